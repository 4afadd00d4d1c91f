"""What the model's other modules need to know of weights that may be spread over ranks
(gspo.model.sharding).

Most runs spread nothing. So this asks what a module or tensor can do instead of what it is:
PyTorch's classes for spread weights take a second to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from gspo.model.expert_parallel import ExpertRanks

T = TypeVar("T")


def is_spread(weights: nn.Module | Tensor) -> bool:
    """Return whether a tensor, or the weights of a module, are spread over ranks."""
    # of the class: a module looks for a name that it has not in three places, and this is asked in
    # every layer
    return hasattr(
        type(weights), "full_tensor" if isinstance(weights, Tensor) else "set_reshard_after_forward"
    )


def run_in(module: nn.Module, function: Callable[..., T], *args: Any) -> T:
    """Call the function while the module's weights are gathered, if they are spread over ranks.
    Tensors that need a gradient must be among the arguments and in a returned tuple, where FSDP
    finds them."""
    return module.run(function, *args) if is_spread(module) else function(*args)


def expert_ranks(experts: nn.Module) -> ExpertRanks | None:
    """Return the ranks to which the experts of a layer are dealt; None where each rank has all of
    them.
    """
    return experts.__dict__.get("ranks") if is_spread(experts) else None


def architecture(model: nn.Module) -> str:
    """Return the name of a model's class. FSDP makes a class of its own from it, with another name."""
    return (type(model).__bases__[1] if is_spread(model) else type(model)).__name__


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return a tensor whose parts may be spread over ranks, all of which must call this."""
    return tensor.full_tensor() if is_spread(tensor) else tensor


def held(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor whose parts may be dealt to ranks; with its gradient."""
    return tensor.to_local() if is_spread(tensor) else tensor


def device_mesh(tensor: Tensor) -> Any:
    """Return the grid of ranks over which a tensor is spread; None if it is not."""
    return getattr(tensor, "device_mesh", None)


def clip_gradients(parameters: list[nn.Parameter], most: float) -> Tensor:
    """Scale all gradients so that their common Euclidean norm is at most `most`; return the norm
    that they had.

    PyTorch's `clip_grad_norm_` does that for parameters that are spread over the same ranks. Here
    some may be spread over others than the rest, or not at all."""
    by_ranks: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_ranks.setdefault(device_mesh(parameter), []).append(parameter)
    norms = [whole(get_total_norm([p.grad for p in alike])) for alike in by_ranks.values()]
    norm = norms[0] if len(norms) == 1 else torch.stack([n.cpu() for n in norms]).norm()
    for alike in by_ranks.values():
        clip_grads_with_norm_(alike, most, norm)
    return norm
