"""The numbers of the article (article.py), computed from the recorded rows by the figures' functions.

Every number has a name, such as `A.4.ratio.plain`. The article's text and tables name numbers and
contain none themselves. article_entries.py says what an entry holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from gspo.analysis import (
    claims,
    doses,
    early_warning,
    fig_arena,
    fig_contrast,
    fig_critical_rate,
    foresight,
    load,
    stability_claims,
    warning_rules,
    warning_table,
    warning_worth,
)
from gspo.analysis.article_entries import Numbers, percent
from gspo.analysis.load import GRPO, GRPO_R2, GSPO, GSPO_TOKEN, Data
from gspo.analysis.sequential import Design
from gspo.analysis.stats import estimate, ratio, t_interval

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
# the studies of a sequential design, whose looks are registered in experiments/STUDIES.md
SEQUENTIAL_STUDIES = {
    "decided.4": ("critical_rate_decided", Design((20, 30, 40))),
    "K": ("critical_rate_tools", Design((10, 20))),
}
ARENA_CELLS = ("tools_edge",)
ARENA_DESIGN = Design((10, 20))
ENGINE = "engine's log-probs"
HEAD = "bfloat16"  # bfloat16 layers under a float32 head
ALL_BFLOAT16 = "bfloat16, head too"
BFLOAT16_ENGINE = f"bfloat16, {ENGINE}"
PRECISIONS = {"head": HEAD, "all": ALL_BFLOAT16, "engine": BFLOAT16_ENGINE}
ALL_TOKENS = "GSPO, all tokens"
HALF = 0.5
ENOUGH = 0.1  # of the clip range: less rounding than this is no matter


@dataclass(frozen=True)
class Dose:
    """A study of a dose: its file, and what doses.py needs to know about it."""

    study: str
    dose: str
    measured: str
    arms: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


DOSES = {
    "B": Dose("fixed_minibatch", "trainer.minibatches", "kl/old_k3"),
    "C": Dose(
        "mismatch_dose",
        "rollout.quantization",
        "mismatch/beyond_2",
        ("policy.old_logprobs", "correction.name"),
    ),
    "D": Dose(
        "routing_dose",
        "optim.router_lr_factor",
        "routing/consistency_after_step",
        ("policy.freeze_router",),
    ),
    "E": Dose(
        "observation_share",
        "task.log",
        "episode/environment_tokens",
        also=("clip/token_active",),
    ),
    "F": Dose(
        "bfloat16",
        "optim.lr",
        "ratio/floor_of_range",
        ("policy.precision", "policy.head_dtype", "policy.old_logprobs"),
        ("clip/token_outside", "ratio/floor_outside", "ratio/floor_of_range"),
    ),
}


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
    for cell in ARENA_CELLS:
        arena_cell(numbers, study(folder, f"arena_{cell}"), cell)
    staleness(numbers, measured("B", folder))
    mismatch(numbers, measured("C", folder))
    routing(numbers, measured("D", folder))
    tools(numbers, measured("E", folder))
    rounding(numbers, measured("F", folder))
    warnings(numbers, folder)
    arena = [f"arena.{cell}" for cell in ARENA_CELLS]
    counted = ("edge", "sums", "effect", *CRITICAL_STUDIES, "B", "C", "D", "E", "F")
    counted += (*SEQUENTIAL_STUDIES, *arena)
    total = sum(numbers.entries[f"{part}.runs"]["value"] for part in counted)
    numbers.count("total.runs", total)
    return numbers


def study(folder: Path, *names: str) -> Data:
    """Return the runs of recorded studies."""
    return load.load([folder / f"{name}.parquet" for name in names])


def measured(letter: str, folder: Path) -> pd.DataFrame:
    """Return a row per run of a dose study, as doses.py measures it."""
    dose = DOSES[letter]
    data = study(folder, dose.study)
    return doses.measure(data, [dose.dose], dose.measured, list(dose.arms), dose.also)


def edge(numbers: Numbers, folder: Path) -> None:
    """Add the comparisons at the edge: paired differences over the last half of the batches."""
    studies = {name: study(folder, name) for name in EDGE_STUDIES}
    studies["twenty"] = study(folder, "edge_rate", "edge_rate_again")
    for name, data in studies.items():
        key = f"edge.{name}"
        for pair, arms in PAIRS.items():
            interval, _ = claims.last_half(data, *arms)
            numbers.difference(f"{key}.{pair}", interval)
            p = max(interval.p(-claims.SAME), interval.p(claims.SAME))
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
    gspo = next(arm for arm in best if arm.startswith(GSPO) and best[arm].mean() > 0.2)
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
        p = max(interval.p(-claims.SAME), interval.p(claims.SAME))
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
    counts, arms = fig_critical_rate.counted(runs)
    _, rates = fig_critical_rate.fit_pooled(counts)
    grpo = PAPER_RANGE if PAPER_RANGE in arms else GRPO
    words = {GSPO: "gspo", GRPO_R2: "replay", grpo: "grpo", QUARTER_RANGE: "quarter"}
    for arm, rate in zip(arms, rates, strict=True):
        numbers.value(f"{setting}.critical.{words[arm]}", 1e4 * rate, ".2f")
    ratios = fig_critical_rate.compare(runs, design)
    pairs = {
        "plain": (GSPO, grpo),
        "replay": (GSPO, GRPO_R2),
        "quarter": (GSPO, QUARTER_RANGE),
        "range": (QUARTER_RANGE, grpo),
        "none": (GRPO_R2, grpo),
    }
    for word, pair in pairs.items():
        if pair in ratios:
            interval, p = ratios[pair]
            numbers.add(f"{setting}.ratio.{word}", interval, ".2f", p)


def arena_cell(numbers: Numbers, data: Data, cell: str) -> None:
    """Add a cell of the arena: each arm minus GSPO at the level of the look, and its collapses."""
    runs = fig_arena.measure(data, ["correction.name"])
    key = f"arena.{cell}"
    numbers.count(f"{key}.runs", len(runs))
    numbers.value(f"{key}.hours", runs["hours"].sum(), ".1f")
    for row in fig_arena.paired(runs, GSPO, ARENA_DESIGN).itertuples():
        numbers.difference(f"{key}.{row.arm}", row.interval)
    for arm, group in runs.groupby("arm"):
        numbers.count(f"{key}.collapsed.{arm}", group["collapsed"].sum())


def ends_of(runs: pd.DataFrame, column: str = "end") -> pd.DataFrame:
    """Return a column of the runs by seed, for each arm and level of the dose."""
    return runs.pivot(index="seed", columns=["arm", "level"], values=column)


def staleness(numbers: Numbers, runs: pd.DataFrame) -> None:
    """Add study B: GSPO minus GRPO at each number of mini-batches, and what the number costs."""
    ends = ends_of(runs)
    for level in sorted(runs["level"].unique()):
        difference = ends[GSPO, level] - ends[GRPO, level]
        numbers.difference(f"B.plain.{level}", t_interval(difference))
    for arm in sorted(runs["arm"].unique()):
        word = "replay" if arm == GRPO_R2 else arm
        loss = ends[arm, 2] - ends[arm, 32]
        numbers.difference(f"B.loss.{word}", t_interval(loss), ".3f")
        for level in (2, 4):
            if arm != GRPO:
                difference = t_interval(ends[arm, level] - ends[GRPO, level])
                numbers.difference(f"B.{word}.{level}", difference)
    numbers.count("B.runs", len(runs))
    numbers.count("B.collapsed", runs["collapsed"].sum())


def mismatch(numbers: Numbers, runs: pd.DataFrame) -> None:
    """Add study C: engines whose weights have few bits, and four remedies."""
    ends = ends_of(runs)
    doses = runs.groupby("level")["got"].mean()
    got = runs.groupby(["arm", "level"])["got"].mean()
    for level in ("fp4_e2m1", "int3", "int2"):
        numbers.value(f"C.share.{level}", 100 * doses[level], ".1g", " %")
        removed = 1 - got[f"{GRPO} + Routing Replay (R3)", level] / got[GRPO, level]
        numbers.value(f"C.removed.{level}", 100 * removed, ".0f", " %")
        for objective in (GSPO, GRPO):
            for word, remedy in {"none": "", "engine": f" [{ENGINE}]", "tis": " [TIS]"}.items():
                arm = objective + remedy
                harm = t_interval(ends[arm, level] - ends[arm, "none"])
                numbers.difference(f"C.harm.{word}.{objective}.{level}", harm)
            for word, remedy in {"tis": "[TIS]", "r3": "+ Routing Replay (R3)"}.items():
                gain = t_interval(ends[f"{objective} {remedy}", level] - ends[objective, level])
                numbers.difference(f"C.{word}.{objective}.{level}", gain)
        cost = {}
        for objective in (GSPO, GRPO):
            arm = f"{objective} [{ENGINE}]"
            cost[objective] = ends[arm, level] - ends[arm, "none"]
        numbers.difference(f"C.most.{level}", t_interval(cost[GSPO] - cost[GRPO]))
        for word, remedy in {"engine": f" [{ENGINE}]", "tis": " [TIS]"}.items():
            difference = ends[GSPO + remedy, level] - ends[GRPO + remedy, level]
            numbers.difference(f"C.plain.{word}.{level}", t_interval(difference))
    for objective in (GSPO, GRPO):
        off = runs[(runs["arm"] == f"{objective} [{ENGINE}]") & (runs["level"] != "none")]
        numbers.count(f"C.collapsed.{objective}", off["collapsed"].sum())
    numbers.count("C.collapsed.of", len(off))
    numbers.count("C.runs", len(runs))


def routing(numbers: Numbers, runs: pd.DataFrame) -> None:
    """Add study D: routers that learn 1 to 60 times as fast as the other weights."""
    ends = ends_of(runs)
    changed = 1 - runs.groupby("level")["got"].mean()
    for level in (1, 14, 60):
        numbers.value(f"D.changed.{level}", 100 * changed[level], ".1f", " %")
    for level in (14, 60):
        loss = t_interval(ends[GRPO, 1] - ends[GRPO, level])
        numbers.difference(f"D.loss.{level}", loss, ".3f")
        loss = t_interval(ends[GSPO, 1] - ends[GSPO, level])
        numbers.difference(f"D.loss.GSPO.{level}", loss, ".3f")
        gain = t_interval(ends[GRPO_R2, level] - ends[GRPO, level])
        numbers.difference(f"D.replay.{level}", gain)
        numbers.difference(f"D.plain.{level}", t_interval(ends[GSPO, level] - ends[GRPO, level]))
        replayed = f"{GSPO} + Routing Replay (R2)"
        gain = t_interval(ends[replayed, level] - ends[GSPO, level])
        numbers.difference(f"D.gspo_replay.{level}", gain)
    numbers.difference("D.plain.1", t_interval(ends[GSPO, 1] - ends[GRPO, 1]))
    for objective in (GSPO, GRPO):
        frozen = t_interval(ends[f"{objective} [frozen router]", 1] - ends[objective, 1])
        numbers.difference(f"D.frozen.{objective}", frozen)
    fastest = runs[runs["level"] == 60]
    numbers.count("D.collapsed", fastest["collapsed"].sum())
    numbers.count("D.collapsed.of", len(fastest))
    alone = fastest[fastest["arm"] == GSPO]
    numbers.count("D.collapsed.GSPO", alone["collapsed"].sum())
    numbers.count("D.collapsed.GSPO.of", len(alone))
    numbers.count("D.runs", len(runs))


def tools(numbers: Numbers, runs: pd.DataFrame) -> None:
    """Add study E: a tool that writes a tenth, half or nine tenths of the tokens."""
    ends = ends_of(runs)
    shares = ends_of(runs, "clip/token_active")
    got = runs.groupby("level")["got"].mean()
    for level in (0, 28, 290):
        numbers.value(f"E.share.{level}", 100 * got[level], ".0f", " %")
        for word, arm in {"grpo": GRPO, "token": GSPO_TOKEN, "cispo": "CISPO"}.items():
            difference = t_interval(ends[arm, level] - ends[GSPO, level])
            numbers.difference(f"E.{word}.{level}", difference)
        cost = t_interval(ends[GSPO, level] - ends[ALL_TOKENS, level])
        numbers.difference(f"E.mistake.{level}", cost, ".3f")
        remaining = t_interval(shares[ALL_TOKENS, level] / shares[GSPO, level])
        above_half = shares[ALL_TOKENS, level] - HALF * shares[GSPO, level]
        numbers.difference(f"E.below_half.{level}", t_interval(above_half))
        numbers.add(f"E.clip.{level}", remaining, ".2f", t_interval(above_half).p())
    numbers.count("E.runs", len(runs))


def rounding(numbers: Numbers, runs: pd.DataFrame) -> None:
    """Add study F: bfloat16 layers, a bfloat16 head, the engine's log-probs, against float32."""
    ends = ends_of(runs)
    floors = ends_of(runs, "got")  # of the first fifth of the batches
    all_floors = ends_of(runs, "ratio/floor_of_range")
    outside = ends_of(runs, "ratio/floor_outside")
    clipped = ends_of(runs, "clip/token_outside")
    for rate, word in {2e-4: "low", 4.7e-4: "high"}.items():
        for precision, name in PRECISIONS.items():
            key = f"F.{word}.{precision}"
            arm = f"{GSPO} [{name}]"
            floor = t_interval(floors[arm, rate])
            numbers.add(f"{key}.floor", floor, ".2f", floor.p(ENOUGH))
            numbers.value(f"{key}.outside", 100 * outside[arm, rate].mean(), ".0f", " %")
            share = t_interval(clipped[arm, rate] - clipped[GSPO, rate])
            numbers.difference(f"{key}.clipped", share)
            for objective in (GSPO, GSPO_TOKEN, GRPO, "CISPO"):
                change = ends[f"{objective} [{name}]", rate] - ends[objective, rate]
                numbers.difference(f"{key}.reward.{objective}", t_interval(change))
        for objective in (GSPO, GSPO_TOKEN):
            for part, table in {"help": all_floors, "help_first": floors}.items():
                with_head = table[f"{objective} [{HEAD}]", rate]
                without = table[f"{objective} [{ALL_BFLOAT16}]", rate]
                name = f"F.{word}.{part}.{objective}"
                numbers.difference(name, t_interval(without - with_head))
    numbers.count("F.runs", len(runs))
    numbers.count("F.collapsed", runs["collapsed"].sum())


