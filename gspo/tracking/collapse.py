"""The rule that says whether a run has collapsed, and the scores that may warn of it earlier.

The collapse rule was fixed before the results of any study were looked at, and is not tuned. An
early-warning score takes one number of a metric per step and returns one number, of which higher is
worse. It depends on that step and the steps before it alone. The monitor of a run compares scores
with thresholds; `Signal.score` returns the scores of a whole series. A step whose metric is missing
(None, NaN, inf) repeats the score before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

DECAY = 0.9  # the factor of the exponential smoothing
# the peak counts from this number of the series on; a baseline is the median of the first so many
# numbers
START = 10
# a reward has fallen if it is below this share of its peak for so many steps
FALLEN, STEPS_FALLEN = 0.7, 20
# it has recovered if it is above this share within so many further steps
RECOVERED, STEPS_TO_RECOVER = 0.9, 50
# a spike is compared with the median of the numbers before it: at most, and at least, so many
WINDOW, FEWEST = 20, 5


@dataclass
class Smoothed:
    """An exponential moving average without the bias of its start:

    s_t = sum_u 0.9^(t-u) r_u / sum_u 0.9^(t-u),   u <= t"""

    total: float = 0.0
    weight: float = 0.0

    def push(self, value: float) -> float:
        """Take in the next number, and return the average."""
        self.total, self.weight = DECAY * self.total + value, DECAY * self.weight + 1
        return self.total / self.weight


@dataclass
class Level:
    """The smoothed reward and its running peak.

    The peak starts anew with the tenth number, so that a lucky first batch does not set it.
    `largest` does not start anew, so that a run which fell in its first steps does not count as
    healthy afterwards."""

    smooth: Smoothed = field(default_factory=Smoothed)
    count: int = 0
    now: float = math.nan
    peak: float = -math.inf
    largest: float = -math.inf

    def push(self, value: float) -> float:
        """Take in the next reward, and return the smoothed one."""
        self.now, self.count = self.smooth.push(value), self.count + 1
        if self.count == START:
            self.peak = -math.inf
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, self.now)
        return self.now

    def fallen(self) -> bool:
        """Return whether the smoothed reward is below 0.7 x its peak; False before the tenth
        number, and while the peak is not positive."""
        return self.count >= START and self.peak > 0 and self.now < FALLEN * self.peak

    def is_healthy(self) -> bool:
        """Return whether the smoothed reward is above 0.9 x the largest so far, the first numbers
        included.
        """
        return self.now > RECOVERED * self.largest


def levels(rewards: Sequence[float | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for every step, the smoothed reward, its running peak, and whether it is below 0.7 x
    that peak.
    """
    level, rows = Level(), []
    for value in rewards:
        if is_finite(value):
            level.push(value)
        rows.append((level.now, level.peak, level.fallen()))
    now, peak, fallen = zip(*rows, strict=True) if rows else ((), (), ())
    return np.array(now), np.array(peak), np.array(fallen, dtype=bool)


def best(rewards: Sequence[float | None]) -> tuple[float, int]:
    """Return the highest smoothed reward and its index. As for the peak of the collapse rule, the
    first nine count only if there are no more. Raises ValueError if there is no reward."""
    smooth = levels(rewards)[0]
    known = [index for index in range(len(smooth)) if is_finite(rewards[index])]
    counted = known[START - 1 :] or known
    if not counted:
        raise ValueError("there is no reward")
    index = max(counted, key=lambda index: smooth[index])
    return float(smooth[index]), index


def collapse(rewards: Sequence[float | None]) -> int | None:
    """Return the index of the step at which a run collapsed, None if it did not collapse.

    That is the first step from which the smoothed reward stays below 0.7 x its running peak for 20
    steps and is not above 0.9 x the peak again within the following 50 steps, or until the run's
    end if that comes earlier."""
    level, peak, fallen = levels(rewards)
    for start in range(len(fallen) - STEPS_FALLEN + 1):
        end = start + STEPS_FALLEN
        back = level[end : end + STEPS_TO_RECOVER] > RECOVERED * peak[start]
        if fallen[start:end].all() and not back.any():
            return start
    return None


class Score(Protocol):
    """An early-warning score: takes in a metric's numbers one by one, and returns the score after
    each.
    """

    def push(self, value: float) -> float: ...


@dataclass
class Shortfall(Smoothed):
    """The score 1 - smoothed value, for shares that are 1 in a healthy run."""

    def push(self, value: float) -> float:
        return 1 - super().push(value)


@dataclass
class BelowPeak:
    """The score 1 - smoothed value / its running peak; 0 while there is no positive peak."""

    level: Level = field(default_factory=Level)

    def push(self, value: float) -> float:
        now = self.level.push(value)
        return (
            1 - now / self.level.peak if self.level.peak > 0 and self.level.count >= START else 0.0
        )


