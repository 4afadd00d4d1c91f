"""The stability monitor: it watches a run's rows for early warnings and a fallen reward, and
reports at the end.

A warning is raised when a score of gspo.tracking.collapse exceeds its threshold. It is raised again
only after the score has been below 0.8 x the threshold in between. The monitor's state is a
function of the run's rows, so a resumed run reads them again. `monitor.jsonl` has one object per
event: step, kind, signal, score, threshold, text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import numpy as np

from gspo.io.ranges import Ranged, choice, ranged
from gspo.tracking.collapse import (
    FALLEN,
    SIGNALS,
    START,
    STEPS_FALLEN,
    Level,
    best,
    collapse,
    is_finite,
    levels,
)

ZERO = "reward_zero"  # the signal of a reward that is 0
CLEARED = 0.8  # a warning ends when its score is below this share of the threshold
# after so many steps in which every response earned 0 a warning is raised, also while warming up
STEPS_AT_ZERO = 3


@dataclass
class Thresholds(Ranged, key="monitor.thresholds"):
    """The score above which a signal of gspo.tracking.collapse.SIGNALS raises a warning; 0 switches
    the signal off.

    The defaults follow what others use: a k3 between engine and trainer above .01 and a |KL| above
    .1 count as far off policy, a truncated share of .1 to .15 as trouble, a gradient norm of 3 to
    10 times its usual size as a spike.
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
    """The settings under `monitor`. They change a run's steps, and its settings hash, with
    action=rollback only.
    """

    # What happens when the reward has fallen. warn: the user is warned | stop: the run writes a
    # checkpoint and ends, with exit code 4 | rollback: it goes on, at a lower learning rate, from
    # the last checkpoint at which the smoothed reward was above 0.9 x the largest; without such a
    # checkpoint it ends
    action: str = choice("warn", ("warn", "stop", "rollback"))
    rollbacks: int = ranged(2, least=1)  # the largest number of rollbacks
    # the factor of each rollback on the learning rate
    rollback_lr: float = ranged(0.5, above=0, below=1)
    # steps without warnings, in which the baselines are measured
    warm_up: int = ranged(10, least=0)
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass
class Event:
    """Something that happened at a step: a warning, its end, a fallen reward, or an update that was
    left out.
    """

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
        self.steps = self.fallen_steps = 0
        self.steps_at_zero = 0  # how many of the latest steps had a reward of 0
        # The last step whose weights were good: the next step's rollouts, which were sampled from
        # them, had a smoothed reward above 0.9 x the largest so far.
        self.last_healthy_step = 0

    def observe(self, step: int, row: dict[str, float | None]) -> list[Event]:
        """Take in a step's metrics and return the new events. Row 0, before training, is ignored."""
        if step == 0:
            return []
        self.steps += 1
        found = (self._signal(step, name, row.get(SIGNALS[name].metric)) for name in SIGNALS)
        events = [event for event in found if event]
        if row.get("optim/skipped"):
            count = row["optim/skipped"]
            text = f"updates left out because their gradient was not finite: {count:.0f}"
            events.append(Event(step, "skipped", "optim/skipped", count, 0.0, text))
        return (
            events
            + self._zero_events(step, row)
            + self._reward_events(step, row.get("reward/mean"))
        )

    def _signal(self, step: int, name: str, value: float | None) -> Event | None:
        """Take in a signal's metric; return its warning, or the end of it, if that is new."""
        threshold, signal = getattr(self.settings.thresholds, name), SIGNALS[name]
        if not is_finite(value):
            return None
        score = self.scores[name].push(value)
        if not threshold or self.steps <= self.settings.warm_up:
            return None
        if name not in self.active and score > threshold:
            self.active.add(name)
            text = f"{name} is {score:.3g}, above {threshold:g} ({signal.meaning}; {signal.metric} is {value:.3g})"
            return Event(step, "warning", name, score, threshold, text)
        if name in self.active and score < CLEARED * threshold:
            self.active.remove(name)
            return Event(step, "cleared", name, score, threshold, f"{name}: {score:.3g} again")
        return None

    def _reward_events(self, step: int, reward: float | None) -> list[Event]:
        """Take in the reward and apply the first half of the collapse rule: has it been low for 20
        steps? Whether it recovers within the following 50 steps cannot be known yet."""
        if is_finite(reward):
            self.level.push(reward)
            if self.level.is_healthy():
                self.last_healthy_step = step - 1
        self.fallen_steps = self.fallen_steps + 1 if self.level.fallen() else 0
        if self.fallen_steps != STEPS_FALLEN:
            return []
        now, peak = self.level.now, self.level.peak
        text = f"the smoothed reward has been below 0.7 x its peak for {STEPS_FALLEN} steps ({now:.3f} of {peak:.3f})"
        return [Event(step, "fallen", "reward_fall", 1 - now / peak, 1 - FALLEN, text)]

    def _zero_events(self, step: int, row: dict[str, float | None]) -> list[Event]:
        """Return a warning when all rewards have been 0 for some steps, and its end when they are
        not again. Rewards whose mean is 0 may differ: then some groups have variance."""
        reward, alike = row.get("reward/mean"), row.get("group/zero_variance")
        if not is_finite(reward):
            return []
        is_zero = reward == 0 and not (is_finite(alike) and alike < 1)
        self.steps_at_zero = self.steps_at_zero + 1 if is_zero else 0
        if self.steps_at_zero == STEPS_AT_ZERO:
            self.active.add(ZERO)
            text = f"the reward has been 0 for {STEPS_AT_ZERO} steps: no response earns anything, nothing is learned"
            return [Event(step, "warning", ZERO, float(STEPS_AT_ZERO), float(STEPS_AT_ZERO), text)]
        if not is_zero and ZERO in self.active:
            self.active.remove(ZERO)
            return [
                Event(
                    step,
                    "cleared",
                    ZERO,
                    0.0,
                    float(STEPS_AT_ZERO),
                    f"rewards differ from 0 again ({reward:.3g})",
                )
            ]
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
    """Answer, in words and from a run's rows, the three questions by which users judge stability:
    does the reward keep rising, is the gradient norm reasonable, does expert activation stay
    consistent? `ended` says how the run ended."""
    rows = [row for row in rows if row["step"] > 0]
    if not rows:
        return "no step was made"
    return "\n".join([_reward(rows, ended == "collapsed"), _gradient(rows), _routing(rows)])


