"""analysis/: every statistic against numbers worked out by hand, and the paper's points."""

import math

import numpy as np
import pytest

from gspo.analysis import claims, efficiency, paper, stats
from gspo.analysis.load import GRPO, GRPO_R2, GSPO
from gspo.statistics import holm, random_sign_flip_p, sign_flip_p, t_quantile


def test_smoothing():
    assert stats.trailing_mean([1, 2, 3, 4], 2)[1:] == pytest.approx([1.5, 2.5, 3.5])
    assert math.isnan(stats.trailing_mean([1, 2, 3, 4], 2)[0])
    assert stats.centred_mean([0, 3, 6, 9], 2) == pytest.approx([1.5, 3, 6, 7.5])
    assert stats.centred_mean([0, math.nan, 6], 2) == pytest.approx([0, 3, 6])


def test_t_interval():
    interval = stats.t_interval([1, 2, 3])  # sd 1, t_2 = 4.3027
    assert (interval.mean, interval.high - 2, 2 - interval.low) == pytest.approx(
        (2, 2.4841, 2.4841), abs=1e-4
    )
    assert math.isnan(stats.t_interval([1.0]).low)
    assert t_quantile(1) == pytest.approx(12.706, abs=5e-4)
    assert t_quantile(31) == pytest.approx(2.0395, abs=5e-4)
    assert t_quantile(1000) == pytest.approx(1.9623, abs=5e-4)


def test_paired_difference_is_over_seeds_and_removes_what_the_arms_share():
    shared, effect = np.array([[5.0, -3.0], [1.0, 7.0]]), np.array([[1, 2], [2, 3]])
    # means 1.5 and 2.5, sd / sqrt(2) = 0.5
    interval = stats.paired_difference(shared + effect, shared)
    assert (interval.mean, interval.high, interval.seeds) == pytest.approx(
        (2, 2 + 12.7062 * 0.5, 2)
    )


def test_blocks_are_neighbours_and_widen_the_interval_of_correlated_batches():
    chosen = stats.block_indices(9, 9, np.random.default_rng(0)).reshape(3, 3)
    assert ((np.diff(chosen, axis=1) - 1) % 9 == 0).all()
    wave = np.sin(np.arange(100) / 8)
    shuffled = np.random.default_rng(0).permutation(wave)
    wide, narrow = (stats.block_bootstrap(x) for x in (wave, shuffled))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
    assert "not over seeds" in wide.kind


def test_ratio():
    # geometric mean 6; log 1.5 is half the logs' distance
    two = stats.ratio([[4, 9], [4, 9]], [[1, 1], [1, 1]])
    assert (two.mean, two.high) == pytest.approx((6, 6 * 1.5**12.706205))
    one = stats.ratio([[2], [4]], [[1], [2]])
    assert (one.mean, one.low, one.high) == pytest.approx((2, 2, 2))
    second_seed_alone = stats.ratio([[np.nan, 2], [np.nan, 4]], [[np.nan, 1], [np.nan, 2]])
    assert second_seed_alone == one
    assert stats.ratio([[1.0], [1.0]], [[0.0], [0.0]]).mean == math.inf
    assert math.isnan(stats.ratio([[0.0], [0.0]], [[0.0], [0.0]]).mean)


def test_decline_and_sign_flip():
    assert stats.decline([1.0] * 20 + [0.5] * 10) == pytest.approx(0.5)
    assert math.isnan(stats.decline([-1.0] * 20))
    assert sign_flip_p([1, 1, 1]) == 0.25  # 2 of 8 patterns
    assert sign_flip_p([1, 2, -3]) == 1
    # |sum| >= 5 of 7, 5 (twice), and their mirrors
    assert sign_flip_p([1, 2, 3, -1]) == 4 / 16 + 2 / 16


def test_efficiency_by_hand():
    t = np.arange(40.0)
    rival, flops = t, 3 * (t + 1)
    # level 34.5; 2t has trailing mean 2 (t - 4.5), which passes it at t = 22 of 0..39: 23 of 40
    # batches
    assert efficiency.needs(2 * t, flops, rival, flops) == (34.5, 69, 120)
    assert efficiency.ratios(2 * t, flops, rival, flops) == pytest.approx(np.full((2, 2), 40 / 23))
    early = np.minimum(t, 20)  # reaches its level of 20 with the window over 20..29: batch 30 of 40
    # equal arms: only `like` is 1
    assert efficiency.ratios(early, flops, early, flops)[0] == pytest.approx([40 / 30, 1])
    # censored
    assert efficiency.ratios(0 * t, flops, early, flops) == pytest.approx(
        np.array([[0, 0], [1, 0.75]])
    )
    never = efficiency.efficiency(*(x[:, None] for x in (0 * t, flops, early, flops)))
    assert never.need == math.inf and never.like.bound == pytest.approx(0.75)
    # the same brackets as where it is reached, so that "the interval includes 1" can be read off
    assert (
        efficiency.Ratio(0, 0, 1.004, 3, bound=0.95).text()
        == "not reached (below 0.95; 95 %: below 1.00)"
    )
    assert efficiency.Ratio(1.5, 0, 2.0, 3).text() == "1.50 [not reached, 2.00]"
    assert efficiency.Ratio(1.1, 0, 1.5, 3, bound=1.1).text() == "1.10 [not reached, 1.50]"


