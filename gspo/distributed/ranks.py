"""The ranks of a run: the processes that train one policy together, and their collectives.

For example, two ranks share a batch of eight problems. `shard` gives each rank four of them to
sample. `unshard` gives both ranks all eight groups again, in their order. Each rank passes its
share of the responses through the model, and `all_reduce_gradients` adds the gradients. Every rank
computes everything else alike, so sources and the step never ask for their rank.

`Ranks` is a run of a single process: every collective is the identity.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gspo.distributed.signed_objects import sign_objects
from gspo.io.errors import first_line

T = TypeVar("T")
BUCKET_NUMEL = 2**24  # elements of an all-reduce of gradients


class RankLost(RuntimeError):
    """Another rank has ended, or has not answered within the timeout."""


class Ranks:
    """The ranks of a run of a single process."""

    rank = 0
    world_size = 1

    def shard(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's share of items: every `world_size`-th item, from `rank` on."""
        return items[self.rank :: self.world_size]

    def unshard(self, items: Sequence[T]) -> list[T]:
        """Return the items of all ranks, in the order that they had before `shard`."""
        shares = self.all_gather(list(items))
        count = sum(len(share) for share in shares)
        merged = []
        for i in range(count):
            share = shares[i % self.world_size]
            merged.append(share[i // self.world_size])
        return merged

    def shard_rows(self, size: int) -> Tensor:
        """Return the indices of this rank's rows of `size` rows.

        They are consecutive: rows of the same prompt cost less together."""
        shares = torch.arange(size).tensor_split(self.world_size)
        return shares[self.rank]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, ordered by rank."""
        return [value]

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks to rank 0, and None to the others."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value."""
        # the other ranks' values do not travel
        sent = value if self.rank == 0 else None
        values: list[Any] = self.all_gather(sent)
        return values[0]

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return rank 0's value for this rank. Rank 0 passes a value per rank, others None."""
        if values is None:
            raise ValueError("rank 0 must pass a value per rank")
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
    group. A subgroup reduces them by its own gloo group, like all else. Everything else goes
    through a gloo group of this instance, so each thread can use an instance of its own. All ranks
    must create their instances in the same order. Objects are signed
    (gspo.distributed.signed_objects).

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

    def gather(self, value: T) -> list[T] | None:
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        with ranks_lost():
            target = dist.get_global_rank(self.group, 0)
            dist.gather_object(value, values, dst=target, group=self.group)
        return values

    def scatter(self, values: Sequence[T] | None) -> T:
        received: list[Any] = [None]
        sent = None if values is None else list(values)
        source = dist.get_global_rank(self.group, 0)
        with ranks_lost():
            dist.scatter_object_list(received, sent, src=source, group=self.group)
        # the object itself, not a copy
        return values[0] if values else received[0]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        group = self.group if total.device.type == "cpu" else self.gpu_group
        with ranks_lost():
            dist.all_reduce(total, group=group)
        return total

    def all_reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        replicated = [p for p in parameters if not hasattr(p, "full_tensor")]
        has_gradient = [p.grad is not None for p in replicated]
        ranks_with_gradient = self.all_reduce(torch.tensor(has_gradient, dtype=torch.int32))
        gradients = []
        for parameter, count in zip(replicated, ranks_with_gradient.tolist(), strict=True):
            if count == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for bucket in buckets(gradients):
            total = self.all_reduce(torch.cat([gradient.flatten() for gradient in bucket]))
            sums = total.split([gradient.numel() for gradient in bucket])
            for gradient, gradient_sum in zip(bucket, sums, strict=True):
                gradient.copy_(gradient_sum.view_as(gradient))

    def new_group(self, timeout: timedelta | None = None) -> Ranks:
        return DistributedRanks(timeout or self.timeout, self.world_size)

    def subgroup(self, size: int) -> Ranks:
        return DistributedRanks(self.timeout, size)


@contextmanager
def ranks_lost() -> Generator[None]:
    """Turn the error of a collective inside the block into RankLost."""
    try:
        yield
    # gloo and NCCL raise it
    except RuntimeError as error:
        raise RankLost(first_line(error)) from error


@contextmanager
def ranks_lost_in_passes() -> Generator[None]:
    """Turn the error of a collective that PyTorch makes by itself into RankLost.

    FSDP makes such collectives in the forward and the backward pass."""
    try:
        yield
    except RuntimeError as error:
        # gloo's errors have no class of their own; each begins with the path of a source file
        is_of_gloo = "/gloo/" in str(error)
        if is_of_gloo or isinstance(error, dist.DistError):
            raise RankLost(first_line(error)) from error
        raise


def buckets(
    tensors: list[Tensor],
    max_numel: int = BUCKET_NUMEL,
) -> list[list[Tensor]]:
    """Group consecutive tensors of equal dtype into lists of at most `max_numel` elements.

    A tensor with more elements gets a list of its own."""
    grouped: list[list[Tensor]] = []
    bucket: list[Tensor] = []
    bucket_numel = 0
    for tensor in tensors:
        fits = bucket_numel + tensor.numel() <= max_numel
        if not bucket or not fits or bucket[0].dtype != tensor.dtype:
            bucket = []
            bucket_numel = 0
            grouped.append(bucket)
        bucket.append(tensor)
        bucket_numel += tensor.numel()
    return grouped
