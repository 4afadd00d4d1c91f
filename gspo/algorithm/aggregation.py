"""Aggregation: from the loss of every token to one number. It is a choice separate from the
objective.

Frameworks give different formulas the same name. Here every denominator is written out, so that the
formula of each framework can be chosen (experiments/PARITY.md says which framework uses which).

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo.data.masked import masked_mean, masked_sum
from gspo.io.ranges import Ranged, choice, ranged

if TYPE_CHECKING:
    from torch import Tensor

MODES = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LENGTH_WEIGHTED = MODES[1:]  # with these, long responses weigh more
ROWS = ("nonempty", "all", "one")


@dataclass(frozen=True)
class Totals:
    """Holds the counts by which a loss is normalised: those of the whole optimizer step, not of a
    micro-batch.
    """

    sequences: int  # the number of responses with at least one token in the mask
    rows: int  # the number of all responses
    tokens: int  # the number of tokens in the mask
    width: int  # the number of columns of the padded batch

    @staticmethod
    def of(mask_BT: Tensor) -> Totals:
        """Count the responses and tokens of a mask."""
        return Totals(
            int(mask_BT.any(-1).sum()), *mask_BT.shape[:1], int(mask_BT.sum()), *mask_BT.shape[1:]
        )


@dataclass
class Aggregation(Ranged, key="aggregation"):
    """Computes the share of a micro-batch in the loss of its optimizer step; all shares add up to
    that loss.

        seq-mean-token-mean       1/N sum_i 1/|y_i| sum_t l_it     GSPO Eq 5, GRPO Eq 2 of
                                  arXiv:2507.18071
        token-mean                sum_it l_it / sum_i |y_i|        DAPO, arXiv:2503.14476: long
                                  responses weigh more
        seq-mean-token-sum        1/N sum_i sum_t l_it             a response weighs in proportion
                                  to its length
        seq-mean-token-sum-norm   1/N sum_i 1/C sum_t l_it         Dr.GRPO, arXiv:2503.20783: C is a
                                  constant

    N is the number of responses with at least one token (`rows=nonempty`), of all responses
    (`all`), or 1 (`one`, which gives a sum). C is `length`. N and sum |y_i| come from `totals`, so
    the gradient does not depend on how the batch is cut into micro-batches.
    """

    # one of the four above | auto: the one that the objective's paper uses
    mode: str = choice("auto", ("auto", *MODES))
    rows: str = choice("nonempty", ROWS)  # what N counts in the seq-mean modes
    # C of the -norm mode: a number | null: the longest response limit of the run | 0: the width of
    # the batch
    length: int | None = ranged(None, least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.mode == "token-mean" and self.rows != "nonempty":
            raise ValueError(
                f"aggregation.rows={self.rows} is not read by aggregation.mode=token-mean"
            )
        if self.length is not None and self.mode not in ("seq-mean-token-sum-norm", "auto"):
            raise ValueError(
                f"aggregation.length={self.length} is not read by aggregation.mode={self.mode}"
            )

    def __call__(self, loss_BT: Tensor, mask_BT: Tensor, totals: Totals) -> Tensor:
        """Aggregate the loss of every token to a scalar.

        Raises ValueError for mode=auto or length=null, which gspo.config replaces before training.
        """
        if self.mode == "token-mean":
            return masked_sum(loss_BT, mask_BT).sum() / max(totals.tokens, 1)
        count = {"nonempty": totals.sequences, "all": totals.rows, "one": 1}[self.rows]
        if self.mode == "seq-mean-token-mean":
            return masked_mean(loss_BT, mask_BT).sum() / max(count, 1)
        total = masked_sum(loss_BT, mask_BT).sum() / max(count, 1)
        if self.mode == "seq-mean-token-sum":
            return total
        if self.mode == "auto" or self.length is None:
            raise ValueError(
                f"aggregation.mode={self.mode} with length={self.length} does not say what to divide by"
            )
        return total / (self.length or totals.width)
