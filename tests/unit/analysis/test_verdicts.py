"""What may be said of runs: hand-made runs with unfinished, unpaired and damaged ones among them,
and every verdict.
"""

import math
import re
import tracemalloc
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml

from gspo.analysis import claims, efficiency, load, reproduce, stability_claims, stats
from gspo.analysis.load import GRPO, GRPO_R2, GSPO
from gspo.analysis.stats import t_interval
from gspo.analysis.verdicts import between, judge
from gspo.statistics import sign_flip_p
from two_arms import write


def three_pairs(folder: Path) -> Path:
    """GSPO - GRPO with R2 is .09, .10, .11 in every batch."""
    for seed, difference in ((1, 0.09), (2, 0.10), (3, 0.11)):
        wave = [0.4 + 0.1 * math.sin(t + seed) for t in range(20)]
        write(folder, GRPO_R2, seed, wave)
        write(folder, GSPO, seed, [r + difference for r in wave])
    return folder


# 4.303 x 0.01 / sqrt(3) = 0.0248
THREE = "reward difference +0.100 [+0.075, +0.125] over batches 11 to 20"


# ------------------------------------------------------------------------------------- what is
# compared with what
@pytest.mark.parametrize("begun", [(GSPO,), (GSPO, GRPO_R2)])
def test_a_seed_that_was_begun_does_not_cut_the_finished_ones(tmp_path, begun):
    three_pairs(tmp_path)
    before = claims.reward(load.load([tmp_path]))
    assert before.finding.startswith(THREE) and "left out" not in before.finding
    for arm in begun:
        write(tmp_path, arm, 4, [0.1] * 4, steps=20)
    after = claims.reward(load.load([tmp_path]))
    assert after.verdict == before.verdict and after.finding.startswith(before.finding)
    assert all(f"{arm}, seed 4 (4 of 20 batches)" in after.finding for arm in begun)


def test_a_finished_seed_without_a_partner_is_left_out_and_named(tmp_path):
    three_pairs(tmp_path)
    write(tmp_path, GSPO, 5, [0.9] * 20)
    write(tmp_path, GSPO, 6, [0.9] * 20)
    write(tmp_path, GRPO_R2, 6, [0.9] * 7, steps=20)
    found = claims.reward(load.load([tmp_path])).finding
    assert found.startswith(THREE)
    assert "GSPO, seed 5 (no run of that seed to compare with)" in found
    assert (
        "GSPO, seed 6 (its other run did not finish); GRPO + Routing Replay (R2), seed 6 (7 of 20 batches)"
        in found
    )


def test_while_no_seed_has_finished_the_begun_are_compared_over_their_common_batches(tmp_path):
    for arm, batches in ((GSPO, 12), (GRPO_R2, 8)):
        write(tmp_path, arm, 1, [0.5] * batches, steps=20)
    assert "over batches 5 to 8" in claims.reward(load.load([tmp_path])).finding


def test_a_run_that_ended_when_it_collapsed_is_not_silently_left_out(tmp_path):
    three_pairs(tmp_path)
    write(tmp_path, GSPO, 4, [0.6] * 80)
    write(tmp_path, GRPO_R2, 4, [0.6] * 15 + [0.0] * 25, steps=80)
    claim = claims.reward(load.load([tmp_path]))
    assert (
        claim.verdict
        == f"undecided (left out, because these runs collapsed and ended: {GRPO_R2}, 1 seed (4))"
    )
    assert "collapsed at step" in claim.finding


def test_lost_rows_are_left_out_of_their_seed_alone_and_arms_stay_aligned(tmp_path):
    rising = [0.02 * t for t in range(40)]
    lost = [math.nan if t == 25 else r for t, r in enumerate(rising)]
    other = [math.nan if t == 35 else r + 0.1 for t, r in enumerate(rising)]
    write(tmp_path, GRPO_R2, 1, lost)
    write(tmp_path, GSPO, 1, other)  # as many rows, but not the same ones
    for seed in (2, 3):
        write(tmp_path, GRPO_R2, seed, rising)
        write(tmp_path, GSPO, seed, [r + 0.1 for r in rising])
    data = load.load([tmp_path])
    assert claims.reward(data).finding.startswith(
        "reward difference +0.100 [+0.100, +0.100] over batches 21 to 40"
    )
    assert [note for note in data.notes if note.startswith("lost")] == [
        f"lost: {tmp_path / 'grpo-r2-seed1'} has no row of batch 26",
        f"lost: {tmp_path / 'gspo-none-seed1'} has no row of batch 36",
    ]


