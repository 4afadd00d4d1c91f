"""What a user's own package may add to a run beside objective, advantages and task: metrics, and
callbacks.

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

from gspo.data.samples import Response
from gspo.io.ranges import Ranged

if TYPE_CHECKING:
    from gspo.data.batch import TrainBatch

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedStep:
    """Holds what a metric may read of a step, after its last update."""

    step: int
    # every response of the step as tensors: tokens, mask_BT, old_logp_BT (log-probs before the
    # updates), adv_BT
    batch: TrainBatch
    responses: list[Response]  # the rows of the batch: texts, scores, the engine's log-probs
    metrics: dict[str, float]  # the step's other metrics


@dataclass
class CustomMetric(Ranged, key="metrics"):
    """The base of a user's own metric: its fields are settings, and calling it computes the number
    of one step.

    Its name in a run is `custom/<name>`, from the setting metrics.<name>. A metric that raises an
    exception or is not finite is left out of the step's row; the first time a warning says why.
    """

    path: str = ""  # where the class is, for example my_pkg.extras:Long
    unit: ClassVar[str] = ""
    meaning: ClassVar[str] = ""

    def __call__(self, trained: TrainedStep) -> float:
        """Compute the metric of a step."""
        raise NotImplementedError


@dataclass
class Callback(Ranged, key="callbacks"):
    """The base of a user's own code around the steps; all methods may be left out.

    `trainer` is the gspo.train.trainer.Trainer. What a callback changes in it, such as
    `trainer.optim.lr`, acts from that moment on. An exception in a callback ends the run, which
    then goes on from its last checkpoint.
    """

    path: str = ""  # where the class is, for example my_pkg.extras:StopEarly

    def before_step(self, step: int, trainer: Any) -> None:
        """Act before the responses of a step are sampled."""

    def after_step(self, step: int, trainer: Any, metrics: dict[str, float]) -> bool | None:
        """Act after the step's updates and its row of metrics. Returns True to end the run after
        this step.
        """

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep of the callback; ready for JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, when a run is resumed."""


class Extensions:
    """Holds the metrics and callbacks of one run, by the names that the settings give them."""

    def __init__(self, metrics: dict[str, CustomMetric], callbacks: dict[str, Callback]):
        self.metrics, self.callbacks = metrics, dict(callbacks)  # a run adds its own
        self.warned: set[str] = set()  # metrics that were left out of a row already
        # what the user was not told yet; whoever tells it clears the list
        self.warnings: list[str] = []

    def measure(self, trained: TrainedStep) -> dict[str, float]:
        """Compute the user's metrics of a step."""
        found = {}
        for name, metric in self.metrics.items():
            try:
                value = float(metric(trained))
                why = "" if math.isfinite(value) else f"it is {value}"
            except Exception as error:  # a metric of the user's may raise anything; that must not end a run of days
                value, why = math.nan, f"{type(error).__name__}: {error}"
            if why and name not in self.warned:
                self.warned.add(name)
                LOG.info("custom/%s", name, exc_info=True)  # where in the user's code it was
                self.warnings.append(
                    f"step {trained.step}: custom/{name} is left out where it fails: {why}"
                )
            if not why:
                found[f"custom/{name}"] = value
        return found

    def before_step(self, step: int, trainer: Any) -> None:
        """Call every callback before a step."""
        for callback in self.callbacks.values():
            callback.before_step(step, trainer)

    def after_step(self, step: int, trainer: Any, metrics: dict[str, float]) -> bool:
        """Call every callback after a step; tell whether one of them ends the run."""
        return any(
            [callback.after_step(step, trainer, metrics) for callback in self.callbacks.values()]
        )

    def state(self) -> dict[str, dict]:
        """Return the states of the callbacks that have one."""
        return {
            name: state for name, callback in self.callbacks.items() if (state := callback.state())
        }

    def load_state(self, states: dict[str, dict]) -> None:
        """Restore what `state` returned; callbacks that are new keep the state they start with."""
        for name, callback in self.callbacks.items():
            if name in states:
                callback.load_state(states[name])
