"""The effect of the engine's log-probs on GSPO and GRPO: runs, numbers, the verdict in words.

fig_engine_likelihoods.py draws them. An arm is a precision, an objective, a replay, and the source
of the old log-probs. A cell is an arm without this source: its two arms are compared.
"""

from dataclasses import replace
from itertools import product

import pandas as pd

from gspo.analysis import load
from gspo.analysis.grid import run_numbers
from gspo.analysis.load import GRPO, GSPO, Data, Run
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import (
    LEVEL,
    START,
    WINDOW,
    Interval,
    estimate,
    number,
    paired_difference,
    ratio,
)

COARSE = "bfloat16"
FINE = "float32"
PLAIN = "no replay"
REPLAY = "R3"
TRAINER = "trainer"
ENGINE = "engine"
WORDS = {  # the settings that make an arm, and the words for their values
    "rollout.dtype": {"bfloat16": COARSE, "float32": FINE},
    "objective.name": {"gspo": GSPO, "grpo": GRPO},
    "policy.routing_replay": {"none": PLAIN, "r3": REPLAY},
    "policy.old_logprobs": {"step_start": TRAINER, "engine": ENGINE},
}
ARMS = tuple(product(*(words.values() for words in WORDS.values())))
# the pairs of arms that are compared: arms without the source of their log-probs
CELLS = tuple(dict.fromkeys(arm[:3] for arm in ARMS))
MEANS = {  # the metrics that are averaged over the batches of a run
    "outside, first": "clip/token_outside_minibatch_1",
    "outside, all": "clip/token_outside",
    "active, first": "clip/token_active_minibatch_1",
    "active, all": "clip/token_active",
    "k3": "mismatch/k3",
    "abs log s": "mismatch/sequence_log_abs",
    "F(2)": "mismatch/beyond_2",
    "agreement": "routing/engine_agreement",
    "grad norm": "optim/grad_norm",
}


# ------------------------------------------------------------------------------------------------
# runs
def arm_name(dtype: str, objective: str, *parts: str) -> str:
    """Return the name of an arm: the objective first, then the precision and the rest."""
    return ", ".join([objective, dtype, *parts])


def chosen(data: Data) -> Data:
    """Return the finished runs of the arms, renamed and cut to their common batches.

    A note says which runs are missing. Raises RunsError if no two arms can be compared.
    """
    runs: dict[tuple[str, int], Run] = {}
    seeds = set()
    for run in data.runs:
        words = tuple(names.get(run.settings.get(key)) for key, names in WORDS.items())
        if words not in ARMS:
            continue
        seeds.add(run.seed)
        if not run.finished:
            continue
        arm = arm_name(*words)
        other = runs.get((arm, run.seed))
        if other:
            raise RunsError(
                f"the same arm and seed twice ({arm}, seed {run.seed}): {other.path} and {run.path}"
            )
        runs[arm, run.seed] = replace(run, arm=arm)
    check_pairs(set(runs), seeds)
    shortest = min(runs.values(), key=lambda run: run.last)
    last = shortest.last
    minimum = START + WINDOW
    if last < minimum:
        raise RunsError(
            f"fig_engine_likelihoods needs {minimum} batches of every run; {shortest.path} has "
            f"{last}"
        )
    cut = []
    for run in runs.values():
        rows = run.rows[run.rows["step"] <= last]
        # so that all of them count as finished
        settings = run.settings | {"steps": last}
        cut.append(replace(run, rows=rows, settings=settings))
    notes = []
    differing = load.differing(cut)
    unexpected = [key for key in differing if key not in WORDS and not key.startswith("objective.")]
    if unexpected:
        notes.append(f"the runs differ also in {', '.join(unexpected)}")
    return Data(cut, notes + missing(set(runs), seeds))


def check_pairs(finished: set[tuple[str, int]], seeds: set[int]) -> None:
    """Raise RunsError unless some pair of arms has a finished seed in common."""
    for cell in CELLS:
        trainer = arm_name(*cell, TRAINER)
        engine = arm_name(*cell, ENGINE)
        for seed in seeds:
            if {(trainer, seed), (engine, seed)} <= finished:
                return
    arms = "; ".join(sorted({arm for arm, _ in finished})) or "none"
    raise RunsError(
        "fig_engine_likelihoods needs finished runs of gspo or grpo with "
        f"policy.old_logprobs=step_start and =engine, else alike, of one seed; found: {arms}"
    )


