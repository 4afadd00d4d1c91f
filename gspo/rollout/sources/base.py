"""The interface of rollout sources, from which the trainer takes its scored groups.

For example, a trainer calls `rollout = source.next(step)`, makes its updates, and calls
`source.update(step)`. It does not know whether the responses were sampled from the current weights
(gspo.rollout.sources.on_policy) or from older weights (gspo.rollout.sources.off_policy).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gspo.data.samples import Response, ScoredResponse
from gspo.rollout.engines.base import Engine
from gspo.rollout.settings import RolloutSettings
from gspo.tasks.base import Task


@dataclass
class Rollout:
    """The scored groups of one training step, and how many seconds they took."""

    groups: list[list[ScoredResponse]]
    rollout_s: float  # seconds that the engine sampled
    # seconds that the step waited for verifiers, after the engine had sampled
    score_s: float
    limit: int  # the largest number of response tokens at this step
    # groups that were scored but are not trained on
    dropped: list[list[ScoredResponse]] = field(default_factory=list)
    # responses that are left out because their verifier itself failed
    ungraded: list[ScoredResponse] = field(default_factory=list)
    # counts of filtered groups, responses and problems, by reason: see the sources
    filtered: dict[str, float] = field(default_factory=dict)
    # seconds that recomputing log-probs under the weights that sampled took
    behaviour_s: float = 0.0
    # seconds the trainer waited for a batch that was sampled beside the training
    waited_s: float | None = None
    # responses that were cut at the token budget and will be continued at later steps
    num_unfinished: int = 0
    environment_s: float = 0.0  # seconds of `rollout_s` that the engine waited for environments
    # metrics of the last load of weights into the engine
    synced: dict[str, float] = field(default_factory=dict)

    @property
    def responses(self) -> list[ScoredResponse]:
        """The responses that the step trains on."""
        return [r for group in self.groups for r in group]

    @property
    def sampled(self) -> list[list[ScoredResponse]]:
        """All groups, trained on or dropped. They all count in measures of the policy's quality."""
        return self.groups + self.dropped


@dataclass
class PendingRollouts:
    """Responses that were sampled and not trained on yet. A checkpoint keeps them.

    `rollouts` holds whole batches by the step that will train on them. `groups` holds the groups
    under way, complete or not, each with the number of its problem's draw.
    """

    rollouts: dict[int, Rollout] = field(default_factory=dict)
    groups: list[tuple[int, list[Response]]] = field(default_factory=list)


class NothingGraded(RuntimeError):
    """No response of a step could be graded, so there is nothing to train on.

    The message gives the reasons."""


class RolloutSource(Protocol):
    """Returns one batch of scored groups per step.

    `engine` samples the problems of `task`, under the settings of the rollout."""

    engine: Engine
    task: Task
    settings: RolloutSettings

    def start_recording_experts(self) -> None:
        """Let every response from now on hold the experts that the engine chose."""
        ...

    def next(self, step: int) -> Rollout:
        """Return the scored groups of a step.

        Raises RuntimeError if no response could be graded, EngineEnded if the engine has ended."""
        ...

    def update(self, step: int) -> None:
        """Sample from the weights that the trainer has after finishing `step` from now on.

        Raises RuntimeError if they did not arrive in the engine."""
        ...

    def check(self, step: int) -> None:
        """Raise RuntimeError if the engine's weights are not the trainer's after `step`."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state of a checkpoint, ready for JSON and often empty.

        A source that loads it continues with the same problems."""
        ...

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the result of `state` after `step`."""
        ...

    def pending(self) -> PendingRollouts:
        """Return the responses that were sampled and not trained on yet."""
        ...

    def restore_pending(self, pending: PendingRollouts) -> None:
        """Restore the result of `pending`."""
        ...

    def close(self) -> None:
        """Close the engine."""
        ...
