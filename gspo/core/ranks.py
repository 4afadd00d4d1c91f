"""The processes that train one policy together, and the few things that they exchange.

For example, two ranks share a batch of eight problems. Each samples responses to the four that
`own` deals it, and `merged` gives both all eight again, in their order. Each passes its share of
the responses through the model, and `add_gradients` makes the gradients of both the same sums. What
is not shared is computed alike on every rank, so that neither sources nor the step ask which rank
they are. One process by itself exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gspo.core.signed_objects import sign_objects

T = TypeVar("T")
BUCKET = 2**24  # numbers that are added in one exchange


class RankLost(RuntimeError):
    """Another rank has ended, or has not answered for too long."""


class Ranks:
    """One process that trains by itself."""

    index = 0  # which of the processes this is
    count = 1

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's share of items: one of every `count`, from its index on."""
        return items[self.index :: self.count]

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        return [value]

    def merged(self, items: Sequence[T]) -> list[T]:
        """Return the items of all ranks in the order from which `own` dealt them."""
        dealt = self.gathered(list(items))
        found: list[T] = [None] * sum(map(len, dealt))  # type: ignore[list-item]
        for index, share in enumerate(dealt):
            found[index :: self.count] = share
        return found

    def told(self, value: T) -> T:
        """Return rank 0's value."""
        return self.gathered(value if self.index == 0 else None)[0]

    def sums(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, which must have one shape."""
        return tensor

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank."""
        return any(self.gathered(flag))

    def own_rows(self, size: int) -> Tensor:
        """Return which of `size` rows are this rank's: neighbours, because rows of one prompt are
        cheaper together.
        """
        return torch.arange(size).tensor_split(self.count)[self.index]

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients of every rank by their sums over the ranks. A parameter without
        gradient on all ranks stays without, so that the optimizer passes over it. Gradients of
        parameters that are spread over the ranks have been added in the backward pass."""

    def another(self, timeout: timedelta | None = None) -> Ranks:
        """Return the same ranks for another thread, which exchanges beside this one, or with
        another timeout. All ranks must ask for it."""
        return self

    def dealt(self, values: Sequence[T] | None) -> T:
        """Return the value that rank 0 has for this rank. Rank 0 gives a value for each rank, the
        others give None.
        """
        return values[0]

    def neighbours(self, size: int) -> Ranks:
        """Return this rank and its neighbours, as ranks of their own: of every `size` ranks in a
        row each is with the others. `size` divides the number of ranks; all of them must ask for
        it."""
        return self


class Processes(Ranks):
    """The ranks of torch.distributed's default group, which has been initialised; with `size` this
    one and its neighbours, `size` in all.

    Objects are signed (gspo.core.signed_objects). Numbers on a GPU are added by the default group
    if these are all its ranks. Everything else is exchanged by a group of its own, on gloo:
    instances may be used by several threads, one thread each. Every rank must make its instances in
    the same order. An exchange on gloo raises RankLost if another rank has ended, or if one does
    not answer within `timeout`.
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=30), size: int = 0):
        sign_objects()
        everyone, rank = dist.get_world_size(), dist.get_rank()
        self.count, self.timeout = size or everyone, timeout
        with lost_ranks():
            for first in range(0, everyone, self.count):  # every rank has to make every group
                group = dist.new_group(
                    list(range(first, first + self.count)), backend="gloo", timeout=timeout
                )
                if first <= rank < first + self.count:
                    self.group, self.index = group, rank - first
        self.on_gpu = None if self.count == everyone else self.group

    def gathered(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.count
        with lost_ranks():
            dist.all_gather_object(values, value, group=self.group)
        values[self.index] = value  # itself, not a copy
        return values

    def sums(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        with lost_ranks():
            dist.all_reduce(total, group=self.group if total.device.type == "cpu" else self.on_gpu)
        return total

    def another(self, timeout: timedelta | None = None) -> Ranks:
        return Processes(timeout or self.timeout, self.count)

    def dealt(self, values: Sequence[T] | None) -> T:
        found: list[Any] = [None]
        with lost_ranks():
            dist.scatter_object_list(
                found, values, src=dist.get_global_rank(self.group, 0), group=self.group
            )
        return values[0] if values else found[0]

    def neighbours(self, size: int) -> Ranks:
        return Processes(self.timeout, size)

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        parameters = [p for p in parameters if not hasattr(p, "full_tensor")]
        there = self.sums(
            torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        ).tolist()
        learning = [p for p, ranks in zip(parameters, there, strict=True) if ranks]
        for parameter in learning:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in buckets([parameter.grad for parameter in learning]):
            total = self.sums(torch.cat([gradient.flatten() for gradient in bucket]))
            for gradient, part in zip(
                bucket, total.split([g.numel() for g in bucket]), strict=True
            ):
                gradient.copy_(part.view_as(gradient))


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Turn the error of an exchange inside the block into RankLost."""
    try:
        yield
    except RuntimeError as error:  # of gloo and of NCCL
        raise RankLost(str(error).splitlines()[0]) from error


@contextmanager
def ranks_lost_in_passes() -> Iterator[None]:
    """Turn the error of an exchange that PyTorch makes by itself, such as for spread weights in a
    forward or backward pass, into RankLost."""
    try:
        yield
    except RuntimeError as error:
        # gloo's errors have no class of their own; each begins with the path of one of its source
        # files
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise RankLost(str(error).splitlines()[0]) from error
        raise


def buckets(tensors: list[Tensor], most: int = BUCKET) -> list[list[Tensor]]:
    """Cut a list of tensors into lists of one dtype with at most `most` numbers each, or of a
    single larger tensor.
    """
    found: list[list[Tensor]] = []
    for tensor in tensors:
        last = found[-1] if found else []
        if (
            last
            and last[0].dtype == tensor.dtype
            and sum(t.numel() for t in last) + tensor.numel() <= most
        ):
            last.append(tensor)
        else:
            found.append([tensor])
    return found
