"""Estimates from k samples of each of m problems: avg@k, pass@k, maj@k, with standard errors and 95
% intervals.

Each estimate is a mean over problems of a number in [0, 1]. Its standard error and interval tell
where it would lie on other problems of the same kind and with other samples. `error_parts` tells
how much of the error is sampling noise; only that matters to someone who is interested in this very
set of problems.

Shape suffixes: P problems, K samples of a problem. Rewards are in [0, 1], and 1 means solved. NaN
stands for a sample that could not be graded through no fault of its own. Such samples are in no
numerator and in no denominator, and problems with too few graded samples are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gspo.data.seeding import seed_for
from gspo.statistics import standard_error, t_half_width, t_quantile, wilson_interval

# maj@k with k < n averages over so many subsets, which adds at most 0.022 / sqrt(m) to its standard
# error
DRAWS = 500


@dataclass(frozen=True)
class Estimate:
    """Holds a mean over problems. Its numbers are NaN if too few problems are left to compute them."""

    value: float
    # the standard error, from the spread between problems and the sampling noise within them
    stderr: float
    low: float  # the lower end of the 95 % interval
    high: float  # its upper end
    problems: int  # the number of problems in the mean


def powers(n: int) -> list[int]:
    """List 1, 2, 4, ... and n, the values of k for which pass@k and maj@k of n samples are
    reported.
    """
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def average(rewards_PK: np.ndarray) -> Estimate:
    """Estimate avg@k, the mean over problems of the mean reward of their graded samples."""
    graded_PK = ~np.isnan(rewards_PK)
    return over_problems(problem_means(rewards_PK), int(graded_PK.sum()))


def problem_means(rewards_PK: np.ndarray) -> np.ndarray:
    """Compute the mean reward of each problem's graded samples; NaN for a problem without any.
    Shape [P].
    """
    graded_PK = ~np.isnan(rewards_PK)
    totals_P = np.where(graded_PK, rewards_PK, 0.0).sum(1)
    return _divide(totals_P, graded_PK.sum(1))


def error_parts(rewards_PK: np.ndarray) -> tuple[float, float]:
    """Split the standard error of avg@k into (sampling, between problems). Their squares add up to
    its square.

        sampling^2 = sum_i v_i / k_i / m^2,    v_i = sum_j (r_ij - mean_i)^2 / (k_i - 1)

    For rewards 0 and 1, v_i / k_i = p_i (1 - p_i) / (k_i - 1), the unbiased form of sum p (1 - p) /
    k / m^2. The rest of the error is due to the choice of problems; it is 0 if noise would make it
    negative. Both are NaN if a problem has a single sample.
    """
    means_P, counts_P = problem_means(rewards_PK), (~np.isnan(rewards_PK)).sum(1)
    used_P = counts_P > 0
    m, whole = int(used_P.sum()), average(rewards_PK).stderr
    if m < 2 or (counts_P[used_P] < 2).any():
        return math.nan, math.nan
    squares_P = np.nansum((rewards_PK - means_P[:, None]) ** 2, axis=1)[used_P]
    sampling = math.sqrt(float((squares_P / (counts_P[used_P] - 1) / counts_P[used_P]).sum())) / m
    return sampling, math.sqrt(max(0.0, whole**2 - sampling**2))


def pass_at_k(rewards_PK: np.ndarray, k: int) -> Estimate:
    """Estimate the chance that at least one of k samples is right, without bias, from n >= k
    samples with c right ones:

        pass@k = mean over problems of 1 - C(n - c, k) / C(n, k)          (Chen et al. 2021,
                                                                          arXiv:2107.03374)

    Problems with fewer than k graded samples are left out.
    """
    counts_P, solved_P = (~np.isnan(rewards_PK)).sum(1), (rewards_PK == 1).sum(1)
    pairs = zip(counts_P.tolist(), solved_P.tolist(), strict=True)
    values = [1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan for n, c in pairs]
    return over_problems(np.array(values), int(counts_P[counts_P >= k].sum()))


def majority_at_k(rewards_PK: np.ndarray, answers_PK: np.ndarray, k: int) -> Estimate:
    """Estimate the chance that the most frequent answer of k samples is right.

    `answers_PK` holds normal forms. A sample whose answer is "" has no vote, and a problem without
    votes is wrong. Ties go to the answer that occurs first, and an answer is as right as the first
    sample that gives it. If k equals the number n of graded samples, they vote in the order they
    were drawn. If k < n, the estimate is the mean over `DRAWS` subsets in random order, which are
    the same each time; it has no bias. Problems with fewer than k graded samples are left out.
    """
    graded_PK = ~np.isnan(rewards_PK)
    counts_P = graded_PK.sum(1)
    _, codes_PK = np.unique(answers_PK, return_inverse=True)
    codes_PK = np.where(answers_PK == "", -1, codes_PK.reshape(answers_PK.shape))
    graded_first_PK = np.argsort(~graded_PK, axis=1, kind="stable")
    values_P = np.full(len(rewards_PK), math.nan)
    for n in np.unique(counts_P[counts_P >= k]).tolist():
        rows = np.flatnonzero(counts_P == n)
        columns = graded_first_PK[rows, :n]
        codes_Pn = np.take_along_axis(codes_PK[rows], columns, axis=1)
        solved_Pn = np.take_along_axis(rewards_PK[rows] == 1, columns, axis=1)
        orders = _orders(n, k)
        values_P[rows] = sum(
            _vote(codes_Pn[:, order], solved_Pn[:, order]) for order in orders
        ) / len(orders)
    return over_problems(values_P, int(counts_P[counts_P >= k].sum()))


def _orders(n: int, k: int) -> np.ndarray:
    """Choose which samples vote and in which order: each row has k different numbers below n."""
    if k == n:
        return np.arange(n)[None]
    rng = np.random.Generator(np.random.Philox(key=seed_for("maj@k", n, k)))
    return rng.permuted(np.tile(np.arange(n), (DRAWS, 1)), axis=1)[:, :k]


def _vote(codes_Pk: np.ndarray, solved_Pk: np.ndarray) -> np.ndarray:
    """Return 1.0 for each problem whose majority is right; `argmax` takes the first of equally
    frequent ones. [P].
    """
    votes_Pk = (codes_Pk[:, :, None] == codes_Pk[:, None, :]).sum(2) * (codes_Pk >= 0)
    first_P = votes_Pk.argmax(1)[:, None]
    voted_P = np.take_along_axis(votes_Pk, first_P, axis=1) > 0
    return (np.take_along_axis(solved_Pk, first_P, axis=1) & voted_P)[:, 0].astype(float)


def over_problems(values_P: np.ndarray, samples: int) -> Estimate:
    """Estimate a mean from the values of independent problems; values that are NaN are left out.

    The interval is that of `interval` if all values lie in [0, 1], and otherwise, as of an
    environment with rewards of its own, mean -+ t stderr, t being Student's 97.5 % quantile with m
    - 1 degrees of freedom.

    The standard error is std (ddof 1) / sqrt(m). The bootstrap's error of a mean has this closed
    form too, except for a factor sqrt((m - 1) / m), so no problems are resampled. `samples` is the
    number of graded samples behind the values.
    """
    values_P = values_P[~np.isnan(values_P)]
    m = len(values_P)
    if m < 2:
        return Estimate(float(values_P.mean()) if m else math.nan, math.nan, math.nan, math.nan, m)
    if values_P.min() < 0 or values_P.max() > 1:
        return mean_difference(values_P)
    value = float(values_P.mean())
    stderr = standard_error(values_P)
    return Estimate(value, stderr, *interval(value, stderr, m, samples), m)


def interval(value: float, stderr: float, problems: int, samples: int) -> tuple[float, float]:
    """Compute the 95 % interval of a mean p over m problems, Wilson's with the effective number n
    of observations:

        n = p (1 - p) / stderr^2

    Its quantile is Student's with m - 1 degrees of freedom. n is at most the number of samples,
    because no spread is smaller than that of independent samples. If p is 0 or 1, n is m, because
    the samples of a problem may all be alike. The interval lies within [0, 1]; for large n it is p
    -+ t stderr. (Effective sample size: Korn and Graubard 1998.)
    """
    spread = max(0.0, value * (1 - value))
    if spread < 1e-12:
        n = float(problems)
    else:
        n = min(float(samples), spread / stderr**2) if stderr else float(samples)
    low, high = wilson_interval(value, n, t_quantile(problems - 1))
    return min(low, value), max(high, value)


def mean_difference(differences_P: np.ndarray) -> Estimate:
    """Estimate the mean of values of independent problems that have no bounds, as of paired
    differences; NaN are left out.

    The interval is mean -+ t std (ddof 1) / sqrt(m), t being Student's 97.5 % quantile with m - 1
    degrees of freedom.
    """
    d_P = differences_P[~np.isnan(differences_P)]
    m = len(d_P)
    if m < 2:
        return Estimate(float(d_P.mean()) if m else math.nan, math.nan, math.nan, math.nan, m)
    value = float(d_P.mean())
    half = t_half_width(d_P)
    return Estimate(value, standard_error(d_P), value - half, value + half, m)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute a / b, NaN where b is 0."""
    return np.divide(a, b, out=np.full(len(a), math.nan), where=b > 0)
