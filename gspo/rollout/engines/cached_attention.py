"""Attention of a new token per row over the row's cached keys and values.

A row's tokens are in the first columns of its cache, and a count on the device says how many there
are. On a GPU in bfloat16 FlashAttention reads only these columns. Everywhere else the columns
behind them are masked.

Shape suffixes: R rows, S columns of the cache, H query heads, J key/value heads, D head dimension.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.io.errors import first_line
from gspo.model.forward.variable_lengths import is_flash_attention_size

MAX_RELATIVE_ERROR = 0.05  # of FlashAttention in bfloat16, beside float64


@dataclass
class FilledColumns:
    """The filled columns of the cache, on the device. A step changes the tensors in place."""

    counts_R: Tensor  # int32: filled columns of each row
    query_ends: Tensor  # int32 [R + 1]: 0, 1, ..., R
    key_ends: Tensor  # int32 [R + 1]: 0, S, ..., R * S

    @classmethod
    def of(cls, counts_R: Tensor, columns: int) -> FilledColumns:
        """Return the filled columns of a cache of `columns` columns per row."""
        num_ends = len(counts_R) + 1
        query_ends = torch.arange(num_ends, dtype=torch.int32, device=counts_R.device)
        return cls(counts_R.to(torch.int32), query_ends, key_ends=query_ends * columns)


def flash_attention(
    q_RHD: Tensor, keys_RSJD: Tensor, values_RSJD: Tensor, filled: FilledColumns
) -> Tensor:
    """Compute attention [R, H, D] over the filled columns with FlashAttention."""
    max_queries = 1
    max_keys = keys_RSJD.shape[1]
    dropout = 0.0
    is_causal = False
    return_debug_mask = False
    output = torch.ops.aten._flash_attention_forward(
        q_RHD,
        keys_RSJD.flatten(0, 1),
        values_RSJD.flatten(0, 1),
        filled.query_ends,
        filled.key_ends,
        max_queries,
        max_keys,
        dropout,
        is_causal,
        return_debug_mask,
        seqused_k=filled.counts_R,
    )
    return output[0]


def masked_attention(
    q_RHD: Tensor, keys_RSJD: Tensor, values_RSJD: Tensor, mask_RS: Tensor
) -> Tensor:
    """Compute attention [R, H, D] over the columns of a mask: -inf for an empty column, else 0.

    The caches may have more columns than the mask."""
    window = mask_RS.shape[1]
    keys = keys_RSJD[:, :window].transpose(1, 2)
    values = values_RSJD[:, :window].transpose(1, 2)
    # The query heads that share a key head are passed as query positions, so they read its keys
    # without copies.
    key_heads = keys_RSJD.shape[2]
    q = q_RHD.unflatten(1, (key_heads, -1))
    mask = mask_RS[:, None, None]
    output = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    return output.flatten(1, 2)


@cache
def flash_attention_works(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    head_dim: int,
) -> bool:
    """Return whether `flash_attention` can be used on this device.

    It is tried once on a few tokens. If it refuses them or computes something else, a warning says
    so, and the mask is used."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if not is_flash_attention_size(capability, dtype, head_dim):
        return False
    reason = why_not(device, dtype, heads, key_heads, head_dim)
    if reason:
        warnings.warn(
            f"decoding reads all columns of the cache, which is slower: {reason}", stacklevel=2
        )
    return not reason


def why_not(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    head_dim: int,
) -> str:
    """Return why `flash_attention` cannot be used, "" if it can.

    It must compute the same as float64 for two rows, whose empty columns hold NaN."""
    generator = torch.Generator().manual_seed(0)
    columns = 5
    counts = (2, 4)
    q_RHD = torch.randn(2, heads, head_dim, generator=generator)
    keys_RSJD, values_RSJD = torch.randn(2, 2, columns, key_heads, head_dim, generator=generator)
    queries_per_key = heads // key_heads
    expected = []
    for row, count in enumerate(counts):
        keys = keys_RSJD[row, :count].repeat_interleave(queries_per_key, 1).double()
        values = values_RSJD[row, :count].repeat_interleave(queries_per_key, 1).double()
        scores = torch.einsum("hd,shd->hs", q_RHD[row].double(), keys) / head_dim**0.5
        expected.append(torch.einsum("hs,shd->hd", scores.softmax(-1), values))
        keys_RSJD[row, count:] = torch.nan
        values_RSJD[row, count:] = torch.nan
    expected_RHD = torch.stack(expected)
    inputs = [x.to(device, dtype) for x in (q_RHD, keys_RSJD, values_RSJD)]
    filled = FilledColumns.of(torch.tensor(counts, device=device), columns)
    try:
        computed_RHD = flash_attention(*inputs, filled)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"FlashAttention refuses counts of keys: {first_line(error)}"
    difference = (computed_RHD.cpu().double() - expected_RHD).abs().max()
    relative_error = float(difference / expected_RHD.abs().max())
    if relative_error < MAX_RELATIVE_ERROR:  # False for NaN
        return ""
    return f"FlashAttention with counts of keys is off by {relative_error:.2g}"