def test_ratio_is_over_the_batches_that_both_arms_have():
    a, b = np.array([[4.0, 4.0], [100.0, 4.0]]), np.array([[2.0, 1.0], [np.nan, 1.0]])
    assert stats.ratio(a, b).values == pytest.approx((2, 4))
    assert stats.ratio(a[:, :1], b[:, :1]).mean == 2
    assert stats.ratio(a, b * np.nan).seeds == 0


# -----------------------------------------------------------------------------------------------------
# efficiency
@pytest.mark.slow
def test_one_lost_row_leaves_the_efficiency_as_it_was(tmp_path):
    """Rewards on straight lines, so that what a seed lost is known: t and 2t, seed 2 higher by 5;
    as worked out by hand in test_analysis_stats.py the ratio is 40 / 23 batches."""
    flops = np.column_stack([10.0 * np.arange(1, 41)] * 2)
    rival = np.column_stack([np.arange(40.0), np.arange(40.0) + 5])
    arm = np.column_stack([2 * np.arange(40.0), 2 * np.arange(40.0) + 5])
    whole = efficiency.efficiency(arm, flops, rival, flops)
    assert whole.like.mean == pytest.approx(40 / 23)
    lost, lost_flops = arm.copy(), flops.copy()
    lost[17, 1] = lost_flops[17, 1] = np.nan
    some = efficiency.efficiency(lost, lost_flops, rival, flops)
    assert some.like.mean == pytest.approx(40 / 23) and some.like.text() == whole.like.text()
    for i in range(2):
        for name, rewards in ((GSPO, lost), (GRPO_R2, rival)):
            write(tmp_path, name, i + 1, rewards[:, i].tolist())
    assert "like for like, 1.74" in claims.cheaper(load.load([tmp_path])).finding


@pytest.mark.slow
def test_seeds_that_do_not_reach_the_level_lie_below_one():
    """Sign test: six seeds, none of which comes near its rival, p = 2 / 64; one on the other side,
    p = 14 / 64.
    """
    flops, rival = (np.column_stack([x] * 6) for x in (np.arange(1.0, 41), np.arange(40.0)))
    result = efficiency.efficiency(0 * rival, flops, rival, flops).like
    assert result.values == (0,) * 6 and result.p(1) == 2 / 64
    assert judge(result, 1, "1").startswith("not seen: contradicted")
    mixed = np.column_stack([0 * rival[:, :5], 2 * rival[:, 5]])
    assert efficiency.efficiency(mixed, flops, rival, flops).like.p(1) == pytest.approx(14 / 64)


def test_an_unknown_compute_is_said_and_not_judged(tmp_path):
    for arm in (GSPO, GRPO_R2):
        write(tmp_path, arm, 1, [0.1 * t for t in range(12)], **{"compute/flops": None})
    data = load.load([tmp_path])
    claim = claims.cheaper(data)
    assert (claim.finding, claim.verdict) == (
        "compute/flops was not recorded",
        "undecided (no compute)",
    )
    assert "nan" not in claims.reward(data).finding
    clipping = claims.clipping(data)
    assert (clipping.finding, clipping.verdict) == (
        "clip/token_active was not recorded",
        "undecided (no shares)",
    )


# -------------------------------------------------------------------------------------------------
# sign-flip test
def test_sign_flip_p_is_the_share_of_all_patterns():
    draw = np.random.default_rng(0)
    for n in (1, 2, 3, 5, 8, 11):
        for d in (draw.normal(0.3, 1, n), draw.integers(-3, 4, n) / 10, np.full(n, 0.1)):
            sums = [
                abs(sum(s * round(x * 1e12) for s, x in zip(signs, d, strict=True)))
                for signs in product((1, -1), repeat=n)
            ]
            least = abs(sum(round(x * 1e12) for x in d)) - n
            assert sign_flip_p(d) == np.mean([s >= least for s in sums]), d


def test_sign_flip_p_of_thirty_seeds_is_exact_and_takes_no_memory():
    tracemalloc.start()
    for n, negative in ((25, 0), (25, 6), (30, 8)):
        tail = sum(math.comb(n, i) for i in range(negative + 1))
        assert sign_flip_p([0.1] * (n - negative) + [-0.1] * negative) == 2 * tail / 2**n
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