def warnings(numbers: Numbers, folder: Path) -> None:
    """Add the worth of early warnings, on the stressed runs and on all recorded runs."""
    frame = pd.read_parquet(folder / early_warning.RECORDED.name)
    thresholds = early_warning.shipped(frame)
    stressed = foresight.histories(frame)
    together = foresight.alarm(stressed, thresholds)
    numbers.count("W.runs", len(stressed))
    numbers.count("W.collapsed", sum(run.collapsed is not None for run in stressed))
    numbers.add("W.seen", together.seen, ".2f")
    numbers.add("W.lead", together.lead, ".0f")
    numbers.add("W.false", together.false, ".2f")
    runs = warning_rules.recorded_runs(frame)
    thresholds |= warning_rules.COUNTER_THRESHOLDS
    numbers.count("W.all", len(runs))
    numbers.count("W.all_collapsed", sum(run.collapsed is not None for run in runs))
    shipped = {
        "any": warning_rules.together(runs, thresholds),
        "fall": warning_rules.as_shipped(runs, thresholds, "reward_fall"),
    }
    for word, verdicts in shipped.items():
        worth = warning_worth.worth(verdicts)
        numbers.add(f"W.{word}.seen", worth.seen, ".2f")
        numbers.add(f"W.{word}.lead", worth.lead, ".0f")
        numbers.add(f"W.{word}.false", worth.per_run, ".2f")
    for rule in ("routing_drift", "entropy_rise", "reward_fall"):
        within = warning_worth.within_settings(runs, rule, warning_table.LEAD)
        numbers.add(f"W.within.{rule}", within, ".2f")
