"""The output head in float32 above layers in bfloat16: what its log-probs and ratios lose against
float64.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from builders import small_policy
from gspo.algorithm.objectives import GSPO
from gspo.model.forward import kernels
from gspo.model.forward.kernels import TokenLogProbs
from gspo.model.policy import Policy
from trainers import steps, trainer

TOKENS, WIDTH, VOCABULARY = 512, 256, 4096
RESPONSES = 8
TENTH_OF_THE_RANGE = 3e-5  # nats; the paper's clip range is 3e-4


def responses() -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Return hidden states and head of responses before and after a small move, and the tokens: the
    largest logits are 20 to 30, as those of public models."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.45
    moved_head = head + torch.randn(VOCABULARY, WIDTH, generator=generator) * 1e-6
    found = []
    for _ in range(RESPONSES):
        hidden = torch.randn(TOKENS, WIDTH, generator=generator)
        moved = hidden + torch.randn(TOKENS, WIDTH, generator=generator) * 3e-4
        tokens = (hidden @ head.t()).softmax(-1).multinomial(1, generator=generator).squeeze(-1)
        found.append((hidden, head, moved, moved_head, tokens))
    return found


def exact(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    logits = hidden.double() @ head.double().t()
    return logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


def errors(kind: torch.dtype, split: bool) -> Tensor:
    """Return by how much the mean log-ratio of each response is off."""
    found = []
    for hidden, head, moved, moved_head, tokens in responses():
        before, _ = TokenLogProbs.apply(hidden.to(kind), head, tokens, 1.0, False, split)
        after, _ = TokenLogProbs.apply(moved.to(kind), moved_head, tokens, 1.0, False, split)
        true = exact(moved, moved_head, tokens) - exact(hidden, head, tokens)
        found.append((after.double() - before.double() - true).mean())
    return torch.stack(found)


@pytest.mark.slow
def test_the_logits_are_as_large_as_those_of_public_models():
    hidden, head, *_ = responses()[0]
    largest = (hidden @ head.t()).amax(-1)
    assert 20 < largest.mean() < 30


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True], ids=["float32 product", "three bfloat16 products"])
def test_a_float32_head_carries_a_clip_range_of_3e_4(split):
    assert errors(torch.float32, split).abs().max() < TENTH_OF_THE_RANGE


@pytest.mark.slow
def test_a_bfloat16_head_does_not_carry_it():
    assert errors(torch.bfloat16, False).square().mean().sqrt() > 3e-4


@pytest.mark.slow
def test_inputs_rounded_to_bfloat16_do_not_carry_it_either_even_if_the_sums_are_float32(
    monkeypatch,
):
    """So `torch.mm(out_dtype=float32)` of rounded inputs is not enough."""
    plain = kernels.parts
    monkeypatch.setattr(kernels, "parts", lambda x, split: (plain(x, True)[0].float(),))
    assert errors(torch.float32, True).square().mean().sqrt() > TENTH_OF_THE_RANGE


@pytest.mark.slow
def test_the_split_products_have_the_gradients_of_the_plain_one():
    hidden, head, _, _, tokens = responses()[0]
    hidden, tokens = hidden[:64], tokens[:64]
    slope = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for split in (False, True):
        x, weight = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logp, entropy = TokenLogProbs.apply(x, weight, tokens, 0.7, True, split)
        ((logp * slope[0]).sum() + (entropy * slope[1]).sum()).backward()
        found.append((x.grad, weight.grad))
    for plain, of_parts in zip(*found, strict=True):
        assert plain.dtype == of_parts.dtype == torch.float32
        assert (plain - of_parts).norm() < 5e-3 * plain.norm(), (
            "the gradient's products round their inputs once"
        )


def test_two_parts_hold_a_float32_matrix():
    x = torch.randn(100, 100, generator=torch.Generator().manual_seed(0)) * 30
    high, low = kernels.parts(x, True)
    assert high.dtype == low.dtype == torch.bfloat16
    assert ((high.double() + low.double() - x) / x).abs().max() <= 2**-16
    assert kernels.parts(x, False)[0] is x


def gpt2(head_dtype: torch.dtype) -> Policy:
    """A policy that runs through the model's own forward."""
    tokenizer = small_policy().tokenizer
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=64)
    torch.manual_seed(0)
    return Policy(
        GPT2LMHeadModel(config), tokenizer, precision=torch.bfloat16, head_dtype=head_dtype
    )


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_a_sampler_in_bfloat16_has_the_heads_precision(head_dtype):
    plain = small_policy()
    policy = Policy(plain.model, plain.tokenizer, precision=torch.bfloat16, head_dtype=head_dtype)
    network = policy.copy(torch.bfloat16).network
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, plain.model.config.hidden_size, generator=generator).bfloat16()
    with network.frozen(copy_experts=True):
        logits = network.logits(hidden)
        head = network._float32_head
        with network.frozen():
            pass
        assert network._float32_head is head, "a context within keeps the head of the outer one"
    assert logits.dtype == head_dtype
    true = hidden.double() @ network.head.double().t()
    error = (logits.double() - true).abs().max() / true.abs().max()
    assert error < 1e-6 if head_dtype == torch.float32 else error > 1e-4


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_runs_through_its_own_forward_has_the_heads_precision_too(head_dtype):
    model = gpt2(head_dtype).copy(torch.bfloat16).model
    assert model(input_ids=torch.arange(5)[None]).logits.dtype == head_dtype
    own = gpt2(head_dtype).model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert own(input_ids=torch.arange(5)[None]).logits.dtype == head_dtype


