"""The paper's claims, what our runs show about each, and the verdict; captions and the summary read
all three here.

The criterion of a claim stands in the docstring of its function and was written before the runs
that it judges. verdicts.py says what the verdicts mean and what each requires. Intervals are 95 %:
over seeds (paired, Student's t) where there are several seeds, otherwise within the run (blocks of
batches), and the sentence then says so. The comparison takes the finished runs of the seeds that
both arms have, over the batches that all of these runs have, and names the runs that it leaves out.

GSPO's rival is GRPO with Routing Replay, as in the paper. Where no run has Routing Replay (a dense
model routes nothing), the rival is plain GRPO.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import pandas as pd
from gspo.analysis import paper
from gspo.analysis.efficiency import Efficiency, efficiency, filled, ratios
from gspo.analysis.load import GRPO, GRPO_R2, GSPO, Data, lacking, not_compared
from gspo.analysis.stats import (
    START,
    WINDOW,
    Interval,
    decline,
    estimate,
    paired_difference,
    ratio,
    t_interval,
)
from gspo.analysis.verdicts import between, judge

DECLINES = (
    # a run declines if the mean of its last 10 batches lies this share below the peak of its
    # smoothed reward
    0.3
)
TENFOLD = 10.0
CHANGED = (0.03, 0.30)  # the paper's "roughly 10 %" of experts, within a factor of about three
# the margin of "the same within", for the reward and for held-out scores, which have the reward's
# unit
SAME = 0.03
SPOKEN = {GRPO_R2: "GRPO with Routing Replay", GRPO: "GRPO"}


@dataclass(frozen=True)
class Claim:
    """One claim of the paper: where the paper makes it, what it says, what was found here, and the
    verdict.
    """

    where: str
    claim: str
    found: str
    verdict: str

    def sentence(self) -> str:
        """Return the claim, the finding and the verdict as one line for a caption."""
        return f"Claim ({self.where}): {self.claim}. Here: {self.found}. Verdict: {self.verdict}."


def contenders(data: Data) -> tuple[str, str]:
    """Return the names of the two arms that are compared: GSPO and its rival in these runs."""
    names = {run.base or run.arm for run in data.runs}
    return GSPO, GRPO if GRPO_R2 not in names and GRPO in names else GRPO_R2


def as_in(figure: str, rival: str) -> str:
    """Return the paper's figure by name, and say so where our rival differs from the paper's."""
    return figure if rival == GRPO_R2 else f"as in {figure}, where the rival has Routing Replay"


def verdict(
    data: Data, arms: tuple[str, str], interval: Interval, line: float, margin: float = 0.0
) -> str:
    """Return the verdict on a paired comparison. It is undecided where a run was left out because
    it ended when it collapsed: the runs that lasted are then no fair sample of the arm."""
    gone = [run for run in data.left_out(*arms) if run.collapsed is not None and not run.finished]
    if gone:
        return f"undecided (left out, for it ended when it collapsed: {gone[0].arm}, seed {gone[0].seed})"
    return judge(interval, line, f"{line:g}", margin)


def last_halves(data: Data, a: str, b: str) -> list[pd.DataFrame]:
    """Return the training rewards of both arms over the last half of their common batches, each as
    a table with steps as index and a column per seed."""
    tables = data.paired("reward/mean", a, b)
    return [table[len(table) // 2 :] for table in tables]


def last_half(data: Data, a: str, b: str) -> tuple[Interval, str]:
    """Return the mean paired difference of the training reward, a - b, over the last half of the
    common batches, and a text that states it."""
    a_TS, b_TS = last_halves(data, a, b)
    interval = paired_difference(a_TS, b_TS)
    flops_a, flops_b = (x.max().mean() for x in data.paired("compute/flops", a, b))
    text = f"{interval.text('+.3f')} over batches {a_TS.index[0]} to {a_TS.index[-1]}"
    text += f" (exact sign-flip p = {interval.p():.2g})" if interval.seeds > 1 else ""
    text += (
        f", at compute {a} / {b} = {flops_a / flops_b:.2f}" if flops_a > 0 and flops_b > 0 else ""
    )
    return interval, ", ".join(filter(None, (text, not_compared(data, (a, b)))))


def reward(data: Data) -> Claim:
    """Judge Fig. 1, top. Criterion: the mean paired difference GSPO - rival of the training reward
    over the last half of the common batches is above 0, or it is the same within ±0.03."""
    arms = contenders(data)
    interval, text = last_half(data, *arms)
    claim = f"GSPO trains to a higher reward than {SPOKEN[arms[1]]} at equal compute"
    where, found = as_in("Fig. 1, top", arms[1]), f"reward difference {text}"
    return Claim(where, claim, found, verdict(data, arms, interval, 0, SAME))


def held_out(data: Data) -> Claim | None:
    """Judge Fig. 1, bottom. Criterion: the paired difference of the held-out scores, averaged over
    the sets, at the last evaluation that all compared runs have, is above 0, or it is the same
    within ±0.03. With one seed the interval is ±1.96 standard errors over problems, with the arms'
    errors taken as independent. Returns None if nothing was evaluated."""
    arms = contenders(data)
    pairs = [data.paired(name, *arms) for name in scores(data)]
    differences = [(a - b).dropna() for a, b in pairs]
    steps = set.intersection(*(set(d.index) for d in differences)) if differences else set()
    if not steps:
        return None
    step = max(steps)
    values_S = np.mean([d.loc[step].to_numpy() for d in differences], axis=0)
    interval = estimate(values_S[None, :])
    if interval.seeds == 1:
        errors = [x.loc[step] for name in scores(data) for x in data.paired(stderr_of(name), *arms)]
        half = 1.96 * float(np.sqrt(np.sum(np.square(errors)))) / len(differences)
        interval = Interval(interval.mean, interval.mean - half, interval.mean + half, 1)
    found = f"difference at batch {step}, mean over {len(differences)} held-out sets, {interval.text('+.3f')}"
    found = ", ".join(filter(None, (found, not_compared(data, arms))))
    said = verdict(data, arms, interval, 0, SAME).replace("within the single run", "over problems")
    return Claim(
        as_in("Fig. 1, bottom", arms[1]), "GSPO ends higher on the held-out benchmarks", found, said
    )


def scores(data: Data) -> list[str]:
    """Return the names of the held-out scores, eval/<set>/avg@k."""
    return [name for name in data.metrics("eval/") if fnmatchcase(name, "eval/*/avg@*")]


def stderr_of(score: str) -> str:
    """Return the name of the metric that holds a score's standard error over problems."""
    return score.rsplit("/", 1)[0] + "/stderr"


