"""Routing: how many experts do the routers keep within a step, layer by layer?

    gspo figure routing runs/paper_figures

Expected, if the paper is right: about 10 % of the experts change with an update (consistency 0.9),
in every arm, and more in deeper models. The verdict follows the criterion in
analysis/stability_claims.py. Writes fig_routing.pdf and .png. Metrics:
routing/consistency_layer_<n> (the router's own choice, also if a replay overrides it; mini-batches
2..N against the step's start).
"""

import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from gspo.analysis import choosing, load, panels, script, stability_claims, style
from gspo.analysis.arm_styles import ArmStyle, ArmStyles, arm_styles, tint
from gspo.analysis.grid import interval_line
from gspo.analysis.load import Data
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import centred_mean, estimate
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.analysis.verdicts import Claim, with_verdicts

PREFIX = "routing/consistency_layer_"
MAX_ARMS = 12  # each arm has a panel
MAX_COLUMNS = 4
MAX_NAMED_LAYERS = 6
MAX_LAYER_TICKS = 8
PAPER_CONSISTENCY = 0.9  # section 5.3: "roughly 10% of the experts" differ after an update


def judged_claims(data: Data) -> list[Claim]:
    """Return the claims that this figure shows."""
    claim = stability_claims.experts_change(data)
    return [claim] if claim else []


def why_not_drawn(data: Data) -> str | None:
    """Return why the figure cannot be drawn, or None if it can."""
    if not data.metrics(PREFIX):
        reason = ""
        if not panels.may_route(data):
            reason = ": their models have no experts, so nothing is routed"
        return f"needs {PREFIX}*, which these runs have not recorded{reason}"
    if len(data.arms) > MAX_ARMS:
        return choosing.too_many(data, MAX_ARMS)
    return None


def draw(data: Data, out: Path, options: FigureOptions = DEFAULTS) -> list[Path]:
    """Draw a panel per arm with consistency by batch and a line per layer.

    The last panel has the mean by layer and a line per arm.
    """
    reason = why_not_drawn(data)
    if reason:
        raise RunsError(f"fig_routing {reason}")
    layers = sorted(int(name.removeprefix(PREFIX)) for name in data.metrics(PREFIX))
    styles = arm_styles(data.arms)
    panel_count = len(styles) + 1
    columns = min(panel_count, MAX_COLUMNS)
    rows = math.ceil(panel_count / columns)
    figure = style.canvas(2.7 * rows, options)
    style.legend_above(figure, styles, options)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for ax, arm in zip(axes, styles, strict=False):
        draw_by_step(ax, data, arm, layers, options)
    name_layers(axes[panel_count - 2])
    draw_by_layer(axes[panel_count - 1], data, layers, styles)
    for ax in axes[panel_count:]:
        ax.set_axis_off()
    for row in grid:
        row[0].set_ylabel("routing consistency")
    thin = " (thin: single seeds)" if options.seeds else ""
    text = (
        f"{load.describe(data, data.arms)} {panels.arms_sentence(data.arms)} Lines: mean over "
        f"seeds, smoothed over ±{options.smooth} batches{thin}; grey dashes: the paper's "
        f"{PAPER_CONSISTENCY}. Last panel: mean over batches, bars 95 % intervals (over seeds; of "
        "a single seed within the run)."
    )
    caption = with_verdicts(text, judged_claims(data))
    return style.save(figure, out, "fig_routing", caption, options)


def draw_by_step(
    ax: Axes,
    data: Data,
    arm: str,
    layers: list[int],
    options: FigureOptions,
) -> None:
    """Draw a line per layer, from dark to light with depth."""
    window = 2 * options.smooth
    shades = np.linspace(0, 0.75, len(layers))
    for layer, shade in zip(layers, shades, strict=True):
        table = data.table(arm, f"{PREFIX}{layer}")
        mean = table.mean(axis=1).dropna()
        if mean.empty:
            continue
        colour = to_hex(matplotlib.colormaps["viridis"](shade))
        if options.seeds:
            pale = tint(colour, 0.45)
            for seed in table:
                line = table[seed].dropna()
                ax.plot(line.index, centred_mean(line, window), color=pale, lw=0.7)
        smooth = centred_mean(mean, window)
        ax.plot(
            mean.index,
            smooth,
            color=colour,
            lw=1.5,
            label=f"layer {layer}",
        )
    ax.axhline(PAPER_CONSISTENCY, **style.DASHED)
    ax.set_title(style.arm_label(arm).replace(", ", "\n"))
    style.training_axis(ax, 0, options)


def name_layers(ax: Axes) -> None:
    """Write the layers' names at the ends of their lines: all if there are few, else two."""
    lines = [line for line in ax.lines if line.get_label().startswith("layer")]
    if len(lines) > MAX_NAMED_LAYERS:
        lines = [lines[0], lines[-1]]
    ends = []
    for line in lines:
        height = line.get_ydata()[-1]
        line_style = ArmStyle(line.get_color(), "")
        ends.append((height, line.get_label(), line_style))
    style.label_ends(ax, ends)


def draw_by_layer(
    ax: Axes,
    data: Data,
    layers: list[int],
    styles: ArmStyles,
) -> None:
    """Draw the mean over batches by layer, with the arms side by side."""
    shifts = [0.0]
    if len(data.arms) > 1:
        shifts = np.linspace(-0.12, 0.12, len(data.arms))
    for arm, shift in zip(data.arms, shifts, strict=True):
        points = []
        for layer in layers:
            interval = estimate(data.table(arm, f"{PREFIX}{layer}"))
            points.append((layer + shift, interval))
        interval_line(
            ax,
            points,
            styles[arm],
            line_width=1.2,
            bar_width=1.2,
            marker_size=4.5,
        )
    ax.axhline(PAPER_CONSISTENCY, **style.DASHED)
    ax.set_title("Mean by layer")
    ax.set_xlabel("MoE layer")
    every = len(layers) // 6 if len(layers) > MAX_LAYER_TICKS else 1
    ax.set_xticks(layers[::every])


def main() -> None:
    script.run(__doc__, draw, judged_claims)


if __name__ == "__main__":
    script.command(main)
