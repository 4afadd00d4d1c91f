"""The stability monitor: it looks for warning signs in a run's rows, and reports at the end.

The monitor raises a warning when a score of gspo.tracking.collapse exceeds its threshold. It raises
the warning again only after the score has been below 0.8 x the threshold in between. It also
reports a fallen reward. The monitor's state is a function of the run's rows, so a resumed run reads
them again. `monitor.jsonl` has an object for each event: step, kind, signal, score, threshold,
text.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from gspo.io.ranges import Ranged, choice, ranged
from gspo.tracking.collapse import (
    FALLEN,
    MAX_BATCHES_OF_A_ROW,
    SIGNALS,
    START,
    STEPS_FALLEN,
    Level,
    best,
    collapse,
    gradient_spikes,
    is_finite,
    levels,
)

Row = Mapping[str, float | None]  # the metrics of a step
WITHOUT_SIGNAL = "group/steps_without_signal"
ZERO = "reward_zero"  # the signal of a reward that is 0
CLEARED = 0.8  # a warning ends when its score is below this share of the threshold
# a warning is raised after this number of steps in which all rewards were 0, also during warm-up
STEPS_AT_ZERO = 3


@dataclass
class Thresholds(Ranged, key="monitor.thresholds"):
    """The scores above which the signals of gspo.tracking.collapse.SIGNALS raise a warning.

    0 switches a signal off. The defaults follow common practice. A k3 between engine and trainer
    above .01 and a |KL| above .1 count as far off policy. A truncated share of .1 to .15 counts as
    trouble, and a gradient norm of 3 to 10 times its usual size as a spike.
    """

    # share of the peak that is lost, as in the collapse rule
    reward_fall: float = ranged(0.3, least=0)
    routing_drift: float = ranged(0.3, least=0)  # 1 - consistency
    mismatch: float = ranged(0.01, least=0)  # nats per token
    ess_token: float = ranged(0.5, least=0)  # 1 - effective sample size
    ess_sequence: float = ranged(0.5, least=0)
    ratio_high: float = ranged(6.9, least=0)  # log of a ratio of 1000
    ratio_low: float = ranged(11.5, least=0)  # log of 100000
    policy_drift: float = ranged(0.1, least=0)  # nats per token
    entropy_fall: float = ranged(1.6, least=0)  # log of a factor of 5
    entropy_rise: float = ranged(1.1, least=0)  # log of a factor of 3
    grad_spike: float = ranged(1.0, least=0)  # log10 of a factor of 10
    grad_growth: float = ranged(2.3, least=0)  # log of a factor of 10
    repetition: float = ranged(0.2, least=0)  # more than at the start
    truncation: float = ranged(0.15, least=0)  # more than at the start
    zero_variance: float = ranged(0.9, least=0)  # of the groups
    clip_share: float = ranged(0.8, least=0)  # of the tokens


@dataclass
class MonitorSettings(Ranged, key="monitor"):
    """The settings under `monitor`.

    They change a run's steps and its settings hash only with action=rollback."""

    # What happens when the reward has fallen. warn: the user is warned | stop: the run writes a
    # checkpoint and ends, with exit code 4 | rollback: it goes on, at a lower learning rate, from
    # the last checkpoint at which the smoothed reward was above 0.9 x the largest. Without such a
    # checkpoint it ends.
    action: str = choice("warn", ("warn", "stop", "rollback"))
    rollbacks: int = ranged(2, least=1)  # the largest number of rollbacks
    # each rollback multiplies the learning rate by this factor
    rollback_lr: float = ranged(0.5, above=0, below=1)
    # steps without warnings, in which the baselines are measured
    warm_up: int = ranged(10, least=0)
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass
class Event:
    """An event at a step: a warning, its end, a fallen reward, or an update that was left out."""

    step: int
    kind: str  # warning | cleared | fallen | skipped
    signal: str
    score: float
    threshold: float
    text: str


