"""Computes the numbers of the article from the recorded rows, by the figures' functions.

Every number has a name, such as `A.4.ratio.plain`. The article's text and tables name numbers and
contain none themselves. article_entries.py says what an entry holds.
"""

from collections import Counter
from pathlib import Path

import pandas as pd

from gspo.analysis import (
    article_doses,
    claims,
    early_warning,
    fig_arena,
    fig_contrast,
    fig_critical_rate,
    load,
    rate_ratios,
    stability_claims,
    warning_rules,
    warning_table,
    warning_worth,
)
from gspo.analysis.article_doses import TWO_LOOKS
from gspo.analysis.article_entries import Numbers, percent
from gspo.analysis.load import GRPO, GRPO_R2, GSPO, Data
from gspo.analysis.sequential import Design
from gspo.analysis.stats import estimate, ratio, t_interval
from gspo.analysis.verdicts import direction

PAIRS = {"replay": (GSPO, GRPO_R2), "plain": (GSPO, GRPO), "none": (GRPO_R2, GRPO)}
PAPER_RANGE = f"{GRPO} [clip range 0.2]"
QUARTER_RANGE = f"{GRPO} [clip range 0.05]"
EDGE_STUDIES = (
    "comfortable",
    "paper_ranges",
    "edge_rate",
    "edge_rate_again",
    "beyond_edge",
    "paper_ranges_at_3.5e-4",
)
EFFECT_STUDIES = ("effect", "effect_comfortable", "effect_range")
CRITICAL_STUDIES = {
    "A.4": "critical_rate",
    "A.16": "critical_rate_16",
    "A.top1": "critical_rate_top1",
}
DECIDED = Design((20, 30, 40))
# the studies of a sequential design, whose looks are registered in experiments/STUDIES.md
SEQUENTIAL_STUDIES = {
    "decided.4": ("critical_rate_decided", DECIDED),
    "decided.16": ("critical_rate_decided_16", DECIDED),
    "decided.top1": ("critical_rate_decided_top1", DECIDED),
    "K": ("critical_rate_tools", TWO_LOOKS),
    "L": ("larger_model", TWO_LOOKS),
    "M": ("initial_networks", Design((20, 40))),
}
ARENA_TASKS = ("sums", "mixed", "tools")
ARENA_SETTINGS = ("comfortable", "edge", "sixteen", "stale")
ARENA_CELLS = tuple(f"{task}_{setting}" for task in ARENA_TASKS for setting in ARENA_SETTINGS)


# ------------------------------------------------------------------------------------------------
# studies
def collect(folder: Path) -> Numbers:
    """Return all numbers of the article from the recorded studies of a folder."""
    numbers = Numbers()
    edge(numbers, folder)
    calibration(numbers, folder)
    sums_alone(numbers, folder)
    effect(numbers, folder)
    for setting, name in CRITICAL_STUDIES.items():
        critical_rates(numbers, study(folder, name), setting)
    for setting, (name, design) in SEQUENTIAL_STUDIES.items():
        critical_rates(numbers, study(folder, name), setting, design)
    arena(numbers, folder)
    article_doses.add_all(numbers, folder)
    warnings(numbers, folder)
    counted = ("edge", "sums", "effect", *CRITICAL_STUDIES, "B", "C", "D", "E", "F", "H", "I")
    counted += (*SEQUENTIAL_STUDIES, "arena")
    total = sum(numbers.entries[f"{part}.runs"]["value"] for part in counted)
    numbers.count("total.runs", total)
    return numbers


def study(folder: Path, *names: str) -> Data:
    """Return the runs of recorded studies."""
    return load.load([folder / f"{name}.parquet" for name in names])