def reward_and_flops(data: Data) -> list[pd.DataFrame]:
    """Return reward and FLOPs of GSPO, then of its rival, for the compared runs at each arm's own
    length. While runs are unfinished only the batches that all of them have are taken, so that a
    run cut short is not mistaken for one that fell short."""
    arms, tables = contenders(data), []
    runs = data.compared(*arms)
    for arm in arms:
        shortest = min(
            run.last for run in runs if run.arm == arm or not all(r.finished for r in runs)
        )
        seeds = [run.seed for run in runs if run.arm == arm]
        tables += [
            data.table(arm, name).loc[:shortest, seeds] for name in ("reward/mean", "compute/flops")
        ]
    return [filled(table) for table in tables]


def compute_ratio(data: Data) -> Efficiency:
    """Return the compute efficiency of GSPO against its rival."""
    return efficiency(*reward_and_flops(data))


def paper_compute_ratio() -> float:
    """Return the ratio to the rival's whole run in the paper's digitised Fig. 1, with one unit of
    compute per marker."""
    columns = []
    for arm in (GSPO, GRPO_R2):
        points = paper.series("fig1_reward", arm).dropna()
        columns += [points.to_numpy(), points.index.to_numpy() + 1.0]
    return float(ratios(*columns)[0, 0])


def cheaper(data: Data) -> Claim:
    """Judge the efficiency shown in Fig. 1. Criterion: the compute at which the rival's trailing
    mean of 10 batches first reaches its own final reward, divided by the compute at which GSPO's
    does, is above 1 (`like` in efficiency.py, which also says what counts where the level is not
    reached, and what p is). It is undecided where the rival ends no higher than it starts, since
    its level was then reached before training. The ratio to the rival's whole run is reported
    beside it."""
    arms, tables = contenders(data), reward_and_flops(data)
    claim, where = (
        f"GSPO reaches the final reward of {SPOKEN[arms[1]]} with less compute",
        as_in("Fig. 1, efficiency", arms[1]),
    )
    if any(table.isna().any(axis=None) for table in tables):
        return Claim(where, claim, "compute/flops was not recorded", "undecided (no compute)")
    result = efficiency(*tables)
    found = f"compute ratio, like for like, {result.like.text()}; against the rival's whole run "
    found += f"{result.to_end.text()} (the paper's points: {paper_compute_ratio():.2f})"
    found = ", ".join(filter(None, (found, not_compared(data, arms))))
    rival = tables[2]
    if rival.tail(WINDOW).mean().mean() <= rival.head(START).mean().mean():
        return Claim(where, claim, found, "undecided (the rival ends no higher than it starts)")
    return Claim(where, claim, found, verdict(data, arms, result.like, 1))


