"""Figure 2: which share of the tokens is clipped, in GSPO and in GRPO?

    gspo figure clipping runs/paper_figures

Expected, if the paper is right: GSPO clips about a hundred times more tokens than GRPO (0.15
against 0.0013), though its band is a thousand times narrower, because it clips whole responses. The
first mini-batch clips nothing by construction: there the policy is still the old policy. The
verdict follows the criterion in analysis/claims.py. Writes fig2_clipping.pdf and .png. Metrics:
clip/token_active, where the clip removed the gradient, and clip/token_outside, where the ratio left
the band. The paper does not say which of the two it shows; we compare it with the first.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gspo.analysis import claims, load, panels, paper, script, style
from gspo.analysis.load import GRPO_R2, GSPO, Data
from gspo.analysis.looks import Look, look, looks, tint
from gspo.analysis.stats import estimate
from gspo.analysis.style import View
from matplotlib.axes import Axes

PAPERS = (GSPO, GRPO_R2)
REFUSED = script.NO_CURVES | {
    "log-x": "its bars start at 0, which a logarithmic axis does not have"
}
MOST = 14  # the most arms that fit into the figure
MINIBATCH = "clip/token_active_minibatch_"  # the metrics by mini-batch of the step
IN_A_ROW = 5  # up to so many arms the three panels stand side by side
PAPER_RANGES = paper.CLIP_RANGES


def judged(data: Data) -> list[claims.Claim]:
    """Return the claims that this figure speaks to."""
    return [] if load.lacking(data, claims.contenders(data)) else [claims.clipping(data)]


def lacking(data: Data) -> str | None:
    """Return why the figure cannot be drawn, or None if it can."""
    if len(data.arms) > MOST:
        return load.too_many(data, MOST)
    if not data.metrics("clip/token_active"):
        return "needs clip/token_active, which no run has recorded"
    return None


def draw(data: Data, out: Path, view: View | None = None) -> list[Path]:
    """Draw the bars of our arms, the paper's bars, and the shares by mini-batch."""
    if why := lacking(data):
        load.die(f"fig2 {why}")
    view = view or View()
    drawn = looks(data.arms)
    figure = style.canvas(1.7 + 0.55 * len(drawn), view)
    figure.set_size_inches(
        view.width, figure.get_figheight() + style.key_above(figure, drawn, view)
    )
    by_minibatch = None  # runs whose mini-batches were not recorded have no such panel
    if not data.metrics(f"{MINIBATCH}2"):
        bars, companion = figure.subplots(1, 2, width_ratios=[1.5, 0.8])
    elif len(drawn) <= IN_A_ROW:
        bars, companion, by_minibatch = figure.subplots(1, 3, width_ratios=[1.5, 0.8, 1])
    else:  # side by side, the two other panels would be as high as the bars of many arms
        panels_of = figure.subplot_mosaic(
            [["bars", "paper"], ["bars", "by"]], width_ratios=[1.5, 1]
        )
        bars, companion, by_minibatch = panels_of["bars"], panels_of["paper"], panels_of["by"]
    share_bars(bars, data, drawn, view)
    paper_bars(companion)
    if by_minibatch:
        minibatch_lines(by_minibatch, data, drawn, view)
    words = f"{panels.named(data.arms)} {clip_ranges(data)} Share of response tokens, mean over all updates; lines on "
    words += "the bars: 95 % intervals over seeds (of a single seed: within the run). Solid: the clip removed the "
    words += "gradient; pale: the ratio lies outside the band."
    if by_minibatch:
        words += " Right: by mini-batch, mean over seeds, axis linear below 0.0001."
    words += " Dots and thin lines: single seeds." if view.seeds else ""
    words += " The paper's bars: GSPO and, as section 5.1 reads, GRPO + Routing Replay (R2)."
    caption = "\n".join(
        [f"{load.describe(data, data.arms)} {words}", *(c.sentence() for c in judged(data))]
    )
    return style.save(figure, out, "fig2_clipping", caption, view)


def clip_ranges(data: Data) -> str:
    """Return a sentence with the arms' clip ranges, and say which are not the paper's: the clipped
    share depends on them."""
    parts = []
    for arm in data.arms:
        get = data.of(arm)[0].settings.get
        low, high = get("objective.clip_low"), get("objective.clip_high")
        published = PAPER_RANGES.get(get("objective.name"), (low, high))
        remark = "" if (low, high) == published else f" (paper: {published[0]} / {published[1]})"
        parts.append(f"{arm} {low} / {high}{remark}")
    return f"Clip ranges: {', '.join(parts)}."


