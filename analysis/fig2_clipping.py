"""Figure 2: which share of the tokens is clipped, in GSPO and in GRPO?

    gspo figure clipping runs/paper_figures

Expected, if the paper is right: GSPO clips about a hundred times more tokens than GRPO (0.15
against 0.0013), though its band is a thousand times narrower, because it clips whole responses. The
first mini-batch clips nothing by construction: there the policy is still the old policy. The
verdict follows the criterion in analysis/claims.py. Writes fig2_clipping.pdf and .png.

Metrics: clip/token_active (the clip removed the gradient) and clip/token_outside (the ratio left
the band). The paper does not say which of the two it shows. We compare it with the first.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gspo.analysis import choosing, claims, load, panels, paper, script, style
from gspo.analysis.arm_styles import ArmStyles, arm_style, arm_styles, tint
from gspo.analysis.grid import name_rows
from gspo.analysis.load import GRPO_R2, GSPO, Data
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import Interval, estimate
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.analysis.verdicts import Claim, with_verdicts

PAPER_ARMS = (GSPO, GRPO_R2)
REFUSED = script.NO_CURVES | {
    "log_x": "its bars start at 0, which a logarithmic axis does not have"
}
MAX_ARMS = 14  # arms that fit into the figure
MAX_ARMS_SIDE_BY_SIDE = 5  # with more arms, the other panels stand above each other
MINIBATCH = "clip/token_active_minibatch_"  # the metrics by mini-batch of the step


def judged_claims(data: Data) -> list[Claim]:
    """Return the claims that this figure shows."""
    if load.why_not_comparable(data, claims.contenders(data)):
        return []
    return [claims.clipping(data)]


def why_not_drawn(data: Data) -> str | None:
    """Return why the figure cannot be drawn, or None if it can."""
    if len(data.arms) > MAX_ARMS:
        return choosing.too_many(data, MAX_ARMS)
    if not data.metrics("clip/token_active"):
        return "needs clip/token_active, which no run has recorded"
    return None


def draw(data: Data, out: Path, options: FigureOptions = DEFAULTS) -> list[Path]:
    """Draw the bars of our arms, the paper's bars, and the shares by mini-batch."""
    reason = why_not_drawn(data)
    if reason:
        raise RunsError(f"fig2 {reason}")
    styles = arm_styles(data.arms)
    figure = style.canvas(1.7 + 0.55 * len(styles), options)
    style.legend_above(figure, styles, options)
    has_minibatches = bool(data.metrics(f"{MINIBATCH}2"))
    if not has_minibatches:
        named = figure.subplot_mosaic("op", width_ratios=[1.5, 0.8])
    elif len(styles) <= MAX_ARMS_SIDE_BY_SIDE:
        named = figure.subplot_mosaic("opm", width_ratios=[1.5, 0.8, 1])
    else:
        named = figure.subplot_mosaic("op;om", width_ratios=[1.5, 1])
    draw_our_bars(named["o"], data, styles, options)
    draw_paper_bars(named["p"])
    text = (
        f"{load.describe(data, data.arms)} {panels.arms_sentence(data.arms)} {clip_ranges(data)} "
        "Share of response tokens, mean over all updates; lines on the bars: 95 % intervals over "
        "seeds (of a single seed: within the run). Solid: the clip removed the gradient; pale: the "
        "ratio lies outside the band."
    )
    if has_minibatches:
        draw_minibatches(named["m"], data, styles, options)
        text += " Right: by mini-batch, mean over seeds, axis linear below 0.0001."
    if options.seeds:
        text += " Dots and thin lines: single seeds."
    text += " The paper's bars: GSPO and, as section 5.1 reads, GRPO + Routing Replay (R2)."
    caption = with_verdicts(text, judged_claims(data))
    return style.save(figure, out, "fig2_clipping", caption, options)


def clip_ranges(data: Data) -> str:
    """Return a sentence with the arms' clip ranges, on which the clipped shares depend.

    It says which ranges are not the paper's.
    """
    texts = []
    for arm in data.arms:
        run = data.of(arm)[0]
        low, high = run.clip_range
        text = f"{arm} {low} / {high}"
        objective = run.settings["objective.name"]
        published = paper.CLIP_RANGES.get(objective, run.clip_range)
        if run.clip_range != published:
            text += f" (paper: {published[0]} / {published[1]})"
        texts.append(text)
    return f"Clip ranges: {', '.join(texts)}."


