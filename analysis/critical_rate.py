"""The learning rate at which half of the runs collapse, and the ratio of two arms' such rates, with
interval and p.

The share of collapsed runs is modelled as a logistic curve in the logarithm of the rate,

    P(collapse at rate r, arm a) = 1 / (1 + (c_a / r)^b),

with a critical rate c_a per arm and one slope b for all arms, so that the ratio of two critical
rates says how much further one arm can be pushed at any share. Slopes are kept finite where the
curve would be a step (all runs below some rate last and all above it collapse) by a weak prior on
b, of standard deviation SLOPE.

The interval resamples seeds, each with all of its runs, because the runs of one seed share cold
start and problems. The exact p exchanges the two arms' runs within a seed, for every subset of the
seeds: what could the ratio have been if the arms were the same?
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from gspo.analysis.stats import REPS, Interval

# collapsed runs go from 27 % to 73 % within 10 % of the rate: steeper slopes are hardly told apart
SLOPE = 20.0
EXACT = 12  # seeds up to which every exchange is tried, else REPS random ones
STEPS, HALVINGS = 60, 40  # of Newton's method at most, and of a step that overshoots


@dataclass(frozen=True)
class Counts:
    """How many runs there are, and how many of them collapsed, by seed S, arm A and learning rate
    R.
    """

    rates_R: np.ndarray
    runs_SAR: np.ndarray
    collapsed_SAR: np.ndarray


def fit(
    rates_R: np.ndarray, runs_AR: np.ndarray, collapsed_AR: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the slope b and the critical rates c_a [A] of highest posterior probability, by
    Newton's method.

    With u = b log(r / m) - h_a, where m is the geometric mean of the rates, the log-likelihood is
    concave in (b, h) and c_a = m exp(h_a / b). The heights h have a prior too, of standard
    deviation SLOPE, which keeps those of arms finite of which all runs collapse or none: their rate
    then lies outside of the rates that were run, and says no more. Counts with further dimensions
    before A are fitted one by one. Where runs collapse less at higher rates, b is not positive, and
    there is no critical rate: NaN.
    """
    arms, x_R = runs_AR.shape[-2], np.log(rates_R) - np.log(rates_R).mean()
    b, h_A = np.ones(runs_AR.shape[:-2]), np.zeros(runs_AR.shape[:-1])
    prior_PP = np.eye(1 + arms) / SLOPE**2
    for _ in range(STEPS):
        p_AR = 1 / (1 + np.exp(-np.clip(b[..., None, None] * x_R - h_A[..., None], -500, 500)))
        rest_AR, spread_AR = collapsed_AR - runs_AR * p_AR, runs_AR * p_AR * (1 - p_AR)
        gradient_P = np.concatenate(
            [(rest_AR * x_R).sum((-1, -2))[..., None], -rest_AR.sum(-1)], -1
        )
        gradient_P -= np.concatenate([b[..., None], h_A], -1) / SLOPE**2
        hessian_PP = np.zeros((*b.shape, 1 + arms, 1 + arms)) + prior_PP
        hessian_PP[..., 0, 0] += (spread_AR * x_R**2).sum((-1, -2))
        hessian_PP[..., 0, 1:] = hessian_PP[..., 1:, 0] = -(spread_AR * x_R).sum(-1)
        hessian_PP[..., range(1, 1 + arms), range(1, 1 + arms)] += spread_AR.sum(-1)
        step_P = np.linalg.solve(hessian_PP, gradient_P[..., None])[..., 0]
        before = log_posterior(x_R, runs_AR, collapsed_AR, b, h_A)
        for _ in range(HALVINGS):
            after = log_posterior(
                x_R, runs_AR, collapsed_AR, b + step_P[..., 0], h_A + step_P[..., 1:]
            )
            if not (worse := after < before - 1e-9).any():
                break
            step_P = np.where(worse[..., None], step_P / 2, step_P)
        b, h_A = b + step_P[..., 0], h_A + step_P[..., 1:]
        if np.abs(step_P).max() < 1e-8:
            break
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        critical_A = np.exp(np.log(rates_R).mean() + h_A / b[..., None])
    return b, np.where(b[..., None] > 0, critical_A, np.nan)


def log_posterior(
    x_R: np.ndarray, runs_AR: np.ndarray, collapsed_AR: np.ndarray, b: np.ndarray, h_A: np.ndarray
) -> np.ndarray:
    """Return the logarithm of the posterior density of (b, h), up to a constant."""
    u_AR = b[..., None, None] * x_R - h_A[..., None]
    likelihood = (collapsed_AR * u_AR - runs_AR * np.logaddexp(0, u_AR)).sum((-1, -2))
    return likelihood - (b**2 + (h_A**2).sum(-1)) / (2 * SLOPE**2)


def probability(rates: np.ndarray, slope: float, critical: float) -> np.ndarray:
    """Return the fitted share of collapsed runs at these rates."""
    return 1 / (1 + (critical / np.asarray(rates)) ** slope)


def ratio(counts: Counts, a: int, b: int) -> tuple[Interval, float]:
    """Return c_a / c_b with its 95 % interval over seeds, and its exact p."""
    seeds, rng = len(counts.runs_SAR), np.random.default_rng(0)
    drawn_DS = rng.integers(seeds, size=(REPS, seeds))
    draws_D = log_ratio(
        counts.rates_R, counts.runs_SAR[drawn_DS], counts.collapsed_SAR[drawn_DS], a, b
    )
    # A draw without a critical rate could lie anywhere: it counts below and above, and so widens
    # the interval.
    low = np.quantile(np.where(np.isnan(draws_D), -np.inf, draws_D), 0.025, method="nearest")
    high = np.quantile(np.where(np.isnan(draws_D), np.inf, draws_D), 0.975, method="nearest")
    if seeds <= EXACT:
        # nothing is exchanged in the first
        exchanged_DS = np.array(list(product((False, True), repeat=seeds)))
    else:
        exchanged_DS = np.vstack([np.zeros((1, seeds), bool), rng.random((REPS, seeds)) < 0.5])
    order_A = np.arange(counts.runs_SAR.shape[1])
    order_A[[a, b]] = b, a
    both = [
        np.where(exchanged_DS[..., None, None], x_SAR[:, order_A], x_SAR)
        for x_SAR in (counts.runs_SAR, counts.collapsed_SAR)
    ]
    others_D = log_ratio(counts.rates_R, *both, a, b)
    found = others_D[0]
    p = float(np.mean(~(np.abs(others_D) < abs(found) - 1e-6)))  # Newton's method leaves 1e-8
    return Interval(
        float(np.exp(found)), float(np.exp(low)), float(np.exp(high)), seeds, logarithmic=True
    ), p


def log_ratio(
    rates_R: np.ndarray, runs_SAR: np.ndarray, collapsed_SAR: np.ndarray, a: int, b: int
) -> np.ndarray:
    """Return log(c_a / c_b) of the seeds' runs together."""
    _, critical_A = fit(rates_R, runs_SAR.sum(-3), collapsed_SAR.sum(-3))
    return np.log(critical_A[..., a] / critical_A[..., b])
