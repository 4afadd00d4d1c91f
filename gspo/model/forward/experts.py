"""The experts of an MoE layer: a gated MLP with the matrices of each token's experts.

Shape suffixes: N tokens, W hidden width, K experts per token, E experts, I width of an expert.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.model.forward.grouped import (
    CastCache,
    ExpertGroups,
    choose_method,
    into_blocks,
    is_aligned,
    multiply_in_blocks,
)
from gspo.model.forward.kernels import FromExperts, ToExperts, inverse_permutation, swiglu
from gspo.model.forward.layers import Experts, ExpertsWrapper
from gspo.model.forward.low_rank import Factors, factors_of_experts, unwrapped
from gspo.model.forward.packed_weights import LayerWeights, Product
from gspo.model.sharding.dtensors import expert_ranks, is_sharded, local_tensor

# multiplies rows by the transposes of their experts' matrices [E, out, in]
GroupedProduct = Callable[[Tensor, Tensor, ExpertGroups], Tensor]


def run_experts(
    experts: Experts | ExpertsWrapper,
    h_NW: Tensor,
    weights_NK: Tensor,
    experts_NK: Tensor,
    layer_weights: LayerWeights | None = None,
    casts: CastCache | None = None,
) -> Tensor:
    """Return sum_k w_k W_down (silu(W_gate h) * W_up h), with the matrices of the k-th expert.

    Tokens are sorted by expert. So each expert is one matrix product over its tokens."""
    module, wrappers = unwrapped(experts)
    device = h_NW.device
    top_k = experts_NK.shape[1]
    dtype = h_NW.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    h_NW = h_NW.to(dtype)
    weights_NK = weights_NK.to(dtype)
    merged = layer_weights.merged if layer_weights else None
    up, down = merged or (module.gate_up_proj, module.down_proj)
    # Weights that are unsharded or merged with an adapter exist only for this pass.
    cast = casts if casts and not merged and not is_sharded(module) else Tensor.to
    up = cast(local_tensor(up), dtype)
    down = cast(local_tensor(down), dtype)
    all_down = layer_weights.all_down if layer_weights else None
    if layer_weights and all_down is not None and len(h_NW) < layer_weights.all_experts_below:
        return _all_experts(up, all_down, h_NW, weights_NK, experts_NK)
    up_factors = None if merged else factors_of_experts(wrappers, "gate_up_proj")
    down_factors = None if merged else factors_of_experts(wrappers, "down_proj")
    ranks = expert_ranks(module)
    matrices = [up, down, *(up_factors or ()), *(down_factors or ())]
    method = choose_method(h_NW, matrices, top_k)
    if method == "all" and not ranks and not up_factors and not down_factors:
        all_down = down.transpose(1, 2).flatten(0, 1)
        return _all_experts(up, all_down, h_NW, weights_NK, experts_NK)
    flat = experts_NK.flatten()
    # a GPU sorts 16 bits in a quarter of the passes
    order = flat.to(torch.int16).argsort(stable=True)
    inverse = inverse_permutation(order)
    # bincount would wait for a GPU
    counts_E = flat.new_zeros(module.num_experts)
    counts_E.scatter_add_(0, flat, torch.ones_like(flat))

    def apply_experts(rows: Tensor, counts_E: Tensor) -> Tensor:
        if layer_weights and layer_weights.experts is not None:
            return _one_by_one(rows, counts_E.tolist(), *layer_weights.experts)
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        blocks = None if method == "grouped" else into_blocks(ends_E, len(rows))
        groups = ExpertGroups(ends_E, blocks)
        inner = swiglu(_adapted(rows, up, up_factors, groups))
        return _adapted(inner, down, down_factors, groups)

    rows = ToExperts.apply(h_NW, order, inverse, top_k)
    out = ranks.compute(rows, counts_E, apply_experts) if ranks else apply_experts(rows, counts_E)
    return FromExperts.apply(out, weights_NK, order, inverse)


def _adapted(
    rows: Tensor,
    weight: Tensor,
    adapter: Factors | None,
    groups: ExpertGroups,
) -> Tensor:
    """Multiply rows by the transposes of their experts' matrices, and add the adapter if given."""
    out = _multiply(rows, weight, groups)
    if adapter is None:
        return out
    b, a = (x.to(rows.dtype) for x in adapter)
    return out + _multiply(_multiply(rows, a, groups), b, groups)


def _grouped(rows: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
    """Multiply rows by the transposes of their experts' matrices `weight` [E, out, in]."""
    if groups.blocks:
        return multiply_in_blocks(rows, weight, groups.blocks)
    if is_aligned(rows.dtype, weight):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=groups.ends_E)
    zero = groups.ends_E.new_zeros(1)
    counts = groups.ends_E.diff(prepend=zero).tolist()
    by_expert = zip(rows.split(counts), weight, strict=True)
    return torch.cat([F.linear(expert_rows, matrix) for expert_rows, matrix in by_expert])


# replaced within `grouped_product_replaced`
_multiply: GroupedProduct = _grouped


def _one_by_one(
    rows: Tensor,
    counts: list[int],
    ups: list[Product],
    downs: list[Product],
) -> Tensor:
    """Apply each expert to its rows, with products that were prepared for frozen weights."""
    by_expert = zip(rows.split(counts), ups, downs, strict=True)
    outputs = []
    for expert_rows, up, down in by_expert:
        if len(expert_rows):
            outputs.append(down(swiglu(up(expert_rows))))
    return torch.cat(outputs)


def _all_experts(
    up: Tensor,
    all_down: Tensor,
    h_NW: Tensor,
    weights_NK: Tensor,
    experts_NK: Tensor,
) -> Tensor:
    """Compute `run_experts` for a few tokens: every expert sees all tokens.

    For a few tokens this costs less than sorting them."""
    gates_NE = h_NW.new_zeros(len(h_NW), len(up)).scatter_(1, experts_NK, weights_NK)
    inner_NEI = swiglu(F.linear(h_NW, up.flatten(0, 1)).unflatten(-1, (len(up), -1)))
    gates_NE1 = gates_NE.unsqueeze(-1)
    inner_NEI = inner_NEI * gates_NE1 if torch.is_grad_enabled() else inner_NEI.mul_(gates_NE1)
    return inner_NEI.flatten(1) @ all_down


@contextmanager
def grouped_product_replaced(by: Callable[[Tensor, Tensor], Tensor]) -> Generator[None]:
    """Within this context, `by` multiplies each expert's rows by the expert's matrix [E, out, in].

    gspo.planning.memory passes tensors without content, which PyTorch's grouped product refuses.
    """
    global _multiply
    original = _multiply

    def replacement(rows: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
        return by(rows, weight)

    _multiply = replacement
    try:
        yield
    finally:
        _multiply = original
