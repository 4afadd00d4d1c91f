"""RAGEN-2's proxy of the mutual information of prompts and responses (arXiv:2604.06268).

If a policy collapses to one template for all prompts, the entropy can stay high while a response no
longer depends on its prompt. The proxy then falls towards 0.

Shape suffixes: R responses, P prompts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RETRIEVAL_DEPTHS = (1, 2, 4, 8)


def prompt_information(
    mean_logp_RP: Tensor, sum_logp_RP: Tensor, own_R: Tensor, identity_P: Tensor
) -> dict[str, float]:
    """Return the proxy and its relatives, as RAGEN's `CollapseDetector` has them.

    l_ij is the log-prob of response i under prompt j, teacher-forced: `mean_logp_RP` is per token,
    and `sum_logp_RP` of the whole response. `own_R` is the column of the response's own prompt.
    Prompts with the same number in `identity_P` are equal.

        matched          mean_i l_i,own(i)
        marginal         mean_i [ logsumexp_j l_ij - log P ]
        mi               matched - marginal, per token
        mi_sequence      the same of whole responses, in nats per response
        bound            log P
        retrieval@k      the share of responses whose own prompt is among the k most probable
        chance@k         the share by chance: k / P for different prompts, an upper bound for equal

    - `mi` takes a mean of log-probs inside the logsumexp: the mixture of tempered distributions,
      not the mutual information over T.
    - `bound` holds for `mi_sequence`, which reaches it after a handful of tokens. For an alarm use
      `mi` or retrieval.
    - Both estimates can be negative.
    """
    prompts = mean_logp_RP.shape[1]
    numbers = {"bound": math.log(prompts)}
    for suffix, logp_RP in (("", mean_logp_RP), ("_sequence", sum_logp_RP)):
        matched_R = logp_RP.gather(1, own_R.unsqueeze(1)).squeeze(1)
        marginal_R = logp_RP.logsumexp(1) - math.log(prompts)
        numbers[f"matched{suffix}"] = float(matched_R.mean())
        numbers[f"marginal{suffix}"] = float(marginal_R.mean())
        numbers[f"mi{suffix}"] = float((matched_R - marginal_R).mean())
    is_own_RP = identity_P[own_R].unsqueeze(1) == identity_P
    # the mean share of prompts that equal the own prompt
    share = float(is_own_RP.sum(1).double().mean()) / prompts
    for depth in RETRIEVAL_DEPTHS:
        k = min(depth, prompts)
        best_RK = mean_logp_RP.topk(k, dim=1).indices
        is_retrieved_R = is_own_RP.gather(1, best_RK).any(1)
        numbers[f"retrieval@{depth}"] = float(is_retrieved_R.double().mean())
        numbers[f"chance@{depth}"] = min(1.0, k * share)
    return numbers
