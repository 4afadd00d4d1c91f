"""Prepares a layer's weights for the network's products.

While weights change, the products use transformers' own tensors, with q, k and v concatenated.
While weights are frozen (in a rollout, in scoring), they are prepared once and used many times. On
a CPU, large matrices are copied into the blocks of oneDNN, because MKL would copy them again for
every product. The speed is 1.1 times for thousands of rows, 1.3 times for 64, twice for 8. This is
a second copy of the weights. Experts are copied in rollouts only: there it helps most, and the
memory of an update is free.

A LoRA adapter (gspo.model.forward.low_rank) is added to the products while weights change. While
weights are frozen, it is merged into the matrices: always into the matrices of attention, and into
all others in rollouts and if they are copied anyway. This too is a second copy.

Shape suffixes: N tokens, W hidden width, H query heads, J key/value heads, D head dimension, E
experts, I width of an expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.model.forward.layers import (
    Attention,
    Experts,
    ExpertsWrapper,
    Layer,
    Linear,
    has_head_norms,
    is_moe,
    rotated_dims,
)
from gspo.model.forward.low_rank import factors, is_adapted, merged, merged_experts, unwrapped

# Below this product of tokens and weights of all experts, sorting the tokens costs more than
# computing every expert for all of them.
ALL_EXPERTS_BELOW = 1 << 22
# Blocks pay off for a matrix of so many elements: a call costs 12 microseconds more.
MIN_BLOCKED_NUMEL = 1 << 16
# oneDNN chooses its blocks for this number of rows; from 16 on the blocks are the same
BLOCK_ROWS = 64
# x W^T + b
Product = Callable[[Tensor], Tensor]


@dataclass
class LayerWeights:
    """The weights of a layer as matrix products.

    If a product is None, transformers' module computes it."""

    # gives q, k and v side by side
    qkv: Product
    # the norms of q and k: one tensor [H + J, D] if each head has its own mean, two tensors if all
    # heads share it, else none
    norms: tuple[Tensor, ...]
    out: Product
    # of the norms of q and k
    norm_epsilon: float = 0.0
    # of a dense layer: gives gate and up side by side
    gate_up: Product | None = None
    # of a dense layer
    down: Product | None = None
    # each expert's gate-and-up product, and down product
    experts: tuple[list[Product], list[Product]] | None = None
    # with fewer tokens, every expert computes all tokens
    all_experts_below: int = 0
    # for these few tokens: the experts' down matrices side by side, [E I, W]
    all_down: Tensor | None = None
    # the experts' matrices with their adapter, [E, 2 I, W] and [E, W, I]
    merged: tuple[Tensor, Tensor] | None = None


def prepare_layer(layer: Layer, freeze: bool, copy_experts: bool = False) -> LayerWeights:
    """Prepare the weights of a layer of a supported family.

    `freeze` says that they will be used many times before they change. `copy_experts` says that a
    second copy of the experts' weights, or of adapted weights, is worth its memory."""
    attention = layer.self_attn
    weight, bias = _projection(attention, freeze)
    norms, norm_epsilon = _head_norms(attention)
    if not freeze:
        qkv = _with_adapter(_plain_product(weight, bias), attention)
        return LayerWeights(qkv, norms, _output(attention.o_proj), norm_epsilon)
    on_cpu = weight.device.type == "cpu"
    product = _blocked_product if on_cpu else _plain_product
    out = product(merged(attention.o_proj), attention.o_proj.bias)
    prepared = LayerWeights(product(weight, bias), norms, out, norm_epsilon)
    if is_moe(layer):
        _prepare_experts(prepared, layer.mlp.experts, on_cpu, copy_experts)
        return prepared
    mlp = layer.mlp
    if on_cpu or (copy_experts and is_adapted(mlp.gate_proj)):
        # either both have a bias or none
        layers = (mlp.gate_proj, mlp.up_proj)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        gate_up_bias = torch.cat(biases) if biases else None
        gate_up = torch.cat([merged(mlp.gate_proj), merged(mlp.up_proj)])
        prepared.gate_up = product(gate_up, gate_up_bias)
        prepared.down = product(merged(mlp.down_proj), mlp.down_proj.bias)
    return prepared


def _prepare_experts(
    prepared: LayerWeights,
    experts: Experts | ExpertsWrapper,
    on_cpu: bool,
    copy_experts: bool,
) -> None:
    """Prepare an MoE layer's frozen experts, if this is worth a copy of their weights."""
    module, _ = unwrapped(experts)
    is_small = on_cpu and module.gate_up_proj.numel() < ALL_EXPERTS_BELOW
    with_adapter = merged_experts(experts) if is_small or copy_experts else None
    up, down = with_adapter or (module.gate_up_proj, module.down_proj)
    if on_cpu and not is_small and copy_experts and down[0].numel() >= MIN_BLOCKED_NUMEL:
        ups = [_blocked_product(weight, None) for weight in up]
        downs = [_blocked_product(weight, None) for weight in down]
        prepared.experts = (ups, downs)
        return
    prepared.merged = with_adapter
    if is_small:
        prepared.all_experts_below = ALL_EXPERTS_BELOW // up.numel()
        prepared.all_down = down.transpose(1, 2).flatten(0, 1)


