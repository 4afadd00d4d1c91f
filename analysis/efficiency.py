"""Compute efficiency: the compute that an arm needs to reach its rival's final level.

    level      mean reward of the rival's last 10 batches
    need(arm)  FLOPs at which the arm's trailing mean of 10 batches first reaches the level
    to_end     FLOPs(rival, whole run) / need(arm)      how the paper's Fig 1 is read; > 1: the arm
               is cheaper
    like       need(rival) / need(arm)                  the same rule for both arms

`to_end` flatters the arm: a noisy curve first touches a level before its average does, so two equal
arms give a value above 1. `like` is nearly without bias, because the rival's curve is as noisy. The
verdict is taken on it. A small bias against the arm is left: the rival always reaches its own final
level. Of equal arms with linear curves of 100 batches `like` lies below 1 in 58 % of the seeds, and
the sign test at .05 rejects them in 9 % of the studies with 10 seeds and in 16 % with 30
(tests/unit/analysis/test_analysis_stats.py, once a day), so a verdict needs the interval as well.

An arm that never reaches the level is censored: need(arm) is known to be more than its whole run,
and no more is known. Its ratios then lie between 0 and a bound, which is the same ratio with
need(arm) = FLOPs(arm, whole run). The lower end of an interval counts a censored draw as 0, and the
upper end counts it as its bound.

The curves are averaged over seeds. If a seed has lost a batch's row, the row is first filled in
from that seed's neighbouring batches. Leaving it out of the mean would move the mean towards the
other seeds. Shape suffixes: T steps, S seeds.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from gspo.analysis.stats import WINDOW, Interval, block_indices, centred_mean, trailing_mean
from gspo.statistics import sign_flip_p_of_integers

REPS = 1000  # bootstrap draws


@dataclass(frozen=True)
class Ratio(Interval):
    """A compute ratio with its interval.

    A mean of 0 stands for "not reached", and the ratio then lies below `bound`. `values` are the
    ratios of the seeds. A value is NaN if the seed does not reach the level and its bound lies
    above 1, since the side of 1 on which it lies is then unknown.
    """

    bound: float = np.inf

    def p(self, null: float = 1.0) -> float:
        """Return the p of an exact two-sided sign test.

        It uses only the side of `null` on which each seed lies, because no more is known of a seed
        that does not reach the level. A seed whose side is unknown counts for neither side.
        """
        if len(self.values) < 2:
            return np.nan
        sides = np.sign(np.array(self.values) - null)
        return sign_flip_p_of_integers(np.nan_to_num(sides).astype(int))

    def text(self, form: str = ".2f") -> str:
        """Return the ratio with its interval in brackets, also if the level is not reached.

        The verdict can then be checked against it.
        """
        if not self.mean > 0:
            return f"not reached (below {self.bound:{form}}; 95 %: below {self.high:{form}})"
        low = f"{self.low:{form}}" if self.low != 0 else "not reached"
        return f"{self.mean:{form}} [{low}, {self.high:{form}}]"


@dataclass(frozen=True)
class Efficiency:
    """The two ratios, the level, and the FLOPs at which each arm reaches it (inf: not reached)."""

    to_end: Ratio
    like: Ratio
    level: float
    need: float
    rival_need: float


def first_reaches(reward_T: np.ndarray, flops_T: np.ndarray, level: float) -> float:
    """Return the FLOPs at which the trailing mean of the reward first reaches the level, or inf."""
    # the level is such a mean too, up to rounding
    reached_T = trailing_mean(reward_T) >= level - 1e-12
    if not reached_T.any():
        return np.inf
    return float(flops_T[reached_T.argmax()])


def needs(
    reward_T: np.ndarray,
    flops_T: np.ndarray,
    rival_T: np.ndarray,
    rival_flops_T: np.ndarray,
) -> tuple[float, float, float]:
    """Return the rival's final level, and the FLOPs at which the arm and the rival reach it."""
    level = float(np.mean(rival_T[-WINDOW:]))
    need = first_reaches(reward_T, flops_T, level)
    rival_need = first_reaches(rival_T, rival_flops_T, level)
    return level, need, rival_need


