"""Figure 2: which share of the tokens is clipped, in GSPO and in GRPO?

    python analysis/fig2_clipping.py runs/paper_figures

Expected, if the paper is right: GSPO clips about a hundred times more tokens than GRPO (0.15 against 0.0013), though
its band is a thousand times narrower, because it clips whole responses. The first mini-batch clips nothing by
construction: there the policy is still the old policy. The verdict follows the criterion in analysis/claims.py.
Writes fig2_clipping.pdf and .png. Metrics: clip/token_active (the clip removed the gradient; compared with the paper,
which does not say which it means) and clip/token_outside (the ratio left the band).
"""

from __future__ import annotations

from pathlib import Path

import claims
import load
import numpy as np
import paper
import script
import style
from load import GRPO_R2, GSPO, Data
from matplotlib.axes import Axes
from stats import estimate

PAPERS = (GSPO, GRPO_R2)  # the arms of the paper's figure
PAPER_RANGES = paper.CLIP_RANGES


def judged(data: Data) -> list[claims.Claim]:
    """The claims that this figure speaks to."""
    return [claims.clipping(data)]


def draw(data: Data, out: Path) -> list[Path]:
    """Bars of our arms, the paper's bars, and the shares by mini-batch."""
    arms = claims.contenders(data)
    load.require(data, "fig2", arms)
    figure = style.canvas(1.5 + 0.55 * len(data.arms))
    bars, companion, by_minibatch = figure.subplots(1, 3, width_ratios=[1.5, 0.8, 1])
    share_bars(bars, data)
    paper_bars(companion)
    minibatch_lines(by_minibatch, data)
    kind = "95 % over seeds" if len(data.seeds(*arms)) > 1 else "95 % within the run"
    words = f"Share of response tokens, mean over all updates; lines on the bars: {kind}. Solid: the clip removed the "
    words += "gradient; pale: the ratio lies outside the band. Right: by mini-batch, axis linear below 0.0001."
    caption = (
        f"{load.describe(data, data.arms)} {clip_ranges(data)} {words}\n{' '.join(c.sentence() for c in judged(data))}"
    )
    return style.save(figure, out, "fig2_clipping", caption)


def clip_ranges(data: Data) -> str:
    """The arms' clip ranges, and whether they are the paper's: the share that is clipped hangs on them."""
    parts = []
    for arm in data.arms:
        get = data.of(arm)[0].settings.get
        low, high = get("objective.clip_low"), get("objective.clip_high")
        published = PAPER_RANGES.get(get("objective.name"), (low, high))
        remark = "" if (low, high) == published else f" (paper: {published[0]} / {published[1]})"
        parts.append(f"{arm} {low} / {high}{remark}")
    return f"Clip ranges: {', '.join(parts)}."


def share_bars(ax: Axes, data: Data) -> None:
    """Active (solid) and outside (pale) per arm, with the value written beside; axis from 0."""
    last, longest = data.common_step(*data.arms), 0.0
    for row, arm in enumerate(data.arms):
        for offset, name, strength in ((-0.19, "clip/token_active", 1.0), (0.19, "clip/token_outside", 0.4)):
            share = estimate(data.table(arm, name).loc[:last])
            ends = np.clip([[share.mean - share.low], [share.high - share.mean]], 0, None)
            hue = style.tint(style.colour(arm), strength)
            bars = {"height": 0.34, "color": hue, "error_kw": {"ecolor": style.INK, "elinewidth": 1}}
            ax.barh(row + offset, share.mean, xerr=None if np.isnan(ends).any() else ends, **bars)
            reach = style.finite_max([share.mean, share.high])
            text = f"{share.mean:.2g} {name.removeprefix('clip/token_')}"
            ax.annotate(text, (reach, row + offset), (5, 0), textcoords="offset points", va="center", fontsize=8)
            longest = max(longest, reach)
    ax.set_yticks(range(len(data.arms)), [style.short(arm) for arm in data.arms])
    bar_axes(ax, data.arms, longest * 1.42)
    ax.set_title("Clipped tokens, our runs")


def paper_bars(ax: Axes) -> None:
    """The paper's two bars."""
    for row, arm in enumerate(PAPERS):
        value = paper.series("fig2_clipped", arm)[0]
        ax.barh(row, value, height=0.5, color=style.colour(arm))
        ax.annotate(f"{value:g}", (value, row), (5, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set_yticks(range(len(PAPERS)), ["GSPO", "GRPO"])
    bar_axes(ax, list(PAPERS), 0.2)
    ax.set_title("The paper's Fig. 2")


def bar_axes(ax: Axes, arms: list[str], right: float) -> None:
    """Horizontal bars from 0, the first arm on top, labels in the arms' colours."""
    ax.set_xlim(0, right or 1)
    ax.set_ylim(len(arms) - 0.45, -0.55)
    ax.grid(axis="x")
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("share of tokens")
    for text, arm in zip(ax.get_yticklabels(), arms, strict=True):
        text.set(color=style.colour(arm), fontweight="bold")


def minibatch_lines(ax: Axes, data: Data) -> None:
    """clip/token_active by mini-batch of the step, mean over batches and seeds."""
    last, prefix = data.common_step(*data.arms), "clip/token_active_minibatch_"
    count = max((int(name.removeprefix(prefix)) for name in data.metrics(prefix)), default=1)
    ends = []
    for arm in data.arms:
        share = [np.nanmean(data.table(arm, f"{prefix}{n}").loc[:last]) for n in range(1, count + 1)]
        ax.plot(range(1, count + 1), share, "o-", ms=4, lw=1.6, color=style.colour(arm))
        ends.append((share[-1], arm))
    ax.set_yscale("symlog", linthresh=1e-4)
    ax.set_ylim(0, max(1e-3, 2 * max(value for value, _ in ends)))
    ax.set_xticks(range(1, count + 1))
    ax.set_xlabel("mini-batch of the step")
    ax.set_title("Clipped, by mini-batch")


if __name__ == "__main__":
    script.command(lambda: script.run(__doc__, draw, judged))
