"""Objectives: with all else equal, what does each gain, what does it clip, what weight is left?

    gspo figure objectives runs/objectives

Any set of arms can be compared; rows are sorted by reward gain. Expected: all of them learn. Arms
that differ by less than their seeds do are not told apart. The clipped share depends on an
objective's range as much as on its kind, and the gradient norm depends on how it averages. Prints a
Markdown table of the same numbers. Writes fig_objectives.pdf and .png.
"""

import math
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from gspo.analysis import choosing, load, script, style
from gspo.analysis.arm_styles import arm_style, tint
from gspo.analysis.blocks import markdown_table
from gspo.analysis.grid import gain_text, name_rows
from gspo.analysis.load import Data
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import START, WINDOW, number
from gspo.analysis.style import DEFAULTS, STRIP, FigureOptions
from gspo.io.arguments import command_options

MEANS = {  # the metrics that are averaged over the batches of a run
    "active": "clip/token_active",
    "outside": "clip/token_outside",
    "weight": "clip/weight",
    "grad norm": "optim/grad_norm",
    "length": "length/mean",
}
SHARE_TITLES = {"active": "Clipped tokens", "outside": "Outside the band"}
FORMATS = {"weight": ".3f", "grad norm": ".2g", "length": ".1f"}  # of the table
REFUSED = script.DOTS | script.NO_CURVES
# heavier arms (LUSPO weights by length) are written at the edge, or the others would look equal
MAX_DRAWN_WEIGHT = 2.0
MAX_ARMS = 16  # each arm has a row
MAX_LABEL_CHARS = 22  # of a line of an arm's name
# why these never remove a gradient
REASONS = {"CISPO": "caps the weight only", "REINFORCE": "no ratio", "SAPO": "no band"}


def main() -> None:
    options = command_options(script.Options, __doc__, REFUSED)
    data = script.read(options)
    paths = draw(data, options.out, options)
    script.print_lines(table(measure(data)), paths)


# ------------------------------------------------------------------------------------------------
# numbers
def measure(data: Data) -> pd.DataFrame:
    """Return a row per arm and seed (the index) over the batches that all runs have.

    Arms are sorted by falling mean gain. The columns are start, end and gain of the reward, then
    MEANS. A metric that was not reported is NaN.
    """
    last = data.common_step(*data.arms)
    minimum = START + WINDOW
    if last < minimum:
        run = min(data.runs, key=lambda run: run.last)
        raise RunsError(
            f"fig_objectives needs {minimum} rollout batches of every run; {run.path} has "
            f"{run.last}"
        )
    frames = {}
    for arm in data.arms:
        # a row of another framework may be the mean of several batches
        reward = data.table(arm, "reward/mean").loc[:last].dropna(how="all")
        if reward.empty:
            raise RunsError(f"fig_objectives needs reward/mean of every run; {arm} has none")
        frame = pd.DataFrame({"start": reward.head(START).mean()})
        frame["end"] = reward.tail(WINDOW).mean()
        frame["gain"] = frame["end"] - frame["start"]
        for name, metric in MEANS.items():
            values = data.table(arm, metric).loc[:last]
            frame[name] = values.mean()
        frames[arm] = frame
    gains = {arm: frame["gain"].mean() for arm, frame in frames.items()}
    falling = sorted(frames, key=lambda arm: -gains[arm])
    return pd.concat({arm: frames[arm] for arm in falling}, names=["arm", "seed"])


def arms_of(numbers: pd.DataFrame) -> list[str]:
    """Return the arms in the order of the rows."""
    return list(dict.fromkeys(numbers.index.get_level_values("arm")))


def table(numbers: pd.DataFrame) -> list[str]:
    """Return a Markdown row per arm with means over seeds.

    The gain has its smallest and largest seed.
    """
    head = ["arm", "seeds", "reward, start", "end", "gain [min, max over seeds]"]
    rows = [[*head, "active", "outside", "weight", "grad norm", "mean length"]]
    for arm in arms_of(numbers):
        runs = numbers.loc[arm]
        mean = runs.mean()
        row = [arm, ", ".join(map(str, runs.index))]
        row += [f"{mean['start']:.3f}", f"{mean['end']:.3f}"]
        row.append(gain_text(runs["gain"]))
        row += [share(mean["active"]), share(mean["outside"])]
        for name, form in FORMATS.items():
            row.append(number(mean[name], form))
        rows.append(row)
    return markdown_table(rows)


