"""The stability monitor: early warnings and the collapse rule on a run's rows, while it runs and in its final report.

A warning is raised when a score of gspo.collapse crosses its threshold, and once more only after the score has fallen
below 0.8 x the threshold in between. What the monitor knows is a function of the run's rows: a resumed run reads them
again. `monitor.jsonl` has one object per event: step, kind, signal, score, threshold, text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from gspo.collapse import RECOVERED, SIGNALS, STEPS_FALLEN, collapse, fallen, smoothed

CLEARED = 0.8  # of the threshold
ACTIONS = ("warn", "stop", "rollback")


@dataclass
class Thresholds:
    """Above which score a signal (gspo.collapse.SIGNALS) is a warning; 0 switches it off.

    From the bands that others use: k3 of engine and trainer .01, |KL| .1 far off policy, truncation .1 to .15 trouble,
    gradient norm 3 to 10 times its usual size a spike.
    """

    reward_fall: float = 0.3  # share of the peak that is lost: the collapse rule's own level
    routing_drift: float = 0.3  # 1 - consistency
    mismatch: float = 0.01  # nats per token
    ess_token: float = 0.5  # 1 - effective sample size
    ess_sequence: float = 0.5
    ratio_high: float = 6.9  # log of a ratio of 1000
    ratio_low: float = 11.5  # log of 100000
    policy_drift: float = 0.1  # nats per token
    entropy_fall: float = 1.6  # log of a factor of 5
    entropy_rise: float = 1.1  # log of a factor of 3
    grad_spike: float = 1.0  # log10 of a factor of 10
    grad_growth: float = 2.3  # log of a factor of 10
    repetition: float = 0.2  # more than at the start
    truncation: float = 0.15  # more than at the start
    zero_variance: float = 0.9  # of the groups
    clip_share: float = 0.8  # of the tokens

    def __post_init__(self):
        for entry in fields(self):
            if not getattr(self, entry.name) >= 0:
                raise ValueError(f"monitor.thresholds.{entry.name}={getattr(self, entry.name)} must not be negative")


@dataclass
class MonitorSettings:
    """What watches a run. With action=rollback it is part of the run's settings hash, else it changes no step."""

    # when the run has collapsed. warn: say so | stop: write a checkpoint and end, exit code 4 | rollback: go on, at a
    # lower learning rate, from the last checkpoint at which the smoothed reward was above 0.9 x its peak; or stop
    action: str = "warn"
    rollbacks: int = 2  # at most so many
    rollback_lr: float = 0.5  # what each of them multiplies the learning rate by
    warm_up: int = 10  # steps in which no warning is raised: the baselines are being measured
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self):
        if self.action not in ACTIONS:
            raise ValueError(f"monitor.action={self.action!r}: choose one of {', '.join(ACTIONS)}")
        if self.rollbacks < 1 or not 0 < self.rollback_lr < 1:
            raise ValueError(
                f"monitor.rollbacks={self.rollbacks} must be at least 1, "
                f"monitor.rollback_lr={self.rollback_lr} must lie in (0, 1)"
            )
        if self.warm_up < 0:
            raise ValueError(f"monitor.warm_up={self.warm_up} must not be negative")


@dataclass
class Event:
    """What happened at a step: a warning, its end, a collapse, or an update that was left out."""

    step: int
    kind: str  # warning | cleared | collapse | skipped
    signal: str
    score: float
    threshold: float
    text: str


class Monitor:
    """Watches the rows of a run."""

    def __init__(self, settings: MonitorSettings):
        self.settings = settings
        self.series: dict[str, list[float | None]] = {}
        self.active: set[str] = set()
        self.collapsed = False
        self.steps = 0
        self.at: list[int] = []  # the rows' steps

    def observe(self, step: int, row: dict[str, float]) -> list[Event]:
        """Take in a step's metrics; what is new. Row 0, before training, is left out."""
        if step == 0:
            return []
        self.steps += 1
        self.at.append(step)
        for signal in SIGNALS.values():
            series = self.series.setdefault(signal.metric, [None] * (self.steps - 1))
            if len(series) < self.steps:  # several signals read one metric
                series.append(row.get(signal.metric))
        events = [event for name in SIGNALS if (event := self._signal(step, name))]
        if row.get("optim/skipped"):
            count = row["optim/skipped"]
            events.append(Event(step, "skipped", "optim/skipped", count, 0.0, skipped_text(count)))
        return events + self._collapse(step)

    def _signal(self, step: int, name: str) -> Event | None:
        threshold, signal = getattr(self.settings.thresholds, name), SIGNALS[name]
        series = self.series[signal.metric]
        if not threshold or self.steps <= self.settings.warm_up or all(value is None for value in series):
            return None
        score = float(signal.score(series)[-1])
        if name not in self.active and score > threshold:
            self.active.add(name)
            text = f"{name} is {score:.3g}, above {threshold:g} ({signal.meaning}; {signal.metric} is {series[-1]:.3g})"
            return Event(step, "warning", name, score, threshold, text)
        if name in self.active and score < CLEARED * threshold:
            self.active.remove(name)
            return Event(step, "cleared", name, score, threshold, f"{name}: {score:.3g} again")
        return None

    def _collapse(self, step: int) -> list[Event]:
        rewards = self.series["reward/mean"]
        below = fallen(rewards)[-STEPS_FALLEN:]
        was, self.collapsed = self.collapsed, len(below) == STEPS_FALLEN and bool(below.all())
        if was or not self.collapsed:
            return []
        level = smoothed(rewards)
        peak, now = float(np.nanmax(level)), float(level[-1])
        text = f"collapse: smoothed reward below 0.7 x its peak for {STEPS_FALLEN} steps ({now:.3f} of {peak:.3f})"
        return [Event(step, "collapse", "reward_fall", 1 - now / peak, 0.3, text)]

    def healthy(self) -> int:
        """The last step whose weights are known to be good: the next one's rollouts, sampled from them, had a smoothed
        reward above 0.9 x its running peak. 0 if there is none."""
        level = smoothed(self.series.get("reward/mean", []))
        good = np.flatnonzero(level > RECOVERED * np.fmax.accumulate(level)) if len(level) else level
        return self.at[good[-1]] - 1 if len(good) else 0

    def metrics(self) -> dict[str, float]:
        """What a row says of it."""
        return {"monitor/warnings": float(len(self.active)), "monitor/collapsed": float(self.collapsed)}


