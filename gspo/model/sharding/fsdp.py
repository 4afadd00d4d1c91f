"""Shards a model's weights over ranks with PyTorch's fully sharded data parallelism (FSDP2).

For example, each of four ranks holds a quarter of every layer's weights, gradients and optimizer
state. Before a layer computes, its weights are all-gathered. After it has computed, they are freed.
In the backward pass the gradients of all ranks are added, and each rank keeps its quarter of the
sums. With groups of two ranks (hybrid sharding) each rank holds a half, and the groups are replicas
of each other.

The experts of a mixture of experts may be sharded by expert instead
(gspo.model.sharding.expert_parallel). Then each expert's weights are sharded only over the ranks
that have this expert.

An all-gather needs all ranks of a group. So all ranks must pass the same number of micro-batches
through the model, of the same kind. `Shards.lockstep` gives the order, and says when a rank has no
micro-batch left.
"""

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
from gspo.io.errors import SettingError
from gspo.model.forward.experts import run_experts
from gspo.model.forward.layers import Experts
from gspo.model.sharding.expert_parallel import ExpertRanks

# It warns whenever experts' weights or norms are unsharded in two collectives: one among the ranks
# that share an expert, one among all ranks.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

T = TypeVar("T")
# the names of the dimensions of a device mesh
REPLICATE = "replicate"
SHARD = "shard"
EXPERTS = "experts"


class Shards:
    """The ranks over which weights are sharded.

    `size` ranks hold a replica of the weights. It divides the number of ranks. `experts`
    neighbouring ranks hold the experts of a layer. It divides the size."""

    def __init__(
        self,
        ranks: Ranks,
        size: int,
        device: str,
        experts: int = 1,
    ):
        self.ranks = ranks
        self.experts = experts
        replicas = ranks.world_size // size
        shape = (replicas, size) if replicas > 1 else (size,)
        names = (REPLICATE, SHARD) if replicas > 1 else (SHARD,)
        self.mesh: DeviceMesh = init_device_mesh(device, shape, mesh_dim_names=names)
        if experts > 1:
            shape = (*shape[:-1], size // experts, experts)
            mesh: DeviceMesh = init_device_mesh(device, shape, mesh_dim_names=(*names, EXPERTS))
            # the ranks that have the same experts
            self.same_experts_mesh = mesh[names]
            # the ranks that together have all experts of a layer
            self.expert_mesh = mesh[EXPERTS]

    def shard_model(self, model: transformers.PreTrainedModel, precision: torch.dtype) -> None:
        """Shard a model's parameters in place.

        The large matrices of each layer's experts or MLP are all-gathered in `precision`, in which
        they are multiplied. All other parameters are all-gathered in their own precision."""
        rounded = MixedPrecisionPolicy(
            param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        not_rounded = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.experts > 1:
            self._shard_experts(model)
        for layer in model.model.layers:
            is_moe = hasattr(layer.mlp, "experts")
            matrices = layer.mlp.experts if is_moe else layer.mlp
            mesh = self.same_experts_mesh if is_moe and self.experts > 1 else self.mesh
            self._fully_shard(matrices, mesh, rounded)
            self._fully_shard(layer, self.mesh, not_rounded)
        self._fully_shard(model, self.mesh, not_rounded)

    def _shard_experts(self, model: transformers.PreTrainedModel) -> None:
        """Keep only this rank's experts of every layer.

        Raises ValueError if the experts cannot be sharded."""
        layers = [
            layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")
        ]
        if not layers:
            raise SettingError(
                "parallel.experts",
                self.experts,
                "this model has no experts",
                remedy="leave it at 1",
            )
        for module in layers:
            for name, parameter in list(module.named_parameters(recurse=False)):
                if len(parameter) % self.experts:
                    raise SettingError(
                        "parallel.experts",
                        self.experts,
                        f"does not divide the model's {len(parameter)} experts",
                    )
                sharded = distribute_tensor(
                    parameter.data, self.expert_mesh, [Shard(0)], src_data_rank=None
                )
                module.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))
            module.ranks = ExpertRanks(self.expert_mesh.get_group())
            # transformers' forward does not know about ranks
            add_method(module, "forward", _experts_forward)

    def _fully_shard(
        self, module: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy
    ) -> None:
        """Shard the parameters of a module that no submodule has sharded."""
        sharded = fully_shard(module, mesh=mesh, mp_policy=precision)
        # The loss is divided by the counts of all ranks already, so gradients are summed over the
        # ranks, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        # gloo has no other reduction
        sharded.set_force_sum_reduction_for_comms(True)
        add_method(module, "run", _run)
        register_fsdp_forward_method(module, "run")

    def lockstep(self, needs_gradient: list[bool]) -> Iterator[tuple[int | None, bool]]:
        """Yield index and need of a gradient of this rank's micro-batches.

        All ranks yield the same number of micro-batches with and without gradient, in the same
        order. The index is None if other ranks have a micro-batch and this rank has none left."""
        for kind in (True, False):
            indices = [i for i, needed in enumerate(needs_gradient) if needed is kind]
            steps = max(self.ranks.all_gather(len(indices)))
            for step in range(steps):
                yield (indices[step] if step < len(indices) else None), kind


def local_rows(tensor: Tensor) -> range:
    """Return the rows of a parameter that this rank holds.

    They are neighbours: ceil(rows / ranks) on each rank, until none are left. Experts are sharded
    by expert first, and then over the ranks that have the same experts."""
    rows = range(len(tensor))
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        dimensions = mesh.mesh_dim_names or ()
        for name in (EXPERTS, SHARD):
            if name in dimensions:
                ranks = mesh.size(dimensions.index(name))
                rows_per_rank = -(-len(rows) // ranks)
                first = mesh.get_local_rank(name) * rows_per_rank
                rows = rows[first : first + rows_per_rank]
    return rows


def add_method(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Give a single module a method, or replace its method. The module is the first argument."""
    setattr(module, name, MethodType(function, module))


def _run(module: nn.Module, function: Callable[..., T], *args: Any) -> T:
    return function(*args)


def _experts_forward(
    experts: Experts,
    h_NW: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
) -> Tensor:
    """Replace the forward of transformers' experts."""
    return run_experts(experts, h_NW, weights_NK, experts_NK)