def share_bars(ax: Axes, data: Data, drawn: dict[str, Look], view: View) -> None:
    """Draw two bars per arm, active (solid) and outside (pale), with the value beside each, on an
    axis from 0.
    """
    last, longest = data.common_step(*data.arms), 0.0
    for row, arm in enumerate(data.arms):
        for offset, name, strength in (
            (-0.19, "clip/token_active", 1.0),
            (0.19, "clip/token_outside", 0.4),
        ):
            table = data.table(arm, name).loc[:last]
            if table.isna().all(axis=None):
                continue
            share = estimate(table)
            ends = np.clip([[share.mean - share.low], [share.high - share.mean]], 0, None)
            hue = tint(drawn[arm].colour, strength)
            bars = {
                "height": 0.34,
                "color": hue,
                "error_kw": {"ecolor": style.INK, "elinewidth": 1},
            }
            ax.barh(row + offset, share.mean, xerr=None if np.isnan(ends).any() else ends, **bars)
            if view.seeds:
                seeds = {"ms": 4, "color": style.MUTED, "mec": "white", "mew": 0.5, "zorder": 4}
                ax.plot(table.mean(), [row + offset] * table.shape[1], "o", **seeds)
            reach = style.finite_max([share.mean, share.high])
            text = f"{share.mean:.2g} {name.removeprefix('clip/token_')}"
            ax.annotate(
                text,
                (reach, row + offset),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            longest = max(longest, reach)
    ax.set_yticks(range(len(data.arms)), [style.short(arm) for arm in data.arms])
    bar_axes(ax, len(data.arms), longest * 1.42)
    ax.set_title("Clipped tokens, our runs")


def paper_bars(ax: Axes) -> None:
    """Draw the paper's two bars."""
    for row, arm in enumerate(PAPERS):
        value = paper.series("fig2_clipped", arm)[0]
        ax.barh(row, value, height=0.5, color=look(arm).colour)
        ax.annotate(
            f"{value:g}", (value, row), (5, 0), textcoords="offset points", va="center", fontsize=8
        )
    ax.set_yticks(range(len(PAPERS)), [style.short(arm) for arm in PAPERS])
    bar_axes(ax, len(PAPERS), 0.2)
    ax.set_title("The paper's Fig. 2")


def bar_axes(ax: Axes, arms: int, right: float) -> None:
    """Set up horizontal bars from 0, with the first arm on top."""
    ax.set_xlim(0, right or 1)
    ax.set_ylim(arms - 0.45, -0.55)
    ax.grid(axis="x")
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("share of tokens")
    for text in ax.get_yticklabels():
        text.set_color(style.INK)


def minibatch_lines(ax: Axes, data: Data, drawn: dict[str, Look], view: View) -> None:
    """Draw clip/token_active by mini-batch of the step, averaged over batches and seeds."""
    last, prefix = data.common_step(*data.arms), MINIBATCH
    count = max((int(name.removeprefix(prefix)) for name in data.metrics(prefix)), default=1)
    largest = 0.0
    for arm, own in drawn.items():
        tables = [data.table(arm, f"{prefix}{n}").loc[:last] for n in range(1, count + 1)]
        each = np.array([table.mean().to_numpy() for table in tables])  # [mini-batch, seed]
        if view.seeds:
            ax.plot(range(1, count + 1), each, color=tint(own.colour, 0.45), lw=0.8, zorder=1)
        ax.plot(range(1, count + 1), each.mean(1), ms=5.5, lw=1.6, **own.plot())
        largest = max(largest, style.finite_max(each.mean(1)))
    ax.set_yscale("symlog", linthresh=1e-4)
    ax.set_ylim(0, max(1e-3, 2 * largest))
    ax.set_xticks(range(1, count + 1))
    ax.set_xlabel("mini-batch of the step")
    ax.set_ylabel("share of tokens")
    ax.set_title("Clipped, by mini-batch")


def main() -> None:
    script.run(__doc__, draw, judged, REFUSED)


if __name__ == "__main__":
    script.command(main)
