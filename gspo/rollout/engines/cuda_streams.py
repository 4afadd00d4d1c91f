"""A CUDA stream for a thread that samples beside the trainer.

The work on a stream runs in the order in which it was queued. On the trainer's stream each decoded
token would wait for a micro-batch. On a side stream the thread waits only for its own inputs, which
an event marks.
"""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class SideThread:
    """A thread that samples beside the trainer, with a stream of its own."""

    def __init__(self, device: torch.device):
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self.stream = SideStream(device)

    def submit(self, function: Callable[[], T], tensors: Iterable[Tensor] = ()) -> Future[T]:
        """Let the thread call a function, on the device after the work that the caller has queued.

        The function may read `tensors`, which the caller's stream made."""
        side_stream = self.stream.after_queued_work(tensors)

        def call() -> T:
            with side_stream:
                return function()

        return self.thread.submit(call)

    def close(self) -> None:
        """End the thread. A call that has not begun is cancelled."""
        self.thread.shutdown(cancel_futures=True)


class SideStream:
    """A stream beside the current stream of the calling thread. Without CUDA it does nothing."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_queued_work(self, tensors: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
        """Return a context whose work begins after the work that this thread has queued until now.

        The work of the context is queued on the side stream. Another thread may enter the context.
        `tensors` were made on the other stream. Their memory is not reused before the side stream
        has read them."""
        if not self.stream:
            return nullcontext()
        event = torch.cuda.current_stream(self.stream.device).record_event()
        return _queued_after(event, self.stream, tensors)


@contextmanager
def _queued_after(
    event: torch.cuda.Event, stream: torch.cuda.Stream, tensors: Iterable[Tensor]
) -> Generator[None]:
    """Queue the work of the block on a stream after the event, and keep the tensors' memory."""
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)
        yield
