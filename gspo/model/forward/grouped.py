"""Products of rows with the matrices of their experts, in the way that suits the device.

"grouped"  PyTorch's grouped product. Its kernel is fast for bfloat16 on GPUs of capability 9.x and
           10.x. For other types and cards PyTorch copies the numbers of rows to the CPU, which
           waits for the GPU, and multiplies expert by expert.
"blocks"   Rows that are sorted by expert are padded to blocks of one expert each, and all blocks
           are one batched product. How many blocks suffice is known without reading a number from
           the device.
"all"      Every expert computes all tokens, and those that a token does not go to get weight 0.

Shape suffixes: N tokens, R rows (a token once for each of its experts), E experts, K experts per
token, B blocks.
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

Way = Literal["grouped", "blocks", "all"]
# the GPUs, by the first number of their capability, with a kernel for grouped products
FAST_GENERATIONS = (9, 10)
LEAST_BLOCK = 16  # rows: smaller blocks would copy more weights than they save padding
# As many rows as cost what one block's copy of an expert's matrix costs. Estimate: 12 bytes of
# memory traffic for each float32 weight at 2 TB/s against one multiplication and addition at 20
# TFLOPS.
COPY_ROWS = 64


def way_to_multiply(tokens_NW: Tensor, weights: list[Tensor], top_k: int) -> Way:
    """Return how to multiply tokens by the matrices [E, out, in] of `top_k` experts each."""
    if not runs_ahead(tokens_NW.device):
        return "grouped"
    aligned = all(is_aligned(tokens_NW.dtype, weight) for weight in weights)
    return choose(
        _capability(tokens_NW.device),
        tokens_NW.dtype,
        aligned,
        len(tokens_NW),
        len(weights[0]),
        top_k,
    )


def choose(
    capability: tuple[int, int],
    dtype: torch.dtype,
    aligned: bool,
    tokens: int,
    experts: int,
    top_k: int,
) -> Way:
    """Return the way to multiply on a GPU of this capability; `aligned` is what `is_aligned` says
    of the matrices.

    Where the grouped kernel is missing, the cheaper of the others is chosen, both counted in rows:
    N E for "all", and R + E b + (R / b + E) COPY_ROWS for blocks of b rows."""
    if aligned and dtype == torch.bfloat16 and capability[0] in FAST_GENERATIONS:
        return "grouped"
    rows = tokens * top_k
    size = block_rows(rows, experts)
    in_blocks = rows + experts * size + block_count(rows, experts, size) * COPY_ROWS
    return "all" if tokens * experts <= in_blocks else "blocks"


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's capability, such as (9, 0)."""
    return torch.get_device_module(device).get_device_capability(device)


def is_aligned(dtype: torch.dtype, weight: Tensor) -> bool:
    """Return whether rows that go in and come out of matrices [E, out, in] have a multiple of 16
    bytes, as the grouped kernel needs it."""
    return all(width * dtype.itemsize % 16 == 0 for width in weight.shape[1:])


def block_rows(rows: int, experts: int) -> int:
    """Return the rows of a block: the largest power of two that is at most the mean number of rows
    of an expert, so that padding at most doubles the rows and all blocks together copy each expert
    at most three times."""
    size = LEAST_BLOCK
    while 2 * size <= rows // experts:
        size *= 2
    return size


def block_count(rows: int, experts: int, size: int) -> int:
    """Return how many blocks suffice, however the rows are spread over the experts: each expert has
    at most one that is not full."""
    return rows // size + min(experts, rows)


