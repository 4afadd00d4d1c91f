"""Statistics that held-out evaluations and recorded runs share.

Shape suffixes: N values, D draws of a bootstrap. scipy is imported inside the functions that need
it, so that commands which compute nothing start fast.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

# Rounding leaves sums uncertain by about 1e-14 of the sum of all sizes. Sums within this share of
# it count as equal.
TIE_TOLERANCE = 1e-9
SMALLEST_P = 1e-15  # of the convolutions of `sign_flip_p_of_integers`
MAX_EXACT = 40  # differences whose sign patterns are all counted: 2^20 sums take half a second


def t_quantile(freedom: float, level: float = 0.05) -> float:
    """Return the quantile of Student's t that |t| exceeds with probability `level`."""
    from scipy.special import stdtrit  # a third of a second, and a tenth of scipy.stats

    return float(stdtrit(freedom, 1 - level / 2))


def standard_error(values_N: np.ndarray) -> float:
    """Return the standard error of the mean of two or more values, std (ddof 1) / sqrt(N)."""
    return float(np.std(values_N, ddof=1)) / math.sqrt(len(values_N))


def t_half_width(values_N: np.ndarray, level: float = 0.05) -> float:
    """Return half the width of the mean's interval, t_{1 - level/2, N-1} times its error.

    The interval covers the truth with probability 1 - level: 95 %."""
    return t_quantile(len(values_N) - 1, level) * standard_error(values_N)


def wilson_interval(share: float, size: float, quantile: float) -> tuple[float, float]:
    """Return Wilson's interval of a share p of `size` observations (Wilson 1927).

        (p + q^2/2n -+ q sqrt(p (1 - p)/n + q^2/4n^2)) / (1 + q^2/n)

    `quantile` is q: 1.96 for 95 %, or Student's. The interval lies within [0, 1].
    """
    square = quantile**2
    variance = max(0.0, share * (1 - share))
    centre = share + square / (2 * size)
    half = math.sqrt(square * (variance / size + square / (4 * size * size)))
    scale = 1 + square / size
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def sign_flip_p(differences_N: np.ndarray) -> float:
    """Return the two-sided p of the hypothesis that paired differences have mean 0.

        p = P( |sum s_i d_i| >= |sum d_i| ),    the signs s_i being +1 or -1 with equal chances

    It is exact if the differences are symmetric about 0 under the hypothesis. Arms with the same
    distribution give such differences. Its smallest value is 2 / 2^N, so with fewer than 6
    differences it cannot fall below 0.05. It is NaN if a difference is NaN, or if there is none.

    The 2^N sign patterns are counted without listing them. The sum of a pattern is a sum over the
    first half of the differences plus a sum over the second half. The sums over the second half
    are sorted, so for each sum over the first half one search counts the extreme patterns. Time and
    memory are 2^(N/2). So with more than MAX_EXACT differences the p comes from random patterns
    (`random_sign_flip_p`). `sign_flip_p_of_integers` takes any number of whole numbers.
    """
    d = np.asarray(differences_N, float)
    if len(d) > MAX_EXACT:
        return random_sign_flip_p(d)
    if not len(d) or not np.isfinite(d).all():
        return math.nan
    threshold = abs(d.sum()) - TIE_TOLERANCE * np.abs(d).sum()
    if threshold <= 0:
        return 1.0
    middle = len(d) // 2
    first_sums = _signed_sums(d[:middle])
    second_sums = np.sort(_signed_sums(d[middle:]))
    counts = len(second_sums) - np.searchsorted(second_sums, threshold - first_sums)
    return 2 * int(counts.sum()) / 2 ** len(d)  # the other tail has as many patterns


def sign_flip_p_of_integers(differences_N: np.ndarray) -> float:
    """Return the p of `sign_flip_p` for whole numbers, of which there may be thousands.

    Sums of whole numbers are whole numbers, so the probability of every sum is computed. Of n
    differences of one size, the number of positive signs is binomial. The distributions of all
    sizes are convolved by Fourier transforms. They are exact to about 1e-15, so a smaller p is
    given as 1e-15. Time and memory grow with the sum of all |d_i|.
    """
    from scipy.signal import convolve
    from scipy.stats import binom

    observed = abs(int(differences_N.sum()))
    if observed == 0:
        return 1.0
    sizes, counts = np.unique(np.abs(differences_N[differences_N != 0]), return_counts=True)
    total = int((sizes * counts).sum())
    # parts[i][k]: the probability that the positive signs of these sizes add up to k
    parts = []
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        part = np.zeros(size * count + 1)
        part[::size] = binom.pmf(np.arange(count + 1), count, 0.5)
        parts.append(part)
    while len(parts) > 1:
        parts.sort(key=len)
        shortest = convolve(parts[0], parts[1])
        parts = [shortest, *parts[2:]]
    # the sum of all differences is 2k - total
    upper_tail = float(parts[0][(total + observed) // 2 :].sum())
    return min(1.0, max(2 * upper_tail, SMALLEST_P))


def random_sign_flip_p(differences_N: np.ndarray, draws: int = 20_000, seed: int = 0) -> float:
    """Return the p of `sign_flip_p` from random sign patterns, for any number of differences.

        p = (1 + number of patterns with |sum s_i d_i| >= |sum d_i|) / (1 + draws)

    This p is valid itself (Phipson and Smyth 2010): it is never 0, and its smallest value is
    1 / (1 + draws). It is NaN if a difference is NaN, or if there is none.
    """
    d = np.asarray(differences_N, float)
    if not len(d) or not np.isfinite(d).all():
        return math.nan
    threshold = abs(d.sum()) - TIE_TOLERANCE * np.abs(d).sum()
    rng = np.random.default_rng(seed)
    signs_DN = 2 * rng.integers(0, 2, size=(draws, len(d)), dtype=np.int8) - 1
    sums_D = np.abs(signs_DN @ d)
    return (1 + int((sums_D >= threshold).sum())) / (1 + draws)


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p of each hypothesis with Holm's correction for their number (Holm 1979).

    With the p in rising order, the k-th of m becomes max over j <= k of min(1, (m - j + 1) p_j).
    Rejecting each hypothesis whose corrected p is below alpha errs at all with probability alpha
    at most. A p that is NaN is no hypothesis, and stays NaN.
    """
    tested = [index for index, p in enumerate(ps) if not math.isnan(p)]
    rising = sorted(tested, key=lambda index: ps[index])
    corrected = [math.nan] * len(ps)
    largest = 0.0
    for position, index in enumerate(rising):
        factor = len(rising) - position
        largest = max(largest, min(1.0, factor * ps[index]))
        corrected[index] = largest
    return corrected


def _signed_sums(values_N: np.ndarray) -> np.ndarray:
    """Return the sums of all 2^N sign patterns."""
    sums = np.zeros(1)
    for value in values_N:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def resample_counts(size: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Return how often each of `size` items is drawn in each of `draws` bootstrap samples.

    A sample draws `size` items with replacement. The shape is [draws, size].
    """
    return rng.multinomial(size, np.full(size, 1 / size), size=draws)


def percentile_interval(
    draws_D: np.ndarray, method: Literal["linear", "nearest"] = "linear"
) -> tuple[float, float]:
    """Return the 95 % interval of a bootstrap: the 2.5 % and 97.5 % percentiles of its draws."""
    low, high = np.quantile(draws_D, [0.025, 0.975], method=method)
    return float(low), float(high)
