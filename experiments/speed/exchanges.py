"""How long a rank is in exchanges with the others, told apart: waiting for the slowest rank, and
exchanging.

Nothing of this is in the trainer. While `Exchanges.timed` is open, the functions through which
ranks exchange are replaced by ones that first wait at a barrier until all ranks are there, and then
exchange. So the times before and after the barrier are noted apart. The barrier itself costs some
tenths of a millisecond for each exchange on a CPU; it counts as waiting. Tokens on their way to
experts that are dealt to ranks are not timed. That is for gloo, where an exchange is over when the
call returns: on a GPU it only begins then.
"""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gspo.train.trainer import Trainer

EXCHANGES = (
    (dist, "all_gather_object"),  # Ranks.all_gather: responses, rewards, metrics
    # Ranks.all_reduce: gradients and log-probs; FSDP's gradients between copies of the weights
    (dist, "all_reduce"),
    (dist, "all_gather_single"),  # FSDP: the weights of a layer
    (dist, "reduce_scatter_single"),  # FSDP: the gradients of a layer
    (DTensor, "full_tensor"),  # all weights for the engine; the gradients' norm
)
OTHER = "other"
PHASES = ("next", "old_logprobs", "update", "handover", OTHER)


class Exchanges:
    """The seconds of this rank's exchanges since they were last taken, by phase of a step. All
    ranks must make one.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.phase, self.noted = OTHER, defaultdict(float)

    @contextmanager
    def timed(self, trainer: Trainer) -> Iterator[None]:
        """Within this context the exchanges of this thread are timed."""
        source = trainer.source
        phases = (
            (source, "next"),
            (trainer.old_policy, "add"),
            (trainer, "update"),
            (source, "update"),
        )
        with ExitStack() as stack:
            for owner, name in EXCHANGES:
                stack.enter_context(patch.object(owner, name, self._timing(getattr(owner, name))))
            for phase, (owner, name) in zip(PHASES, phases, strict=False):
                stack.enter_context(
                    patch.object(owner, name, self._during(phase, getattr(owner, name)))
                )
            yield

    def taken(self) -> dict[str, float]:
        """Return what was noted since the last call: seconds of waiting and of exchanging by phase,
        and the number of exchanges."""
        names = [f"{phase}_{kind}_s" for phase in PHASES for kind in ("waiting", "exchanging")]
        found = {name: self.noted[name] for name in [*names, "exchanges"]}
        self.noted.clear()
        return found

    def _timing(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        main = threading.get_ident()

        @functools.wraps(exchange)
        def timed(*args: Any, **settings: Any) -> Any:
            # a rollout beside the training must not meet its barriers
            if threading.get_ident() != main:
                return exchange(*args, **settings)
            begun = time.perf_counter()
            dist.barrier(self.group)
            together = time.perf_counter()
            found = exchange(*args, **settings)
            self.noted[f"{self.phase}_waiting_s"] += together - begun
            self.noted[f"{self.phase}_exchanging_s"] += time.perf_counter() - together
            self.noted["exchanges"] += 1
            return found

        return timed

    def _during(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def within(*args: Any, **settings: Any) -> Any:
            self.phase = phase
            found = function(*args, **settings)
            self.phase = OTHER
            return found

        return within
