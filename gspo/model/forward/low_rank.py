"""The two matrices of a layer's LoRA adapter, or the layer's weight with its adapter merged in.

LoRA (arXiv:2106.09685, section 4.1) leaves a weight W [out, in] as it is and trains two narrow
matrices beside it:

    h = W x + (alpha / r) B A x

At first A [r, in] is random and B [out, r] is zero, so nothing changes yet.

While the adapter learns, the formula is computed as it stands: W needs no gradient, and no tensor
of W's size is made. While weights are frozen (in a rollout, in scoring), W + (alpha / r) B A
replaces W. gspo.model.forward.packed_weights computes it once. The two differ by rounding.

peft puts a wrapper around each adapted layer, and two wrappers around an MoE layer's experts, one
for each of their tensors. Importing peft takes a second and most runs have no adapter. These
functions therefore test for attributes instead of classes.

Shape suffixes: E experts, r the rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard, overload

from torch import Tensor

from gspo.model.forward.layers import Experts, ExpertsWrapper, Linear, LinearWrapper, Wrapper

if TYPE_CHECKING:
    from typing_extensions import TypeIs

# peft's name of a model's only adapter
NAME = "default"
# (alpha / r) B and A: [out, r] and [r, in]; for experts [E, out, r] and [E, r, in]
Factors = tuple[Tensor, Tensor]


@overload
def is_wrapped(module: Experts | ExpertsWrapper) -> TypeIs[ExpertsWrapper]: ...
@overload
def is_wrapped(module: object) -> TypeGuard[Wrapper]: ...
def is_wrapped(module: object) -> bool:
    """Return whether a module is peft's wrapper around a layer or a tensor of the experts."""
    return hasattr(type(module), "get_delta_weight")


@overload
def is_adapted(module: Linear) -> TypeGuard[LinearWrapper]: ...
@overload
def is_adapted(module: object) -> TypeGuard[Wrapper]: ...
def is_adapted(module: object) -> bool:
    """Return whether a module has an adapter that is switched on."""
    return is_wrapped(module) and not module.disable_adapters


def factors(layer: Linear) -> Factors | None:
    """Return (alpha / r) B and A of a linear layer, with gradients. None: it is not adapted."""
    if not is_adapted(layer):
        return None
    return layer.lora_B[NAME].weight * layer.scaling[NAME], layer.lora_A[NAME].weight


def merged(layer: Linear) -> Tensor:
    """Return the weight of a linear layer, with its adapter merged in: W + (alpha / r) B A."""
    return layer.weight + layer.get_delta_weight(NAME) if is_adapted(layer) else layer.weight


def unwrapped(experts: Experts | ExpertsWrapper) -> tuple[Experts, dict[str, ExpertsWrapper]]:
    """Return a layer's experts without wrappers, and the wrappers by the tensor that they adapt."""
    wrappers: dict[str, ExpertsWrapper] = {}
    while is_wrapped(experts):
        wrappers[experts.parameter_name] = experts
        experts = experts.base_layer
    return experts, wrappers


def factors_of_experts(wrappers: dict[str, ExpertsWrapper], name: str) -> Factors | None:
    """Return (alpha / r) B and A of all experts' matrices `name`, with gradients.

    The result is None if the matrices are not adapted."""
    wrapper = wrappers.get(name)
    if wrapper is None or wrapper.disable_adapters:
        return None
    b, a, scale = wrapper.get_delta_factors(NAME)
    # peft stores B as [out, r, E]; a grouped product needs each expert's matrix contiguous
    return (scale * b).contiguous(), a


def merged_experts(experts: Experts | ExpertsWrapper) -> tuple[Tensor, Tensor] | None:
    """Return the experts' gate-and-up and down matrices with their adapters merged in.

    The result is None if the experts are not adapted."""
    module, wrappers = unwrapped(experts)
    if not any(is_adapted(wrapper) for wrapper in wrappers.values()):
        return None
    up = module.gate_up_proj + wrappers["gate_up_proj"].get_delta_weight(NAME)
    down = module.down_proj + wrappers["down_proj"].get_delta_weight(NAME)
    return up, down
