"""LoRA: what an adapter computes, against dense weights, peft's own modules and peft's own merge;
and its files.
"""

import json
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    OPTConfig,
)

from architectures import small_model
from builders import batch_of, fed, sample, small_policy
from families import other_family
from gspo.model import adapter as adapters
from gspo.model.adapter import Adapter, check_adapted_forward, targets
from gspo.model.cost import active_parameters
from gspo.model.forward import network
from gspo.model.forward.packed_weights import LayerWeights, _prepare_experts
from gspo.model.loading import load, save
from gspo.model.policy import Policy
from gspo.model.settings import LoraSettings, TinyDense, TinyMoE
from gspo.model.tokenizer import character_tokenizer
from gspo.model.value_head import ValueHead
from gspo.rollout.engines.local import LocalEngine
from moe_families import MOE_FAMILIES
from refusals import refuses

MOE = TinyMoE(hidden=32, layers=3, heads=2, experts=8, experts_per_token=2, expert_width=16)
# copied in rollouts
LARGE = TinyMoE(hidden=256, layers=1, heads=4, experts=16, experts_per_token=2, expert_width=512)
DENSE = TinyDense(hidden=32, layers=2, heads=2, width=48)
CASES = {
    "attention": (MOE, "attention", 4),
    "experts": (MOE, "experts", 4),
    "all": (MOE, "all", 4),
    "all, a rank that the grouped product does not take": (MOE, "all", 3),
    "large": (LARGE, "all", 8),
    "dense": (DENSE, "all", 4),
}


def adapted(
    model=MOE, which: str = "all", rank: int = 4, learned: bool = True, policy: Policy | None = None
) -> Policy:
    """A small policy with an adapter that already changes what it computes, if it has learned."""
    policy = policy or small_policy(model)
    policy.adapt(LoraSettings(rank=rank, targets=which, alpha=8), seed=1)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.adapter.parameters() if learned else ():
            parameter.normal_(0, 0.2, generator=g)
    return policy


def of_case(case: str, learned: bool = True) -> Policy:
    return adapted(*CASES[case], learned=learned)


def close(a, b, mask, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(a[mask], b[mask], atol=tolerance, rtol=tolerance)


def gradients(policy: Policy, batch) -> None:
    (policy.forward(batch).logp_BT * batch.adv_BT)[batch.mask_BT].sum().backward()


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_that_has_not_learned_changes_nothing(case):
    plain = small_policy(CASES[case][0])
    batch = batch_of(plain, sample(plain))
    policy = of_case(case, learned=False)
    close(policy.forward(batch).logp_BT, plain.forward(batch).logp_BT, batch.mask_BT, 1e-6)
    merged = dict(policy.named_tensors())
    assert list(merged) == list(dict(plain.named_tensors()))
    assert all(torch.equal(merged[name], tensor) for name, tensor in plain.named_tensors())


@pytest.mark.parametrize("case", CASES)
def test_merged_equals_unmerged_and_the_engine_equals_the_trainer(case):
    policy = of_case(case)
    batch = batch_of(policy, sample(policy, record_experts=True))  # sampled with merged weights
    learning, merged = policy.forward(batch), policy.copy().forward(batch)
    close(batch.engine_logp_BT, learning.logp_BT.detach(), batch.mask_BT)
    close(merged.logp_BT, learning.logp_BT, batch.mask_BT)
    close(batch.old_logp_BT, learning.logp_BT.detach(), batch.mask_BT)  # scored with frozen weights
    if policy.routing.layers:
        real = fed(batch)
        assert torch.equal(batch.engine_experts_BSLK[real], learning.experts_BSLK[real])
    plain = small_policy(CASES[case][0]).forward(batch).logp_BT
    assert (plain - learning.logp_BT)[batch.mask_BT].abs().max() > 0.05, (
        "the adapter should have changed something"
    )


@pytest.mark.parametrize("case", CASES)
def test_our_forward_equals_that_of_pefts_modules(case):
    policy = of_case(case)
    batch = batch_of(policy, sample(policy))
    ours = policy.forward(batch).logp_BT
    assert policy.network, "a known family"
    policy.network = None
    close(ours, policy.forward(batch).logp_BT, batch.mask_BT)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_dense_low_rank_product(case):
    """W' = W + s B A has dL/dB = s (dL/dW') A^T and dL/dA = s B^T (dL/dW'), for an expert's matrix
    as for a layer's.
    """
    policy = of_case(case)
    batch = batch_of(policy, sample(policy))
    dense = policy.copy()
    gradients(policy, batch)
    gradients(dense, batch)
    by_name = {name: parameter.grad for name, parameter in dense.model.named_parameters()}
    scale, rank = 8 / CASES[case][2], CASES[case][2]
    for name, wrapper in policy.adapter._wrappers.items():
        a, b, of_dense = wrapper.lora_A.default.weight, wrapper.lora_B.default.weight, by_name[name]
        if of_dense.ndim == 2:
            expected_a, expected_b = scale * b.T @ of_dense, scale * of_dense @ a.T
        else:  # peft stacks the experts' A, and has B as [out, r, E]
            a_EIN, b_ORE = a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1))
            expected_a = scale * torch.einsum("ore,eoi->eri", b_ORE, of_dense).flatten(0, 1)
            expected_b = scale * torch.einsum("eoi,eri->ore", of_dense, a_EIN).flatten(1)
        for found, expected in ((a.grad, expected_a), (b.grad, expected_b)):
            atol = 1e-4 * float(expected.detach().abs().max())
            assert atol > 0
            torch.testing.assert_close(found, expected.detach(), atol=atol, rtol=0)
    others = [
        parameter for name, parameter in policy.model.named_parameters() if ".lora_" not in name
    ]
    assert others and all(
        parameter.grad is None and not parameter.requires_grad for parameter in others
    )
    assert len(policy.parameters()) == 2 * len(policy.adapter.layers)


