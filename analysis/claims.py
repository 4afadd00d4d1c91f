"""The paper's claims, what our runs show, and the verdict. Captions and the summary both read it from here.

Every criterion is in the docstring of its function and was written before the runs it judges. Verdicts:
    seen                       the criterion holds
    not seen                   it does not
    not seen: contradicted     the interval lies wholly on the other side
    undecided                  the interval includes both sides
Intervals are 95 %: over seeds (paired, Student's t) where there are several seeds, otherwise within the run (blocks of
batches), which the sentence then says. Comparisons use the batches that all compared runs have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import paper
from efficiency import Efficiency, efficiency, ratios
from load import GRPO, GRPO_R2, GSPO, Data, lacking
from stats import START, WINDOW, Interval, decline, estimate, paired_difference, ratio, sign_flip_p

DECLINES = 0.3  # a run declines if its last 10 batches lie this share below the peak of its EMA(0.9)
TENFOLD = 10.0
SPOKEN = {GRPO_R2: "GRPO with Routing Replay", GRPO: "GRPO"}
CHANGED = (0.03, 0.30)  # "roughly 10 %" of experts, within a factor of about three


@dataclass(frozen=True)
class Claim:
    """One claim: where the paper makes it, what it says, what was found here, and the verdict."""

    where: str
    claim: str
    found: str
    verdict: str

    def sentence(self) -> str:
        return f"Claim ({self.where}): {self.claim}. Here: {self.found}. Verdict: {self.verdict}."


def judge(interval: Interval, line: float, name: str) -> str:
    """Verdict on "above the line" from an interval alone."""
    kind = interval.kind
    if interval.low > line:
        return f"seen (interval {kind}, above {name})"
    if interval.high < line:
        return f"not seen: contradicted (interval {kind}, below {name})"
    if np.isnan(interval.low):
        return "undecided (no interval)"
    return f"undecided (interval {kind}, includes {name})"


def contenders(data: Data) -> tuple[str, str]:
    """GSPO and its rival in these runs: GRPO with Routing Replay as in the paper; where no run has that, GRPO."""
    return GSPO, GRPO if GRPO_R2 not in data.arms and GRPO in data.arms else GRPO_R2


def as_in(figure: str, rival: str) -> str:
    return figure if rival == GRPO_R2 else f"as in {figure}, where the rival has Routing Replay"


def last_halves(data: Data, a: str, b: str) -> list[pd.DataFrame]:
    """The training rewards of both arms over the last half of their common batches: index step, a column per seed."""
    tables = data.paired("reward/mean", a, b)
    return [table[len(table) // 2 :] for table in tables]


def last_half(data: Data, a: str, b: str) -> tuple[Interval, str]:
    """Mean paired difference of the training reward a - b over the last half of the common batches, and in words."""
    a_TS, b_TS = last_halves(data, a, b)
    interval = paired_difference(a_TS, b_TS)
    flops_a, flops_b = (x.iloc[-1].mean() for x in data.paired("compute/flops", a, b))
    text = f"{interval.text('+.3f')} over batches {a_TS.index[0]} to {a_TS.index[-1]}"
    if interval.seeds > 1:
        p, least = sign_flip_p((a_TS - b_TS).mean()), 2 / 2**interval.seeds
        remark = f", the least possible with {seeds(interval.seeds)}" if p == least else ""
        text += f" (exact sign-flip p = {p:.2g}{remark})"
    return interval, f"{text}, at compute {a} / {b} = {flops_a / flops_b:.2f}"


def reward(data: Data) -> Claim:
    """Fig 1, top. Criterion: mean paired difference GSPO - GRPO with Routing Replay of the training reward over the
    last half of the common batches. Seen: its interval lies above 0; contradicted: below; else undecided."""
    arms = contenders(data)
    interval, text = last_half(data, *arms)
    claim = f"GSPO trains to a higher reward than {SPOKEN[arms[1]]} at equal compute"
    return Claim(as_in("Fig. 1, top", arms[1]), claim, f"reward difference {text}", judge(interval, 0, "0"))


def held_out(data: Data) -> Claim | None:
    """Fig 1, bottom. Criterion: paired difference of the held-out scores, mean over the sets, at the last evaluation
    that all runs have. Seen: interval above 0; contradicted: below; else undecided. One seed: +-1.96 standard errors
    over problems, the arms' errors taken as independent. None if nothing was evaluated."""
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
    verdict = judge(interval, 0, "0").replace("within the single run", "over problems")
    return Claim(as_in("Fig. 1, bottom", arms[1]), "GSPO ends higher on the held-out benchmarks", found, verdict)


