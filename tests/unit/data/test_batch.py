"""Packing, trimming, masks, reductions: hand numbers and invariances."""

import math

import numpy as np
import pytest
import torch

from gspo.data.masked import masked_mean
from gspo.data.pack import pack, pack_recorded
from gspo.data.problems import Problem
from gspo.data.samples import Response


def response(prompt: list[int], tokens: list[int], index: int = 0) -> Response:
    problem = Problem("math", index, "", "")
    return Response(
        problem, 0, prompt, tokens, -np.arange(1, len(tokens) + 1, dtype=np.float32), "stop", "", 0
    )


def test_pack_by_hand():
    batch = pack([response([5, 6, 7], [8, 2]), response([5], [9, 9, 9, 2])], pad_id=0)
    assert batch.prompt_width == 3
    assert batch.tokens_BS.tolist() == [[5, 6, 7, 8, 2, 0, 0], [0, 0, 5, 9, 9, 9, 2]]
    assert batch.attention_BS.int().tolist() == [[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]
    assert batch.mask_BT.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.engine_logp_BT.tolist() == [[-1, -2, 0, 0], [-1, -2, -3, -4]]


def test_pack_equals_packing_row_by_row():
    rng = np.random.default_rng(3)
    responses = []
    for i in range(40):
        prompt, length = int(rng.integers(1, 9)), int(rng.integers(1, 12))
        responses.append(
            Response(
                Problem("math", i, "", ""),
                0,
                rng.integers(1, 50, prompt).tolist(),
                rng.integers(1, 50, length).tolist(),
                rng.normal(size=length).astype(np.float32),
                "stop",
                "",
                0,
                experts=rng.integers(0, 8, (prompt + length - 1, 2, 3)),
                old_logprobs=rng.normal(size=length).astype(np.float32),
                old_experts=rng.integers(0, 8, (prompt + length, 2, 3)).astype(np.int16),
            )
        )
    batch = pack(responses, 77)
    old_logp_BT, old_experts_BSLK = pack_recorded(responses, batch)
    start = batch.prompt_width
    for i, r in enumerate(responses):
        prompt, length = len(r.prompt_ids), len(r.token_ids)
        real = slice(start - prompt, start + length)
        assert batch.tokens_BS[i, real].tolist() == r.prompt_ids + r.token_ids
        assert batch.attention_BS[i, real].all() and batch.attention_BS[i].sum() == prompt + length
        assert (batch.tokens_BS[i][~batch.attention_BS[i]] == 77).all()
        assert batch.mask_BT[i].sum() == length and batch.mask_BT[i, :length].all()
        for packed_BT, own in (
            (batch.engine_logp_BT, r.logprobs),
            (old_logp_BT, r.old_logprobs),
        ):
            assert (packed_BT[i, :length].numpy() == own).all() and (
                packed_BT[i, length:] == 0
            ).all()
        for packed_BSLK, own in (
            (batch.engine_experts_BSLK, r.experts),
            (old_experts_BSLK, r.old_experts),
        ):
            recorded = slice(start - prompt, start - prompt + len(own))
            assert (packed_BSLK[i, recorded].numpy() == own).all()
            assert (packed_BSLK[i, : start - prompt] == -1).all() and (
                packed_BSLK[i, recorded.stop :] == -1
            ).all()


def test_all_sampled_tokens_are_selected_also_those_not_trained_on():
    batch = pack([response([1, 2], [3, 4]), response([5], [6, 7, 8])], pad_id=0)
    batch.mask_BT[0] = False
    copied = batch.to(torch.device("cpu"))
    x_BT = torch.arange(6.0).view(2, 3)
    assert copied.of_tokens(x_BT).tolist() == [3, 4, 5]
    assert copied.with_all_sampled().of_tokens(x_BT).tolist() == [0, 1, 3, 4, 5]
    assert copied.with_all_sampled().of_rows(x_BT).tolist() == x_BT.tolist()


def test_rows_cuts_only_padding():
    batch = pack([response([5, 6, 7], [8, 2]), response([5], [9, 9, 9, 2])], pad_id=0)
    batch = batch.with_old_policy(
        batch.engine_logp_BT * 2, torch.arange(2 * 7 * 3 * 2).view(2, 7, 3, 2)
    )
    second = batch.rows(torch.tensor([1]))
    assert second.tokens_BS.tolist() == [[5, 9, 9, 9, 2]] and second.prompt_width == 1
    assert second.old_logp_BT.tolist() == [[-2, -4, -6, -8]]
    assert torch.equal(second.experts_BSLK[0], batch.experts_BSLK[1, 2:])
    first = batch.rows(torch.tensor([0]))
    assert first.tokens_BS.tolist() == [[5, 6, 7, 8, 2]] and first.mask_BT.shape == (1, 2)


def test_split_keeps_every_row_once_and_pads_less():
    rows = [response([1 + i] * (i % 5 + 1), [3] * (1 + (7 * i) % 11), i) for i in range(20)]
    batch = pack(rows, pad_id=0)
    adv_BT = torch.arange(20.0).unsqueeze(-1).expand(batch.mask_BT.shape)
    batch = batch.with_old_policy(batch.engine_logp_BT).with_advantages(adv_BT)
    parts = batch.split(6)
    assert sorted(a for part in parts for a in part.adv_BT[:, 0].tolist()) == list(range(20))
    assert sum(int(p.attention_BS.sum()) for p in parts) == int(batch.attention_BS.sum())
    assert sum(p.tokens_BS.numel() for p in parts) < 0.85 * batch.tokens_BS.numel()


def test_rows_with_the_same_prompt_stay_together_and_those_without_advantage_apart():
    rows = [response([1 + i % 3], [3] * (1 + (7 * i) % 11), i) for i in range(12)]
    batch = pack(rows, pad_id=0)
    assert batch.prompts_B.tolist() == [0, 1, 2] * 4
    adv_BT = torch.zeros(batch.mask_BT.shape)
    adv_BT[batch.prompts_B != 1] = 1.0
    batch = batch.with_old_policy(batch.engine_logp_BT).with_advantages(adv_BT)
    assert [part.prompts_B.tolist() for part in batch.split(4)][-1] == [1] * 4
    assert {tuple(part.prompts_B.tolist()) for part in batch.split(4)} == {
        (0,) * 4,
        (1,) * 4,
        (2,) * 4,
    }


def test_an_engine_that_lost_log_probs_is_refused():
    broken = response([1], [3, 4])
    broken.logprobs = broken.logprobs[:1]
    with pytest.raises(ValueError, match="2 tokens, 1 logprobs"):
        pack([broken], pad_id=0)


def test_masked_mean_ignores_nan_and_defines_empty_rows():
    x = torch.tensor([[1.0, math.nan, 3.0], [math.inf, math.nan, math.nan]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert masked_mean(x, mask).tolist() == [2.0, 0.0]
