"""Attention by variable lengths: its places and gathers, with the formula in place of the GPU's
operator, against the rectangles; and where it is chosen."""

import warnings
from itertools import pairwise

import pytest
import torch

from builders import batch_of, sample, small_policy
from gspo.data.batch import TokenBatch
from gspo.model.forward import packing, variable_lengths
from gspo.model.forward.variable_lengths import (
    by_formula,
    is_flash_attention_size,
    uses_varlen,
    varlen_problem,
)


def formula(q, k, v, query_ends, key_ends, most_queries, most_keys, *, window_size, enable_gqa):
    """What the operator computes, with the checks that it makes."""
    assert window_size == (-1, 0) and enable_gqa
    assert query_ends.dtype == key_ends.dtype == torch.int32
    lengths = tuple(
        (int(b - a), int(d - c))
        for (a, b), (c, d) in zip(pairwise(query_ends), pairwise(key_ends), strict=True)
    )
    assert (most_queries, most_keys) == tuple(map(max, zip(*lengths, strict=True)))
    assert (int(query_ends[-1]), int(key_ends[-1])) == (len(q), len(k))
    return by_formula(q, k, v, lengths)


@pytest.fixture
def operator(monkeypatch):
    monkeypatch.setattr(variable_lengths, "varlen_operator", lambda: formula)


