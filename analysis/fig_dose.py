"""A dose: does more of something cost the reward, and which objective withstands it longer?

    gspo figure dose runs/routing_dose dose=optim.router_lr_factor \\
        measured=routing/consistency_after_step arms=policy.freeze_router
    gspo figure dose runs/mismatch_dose dose=[rollout.dtype,rollout.quantization] \\
        measured=mismatch/beyond_2 arms=[correction.name,policy.old_logprobs]
    gspo figure dose runs/observation_share dose=task.log measured=episode/environment_tokens \\
        against=gspo also=clip/token_active

The metric `measured` is read in the first fifth of the batches, before any run sinks. Arms are the
objectives with their Routing Replay, and with the settings of `arms`.

Above: the reward at the end, and the share of collapsed runs. Below, paired by seed: every
objective minus GRPO (or the objective `against`) with the same remedy, and every remedy minus
none of the same objective. Prints Markdown tables of all of it, with the means of the metrics
`also`, and of each dose minus the least dose or the dose `reference`. The outcome is the reward, or
the metric `outcome`. With looks=[10,20] the runs are a sequential design, whose differences have the
level of the look (sequential.py). Writes fig_dose_<study>.pdf and .png. Metrics: reward/mean and the
named metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from gspo.analysis import load, script, style
from gspo.analysis.arm_styles import ArmStyles, arm_styles
from gspo.analysis.blocks import markdown_table
from gspo.analysis.choosing import same_value
from gspo.analysis.grid import (
    arm_words,
    cell_intervals,
    check_alike,
    collapsed_count,
    difference_cells,
    interval_line,
    part_length,
    range_suffixes,
    run_numbers,
    settled_runs,
    span,
)
from gspo.analysis.load import GRPO, OBJECTIVES, Data, Run
from gspo.analysis.runs import RunsError
from gspo.analysis.sequential import Design, chosen_design, level_of
from gspo.analysis.stats import LEVEL, Interval, t_interval
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.analysis.verdicts import direction
from gspo.io.arguments import command_options, option

REFUSED = script.DOTS | script.NO_CURVES
REWARD = "reward/mean"
# from (arm, the arm it is compared with) to a frame with columns position, level, seed, difference
Pairs = dict[tuple[str, str], pd.DataFrame]


@dataclass(frozen=True, kw_only=True)
class Options(script.Options):
    """The options of this figure."""

    dose: tuple[str, ...] = option(
        meaning="the setting that was varied, or the settings that stand for the dose together"
    )
    measured: str = option(meaning="the metric that says how much of it the runs got")
    arms: tuple[str, ...] = option((), "settings that make an arm besides objective and replay")
    against: str = option(
        "grpo", "the objective that the others are compared with", choices=tuple(OBJECTIVES)
    )
    also: tuple[str, ...] = option((), "metrics whose means the table shows")
    outcome: str = option(REWARD, "the metric that is compared at the end of the runs")
    looks: tuple[int, ...] = option((), "numbers of seeds at which a sequential design is judged")
    same: float = option(0.03, "two outcomes within this difference are the same", least=0)
    reference: str = option(
        "", "the dose that the other doses are compared with; the least if empty"
    )


def main() -> None:
    options = command_options(Options, __doc__, REFUSED)
    design = chosen_design(options.looks)
    data = script.read(options, notes=False)
    script.print_notes(data, "unfinished", "left out", "lost")
    numbers = measure(
        data, options.dose, options.measured, options.arms, options.also, options.outcome
    )
    baseline = OBJECTIVES[options.against]
    paths = draw(
        data,
        numbers,
        options.dose,
        options.measured,
        options.out,
        options,
        baseline=baseline,
        also=options.also,
        outcome=options.outcome,
        design=design,
    )
    script.print_lines(
        table(numbers, options.dose, options.measured, options.also, options.outcome),
        difference_table(numbers, baseline, options.outcome, design, options.same),
        dose_table(numbers, options.outcome, design, options.same, options.reference),
        paths,
    )


# ------------------------------------------------------------------------------------------------
# numbers
def measure(
    data: Data,
    dose: list[str],
    metric: str,
    settings: list[str],
    also: Sequence[str] = (),
    outcome: str = REWARD,
) -> pd.DataFrame:
    """Return a row per run that has finished or collapsed, ordered by dose, arm and seed.

    The columns are level (of the dose, in words), position (of the level in their order), got (the
    measured metric), objective, remedy, arm, seed, end (the mean of `outcome` in the last fifth of
    the batches), collapsed, and the means of `also`. Raises RunsError if a setting, the metric
    or the outcome is missing, or if runs of the same level and arm differ in anything else.
    """
    for name in (metric, *also, outcome):
        data.check_metric(name)
    runs = settled_runs(data, (*dose, *settings))
    rows = []
    for run in runs:
        part = part_length(run)
        row = run_numbers(run, part, part, {name: name for name in also})
        row |= arm_and_level(run, dose, settings)
        row["end"] = run.column(outcome).tail(part).mean()
        row["got"] = run.column(metric).loc[:part].mean()
        rows.append(row)
    numbers = pd.DataFrame(rows)
    suffixes = range_suffixes(runs, numbers, ["level"])
    numbers["arm"] += suffixes
    numbers["objective"] += suffixes
    if numbers["end"].isna().all():
        raise RunsError(f"no run reports {outcome} in the last fifth of its batches")
    for (level, arm), cell in numbers.groupby(["level", "arm"]):
        repeated = cell[cell.duplicated("seed")]
        if len(repeated):
            raise RunsError(
                f"two runs of {arm} at {level}, seed {repeated.iloc[0]['seed']}: "
                "name with arms=[...] what they differ in"
            )
        group = [runs[index] for index in cell.index]
        check_alike(group, (), "give fewer runs", f"the runs of {arm} at {level}")
    levels = order(numbers)
    numbers = numbers.assign(position=numbers["level"].map(levels.index))
    return numbers.sort_values(["position", "arm", "seed"])


def arm_and_level(run: Run, dose: list[str], settings: list[str]) -> dict[str, object]:
    """Return the level of a run's dose, its objective, its remedy, and the arm that these make."""
    level = run.settings[dose[0]]
    if len(dose) > 1:
        values = [str(run.settings[key]) for key in dose]
        level = ", ".join(value for value in values if value != "none")
    words = arm_words(run, settings)
    objective = load.base_arm(run.settings, with_replay=False)
    arm = load.base_arm(run.settings)
    if words:
        arm += f" [{', '.join(words)}]"
    remedy = arm.removeprefix(objective)
    return {"level": level, "objective": objective, "remedy": remedy, "arm": arm}