def _output(layer: Linear) -> Product:
    """Return the product of attention's last layer; with an adapter it is peft's."""
    return layer if is_adapted(layer) else _plain_product(layer.weight, layer.bias)


def _with_adapter(qkv: Product, attention: Attention) -> Product:
    """Add the adapters of q, k and v to the product that gives them side by side."""
    pairs = [factors(layer) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    # either all three are adapted or none
    adapters = [pair for pair in pairs if pair is not None]
    if not adapters:
        return qkv
    (q_b, q_a), (k_b, k_a), (v_b, v_a) = adapters
    q_b = _interleaved(q_b, attention)
    k_b = _interleaved(k_b, attention)
    b = (q_b, k_b, v_b)
    a = torch.cat([q_a, k_a, v_a])

    def multiply(x: Tensor) -> Tensor:
        inner = F.linear(x, a).chunk(3, -1)
        return qkv(x) + torch.cat(
            [F.linear(part, matrix) for part, matrix in zip(inner, b, strict=True)], -1
        )

    return multiply


def _plain_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the product x W^T + b."""
    return partial(F.linear, weight=weight, bias=bias)


def _blocked_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the product x W^T + b over weights in oneDNN's blocks, if this is faster.

    It equals the plain product up to rounding, and has no gradient."""
    if weight.numel() < MIN_BLOCKED_NUMEL or not torch.backends.mkldnn.is_available():
        return _plain_product(weight, bias)
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return _plain_product(weight, bias)
    weight = weight.detach()
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, BLOCK_ROWS)

    def multiply(x: Tensor) -> Tensor:
        if len(x) > 2 or bias is not None:
            return torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], "")
        # For one or two rows, reading the weights takes all the time. Blocks do not help.
        if len(x) == 1:
            return torch.mv(weight, x[0]).unsqueeze(0)
        return (weight @ x.t()).t().contiguous()

    return multiply


def _projection(attention: Attention, freeze: bool) -> tuple[Tensor, Tensor | None]:
    """Return weight [(H + 2 J) D, W] and bias of q, k and v together.

    With `freeze` an adapter is merged into the weight.

    The rotary embedding rotates pairs of numbers. transformers keeps the first numbers of all pairs
    in the first half of a head, and the second numbers in its second half. Here the rows of q's and
    k's weights are reordered, which puts the two numbers of a pair side by side. The products of q
    and k do not change."""
    q = attention.q_proj
    k = attention.k_proj
    v = attention.v_proj
    q_weight, k_weight, v_weight = (merged(x) if freeze else x.weight for x in (q, k, v))
    q_weight = _interleaved(q_weight, attention)
    k_weight = _interleaved(k_weight, attention)
    weight = torch.cat([q_weight, k_weight, v_weight])
    # either all three have a bias or none
    biases = [layer.bias for layer in (q, k, v) if layer.bias is not None]
    if not biases:
        return weight, None
    q_bias, k_bias, v_bias = biases
    q_bias = _interleaved(q_bias, attention)
    k_bias = _interleaved(k_bias, attention)
    return weight, torch.cat([q_bias, k_bias, v_bias])


def _head_norms(attention: Attention) -> tuple[tuple[Tensor, ...], float]:
    """Return the norms of q and k as `LayerWeights` has them, and their epsilon."""
    if not has_head_norms(attention):
        return (), 0.0
    dim = attention.head_dim
    epsilon = attention.q_norm.variance_epsilon
    q_norm = _interleaved(attention.q_norm.weight, attention)
    k_norm = _interleaved(attention.k_norm.weight, attention)
    if q_norm.numel() != dim:
        return (q_norm, k_norm), epsilon
    q_norms = q_norm.expand(attention.q_proj.out_features // dim, dim)
    k_norms = k_norm.expand(attention.k_proj.out_features // dim, dim)
    return (torch.cat([q_norms, k_norms]),), epsilon


def _interleaved(x: Tensor, attention: Attention) -> Tensor:
    """Return the rows of every head in the order 0, R/2, 1, R/2 + 1, ..., R - 1, R, R + 1, ...

    R is the number of dimensions that the rotary embedding rotates, in most families all."""
    dim = attention.head_dim
    rotated = rotated_dims(attention)
    if rotated == dim:
        halves = x.unflatten(0, (-1, 2, dim // 2))
        return halves.transpose(1, 2).flatten(0, 2)
    heads = x.unflatten(0, (-1, dim))
    halves = heads[:, :rotated].unflatten(1, (2, rotated // 2))
    pairs = halves.transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, heads[:, rotated:]], 1).flatten(0, 1)
