"""Rules on series of numbers: has a run collapsed, and what could have been seen before?

The collapse rule was fixed before any study was looked at, and is not tuned. Every early-warning score is a causal
function of one metric's series, one number per step: higher is worse, and the score of a step depends on that step and
those before it alone. The monitor of a run compares the last one with a threshold; analysis/ scores them as predictors.

Steps without the metric (None, NaN) are left out of averages and repeat the score before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

DECAY = 0.9  # of the smoothing, s_t = 0.9 s_(t-1) + 0.1 r_t without the bias of its start
FALLEN, STEPS_FALLEN = 0.7, 20  # below this share of the running peak, for so many steps
RECOVERED, STEPS_TO_RECOVER = 0.9, 50  # and not above this share of it within so many further ones
BASELINE = 10  # steps at a run's start that its later ones are compared with
WINDOW, FEWEST = 20, 5  # numbers before, whose median a spike is compared with: so many, and at least so many


def smoothed(values: Sequence[float | None], decay: float = DECAY) -> np.ndarray:
    """Exponential moving average without the bias of its start:

        s_t = sum_u decay^(t-u) r_u / sum_u decay^(t-u),   u <= t

    NaN before the first number."""
    total, weight, out = 0.0, 0.0, []
    for value in _numbers(values):
        if not math.isnan(value):
            total, weight = decay * total + value, decay * weight + 1
        out.append(total / weight if weight else math.nan)
    return np.array(out)


def fallen(rewards: Sequence[float | None]) -> np.ndarray:
    """Whether the smoothed reward of a step is below 0.7 x its running peak, [steps]; never while the peak is <= 0."""
    level = smoothed(rewards)
    peak = np.fmax.accumulate(level) if len(level) else level
    return (peak > 0) & (level < FALLEN * peak)


def collapse(rewards: Sequence[float | None]) -> int | None:
    """The index of the step at which a run collapsed, None if it did not.

    The first step from which the smoothed reward stays below 0.7 x its running peak for 20 steps and is not above
    0.9 x the peak again within the following 50, or until the run's end if that is earlier."""
    level, below = smoothed(rewards), fallen(rewards)
    for start in range(len(below) - STEPS_FALLEN + 1):
        end = start + STEPS_FALLEN
        peak = np.nanmax(level[: start + 1]) if below[start] else math.nan
        if below[start:end].all() and not (level[end : end + STEPS_TO_RECOVER] > RECOVERED * peak).any():
            return start
    return None


@dataclass(frozen=True)
class Signal:
    """An early warning: a score of every step from one metric's series."""

    metric: str
    score: Callable[[Sequence[float | None]], np.ndarray]
    meaning: str  # of the score, in the words of a warning


def shortfall(values: Sequence[float | None]) -> np.ndarray:
    """1 - smoothed value: for shares that are 1 in a healthy run."""
    return 1 - smoothed(values)


def below_peak(values: Sequence[float | None]) -> np.ndarray:
    """1 - smoothed value / its running peak; 0 while the peak is not positive."""
    level = smoothed(values)
    peak = np.fmax.accumulate(level) if len(level) else level
    return np.where(peak > 0, 1 - level / np.where(peak > 0, peak, 1.0), 0.0)


def rise(values: Sequence[float | None]) -> np.ndarray:
    """Smoothed value minus the run's baseline: the median of its first 10 numbers."""
    return smoothed(values) - _baseline(values)


def growth(values: Sequence[float | None]) -> np.ndarray:
    """log(smoothed value / baseline), for positive quantities."""
    return _log(smoothed(values)) - _log(_baseline(values))


def decline(values: Sequence[float | None]) -> np.ndarray:
    """log(baseline / smoothed value)."""
    return -growth(values)


def spike(values: Sequence[float | None]) -> np.ndarray:
    """log10(value / median of the 20 numbers before it); 0 while there are fewer than 5."""
    numbers = _numbers(values)
    there = ~np.isnan(numbers)
    known = numbers[there]
    if len(known) <= FEWEST:
        return np.zeros(len(numbers))
    before = np.lib.stride_tricks.sliding_window_view(np.append(np.full(WINDOW, math.nan), known[:-1]), WINDOW)
    score = np.zeros(len(known))
    score[FEWEST:] = (_log(known[FEWEST:]) - _log(np.nanmedian(before[FEWEST:], axis=1))) / math.log(10)
    return np.append(0.0, score)[np.cumsum(there)]


def log_tail(values: Sequence[float | None]) -> np.ndarray:
    """Smoothed |log value|: how far the extreme ratio of a step is from 1."""
    return smoothed(np.abs(_log(_numbers(values))))


SIGNALS = {
    "reward_fall": Signal("reward/mean", below_peak, "share of its peak that the smoothed reward has lost"),
    "routing_drift": Signal("routing/consistency", shortfall, "share of the old policy's experts left within a step"),
    "mismatch": Signal("mismatch/k3", smoothed, "k3 of engine and trainer, nats per token"),
    "ess_token": Signal("ratio/ess_token", shortfall, "share of the effective sample size that token ratios cost"),
    "ess_sequence": Signal("ratio/ess_sequence", shortfall, "the same, of sequence ratios"),
    "ratio_high": Signal("ratio/token_max", log_tail, "log of the step's largest token ratio"),
    "ratio_low": Signal("ratio/token_min", log_tail, "log of the step's smallest token ratio, its sign changed"),
    "policy_drift": Signal("kl/old_k3", smoothed, "k3 of the policy and the old policy, nats per token"),
    "entropy_fall": Signal("policy/entropy", decline, "log of how many times smaller the entropy is than at the start"),
    "entropy_rise": Signal("policy/entropy", growth, "log of how many times larger the entropy is than at the start"),
    "grad_spike": Signal("optim/grad_norm_max", spike, "log10 of the gradient norm over that of the 20 steps before"),
    "grad_growth": Signal("optim/grad_norm", growth, "log of how many times larger the gradient norm is than at first"),
    "repetition": Signal("length/repetition", rise, "repeated 4-grams, more than at the start"),
    "truncation": Signal("length/truncated", rise, "responses that hit the limit, more than at the start"),
    "zero_variance": Signal("group/zero_variance", smoothed, "share of groups without signal"),
    "clip_share": Signal("clip/token_active", smoothed, "share of tokens whose gradient the clip removed"),
}


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else float(value) for value in values])


def _baseline(values: Sequence[float | None]) -> np.ndarray:
    """Median of the first 10 numbers, at every step of those that were there by then."""
    numbers, seen, out = _numbers(values), [], []
    for value in numbers:
        if len(seen) < BASELINE and not math.isnan(value):
            seen.append(value)
        out.append(float(np.median(seen)) if seen else math.nan)
    return np.array(out)


def _log(x: np.ndarray) -> np.ndarray:
    """log, of at least 1e-12: a norm or an entropy of exactly 0 is far from any baseline and not infinitely far."""
    return np.log(np.maximum(x, 1e-12))
