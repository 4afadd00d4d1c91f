"""Objectives: with all else equal, what does each one gain, what does it clip, and what weight does
it leave?

    gspo figure objectives runs/objectives

Any set of arms can be compared; rows are sorted by reward gain. Expected: all of them learn. Arms
that differ by less than their seeds do are not told apart. The clipped share depends on an
objective's range as much as on its kind, and the gradient norm depends on how it averages. Prints a
Markdown table of the same numbers; writes fig_objectives.pdf and .png.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
from gspo.analysis import load, script, style
from gspo.analysis.blocks import aligned_table
from gspo.analysis.load import Data
from gspo.analysis.looks import look, tint
from gspo.analysis.stats import START, WINDOW, number
from gspo.analysis.style import STRIP, View
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

MEANS = {  # the metrics that are averaged over the batches of a run
    "active": "clip/token_active",
    "outside": "clip/token_outside",
    "weight": "clip/weight",
    "grad norm": "optim/grad_norm",
    "length": "length/mean",
}
WRITTEN = {"weight": ".3f", "grad norm": ".2g", "length": ".1f"}  # the number formats of the table
REFUSED = script.DOTS | script.NO_CURVES
# heavier arms (LUSPO weights by length) are written at the edge, or the others would look alike
LARGEST_WEIGHT = 2.0
# why these never remove a gradient
MOST = 16  # the most arms, each of which has a row
REASONS = {"CISPO": "caps the weight only", "REINFORCE": "no ratio", "SAPO": "no band"}


def main() -> None:
    args = script.parser(__doc__, refused=REFUSED).parse_args()
    data = script.read(args)
    paths = draw(data, args.out, script.view(args))
    print("\n".join(["", *table(measure(data)), "", *map(str, paths)]))


# ---------------------------------------------------------------------------------------------------------
# numbers
def measure(data: Data) -> pd.DataFrame:
    """Return a row per arm and seed (the index) over the batches that all runs have, sorted by
    falling mean gain.

    Columns: start, end and gain of the reward, then MEANS; a metric that was not reported is NaN.
    """
    last = data.common_step(*data.arms)
    if last < START + WINDOW:
        run = min(data.runs, key=lambda run: run.last)
        load.die(
            f"fig_objectives needs {START + WINDOW} rollout batches of every run; {run.path} has {run.last}"
        )
    frames = {}
    for arm in data.arms:
        reward = data.table(arm, "reward/mean").loc[:last]
        frame = pd.DataFrame(
            {"start": reward.head(START).mean(), "end": reward.tail(WINDOW).mean()}
        )
        frame["gain"] = frame["end"] - frame["start"]
        for name, metric in MEANS.items():
            frame[name] = data.table(arm, metric).loc[:last].mean()
        frames[arm] = frame
    order = sorted(frames, key=lambda arm: -frames[arm]["gain"].mean())
    return pd.concat({arm: frames[arm] for arm in order}, names=["arm", "seed"])


def arms_of(numbers: pd.DataFrame) -> list[str]:
    """Return the arms in the order of the rows."""
    return list(dict.fromkeys(numbers.index.get_level_values("arm")))


def table(numbers: pd.DataFrame) -> list[str]:
    """Return a Markdown row per arm with means over seeds, and the gain with its smallest and
    largest seed.
    """
    head = [
        "arm",
        "seeds",
        "reward, start",
        "end",
        "gain [min, max over seeds]",
        "active",
        "outside",
        "weight",
    ]
    cells = [[*head, "grad norm", "mean length"]]
    for arm in arms_of(numbers):
        own = numbers.loc[arm]
        mean, gains = own.mean(), own["gain"]
        spread = f" [{gains.min():+.3f}, {gains.max():+.3f}]" if len(own) > 1 else ""
        line = [arm, ", ".join(map(str, own.index)), f"{mean['start']:.3f}", f"{mean['end']:.3f}"]
        line += [f"{mean['gain']:+.3f}{spread}", share(mean["active"]), share(mean["outside"])]
        cells.append(line + [number(mean[name], form) for name, form in WRITTEN.items()])
    return aligned_table(cells)


def share(value: float) -> str:
    return "never" if value == 0 else number(value, ".2g")


# ----------------------------------------------------------------------------------------------------------
# figure
def draw(data: Data, out: Path, view: View | None = None) -> list[Path]:
    """Draw a row per arm and a panel per quantity."""
    if len(data.arms) > MOST:
        load.die(f"fig_objectives {load.too_many(data, MOST)}")
    numbers = measure(data)
    names = [name(arm) for arm in arms_of(numbers)]
    view = view or View()
    figure = style.canvas(
        0.85 + len(names) * (0.12 + 0.155 * max(text.count("\n") + 1 for text in names)), view
    )
    columns = [
        name
        for name in ("gain", "active", "outside", "weight", "grad norm")
        if numbers[name].notna().any()
    ]
    widths = [1.6, *[1] * (len(columns) - 1)]
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False, width_ratios=widths)[0]
    panel_of = dict(zip(columns, axes, strict=True))
    limit = gradient_limit(data)
    gain_panel(panel_of["gain"], numbers)
    share_panels(
        {name: panel_of[name] for name in ("active", "outside") if name in panel_of}, numbers
    )
    if "weight" in panel_of:
        weight_panel(panel_of["weight"], numbers)
    if "grad norm" in panel_of:
        norm_panel(panel_of["grad norm"], numbers, limit)
    for ax in axes:
        ax.grid(axis="y", visible=True)
        ax.tick_params(axis="y", length=0)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    axes[0].set_yticks(range(len(names)), names)
    for text in axes[0].get_yticklabels():
        text.set_color(style.INK)
    figure.align_xlabels()
    caption = f"{load.describe(data, data.arms)}\n{definitions(numbers, limit)}"
    return style.save(figure, out, "fig_objectives", caption, view)


def name(arm: str) -> str:
    """Return the arm's name broken into lines of at most about 22 letters."""
    return "\n".join(textwrap.fill(line, 22) for line in style.short(arm).split("\n"))


