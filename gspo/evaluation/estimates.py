"""What k samples of each of m problems say: avg@k, pass@k, maj@k, with standard errors and 95 % intervals.

Each of them is a mean over problems of a number in [0, 1]. Standard errors and intervals answer: where would it lie on
other problems of this kind, with other samples? `error_parts` says how much of that is sampling noise, which alone
counts where the set itself is the subject.

Shape suffixes: P problems, K samples of a problem. Rewards are in [0, 1], 1 is solved; NaN is a sample that could not
be graded, by no fault of its own. It is in no numerator and no denominator; nor is a problem with too few graded ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from gspo.core.seeding import seed_for

DRAWS = 500  # subsets that maj@k with k < n averages over: adds at most 0.022 / sqrt(m) to its standard error


@dataclass(frozen=True)
class Estimate:
    """A mean over problems. NaN where too few problems are left to say."""

    value: float
    stderr: float  # over problems: the spread between them and the sampling noise within them
    low: float  # 95 % interval
    high: float
    problems: int  # that it is a mean of


def powers(n: int) -> list[int]:
    """1, 2, 4, ... and n: the k's of pass@k and maj@k that n samples are reported for."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def average(rewards_PK: np.ndarray) -> Estimate:
    """avg@k: the mean over problems of the mean reward of their graded samples."""
    graded_PK = ~np.isnan(rewards_PK)
    return over_problems(problem_means(rewards_PK), int(graded_PK.sum()))


def problem_means(rewards_PK: np.ndarray) -> np.ndarray:
    """[P] mean reward of each problem's graded samples; NaN for a problem without any."""
    graded_PK = ~np.isnan(rewards_PK)
    totals_P = np.where(graded_PK, rewards_PK, 0.0).sum(1)
    return _divide(totals_P, graded_PK.sum(1))


def error_parts(rewards_PK: np.ndarray) -> tuple[float, float]:
    """The standard error of avg@k in two parts, (sampling, between problems); their squares add up to its square.

        sampling^2 = sum_i v_i / k_i / m^2,    v_i = sum_j (r_ij - mean_i)^2 / (k_i - 1)

    For rewards 0 and 1, v_i / k_i = p_i (1 - p_i) / (k_i - 1): the unbiased form of sum p (1 - p) / k / m^2. What is
    left of the whole is due to the choice of problems; 0 where noise makes that negative. NaN with a single sample.
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
    """The chance that at least one of k samples is right, without bias from n >= k samples, c of them right:

        pass@k = mean over problems of 1 - C(n - c, k) / C(n, k)          (Chen et al. 2021, arXiv:2107.03374)

    Problems with fewer than k graded samples are left out.
    """
    counts_P, solved_P = (~np.isnan(rewards_PK)).sum(1), (rewards_PK == 1).sum(1)
    pairs = zip(counts_P.tolist(), solved_P.tolist(), strict=True)
    values = [1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan for n, c in pairs]
    return over_problems(np.array(values), int(counts_P[counts_P >= k].sum()))


def majority_at_k(rewards_PK: np.ndarray, answers_PK: np.ndarray, k: int) -> Estimate:
    """The chance that the most frequent answer of k samples is right.

    `answers_PK` holds normal forms; "" has no vote, and where nobody votes the problem is wrong. Ties go to the answer
    that occurs first, and an answer is as right as the sample that it occurs in first. With k < n graded samples: the
    mean over `DRAWS` subsets in random order, drawn by position, hence without bias and the same every time; with k = n
    the samples in the order they were drawn. Problems with fewer than k graded samples are left out.
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
        values_P[rows] = sum(_vote(codes_Pn[:, order], solved_Pn[:, order]) for order in orders) / len(orders)
    return over_problems(values_P, int(counts_P[counts_P >= k].sum()))


def _orders(n: int, k: int) -> np.ndarray:
    """Which samples vote, and in which order: rows of k different numbers below n."""
    if k == n:
        return np.arange(n)[None]
    rng = np.random.Generator(np.random.Philox(key=seed_for("maj@k", n, k)))
    return rng.permuted(np.tile(np.arange(n), (DRAWS, 1)), axis=1)[:, :k]


def _vote(codes_Pk: np.ndarray, solved_Pk: np.ndarray) -> np.ndarray:
    """[P] 1.0 where the majority is right. `argmax` takes the first of equals: the answer that occurs first."""
    votes_Pk = (codes_Pk[:, :, None] == codes_Pk[:, None, :]).sum(2) * (codes_Pk >= 0)
    first_P = votes_Pk.argmax(1)[:, None]
    voted_P = np.take_along_axis(votes_Pk, first_P, axis=1) > 0
    return (np.take_along_axis(solved_Pk, first_P, axis=1) & voted_P)[:, 0].astype(float)


def over_problems(values_P: np.ndarray, samples: int) -> Estimate:
    """Mean, standard error and interval of independent problems' values in [0, 1]; those that are NaN are left out.

    The standard error is std (ddof 1) / sqrt(m). It is what resampling problems with replacement converges to, times
    sqrt(m / (m - 1)): the bootstrap's error of a mean has this closed form, so nothing is drawn. `samples`: graded
    samples behind the values.
    """
    values_P = values_P[~np.isnan(values_P)]
    m = len(values_P)
    if m < 2:
        return Estimate(float(values_P.mean()) if m else math.nan, math.nan, math.nan, math.nan, m)
    value, stderr = float(values_P.mean()), float(values_P.std(ddof=1) / math.sqrt(m))
    return Estimate(value, stderr, *interval(value, stderr, m, samples), m)


def interval(value: float, stderr: float, problems: int, samples: int) -> tuple[float, float]:
    """95 % interval of a mean p over m problems, within [0, 1]: Wilson's, with the effective number of observations.

        n = p (1 - p) / stderr^2,    (p + t^2/2n -+ t sqrt(p (1 - p)/n + t^2/4n^2)) / (1 + t^2/n)

    t is Student's quantile with m - 1 degrees of freedom. n is at most the number of samples (no spread is smaller than
    that of independent samples), and m where p is 0 or 1: samples of one problem may all be alike. For large n this is
    p -+ t stderr. (Wilson 1927; effective sample size: Korn and Graubard 1998.)
    """
    spread = max(0.0, value * (1 - value))
    if spread < 1e-12:
        n = float(problems)
    else:
        n = min(float(samples), spread / stderr**2) if stderr else float(samples)
    t2 = student_quantile(0.975, problems - 1) ** 2
    centre, half = value + t2 / (2 * n), math.sqrt(t2 * (spread / n + t2 / (4 * n * n)))
    low, high = (centre - half) / (1 + t2 / n), (centre + half) / (1 + t2 / n)
    return max(0.0, min(low, value)), min(1.0, max(high, value))


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t distribution, right to 0.2 %: in closed form for 1 and 2 degrees of freedom, above by the
    expansion in 1/freedom of Abramowitz and Stegun 26.7.5."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        a = 2 * probability - 1
        return a * math.sqrt(2 / (1 - a * a))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**i for i, term in enumerate(terms))


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, NaN where b is 0."""
    return np.divide(a, b, out=np.full(len(a), math.nan), where=b > 0)
