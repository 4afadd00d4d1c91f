"""Reductions under a mask, by `where` and never by multiplication: NaN or inf in padding never reaches a result.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATIONS = ("sequence_mean", "token_mean")


def masked_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over the tokens of each response; masked tokens count as 0 and get no gradient. Shape [B]."""
    return torch.where(mask_BT, x_BT, 0.0).sum(-1)


def masked_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the tokens of each response; 0 for a response without tokens. Shape [B]."""
    return masked_sum(x_BT, mask_BT) / mask_BT.sum(-1).clamp(min=1)


@dataclass(frozen=True)
class Totals:
    """What a loss is normalised by: counts of the whole optimizer step, whatever the micro-batch."""

    sequences: int  # responses with at least one token
    tokens: int

    @staticmethod
    def of(mask_BT: Tensor) -> Totals:
        return Totals(sequences=int(mask_BT.any(-1).sum()), tokens=int(mask_BT.sum()))


def aggregate(loss_BT: Tensor, mask_BT: Tensor, how: str, totals: Totals) -> Tensor:
    """The share of a (micro-)batch in the loss of its optimizer step; the shares of all micro-batches add up to it.

        sequence_mean   1/B sum_i 1/|y_i| sum_t loss_it      GSPO Eq 5 and GRPO Eq 2 of arXiv:2507.18071
        token_mean      sum_it loss_it / sum_i |y_i|         DAPO, arXiv:2503.14476

    B and sum |y_i| come from `totals`, so the gradient does not depend on how the batch is cut.
    """
    if how == "sequence_mean":
        return masked_mean(loss_BT, mask_BT).sum() / max(totals.sequences, 1)
    if how == "token_mean":
        return masked_sum(loss_BT, mask_BT).sum() / max(totals.tokens, 1)
    raise ValueError(f"aggregation={how!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