def rows(
    ax: Axes, numbers: pd.DataFrame, column: str, left: float | None = None, right: float = math.inf
) -> None:
    """Draw each arm's seeds as pale dots and their mean as a bar; zeros are drawn at `left` if it
    is given, and arms above `right` are not drawn."""
    for row, arm in enumerate(arms_of(numbers)):
        seeds, own = numbers.loc[arm, column].dropna().to_numpy(), look(arm)
        if not len(seeds) or seeds.mean() > right:
            continue
        x, mean = seeds, seeds.mean()
        if left is not None:
            x, mean = np.where(seeds == 0, left, seeds), mean or left
        ax.plot(
            x,
            np.full(len(x), row),
            own.marker,
            ms=5.5,
            color=tint(own.colour, 0.5),
            mec="white",
            mew=0.5,
            zorder=3,
        )
        ax.plot(mean, row, "|", ms=11, mew=2.4, color=own.colour, zorder=4)


def gain_panel(ax: Axes, numbers: pd.DataFrame) -> None:
    """Draw the reward gained on an axis from 0, so that no gain is visible as such."""
    rows(ax, numbers, "gain")
    ax.axvline(0, color=style.MUTED, lw=1, zorder=2)
    ax.margins(x=0.05)
    ax.set_title("Reward gain")
    ax.set_xlabel(f"last {WINDOW} - first {START} batches")