def draw_our_bars(
    ax: Axes,
    data: Data,
    styles: ArmStyles,
    options: FigureOptions,
) -> None:
    """Draw two bars per arm, active (solid) and outside (pale), on an axis from 0.

    The value stands beside each bar.
    """
    last = data.common_step(*data.arms)
    longest = 0.0
    kinds = ((-0.19, "active", 1.0), (0.19, "outside", 0.4))
    for row, arm in enumerate(data.arms):
        for shift, kind, strength in kinds:
            y = row + shift
            table = data.table(arm, f"clip/token_{kind}").loc[:last]
            if table.isna().all(axis=None):
                continue
            share = estimate(table)
            draw_bar(ax, y, share, tint(styles[arm].colour, strength))
            if options.seeds:
                heights = np.full(table.shape[1], y)
                style.dots(ax, table.mean(), heights, style.MUTED, size=4, zorder=4)
            length = style.finite_max([share.mean, share.high])
            write_beside(ax, f"{share.mean:.2g} {kind}", length, y)
            longest = max(longest, length)
    name_bars(ax, data.arms)
    ax.set_xlim(0, longest * 1.42 or 1)
    ax.set_title("Clipped tokens, our runs")


def draw_bar(ax: Axes, y: float, share: Interval, colour: str) -> None:
    """Draw a bar, with its interval if it has any."""
    below = share.mean - share.low
    above = share.high - share.mean
    interval = None
    if not np.isnan(below + above):
        interval = np.maximum([[below], [above]], 0)
    error_line = {"ecolor": style.INK, "elinewidth": 1}
    ax.barh(
        y,
        share.mean,
        xerr=interval,
        height=0.34,
        color=colour,
        error_kw=error_line,
    )


def write_beside(ax: Axes, text: str, x: float, y: float) -> None:
    """Write text at the right of a bar that ends at x."""
    ax.annotate(
        text,
        (x, y),
        (5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def draw_paper_bars(ax: Axes) -> None:
    """Draw the paper's two bars."""
    for row, arm in enumerate(PAPER_ARMS):
        value = paper.series("fig2_clipped", arm)[0]
        ax.barh(row, value, height=0.5, color=arm_style(arm).colour)
        write_beside(ax, f"{value:g}", value, row)
    name_bars(ax, PAPER_ARMS)
    ax.set_xlim(0, 0.2)
    ax.set_title("The paper's Fig. 2")


def name_bars(ax: Axes, arms: Sequence[str]) -> None:
    """Set up horizontal bars, with the first arm on top."""
    name_rows([ax], [style.arm_label(arm) for arm in arms], 0.55)
    ax.grid(axis="x")
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("share of tokens")


def draw_minibatches(
    ax: Axes,
    data: Data,
    styles: ArmStyles,
    options: FigureOptions,
) -> None:
    """Draw clip/token_active by mini-batch of the step, averaged over batches and seeds."""
    last = data.common_step(*data.arms)
    count = max(int(name.removeprefix(MINIBATCH)) for name in data.metrics(MINIBATCH))
    x = range(1, count + 1)
    largest = 0.0
    for arm, line in styles.items():
        shares = {}
        for minibatch in x:
            table = data.table(arm, f"{MINIBATCH}{minibatch}")
            shares[minibatch] = table.loc[:last].mean()
        shares_NS = pd.DataFrame(shares).T  # a row per mini-batch, a column per seed
        if options.seeds:
            thin = tint(line.colour, 0.45)
            ax.plot(shares_NS, color=thin, lw=0.8, zorder=1)
        means_N = shares_NS.mean(axis=1, skipna=False)
        ax.plot(means_N, ms=5.5, lw=1.6, **line.plot_options())
        largest = max(largest, style.finite_max(means_N))
    ax.set_yscale("symlog", linthresh=1e-4)
    ax.set_ylim(0, max(1e-3, 2 * largest))
    ax.set_xticks(x)
    ax.set_xlabel("mini-batch of the step")
    ax.set_ylabel("share of tokens")
    ax.set_title("Clipped, by mini-batch")


def main() -> None:
    script.run(__doc__, draw, judged_claims, REFUSED)


if __name__ == "__main__":
    script.command(main)
