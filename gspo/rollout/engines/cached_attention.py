"""Attention of one new token of each row over the row's cached keys and values.

A row's tokens lie in the first columns of its cache, and a count on the device says how many there
are. On a GPU in bfloat16 FlashAttention reads these columns and no others. Everywhere else the
columns behind them are masked.

Shape suffixes: R rows, S columns of the cache, H query heads, J key/value heads, D head dimension.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.model.forward.variable_lengths import is_flash_attention_size


@dataclass
class Filled:
    """Says which columns of the cache are filled. All tensors lie on the device, and a step changes
    them in place.
    """

    counts_R: Tensor  # int32: how many columns of each row are filled
    query_ends: Tensor  # int32 [R + 1]: 0, 1, ..., R
    key_ends: Tensor  # int32 [R + 1]: 0, S, ..., R * S


def filled_columns(counts_R: Tensor, columns: int) -> Filled:
    """Return what `by_counts` needs to know of a cache of so many columns, of which counts_R are
    filled.
    """
    ends = torch.arange(len(counts_R) + 1, dtype=torch.int32, device=counts_R.device)
    return Filled(counts_R.to(torch.int32), ends, ends * columns)


def by_counts(q_RHD: Tensor, keys_RSJD: Tensor, values_RSJD: Tensor, filled: Filled) -> Tensor:
    """Compute attention with FlashAttention, which reads the filled columns only. Returns [R, H,
    D].
    """
    columns = keys_RSJD.shape[1]
    out = torch.ops.aten._flash_attention_forward(
        q_RHD,
        keys_RSJD.flatten(0, 1),
        values_RSJD.flatten(0, 1),
        filled.query_ends,
        filled.key_ends,
        1,
        columns,
        0.0,
        False,
        False,
        seqused_k=filled.counts_R,
    )
    return out[0]


def by_mask(q_RHD: Tensor, keys_RSJD: Tensor, values_RSJD: Tensor, mask_RS: Tensor) -> Tensor:
    """Compute attention over the columns of a mask, which is -inf where a column is empty and else
    0. The caches may have more columns than the mask. Returns [R, H, D]."""
    columns = slice(0, mask_RS.shape[1])
    # The query heads of one key head take the place of several query positions: they read its keys
    # without copies.
    q = q_RHD.unflatten(1, (keys_RSJD.shape[2], -1))
    keys, values = (x[:, columns].transpose(1, 2) for x in (keys_RSJD, values_RSJD))
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask_RS[:, None, None]
    ).flatten(1, 2)


@cache
def counts_are_used(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int
) -> bool:
    """Return whether `by_counts` is used on this device. It is tried once on a few tokens: where it
    refuses them or computes something else, a mask is used, which a warning says."""
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
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int
) -> str:
    """Return why `by_counts` cannot be used, "" if it can: for two rows it computes what float64
    does. The columns that are not filled hold NaN."""
    generator = torch.Generator().manual_seed(0)
    columns, counts = 5, (2, 4)
    q_RHD = torch.randn(2, heads, head_dim, generator=generator)
    keys_RSJD, values_RSJD = torch.randn(2, 2, columns, key_heads, head_dim, generator=generator)
    shared = heads // key_heads
    expected = []
    for row, count in enumerate(counts):
        keys, values = (
            x[row, :count].repeat_interleave(shared, 1).double() for x in (keys_RSJD, values_RSJD)
        )
        scores = torch.einsum("hd,shd->hs", q_RHD[row].double(), keys) / head_dim**0.5
        expected.append(torch.einsum("hs,shd->hd", scores.softmax(-1), values))
        keys_RSJD[row, count:], values_RSJD[row, count:] = torch.nan, torch.nan
    on_device = [x.to(device, dtype) for x in (q_RHD, keys_RSJD, values_RSJD)]
    try:
        computed = by_counts(
            *on_device, filled_columns(torch.tensor(counts, device=device), columns)
        )
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"FlashAttention refuses counts of keys: {str(error).splitlines()[0]}"
    want = torch.stack(expected)
    off = float((computed.cpu().double() - want).abs().max() / want.abs().max())
    # NaN, which compares as neither, is an error too.
    return "" if off < 0.05 else f"FlashAttention with counts of keys is off by {off:.2g}"
