"""Clip range: how much of the disparity in clipped tokens (Fig 2) is due to the ranges?

    gspo figure clip-range runs/clip_range

Both objectives are run at the same ranges, from the paper's for GSPO to the paper's for GRPO.
Expected: at equal ranges GSPO clips no more tokens than GRPO, because a mean of log-ratios varies
less than each of them. With each objective at its own range the paper finds a hundred times as
many. Prints a Markdown table. Writes fig_clip_range.pdf and .png.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gspo.analysis import load, script, style
from gspo.analysis.arm_styles import arm_style, tint
from gspo.analysis.blocks import markdown_table
from gspo.analysis.load import GRPO, GSPO, Data
from gspo.analysis.paper import CLIP_RANGES
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import WINDOW, ratio, t_interval
from gspo.analysis.style import FigureOptions
from gspo.io.arguments import command_options

REFUSED = script.DOTS | script.NO_CURVES | {"log_x": "its x axis is logarithmic already"}
SHARES = {"active": "clip/token_active", "outside": "clip/token_outside"}
PAPER_LOW = {GSPO: CLIP_RANGES["gspo"][0], GRPO: CLIP_RANGES["grpo"][0]}


def main() -> None:
    options = command_options(script.Options, __doc__, REFUSED)
    data = script.read(options, notes=False)
    script.print_notes(data, "unfinished", "left out", "cut")
    numbers = measure(data)
    paths = draw(data, numbers, options.out, options)
    script.print_lines(table(numbers), [disparity(numbers)], paths)


def measure(data: Data) -> pd.DataFrame:
    """Return a row per finished run.

    The columns are arm, low, high, seed, active and outside (means over all batches), and end, the
    reward at the end.
    """
    arm_of = {"gspo": GSPO, "grpo": GRPO}
    runs = [run for run in data.runs if run.settings["objective.name"] in arm_of and run.finished]
    unexpected = [key for key in load.differing(runs) if not key.startswith("objective.")]
    if unexpected:
        raise RunsError(
            f"the runs differ also in {', '.join(unexpected)}: give those that differ in the clip range alone"
        )
    rows = []
    for run in runs:
        steps = run.rows[run.rows["step"] > 0].sort_values("step")
        row: dict[str, object] = {
            "arm": arm_of[run.settings["objective.name"]],
            "seed": run.seed,
            "low": float(run.settings["objective.clip_low"]),
            "high": float(run.settings["objective.clip_high"]),
        }
        for name, metric in SHARES.items():
            row[name] = steps[metric].astype(float).mean()
        row["end"] = steps["reward/mean"].astype(float).tail(WINDOW).mean()
        rows.append(row)
    numbers = pd.DataFrame(rows)
    if numbers.empty or not {GSPO, GRPO} <= set(numbers["arm"]):
        raise RunsError("fig_clip_range needs finished runs of GSPO and GRPO")
    return numbers


def clipped_share(numbers: pd.DataFrame, arm: str, low: float) -> pd.Series:
    """Return the clipped share of an arm at a range, by seed."""
    rows = numbers[(numbers["arm"] == arm) & (numbers["low"] == low)]
    return rows.set_index("seed")["active"].sort_index()


def compared(numbers: pd.DataFrame, gspo_low: float, grpo_low: float) -> str:
    """Return GSPO's share over GRPO's at these ranges as text, with its interval.

    The interval is over the seeds that both have.
    """
    gspo = clipped_share(numbers, GSPO, gspo_low)
    grpo = clipped_share(numbers, GRPO, grpo_low)
    seeds = gspo.index.intersection(grpo.index)
    if not len(seeds):
        return "-"
    interval = ratio(gspo[seeds].to_numpy()[None], grpo[seeds].to_numpy()[None])
    return interval.text(".3g") if np.isfinite(interval.mean) else "GRPO clips none"


def table(numbers: pd.DataFrame) -> list[str]:
    """Return a Markdown row per range with both shares, their ratio and both rewards."""
    rows = [["range", "GSPO clipped", "GRPO clipped", "GSPO / GRPO", "GSPO reward", "GRPO reward"]]
    for (low, high), cell in numbers.groupby(["low", "high"]):
        shares = []
        rewards = []
        for arm in (GSPO, GRPO):
            runs = cell[cell["arm"] == arm]
            shares.append(f"{runs['active'].mean():.2g}")
            rewards.append(t_interval(runs["end"].to_numpy()).text() if len(runs) else "-")
        rows.append([f"{low:g} / {high:g}", *shares, compared(numbers, low, low), *rewards])
    return markdown_table(rows)


def disparity(numbers: pd.DataFrame) -> str:
    """Return a sentence with the paper's comparison, each objective at its own range."""
    text = compared(numbers, PAPER_LOW[GSPO], PAPER_LOW[GRPO])
    return f"Each at the paper's own range: GSPO / GRPO {text} (the paper: about 115)."


def draw(
    data: Data, numbers: pd.DataFrame, out: Path, options: FigureOptions | None = None
) -> list[Path]:
    """Draw the clipped share against the range on the left, and the reward at the end on the right."""
    options = options or FigureOptions()
    figure = style.canvas(3.2, options)
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    lines(left, numbers, "active")
    lines(left, numbers, "outside", pale=True)
    left.set_yscale("symlog", linthresh=1e-4)
    left.set_ylim(0, 1)
    left.set_title("Clipped tokens")
    left.set_ylabel("share; pale: outside the band")
    lines(right, numbers, "end")
    right.set_ylim(bottom=0)
    right.set_title("Reward at the end")
    right.set_ylabel(f"mean of the last {WINDOW} batches")
    for ax in (left, right):
        ax.set_xscale("log")
        ax.set_xlabel("lower clip range")
        for arm, low in PAPER_LOW.items():
            colour = tint(arm_style(arm).colour, 0.5)
            ax.axvline(low, color=colour, lw=1, ls="--", zorder=0)
    style.legend(left, {arm: arm_style(arm) for arm in (GSPO, GRPO)}, loc="best")
    run = data.runs[0]
    caption = (
        f"{len(numbers)} runs of {run.planned} batches in {run.settings['trainer.minibatches']} "
        "mini-batches. Marks: seeds; lines: means over seeds of the mean over all batches. Dashed: "
        "the range that the paper chose for each. Share axis linear below 0.0001. "
    )
    return style.save(figure, out, "fig_clip_range", caption + disparity(numbers), options)


def lines(ax: Axes, numbers: pd.DataFrame, column: str, pale: bool = False) -> None:
    """Draw the mean of a column against the range, a line per arm.

    Each seed is a mark, unless the lines are pale.
    """
    for arm, runs in numbers.groupby("arm"):
        line = arm_style(arm)
        if not pale:
            seeds = {"ms": 5, "color": tint(line.colour, 0.5), "mec": "white", "mew": 0.4}
            ax.plot(runs["low"], runs[column], line.marker, **seeds)
        means = runs.groupby("low")[column].mean()
        colour = tint(line.colour, 0.4 if pale else 1.0)
        ax.plot(means.index, means, color=colour, ls=line.line, lw=1.2 if pale else 1.8)


if __name__ == "__main__":
    script.command(main)
