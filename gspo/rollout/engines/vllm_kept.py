"""The kept tokens of vLLM's responses, from the log-probs that vLLM returns.

With logprobs_mode=processed_logprobs, vLLM computes log-probs after the temperature, min_p, top_k
and top_p. Then exactly the kept tokens have finite log-probs. vLLM returns the most likely tokens
of each position, at least rollout.top_k of them, so all kept tokens are among these.

vLLM's own flag for this, return_sampling_mask (from 0.28), is not used. With it an engine refuses
every request with temperature 0 or without top_k, whether it needs the kept tokens or not: greedy
evaluation, evaluation with other rules, and the scoring of the hand-over check. It also needs a GPU
and the second model runner. This way works with every runner, also on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gspo.data.kept_tokens import KeptTokens
from gspo.model.weights import input_embedding

if TYPE_CHECKING:
    from gspo.model.policy import Policy
    from gspo.rollout.engines.truncation import Truncation

# vLLM keeps all tokens as likely as the k-th, so there may be some more than top_k
MAX_TIES = 32


def vocabulary_size(policy: Policy) -> int:
    """Return the number of logits of the policy's model."""
    return len(input_embedding(policy.model))


def max_logprobs(settings: Truncation) -> int:
    """Return vLLM's option max_logprobs: the most log-probs that a request may ask for."""
    return settings.top_k + MAX_TIES


def requested_logprobs(top_k: int, vocabulary: int) -> int:
    """Return how many log-probs a request asks for at each position."""
    return min(top_k + MAX_TIES, vocabulary)


def kept_of(finite_ids: list[list[int]], top_k: int, vocabulary: int) -> KeptTokens:
    """Return the kept tokens of a response from the tokens with finite log-probs.

    Raises RuntimeError if more tokens may have been kept than were returned."""
    limit = requested_logprobs(top_k, vocabulary)
    largest = max(map(len, finite_ids), default=0)
    if limit < vocabulary and largest >= limit:
        raise RuntimeError(
            f"vLLM kept at least {largest} tokens with rollout.top_k={top_k}, because many are "
            "equally likely: the kept tokens are not known; set policy.head_dtype=float32, or "
            "rollout.keep_mask=false"
        )
    lists = [[] if len(ids) >= vocabulary else ids for ids in finite_ids]
    return KeptTokens.of_lists(lists, vocabulary)
