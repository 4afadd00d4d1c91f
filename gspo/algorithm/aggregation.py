"""Aggregation: from the loss of every token to a single number.

It is a choice separate from the objective. Frameworks give different formulas the same name. Here
every denominator is written out, and the formula of each framework can be chosen
(experiments/PARITY.md lists the formula that each framework uses).

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo.data.masked import masked_mean, masked_sum
from gspo.io.errors import SettingError
from gspo.io.ranges import Ranged, choice, ranged

if TYPE_CHECKING:
    from torch import Tensor

MODES = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LENGTH_WEIGHTED = MODES[1:]  # with these, long responses weigh more
ROWS = ("nonempty", "all", "one")


@dataclass(frozen=True)
class Totals:
    """The counts by which a loss is normalised, over the whole optimizer step."""

    sequences: int  # responses with at least one token in the mask
    rows: int  # all responses
    tokens: int  # tokens in the mask
    width: int  # columns of the padded batch

    @staticmethod
    def of(mask_BT: Tensor) -> Totals:
        """Count the responses and tokens of a mask."""
        rows, width = mask_BT.shape
        sequences = int(mask_BT.any(-1).sum())
        tokens = int(mask_BT.sum())
        return Totals(sequences, rows, tokens, width)


@dataclass
class Aggregation(Ranged, key="aggregation"):
    """The mean of the token losses l_it, by the formula of `mode`.

        seq-mean-token-mean       1/N sum_i 1/|y_i| sum_t l_it
        token-mean                sum_it l_it / sum_i |y_i|
        seq-mean-token-sum        1/N sum_i sum_t l_it
        seq-mean-token-sum-norm   1/N sum_i 1/C sum_t l_it

    GSPO and GRPO use the first (arXiv:2507.18071, Eq 5 and 2). DAPO uses the second
    (arXiv:2503.14476), in which long responses weigh more. In the third, a response weighs in
    proportion to its length. Dr.GRPO uses the fourth (arXiv:2503.20783).

    C is the constant `length`. N depends on `rows`:

        nonempty    the number of responses that have tokens
        all         the number of all responses
        one         1, which gives a sum

    A call returns the share of a micro-batch, and all shares add up to the loss of the optimizer
    step. N and sum_i |y_i| count the whole step (`totals`), so the gradient does not depend on the
    size of micro-batches.
    """

    # one of the four above | auto: the mode of the objective's paper
    mode: str = choice("auto", ("auto", *MODES))
    rows: str = choice("nonempty", ROWS)  # N of the seq-mean modes
    # C of the -norm mode: a number | null: the longest response limit of the run | 0: the width of
    # the batch
    length: int | None = ranged(None, least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.mode == "token-mean" and self.rows != "nonempty":
            raise SettingError(
                "aggregation.rows", self.rows, "is not read by aggregation.mode=token-mean"
            )
        if self.length is not None and self.mode not in ("seq-mean-token-sum-norm", "auto"):
            raise SettingError(
                "aggregation.length", self.length, f"is not read by aggregation.mode={self.mode}"
            )

    def __call__(self, loss_BT: Tensor, mask_BT: Tensor, totals: Totals) -> Tensor:
        """Return a scalar: the micro-batch's share of the aggregated loss.

        Raises ValueError for mode=auto or length=null, which gspo.config replaces before training.
        """
        counts = {"nonempty": totals.sequences, "all": totals.rows, "one": 1}
        count = max(counts[self.rows], 1)
        if self.mode == "seq-mean-token-mean":
            return masked_mean(loss_BT, mask_BT).sum() / count
        total = masked_sum(loss_BT, mask_BT).sum()
        if self.mode == "token-mean":
            return total / max(totals.tokens, 1)
        if self.mode == "seq-mean-token-sum":
            return total / count
        if self.mode == "auto" or self.length is None:
            raise SettingError(
                "aggregation.mode",
                self.mode,
                f"with length={self.length} does not say what to divide by",
            )
        return total / count / (self.length or totals.width)
