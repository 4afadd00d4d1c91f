"""Ratings on the Elo scale, as CodeForces uses it: of a policy on problems with known ratings.

    P(solve | R, d) = 1 / (1 + 10^((d - R)/400))        R rating of the solver, d rating of the problem

A rating depends on more than the policy: which problems, how many attempts at each, and in which order they count moved
published ones by hundreds of points (arXiv:2602.05891). Quote it with the number of problems, the window of their
ratings, the attempts per problem and an error.

Shape suffixes: P problems, D draws of the bootstrap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gspo.core.seeding import seed_for

LOGISTIC = math.log(10) / 400  # 400 points are a factor of 10 in the odds
MEAN, SPREAD = 1500.0, 700.0  # the prior of `most_probable`
DRAWS = 1000
HALVINGS = 70  # of an interval of at most 1e12 points, to below 1e-8


@dataclass(frozen=True)
class Rating:
    """A rating and its standard error from the curvature of the log likelihood (or posterior) at it."""

    rating: float
    stderr: float


@dataclass(frozen=True)
class Resampled:
    """What other problems of this kind would have given: standard error and 95 % interval of the rating."""

    stderr: float
    low: float
    high: float


def chance(rating: float | np.ndarray, difficulty: float | np.ndarray) -> np.ndarray:
    """P(solve | R, d)."""
    return 1 / (1 + 10.0 ** np.clip((np.asarray(difficulty) - rating) / 400, -300, 300))


def most_likely(difficulty_P: np.ndarray, solved_P: np.ndarray, attempts_P: np.ndarray) -> Rating:
    """Maximum likelihood: the rating at which as many solves are expected as there were,

        sum n_i P(solve | R, d_i) = sum k_i        k_i of n_i attempts at problem i solved it

    by bisection. With every attempt solved it is +inf, with none -inf, and the standard error is infinite too: the
    likelihood only says that the solver is off the scale of these problems.
    """
    solved, attempts = int(solved_P.sum()), int(attempts_P.sum())
    if solved in (0, attempts):
        return Rating(math.inf if solved else -math.inf, math.inf)
    margin = 400 * math.log10(attempts + 1)  # there, less than one solve (or failure) is expected
    start = (np.min(difficulty_P) - margin, np.max(difficulty_P) + margin)
    root = float(_root(lambda R: solved - (attempts_P * chance(R, difficulty_P)).sum(), *start))
    return Rating(root, _information(root, difficulty_P, attempts_P) ** -0.5)


def most_probable(
    difficulty_P: np.ndarray,
    solved_P: np.ndarray,
    attempts_P: np.ndarray,
    mean: float = MEAN,
    spread: float = SPREAD,
) -> Rating:
    """Maximum a posteriori under R ~ N(mean, spread^2): finite where everything or nothing is solved.

    The standard error takes all attempts as independent. Attempts at one problem are not: see `bootstrap`.
    """
    ones_1P = np.ones((1, len(difficulty_P)))
    root = float(_most_probable(ones_1P, difficulty_P, solved_P, attempts_P, mean, spread)[0])
    return Rating(root, (_information(root, difficulty_P, attempts_P) + spread**-2) ** -0.5)


def bootstrap(
    difficulty_P: np.ndarray,
    solved_P: np.ndarray,
    attempts_P: np.ndarray,
    mean: float = MEAN,
    spread: float = SPREAD,
    draws: int = DRAWS,
) -> Resampled:
    """Standard deviation and 2.5 and 97.5 percentiles of the most probable rating over sets of as many problems, drawn
    with replacement by position: the same every time."""
    problems = len(difficulty_P)
    rng = np.random.Generator(np.random.Philox(key=seed_for("elo", problems, draws)))
    weights_DP = rng.multinomial(problems, np.full(problems, 1 / problems), size=draws)
    ratings_D = _most_probable(weights_DP, difficulty_P, solved_P, attempts_P, mean, spread)
    low, high = np.percentile(ratings_D, [2.5, 97.5])
    return Resampled(float(ratings_D.std(ddof=1)), float(low), float(high))


def _most_probable(
    weights_DP: np.ndarray,
    difficulty_P: np.ndarray,
    solved_P: np.ndarray,
    attempts_P: np.ndarray,
    mean: float,
    spread: float,
) -> np.ndarray:
    """[D] the roots of the slope of the log posterior, problem i counted weights_DP[:, i] times.

    The likelihood's slope is at most LOGISTIC x attempts in size, so the root is within that many spread^2 of the mean.
    """
    reach_D = spread**2 * LOGISTIC * (weights_DP @ attempts_P)

    def slope(R_D: np.ndarray) -> np.ndarray:
        expected_DP = attempts_P * chance(R_D[:, None], difficulty_P)
        return LOGISTIC * (weights_DP * (solved_P - expected_DP)).sum(1) + (mean - R_D) / spread**2

    return _root(slope, mean - reach_D, mean + reach_D)


def _root(falling, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Where a falling function is 0, between `low` and `high`; the nearer end if it is 0 nowhere between."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = falling(middle) > 0
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return (low + high) / 2


def _information(rating: float, difficulty_P: np.ndarray, attempts_P: np.ndarray) -> float:
    """Fisher information: minus the curvature of the log likelihood, (ln 10/400)^2 sum n_i P_i (1 - P_i)."""
    p_P = chance(rating, difficulty_P)
    return float(LOGISTIC**2 * (attempts_P * p_P * (1 - p_P)).sum())
