"""Rules on series of numbers: has a run collapsed, and what could have been seen before?

The collapse rule was fixed before any study was looked at, and is not tuned. An early-warning score is fed one number
of a metric per step and gives one back, higher is worse: it depends on that step and those before it alone. The monitor
of a run compares it with a threshold; `Signal.score` gives the scores of a whole series.

Steps without the metric (None, NaN, inf) repeat the score before them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

DECAY = 0.9  # of the smoothing
START = 10  # numbers before which the smoothed reward has no peak yet, and from which baselines are taken
FALLEN, STEPS_FALLEN = 0.7, 20  # below this share of the running peak, for so many steps
RECOVERED, STEPS_TO_RECOVER = 0.9, 50  # and not above this share of it within so many further ones
WINDOW, FEWEST = 20, 5  # numbers before, whose median a spike is compared with: so many, and at least so many


@dataclass
class Smoothed:
    """Exponential moving average without the bias of its start:

    s_t = sum_u 0.9^(t-u) r_u / sum_u 0.9^(t-u),   u <= t"""

    total: float = 0.0
    weight: float = 0.0

    def push(self, value: float) -> float:
        self.total, self.weight = DECAY * self.total + value, DECAY * self.weight + 1
        return self.total / self.weight


@dataclass
class Level:
    """The smoothed reward and its running peak, which begins anew with the tenth number: no lucky first batch.

    `largest` does not begin anew: a run that fell in its first steps is not healthy because its peak was forgotten."""

    smooth: Smoothed = field(default_factory=Smoothed)
    count: int = 0
    now: float = math.nan
    peak: float = -math.inf
    largest: float = -math.inf

    def push(self, value: float) -> float:
        self.now, self.count = self.smooth.push(value), self.count + 1
        if self.count == START:
            self.peak = -math.inf
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, self.now)
        return self.now

    def fallen(self) -> bool:
        """Below 0.7 x the peak; never while that is not positive, nor before the tenth number."""
        return self.count >= START and self.peak > 0 and self.now < FALLEN * self.peak

    def healthy(self) -> bool:
        """Above 0.9 x the largest level so far, the first numbers included."""
        return self.now > RECOVERED * self.largest


def levels(rewards: Sequence[float | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every step the smoothed reward, its running peak, and whether it has fallen."""
    level, rows = Level(), []
    for value in rewards:
        if known(value):
            level.push(value)
        rows.append((level.now, level.peak, level.fallen()))
    now, peak, fallen = zip(*rows, strict=True) if rows else ((), (), ())
    return np.array(now), np.array(peak), np.array(fallen, dtype=bool)


def collapse(rewards: Sequence[float | None]) -> int | None:
    """The index of the step at which a run collapsed, None if it did not.

    The first step from which the smoothed reward stays below 0.7 x its running peak for 20 steps and is not above
    0.9 x the peak again within the following 50, or until the run's end if that is earlier."""
    level, peak, fallen = levels(rewards)
    for start in range(len(fallen) - STEPS_FALLEN + 1):
        end = start + STEPS_FALLEN
        back = level[end : end + STEPS_TO_RECOVER] > RECOVERED * peak[start]
        if fallen[start:end].all() and not back.any():
            return start
    return None


class Score(Protocol):
    def push(self, value: float) -> float: ...


@dataclass
class Shortfall(Smoothed):
    """1 - smoothed value: for shares that are 1 in a healthy run."""

    def push(self, value: float) -> float:
        return 1 - super().push(value)


@dataclass
class BelowPeak:
    """1 - smoothed value / its running peak; 0 while there is no positive peak."""

    level: Level = field(default_factory=Level)

    def push(self, value: float) -> float:
        now = self.level.push(value)
        return 1 - now / self.level.peak if self.level.peak > 0 and self.level.count >= START else 0.0


@dataclass
class Rise(Smoothed):
    """Smoothed value minus the run's baseline: the median of its first 10 numbers."""

    first: list[float] = field(default_factory=list)

    def push(self, value: float) -> float:
        return super().push(value) - self.baseline(value)

    def baseline(self, value: float) -> float:
        if len(self.first) < START:
            self.first.append(value)
        return float(np.median(self.first))


@dataclass
class Growth(Rise):
    """log(smoothed value / baseline), for positive quantities."""

    def push(self, value: float) -> float:
        return _log(Smoothed.push(self, value)) - _log(self.baseline(value))


@dataclass
class Decline(Growth):
    """log(baseline / smoothed value)."""

    def push(self, value: float) -> float:
        return -super().push(value)


@dataclass
class Spike:
    """log10(value / median of the 20 positive numbers before it); 0 while there are fewer than 5."""

    before: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def push(self, value: float) -> float:
        usual = float(np.median(self.before)) if len(self.before) >= FEWEST else value
        if value > 0:  # steps without signal have no gradient, and say nothing of its usual size
            self.before.append(value)
        return (_log(value) - _log(usual)) / math.log(10)


@dataclass
class LogTail(Smoothed):
    """Smoothed |log value|: how far the extreme ratio of a step is from 1."""

    def push(self, value: float) -> float:
        return super().push(abs(_log(value)))


@dataclass(frozen=True)
class Signal:
    """An early warning: a score of every step from one metric's series."""

    metric: str
    kind: type[Score]
    meaning: str  # of the score, in the words of a warning

    def score(self, values: Sequence[float | None]) -> np.ndarray:
        """The scores of a series, [steps]; NaN before its first number."""
        score, last, out = self.kind(), math.nan, []
        for value in values:
            last = score.push(value) if known(value) else last
            out.append(last)
        return np.array(out)


SIGNALS = {
    "reward_fall": Signal("reward/mean", BelowPeak, "share of its peak that the smoothed reward has lost"),
    "routing_drift": Signal("routing/consistency", Shortfall, "1 - routing consistency within a step"),
    "mismatch": Signal("mismatch/k3", Smoothed, "k3 of engine and trainer, nats per token"),
    "ess_token": Signal("ratio/ess_token", Shortfall, "share of the effective sample size that token ratios cost"),
    "ess_sequence": Signal("ratio/ess_sequence", Shortfall, "the same, of sequence ratios"),
    "ratio_high": Signal("ratio/token_max", LogTail, "log of the step's largest token ratio"),
    "ratio_low": Signal("ratio/token_min", LogTail, "log of the step's smallest token ratio, its sign changed"),
    "policy_drift": Signal("kl/old_k3", Smoothed, "k3 of the policy and the old policy, nats per token"),
    "entropy_fall": Signal("policy/entropy", Decline, "log of how many times smaller the entropy is than at the start"),
    "entropy_rise": Signal("policy/entropy", Growth, "log of how many times larger the entropy is than at the start"),
    "grad_spike": Signal("optim/grad_norm_max", Spike, "log10 of the gradient norm over that of the 20 steps before"),
    "grad_growth": Signal("optim/grad_norm", Growth, "log of how many times larger the gradient norm is than at first"),
    "repetition": Signal("length/repetition", Rise, "repeated 4-grams, more than at the start"),
    "truncation": Signal("length/truncated", Rise, "responses that hit the limit, more than at the start"),
    "zero_variance": Signal("group/zero_variance", Smoothed, "share of groups without signal"),
    "clip_share": Signal("clip/token_active", Smoothed, "share of tokens whose gradient the clip removed"),
}


def known(value: float | None) -> bool:
    """Whether a row has a finite number."""
    return value is not None and math.isfinite(value)


def _log(x: float) -> float:
    """log, of at least 1e-12: a norm or an entropy of exactly 0 is far from any baseline and not infinitely far."""
    return math.log(max(x, 1e-12))