def ratios(
    reward_T: np.ndarray,
    flops_T: np.ndarray,
    rival_T: np.ndarray,
    rival_flops_T: np.ndarray,
) -> np.ndarray:
    """Return [[to_end, like], [their upper bounds]] for a pair of curves.

    A censored arm has 0 and the bound.
    """
    _, need, rival_need = needs(reward_T, flops_T, rival_T, rival_flops_T)
    rival = np.array([rival_flops_T[-1], rival_need])
    # a censored arm needs more than its whole run
    censored_need = np.nextafter(flops_T[-1], np.inf)
    return np.array([rival / need, rival / min(need, censored_need)])


def efficiency(
    reward_TS: np.ndarray, flops_TS: np.ndarray, rival_TS: np.ndarray, rival_flops_TS: np.ndarray
) -> Efficiency:
    """Return the ratios of the curves averaged over seeds, with a two-level paired bootstrap.

    Each draw takes seeds with replacement (both arms of a seed together) and, within a seed, blocks
    of batches: the curve's smooth part (centred mean of 10) plus its residuals in resampled blocks,
    the same blocks for both arms. With a single seed only the second level is left and the interval
    is within-run. With two to four seeds, intervals from a bootstrap over seeds are too narrow. The
    second level makes up for some of it. The intervals are percentiles.
    """
    curves = (reward_TS, flops_TS, rival_TS, rival_flops_TS)
    tables = [filled(curve).to_numpy() for curve in curves]
    reward, flops, rival, rival_flops = tables
    smooth, noise = smooth_and_noise(reward)
    rival_smooth, rival_noise = smooth_and_noise(rival)
    shorter, longer = sorted((len(reward), len(rival)))
    seeds = reward.shape[1]
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(REPS):
        drawn_seeds = rng.integers(seeds, size=seeds)
        rewards = []
        rival_rewards = []
        for seed in drawn_seeds:
            steps = block_indices(shorter, longer, rng)
            arm_steps = steps[: len(reward)]
            rival_steps = steps[: len(rival)]
            rewards.append(smooth[:, seed] + noise[arm_steps, seed])
            rival_rewards.append(rival_smooth[:, seed] + rival_noise[rival_steps, seed])
        draw = ratios(
            np.mean(rewards, 0),
            flops[:, drawn_seeds].mean(1),
            np.mean(rival_rewards, 0),
            rival_flops[:, drawn_seeds].mean(1),
        )
        draws.append(draw)
    # no interpolation between draws: it would mix a censored 0 with a ratio
    lows, highs = np.quantile(draws, [0.025, 0.975], axis=0, method="nearest")
    mean_curves = [table.mean(1) for table in tables]
    points, bounds = ratios(*mean_curves)
    values = []
    for seed in range(seeds):
        seed_curves = [table[:, seed] for table in tables]
        values.append(ratios_of_seed(*seed_curves))
    results = []
    for index, values_S in enumerate(zip(*values, strict=True)):
        result = Ratio(
            mean=points[index],
            low=lows[0, index],
            high=highs[1, index],
            seeds=seeds,
            values=values_S,
            bound=bounds[index],
        )
        results.append(result)
    to_end, like = results
    return Efficiency(to_end, like, *needs(*mean_curves))


def smooth_and_noise(reward_TS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the centred means of each seed, and the residuals, whose mean is 0 in each seed."""
    smooth_TS = np.apply_along_axis(centred_mean, 0, reward_TS)
    residuals_TS = reward_TS - smooth_TS
    return smooth_TS, residuals_TS - residuals_TS.mean(0)


def ratios_of_seed(*curves: np.ndarray) -> list[float]:
    """Return both ratios of a seed.

    If the level is not reached, a ratio is 0, or NaN if the bound lies above 1.
    """
    point, bound = ratios(*curves)
    unknown = (point == 0) & (bound > 1)
    return np.where(unknown, np.nan, point).tolist()


def filled(table_TS: np.ndarray | pd.DataFrame) -> pd.DataFrame:
    """Return the table with a seed's lost steps filled in from that seed alone.

    A step between two others lies on the line through them. A step at an end has the nearest value.
    """
    table = pd.DataFrame(table_TS).astype(float)
    return table.interpolate(limit_direction="both")
