"""One style for all figures: axes, captions, and files that come out the same byte for byte.
looks.py has the arms.
"""

from __future__ import annotations

import io
import math
import os
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from gspo.analysis.load import Data
from gspo.analysis.looks import Look
from gspo.analysis.stats import WINDOW
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import offset_copy

from gspo.io.escaping import escape
from gspo.io.files import replace_bytes

# colours of everything that belongs to no arm
INK, MUTED, FAINT, STRIP = "#222222", "#6B6B6B", "#D9D9D9", "#F2F2F2"
# inches: text of 9 points stays legible when a README shows the figure about 850 pixels wide
WIDTH = 9.0
CAPTION_SIZE = 8.5
FORMATS = ("pdf", "png", "svg")
COMPUTE = "compute/flops"
LONGEST_NAME = 22  # characters of an objective's name in a label
# what stands before the last part of a setting's name
PREFIX = re.compile(r"(?<![\w.])(?:\w+\.)+(?=\w+=)")
# a power of ten in a label
POWER = re.compile(r"\$(\\mathdefault\{)?(-?\d*\\times)?-?10\^\{-?\d+\}\}?\$")


@dataclass(frozen=True)
class View:
    """How figures are drawn and written, as the options of script.py say."""

    seeds: bool = False  # whether each seed's curve is drawn too
    smooth: int = WINDOW // 2  # batches on either side over which curves are averaged
    log_x: bool = False
    formats: tuple[str, ...] = ("pdf", "png")
    caption: bool = True
    width: float = WIDTH  # inches
    where: str = ""  # the settings by which the runs were chosen, as in "optim.lr=2e-4"


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
        "svg.hashsalt": "gspo",  # the same names inside the file each time
    }
)


def short(arm: str) -> str:
    """Return the arm's name on two lines where it is long, for labels beside lines and bars.

    >>> short("my_package.losses:Mine [optim.lr=0.001, trainer.minibatches=4]")
    'Mine\\nlr=0.001, minibatches=4'
    """
    name, _, settings = arm.removesuffix("]").partition(" [")
    objective, plus, replay = name.partition(" + ")
    objective = objective.rpartition(":")[2]
    if len(objective) > LONGEST_NAME:
        objective = f"{objective[: LONGEST_NAME - 1]}…"
    name = f"{objective} +\n{replay.removesuffix(' (R2)')}" if plus else objective
    return f"{name}\n{PREFIX.sub('', settings)}" if settings else name


def canvas(height: float, view: View) -> Figure:
    """Return an empty figure of this height in inches, to which the caption will be added."""
    return Figure(figsize=(view.width, height), layout="constrained")


