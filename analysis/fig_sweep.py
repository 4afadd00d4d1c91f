"""A sweep over one or two settings: their effect on reward, stability and clipped tokens.

    gspo figure sweep runs/learning_rate x=optim.lr by=trainer.minibatches
    gspo figure sweep runs/staleness x=rollout.staleness

Any setting can be `x`. Each value of the setting `by` is a row of panels. Prints a Markdown table
with the paired difference of GSPO and GRPO, seed by seed. Writes fig_sweep_<study>.pdf and .png.
The first lines of the sweep's own file describe the expected result.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from gspo.analysis import load, script, style
from gspo.analysis.arm_styles import ArmStyle, arm_styles, tint
from gspo.analysis.blocks import markdown_table
from gspo.analysis.grid import collapsed_count, settled_runs, span
from gspo.analysis.load import GRPO, GSPO, Data, Run
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import START, WINDOW, t_interval
from gspo.analysis.style import FigureOptions
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
    data = script.read(options, notes=False)
    script.print_notes(data, "unfinished", "left out", "cut")
    if not options.x:
        varied = ", ".join(load.varied(data)) or "no setting beside those that make an arm"
        raise RunsError(
            f"x=: say which setting is on the x axis, as in x=optim.lr; these runs vary {varied}"
        )
    numbers = measure(data, options.x, options.by, options.end)
    paths = draw(data, numbers, options.x, options.by, options.out, options, end=options.end)
    script.print_lines(table(numbers, options.x, options.by), paths)


# ---------------------------------------------------------------------------------------------------------
# numbers
def measure(data: Data, x: str, row_setting: str, end: int = WINDOW) -> pd.DataFrame:
    """Return the numbers of `measure_run` for each run that has finished or collapsed.

    The last `end` batches count as the end. Raises RunsError if the runs lack a setting,
    or differ in others too.
    """
    runs = settled_runs(data, filter(None, (x, row_setting)))
    check_comparable(runs, x, row_setting)
    if end < 1:
        raise RunsError("--end 0: the reward at the end needs at least one batch")
    numbers = pd.DataFrame([measure_run(run, x, row_setting, end) for run in runs])
    repeated = numbers[numbers.duplicated(["row", "x", "arm", "seed"])]
    if len(repeated):
        first = repeated.iloc[0]
        raise RunsError(
            f"two runs of {first['arm']}, seed {first['seed']}, {x}={first['x']}: give one"
        )
    arms = numbers["arm"].nunique()
    if arms > MAX_ARMS:
        raise RunsError(
            f"{arms} arms are more than a figure of lines can tell apart: give fewer runs"
        )
    return numbers


def check_comparable(runs: list[Run], x: str, row_setting: str) -> None:
    """Raise RunsError if the runs differ in length or in settings that are not swept."""
    lengths = sorted({str(run.planned) for run in runs})
    if len(lengths) > 1:
        raise RunsError(f"the runs are of {', '.join(lengths)} steps: give those of one length")
    expected = {x, row_setting, REPLAY, *DERIVED.get(x, ()), *DERIVED.get(row_setting, ())}
    unexpected = [key for key in load.differing(runs) if not key.startswith("objective.")]
    # two objectives have different settings, but the runs of one objective have the same
    for name in {run.settings["objective.name"] for run in runs}:
        group = [run for run in runs if run.settings["objective.name"] == name]
        unexpected += [key for key in load.differing(group) if key.startswith("objective.")]
    unexpected = [key for key in unexpected if key not in expected]
    if unexpected:
        raise RunsError(
            f"the runs differ also in {', '.join(unexpected)}: choose among them with x= and by=, or "
            "one value with where.KEY=VALUE"
        )


def measure_run(run: Run, x: str, row_setting: str, end: int) -> dict[str, object]:
    """Return the numbers of a run; `row` is the value of `row_setting`."""
    rows = run.rows[run.rows["step"] > 0].sort_values("step")
    reward = run.column("reward/mean")
    smooth, peaks, _ = levels(reward.tolist())
    replay_varies = REPLAY in (x, row_setting)
    numbers: dict[str, object] = {
        "row": run.settings[row_setting] if row_setting else "",
        "x": run.settings[x],
        "arm": load.base_arm(run.settings, with_replay=not replay_varies),
        "seed": run.seed,
        "start": reward.head(START).mean(),
        "end": reward.tail(end).mean(),
        "fall": max(0.0, 1 - smooth[-1] / peaks[-1]) if peaks[-1] > 0 else 1.0,
        "collapsed": run.collapsed is not None,
        "clipped": math.nan,
        "length": math.nan,
    }
    if "clip/token_active" in rows:
        numbers["clipped"] = rows["clip/token_active"].astype(float).mean()
    if "length/mean" in rows:
        numbers["length"] = rows["length/mean"].astype(float).head(START).mean()
    return numbers


def table(numbers: pd.DataFrame, x: str, row_setting: str) -> list[str]:
    """Return a Markdown row per setting and arm.

    GSPO - GRPO has its 95 % t interval over the seeds that both have.
    """
    head = [NAMES.get(row_setting, row_setting)] if row_setting else []
    head += [NAMES.get(x, x), "objective", "seeds", "start", "end", "range", "collapsed"]
    table_rows = [[*head, "clipped", "tokens", "GSPO - GRPO"]]
    for group, value in itertools.product(ordered(numbers["row"]), ordered(numbers["x"])):
        cell = numbers[(numbers["row"] == group) & (numbers["x"] == value)]
        for arm, runs in cell.groupby("arm"):
            end = runs["end"]
            row = [group, f"{value}"] if row_setting else [f"{value}"]
            row += [arm, str(len(runs)), f"{runs['start'].mean():.3f}", f"{end.mean():.3f}"]
            row += [f"{end.min():.2f}-{end.max():.2f}", collapsed_count(runs)]
            row += [f"{runs['clipped'].mean():.2g}", f"{runs['length'].mean():.0f}"]
            row.append(difference(cell) if arm == GSPO else "")
            table_rows.append(row)
    return markdown_table(table_rows)


def difference(cell: pd.DataFrame) -> str:
    """Return GSPO's reward at the end minus GRPO's, with its interval."""
    ends = cell.pivot(index="seed", columns="arm", values="end")
    if not {GSPO, GRPO} <= set(ends):
        return ""
    return t_interval((ends[GSPO] - ends[GRPO]).dropna().to_numpy()).text("+.3f")


def ordered(column: pd.Series) -> list:
    """Return the values with numbers first, by size, then words."""
    return sorted(column.unique(), key=load.numbers_first)


# ----------------------------------------------------------------------------------------------------------
# figure
def draw(
    data: Data,
    numbers: pd.DataFrame,
    x: str,
    row_setting: str,
    out: Path,
    options: FigureOptions | None = None,
    *,
    end: int = WINDOW,
) -> list[Path]:
    """Draw a row of panels for each value of `row_setting`, with the columns PANELS."""
    options = options or FigureOptions()
    values = ordered(numbers["x"])
    groups = ordered(numbers["row"])
    styles = arm_styles(sorted(numbers["arm"].unique()))
    figure = style.canvas(0.4 + 2.1 * len(groups), options)
    axes = figure.subplots(len(groups), len(PANELS), squeeze=False, sharex=True, sharey="col")
    for panels, group in zip(axes, groups, strict=True):
        runs = numbers[numbers["row"] == group]
        for ax, column in zip(panels, PANELS, strict=True):
            draw_panel(ax, runs, column, values, styles)
        if row_setting:
            panels[0].set_ylabel(f"{group} {NAMES.get(row_setting, row_setting)}")
    for ax, (column, (title, label)) in zip(axes[0], PANELS.items(), strict=True):
        # so that the collapse rule's 0.3 is in view and smaller falls look like noise
        minimum = 0.35 if column == "fall" else 1e-3
        room = 2 if column == "clipped" else 1.05  # its axis is logarithmic
        ax.set_ylim(0, room * max(numbers[column].max(), minimum))  # the rows share this axis
        ax.set_title(f"{title}\n", pad=2)
        subtitle = {"transform": ax.transAxes, "fontsize": 8.5, "color": style.MUTED}
        ax.text(0, 1.03, label.format(end=end), **subtitle)
    for ax in axes[-1]:
        ticks = [f"{value:g}" if isinstance(value, float) else f"{value}" for value in values]
        ax.set_xticks(range(len(values)), ticks)
        ax.set_xlabel(NAMES.get(x, x))
    style.legend(axes[0, -1], dict(sorted(styles.items(), reverse=True)), loc="best")
    study = Path(data.runs[0].settings["study"]).name
    return style.save(figure, out, f"fig_sweep_{study}", caption(data, numbers, x), options)


def draw_panel(
    ax: Axes, runs: pd.DataFrame, column: str, values: list, styles: dict[str, ArmStyle]
) -> None:
    """Draw seeds as pale dots, or crosses if they collapsed, and the mean as a line.

    The reward of the first batches is dashed.
    """
    for arm, arm_runs in runs.groupby("arm", sort=True):
        shift = 0.1 * (list(styles).index(arm) - (len(styles) - 1) / 2)
        colour = styles[arm].colour
        x = arm_runs["x"].map(values.index).to_numpy() + shift
        y = arm_runs[column].to_numpy(float)
        collapsed = arm_runs["collapsed"].to_numpy(bool)
        dots = {"ms": 4.5, "color": tint(colour, 0.5), "mec": "white", "mew": 0.4}
        ax.plot(x[~collapsed], y[~collapsed], styles[arm].marker, **dots)
        ax.plot(x[collapsed], y[collapsed], "x", ms=5, mew=1.4, color=tint(colour, 0.8))
        means = [arm_runs.loc[arm_runs["x"] == value, column].mean() for value in values]
        mean_x = [index + shift for index in range(len(values))]
        ax.plot(mean_x, means, color=colour, ls=styles[arm].line, lw=1.8)
    if column == "end":
        starts = [runs.loc[runs["x"] == value, "start"].mean() for value in values]
        ax.plot(range(len(values)), starts, color=style.MUTED, lw=1, ls="--")
    if column == "clipped":
        ax.set_yscale("symlog", linthresh=1e-4)


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
        lengths = []
        for value in ordered(numbers["x"]):
            lengths.append(f"{numbers.loc[numbers['x'] == value, 'length'].mean():.0f}")
        text += f" Tokens of a response: {', '.join(lengths)}."
    return text


if __name__ == "__main__":
    script.command(main)
