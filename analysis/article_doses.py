"""The numbers of the article's dose studies, B to I. doses.py says what a dose study is."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from gspo.analysis import doses, load
from gspo.analysis.article_entries import Numbers
from gspo.analysis.load import GRPO, GRPO_R2, GSPO, GSPO_TOKEN
from gspo.analysis.sequential import Design, level_of
from gspo.analysis.stats import t_interval

TWO_LOOKS = Design((10, 20))  # of studies H, I and K, and of the arena
ENGINE = "engine's log-probs"
HEAD = "bfloat16"  # bfloat16 layers under a float32 head
ALL_BFLOAT16 = "bfloat16, head too"
BFLOAT16_ENGINE = f"bfloat16, {ENGINE}"
PRECISIONS = {"head": HEAD, "all": ALL_BFLOAT16, "engine": BFLOAT16_ENGINE}
ALL_TOKENS = "GSPO, all tokens"
FLOAT32 = "float32, float32, step_start"
# the precisions of study I in its levels, by their names in PRECISIONS
ARENA_PRECISIONS = {
    "bfloat16, float32, step_start": "head",
    "bfloat16, bfloat16, step_start": "all",
    "bfloat16, float32, engine": "engine",
}
RATES_OF_H = {"low": "0.0002", "high": "0.00047"}
TOP_P = {"p90": "0.9", "p95": "0.95", "p99": "0.99"}
CLIPPED = "clip/token_active"
HELD_OUT = "eval/math_hard/avg@4"
HALF = 0.5
ENOUGH = 0.1  # of the clip range: less rounding than this is no matter


@dataclass(frozen=True)
class Dose:
    """A study of a dose: its file, and what doses.py needs to know about it."""

    study: str
    dose: tuple[str, ...]
    measured: str
    arms: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


DOSES = {
    "B": Dose("fixed_minibatch", ("trainer.minibatches",), "kl/old_k3"),
    "C": Dose(
        "mismatch_dose",
        ("rollout.quantization",),
        "mismatch/beyond_2",
        ("policy.old_logprobs", "correction.name"),
    ),
    "D": Dose(
        "routing_dose",
        ("optim.router_lr_factor",),
        "routing/consistency_after_step",
        ("policy.freeze_router",),
    ),
    "E": Dose(
        "observation_share",
        ("task.log",),
        "episode/environment_tokens",
        also=("clip/token_active",),
    ),
    "F": Dose(
        "bfloat16",
        ("optim.lr",),
        "ratio/floor_of_range",
        ("policy.precision", "policy.head_dtype", "policy.old_logprobs"),
        ("clip/token_outside", "ratio/floor_outside", "ratio/floor_of_range"),
    ),
    "H": Dose(
        "sampling_mask",
        ("optim.lr", "rollout.top_p"),
        "clip/token_outside",
        ("rollout.keep_mask",),
    ),
    "I": Dose(
        "arena_bfloat16",
        ("policy.precision", "policy.head_dtype", "policy.old_logprobs"),
        "mismatch/logp_abs",
        ("correction.name",),
    ),
}


def add_all(numbers: Numbers, folder: Path) -> None:
    """Add the numbers of all dose studies from the recorded studies of a folder."""
    staleness(numbers, measured("B", folder))
    mismatch(numbers, measured("C", folder))
    routing(numbers, measured("D", folder))
    tools(numbers, measured("E", folder))
    rounding(numbers, measured("F", folder))
    sampling_mask(numbers, measured("H", folder), measured("H", folder, HELD_OUT))
    arena_rounding(numbers, measured("I", folder), measured("I", folder, CLIPPED))


def measured(letter: str, folder: Path, outcome: str = doses.REWARD) -> pd.DataFrame:
    """Return a row per run of a dose study, as doses.py measures it."""
    dose = DOSES[letter]
    data = load.load([folder / f"{dose.study}.parquet"])
    return doses.measure(data, list(dose.dose), dose.measured, list(dose.arms), dose.also, outcome)


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
    numbers.count("B.long", runs["can_collapse"].sum())


def mismatch(numbers: Numbers, runs: pd.DataFrame) -> None:
    """Add study C: engines whose weights have few bits, and four remedies."""
    ends = ends_of(runs)
    shares = runs.groupby("level")["measured"].mean()
    got = runs.groupby(["arm", "level"])["measured"].mean()
    for level in ("fp4_e2m1", "int3", "int2"):
        numbers.value(f"C.share.{level}", 100 * shares[level], ".1g", " %")
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
    changed = 1 - runs.groupby("level")["measured"].mean()
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
    got = runs.groupby("level")["measured"].mean()
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
    floors = ends_of(runs, "measured")  # of the first fifth of the batches
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


def sampling_mask(numbers: Numbers, rewards: pd.DataFrame, scores: pd.DataFrame) -> None:
    """Add study H: truncated sampling, and the sampling mask minus none, with the look's level."""
    level = level_of(TWO_LOOKS, rewards["seed"].nunique())
    ends = ends_of(rewards)
    held_out = ends_of(scores)
    for rate, lr in RATES_OF_H.items():
        for word, top_p in TOP_P.items():
            key = f"H.{rate}.{word}"
            dose = f"{lr}, {top_p}"
            for arm in (GSPO, GRPO):
                masked = f"{arm} [sampling mask]"
                gain = t_interval(ends[masked, dose] - ends[arm, dose], level)
                numbers.difference(f"{key}.reward.{arm}", gain)
                harm = t_interval(held_out[masked, dose] - held_out[arm, dose], level)
                numbers.difference(f"{key}.held_out.{arm}", harm)
                cut = t_interval(held_out[arm, dose] - held_out[arm, f"{lr}, 1.0"], level)
                numbers.difference(f"{key}.cut.{arm}", cut)
    numbers.count("H.runs", len(rewards))


def arena_rounding(numbers: Numbers, rewards: pd.DataFrame, clipped: pd.DataFrame) -> None:
    """Add study I: each arm in bfloat16 minus itself in float32, with the look's level."""
    for outcome, runs in {"reward": rewards, "clip": clipped}.items():
        differences = doses.dose_differences(runs, TWO_LOOKS, FLOAT32)
        for row in differences.itertuples():
            precision = ARENA_PRECISIONS[row.level]
            numbers.difference(f"I.{precision}.{outcome}.{row.arm}", row.interval)
    numbers.count("I.runs", len(rewards))
