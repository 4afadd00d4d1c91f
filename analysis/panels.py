"""Panels that several figures share: curves of arms, the paper's curves, the paired difference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from gspo.analysis import claims, load, paper, style
from gspo.analysis.arm_styles import ArmStyle, arm_style, tint
from gspo.analysis.load import GRPO_R2, Data
from gspo.analysis.stats import centred_mean, paired_difference
from gspo.analysis.style import COMPUTE, FigureOptions
from matplotlib.axes import Axes

from gspo.statistics import t_quantile

# seeds for a band: an interval over two seeds is 13 standard errors wide
MIN_BAND_SEEDS = 3
MAX_SEED_TICKS = 8  # seeds whose numbers stand at the axis


def arms_sentence(arms: Sequence[str]) -> str:
    """Return the names of the arms as a sentence for captions."""
    word = "Arms" if len(arms) > 1 else "Arm"
    return f"{word}: {', '.join(arms)}."


# ------------------------------------------------------------------------------------------------
# curves
def curve(
    ax: Axes,
    values: pd.DataFrame,
    line_style: ArmStyle,
    options: FigureOptions,
    x: pd.DataFrame | None = None,
    band: bool = True,
    minimum: float = -np.inf,
) -> float:
    """Draw an arm, and return the height at which its mean ends.

    `values` (index step, a column per seed) are drawn against `x` (in the same form) or the step.
    The thick line is the mean over seeds, smoothed, up to the last step that all seeds have. The
    band is its pointwise 95 % t interval, drawn from 3 seeds on. Thin lines are single seeds,
    smoothed in the same way. They are drawn on request, or if there are two seeds. The thin line of
    a single seed shows its batches unsmoothed.

    On a logarithmic axis, `minimum` is the smallest value. There 0 is a gap, and bands end at the
    minimum. If no value is negative, the band ends at 0.
    """
    window = 2 * options.smooth
    seeds = values.shape[1]
    if options.seeds or (band and seeds < MIN_BAND_SEEDS):
        thin = {"color": tint(line_style.colour, 0.45), "lw": 0.8, "zorder": 1}
        for seed in values:
            series = values[seed].dropna()
            line_x = series.index if x is None else x.loc[series.index, seed]
            line = series.to_numpy() if seeds == 1 else centred_mean(series, window)
            ax.plot(line_x, np.where(line >= minimum, line, np.nan), **thin)
    complete_steps = values.dropna().index
    if not len(complete_steps):
        return float("nan")
    columns = [centred_mean(values.loc[complete_steps, seed], window) for seed in values]
    smooth_TS = np.column_stack(columns)
    if x is None:
        mean_x = complete_steps.to_numpy()
    else:
        mean_x = x.loc[complete_steps].mean(axis=1).to_numpy()
    mean = smooth_TS.mean(1)
    if band and seeds >= MIN_BAND_SEEDS:
        half = t_quantile(seeds - 1) * smooth_TS.std(1, ddof=1) / np.sqrt(seeds)
        never_negative = float(values.min(axis=None)) >= 0
        floor = max(minimum, 0.0) if never_negative else minimum
        low = np.maximum(mean - half, floor)
        high = np.maximum(mean + half, floor)
        ax.fill_between(mean_x, low, high, color=line_style.colour, alpha=0.1, lw=0, zorder=0)
        for edge in (low, high):
            ax.plot(
                mean_x,
                edge,
                color=tint(line_style.colour, 0.4),
                lw=0.6,
                ls=line_style.line,
                zorder=1,
            )
    ax.plot(
        mean_x,
        np.where(mean >= minimum, mean, np.nan),
        lw=2.2,
        ms=5,
        markevery=max(1, len(mean_x) // 8),
        zorder=3,
        **line_style.plot_options(),
    )
    return float(mean[-1])


def how_drawn(data: Data, arms: Sequence[str], options: FigureOptions, bands: bool = True) -> str:
    """Return sentences for the caption that explain the lines of `curve`."""
    seeds = [len(data.seeds(arm)) for arm in arms]
    thin = []
    if 1 in seeds:
        thin.append("batches (where there is one seed)")
    if any(1 < n < MIN_BAND_SEEDS or (n > 1 and options.seeds) for n in seeds):
        thin.append("single seeds")
    text = f"Thin lines: {' or '.join(thin)}. " if thin else ""
    if bands and max(seeds) >= MIN_BAND_SEEDS:
        text += "Bands: pointwise 95 % intervals over seeds (Student's t). "
    smoothing = f"smoothed over ±{options.smooth} batches" if options.smooth else "not smoothed"
    mean = "mean over seeds" if max(seeds) > 1 else "the run"
    return f"{text}Thick lines: {mean}, {smoothing}."


def reward_against_compute(
    ax: Axes, data: Data, arms: tuple[str, ...], options: FigureOptions
) -> None:
    """Draw the training reward of each arm over its FLOPs.

    The x axis is batches if a run has not recorded its FLOPs.
    """
    has_compute = style.has_compute(data, arms)
    largest = 0.0
    ends = []
    for arm in arms:
        flops = None
        if has_compute:
            flops = data.table(arm, COMPUTE)
            largest = max(largest, style.finite_max(flops))
        end = curve(ax, data.table(arm, "reward/mean"), arm_style(arm), options, flops)
        ends.append((end, style.arm_label(arm), arm_style(arm)))
    style.training_axis(ax, largest, options)
    ax.set_ylabel("training reward (mean of batch)")
    ax.set_title("Training reward, our runs")
    style.label_ends(ax, ends)


# ------------------------------------------------------------------------------------------------
# the paired difference
def difference(ax: Axes, data: Data, a: str, b: str) -> None:
    """Draw the paired difference a - b that is judged.

    There is a dot per seed, the mean with its 95 % interval, p, and a line at 0.
    """
    a_TS, b_TS = claims.last_halves(data, a, b)
    mean_S = (a_TS - b_TS).mean()
    interval = paired_difference(a_TS, b_TS)
    ax.axhline(0, color=style.INK, lw=1.2, zorder=1)
    dots = {"ms": 5, "color": style.MUTED, "mec": "white", "mew": 0.5, "zorder": 3}
    ax.plot(range(len(mean_S)), mean_S, "o", **dots)
    mean_x = len(mean_S) + 0.6
    ax.plot([mean_x, mean_x], [interval.low, interval.high], color=style.INK, lw=2, zorder=2)
    ax.plot(mean_x, interval.mean, "_", ms=13, mew=2.4, color=style.INK, zorder=4)
    if len(mean_S) <= MAX_SEED_TICKS:
        ax.set_xticks([*range(len(mean_S)), mean_x], [*map(str, mean_S.index), "mean"])
    else:
        ax.set_xticks([mean_x], ["mean"])
    ax.set_xlim(-0.7, mean_x + 0.9)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("seed")
    ax.set_ylabel(f"{short_name(a)} - {short_name(b)}")
    p = f", p = {interval.p_text()}" if interval.seeds > 1 else ""
    ax.set_title(f"Paired difference\n{interval.mean:+.3f}{p}")
    ax.margins(y=0.12)


def short_name(arm: str) -> str:
    """Return the arm's name without the words "Routing Replay"."""
    return arm.replace("Routing Replay (", "").replace(")", "")


