"""The registered collapse rule and the early-warning scores: hand-worked series, causality, gaps."""

import math

import numpy as np
import pytest

from gspo.tracking import collapse
from gspo.tracking.collapse import SIGNALS, Signal
from gspo.tracking.metrics import lookup


def scores(kind, series) -> list[float]:
    return Signal("reward/mean", kind, "").score(series).tolist()


def test_smoothing_by_hand():
    assert scores(collapse.Smoothed, [1.0, 0.0]) == pytest.approx([1.0, 0.9 / 1.9])
    assert scores(collapse.Smoothed, [2.0, None, math.nan, math.inf, 2.0]) == pytest.approx(
        [2.0] * 5
    )
    late = scores(collapse.Smoothed, [None, 1.0])
    assert math.isnan(late[0]) and late[1] == 1.0
    assert scores(collapse.Smoothed, [0.3] * 50) == pytest.approx([0.3] * 50), (
        "no bias at the start"
    )


def falling(level: float, steps: int, start: int = 30, before: float = 1.0) -> list[float]:
    return [before] * start + [level] * steps


def test_a_run_that_falls_and_stays_has_collapsed_where_the_smoothed_reward_crossed():
    """After n steps at 0 the smoothed reward is about 0.9^n: below 0.7 from the fourth on (0.9^4 =
    0.656).
    """
    assert collapse.collapse(falling(0.0, 60, start=200)) == 200 + 3
    assert collapse.collapse(falling(0.0, 22, start=200)) is None, "19 steps below are not 20"
    assert collapse.collapse(falling(0.0, 23, start=200)) == 203, (
        "the run's end ends the wait for a recovery"
    )


def test_a_decline_to_seventy_per_cent_is_none():
    assert collapse.collapse(falling(0.71, 300)) is None
    assert collapse.collapse(falling(0.69, 300)) is not None


def test_a_recovery_within_fifty_steps_takes_it_back_and_a_late_one_does_not():
    fall = falling(0.0, 24, start=200)
    assert collapse.collapse(fall + [1.0] * 100) is None
    late = falling(0.0, 24 + 50, start=200) + [1.0] * 100
    assert collapse.collapse(late) == 203
    half = fall + [0.85] * 200  # better again, but not to 0.9 of the peak
    assert collapse.collapse(half) == 203


def test_a_short_dip_is_none_and_a_second_fall_is_found():
    dip = [1.0] * 100 + [0.0] * 10 + [1.0] * 100
    assert collapse.collapse(dip) is None
    found = collapse.collapse(dip + [0.0] * 100)
    assert found == len(dip) + 3


def test_a_run_that_never_earned_anything_has_not_collapsed():
    assert collapse.collapse([0.0] * 300) is None
    assert collapse.collapse([-0.5] * 100 + [-1.0] * 200) is None, "no share of a negative peak"
    assert collapse.collapse([]) is None and collapse.collapse([None] * 40) is None


def test_unscaled_rewards_and_missing_rows_change_no_verdict():
    series = falling(0.2, 80, start=60, before=0.6)
    with_gaps = [None, *series[:30], None, *series[30:]]
    assert collapse.collapse([7 * r for r in series]) == collapse.collapse(series)
    assert collapse.collapse(with_gaps) == collapse.collapse(series) + 2


def test_a_lucky_first_batch_is_no_peak():
    """The first reward alone would be the smoothed one: the peak is looked for from the tenth
    number on.
    """
    lucky = [1.0] + [0.3] * 300
    assert collapse.collapse(lucky) is None
    assert collapse.collapse([1.0] * 12 + [0.3] * 300) is not None


def test_noise_of_a_constant_policy_is_seldom_taken_for_a_collapse():
    """Not never: a rule that looks at a peak finds one in noise, the more so the smaller the
    reward.
    """
    rng = np.random.default_rng(0)
    share = [
        sum(collapse.collapse(rng.binomial(256, mean, 60) / 256) is not None for _ in range(200))
        / 200
        for mean in (0.05, 0.2, 0.5)
    ]
    assert share[0] < 0.1 and share[1] == share[2] == 0, share


