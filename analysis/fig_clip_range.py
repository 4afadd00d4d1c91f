"""Clip range: how much of the disparity in clipped tokens (Fig 2) is due to the ranges?

    gspo figure clip-range runs/clip_range

Both objectives are run at the same ranges, from the paper's for GSPO to the paper's for GRPO.
Expected: at equal ranges GSPO clips no more tokens than GRPO, because a mean of log-ratios varies
less than each of them. With each objective at its own range the paper finds a hundred times as
many. Prints a Markdown table. Writes fig_clip_range.pdf and .png.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gspo.analysis import script, style
from gspo.analysis.arm_styles import arm_style, tint
from gspo.analysis.blocks import markdown_table
from gspo.analysis.grid import check_alike, refuse_repeated, run_numbers
from gspo.analysis.load import GRPO, GSPO, Data
from gspo.analysis.paper import CLIP_RANGES
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import START, WINDOW, ratio, t_interval
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.io.arguments import command_options

REFUSED = script.DOTS | script.NO_CURVES | {"log_x": "its x axis is logarithmic already"}
SHARES = {"active": "clip/token_active", "outside": "clip/token_outside"}
ARM_OF = {"gspo": GSPO, "grpo": GRPO}
Range = tuple[float, float]
PAPER_RANGES: dict[str, Range] = {arm: CLIP_RANGES[objective] for objective, arm in ARM_OF.items()}


def main() -> None:
    options = command_options(script.Options, __doc__, REFUSED)
    data = script.read(options, notes=script.ABOUT_ENDS)
    numbers = measure(data)
    paths = draw(data, numbers, options.out, options)
    script.print_lines(table(numbers), [disparity(numbers)], paths)


def measure(data: Data) -> pd.DataFrame:
    """Return a row per finished run.

    The columns are arm, low, high, seed, active and outside (means over all batches), and end, the
    reward at the end.
    """
    runs = []
    for run in data.runs:
        if run.finished and run.settings["objective.name"] in ARM_OF:
            runs.append(run)
            if None in run.clip_range:
                raise RunsError(f"{run.path} has no clip range")
    advice = "give those that differ in the clip range alone"
    check_alike(runs, ("objective.",), advice)
    for name, arm in ARM_OF.items():
        of_arm = [run for run in runs if run.settings["objective.name"] == name]
        check_alike(of_arm, ("objective.clip_",), advice, f"the runs of {arm}")
    rows = []
    for run in runs:
        row = run_numbers(run, START, WINDOW, SHARES)
        row["arm"] = ARM_OF[run.settings["objective.name"]]
        row["low"] = float(run.settings["objective.clip_low"])
        row["high"] = float(run.settings["objective.clip_high"])
        rows.append(row)
    numbers = pd.DataFrame(rows)
    if numbers.empty or not {GSPO, GRPO} <= set(numbers["arm"]):
        raise RunsError("fig_clip_range needs finished runs of GSPO and GRPO")
    refuse_repeated(numbers, ["low"], "choose one with where.objective.clip_high=...")
    return numbers


def clipped_share(numbers: pd.DataFrame, arm: str, clip_range: Range) -> pd.Series:
    """Return the clipped share of an arm at a range, by seed."""
    low, high = clip_range
    chosen = (numbers["arm"] == arm) & (numbers["low"] == low) & (numbers["high"] == high)
    return numbers[chosen].set_index("seed")["active"]


def compared(numbers: pd.DataFrame, gspo_range: Range, grpo_range: Range) -> str:
    """Return GSPO's share over GRPO's at these ranges as text, with its interval.

    The interval is over the seeds that both have.
    """
    gspo = clipped_share(numbers, GSPO, gspo_range)
    grpo = clipped_share(numbers, GRPO, grpo_range)
    shares = pd.DataFrame({"gspo": gspo, "grpo": grpo}).dropna()
    if shares.empty:
        return "-"
    # each is a table of one batch, with a column per seed
    gspo_TS = shares[["gspo"]].T
    grpo_TS = shares[["grpo"]].T
    interval = ratio(gspo_TS, grpo_TS)
    if not np.isfinite(interval.mean):
        return "GRPO clips none"
    return interval.text(".3g")


def table(numbers: pd.DataFrame) -> list[str]:
    """Return a Markdown row per range with both shares, their ratio and both rewards."""
    rows = [["range", "GSPO clipped", "GRPO clipped", "GSPO / GRPO", "GSPO reward", "GRPO reward"]]
    for (low, high), cell in numbers.groupby(["low", "high"]):
        shares = []
        rewards = []
        for arm in (GSPO, GRPO):
            runs = cell[cell["arm"] == arm]
            reward = t_interval(runs["end"]).text() if len(runs) else "-"
            rewards.append(reward)
            shares.append(f"{runs['active'].mean():.2g}" if len(runs) else "-")
        quotient = compared(numbers, (low, high), (low, high))
        rows.append([f"{low:g} / {high:g}", *shares, quotient, *rewards])
    return markdown_table(rows)


def disparity(numbers: pd.DataFrame) -> str:
    """Return a sentence with the paper's comparison, each objective at its own range."""
    text = compared(numbers, PAPER_RANGES[GSPO], PAPER_RANGES[GRPO])
    return f"Each at the paper's own range: GSPO / GRPO {text} (the paper: about 115)."


