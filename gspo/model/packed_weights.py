"""A layer's weights in the form that the network multiplies with.

While weights change, that is transformers' own tensors, with q, k and v put together. While they are frozen (in a
rollout, in scoring) they are prepared once and used many times: on a CPU large matrices are laid out in the blocks of
oneDNN, where MKL copies them anew for every product: 1.1 times as fast for thousands of rows, 1.3 for 64, 2 for 8. That
is a second copy of them; of experts in rollouts alone, where it matters most and an update's memory is not in use.

Shape suffixes: N tokens, W hidden width, H query heads, J key/value heads, D head dimension, E experts, I width of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 1 << 22  # tokens times weights of all experts, below which sorting costs more than computing all of them
LARGE = 1 << 16  # numbers in a matrix from which on blocks pay for their calls, which take 12 microseconds longer
ROWS = 64  # that oneDNN chooses its blocks for; from 16 on they are the same
Product = Callable[[Tensor], Tensor]  # x W^T + b


@dataclass
class Prepared:
    """The weights of one layer. What is None is computed from transformers' module."""

    qkv: Product  # q, k and v side by side
    norms: tuple[Tensor, ...]  # weights of q's and k's norm: one for both by head, [H + J, D]; one each over all heads
    out: Product
    gate_up: Product | None = None  # of a dense layer, side by side
    down: Product | None = None
    experts: tuple[list[Product], list[Product]] | None = None  # first and last matrix of each
    few: int = 0  # tokens below which every expert sees all of them
    all_down: Tensor | None = None  # for these, the experts' last matrices side by side, [E I, W]


def prepared(layer: nn.Module, freeze: bool, copy_experts: bool = False) -> Prepared:
    """The weights of a layer of a known family; `freeze`: they will be used many times before they change."""
    own = layer.self_attn
    weight, bias, norms = _projection(own)
    blocks = freeze and weight.device.type == "cpu"
    multiply = _by_blocks if blocks else _plainly
    made = Prepared(multiply(weight, bias), norms, multiply(own.o_proj.weight, own.o_proj.bias))
    if not blocks:
        return made
    if not hasattr(layer.mlp, "experts"):
        mlp = layer.mlp
        biases = None if mlp.gate_proj.bias is None else torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias])
        made.gate_up = multiply(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), biases)
        made.down = multiply(mlp.down_proj.weight, mlp.down_proj.bias)
        return made
    up, down = layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj
    if up.numel() < FEW:
        made.few, made.all_down = FEW // up.numel(), down.transpose(1, 2).flatten(0, 1)
    elif copy_experts and down[0].numel() >= LARGE:
        made.experts = [multiply(one, None) for one in up], [multiply(one, None) for one in down]
    return made


def _plainly(weight: Tensor, bias: Tensor | None) -> Product:
    return partial(F.linear, weight=weight, bias=bias)


def _by_blocks(weight: Tensor, bias: Tensor | None) -> Product:
    """The same numbers but for rounding, without gradient."""
    known = weight.dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()
    if weight.numel() < LARGE or not known:
        return _plainly(weight, bias)
    weight = weight.detach()
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    def multiply(x: Tensor) -> Tensor:
        if len(x) > 2 or bias is not None:
            return torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], "")
        # as matrix times vector: reading the weights is all that takes time
        return torch.mv(weight, x[0]).unsqueeze(0) if len(x) == 1 else (weight @ x.t()).t().contiguous()

    return multiply


def _projection(attention: nn.Module) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Weight [(H + 2 J) D, W] and bias of q, k and v together, and the weights of q's and k's norm.

    transformers lays out the halves of a head that turn together one after the other; taking the rows of q's and k's
    weights in another order puts the pairs side by side, and leaves their scores as they are."""
    dim = attention.head_dim
    parts = [(attention.q_proj, True), (attention.k_proj, True), (attention.v_proj, False)]
    weight = torch.cat([_interleaved(part.weight, dim) if turned else part.weight for part, turned in parts])
    bias = None
    if attention.q_proj.bias is not None:
        bias = torch.cat([_interleaved(part.bias, dim) if turned else part.bias for part, turned in parts])
    norms = ()
    if getattr(attention, "q_norm", None) is not None:
        norms = tuple(_interleaved(norm.weight, dim) for norm in (attention.q_norm, attention.k_norm))
        if norms[0].numel() == dim:
            counts = [part.out_features // dim for part in (attention.q_proj, attention.k_proj)]
            norms = (torch.cat([w.expand(count, dim) for w, count in zip(norms, counts, strict=True)]),)
    return weight, bias, norms


def _interleaved(x: Tensor, dim: int) -> Tensor:
    """Rows 0, D/2, 1, D/2 + 1, ... of every head."""
    return x.unflatten(0, (-1, 2, dim // 2)).transpose(1, 2).flatten(0, 2)
