"""What the trainer takes its scored groups from: the interface of every rollout source, and what a
source hands over.

For example, a trainer takes `rollout = source.next(step)`, makes its updates, and calls
`source.update(step)`. It does not know whether the responses were sampled from the current weights
(gspo.rollout.sources.on_policy) or from older ones (gspo.rollout.sources.off_policy).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gspo.data.samples import Response, ScoredResponse
from gspo.rollout.engines.base import Engine
from gspo.rollout.settings import RolloutSettings
from gspo.tasks.base import Task


@dataclass
class Rollout:
    """The scored groups of one training step, and what they cost in seconds."""

    groups: list[list[ScoredResponse]]
    rollout_s: float  # seconds that the engine sampled
    # seconds spent waiting for the verifiers; what they do while the engine samples costs nothing
    score_s: float
    limit: int  # the largest number of response tokens at this step
    # groups that were scored but are not trained on
    dropped: list[list[ScoredResponse]] = field(default_factory=list)
    # responses left out because their verifier itself failed
    ungraded: list[ScoredResponse] = field(default_factory=list)
    # how many were left out for which reason; see the sources
    filtered: dict[str, float] = field(default_factory=dict)
    # seconds that recomputing log-probs under the weights that sampled took
    behaviour_s: float = 0.0
    # seconds the trainer waited for a batch that was sampled beside the training
    waited_s: float | None = None
    # responses that were cut at the token budget and will be continued at later steps
    in_flight: int = 0
    environment_s: float = 0.0  # seconds of `rollout_s` spent waiting for environments
    synced: dict[str, float] = field(
        default_factory=dict
    )  # metrics of loading the weights that sampled into the engine

    @property
    def responses(self) -> list[ScoredResponse]:
        """The responses that the step trains on."""
        return [r for group in self.groups for r in group]

    @property
    def sampled(self) -> list[list[ScoredResponse]]:
        """All groups, trained on or dropped. How good the policy is must be measured on all of
        them.
        """
        return self.groups + self.dropped


@dataclass
class PendingRollouts:
    """What a source has sampled and the trainer has not trained on yet; a checkpoint keeps it.

    `rollouts` holds whole batches by the step that will train on them. `groups` holds groups with
    unfinished responses, each beside the number of the draw of problems that it belongs to.
    """

    rollouts: dict[int, Rollout] = field(default_factory=dict)
    groups: list[tuple[int, list[Response]]] = field(default_factory=list)


class NothingGraded(RuntimeError):
    """Raised when no response of a step could be graded, so that there is nothing to train on. The
    message says why.
    """


class RolloutSource(Protocol):
    """Hands the trainer one batch of scored groups per step."""

    engine: Engine
    task: Task
    settings: RolloutSettings
    # whether the engine records the experts of every token; the trainer may turn it on
    record_experts: bool

    @property
    def exact(self) -> bool:
        """Whether the engine's log-probs and experts equal, up to rounding, those of the trainer's
        weights at the start of the step: then the trainer need not compute them again."""
        ...

    def next(self, step: int) -> Rollout:
        """Return the scored groups of a step. Raises RuntimeError if no response of it could be
        graded, and EngineEnded if the engine's process has ended."""
        ...

    def update(self, step: int) -> None:
        """Take over the weights that the trainer has after finishing `step`. Raises RuntimeError if
        they did not arrive in the engine."""
        ...

    def check(self, step: int) -> None:
        """Raise RuntimeError if the engine's weights are not those that the trainer had after
        `step`.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep so that the same problems follow; ready for JSON,
        often empty.
        """
        ...

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Restore what `state` returned after `step`."""
        ...

    def pending(self) -> PendingRollouts:
        """Return what was sampled and not yet trained on."""
        ...

    def restore_pending(self, pending: PendingRollouts) -> None:
        """Restore what `pending` returned."""
        ...

    def close(self) -> None:
        """Close the engine."""
        ...