class Monitor:
    """Watches the rows of a run, one after the other."""

    def __init__(self, settings: MonitorSettings):
        self.settings = settings
        self.scores = {name: signal.kind() for name, signal in SIGNALS.items()}
        self.level = Level()
        self.active: set[str] = set()
        self.steps = 0
        self.fallen_steps = 0
        # the first steps of the falls that the monitor has reported, and of a present fall
        self.falls: list[int] = []
        self.fall_began = 0  # 0: the reward is not low
        self.steps_at_zero = 0  # the number of latest steps in a row with a reward of 0
        # The last step with good weights: they sampled the next step's rollouts, and these had a
        # smoothed reward above 0.9 x the largest so far.
        self.last_healthy_step = 0

    def observe(self, step: int, row: Row) -> list[Event]:
        """Take in a step's metrics, and return the new events. Row 0 (before training) has none."""
        if step == 0:
            return []
        self.steps += 1
        events: list[Event] = []
        for name in SIGNALS:
            events += self._signal_events(step, name, row)
        count = row.get("optim/skipped")
        if count:
            text = f"updates left out because their gradient was not finite: {count:.0f}"
            events.append(Event(step, "skipped", "optim/skipped", count, 0.0, text))
        events += self._zero_events(step, row)
        events += self._reward_events(step, row)
        return events

    def _signal_events(self, step: int, name: str, row: Row) -> list[Event]:
        """Take in a signal's metric, and return its new warning or the end of its warning."""
        signal = SIGNALS[name]
        value = row.get(signal.metric)
        if not is_finite(value):
            return []
        score = self.scores[name].push(value)
        threshold = getattr(self.settings.thresholds, name)
        if not threshold or self.steps <= self.settings.warm_up:
            return []
        if name not in self.active and score > threshold:
            self.active.add(name)
            text = (
                f"{name} is {score:.3g}, above {threshold:g} "
                f"({signal.meaning}; {signal.metric} is {value:.3g})"
            )
            return [Event(step, "warning", name, score, threshold, text)]
        if name in self.active and score < CLEARED * threshold:
            self.active.remove(name)
            text = f"{name} is {score:.3g}, below {CLEARED} x {threshold:g} again"
            return [Event(step, "cleared", name, score, threshold, text)]
        return []

    def _reward_events(self, step: int, row: Row) -> list[Event]:
        """Take in the reward, and return an event if it has now been low for 20 steps.

        This is the first half of the collapse rule. Whether the reward recovers within the
        following 50 steps is not known yet."""
        reward = row.get("reward/mean")
        if is_finite(reward):
            self.level.push(reward)
            if self.level.is_healthy():
                self.last_healthy_step = step - 1
        self.fallen_steps = self.fallen_steps + 1 if self.level.fallen() else 0
        if self.fallen_steps <= 1:
            self.fall_began = step if self.fallen_steps else 0
        if self.fallen_steps != STEPS_FALLEN:
            return []
        self.falls.append(self.fall_began)
        now = self.level.now
        peak = self.level.peak
        text = (
            f"the smoothed reward has been below 0.7 x its peak for {STEPS_FALLEN} steps "
            f"({now:.3f} of {peak:.3f})"
        )
        return [Event(step, "fallen", "reward_fall", 1 - now / peak, 1 - FALLEN, text)]

    def _zero_events(self, step: int, row: Row) -> list[Event]:
        """Return a warning when all rewards have been 0 for 3 steps, and later the warning's end.

        Rewards with a mean of 0 may differ from 0, but then some groups have variance. Some
        advantages learn from rewards that are all 0, such as nsr."""
        reward = row.get("reward/mean")
        zero_variance = row.get("group/zero_variance")
        if not is_finite(reward):
            return []
        has_variance = is_finite(zero_variance) and zero_variance < 1
        has_signal = has_variance or row.get(WITHOUT_SIGNAL) == 0
        is_zero = reward == 0 and not has_signal
        self.steps_at_zero = self.steps_at_zero + 1 if is_zero else 0
        threshold = float(STEPS_AT_ZERO)
        if self.steps_at_zero == STEPS_AT_ZERO:
            self.active.add(ZERO)
            text = (
                f"the reward has been 0 for {STEPS_AT_ZERO} steps: no response earns anything, "
                "nothing is learned"
            )
            return [Event(step, "warning", ZERO, threshold, threshold, text)]
        if not is_zero and ZERO in self.active:
            self.active.remove(ZERO)
            text = f"rewards differ from 0 again ({reward:.3g})"
            return [Event(step, "cleared", ZERO, 0.0, threshold, text)]
        return []

    def metrics(self) -> dict[str, float]:
        """Return the monitor's own metrics."""
        return {
            "monitor/warnings": float(len(self.active)),
            "monitor/fallen": float(self.fallen_steps >= STEPS_FALLEN),
        }


def as_lines(events: Iterable[Event]) -> str:
    """Return events as the lines of monitor.jsonl."""
    return "".join(json.dumps(asdict(event)) + "\n" for event in events)


def stability_report(rows: list[dict], ended: str = "") -> str:
    """Return the answers, in words, to the three questions by which users judge stability.

    Does the reward keep rising? Is the gradient norm reasonable? Does expert activation stay
    consistent? `ended` is the `how` of the run's status, such as "collapsed"."""
    rows = [row for row in rows if row["step"] > 0]
    if not rows:
        return "no step was made"
    return "\n".join(
        [reward_answer(rows, ended == "collapsed"), _gradient(rows), routing_answer(rows)]
    )


def _silent(rows: list[dict]) -> bool:
    """Return whether no step could learn: without any gradient, or with all rewards equal.

    Some advantages learn from equal rewards, so a step with an advantage could learn."""
    norms = _column(rows, "optim/grad_norm")
    if len(norms) and norms.max() == 0:
        return True
    if (_column(rows, WITHOUT_SIGNAL) == 0).any():
        return False
    rewards = _column(rows, "reward/mean")
    zero_variance = _column(rows, "group/zero_variance")
    if not len(rewards) or not len(zero_variance):
        return False
    return bool(zero_variance.min() == 1 and rewards.min() == rewards.max())