def missing(finished: set[tuple[str, int]], seeds: set[int]) -> list[str]:
    """Return no line, or a line that names the design's arms and seeds without finished run."""
    count = 0
    texts = []
    for words in ARMS:
        arm = arm_name(*words)
        gaps = [str(seed) for seed in sorted(seeds) if (arm, seed) not in finished]
        if gaps:
            count += len(gaps)
            texts.append(f"{arm}: {', '.join(gaps)}")
    if not texts:
        return []
    total = len(ARMS) * len(seeds)
    arms_and_seeds = "; ".join(texts)
    return [
        f"missing or unfinished, left out: {count} of {total} runs (arm: seeds): {arms_and_seeds}"
    ]


# ------------------------------------------------------------------------------------------------
# numbers
def measure(data: Data) -> pd.DataFrame:
    """Return a row per arm and seed: start, end and gain of the reward, and MEANS.

    A metric that was not reported is NaN.
    """
    arms = [arm_name(*words) for words in ARMS]
    rows = []
    for run in data.of(*arms):
        row = run_numbers(run, START, WINDOW, MEANS)
        rows.append(row | {"arm": run.arm})
    numbers = pd.DataFrame(rows)
    numbers["gain"] = numbers["end"] - numbers["start"]
    return numbers.set_index(["arm", "seed"])


def tables_of(data: Data, metric: str, *arms: tuple[str, ...]) -> list[pd.DataFrame] | None:
    """Return the metric of these arms for the seeds that all have, or None without such a seed."""
    names = tuple(arm_name(*arm) for arm in arms)
    return None if load.why_not_comparable(data, names) else data.paired(metric, *names)


def effect(data: Data, *cell: str) -> tuple[Interval, pd.Series] | None:
    """Return the reward with the engine's log-probs minus that with the trainer's.

    The result is the interval and the values of the seeds, or None if there are no pairs.
    """
    tables = tables_of(data, "reward/mean", (*cell, ENGINE), (*cell, TRAINER))
    if not tables:
        return None
    engine, trainer = tables
    difference = (engine - trainer).tail(WINDOW)
    return estimate(difference), difference.mean()


def contrast(data: Data, dtype: str, replay: str) -> tuple[Interval, pd.DataFrame] | None:
    """Return GSPO's effect minus GRPO's: the interval, and both effects by seed."""
    arms = [
        (dtype, GSPO, replay, ENGINE),
        (dtype, GSPO, replay, TRAINER),
        (dtype, GRPO, replay, ENGINE),
        (dtype, GRPO, replay, TRAINER),
    ]
    tables = tables_of(data, "reward/mean", *arms)
    if not tables:
        return None
    gspo_engine, gspo_trainer, grpo_engine, grpo_trainer = tables
    gspo = (gspo_engine - gspo_trainer).tail(WINDOW)
    grpo = (grpo_engine - grpo_trainer).tail(WINDOW)
    effects = pd.DataFrame({GSPO: gspo.mean(), GRPO: grpo.mean()})
    return paired_difference(gspo, grpo), effects


def clip_range(data: Data) -> tuple[float, float] | None:
    """Return GSPO's objective.clip_low and clip_high, or None if its runs differ or have none."""
    ranges = {run.clip_range for run in data.runs if run.arm.startswith(f"{GSPO},")}
    limits = ranges.pop() if len(ranges) == 1 else (None, None)
    return None if None in limits else limits


# ------------------------------------------------------------------------------------------------
# words
def verdict(data: Data) -> list[str]:
    """Return the results in words: the question, the noise floor, the clip, the gap."""
    lines = [answer(data, COARSE, replay) for replay in (PLAIN, REPLAY)]
    largest = []
    for cell in CELLS:
        result = effect(data, *cell)
        if cell[0] == FINE and result:
            _, by_seed = result
            largest.append(by_seed.abs().max())
    if largest:
        lines.append(
            "Noise floor: in float32, where only rounding differs, a single seed's effect is up to "
            f"{max(largest):.3f}: an effect of that size can be chance."
        )
    means = measure(data).groupby(level="arm").mean()
    limits = clip_range(data)
    for replay in (PLAIN, REPLAY):
        lines += clip_words(means, replay, limits)
    return lines + routing_words(data, GSPO) + routing_words(data, GRPO)


