"""The collapse rule of a run, and scores that may warn of a collapse earlier.

The collapse rule was fixed before the results of any study were looked at, and is not tuned.

An early-warning score takes a metric's number of each step and returns a number. Higher is worse.
The score depends only on this step and earlier steps. The monitor of a run compares scores with
thresholds. `Signal.score` returns the scores of a whole series. A step whose metric is missing
(None, NaN, inf) repeats the previous score.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

import numpy as np

DECAY = 0.9  # the factor of the exponential smoothing
# The peak counts from the tenth number of a series on. A baseline is the median of the first ten.
START = 10
# A reward has fallen if it is below this share of its peak for this number of steps.
FALLEN = 0.7
STEPS_FALLEN = 20
# It has recovered if it is above this share of the peak within this number of further steps.
RECOVERED = 0.9
STEPS_TO_RECOVER = 50
# A reward between 0 and 1 cannot collapse by this rule in fewer rollout batches: after ten of 1,
# two of 0 leave the smoothed reward above 0.7, and 20 more have to be below it.
MIN_BATCHES = 32
# A row that is the mean of many rollout batches counts as so many at most. The smoothing has
# forgotten the rows before by then, so that more of them change nothing.
MAX_BATCHES_OF_A_ROW = 100
# A spike is compared with the median of the previous numbers: at most 20, and at least 5.
WINDOW = 20
MIN_WINDOW = 5

# the numbers of a metric by step; None or NaN: the step has none
Series = Sequence[float | None] | np.ndarray


@dataclass
class Smoothed:
    """An exponential moving average without the bias of its start:

    s_t = sum_u 0.9^(t-u) r_u / sum_u 0.9^(t-u),   u <= t"""

    total: float = 0.0
    weight: float = 0.0

    def push(self, value: float) -> float:
        """Take in the next number, and return the average."""
        self.total = DECAY * self.total + value
        self.weight = DECAY * self.weight + 1
        return self.total / self.weight


@dataclass
class Level:
    """The smoothed reward and its running peak.

    The peak starts anew with the tenth number, because a lucky first batch must not set it.
    `largest` does not start anew: a run that fell in its first steps is not healthy afterwards."""

    smooth: Smoothed = field(default_factory=Smoothed)
    count: int = 0
    now: float = math.nan
    peak: float = -math.inf
    largest: float = -math.inf

    def push(self, value: float) -> float:
        """Take in the next reward, and return the smoothed one."""
        self.now = self.smooth.push(value)
        self.count += 1
        if self.count == START:
            self.peak = -math.inf
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, self.now)
        return self.now

    def fallen(self) -> bool:
        """Return whether the smoothed reward is below 0.7 x its peak.

        It is False before the tenth number, and while the peak is not positive."""
        return self.count >= START and self.peak > 0 and self.now < FALLEN * self.peak

    def is_healthy(self) -> bool:
        """Return whether the smoothed reward is above 0.9 x the largest of all rewards so far."""
        return self.now > RECOVERED * self.largest


def levels(rewards: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for every step, the smoothed reward, its running peak, and whether it has fallen.

    The reward has fallen while the smoothed reward is below 0.7 x its peak."""
    level = Level()
    smoothed: list[float] = []
    peaks: list[float] = []
    fallen: list[bool] = []
    for value in rewards:
        if is_finite(value):
            level.push(value)
        smoothed.append(level.now)
        peaks.append(level.peak)
        fallen.append(level.fallen())
    return np.array(smoothed), np.array(peaks), np.array(fallen, dtype=bool)


def best(rewards: Series) -> tuple[float, int]:
    """Return the highest smoothed reward and its index.

    As in the collapse rule, the first nine rewards count only if there are no more. Raises
    ValueError if there is no reward."""
    smoothed, _, _ = levels(rewards)
    finite = [index for index in range(len(smoothed)) if is_finite(rewards[index])]
    candidates = finite[START - 1 :] or finite
    if not candidates:
        raise ValueError("there is no reward")
    index = max(candidates, key=lambda index: smoothed[index])
    return float(smoothed[index]), index