def test_scores_by_hand():
    assert scores(collapse.Shortfall, [1.0, 0.0])[1] == pytest.approx(1 - 0.9 / 1.9)
    assert scores(collapse.BelowPeak, [1.0] * 10 + [0.0])[9:] == pytest.approx(
        [0, 1 - 0.9 * 6.5132 / 6.8619], abs=1e-4
    )
    assert scores(collapse.BelowPeak, [-1.0] * 10 + [-2.0]) == [0] * 11
    series = [2.0] * 10 + [8.0] * 400
    rise = scores(collapse.Rise, series)
    assert rise[-1] == pytest.approx(6.0) and rise[9] == pytest.approx(0)
    assert scores(collapse.Growth, series)[-1] == pytest.approx(math.log(4))
    assert scores(collapse.Decline, series)[-1] == pytest.approx(-math.log(4))
    assert scores(collapse.Growth, [1.0] * 10 + [0.0] * 400)[-1] < -20, (
        "an entropy of 0 is finite, and far"
    )
    spikes = scores(collapse.Spike, [1.0, 1.0, 50.0, 1.0, 1.0, 1.0, 100.0, 1.0, None])
    assert spikes[:5] == [0] * 5 and spikes[6:] == pytest.approx([2, 0, 0])
    assert max(scores(collapse.Spike, [0.0] * 30 + [0.001] * 30 + [0.0] * 9)) == 0, (
        "steps without signal are no measure"
    )
    assert scores(collapse.LogTail, [math.e, 1 / math.e]) == pytest.approx([1, 1])


@pytest.mark.parametrize("name", SIGNALS)
def test_a_score_is_causal_and_its_metric_is_registered(name):
    signal = SIGNALS[name]
    assert lookup(signal.metric).name == signal.metric
    series = np.random.default_rng(3).uniform(0.05, 1.0, 45).tolist()
    series[7] = series[30] = None
    whole = signal.score(series)
    assert whole.shape == (45,) and np.isfinite(whole).all()
    for t in (1, 5, 8, 20, 31, 44):
        assert signal.score(series[:t])[-1] == pytest.approx(whole[t - 1], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "healthy", "ill"),
    [
        ("reward_fall", 0.6, 0.1), ("routing_drift", 0.99, 0.5), ("mismatch", 1e-5, 0.05), ("ess_token", 0.99, 0.2),
        ("ess_sequence", 0.99, 0.2), ("ratio_high", 1.5, 40.0), ("ratio_low", 0.8, 1e-4), ("policy_drift", 1e-4, 0.1),
        ("entropy_fall", 0.5, 0.01), ("entropy_rise", 0.5, 3.0), ("grad_spike", 0.3, 30.0), ("grad_growth", 0.3, 5.0),
        ("repetition", 0.1, 0.8), ("truncation", 0.02, 0.6), ("zero_variance", 0.1, 0.95), ("clip_share", 0.15, 0.9),
    ],
)  # fmt: skip
def test_a_score_rises_when_its_metric_turns_bad(name, healthy, ill):
    score = SIGNALS[name].score([healthy] * 30 + [ill] * 4)
    assert score[33] > score[29] + 1e-3 and score[30] > score[29]


def test_every_signal_is_tested_for_its_direction():
    tested = test_a_score_rises_when_its_metric_turns_bad.pytestmark[0].args[1]
    assert {row[0] for row in tested} == set(SIGNALS)


def test_fewer_batches_than_the_minimum_cannot_collapse():
    """The fastest collapse of a reward between 0 and 1: it falls from 1 to 0 at once."""

    def collapses(batches: int) -> bool:
        ends = range(1, batches)
        return any(collapse.collapse([1.0] * n + [0.0] * (batches - n)) is not None for n in ends)

    shortest = collapse.MIN_BATCHES
    assert collapses(shortest) and not collapses(shortest - 1)
