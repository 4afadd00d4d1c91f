"""Statistics of runs: smoothing, intervals over seeds, paired comparisons.

There are two kinds of interval, and every number says which it has:
- over seeds (two or more): the range in which another training run could lie, by Student's t.
- within the run (a single seed): how well the mean over this run's batches is known, by resampling
  blocks of neighbouring batches. It says nothing about other seeds and is too narrow as a statement
  about the method.

Shape suffixes: T steps, S seeds, B blocks, D draws of a bootstrap. Tables are [T, S], as numpy
arrays or data frames. gspo/statistics.py has the formulas that evaluations use too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gspo.statistics import percentile_interval, sign_flip_p, t_half_width
from gspo.tracking.collapse import levels

WINDOW = 10  # batches in the final level and in trailing means
# batches in the start reward: a single batch is noisy, and more would hide the first gains
START = 5
REPS = 2000  # bootstrap draws
MAX_DRAWN_VALUES = 2**22  # numbers that the bootstrap holds at once


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval.

    With `seeds` = 1 it holds within the run only. low and high are NaN if there is no interval.
    """

    mean: float
    low: float
    high: float
    seeds: int
    values: tuple[float, ...] = ()  # the value of each seed, if there are several
    logarithmic: bool = False  # whether the mean is geometric, as for ratios

    @property
    def kind(self) -> str:
        if self.seeds > 1:
            return f"over {self.seeds} seeds"
        return "within the single run, not over seeds"

    def text(self, form: str = ".3f") -> str:
        if math.isnan(self.low):
            return f"{self.mean:{form}} [no interval]"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def p(self, null: float = 0.0) -> float:
        """Return the exact two-sided sign-flip p of the hypothesis that the seeds' mean is `null`.

        It is NaN without several seeds.
        """
        if len(self.values) < 2:
            return math.nan
        values_S = np.array(self.values)
        if self.logarithmic:
            return sign_flip_p(np.log(values_S / null))
        return sign_flip_p(values_S - null)

    def p_text(self) -> str:
        """Return the p against 0 for a table, or "-" without several seeds."""
        return f"{self.p():.2g}" if self.seeds > 1 else "-"


NO_INTERVAL = Interval(math.nan, math.nan, math.nan, 0)


def number(value: float, form: str) -> str:
    """Return a number in this format, or "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:{form}}"


def trailing_mean(values_T: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Return the mean of the last `window` values at each step, NaN before there are that many.

    It uses no later value, so it can say when a level was first reached.
    """
    values_T = np.asarray(values_T, float)
    window = min(window, len(values_T))
    means = np.convolve(values_T, np.full(window, 1 / window), "valid")
    return np.concatenate([np.full(window - 1, np.nan), means])


