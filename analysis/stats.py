"""Statistics of runs: smoothing, intervals over seeds, paired comparisons.

There are two kinds of interval, and every number says which it has:
- over seeds (two or more): the range in which another training run could lie, by Student's t.
- within the run (a single seed): how well the mean over this run's batches is known, by resampling
  blocks of neighbouring batches. It says nothing about other seeds and is too narrow as a statement
  about the method.

Shape suffixes: T steps, S seeds, B blocks, D draws of a bootstrap. Tables are [T, S], as numpy
arrays or data frames. gspo/statistics.py has the formulas that evaluations use too.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gspo.statistics import percentile_interval, sign_flip_p, t_half_width
from gspo.tracking.collapse import levels

WINDOW = 10  # batches in the final level and in trailing means
# batches in the start reward: a single batch is noisy, and more would hide the first gains
START = 5
REPS = 2000  # bootstrap draws
LEVEL = 0.05  # of intervals and verdicts


@dataclass(frozen=True)
class Interval:
    """A mean with its interval, which covers the truth with probability 1 - level: 95 %.

    With `seeds` = 1 it holds within the run only. low and high are NaN if there is no interval. In
    a sequential design the level is that of the look (sequential.py). Verdicts compare the p with
    it.
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    seeds: int = 1
    values: tuple[float, ...] = ()  # the value of each seed, if there are several
    logarithmic: bool = False  # whether the mean is geometric, as for ratios
    level: float = LEVEL

    @property
    def kind(self) -> str:
        if self.seeds > 1 and self.level != LEVEL:
            return f"over {self.seeds} seeds at the look's level {self.level:.2g}"
        if self.seeds > 1:
            return f"over {self.seeds} seeds"
        return "within the single run, not over seeds"

    def text(self, form: str = ".3f") -> str:
        if math.isnan(self.mean):
            return "-"
        if math.isnan(self.low):
            return f"{self.mean:{form}} [no interval]"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def p(self, null: float = 0.0) -> float:
        """Return the two-sided sign-flip p of the hypothesis that the seeds' mean is `null`.

        It is NaN without several seeds.
        """
        if len(self.values) < 2:
            return math.nan
        values_S = np.array(self.values)
        if self.logarithmic:
            return sign_flip_p(np.log(values_S / null))
        return sign_flip_p(values_S - null)

    def p_within(self, low: float, high: float) -> float:
        """Return the larger p of two hypotheses: that the seeds' mean is `low`, and `high`.

        If it is small and the interval lies between them, the mean does too."""
        return max(self.p(low), self.p(high))

    def p_text(self) -> str:
        """Return the p against 0 for a table, or "-" without several seeds."""
        if self.seeds > 1:
            return f"{self.p():.2g}"
        return "-"


NO_INTERVAL = Interval(math.nan, seeds=0)


def number(value: float, form: str) -> str:
    """Return a number in this format, or "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:{form}}"


def trailing_mean(values_T: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Return the mean of the last `window` values at each step, NaN before there are that many.

    It uses no later value, so it can say when a level was first reached.
    """
    series = pd.Series(values_T, dtype=float)
    window = min(window, len(series))
    means = series.rolling(window).mean()
    return means.to_numpy()


