"""Truncated sampling: top_p, top_k and min_p exclude unlikely tokens before a token is drawn.

For example, with probabilities .5, .3, .15, .05 and top_p=.7 the first two tokens are kept, because
the first alone has less than .7. Their probabilities become .625 and .375. The reported log-prob
stays log .5 or log .3, of the whole distribution. The trainer's log-probs, ratios and gradients are
of the whole distribution too. With rollout.keep_mask all of them are of the kept tokens, and the
reported log-prob is log .625 or log .375.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from gspo.data.lazy_torch import torch
from gspo.io.errors import SettingError
from gspo.io.ranges import HASHED_IF_CHANGED, Ranged, ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class Truncation(Ranged):
    """The rules that say which tokens may be drawn.

    They are applied in this order, as in vLLM, to the distribution at the sampling temperature.
    Each rule applies to the tokens that the rules before it have kept.

    min_p   tokens with at least min_p times the largest probability (arXiv:2407.01082)
    top_k   the k most likely tokens, and all as likely as the k-th
    top_p   the fewest most likely tokens with a total probability of top_p (arXiv:1904.09751)
    """

    # the defaults keep all tokens
    top_p: float = ranged(1.0, above=0, most=1, metadata=HASHED_IF_CHANGED)
    top_k: int = ranged(0, least=0, metadata=HASHED_IF_CHANGED)
    min_p: float = ranged(0.0, least=0, below=1, metadata=HASHED_IF_CHANGED)

    @property
    def rules(self) -> dict[str, float]:
        """The rules that exclude tokens, by name. It is empty for the whole distribution."""
        values = {f.name: getattr(self, f.name) for f in fields(Truncation)}
        return {f.name: values[f.name] for f in fields(Truncation) if values[f.name] != f.default}

    def refuse_greedy(self, temperature: float, prefix: str = "") -> None:
        """Raise ValueError for a rule beside temperature 0, which takes the most likely token."""
        if temperature != 0:
            return
        for name, value in self.rules.items():
            raise SettingError(
                f"{prefix}{name}", value, f"is not read with {prefix}temperature=0 (greedy)"
            )


def kept_tokens(logprobs_RV: Tensor, truncation: Truncation) -> Tensor:
    """Return which tokens may be drawn, bool [R, V]: at least the most likely token of each row.

    Of equally likely tokens on the border of top_p, the tokens with the smaller ids are kept."""
    kept_RV = torch.ones_like(logprobs_RV, dtype=torch.bool)
    if truncation.min_p:
        max_R1 = logprobs_RV.amax(-1, keepdim=True)
        kept_RV &= logprobs_RV >= max_R1 + math.log(truncation.min_p)
    if 0 < truncation.top_k < logprobs_RV.shape[-1]:
        kth_R1 = logprobs_RV.topk(truncation.top_k).values[:, -1:]
        kept_RV &= logprobs_RV >= kth_R1
    if truncation.top_p < 1:
        p_RV = logprobs_RV.double().masked_fill(~kept_RV, -torch.inf).softmax(-1)
        sorted_RV, order_RV = p_RV.sort(dim=-1, descending=True, stable=True)
        before_RV = sorted_RV.cumsum(-1) - sorted_RV  # total probability of the more likely tokens
        within_sorted_RV = before_RV < truncation.top_p
        kept_RV &= torch.empty_like(kept_RV).scatter_(-1, order_RV, within_sorted_RV)
    return kept_RV