def in_words(outcome: str) -> str:
    """Return the name of an outcome in tables and titles."""
    return "reward" if outcome == REWARD else outcome


def order(numbers: pd.DataFrame) -> list:
    """Return the levels of the dose from the least to the largest.

    Numbers are ordered by size, other levels by the measured metric.
    """
    if all(isinstance(level, Real) for level in numbers["level"]):
        return sorted(numbers["level"].unique())
    measured = numbers.groupby("level")["got"].mean().fillna(0)
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
    """Return the differences a - b for the seeds that both arms have at a level."""
    keys = ["position", "level", "seed"]
    ends = numbers.set_index(["arm", *keys])["end"]
    difference = (ends[a] - ends[b]).dropna()
    return difference.reset_index(name="difference")


def intervals(
    pair: pd.DataFrame, design: Design | None = None
) -> list[tuple[int, object, Interval]]:
    """Return the position, the level and the interval of the difference at each level of the dose.

    In a sequential design the interval has the level of the look. Raises RunsError if the design
    has no look at the number of seeds."""
    points = []
    for (position, level), cell in pair.groupby(["position", "level"]):
        error_rate = level_of(design, len(cell)) if design else LEVEL
        interval = t_interval(cell["difference"], error_rate)
        points.append((position, level, interval))
    return points


# ------------------------------------------------------------------------------------------------
# tables
def table(
    numbers: pd.DataFrame,
    dose: list[str],
    metric: str,
    also: Sequence[str] = (),
    outcome: str = REWARD,
) -> list[str]:
    """Return a Markdown row per level and arm."""
    head = [" ".join(dose), "arm", "seeds", f"{metric}, first fifth"]
    rows = [[*head, f"{in_words(outcome)}, last fifth", "collapsed", *also]]
    for (_, level, arm), runs in numbers.groupby(["position", "level", "arm"]):
        row = [level, arm, len(runs), f"{runs['got'].mean():.4g}"]
        row.append(t_interval(runs["end"]).text())
        row.append(collapsed_count(runs))
        for name in also:
            row.append(f"{runs[name].mean():.4g}")
        rows.append(row)
    return markdown_table(rows)


