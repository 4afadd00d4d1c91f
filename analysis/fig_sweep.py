"""A sweep over one setting, or two: what does it do to the reward, to stability, to the share of
clipped tokens?

    gspo figure sweep runs/learning_rate --x optim.lr --by trainer.minibatches
    gspo figure sweep runs/staleness --x rollout.staleness

Any setting can be --x; each value of --by is a row of panels. Prints a Markdown table with the
paired difference of GSPO and GRPO, seed by seed; writes fig_sweep_<study>.pdf and .png. The first
lines of the sweep's own file say what was expected.
"""

from __future__ import annotations

import itertools
import math
from numbers import Real
from pathlib import Path

import pandas as pd
from gspo.analysis import load, script, style
from gspo.analysis.blocks import aligned_table
from gspo.analysis.load import GRPO, GSPO, OBJECTIVES, Data, Run
from gspo.analysis.looks import Look, looks, tint
from gspo.analysis.stats import START, WINDOW, t_interval
from gspo.analysis.style import View
from matplotlib.axes import Axes

from gspo.tracking.collapse import levels

REPLAY = "policy.routing_replay"
MOST = 8  # the most lines that can be told apart
REFUSED = script.DOTS | script.NO_CURVES
PANELS = {  # column: the panel's title, and what its y axis shows
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
DERIVED = {  # the settings that a sweep must change along with the one that it varies
    "objective.clip_low": ("objective.clip_high",),
    "rollout.group_size": ("rollout.prompts_per_step",),
    "task.max_operands": (
        "task.min_operands",
        "cold_start.wrong_step_rate",
        "rollout.max_new_tokens",
    ),
}


def main() -> None:
    parser = script.parser(__doc__, refused=REFUSED)
    parser.add_argument("--x", default="", help="the setting on the x axis, such as optim.lr")
    parser.add_argument(
        "--by", default="", help="a second setting: a row of panels for each of its values"
    )
    parser.add_argument(
        "--end",
        type=script.batches,
        default=WINDOW,
        metavar="N",
        help=f"batches of the reward at the end ({WINDOW})",
    )
    args = parser.parse_args()
    data = script.read(args, notes=False)
    script.print_notes(data, "unfinished", "left out", "cut")
    if not args.x:
        varied = ", ".join(load.varied(data)) or "no setting beside those that make an arm"
        load.die(
            f"--x: say which setting is on the x axis, as in --x optim.lr; these runs vary {varied}"
        )
    numbers = measure(data, args.x, args.by, args.end)
    paths = draw(data, numbers, args.x, args.by, args.out, script.view(args), args.end)
    print("\n".join(["", *table(numbers, args.x, args.by), "", *map(str, paths)]))


# ---------------------------------------------------------------------------------------------------------
# numbers
def measure(data: Data, x: str, row_setting: str, end: int = WINDOW) -> pd.DataFrame:
    """Return a row per run that has finished or collapsed: row (the value of `row_setting`), x,
    arm, seed, and what `measured` gives with the last `end` batches as the end.

    Raises Refused if the runs lack one of the settings, or differ in others too.
    """
    runs = [run for run in data.runs if run.finished or run.collapsed is not None]
    check(runs, x, row_setting)
    if end < 1:
        load.die("--end 0: the reward at the end needs at least one batch")
    numbers = pd.DataFrame([measured(run, x, row_setting, end) for run in runs])
    twice = numbers[numbers.duplicated(["row", "x", "arm", "seed"])]
    if len(twice):
        load.die(
            f"two runs of {twice.iloc[0]['arm']}, seed {twice.iloc[0]['seed']}, {x}={twice.iloc[0]['x']}: give one"
        )
    if numbers["arm"].nunique() > MOST:
        load.die(
            f"{numbers['arm'].nunique()} arms are more than a figure of lines can tell apart: give fewer runs"
        )
    return numbers


def check(runs: list[Run], x: str, row_setting: str) -> None:
    """Raise Refused if a setting is missing, or if the runs differ in length or in settings that
    are not swept.
    """
    for key in filter(None, (x, row_setting)):
        if not runs or any(key not in run.settings for run in runs):
            load.die(
                f"no finished run has a setting {key}"
                if not runs
                else f"not all runs have a setting {key}"
            )
    if len({run.planned for run in runs}) > 1:
        load.die(
            f"the runs are of {', '.join(sorted({str(run.planned) for run in runs}))} steps: give those of one length"
        )
    meant = {x, row_setting, REPLAY, *DERIVED.get(x, ()), *DERIVED.get(row_setting, ())}
    others = [
        key for key in load.differing(runs) if key not in meant and not key.startswith("objective.")
    ]
    for name in {
        run.settings["objective.name"] for run in runs
    }:  # an objective has its own fields, but one set of them
        same = [run for run in runs if run.settings["objective.name"] == name]
        others += [
            key for key in load.differing(same) if key.startswith("objective.") and key not in meant
        ]
    if others:
        load.die(
            f"the runs differ also in {', '.join(others)}: choose among them with --x and --by, or one "
            "value with --where"
        )


def measured(run: Run, x: str, row_setting: str, end: int) -> dict[str, object]:
    """Return one run's numbers as a row of the table."""
    rows, reward = run.rows[run.rows["step"] > 0].sort_values("step"), run.column("reward/mean")
    smooth, peak, _ = levels(reward.tolist())
    return {
        "row": run.settings[row_setting] if row_setting else "",
        "x": run.settings[x],
        "arm": arm(run, x, row_setting),
        "seed": run.seed,
        "start": reward.head(START).mean(),
        "end": reward.tail(end).mean(),
        "fall": max(0.0, 1 - smooth[-1] / peak[-1]) if peak[-1] > 0 else 1.0,
        "collapsed": run.collapsed is not None,
        "clipped": rows["clip/token_active"].astype(float).mean()
        if "clip/token_active" in rows
        else math.nan,
        "length": rows["length/mean"].astype(float).head(START).mean()
        if "length/mean" in rows
        else math.nan,
    }


def arm(run: Run, x: str, row_setting: str) -> str:
    """Return the run's objective, with its kind of Routing Replay unless that is what the sweep
    varies.
    """
    name = OBJECTIVES.get(run.settings["objective.name"], run.settings["objective.name"])
    replay = run.settings.get(REPLAY, "none")
    return (
        name
        if REPLAY in (x, row_setting) or replay == "none"
        else f"{name} + Routing Replay ({replay.upper()})"
    )


def table(numbers: pd.DataFrame, x: str, row_setting: str) -> list[str]:
    """Return a Markdown row per setting and arm, with GSPO - GRPO and its 95 % t interval over the
    seeds that both have."""
    head = [NAMES.get(row_setting, row_setting)] if row_setting else []
    head += [
        NAMES.get(x, x),
        "objective",
        "seeds",
        "start",
        "end",
        "range",
        "collapsed",
        "clipped",
        "tokens",
        "GSPO - GRPO",
    ]
    rows = []
    for group, value in itertools.product(ordered(numbers["row"]), ordered(numbers["x"])):
        cell = numbers[(numbers["row"] == group) & (numbers["x"] == value)]
        for name, runs in cell.groupby("arm"):
            row = [group, f"{value}"] if row_setting else [f"{value}"]
            row += [
                name,
                str(len(runs)),
                f"{runs['start'].mean():.3f}",
                f"{runs['end'].mean():.3f}",
            ]
            row += [
                f"{runs['end'].min():.2f}-{runs['end'].max():.2f}",
                f"{runs['collapsed'].sum()} of {len(runs)}",
            ]
            row += [
                f"{runs['clipped'].mean():.2g}",
                f"{runs['length'].mean():.0f}",
                difference(cell) * (name == GSPO),
            ]
            rows.append(row)
    return aligned_table([head, *rows])


def difference(cell: pd.DataFrame) -> str:
    """Return the reward at the end of GSPO minus that of GRPO, with its interval."""
    ends = cell.pivot(index="seed", columns="arm", values="end")
    if not {GSPO, GRPO} <= set(ends):
        return ""
    return t_interval((ends[GSPO] - ends[GRPO]).dropna().to_numpy()).text("+.3f")


# ----------------------------------------------------------------------------------------------------------
# figure
def draw(
    data: Data,
    numbers: pd.DataFrame,
    x: str,
    row_setting: str,
    out: Path,
    view: View | None = None,
    end: int = WINDOW,
) -> list[Path]:
    """Draw a row of panels for each value of `row_setting`, with the columns PANELS."""
    values, groups = ordered(numbers["x"]), ordered(numbers["row"])
    drawn, view = looks(sorted(numbers["arm"].unique())), view or View()
    figure = style.canvas(0.4 + 2.1 * len(groups), view)
    axes = figure.subplots(len(groups), len(PANELS), squeeze=False, sharex=True, sharey="col")
    for line, group in zip(axes, groups, strict=True):
        rows = numbers[numbers["row"] == group]
        for ax, column in zip(line, PANELS, strict=True):
            panel(ax, rows, column, values, drawn)
        line[0].set_ylabel(f"{group} {NAMES.get(row_setting, row_setting)}" if row_setting else "")
    for ax, column in zip(axes[0], PANELS, strict=True):
        # so that the collapse rule's 0.3 is in view and smaller falls look like noise
        least = 0.35 if column == "fall" else 1e-3
        room = 2 if column == "clipped" else 1.05  # its axis is logarithmic
        ax.set_ylim(0, room * max(numbers[column].max(), least))  # the rows share this axis
    for ax, (title, label) in zip(axes[0], PANELS.values(), strict=True):
        ax.set_title(f"{title}\n", pad=2)
        ax.text(
            0, 1.03, label.format(end=end), transform=ax.transAxes, fontsize=8.5, color=style.MUTED
        )
    for ax in axes[-1]:
        ax.set_xticks(
            range(len(values)),
            [f"{value:g}" if isinstance(value, float) else f"{value}" for value in values],
        )
        ax.set_xlabel(NAMES.get(x, x))
    style.key(axes[0, -1], dict(sorted(drawn.items(), reverse=True)), loc="best")
    study = Path(data.runs[0].settings["study"]).name
    return style.save(
        figure, out, f"fig_sweep_{study}", caption(data, numbers, x, row_setting), view
    )


def ordered(column: pd.Series) -> list:
    """Return the values with numbers first, by size, then words."""
    return sorted(
        column.unique(), key=lambda v: (0, v, "") if isinstance(v, Real) else (1, 0, str(v))
    )


def panel(ax: Axes, rows: pd.DataFrame, column: str, values: list, drawn: dict[str, Look]) -> None:
    """Draw seeds as pale dots, or crosses where they collapsed, and the mean as a line. The reward
    of the first batches is dashed."""
    for name, runs in rows.groupby("arm", sort=True):
        shift, own = 0.1 * (list(drawn).index(name) - (len(drawn) - 1) / 2), drawn[name]
        place = runs["x"].map(values.index).to_numpy() + shift
        fell = runs["collapsed"].to_numpy(bool)
        y = runs[column].to_numpy(float)
        ax.plot(
            place[~fell],
            y[~fell],
            own.marker,
            ms=4.5,
            color=tint(own.colour, 0.5),
            mec="white",
            mew=0.4,
        )
        ax.plot(place[fell], y[fell], "x", ms=5, mew=1.4, color=tint(own.colour, 0.8))
        means = {value: runs.loc[runs["x"] == value, column].mean() for value in values}
        ax.plot(
            [i + shift for i in range(len(values))],
            means.values(),
            color=own.colour,
            ls=own.line,
            lw=1.8,
        )
    if column == "end":
        starts = [rows.loc[rows["x"] == value, "start"].mean() for value in values]
        ax.plot(range(len(values)), starts, color=style.MUTED, lw=1, ls="--")
    if column == "clipped":
        ax.set_yscale("symlog", linthresh=1e-4)


def caption(data: Data, numbers: pd.DataFrame, x: str, row_setting: str) -> str:
    """Return the caption: what was run and what is drawn."""
    run = data.runs[0]
    seeds = numbers.groupby(["row", "x", "arm"])["seed"].count()
    counted = f"{seeds.min()}" if seeds.min() == seeds.max() else f"{seeds.min()} to {seeds.max()}"
    words = f"{len(numbers)} runs of {run.planned} rollout batches, {counted} seeds each. Marks: seeds; crosses: "
    words += "seeds that collapsed by the registered rule; lines: means; dashed: reward of the first batches. "
    words += "Fall: of the smoothed reward from its peak (of batch 10 on) to the end. Clipped share: axis linear below "
    words += "0.0001. Arms are shifted sideways a little, so that no mark hides another."
    if x in DERIVED:
        words += f" Along with {NAMES[x]} change: {', '.join(DERIVED[x])}."
    if "operands" in x:
        lengths = [
            numbers.loc[numbers["x"] == value, "length"].mean() for value in ordered(numbers["x"])
        ]
        words += f" Tokens of a response: {', '.join(f'{n:.0f}' for n in lengths)}."
    return words


if __name__ == "__main__":
    script.command(main)