def share(value: float) -> str:
    return "never" if value == 0 else number(value, ".2g")


# ------------------------------------------------------------------------------------------------
# figure
def draw(data: Data, out: Path, options: FigureOptions = DEFAULTS) -> list[Path]:
    """Draw a row per arm and a panel per quantity."""
    if len(data.arms) > MAX_ARMS:
        raise RunsError(f"fig_objectives {choosing.too_many(data, MAX_ARMS)}")
    numbers = measure(data)
    limit = gradient_limit(data)
    labels = [row_label(arm) for arm in arms_of(numbers)]
    lines_per_row = 1 + max(label.count("\n") for label in labels)
    row_height = 0.12 + 0.155 * lines_per_row
    figure = style.canvas(0.85 + len(labels) * row_height, options)
    quantities = ("gain", "active", "outside", "weight", "grad norm")
    columns = [name for name in quantities if numbers[name].notna().any()]
    widths = [1.6 if name == "gain" else 1.0 for name in columns]
    panels = figure.subplot_mosaic([columns], sharey=True, width_ratios=widths)
    draw_gains(panels["gain"], numbers)
    share_panels = {name: panels[name] for name in SHARE_TITLES if name in panels}
    draw_shares(share_panels, numbers)
    if "weight" in panels:
        draw_weights(panels["weight"], numbers)
    if "grad norm" in panels:
        draw_norms(panels["grad norm"], numbers, limit)
    name_rows(list(panels.values()), labels, 0.6)
    figure.align_xlabels()
    caption = f"{load.describe(data, data.arms)}\n{definitions(numbers, limit)}"
    return style.save(figure, out, "fig_objectives", caption, options)


def row_label(arm: str) -> str:
    """Return the arm's name broken into lines of about 22 letters at most."""
    lines = style.arm_label(arm).split("\n")
    return "\n".join(textwrap.fill(line, MAX_LABEL_CHARS) for line in lines)


def draw_rows(
    ax: Axes,
    numbers: pd.DataFrame,
    column: str,
    zero_x: float | None = None,
    maximum: float = math.inf,
) -> None:
    """Draw each arm's seeds as pale dots and their mean as a bar.

    Zeros are drawn at `zero_x` if it is given. Arms whose mean is above `maximum` are not drawn.
    """
    for row, arm in enumerate(arms_of(numbers)):
        seeds = numbers.loc[arm, column].dropna()
        mean = seeds.mean()
        if seeds.empty or mean > maximum:
            continue
        if zero_x is not None:
            seeds = seeds.replace(0, zero_x)
            mean = mean or zero_x
        line = arm_style(arm)
        rows = np.full(len(seeds), row)
        pale = tint(line.colour, 0.5)
        style.dots(ax, seeds, rows, pale, line.marker, 5.5, zorder=3)
        style.mean_mark(ax, mean, row, line.colour, "|", 11)


def draw_gains(ax: Axes, numbers: pd.DataFrame) -> None:
    """Draw the reward gained, with a line at 0."""
    draw_rows(ax, numbers, "gain")
    ax.axvline(0, color=style.MUTED, lw=1, zorder=2)
    ax.margins(x=0.05)
    ax.set(title="Reward gain", xlabel=f"last {WINDOW} - first {START} batches")


def draw_shares(panels: dict[str, Axes], numbers: pd.DataFrame) -> None:
    """Draw shares on a common logarithmic axis.

    Exactly 0, which has no logarithm, gets a shaded strip at the left, "never".
    """
    values = numbers[["active", "outside"]].to_numpy()
    smallest = values[values > 0].min(initial=0.1)
    lowest_power = math.floor(math.log10(smallest))
    lowest = 10.0**lowest_power
    has_zeros = bool((values == 0).any())
    strip_width = 0.4 * -lowest_power  # in decades
    zero_x = 10 ** (lowest_power - strip_width / 2)
    room = strip_width if has_zeros else 0.1
    left = 10 ** (lowest_power - room)
    last_power = lowest_power if has_zeros else lowest_power - 1
    every = -2 if lowest_power < -2 else -1
    ticks = {}
    for power in range(0, last_power, every):
        ticks[10.0**power] = f"$10^{{{power}}}$"
    ticks[1.0] = "1"
    if has_zeros:
        ticks[zero_x] = "never"
    for column, ax in panels.items():
        ax.set_xscale("log")
        draw_rows(ax, numbers, column, zero_x)
        if has_zeros:
            ax.axvspan(left, lowest, color=STRIP, lw=0, zorder=0)
        ax.set_xlim(left, 1.5)
        ax.set_xticks(list(ticks), list(ticks.values()))
        ax.xaxis.minorticks_off()
        ax.set(title=SHARE_TITLES[column], xlabel="share of tokens")


