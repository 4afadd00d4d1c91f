"""The curves of any study: a panel per metric, and the same style for an arm in every panel.

    gspo figure curves runs/objectives
    gspo figure curves runs/learning_rate metrics=[reward/mean,optim/grad_norm]

Any metric of gspo/tracking/metrics.py can be drawn (members of a family by their full names), and
metrics of your own, such as custom/answers. Metrics that the runs have not recorded are left out.
Writes fig_curves_<study>.pdf and .png.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gspo.analysis import choosing, load, panels, script, style
from gspo.analysis.arm_styles import ArmStyles, arm_styles
from gspo.analysis.load import Data, Run
from gspo.analysis.runs import RunsError, nearest
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.io.arguments import command_options, option

METRICS = (
    "reward/mean",
    "clip/token_active",
    "routing/consistency",
    "policy/entropy",
    "optim/grad_norm",
    "length/mean",
)
LOGARITHMIC = (
    "clip/token_active",
    "optim/grad_norm",
    "mismatch/k3",
    "mismatch/logp_abs",
    "ratio/sequence_log_abs",
)
PANELS_PER_ROW = 3
MAX_COLUMNS = 6  # combinations of settings that stand side by side
MAX_BANDS = 6  # with more arms than this, bands would hide each other
# A metric with fewer points than this is a held-out score, measured now and then. It is not
# smoothed.
SPARSE = 20


@dataclass(frozen=True, kw_only=True)
class Options(script.Options):
    """The options of this figure."""

    metrics: tuple[str, ...] = option(METRICS, "the metrics, a panel for each")


def main() -> None:
    options = command_options(Options, __doc__)
    data = script.read(options, several_studies=True)
    for path in draw(data, options.out, options, options.metrics):
        print(path)


def draw(
    data: Data,
    out: Path,
    options: FigureOptions = DEFAULTS,
    metrics: Sequence[str] = METRICS,
) -> list[Path]:
    """Draw the curves.

    If the runs vary settings that do not make an arm, each combination of their values is a column
    of panels. Raises RunsError if the runs have recorded none of the metrics, or vary too much for
    a page.
    """
    drawn = recorded(data, metrics)
    columns = combinations(data)
    if len(columns) > MAX_COLUMNS:
        raise RunsError(
            f"fig_curves shows {MAX_COLUMNS} combinations of settings, not {len(columns)}: "
            f"{choosing.choose_one(data)}"
        )
    if len(columns) > 1:
        arms = list(dict.fromkeys(arm for runs in columns.values() for arm in runs.arms))
        options = replace(options, width=max(options.width, 0.6 + 2.6 * len(columns)))
    else:
        arms = data.arms
    styles = arm_styles(arms)
    if len(columns) > 1:
        figure = draw_columns(columns, drawn, styles, options)
    else:
        figure = draw_grid(data, drawn, styles, options)
    style.legend_above(figure, styles, options)
    sentences = [
        load.describe(data, data.arms),
        panels.how_drawn(data, data.arms, options, bands=len(styles) <= MAX_BANDS),
        "Means are drawn as far as all seeds of the arm have come; metrics with fewer than "
        f"{SPARSE} points are not smoothed; on logarithmic axes values of 0 are left out.",
    ]
    name = f"fig_curves_{study_name(data.runs)}"
    return style.save(figure, out, name, " ".join(sentences), options)


def draw_columns(
    columns: dict[str, Data],
    metrics: list[str],
    styles: ArmStyles,
    options: FigureOptions,
) -> Figure:
    """Return the figure of several combinations of settings, a column for each."""
    figure = style.canvas(2.1 * len(metrics), options)
    shape = (len(metrics), len(columns))
    grid = figure.subplots(*shape, sharey="row", sharex=True, squeeze=False)
    for column, (title, data) in enumerate(columns.items()):
        for row, metric in enumerate(metrics):
            draw_panel(grid[row, column], data, metric, styles, options)
            grid[row, column].set_title(f"{title}\n{metric}" if row == 0 else metric)
    for ax in grid[:, 1:].flat:
        ax.set_ylabel("")
    for ax in grid[:-1].flat:
        ax.set_xlabel("")
    return figure


def draw_grid(
    data: Data,
    metrics: list[str],
    styles: ArmStyles,
    options: FigureOptions,
) -> Figure:
    """Return the figure of runs at a single setting: the metrics fill the rows of a grid."""
    rows = math.ceil(len(metrics) / PANELS_PER_ROW)
    columns = min(PANELS_PER_ROW, len(metrics))
    figure = style.canvas(2.3 * rows, options)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax, metric in zip(axes.flat, metrics, strict=False):
        draw_panel(ax, data, metric, styles, options)
    for ax in axes.flat[len(metrics) :]:
        ax.set_axis_off()
    for ax in axes.flat[: max(0, len(metrics) - columns)]:
        ax.set_xlabel("")  # another panel is below
    return figure


def combinations(data: Data) -> dict[str, Data]:
    """Return the runs by the values of the settings that vary and do not make an arm.

    The key is a text that names the values, "" if no setting varies. In each combination the arms
    have their names without these settings.
    """
    keys = list(choosing.varied(data))
    runs_by_text: dict[str, list[Run]] = {}
    for arm in data.arms:
        for run in data.of(arm):
            values = [f"{key.rpartition('.')[2]}={run.settings.get(key)}" for key in keys]
            runs_by_text.setdefault("\n".join(values), []).append(run)
    if len(runs_by_text) < 2:
        return {"": data}

    def order(item: tuple[str, list[Run]]) -> list:
        _, runs = item
        return [choosing.numbers_first(runs[0].settings.get(key)) for key in keys]

    columns = {}
    for text, runs in sorted(runs_by_text.items(), key=order):
        columns[text] = Data([without_settings(run, keys) for run in runs])
    return columns


def without_settings(run: Run, keys: list[str]) -> Run:
    """Return the run with an arm's name that leaves out these settings."""
    appended = {key: value for key, value in run.appended.items() if key not in keys}
    arm = load.arm_with(run.base or run.arm, appended)
    return replace(run, arm=arm, appended=appended)