def answer(data: Data, dtype: str, replay: str) -> str:
    """Return in words whether GSPO loses less than GRPO.

    That takes an interval over seeds that excludes 0.
    """
    head = f"GSPO against GRPO, {dtype}, {replay}:"
    result = contrast(data, dtype, replay)
    if not result:
        return f"{head} not judged, its four arms have no finished seed in common."
    interval, effects = result
    p = interval.p()
    seeds = interval.seeds
    text = (
        f"{head} the engine's log-probs change the reward of the last {WINDOW} batches by "
        f"{effects[GSPO].mean():+.3f} with GSPO, by {effects[GRPO].mean():+.3f} with GRPO; "
        f"GSPO - GRPO {interval.text('+.3f')}"
    )
    if seeds == 1:
        return f"{text} (interval {interval.kind}). Not judged: one seed says nothing about others."
    text += (
        f" (95 % t interval over {seeds} seeds; exact sign-flip p = {p:.2g}: {seeds} seeds cannot "
        f"go below {2 / 2**seeds:.2g}). "
    )
    if interval.low <= 0 <= interval.high:
        return (
            f"{text}Not told apart: the interval includes 0, and any difference within it remains "
            "possible."
        )
    amount = "less (or gains more)" if interval.low > 0 else "more (or gains less)"
    if p < LEVEL:
        return f"{text}Told apart: GSPO loses {amount} than GRPO."
    return f"{text}Points to this: GSPO loses {amount} than GRPO; p is not below {LEVEL:g}."


def clip_words(means: pd.DataFrame, replay: str, limits: tuple[float, float] | None) -> list[str]:
    """Return in words the effects of bfloat16 on the clip.

    These are the effects on the first mini-batch's tokens and on the likelihood of sequences.
    """
    parts = []
    for objective in (GSPO, GRPO):
        arm = arm_name(COARSE, objective, replay, ENGINE)
        if arm in means.index:
            outside = share(means["outside, first"][arm])
            active = share(means["active, first"][arm])
            parts.append(f"{outside} of {objective}'s tokens ({active} clipped)")
    lines = []
    if parts:
        lines.append(
            f"First mini-batch, {COARSE}, {replay}, engine's log-probs, outside the clip range: "
            f"{', '.join(parts)}; with the trainer's 0 by construction."
        )
    arm = arm_name(COARSE, GSPO, replay, TRAINER)
    if limits and arm in means.index:
        low, high = limits
        gap = means["abs log s"][arm]
        lines.append(
            f"Gap, {COARSE}, {replay}, trainer's log-probs: mean |log s| {share(gap)}, "
            f"{share(gap / low)} times the lower side of GSPO's clip range (-{low:.2g}, "
            f"+{high:.2g})."
        )
    return lines


def routing_words(data: Data, objective: str) -> list[str]:
    """Return in words how much of the gap is due to routing, in bfloat16.

    That is 1 - (k3 with R3) / (k3 without).
    """
    replayed = (COARSE, objective, REPLAY, TRAINER)
    plain = (COARSE, objective, PLAIN, TRAINER)
    tables = tables_of(data, MEANS["k3"], replayed, plain)
    if not tables or any(table.isna().all(axis=None) for table in tables):
        return []
    with_replay, without = (table.mean().mean() for table in tables)
    rest = ratio(*tables)
    gone = Interval(1 - rest.mean, 1 - rest.high, 1 - rest.low)
    return [
        f"Routing, {objective}, {COARSE}, trainer's log-probs: k3 {without:.2g} without R3, "
        f"{with_replay:.2g} with: a share of {gone.text('.2f')} is gone (interval {rest.kind})."
    ]


def share(value: float, form: str = ".2g") -> str:
    return "0" if value == 0 else number(value, form)