def centred_mean(values_T: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Return at each step the mean of the values at most window/2 away, fewer at the ends.

    NaN values are skipped.
    """
    values_T = np.asarray(values_T, float)
    reach = window // 2
    means = []
    for t in range(len(values_T)):
        near = values_T[max(0, t - reach) : t + reach + 1]
        means.append(np.nanmean(near) if np.isfinite(near).any() else math.nan)
    return np.array(means)


def t_interval(values_S: np.ndarray) -> Interval:
    """Return the mean over seeds with the interval mean ± t_{0.975, S-1} sd / sqrt(S).

    A single seed has no interval.
    """
    values_S = np.asarray(values_S, float)
    mean = float(values_S.mean())
    if len(values_S) < 2:
        return Interval(mean, math.nan, math.nan, 1)
    half = t_half_width(values_S)
    return Interval(mean, mean - half, mean + half, len(values_S), tuple(values_S.tolist()))


def block_length(steps: int) -> int:
    """Return the number of neighbouring batches in a block."""
    return max(1, round(math.sqrt(steps)))


def block_indices(steps: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Return `length` indices below `steps`: circular blocks of neighbours from random starts."""
    block = block_length(steps)
    starts_B = rng.integers(steps, size=math.ceil(length / block))
    return ((starts_B[:, None] + np.arange(block)) % steps).ravel()[:length]


def block_bootstrap(values_T: np.ndarray, reps: int = REPS) -> Interval:
    """Return the mean over the batches of ONE run, with its moving-block bootstrap interval.

    Blocks keep the correlation of neighbouring batches, which a plain bootstrap would count as
    independent evidence. The interval (percentiles) holds within the run only.
    """
    values_T = np.asarray(values_T, float)
    values_T = values_T[np.isfinite(values_T)]
    if not len(values_T):
        return Interval(math.nan, math.nan, math.nan, 1)
    rng = np.random.default_rng(0)
    length = len(values_T)
    block = block_length(length)
    # These are the starts that `reps` calls of `block_indices` draw, in their order.
    starts_DB = rng.integers(length, size=(reps, math.ceil(length / block)))
    means = []
    for starts in np.array_split(starts_DB, math.ceil(reps * length / MAX_DRAWN_VALUES)):
        indices = (starts[:, :, None] + np.arange(block)) % length
        indices = indices.reshape(len(starts), -1)[:, :length]
        means.append(values_T[indices].mean(axis=1))
    low, high = percentile_interval(np.concatenate(means))
    return Interval(float(values_T.mean()), low, high, 1)


def estimate(table_TS: np.ndarray) -> Interval:
    """Return the mean over batches and seeds with its interval.

    Several seeds give the t interval of the seeds' means, a single seed the interval within its run. A
    missing batch (NaN) is left out of the mean of its seed alone. A seed without any batch is left
    out.
    """
    table_TS = np.asarray(table_TS, float)
    table_TS = table_TS[:, np.isfinite(table_TS).any(axis=0)]
    if table_TS.shape[1] == 0:
        return NO_INTERVAL
    if table_TS.shape[1] == 1:
        return block_bootstrap(table_TS[:, 0])
    return t_interval(np.nanmean(table_TS, axis=0))


def paired_difference(a_TS: np.ndarray, b_TS: np.ndarray) -> Interval:
    """Return the mean of a - b, taken batch by batch and seed by seed.

    Both arms saw the same problems in a batch. So the difficulty of the problems, the largest part
    of the noise, cancels.
    """
    return estimate(np.asarray(a_TS, float) - np.asarray(b_TS, float))


def ratio(a_TS: np.ndarray, b_TS: np.ndarray) -> Interval:
    """Return the mean of a over the mean of b, per seed, over the batches that both have.

    Several seeds give the geometric mean and the t interval of the logarithms. A single seed gives a
    block bootstrap that draws the same batches of both arms. There is no interval if the mean of a
    seed is 0. The ratio is inf if b is 0 throughout, NaN if both are.
    """
    a_TS = np.asarray(a_TS, float)
    b_TS = np.asarray(b_TS, float)
    both_TS = np.isfinite(a_TS) & np.isfinite(b_TS)
    has_both_S = both_TS.any(axis=0)
    if not has_both_S.any():
        return NO_INTERVAL
    a_TS = np.where(both_TS, a_TS, np.nan)[:, has_both_S]
    b_TS = np.where(both_TS, b_TS, np.nan)[:, has_both_S]
    a_S = np.nanmean(a_TS, axis=0)
    b_S = np.nanmean(b_TS, axis=0)
    seeds = len(a_S)
    if (a_S <= 0).any() or (b_S <= 0).any():  # there is no logarithm: pool the seeds
        if b_S.mean() > 0:
            pooled = float(a_S.mean() / b_S.mean())
        else:
            pooled = math.inf if a_S.mean() > 0 else math.nan
        return Interval(pooled, math.nan, math.nan, seeds)
    if seeds > 1:
        log = t_interval(np.log(a_S / b_S))
        ends = (math.exp(x) for x in (log.mean, log.low, log.high))
        return Interval(*ends, seeds, tuple((a_S / b_S).tolist()), logarithmic=True)
    has_both_T = both_TS.any(axis=1)
    a_TS = a_TS[has_both_T]
    b_TS = b_TS[has_both_T]
    rng = np.random.default_rng(0)
    ratios_D = []
    for _ in range(REPS):
        chosen = block_indices(len(a_TS), len(a_TS), rng)
        denominator = b_TS[chosen].mean()
        ratios_D.append(a_TS[chosen].mean() / denominator if denominator > 0 else np.inf)
    # "nearest" because inf may occur, which cannot be interpolated
    low, high = percentile_interval(ratios_D, method="nearest")
    return Interval(float(a_S[0] / b_S[0]), low, high, 1)


def decline(values_T: np.ndarray) -> float:
    """Return 1 - (mean of the last 10) / peak: 0.3 for a run that ends 30 % below its peak.

    It is NaN if the peak is not positive. The peak is the collapse rule's, so a lucky first
    batch does not set it.
    """
    values_T = np.asarray(values_T, float)
    _, peaks, _ = levels(values_T.tolist())
    peak = float(peaks[-1])
    return 1 - float(np.nanmean(values_T[-WINDOW:])) / peak if peak > 0 else math.nan
