"""The paper's claims, the findings of our runs about each, and the verdicts.

Captions and the summary take all three from here and from stability_claims.py. The criterion of a
claim stands in the docstring of its function and was written before the runs that it judges.
verdicts.py defines the verdicts and their requirements. Intervals are 95 %: over seeds (paired,
Student's t) if there are several seeds, otherwise within the run (blocks of batches), and the
sentence then says so. The comparison takes the finished runs of the seeds that both arms have, over
the batches that all of these runs have. It names the runs that it leaves out.

GSPO's rival is GRPO with Routing Replay, as in the paper. If no run has Routing Replay (a dense
model routes nothing), the rival is plain GRPO.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
import pandas as pd

from gspo.analysis import paper, stability_claims
from gspo.analysis.efficiency import Efficiency, efficiency, filled, ratios
from gspo.analysis.load import (
    GRPO,
    GRPO_R2,
    GSPO,
    Data,
    count_seeds,
    not_compared,
    why_not_comparable,
)
from gspo.analysis.runs import Run
from gspo.analysis.stats import (
    START,
    WINDOW,
    Interval,
    estimate,
    paired_difference,
    ratio,
)
from gspo.analysis.verdicts import Claim, judge
from gspo.tracking.metrics import stderr_of

TENFOLD = 10.0
# the margin of "the same within", for the reward and for held-out scores, which have the reward's
# unit
SAME = 0.03
NORMAL_QUANTILE = 1.96
NAMES_IN_WORDS = {GRPO_R2: "GRPO with Routing Replay", GRPO: "GRPO"}


def contenders(data: Data) -> tuple[str, str]:
    """Return the names of the two arms that are compared: GSPO and its rival in these runs."""
    names = {run.base or run.arm for run in data.runs}
    plain_rival = GRPO_R2 not in names and GRPO in names
    return GSPO, GRPO if plain_rival else GRPO_R2


def as_in(figure: str, rival: str) -> str:
    """Return the paper's figure by name, and say so if our rival differs from the paper's."""
    return figure if rival == GRPO_R2 else f"as in {figure}, where the rival has Routing Replay"


def join(*texts: str) -> str:
    """Return the texts that are not empty, with commas between them."""
    return ", ".join(filter(None, texts))


def verdict(
    data: Data,
    arms: tuple[str, str],
    interval: Interval,
    line: float,
    margin: float = 0.0,
) -> str:
    """Return the verdict on a paired comparison.

    It is undecided if a run was left out because it ended when it collapsed. The remaining runs
    are then no fair sample of the arm.
    """
    return without_collapsed(data, arms) or judge(interval, line, f"{line:g}", margin)


def without_collapsed(data: Data, arms: tuple[str, str]) -> str:
    """Return "undecided" with the runs that are not compared because they collapsed, else ""."""
    return undecided_without(data.left_out(*arms))


def undecided_without(left_out: Sequence[Run]) -> str:
    """Return "undecided" with the names of these runs that ended when they collapsed, else ""."""
    seeds: dict[str, list[int]] = {}
    for run in left_out:
        if run.collapsed is not None and not run.finished:
            seeds.setdefault(run.arm, []).append(run.seed)
    if not seeds:
        return ""
    names = [f"{arm}, {count_seeds(of_arm)}" for arm, of_arm in seeds.items()]
    return f"undecided (left out, because these runs collapsed and ended: {'; '.join(names)})"


def last_halves(data: Data, a: str, b: str) -> list[pd.DataFrame]:
    """Return the training rewards of both arms over the last half of their common batches.

    Each is a table with steps as index and a column per seed.
    """
    tables = data.paired("reward/mean", a, b)
    return [table[len(table) // 2 :] for table in tables]


def last_half(data: Data, a: str, b: str) -> tuple[Interval, str]:
    """Return the mean paired difference of the training reward, a - b, and a text that states it.

    The difference is over the last half of the common batches.
    """
    a_TS, b_TS = last_halves(data, a, b)
    interval = paired_difference(a_TS, b_TS)
    text = f"{interval.text('+.3f')} over batches {a_TS.index[0]} to {a_TS.index[-1]}"
    # without the collapsed runs, p would be of seeds that were chosen by the outcome
    if interval.seeds > 1 and not without_collapsed(data, (a, b)):
        text += f" (exact sign-flip p = {interval.p():.2g})"
    a_table, b_table = data.paired("compute/flops", a, b)
    a_flops = a_table.max().mean()
    b_flops = b_table.max().mean()
    if a_flops > 0 and b_flops > 0:
        text += f", at compute {a} / {b} = {a_flops / b_flops:.2f}"
    return interval, join(text, not_compared(data, (a, b)))


def reward(data: Data) -> Claim:
    """Judge Fig. 1, top.

    Criterion: the mean paired difference GSPO - rival of the training reward over the last half of
    the common batches is above 0, or it is the same within ±0.03.
    """
    arms = contenders(data)
    rival = arms[1]
    interval, text = last_half(data, *arms)
    return Claim(
        as_in("Fig. 1, top", rival),
        f"GSPO trains to a higher reward than {NAMES_IN_WORDS[rival]} at equal compute",
        f"reward difference {text}",
        verdict(data, arms, interval, 0, SAME),
    )


def held_out_difference(data: Data) -> tuple[Interval, int, int] | None:
    """Return the difference of the held-out scores GSPO - rival, its batch, and how many sets.

    The scores are averaged over the sets at the last evaluation that all compared runs have. With a
    single seed the interval is ±1.96 standard errors over problems, with the arms' errors taken as
    independent. Return None if nothing was evaluated.
    """
    arms = contenders(data)
    differences = {}
    for name in scores(data):
        gspo, rival = data.paired(name, *arms)
        differences[name] = (gspo - rival).dropna()
    if not differences:
        return None
    steps = [set(table.index) for table in differences.values()]
    common_steps = set.intersection(*steps)
    if not common_steps:
        return None
    step = max(common_steps)
    sets = len(differences)
    values_S = np.mean([table.loc[step] for table in differences.values()], axis=0)
    interval = estimate(values_S[None, :])
    if interval.seeds == 1:
        errors = []
        for name in differences:
            errors += [table.loc[step] for table in data.paired(stderr_of(name), *arms)]
        error = float(np.sqrt(np.sum(np.square(errors)))) / sets
        half = NORMAL_QUANTILE * error
        interval = Interval(interval.mean, interval.mean - half, interval.mean + half)
    return interval, step, sets


def held_out(data: Data) -> Claim | None:
    """Judge Fig. 1, bottom. Return None if nothing was evaluated.

    Criterion: the paired difference of the held-out scores (`held_out_difference`) is above 0, or
    it is the same within ±0.03.
    """
    arms = contenders(data)
    difference = held_out_difference(data)
    if difference is None:
        return None
    interval, step, sets = difference
    text = f"difference at batch {step}, mean over {sets} held-out sets, {interval.text('+.3f')}"
    words = verdict(data, arms, interval, 0, SAME)
    return Claim(
        as_in("Fig. 1, bottom", arms[1]),
        "GSPO ends higher on the held-out benchmarks",
        join(text, not_compared(data, arms)),
        words.replace("within the single run", "over problems"),
    )


def scores(data: Data) -> list[str]:
    """Return the names of the held-out scores, eval/<set>/avg@k."""
    return [name for name in data.metrics("eval/") if fnmatchcase(name, "eval/*/avg@*")]


def reward_and_flops(data: Data) -> list[pd.DataFrame]:
    """Return reward and FLOPs of GSPO, then of its rival, for the compared runs.

    Each arm has its own length. While runs are unfinished, only the batches that all of them have
    are taken. So a run that was cut short is not mistaken for a run that fell short.
    """
    arms = contenders(data)
    runs = data.compared(*arms)
    all_finished = all(run.finished for run in runs)
    tables = []
    for arm in arms:
        last = min(run.last for run in runs if run.arm == arm or not all_finished)
        seeds = [run.seed for run in runs if run.arm == arm]
        for metric in ("reward/mean", "compute/flops"):
            tables.append(filled(data.table(arm, metric).loc[:last, seeds]))
    return tables


def compute_ratio(data: Data) -> Efficiency:
    """Return the compute efficiency of GSPO against its rival."""
    return efficiency(*reward_and_flops(data))


def paper_compute_ratio() -> float:
    """Return the ratio to the rival's whole run in the paper's digitised Fig. 1.

    A marker counts as one unit of compute.
    """
    curves = []
    for arm in (GSPO, GRPO_R2):
        points = paper.series("fig1_reward", arm).dropna()
        curves += [points.to_numpy(), points.index.to_numpy() + 1.0]
    return float(ratios(*curves)[0, 0])


def cheaper(data: Data) -> Claim:
    """Judge the efficiency shown in Fig. 1.

    Criterion: the compute at which the rival's trailing mean of 10 batches first reaches its own
    final reward, divided by the compute at which GSPO's does, is above 1. This is `like` in
    efficiency.py, which also defines p and the rule for a level that is not reached. The verdict is
    undecided if the rival ends no higher than it starts, since its level was then reached before
    training. The ratio to the rival's whole run is reported beside it.
    """
    arms = contenders(data)
    rival = arms[1]
    claim = f"GSPO reaches the final reward of {NAMES_IN_WORDS[rival]} with less compute"
    where = as_in("Fig. 1, efficiency", rival)
    tables = reward_and_flops(data)
    if any(table.isna().any(axis=None) for table in tables):
        return Claim(where, claim, "compute/flops was not recorded", "undecided (no compute)")
    result = efficiency(*tables)
    text = (
        f"compute ratio, like for like, {result.like.text()}; against the rival's whole run "
        f"{result.to_end.text()} (the paper's points: {paper_compute_ratio():.2f})"
    )
    rival_reward = tables[2]
    start = rival_reward.head(START).mean().mean()
    end = rival_reward.tail(WINDOW).mean().mean()
    if end <= start:
        words = "undecided (the rival ends no higher than it starts)"
    else:
        words = verdict(data, arms, result.like, 1)
    return Claim(where, claim, join(text, not_compared(data, arms)), words)


def clipping(data: Data) -> Claim:
    """Judge Fig. 2.

    Criterion: the share of clipped tokens (active: the clip removed the gradient), averaged over
    the common batches, divided by the rival's is at least 10, and above 1 by interval and p. It
    speaks against the claim if the ratio is below 10 by interval and p. The paper's ratio, 115, is
    reported but not tested. GSPO's own share gets no verdict if a calibrated clip range has chosen
    it.
    """
    arms = contenders(data)
    gspo, rival = data.paired("clip/token_active", *arms)
    result = ratio(gspo, rival)
    shares = f"{gspo.mean().mean():.2g} against {rival.mean().mean():.2g}"
    if not result.seeds:
        text = "clip/token_active was not recorded"
        words = "undecided (no shares)"
    elif np.isinf(result.mean):
        text = f"{shares} of tokens: GRPO clipped none, no ratio"
        words = "undecided (no ratio)"
    else:
        gspo_share = paper.series("fig2_clipped", GSPO)[0]
        rival_share = paper.series("fig2_clipped", GRPO_R2)[0]
        text = (
            f"{shares} of tokens, ratio {result.text('.3g')} {result.kind} "
            f"(paper: {gspo_share / rival_share:.0f})"
        )
        words = without_collapsed(data, arms) or judge_clipping(result)
    return Claim(
        "Fig. 2",
        "GSPO clips two orders of magnitude more tokens than GRPO",
        join(text + calibrated(data), not_compared(data, arms)),
        words,
    )


def judge_clipping(result: Interval) -> str:
    """Return the verdict on the ratio of the clipped shares."""
    if result.mean == 0:
        return "points against it (GSPO clipped none)"
    if result.high < TENFOLD:
        return judge(result, TENFOLD, "tenfold")
    if result.mean >= TENFOLD:
        return f"{judge(result, 1, '1')}; in the mean at least tenfold"
    if np.isnan(result.low):
        return "undecided (no interval)"
    return "undecided (interval includes tenfold)"


def calibrated(data: Data) -> str:
    """Return a remark if GSPO's clip range is not the paper's.

    Its share of clipped tokens was then chosen.
    """
    limits = data.of(GSPO)[0].clip_range
    if None in limits or limits == paper.CLIP_RANGES["gspo"]:
        return ""
    low, high = limits
    return (
        f"; GSPO's share is no finding: its clip range, {low:g} / {high:g}, is not the paper's but "
        "was chosen"
    )


def replay_helps(data: Data) -> Claim:
    """Judge Fig. 3 for runs without a decline.

    Criterion: the mean paired difference of the reward, with minus without Routing Replay, over the
    last half of the common batches is above 0, or it is the same within ±0.03.
    """
    interval, text = last_half(data, GRPO_R2, GRPO)
    return Claim(
        "Fig. 3",
        "GRPO reaches a higher reward with Routing Replay than without",
        f"reward difference {text}",
        verdict(data, (GRPO_R2, GRPO), interval, 0, SAME),
    )


def all_claims(data: Data) -> list[Claim]:
    """Return every claim that these runs can judge, in the paper's order.

    Claims about mixture-of-experts (MoE) models are judged on MoE runs alone.
    """
    claims: list[Claim | None] = []
    if why_not_comparable(data, contenders(data)) is None:
        claims += [reward(data), held_out(data), cheaper(data), clipping(data)]
    if why_not_comparable(data, (GRPO_R2, GRPO)) is None:
        claims += [stability_claims.collapse_without_replay(data), replay_helps(data)]
    if why_not_comparable(data, (GSPO,)) is None and all(run.moe for run in data.of(GSPO)):
        claims.append(stability_claims.stable(data))
    claims.append(stability_claims.experts_change(data))
    return [claim for claim in claims if claim is not None]
