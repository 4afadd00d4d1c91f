"""Routing: how many experts do the routers keep from the start of a step to its later mini-batches, layer by layer?

    python analysis/fig_routing.py runs/paper_figures

Expected, if the paper is right: about 10 % of the experts change with an update (consistency 0.9), in every arm, and
more in deeper models. The verdict follows the criterion in analysis/claims.py.
Writes fig_routing.pdf and .png. Metrics: routing/consistency_layer_<n> (the router's own choice, also where a replay
overrides it; mini-batches 2..N against the step's start).
"""

from __future__ import annotations

from pathlib import Path

import claims
import load
import matplotlib
import numpy as np
import script
import style
from load import Data
from matplotlib.axes import Axes
from stats import centred_mean, estimate

PREFIX = "routing/consistency_layer_"
MOST = 6  # arms: a panel each
PAPER = 0.9  # section 5.3: "roughly 10% of the experts" differ after an update


def judged(data: Data) -> list[claims.Claim]:
    """The claims that this figure speaks to."""
    return [claim for claim in (claims.experts_change(data),) if claim]


def draw(data: Data, out: Path) -> list[Path]:
    """One panel per arm: consistency by batch, a line per layer. Last panel: mean by layer, a line per arm."""
    layers = sorted(int(name.removeprefix(PREFIX)) for name in data.metrics(PREFIX))
    if not layers:
        load.die(f"fig_routing needs {PREFIX}*; these runs report none (a model without MoE layers)")
    figure = style.canvas(3.1)
    axes = figure.subplots(1, len(data.arms) + 1, sharey=True)
    for ax, arm in zip(axes, data.arms, strict=False):
        by_step(ax, data, arm, layers)
    name_layers(axes[len(data.arms) - 1])
    by_layer(axes[-1], data, layers)
    axes[0].set_ylabel("routing consistency")
    words = f"Lines: mean over seeds, smoothed over ±5 batches; grey dashes: the paper's {PAPER}. Right: mean over "
    words += "batches, bars 95 % intervals (over seeds; of a single seed within the run)."
    caption = f"{load.describe(data, data.arms)} {words}\n{' '.join(c.sentence() for c in judged(data))}"
    return style.save(figure, out, "fig_routing", caption)


def by_step(ax: Axes, data: Data, arm: str, layers: list[int]) -> None:
    """A line per layer, dark to light with depth."""
    hues = matplotlib.colormaps["viridis"](np.linspace(0, 0.75, len(layers)))
    for layer, hue in zip(layers, hues, strict=True):
        mean = data.table(arm, f"{PREFIX}{layer}").mean(axis=1).dropna()
        if mean.empty:
            continue
        ax.plot(mean.index, centred_mean(mean), color=hue, lw=1.5, label=f"layer {layer}")
    ax.axhline(PAPER, color=style.MUTED, lw=1, ls="--", zorder=1)
    ax.set_title(style.short(arm), color=style.colour(arm))
    ax.set_xlabel("rollout batch")


def name_layers(ax: Axes) -> None:
    """Names of the layers at the ends of their lines: of all if they are few, else of the first and the last."""
    lines = [line for line in ax.lines if line.get_label().startswith("layer")]
    named = lines if len(lines) <= 6 else [lines[0], lines[-1]]
    style.label_ends(ax, [(line.get_ydata()[-1], line.get_label(), line.get_color()) for line in named])


def by_layer(ax: Axes, data: Data, layers: list[int]) -> None:
    """Mean over batches by layer, arms side by side."""
    shift = np.linspace(-0.12, 0.12, len(data.arms)) if len(data.arms) > 1 else [0.0]
    for arm, offset in zip(data.arms, shift, strict=True):
        means = [estimate(data.table(arm, f"{PREFIX}{layer}")) for layer in layers]
        x, y = np.array(layers) + offset, np.array([m.mean for m in means])
        ends = np.array([[m.mean - m.low for m in means], [m.high - m.mean for m in means]])
        ax.errorbar(x, y, yerr=np.nan_to_num(ends), color=style.colour(arm), marker="o", ms=4, lw=1.2)
    ax.axhline(PAPER, color=style.MUTED, lw=1, ls="--", zorder=1)
    ax.set_title("Mean by layer")
    ax.set_xlabel("MoE layer")
    ax.set_xticks(layers if len(layers) <= 8 else layers[:: len(layers) // 6])


if __name__ == "__main__":
    script.command(lambda: script.run(__doc__, draw, judged))