def share_panels(axes: dict[str, Axes], numbers: pd.DataFrame) -> None:
    """Draw shares on one logarithmic axis. Exactly 0, which has no logarithm, gets a shaded strip
    at the left, "never"."""
    values = numbers[["active", "outside"]].to_numpy()
    zeros, lowest = (
        bool((values == 0).any()),
        math.floor(math.log10(values[values > 0].min(initial=0.1))),
    )
    width = 0.4 * -lowest  # the strip's width in decades
    edge, never, left = (
        10.0**lowest,
        10 ** (lowest - width / 2),
        10 ** (lowest - (width if zeros else 0.1)),
    )
    ticks = [10.0**d for d in range(0, lowest - (not zeros), -2 if lowest < -2 else -1)]
    titles = {"active": "Clipped tokens", "outside": "Outside the band"}
    for column, ax in axes.items():
        ax.set_xscale("log")
        rows(ax, numbers, column, never)
        if zeros:
            ax.axvspan(left, edge, color=STRIP, lw=0, zorder=0)
        ax.set_xlim(left, 1.5)
        ax.set_xticks(
            [never] * zeros + ticks,
            ["never"] * zeros + [f"$10^{{{math.log10(x):.0f}}}$" if x < 1 else "1" for x in ticks],
        )
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_title(titles[column])
        ax.set_xlabel("share of tokens")


def weight_panel(ax: Axes, numbers: pd.DataFrame) -> None:
    """Draw the weight left, near 1; what is far above is written at the edge."""
    means = numbers["weight"].groupby(level="arm").mean()
    right = LARGEST_WEIGHT if (means <= LARGEST_WEIGHT).any() else math.inf
    rows(ax, numbers, "weight", right=right)
    ax.axvline(1, color=style.MUTED, lw=1, ls="--", zorder=1)
    ax.margins(x=0.1)
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.9), max(high, 1.05))  # so that differences of a thousandth look small
    for row, arm in enumerate(arms_of(numbers)):
        if means[arm] > right:
            at = {
                "transform": ax.get_yaxis_transform(),
                "ha": "right",
                "va": "center",
                "fontsize": 8.5,
                "zorder": 4,
            }
            box = {"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none"}
            ax.text(
                1, row, f"{means[arm]:.3g} \N{RIGHTWARDS ARROW}", color=style.INK, bbox=box, **at
            )
    ax.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    ax.set_title("Weight left")
    ax.set_xlabel("1 = on policy")


def norm_panel(ax: Axes, numbers: pd.DataFrame, limit: float | None) -> None:
    """Draw the gradient norm on a logarithmic axis, with the norm to which larger gradients are
    cut.
    """
    ax.set_xscale("log")
    rows(ax, numbers, "grad norm")
    if limit is not None:
        ax.axvline(limit, color=style.MUTED, lw=1, ls="--", zorder=1)
    ax.margins(x=0.1)
    low, high = ax.get_xlim()
    if high < 3 * low:  # a logarithmic axis has no round numbers there
        ax.set_xscale("linear")
        ax.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    else:
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 20 else (1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_title("Gradient norm")
    ax.set_xlabel("mean, before its clip")


def gradient_limit(data: Data) -> float | None:
    """Return the runs' optim.max_grad_norm, or None if they differ or have none."""
    limits = {run.settings.get("optim.max_grad_norm") for run in data.runs}
    limit = limits.pop()
    return None if limits or not limit else float(limit)


def definitions(numbers: pd.DataFrame, limit: float | None) -> str:
    """Return what the panels show, for the caption."""
    removed = numbers["active"].groupby(level="arm").max()
    reasons = [f"{arm}: {why}" for arm, why in REASONS.items() if removed.get(arm) == 0]
    zeros = "; never: not of one token" + (f" ({', '.join(reasons)})" if reasons else "")
    text = "Each objective with its own clip range. Dots: seeds; bars: their mean; all but the gain averaged over all "
    text += "batches. Clipped: the clip or mask removed the token's gradient"
    text += zeros if (numbers[["active", "outside"]] == 0).any(axis=None) else ""
    text += ". Outside the band: whatever the sign of the advantage. Weight left: mean over tokens of the factor on "
    text += "A ∇log π" + (" (LUSPO's holds the response's length)" if "LUSPO" in removed else "")
    return text + (
        f". Dashes in the last panel: larger gradients are cut to norm {limit:g}." if limit else "."
    )


if __name__ == "__main__":
    script.command(main)
