"""A CUDA stream for a thread that samples beside the trainer.

Work on one stream runs in the order in which it was queued. On the trainer's own stream each
decoded token would wait for a micro-batch. On a stream of its own the thread must wait for what it
uses, which an event marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream beside the one that the calling thread queues its work on. Where there is no CUDA it
    does nothing.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def record_event(self) -> torch.cuda.Event | None:
        """Return an event that is reached once all that this thread has queued until now is done."""
        return torch.cuda.current_stream(self.stream.device).record_event() if self.stream else None

    @contextmanager
    def after(
        self, event: torch.cuda.Event | None, tensors: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """Within this context the calling thread queues its work on this stream, where it begins
        after the event.

        `tensors` were made on the other stream. Their memory is not given away before this stream
        has read them."""
        if not self.stream:
            yield
            return
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(event)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)
            yield
