"""Efficiency: how much compute does GSPO need to reach the final reward of GRPO with Routing Replay?

    python analysis/fig_efficiency.py runs/paper_figures

Expected, if the paper is right: about half (ratio 1.6 to 2 in its Fig. 1). The exact definition of the two ratios and
of their intervals is at the top of analysis/efficiency.py; the verdict is taken on the like-for-like ratio, which is 1
for equal arms. Writes fig_efficiency.pdf and .png. Metrics: reward/mean, compute/flops.
"""

from __future__ import annotations

from pathlib import Path

import claims
import load
import numpy as np
import script
import style
from efficiency import Efficiency
from load import GSPO, Data
from matplotlib.axes import Axes
from stats import WINDOW, Interval, trailing_mean


def judged(data: Data) -> list[claims.Claim]:
    """The claims that this figure speaks to."""
    return [claims.cheaper(data)]


def draw(data: Data, out: Path) -> list[Path]:
    """Left: the curves and where they reach the level. Right: the ratios with their intervals."""
    arms = claims.contenders(data)
    load.require(data, "fig_efficiency", arms)
    if any(table.isna().any(axis=None) for table in claims.reward_and_flops(data)):
        load.die("fig_efficiency needs compute/flops of every run")
    result = claims.compute_ratio(data)
    figure = style.canvas(3.4)
    curves, ratios = figure.subplots(1, 2, width_ratios=[1.45, 1])
    reaching(curves, data, arms, result)
    ratio_axis(ratios, arms[1], result)
    words = f"Left: trailing mean of {WINDOW} batches, mean over seeds; dotted: mean of the rival's last {WINDOW} "
    words += "batches. Right: 95 % intervals, resampling seeds and blocks of batches."
    caption = f"{load.describe(data, list(arms))} {words}\n{judged(data)[0].sentence()}"
    return style.save(figure, out, "fig_efficiency", caption)


def reaching(ax: Axes, data: Data, arms: tuple[str, ...], result: Efficiency) -> None:
    """Trailing-mean rewards against compute; dots where they first reach the rival's final level."""
    ends, largest = [], 0.0
    reward, flops, rival, rival_flops = (table.mean(axis=1) for table in claims.reward_and_flops(data))
    curves = ((reward, flops, result.need), (rival, rival_flops, result.rival_need))
    for arm, (batches, x, need) in zip(arms, curves, strict=True):
        y, hue = trailing_mean(batches), style.colour(arm)
        ax.plot(x, y, color=hue, lw=2)
        if np.isfinite(need):
            ax.plot(need, result.level, "o", color=hue, ms=7, mec="white", zorder=4)
        ends.append((y[-1], style.short(arm), hue))
        largest = max(largest, style.finite_max(x))
    ax.axhline(result.level, color=style.INK, lw=1, ls=":")
    style.flops_axis(ax, largest)
    ax.set_ylabel("training reward")
    ax.set_title("Reaching the rival's final level")
    style.label_ends(ax, ends)


def ratio_axis(ax: Axes, rival: str, result: Efficiency) -> None:
    """The like-for-like ratio, the ratio to the rival's whole run, and the paper's, on one axis; 1 = equal."""
    published = claims.paper_compute_ratio()
    rows = [
        ("like for like\n(decides)", result.like, result.like.text()),
        ("to the rival's\nwhole run", result.to_end, result.to_end.text()),
        ("the paper's points,\nwhole run", Interval(published, np.nan, np.nan, 1), f"{published:.2f}"),
    ]
    right = max(2.0, 1.1 * style.finite_max([(r.mean, r.high) for _, r, _ in rows]))
    for row, (_, ratio, text) in enumerate(rows):
        hue = style.OTHER if row == 2 else style.colour(GSPO)
        reached = ratio.mean > 0  # if not, the ratio lies somewhere below the bound
        ax.plot([ratio.low, ratio.high], [row, row], color=hue, lw=2)
        ax.plot(ratio.mean if reached else ratio.bound, row, "o" if reached else "<", color=hue, ms=7, mec="white")
        ax.text(
            right, row - 0.22, text, ha="right", va="center", fontsize=8.5, bbox={"fc": "white", "ec": "none", "pad": 1}
        )
    ax.axvline(1, color=style.INK, lw=1, ls=":")
    ax.set_yticks(range(3), [name for name, _, _ in rows])
    ax.set_ylim(2.5, -0.6)
    ax.set_xlim(0, right)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(f"compute, {rival.replace('Routing Replay (R2)', 'R2')} / GSPO")
    ax.set_title("Ratio (over 1: GSPO cheaper)")


if __name__ == "__main__":
    script.command(lambda: script.run(__doc__, draw, judged))