def draw_weights(ax: Axes, numbers: pd.DataFrame) -> None:
    """Draw the weight left, near 1; weights far above are written at the edge."""
    means = numbers["weight"].groupby(level="arm").mean()
    maximum = MAX_DRAWN_WEIGHT
    if (means > maximum).all():
        maximum = math.inf
    draw_rows(ax, numbers, "weight", maximum=maximum)
    ax.axvline(1, **style.DASHED)
    ax.margins(x=0.1)
    low, high = ax.get_xlim()
    # so that differences of a thousandth look small
    ax.set_xlim(min(low, 0.9), max(high, 1.05))
    at_edge = {
        "transform": ax.get_yaxis_transform(),
        "ha": "right",
        "va": "center",
        "fontsize": 8.5,
        "zorder": 4,
        "color": style.INK,
        "bbox": {"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none"},
    }
    for row, arm in enumerate(arms_of(numbers)):
        mean = means[arm]
        if mean > maximum:
            ax.text(1, row, f"{mean:.3g} \N{RIGHTWARDS ARROW}", **at_edge)
    locator = MaxNLocator(3, steps=[1, 2, 5, 10])
    ax.xaxis.set_major_locator(locator)
    ax.set(title="Weight left", xlabel="1 = on policy")


def draw_norms(ax: Axes, numbers: pd.DataFrame, limit: float | None) -> None:
    """Draw the gradient norm on a logarithmic axis, with the norm at which it is clipped."""
    ax.set_xscale("log")
    draw_rows(ax, numbers, "grad norm")
    if limit is not None:
        ax.axvline(limit, **style.DASHED)
    ax.margins(x=0.1)
    low, high = ax.get_xlim()
    if high < 3 * low:  # a logarithmic axis has no round numbers there
        ax.set_xscale("linear")
        locator = MaxNLocator(3, steps=[1, 2, 5, 10])
    elif high / low > 20:
        locator = LogLocator(subs=[1])
    else:
        locator = LogLocator(subs=[1, 2, 5])
    style.round_ticks(ax, locator)
    ax.set(title="Gradient norm", xlabel="mean, before its clip")


def gradient_limit(data: Data) -> float | None:
    """Return the runs' optim.max_grad_norm, or None if they differ or have none."""
    limits = {run.settings.get("optim.max_grad_norm") for run in data.runs}
    limit = limits.pop()
    return None if limits or not limit else float(limit)


def definitions(numbers: pd.DataFrame, limit: float | None) -> str:
    """Return the part of the caption that explains the panels."""
    text = (
        "Each objective with its own clip range. Dots: seeds; bars: their mean; all but the gain "
        "averaged over all batches. Clipped: the clip or mask removed the token's gradient"
    )
    removed = numbers["active"].groupby(level="arm").max()
    shares = numbers[["active", "outside"]]
    if (shares == 0).any(axis=None):
        text += "; never: not of one token"
        reasons = []
        for arm, why in REASONS.items():
            if removed.get(arm) == 0:
                reasons.append(f"{arm}: {why}")
        if reasons:
            text += f" ({', '.join(reasons)})"
    text += (
        ". Outside the band: whatever the sign of the advantage. Weight left: mean over tokens of "
        "the factor on A ∇log π"
    )
    if "LUSPO" in removed:
        text += " (LUSPO's holds the response's length)"
    if limit:
        text += f". Dashes in the last panel: larger gradients are cut to norm {limit:g}"
    return f"{text}."


if __name__ == "__main__":
    script.command(main)