def difference_table(
    numbers: pd.DataFrame,
    baseline: str = GRPO,
    outcome: str = REWARD,
    design: Design | None = None,
    margin: float = 0.03,
) -> list[str]:
    """Return a Markdown row per level and pair of arms.

    The arms of a pair differ in the objective or in the remedy alone.
    """
    difference = f"difference of the {in_words(outcome)}, last fifth"
    rows = [["dose", difference, "mean and interval", "p", "level", "verdict"]]
    for pairs in compared(numbers, baseline):
        for (a, b), pair in pairs.items():
            for _, level, interval in intervals(pair, design):
                cells = [*difference_cells(interval), f"{interval.level:.2g}"]
                rows.append([level, f"{a} - {b}", *cells, direction(interval, margin)])
    return markdown_table(rows)


def dose_table(
    numbers: pd.DataFrame,
    outcome: str = REWARD,
    design: Design | None = None,
    margin: float = 0.03,
    reference: str = "",
) -> list[str]:
    """Return a Markdown row per arm and level: the difference to the arm's reference, by seed.

    The reference is the arm's least dose, or the level `reference`, which an arm may lack. Raises
    RunsError if no run has this level."""
    levels = numbers.drop_duplicates("position").set_index("position")["level"].to_dict()
    chosen = [position for position, level in levels.items() if same_value(level, reference)]
    if reference and not chosen:
        names = ", ".join(str(level) for level in levels.values())
        raise RunsError(f"reference={reference}: no run has this dose; there are {names}")
    name = f"dose {reference}" if reference else "its least dose"
    head = ["arm", "dose", f"{in_words(outcome)}, minus that at {name}", "p", "level", "verdict"]
    rows = [head]
    for arm, runs in numbers.groupby("arm"):
        ends = runs.pivot(index="seed", columns="position", values="end")
        base = chosen[0] if chosen else ends.columns[0]
        if base not in ends:
            continue
        for position in ends.columns.drop(base):
            paired = (ends[position] - ends[base]).dropna()
            if len(paired):
                doses = f"{levels[position]} - {levels[base]}"
                error_rate = level_of(design, len(paired)) if design else LEVEL
                interval = t_interval(paired, error_rate)
                cells = [*difference_cells(interval), f"{interval.level:.2g}"]
                rows.append([arm, doses, *cells, direction(interval, margin)])
    return markdown_table(rows)


# ------------------------------------------------------------------------------------------------
# figure
def draw(
    data: Data,
    numbers: pd.DataFrame,
    dose: list[str],
    metric: str,
    out: Path,
    options: FigureOptions = DEFAULTS,
    *,
    baseline: str = GRPO,
    also: Sequence[str] = (),
    outcome: str = REWARD,
    design: Design | None = None,
) -> list[Path]:
    """Draw the reward and the collapsed share above, and the differences of pairs of arms below.

    If there are no remedies, the last panel shows the first metric of `also`.
    """
    styles = arm_styles(sorted(numbers["arm"].unique()))
    objectives, remedies = compared(numbers, baseline)
    extra_metric = also[0] if also and not remedies else ""
    figure = style.canvas(7.4, options)
    heights = (1, 0.1 + 0.06 * len(styles), 1)
    panels = figure.subplot_mosaic("ab;nn;cd", height_ratios=heights)
    end_panel, share_panel, names_panel, objective_panel, remedy_panel = panels.values()
    draw_column(end_panel, numbers, styles, "end")
    if extra_metric:
        draw_column(remedy_panel, numbers, styles, extra_metric)
    draw_collapsed(share_panel, numbers, styles)
    draw_differences(objective_panel, objectives, styles, design)
    draw_differences(remedy_panel, remedies, styles, design)
    objective_panel.set_visible(bool(objectives or extra_metric))
    remedy_panel.set_visible(bool(remedies or extra_metric))
    name = in_words(outcome)
    end_panel.set(title=f"{name[0].upper()}{name[1:]} at the end")
    end_panel.set_ylabel("last fifth of the batches")
    share_panel.set(title="Collapsed runs", ylabel="share of the seeds")
    objective_panel.set_title(f"Each objective minus {baseline}")
    if extra_metric:
        objective_panel.set_ylabel("difference, paired by seed")
        remedy_panel.set(title=extra_metric, ylabel="mean of all batches")
    else:
        objective_panel.set_ylabel("difference, same remedy")
        remedy_panel.set(title="Each remedy minus none", ylabel="difference, same objective")
    ticks = []
    for (_, level), cell in numbers.groupby(["position", "level"]):
        measured = cell.groupby("arm")["got"].mean()
        ticks.append(tick(level, measured))
    for ax in (end_panel, share_panel, objective_panel, remedy_panel):
        ax.set_xlabel(f"{' and '.join(dose)}; below it\n{metric}")
        ax.set_xticks(range(len(ticks)), ticks)
    names_panel.set_axis_off()
    columns = min(len(styles), 4)
    style.legend(names_panel, styles, loc="center", ncols=columns)
    study = Path(data.runs[0].study).name
    text = caption(data, numbers, metric, design)
    return style.save(figure, out, f"fig_dose_{study}", text, options)


