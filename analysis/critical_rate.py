"""The learning rate at which half of the runs collapse, and the ratio of two arms' such rates.

The share of collapsed runs is modelled as a logistic curve in the logarithm of the rate,

    P(collapse at rate r, arm a) = 1 / (1 + (c_a / r)^b),

with a critical rate c_a per arm and a slope b for all arms. So the ratio of two critical rates
says how much further an arm can be pushed at any share. The curve would be a step if all runs
below some rate last and all above it collapse. A weak prior on b, of standard deviation SLOPE,
keeps the slope finite then.

The interval resamples seeds, each with all of its runs, because the runs of a seed share cold
start and problems. The exact p exchanges the two arms' runs within a seed, for every subset of the
seeds: it asks what the ratio could have been if the arms were the same.

Shape suffixes: S seeds, A arms, R rates, P parameters, D draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from gspo.analysis.stats import REPS, Interval

# collapsed runs go from 27 % to 73 % within 10 % of the rate: steeper slopes are hardly told apart
SLOPE = 20.0
MAX_EXACT_SEEDS = 12  # up to here every exchange is tried, beyond REPS random exchanges
MAX_NEWTON_STEPS = 60
MAX_HALVINGS = 40  # of a Newton step that overshoots


@dataclass(frozen=True)
class Counts:
    """The numbers of runs, and of collapsed runs among them, by seed, arm and learning rate."""

    rates_R: np.ndarray
    runs_SAR: np.ndarray
    collapsed_SAR: np.ndarray


def fit(
    rates_R: np.ndarray, runs_AR: np.ndarray, collapsed_AR: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the slope b and the critical rates c_a [A] of highest posterior probability.

    They are found by Newton's method. With u = b log(r / m) - h_a, where m is the geometric mean of
    the rates, the log-likelihood is concave in (b, h) and c_a = m exp(h_a / b). The heights h have
    a prior too, of standard deviation SLOPE. It keeps h finite for arms of which all runs collapse,
    or none. Their critical rate then lies outside of the rates that were run, and says no more.

    Counts with further dimensions before A are fitted separately. If runs collapse less at higher
    rates, b is not positive and there is no critical rate: NaN.
    """
    arms = runs_AR.shape[-2]
    x_R = np.log(rates_R) - np.log(rates_R).mean()
    b = np.ones(runs_AR.shape[:-2])
    h_A = np.zeros(runs_AR.shape[:-1])
    prior_PP = np.eye(1 + arms) / SLOPE**2
    heights = range(1, 1 + arms)  # the parameters after b
    for _ in range(MAX_NEWTON_STEPS):
        u_AR = b[..., None, None] * x_R - h_A[..., None]
        p_AR = 1 / (1 + np.exp(-np.clip(u_AR, -500, 500)))
        residual_AR = collapsed_AR - runs_AR * p_AR
        variance_AR = runs_AR * p_AR * (1 - p_AR)
        slope_gradient = (residual_AR * x_R).sum((-1, -2))
        gradient_P = np.concatenate([slope_gradient[..., None], -residual_AR.sum(-1)], -1)
        gradient_P -= np.concatenate([b[..., None], h_A], -1) / SLOPE**2
        hessian_PP = np.zeros((*b.shape, 1 + arms, 1 + arms)) + prior_PP
        hessian_PP[..., 0, 0] += (variance_AR * x_R**2).sum((-1, -2))
        hessian_PP[..., 0, 1:] = -(variance_AR * x_R).sum(-1)
        hessian_PP[..., 1:, 0] = -(variance_AR * x_R).sum(-1)
        hessian_PP[..., heights, heights] += variance_AR.sum(-1)
        step_P = np.linalg.solve(hessian_PP, gradient_P[..., None])[..., 0]
        before = log_posterior(x_R, runs_AR, collapsed_AR, b, h_A)
        for _ in range(MAX_HALVINGS):
            new_b = b + step_P[..., 0]
            new_h_A = h_A + step_P[..., 1:]
            worse = log_posterior(x_R, runs_AR, collapsed_AR, new_b, new_h_A) < before - 1e-9
            if not worse.any():
                break
            step_P = np.where(worse[..., None], step_P / 2, step_P)
        b = b + step_P[..., 0]
        h_A = h_A + step_P[..., 1:]
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
    runs_SAR = counts.runs_SAR
    collapsed_SAR = counts.collapsed_SAR
    seeds = len(runs_SAR)
    rng = np.random.default_rng(0)
    drawn_DS = rng.integers(seeds, size=(REPS, seeds))
    draws_D = log_ratio(counts.rates_R, runs_SAR[drawn_DS], collapsed_SAR[drawn_DS], a, b)
    # A draw without a critical rate could lie anywhere: it counts below and above, and so widens
    # the interval.
    low = np.quantile(np.where(np.isnan(draws_D), -np.inf, draws_D), 0.025, method="nearest")
    high = np.quantile(np.where(np.isnan(draws_D), np.inf, draws_D), 0.975, method="nearest")
    # nothing is exchanged in the first draw
    if seeds <= MAX_EXACT_SEEDS:
        exchanged_DS = np.array(list(product((False, True), repeat=seeds)))
    else:
        random_DS = rng.random((REPS, seeds)) < 0.5
        exchanged_DS = np.vstack([np.zeros((1, seeds), bool), random_DS])
    exchanged_DS11 = exchanged_DS[..., None, None]
    order_A = np.arange(runs_SAR.shape[1])
    order_A[[a, b]] = b, a
    log_ratios_D = log_ratio(
        counts.rates_R,
        np.where(exchanged_DS11, runs_SAR[:, order_A], runs_SAR),
        np.where(exchanged_DS11, collapsed_SAR[:, order_A], collapsed_SAR),
        a,
        b,
    )
    observed = log_ratios_D[0]
    smaller_D = np.abs(log_ratios_D) < abs(observed) - 1e-6  # Newton's method leaves 1e-8
    mean, low, high = (float(np.exp(x)) for x in (observed, low, high))
    return Interval(mean, low, high, seeds, logarithmic=True), float(np.mean(~smaller_D))


def log_ratio(
    rates_R: np.ndarray, runs_SAR: np.ndarray, collapsed_SAR: np.ndarray, a: int, b: int
) -> np.ndarray:
    """Return log(c_a / c_b) of the seeds' runs together."""
    _, critical_A = fit(rates_R, runs_SAR.sum(-3), collapsed_SAR.sum(-3))
    return np.log(critical_A[..., a] / critical_A[..., b])