def scores(data: Data) -> list[str]:
    """The held-out scores: eval/<set>/avg@k."""
    return [name for name in data.metrics("eval/") if "/avg@" in name]


def stderr_of(score: str) -> str:
    """The metric that holds a score's standard error over problems."""
    return score.rsplit("/", 1)[0] + "/stderr"


def reward_and_flops(data: Data) -> list[pd.DataFrame]:
    """Reward and FLOPs of GSPO, then of its rival: shared seeds, each arm's own length; if any run is
    unfinished, only the batches that all have, so that a run cut short is not taken for one that fell short."""
    arms, tables = contenders(data), []
    shared, unfinished = data.seeds(*arms), any(run.last < run.planned for run in data.of(*arms))
    for arm in arms:
        last = data.common_step(*arms) if unfinished else data.common_step(arm)
        tables += [data.table(arm, name).loc[:last, shared] for name in ("reward/mean", "compute/flops")]
    return tables


def compute_ratio(data: Data) -> Efficiency:
    """The efficiency of GSPO against its rival."""
    return efficiency(*reward_and_flops(data))


def paper_compute_ratio() -> float:
    """The ratio to the rival's whole run of the paper's digitised Fig 1, a marker counted as one unit of compute."""
    columns = []
    for arm in (GSPO, GRPO_R2):
        points = paper.series("fig1_reward", arm).dropna()
        columns += [points.to_numpy(), points.index.to_numpy() + 1.0]
    return float(ratios(*columns)[0, 0])


def cheaper(data: Data) -> Claim:
    """Efficiency (Fig 1). Criterion: compute at which the rival's trailing-10 reward first reaches its own final level
    / compute at which GSPO's does (`like` in efficiency.py, which also says what counts where the level is not
    reached). Seen: interval above 1; contradicted: below; else undecided, as where the rival ends no higher than
    it starts: then its level was reached before training. The ratio to the rival's whole run is reported beside it."""
    result, rival_arm = compute_ratio(data), contenders(data)[1]
    claim = f"GSPO reaches the final reward of {SPOKEN[rival_arm]} with less compute"
    where = as_in("Fig. 1, efficiency", rival_arm)
    found = f"compute ratio, like for like, {result.like.text()}; against the rival's whole run "
    found += f"{result.to_end.text()} (the paper's points: {paper_compute_ratio():.2f})"
    rival = data.table(rival_arm, "reward/mean")
    if rival.tail(WINDOW).mean().mean() <= rival.head(START).mean().mean():
        return Claim(where, claim, found, "undecided (the rival ends no higher than it starts)")
    return Claim(where, claim, found, judge(result.like, 1, "1"))


def clipping(data: Data) -> Claim:
    """Fig 2. Criterion: share of clipped tokens (active: the clip removed the gradient), mean over the common batches,
    GSPO / GRPO with Routing Replay. Seen (in direction): ratio at least 10 and interval above 1; not seen: the whole
    interval below 10; else undecided. The paper's ratio, 115, is reported beside it, not tested."""
    tables = data.paired("clip/token_active", *contenders(data))
    result = ratio(*tables)
    paper_ratio = paper.series("fig2_clipped", GSPO)[0] / paper.series("fig2_clipped", GRPO_R2)[0]
    shares = " against ".join(f"{np.nanmean(t):.2g}" for t in tables)
    found = f"{shares} of tokens, ratio {result.text('.3g')} {result.kind} (paper: {paper_ratio:.0f})"
    if np.isinf(result.mean):
        found, verdict = f"{shares} of tokens: GRPO clipped none, no ratio", "undecided (no ratio)"
    elif result.mean >= TENFOLD and result.low > 1:
        verdict = "seen in direction (at least tenfold)"
    elif result.high < TENFOLD or result.mean == 0:
        verdict = "not seen (less than tenfold)"
    else:
        verdict = "undecided (interval includes tenfold)" if np.isfinite(result.low) else "undecided (no interval)"
    return Claim("Fig. 2", "GSPO clips two orders of magnitude more tokens than GRPO", found, verdict)


