"""Spreads a model's weights over ranks (PyTorch's fully sharded data parallelism, FSDP2).

For example, with four ranks each holds a quarter of every layer's weights, gradients and optimizer state. Before a
layer computes, its weights are gathered; afterwards they are dropped again; in the backward pass the gradients of all
ranks are added, and each rank keeps its quarter of the sums. With groups of two ranks (hybrid sharding) each holds a
half, and both groups hold the same.

Every gathering takes all ranks of a group. So all of them must pass equally many micro-batches through the model, of
the same kind: `Shards.lockstep` says in which order, and where a rank has none left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from gspo.core.ranks import Ranks

T = TypeVar("T")


class Shards:
    """The ranks over which weights are spread. `size` ranks hold one copy of the weights; it divides their number."""

    def __init__(self, ranks: Ranks, size: int, device: str):
        self.ranks = ranks
        shape, names = ((size,), ("shard",))
        if size < ranks.count:
            shape, names = (ranks.count // size, size), ("replicate", "shard")
        self.mesh: DeviceMesh = init_device_mesh(device, shape, mesh_dim_names=names)

    def spread(self, model: transformers.PreTrainedModel, precision: torch.dtype) -> None:
        """Spread a model's parameters in place. The large matrices of each layer's experts or MLP are gathered in
        `precision`, in which they multiply; everything else in its own."""
        rounded = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in model.model.layers:
            self._spread(getattr(layer.mlp, "experts", layer.mlp), rounded)
            self._spread(layer, MixedPrecisionPolicy(cast_forward_inputs=False))
        self._spread(model, MixedPrecisionPolicy(cast_forward_inputs=False))

    def _spread(self, module: nn.Module, precision: MixedPrecisionPolicy) -> None:
        fully_shard(module, mesh=self.mesh, mp_policy=precision)
        # The loss is divided by the counts of all ranks already, so gradients are sums over the ranks, not means.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        module.run = MethodType(_run, module)
        register_fsdp_forward_method(module, "run")

    def lockstep(self, learns: list[bool]) -> Iterator[tuple[int | None, bool]]:
        """Yield, for this rank's micro-batches, of which `learns` says whether they need a gradient, the number of each
        and that word, so that all ranks yield as many of both kinds in the same order. The number is None where
        other ranks have a micro-batch and this one has none left."""
        for learning in (True, False):
            own = [i for i, does in enumerate(learns) if does is learning]
            most = max(self.ranks.gathered(len(own)))
            yield from ((i, learning) for i in own + [None] * (most - len(own)))


def own_rows(tensor: Tensor) -> range:
    """Return which rows of a parameter this rank holds: neighbours, ceil(rows / ranks) each while there are any."""
    if not isinstance(tensor, DTensor):
        return range(len(tensor))
    size = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    index = tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1)
    each = -(-len(tensor) // size)
    return range(len(tensor))[index * each : (index + 1) * each]


def _run(module: nn.Module, function: Callable[..., T], *args: Any) -> T:
    return function(*args)