def edge(numbers: Numbers, folder: Path) -> None:
    """Add the comparisons at the edge: paired differences over the last half of the batches."""
    studies = {name: study(folder, name) for name in EDGE_STUDIES}
    studies["twenty"] = study(folder, "edge_rate", "edge_rate_again")
    for name, data in studies.items():
        key = f"edge.{name}"
        for pair, arms in PAIRS.items():
            interval, _ = claims.last_half(data, *arms)
            numbers.difference(f"{key}.{pair}", interval)
            p = interval.p_within(-claims.SAME, claims.SAME)
            numbers.add(f"{key}.{pair}.same", interval, "+.3f", p)
        shares = data.paired("clip/token_active", GSPO, GRPO_R2)
        clipped = ratio(*shares)
        numbers.add(f"{key}.clip", clipped, ".3g", clipped.p(1))
        held_out = claims.held_out_difference(data)
        if held_out is not None:
            numbers.difference(f"{key}.held_out", held_out[0])
    gains = fig_contrast.between(studies["paper_ranges"], studies["edge_rate"])
    numbers.difference("edge.own_range.replay", gains[GRPO_R2])
    numbers.difference("edge.own_range.plain", gains[GRPO])
    for arm, word in {GSPO: "gspo", GRPO_R2: "replay", GRPO: "grpo"}.items():
        falls = t_interval(stability_claims.declines(studies["beyond_edge"], arm))
        p = falls.p(stability_claims.MIN_DECLINE)
        numbers.add(f"edge.fall.{word}", percent(falls), ".0f", p, " %")
    for name in ("comfortable", "edge_rate"):
        falls = t_interval(stability_claims.declines(studies[name], GRPO))
        p = falls.p(stability_claims.MIN_DECLINE)
        numbers.add(f"edge.{name}.change", percent(falls, -100), "+.1f", p, " %")
        numbers.add(f"edge.{name}.fall", percent(falls), ".1f", p, " %")
    changes = [1 - studies["edge_rate"].table(arm, "routing/consistency") for arm in (GRPO, GSPO)]
    numbers.value("edge.changed", 100 * changes[0].mean().mean(), ".1f", " %")
    changed = estimate(pd.concat(changes).groupby(level="step").mean())
    p = changed.p(stability_claims.CHANGED[0])
    numbers.add("edge.changed.interval", percent(changed), ".2f", p, " %")
    p = changed.p(stability_claims.CHANGED[1])
    numbers.add("edge.changed.limit", percent(changed), ".2f", p, " %")
    # the GSPO runs of two studies are the same
    names = {run.path.name for name in EDGE_STUDIES for run in studies[name].runs}
    numbers.count("edge.runs", len(names))
    efficiency = claims.compute_ratio(studies["comfortable"]).like
    numbers.add("edge.comfortable.compute", efficiency, ".2f", efficiency.p(1))


def calibration(numbers: Numbers, folder: Path) -> None:
    """Add what four calibration seeds promised at 7e-4, each arm at its best clip range."""
    data = study(folder, "edge_calibration", "edge_ranges")
    runs = fig_critical_rate.measure(data)
    best = runs[runs["rate"] == 7e-4].pivot(index="seed", columns="arm", values="end")
    is_gspo = best.columns.str.startswith(GSPO)
    gspo = best.loc[:, is_gspo].mean().idxmax()
    grpo = f"{GRPO} [clip range 0.0125]"
    numbers.difference("calibration.plain", t_interval((best[gspo] - best[grpo]).dropna()))


def sums_alone(numbers: Numbers, folder: Path) -> None:
    """Add the 64 runs on sums alone: reward of the last fifth, differences, collapsed runs."""
    runs = fig_critical_rate.measure(study(folder, "math_edge"))
    ends = runs.pivot(index="seed", columns="arm", values="end")
    arms = {"gspo": GSPO, "replay": GRPO_R2, "grpo": PAPER_RANGE, "quarter": QUARTER_RANGE}
    for word, arm in arms.items():
        of_arm = runs[runs["arm"] == arm]
        numbers.add(f"sums.end.{word}", t_interval(of_arm["end"]), ".3f")
        numbers.count(f"sums.collapsed.{word}", of_arm["collapsed"].sum())
    numbers.difference("sums.replay", t_interval(ends[GSPO] - ends[GRPO_R2]))
    numbers.difference("sums.plain", t_interval(ends[GSPO] - ends[PAPER_RANGE]))
    numbers.difference("sums.quarter", t_interval(ends[GSPO] - ends[QUARTER_RANGE]))
    numbers.difference("sums.none", t_interval(ends[GRPO_R2] - ends[PAPER_RANGE]))
    numbers.count("sums.seeds", len(ends))
    numbers.count("sums.runs", len(runs))


def effect(numbers: Numbers, folder: Path) -> None:
    """Add the runs of `make reproduce`: paired differences over the last half of the batches."""
    edge, comfortable, narrow = (study(folder, name) for name in EFFECT_STUDIES)
    of_gspo, of_narrow = fig_contrast.completed([edge, narrow])
    for pair, arms in PAIRS.items():
        numbers.difference(f"effect.edge.{pair}", claims.last_half(edge, *arms)[0])
    same = {"comfortable": comfortable, "range": of_narrow}
    for name, data in same.items():
        interval, _ = claims.last_half(data, GSPO, GRPO_R2)
        p = interval.p_within(-claims.SAME, claims.SAME)
        numbers.add(f"effect.{name}.replay.same", interval, "+.3f", p)
        numbers.difference(f"effect.{name}.replay", interval)
    numbers.difference("effect.gain", fig_contrast.gains(of_gspo, of_narrow)[GRPO_R2])
    numbers.count("effect.runs", sum(len(data.runs) for data in (edge, comfortable, narrow)))


