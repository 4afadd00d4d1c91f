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
the metric `outcome`. With rows=true the figure is a panel per dose and a row per arm instead: the
arm minus itself at the reference. With looks=[10,20] the runs are a sequential design, whose
differences have the level of the look (sequential.py). Writes fig_dose_<study>.pdf and .png.
Metrics: reward/mean and the named metrics.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gspo.analysis import script, style
from gspo.analysis.arm_styles import ArmStyles, arm_styles
from gspo.analysis.blocks import markdown_table
from gspo.analysis.doses import (
    REWARD,
    Pairs,
    compared,
    dose_differences,
    in_words,
    intervals,
    measure,
)
from gspo.analysis.grid import (
    cell_intervals,
    collapsed_count,
    coverage,
    difference_cells,
    draw_rows,
    interval_line,
    name_rows,
    row_names,
    span,
)
from gspo.analysis.load import GRPO, OBJECTIVES, Data
from gspo.analysis.runs import RunsError
from gspo.analysis.sequential import Design, chosen_design
from gspo.analysis.stats import t_interval
from gspo.analysis.verdicts import direction
from gspo.io.arguments import command_options, option
from gspo.tracking.collapse import MIN_BATCHES

REFUSED = script.DOTS | script.NO_CURVES
MAX_LABEL_CHARS = 50  # per line below an axis


@dataclass(frozen=True, kw_only=True)
class Options(script.Options):
    """The options of this figure."""

    dose: tuple[str, ...] = option(
        meaning="the setting that was varied, or the settings that stand for the dose together"
    )
    measured: str = option(meaning="the metric that says how much of it the runs got")
    arms: tuple[str, ...] = option((), "settings that make an arm besides objective and replay")
    against: str = option(
        "grpo", "the objective that the others are compared with, as grpo or as the table names it"
    )
    also: tuple[str, ...] = option((), "metrics whose means the table shows")
    outcome: str = option(REWARD, "the metric that is compared at the end of the runs")
    looks: tuple[int, ...] = option((), "numbers of seeds at which a sequential design is judged")
    same: float = option(0.03, "two outcomes within this difference are the same", least=0)
    reference: str = option(
        "", "the dose that the other doses are compared with; the least if empty"
    )
    rows: bool = option(
        False, "draw a panel per dose with a row per arm: the arm minus itself at the reference"
    )


def main() -> None:
    options = command_options(Options, __doc__, REFUSED)
    design = chosen_design(options.looks)
    data = script.read(options, notes=script.ABOUT_ENDS)
    outcome = options.outcome
    numbers = measure(data, options.dose, options.measured, options.arms, options.also, outcome)
    lost = numbers[numbers["end"].isna() & numbers["collapsed"]]
    for (level, arm), runs in lost.groupby(["level", "arm"]):
        seeds = ", ".join(str(seed) for seed in sorted(runs["seed"]))
        print(
            f"note: {arm} at {level} ended when it collapsed, without {outcome} in the last fifth of "
            f"its batches: seed {seeds}; what is compared with it stays undecided"
        )
    differences = dose_differences(numbers, design, options.reference)
    baseline = OBJECTIVES.get(options.against, options.against)
    objectives = sorted(numbers["objective"].unique())
    if baseline not in objectives:
        names = ", ".join(objectives)
        problem = f"against={options.against}: there are no runs of {baseline}, but of {names}"
        if options.against != Options.against:
            raise RunsError(problem)
        if len(objectives) > 1:
            print(f"note: {problem}; name one of them, and objectives are compared with it")
    if options.rows:
        paths = draw_rows_by_dose(data, numbers, differences, options)
    else:
        paths = draw(data, numbers, baseline, design, options)
    script.print_lines(
        table(numbers, options.dose, options.measured, options.also, outcome),
        difference_table(numbers, baseline, outcome, design, options.same),
        dose_table(differences, outcome, options.same, options.reference),
        paths,
    )


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
        row = [level, arm, len(runs), f"{runs['measured'].mean():.4g}"]
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
    differences: pd.DataFrame, outcome: str = REWARD, margin: float = 0.03, reference: str = ""
) -> list[str]:
    """Return a Markdown row per arm and dose of dose_differences."""
    name = f"dose {reference}" if reference else "its least dose"
    head = ["arm", "dose", f"{in_words(outcome)}, minus that at {name}", "p", "level", "verdict"]
    rows = [head]
    for row in differences.itertuples():
        cells = [*difference_cells(row.interval), f"{row.interval.level:.2g}"]
        doses = f"{row.level} - {row.reference}"
        rows.append([row.arm, doses, *cells, direction(row.interval, margin)])
    return markdown_table(rows)


