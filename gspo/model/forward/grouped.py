"""Products of rows with the matrices of their experts, with a method that suits the device.

"grouped"  PyTorch's grouped product. Its kernel is fast for bfloat16 on GPUs of capability 9.x and
           10.x. For other types and GPUs PyTorch copies the numbers of rows to the CPU, which
           waits for the GPU, and multiplies expert by expert.
"blocks"   Rows that are sorted by expert are padded to blocks of one expert each. All blocks are
           one batched product. The number of blocks is computed without reading from the device.
"all"      Every expert computes all tokens, with weight 0 for tokens that do not go to it.

Shape suffixes: N tokens, R rows (a token once for each of its experts), E experts, K experts per
token, B blocks, W hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gspo.data.batch import runs_ahead
from gspo.model.forward.kernels import Rounded

Method = Literal["grouped", "blocks", "all"]
# the major capability of GPUs with a kernel for grouped products
GROUPED_CAPABILITIES = (9, 10)
# Smaller blocks would copy more weights than they save padding.
MIN_BLOCK_ROWS = 16
# So many rows cost as much as one block's copy of an expert's matrix. Estimate: 12 bytes of memory
# traffic for each float32 weight at 2 TB/s against one multiplication and addition at 20 TFLOPS.
COPY_ROWS = 64


def choose_method(tokens_NW: Tensor, weights: list[Tensor], top_k: int) -> Method:
    """Return the method to multiply tokens by the matrices [E, out, in] of `top_k` experts each."""
    device = tokens_NW.device
    dtype = tokens_NW.dtype
    if not runs_ahead(device):
        return "grouped"
    aligned = all(is_aligned(dtype, weight) for weight in weights)
    tokens = len(tokens_NW)
    experts = len(weights[0])
    return choose_gpu_method(_capability(device), dtype, aligned, tokens, experts, top_k)


def choose_gpu_method(
    capability: tuple[int, int],
    dtype: torch.dtype,
    aligned: bool,
    tokens: int,
    experts: int,
    top_k: int,
) -> Method:
    """Return the method for a GPU of this capability. `aligned` is the result of `is_aligned`.

    If the grouped kernel is missing, the cheaper of the other methods is chosen. Their costs in
    rows are N E for "all", and R + E b + (R / b + E) COPY_ROWS for blocks of b rows."""
    if aligned and dtype == torch.bfloat16 and capability[0] in GROUPED_CAPABILITIES:
        return "grouped"
    rows = tokens * top_k
    size = block_rows(rows, experts)
    cost_of_blocks = rows + experts * size + block_count(rows, experts, size) * COPY_ROWS
    return "all" if tokens * experts <= cost_of_blocks else "blocks"


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's capability, such as (9, 0)."""
    return torch.get_device_module(device).get_device_capability(device)


def is_aligned(dtype: torch.dtype, weight: Tensor) -> bool:
    """Return whether the input and output rows of matrices [E, out, in] are multiples of 16 bytes.

    The grouped kernel needs this."""
    return all(width * dtype.itemsize % 16 == 0 for width in weight.shape[1:])


def block_rows(rows: int, experts: int) -> int:
    """Return the rows of a block: the largest power of two up to the mean rows of an expert.

    So padding at most doubles the rows, and all blocks together copy each expert at most three
    times."""
    size = MIN_BLOCK_ROWS
    while 2 * size <= rows // experts:
        size *= 2
    return size


def block_count(rows: int, experts: int, size: int) -> int:
    """Return a number of blocks that is enough for any distribution of the rows over the experts.

    Each expert has at most one block that is not full."""
    return rows // size + min(experts, rows)


