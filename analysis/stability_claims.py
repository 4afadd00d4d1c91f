"""The paper's claims about stability and routing, which concern mixture-of-experts (MoE) models.

claims.py has the others, and says how all of them are judged.
"""

import numpy as np
import pandas as pd

from gspo.analysis.load import GRPO, GRPO_R2, GSPO, Data, Run
from gspo.analysis.stats import START, WINDOW, decline, estimate, t_interval
from gspo.analysis.verdicts import Claim, between, judge
from gspo.io.tables import counted

# a run declines if the mean of its last 10 batches lies this share below the peak of its smoothed
# reward
MIN_DECLINE = 0.3
DECLINE_NAME = "a decline of 30 %"
CHANGED = (0.03, 0.30)  # the paper's "roughly 10 %" of experts, within a factor of about three


def declines(data: Data, arm: str) -> pd.Series:
    """Return each seed's decline from its peak (stats.decline) for the settled runs.

    These have finished or collapsed. While there are none, all runs count.
    """
    runs = data.of(arm)
    settled = [run for run in runs if run.settled] or runs
    return pd.Series({run.seed: decline_of(run) for run in settled}, dtype=float)


def decline_of(run: Run) -> float:
    """Return a run's decline from its peak, NaN if it has no reward at its end."""
    if run.last_rewards(WINDOW).empty:
        return float("nan")
    return decline(run.column("reward/mean"))


def collapse_without_replay(data: Data) -> Claim:
    """Judge Fig. 3.

    Criterion: without Routing Replay the mean of the last 10 batches lies at least 30 % below the
    peak of the EMA(0.9) of the reward, in the mean over seeds.
    """
    plain = declines(data, GRPO)
    replayed = declines(data, GRPO_R2)
    return Claim(
        "Fig. 3",
        "GRPO without Routing Replay declines and does not converge",
        f"end against peak: {GRPO} {in_percent(plain)}, {GRPO_R2} {in_percent(replayed)}",
        judge(t_interval(plain), MIN_DECLINE, DECLINE_NAME),
    )


def stable(data: Data) -> Claim:
    """Judge sections 1 and 5.3.

    Criterion: the control, GRPO without Routing Replay, declines (by 30 % in the mean, as in Fig.
    3), while GSPO without Routing Replay declines in no seed and gains, and the paired difference
    of their declines lies above 0. The verdict is undecided without a control that declines, for
    then there was nothing to withstand. It speaks against the claim if GSPO declines or gains
    nothing.
    """
    falls = declines(data, GSPO)
    gains = []
    for run in data.of(GSPO):
        if run.seed in falls:
            first_rewards = run.column("reward/mean").head(START)
            gains.append(run.last_rewards(WINDOW).mean() - first_rewards.mean())
    gain_text = "-" if np.isnan(gains).any() else f"{np.mean(gains):+.3f}"
    text = (
        f"end against peak {in_percent(falls)}, end against start {gain_text} reward, "
        f"{counted(len(falls), 'seed')}"
    )
    control_falls = pd.Series(dtype=float)
    if GRPO in data.arms:
        control_falls = declines(data, GRPO)
        control_text = in_percent(control_falls)
        text += f"; control, GRPO without Routing Replay: end against peak {control_text}"
    return Claim(
        "section 5.3",
        "GSPO trains an MoE model stably without Routing Replay",
        text,
        judge_stability(falls, gains, control_falls),
    )


def judge_stability(falls: pd.Series, gains: list[float], control_falls: pd.Series) -> str:
    """Return the verdict on GSPO's declines and gains, beside the declines of the control."""
    declined = int((falls >= MIN_DECLINE).sum())
    if declined:
        words = judge(t_interval(-falls), -MIN_DECLINE, DECLINE_NAME)
        if words.startswith("not seen"):
            return words
        return f"points against it ({declined} of {counted(len(falls), 'seed')} declined by 30 %)"
    if np.isnan(gains).any():
        return "undecided (a run has no reward at its end)"
    if np.mean(gains) <= 0:
        return judge(t_interval(gains), 0, "no gain")
    common = falls.index.intersection(control_falls.index)
    if not len(common):
        return "undecided (no control: GRPO without Routing Replay on the same seeds)"
    if falls.isna().any() or control_falls[common].isna().any():
        return "undecided (a reward that is never positive, or missing at the end, has no decline)"
    if control_falls[common].mean() < MIN_DECLINE:
        declined = int((control_falls[common] >= MIN_DECLINE).sum())
        elsewhere = int((control_falls >= MIN_DECLINE).sum())
        if not declined and elsewhere:
            return (
                f"undecided (the control does not decline on the {counted(len(common), 'seed')} that "
                f"both have; it declines on {counted(elsewhere, 'seed')} of its own)"
            )
        if not declined:
            return "undecided (the control does not decline either: nothing here is unstable)"
        return (
            f"undecided (the control declines by less than 30 % in the mean; {declined} of "
            f"{counted(len(common), 'seed')} declined by 30 %)"
        )
    return judge(t_interval(control_falls[common] - falls[common]), 0, "0")


def in_percent(declines_S: pd.Series) -> str:
    """Return declines as changes in percent: the mean, and the range if there are several seeds."""
    if declines_S.isna().all():
        return "- (no reward is positive, or none is at the end)"
    mean = f"{-100 * declines_S.mean():+.1f} %"
    if len(declines_S) == 1:
        return mean
    worst = f"{-100 * declines_S.max():+.1f} %"
    best = f"{-100 * declines_S.min():+.1f} %"
    without = int(declines_S.isna().sum())
    rest = f", {without} without a reward at the end" if without else ""
    return f"{mean} (seeds {worst} to {best}{rest})"


def experts_change(data: Data) -> Claim | None:
    """Judge section 5.3. Return None if no run reports the routing consistency.

    Criterion: 1 - routing/consistency (mini-batches 2..N against the step's start), averaged over
    batches and over the arms without Routing Replay, lies between 3 % and 30 %. The seeds are those
    that these arms share, and the first arm's if they share none.
    """
    changes = {}
    for arm in (GRPO, GSPO, GRPO_R2):
        if arm in data.arms:
            table = 1 - data.table(arm, "routing/consistency")
            if table.notna().any(axis=None):
                changes[arm] = table
    if not changes:
        return None
    texts = [f"{arm} {100 * table.mean().mean():.1f} %" for arm, table in changes.items()]
    without_replay = [table for arm, table in changes.items() if arm != GRPO_R2]
    judged = without_replay or list(changes.values())
    common_seeds = set.intersection(*(set(table.columns) for table in judged))
    if common_seeds:
        judged = [table[sorted(common_seeds)] for table in judged]
    else:
        judged = judged[:1]
    # the mean over the arms, for each batch and seed
    means_TS = pd.concat(judged).groupby(level="step").mean()
    return Claim(
        "section 5.3",
        "about 10 % of the activated experts change with an update",
        f"changed experts {', '.join(texts)}",
        between(estimate(means_TS), *CHANGED, "between 3 % and 30 %"),
    )
