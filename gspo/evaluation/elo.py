"""Ratings on the Elo scale, as CodeForces uses it.

A policy is rated on problems with known ratings. R is the solver's rating and d the problem's:

    P(solve | R, d) = 1 / (1 + 10^((d - R)/400))

A rating depends on more than the policy. The choice of problems, the number of attempts at each and
the order in which they count have moved published ratings by hundreds of points (arXiv:2602.05891).
Quote a rating with the number of problems, the range of their ratings, the attempts per problem and
an error.

Shape suffixes: P problems, D draws of the bootstrap.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from gspo.data.seeding import numpy_generator
from gspo.statistics import percentile_interval, resample_counts

LOGISTIC = math.log(10) / 400  # 400 points are a factor of 10 in the odds
# mean and standard deviation of the prior of `maximum_a_posteriori`
PRIOR_MEAN = 1500.0
PRIOR_STD = 700.0
DRAWS = 1000  # the number of resampled sets of problems in the bootstrap
BISECTIONS = 70  # they narrow an interval of up to 1e12 points to less than 1e-8


@dataclass(frozen=True)
class Rating:
    """A rating and its standard error, from the curvature of the log likelihood or posterior."""

    rating: float
    stderr: float


@dataclass(frozen=True)
class Resampled:
    """Standard error and 95 % interval of a rating over other problems of the same kind."""

    stderr: float
    low: float
    high: float


def chance(rating: float | ndarray, difficulty: float | ndarray) -> ndarray:
    """Compute P(solve | R, d) for a solver with rating R and a problem with difficulty d."""
    exponent = (np.asarray(difficulty) - rating) / 400
    odds_against = 10.0 ** np.clip(exponent, -300, 300)
    return 1 / (1 + odds_against)


def maximum_likelihood(difficulty_P: ndarray, solved_P: ndarray, attempts_P: ndarray) -> Rating:
    """Compute the maximum-likelihood rating.

    At this rating the expected number of solves equals the observed number:

        sum n_i P(solve | R, d_i) = sum k_i        k_i of n_i attempts at problem i solved it

    The equation is solved by bisection. The rating is +inf if every attempt solved its problem, and
    -inf if none did. The standard error is infinite then, as the solver lies outside the scale of
    these problems.
    """
    solved = int(solved_P.sum())
    attempts = int(attempts_P.sum())
    if solved == 0:
        return Rating(-math.inf, math.inf)
    if solved == attempts:
        return Rating(math.inf, math.inf)
    # below all problems by this margin, less than one solve is expected; above, one failure
    margin = 400 * math.log10(attempts + 1)

    def missing_solves(R: ndarray) -> ndarray:
        expected_P = attempts_P * chance(R, difficulty_P)
        return solved - expected_P.sum()

    low = np.min(difficulty_P) - margin
    high = np.max(difficulty_P) + margin
    root = float(_root(missing_solves, low, high))
    curvature = _information(root, difficulty_P, attempts_P)
    return Rating(root, curvature**-0.5)


def maximum_a_posteriori(difficulty_P: ndarray, solved_P: ndarray, attempts_P: ndarray) -> Rating:
    """Compute the maximum a posteriori rating under the prior R ~ N(PRIOR_MEAN, PRIOR_STD^2).

    It is finite even if all problems or none are solved. The standard error assumes that all
    attempts are independent. Attempts at the same problem are not: see `bootstrap`.
    """
    ones_1P = np.ones((1, len(difficulty_P)))
    roots_1 = _maximum_a_posteriori(ones_1P, difficulty_P, solved_P, attempts_P)
    root = float(roots_1[0])
    curvature = _information(root, difficulty_P, attempts_P) + PRIOR_STD**-2
    return Rating(root, curvature**-0.5)


def bootstrap(difficulty_P: ndarray, solved_P: ndarray, attempts_P: ndarray) -> Resampled:
    """Compute error and interval of the most probable rating over resampled sets of problems.

    Each of `DRAWS` sets has as many problems as the original, drawn with replacement. The draws are
    the same each time.
    """
    problems = len(difficulty_P)
    rng = numpy_generator("elo", problems, DRAWS)
    weights_DP = resample_counts(problems, DRAWS, rng)
    ratings_D = _maximum_a_posteriori(weights_DP, difficulty_P, solved_P, attempts_P)
    stderr = float(ratings_D.std(ddof=1))
    low, high = percentile_interval(ratings_D)
    return Resampled(stderr, low, high)


def _maximum_a_posteriori(
    weights_DP: ndarray, difficulty_P: ndarray, solved_P: ndarray, attempts_P: ndarray
) -> ndarray:
    """Find the roots of the slope of the log posterior. Shape [D].

    In draw D problem i counts weights_DP[D, i] times. The slope of the log likelihood is at most
    LOGISTIC x attempts in size, so the root lies within that many PRIOR_STD^2 of the mean.
    """
    reach_D = PRIOR_STD**2 * LOGISTIC * (weights_DP @ attempts_P)

    def slope(R_D: ndarray) -> ndarray:
        expected_DP = attempts_P * chance(R_D[:, None], difficulty_P)
        surplus_DP = solved_P - expected_DP
        likelihood_D = LOGISTIC * (weights_DP * surplus_DP).sum(1)
        prior_D = (PRIOR_MEAN - R_D) / PRIOR_STD**2
        return likelihood_D + prior_D

    low_D = PRIOR_MEAN - reach_D
    high_D = PRIOR_MEAN + reach_D
    return _root(slope, low_D, high_D)


def _root(decreasing: Callable[[ndarray], ndarray], low: ndarray, high: ndarray) -> ndarray:
    """Find the root of a decreasing function by bisection, or the nearer end if it has none."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_positive = decreasing(middle) > 0
        low = np.where(is_positive, middle, low)
        high = np.where(is_positive, high, middle)
    return (low + high) / 2


def _information(rating: float, difficulty_P: ndarray, attempts_P: ndarray) -> float:
    """Compute the Fisher information (ln 10/400)^2 sum n_i P_i (1 - P_i).

    It is minus the curvature of the log likelihood."""
    p_P = chance(rating, difficulty_P)
    variance_P = attempts_P * p_P * (1 - p_P)
    return float(LOGISTIC**2 * variance_P.sum())