class KeptCasts:
    """Weights rounded to a precision, kept for several passes. Gradients reach the weights as if
    each pass had rounded them.

    A weight that an operation has changed in place is rounded again. PyTorch's fused optimizers
    change weights without counting it, so casts must not be kept beyond an optimizer's step."""

    def __init__(self):
        self._kept: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}

    def __call__(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return weight.to(dtype)."""
        if weight.dtype == dtype:
            return weight
        key = (id(weight), dtype)
        if key not in self._kept or self._kept[key][1] != weight._version:
            self._kept[key] = (weight, weight._version, weight.detach().to(dtype))
        rounded = self._kept[key][2]
        return (
            Rounded.apply(weight, rounded)
            if weight.requires_grad and torch.is_grad_enabled()
            else rounded
        )


@dataclass
class Groups:
    """Says which rows, sorted by expert, go to which expert: those of expert e end before row
    `ends_E[e]`.
    """

    ends_E: Tensor  # int32
    blocks: Blocks | None = None  # None: PyTorch's grouped product is used


@dataclass
class Blocks:
    """Says where rows that are sorted by expert stand once they are padded to blocks of one expert
    each.
    """

    places_R: Tensor  # the row's place in the list of all blocks' rows
    experts_B: Tensor
    size: int  # rows of a block


def into_blocks(ends_E: Tensor, rows: int) -> Blocks:
    """Return the blocks of so many rows. Nothing is read from the device."""
    experts = len(ends_E)
    size = block_rows(rows, experts)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    blocks_E = (counts_E + size - 1) // size
    block_ends_E = blocks_E.cumsum(0, dtype=torch.int32)
    # from a row's number to its place
    skipped_E = (block_ends_E - blocks_E) * size - (ends_E - counts_E)
    row_numbers = torch.arange(rows, device=ends_E.device, dtype=torch.int32)
    expert_R = torch.searchsorted(ends_E, row_numbers, right=True)
    places_R = (row_numbers + skipped_E.index_select(0, expert_R)).long()
    block_numbers = torch.arange(
        block_count(rows, experts, size), device=ends_E.device, dtype=torch.int32
    )
    # Blocks that no row needs are at the end. They hold zeros, and count as the last expert's.
    experts_B = torch.searchsorted(block_ends_E, block_numbers, right=True).clamp_(max=experts - 1)
    return Blocks(places_R, experts_B, size)


class BlockProduct(Function):
    """Multiplies each row by the transpose of its expert's matrix; `weight` is [E, out, in].

    The copies of the matrices, one for each block, are made again in the backward instead of kept.
    A matrix's gradient is the sum over its blocks, as a product with ones and zeros: a sum in a
    fixed order."""

    @staticmethod
    def forward(
        ctx, rows: Tensor, weight: Tensor, places_R: Tensor, experts_B: Tensor, size: int
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, places_R, experts_B)
        ctx.size = size
        padded = _padded(rows, places_R, experts_B, size)
        out = torch.bmm(padded, weight.index_select(0, experts_B).transpose(1, 2))
        return out.flatten(0, 1).index_select(0, places_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, places_R, experts_B = ctx.saved_tensors
        padded_grad = _padded(grad, places_R, experts_B, ctx.size)
        grad_rows, grad_weight = None, None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.bmm(padded_grad, weight.index_select(0, experts_B))
            grad_rows = grad_rows.flatten(0, 1).index_select(0, places_R)
        if ctx.needs_input_grad[1]:
            padded = _padded(rows, places_R, experts_B, ctx.size)
            by_block = torch.bmm(padded_grad.transpose(1, 2), padded).flatten(1)
            expert_numbers = torch.arange(len(weight), device=weight.device)
            belongs_EB = (expert_numbers.unsqueeze(1) == experts_B).to(by_block.dtype)
            grad_weight = (belongs_EB @ by_block).view_as(weight)
        return grad_rows, grad_weight, None, None, None


def _padded(rows: Tensor, places_R: Tensor, experts_B: Tensor, size: int) -> Tensor:
    """Return the rows in their blocks [B, size, in], with zeros at padding."""
    padded = rows.new_zeros(len(experts_B) * size, rows.shape[1])
    return padded.index_copy_(0, places_R, rows).unflatten(0, (len(experts_B), size))


def multiply_in_blocks(rows: Tensor, weight: Tensor, blocks: Blocks) -> Tensor:
    """Multiply each row by the transpose of its expert's matrix [E, out, in], in blocks."""
    return BlockProduct.apply(rows, weight, blocks.places_R, blocks.experts_B, blocks.size)
