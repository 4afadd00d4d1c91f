"""Metrics and callbacks that a user's package adds to a run.

For example, with this in my_pkg/extras.py, `metrics.long.path=my_pkg.extras:Long
metrics.long.tokens=50` measures `custom/long` at every step:

    @dataclass
    class Long(CustomMetric):
        unit: ClassVar[str] = "share of responses"
        meaning: ClassVar[str] = "responses of at least `tokens` tokens"
        tokens: int = ranged(16, least=1)

        def __call__(self, trained: TrainedStep) -> float:
            return sum(r.length >= self.tokens for r in trained.responses) / len(trained.responses)
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gspo.data.samples import ScoredResponse
from gspo.io.ranges import Ranged

if TYPE_CHECKING:
    from gspo.data.batch import TrainBatch

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedStep:
    """The contents of a step that a metric may read, after the last update."""

    step: int
    # every response of the step as tensors: tokens, mask_BT, old_logp_BT (log-probs before the
    # updates), adv_BT
    batch: TrainBatch
    responses: list[ScoredResponse]  # the rows of the batch: texts, scores, engine's log-probs
    metrics: dict[str, float]  # the step's other metrics


@dataclass
class CustomMetric(Ranged, key="metrics"):
    """The base of a user's metric: its fields are settings, and calling it computes one number.

    Its name in a run is `custom/<name>`, from the setting metrics.<name>. A metric that raises an
    exception or is not finite is left out of the step's row. The first time, a warning gives the
    reason.
    """

    path: str = ""  # the class, for example my_pkg.extras:Long
    unit: ClassVar[str] = ""
    meaning: ClassVar[str] = ""

    def __call__(self, trained: TrainedStep) -> float:
        """Compute the metric of a step."""
        raise NotImplementedError


@dataclass
class Callback(Ranged, key="callbacks"):
    """The base of a user's code around the steps. All methods are optional.

    `trainer` is the gspo.train.trainer.Trainer. A callback may change it. A new value of
    `trainer.optim.lr` acts from then on, and a resumed run keeps it. Any other change must be made
    again by `before_step` of a resumed run. An exception in a callback ends the run, which then
    goes on from its last checkpoint.
    """

    path: str = ""  # the class, for example my_pkg.extras:StopEarly

    def before_step(self, step: int, trainer: Any) -> None:
        """Act before the responses of a step are sampled."""

    def after_step(self, step: int, trainer: Any, metrics: dict[str, float]) -> bool | None:
        """Act after the step's updates and metrics. Return True to end the run after this step.

        The run has then ended: a sweep does not continue it, and `resume=RUN` does."""

    def state(self) -> dict[str, Any]:
        """Return the callback's state for a checkpoint, ready for JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state` when a run is resumed."""


class Extensions:
    """The metrics and callbacks of a run, by their names in the settings."""

    def __init__(self, metrics: dict[str, CustomMetric], callbacks: dict[str, Callback]):
        self.metrics = metrics
        self.callbacks = dict(callbacks)  # a run adds callbacks to this copy
        self.ended_by = ""  # the name of the callback that ended the run
        self.warned: set[str] = set()  # metrics that have had a warning
        # new warnings for the user; the run's loop prints them and clears the list
        self.warnings: list[str] = []

    def measure(self, trained: TrainedStep) -> dict[str, float]:
        """Compute the user's metrics of a step."""
        values = {}
        for name, metric in self.metrics.items():
            try:
                value = float(metric(trained))
                problem = "" if math.isfinite(value) else f"it is {value}"
            # a user's metric may raise anything, which must not end a run of days
            except Exception as error:
                value = math.nan
                problem = f"{type(error).__name__}: {error}"
            if not problem:
                values[f"custom/{name}"] = value
            elif name not in self.warned:
                self.warned.add(name)
                LOG.info("custom/%s", name, exc_info=True)  # the line in the user's code
                self.warnings.append(
                    f"step {trained.step}: custom/{name} failed and is left out: {problem}"
                )
        return values

    def before_step(self, step: int, trainer: Any) -> None:
        """Call every callback before a step."""
        for callback in self.callbacks.values():
            callback.before_step(step, trainer)

    def after_step(self, step: int, trainer: Any, metrics: dict[str, float]) -> bool:
        """Call every callback after a step, and return whether one of them ends the run."""
        ends = False
        for name, callback in self.callbacks.items():
            if callback.after_step(step, trainer, metrics):
                ends = True
                self.ended_by = name
        return ends

    def state(self) -> dict[str, dict]:
        """Return the states of the callbacks, without empty states."""
        states = {}
        for name, callback in self.callbacks.items():
            state = callback.state()
            if state:
                states[name] = state
        return states

    def load_state(self, states: dict[str, dict]) -> None:
        """Restore the result of `state`. New callbacks keep the state they start with."""
        for name, callback in self.callbacks.items():
            if name in states:
                callback.load_state(states[name])
