"""The style of all figures: axes, captions, and files with the same bytes each time.

arm_styles.py has the colours, markers and lines of the arms.
"""

import io
import math
import os
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import Locator, LogLocator, MaxNLocator
from matplotlib.transforms import offset_copy
from numpy.typing import ArrayLike

from gspo.analysis.arm_styles import ArmStyle, ArmStyles
from gspo.analysis.load import Data
from gspo.analysis.stats import WINDOW
from gspo.io.arguments import option
from gspo.io.escaping import escape
from gspo.io.files import replace_bytes

# colours of everything that belongs to no arm
INK = "#222222"
MUTED = "#6B6B6B"
FAINT = "#D9D9D9"
STRIP = "#F2F2F2"
# inches: text of 9 points stays legible when a README shows the figure about 850 pixels wide
WIDTH = 9.0
CAPTION_SIZE = 8.5
FORMATS = ("pdf", "png", "svg")
# the line that a panel's values are compared with
DASHED = {"color": MUTED, "lw": 1, "ls": "--", "zorder": 1}
COMPUTE = "compute/flops"
MAX_NAME_CHARS = 22  # of an objective's name in a label
# the groups before the last part of a setting's name
SETTING_GROUPS = re.compile(r"(?<![\w.])(?:\w+\.)+(?=\w+=)")
# a power of ten in a label
POWER = re.compile(r"\$(\\mathdefault\{)?(-?\d*\\times)?-?10\^\{-?\d+\}\}?\$")
# file metadata that would hold the date or the version
UNDATED = {
    ".pdf": {"CreationDate": None},
    ".png": {"Software": None},
    ".svg": {"Date": None},
}


@dataclass(frozen=True, kw_only=True)
class FigureOptions:
    """How figures are drawn and written: the options that all figures share."""

    where: dict[str, str] = option(
        {}, "only runs with this setting: where.optim.lr=2e-4 or where.seed=[1,2]"
    )
    seeds: bool = option(False, "draw a thin curve for each seed too")
    smooth: int = option(
        WINDOW // 2, "average curves over so many batches on either side; 0: as they are", least=0
    )
    log_x: bool = option(False, "logarithmic axis of training compute or batches")
    formats: tuple[str, ...] = option(("pdf", "png"), "file formats", choices=FORMATS)
    caption: bool = option(True, "write the caption into the picture")
    width: float = option(
        WIDTH,
        "width of the picture in inches; text keeps its size",
        least=6,
        most=40,
        why="in a narrower picture the panels' texts collide",
    )


DEFAULTS = FigureOptions()


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


def arm_label(arm: str) -> str:
    """Return the arm's name, on two lines if it is long, for labels beside lines and bars.

    >>> arm_label("my_package.losses:Mine [optim.lr=0.001, trainer.minibatches=4]")
    'Mine\\nlr=0.001, minibatches=4'
    """
    name, _, settings = arm.removesuffix("]").partition(" [")
    objective, plus, replay = name.partition(" + ")
    objective = objective.rpartition(":")[2]
    if len(objective) > MAX_NAME_CHARS:
        objective = f"{objective[: MAX_NAME_CHARS - 1]}…"
    label = objective
    if plus:
        label = f"{objective} +\n{replay.removesuffix(' (R2)')}"
    if settings:
        label += f"\n{SETTING_GROUPS.sub('', settings)}"
    return label


def canvas(height: float, options: FigureOptions) -> Figure:
    """Return an empty figure of this height in inches, without its caption."""
    return Figure(figsize=(options.width, height), layout="constrained")


def dots(
    ax: Axes,
    x: Iterable[float] | float,
    y: Iterable[float] | float,
    colour: str,
    marker: str = "o",
    size: float = 5,
    *,
    edge: float = 0.5,
    zorder: float = 2,
) -> None:
    """Draw dots with a white edge, so that overlapping dots can be told apart."""
    ax.plot(
        x,
        y,
        marker=marker,
        ls="",
        ms=size,
        color=colour,
        mec="white",
        mew=edge,
        zorder=zorder,
    )


def mean_mark(
    ax: Axes,
    x: float,
    y: float,
    colour: str,
    marker: str,
    size: float,
) -> None:
    """Draw a mean as a thick bar: "|" if values are on the x axis, "_" if on the y axis."""
    ax.plot(x, y, marker=marker, ls="", ms=size, mew=2.4, color=colour, zorder=4)


