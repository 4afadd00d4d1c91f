"""The fit of critical rates: hand-worked cases, known truths, arms that are the same, arms that
never collapse.
"""

import numpy as np
import pytest

from gspo.analysis import critical_rate
from gspo.analysis.critical_rate import Counts, fit, probability, ratio

RATES = 1e-4 * 2.0 ** np.arange(8)


def drawn(
    critical: tuple[float, ...], slope: float, seeds: int, rng: np.random.Generator
) -> Counts:
    """Runs of a known truth, one at each of RATES for each seed and arm."""
    chance_AR = probability(RATES, slope, np.array(critical)[:, None])
    collapsed_SAR = rng.random((seeds, *chance_AR.shape)) < chance_AR
    return Counts(RATES, np.ones(collapsed_SAR.shape, int), collapsed_SAR.astype(int))


def fitted(counts: Counts) -> tuple[np.ndarray, np.ndarray]:
    return fit(counts.rates_R, counts.runs_SAR.sum(0), counts.collapsed_SAR.sum(0))


def test_the_known_rates_come_out():
    truth = (8e-4, 4e-4, 4e-4)
    slope, critical = fitted(drawn(truth, 3.0, 3000, np.random.default_rng(1)))
    assert slope == pytest.approx(3.0, rel=0.03)
    np.testing.assert_allclose(critical, truth, rtol=0.02)


def test_half_collapse_at_the_critical_rate_by_hand():
    """One of four at r, three of four at 4 r: so c = 2 r, and the logit goes from -log 3 to log 3
    over log 4.
    """
    slope, critical = fit(np.array([1e-4, 4e-4]), np.array([[4, 4]]), np.array([[1, 3]]))
    assert critical[0] == pytest.approx(2e-4, rel=1e-6)
    assert slope == pytest.approx(2 * np.log(3) / np.log(4), rel=0.01)


def test_a_step_is_found_between_the_rates_where_it_lies():
    slope, critical = fit(RATES, np.ones((2, 8)), np.array([RATES > 5e-4, RATES > 3e-4]))
    assert 4e-4 < critical[0] < 8e-4 and 2e-4 < critical[1] < 4e-4 and slope > 3


def test_arms_of_which_none_or_all_collapse_lie_outside_of_the_rates():
    collapsed = np.array([np.zeros(8, bool), np.ones(8, bool), RATES > 5e-4])
    _, critical = fit(RATES, np.ones((3, 8)), collapsed)
    assert np.isfinite(critical).all() and critical[0] > RATES[-1] and critical[1] < RATES[0]


def test_many_fits_at_once_are_those_of_each():
    rng = np.random.default_rng(5)
    counts = drawn((8e-4, 3e-4), 4.0, 6, rng)
    slopes, critical = fit(RATES, counts.runs_SAR, counts.collapsed_SAR)
    alone = [
        fit(RATES, runs, down)
        for runs, down in zip(counts.runs_SAR, counts.collapsed_SAR, strict=True)
    ]
    np.testing.assert_allclose(slopes, [slope for slope, _ in alone], rtol=1e-6)
    np.testing.assert_allclose(critical, [rates for _, rates in alone], rtol=1e-6)


def test_where_less_collapses_at_higher_rates_there_is_no_critical_rate():
    slope, critical = fit(RATES, np.ones((1, 8)), np.array([RATES < 5e-4]))
    assert slope < 0 and np.isnan(critical).all()


def test_the_fit_is_the_highest_point_where_plain_newton_steps_overshoot():
    """Of five seeds, k collapse below a rate and the others above it: the slope falls with k and
    changes its sign.
    """
    counts = [(5 - k) * (RATES > 5e-4).astype(int) + k * (RATES < 5e-4) for k in range(6)]
    slopes = [fit(RATES, np.full((1, 8), 5), np.array([down]))[0] for down in counts]
    assert (np.diff(slopes) < 0).all() and slopes[2] > 0 > slopes[3]
    for down, slope in zip(counts, slopes, strict=True):
        share = down / 5
        u = np.log(RATES / np.exp(np.log(RATES).mean()))
        grid = np.stack(
            np.meshgrid(np.linspace(-20, 20, 401), np.linspace(-20, 20, 401), indexing="ij")
        )
        logits = grid[0, ..., None] * u - grid[1, ..., None]
        posterior = 5 * (share * logits - np.logaddexp(0, logits)).sum(-1) - (grid**2).sum(0) / (
            2 * 20.0**2
        )
        best = np.unravel_index(posterior.argmax(), posterior.shape)
        assert slope == pytest.approx(grid[0][best], abs=0.1)


