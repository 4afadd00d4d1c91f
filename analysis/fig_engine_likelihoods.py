"""Engine likelihoods: what do GSPO and GRPO lose with the engine's log-probs as the old policy's?

    gspo figure engine-likelihoods runs/engine_likelihoods

Section 5.4 of the GSPO paper argues, without an experiment, that a sequence's likelihood tolerates
the engine's precision, so that the engine's log-probs can be used unchanged. Expected, if so: in
bfloat16 GSPO loses less reward by them than GRPO. In float32 the two likelihoods agree to rounding.
So a difference there is chance, and serves as the yardstick. Prints Markdown tables and the verdict
in words. Writes fig_engine_likelihoods.pdf and .png. Runs that are missing or unfinished are named
and left out. Arms are paired by seed.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gspo.analysis import load, script, style
from gspo.analysis.arm_styles import arm_style, tint
from gspo.analysis.blocks import markdown_table
from gspo.analysis.engine_likelihoods import (
    ARMS,
    CELLS,
    COARSE,
    ENGINE,
    MEANS,
    REPLAY,
    TRAINER,
    arm_name,
    chosen,
    clip_range,
    effect,
    measure,
    share,
    verdict,
)
from gspo.analysis.grid import gain_text, name_rows
from gspo.analysis.load import Data
from gspo.analysis.stats import WINDOW
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.io.arguments import command_options

SHARES = {"outside": "Outside the clip range", "active": "Gradient removed"}  # a panel for each
# log-probs, column, height in the row, marker
MARKS = (
    (ENGINE, ", first", -0.24, "D"),
    (ENGINE, ", all", 0.0, "o"),
    (TRAINER, ", all", 0.24, "o"),
)
PAIR = ((ENGINE, "", -0.15, "o"), (TRAINER, "", 0.15, "o"))
GAPS = {  # title of a panel, label of its x axis, and its unit as a number
    "k3": ("Gap of tokens", "k3 ($10^{-4}$ nats)", 1e-4),
    "abs log s": ("Gap of sequences", "mean |log s| ($10^{-3}$ nats)", 1e-3),
    "F(2)": ("Off by a factor of 2", "share of tokens ($10^{-4}$)", 1e-4),
    "agreement": ("Same experts", "share of experts", 1),
}


def main() -> None:
    options = command_options(script.Options, __doc__, script.DOTS | script.NO_CURVES)
    loaded = script.read(options, notes=None)
    data = chosen(loaded)
    script.print_notes(loaded)
    script.print_notes(data)
    paths = draw(data, options.out, options)
    script.print_lines(arm_table(data), effect_table(data), verdict(data), paths)


def arm_table(data: Data) -> list[str]:
    """Return a Markdown row per arm with means over seeds.

    The gain has its smallest and largest seed.
    """
    head = ["arm", "seeds", "reward, start", f"last {WINDOW}", "gain [min, max over seeds]"]
    rows = [[*head, *MEANS]]
    for arm, runs in measure(data).groupby(level="arm", sort=False):
        mean = runs.mean()
        seeds = ", ".join(map(str, runs.index.get_level_values("seed")))
        row = [arm, seeds]
        row += [f"{mean['start']:.3f}", f"{mean['end']:.3f}"]
        row.append(gain_text(runs["gain"]))
        for name in MEANS:
            form = ".4f" if name == "agreement" else ".2g"
            row.append(share(mean[name], form))
        rows.append(row)
    return markdown_table(rows)


def effect_table(data: Data) -> list[str]:
    """Return a Markdown row per pair of arms: the effect on the reward, its interval, each seed."""
    rows = [["reward, engine - trainer", "mean [95 % interval]", "interval", "each seed"]]
    for cell in CELLS:
        result = effect(data, *cell)
        if result:
            interval, values = result
            seeds = ", ".join(f"{seed}: {value:+.3f}" for seed, value in values.items())
            mean = interval.text("+.3f")
            rows.append([arm_name(*cell), mean, interval.kind, seeds])
    return markdown_table(rows)


# ------------------------------------------------------------------------------------------------
# figure
def draw(data: Data, out: Path, options: FigureOptions = DEFAULTS) -> list[Path]:
    """Draw a row per pair of arms above (reward, clip), and the gap in bfloat16 below."""
    numbers = measure(data)
    limits = clip_range(data)
    coarse = [cell for cell in CELLS if cell[0] == COARSE]
    figure = style.canvas(6.2, options)
    panels = figure.subplot_mosaic("rroa;klfs", height_ratios=[8, 4.6])
    reward_panel = panels["r"]
    share_panels = {"outside": panels["o"], "active": panels["a"]}
    gap_panels = {
        "k3": panels["k"],
        "abs log s": panels["l"],
        "F(2)": panels["f"],
        "agreement": panels["s"],
    }
    draw_rewards(reward_panel, data)
    for column, ax in share_panels.items():
        draw_marks(ax, numbers, CELLS, column, MARKS)
        share_axis(ax)
        ax.set(title=SHARES[column], xlabel="share of tokens")
    for column, ax in gap_panels.items():
        title, label, unit = GAPS[column]
        draw_marks(ax, numbers / unit, coarse, column, PAIR)
        ax.set(title=title, xlabel=label)
        if column == "abs log s" and limits:
            for side in limits:
                ax.axvline(side / unit, **style.DASHED)
        if column == "agreement":
            ax.set_xlim(right=1)
        else:
            ax.set_xlim(left=0)
        style.round_ticks(ax, MaxNLocator(3))
    upper = [reward_panel, *share_panels.values()]
    first_float32_row = len(coarse) - 0.5
    last_float32_row = len(CELLS) - 0.45
    grey = tint(style.FAINT, 0.3)
    for ax in upper:
        ax.axhspan(first_float32_row, last_float32_row, color=grey, lw=0, zorder=0)
    lower = list(gap_panels.values())
    for axes, cells in ((upper, CELLS), (lower, coarse)):
        names = [row_name(*cell) for cell in cells]
        for ax in axes[1:]:
            ax.set_yticks(range(len(cells)), [""] * len(cells))
        name_rows(axes, names, 0.55)
    handles = []
    for old, when, _, marker in MARKS:
        minibatches = "mini-batches" if when == ", all" else "mini-batch"
        label = f"{old}'s log-probs{when} {minibatches}"
        mark = mark_options(style.INK, old, marker)
        handles.append(Line2D([], [], label=label, **mark))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(MARKS))
    return style.save(figure, out, "fig_engine_likelihoods", caption(data), options)


def row_name(dtype: str, objective: str, replay: str) -> str:
    suffix = " + R3" if replay == REPLAY else ""
    return f"{objective} {dtype}{suffix}"


def share_axis(ax: Axes) -> None:
    """Set up an x axis of shares that is logarithmic above 1e-4, with room for 0."""
    ax.set_xscale("symlog", linthresh=1e-4, linscale=0.6)
    ax.set(xlim=(-2e-5, 1.5), xticks=[0, 1e-4, 1e-2, 1])

    def power(x: float, _: int) -> str:
        return f"$10^{{{np.log10(x):.0f}}}$" if 0 < x < 1 else f"{x:g}"

    ax.xaxis.set_major_formatter(power)
    ax.xaxis.minorticks_off()


def draw_rewards(ax: Axes, data: Data) -> None:
    """Draw the effect on the reward: each seed as a dot, the mean with its interval as a bar."""
    ax.axvline(0, color=style.MUTED, lw=1, zorder=2)
    for row, cell in enumerate(CELLS):
        result = effect(data, *cell)
        if not result:
            continue
        interval, by_seed = result
        colour = arm_style(cell[1]).colour
        ends = [interval.low, interval.high]
        ax.plot(ends, [row, row], color=tint(colour, 0.45), lw=1.6, zorder=2)
        rows = np.full(len(by_seed), row)
        style.dots(ax, by_seed, rows, tint(colour, 0.6))
        style.mean_mark(ax, interval.mean, row, colour, "|", 12)
    ax.set(
        title="Reward: engine's log-probs - trainer's",
        xlabel=f"difference, mean of the last {WINDOW} batches",
    )


def draw_marks(
    ax: Axes,
    numbers: pd.DataFrame,
    cells: Sequence[tuple],
    column: str,
    kinds: tuple,
) -> None:
    """Draw a row per pair of arms with a mark per seed, each kind of mark at its own height."""
    for row, cell in enumerate(cells):
        colour = arm_style(cell[1]).colour
        for old, when, shift, marker in kinds:
            arm = arm_name(*cell, old)
            if arm in numbers.index:
                by_seed = numbers.loc[arm, column + when]
                heights = np.full(len(by_seed), row + shift)
                ax.plot(by_seed, heights, **mark_options(colour, old, marker))


def mark_options(colour: str, old: str, marker: str) -> dict:
    """Return the marker's style: filled for the engine's log-probs, hollow for the trainer's."""
    common = {"ls": "", "marker": marker, "ms": 4.5, "clip_on": False, "zorder": 3}
    if old == ENGINE:
        return common | {"mfc": tint(colour, 0.75), "mec": "white", "mew": 0.4}
    return common | {"mfc": "white", "mec": colour}


def caption(data: Data) -> str:
    seeds = sorted({run.seed for run in data.runs})
    first = data.runs[0]
    model = first.settings.get("model.name", "model not named")
    text = (
        f"Run: {model}, {first.last} rollout batches, {len(data.runs)} of {len(ARMS) * len(seeds)} "
        f"runs, {load.count_seeds(seeds)}. Dots: seeds. Bars: mean, 95 % interval (of a single "
        "seed: within the run). Grey: float32, only rounding differs. Lower row: the gap in "
        "bfloat16; dashes: GSPO's clip range."
    )
    answers = verdict(data)[:2]
    return "\n".join([text, *answers])


if __name__ == "__main__":
    script.command(main)