def _silent(rows: list[dict]) -> bool:
    """Return whether nothing could be learned in any step, because there was no gradient or all
    rewards were equal.
    """
    norms, rewards = _column(rows, "optim/grad_norm"), _column(rows, "reward/mean")
    alike = _column(rows, "group/zero_variance")
    same = (
        len(alike) > 0 and len(rewards) > 0 and alike.min() == 1 and rewards.min() == rewards.max()
    )
    return bool(same or (len(norms) > 0 and norms.max() == 0))


def _column(rows: list[dict], name: str) -> np.ndarray:
    """Return the finite numbers that the rows have of a metric."""
    return np.array([row[name] for row in rows if is_finite(row.get(name))])


def _reward(rows: list[dict], stopped: bool) -> str:
    """Answer whether the reward keeps rising; `stopped` says that the monitor ended the run."""
    question = "Does the reward keep rising? "
    rows = [row for row in rows if is_finite(row.get("reward/mean"))]
    rewards = _column(rows, "reward/mean")
    if _silent(rows):
        mean = rewards.mean()
        return f"{question}No: no signal (none of {len(rows)} steps had a gradient from rewards; mean {mean:.3f})."
    if len(rows) < START:
        return question + f"Unknown: {len(rows)} rows have a reward."
    level = levels(rewards)[0]
    (peak, top), at, third = best(rewards.tolist()), collapse(rewards), len(rows) // 3
    before, after = rewards[-2 * third : -third], rewards[-third:]
    change, noise = after.mean() - before.mean(), math.sqrt((before.var() + after.var()) / third)
    if stopped:
        verdict = f"No: the monitor ended the run {STEPS_FALLEN} steps into a fall, and it might have recovered"
    elif at is not None:
        verdict = f"No: it collapsed at step {rows[at]['step']}"
    elif peak > 0 and level[-1] < FALLEN * peak:
        verdict = f"No: it has lost {1 - level[-1] / peak:.0%} of its peak"
    elif len(rows) < START + STEPS_FALLEN:
        verdict = "Too few steps to tell"
    elif abs(change) > 2 * noise:
        verdict = "Yes" if change > 0 else "No: it is falling"
    else:
        verdict = "It is level"
    ends = f"smoothed {rewards[:5].mean():.3f} at first, {level[-1]:.3f} at the end"
    highest = f"peak {peak:.3f} at step {rows[top]['step']}"
    return (
        f"{question}{verdict} ({ends}, {highest}; last third against the one before {change:+.3f})."
    )


def _gradient(rows: list[dict]) -> str:
    """Answer whether the gradient norm is in a reasonable range."""
    question = "Is the gradient norm in a reasonable range? "
    norms, tops = _column(rows, "optim/grad_norm"), _column(rows, "optim/grad_norm_max")
    skipped = _column(rows, "optim/skipped").sum()
    if not len(norms) or not len(tops):
        return (
            question + f"Unknown: no row has one (updates left out as not finite: {skipped:.0f})."
        )
    spikes, still = int((SIGNALS["grad_spike"].score(tops) > 1).sum()), int((norms == 0).sum())
    verdict = "No" if skipped or spikes else "Yes"
    if _silent(rows) or 2 * still > len(norms):
        verdict = f"No: no signal, {still} of {len(norms)} steps had no gradient"
    return (
        f"{question}{verdict} (median {np.median(norms):.3g}, largest of an update {tops.max():.3g}; "
        f"steps with ten times the norm of those before: {spikes}; updates left out as not finite: {skipped:.0f})."
    )


def _routing(rows: list[dict]) -> str:
    """Answer whether expert activation stays consistent."""
    question = "Does expert activation stay consistent? "
    rows = [row for row in rows if is_finite(row.get("routing/consistency"))]
    if not rows:
        why = "the model is dense, its router is none of those that are read, or no step had two mini-batches"
        return f"{question}Not known: {why}."
    kept = _column(rows, "routing/consistency")
    worst, prefix = int(kept.argmin()), "routing/consistency_layer_"
    names = [name for name in rows[-1] if name.startswith(prefix) and is_finite(rows[-1][name])]
    layers = {name: _column(rows, name).mean() for name in names}
    least = min(layers, key=layers.get, default="")
    layer = f"; least in layer {least.removeprefix(prefix)}: {layers[least]:.4f}" if least else ""
    agreement = _column(rows, "routing/engine_agreement")
    engine = (
        f"; the engine's experts are the trainer's to {agreement.mean():.4f}"
        if len(agreement)
        else ""
    )
    verdict = "Yes" if SIGNALS["routing_drift"].score(kept).max() < 0.1 else "No"
    verdict = "It says nothing: no signal" if _silent(rows) else verdict
    return (
        f"{question}{verdict} (routing consistency within a step: mean {kept.mean():.4f}, "
        f"lowest {kept[worst]:.4f} at step {rows[worst]['step']}{layer}{engine})."
    )
