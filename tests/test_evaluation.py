"""avg@k, pass@k, Elo: hand numbers; evaluation on the real task is repeatable."""

import math

import numpy as np
import pytest
from conftest import small_policy

from gspo.evaluation import EvaluationSettings, elo, evaluate, summarise
from gspo.rollout.engine import LocalEngine
from gspo.tasks.mixture import Mixture


def test_summary_by_hand():
    rewards = np.array([[1, 1], [1, 0], [0, 0], [0, 0]], dtype=float)
    result = summarise("set", rewards)
    assert result["eval/set/avg@2"] == pytest.approx(3 / 8)
    assert result["eval/set/pass@2"] == pytest.approx(2 / 4)
    means = [1, 0.5, 0, 0]
    assert result["eval/set/stderr"] == pytest.approx(np.std(means, ddof=1) / 2)


def test_elo_by_hand():
    # half of the problems rated 1600 solved, no prior to speak of: the rating is 1600
    rating, error = elo([(1600, 50, 100)], spread=1e6)
    assert rating == pytest.approx(1600, abs=0.1)
    assert error == pytest.approx(1 / (math.log(10) / 400 * math.sqrt(100 / 4)), rel=1e-3)
    # 10 of 11 solved at 1600: odds 10, 400 points above
    assert elo([(1600, 10, 11)], spread=1e6)[0] == pytest.approx(2000, abs=1)
    # everything solved: the prior keeps it finite, and above the hardest problem
    assert 1600 < elo([(1600, 40, 40)])[0] < 4000
    assert elo([(1600, 0, 40)])[0] < 1200


def test_elo_recovers_a_simulated_player():
    rng = np.random.default_rng(0)
    ratings = np.linspace(800, 2400, 100)
    solved = rng.binomial(8, 1 / (1 + 10 ** ((ratings - 1700) / 400)))
    rating, error = elo([(d, int(k), 8) for d, k in zip(ratings, solved, strict=True)])
    assert abs(rating - 1700) < 3 * error < 120


def test_evaluation_is_repeatable_and_covers_every_set():
    task, engine = Mixture(), LocalEngine(small_policy())
    settings = EvaluationSettings(problems=3, samples=2)
    try:
        first, groups = evaluate(engine, task, settings, 8, step=0)
        again, _ = evaluate(engine, task, settings, 8, step=5)
        one, _ = evaluate(engine, task, EvaluationSettings(problems=3, samples=2, sets=["code"]), 8, step=0)
    finally:
        task.close()
    assert first == again
    assert {name.split("/")[1] for name in first if "avg@2" in name} == set(task.evaluation_sets())
    assert "eval/elo" in first and len(groups) == 3 * 5
    assert one == {k: v for k, v in first.items() if k.startswith("eval/code/")}
    with pytest.raises(ValueError, match="no set 'x'"):
        evaluate(engine, task, EvaluationSettings(sets=["x"]), 8, step=0)
