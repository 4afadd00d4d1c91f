"""The fit of critical rates: hand-worked cases, known truths, arms that are the same, arms that never collapse."""

import numpy as np
import pytest

from analysis import critical_rate
from analysis.critical_rate import Runs, fit, probability, ratio

RATES = 1e-4 * 2.0 ** np.arange(8)


def drawn(critical: tuple[float, ...], slope: float, seeds: int, rng: np.random.Generator) -> Runs:
    """Runs of a known truth, at RATES."""
    arm, seed, rate = (x.ravel() for x in np.meshgrid(range(len(critical)), range(1, seeds + 1), RATES, indexing="ij"))
    chance = probability(rate, slope, np.array(critical)[arm.astype(int)])
    return Runs(arm.astype(int), seed.astype(int), rate, rng.random(len(rate)) < chance)


def test_the_known_rates_come_out():
    truth = (8e-4, 4e-4, 4e-4)
    slope, critical = fit(drawn(truth, 3.0, 3000, np.random.default_rng(1)), 3)
    assert slope == pytest.approx(3.0, rel=0.03)
    np.testing.assert_allclose(critical, truth, rtol=0.02)


def test_half_collapse_at_the_critical_rate_by_hand():
    """One of four at r, three of four at 4 r: so c = 2 r, and the logit goes from -log 3 to log 3 over log 4."""
    runs = Runs(np.zeros(8, int), np.arange(8), np.repeat([1e-4, 4e-4], 4), np.array([1, 0, 0, 0, 1, 1, 1, 0], bool))
    slope, critical = fit(runs, 1)
    assert critical[0] == pytest.approx(2e-4, rel=1e-6)
    assert slope == pytest.approx(2 * np.log(3) / np.log(4), rel=0.01)


def test_a_step_is_found_between_the_rates_where_it_lies():
    collapsed = np.concatenate([RATES > 5e-4, RATES > 3e-4])
    runs = Runs(np.repeat([0, 1], 8), np.ones(16, int), np.tile(RATES, 2), collapsed)
    slope, critical = fit(runs, 2)
    assert 4e-4 < critical[0] < 8e-4 and 2e-4 < critical[1] < 4e-4 and slope > 3


def test_arms_of_which_none_or_all_collapse_lie_outside_of_the_rates():
    collapsed = np.concatenate([np.zeros(8, bool), np.ones(8, bool), RATES > 5e-4])
    runs = Runs(np.repeat([0, 1, 2], 8), np.ones(24, int), np.tile(RATES, 3), collapsed)
    _, critical = fit(runs, 3)
    assert np.isfinite(critical).all() and critical[0] > RATES[-1] and critical[1] < RATES[0]


def test_the_ratio_has_its_interval_and_p(monkeypatch):
    monkeypatch.setattr(critical_rate, "REPS", 300)
    rng = np.random.default_rng(3)
    value, p = ratio(drawn((8e-4, 4e-4), 8.0, 10, rng), 2, 0, 1)
    assert 1.5 < value.mean < 2.7 and 1.2 < value.low < value.mean < value.high and p < 0.05 and value.seeds == 10


@pytest.mark.slow
def test_same_arms_are_seldom_told_apart():
    """Of 40 comparisons of two arms that are the same, p < .05 in about 2, and about 38 intervals hold 1."""
    rng, smallest, covered = np.random.default_rng(3), 0, 0
    for _ in range(40):
        value, p = ratio(drawn((4e-4, 4e-4), 4.0, 6, rng), 2, 0, 1)
        smallest += p < 0.05
        covered += value.low <= 1 <= value.high
    assert smallest <= 6 and covered >= 32
