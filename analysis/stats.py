"""Statistics of runs: smoothing, intervals over seeds, paired comparisons.

There are two kinds of interval, and every number says which it has:
- over seeds (two or more): what another training run could have given, by Student's t;
- within the run (one seed): how well the mean over this run's batches is known, by resampling
  blocks of neighbouring batches. It says nothing about other seeds and is too narrow as a statement
  about the method.

Tables are [T steps, S seeds], as numpy arrays or data frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gspo.tracking.collapse import levels

WINDOW = 10  # batches in the final level and in trailing means
# batches in the start reward: a single batch is noisy, and more would hide the first gains
START = 5
REPS = 2000  # bootstrap draws
# relative; rounding leaves differences of means of rewards uncertain by about 1e-14 of the rewards
TIE = 1e-9
# 97.5 % quantiles of Student's t, 1 to 30 degrees of freedom
# fmt: off
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
        2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
        2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
# fmt: on


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval. With `seeds` = 1 it holds within the run only; low and high
    are NaN where there is no interval."""

    mean: float
    low: float
    high: float
    seeds: int
    values: tuple[float, ...] = ()  # the seeds' own values, where there are several
    logarithmic: bool = False  # whether the mean is geometric, as for ratios

    @property
    def kind(self) -> str:
        return (
            f"over {self.seeds} seeds"
            if self.seeds > 1
            else "within the single run, not over seeds"
        )

    def text(self, form: str = ".3f") -> str:
        if math.isnan(self.low):
            return f"{self.mean:{form}} [no interval]"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def p(self, line: float = 0.0) -> float:
        """Return the exact two-sided sign-flip p for the hypothesis that the seeds' mean is `line`;
        NaN without several seeds."""
        if len(self.values) < 2:
            return math.nan
        values_S = np.array(self.values)
        return sign_flip_p(np.log(values_S / line) if self.logarithmic else values_S - line)


def number(value: float, form: str) -> str:
    """Return a number in this format, or "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:{form}}"


def trailing_mean(values_T: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Return the mean of the last `window` values at each step, NaN before there are that many. It
    looks at no later value, so that it can say when a level was first reached."""
    values_T = np.asarray(values_T, float)
    window = min(window, len(values_T))
    return np.concatenate(
        [np.full(window - 1, np.nan), np.convolve(values_T, np.full(window, 1 / window), "valid")]
    )


