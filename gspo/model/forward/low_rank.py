"""What our forward asks of layers that carry a LoRA adapter: its two narrow matrices, or the weight
with it merged in.

LoRA (arXiv:2106.09685, section 4.1) leaves a weight W [out, in] as it is and trains two narrow
matrices beside it:

    h = W x + (alpha / r) B A x        A [r, in] is random at first, B [out, r] is zero, so that
                                       nothing changes yet

Where the adapter learns, it is computed as the formula has it: W needs no gradient, and nothing of
W's size is made. Where weights are frozen for a while (a rollout, scoring), W + (alpha / r) B A
takes W's place, which gspo.model.forward.packed_weights prepares once. The two differ by rounding.

peft puts a wrapper around each adapted layer, and around an MoE layer's experts one for each of
their two tensors. Importing peft takes a second and most runs have no adapter, so this asks what a
module can do instead of what it is.

Shape suffixes: E experts, r the rank.
"""

from __future__ import annotations

from torch import Tensor, nn

NAME = "default"  # of the only adapter of a model, as peft calls it
# (alpha / r) B and A: [out, r] and [r, in], of experts [E, out, r] and [E, r, in]
Factors = tuple[Tensor, Tensor]


def is_wrapped(module: nn.Module) -> bool:
    """Return whether a module is peft's wrapper around a layer, or around one tensor of the
    experts.
    """
    return hasattr(type(module), "get_delta_weight")


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module carries an adapter that is not switched off."""
    return is_wrapped(module) and not module.disable_adapters


def factors(layer: nn.Module) -> Factors | None:
    """Return (alpha / r) B and A of a linear layer, with their gradients; None where no adapter
    acts.
    """
    if not is_adapted(layer):
        return None
    return layer.lora_B[NAME].weight * layer.scaling[NAME], layer.lora_A[NAME].weight


def merged(layer: nn.Module) -> Tensor:
    """Return the weight of a linear layer, W + (alpha / r) B A where an adapter acts, as peft
    merges it.
    """
    return layer.weight + layer.get_delta_weight(NAME) if is_adapted(layer) else layer.weight


def unwrapped(experts: nn.Module) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Return the experts of a layer, and the wrappers around them by the name of the tensor that
    each adapts.
    """
    wrappers = {}
    while is_wrapped(experts):
        wrappers[experts.parameter_name] = experts
        experts = experts.base_layer
    return experts, wrappers


def factors_of_experts(wrappers: dict[str, nn.Module], name: str) -> Factors | None:
    """Return (alpha / r) B and A of every expert's matrix `name`, with gradients; None where no
    adapter acts.
    """
    wrapper = wrappers.get(name)
    if wrapper is None or not is_adapted(wrapper):
        return None
    b, a, scale = wrapper.get_delta_factors(NAME)
    # peft keeps B as [out, r, E]: a grouped product wants an expert's side by side
    return (scale * b).contiguous(), a


def merged_experts(experts: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return the experts' gate-and-up and down matrices with their adapters merged in; None where
    no adapter acts.
    """
    own, wrappers = unwrapped(experts)
    if not any(is_adapted(wrapper) for wrapper in wrappers.values()):
        return None
    names = ("gate_up_proj", "down_proj")
    return tuple(getattr(own, name) + wrappers[name].get_delta_weight(NAME) for name in names)