@dataclass
class Rise(Smoothed):
    """The score smoothed value - baseline, where the baseline is the median of the first 10
    numbers.
    """

    first: list[float] = field(default_factory=list)

    def push(self, value: float) -> float:
        return super().push(value) - self.baseline(value)

    def baseline(self, value: float) -> float:
        """Return the median of the first numbers, of which `value` may be one."""
        if len(self.first) < START:
            self.first.append(value)
        return float(np.median(self.first))


@dataclass
class Growth(Rise):
    """The score log(smoothed value / baseline), for positive quantities. The baseline is the median
    of the first 10 positive numbers: nothing can be said to have grown from 0. Before the first of
    them the score is 0."""

    def push(self, value: float) -> float:
        now = Smoothed.push(self, value)
        if value <= 0 and len(self.first) < START:
            return _log(now) - _log(float(np.median(self.first))) if self.first else 0.0
        return _log(now) - _log(self.baseline(value))


@dataclass
class Decline(Growth):
    """The score log(baseline / smoothed value), for positive quantities."""

    def push(self, value: float) -> float:
        return -super().push(value)


@dataclass
class Spike:
    """The score log10(value / median of the 20 positive numbers before it); 0 while there are fewer
    than 5 of these.
    """

    before: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def push(self, value: float) -> float:
        usual = float(np.median(self.before)) if len(self.before) >= FEWEST else value
        # a step without signal has no gradient, and tells nothing about the usual size
        if value > 0:
            self.before.append(value)
        return (_log(value) - _log(usual)) / math.log(10)


@dataclass
class LogTail(Smoothed):
    """The score smoothed |log value|: how far the extreme ratio of a step is from 1."""

    def push(self, value: float) -> float:
        return super().push(abs(_log(value)))


@dataclass(frozen=True)
class Signal:
    """An early-warning signal: a metric, and the kind of score that is computed from its series."""

    metric: str
    kind: type[Score]
    meaning: str  # what the score means, in the words of a warning

    def score(self, values: Sequence[float | None]) -> np.ndarray:
        """Return the scores of a series, [steps]; NaN before its first number."""
        score, last, out = self.kind(), math.nan, []
        for value in values:
            last = score.push(value) if is_finite(value) else last
            out.append(last)
        return np.array(out)


SIGNALS = {
    "reward_fall": Signal(
        "reward/mean", BelowPeak, "share of its peak that the smoothed reward has lost"
    ),
    "routing_drift": Signal(
        "routing/consistency", Shortfall, "1 - routing consistency within a step"
    ),
    "mismatch": Signal("mismatch/k3", Smoothed, "k3 of engine and trainer, nats per token"),
    "ess_token": Signal(
        "ratio/ess_token", Shortfall, "share of the effective sample size that token ratios cost"
    ),
    "ess_sequence": Signal("ratio/ess_sequence", Shortfall, "the same, of sequence ratios"),
    "ratio_high": Signal("ratio/token_max", LogTail, "log of the step's largest token ratio"),
    "ratio_low": Signal(
        "ratio/token_min", LogTail, "log of the step's smallest token ratio, its sign changed"
    ),
    "policy_drift": Signal(
        "kl/old_k3", Smoothed, "k3 of the policy and the old policy, nats per token"
    ),
    "entropy_fall": Signal(
        "policy/entropy", Decline, "log of how many times smaller the entropy is than at the start"
    ),
    "entropy_rise": Signal(
        "policy/entropy", Growth, "log of how many times larger the entropy is than at the start"
    ),
    "grad_spike": Signal(
        "optim/grad_norm_max", Spike, "log10 of the gradient norm over that of the 20 steps before"
    ),
    "grad_growth": Signal(
        "optim/grad_norm", Growth, "log of how many times larger the gradient norm is than at first"
    ),
    "repetition": Signal("length/repetition", Rise, "repeated 4-grams, more than at the start"),
    "truncation": Signal(
        "length/truncated", Rise, "responses that hit the limit, more than at the start"
    ),
    "zero_variance": Signal("group/zero_variance", Smoothed, "share of groups without signal"),
    "clip_share": Signal(
        "clip/token_active", Smoothed, "share of tokens whose gradient the clip removed"
    ),
}


def is_finite(value: float | None) -> bool:
    """Return whether a row's entry is a finite number."""
    return value is not None and math.isfinite(value)


def _log(x: float) -> float:
    """Return log(max(x, 1e-12)), so that a norm or an entropy of exactly 0 is far from any
    baseline, but not infinitely far."""
    return math.log(max(x, 1e-12))
