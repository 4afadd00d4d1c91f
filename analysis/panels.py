"""Panels that several figures share: curves of arms, the paper's beside them, the paired difference
that is judged.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from gspo.analysis import claims, load, paper, style
from gspo.analysis.load import GRPO_R2, Data
from gspo.analysis.looks import Look, look, tint
from gspo.analysis.stats import centred_mean, paired_difference
from gspo.analysis.style import COMPUTE, View
from matplotlib.axes import Axes

from gspo.statistics import sign_flip_p, t_quantile

# the fewest seeds for a band: an interval over two is 13 standard errors wide, and over one there
# is none
BAND = 3


def named(arms: tuple[str, ...] | list[str]) -> str:
    """Return the names of the arms as a sentence for captions."""
    return f"Arm{'s' * (len(arms) > 1)}: {', '.join(arms)}."


# ----------------------------------------------------------------------------------------------------------
# curves
def curve(
    ax: Axes,
    values: pd.DataFrame,
    own: Look,
    view: View,
    x: pd.DataFrame | None = None,
    band: bool = True,
    least: float = -np.inf,
) -> float:
    """Draw one arm: `values` (index step, a column per seed) against `x` (in the same form) or the
    step. Returns the height at which the mean ends.

    The thick line is the mean over seeds, smoothed, as far as all seeds have come. The band is its
    pointwise 95 % t interval, drawn from 3 seeds on. Thin lines are single seeds, smoothed in the
    same way; they are drawn if asked for or if there are two. A single seed's thin line shows its
    batches unsmoothed. On a logarithmic axis, where `least` is the smallest value, 0 is a gap, and
    bands end at that value. The band of values of which none is negative ends at 0.
    """
    reach, faint = 2 * view.smooth, {"color": tint(own.colour, 0.45), "lw": 0.8, "zorder": 1}
    for seed in values if view.seeds or (band and values.shape[1] < BAND) else ():
        line = values[seed].dropna()
        at = line.index if x is None else x.loc[line.index, seed]
        line = line.to_numpy() if values.shape[1] == 1 else centred_mean(line, reach)
        ax.plot(at, np.where(line >= least, line, np.nan), **faint)
    whole = values.dropna().index
    if not len(whole):
        return float("nan")
    smooth = np.column_stack([centred_mean(values.loc[whole, seed], reach) for seed in values])
    at = whole.to_numpy() if x is None else x.loc[whole].mean(axis=1).to_numpy()
    mean, seeds = smooth.mean(1), smooth.shape[1]
    if band and seeds >= BAND:
        half = t_quantile(seeds - 1) * smooth.std(1, ddof=1) / np.sqrt(seeds)
        # of what is never negative
        floor = max(least, 0.0) if float(values.min(axis=None)) >= 0 else least
        low, high = np.maximum(mean - half, floor), np.maximum(mean + half, floor)
        ax.fill_between(at, low, high, color=own.colour, alpha=0.1, lw=0, zorder=0)
        for edge in (low, high):
            ax.plot(at, edge, color=tint(own.colour, 0.4), lw=0.6, ls=own.line, zorder=1)
    ax.plot(
        at,
        np.where(mean >= least, mean, np.nan),
        lw=2.2,
        ms=5,
        markevery=max(1, len(at) // 8),
        zorder=3,
        **own.plot(),
    )
    return float(mean[-1])


def how_drawn(data: Data, arms: tuple[str, ...] | list[str], view: View, bands: bool = True) -> str:
    """Return a sentence for the caption that explains what `curve` draws."""
    counts = [len(data.seeds(arm)) for arm in arms]
    thin = ["batches (where there is one seed)"] * (1 in counts)
    thin += ["single seeds"] * any(1 < n < BAND or (n > 1 and view.seeds) for n in counts)
    text = f"Thin lines: {' or '.join(thin)}. " if thin else ""
    text += (
        "Bands: pointwise 95 % intervals over seeds (Student's t). "
        if bands and max(counts) >= BAND
        else ""
    )
    smoothed = f", smoothed over ±{view.smooth} batches" if view.smooth else ", not smoothed"
    mean = "mean over seeds" if max(counts) > 1 else "the run"
    return f"{text}Thick lines: {mean}{smoothed}."


def reward_against_compute(ax: Axes, data: Data, arms: tuple[str, ...], view: View) -> None:
    """Draw the training reward of each arm over its FLOPs, or over batches where a run has not
    recorded them.
    """
    compute, ends, largest = style.has_compute(data, arms), [], 0.0
    for arm in arms:
        flops = data.table(arm, COMPUTE) if compute else None
        ends.append(
            (
                curve(ax, data.table(arm, "reward/mean"), look(arm), view, flops),
                style.short(arm),
                look(arm),
            )
        )
        largest = max(largest, style.finite_max(flops)) if compute else 0.0
    style.training_axis(ax, largest, view)
    ax.set_ylabel("training reward (mean of batch)")
    ax.set_title("Training reward, our runs")
    style.label_ends(ax, ends)


def difference(ax: Axes, data: Data, a: str, b: str) -> None:
    """Draw the paired difference a - b that is judged: a dot per seed, the mean with its 95 %
    interval, p, and a line at 0."""
    a_TS, b_TS = claims.last_halves(data, a, b)
    each, mean = (a_TS - b_TS).mean(), paired_difference(a_TS, b_TS)
    ax.axhline(0, color=style.INK, lw=1.2, zorder=1)
    ax.plot(range(len(each)), each, "o", ms=5, color=style.MUTED, mec="white", mew=0.5, zorder=3)
    at = len(each) + 0.6
    ax.plot([at, at], [mean.low, mean.high], color=style.INK, lw=2, zorder=2)
    ax.plot(at, mean.mean, "_", ms=13, mew=2.4, color=style.INK, zorder=4)
    names_fit = len(each) <= 8
    ax.set_xticks(
        [*range(len(each)), at] if names_fit else [at],
        [*map(str, each.index), "mean"] if names_fit else ["mean"],
    )
    ax.set_xlim(-0.7, at + 0.9)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("seed")
    ax.set_ylabel(f"{short_name(a)} - {short_name(b)}")
    p = f", p = {sign_flip_p(each):.2g}" if len(each) > 1 else ""
    ax.set_title(f"Paired difference\n{mean.mean:+.3f}{p}")
    ax.margins(y=0.12)


def short_name(arm: str) -> str:
    """Return the arm's name without the words "Routing Replay"."""
    return arm.replace("Routing Replay (", "").replace(")", "")


