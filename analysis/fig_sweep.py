"""A sweep over one or two settings: their effect on reward, stability and clipped tokens.

    gspo figure sweep runs/learning_rate x=optim.lr by=trainer.minibatches
    gspo figure sweep runs/staleness x=rollout.staleness

Any setting can be `x`. Each value of the setting `by` is a row of panels. Prints a Markdown table
with the paired difference of GSPO and GRPO, seed by seed. Writes fig_sweep_<study>.pdf and .png.
The first lines of the sweep's own file describe the expected result.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gspo.analysis import choosing, load, script, style
from gspo.analysis.arm_styles import ArmStyles, arm_styles, tint
from gspo.analysis.blocks import markdown_table
from gspo.analysis.grid import (
    check_one_length,
    collapsed_count,
    refuse_repeated,
    run_numbers,
    settled_runs,
    span,
    value_of,
)
from gspo.analysis.load import GRPO, GSPO, Data, Run
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import START, WINDOW, t_interval
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.io.arguments import command_options, option
from gspo.tracking.collapse import levels

REPLAY = "policy.routing_replay"
MAX_ARMS = 8  # lines that can be told apart
REFUSED = script.DOTS | script.NO_CURVES
PANELS = {  # column: the title of its panel, and of its y axis
    "end": ("Reward at the end", "last {end} batches"),
    "fall": ("Fall from the peak", "share of it lost at the end"),
    "clipped": ("Clipped tokens", "share, mean of all batches"),
}
NAMES = {
    "optim.lr": "learning rate",
    "trainer.minibatches": "mini-batches",
    "objective.clip_low": "clip range, lower side",
    "rollout.group_size": "responses per prompt",
    "rollout.staleness": "age of the responses, batches",
    "task.max_operands": "summands",
    REPLAY: "Routing Replay",
}
DERIVED = {  # the settings that a sweep must change along with another
    "objective.clip_low": ("objective.clip_high",),
    "rollout.group_size": ("rollout.prompts_per_step",),
    "task.max_operands": (
        "task.min_operands",
        "cold_start.wrong_step_rate",
        "rollout.max_new_tokens",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options(script.Options):
    """The options of this figure."""

    x: str = option("", "the setting on the x axis, such as optim.lr")
    by: str = option("", "a second setting: a row of panels for each of its values")
    end: int = option(WINDOW, "batches of the reward at the end", least=1)


def main() -> None:
    options = command_options(Options, __doc__, REFUSED)
    data = script.read(options, notes=script.ABOUT_ENDS)
    if not options.x:
        varied = ", ".join(choosing.varied(data)) or "no setting beside those that make an arm"
        raise RunsError(
            f"x=: name the setting of the x axis, as in x=optim.lr; these runs vary {varied}"
        )
    numbers = measure(data, options.x, options.by, options.end)
    paths = draw(data, numbers, options.x, options.by, options.out, options, end=options.end)
    script.print_lines(table(numbers, options.x, options.by), paths)


# ------------------------------------------------------------------------------------------------
# numbers
def measure(
    data: Data,
    x: str,
    row_setting: str,
    end: int = WINDOW,
) -> pd.DataFrame:
    """Return a row for each run that has finished or collapsed.

    The columns are row (the value of `row_setting`), x, arm, seed, start, end (of the last `end`
    batches), fall, collapsed, clipped and length. Raises RunsError if the runs lack a setting, or
    differ in others too.
    """
    runs = settled_runs(data, filter(None, (x, row_setting)))
    check_comparable(runs, x, row_setting)
    if end < 1:
        raise RunsError("end=0: the reward at the end needs at least one batch")
    if runs and end > runs[0].planned:
        raise RunsError(f"end={end}: the runs have {runs[0].planned} batches")
    if x == row_setting:
        raise RunsError(f"by={row_setting}: it is on the x axis already")
    replay_varies = REPLAY in (x, row_setting)
    rows = []
    for run in runs:
        row = run_numbers(run, START, end, {"clipped": "clip/token_active"})
        row["row"] = value_of(run, row_setting) if row_setting else ""
        row["x"] = value_of(run, x)
        row["arm"] = load.base_arm(run.settings, with_replay=not replay_varies)
        row["fall"] = fall(run)
        row["length"] = run.column("length/mean").head(START).mean()
        rows.append(row)
    numbers = pd.DataFrame(rows)
    refuse_repeated(numbers, ["row", "x"], "give one")
    arms = numbers["arm"].nunique()
    if arms > MAX_ARMS:
        raise RunsError(
            f"{arms} arms are more than a figure of lines can tell apart: give fewer runs"
        )
    return numbers


def check_comparable(runs: list[Run], x: str, row_setting: str) -> None:
    """Raise RunsError if the runs differ in length, or in other settings than these two.

    The objectives may each have settings of their own.
    """
    check_one_length(runs)
    differing = [key for key in load.differing(runs) if not key.startswith("objective.")]
    # two objectives have different settings, but the runs of one objective have the same
    for name in {run.settings["objective.name"] for run in runs}:
        group = [run for run in runs if run.settings["objective.name"] == name]
        differing += [key for key in load.differing(group) if key.startswith("objective.")]
    expected = {x, row_setting, REPLAY}
    for setting in (x, row_setting):
        expected.update(DERIVED.get(setting, ()))
    unexpected = [key for key in differing if key not in expected]
    if unexpected:
        raise RunsError(
            f"the runs differ also in {', '.join(unexpected)}: choose among them with x= and by=, or "
            "one value with where.KEY=VALUE"
        )


def fall(run: Run) -> float:
    """Return the share of the peak of the smoothed reward that is lost at the end.

    It is NaN if the peak is not above 0."""
    rewards = run.column("reward/mean").tolist()
    smooth, peaks, _ = levels(rewards)
    if not len(peaks) or peaks[-1] <= 0:
        return math.nan
    return max(0.0, 1 - smooth[-1] / peaks[-1])


def table(numbers: pd.DataFrame, x: str, row_setting: str) -> list[str]:
    """Return a Markdown row per setting and arm.

    GSPO - GRPO has its 95 % t interval over the seeds that both have.
    """
    head = [NAMES.get(x, x), "objective", "seeds", "start", "end", "range", "collapsed"]
    head += ["clipped", "tokens", "GSPO - GRPO"]
    if row_setting:
        head.insert(0, NAMES.get(row_setting, row_setting))
    rows = [head]
    cells = itertools.product(ordered(numbers["row"]), ordered(numbers["x"]))
    for group, value in cells:
        cell = numbers[numbers["row"] == group]
        cell = cell[cell["x"] == value]
        for arm, runs in cell.groupby("arm"):
            end = runs["end"]
            row = [group] if row_setting else []
            row += [value, arm, len(runs)]
            row.append(f"{runs['start'].mean():.3f}")
            row.append(f"{end.mean():.3f}")
            row.append(f"{end.min():.2f}-{end.max():.2f}")
            row.append(collapsed_count(runs))
            row.append(f"{runs['clipped'].mean():.2g}")
            row.append(f"{runs['length'].mean():.0f}")
            row.append(difference(cell) if arm == GSPO else "")
            rows.append(row)
    return markdown_table(rows)


def difference(cell: pd.DataFrame) -> str:
    """Return GSPO's reward at the end minus GRPO's, with its interval."""
    ends = cell.pivot(index="seed", columns="arm", values="end")
    if not {GSPO, GRPO} <= set(ends):
        return ""
    differences = (ends[GSPO] - ends[GRPO]).dropna()
    return t_interval(differences).text("+.3f") if len(differences) else "-"


def ordered(column: pd.Series) -> list:
    """Return the values with numbers first, by size, then words."""
    return sorted(column.unique(), key=choosing.numbers_first)


# ------------------------------------------------------------------------------------------------
# figure
def draw(
    data: Data,
    numbers: pd.DataFrame,
    x: str,
    row_setting: str,
    out: Path,
    options: FigureOptions = DEFAULTS,
    *,
    end: int = WINDOW,
) -> list[Path]:
    """Draw a row of panels for each value of `row_setting`, with the columns PANELS."""
    values = ordered(numbers["x"])
    groups = ordered(numbers["row"])
    styles = arm_styles(sorted(numbers["arm"].unique()))
    figure = style.canvas(0.4 + 2.1 * len(groups), options)
    axes = figure.subplots(
        len(groups),
        len(PANELS),
        squeeze=False,
        sharex=True,
        sharey="col",
    )
    for panels, group in zip(axes, groups, strict=True):
        runs = numbers[numbers["row"] == group]
        for ax, column in zip(panels, PANELS, strict=True):
            draw_panel(ax, runs, column, values, styles)
        if row_setting:
            panels[0].set_ylabel(f"{group} {NAMES.get(row_setting, row_setting)}")
    for ax, column in zip(axes[0], PANELS, strict=True):
        title, label = PANELS[column]
        # so that the collapse rule's 0.3 is in view and smaller falls look like noise
        minimum = 0.35 if column == "fall" else 1e-3
        # NaN if no run reports the metric
        largest = np.fmax(numbers[column].max(), minimum)
        room = 2 if column == "clipped" else 1.05  # its axis is logarithmic
        ax.set_ylim(0, room * largest)  # the rows share this axis
        ax.set_title(f"{title}\n", pad=2)
        subtitle = {"transform": ax.transAxes, "fontsize": 8.5, "color": style.MUTED}
        ax.text(0, 1.03, label.format(end=end), **subtitle)
    ticks = [f"{value:g}" if isinstance(value, float) else f"{value}" for value in values]
    for ax in axes[-1]:
        ax.set_xticks(range(len(values)), ticks)
        ax.set_xlabel(NAMES.get(x, x))
    falling = dict(sorted(styles.items(), reverse=True))
    style.legend(axes[0, -1], falling, loc="best")
    study = Path(data.runs[0].study).name
    text = caption(data, numbers, x)
    return style.save(figure, out, f"fig_sweep_{study}", text, options)


def draw_panel(
    ax: Axes,
    runs: pd.DataFrame,
    column: str,
    values: list,
    styles: ArmStyles,
) -> None:
    """Draw seeds as pale dots, or crosses if they collapsed, and the mean as a line.

    The reward of the first batches is dashed.
    """
    positions = np.arange(len(values))
    middle = (len(styles) - 1) / 2
    for index, (arm, line) in enumerate(styles.items()):
        arm_runs = runs[runs["arm"] == arm]
        if arm_runs.empty:
            continue
        shift = 0.1 * (index - middle)
        x = arm_runs["x"].map(values.index) + shift
        y = arm_runs[column]
        collapsed = arm_runs["collapsed"]
        pale = tint(line.colour, 0.5)
        style.dots(ax, x[~collapsed], y[~collapsed], pale, line.marker, 4.5, edge=0.4)
        cross = {"ms": 5, "mew": 1.4, "color": tint(line.colour, 0.8)}
        ax.plot(x[collapsed], y[collapsed], "x", **cross)
        means = mean_by_x(arm_runs, column, values)
        ax.plot(
            positions + shift,
            means,
            color=line.colour,
            ls=line.line,
            lw=1.8,
        )
    if column == "end":
        starts = mean_by_x(runs, "start", values)
        ax.plot(positions, starts, color=style.MUTED, lw=1, ls="--")
    if column == "clipped":
        ax.set_yscale("symlog", linthresh=1e-4)


def mean_by_x(runs: pd.DataFrame, column: str, values: list) -> pd.Series:
    """Return the mean of a column for each of these values of the setting on the x axis."""
    return runs.groupby("x")[column].mean().reindex(values)


def caption(data: Data, numbers: pd.DataFrame, x: str) -> str:
    """Return the caption, which describes the runs and the marks."""
    seeds = span(numbers.groupby(["row", "x", "arm"])["seed"].count())
    text = (
        f"{len(numbers)} runs of {data.runs[0].planned} rollout batches, {seeds} seeds each. "
        "Marks: seeds; crosses: seeds that collapsed by the registered rule; lines: means; dashed: "
        "reward of the first batches. Fall: of the smoothed reward from its peak (of batch 10 on) "
        "to the end. Clipped share: axis linear below 0.0001. Arms are shifted sideways a little, "
        "so that no mark hides another."
    )
    if x in DERIVED:
        text += f" Along with {NAMES[x]} change: {', '.join(DERIVED[x])}."
    if "operands" in x:
        lengths = mean_by_x(numbers, "length", ordered(numbers["x"]))
        text += f" Tokens of a response: {', '.join(f'{length:.0f}' for length in lengths)}."
    return text


if __name__ == "__main__":
    script.command(main)
