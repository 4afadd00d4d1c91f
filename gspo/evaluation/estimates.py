"""Estimates of avg@k, pass@k and maj@k from k samples of m problems, with 95 % intervals.

Each estimate is a mean over problems of a number in [0, 1]. Its standard error and interval
describe its spread over other problems of the same kind and other samples. `error_parts` computes
the share of sampling noise in the error. Only this share matters if the question is about exactly
this set of problems.

Shape suffixes: P problems, K samples of a problem. Rewards are in [0, 1], and 1 means solved. NaN
stands for a sample that could not be graded through no fault of its own. Such samples are in no
numerator and in no denominator, and problems with too few graded samples are left out.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray

from gspo.data.seeding import numpy_generator
from gspo.statistics import standard_error, t_half_width, t_quantile, wilson_interval

# maj@k with k < n averages over so many subsets, which adds at most 0.022 / sqrt(m) to its standard
# error
DRAWS = 500


@dataclass(frozen=True)
class Estimate:
    """A mean over problems. Numbers are NaN if there are too few problems to compute them."""

    value: float
    # the standard error, from the spread between problems and the sampling noise within them
    stderr: float
    low: float  # the lower end of the 95 % interval
    high: float  # its upper end
    problems: int  # the number of problems in the mean


def powers(n: int) -> list[int]:
    """Return 1, 2, 4, ... and n: the values of k in the reported pass@k and maj@k of n samples."""
    powers_of_2 = [2**i for i in range(n.bit_length())]
    return sorted({*powers_of_2, n})


def average(rewards_PK: ndarray) -> Estimate:
    """Estimate avg@k, the mean over problems of the mean reward of their graded samples."""
    counts_P = graded_counts(rewards_PK)
    totals_P = np.nansum(rewards_PK, axis=1)
    means_P = ratio(totals_P, counts_P)
    graded = rewards_PK[~np.isnan(rewards_PK)]
    are_shares = bool(((graded >= 0) & (graded <= 1)).all())
    return over_problems(means_P, int(counts_P.sum()), are_shares)


def graded_counts(rewards_PK: ndarray) -> ndarray:
    """Count the graded samples of each problem. Shape [P]."""
    graded_PK = ~np.isnan(rewards_PK)
    return graded_PK.sum(1)


def error_parts(rewards_PK: ndarray) -> tuple[float, float]:
    """Split the standard error of avg@k into (sampling, between problems).

    The squares of the parts add up to the square of the error.

        sampling^2 = sum_i v_i / k_i / m^2,    v_i = sum_j (r_ij - mean_i)^2 / (k_i - 1)

    For rewards 0 and 1, v_i / k_i is p_i (1 - p_i) / (k_i - 1), where p_i is the share of right
    samples. The division by k_i - 1 makes it unbiased. The rest of the error is due to the choice
    of problems, and counts as 0 if it would be negative. Both parts are NaN if there are fewer than
    two problems, or if a problem has a single graded sample.
    """
    used_P = graded_counts(rewards_PK) > 0
    rewards_PK = rewards_PK[used_P]
    counts_P = graded_counts(rewards_PK)
    m = len(counts_P)
    if m < 2 or counts_P.min() < 2:
        return math.nan, math.nan
    variance_P = np.nanvar(rewards_PK, axis=1, ddof=1)
    squared_error_P = variance_P / counts_P
    sampling = math.sqrt(squared_error_P.sum()) / m
    stderr = average(rewards_PK).stderr
    between_squared = max(0.0, stderr**2 - sampling**2)
    return sampling, math.sqrt(between_squared)


def pass_at_k(rewards_PK: ndarray, k: int) -> Estimate:
    """Estimate the chance that at least one of k samples is right, without bias.

    With n >= k samples of a problem, c of them right (Chen et al. 2021, arXiv:2107.03374):

        pass@k = mean over problems of 1 - C(n - c, k) / C(n, k)

    Problems with fewer than k graded samples are left out.
    """
    counts_P = graded_counts(rewards_PK)
    solved_P = (rewards_PK == 1).sum(1)
    values = []
    samples = 0
    for n, c in zip(counts_P.tolist(), solved_P.tolist(), strict=True):
        if n >= k:
            samples += n
            all_wrong = math.comb(n - c, k) / math.comb(n, k)
            values.append(1 - all_wrong)
    return over_problems(np.array(values), samples)


def majority_at_k(rewards_PK: ndarray, answers_PK: ndarray, k: int) -> Estimate:
    """Estimate the chance that the most frequent answer of k samples is right.

    `answers_PK` holds normal forms. A sample whose answer is "" has no vote, and a problem without
    votes is wrong. Ties go to the answer that occurs first, and an answer is as right as the first
    sample that gives it. If k equals the number n of graded samples, they vote in the order they
    were drawn. If k < n, the estimate is the mean over `DRAWS` subsets in random order, which are
    the same each time; it has no bias. Problems with fewer than k graded samples are left out.
    """
    graded_PK = ~np.isnan(rewards_PK)
    counts_P = graded_PK.sum(1)
    _, codes = np.unique(answers_PK, return_inverse=True)
    codes_PK = codes.reshape(answers_PK.shape)
    codes_PK = np.where(answers_PK == "", -1, codes_PK)
    # ungraded samples go to the end of their row
    order_PK = np.argsort(~graded_PK, axis=1, kind="stable")
    codes_PK = np.take_along_axis(codes_PK, order_PK, axis=1)
    solved_PK = np.take_along_axis(rewards_PK == 1, order_PK, axis=1)
    values_P = np.full(len(rewards_PK), math.nan)
    used_counts = counts_P[counts_P >= k]
    for n in np.unique(used_counts).tolist():
        rows = np.flatnonzero(counts_P == n)
        orders = _orders(n, k)
        right = np.zeros(len(rows))
        for order in orders:
            voting = np.ix_(rows, order)
            right += _vote(codes_PK[voting], solved_PK[voting])
        values_P[rows] = right / len(orders)
    return over_problems(values_P, int(used_counts.sum()))


def _orders(n: int, k: int) -> ndarray:
    """Choose the samples that vote, in order: each row has k different numbers below n."""
    if k == n:
        return np.arange(n)[None]
    rng = numpy_generator("maj@k", n, k)
    numbers = np.tile(np.arange(n), (DRAWS, 1))
    permutations = rng.permuted(numbers, axis=1)
    return permutations[:, :k]


def _vote(codes_Pk: ndarray, solved_Pk: ndarray) -> ndarray:
    """Return 1.0 for each problem whose majority is right, else 0.0. Shape [P]."""
    same_Pkk = codes_Pk[:, :, None] == codes_Pk[:, None, :]
    votes_Pk = np.where(codes_Pk >= 0, same_Pkk.sum(2), 0)
    # `argmax` returns the first of equally frequent answers
    winner_P = votes_Pk.argmax(1)
    rows_P = np.arange(len(winner_P))
    has_votes_P = votes_Pk[rows_P, winner_P] > 0
    is_right_P = solved_Pk[rows_P, winner_P]
    return (is_right_P & has_votes_P).astype(float)


def over_problems(values_P: ndarray, samples: int, are_shares: bool = True) -> Estimate:
    """Estimate a mean from the values of independent problems. NaN values are left out.

    With `are_shares`, all rewards lie in [0, 1], and the interval is `interval`. Other rewards may
    lie outside. Then the interval is mean -+ t stderr, t being Student's 97.5 % quantile with m - 1
    degrees of freedom.

    The standard error is std (ddof 1) / sqrt(m). The bootstrap's error of a mean has this closed
    form too, except for a factor sqrt((m - 1) / m), so no problems are resampled. `samples` is the
    number of graded samples behind the values.
    """
    estimate = mean_difference(values_P)
    m = estimate.problems
    if m < 2 or not are_shares:
        return estimate
    low, high = interval(estimate.value, estimate.stderr, m, samples)
    return replace(estimate, low=low, high=high)


def interval(value: float, stderr: float, problems: int, samples: int) -> tuple[float, float]:
    """Compute the 95 % interval of a mean p over m problems, within [0, 1].

    It is Wilson's interval with the effective number n of observations:

        n = p (1 - p) / stderr^2

    t is Student's quantile with m - 1 degrees of freedom. n is at most the number of samples,
    because no spread is smaller than the spread of independent samples. If p is 0 or 1, n is m,
    because the samples of a problem may all be equal. For large n the interval is p -+ t stderr.
    (Wilson 1927; effective sample size: Korn and Graubard 1998.)
    """
    spread = max(0.0, value * (1 - value))
    n = float(samples)
    if spread < 1e-12:
        n = float(problems)
    elif stderr:
        effective = spread / stderr**2
        n = min(n, effective)
    t = t_quantile(problems - 1)
    low, high = wilson_interval(value, n, t)
    return min(low, value), max(high, value)


def mean_difference(differences_P: ndarray) -> Estimate:
    """Estimate the mean of unbounded values of independent problems, such as paired differences.

    NaN values are left out. The interval is mean -+ t std (ddof 1) / sqrt(m), t being Student's
    97.5 % quantile with m - 1 degrees of freedom.
    """
    is_nan_P = np.isnan(differences_P)
    d_P = differences_P[~is_nan_P]
    m = len(d_P)
    value = float(d_P.mean()) if m else math.nan
    if m < 2:
        return Estimate(value, math.nan, math.nan, math.nan, m)
    stderr = standard_error(d_P)
    half = t_half_width(d_P)
    low = value - half
    high = value + half
    return Estimate(value, stderr, low, high, m)


def ratio(a: ndarray, b: ndarray) -> ndarray:
    """Compute a / b element by element, NaN if b is 0."""
    result = np.full(a.shape, math.nan)
    return np.divide(a, b, out=result, where=b > 0)