def test_layers_that_are_computed_again_give_the_same_gradient():
    found = []
    for checkpointing in (False, True):
        plain = small_policy()
        policy = adapted(policy=Policy(plain.model, plain.tokenizer, checkpointing=checkpointing))
        gradients(policy, batch_of(policy, sample(policy)))
        found.append([parameter.grad for parameter in policy.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_in_bfloat16_the_adapter_still_acts_and_is_rounded_as_the_rest():
    plain = small_policy()
    policy = adapted(policy=Policy(plain.model, plain.tokenizer, precision=torch.bfloat16))
    batch = batch_of(policy, sample(policy))
    # else rounding would send tokens to other experts
    batch = replace(batch, replay_BSLK=batch.experts_BSLK)
    rounded = policy.forward(batch).logp_BT.detach()
    policy.precision = torch.float32
    exact, off = (
        policy.forward(batch).logp_BT.detach(),
        policy.without_adapter().score(batch, 8).logp_BT,
    )
    error = (rounded - exact)[batch.mask_BT].abs().mean()
    assert 0 < error < 0.1 * (off - exact)[batch.mask_BT].abs().mean()


@pytest.mark.parametrize("which", ["attention", "experts", "all"])
@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_other_families(family, which):
    policy = adapted(which=which, policy=other_family(family))
    assert policy.network
    batch = batch_of(policy, sample(policy))
    learning = policy.forward(batch).logp_BT
    close(policy.copy().forward(batch).logp_BT, learning, batch.mask_BT)
    policy.network = None
    close(policy.forward(batch).logp_BT, learning, batch.mask_BT)


@pytest.mark.parametrize("which", ["attention", "experts"])
def test_heads_that_rotate_in_part_and_shared_experts(which):
    policy = adapted(which=which, policy=small_policy(MOE_FAMILIES["glm4_moe"]))
    assert policy.network
    batch = batch_of(policy, sample(policy))
    learning = policy.forward(batch).logp_BT
    close(policy.copy().forward(batch).logp_BT, learning, batch.mask_BT)
    policy.network = None
    close(policy.forward(batch).logp_BT, learning, batch.mask_BT)


def test_an_architecture_without_a_forward_of_ours_is_adapted_by_pefts_modules():
    plain = small_policy()
    plain.model.set_attn_implementation("eager")
    policy = adapted(policy=Policy(plain.model, plain.tokenizer))
    assert policy.network is None
    batch = batch_of(policy, sample(policy))
    learning = policy.forward(batch)
    close(batch.engine_logp_BT, learning.logp_BT.detach(), batch.mask_BT)
    ours = adapted().forward(batch)
    close(ours.logp_BT, learning.logp_BT, batch.mask_BT)
    learning.logp_BT[batch.mask_BT].sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())


# -------------------------------------------------------------------------------------------------
# without the adapter
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_without_its_adapter_the_policy_is_the_one_that_it_began_as_on_the_same_tensors(precision):
    plain = small_policy()
    start = Policy(plain.model, plain.tokenizer, precision=precision)
    batch = batch_of(start, sample(start))
    expected = start.score(batch, 4)
    pointers = {parameter.data_ptr() for parameter in start.model.parameters()}
    policy = adapted(policy=start)
    before = policy.without_adapter()
    found, on = before.score(batch, 4), policy.score(batch, 4)
    assert torch.equal(found.logp_BT, expected.logp_BT), (
        "the reference is the model before training, to the bit"
    )
    assert torch.equal(found.experts_BSLK, expected.experts_BSLK)
    assert not torch.equal(on.logp_BT, expected.logp_BT)
    assert {
        p.data_ptr() for p in before.model.parameters()
    } >= pointers and before.model is policy.model
    gradients(policy, batch)
    assert all(parameter.grad is not None for parameter in policy.parameters()), (
        "it learns on, after being off"
    )


def test_routing_replay_sends_tokens_to_the_recorded_experts_under_an_adapter():
    policy = adapted(learned=False)
    batch = batch_of(policy, sample(policy))
    with torch.no_grad():
        for parameter in policy.adapter.parameters():
            parameter.add_(0.2)
    replayed = replace(batch, replay_BSLK=batch.experts_BSLK)
    free, forced, merged = (
        policy.forward(batch),
        policy.forward(replayed),
        policy.copy().forward(replayed),
    )
    assert not torch.equal(free.experts_BSLK, batch.experts_BSLK), (
        "the change should have moved some routes"
    )
    assert (free.logp_BT - forced.logp_BT)[batch.mask_BT].abs().max() > 1e-3
    close(forced.logp_BT, merged.logp_BT, batch.mask_BT)
    real = fed(batch)
    assert torch.equal(forced.experts_BSLK[real], merged.experts_BSLK[real]), (
        "the own choice is recorded too"
    )


# ----------------------------------------------------------------------------------------------------------
# its files
@pytest.mark.parametrize("case", ["all", "attention", "dense"])
def test_peft_loads_the_files_elsewhere_and_merges_to_the_same_bits(case, tmp_path):
    policy = of_case(case)
    batch = batch_of(policy, sample(policy))
    plain = small_policy(CASES[case][0])
    save(plain.model, plain.tokenizer, tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    policy.adapter.save(tmp_path / "adapter", policy.adapter.tensors())
    base = load(str(tmp_path / "base"))[0]
    elsewhere = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    tokens, attention = batch.tokens_BS, batch.attention_BS
    with torch.no_grad():
        theirs = elsewhere(input_ids=tokens, attention_mask=attention.long()).logits
        policy.model.eval()
        ours = policy.copy().model(input_ids=tokens, attention_mask=attention.long()).logits
    close(ours, theirs, attention, 1e-4)
    merged = elsewhere.merge_and_unload().state_dict()
    assert merged.keys() == dict(policy.named_tensors()).keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in policy.named_tensors())
    again = small_policy(CASES[case][0])
    again.adapt(
        LoraSettings(rank=CASES[case][2], targets=CASES[case][1], alpha=8),
        99,
        folder=tmp_path / "adapter",
    )
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), policy.parameters(), strict=True)
    )
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (
        config["r"] == CASES[case][2]
        and config["lora_alpha"] == 8
        and config["peft_type"] == "LORA"
    )


