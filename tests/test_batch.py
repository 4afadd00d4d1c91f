"""Packing, trimming, masks, reductions, advantages: hand numbers and invariances."""

import math

import numpy as np
import pytest
import torch

from gspo.advantages import GroupNormalized
from gspo.batch import pack
from gspo.masked import Totals, aggregate, masked_mean
from gspo.records import Problem, Response


def response(prompt: list[int], tokens: list[int], index: int = 0) -> Response:
    problem = Problem("math", index, "", "")
    return Response(problem, 0, prompt, tokens, -np.arange(1, len(tokens) + 1, dtype=np.float32), "stop", "", 0)


def test_pack_by_hand():
    batch = pack([response([5, 6, 7], [8, 2]), response([5], [9, 9, 9, 2])], torch.tensor([1.5, -0.5]), pad_id=0)
    assert batch.prompt_width == 3
    assert batch.tokens_BS.tolist() == [[5, 6, 7, 8, 2, 0, 0], [0, 0, 5, 9, 9, 9, 2]]
    assert batch.attention_BS.int().tolist() == [[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]
    assert batch.mask_BT.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.engine_logp_BT.tolist() == [[-1, -2, 0, 0], [-1, -2, -3, -4]]
    assert batch.adv_BT.tolist() == [[1.5] * 4, [-0.5] * 4]


def test_rows_cuts_only_padding():
    batch = pack([response([5, 6, 7], [8, 2]), response([5], [9, 9, 9, 2])], torch.zeros(2), pad_id=0)
    batch.old_logp_BT = batch.engine_logp_BT * 2
    batch.experts_BSLK = torch.arange(2 * 7 * 3 * 2).view(2, 7, 3, 2)
    second = batch.rows(torch.tensor([1]))
    assert second.tokens_BS.tolist() == [[5, 9, 9, 9, 2]] and second.prompt_width == 1
    assert second.old_logp_BT.tolist() == [[-2, -4, -6, -8]]
    assert torch.equal(second.experts_BSLK[0], batch.experts_BSLK[1, 2:])
    first = batch.rows(torch.tensor([0]))
    assert first.tokens_BS.tolist() == [[5, 6, 7, 8, 2]] and first.mask_BT.shape == (1, 2)


def test_split_keeps_every_row_once_and_pads_less():
    rows = [response([1] * (i % 5 + 1), [3] * (1 + (7 * i) % 11), i) for i in range(20)]
    batch = pack(rows, torch.arange(20.0), pad_id=0)
    parts = batch.split(6)
    assert sorted(a for part in parts for a in part.adv_BT[:, 0].tolist()) == list(range(20))
    assert sum(int(p.attention_BS.sum()) for p in parts) == int(batch.attention_BS.sum())
    assert sum(p.tokens_BS.numel() for p in parts) < 0.85 * batch.tokens_BS.numel()


def test_an_engine_that_lost_log_probs_is_refused():
    broken = response([1], [3, 4])
    broken.logprobs = broken.logprobs[:1]
    with pytest.raises(ValueError, match="2 tokens, 1 logprobs"):
        pack([broken], torch.zeros(1), pad_id=0)


def test_masked_mean_ignores_nan_and_defines_empty_rows():
    x = torch.tensor([[1.0, math.nan, 3.0], [math.inf, math.nan, math.nan]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert masked_mean(x, mask).tolist() == [2.0, 0.0]


def test_aggregations_by_hand():
    loss = torch.tensor([[2.0, 4.0, 99.0], [9.0, 99.0, 99.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    totals = Totals.of(mask)
    assert (totals.sequences, totals.tokens) == (2, 3)
    assert aggregate(loss, mask, "sequence_mean", totals).item() == pytest.approx((3 + 9) / 2)
    assert aggregate(loss, mask, "token_mean", totals).item() == pytest.approx(15 / 3)
    with pytest.raises(ValueError, match="sum_mean"):
        aggregate(loss, mask, "sum_mean", totals)


def test_group_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    adv = GroupNormalized()(rewards)
    std = math.sqrt(4 * 0.25 / 3)  # ddof 1
    torch.testing.assert_close(adv[0], torch.tensor([0.5, -0.5, -0.5, 0.5]) / (std + 1e-6))
    assert adv[1].tolist() == [0, 0, 0, 0] and adv[2].tolist() == [0, 0, 0, 0]  # exactly, although .1 is not exact
    assert adv[3, 0] == pytest.approx(0.75 / (0.5 + 1e-6))
    assert adv.sum(-1).abs().max() < 1e-6