def centred_mean(values_T: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Return at each step the mean of the values at most window/2 away, fewer at the ends.

    NaN values are skipped.
    """
    series = pd.Series(values_T, dtype=float)
    width = 2 * (window // 2) + 1
    means = series.rolling(width, center=True, min_periods=1).mean()
    return means.to_numpy()


def t_interval(values_S: np.ndarray, level: float = LEVEL) -> Interval:
    """Return the mean over seeds with the interval mean ± t_{1 - level/2, S-1} sd / sqrt(S).

    A single seed has no interval.
    """
    values_S = np.asarray(values_S, float)
    mean = float(values_S.mean())
    seeds = len(values_S)
    if seeds < 2:
        return Interval(mean)
    half = t_half_width(values_S, level)
    values = tuple(values_S.tolist())
    return Interval(mean, mean - half, mean + half, seeds, values, level=level)


def block_length(steps: int) -> int:
    """Return the number of neighbouring batches in a block."""
    return max(1, round(math.sqrt(steps)))


def block_indices(steps: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Return `length` indices below `steps`: circular blocks of neighbours from random starts."""
    block = block_length(steps)
    blocks = math.ceil(length / block)
    starts_B = rng.integers(steps, size=blocks)
    within_block = np.arange(block)
    indices = starts_B[:, None] + within_block
    indices = indices.ravel() % steps
    return indices[:length]


def block_bootstrap(values_T: np.ndarray, reps: int = REPS) -> Interval:
    """Return the mean over the batches of ONE run, with its moving-block bootstrap interval.

    Blocks keep the correlation of neighbouring batches, which a plain bootstrap would count as
    independent evidence. The interval (percentiles) holds within the run only. It is too narrow: in
    500 simulated runs of 50 batches it covers the truth in 88 %, and in 83 % if neighbours are
    correlated by .5 (tests/unit/analysis/test_analysis_stats.py, once a day).
    """
    values_T = np.asarray(values_T, float)
    values_T = values_T[np.isfinite(values_T)]
    length = len(values_T)
    if not length:
        return Interval(math.nan)
    rng = np.random.default_rng(0)
    means = [values_T[block_indices(length, length, rng)].mean() for _ in range(reps)]
    low, high = percentile_interval(np.array(means))
    return Interval(float(values_T.mean()), low, high)


def estimate(table_TS: np.ndarray) -> Interval:
    """Return the mean over batches and seeds with its interval.

    Several seeds give the t interval of the seeds' means, a single seed the interval within its
    run. A missing batch (NaN) is left out of the mean of its seed alone. A seed without any batch
    is left out.
    """
    table_TS = np.asarray(table_TS, float)
    has_batches_S = np.isfinite(table_TS).any(axis=0)
    table_TS = table_TS[:, has_batches_S]
    seeds = table_TS.shape[1]
    if seeds == 0:
        return NO_INTERVAL
    if seeds == 1:
        return block_bootstrap(table_TS[:, 0])
    means_S = np.nanmean(table_TS, axis=0)
    return t_interval(means_S)


def paired_difference(a_TS: np.ndarray, b_TS: np.ndarray) -> Interval:
    """Return the mean of a - b, taken batch by batch and seed by seed.

    Both arms saw the same problems in a batch. So the difficulty of the problems, the largest part
    of the noise, cancels.
    """
    a_TS = np.asarray(a_TS, float)
    b_TS = np.asarray(b_TS, float)
    return estimate(a_TS - b_TS)


def ratio(a_TS: np.ndarray, b_TS: np.ndarray) -> Interval:
    """Return the mean of a over the mean of b, per seed, over the batches that both have.

    Several seeds give the geometric mean and the t interval of the logarithms. A single seed gives
    a block bootstrap. There is no interval if the mean of a seed is 0. The ratio is inf if b is 0
    throughout, NaN if both are.
    """
    a_TS = np.asarray(a_TS, float)
    b_TS = np.asarray(b_TS, float)
    both_TS = np.isfinite(a_TS + b_TS)
    has_both_S = both_TS.any(axis=0)
    if not has_both_S.any():
        return NO_INTERVAL
    a_TS = np.where(both_TS, a_TS, np.nan)[:, has_both_S]
    b_TS = np.where(both_TS, b_TS, np.nan)[:, has_both_S]
    a_S = np.nanmean(a_TS, axis=0)
    b_S = np.nanmean(b_TS, axis=0)
    seeds = len(a_S)
    smallest = min(a_S.min(), b_S.min())
    if smallest <= 0:
        # there is no logarithm: pool the seeds
        with np.errstate(divide="ignore", invalid="ignore"):
            pooled = a_S.mean() / b_S.mean()
        return Interval(float(pooled), seeds=seeds)
    if seeds == 1:
        has_both_T = both_TS.any(axis=1)
        return bootstrap_ratio(a_TS[has_both_T, 0], b_TS[has_both_T, 0])
    ratios_S = a_S / b_S
    log = t_interval(np.log(ratios_S))
    return Interval(
        mean=math.exp(log.mean),
        low=math.exp(log.low),
        high=math.exp(log.high),
        seeds=seeds,
        values=tuple(ratios_S.tolist()),
        logarithmic=True,
    )


def bootstrap_ratio(a_T: np.ndarray, b_T: np.ndarray) -> Interval:
    """Return the ratio of the means of two runs, with the same batches drawn of both."""
    steps = len(a_T)
    rng = np.random.default_rng(0)
    draws = [block_indices(steps, steps, rng) for _ in range(REPS)]
    indices_DT = np.array(draws)
    a_D = a_T[indices_DT].mean(axis=1)
    b_D = b_T[indices_DT].mean(axis=1)
    ratios_D = np.full(REPS, np.inf)
    np.divide(a_D, b_D, out=ratios_D, where=b_D > 0)
    # "nearest" because inf may occur, which cannot be interpolated
    low, high = percentile_interval(ratios_D, method="nearest")
    mean = a_T.mean() / b_T.mean()
    return Interval(float(mean), low, high)


def decline(values_T: np.ndarray) -> float:
    """Return 1 - (mean of the last 10) / peak: 0.3 for a run that ends 30 % below its peak.

    It is NaN if the peak is not positive. The peak is the collapse rule's, so a lucky first
    batch does not set it.
    """
    values_T = np.asarray(values_T, float)
    _, peaks, _ = levels(values_T.tolist())
    peak = float(peaks[-1])
    if peak <= 0:
        return math.nan
    last = values_T[-WINDOW:]
    end = float(np.nanmean(last))
    return 1 - end / peak
