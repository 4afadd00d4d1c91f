"""The lists of kept tokens: of a response, of a batch, and of the parts of a batch."""

import numpy as np
import pytest
import torch

from gspo.data.kept_tokens import KeptTokens, id_dtype
from gspo.data.pack import pack
from gspo.data.problems import Problem
from gspo.data.samples import Response, Turn
from gspo.model.forward.kept_softmax import all_columns

PROBLEM = Problem("math", 0, "1+1=?", "2")


def kept(*lists, vocabulary=100) -> KeptTokens:
    return KeptTokens.of_lists([list(ids) for ids in lists], vocabulary)


def response(token_ids, kept_tokens=None, prompt=(1, 2), turns=()) -> Response:
    logprobs = np.zeros(len(token_ids), np.float32)
    return Response(
        PROBLEM, 0, list(prompt), list(token_ids), logprobs, "stop", "", 0, turns=list(turns),
        kept=kept_tokens,
    )  # fmt: skip


def lists_of(batch) -> list[list[list[int]]]:
    """The kept tokens of every column of a batch, row by row."""
    sets = batch.kept
    return [
        [
            sets.ids[start : start + count].tolist()
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        ]
        for starts, counts in zip(sets.starts_BT, sets.counts_BT, strict=True)
    ]


def test_lists_of_positions():
    a, b = kept([5, 7], [], [9]), kept([4])
    assert a.counts.tolist() == [2, 0, 1] and a.ids.tolist() == [5, 7, 9] and len(a) == 3
    joined = a.followed_by(KeptTokens.whole_vocabulary(2)).followed_by(b)
    assert joined.counts.tolist() == [2, 0, 1, 0, 0, 1] and joined.ids.tolist() == [5, 7, 9, 4]
    assert joined.first(2).ids.tolist() == [5, 7] and joined.first(0).ids.tolist() == []
    whole = KeptTokens.whole_vocabulary(2).followed_by(KeptTokens.whole_vocabulary(1))
    assert whole.counts.tolist() == [0, 0, 0] and len(whole.ids) == 0


def test_token_ids_take_two_bytes_if_they_fit():
    assert id_dtype(2**16) == np.uint16 and id_dtype(2**16 + 1) == np.int32
    far = kept([151_935], vocabulary=151_936)
    assert KeptTokens.whole_vocabulary(1).followed_by(far).ids.tolist() == [151_935]


def test_a_response_whose_token_was_not_kept_is_refused():
    assert kept([3, 4], [], [9]).fault([4, 8, 9]) == ""
    for wrong, tokens, words in [
        (kept([3, 4]), [4, 8], "at 1 positions, and 2 tokens"),
        (kept([3, 4], [8]), [5, 8], "sampled token 5 at position 0, which is found 0 times"),
        (kept([3, 3], [8]), [3, 8], "found 2 times"),
        (KeptTokens(np.array([2], np.int32), np.array([3], np.uint16)), [3], "do not add up"),
        (KeptTokens(np.array([2, -1], np.int32), np.array([3], np.uint16)), [3, 3], "add up"),
    ]:
        assert words in wrong.fault(tokens)
        with pytest.raises(ValueError, match="problem 0"):
            pack([response(tokens, wrong)], 0)


def test_parts_of_a_batch_have_their_own_lists():
    """An episode has holes: the environment's two tokens are of the whole vocabulary."""
    turns = [Turn("policy", 1, ""), Turn("environment", 2, ""), Turn("policy", 1, "")]
    batch = pack(
        [
            response([3, 4], kept([3, 8], [4])),
            response([5, 6, 7, 8], kept([5], [], [], [8, 9, 2]), prompt=[1, 2, 3], turns=turns),
            response([6], None),
        ],
        pad_id=0,
    )
    assert lists_of(batch) == [
        [[3, 8], [4], [], []],
        [[5], [], [], [8, 9, 2]],
        [[], [], [], []],
    ]
    part = batch.rows(torch.tensor([2, 0]))
    assert lists_of(part) == [[[], []], [[3, 8], [4]]]
    assert part.kept.ids is batch.kept.ids, "no list is copied"
    # a single kept token is no choice, and neither are the environment's tokens
    assert batch.choice_BT.tolist() == [
        [True, False, False, False],
        [False, False, False, True],
        [True, False, False, False],
    ]
    columns = all_columns(batch.kept)
    assert columns.positions_N.tolist() == [0, 0, 1, 4, 7, 7, 7]
    assert columns.ids_N.tolist() == [3, 8, 4, 5, 8, 9, 2]


def test_without_lists_a_batch_has_none():
    batch = pack([response([3, 4]), response([5])], 0)
    assert batch.kept is None and batch.choice_BT is batch.mask_BT