def test_a_rate_without_runs_of_an_arm_counts_nothing():
    runs, collapsed = np.array([[4, 0, 4], [4, 4, 4]]), np.array([[1, 0, 3], [0, 2, 4]])
    slope, critical = fit(np.array([1e-4, 2e-4, 4e-4]), runs, collapsed)
    # both are symmetric about 2e-4
    assert slope > 0 and critical == pytest.approx([2e-4, 2e-4], rel=1e-6)


def test_the_ratio_has_its_interval_and_p():
    value, p = ratio(drawn((8e-4, 4e-4), 8.0, 10, np.random.default_rng(3)), 0, 1)
    assert (
        1.5 < value.mean < 2.7
        and 1.2 < value.low < value.mean < value.high
        and p < 0.05
        and value.seeds == 10
    )


@pytest.mark.slow
def test_a_level_for_which_the_draws_are_too_few_gives_no_interval():
    counts = drawn((8e-4, 4e-4), 8.0, 10, np.random.default_rng(3))
    value, p = ratio(counts, 0, 1, level=1.5e-5)
    assert np.isnan(value.low) and "[no interval]" in value.text(".2f") and p < 0.05


def test_draws_without_a_critical_rate_widen_the_interval():
    """Three seeds collapse above a rate and two below it: in many draws of five runs collapse less
    at higher rates.
    """
    rising, falling = RATES > 5e-4, RATES < 5e-4
    collapsed = np.array([[rising, rising]] * 3 + [[falling, falling]] * 2).astype(int)
    value, p = ratio(Counts(RATES, np.ones(collapsed.shape, int), collapsed), 0, 1)
    assert value.mean == pytest.approx(1) and value.low == 0 and np.isinf(value.high) and p == 1


@pytest.mark.daily
@pytest.mark.parametrize(
    ("seeds", "level", "covered"), [(10, 0.05, 0.90), (30, 0.018, 0.973), (40, 0.044, 0.952)]
)
def test_how_often_the_interval_covers_the_truth(seeds, level, covered, monkeypatch):
    """Studies of three rates and three arms, with the slope and the rates of 16 mini-batches."""
    monkeypatch.setattr(critical_rate, "FINE_REPS", 2000)
    rates = 1e-4 * np.array([2.3, 2.7, 3.1])
    truth = 1e-4 * np.array([2.72, 2.62, 2.55])
    chance_AR = probability(rates, 17.0, truth[:, None])
    rng = np.random.default_rng(7)
    hits = []
    for _ in range(400):
        collapsed_SAR = (rng.random((seeds, 3, 3)) < chance_AR).astype(int)
        counts = Counts(rates, np.ones_like(collapsed_SAR), collapsed_SAR)
        interval, _ = ratio(counts, 0, 1, level)
        hits.append(interval.low <= truth[0] / truth[1] <= interval.high)
    assert np.mean(hits) == pytest.approx(covered, abs=0.04)


@pytest.mark.slow
def test_same_arms_are_seldom_told_apart():
    """Of 40 comparisons of two arms that are the same, p < .05 in about 2, and about 38 intervals
    hold 1.
    """
    rng, smallest, covered = np.random.default_rng(3), 0, 0
    for _ in range(40):
        value, p = ratio(drawn((4e-4, 4e-4), 4.0, 6, rng), 0, 1)
        smallest += p < 0.05
        covered += value.low <= 1 <= value.high
    assert smallest <= 6 and covered >= 32