def test_the_files_hold_the_adapter_alone(tmp_path):
    policy = adapted()
    policy.adapter.save(tmp_path, policy.adapter.tensors())
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert all("lora_A" in name or "lora_B" in name for name in stored)
    assert sum(x.numel() for x in stored.values()) == sum(p.numel() for p in policy.parameters())


def test_an_adapter_of_another_model_or_another_shape_is_refused(tmp_path):
    policy = adapted()
    policy.adapter.save(tmp_path, policy.adapter.tensors())
    other = small_policy(
        TinyMoE(hidden=32, layers=3, heads=2, experts=8, experts_per_token=2, expert_width=16)
    )
    with torch.no_grad():
        other.model.lm_head.weight.mul_(1.01)
    with pytest.raises(ValueError, match="adapter of other weights than this model has now"):
        other.adapt(LoraSettings(rank=4), 1, folder=tmp_path)
    for different in (LoraSettings(rank=8), LoraSettings(rank=4, targets="attention")):
        with pytest.raises(ValueError, match="of other layers or of another rank"):
            small_policy().adapt(different, 1, folder=tmp_path)
    with pytest.raises(ValueError, match=r"lora_alpha=8, and policy.lora.alpha is 16"):
        small_policy().adapt(LoraSettings(rank=4, alpha=16), 1, folder=tmp_path)


