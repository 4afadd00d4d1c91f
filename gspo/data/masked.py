"""Reductions under a mask.

They use `torch.where` and never multiplication, so NaN or inf in padding cannot spread.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gspo.data.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def masked_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Compute the sum over the tokens of each response. Shape [B].

    Masked tokens count as 0 and get no gradient.
    """
    return torch.where(mask_BT, x_BT, 0.0).sum(-1)


def masked_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Compute the mean over the tokens of each response, 0 without tokens. Shape [B]."""
    tokens_B = mask_BT.sum(-1).clamp(min=1)
    return masked_sum(x_BT, mask_BT) / tokens_B
