"""The numbers of a dose study: a row per run, and the paired differences between arms and doses.

fig_dose.py draws them and says what a dose is.
"""

from collections.abc import Sequence
from dataclasses import replace
from numbers import Real

import pandas as pd

from gspo.analysis import load
from gspo.analysis.choosing import same_value
from gspo.analysis.grid import (
    ARM_WORDS,
    arm_words,
    check_alike,
    part_length,
    range_suffixes,
    refuse_repeated,
    run_numbers,
    settled_runs,
    value_of,
)
from gspo.analysis.load import GRPO, Data, Run
from gspo.analysis.runs import RunsError
from gspo.analysis.sequential import Design, level_of
from gspo.analysis.stats import LEVEL, NO_INTERVAL, Interval, t_interval

REWARD = "reward/mean"
# from (arm, the arm it is compared with) to a frame with columns position, level, seed, difference
Pairs = dict[tuple[str, str], pd.DataFrame]


def measure(
    data: Data,
    dose: list[str],
    metric: str,
    settings: list[str],
    also: Sequence[str] = (),
    outcome: str = REWARD,
) -> pd.DataFrame:
    """Return a row per run that has finished or collapsed, ordered by dose, arm and seed.

    The columns are level (of the dose, in words), label (of the level in a figure), position (of
    the level in their order), measured (its metric in the first fifth), objective, remedy, arm,
    seed, end (the mean of `outcome` in the last fifth of the batches), collapsed, and the means of
    `also`. Raises RunsError if a setting, the metric or the outcome is missing, or if runs of the
    same level and arm differ in anything else.
    """
    for name in (metric, *also, outcome):
        data.check_metric(name)
    runs = settled_runs(data, (*dose, *settings))
    rows = []
    for run in runs:
        part = part_length(run)
        row = run_numbers(run, part, part, {name: name for name in also})
        row |= arm_and_level(run, dose, settings)
        # held-out scores are not of every batch
        row["end"] = run.column(outcome).loc[run.last - part + 1 :].mean()
        row["measured"] = run.column(metric).loc[:part].mean()
        rows.append(row)
    numbers = pd.DataFrame(rows)
    suffixes = range_suffixes(runs, numbers, ["level"])
    numbers["arm"] += suffixes
    numbers["objective"] += suffixes
    if numbers["end"].isna().all():
        raise RunsError(f"no run reports {outcome} in the last fifth of its batches")
    refuse_repeated(numbers, ["level"], "name with arms=[...] what they differ in")
    for (level, arm), cell in numbers.groupby(["level", "arm"]):
        group = [runs[index] for index in cell.index]
        check_alike(group, (), "give fewer runs", f"the runs of {arm} at {level}")
    levels = order(numbers)
    numbers = numbers.assign(position=numbers["level"].map(levels.index))
    return numbers.sort_values(["position", "arm", "seed"])


def arm_and_level(run: Run, dose: list[str], settings: list[str]) -> dict[str, object]:
    """Return the level of a run's dose, its objective, its remedy, and the arm that these make."""
    level = value_of(run, dose[0])
    if len(dose) > 1:
        values = [str(value_of(run, key)) for key in dose]
        level = ", ".join(value for value in values if value != "none") or "none"
    label = level
    if all(key in ARM_WORDS for key in dose):
        label = ", ".join(arm_words(run, dose)) or level
    words = arm_words(run, settings)
    objective = load.base_arm(run.settings, with_replay=False)
    arm = load.base_arm(run.settings)
    if words:
        arm += f" [{', '.join(words)}]"
    remedy = arm.removeprefix(objective)
    return {"level": level, "label": label, "objective": objective, "remedy": remedy, "arm": arm}


def in_words(outcome: str) -> str:
    """Return the name of an outcome in tables and titles."""
    return "reward" if outcome == REWARD else outcome


def order(numbers: pd.DataFrame) -> list:
    """Return the levels of the dose from the least to the largest.

    Numbers are ordered by size, other levels by the measured metric.
    """
    if all(isinstance(level, Real) for level in numbers["level"]):
        return sorted(numbers["level"].unique())
    measured = numbers.groupby("level")["measured"].mean().fillna(0)
    return list(measured.sort_values().index)