def test_paper_points():
    assert (
        len(paper.series("fig1_reward", GSPO)) == 50
        and len(paper.series("fig1_reward", GRPO_R2)) == 80
    )
    assert paper.series("fig1_reward", GRPO_R2).isna().sum() == 5
    assert paper.series("fig1_reward", GSPO).tail(10).mean() == pytest.approx(0.721, abs=5e-4)
    assert paper.series("fig3_reward", GRPO).min() == 0.2347
    assert claims.paper_compute_ratio() == 2  # marker 39, the 40th, of 80
    with pytest.raises(KeyError, match="fig9"):
        paper.series("fig9", GSPO)


def test_a_lucky_first_batch_is_no_peak():
    """The rule is that of the collapse: the peak counts from the tenth batch of the smoothed reward
    on.
    """
    lucky = [1.0] + [0.5] * 89
    # .5 + .5 x .9^9 / (1 + ... + .9^9)
    assert stats.decline(lucky) == pytest.approx(1 - 0.5 / 0.52974, abs=1e-4)
    assert stats.decline([0.5] * 60 + [0.25] * 30) == pytest.approx(0.5, abs=1e-6)
    assert math.isnan(stats.decline([0.0] * 30))


def test_holm_by_hand():
    """Of .01, .04, .03 the factors are 3, 1, 2, and no corrected p is below an earlier one."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    with_nan = holm([0.01, math.nan, 0.03])
    assert with_nan[::2] == [0.02, 0.03] and math.isnan(with_nan[1])


def test_random_signs_give_the_exact_p():
    """Within five standard errors of the drawn share, and never 0."""
    differences = np.array([0.3, -0.1, 0.2, 0.25, 0.05, -0.02, 0.4, 0.1])
    exact = sign_flip_p(differences)
    drawn = random_sign_flip_p(differences, draws=20_000)
    assert drawn == pytest.approx(exact, abs=5 * np.sqrt(exact * (1 - exact) / 20_000))
    assert random_sign_flip_p(np.ones(60), draws=999) == 1 / 1000
    assert random_sign_flip_p(np.zeros(3), draws=99) == 1.0
    assert np.isnan(random_sign_flip_p(np.array([])))


@pytest.mark.daily
def test_how_often_equal_arms_differ_in_efficiency():
    rng = np.random.default_rng(3)
    steps = 100
    flops_T = np.arange(1.0, steps + 1)
    curve_T = np.linspace(0.2, 0.6, steps)
    sides = []
    for _ in range(1500):
        arm_T = curve_T + rng.normal(0, 0.05, steps)
        rival_T = curve_T + rng.normal(0, 0.05, steps)
        _, need, rival_need = efficiency.needs(arm_T, flops_T, rival_T, flops_T)
        sides.append(np.sign(rival_need - need) if np.isfinite(need) else -1.0)
    below = np.mean(np.array(sides) < 0)
    assert below == pytest.approx(0.58, abs=0.04)
    for seeds, rejected in ((10, 0.09), (30, 0.16)):
        p_values = [sign_flip_p(rng.choice(sides, seeds)) for _ in range(400)]
        assert np.mean(np.array(p_values) < 0.05) == pytest.approx(rejected, abs=0.06)


@pytest.mark.daily
@pytest.mark.parametrize(("correlation", "covered"), [(0.0, 0.88), (0.5, 0.83)])
def test_how_often_the_interval_of_a_single_run_covers_the_truth(correlation, covered):
    rng = np.random.default_rng(3)
    steps = 50
    hits = []
    for _ in range(500):
        noise_T = rng.normal(size=2 * steps)
        for t in range(1, 2 * steps):
            noise_T[t] += correlation * noise_T[t - 1]
        interval = stats.block_bootstrap(noise_T[steps:], 300)
        hits.append(interval.low <= 0 <= interval.high)
    assert np.mean(hits) == pytest.approx(covered, abs=0.05)