def clipping(data: Data) -> Claim:
    """Judge Fig. 2. Criterion: the share of clipped tokens (active: the clip removed the gradient),
    averaged over the common batches, divided by the rival's is at least 10, and above 1 by interval
    and p. It speaks against the claim if the ratio is below 10 by interval and p. The paper's
    ratio, 115, is reported but not tested. GSPO's own share gets no verdict where a calibrated clip
    range has chosen it."""
    arms = contenders(data)
    tables = data.paired("clip/token_active", *arms)
    result = ratio(*tables)
    paper_ratio = paper.series("fig2_clipped", GSPO)[0] / paper.series("fig2_clipped", GRPO_R2)[0]
    shares = " against ".join(f"{t.mean().mean():.2g}" for t in tables)
    found = (
        f"{shares} of tokens, ratio {result.text('.3g')} {result.kind} (paper: {paper_ratio:.0f})"
    )
    if not result.seeds:
        found, said = "clip/token_active was not recorded", "undecided (no shares)"
    elif np.isinf(result.mean):
        found, said = f"{shares} of tokens: GRPO clipped none, no ratio", "undecided (no ratio)"
    elif result.mean == 0:
        said = "points against it (GSPO clipped none)"
    elif result.high < TENFOLD:
        said = judge(result, TENFOLD, "tenfold")
    elif result.mean >= TENFOLD:
        said = f"{judge(result, 1, '1')}; in the mean at least tenfold"
    else:
        said = (
            "undecided (no interval)"
            if np.isnan(result.low)
            else "undecided (interval includes tenfold)"
        )
    found = ", ".join(filter(None, (found + calibrated(data), not_compared(data, arms))))
    return Claim("Fig. 2", "GSPO clips two orders of magnitude more tokens than GRPO", found, said)


def calibrated(data: Data) -> str:
    """Return a remark if GSPO's clip range is not the paper's, since its share of clipped tokens
    was then chosen.
    """
    settings = data.of(GSPO)[0].settings
    low, high = (settings.get(f"objective.clip_{side}") for side in ("low", "high"))
    if None in (low, high) or (low, high) == paper.CLIP_RANGES["gspo"]:
        return ""
    return f"; GSPO's share is no finding: its clip range, {low:g} / {high:g}, is not the paper's but was chosen"


def declines(data: Data, arm: str) -> pd.Series:
    """Return each seed's decline from its peak (stats.decline) for the runs that finished or
    collapsed; while there are none, for all runs."""
    runs = data.of(arm)
    settled = [run for run in runs if run.finished or run.collapsed is not None] or runs
    return pd.Series({run.seed: decline(run.column("reward/mean")) for run in settled})


def collapse_without_replay(data: Data) -> Claim:
    """Judge Fig. 3. Criterion: without Routing Replay the mean of the last 10 batches lies at least
    30 % below the peak of the EMA(0.9) of the reward, in the mean over seeds."""
    falls = {arm: declines(data, arm) for arm in (GRPO, GRPO_R2)}
    found = "end against peak: " + ", ".join(f"{arm} {in_percent(f)}" for arm, f in falls.items())
    said = judge(t_interval(falls[GRPO]), DECLINES, "a decline of 30 %")
    return Claim(
        "Fig. 3", "GRPO without Routing Replay declines and does not converge", found, said
    )


def replay_helps(data: Data) -> Claim:
    """Judge Fig. 3 where there is no decline. Criterion: the mean paired difference of the reward,
    with minus without Routing Replay, over the last half of the common batches is above 0, or it is
    the same within ±0.03."""
    interval, text = last_half(data, GRPO_R2, GRPO)
    claim = "GRPO reaches a higher reward with Routing Replay than without"
    return Claim(
        "Fig. 3",
        claim,
        f"reward difference {text}",
        verdict(data, (GRPO_R2, GRPO), interval, 0, SAME),
    )