def shifts(count: int, distance: float) -> list[float]:
    """Return the places of lines beside each other, so that their intervals can be told apart."""
    return [distance * (index - (count - 1) / 2) for index in range(count)]


def draw_column(ax: Axes, numbers: pd.DataFrame, styles: ArmStyles, column: str) -> None:
    """Draw the mean of a column over seeds with its interval, for each arm at each level."""
    for shift, (arm, line) in zip(shifts(len(styles), 0.05), styles.items(), strict=True):
        runs = numbers[numbers["arm"] == arm]
        shifted = runs.assign(x=runs["position"] + shift)
        interval_line(ax, cell_intervals(shifted, "x", column), line)


def draw_collapsed(ax: Axes, numbers: pd.DataFrame, styles: ArmStyles) -> None:
    """Draw the share of collapsed runs, for each arm at each level."""
    for shift, (arm, line) in zip(shifts(len(styles), 0.05), styles.items(), strict=True):
        runs = numbers[numbers["arm"] == arm]
        share = runs.assign(x=runs["position"] + shift).groupby("x")["collapsed"].mean()
        ax.plot(share, lw=1.6, ms=5, **line.plot_options())
    ax.set_ylim(-0.05, 1.05)


def draw_differences(
    ax: Axes, pairs: Pairs, styles: ArmStyles, design: Design | None = None
) -> None:
    """Draw the mean difference of each pair of arms at each level, with its interval."""
    x_shifts = shifts(len(pairs), 0.07)
    for shift, (arm, rival) in zip(x_shifts, pairs, strict=True):
        points = []
        for position, _, interval in intervals(pairs[arm, rival], design):
            points.append((position + shift, interval))
        interval_line(ax, points, styles[arm])
    ax.axhline(0, color=style.MUTED, lw=1, zorder=1)


def tick(level: object, measured: pd.Series) -> str:
    """Return the label of a level: its words, and below them its measured metric.

    That is the mean over the arms. If an arm is above twice another, it is the range of the arms.
    """
    word = f"{level:g}" if isinstance(level, Real) else str(level)
    if measured.isna().all():
        return word
    least = measured.min()
    largest = measured.max()
    if 0 < least < largest / 2:
        return f"{word}\n{least:.2g} to {largest:.2g}"
    return f"{word}\n{measured.mean():.3g}"


def caption(data: Data, numbers: pd.DataFrame, metric: str, design: Design | None = None) -> str:
    """Return the caption, which describes the runs and the panels."""
    seeds = span(numbers.groupby(["position", "arm"]).size())
    batches = span([run.planned for run in data.runs])
    level = ""
    if design:
        level = " Differences have the level of the sequential design's look."
    return (
        f"{len(numbers)} runs of {batches} rollout batches, {seeds} seeds per arm and dose. Under "
        f"each dose stands {metric} in the first fifth of the batches: the mean over the arms, or "
        "its least and largest arm. Bars: 95 % intervals over seeds; collapse by the registered "
        f"rule. Differences are paired by seed.{level}"
    )


if __name__ == "__main__":
    script.command(main)