def centred_mean(values_T: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Return at each step the mean of the values at most window/2 away on either side, so of fewer
    at the ends. NaN is skipped."""
    values_T, reach = np.asarray(values_T, float), window // 2
    near = [values_T[max(0, t - reach) : t + reach + 1] for t in range(len(values_T))]
    return np.array([np.nanmean(x) if np.isfinite(x).any() else math.nan for x in near])


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t; beyond 30 degrees of freedom by the Cornish-Fisher
    series (error < 1e-3)."""
    if freedom <= len(T975):
        return T975[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


AT_ONCE = 2**22  # numbers that the bootstrap holds at once


def t_interval(values_S: np.ndarray) -> Interval:
    """Return the mean over seeds with the interval mean ± t_{0.975, S-1} sd / sqrt(S); a single
    seed has no interval."""
    values_S = np.asarray(values_S, float)
    mean = float(values_S.mean())
    if len(values_S) < 2:
        return Interval(mean, math.nan, math.nan, 1)
    half = t_quantile(len(values_S) - 1) * values_S.std(ddof=1) / math.sqrt(len(values_S))
    return Interval(mean, mean - half, mean + half, len(values_S), tuple(values_S.tolist()))


def block_length(steps: int) -> int:
    """Return how many neighbouring batches a block has."""
    return max(1, round(math.sqrt(steps)))


def block_indices(steps: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Return `length` positions below `steps`: circular blocks of round(sqrt(steps)) neighbours
    from random starts.
    """
    block = block_length(steps)
    starts = rng.integers(steps, size=math.ceil(length / block))
    return ((starts[:, None] + np.arange(block)) % steps).ravel()[:length]


def block_bootstrap(values_T: np.ndarray, reps: int = REPS) -> Interval:
    """Return the mean over the batches of ONE run, with an interval by the moving-block bootstrap
    (percentiles).

    Blocks keep the correlation of neighbouring batches, which a plain bootstrap would count as
    independent evidence. The interval holds within the run only.
    """
    values_T = np.asarray(values_T, float)
    values_T = values_T[np.isfinite(values_T)]
    if not len(values_T):
        return Interval(math.nan, math.nan, math.nan, 1)
    rng, length = np.random.default_rng(0), len(values_T)
    block = block_length(length)
    # All starts at once are the numbers that as many calls of `block_indices` draw, in their order.
    starts_RB = rng.integers(length, size=(reps, math.ceil(length / block)))
    draws = []
    for starts in np.array_split(starts_RB, math.ceil(reps * length / AT_ONCE)):
        places = (starts[:, :, None] + np.arange(block)) % length
        draws.append(values_T[places.reshape(len(starts), -1)[:, :length]].mean(axis=1))
    low, high = np.quantile(np.concatenate(draws), [0.025, 0.975])
    return Interval(float(values_T.mean()), float(low), float(high), 1)


def estimate(table_TS: np.ndarray) -> Interval:
    """Return the mean over batches and seeds with the t interval of the seeds' means, or with the
    within-run interval of a single seed. A batch that a seed lacks (NaN) is left out of that seed's
    mean alone, and a seed that lacks all is left out."""
    table_TS = np.asarray(table_TS, float)
    table_TS = table_TS[:, np.isfinite(table_TS).any(axis=0)]
    if table_TS.shape[1] == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    if table_TS.shape[1] == 1:
        return block_bootstrap(table_TS[:, 0])
    return t_interval(np.nanmean(table_TS, axis=0))


def paired_difference(a_TS: np.ndarray, b_TS: np.ndarray) -> Interval:
    """Return the mean of a - b, taken batch by batch and seed by seed. Both arms saw the same
    problems there, so the difficulty of the problems, the largest part of the noise, cancels."""
    return estimate(np.asarray(a_TS, float) - np.asarray(b_TS, float))


def ratio(a_TS: np.ndarray, b_TS: np.ndarray) -> Interval:
    """Return the mean of a over the mean of b, per seed, over the batches that both have. Several
    seeds give the geometric mean and the t interval of the logarithms; one seed gives a block
    bootstrap that draws the same batches of both arms. There is no interval where a seed's mean is
    0; the ratio is inf if b is 0 throughout, NaN if both are."""
    a_TS, b_TS = np.asarray(a_TS, float), np.asarray(b_TS, float)
    both_TS = np.isfinite(a_TS) & np.isfinite(b_TS)
    seeds_S = both_TS.any(axis=0)
    if not seeds_S.any():
        return Interval(math.nan, math.nan, math.nan, 0)
    a_TS, b_TS = (np.where(both_TS, x, np.nan)[:, seeds_S] for x in (a_TS, b_TS))
    a_S, b_S = np.nanmean(a_TS, axis=0), np.nanmean(b_TS, axis=0)
    seeds = len(a_S)
    # there is no logarithm, so take the pooled ratio without an interval
    if (a_S <= 0).any() or (b_S <= 0).any():
        point = (
            float(a_S.mean() / b_S.mean())
            if b_S.mean() > 0
            else math.inf
            if a_S.mean() > 0
            else math.nan
        )
        return Interval(point, math.nan, math.nan, seeds)
    if seeds > 1:
        log = t_interval(np.log(a_S / b_S))
        ends = (math.exp(x) for x in (log.mean, log.low, log.high))
        return Interval(*ends, seeds, tuple((a_S / b_S).tolist()), logarithmic=True)
    a_TS, b_TS = (x[both_TS.any(axis=1)] for x in (a_TS, b_TS))
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(REPS):
        chosen = block_indices(len(a_TS), len(a_TS), rng)
        below = b_TS[chosen].mean()
        draws.append(a_TS[chosen].mean() / below if below > 0 else np.inf)
    # "nearest" because inf may occur, which cannot be interpolated
    low, high = np.quantile(draws, [0.025, 0.975], method="nearest")
    return Interval(float(a_S[0] / b_S[0]), float(low), float(high), 1)


def decline(values_T: np.ndarray) -> float:
    """Return 1 - (mean of the last 10) / peak, so 0.3 where the run ends 30 % below its peak; NaN
    if the peak is not positive. The peak is that of the collapse rule: a lucky first batch does not
    set it."""
    values_T = np.asarray(values_T, float)
    peak = float(levels(values_T.tolist())[1][-1])
    return 1 - float(np.nanmean(values_T[-WINDOW:])) / peak if peak > 0 else math.nan


def sign_flip_p(differences_S: np.ndarray) -> float:
    """Return the exact two-sided p that paired differences have mean 0: the share of the 2^S sign
    patterns that are at least as extreme.

    Its smallest value is 2 / 2^S, so with fewer than 6 seeds it cannot fall below 0.05. Patterns
    are counted without listing them: a pattern's sum is a sum of its first half plus one of its
    second, and of the 2^(S/2) sums of the second half, sorted, those that are large enough for a
    given first half are one stretch. Sums that differ by no more than TIE of the sum of all sizes
    are ties, and ties count as equally extreme. NaN if a difference is NaN.
    """
    d = np.asarray(differences_S, float)
    if not len(d) or not np.isfinite(d).all():
        return math.nan
    extreme = abs(d.sum()) - TIE * np.abs(d).sum()
    if extreme <= 0:
        return 1.0
    first, second = signed_sums(d[: len(d) // 2]), np.sort(signed_sums(d[len(d) // 2 :]))
    # the other tail holds as many
    as_extreme = len(second) - np.searchsorted(second, extreme - first)
    return 2 * int(as_extreme.sum()) / 2 ** len(d)


def signed_sums(values_S: np.ndarray) -> np.ndarray:
    """Return the sums of all 2^S sign patterns."""
    sums = np.zeros(1)
    for value in values_S:
        sums = np.concatenate([sums + value, sums - value])
    return sums