def label_ends(ax: Axes, ends: list[tuple[float, str, Look]], letter: float = 0.075) -> None:
    """Write the arms' names at the right edge with a piece of their lines, at the heights where the
    lines end, kept apart. `letter` is the height of a line of text as a share of the panel's."""
    low, high = ax.get_ylim()
    ax.set_ylim(low, high)  # the labels are placed for these limits
    log = ax.get_yscale() == "log"
    scale = np.log if log else np.asarray
    place, gap = -math.inf, 0.0
    for y, text, look in sorted(
        (end for end in ends if np.isfinite(end[0])), key=lambda end: end[:2]
    ):
        size = letter * (1 + text.count("\n"))
        place = max(
            float((scale(y) - scale(low)) / (scale(high) - scale(low))), place + (gap + size) / 2
        )
        gap = size
        stroke = {
            "arrowstyle": "-",
            "color": look.colour,
            "ls": look.line,
            "lw": 1.8,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        at = {"xycoords": "axes fraction", "textcoords": "offset points"}
        ax.annotate("", (1, place), (26, 0), arrowprops=stroke, annotation_clip=False, **at)
        middle = offset_copy(ax.transAxes, ax.get_figure(root=True), x=14, units="points")
        mark = look.plot() | {"ls": ""}
        ax.add_line(Line2D([1], [place], transform=middle, clip_on=False, ms=5.5, **mark))
        ax.annotate(
            text,
            (1, place),
            (31, 0),
            color=INK,
            va="center",
            linespacing=1.1,
            annotation_clip=False,
            **at,
        )


def key(ax: Axes, looks: dict[str, Look], **where: object) -> None:
    """Draw a legend of arms, for a panel without room for names at the lines' ends."""
    lines = [
        Line2D([], [], lw=1.6, ms=5, label=short(arm), **look.plot()) for arm, look in looks.items()
    ]
    ax.legend(handles=lines, fontsize=8, handlelength=2.6, **where)


def key_above(figure: Figure, looks: dict[str, Look], view: View) -> float:
    """Draw a legend of arms in lines above the panels, and return its height in inches."""
    names = [short(arm).replace("\n", " ") for arm in looks]
    # this many letters of the legend's size are about as wide as the page
    letters = int(11.6 * view.width)
    columns = min(len(names), max(1, letters // (max(map(len, names)) + 8)))
    lines = [Line2D([], [], lw=2, ms=5, **look.plot()) for look in looks.values()]
    figure.legend(
        lines, names, loc="outside upper left", ncols=columns, fontsize=8.5, handlelength=2.6
    )
    return 0.1 + 0.2 * -(-len(names) // columns)


def training_axis(ax: Axes, largest: float, view: View) -> None:
    """Set up the x axis of curves: FLOPs up to `largest`, with the power of ten in the label
    instead of at the ticks; batches where `largest` is 0."""
    power = math.floor(math.log10(largest)) if largest > 0 else 0
    if view.log_x:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=not largest))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 10**power:g}"))
    if largest and not view.log_x:
        ax.set_xlim(0, largest * 1.01)
    ax.set_xlabel(rf"training compute ($10^{{{power}}}$ FLOPs)" if largest else "rollout batch")


def has_compute(data: Data, arms: tuple[str, ...]) -> bool:
    """Return whether every run of these arms has recorded its compute; if not, batches are the x
    axis.
    """
    return all(data.table(arm, COMPUTE).notna().any().all() for arm in arms)


def save(figure: Figure, out: Path, name: str, caption: str, view: View) -> list[Path]:
    """Write out/name in the formats asked for, with the caption wrapped under the panels. The same
    runs give the same bytes."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    if view.where:
        name = f"{name}_{re.sub(r'[^A-Za-z0-9.+-]+', '_', view.where)}"
        caption = f"Runs with {view.where}. {caption}"
    if view.caption:
        write_under(figure, caption)
    for text in figure.findobj(Text):
        as_data(text)
    figure.draw_without_rendering()  # arrange the panels once, for all files
    figure.set_layout_engine("none")
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{suffix}" for suffix in view.formats]
    for path in paths:
        undated = {
            ".pdf": {"CreationDate": None},
            ".png": {"Software": None},
            ".svg": {"Date": None},
        }[path.suffix]
        drawn = io.BytesIO()
        figure.savefig(drawn, format=path.suffix[1:], dpi=160, metadata=undated)
        replace_bytes(path, drawn.getvalue())
    return paths


def as_data(text: Text) -> None:
    """Show names and settings literally. matplotlib would read text between dollar signs as
    formulas, which here are only powers of ten."""
    text.set_text(escape(text.get_text()))
    if "$" in POWER.sub("", text.get_text()):
        text.set_parse_math(False)


def write_under(figure: Figure, caption: str) -> None:
    """Write the wrapped caption below the panels; the figure grows by its height."""
    width, height = figure.get_size_inches()
    # a letter is about 0.57 of the font size wide
    letters = int(width * 72 / (CAPTION_SIZE * 0.57))
    lines = [
        line for paragraph in caption.splitlines() for line in textwrap.wrap(paragraph, letters)
    ]
    under = (len(lines) * CAPTION_SIZE * 1.35 + 14) / 72
    total = height + under
    figure.set_size_inches(width, total)
    figure.get_layout_engine().set(
        rect=(0, under / total, 1, 1 - under / total), w_pad=0.06, h_pad=0.06
    )
    text = "\n".join(lines)
    figure.text(
        0.012,
        (under - 4 / 72) / total,
        text,
        va="top",
        fontsize=CAPTION_SIZE,
        color=INK,
        linespacing=1.35,
    )


def finite_max(*values: np.ndarray) -> float:
    """Return the largest finite number of several arrays, or 0 if there is none."""
    flat = np.concatenate([np.ravel(np.asarray(v, float)) for v in values])
    flat = flat[np.isfinite(flat)]
    return float(flat.max()) if len(flat) else 0.0
