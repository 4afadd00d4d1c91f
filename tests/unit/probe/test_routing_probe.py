"""The experts that the probe records of Hugging Face models, and what it computes of them."""

import pytest
import torch
import transformers

from builders import batch_of, perturb, sample, small_policy
from families import other_family
from gspo.model.settings import TinyDense
from gspo.probe import RoutingProbe, routing_statistics
from moe_families import MOE_FAMILIES
from probing import forward, record, response_mask


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "minimax_m2", "deepseek_v4"]
)
def test_the_experts_are_those_that_the_policy_records(family):
    """Also after a layer without a router, dense or with a fixed table."""
    if family in ("mixtral", "olmoe"):
        policy = other_family(family)
    else:
        policy = small_policy(MOE_FAMILIES[family])
    batch = batch_of(policy, sample(policy))
    probe = RoutingProbe(policy.model)
    experts_BSLK = record(probe, policy.model, batch)
    mask_BS = response_mask(batch)[:, 1:]
    assert torch.equal(
        experts_BSLK[:, :-1][mask_BS].sort(-1).values,
        batch.experts_BSLK[:, :-1][mask_BS].sort(-1).values,
    )
    assert probe.num_experts == policy.routing.experts


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
}
FAMILIES = {
    "GptOss": ({"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16}, 2, 6, 3),
    "GraniteMoe": ({"num_local_experts": 6, "num_experts_per_tok": 2}, 2, 6, 2),
    "Glm4Moe": (
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        1,
        8,
        2,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_record_too(family):
    settings, layers, experts, top_k = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**SIZES, **settings, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    probe = RoutingProbe(model)
    tokens_BS = torch.randint(40, (2, 5))
    with probe.recording(), torch.no_grad():
        model(tokens_BS)
    experts_BSLK = probe.experts(tokens_BS)
    assert experts_BSLK.shape == (2, 5, layers, top_k)
    assert probe.num_experts == experts
    assert experts_BSLK.min() >= 0 and experts_BSLK.max() < experts


def test_a_batch_may_pass_in_chunks_of_rows(moe):
    batch = batch_of(moe, sample(moe))
    probe = RoutingProbe(moe.model)
    whole_BSLK = record(probe, moe.model, batch)
    with probe.recording(), torch.no_grad():
        for rows in (slice(0, 4), slice(4, None)):
            forward(moe.model, batch, rows)
    assert torch.equal(probe.experts(batch.tokens_BS), whole_BSLK)


def test_statistics_are_hand_numbers():
    """Two rows of three positions, two layers, two of four experts. The last two tokens are the
    response, so positions 0 and 1 predict them, and of the second row position 0 alone."""
    old_BSLK = torch.tensor(
        [
            [[[0, 1], [0, 1]], [[2, 3], [2, 3]], [[0, 1], [0, 1]]],
            [[[0, 2], [0, 2]], [[1, 3], [1, 3]], [[0, 1], [0, 1]]],
        ]
    )
    experts_BSLK = old_BSLK.clone()
    experts_BSLK[0, 0, 1] = torch.tensor([1, 2])  # layer 1 keeps one of two
    experts_BSLK[1, 0, 0] = torch.tensor([2, 0])  # another order
    experts_BSLK[1, 1] = 3  # not measured
    response_BS = torch.tensor([[0, 1, 1], [0, 1, 0]])
    metrics = routing_statistics(experts_BSLK, old_BSLK, response_BS, 4)
    assert metrics["routing/consistency"] == pytest.approx(5.5 / 6)
    assert metrics["routing/consistency_layer_0"] == 1
    assert metrics["routing/consistency_layer_1"] == pytest.approx(2.5 / 3)
    assert metrics["routing/changed_any_layer"] == pytest.approx(1 / 3)
    # layer 0: 2, 1, 2, 1 choices of 6; layer 1: 1, 1, 3, 1
    assert metrics["routing/load_max"] == pytest.approx((2 / 1.5 + 3 / 1.5) / 2)
    loads_LE = torch.tensor([[2, 1, 2, 1], [1, 1, 3, 1]]) / 6
    entropy = -(loads_LE * loads_LE.log()).sum(-1) / torch.tensor(4.0).log()
    assert metrics["routing/load_entropy"] == pytest.approx(entropy.mean().item())
    without_old = routing_statistics(experts_BSLK, None, response_BS, 4)
    assert "routing/consistency" not in without_old and without_old["routing/load_max"] > 1


def test_passes_may_differ_in_padding(moe):
    batch = batch_of(moe, sample(moe))
    probe = RoutingProbe(moe.model)
    old_BSLK = record(probe, moe.model, batch)
    old_response_BS = response_mask(batch)
    perturb(moe, 0.1)
    experts_BSLK = record(probe, moe.model, batch)
    same = routing_statistics(experts_BSLK, old_BSLK, old_response_BS, probe.num_experts)
    wider_BSLK = torch.nn.functional.pad(experts_BSLK, (0, 0, 0, 0, 3, 2), value=-1)
    wider_BS = torch.nn.functional.pad(old_response_BS, (3, 2))
    arguments = (wider_BSLK, old_BSLK, wider_BS, probe.num_experts, old_response_BS)
    assert routing_statistics(*arguments) == same
    assert 0 < same["routing/consistency"] < 1


def test_gradient_checkpointing_does_not_record_twice(moe):
    batch = batch_of(moe, sample(moe))
    probe = RoutingProbe(moe.model)
    plain_BSLK = record(probe, moe.model, batch)
    moe.model.gradient_checkpointing_enable()
    moe.model.train()
    with probe.recording():
        loss = forward(moe.model, batch).logits.sum()
    loss.backward()
    assert torch.equal(probe.experts(batch.tokens_BS), plain_BSLK)
    with probe.recording():
        forward(moe.model, batch).logits.sum().backward()
    with pytest.raises(ValueError, match=r"close `recording` before `backward\(\)`"):
        probe.experts(batch.tokens_BS)


def test_a_dense_model_is_refused_in_one_sentence():
    dense = small_policy(TinyDense(hidden=32, layers=3, heads=2, width=48))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no module called"):
        RoutingProbe(dense.model)


def test_what_does_not_fit_together_is_refused(moe):
    batch = batch_of(moe, sample(moe))
    probe = RoutingProbe(moe.model)
    with pytest.raises(ValueError, match="0 positions were recorded"):
        probe.experts(batch.tokens_BS)
    experts_BSLK = record(probe, moe.model, batch)
    with pytest.raises(ValueError, match="positions were recorded, and the batch has"):
        probe.experts(batch.tokens_BS[:, 1:])
    response_BS = response_mask(batch)
    with pytest.raises(ValueError, match="the mask of response tokens"):
        routing_statistics(experts_BSLK, None, batch.mask_BT, 8)
    fewer_BS = response_BS.clone()
    fewer_BS[0] = False
    with pytest.raises(ValueError, match="the same rows in the same order"):
        routing_statistics(experts_BSLK, experts_BSLK, response_BS, 8, fewer_BS)


def test_rows_without_response_tokens_do_not_count(moe):
    batch = batch_of(moe, sample(moe))
    probe = RoutingProbe(moe.model)
    old_BSLK = record(probe, moe.model, batch)
    perturb(moe, 0.1)
    experts_BSLK = record(probe, moe.model, batch)
    response_BS = response_mask(batch)
    response_BS[1:] = False
    first = routing_statistics(experts_BSLK, old_BSLK, response_BS, 8)
    assert first == routing_statistics(experts_BSLK[:1], old_BSLK[:1], response_BS[:1], 8)
    response_BS[0] = False
    assert routing_statistics(experts_BSLK, old_BSLK, response_BS, 8) == {}


def test_removed_hooks_record_nothing(moe):
    batch = batch_of(moe, sample(moe))
    probe = RoutingProbe(moe.model)
    probe.remove()
    with pytest.raises(ValueError, match="0 positions were recorded"):
        record(probe, moe.model, batch)