@pytest.mark.parametrize("unit", [1e-13, 1.0, 1e9])
def test_sign_flip_p_does_not_depend_on_the_unit_or_the_order(unit):
    # the sum 1.6; -0.1 and 0.1 tie under rounding
    d = np.array([0.1, 0.2, 0.3, -0.1, 0.7, 0.4]) * unit
    assert {sign_flip_p(np.roll(d, k)) for k in range(6)} == {sign_flip_p([1, 2, 3, -1, 7, 4])}
    assert sign_flip_p(np.array([0.1, 0.2, -0.3]) * unit) == 1, "0 but for rounding"
    assert math.isnan(sign_flip_p([0.1, math.nan]))


# --------------------------------------------------------------------------------------------------------
# verdicts
def test_three_seeds_point_and_six_decide():
    narrow = t_interval([-0.0087, -0.009, -0.0093])
    assert -0.010 < narrow.low < narrow.high < -0.008
    assert judge(narrow, 0, "0") == (
        "points against it (interval over 3 seeds, below 0; exact p = 0.25: a verdict needs p < 0.05, so 6 seeds)"
    )
    six = t_interval([-0.2, -0.21, -0.19, -0.2, -0.22, -0.18])
    assert (
        judge(six, 0, "0")
        == "not seen: contradicted (interval over 6 seeds, below 0; exact p = 0.031)"
    )
    up = t_interval([-x for x in six.values])
    assert judge(up, 0, "0") == "seen (interval over 6 seeds, above 0; exact p = 0.031)"
    one_astray = t_interval([-0.01] * 5 + [0.0005])  # the interval ends at -0.004; p = 4 / 64
    assert judge(one_astray, 0, "0") == (
        "points against it (interval over 6 seeds, below 0; exact p = 0.062: a verdict needs p < 0.05)"
    )
    assert (
        judge(t_interval([0.1, -0.1, 0.2]), 0, "0")
        == "undecided (interval over 3 seeds, includes 0)"
    )
    assert judge(stats.block_bootstrap(np.full(9, 0.1)), 0, "0").startswith(
        "points to it (interval within the single"
    )


def test_the_same_within_a_margin():
    around = [0.01, -0.01, 0.004, -0.004, 0.007, -0.007]
    same = "the same within ±0.03 (interval over {} seeds; against ±0.03 exact p = {}"
    assert judge(t_interval(around), 0, "0", 0.03) == same.format(6, "0.031)")
    assert judge(t_interval(around[:4]), 0, "0", 0.03).startswith(
        "points to " + same.format(4, "0.12: a verdict needs")
    )
    assert judge(t_interval([x + 0.04 for x in around]), 0, "0", 0.03).startswith("seen (")
    assert judge(t_interval([4 * x for x in around]), 0, "0", 0.03).startswith("undecided")
    below = judge(t_interval([-0.01, -0.011, -0.009, -0.01, -0.01, -0.01]), 0, "0", 0.03)
    assert below.startswith("not seen: contradicted") and below.endswith(
        "; " + same.format(6, "0.031)")
    )


def test_ratios_and_ranges_follow_the_same_rule():
    def shares(count: int) -> stats.Interval:
        return stats.ratio(
            np.full((4, count), 0.16) * np.linspace(0.9, 1.1, count), np.full((4, count), 0.002)
        )

    assert shares(5).p(1) == 2 / 32 and shares(6).p(1) == 2 / 64 and shares(6).p(80) > 0.5
    assert judge(shares(5), 10, "tenfold").startswith("points to it")
    assert judge(shares(6), 10, "tenfold").startswith("seen")
    tenth = [0.09, 0.1, 0.11, 0.1, 0.1, 0.1]
    assert between(t_interval(tenth), 0.03, 0.3, "in it").startswith(
        "seen (interval over 6 seeds, in it"
    )
    assert between(t_interval(tenth[:5]), 0.03, 0.3, "in it").startswith("points to it")
    assert between(t_interval([x / 10 for x in tenth]), 0.03, 0.3, "in it").startswith(
        "not seen: contradicted"
    )
    assert between(t_interval([0.02, 0.05]), 0.03, 0.3, "in it").startswith("undecided")


