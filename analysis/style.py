"""One look for all figures: colours, axes, caption, and files that come out byte for byte the same."""

from __future__ import annotations

import math
import os
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from load import GRPO, GRPO_R2, GSPO, GSPO_TOKEN
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's palette, told apart with any common colour blindness; an arm has its colour in every figure.
COLOURS = {GSPO: "#0072B2", GRPO_R2: "#D55E00", GRPO: "#7A5195", GSPO_TOKEN: "#009E73"}
OTHER, INK, MUTED, FAINT = "#555555", "#222222", "#6B6B6B", "#D9D9D9"
WIDTH = 9.0  # inches: text of 9 points stays legible when a README shows the figure about 850 pixels wide
CAPTION_SIZE = 8.5

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {
        "font.family": "DejaVu Sans",  # ships with matplotlib: the same file on every machine
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlepad": 8,
        "axes.labelsize": 9,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": "#EBEBEB",
        "grid.linewidth": 0.8,
        "axes.axisbelow": True,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.frameon": False,
        "lines.solid_capstyle": "round",
        "pdf.fonttype": 42,  # TrueType: text in the PDF stays text
        "ps.fonttype": 42,
    }
)


def colour(arm: str) -> str:
    """An arm's colour; appended settings ("GRPO [optim.lr=0.001]") keep the colour of the arm."""
    return COLOURS.get(arm.split(" [")[0], OTHER)


def short(arm: str) -> str:
    """The arm's name on two lines where it is long, for labels beside lines and bars."""
    return arm.replace("GRPO + Routing Replay (R2)", "GRPO +\nRouting Replay").replace(" [", "\n[")


def canvas(height: float) -> Figure:
    """An empty figure of README width; `height` in inches, the caption not counted."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def tint(hex_colour: str, strength: float) -> tuple[float, ...]:
    """A colour mixed with white: strength 1 is the colour itself. Opaque, so that overlaps do not darken."""
    return tuple(1 - strength * (1 - c) for c in matplotlib.colors.to_rgb(hex_colour))


def label_ends(ax: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write names at the right edge, at the height where their lines end, kept apart. (y, text, colour) each."""
    low, high = ax.get_ylim()
    ax.set_ylim(low, high)  # the labels are placed for these limits
    place, gap = -math.inf, 0.0
    for y, text, hue in sorted(ends):
        size = 0.075 * (1 + text.count("\n"))
        place = max((y - low) / (high - low), place + (gap + size) / 2)
        gap = size
        ax.text(1.02, place, text, transform=ax.transAxes, color=hue, va="center", fontweight="bold", linespacing=1.1)


def flops_axis(ax: Axes, largest: float) -> None:
    """x axis in FLOPs, the power of ten in the label instead of at the ticks."""
    power = math.floor(math.log10(largest)) if largest > 0 else 0
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 10**power:g}"))
    ax.set_xlabel(rf"training compute ($10^{{{power}}}$ FLOPs)")
    ax.set_xlim(0, largest * 1.01)


def save(figure: Figure, out: Path, name: str, caption: str) -> list[Path]:
    """Write out/name.pdf and .png with the caption, wrapped, under the panels. The same runs give the same bytes."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    width = int(WIDTH * 72 / (CAPTION_SIZE * 0.54))  # letters: they are some 0.54 of the font size wide
    lines = [line for paragraph in caption.splitlines() for line in textwrap.wrap(paragraph, width)]
    width, height = figure.get_size_inches()
    under = (len(lines) * CAPTION_SIZE * 1.35 + 14) / 72
    total = height + under
    figure.set_size_inches(width, total)
    figure.get_layout_engine().set(rect=(0, under / total, 1, 1 - under / total), w_pad=0.06, h_pad=0.06)
    text = "\n".join(lines)
    figure.text(0.012, (under - 4 / 72) / total, text, va="top", fontsize=CAPTION_SIZE, color=INK, linespacing=1.35)
    figure.draw_without_rendering()  # arrange the panels once, for both files
    figure.set_layout_engine("none")
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.pdf", out / f"{name}.png"]
    figure.savefig(paths[0], metadata={"CreationDate": None})
    figure.savefig(paths[1], dpi=160, metadata={"Software": None})
    return paths


def finite_max(*values: np.ndarray) -> float:
    """The largest finite number of several arrays, 0 if there is none."""
    flat = np.concatenate([np.ravel(np.asarray(v, float)) for v in values])
    flat = flat[np.isfinite(flat)]
    return float(flat.max()) if len(flat) else 0.0