def difference_caption(data: Data, a: str, b: str) -> str:
    """Return a sentence for the caption that explains what `difference` draws."""
    a_TS = claims.last_halves(data, a, b)[0]
    steps, seeds = a_TS.index, a_TS.shape[1]
    text = f"Paired difference: {a} - {b}, training reward, mean over batches {steps[0]} to {steps[-1]}, "
    if seeds == 1:
        return f"{text}of one seed; bar: 95 % interval within the run, which says nothing of other seeds."
    return (
        f"{text}paired by seed; bar: 95 % t interval over {seeds} seeds; p: exact sign-flip test."
    )


# -------------------------------------------------------------------------------------------------------
# the paper's
def paper_curves(ax: Axes, figure: str, arms: tuple[str, ...], view: View, smoothed: bool) -> None:
    """Draw the paper's points, which were digitised. x is the number of the marker, since the
    paper's axis has no ticks."""
    for arm in arms:
        points = paper.series(figure, arm)
        # nothing is drawn where the first markers are hidden
        points = points.loc[points.first_valid_index() :]
        own = look(arm)
        if not smoothed:
            shown = points.dropna()
            ax.plot(shown.index, shown, lw=1.6, ms=4.5, **own.plot())
            continue
        ax.plot(points.index, points, ".", ms=3, color=tint(own.colour, 0.5))
        every = {"markevery": max(1, len(points) // 6), "lw": 1.8, "ms": 4.5}
        ax.plot(points.index, centred_mean(points, 2 * view.smooth), **every, **own.plot())
    ax.set_xlabel("points in the paper's order")


def paper_rewards(ax: Axes, figure: str, arms: tuple[str, ...], view: View) -> None:
    """Draw the paper's training rewards."""
    paper_curves(ax, figure, arms, view, smoothed=True)
    ax.set_ylabel("training reward")
    ax.set_title(f"The paper's {figure[:3].capitalize()}. {figure[3]}")
    style.key(ax, {arm: look(arm) for arm in arms}, loc="best")


def lacking(data: Data, arms: tuple[str, ...]) -> str | None:
    """Return why these arms cannot be compared, or None if they can; for models without experts it
    says that they have none."""
    why = load.lacking(data, arms)
    if why and GRPO_R2 in arms and not data.metrics("routing/"):
        return why.replace(
            "; found:", " (these runs route nothing: dense models have no Routing Replay); found:"
        )
    return why