def _column(rows: list[dict], name: str) -> np.ndarray:
    """Return a metric's finite numbers in the rows."""
    return np.array([row[name] for row in rows if is_finite(row.get(name))])


def reward_answer(rows: list[dict], stopped: bool = False, batches_per_row: int = 1) -> str:
    """Return whether the reward keeps rising, in words. `stopped`: the monitor ended the run.

    A row that is the mean of several rollout batches counts for each of them, in the smoothing and
    in the collapse rule."""
    question = "Does the reward keep rising? "
    rows = [row for row in rows if is_finite(row.get("reward/mean"))]
    rewards = _column(rows, "reward/mean")
    if _silent(rows):
        mean = rewards.mean()
        return (
            f"{question}No: no signal (none of {len(rows)} steps had a gradient from rewards; "
            f"mean {mean:.3f})."
        )
    if len(rows) < START:
        return question + f"Unknown: {len(rows)} rows have a reward."
    batches_per_row = min(batches_per_row, MAX_BATCHES_OF_A_ROW)
    by_batch = rewards.repeat(batches_per_row)
    smoothed, _, _ = levels(by_batch)
    last = smoothed[-1]
    peak, peak_index = best(by_batch.tolist())
    collapse_index = collapse(by_batch)
    third = len(rows) // 3
    before = rewards[-2 * third : -third]
    after = rewards[-third:]
    change = after.mean() - before.mean()
    noise = math.sqrt((before.var() + after.var()) / third)
    if stopped:
        verdict = (
            f"No: the monitor ended the run {STEPS_FALLEN} steps into a fall, "
            "and it might have recovered"
        )
    elif collapse_index is not None:
        step = rows[collapse_index // batches_per_row]["step"]
        verdict = f"No: it collapsed at step {step}"
    elif peak > 0 and last < FALLEN * peak:
        verdict = f"No: it has lost {1 - last / peak:.0%} of its peak"
    elif len(by_batch) < START + STEPS_FALLEN:
        verdict = "Too few steps to tell"
    elif abs(change) > 2 * noise:
        verdict = "Yes" if change > 0 else "No: it is falling"
    else:
        verdict = "It is level"
    return (
        f"{question}{verdict} (smoothed {rewards[:5].mean():.3f} at first, {last:.3f} at the end, "
        f"peak {peak:.3f} at step {rows[peak_index // batches_per_row]['step']}; "
        f"last third against the one before {change:+.3f})."
    )


def _gradient(rows: list[dict]) -> str:
    """Return in words whether the gradient norm is in a reasonable range."""
    question = "Is the gradient norm in a reasonable range? "
    norms = _column(rows, "optim/grad_norm")
    max_norms = _column(rows, "optim/grad_norm_max")
    skipped = _column(rows, "optim/skipped").sum()
    if not len(norms) or not len(max_norms):
        return (
            question + f"Unknown: no row has one (updates left out as not finite: {skipped:.0f})."
        )
    spikes = gradient_spikes(max_norms)
    zeros = int((norms == 0).sum())
    verdict = "No" if skipped or spikes else "Yes"
    if _silent(rows):
        verdict = "No: no signal from rewards"
    if 2 * zeros > len(norms):
        verdict = f"No: no signal, {zeros} of {len(norms)} steps had no gradient"
    return (
        f"{question}{verdict} (median {np.median(norms):.3g}, "
        f"largest of an update {max_norms.max():.3g}; "
        f"steps with ten times the usual norm: {spikes}; "
        f"updates left out as not finite: {skipped:.0f})."
    )


def routing_answer(rows: list[dict]) -> str:
    """Return in words whether expert activation stays consistent."""
    question = "Does expert activation stay consistent? "
    rows = [row for row in rows if is_finite(row.get("routing/consistency"))]
    if not rows:
        return (
            f"{question}Not known: the model is dense, its router is none of those that are read, "
            "or no step had two mini-batches."
        )
    consistency = _column(rows, "routing/consistency")
    worst = int(consistency.argmin())
    prefix = "routing/consistency_layer_"
    names = [name for name in rows[-1] if name.startswith(prefix) and is_finite(rows[-1][name])]
    layers = {name.removeprefix(prefix): _column(rows, name).mean() for name in names}
    details = ""
    if layers:
        layer = min(layers, key=lambda name: layers[name])
        details += f"; least in layer {layer}: {layers[layer]:.4f}"
    agreement = _column(rows, "routing/engine_agreement")
    if len(agreement):
        details += f"; engine agreement: mean {agreement.mean():.4f}"
    if _silent(rows):
        verdict = "It says nothing: no signal"
    elif SIGNALS["routing_drift"].score(consistency).max() < 0.1:
        verdict = "Yes"
    else:
        verdict = "No"
    return (
        f"{question}{verdict} (routing consistency within a step: mean {consistency.mean():.4f}, "
        f"lowest {consistency[worst]:.4f} at step {rows[worst]['step']}{details})."
    )
