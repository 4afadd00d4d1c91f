"""Panels that several figures share: curves of arms, the paper's curves, the paired difference."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gspo.analysis import claims, load, paper, style
from gspo.analysis.arm_styles import ArmStyle, arm_style, tint
from gspo.analysis.load import GRPO_R2, Data
from gspo.analysis.stats import Interval, centred_mean, paired_difference
from gspo.analysis.style import COMPUTE, FigureOptions
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
            ax.plot(line_x, drawn_part(line, minimum), **thin)
    complete = values.dropna()
    if complete.empty:
        return float("nan")
    curves = [centred_mean(complete[seed], window) for seed in complete]
    smooth_TS = np.column_stack(curves)
    mean_x = complete.index
    if x is not None:
        mean_x = x.loc[mean_x].mean(axis=1)
    mean = smooth_TS.mean(1)
    if band and seeds >= MIN_BAND_SEEDS:
        deviation = smooth_TS.std(1, ddof=1)
        half = t_quantile(seeds - 1) * deviation / np.sqrt(seeds)
        never_negative = float(values.min(axis=None)) >= 0
        floor = max(minimum, 0.0) if never_negative else minimum
        low = np.maximum(mean - half, floor)
        high = np.maximum(mean + half, floor)
        colour = line_style.colour
        edge = {"color": tint(colour, 0.4), "lw": 0.6, "ls": line_style.line, "zorder": 1}
        ax.fill_between(
            mean_x,
            low,
            high,
            color=colour,
            alpha=0.1,
            lw=0,
            zorder=0,
        )
        ax.plot(mean_x, low, **edge)
        ax.plot(mean_x, high, **edge)
    ax.plot(
        mean_x,
        drawn_part(mean, minimum),
        lw=2.2,
        ms=5,
        markevery=max(1, len(mean_x) // 8),
        zorder=3,
        **line_style.plot_options(),
    )
    return float(mean[-1])


def drawn_part(values: np.ndarray, minimum: float) -> np.ndarray:
    """Return the values with a gap (NaN) for each value below the minimum."""
    return np.where(values >= minimum, values, np.nan)


def how_drawn(
    data: Data,
    arms: Sequence[str],
    options: FigureOptions,
    bands: bool = True,
) -> str:
    """Return sentences for the caption that explain the lines of `curve`."""
    seeds = [len(data.seeds(arm)) for arm in arms]
    several = [count for count in seeds if count > 1]
    thin = []
    if 1 in seeds and (bands or options.seeds):
        thin.append("batches (where there is one seed)")
    few_seeds = bool(several) and min(several) < MIN_BAND_SEEDS
    if several and (options.seeds or (bands and few_seeds)):
        thin.append("single seeds")
    text = f"Thin lines: {' or '.join(thin)}. " if thin else ""
    if bands and max(seeds) >= MIN_BAND_SEEDS:
        text += "Bands: pointwise 95 % intervals over seeds (Student's t). "
    smoothing = f"smoothed over ±{options.smooth} batches" if options.smooth else "not smoothed"
    mean = "mean over seeds" if several else "the run"
    return f"{text}Thick lines: {mean}, {smoothing}."


def reward_against_compute(
    ax: Axes,
    data: Data,
    arms: tuple[str, ...],
    options: FigureOptions,
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
        line = arm_style(arm)
        rewards = data.table(arm, "reward/mean")
        end = curve(ax, rewards, line, options, flops)
        ends.append((end, style.arm_label(arm), line))
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
    seeds = len(mean_S)
    interval = paired_difference(a_TS, b_TS)
    zero_line(ax)
    style.dots(ax, range(seeds), mean_S, style.MUTED, zorder=3)
    mean_x = seeds + 0.6
    mean_bar(ax, mean_x, interval, 13)
    ticks: dict[float, str] = {}
    if seeds <= MAX_SEED_TICKS:
        ticks |= dict(enumerate(map(str, mean_S.index)))
    ticks[mean_x] = "mean"
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.set_xlim(-0.7, mean_x + 0.9)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("seed")
    ax.set_ylabel(f"{short_name(a)} - {short_name(b)}")
    title = f"Paired difference\n{interval.mean:+.3f}"
    if interval.seeds > 1:
        title += f", p = {interval.p_text()}"
    ax.set_title(title)
    ax.margins(y=0.12)


def zero_line(ax: Axes) -> None:
    """Draw the line at which a difference is 0."""
    ax.axhline(0, color=style.INK, lw=1.2, zorder=1)


def mean_bar(ax: Axes, x: float, interval: Interval, width: float) -> None:
    """Draw a mean of this width in points, and its interval."""
    ends = [interval.low, interval.high]
    ax.plot([x, x], ends, color=style.INK, lw=2)
    style.mean_mark(ax, x, interval.mean, style.INK, "_", width)


def short_name(arm: str) -> str:
    """Return the arm's name without the words "Routing Replay"."""
    return arm.replace("Routing Replay (", "").replace(")", "")


def difference_caption(data: Data, a: str, b: str) -> str:
    """Return a sentence for the caption that explains the panel of `difference`."""
    table, _ = claims.last_halves(data, a, b)
    seeds = table.shape[1]
    text = (
        f"Paired difference: {a} - {b}, training reward, mean over batches {table.index[0]} to "
        f"{table.index[-1]}, "
    )
    if seeds > 1:
        text += f"paired by seed; bar: 95 % t interval over {seeds} seeds; p: exact sign-flip test."
    else:
        text += "of one seed; bar: 95 % interval within the run, which says nothing of other seeds."
    return text


# ------------------------------------------------------------------------------------------------
# the paper's
def paper_curves(
    ax: Axes,
    figure: str,
    arms: tuple[str, ...],
    options: FigureOptions,
    smoothed: bool,
) -> None:
    """Draw the paper's digitised points.

    x is the number of the marker, since the paper's axis has no ticks.
    """
    for arm in arms:
        points = paper.series(figure, arm)
        # nothing is drawn before the first marker that is not hidden
        points = points.loc[points.first_valid_index() :]
        x = points.index
        line = arm_style(arm)
        if not smoothed:
            ax.plot(points.dropna(), lw=1.6, ms=4.5, **line.plot_options())
            continue
        ax.plot(points, ".", ms=3, color=tint(line.colour, 0.5))
        smooth = centred_mean(points, 2 * options.smooth)
        every = max(1, len(x) // 6)
        ax.plot(x, smooth, markevery=every, lw=1.8, ms=4.5, **line.plot_options())
    ax.set_xlabel("points in the paper's order")


def paper_rewards(
    ax: Axes,
    figure: str,
    arms: tuple[str, ...],
    options: FigureOptions,
) -> None:
    """Draw the paper's training rewards."""
    paper_curves(ax, figure, arms, options, smoothed=True)
    ax.set_ylabel("training reward")
    ax.set_title(f"The paper's {figure[:3].capitalize()}. {figure[3]}")
    style.legend(ax, {arm: arm_style(arm) for arm in arms}, loc="best")


def may_route(data: Data) -> bool:
    """Return whether a run's model has experts. Another framework's log may not tell."""
    return any(run.moe or "framework" in run.settings for run in data.runs)


def why_not_comparable(data: Data, arms: tuple[str, ...]) -> str | None:
    """Return why these arms cannot be compared, or None if they can.

    For models without experts the reason says that they have none.
    """
    reason = load.why_not_comparable(data, arms)
    if reason and GRPO_R2 in arms and not may_route(data):
        no_routing = "these runs route nothing: dense models have no Routing Replay"
        return reason.replace("; found:", f" ({no_routing}); found:")
    return reason
