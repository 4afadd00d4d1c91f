"""The curves of any study: a panel per metric, and the same look for an arm in every panel.

    gspo figure curves runs/objectives
    gspo figure curves runs/learning_rate --metrics reward/mean optim/grad_norm

Any metric of gspo/tracking/metrics.py can be drawn (members of a family by their full names), and
metrics of your own, such as custom/answers; metrics that the runs have not recorded are left out.
Writes fig_curves_<study>.pdf and .png.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from gspo.analysis import load, panels, script, style
from gspo.analysis.load import Data, Run
from gspo.analysis.looks import Look, looks
from gspo.analysis.runs import nearest
from gspo.analysis.style import View
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
PER_ROW = 3
MOST_COLUMNS = 6  # most combinations of settings that stand side by side
CROWD = 6  # with more arms than this, bands would hide each other
# with fewer points than this a metric is a held-out score, measured now and then, and is not
# smoothed
SPARSE = 20


def main() -> None:
    options = script.parser(__doc__)
    options.add_argument(
        "--metrics", nargs="+", default=list(METRICS), help=f"default: {' '.join(METRICS)}"
    )
    args = options.parse_args()
    for path in draw(
        script.read(args, several_studies=True), args.out, script.view(args), args.metrics
    ):
        print(path)


def draw(
    data: Data, out: Path, view: View | None = None, metrics: list[str] | tuple[str, ...] = METRICS
) -> list[Path]:
    """Draw the curves. Where the runs vary settings beside those that make an arm, each combination
    of their values is a column of panels. Raises Refused if the runs have recorded none of the
    metrics, or vary too much for a page."""
    shown, view = recorded(data, metrics), view or View()
    columns = combinations(data)
    if len(columns) > MOST_COLUMNS:
        load.die(
            f"fig_curves shows {MOST_COLUMNS} combinations of settings, not {len(columns)}: {load.choose_one(data)}"
        )
    if len(columns) > 1:
        drawn = looks(list(dict.fromkeys(arm for runs in columns.values() for arm in runs.arms)))
        width = max(view.width, 0.6 + 2.6 * len(columns))
        figure = Figure(figsize=(width, 2.1 * len(shown)), layout="constrained")
        view = replace(view, width=width)
        grid = figure.subplots(len(shown), len(columns), sharey="row", sharex=True, squeeze=False)
        for column, (title, runs) in enumerate(columns.items()):
            for row, metric in enumerate(shown):
                panel(grid[row, column], runs, metric, drawn, view)
                grid[row, column].set_title(f"{title}\n{metric}" if row == 0 else metric)
        for ax in grid[:, 1:].flat:
            ax.set_ylabel("")
        for ax in grid[:-1].flat:
            ax.set_xlabel("")
    else:
        drawn = looks(data.arms)
        figure = style.canvas(2.3 * -(-len(shown) // PER_ROW), view)
        axes = figure.subplots(-(-len(shown) // PER_ROW), min(PER_ROW, len(shown)), squeeze=False)
        for ax, metric in zip(axes.flat, shown, strict=False):
            panel(ax, data, metric, drawn, view)
        for ax in axes.flat[len(shown) :]:
            ax.set_axis_off()
        for ax in axes.flat[: max(0, len(shown) - axes.shape[1])]:
            ax.set_xlabel("")  # another panel is below
    figure.set_size_inches(
        view.width, figure.get_figheight() + style.key_above(figure, drawn, view)
    )
    how = panels.how_drawn(data, data.arms, view, bands=len(drawn) <= CROWD)
    words = [
        load.describe(data, data.arms),
        how,
        "Means are drawn as far as all seeds of the arm have come; metrics",
    ]
    words.append(
        f"with fewer than {SPARSE} points are not smoothed; on logarithmic axes values of 0 are left out."
    )
    return style.save(figure, out, f"fig_curves_{study(data.runs)}", " ".join(words), view)


def combinations(data: Data) -> dict[str, Data]:
    """Return the runs by the values of the settings that vary beside those that make an arm, under
    a text that names the values; one text where none vary. In each the arms have their names
    without these settings."""
    keys = list(load.varied(data))
    found: dict[str, list[Run]] = {}
    for arm in data.arms:
        for run in data.of(arm):
            values = [f"{key.rpartition('.')[2]}={run.settings.get(key)}" for key in keys]
            found.setdefault("\n".join(values), []).append(run)
    if len(found) < 2:
        return {"": data}

    def plain(run: Run) -> Run:
        kept = {key: value for key, value in run.beside.items() if key not in keys}
        beside = ", ".join(f"{key}={value}" for key, value in kept.items())
        return replace(
            run, arm=f"{run.base} [{beside}]" if kept else run.base or run.arm, beside=kept
        )

    ordered = sorted(
        found.items(),
        key=lambda item: [load.numbers_first(item[1][0].settings.get(key)) for key in keys],
    )
    return {text: Data([plain(run) for run in runs]) for text, runs in ordered}


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
        load.die(
            f"the runs have recorded none of {', '.join(metrics)}{nearest(metrics[0], data.metrics(''))}"
        )
    return [metric for metric in metrics if metric not in missing]


def panel(ax: Axes, data: Data, metric: str, drawn: dict[str, Look], view: View) -> None:
    """Draw one metric of all arms. Step 0, the evaluation before training, is included where the
    axis has a 0.
    """
    if metric not in data.rows or not any(arm in data.arms for arm in drawn):
        ax.set_axis_off()
        return
    positive = data.rows[metric][data.rows[metric] > 0]
    log = metric in LOGARITHMIC and len(positive) > 0 and positive.max() > 2 * positive.min()
    for arm, own in drawn.items():
        if arm not in data.arms:
            continue
        table = data.table(arm, metric, first_step=int(view.log_x)).dropna(how="all")
        how = view if len(table) >= SPARSE else replace(view, smooth=0)
        panels.curve(
            ax, table, own, how, band=len(drawn) <= CROWD, least=positive.min() if log else -np.inf
        )
    ax.set_title(metric)
    ax.set_ylabel(data.definition(metric).unit or "unit not recorded")
    style.training_axis(ax, 0, view)
    if log:
        ax.set_yscale("log")


def study(runs: list[Run]) -> str:
    """Return the study's name, or the names of up to three studies, or their number, for file names
    and titles.
    """
    names = sorted({str(run.settings.get("study", "runs")) for run in runs})
    return "_".join(names) if len(names) < 4 else f"{len(names)}_studies"


if __name__ == "__main__":
    script.command(main)
