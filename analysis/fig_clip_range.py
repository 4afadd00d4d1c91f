"""Clip range: how much of GSPO's and GRPO's disparity in clipped tokens (the paper's Fig 2) is
their ranges' doing?

    gspo figure clip-range runs/clip_range

Both objectives are run at the same ranges, from the paper's for GSPO to the paper's for GRPO.
Expected: at equal ranges GSPO clips no more tokens than GRPO, because a mean of log-ratios varies
less than each of them. With each objective at its own range the paper finds a hundred times as
many. Prints a Markdown table; writes fig_clip_range.pdf and .png.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from gspo.analysis import load, script, style
from gspo.analysis.blocks import aligned_table
from gspo.analysis.fig2_clipping import PAPER_RANGES
from gspo.analysis.load import GRPO, GSPO, OBJECTIVES, Data
from gspo.analysis.looks import look, tint
from gspo.analysis.stats import WINDOW, ratio, t_interval
from gspo.analysis.style import View
from matplotlib.axes import Axes

REFUSED = script.DOTS | script.NO_CURVES | {"log-x": "its x axis is logarithmic already"}
SHARES = {"active": "clip/token_active", "outside": "clip/token_outside"}


def main() -> None:
    args = script.parser(__doc__, refused=REFUSED).parse_args()
    data = script.read(args, notes=False)
    script.print_notes(data, "unfinished", "left out", "cut")
    numbers = measure(data)
    paths = draw(data, numbers, args.out, script.view(args))
    print("\n".join(["", *table(numbers), "", disparity(numbers), "", *map(str, paths)]))


def measure(data: Data) -> pd.DataFrame:
    """Return a row per finished run: arm, low, high, seed, active and outside (means over all
    batches), and the reward at the end."""
    rows = []
    runs = [
        r
        for r in data.runs
        if OBJECTIVES.get(r.settings["objective.name"]) in (GSPO, GRPO) and r.last >= r.planned
    ]
    others = [key for key in load.differing(runs) if not key.startswith("objective.")]
    if others:
        load.die(
            f"the runs differ also in {', '.join(others)}: give those that differ in the clip range alone"
        )
    for run in runs:
        steps = run.rows[run.rows["step"] > 0].sort_values("step")
        row = {"arm": OBJECTIVES.get(run.settings["objective.name"]), "seed": run.seed}
        row |= {side: float(run.settings[f"objective.clip_{side}"]) for side in ("low", "high")}
        row |= {name: steps[metric].astype(float).mean() for name, metric in SHARES.items()}
        rows.append(row | {"end": steps["reward/mean"].astype(float).tail(WINDOW).mean()})
    numbers = pd.DataFrame(rows)
    if numbers.empty or not {GSPO, GRPO} <= set(numbers["arm"]):
        load.die("fig_clip_range needs finished runs of GSPO and GRPO")
    return numbers


def shares(numbers: pd.DataFrame, arm: str, low: float, name: str = "active") -> pd.Series:
    """Return one clipped share of one arm at one range, by seed."""
    rows = numbers[(numbers["arm"] == arm) & (numbers["low"] == low)]
    return rows.set_index("seed")[name].sort_index()


def compared(numbers: pd.DataFrame, gspo_low: float, grpo_low: float) -> str:
    """Return GSPO's share over GRPO's at these ranges as text, with its interval over the seeds
    that both have.
    """
    a, b = shares(numbers, GSPO, gspo_low), shares(numbers, GRPO, grpo_low)
    both = a.index.intersection(b.index)
    if not len(both):
        return "-"
    value = ratio(a[both].to_numpy()[None], b[both].to_numpy()[None])
    return value.text(".3g") if np.isfinite(value.mean) else "GRPO clips none"


def table(numbers: pd.DataFrame) -> list[str]:
    """Return a Markdown row per range with both shares, their ratio and both rewards."""
    head = ["range", "GSPO clipped", "GRPO clipped", "GSPO / GRPO", "GSPO reward", "GRPO reward"]
    rows = []
    for (low, high), cell in numbers.groupby(["low", "high"]):
        means, ends = cell.groupby("arm")["active"].mean(), cell.groupby("arm")["end"]
        clipped = [f"{means.get(arm, np.nan):.2g}" for arm in (GSPO, GRPO)]
        reward = [
            t_interval(ends.get_group(arm).to_numpy()).text() if arm in means else "-"
            for arm in (GSPO, GRPO)
        ]
        rows.append([f"{low:g} / {high:g}", *clipped, compared(numbers, low, low), *reward])
    return aligned_table([head, *rows])


def disparity(numbers: pd.DataFrame) -> str:
    """Return a sentence with the paper's comparison, where each objective has its own range."""
    own = {arm: PAPER_RANGES[name][0] for arm, name in ((GSPO, "gspo"), (GRPO, "grpo"))}
    both = compared(numbers, own[GSPO], own[GRPO])
    return f"Each at the paper's own range: GSPO / GRPO {both} (the paper: about 115)."


def draw(data: Data, numbers: pd.DataFrame, out: Path, view: View | None = None) -> list[Path]:
    """Draw the clipped share against the range on the left, and the reward at the end on the right."""
    view = view or View()
    figure = style.canvas(3.2, view)
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    lines(left, numbers, "active", 1.0)
    lines(left, numbers, "outside", 0.4)
    left.set_yscale("symlog", linthresh=1e-4)
    left.set_ylim(0, 1)
    left.set_title("Clipped tokens")
    left.set_ylabel("share; pale: outside the band")
    lines(right, numbers, "end", 1.0)
    right.set_ylim(bottom=0)
    right.set_title("Reward at the end")
    right.set_ylabel(f"mean of the last {WINDOW} batches")
    for ax in (left, right):
        ax.set_xscale("log")
        ax.set_xlabel("lower clip range")
        for arm, name in ((GSPO, "gspo"), (GRPO, "grpo")):
            ax.axvline(
                PAPER_RANGES[name][0], color=tint(look(arm).colour, 0.5), lw=1, ls="--", zorder=0
            )
    style.key(left, {arm: look(arm) for arm in (GSPO, GRPO)}, loc="best")
    run = data.runs[0]
    words = f"{len(numbers)} runs of {run.planned} batches in {run.settings['trainer.minibatches']} mini-batches. Marks: "
    words += "seeds; lines: means over seeds of the mean over all batches. Dashed: the range that the paper chose for "
    words += "each. Share axis linear below 0.0001. " + disparity(numbers)
    return style.save(figure, out, "fig_clip_range", words, view)


def lines(ax: Axes, numbers: pd.DataFrame, column: str, strength: float) -> None:
    """Draw one column against the range: the mean as a line per arm and, at full strength, each
    seed as a mark.
    """
    for arm, runs in numbers.groupby("arm"):
        own = look(arm)
        if strength == 1:
            seeds = {"ms": 5, "color": tint(own.colour, 0.5), "mec": "white", "mew": 0.4}
            ax.plot(runs["low"], runs[column], own.marker, **seeds)
        means = runs.groupby("low")[column].mean()
        ax.plot(
            means.index,
            means,
            color=tint(own.colour, strength),
            ls=own.line,
            lw=1.8 if strength == 1 else 1.2,
        )


if __name__ == "__main__":
    script.command(main)