class CastCache:
    """Weights that are rounded to a precision once for several passes.

    Gradients reach the weights as if each pass had rounded them. A weight that an operation has
    changed in place is rounded again. PyTorch's fused optimizers change weights without counting
    it, so a cache must not be used beyond an optimizer's step."""

    def __init__(self):
        self._casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}

    def __call__(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return weight.to(dtype)."""
        if weight.dtype == dtype:
            return weight
        key = (id(weight), dtype)
        if key not in self._casts or self._casts[key][1] != weight._version:
            self._casts[key] = (weight, weight._version, weight.detach().to(dtype))
        rounded = self._casts[key][2]
        if weight.requires_grad and torch.is_grad_enabled():
            return Rounded.apply(weight, rounded)
        return rounded


@dataclass
class ExpertGroups:
    """The rows of each expert, in rows that are sorted by expert.

    ends_E   int32, the rows of expert e end before row `ends_E[e]`
    blocks   None: PyTorch's grouped product is used
    """

    ends_E: Tensor
    blocks: Blocks | None = None


@dataclass
class Blocks:
    """The layout of rows that are sorted by expert and padded to blocks of one expert each.

    slots_R     the index of each row in the list of all blocks' rows
    experts_B   the expert of each block
    size        rows of a block
    """

    slots_R: Tensor
    experts_B: Tensor
    size: int


def into_blocks(ends_E: Tensor, rows: int) -> Blocks:
    """Return the blocks of so many rows, without reading from the device."""
    experts = len(ends_E)
    size = block_rows(rows, experts)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    blocks_E = (counts_E + size - 1) // size
    block_ends_E = blocks_E.cumsum(0, dtype=torch.int32)
    # the difference of a row's slot and its index
    padding_before_E = (block_ends_E - blocks_E) * size - (ends_E - counts_E)
    index_R = torch.arange(rows, device=ends_E.device, dtype=torch.int32)
    expert_R = torch.searchsorted(ends_E, index_R, right=True)
    slots_R = (index_R + padding_before_E.index_select(0, expert_R)).long()
    blocks = block_count(rows, experts, size)
    index_B = torch.arange(blocks, device=ends_E.device, dtype=torch.int32)
    # Blocks that no row needs are at the end. They hold zeros, and count as the last expert's.
    experts_B = torch.searchsorted(block_ends_E, index_B, right=True).clamp_(max=experts - 1)
    return Blocks(slots_R, experts_B, size)


class BlockProduct(Function):
    """The product of each row with the transpose of its expert's matrix in `weight` [E, out, in].

    Each block has a copy of its expert's matrix. The copies are made again in the backward. A
    matrix's gradient is the sum over its blocks. It is computed as a product with ones and zeros,
    which adds in a fixed order."""

    @staticmethod
    def forward(
        ctx,
        rows: Tensor,
        weight: Tensor,
        slots_R: Tensor,
        experts_B: Tensor,
        size: int,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, slots_R, experts_B)
        ctx.size = size
        padded = _padded(rows, slots_R, experts_B, size)
        out = torch.bmm(padded, weight.index_select(0, experts_B).transpose(1, 2))
        return out.flatten(0, 1).index_select(0, slots_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, slots_R, experts_B = ctx.saved_tensors
        padded_grad = _padded(grad, slots_R, experts_B, ctx.size)
        grad_rows = None
        grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.bmm(padded_grad, weight.index_select(0, experts_B))
            grad_rows = grad_rows.flatten(0, 1).index_select(0, slots_R)
        if ctx.needs_input_grad[1]:
            padded = _padded(rows, slots_R, experts_B, ctx.size)
            grad_B = torch.bmm(padded_grad.transpose(1, 2), padded).flatten(1)
            index_E = torch.arange(len(weight), device=weight.device)
            belongs_EB = (index_E.unsqueeze(1) == experts_B).to(grad_B.dtype)
            grad_weight = (belongs_EB @ grad_B).view_as(weight)
        return grad_rows, grad_weight, None, None, None


def _padded(
    rows: Tensor,
    slots_R: Tensor,
    experts_B: Tensor,
    size: int,
) -> Tensor:
    """Return the rows in blocks [B, size, in], with zeros at padding."""
    padded = rows.new_zeros(len(experts_B) * size, rows.shape[1])
    padded.index_copy_(0, slots_R, rows)
    return padded.unflatten(0, (len(experts_B), size))


def multiply_in_blocks(rows: Tensor, weight: Tensor, blocks: Blocks) -> Tensor:
    """Multiply each row by the transpose of its expert's matrix in `weight` [E, out, in]."""
    return BlockProduct.apply(rows, weight, blocks.slots_R, blocks.experts_B, blocks.size)