# ---------------------------------------------------------------------------------------------------
# arms there are
@pytest.mark.slow
def test_dense_models_are_compared_with_grpo_and_asked_nothing_of_moe(tmp_path):
    shares = {"clip/token_active": 0.01, "clip/token_outside": 0.02}
    for seed in (1, 2):
        write(
            tmp_path / "runs",
            GSPO,
            seed,
            [0.3 + 0.01 * t for t in range(14)],
            model="tiny_dense",
            **shares,
        )
        write(
            tmp_path / "runs",
            GRPO,
            seed,
            [0.25 + 0.01 * t for t in range(14)],
            model="tiny_dense",
            **shares,
        )
    data = load.load([tmp_path / "runs"])
    paths, left_out = reproduce.draw_all(data, tmp_path / "figures")
    assert {path.stem for path in paths} == {"fig1_stability", "fig2_clipping", "fig_efficiency"}
    text = "\n".join(reproduce.summary(data, paths, left_out))
    assert (
        "GSPO trains to a higher reward than GRPO at equal compute (as in Fig. 1, top, where the rival has"
        in text
    )
    assert "reward difference +0.050 [+0.050, +0.050]" in text
    assert (
        "These models are dense: what the paper claims of MoE models and Routing Replay is not judged."
        in text
    )
    assert "MoE model stably" not in text and not re.search(r"\bnan\b", text)


@pytest.mark.slow
def test_stable_needs_a_control_that_is_not(tmp_path):
    good, bad = [0.3 + 0.005 * t for t in range(40)], [0.5] * 20 + [0.1] * 20
    for seed in range(1, 7):
        write(tmp_path / "alone", GSPO, seed, [r + seed / 100 for r in good])
        write(tmp_path / "healthy", GRPO, seed, good)
        write(tmp_path / "broken", GRPO, seed, [r + seed / 100 for r in bad])

    def verdict(*others: str) -> str:
        return stability_claims.stable(
            load.load([tmp_path / "alone", *(tmp_path / other for other in others)])
        ).verdict

    assert verdict() == "undecided (no control: GRPO without Routing Replay on the same seeds)"
    assert (
        verdict("healthy")
        == "undecided (the control does not decline either: nothing here is unstable)"
    )
    assert verdict("broken") == "seen (interval over 6 seeds, above 0; exact p = 0.031)"
    write(tmp_path / "elsewhere", GRPO, 1, good)
    write(tmp_path / "elsewhere", GRPO, 7, bad)
    assert verdict("elsewhere") == (
        "undecided (the control does not decline on the 1 seed that both have; it declines on 1 seed of its own)"
    )
    for seed in range(1, 7):
        write(tmp_path / "some", GRPO, seed, bad if seed == 1 else good)
        write(tmp_path / "negative", GRPO, seed, [-r for r in good])
    assert (
        verdict("some") == "undecided (the control declines by less than 30 % in the mean; "
        "1 of 6 seeds declined by 30 %)"
    )
    never = load.load([tmp_path / "alone", tmp_path / "negative"])
    claim = stability_claims.stable(never)
    assert claim.verdict.startswith("undecided (a reward that is never positive, or missing")
    assert (
        "nan" not in claim.finding
        and "- (no reward is positive, or none is at the end)" in claim.finding
    )


def test_seeds_of_different_arms_are_no_more_seeds_of_changed_experts(tmp_path):
    for seed in (1, 2, 3):
        write(tmp_path, GSPO, seed, [0.5] * 12, **{"routing/consistency": 0.9})
        write(tmp_path, GRPO, seed + 3, [0.5] * 12, **{"routing/consistency": 0.9})
    claim = stability_claims.experts_change(load.load([tmp_path]))
    assert claim.verdict.startswith("points to it (interval over 3 seeds"), claim.verdict


def test_a_chosen_clip_range_is_said(tmp_path):
    for arm, share in ((GSPO, 0.15), (GRPO_R2, 0.002)):
        file = write(tmp_path, arm, 1, [0.5] * 9, **{"clip/token_active": share}) / "settings.yaml"
        settings = yaml.safe_load(file.read_text())
        settings["objective"] |= {"clip_low": 3.5e-4, "clip_high": 4.7e-4}
        file.write_text(yaml.safe_dump(settings))
    found = claims.clipping(load.load([tmp_path])).finding
    assert (
        "GSPO's share is no finding: its clip range, 0.00035 / 0.00047, is not the paper's but was chosen"
        in found
    )
