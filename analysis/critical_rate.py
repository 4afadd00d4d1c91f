"""The learning rate at which half of the runs collapse, and the ratio of two arms' such rates, with interval and p.

The share of collapsed runs is modelled as a logistic curve in the logarithm of the rate,

    P(collapse at rate r, arm a) = 1 / (1 + (c_a / r)^b),

with a critical rate c_a per arm and one slope b for all arms, so that the ratio of two critical rates says how much
further one arm can be pushed at any share. Slopes are kept finite where the curve would be a step (all runs below some
rate last and all above it collapse) by a weak prior on b, of standard deviation SLOPE.

The interval resamples seeds, each with all of its runs, because the runs of one seed share cold start and problems. The
exact p exchanges the two arms' runs within a seed, for every subset of the seeds: what could the ratio have been if the
arms were the same?
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from analysis.stats import REPS, Interval

SLOPE = 20.0  # collapsed runs go from 27 % to 73 % within 10 % of the rate: steeper slopes are hardly told apart
EXACT = 12  # seeds up to which every exchange is tried, else REPS random ones
STEPS = 60  # of Newton's method at most


@dataclass(frozen=True)
class Runs:
    """Every run as an entry: its arm's number, its seed, its learning rate, and whether it collapsed."""

    arm_N: np.ndarray
    seed_N: np.ndarray
    rate_N: np.ndarray
    collapsed_N: np.ndarray

    def of_seeds(self, seeds: np.ndarray) -> Runs:
        """Return the runs of these seeds, of a seed that is named twice twice."""
        at = np.concatenate([np.flatnonzero(self.seed_N == seed) for seed in seeds])
        return Runs(self.arm_N[at], self.seed_N[at], self.rate_N[at], self.collapsed_N[at])

    def exchanged(self, a: int, b: int, seeds: np.ndarray) -> Runs:
        """Return the runs with the arms a and b exchanged in these seeds."""
        here = np.isin(self.seed_N, seeds)
        arm_N = np.where(here & (self.arm_N == a), b, np.where(here & (self.arm_N == b), a, self.arm_N))
        return Runs(arm_N, self.seed_N, self.rate_N, self.collapsed_N)


def fit(runs: Runs, arms: int) -> tuple[float, np.ndarray]:
    """Return the slope b and the critical rates c_a [arms] of highest posterior probability, by Newton's method.

    With u = b log(r / m) - h_a, where m is the geometric mean of the rates, the log-likelihood is concave in (b, h) and
    c_a = m exp(h_a / b). The heights h have a prior too, of standard deviation SLOPE, which keeps those of arms finite
    of which all runs collapse or none: their rate then lies outside of the rates that were run, and says no more.
    """
    middle = np.log(runs.rate_N).mean()
    design_NP = np.zeros((len(runs.rate_N), 1 + arms))
    design_NP[:, 0] = np.log(runs.rate_N) - middle
    design_NP[np.arange(len(runs.rate_N)), 1 + runs.arm_N] = -1.0
    target_N, weights_P = runs.collapsed_N.astype(float), np.zeros(1 + arms)
    weights_P[0] = 1.0
    for _ in range(STEPS):
        p_N = 1 / (1 + np.exp(-np.clip(design_NP @ weights_P, -500, 500)))
        gradient_P = design_NP.T @ (target_N - p_N) - weights_P / SLOPE**2
        hessian_PP = (design_NP * (p_N * (1 - p_N))[:, None]).T @ design_NP + np.eye(1 + arms) / SLOPE**2
        step_P = np.linalg.solve(hessian_PP, gradient_P)
        step_P *= min(1.0, 5.0 / max(np.abs(step_P).max(), 1e-12))  # a longer one may overshoot where p is 0 or 1
        weights_P += step_P
        if np.abs(step_P).max() < 1e-8:
            break
    return float(weights_P[0]), np.exp(middle + weights_P[1:] / weights_P[0])


def probability(rates: np.ndarray, slope: float, critical: float) -> np.ndarray:
    """Return the fitted share of collapsed runs at these rates."""
    return 1 / (1 + (critical / np.asarray(rates)) ** slope)


def ratio(runs: Runs, arms: int, a: int, b: int) -> tuple[Interval, float]:
    """Return c_a / c_b with its 95 % interval over seeds, and its exact p."""
    seeds, rng = np.unique(runs.seed_N), np.random.default_rng(0)
    found = log_ratio(runs, arms, a, b)
    draws = [log_ratio(runs.of_seeds(rng.choice(seeds, len(seeds))), arms, a, b) for _ in range(REPS)]
    low, high = np.quantile(draws, (0.025, 0.975))
    if len(seeds) <= EXACT:
        subsets = [seeds[np.array(chosen, bool)] for chosen in product((0, 1), repeat=len(seeds))]
    else:
        subsets = [seeds[rng.random(len(seeds)) < 0.5] for _ in range(REPS)] + [seeds[:0]]
    others = np.array([log_ratio(runs.exchanged(a, b, subset), arms, a, b) for subset in subsets])
    p = float(np.mean(np.abs(others) >= abs(found) - 1e-6))  # Newton leaves 1e-8
    return Interval(float(np.exp(found)), float(np.exp(low)), float(np.exp(high)), len(seeds), logarithmic=True), p


def log_ratio(runs: Runs, arms: int, a: int, b: int) -> float:
    """Return log(c_a / c_b)."""
    _, critical = fit(runs, arms)
    return float(np.log(critical[a] / critical[b]))
