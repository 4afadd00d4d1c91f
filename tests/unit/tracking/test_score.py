"""The score of a run, by hand."""

import doctest
import math

import pytest

from gspo.tracking import score as module
from gspo.tracking.score import score


def rewards(*values: float | None) -> list[dict]:
    return [{"step": step, "reward/mean": value} for step, value in enumerate(values, start=1)]


def test_without_evaluation_it_is_the_training_reward_of_the_last_tenth():
    assert doctest.testmod(module).failed == 0
    assert score(rewards(*range(1, 11))) == 10
    assert score(rewards(*range(1, 12))) == 10.5  # 1.1 steps are two
    assert score(rewards(*[0.0] * 19, 1.0, 1.0, None)) == 1.0
    assert score(rewards(0.25)) == 0.25


def test_with_evaluation_it_is_the_held_out_reward_over_the_sets():
    rows = [{"step": 0, "eval/a/avg@2": 0.1, "eval/b/avg@2": 0.3}]
    rows += [{"step": step, "reward/mean": 0.9} for step in range(1, 31)]
    for step, value in ((10, 0.4), (29, 0.6), (30, 0.8)):
        rows[step] |= {"eval/a/avg@2": value, "eval/b/avg@2": value + 0.1, "eval/a/pass@2": 1.0}
    assert score(rows) == pytest.approx((0.65 + 0.85) / 2)
    assert score(rows[:21]) == pytest.approx(0.45), "the newest, where the last tenth has none"
    assert score(rows[:21], collapsed=True) == pytest.approx(0.2), (
        "its lowest, which the fall has not been seen in"
    )
    assert score(rows, collapsed=True) == score(rows)


def test_there_may_be_none():
    assert (
        math.isnan(score([]))
        and math.isnan(score([{"step": 0}]))
        and math.isnan(score(rewards(None, None)))
    )
