"""Spreads a model's weights over ranks (PyTorch's fully sharded data parallelism, FSDP2).

For example, with four ranks each holds a quarter of every layer's weights, gradients and optimizer
state. Before a layer computes, its weights are gathered; afterwards they are dropped again; in the
backward pass the gradients of all ranks are added, and each rank keeps its quarter of the sums.
With groups of two ranks (hybrid sharding) each holds a half, and both groups hold the same.

Of a mixture of experts, the experts may be dealt to the ranks instead (gspo.model.sharding.expert_parallel):
then each expert's weights are spread only over those ranks that have it.

Every gathering takes all ranks of a group. So all of them must pass equally many micro-batches
through the model, of the same kind: `Shards.lockstep` says in which order, and where a rank has
none left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gspo.distributed.ranks import Ranks
from gspo.model.forward.network import experts
from gspo.model.sharding.expert_parallel import ExpertRanks

# It warns wherever experts' weights or norms are put together in two exchanges: between those that
# share an expert, and between all.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

T = TypeVar("T")
COPIES, SPREAD, DEALT = "replicate", "shard", "experts"  # the dimensions of a grid of ranks


class Shards:
    """The ranks over which weights are spread. `size` ranks hold one copy of the weights; it
    divides their number. The experts of a layer are dealt to `experts` neighbours; that number
    divides the size."""

    def __init__(self, ranks: Ranks, size: int, device: str, experts: int = 1):
        self.ranks, self.experts = ranks, experts
        shape, names = ((size,), (SPREAD,))
        if size < ranks.world_size:
            shape, names = (ranks.world_size // size, size), (COPIES, SPREAD)
        self.mesh: DeviceMesh = init_device_mesh(device, shape, mesh_dim_names=names)
        if experts > 1:
            shape = (*shape[:-1], size // experts, experts)
            expert_mesh: DeviceMesh = init_device_mesh(
                device, shape, mesh_dim_names=(*names, DEALT)
            )
            # ranks of one expert; ranks of one layer
            self.sharing, self.dealt = expert_mesh[names], expert_mesh[DEALT]

    def spread(self, model: transformers.PreTrainedModel, precision: torch.dtype) -> None:
        """Spread a model's parameters in place. The large matrices of each layer's experts or MLP
        are gathered in `precision`, in which they multiply; everything else in its own."""
        rounded = MixedPrecisionPolicy(
            param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        plain = MixedPrecisionPolicy(cast_forward_inputs=False)
        sparse = [
            layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")
        ]
        if self.experts > 1:
            self._deal(sparse)
        for layer in model.model.layers:
            dealt = self.experts > 1 and hasattr(layer.mlp, "experts")
            mesh = self.sharing if dealt else self.mesh
            self._spread(getattr(layer.mlp, "experts", layer.mlp), mesh, rounded)
            self._spread(layer, self.mesh, plain)
        self._spread(model, self.mesh, plain)

    def _deal(self, layers: list[nn.Module]) -> None:
        """Leave to this rank its part of the experts of every layer. Raises ValueError if they
        cannot be dealt.
        """
        if not layers:
            raise ValueError(
                f"parallel.experts={self.experts}: this model has no experts; leave it at 1"
            )
        for own in layers:
            for name, parameter in list(own.named_parameters(recurse=False)):
                if len(parameter) % self.experts:
                    raise ValueError(
                        f"parallel.experts={self.experts} does not divide the model's {len(parameter)} experts"
                    )
                dealt = distribute_tensor(
                    parameter.data, self.dealt, [Shard(0)], src_data_rank=None
                )
                own.register_parameter(name, nn.Parameter(dealt, parameter.requires_grad))
            own.ranks = ExpertRanks(self.dealt.get_group())
            own.forward = MethodType(_forward, own)  # transformers' own knows of no ranks

    def _spread(self, module: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
        fully_shard(module, mesh=mesh, mp_policy=precision)
        # The loss is divided by the counts of all ranks already, so gradients are sums over the
        # ranks, not means.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        module.run = MethodType(_run, module)
        register_fsdp_forward_method(module, "run")

    def lockstep(self, learns: list[bool]) -> Iterator[tuple[int | None, bool]]:
        """Yield, for this rank's micro-batches, of which `learns` says whether they need a
        gradient, the number of each and that word, so that all ranks yield as many of both kinds in
        the same order. The number is None where other ranks have a micro-batch and this one has
        none left."""
        for learning in (True, False):
            own = [i for i, does in enumerate(learns) if does is learning]
            most = max(self.ranks.all_gather(len(own)))
            yield from ((i, learning) for i in own + [None] * (most - len(own)))


def own_rows(tensor: Tensor) -> range:
    """Return which rows of a parameter this rank holds: neighbours, ceil(rows / ranks) each while
    there are any. Experts are dealt first, and those of a rank then spread."""
    rows = range(len(tensor))
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for name in (DEALT, SPREAD):
            if name in mesh.mesh_dim_names:
                each = -(-len(rows) // mesh.size(mesh.mesh_dim_names.index(name)))
                index = mesh.get_local_rank(name)
                rows = rows[index * each : (index + 1) * each]
    return rows


def _run(module: nn.Module, function: Callable[..., T], *args: Any) -> T:
    return function(*args)


def _forward(own: nn.Module, h_NW: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Stand in for the forward of transformers' experts."""
    return experts(own, h_NW, weights_NK, experts_NK)