def drawn_batch(seed: int, shared: bool) -> TokenBatch:
    """Prompts of 1 to 9 tokens and responses of 1 to 12, some of a single token; groups of 1 to 4
    rows.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(1, 5, (4,), generator=generator).tolist()
    prompts = torch.randint(1, 10, (4,), generator=generator).tolist()
    rows = [number for number, count in enumerate(groups) for _ in range(count)]
    prompts_B = torch.tensor([prompts[number] for number in rows])
    responses_B = torch.randint(1, 13, (len(rows),), generator=generator)
    responses_B[0] = 1
    width, length = int(prompts_B.max()), int(responses_B.max())
    columns = torch.arange(width + length)
    attention_BS = (columns >= width - prompts_B[:, None]) & (
        columns < width + responses_B[:, None]
    )
    tokens_BS = torch.randint(3, 20, attention_BS.shape, generator=generator)
    if shared:
        group = torch.tensor(rows)
        first = torch.tensor([rows.index(number) for number in rows])
        tokens_BS[:, :width] = tokens_BS[first, :width]
    else:
        group = torch.arange(len(rows))
    mask_BT = attention_BS[:, width:]
    return TokenBatch(
        tokens_BS=tokens_BS * attention_BS,
        attention_BS=attention_BS,
        mask_BT=mask_BT,
        sampled_BT=mask_BT,
        prompts_B=group,
    )


def outputs_and_gradients(policy, batch, monkeypatch, by_lengths: bool):
    monkeypatch.setattr(type(policy), "_uses_varlen", lambda self: by_lengths)
    logp = policy.forward(batch).logp_BT
    slopes = torch.linspace(-1, 2, logp.numel()).view(logp.shape)
    (logp * slopes * batch.mask_BT).sum().backward()
    gradients = [p.grad.clone() for p in policy.model.parameters()]
    policy.model.zero_grad()
    return logp.detach(), gradients


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_log_probs_and_gradients_are_those_of_the_rectangles(monkeypatch, operator, seed, shared):
    monkeypatch.setattr(packing, "BUCKET_TOKENS", 20)
    monkeypatch.setattr(packing, "WORTH_SHARING", 0.0 if shared else 2.0)
    policy, batch = small_policy(), drawn_batch(seed, shared)
    layout = packing.lay_out(batch)
    assert isinstance(layout, packing.SharedPrompts) == shared
    ours, ours_grad = outputs_and_gradients(policy, batch, monkeypatch, True)
    theirs, theirs_grad = outputs_and_gradients(policy, batch, monkeypatch, False)
    torch.testing.assert_close(ours[batch.mask_BT], theirs[batch.mask_BT], atol=1e-5, rtol=1e-5)
    for a, b in zip(ours_grad, theirs_grad, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5 * float(b.abs().max()) + 1e-8, rtol=1e-3)


def test_rows_of_one_length_need_no_gather(monkeypatch, operator):
    monkeypatch.setattr(packing, "WORTH_SHARING", 2.0)
    batch = drawn_batch(0, False)
    batch.attention_BS = torch.ones_like(batch.attention_BS)
    batch.mask_BT = batch.sampled_BT = torch.ones_like(batch.mask_BT)
    layout = packing.lay_out(batch).use_varlen()
    assert layout.varlen.in_order
    policy = small_policy()
    ours, _ = outputs_and_gradients(policy, batch, monkeypatch, True)
    theirs, _ = outputs_and_gradients(policy, batch, monkeypatch, False)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_response_attends_to_the_prompt_of_its_group_and_to_itself(monkeypatch):
    """Prompts p (2 tokens) and r (1), responses of 3 and 1 tokens to p and of 2 to r. Last tokens
    are left out.
    """
    monkeypatch.setattr(packing, "WORTH_SHARING", 0.0)
    attention_BS = torch.tensor(
        [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]], dtype=torch.bool
    )
    mask_BT = attention_BS[:, 2:]
    batch = TokenBatch(
        tokens_BS=torch.zeros(3, 5, dtype=torch.int64),
        attention_BS=attention_BS,
        mask_BT=mask_BT,
        sampled_BT=mask_BT,
        prompts_B=torch.tensor([0, 0, 1]),
    )
    lengths = packing.lay_out(batch).use_varlen().varlen
    # flat list: p p | r . | first response's 2 tokens | the third's 1 and padding
    assert lengths.queries_Q.tolist() == [0, 1, 2, 4, 5, 6]
    assert lengths.query_ends.tolist() == [0, 2, 3, 5, 6]
    assert lengths.keys_U.tolist() == [0, 1, 2, 0, 1, 4, 5, 2, 6]
    assert lengths.key_ends.tolist() == [0, 2, 3, 7, 9]
    assert (lengths.max_queries, lengths.max_keys) == (2, 4)


def test_masks_are_made_once_for_all_layers(monkeypatch):
    policy = small_policy()
    batch = batch_of(policy, sample(policy, group_size=5))
    layout, calls = packing.lay_out(batch), []
    plain = packing.response_mask
    monkeypatch.setattr(packing, "response_mask", lambda *x: calls.append(x) or plain(*x))
    first = layout.masks(torch.bfloat16)
    assert layout.masks(torch.bfloat16) is first and len(calls) == len(layout.buckets)
    assert all(mask.dtype == torch.bfloat16 for mask in first)
    assert all(mask.dtype == torch.float32 for mask in layout.masks(torch.float32))


def test_it_is_chosen_for_what_flash_attention_computes():
    bf16 = torch.bfloat16
    assert (
        is_flash_attention_size((9, 0), bf16, 128)
        and is_flash_attention_size((8, 0), torch.float16, 64)
        and is_flash_attention_size((12, 0), bf16, 256)
    )
    assert not is_flash_attention_size(None, bf16, 128)  # a CPU
    assert not is_flash_attention_size((7, 5), bf16, 128)
    assert not is_flash_attention_size((9, 0), torch.float32, 128)
    assert not is_flash_attention_size((9, 0), bf16, 264) and not is_flash_attention_size(
        (9, 0), bf16, 100
    )


def test_an_operator_that_is_missing_refuses_or_errs_is_not_used(monkeypatch):
    cpu = torch.device("cpu")

    def reason(function) -> str:
        monkeypatch.setattr(variable_lengths, "varlen_operator", lambda: function)
        return varlen_problem(cpu, torch.bfloat16, 4, 2, 16)

    def refusing(*x, window_size):
        raise RuntimeError("no kernel for this head\nmore lines")

    def top_left(
        q, k, v, query_ends, key_ends, most_queries, most_keys, *, window_size, enable_gqa
    ):
        causal = torch.ones(3, 5, dtype=torch.bool).tril()
        k, v = (x[:5].repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        first = torch.nn.functional.scaled_dot_product_attention(
            q[:3].transpose(0, 1), k, v, attn_mask=causal
        )
        return torch.cat([first.transpose(0, 1), q[3:]])

    assert reason(formula) == ""
    assert reason(None).startswith("is missing")
    assert reason(refusing) == "refuses: no kernel for this head"
    assert reason(top_left).startswith("computes something else")


def test_a_user_hears_once_that_rectangles_are_used(monkeypatch):
    uses_varlen.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(variable_lengths, "varlen_problem", lambda *_: "is missing in PyTorch 2.9")
    try:
        with pytest.warns(UserWarning, match="padded rectangles.*is missing in PyTorch 2.9"):
            assert not uses_varlen(torch.device("cuda"), torch.bfloat16, 8, 2, 64)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not uses_varlen(torch.device("cuda"), torch.bfloat16, 8, 2, 64)
            assert not uses_varlen(torch.device("cpu"), torch.bfloat16, 8, 2, 64)
    finally:
        uses_varlen.cache_clear()
