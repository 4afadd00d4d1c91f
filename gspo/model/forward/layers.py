"""The parts of a transformers model that our forward reads, as types.

transformers has a class for each part of each family. The classes of the supported families
(gspo.model.forward.network.FAMILIES) share the attributes that are named here. peft may put a
wrapper around a linear layer, which then has the same attributes, and around the experts of an MoE
layer (gspo.model.forward.low_rank).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    import transformers
    from typing_extensions import TypeIs


# gives logits, gate weights and the choice of experts
Router = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Linear(Protocol):
    """A linear layer x W^T + b."""

    weight: Tensor
    bias: Tensor | None
    out_features: int

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Norm(Protocol):
    """A root-mean-square norm."""

    weight: Tensor
    variance_epsilon: float


class Attention(Protocol):
    """The projections of attention."""

    config: transformers.PretrainedConfig
    head_dim: int
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear


class NormedAttention(Attention, Protocol):
    """Attention that normalises q and k, as some families do."""

    q_norm: Norm
    k_norm: Norm


class DenseMlp(Protocol):
    """A gated MLP."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Experts(Protocol):
    """The experts of an MoE layer: the matrices of all gated MLPs, stacked."""

    gate_up_proj: Tensor
    down_proj: Tensor
    num_experts: int


class Wrapper(Protocol):
    """peft's wrapper around a linear layer, or around experts for one of their tensors."""

    @property
    def disable_adapters(self) -> bool: ...

    def enable_adapters(self, enabled: bool) -> None: ...

    def get_delta_weight(self, adapter: str, /) -> Tensor: ...


class LinearWrapper(Linear, Wrapper, Protocol):
    """peft's wrapper around a linear layer, with the two matrices of each adapter."""

    lora_A: Mapping[str, Linear]
    lora_B: Mapping[str, Linear]
    scaling: Mapping[str, float]


class ExpertsWrapper(Wrapper, Protocol):
    """peft's wrapper around the experts, or around another wrapper, for one of their tensors."""

    parameter_name: str
    base_layer: Experts | ExpertsWrapper

    def get_delta_factors(self, adapter: str, /) -> tuple[Tensor, Tensor, float]: ...


class MoeMlp(Protocol):
    """A router and its experts."""

    gate: Router
    experts: Experts | ExpertsWrapper


class SharedMoeMlp(MoeMlp, Protocol):
    """A router, its experts, and an MLP that all tokens go through."""

    shared_experts: DenseMlp


class DenseLayer(Protocol):
    """A layer with a dense MLP."""

    self_attn: Attention
    mlp: DenseMlp
    input_layernorm: Norm
    post_attention_layernorm: Norm


class MoeLayer(Protocol):
    """A layer with a mixture of experts."""

    self_attn: Attention
    mlp: MoeMlp
    input_layernorm: Norm
    post_attention_layernorm: Norm


Layer = DenseLayer | MoeLayer


class Body(Protocol):
    """A model without its output head."""

    embed_tokens: Callable[[Tensor], Tensor]
    layers: Sequence[Layer]
    norm: Norm
    # gives the cosines and sines at some positions, in the type of its first argument
    rotary_emb: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def body(model: transformers.PreTrainedModel) -> Body:
    """Return the body of a model of a supported family."""
    return model.model


def output_head(model: transformers.PreTrainedModel) -> Linear:
    """Return the output head of a model of a supported family."""
    return model.lm_head


def is_moe(layer: Layer) -> TypeIs[MoeLayer]:
    """Return whether a layer is an MoE layer."""
    return hasattr(layer.mlp, "experts")


def has_head_norms(attention: Attention) -> TypeIs[NormedAttention]:
    """Return whether attention normalises q and k."""
    return getattr(attention, "q_norm", None) is not None


def has_shared_experts(mlp: MoeMlp) -> TypeIs[SharedMoeMlp]:
    """Return whether an MoE layer has an MLP that all tokens go through."""
    return hasattr(mlp, "shared_experts")


def rotated_dims(attention: Attention) -> int:
    """Return how many dimensions of a head the rotary embedding rotates, from the first on."""
    parameters = getattr(attention.config, "rope_parameters", None) or {}
    return int(attention.head_dim * parameters.get("partial_rotary_factor", 1.0))
