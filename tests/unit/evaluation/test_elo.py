"""Elo: hand numbers, simulated players, the ends of the scale, the bootstrap's coverage."""

import math

import numpy as np
import pytest

from gspo.evaluation import elo

L = math.log(10) / 400


def arrays(*items):
    return tuple(np.array(column, dtype=float) for column in zip(*items, strict=True))


def test_the_chance_to_solve():
    assert elo.chance(1500, 1500) == 0.5
    assert elo.chance(1900, 1500) == pytest.approx(10 / 11)
    assert elo.chance(1e6, 0) == 1 and elo.chance(-1e6, 0) == pytest.approx(0)


def test_maximum_likelihood_by_hand():
    # half of the attempts at 1600 solved: 1600; 10 of 11: odds of 10, 400 points above
    got = elo.maximum_likelihood(*arrays((1600, 50, 100)))
    assert got.rating == pytest.approx(1600) and got.stderr == pytest.approx(
        1 / (L * math.sqrt(100 / 4))
    )
    assert elo.maximum_likelihood(*arrays((1600, 10, 11))).rating == pytest.approx(2000)
    # one of two at 1000 and at 2000: by symmetry in the middle
    assert elo.maximum_likelihood(*arrays((1000, 2, 2), (2000, 0, 2))).rating == pytest.approx(1500)


def test_off_the_scale():
    assert elo.maximum_likelihood(*arrays((1600, 40, 40))) == elo.Rating(math.inf, math.inf)
    assert elo.maximum_likelihood(*arrays((1600, 0, 40))) == elo.Rating(-math.inf, math.inf)
    assert 1600 < elo.maximum_a_posteriori(*arrays((1600, 40, 40))).rating < 4000
    assert elo.maximum_a_posteriori(*arrays((1600, 0, 40))).rating < 1200


def test_the_prior(monkeypatch):
    # no data to speak of: the prior; a wide prior: maximum likelihood; Newton's method on the same
    # posterior
    got = elo.maximum_a_posteriori(*arrays((1600, 0, 0)))
    assert (got.rating, got.stderr) == (pytest.approx(1500), pytest.approx(700))
    items = arrays((1200, 7, 8), (1600, 3, 8), (2000, 1, 8))
    likely = elo.maximum_likelihood(*items)
    with monkeypatch.context() as patched:
        patched.setattr(elo, "PRIOR_STD", 1e6)
        wide = elo.maximum_a_posteriori(*items)
    assert wide.rating == pytest.approx(likely.rating, abs=0.01) and wide.stderr == pytest.approx(
        likely.stderr
    )
    rating = 1500.0
    for _ in range(50):
        p = [1 / (1 + 10 ** ((d - rating) / 400)) for d in items[0]]
        slope = (
            sum(L * (s - n * q) for s, n, q in zip(items[1], items[2], p, strict=True))
            - (rating - 1500) / 700**2
        )
        curvature = (
            -sum(L * L * n * q * (1 - q) for n, q in zip(items[2], p, strict=True)) - 700**-2
        )
        rating -= slope / curvature
    got = elo.maximum_a_posteriori(*items)
    assert got.rating == pytest.approx(rating) and got.stderr == pytest.approx((-curvature) ** -0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("true", "spread"), [(800, 34), (1500, 25), (2200, 25)])
def test_simulated_players(true, spread):
    """100 problems rated 800 to 3500, 8 attempts at each: no bias, and the reported error is the
    real one.
    """
    rng = np.random.default_rng(true)
    difficulty, attempts = np.linspace(800, 3500, 100), np.full(100, 8)
    draws = rng.binomial(8, elo.chance(true, difficulty), size=(300, 100))
    likely = [elo.maximum_likelihood(difficulty, solved, attempts) for solved in draws]
    probable = [elo.maximum_a_posteriori(difficulty, solved, attempts) for solved in draws]
    for found in (likely, probable):
        ratings = np.array([r.rating for r in found])
        assert abs(ratings.mean() - true) < 8
        assert ratings.std() == pytest.approx(spread, rel=0.15)
        assert np.mean([r.stderr for r in found]) == pytest.approx(spread, rel=0.1)


@pytest.mark.slow
def test_the_bootstrap_knows_that_attempts_at_one_problem_are_alike(monkeypatch):
    """A player whose chance also depends on the problem: the curvature's error is too small, the
    bootstrap's is not.
    """
    monkeypatch.setattr(elo, "DRAWS", 300)
    rng, true = np.random.default_rng(5), 1600
    difficulty, attempts, times = np.linspace(1000, 2200, 60), np.full(60, 16), 100
    covered_by_bootstrap = covered_by_curvature = 0
    for _ in range(times):
        solved = rng.binomial(16, elo.chance(true, difficulty + rng.normal(0, 500, 60)))
        truth = 1600  # by symmetry of ratings and noise about 1600
        items = (difficulty, solved, attempts)
        got, resampled = elo.maximum_a_posteriori(*items), elo.bootstrap(*items)
        covered_by_bootstrap += resampled.low <= truth <= resampled.high
        covered_by_curvature += abs(got.rating - truth) < 1.96 * got.stderr
    assert covered_by_bootstrap / times > 0.88 and covered_by_curvature / times < 0.75
    assert elo.bootstrap(*items) == resampled, "drawn by position"
