"""Efficiency: how much compute does GSPO need to reach the final reward of GRPO with Routing
Replay?

    gspo figure efficiency runs/paper_figures

Expected, if the paper is right: about half (ratio 1.6 to 2 in its Fig. 1). The exact definition of
the two ratios and of their intervals is at the top of analysis/efficiency.py; the verdict is taken
on the like-for-like ratio, which is 1 for equal arms. Writes fig_efficiency.pdf and .png. Metrics:
reward/mean, compute/flops.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gspo.analysis import claims, load, panels, script, style
from gspo.analysis.efficiency import Efficiency
from gspo.analysis.load import GSPO, Data
from gspo.analysis.looks import look, tint
from gspo.analysis.stats import WINDOW, Interval, trailing_mean
from gspo.analysis.style import View
from matplotlib.axes import Axes

REFUSED = {"smooth": f"its curves are trailing means of {WINDOW} batches, as the criterion says"}


def judged(data: Data) -> list[claims.Claim]:
    """Return the claims that this figure speaks to."""
    return [claims.cheaper(data)]


def lacking(data: Data) -> str | None:
    """Return why the figure cannot be drawn, or None if it can."""
    arms = claims.contenders(data)
    if why := panels.lacking(data, arms):
        return why
    return None if style.has_compute(data, arms) else f"needs {style.COMPUTE} of every run"


def draw(data: Data, out: Path, view: View | None = None) -> list[Path]:
    """Draw the curves and where they reach the level on the left, and the ratios with their
    intervals on the right.
    """
    if why := lacking(data):
        load.die(f"fig_efficiency {why}")
    arms, view = claims.contenders(data), view or View()
    result = claims.compute_ratio(data)
    figure = style.canvas(3.4, view)
    curves, ratios = figure.subplots(1, 2, width_ratios=[1.45, 1])
    reaching(curves, data, result, view)
    ratio_axis(ratios, arms[1], result)
    words = f"{panels.named(arms)} Left: trailing mean of {WINDOW} batches, mean over seeds"
    words += (
        " (thin: single seeds)" * view.seeds
        + f"; dotted: mean of the rival's last {WINDOW} batches. Right: 95 % "
    )
    words += "intervals, resampling seeds and blocks of batches; an arrowhead marks the bound of a ratio whose level "
    words += "was not reached."
    caption = f"{load.describe(data, list(arms))} {words}\n{judged(data)[0].sentence()}"
    return style.save(figure, out, "fig_efficiency", caption, view)


def reaching(ax: Axes, data: Data, result: Efficiency, view: View) -> None:
    """Draw the trailing means of the rewards against compute, with a dot where each first reaches
    the rival's final level."""
    ends, largest = [], 0.0
    reward, flops, rival, rival_flops = claims.reward_and_flops(data)
    curves = ((reward, flops, result.need), (rival, rival_flops, result.rival_need))
    for arm, (batches, x, need) in zip(claims.contenders(data), curves, strict=True):
        y, own, mean_x = trailing_mean(batches.mean(axis=1)), look(arm), x.mean(axis=1)
        for seed in batches if view.seeds else ():
            ax.plot(
                x[seed],
                trailing_mean(batches[seed]),
                color=tint(own.colour, 0.45),
                lw=0.8,
                zorder=1,
            )
        ax.plot(mean_x, y, lw=2, ms=5, markevery=max(1, len(y) // 8), **own.plot())
        if np.isfinite(need):
            ax.plot(
                need, result.level, marker=own.marker, color=own.colour, ms=9, mec="white", zorder=4
            )
        ends.append((y[-1], style.short(arm), own))
        largest = max(largest, style.finite_max(mean_x))
    ax.axhline(result.level, color=style.INK, lw=1, ls=":")
    style.training_axis(ax, largest, view)
    ax.set_ylabel("training reward")
    ax.set_title("Reaching the rival's final level")
    style.label_ends(ax, ends)


def ratio_axis(ax: Axes, rival: str, result: Efficiency) -> None:
    """Draw three ratios on one axis, where 1 is equal: like for like, to the rival's whole run, and
    the paper's.
    """
    published = claims.paper_compute_ratio()
    rows = [
        ("like for like\n(decides)", result.like, result.like.text()),
        ("to the rival's\nwhole run", result.to_end, result.to_end.text()),
        (
            "the paper's points,\nwhole run",
            Interval(published, np.nan, np.nan, 1),
            f"{published:.2f}",
        ),
    ]
    right = max(2.0, 1.1 * style.finite_max([(r.mean, r.high) for _, r, _ in rows]))
    for row, (_, ratio, text) in enumerate(rows):
        hue = style.MUTED if row == 2 else look(GSPO).colour
        reached = ratio.mean > 0  # if not, the ratio lies somewhere below the bound
        ax.plot([ratio.low, ratio.high], [row, row], color=hue, lw=2)
        ax.plot(
            ratio.mean if reached else ratio.bound,
            row,
            "o" if reached else "<",
            color=hue,
            ms=7,
            mec="white",
        )
        box = {"fc": "white", "ec": "none", "pad": 1}
        shown = text.replace(" (", "\n(")
        ax.text(right, row - 0.28, shown, ha="right", va="center", fontsize=8.5, bbox=box)
    ax.axvline(1, color=style.INK, lw=1, ls=":")
    ax.set_yticks(range(3), [name for name, _, _ in rows])
    ax.set_ylim(2.5, -0.6)
    ax.set_xlim(0, right)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(f"compute, {panels.short_name(rival)} / {GSPO}")
    ax.set_title("Ratio (over 1: GSPO cheaper)")


def main() -> None:
    script.run(__doc__, draw, judged, REFUSED)


if __name__ == "__main__":
    script.command(main)