# ------------------------------------------------------------------------------------------------
# figure
def draw(
    data: Data,
    numbers: pd.DataFrame,
    baseline: str,
    design: Design | None,
    options: Options,
) -> list[Path]:
    """Draw the reward and the collapsed share above, and the differences of pairs of arms below.

    If there are no remedies, the last panel shows the first metric of `options.also`.
    """
    styles = arm_styles(sorted(numbers["arm"].unique()))
    objectives, remedies = compared(numbers, baseline)
    extra_metric = options.also[0] if options.also and not remedies else ""
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
    objective_panel.set_visible(bool(objectives))
    remedy_panel.set_visible(bool(remedies or extra_metric))
    name = in_words(options.outcome)
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
    for (_, label), cell in numbers.groupby(["position", "label"]):
        measured = cell.groupby("arm")["measured"].mean()
        ticks.append(tick(label, measured))
    for ax in (end_panel, share_panel, objective_panel, remedy_panel):
        doses = textwrap.fill(" and ".join(options.dose), MAX_LABEL_CHARS)
        ax.set_xlabel(f"{doses}; below it\n{options.measured}")
        ax.set_xticks(range(len(ticks)), ticks)
    share_panel.set_xlim(end_panel.get_xlim())
    names_panel.set_axis_off()
    columns = min(len(styles), 4)
    style.legend(names_panel, styles, loc="center", ncols=columns)
    text = caption(data, numbers, options.measured, design)
    return style.save(figure, options.out, file_name(data), text, options)


def draw_rows_by_dose(
    data: Data, numbers: pd.DataFrame, differences: pd.DataFrame, options: Options
) -> list[Path]:
    """Draw a panel per dose and a row per arm: the arm minus itself at the reference dose.

    The arms stand in the order of their outcome, averaged over the doses. Raises RunsError if no
    arm has runs of one seed at two doses.
    """
    if differences.empty:
        raise RunsError("rows=true: no arm has runs of one seed at the reference and another dose")
    means = numbers.groupby("arm")["end"].mean().sort_values(ascending=False)
    arms = [arm for arm in means.index if arm in set(differences["arm"])]
    styles = arm_styles(sorted(arms))  # they do not depend on the order of the results
    doses = differences.sort_values("position").groupby("position", sort=False)
    figure = style.canvas(1.05 + 0.19 * len(arms), options)
    [panels] = figure.subplots(1, len(doses), sharex=True, sharey=True, squeeze=False)
    name = in_words(options.outcome)
    for ax, (_, rows) in zip(panels, doses, strict=True):
        draw_rows(ax, rows, arms, styles, options.same)
        ax.set_title(lines_of(rows["label"].iloc[0]), fontsize=9)
        ax.set_xlabel(f"{name}, difference", fontsize=8.5)
    name_rows(panels, row_names(arms), 0.7)
    # the panels share the axis, and more numbers would run into each other
    panels[0].xaxis.set_major_locator(MaxNLocator(4))
    panels[0].tick_params(axis="y", labelsize=8)
    covered = {coverage(interval.level) for interval in differences["interval"]}
    strip = f" Grey: within {options.same:g}." if options.same else ""
    references = [str(level) for level in differences["reference"].unique()]
    settings = " and ".join(options.dose)
    reference = f"{settings} = {references[0]}"
    if len(references) > 1:
        reference = f"its least {settings} ({', '.join(references)})"
    text = (
        f"In the last fifth of the batches, {name} minus the same arm's at {reference}, paired by "
        f"seed: mean and {' and '.join(sorted(covered))} interval. Filled: the interval leaves 0 "
        f"out and the exact p is below the level.{strip} {len(numbers)} runs."
    )
    return style.save(figure, options.out, file_name(data), text, options)


def file_name(data: Data) -> str:
    """Return the name of the figure's files, which has the study's name."""
    return f"fig_dose_{Path(data.runs[0].study).name}"


def lines_of(label: object) -> str:
    """Return a dose in words with a line for each of its settings."""
    return f"{label:g}" if isinstance(label, Real) else str(label).replace(", ", "\n")


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
    """Draw the share of collapsed runs, for each arm at each level.

    Runs that are too short for the collapse rule are left out."""
    if not numbers["can_collapse"].any():
        words = f"runs of fewer than {MIN_BATCHES} batches:\ntoo short for the collapse rule"
        ax.text(0.5, 0.5, words, ha="center", va="center", transform=ax.transAxes)
    numbers = numbers[numbers["can_collapse"]]
    for shift, (arm, line) in zip(shifts(len(styles), 0.05), styles.items(), strict=True):
        runs = numbers[numbers["arm"] == arm]
        share = runs.assign(x=runs["position"] + shift).groupby("x")["collapsed"].mean()
        if len(share):
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


def tick(label: object, measured: pd.Series) -> str:
    """Return the label of a level: its words, and below them its measured metric.

    That is the mean over the arms. If an arm is above twice another, it is the range of the arms.
    """
    word = lines_of(label)
    if measured.isna().all():
        return word
    least = measured.min()
    largest = measured.max()
    if 0 < least < largest / 2:
        return f"{word}\n{least:.2g}\nto {largest:.2g}"
    return f"{word}\n{measured.mean():.3g}"


def caption(data: Data, numbers: pd.DataFrame, metric: str, design: Design | None = None) -> str:
    """Return the caption, which describes the runs and the panels."""
    seeds = span(numbers.groupby(["position", "arm"]).size())
    batches = span([run.planned for run in data.runs])
    level = ""
    if design:
        level = " Differences have the level of the sequential design's look."
    rule = "collapse by the registered rule"
    if not numbers["can_collapse"].all():
        rule += f", which needs {MIN_BATCHES} batches"
    return (
        f"{len(numbers)} runs of {batches} rollout batches, {seeds} seeds per arm and dose. Under "
        f"each dose stands {metric} in the first fifth of the batches: the mean over the arms, or "
        f"its least and largest arm. Bars: 95 % intervals over seeds; {rule}. "
        f"Differences are paired by seed.{level}"
    )


if __name__ == "__main__":
    script.command(main)
