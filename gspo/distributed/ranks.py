"""The ranks of a run: the processes that train one policy together, and their collectives.

For example, two ranks share a batch of eight problems. `shard` gives each rank four of them to
sample. `unshard` gives both ranks all eight groups again, in their order. Each rank passes its
share of the responses through the model, and `all_reduce_gradients` adds the gradients. Every rank
computes everything else alike, so sources and the step never ask for their rank.

`Ranks` is a run of one process: every collective is the identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gspo.distributed.signed_objects import sign_objects

T = TypeVar("T")
BUCKET_NUMEL = 2**24  # elements of one all-reduce of gradients


class RankLost(RuntimeError):
    """Another rank has ended, or has not answered within the timeout."""


class Ranks:
    """The ranks of a run of one process."""

    rank = 0
    world_size = 1

    def shard(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's share of items: every `world_size`-th item, from `rank` on."""
        return items[self.rank :: self.world_size]

    def unshard(self, items: Sequence[T]) -> list[T]:
        """Return the items of all ranks, in the order that they had before `shard`."""
        shares = self.all_gather(list(items))
        merged: list[T] = [None] * sum(map(len, shares))  # type: ignore[list-item]
        for rank, share in enumerate(shares):
            merged[rank :: self.world_size] = share
        return merged

    def shard_rows(self, size: int) -> Tensor:
        """Return the indices of this rank's rows of `size` rows.

        They are consecutive: rows of one prompt cost less together."""
        return torch.arange(size).tensor_split(self.world_size)[self.rank]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, ordered by rank."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value."""
        return self.all_gather(value if self.rank == 0 else None)[0]

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return rank 0's value for this rank. Rank 0 passes one value per rank, others None."""
        return values[0]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, which must have the same shape."""
        return tensor

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank."""
        return any(self.all_gather(flag))

    def all_reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients of all ranks by their sums.

        A parameter that has no gradient on any rank keeps none, so the optimizer leaves it alone.
        Sharded parameters (DTensor) are left out: FSDP sums their gradients in the backward pass.
        """

    def new_group(self, timeout: timedelta | None = None) -> Ranks:
        """Return the same ranks for another thread, or with another timeout.

        All ranks must call this, in the same order."""
        return self

    def subgroup(self, size: int) -> Ranks:
        """Return the group of `size` consecutive ranks that this rank belongs to.

        `size` divides the world size. All ranks must call this, in the same order."""
        return self


class DistributedRanks(Ranks):
    """The ranks of torch.distributed's default group, or of a subgroup of `size` ranks.

    `dist.init_process_group` must have been called. Tensors on a GPU are reduced by the default
    group, or by this group where it is a subgroup. Everything else goes through a gloo group of
    this instance, so each thread can use an instance of its own. All ranks must create their
    instances in the same order. Objects are signed (gspo.distributed.signed_objects).

    A collective raises RankLost if a rank has ended, or does not answer within `timeout`.
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=30), size: int = 0):
        sign_objects()
        default_size = dist.get_world_size()
        default_rank = dist.get_rank()
        self.world_size = size or default_size
        self.timeout = timeout
        with ranks_lost():
            # every rank has to create every group
            for first in range(0, default_size, self.world_size):
                members = range(first, first + self.world_size)
                group = dist.new_group(list(members), backend="gloo", timeout=timeout)
                if default_rank in members:
                    self.group = group
                    self.rank = default_rank - first
        self.gpu_group = None if self.world_size == default_size else self.group

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        with ranks_lost():
            dist.all_gather_object(values, value, group=self.group)
        values[self.rank] = value  # the object itself, not a copy
        return values

    def scatter(self, values: Sequence[T] | None) -> T:
        received: list[Any] = [None]
        source = dist.get_global_rank(self.group, 0)
        with ranks_lost():
            dist.scatter_object_list(received, values, src=source, group=self.group)
        return values[0] if values else received[0]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        group = self.group if total.device.type == "cpu" else self.gpu_group
        with ranks_lost():
            dist.all_reduce(total, group=group)
        return total

    def all_reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        replicated = [p for p in parameters if not hasattr(p, "full_tensor")]
        has_gradient = torch.tensor([p.grad is not None for p in replicated], dtype=torch.int32)
        ranks_with_gradient = self.all_reduce(has_gradient).tolist()
        trained = [p for p, n in zip(replicated, ranks_with_gradient, strict=True) if n]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in buckets([parameter.grad for parameter in trained]):
            total = self.all_reduce(torch.cat([gradient.flatten() for gradient in bucket]))
            parts = total.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def new_group(self, timeout: timedelta | None = None) -> Ranks:
        return DistributedRanks(timeout or self.timeout, self.world_size)

    def subgroup(self, size: int) -> Ranks:
        return DistributedRanks(self.timeout, size)


@contextmanager
def ranks_lost() -> Iterator[None]:
    """Turn the error of a collective inside the block into RankLost."""
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL raise it
        raise RankLost(str(error).splitlines()[0]) from error


@contextmanager
def ranks_lost_in_passes() -> Iterator[None]:
    """Turn the error of a collective that PyTorch makes by itself into RankLost.

    FSDP makes such collectives in the forward and the backward pass."""
    try:
        yield
    except RuntimeError as error:
        # gloo's errors have no class of their own; each begins with the path of a source file
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise RankLost(str(error).splitlines()[0]) from error
        raise


def buckets(tensors: list[Tensor], max_numel: int = BUCKET_NUMEL) -> list[list[Tensor]]:
    """Group consecutive tensors of one dtype into lists of at most `max_numel` elements.

    A tensor with more elements gets a list of its own."""
    grouped: list[list[Tensor]] = []
    for tensor in tensors:
        last = grouped[-1] if grouped else []
        numel = sum(t.numel() for t in last) + tensor.numel()
        if last and last[0].dtype == tensor.dtype and numel <= max_numel:
            last.append(tensor)
        else:
            grouped.append([tensor])
    return grouped
