"""Routing: how many experts do the routers keep from the start of a step to its later mini-batches,
layer by layer?

    gspo figure routing runs/paper_figures

Expected, if the paper is right: about 10 % of the experts change with an update (consistency 0.9),
in every arm, and more in deeper models. The verdict follows the criterion in analysis/claims.py.
Writes fig_routing.pdf and .png. Metrics: routing/consistency_layer_<n> (the router's own choice,
also where a replay overrides it; mini-batches 2..N against the step's start).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from gspo.analysis import claims, load, panels, script, style
from gspo.analysis.load import Data
from gspo.analysis.looks import Look, looks, tint
from gspo.analysis.stats import centred_mean, estimate
from gspo.analysis.style import View
from matplotlib.axes import Axes

PREFIX = "routing/consistency_layer_"
MOST = 12  # the most arms, since each has a panel
PER_ROW = 4  # panels
PAPER = 0.9  # section 5.3: "roughly 10% of the experts" differ after an update


def judged(data: Data) -> list[claims.Claim]:
    """Return the claims that this figure speaks to."""
    return [claim for claim in (claims.experts_change(data),) if claim]


def lacking(data: Data) -> str | None:
    """Return why the figure cannot be drawn, or None if it can."""
    if not data.metrics(PREFIX):
        return f"needs {PREFIX}*, which these runs have not recorded: their models have no experts, so nothing is routed"
    return load.too_many(data, MOST) if len(data.arms) > MOST else None


def draw(data: Data, out: Path, view: View | None = None) -> list[Path]:
    """Draw one panel per arm with consistency by batch and a line per layer; the last panel has the
    mean by layer and a line per arm."""
    if why := lacking(data):
        load.die(f"fig_routing {why}")
    layers, view = (
        sorted(int(name.removeprefix(PREFIX)) for name in data.metrics(PREFIX)),
        view or View(),
    )
    drawn = looks(data.arms)
    columns = min(len(drawn) + 1, PER_ROW)
    lines = -(-(len(drawn) + 1) // columns)
    figure = style.canvas(2.7 * lines, view)
    figure.set_size_inches(
        view.width, figure.get_figheight() + style.key_above(figure, drawn, view)
    )
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for ax, arm in zip(axes, drawn, strict=False):
        by_step(ax, data, arm, layers, view)
    name_layers(axes[len(drawn) - 1])
    by_layer(axes[len(drawn)], data, layers, drawn)
    for ax in axes[len(drawn) + 1 :]:
        ax.set_axis_off()
    for row in grid:
        row[0].set_ylabel("routing consistency")
    words = (
        f"{panels.named(data.arms)} Lines: mean over seeds, smoothed over ±{view.smooth} batches"
    )
    words += (
        " (thin: single seeds)" * view.seeds
        + f"; grey dashes: the paper's {PAPER}. Last panel: mean over batches, "
    )
    words += "bars 95 % intervals (over seeds; of a single seed within the run)."
    caption = "\n".join(
        [f"{load.describe(data, data.arms)} {words}", *(c.sentence() for c in judged(data))]
    )
    return style.save(figure, out, "fig_routing", caption, view)


def by_step(ax: Axes, data: Data, arm: str, layers: list[int], view: View) -> None:
    """Draw a line per layer, from dark to light with depth."""
    hues = matplotlib.colormaps["viridis"](np.linspace(0, 0.75, len(layers)))
    for layer, hue in zip(layers, hues, strict=True):
        table = data.table(arm, f"{PREFIX}{layer}")
        mean, reach = table.mean(axis=1).dropna(), 2 * view.smooth
        if mean.empty:
            continue
        for seed in table if view.seeds else ():
            line = table[seed].dropna()
            ax.plot(
                line.index,
                centred_mean(line, reach),
                color=tint(matplotlib.colors.to_hex(hue), 0.45),
                lw=0.7,
            )
        ax.plot(mean.index, centred_mean(mean, reach), color=hue, lw=1.5, label=f"layer {layer}")
    ax.axhline(PAPER, color=style.MUTED, lw=1, ls="--", zorder=1)
    ax.set_title(style.short(arm).replace(", ", "\n"))
    style.training_axis(ax, 0, view)


def name_layers(ax: Axes) -> None:
    """Write the layers' names at the ends of their lines: all names if there are few, else the
    first and the last.
    """
    lines = [line for line in ax.lines if line.get_label().startswith("layer")]
    ends, named = [], lines if len(lines) <= 6 else [lines[0], lines[-1]]
    for line in named:
        own = Look(matplotlib.colors.to_hex(line.get_color()), "")
        ends.append((line.get_ydata()[-1], line.get_label(), own))
    style.label_ends(ax, ends)


def by_layer(ax: Axes, data: Data, layers: list[int], drawn: dict[str, Look]) -> None:
    """Draw the mean over batches by layer, with the arms side by side."""
    shift = np.linspace(-0.12, 0.12, len(data.arms)) if len(data.arms) > 1 else [0.0]
    for arm, offset in zip(data.arms, shift, strict=True):
        means = [estimate(data.table(arm, f"{PREFIX}{layer}")) for layer in layers]
        x, y = np.array(layers) + offset, np.array([m.mean for m in means])
        ends = np.array([[m.mean - m.low for m in means], [m.high - m.mean for m in means]])
        ax.errorbar(
            x,
            y,
            yerr=np.nan_to_num(ends),
            ecolor=drawn[arm].colour,
            ms=4.5,
            lw=1.2,
            **drawn[arm].plot(),
        )
    ax.axhline(PAPER, color=style.MUTED, lw=1, ls="--", zorder=1)
    ax.set_title("Mean by layer")
    ax.set_xlabel("MoE layer")
    ax.set_xticks(layers if len(layers) <= 8 else layers[:: len(layers) // 6])


def main() -> None:
    script.run(__doc__, draw, judged)


if __name__ == "__main__":
    script.command(main)