def difference_caption(data: Data, a: str, b: str) -> str:
    """Return a sentence for the caption that explains the panel of `difference`."""
    table = claims.last_halves(data, a, b)[0]
    seeds = table.shape[1]
    text = (
        f"Paired difference: {a} - {b}, training reward, mean over batches {table.index[0]} to "
        f"{table.index[-1]}, "
    )
    if seeds == 1:
        return f"{text}of one seed; bar: 95 % interval within the run, which says nothing of other seeds."
    return (
        f"{text}paired by seed; bar: 95 % t interval over {seeds} seeds; p: exact sign-flip test."
    )


# ------------------------------------------------------------------------------------------------
# the paper's
def paper_curves(
    ax: Axes, figure: str, arms: tuple[str, ...], options: FigureOptions, smoothed: bool
) -> None:
    """Draw the paper's digitised points.

    x is the number of the marker, since the paper's axis has no ticks.
    """
    for arm in arms:
        points = paper.series(figure, arm)
        # nothing is drawn before the first marker that is not hidden
        points = points.loc[points.first_valid_index() :]
        lines = arm_style(arm).plot_options()
        if not smoothed:
            visible = points.dropna()
            ax.plot(visible.index, visible, lw=1.6, ms=4.5, **lines)
            continue
        ax.plot(points.index, points, ".", ms=3, color=tint(arm_style(arm).colour, 0.5))
        smooth = centred_mean(points, 2 * options.smooth)
        markers = {"markevery": max(1, len(points) // 6), "lw": 1.8, "ms": 4.5}
        ax.plot(points.index, smooth, **markers, **lines)
    ax.set_xlabel("points in the paper's order")


def paper_rewards(ax: Axes, figure: str, arms: tuple[str, ...], options: FigureOptions) -> None:
    """Draw the paper's training rewards."""
    paper_curves(ax, figure, arms, options, smoothed=True)
    ax.set_ylabel("training reward")
    ax.set_title(f"The paper's {figure[:3].capitalize()}. {figure[3]}")
    style.legend(ax, {arm: arm_style(arm) for arm in arms}, loc="best")


def why_not_comparable(data: Data, arms: tuple[str, ...]) -> str | None:
    """Return why these arms cannot be compared, or None if they can.

    For models without experts the reason says that they have none.
    """
    reason = load.why_not_comparable(data, arms)
    if reason and GRPO_R2 in arms and not data.metrics("routing/"):
        no_routing = "these runs route nothing: dense models have no Routing Replay"
        return reason.replace("; found:", f" ({no_routing}); found:")
    return reason
