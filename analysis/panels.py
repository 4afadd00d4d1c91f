"""Panels that several figures share: reward against compute from runs, and the paper's curve beside it."""

from __future__ import annotations

import numpy as np
import paper
import style
from load import Data
from matplotlib.axes import Axes
from stats import WINDOW, centred_mean, t_quantile


def reward_against_compute(ax: Axes, data: Data, arms: tuple[str, ...]) -> None:
    """Training reward of each arm over its FLOPs: raw or per seed thin, mean smoothed (centred, 10 batches) thick.

    One seed: raw batches thin. Two or three: each seed's smoothed curve thin. Four or more: 95 % t band of the
    smoothed curves. The mean is drawn as far as all seeds of the arm have come; its x is their mean compute.
    """
    ends, largest = [], 0.0
    for arm in arms:
        reward, flops = data.table(arm, "reward/mean"), data.table(arm, "compute/flops")
        whole = reward.notna().all(axis=1)
        smooth = np.column_stack([centred_mean(reward[seed][whole]) for seed in reward])
        x, mean, hue = flops[whole].mean(axis=1).to_numpy(), smooth.mean(1), style.colour(arm)
        seeds = smooth.shape[1]
        if seeds == 1:
            ax.plot(flops.iloc[:, 0], reward.iloc[:, 0], color=style.tint(hue, 0.4), lw=0.8, zorder=1)
        elif seeds < 4:
            for seed in reward:
                ax.plot(flops[seed], centred_mean(reward[seed]), color=style.tint(hue, 0.5), lw=0.9, zorder=1)
        else:
            half = t_quantile(seeds - 1) * smooth.std(1, ddof=1) / np.sqrt(seeds)
            ax.fill_between(x, mean - half, mean + half, color=hue, alpha=0.18, lw=0, zorder=1)
        ax.plot(x, mean, color=hue, lw=2.4, zorder=3)
        ends.append((mean[-1], style.short(arm), hue))
        largest = max(largest, style.finite_max(flops))
    style.flops_axis(ax, largest)
    ax.set_ylabel("training reward (mean of batch)")
    style.label_ends(ax, ends)


def how_drawn(data: Data, arms: tuple[str, ...]) -> str:
    """What the lines of `reward_against_compute` are, for the caption."""
    counts = [len(data.seeds(arm)) for arm in arms]
    thin = ["batches"] * (1 in counts) + ["single seeds"] * any(1 < n < 4 for n in counts)
    text = f"Thin lines: {' (where there is one seed) or '.join(thin)}. " if thin else ""
    text += "Bands: 95 % intervals over seeds. " if max(counts) >= 4 else ""
    return (
        f"{text}Thick lines: mean, smoothed over ±{WINDOW // 2} batches. The paper's points are digitised, single runs."
    )


def paper_rewards(ax: Axes, figure: str, arms: tuple[str, ...]) -> None:
    """The paper's training-reward curve, digitised; x is the marker's number, the paper's axis has no ticks."""
    for arm in arms:
        points = paper.series(figure, arm)
        points = points.loc[points.first_valid_index() :]  # nothing is drawn where the first markers are hidden
        hue = style.colour(arm)
        ax.plot(points.index, points, color=style.tint(hue, 0.4), lw=0.8)
        ax.plot(points.index, centred_mean(points), color=hue, lw=1.8)
        ax.plot(points.index, points, ".", color=hue, ms=3)
    ax.set_xlabel("marker number")
    ax.set_title(f"The paper's {figure[:3].capitalize()}. {figure[3]}")
