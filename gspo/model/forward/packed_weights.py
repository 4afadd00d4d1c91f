"""Prepares a layer's weights in the form that the network multiplies with.

While weights change, that form is transformers' own tensors, with q, k and v put together. While
they are frozen (in a rollout, in scoring) they are prepared once and used many times: on a CPU
large matrices are laid out in the blocks of oneDNN, because MKL would copy them anew for every
product. That is 1.1 times as fast for thousands of rows, 1.3 times for 64, twice for 8. It is a
second copy of the weights. Experts are copied in rollouts only, where it helps most and the memory
of an update is free.

A LoRA adapter (gspo.model.forward.low_rank) is added to the products while weights change, and merged into
the matrices while they are frozen: into those of attention always, into all others where they are
copied anyway and in rollouts. That too is a second copy.

Shape suffixes: N tokens, W hidden width, H query heads, J key/value heads, D head dimension, E
experts, I width of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gspo.model.forward.low_rank import factors, is_adapted, merged, merged_experts, unwrapped

# Below this product of tokens and weights of all experts, sorting the tokens costs more than
# computing every expert for all of them.
ALL_EXPERTS_BELOW = 1 << 22
# from so many numbers in a matrix on, blocks save more than the 12 microseconds that a call costs
# more
LARGE = 1 << 16
# the number of rows that oneDNN chooses its blocks for; from 16 on the blocks are the same
ROWS = 64
Product = Callable[[Tensor], Tensor]  # x W^T + b


@dataclass
class LayerWeights:
    """The weights of one layer as matrix products. Fields that are None are computed by
    transformers' module.
    """

    qkv: Product  # gives q, k and v side by side
    # q's and k's norm: one tensor [H + J, D] if by head; two if over all heads; else none
    norms: tuple[Tensor, ...]
    out: Product
    gate_up: Product | None = None  # of a dense layer: gives gate and up side by side
    down: Product | None = None  # of a dense layer
    # each expert's gate-and-up product, and down product
    experts: tuple[list[Product], list[Product]] | None = None
    all_experts_below: int = 0  # with fewer tokens than this, every expert computes all of them
    # for that case: the experts' down matrices side by side, [E I, W]
    all_down: Tensor | None = None
    # the experts' matrices with their adapter, [E, 2 I, W] and [E, W, I]
    merged: tuple[Tensor, Tensor] | None = None


def prepare_layer(layer: nn.Module, freeze: bool, copy_experts: bool = False) -> LayerWeights:
    """Prepare the weights of a layer of a supported family. `freeze` says that they will be used
    many times before they change; `copy_experts` that a second copy of the experts' weights, or of
    those that an adapter acts on, is worth its memory."""
    own = layer.self_attn
    weight, bias, norms = _projection(own, freeze)
    blocks = freeze and weight.device.type == "cpu"
    multiply = _by_blocks if blocks else _plainly
    if not freeze:
        return LayerWeights(_with_adapter(multiply(weight, bias), own), norms, _output(own.o_proj))
    made = LayerWeights(
        multiply(weight, bias), norms, multiply(merged(own.o_proj), own.o_proj.bias)
    )
    if hasattr(layer.mlp, "experts"):
        _prepare_experts(made, layer.mlp.experts, blocks, copy_experts)
    elif blocks or (copy_experts and is_adapted(layer.mlp.gate_proj)):
        mlp = layer.mlp
        biases = (
            None
            if mlp.gate_proj.bias is None
            else torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias])
        )
        made.gate_up = multiply(torch.cat([merged(mlp.gate_proj), merged(mlp.up_proj)]), biases)
        made.down = multiply(merged(mlp.down_proj), mlp.down_proj.bias)
    return made


def _prepare_experts(
    made: LayerWeights, experts: nn.Module, blocks: bool, copy_experts: bool
) -> None:
    """Prepare an MoE layer's experts, whose weights are frozen, where that is worth a copy of them."""
    own, _ = unwrapped(experts)
    small = blocks and own.gate_up_proj.numel() < ALL_EXPERTS_BELOW
    with_adapter = merged_experts(experts) if small or copy_experts else None
    up, down = with_adapter or (own.gate_up_proj, own.down_proj)
    if blocks and not small and copy_experts and down[0].numel() >= LARGE:
        made.experts = (
            [_by_blocks(one, None) for one in up],
            [_by_blocks(one, None) for one in down],
        )
        return
    made.merged = with_adapter
    if small:
        made.all_experts_below = ALL_EXPERTS_BELOW // up.numel()
        made.all_down = down.transpose(1, 2).flatten(0, 1)