def critical_rates(
    numbers: Numbers, data: Data, setting: str, design: Design | None = None
) -> None:
    """Add the critical rates of a setting of study A or K, and the ratios of two arms' rates.

    In a sequential design the intervals have the level of the look.
    """
    runs = fig_critical_rate.measure(data)
    numbers.count(f"{setting}.runs", len(runs))
    counts, arms = rate_ratios.collapse_counts(runs)
    _, rates = rate_ratios.fit_pooled(counts)
    grpo = PAPER_RANGE if PAPER_RANGE in arms else GRPO
    words = {GSPO: "gspo", GRPO_R2: "replay", grpo: "grpo", QUARTER_RANGE: "quarter"}
    for arm, rate in zip(arms, rates, strict=True):
        numbers.value(f"{setting}.critical.{words[arm]}", 1e4 * rate, ".2f")
    ratios = rate_ratios.compare(runs, design)
    pairs = {
        "plain": (GSPO, grpo),
        "replay": (GSPO, GRPO_R2),
        "quarter": (GSPO, QUARTER_RANGE),
        "range": (QUARTER_RANGE, grpo),
        "none": (GRPO_R2, grpo),
    }
    for word, pair in pairs.items():
        rate_ratio = ratios.get(pair)
        # a ratio that is only bounded has no interval
        if rate_ratio and rate_ratio.measured:
            numbers.add(f"{setting}.ratio.{word}", rate_ratio.interval, ".2f", rate_ratio.p)


def arena(numbers: Numbers, folder: Path) -> None:
    """Add the arena: in each cell each arm minus GSPO at the level of the look; collapsed runs."""
    cells = []
    directions: Counter[str] = Counter()
    for cell in ARENA_CELLS:
        runs = fig_arena.measure(study(folder, f"arena_{cell}"), ["correction.name"])
        cells.append(runs)
        for row in fig_arena.paired(runs, GSPO, TWO_LOOKS).itertuples():
            numbers.difference(f"arena.{cell}.{row.arm}", row.interval)
            directions[direction(row.interval, claims.SAME)] += 1
    for word, count in directions.items():
        numbers.count(f"arena.{word}", count)
    numbers.count("arena.pairs", directions.total())
    runs = pd.concat(cells)
    numbers.count("arena.runs", len(runs))
    numbers.value("arena.hours", runs["hours"].sum(), ".1f")
    for arm, group in runs.groupby("arm"):
        numbers.count(f"arena.runs.{arm}", len(group))
        numbers.count(f"arena.collapsed.{arm}", group["collapsed"].sum())
    ranking = fig_arena.rank(runs)
    for (a, b), interval in ranking.comparisons.items():
        if GSPO in (a, b):
            rival = a if b == GSPO else b
            minus_gspo = fig_arena.signed(interval, 1 if rival == a else -1)
            numbers.add(f"arena.mean.{rival}", minus_gspo, "+.3f", ranking.p[a, b])
    for arm in ranking.arms:
        best, worst = ranking.ranks(arm)
        numbers.count(f"arena.best_rank.{arm}", best)
        numbers.count(f"arena.worst_rank.{arm}", worst)
    numbers.count("arena.ranked", len(ranking.arms))


def warnings(numbers: Numbers, folder: Path) -> None:
    """Add the worth of early warnings, on the stressors, and on them and 19 studies."""
    frame = pd.read_parquet(folder / early_warning.RECORDED.name)
    thresholds = early_warning.shipped(frame)
    stressed = warning_rules.stressor_runs(frame)
    together = warning_worth.worth(warning_rules.together(stressed, thresholds))
    numbers.count("W.runs", len(stressed))
    numbers.count("W.collapsed", sum(run.collapsed is not None for run in stressed))
    numbers.add("W.seen", together.seen, ".2f")
    numbers.add("W.lead", together.lead, ".0f")
    numbers.add("W.false", together.per_run, ".2f")
    runs = warning_rules.recorded_runs(frame)
    thresholds |= warning_rules.COUNTER_THRESHOLDS
    numbers.count("W.all", len(runs))
    numbers.count("W.all_collapsed", sum(run.collapsed is not None for run in runs))
    verdicts_by_word = {
        "any": warning_rules.together(runs, thresholds),
        "fall": warning_rules.as_shipped(runs, thresholds, "reward_fall"),
    }
    for word, verdicts in verdicts_by_word.items():
        worth = warning_worth.worth(verdicts)
        numbers.add(f"W.{word}.seen", worth.seen, ".2f")
        numbers.add(f"W.{word}.lead", worth.lead, ".0f")
        numbers.add(f"W.{word}.false", worth.per_run, ".2f")
    for rule in ("routing_drift", "entropy_rise", "reward_fall"):
        within = warning_worth.within_settings(runs, rule, warning_table.LEAD)
        numbers.add(f"W.within.{rule}", within, ".2f")