def skipped_text(count: float) -> str:
    return f"updates left out because their gradient was not finite: {count:.0f}"


def write_events(folder: Path, events: Iterable[Event]) -> None:
    with open(folder / "monitor.jsonl", "a") as file:
        file.writelines(json.dumps(asdict(event)) + "\n" for event in events)


def report(rows: list[dict]) -> str:
    """The three questions by which users judge stability, answered in words, with the numbers of a run's rows."""
    rows = [row for row in rows if row["step"] > 0]
    if not rows:
        return "no step was made"
    return "\n".join([_reward(rows), _gradient(rows), _routing(rows)])


def _column(rows: list[dict], name: str) -> np.ndarray:
    """The numbers of a metric, NaN where a row has none."""
    return np.array([math.nan if row.get(name) is None else float(row[name]) for row in rows])


def _reward(rows: list[dict]) -> str:
    question = "Does the reward keep rising? "
    rewards = _column(rows, "reward/mean")
    if np.isnan(rewards).all():
        return question + "Unknown: no row has a reward."
    level, steps = smoothed(rewards), [row["step"] for row in rows]
    top = int(np.nanargmax(level))
    ends = f"smoothed {np.nanmean(level[:5]):.3f} at first, {level[-1]:.3f} at the end"
    at = collapse(rewards)
    third = max(1, len(rewards) // 3)
    before, after = rewards[-2 * third : -third], rewards[-third:]
    noise = math.sqrt((np.nanvar(before) + np.nanvar(after)) / third) if third > 1 else math.inf
    change = np.nanmean(after) - np.nanmean(before) if len(before) else 0.0
    if at is not None:
        verdict = f"No: it collapsed at step {steps[at]}"
    elif change > 2 * noise:
        verdict = "Yes"
    elif change < -2 * noise:
        verdict = "No: it is falling"
    else:
        verdict = "It is level"
    peak = f"peak {level[top]:.3f} at step {steps[top]}"
    return f"{question}{verdict} ({ends}, {peak}; last third against the one before {change:+.3f})."


def _gradient(rows: list[dict]) -> str:
    question = "Is the gradient norm in a reasonable range? "
    norms, tops = _column(rows, "optim/grad_norm"), _column(rows, "optim/grad_norm_max")
    skipped = np.nansum(_column(rows, "optim/skipped"))
    if np.isnan(norms).all():
        return question + f"Unknown: no row has one (updates left out as not finite: {skipped:.0f})."
    usual, largest = float(np.nanmedian(norms)), float(np.nanmax(tops))
    spikes = int((SIGNALS["grad_spike"].score(tops) > 1).sum())
    good = not skipped and not spikes
    return (
        f"{question}{'Yes' if good else 'No'} (median {usual:.3g}, largest of an update {largest:.3g}; "
        f"steps with ten times the norm of those before: {spikes}; updates left out as not finite: {skipped:.0f})."
    )


def _routing(rows: list[dict]) -> str:
    question = "Does expert activation stay consistent? "
    kept = _column(rows, "routing/consistency")
    if np.isnan(kept).all():
        return question + "There are no experts, or there was one mini-batch."
    worst = int(np.nanargmin(kept))
    layers = {
        name: np.nanmean(_column(rows, name)) for name in rows[-1] if name.startswith("routing/consistency_layer_")
    }
    least = min(layers, key=layers.get, default="")
    layer = f"; least in layer {least.rsplit('_', 1)[1]}: {layers[least]:.4f}" if least else ""
    agreement = _column(rows, "routing/engine_agreement")
    engine = (
        "" if np.isnan(agreement).all() else f"; the engine's experts are the trainer's to {np.nanmean(agreement):.4f}"
    )
    verdict = "Yes" if np.nanmin(smoothed(kept)) > 0.9 else "No"
    return (
        f"{question}{verdict} (share of the old experts kept within a step: mean {np.nanmean(kept):.4f}, "
        f"lowest {kept[worst]:.4f} at step {rows[worst]['step']}{layer}{engine})."
    )
