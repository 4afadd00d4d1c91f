"""Estimates of avg@k, pass@k and maj@k from k samples of m problems, with 95 % intervals.

Each estimate is a mean over problems of a number in [0, 1]. Its standard error and interval
describe its spread over other problems of the same kind and other samples. `error_parts` computes
the share of sampling noise in the error. Only this share matters if the question is about exactly
this set of problems.

Shape suffixes: P problems, K samples of a problem. Rewards are in [0, 1], and 1 means solved. NaN
stands for a sample that could not be graded through no fault of its own. Such samples are in no
numerator and in no denominator, and problems with too few graded samples are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from gspo.data.seeding import seed_for
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


def average(rewards_PK: np.ndarray) -> Estimate:
    """Estimate avg@k, the mean over problems of the mean reward of their graded samples."""
    graded_PK = ~np.isnan(rewards_PK)
    return over_problems(problem_means(rewards_PK), int(graded_PK.sum()))


def problem_means(rewards_PK: np.ndarray) -> np.ndarray:
    """Compute the mean reward of each problem's graded samples, NaN without any. Shape [P]."""
    graded_PK = ~np.isnan(rewards_PK)
    totals_P = np.where(graded_PK, rewards_PK, 0.0).sum(1)
    return ratio(totals_P, graded_PK.sum(1))


def error_parts(rewards_PK: np.ndarray) -> tuple[float, float]:
    """Split the standard error of avg@k into (sampling, between problems).

    The squares of the parts add up to the square of the error.

        sampling^2 = sum_i v_i / k_i / m^2,    v_i = sum_j (r_ij - mean_i)^2 / (k_i - 1)

    For rewards 0 and 1, v_i / k_i = p_i (1 - p_i) / (k_i - 1), the unbiased form of sum p (1 - p) /
    k / m^2. The rest of the error is due to the choice of problems; it is 0 if noise would make it
    negative. Both are NaN if a problem has a single sample.
    """
    deviations_PK = rewards_PK - problem_means(rewards_PK)[:, None]
    squares_P = np.nansum(deviations_PK**2, axis=1)
    counts_P = (~np.isnan(rewards_PK)).sum(1)
    squares_P = squares_P[counts_P > 0]
    counts_P = counts_P[counts_P > 0]
    m = len(counts_P)
    if m < 2 or (counts_P < 2).any():
        return math.nan, math.nan
    squared_errors_P = squares_P / (counts_P - 1) / counts_P
    sampling = math.sqrt(float(squared_errors_P.sum())) / m
    stderr = average(rewards_PK).stderr
    between = math.sqrt(max(0.0, stderr**2 - sampling**2))
    return sampling, between


def pass_at_k(rewards_PK: np.ndarray, k: int) -> Estimate:
    """Estimate the chance that at least one of k samples is right, without bias.

    With n >= k samples of a problem, c of them right (Chen et al. 2021, arXiv:2107.03374):

        pass@k = mean over problems of 1 - C(n - c, k) / C(n, k)

    Problems with fewer than k graded samples are left out.
    """
    counts_P = (~np.isnan(rewards_PK)).sum(1)
    solved_P = (rewards_PK == 1).sum(1)
    values = []
    for n, c in zip(counts_P.tolist(), solved_P.tolist(), strict=True):
        value = math.nan
        if n >= k:
            value = 1 - math.comb(n - c, k) / math.comb(n, k)
        values.append(value)
    samples = int(counts_P[counts_P >= k].sum())
    return over_problems(np.array(values), samples)


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
    used_counts = counts_P[counts_P >= k]
    for n in np.unique(used_counts).tolist():
        rows = np.flatnonzero(counts_P == n)
        columns = graded_first_PK[rows, :n]
        codes_Pn = np.take_along_axis(codes_PK[rows], columns, axis=1)
        solved_Pn = np.take_along_axis(rewards_PK[rows] == 1, columns, axis=1)
        orders = _orders(n, k)
        votes = [_vote(codes_Pn[:, order], solved_Pn[:, order]) for order in orders]
        values_P[rows] = sum(votes) / len(orders)
    return over_problems(values_P, int(used_counts.sum()))


def _orders(n: int, k: int) -> np.ndarray:
    """Choose the samples that vote, in order: each row has k different numbers below n."""
    if k == n:
        return np.arange(n)[None]
    rng = np.random.Generator(np.random.Philox(key=seed_for("maj@k", n, k)))
    numbers = np.tile(np.arange(n), (DRAWS, 1))
    return rng.permuted(numbers, axis=1)[:, :k]


def _vote(codes_Pk: np.ndarray, solved_Pk: np.ndarray) -> np.ndarray:
    """Return 1.0 for each problem whose majority is right, else 0.0. Shape [P]."""
    same_Pkk = codes_Pk[:, :, None] == codes_Pk[:, None, :]
    votes_Pk = np.where(codes_Pk >= 0, same_Pkk.sum(2), 0)
    # `argmax` returns the first of equally frequent answers
    winner_P1 = votes_Pk.argmax(1)[:, None]
    has_votes_P1 = np.take_along_axis(votes_Pk, winner_P1, axis=1) > 0
    is_right_P1 = np.take_along_axis(solved_Pk, winner_P1, axis=1)
    return (is_right_P1 & has_votes_P1)[:, 0].astype(float)


def over_problems(values_P: np.ndarray, samples: int) -> Estimate:
    """Estimate a mean from the values of independent problems. NaN values are left out.

    If all values lie in [0, 1] the interval is `interval`. Rewards of an environment may lie
    outside. Then the interval is mean -+ t stderr, t being Student's 97.5 % quantile with m - 1
    degrees of freedom.

    The standard error is std (ddof 1) / sqrt(m). The bootstrap's error of a mean has this closed
    form too, except for a factor sqrt((m - 1) / m), so no problems are resampled. `samples` is the
    number of graded samples behind the values.
    """
    values_P = values_P[~np.isnan(values_P)]
    estimate = mean_difference(values_P)
    m = len(values_P)
    if m < 2 or values_P.min() < 0 or values_P.max() > 1:
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
        n = min(n, spread / stderr**2)
    low, high = wilson_interval(value, n, t_quantile(problems - 1))
    return min(low, value), max(high, value)


def mean_difference(differences_P: np.ndarray) -> Estimate:
    """Estimate the mean of unbounded values of independent problems, such as paired differences.

    NaN values are left out. The interval is mean -+ t std (ddof 1) / sqrt(m), t being Student's
    97.5 % quantile with m - 1 degrees of freedom.
    """
    d_P = differences_P[~np.isnan(differences_P)]
    m = len(d_P)
    value = float(d_P.mean()) if m else math.nan
    if m < 2:
        return Estimate(value, math.nan, math.nan, math.nan, m)
    half = t_half_width(d_P)
    return Estimate(value, standard_error(d_P), value - half, value + half, m)


def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute a / b element by element, NaN if b is 0."""
    a = np.asarray(a, float)
    b = np.asarray(b, float)
    result = np.full(a.shape, math.nan)
    return np.divide(a, b, out=result, where=b > 0)


def bootstrap_counts(purpose: str, problems: int, draws: int) -> np.ndarray:
    """Return how often each problem occurs in each resampled set. Shape [draws, problems].

    A set has as many problems, drawn with replacement. The draws are the same each time."""
    rng = np.random.Generator(np.random.Philox(key=seed_for(purpose, problems, draws)))
    equal_chances = np.full(problems, 1 / problems)
    return rng.multinomial(problems, equal_chances, size=draws)