def draw(
    data: Data,
    numbers: pd.DataFrame,
    out: Path,
    options: FigureOptions = DEFAULTS,
) -> list[Path]:
    """Draw the clipped share against the range on the left, the reward at the end on the right."""
    figure = style.canvas(3.2, options)
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    lines(left, numbers, "active")
    lines(left, numbers, "outside", pale=True)
    left.set_yscale("symlog", linthresh=1e-4)
    left.set_ylim(0, 1)
    left.set(title="Clipped tokens", ylabel="share; pale: outside the band")
    lines(right, numbers, "end")
    right.set_ylim(bottom=0)
    right.set(title="Reward at the end", ylabel=f"mean of the last {WINDOW} batches")
    for ax in (left, right):
        ax.set(xscale="log", xlabel="lower clip range")
        for arm, (low, _) in PAPER_RANGES.items():
            colour = tint(arm_style(arm).colour, 0.5)
            dashes = style.DASHED | {"color": colour, "zorder": 0}
            ax.axvline(low, **dashes)
    styles = {arm: arm_style(arm) for arm in (GSPO, GRPO)}
    style.legend(left, styles, loc="best")
    run = data.runs[0]
    caption = (
        f"{len(numbers)} runs of {run.planned} batches in {run.settings['trainer.minibatches']} "
        "mini-batches. Marks: seeds; lines: means over seeds of the mean over all batches. Dashed: "
        "the range that the paper chose for each. Share axis linear below 0.0001. "
        f"{disparity(numbers)}"
    )
    return style.save(figure, out, "fig_clip_range", caption, options)


def lines(ax: Axes, numbers: pd.DataFrame, column: str, pale: bool = False) -> None:
    """Draw the mean of a column against the range, a line per arm.

    Each seed is a mark, unless the lines are pale.
    """
    for arm, runs in numbers.groupby("arm"):
        line = arm_style(arm)
        colour = line.colour
        # a lower side may stand beside several upper sides, which the table has apart
        means = runs.groupby(["low", "high"])[column].mean().droplevel("high")
        if pale:
            ax.plot(means, color=tint(colour, 0.4), ls=line.line, lw=1.2)
            continue
        x = runs["low"]
        y = runs[column]
        style.dots(ax, x, y, tint(colour, 0.5), line.marker, edge=0.4)
        ax.plot(means, color=colour, ls=line.line, lw=1.8)


if __name__ == "__main__":
    script.command(main)