def collapse(rewards: Series) -> int | None:
    """Return the index of the step at which a run collapsed, None if it did not collapse.

    It is the first step with both properties. From this step on, the smoothed reward stays below
    0.7 x its running peak for 20 steps. In the following 50 steps, or until the run's end if it
    comes earlier, the reward is never above 0.9 x the peak again."""
    smoothed, peak, fallen = levels(rewards)
    for start in range(len(fallen) - STEPS_FALLEN + 1):
        end = start + STEPS_FALLEN
        recovered = smoothed[end : end + STEPS_TO_RECOVER] > RECOVERED * peak[start]
        if fallen[start:end].all() and not recovered.any():
            return start
    return None


class SignalScore(Protocol):
    """An early-warning score of a metric."""

    def push(self, value: float) -> float:
        """Take in the metric's next number, and return the score."""


@dataclass
class Shortfall(Smoothed):
    """The score 1 - smoothed value, for shares that are 1 in a healthy run."""

    def push(self, value: float) -> float:
        return 1 - super().push(value)


@dataclass
class BelowPeak:
    """The score 1 - smoothed value / its running peak. It is 0 while there is no positive peak."""

    level: Level = field(default_factory=Level)

    def push(self, value: float) -> float:
        now = self.level.push(value)
        if self.level.count < START or self.level.peak <= 0:
            return 0.0
        return 1 - now / self.level.peak


@dataclass
class Rise(Smoothed):
    """The score smoothed value - baseline. The baseline is the median of the first 10 numbers."""

    first: list[float] = field(default_factory=list)
    median: float = math.nan  # of the first numbers

    def push(self, value: float) -> float:
        return super().push(value) - self.baseline(value)

    def baseline(self, value: float) -> float:
        """Return the median of the first numbers, after adding `value` if they are not complete."""
        if len(self.first) < START:
            self.first.append(value)
            self.median = float(np.median(self.first))
        return self.median


@dataclass
class Growth(Rise):
    """The score log(smoothed value / baseline), for positive quantities.

    The baseline is the median of the first 10 positive numbers, because growth from 0 has no size.
    Before the first positive number the score is 0."""

    def push(self, value: float) -> float:
        now = Smoothed.push(self, value)
        if value > 0 or len(self.first) == START:
            baseline = self.baseline(value)
        elif self.first:
            baseline = self.median
        else:
            return 0.0
        return _log(now) - _log(baseline)


@dataclass
class Decline(Growth):
    """The score log(baseline / smoothed value), for positive quantities."""

    def push(self, value: float) -> float:
        return -super().push(value)


@dataclass
class Spike:
    """The score log10(value / median of the previous 20 positive numbers).

    It is 0 while there are fewer than 5 previous numbers."""

    previous: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def push(self, value: float) -> float:
        # much faster than numpy's median, with the same result
        usual = statistics.median(self.previous) if len(self.previous) >= MIN_WINDOW else value
        # a step without signal has no gradient, and tells nothing about the usual size
        if value > 0:
            self.previous.append(value)
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
    kind: type[SignalScore]
    meaning: str  # what the score means, in the words of a warning

    def score(self, values: Series) -> np.ndarray:
        """Return the scores of a series, [steps], with NaN before its first number."""
        score = self.kind()
        latest = math.nan
        scores = []
        for value in values:
            if is_finite(value):
                latest = score.push(value)
            scores.append(latest)
        return np.array(scores)


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


def is_finite(value: float | None) -> TypeGuard[float]:
    """Return whether a row's entry is a finite number."""
    return value is not None and math.isfinite(value)


def _log(x: float) -> float:
    """Return log(max(x, 1e-12)).

    A norm or an entropy of exactly 0 is then far from any baseline, but not infinitely far."""
    return math.log(max(x, 1e-12))


def gradient_spikes(norms_T: np.ndarray) -> int:
    """Return how many gradient norms are more than ten times the usual one.

    The usual norm is the median of the last 20 positive norms before it. The first five norms have
    too few before them, and are compared with the median of all positive norms."""
    is_spike_T = SIGNALS["grad_spike"].score(norms_T) > 1
    positive = norms_T[norms_T > 0]
    if len(positive):
        is_spike_T[:MIN_WINDOW] = norms_T[:MIN_WINDOW] > 10 * np.median(positive)
    return int(is_spike_T.sum())
