"""Truncated sampling: top_p, top_k and min_p leave unlikely tokens out before one is drawn.

For example, with probabilities .5, .3, .15, .05 and top_p=.7 the first two tokens are kept, because
the first alone has less than .7; one is drawn from .625 and .375. The log-prob that is reported
stays log .5 or log .3: that of the whole distribution, which the trainer's log-probs, ratios and
gradients are of too.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from gspo.data.lazy_torch import torch
from gspo.io.ranges import HASHED_IF_CHANGED, Ranged, ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class Truncation(Ranged):
    """Says which tokens may be drawn. The three rules are applied in this order, as vLLM does, to
    the distribution at the sampling temperature; each measures what the ones before it have left.

    min_p   tokens with at least min_p times the probability of the likeliest (arXiv:2407.01082)
    top_k   the k likeliest tokens, and those as likely as the k-th
    top_p   the likeliest tokens, as few as together have a probability of top_p (arXiv:1904.09751)
    """

    # 1: no token is left out
    top_p: float = ranged(1.0, above=0, most=1, metadata=HASHED_IF_CHANGED)
    top_k: int = ranged(0, least=0, metadata=HASHED_IF_CHANGED)  # 0: no token is left out
    # 0: no token is left out
    min_p: float = ranged(0.0, least=0, below=1, metadata=HASHED_IF_CHANGED)

    @property
    def rules(self) -> dict[str, float]:
        """The rules that leave tokens out, by name; empty where sampling is from the whole
        distribution.
        """
        named = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {f.name: named[f.name] for f in fields(Truncation) if named[f.name] != f.default}

    def refuse_greedy(self, temperature: float, prefix: str = "") -> None:
        """Raise ValueError for a rule beside temperature 0, which takes the likeliest token anyway."""
        for name, value in self.rules.items() if temperature == 0 else ():
            raise ValueError(
                f"{prefix}{name}={value} is not read with {prefix}temperature=0 (greedy)"
            )


def kept_tokens(logprobs_RV: Tensor, truncation: Truncation) -> Tensor:
    """Return which tokens may be drawn, bool [R, V]: at least the likeliest of each row. Of equally
    likely tokens on the border of top_p those with the smaller number are kept."""
    kept_RV = torch.ones_like(logprobs_RV, dtype=torch.bool)
    if truncation.min_p:
        kept_RV &= logprobs_RV >= logprobs_RV.amax(-1, keepdim=True) + math.log(truncation.min_p)
    if 0 < truncation.top_k < logprobs_RV.shape[-1]:
        kth_R1 = logprobs_RV.topk(truncation.top_k).values[:, -1:]
        kept_RV &= logprobs_RV >= kth_R1
    if truncation.top_p < 1:
        p_RV = logprobs_RV.double().masked_fill(~kept_RV, -torch.inf).softmax(-1)
        sorted_RV, order_RV = p_RV.sort(dim=-1, descending=True, stable=True)
        likelier_RV = sorted_RV.cumsum(-1) - sorted_RV  # the probability of the tokens before each
        within_RV = torch.empty_like(kept_RV).scatter_(-1, order_RV, likelier_RV < truncation.top_p)
        kept_RV &= within_RV
    return kept_RV