def stable(data: Data) -> Claim:
    """Judge sections 1 and 5.3. Criterion: the control, GRPO without Routing Replay, declines (by
    30 % in the mean, as in Fig. 3), while GSPO without Routing Replay declines in no seed and
    gains, and the paired difference of their declines lies above 0. It is undecided without a
    control that declines, for then there was nothing to withstand. It speaks against the claim if
    GSPO declines or gains nothing."""
    falls = declines(data, GSPO)
    rewards = [run.column("reward/mean") for run in data.of(GSPO) if run.seed in falls]
    gains = [reward.tail(WINDOW).mean() - reward.head(START).mean() for reward in rewards]
    fell = int((falls >= DECLINES).sum())
    found = f"end against peak {in_percent(falls)}, end against start {np.mean(gains):+.3f} reward, {seeds(len(falls))}"
    control = declines(data, GRPO) if GRPO in data.arms else pd.Series(dtype=float)
    found += (
        f"; control, GRPO without Routing Replay: end against peak {in_percent(control)}"
        if len(control)
        else ""
    )
    both = falls.index.intersection(control.index)
    if fell:
        against = judge(t_interval(-falls), -DECLINES, "a decline of 30 %")
        contradicted = against.startswith("not seen")
        said = (
            against
            if contradicted
            else f"points against it ({fell} of {seeds(len(falls))} declined by 30 %)"
        )
    elif np.mean(gains) <= 0:
        said = judge(t_interval(gains), 0, "no gain")
    elif not len(both):
        said = "undecided (no control: GRPO without Routing Replay on the same seeds)"
    elif control[both].mean() < DECLINES:
        said = "undecided (the control does not decline either: nothing here is unstable)"
    else:
        said = judge(t_interval(control[both] - falls[both]), 0, "0")
    return Claim(
        "section 5.3", "GSPO trains an MoE model stably without Routing Replay", found, said
    )


def in_percent(declines_S: pd.Series) -> str:
    """Return declines as changes in percent: the mean, and the range over seeds if there are
    several.
    """
    mean, worst, best = (
        f"{-100 * x:+.1f} %" for x in (declines_S.mean(), declines_S.max(), declines_S.min())
    )
    return mean if len(declines_S) == 1 else f"{mean} (seeds {worst} to {best})"


def seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def experts_change(data: Data) -> Claim | None:
    """Judge section 5.3. Criterion: 1 - routing/consistency (mini-batches 2..N against the step's
    start), averaged over batches and over the arms without Routing Replay, lies between 3 % and 30
    %. Returns None if no run reports it."""
    tables = {
        arm: 1 - data.table(arm, "routing/consistency")
        for arm in (GRPO, GSPO, GRPO_R2)
        if arm in data.arms
    }
    tables = {arm: table for arm, table in tables.items() if table.notna().any(axis=None)}
    if not tables:
        return None
    found = "changed experts " + ", ".join(
        f"{arm} {100 * table.mean().mean():.1f} %" for arm, table in tables.items()
    )
    judged = [table for arm, table in tables.items() if arm != GRPO_R2] or list(tables.values())
    # the mean over the arms, for each batch and seed
    by_seed = pd.concat(judged).groupby(level="step").mean()
    said = between(estimate(by_seed), *CHANGED, "between 3 % and 30 %")
    return Claim(
        "section 5.3", "about 10 % of the activated experts change with an update", found, said
    )


def all_claims(data: Data) -> list[Claim]:
    """Return every claim that these runs can speak to, in the paper's order. Claims about
    mixture-of-experts (MoE) models are judged on MoE runs alone."""
    claims: list[Claim | None] = []
    if lacking(data, contenders(data)) is None:
        claims += [reward(data), held_out(data), cheaper(data), clipping(data)]
    if lacking(data, (GRPO_R2, GRPO)) is None:
        claims += [collapse_without_replay(data), replay_helps(data)]
    if lacking(data, (GSPO,)) is None and all(run.moe for run in data.of(GSPO)):
        claims.append(stable(data))
    claims.append(experts_change(data))
    return [claim for claim in claims if claim is not None]
