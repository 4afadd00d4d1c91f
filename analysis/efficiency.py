"""Compute efficiency: how much compute an arm needs to reach its rival's final level. Definitions,
no drawing.

    level      mean reward of the rival's last 10 batches
    need(arm)  FLOPs at which the arm's trailing mean of 10 batches first reaches the level
    to_end     FLOPs(rival, whole run) / need(arm)      how the paper's Fig 1 is read; > 1: the arm
               is cheaper
    like       need(rival) / need(arm)                  the same rule for both arms

`to_end` flatters the arm: a noisy curve first touches a level before its average does, so two equal
arms give a value above 1. `like` has no such bias, because the rival's curve is as noisy; the
verdict is taken on it.

An arm that never reaches the level is censored: all that is known is that need(arm) is more than
its whole run. Its ratios then lie between 0 and a bound, which is the same ratio with need(arm) =
FLOPs(arm, whole run). The lower end of an interval counts a censored draw as 0, and the upper end
counts it as its bound.

The curves are averaged over seeds. Where one seed has lost a batch's row, the row is first filled
in from that seed's neighbouring batches; leaving it out of the mean would move the mean towards the
other seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from gspo.analysis.stats import (
    WINDOW,
    Interval,
    block_indices,
    centred_mean,
    trailing_mean,
)

from gspo.statistics import sign_flip_p

REPS = 1000


@dataclass(frozen=True)
class Ratio(Interval):
    """A compute ratio with its interval. A mean of 0 stands for "not reached", and the ratio then
    lies below `bound`. `values` are the seeds' own ratios, NaN where a seed does not reach the
    level and its bound lies above 1, since it is then unknown on which side of 1 it lies."""

    bound: float = np.inf

    def p(self, line: float = 1.0) -> float:
        """Return the p of an exact two-sided sign test, which uses only the side of the line on
        which each seed lies, because no more is known of a seed that does not reach the level. A
        seed whose side is unknown counts for neither side."""
        if len(self.values) < 2:
            return np.nan
        return sign_flip_p(np.nan_to_num(np.sign(np.array(self.values) - line)))

    def text(self, form: str = ".2f") -> str:
        """Return the ratio with its interval in brackets, also where the level is not reached, so
        that the verdict can be checked against it."""
        if not self.mean > 0:
            return f"not reached (below {self.bound:{form}}; 95 %: below {self.high:{form}})"
        low = f"{self.low:{form}}" if self.low != 0 else "not reached"
        return f"{self.mean:{form}} [{low}, {self.high:{form}}]"


@dataclass(frozen=True)
class Efficiency:
    """The two ratios, and what the figure marks: the level, and the FLOPs at which each arm reaches
    it (inf: not reached)."""

    to_end: Ratio
    like: Ratio
    level: float
    need: float
    rival_need: float


def first_reaches(reward_T: np.ndarray, flops_T: np.ndarray, level: float) -> float:
    """Return the FLOPs at which the trailing mean of the reward first reaches the level, or inf if
    it never does.
    """
    # the level is such a mean too, up to rounding
    hits = np.flatnonzero(trailing_mean(reward_T) >= level - 1e-12)
    return float(flops_T[hits[0]]) if len(hits) else np.inf


def needs(reward_T, flops_T, rival_T, rival_flops_T) -> tuple[float, float, float]:
    """Return the rival's final level, and the FLOPs at which the arm and the rival first reach it."""
    level = float(np.mean(rival_T[-WINDOW:]))
    return (
        level,
        first_reaches(reward_T, flops_T, level),
        first_reaches(rival_T, rival_flops_T, level),
    )


def ratios(reward_T, flops_T, rival_T, rival_flops_T) -> np.ndarray:
    """Return [[to_end, like], [their upper bounds]] for one pair of curves; a censored arm has 0
    and the bound.
    """
    _, need, rival_need = needs(reward_T, flops_T, rival_T, rival_flops_T)
    rival = np.array([rival_flops_T[-1], rival_need], float)
    # where the arm is censored it needs more than its whole run
    least = np.nextafter(flops_T[-1], np.inf)
    return np.array([rival / need, rival / min(need, least)])


def efficiency(
    reward_TS: np.ndarray, flops_TS: np.ndarray, rival_TS: np.ndarray, rival_flops_TS: np.ndarray
) -> Efficiency:
    """Return the ratios of the curves averaged over seeds, with a two-level paired bootstrap
    (percentiles).

    Each draw takes seeds with replacement (both arms of a seed together) and, within a seed, blocks
    of batches: the curve's smooth part (centred mean of 10) plus its residuals in resampled blocks,
    the same blocks for both arms. With one seed only the second level is left and the interval is
    within-run. With two to four seeds, intervals from a bootstrap over seeds are too narrow; the
    second level makes up for some of it.
    """
    tables = [filled(x).to_numpy() for x in (reward_TS, flops_TS, rival_TS, rival_flops_TS)]
    curves, rival_curves = tables[0], tables[2]
    seeds = curves.shape[1]
    smooth, rival_smooth = (np.apply_along_axis(centred_mean, 0, x) for x in (curves, rival_curves))
    noise, rival_noise = centred(curves - smooth), centred(rival_curves - rival_smooth)
    shorter, longer = sorted((len(curves), len(rival_curves)))
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(REPS):
        mine, rivals, picked = [], [], rng.integers(seeds, size=seeds)
        for seed in picked:
            chosen = block_indices(shorter, longer, rng)
            mine.append(smooth[:, seed] + noise[chosen[: len(curves)], seed])
            rivals.append(rival_smooth[:, seed] + rival_noise[chosen[: len(rival_curves)], seed])
        flops, rival_flops = (x[:, picked].mean(1) for x in (tables[1], tables[3]))
        draws.append(ratios(np.mean(mine, 0), flops, np.mean(rivals, 0), rival_flops))
    # no interpolation between draws: it would mix a censored 0 with a ratio
    (low, _), (_, high) = np.quantile(draws, [0.025, 0.975], axis=0, method="nearest")
    curve = [x.mean(1) for x in tables]
    point, bound = ratios(*curve)
    each = zip(*(of_seed(*(x[:, seed] for x in tables)) for seed in range(seeds)), strict=True)
    to_end, like = (
        Ratio(point[i], low[i], high[i], seeds, values, bound=bound[i])
        for i, values in enumerate(each)
    )
    return Efficiency(to_end, like, *needs(*curve))


def of_seed(*curves: np.ndarray) -> list[float]:
    """Return both ratios of one seed; where the level is not reached, 0, or NaN if the bound lies
    above 1.
    """
    point, bound = ratios(*curves)
    return np.where((point == 0) & (bound > 1), np.nan, point).tolist()


def filled(table_TS: np.ndarray | pd.DataFrame) -> pd.DataFrame:
    """Return the table with the steps that a seed lost filled in from that seed alone: between two
    steps on the line through them, at an end with the nearest value."""
    return pd.DataFrame(table_TS).astype(float).interpolate(limit_direction="both")


def centred(residuals_TS: np.ndarray) -> np.ndarray:
    """Return the residuals with each seed's mean taken off."""
    return residuals_TS - residuals_TS.mean(0)