def compared(numbers: pd.DataFrame, baseline: str = GRPO) -> tuple[Pairs, Pairs]:
    """Return the paired differences of the rewards at the end.

    First come the objectives minus `baseline`, then the remedies minus none. An objective with
    several clip ranges is an objective for each.
    """
    arms = numbers.drop_duplicates("arm")
    arm_of = arms.set_index(["objective", "remedy"])["arm"].to_dict()
    objectives: Pairs = {}
    remedies: Pairs = {}
    for row in arms.itertuples():
        rival = arm_of.get((baseline, row.remedy))
        if row.objective != baseline and rival:
            objectives[row.arm, rival] = differences(numbers, row.arm, rival)
        plain = arm_of.get((row.objective, ""))
        if row.remedy and plain:
            remedies[row.arm, plain] = differences(numbers, row.arm, plain)
    return objectives, remedies


def differences(numbers: pd.DataFrame, a: str, b: str) -> pd.DataFrame:
    """Return the differences a - b for the seeds that both arms have at a level.

    A run that collapsed before its outcome was measured has the difference NaN.
    """
    keys = ["position", "level", "seed"]
    runs = numbers.set_index(["arm", *keys])
    return shared_differences(runs.loc[a], runs.loc[b]).reset_index(name="difference")


def shared_differences(a_runs: pd.DataFrame, b_runs: pd.DataFrame) -> pd.Series:
    """Return the differences of `end` between runs of the same index, which both must have.

    A run without outcome is left out, unless it collapsed: then the difference is NaN.
    """
    shared = a_runs.index.intersection(b_runs.index)
    a_shared = a_runs.loc[shared]
    b_shared = b_runs.loc[shared]
    difference = a_shared["end"] - b_shared["end"]
    either_collapsed = a_shared["collapsed"] | b_shared["collapsed"]
    return difference[difference.notna() | either_collapsed]


def paired_interval(differences_S: pd.Series, error_rate: float) -> Interval:
    """Return the interval of differences. If one is NaN there is none: the rest is no fair sample."""
    if differences_S.isna().any():
        return replace(NO_INTERVAL, level=error_rate)
    return t_interval(differences_S, error_rate)


def intervals(
    pair: pd.DataFrame, design: Design | None = None
) -> list[tuple[int, object, Interval]]:
    """Return the position, the level and the interval of the difference at each level of the dose.

    In a sequential design the interval has the level of the look. Raises RunsError if the design
    has no look at the number of seeds."""
    points = []
    for (position, level), cell in pair.groupby(["position", "level"]):
        error_rate = level_of(design, len(cell), f"a pair at {level}") if design else LEVEL
        interval = paired_interval(cell["difference"], error_rate)
        points.append((position, level, interval))
    return points


def dose_differences(
    numbers: pd.DataFrame, design: Design | None = None, reference: str = ""
) -> pd.DataFrame:
    """Return a row per arm and dose: the difference to the arm's reference dose, paired by seed.

    The columns are arm, position, level, label, reference (its level) and interval. The reference
    is the arm's least dose, or the level `reference`. An arm that lacks it has no rows. Raises
    RunsError if no run has this level, or if a sequential design has no look at a pair's number of
    seeds.
    """
    by_position = numbers.drop_duplicates("position").set_index("position")
    levels = by_position["level"].to_dict()
    labels = by_position["label"].to_dict()
    chosen = []
    if reference:
        chosen = [position for position, level in levels.items() if same_value(level, reference)]
    if reference and not chosen:
        names = ", ".join(str(level) for level in levels.values())
        raise RunsError(f"reference={reference}: no run has this dose; there are {names}")
    rows = []
    for arm, runs in numbers.groupby("arm"):
        at_dose = {position: cell.set_index("seed") for position, cell in runs.groupby("position")}
        base = chosen[0] if chosen else min(at_dose)
        if base not in at_dose:
            continue
        for position in sorted(at_dose.keys() - {base}):
            paired = shared_differences(at_dose[position], at_dose[base])
            if len(paired):
                pair = f"{arm} at {levels[position]} and {levels[base]}"
                error_rate = level_of(design, len(paired), pair) if design else LEVEL
                row = {"arm": arm, "position": position, "level": levels[position]}
                row["label"] = labels[position]
                row["reference"] = levels[base]
                row["interval"] = paired_interval(paired, error_rate)
                rows.append(row)
    columns = ["arm", "position", "level", "label", "reference", "interval"]
    return pd.DataFrame(rows, columns=columns)
