"""The curves of any study: a panel per metric, and the same look for an arm in every panel.

    python analysis/fig_curves.py runs/objectives
    python analysis/fig_curves.py runs/learning_rate --metrics reward/mean optim/grad_norm

Any metric of gspo/tracking/metrics.py can be drawn (members of a family by their full names), and metrics of your own,
such as custom/answers; metrics that the runs have not recorded are left out. Writes fig_curves_<study>.pdf and .png.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import load, panels, script, style
from analysis.load import Data, Run
from analysis.looks import Look, looks
from analysis.runs import nearest
from analysis.style import View

METRICS = (
    "reward/mean",
    "clip/token_active",
    "routing/consistency",
    "policy/entropy",
    "optim/grad_norm",
    "length/mean",
)
LOGARITHMIC = ("clip/token_active", "optim/grad_norm", "mismatch/k3", "mismatch/logp_abs", "ratio/sequence_log_abs")
PER_ROW = 3
CROWD = 6  # with more arms than this, bands would hide each other
SPARSE = 20  # with fewer points than this a metric is a held-out score, measured now and then, and is not smoothed


def main() -> None:
    options = script.parser(__doc__)
    options.add_argument("--metrics", nargs="+", default=list(METRICS), help=f"default: {' '.join(METRICS)}")
    args = options.parse_args()
    for path in draw(script.read(args, several_studies=True), args.out, script.view(args), args.metrics):
        print(path)


def draw(data: Data, out: Path, view: View | None = None, metrics: list[str] | tuple[str, ...] = METRICS) -> list[Path]:
    """Draw the curves. Raises Refused if the runs have recorded none of the metrics."""
    shown, view = recorded(data, metrics), view or View()
    drawn = looks(data.arms)
    names = [re.sub(r"\w+\.(\w+=)", r"\1", style.short(arm).replace("\n", " ")) for arm in drawn]
    letters = int(11.6 * view.width)  # this many letters of the legend's size are about as wide as the page
    columns = max(1, letters // (max(map(len, names)) + 8))
    figure = style.canvas(2.3 * -(-len(shown) // PER_ROW) + 0.3 + 0.2 * -(-len(drawn) // columns), view)
    axes = figure.subplots(-(-len(shown) // PER_ROW), min(PER_ROW, len(shown)), squeeze=False)
    for ax, metric in zip(axes.flat, shown, strict=False):
        panel(ax, data, metric, drawn, view)
    for ax in axes.flat[len(shown) :]:
        ax.set_axis_off()
    for ax in axes.flat[: max(0, len(shown) - axes.shape[1])]:
        ax.set_xlabel("")  # another panel is below
    lines = [Line2D([], [], lw=2, ms=5, **own.plot()) for own in drawn.values()]
    figure.legend(lines, names, loc="outside upper left", ncols=columns, fontsize=8.5, handlelength=2.6)
    how = panels.how_drawn(data, list(drawn), view, bands=len(drawn) <= CROWD)
    words = [load.describe(data, data.arms), how, "Means are drawn as far as all seeds of the arm have come; metrics"]
    words.append(f"with fewer than {SPARSE} points are not smoothed; on logarithmic axes values of 0 are left out.")
    return style.save(figure, out, f"fig_curves_{study(data.runs)}", " ".join(words), view)


def recorded(data: Data, metrics: list[str] | tuple[str, ...]) -> list[str]:
    """Return the metrics of this list that the runs have recorded."""
    for metric in metrics:
        try:
            data.definition(metric)
        except KeyError as error:
            load.die(str(error.args[0]))
    missing = [metric for metric in metrics if not data.metrics(metric)]
    if missing and tuple(metrics) != METRICS:
        print(f"note: the runs have not recorded {', '.join(missing)}")
    if len(missing) == len(metrics):
        load.die(f"the runs have recorded none of {', '.join(metrics)}{nearest(metrics[0], data.metrics(''))}")
    return [metric for metric in metrics if metric not in missing]


def panel(ax: Axes, data: Data, metric: str, drawn: dict[str, Look], view: View) -> None:
    """Draw one metric of all arms. Step 0, the evaluation before training, is included where the axis has a 0."""
    positive = data.rows[metric][data.rows[metric] > 0]
    log = metric in LOGARITHMIC and len(positive) > 0 and positive.max() > 2 * positive.min()
    for arm, own in drawn.items():
        table = data.table(arm, metric, first_step=int(view.log_x)).dropna(how="all")
        how = view if len(table) >= SPARSE else replace(view, smooth=0)
        panels.curve(ax, table, own, how, band=len(drawn) <= CROWD, least=positive.min() if log else -np.inf)
    ax.set_title(metric)
    ax.set_ylabel(data.definition(metric).unit or "unit not recorded")
    style.training_axis(ax, 0, view)
    if log:
        ax.set_yscale("log")


def study(runs: list[Run]) -> str:
    """Return the study's name, or the names of up to three studies, or their number, for file names and titles."""
    names = sorted({str(run.settings.get("study", "runs")) for run in runs})
    return "_".join(names) if len(names) < 4 else f"{len(names)}_studies"


if __name__ == "__main__":
    script.command(main)
