"""The curves of any study: a panel per metric, a colour per arm.

    python analysis/fig_curves.py runs/objectives
    python analysis/fig_curves.py runs/learning_rate --metrics reward/mean optim/grad_norm

Reads any metric of gspo/metrics.py (a family's members by their own names); those that the runs have not recorded are
left out. Writes fig_curves_<study>.pdf and .png.
"""

from __future__ import annotations

import re
from pathlib import Path

import load
import matplotlib
import numpy as np
import script
import style
from load import Data, Run
from matplotlib.axes import Axes
from stats import WINDOW, centred_mean

from gspo.metrics import lookup

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
CROWD = 6  # with more arms than these their seeds are not drawn one by one
DISTINCT = (*style.COLOURS.values(), "#E69F00", "#56B4E9", "#CC79A7", "#555555")  # told apart; more arms get a scale


def main() -> None:
    options = script.parser(__doc__)
    options.add_argument("--metrics", nargs="+", default=list(METRICS), help=f"default: {' '.join(METRICS)}")
    args = options.parse_args()
    data = load.load(args.runs)
    for note in data.notes:
        print(f"note: {note}")
    for path in draw(data, args.out, args.metrics):
        print(path)


def draw(data: Data, out: Path, metrics: list[str] | tuple[str, ...] = METRICS) -> list[Path]:
    """Dies if the runs have recorded none of the metrics."""
    for metric in metrics:
        try:
            lookup(metric)
        except KeyError as error:
            load.die(str(error.args[0]))
    missing = [metric for metric in metrics if metric not in data.rows or data.rows[metric].isna().all()]
    if missing and tuple(metrics) != METRICS:
        print(f"note: the runs have not recorded {', '.join(missing)}")
    shown = [metric for metric in metrics if metric not in missing]
    if not shown:
        load.die(f"the runs have recorded none of {', '.join(metrics)}")
    rows, hues = -(-len(shown) // PER_ROW), colours(data.arms)
    names = [re.sub(r"\w+\.(\w+=)", r"\1", style.short(arm).replace("\n", " ")) for arm in hues]
    letters = 105  # of the legend's size are about as wide as the page
    columns = max(1, letters // (max(map(len, names)) + 6))
    legend = 0.2 * -(-len(hues) // columns)
    figure = style.canvas(2.3 * rows + 0.3 + legend)
    axes = figure.subplots(rows, min(PER_ROW, len(shown)), squeeze=False)
    for ax, metric in zip(axes.flat, shown, strict=False):
        panel(ax, data, metric, hues)
    for ax in axes.flat[len(shown) :]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel("rollout batch")
    lines = [matplotlib.lines.Line2D([], [], color=hue, lw=2.2) for hue in hues.values()]
    figure.legend(lines, names, loc="outside upper left", ncols=columns, fontsize=8.5)
    drawn = "Thin: single seeds. Thick: their mean" if len(hues) <= CROWD else "Lines: means over seeds"
    caption = f"{load.describe(data, data.arms)} {drawn}, smoothed over ±{WINDOW // 2} batches, as far as all seeds of"
    caption += " the arm have come; on logarithmic axes values of 0 are left out."
    return style.save(figure, out, f"fig_curves_{study(data.runs)}", caption)


def panel(ax: Axes, data: Data, metric: str, hues: dict[str, str]) -> None:
    """One metric of all arms. Held-out scores, taken now and then, are joined by lines and not smoothed."""
    positive = data.rows[metric][data.rows[metric] > 0]
    log = metric in LOGARITHMIC and len(positive) > 0 and positive.max() > 2 * positive.min()
    for arm, hue in hues.items():
        table = data.table(arm, metric, first_step=0).dropna(how="all")
        for seed in table if len(hues) <= CROWD else ():
            values = table[seed].dropna()
            ax.plot(values.index, drawable(values, log), color=style.tint(hue, 0.4), lw=0.6, zorder=1)
        whole = table.dropna()
        if len(whole):
            mean = whole.mean(axis=1).to_numpy()
            smooth = centred_mean(mean) if len(whole) > 2 * WINDOW else mean
            ax.plot(whole.index, drawable(smooth, log), color=hue, lw=1.8, zorder=2)
    ax.set_title(metric)
    ax.set_ylabel(lookup(metric).unit)
    if log:
        ax.set_yscale("log")


def drawable(values: np.ndarray, log: bool) -> np.ndarray:
    """Values that a logarithmic axis cannot show become gaps."""
    values = np.asarray(values, float)
    return np.where(values > 0, values, np.nan) if log else values


def colours(arms: list[str]) -> dict[str, str]:
    """The arms' own colours where these tell them apart; else distinct ones; a scale for more than there are."""
    own = [style.colour(arm) for arm in arms]
    if len(set(own)) == len(own):
        return dict(zip(arms, own, strict=True))
    if len(arms) <= len(DISTINCT):
        return dict(zip(arms, DISTINCT, strict=False))
    scale = matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(arms)))
    return {arm: matplotlib.colors.to_hex(hue) for arm, hue in zip(arms, scale, strict=True)}


def study(runs: list[Run]) -> str:
    """The studies' names, for files and titles; of many their number."""
    names = sorted({str(run.settings.get("study", "runs")) for run in runs})
    return "_".join(names) if len(names) < 4 else f"{len(names)}_studies"


if __name__ == "__main__":
    script.command(main)