def label_ends(
    ax: Axes, ends: list[tuple[float, str, ArmStyle]], line_height: float = 0.075
) -> None:
    """Write the arms' names at the right edge, at the heights of the ends of their lines.

    Beside each name stands a piece of its line. The names are kept apart. `ends` are (height, name,
    style) on a linear axis. `line_height` is the height of a line of text as a share of the
    panel's.
    """
    low, high = ax.get_ylim()
    ax.set_ylim(low, high)  # the labels are placed for these limits
    beside_axes = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "annotation_clip": False,
    }
    middle = offset_copy(ax.transAxes, ax.get_figure(root=True), x=14, units="points")
    finite = [end for end in ends if np.isfinite(end[0])]
    height = -math.inf
    previous_size = 0.0
    for value, text, style in sorted(finite, key=lambda end: end[:2]):
        size = line_height * (1 + text.count("\n"))
        lowest = height + (previous_size + size) / 2
        height = max((value - low) / (high - low), lowest)
        previous_size = size
        stroke = {
            "arrowstyle": "-",
            "color": style.colour,
            "ls": style.line,
            "lw": 1.8,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        ax.annotate("", (1, height), (26, 0), arrowprops=stroke, **beside_axes)
        marker = style.plot_options() | {"ls": "", "ms": 5.5}
        line = Line2D([1], [height], transform=middle, clip_on=False, **marker)
        ax.add_line(line)
        words = {"color": INK, "va": "center", "linespacing": 1.1}
        ax.annotate(text, (1, height), (31, 0), **words, **beside_axes)


def arm_lines(styles: ArmStyles, width: float) -> list[Line2D]:
    """Return a line of each arm for a legend."""
    return [Line2D([], [], lw=width, ms=5, **style.plot_options()) for style in styles.values()]


def legend(
    ax: Axes,
    styles: ArmStyles,
    loc: str,
    ncols: int = 1,
) -> None:
    """Draw a legend of arms, for a panel without room for names at the lines' ends."""
    lines = arm_lines(styles, 1.6)
    names = [arm_label(arm) for arm in styles]
    ax.legend(lines, names, fontsize=8, handlelength=2.6, loc=loc, ncols=ncols)


def legend_above(figure: Figure, styles: ArmStyles, options: FigureOptions) -> None:
    """Draw a legend of arms above the panels, and make the figure higher by its height."""
    names = [arm_label(arm).replace("\n", " ") for arm in styles]
    # this many letters of the legend's size are about as wide as the page
    letters = int(11.6 * options.width)
    longest = max(map(len, names))
    columns = max(1, letters // (longest + 8))
    columns = min(len(names), columns)
    figure.legend(
        arm_lines(styles, 2),
        names,
        loc="outside upper left",
        ncols=columns,
        fontsize=8.5,
        handlelength=2.6,
    )
    text_lines = math.ceil(len(names) / columns)
    height = figure.get_figheight() + 0.1 + 0.2 * text_lines
    figure.set_size_inches(options.width, height)


def round_ticks(ax: Axes, locator: Locator) -> None:
    """Set up an x axis with ticks at these places alone, written without a power of ten."""
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.xaxis.minorticks_off()


def training_axis(ax: Axes, largest: float, options: FigureOptions) -> None:
    """Set up the x axis of curves: FLOPs up to `largest`, or batches if `largest` is 0.

    The power of ten stands in the label instead of at the ticks.
    """
    power = math.floor(math.log10(largest)) if largest > 0 else 0
    if options.log_x:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        ax.xaxis.minorticks_off()
    else:
        locator = MaxNLocator(6, steps=[1, 2, 5, 10], integer=not largest)
        ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x / 10**power:g}")
    if not largest:
        ax.set_xlabel("rollout batch")
        return
    ax.set_xlabel(rf"training compute ($10^{{{power}}}$ FLOPs)")
    if not options.log_x:
        ax.set_xlim(0, largest * 1.01)


def has_compute(data: Data, arms: tuple[str, ...]) -> bool:
    """Return whether every run of these arms has recorded its compute.

    If not, batches are the x axis.
    """
    return all(data.table(arm, COMPUTE).notna().any().all() for arm in arms)


def save(
    figure: Figure,
    out: Path,
    name: str,
    caption: str,
    options: FigureOptions,
) -> list[Path]:
    """Write out/name in the formats of the options, with the caption wrapped under the panels.

    The same runs give the same bytes.
    """
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    if options.where:
        settings = ", ".join(f"{key}={value}" for key, value in options.where.items())
        name = f"{name}_{re.sub(r'[^A-Za-z0-9.+-]+', '_', settings)}"
        caption = f"Runs with {settings}. {caption}"
    if options.caption:
        write_under(figure, caption)
    for text in figure.findobj(Text):
        make_literal(text)
    figure.draw_without_rendering()  # arrange the panels once, for all files
    figure.set_layout_engine("none")
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{suffix}" for suffix in options.formats]
    for path in paths:
        content = io.BytesIO()
        metadata = UNDATED[path.suffix]
        figure.savefig(
            content,
            format=path.suffix[1:],
            dpi=160,
            metadata=metadata,
        )
        replace_bytes(path, content.getvalue())
    return paths


def make_literal(text: Text) -> None:
    """Show names and settings literally.

    matplotlib would read text between dollar signs as a formula. Here only powers of ten are
    formulas.
    """
    text.set_text(escape(text.get_text()))
    if "$" in POWER.sub("", text.get_text()):
        text.set_parse_math(False)


def write_under(figure: Figure, caption: str) -> None:
    """Write the wrapped caption below the panels; the figure grows by its height."""
    width, height = figure.get_size_inches()
    # a letter is about 0.57 of the font size wide
    letters = int(width * 72 / (CAPTION_SIZE * 0.57))
    lines = []
    for paragraph in caption.splitlines():
        lines += textwrap.wrap(paragraph, letters)
    caption_height = (len(lines) * CAPTION_SIZE * 1.35 + 14) / 72
    total = height + caption_height
    figure.set_size_inches(width, total)
    share = caption_height / total
    above_caption = (0, share, 1, 1 - share)
    figure.get_layout_engine().set(rect=above_caption, w_pad=0.06, h_pad=0.06)
    top = (caption_height - 4 / 72) / total
    text_style = {"va": "top", "fontsize": CAPTION_SIZE, "color": INK, "linespacing": 1.35}
    figure.text(0.012, top, "\n".join(lines), **text_style)


def finite_max(values: ArrayLike) -> float:
    """Return the largest finite number of an array, at least 0."""
    numbers = np.asarray(values, float)
    return float(np.max(numbers, initial=0, where=np.isfinite(numbers)))