def recorded(data: Data, metrics: Sequence[str]) -> list[str]:
    """Return the metrics of this list that the runs have recorded."""
    for metric in metrics:
        try:
            data.definition(metric)
        except KeyError as error:
            raise RunsError(str(error.args[0])) from None
    missing = [metric for metric in metrics if metric not in data.metrics(metric)]
    if missing and tuple(metrics) != METRICS:
        print(f"note: the runs have not recorded {', '.join(missing)}")
    if len(missing) == len(metrics):
        suggestion = nearest(metrics[0], data.metrics(""))
        raise RunsError(f"the runs have recorded none of {', '.join(metrics)}{suggestion}")
    return [metric for metric in metrics if metric not in missing]


def draw_panel(
    ax: Axes,
    data: Data,
    metric: str,
    styles: ArmStyles,
    options: FigureOptions,
) -> None:
    """Draw a metric of all arms.

    Step 0, the evaluation before training, is included unless the x axis is logarithmic.
    """
    if metric not in data.rows or not any(arm in data.arms for arm in styles):
        ax.set_axis_off()
        return
    positive = data.rows[metric][data.rows[metric] > 0]
    minimum = -np.inf
    logarithmic = metric in LOGARITHMIC and positive.max() > 2 * positive.min()
    if logarithmic:
        minimum = positive.min()
    for arm, line in styles.items():
        if arm not in data.arms:
            continue
        table = data.table(arm, metric, first_step=int(options.log_x)).dropna(how="all")
        arm_options = options if len(table) >= SPARSE else replace(options, smooth=0)
        band = len(styles) <= MAX_BANDS
        panels.curve(ax, table, line, arm_options, band=band, minimum=minimum)
    ax.set_title(metric)
    ax.set_ylabel(data.definition(metric).unit or "unit not recorded")
    style.training_axis(ax, 0, options)
    if logarithmic:
        ax.set_yscale("log")


def study_name(runs: list[Run]) -> str:
    """Return the names of up to three studies, or their number, for file names and titles."""
    names = sorted({str(run.settings.get("study", "runs")) for run in runs})
    return "_".join(names) if len(names) < 4 else f"{len(names)}_studies"


if __name__ == "__main__":
    script.command(main)