def _output(layer: nn.Module) -> Product:
    """Return the product of attention's last layer; with an adapter it is peft's."""
    return layer if is_adapted(layer) else _plainly(layer.weight, layer.bias)


def _with_adapter(qkv: Product, attention: nn.Module) -> Product:
    """Add the adapters of q, k and v to the product that gives them side by side."""
    pairs = [factors(layer) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    if not any(pairs):
        return qkv
    (q_b, q_a), (k_b, k_a), (v_b, v_a) = pairs
    b = (_interleaved(q_b, attention.head_dim), _interleaved(k_b, attention.head_dim), v_b)
    a = torch.cat([q_a, k_a, v_a])

    def multiply(x: Tensor) -> Tensor:
        narrow = F.linear(x, a).chunk(3, -1)
        return qkv(x) + torch.cat(
            [F.linear(part, own) for part, own in zip(narrow, b, strict=True)], -1
        )

    return multiply


def _plainly(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the usual product x W^T + b."""
    return partial(F.linear, weight=weight, bias=bias)


def _by_blocks(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the same product over weights in oneDNN's blocks, where that is faster. It equals the
    usual one up to rounding, and has no gradient."""
    has_blocks = (
        weight.dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()
    )
    if weight.numel() < LARGE or not has_blocks:
        return _plainly(weight, bias)
    weight = weight.detach()
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    def multiply(x: Tensor) -> Tensor:
        if len(x) > 2 or bias is not None:
            return torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], "")
        # For one or two rows, reading the weights takes all the time, so they stay as they are.
        return (
            torch.mv(weight, x[0]).unsqueeze(0)
            if len(x) == 1
            else (weight @ x.t()).t().contiguous()
        )

    return multiply


def _projection(
    attention: nn.Module, freeze: bool
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Return weight [(H + 2 J) D, W] and bias of q, k and v together, and the weights of q's and
    k's norm. In frozen weights an adapter is merged.

    The rotary embedding rotates pairs of numbers. transformers keeps the first numbers of all pairs
    in the first half of a head and the second ones in its second half. Taking the rows of q's and
    k's weights in another order puts the two numbers of a pair side by side, and leaves the
    products of q and k as they are."""
    dim = attention.head_dim
    layers = [(attention.q_proj, True), (attention.k_proj, True), (attention.v_proj, False)]
    weights = [(merged(each) if freeze else each.weight, rotated) for each, rotated in layers]
    weight = torch.cat([_interleaved(each, dim) if rotated else each for each, rotated in weights])
    bias = None
    if attention.q_proj.bias is not None:
        bias = torch.cat(
            [_interleaved(each.bias, dim) if rotated else each.bias for each, rotated in layers]
        )
    norms = ()
    if getattr(attention, "q_norm", None) is not None:
        norms = tuple(
            _interleaved(norm.weight, dim) for norm in (attention.q_norm, attention.k_norm)
        )
        if norms[0].numel() == dim:
            counts = [each.out_features // dim for each in (attention.q_proj, attention.k_proj)]
            norms = (
                torch.cat([w.expand(count, dim) for w, count in zip(norms, counts, strict=True)]),
            )
    return weight, bias, norms


def _interleaved(x: Tensor, dim: int) -> Tensor:
    """Return the rows of every head in the order 0, D/2, 1, D/2 + 1, ..."""
    return x.unflatten(0, (-1, 2, dim // 2)).transpose(1, 2).flatten(0, 2)