def test_the_beginning_depends_on_the_seed_alone():
    def beginning(seed: int) -> list[torch.Tensor]:
        policy = small_policy()
        torch.rand(seed + 3)  # whatever was drawn before
        state = torch.get_rng_state()
        policy.adapt(LoraSettings(rank=4), seed)
        assert torch.equal(torch.get_rng_state(), state), "nothing else draws from another place"
        return policy.parameters()

    first, again, other = beginning(1), beginning(1), beginning(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_what_is_adapted():
    model = small_policy().model
    q, k, v, o = (f"model.layers.0.self_attn.{name}_proj" for name in "qkvo")
    attention, nothing = targets(model, "attention")
    assert {q, k, v, o} < set(attention) and len(attention) == 12 and nothing == []
    assert targets(model, "experts") == (
        [], [f"model.layers.{i}.mlp.experts.{name}_proj" for i in range(3) for name in ("gate_up", "down")]
    )  # fmt: skip
    assert targets(model, "all") == (attention, targets(model, "experts")[1])
    dense = small_policy(DENSE).model
    assert len(targets(dense, "all")[0]) == 2 * 7
    with refuses("policy.lora.targets", "experts", "Qwen3ForCausalLM has no layers of this kind"):
        targets(dense, "experts")


@pytest.mark.parametrize("family", ["jamba", "llama4_text", "jetmoe", "falcon"])
def test_routers_and_layers_that_an_adapter_cannot_change_are_left_out(family):
    policy = Policy(small_model(family), character_tokenizer())
    linear, _ = targets(policy.model, "all")
    assert linear and not any("router" in name or "dt_proj" in name for name in linear)
    assert any("mamba" in name for name in linear) == (family == "jamba")
    policy.adapt(LoraSettings(rank=2, targets="all"), seed=0)


def test_a_forward_that_fails_with_an_adapter_is_refused(monkeypatch):
    policy = Policy(small_model("gpt2"), character_tokenizer())

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the size of tensor a must match\nthat of b")

    monkeypatch.setattr(policy.model, "forward", fail)
    with refuses(
        "policy.lora", problem="of GPT2LMHeadModel fails with an adapter (RuntimeError: the"
    ):
        check_adapted_forward(policy.model)


def test_a_model_that_peft_refuses_is_one_line():
    policy = Policy(small_model("mamba"), character_tokenizer())
    with refuses("policy.lora.targets", "all", "peft refuses MambaForCausalLM: "):
        policy.adapt(LoraSettings(rank=2), seed=0)


def test_a_critic_has_the_width_of_the_head():
    """OPT-350M's head is narrower than its layers."""
    config = OPTConfig(
        vocab_size=100, hidden_size=32, word_embed_proj_dim=16, num_hidden_layers=1, ffn_dim=32
    )
    config.num_attention_heads = 2
    model = AutoModelForCausalLM.from_config(config)
    head = ValueHead.open(model, None)
    with head.recording(model), torch.no_grad():
        model(torch.arange(4)[None])
    assert head(head.hidden_of_last_forward()).shape == (1, 4)


def multimodal_model() -> Gemma3ForConditionalGeneration:
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("which", ["attention", "all"])
def test_a_multimodal_model_is_adapted_in_its_text_part_alone(which):
    model = multimodal_model()
    linear, _ = targets(model, which)
    assert linear and all(name.startswith("model.language_model.") for name in linear)
    Adapter(model, LoraSettings(rank=2, targets=which), seed=0)
    adapted_parts = {name.split(".")[1] for name, _ in model.named_parameters() if "lora" in name}
    assert adapted_parts == {"language_model"}


def test_a_multimodal_models_vision_part_is_no_cost_and_its_critic_has_the_texts_width():
    model = multimodal_model()
    text = sum(p.numel() for p in model.model.language_model.parameters())
    assert active_parameters(model) == text  # the head is the input embedding
    assert ValueHead.open(model, None).linear.in_features == 32


def test_a_copy_for_the_engine_has_merged_weights_under_the_models_own_names():
    policy = adapted()
    engine = LocalEngine(policy, dtype=torch.bfloat16)
    assert engine.sampler.adapter is None
    merged = dict(policy.named_tensors())
    assert policy.shapes() == {name: tensor.shape for name, tensor in merged.items()}
    assert policy.shapes() == small_policy().shapes()
    for name, tensor in engine.sampler.named_tensors():
        assert torch.equal(tensor, merged[name].to(tensor.dtype)), name
    with torch.no_grad():
        policy.parameters()[1].add_(1.0)
    engine.load_weights(policy.named_tensors())
    now = dict(engine.sampler.named_tensors())
    assert sum(not torch.equal(now[name], merged[name].to(now[name].dtype)) for name in now) == 1


@pytest.mark.parametrize("case", ["all", "dense"])
def test_a_merged_model_is_written_as_a_normal_folder_for_an_engine_that_starts_from_one(
    case, tmp_path
):
    policy = of_case(case)
    merged = dict(policy.named_tensors())
    save(policy.model, policy.tokenizer, tmp_path, dict(merged))  # transformers empties it
    stored = load(str(tmp_path))[0].state_dict()
    assert stored.keys() == merged.keys() and all(
        torch.equal(stored[name], merged[name]) for name in merged
    )
    save(small_policy(CASES[case][0]).model, policy.tokenizer, tmp_path / "plain")
    assert (
        load_file(tmp_path / "model.safetensors").keys()
        == load_file(tmp_path / "plain/model.safetensors").keys()
    )


def test_without_peft_the_setting_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with refuses("policy.lora", problem="needs peft, which is not installed"):
        adapters.import_peft()


def test_how_many_parameters_a_token_passes_through_does_not_count_wrappers_twice():
    assert adapted().active_parameters == small_policy().active_parameters


@pytest.mark.parametrize("model", [MOE, LARGE])
@torch.no_grad()
def test_on_a_gpu_experts_are_merged_in_rollouts_and_in_scoring_the_adapter_is_added(model):
    """There weights are not laid out in blocks; what this asks for is what a GPU gets."""
    policy = adapted(model)
    layer = policy.model.model.layers[0]
    h_NW = torch.randn(40, model.hidden, generator=torch.Generator().manual_seed(0))
    weights_NK, experts_NK, _ = network.route(layer.mlp.gate, h_NW, None)
    found = []
    for copy_experts in (True, False):
        made = LayerWeights(None, (), None)
        _prepare_experts(made, layer.mlp.experts, on_cpu=False, copy_experts=copy_experts)
        assert (
            (made.merged is not None) == copy_experts
            and made.experts is None
            and not made.all_experts_below
        )
        found.append(network.run_experts(layer.mlp.experts, h_NW, weights_NK, experts_NK, made))
    torch.testing.assert_close(*found, atol=1e-5 * float(found[0].abs().max()), rtol=0)
    with policy.adapter.off():
        off = network.run_experts(layer.mlp.experts, h_NW, weights_NK, experts_NK, None)
    assert (found[0] - off).abs().max() > 0.01
