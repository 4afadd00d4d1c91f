"""A CUDA stream for a thread that samples beside the trainer.

The work on a stream runs in the order in which it was queued. On the trainer's stream each decoded
token would wait for a micro-batch. On a side stream the thread waits only for its own inputs, which
an event marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream beside the current stream of the calling thread. Without CUDA it does nothing."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def record_event(self) -> torch.cuda.Event | None:
        """Return an event that marks the end of all work that this thread has queued until now."""
        if not self.stream:
            return None
        return torch.cuda.current_stream(self.stream.device).record_event()

    @contextmanager
    def after(
        self, event: torch.cuda.Event | None, tensors: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """Queue the work of the block on this stream, after the event.

        `tensors` were made on the other stream. Their memory is not reused before this stream has
        read them."""
        if not self.stream:
            yield
            return
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(event)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)
            yield
