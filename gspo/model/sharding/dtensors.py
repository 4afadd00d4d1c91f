"""Functions for weights that may be sharded over ranks (gspo.model.sharding.fsdp).

Most runs shard nothing. These functions therefore test for attributes instead of classes:
importing PyTorch's classes of sharded weights takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

    from gspo.model.sharding.expert_parallel import ExpertRanks

T = TypeVar("T")


class ShardedModule(Protocol):
    """A module that gspo.model.sharding.fsdp has sharded."""

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function while the module's weights are all-gathered."""
        ...

    def reshard(self) -> None:
        """Free the weights of other ranks."""


@overload
def is_sharded(weights: Tensor) -> TypeIs[DTensor]: ...
@overload
def is_sharded(weights: object) -> TypeGuard[ShardedModule]: ...
def is_sharded(weights: object) -> bool:
    """Return whether a tensor, or the weights of a module, are sharded over ranks."""
    attribute = "full_tensor" if isinstance(weights, Tensor) else "set_reshard_after_forward"
    # Every layer asks this. The class is faster to ask than a module, which searches three
    # dictionaries for a name that it lacks.
    return hasattr(type(weights), attribute)


def run_unsharded(module: object, function: Callable[..., T], *args: Any) -> T:
    """Call a function while the module's weights are all-gathered, if they are sharded.

    Tensors that need a gradient must be among the arguments and in a returned tuple, because FSDP
    registers its hooks on these."""
    return module.run(function, *args) if is_sharded(module) else function(*args)


def reshard(module: object) -> None:
    """Free the weights of other ranks, if the module's weights are sharded."""
    if is_sharded(module):
        module.reshard()


def expert_ranks(experts: object) -> ExpertRanks | None:
    """Return the ranks that share a layer's experts, or None if each rank has all experts."""
    return experts.__dict__.get("ranks") if is_sharded(experts) else None


def architecture(model: nn.Module) -> str:
    """Return the name of a model's class. FSDP derives a class of another name from it."""
    model_class = type(model).__bases__[1] if is_sharded(model) else type(model)
    return model_class.__name__


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a tensor that may be sharded. All its ranks must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that may be sharded, with its gradient."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def device_mesh(tensor: Tensor) -> Any:
    """Return the device mesh over which a tensor is sharded, or None if it is not sharded."""
    return getattr(tensor, "device_mesh", None)


def clip_grad_norm(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients so that their total norm is at most `max_norm`. Return the norm before.

    PyTorch's `clip_grad_norm_` requires that all parameters are sharded over the same ranks. Here
    their meshes may differ, and some parameters may not be sharded."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(device_mesh(parameter), []).append(parameter)
    norms = []
    for group in by_mesh.values():
        gradients = [p.grad for p in group if p.grad is not None]
        norms.append(full_tensor(get_total_norm(gradients)))
    norm = norms[0] if len(norms) == 1 else torch.stack([n.cpu() for n in norms]).norm()
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, norm)
    return norm