def declines(data: Data, arm: str) -> list[float]:
    """Decline from peak of each seed of an arm; see stats.decline."""
    return [decline(column.dropna()) for _, column in data.table(arm, "reward/mean").items()]


def collapse_without_replay(data: Data) -> Claim:
    """Fig 3. Criterion: without Routing Replay the last 10 batches lie at least 30 % below the peak of the EMA(0.9) of
    the reward, in the mean over seeds. Seen or not seen."""
    falls = {arm: declines(data, arm) for arm in (GRPO, GRPO_R2)}
    found = "end against peak: " + ", ".join(f"{arm} {in_percent(f)}" for arm, f in falls.items())
    verdict = "seen (declines)" if np.mean(falls[GRPO]) >= DECLINES else "not seen (no decline of 30 %)"
    return Claim("Fig. 3", "GRPO without Routing Replay declines and does not converge", found, verdict)


def replay_helps(data: Data) -> Claim:
    """Fig 3, where there is no decline. Criterion: mean paired difference of the reward, with - without Routing Replay,
    over the last half of the common batches. Seen: interval above 0; contradicted: below; else undecided."""
    interval, text = last_half(data, GRPO_R2, GRPO)
    claim = "GRPO reaches a higher reward with Routing Replay than without"
    return Claim("Fig. 3", claim, f"reward difference {text}", judge(interval, 0, "0"))


def stable(data: Data) -> Claim:
    """Sections 1 and 5.3. Criterion: GSPO without Routing Replay declines in no seed (30 % below the peak, as in
    Fig 3) and ends, in the mean, above its start. Contradicted: a seed declines. Not seen: no gain."""
    table = data.table(GSPO, "reward/mean")
    falls = declines(data, GSPO)
    gain = float((table.tail(WINDOW).mean() - table.head(START).mean()).mean())
    found = f"end against peak {in_percent(falls)}, end against start {gain:+.3f} reward, {seeds(len(falls))}"
    verdict = "seen" if gain > 0 else "not seen (no gain)"
    if max(falls) >= DECLINES:
        verdict = "not seen: contradicted (a seed declines)"
    return Claim("section 5.3", "GSPO trains an MoE model stably without Routing Replay", found, verdict)


def in_percent(declines_S: list[float]) -> str:
    """Declines as changes in percent: the mean, and the range over seeds if there are several."""
    mean, worst, best = (f"{-100 * x:+.1f} %" for x in (np.mean(declines_S), max(declines_S), min(declines_S)))
    return mean if len(declines_S) == 1 else f"{mean} (seeds {worst} to {best})"


def seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def experts_change(data: Data) -> Claim | None:
    """Section 5.3. Criterion: 1 - routing/consistency (mini-batches 2..N against the step's start), mean over batches,
    of the arms without Routing Replay, lies between 3 % and 30 %. None if no run reports it."""
    tables = {arm: data.table(arm, "routing/consistency") for arm in (GRPO, GSPO, GRPO_R2) if arm in data.arms}
    changed = {arm: 1 - float(table.mean().mean()) for arm, table in tables.items() if table.notna().any(axis=None)}
    if not changed:
        return None
    found = "changed experts " + ", ".join(f"{arm} {100 * share:.1f} %" for arm, share in changed.items())
    judged = [share for arm, share in changed.items() if arm != GRPO_R2] or list(changed.values())
    verdict = (
        "seen (between 3 % and 30 %)"
        if all(CHANGED[0] <= share <= CHANGED[1] for share in judged)
        else "not seen (outside 3 % to 30 %)"
    )
    return Claim("section 5.3", "about 10 % of the activated experts change with an update", found, verdict)


def all_claims(data: Data) -> list[Claim]:
    """Every claim that these runs can speak to, in the paper's order."""
    claims: list[Claim | None] = []
    if lacking(data, contenders(data)) is None:
        claims += [reward(data), held_out(data), cheaper(data), clipping(data)]
    if lacking(data, (GRPO_R2, GRPO)) is None:
        claims += [collapse_without_replay(data), replay_helps(data)]
    if lacking(data, (GSPO,)) is None:
        claims.append(stable(data))
    claims.append(experts_change(data))
    return [claim for claim in claims if claim is not None]