@pytest.mark.slow
def test_in_the_first_mini_batch_every_ratio_is_exactly_1_and_the_floor_is_what_rounding_does():
    """The pass under the old policy multiplies matrices of other shapes, which round otherwise in
    bfloat16.
    """
    t = trainer(GSPO(clip_low=3e-4, clip_high=4e-4), old_pass="always", minibatches=1)
    t.policy.precision = torch.bfloat16
    for row in steps(t, 2):
        assert row["ratio/sequence_min"] == row["ratio/sequence_max"] == row["ratio/token_max"] == 1
        assert row["ratio/sequence_log_abs"] == row["clip/token_outside"] == 0
        floor = row["ratio/floor_sequence_abs"]
        assert row["ratio/floor_of_range"] == pytest.approx(floor / 3e-4)
        assert 0 <= floor < 0.01 and 0 <= row["ratio/floor_outside"] <= 1


def test_the_floor_is_the_distance_of_the_old_log_probs_from_the_first_pass():
    """By hand: old log-probs that are off by a known number for each response."""
    t = trainer(GSPO(clip_low=3e-4, clip_high=4e-4), minibatches=1)
    off = torch.tensor([0.0, 1e-4, -1e-4, 3.5e-4, -3.5e-4, 1e-3, -1e-3, 2e-4]).repeat(4)
    plain = t.old_policy.add

    def shifted(*arguments):
        batch, values_BT = plain(*arguments)
        return replace(batch, old_logp_BT=batch.old_logp_BT + off[:, None]), values_BT

    t.old_policy.add = shifted
    row = steps(t, 1)[0]
    assert row["ratio/floor_sequence_abs"] == pytest.approx(float(off.abs().mean()), rel=1e-2)
    assert row["ratio/floor_of_range"] == pytest.approx(float(off.abs().mean()) / 3e-4, rel=1e-2)
    # s = exp(-off): below 1 - 3e-4 where off is 3.5e-4 or 1e-3, above 1 + 4e-4 where it is -1e-3
    assert row["ratio/floor_outside"] == pytest.approx(3 / 8)
    assert row["ratio/sequence_max"] == row["ratio/sequence_min"] == 1


def test_with_the_engines_log_probs_the_ratio_is_to_the_engine_and_the_floor_says_how_far_it_is():
    t = trainer(GSPO(clip_low=3e-4, clip_high=4e-4), minibatches=1)
    t.policy_settings.old_logprobs = "engine"
    row = steps(t, 1)[0]
    assert row["ratio/floor_sequence_abs"] == pytest.approx(row["ratio/sequence_log_abs"])
