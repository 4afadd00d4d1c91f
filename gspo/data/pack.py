"""Packs responses into batches (gspo.data.batch).

Shape suffixes: B responses, T response tokens, S all tokens, L MoE layers, K experts per
token.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from gspo.data.batch import NOT_RECORDED, KeptSets, RolloutBatch, TokenBatch, contents_of
from gspo.data.kept_tokens import KeptTokens
from gspo.data.samples import Response, ScoredResponse


def pack(responses: Sequence[Response], pad_id: int) -> RolloutBatch:
    """Pack responses into a batch.

    The engine's experts are packed if all responses have them. Raises ValueError for a response
    without tokens, without a log-prob per token, or with a token that is not among the kept tokens
    of its position: only a broken engine returns such.
    """
    for r in responses:
        tokens = len(r.token_ids)
        if tokens == 0 or tokens != len(r.logprobs):
            raise ValueError(
                f"response {r.sample}, problem {r.problem.index}: {tokens} tokens, "
                f"{len(r.logprobs)} logprobs"
            )
        fault = r.kept.fault(r.token_ids) if r.kept is not None else ""
        if fault:
            raise ValueError(f"response {r.sample}, problem {r.problem.index} {fault}")
    by_policy = None
    if any(r.turns for r in responses):
        by_policy = [r.policy_mask for r in responses]
    prompts = [r.prompt_ids for r in responses]
    token_ids = [r.token_ids for r in responses]
    logprobs = [r.logprobs for r in responses]
    experts = [r.experts for r in responses]
    batch = layout(prompts, token_ids, pad_id, by_policy)
    real_BT = batch.real_BT
    batch.kept = _kept([r.kept for r in responses], real_BT)
    return RolloutBatch(
        **contents_of(batch),
        engine_logp_BT=_logprobs(logprobs, batch),
        engine_experts_BSLK=_experts(responses, experts, batch),
    )


def pack_recorded(
    responses: Sequence[Response], batch: TokenBatch
) -> tuple[Tensor, Tensor | None] | None:
    """Pack the log-probs and experts that were recorded under the weights that sampled.

    Returns None if a response lacks the log-prob of a token. The experts are None if a response has
    none.
    """
    logprobs = []
    for r in responses:
        if r.old_logprobs is None or len(r.old_logprobs) != len(r.token_ids):
            return None
        logprobs.append(r.old_logprobs)
    experts = [r.old_experts for r in responses]
    return _logprobs(logprobs, batch), _experts(responses, experts, batch)


@dataclass
class EpisodeTurns:
    """The turns of a batch of episodes."""

    index_BT: Tensor  # int64, the index of the policy's turn, from 0
    rewards_BT: Tensor  # float64, the reward of every turn, at its last token


def pack_turns(responses: Sequence[ScoredResponse], batch: TokenBatch) -> EpisodeTurns | None:
    """Pack the turns and their rewards, None if no response is an episode.

    A response that is no episode is a single turn, with the verifier's reward."""
    if not any(r.turns for r in responses):
        return None
    index_BT = torch.zeros_like(batch.mask_BT, dtype=torch.int64)
    # rounded to float32, as rewards of whole responses are, so that their float64 sums are exact
    rewards_BT = torch.zeros_like(batch.mask_BT, dtype=torch.float32)
    for i, r in enumerate(responses):
        end = 0
        index = 0
        for turn in r.turns:
            begin = end
            end += turn.tokens
            if turn.author == "policy":
                index_BT[i, begin:end] = index
                rewards_BT[i, end - 1] = turn.reward
                index += 1
        if not r.turns:
            last = len(r.token_ids) - 1
            rewards_BT[i, last] = r.reward
    return EpisodeTurns(index_BT, rewards_BT.double())


def _logprobs(rows: list[ndarray], batch: TokenBatch) -> Tensor:
    """Pack log-probs of the response tokens, 0 at padding: [B, T], float32."""
    packed_BT = np.zeros(batch.mask_BT.shape, dtype=np.float32)
    real_BT = batch.real_BT
    packed_BT[real_BT.numpy()] = np.concatenate(rows)
    return torch.from_numpy(packed_BT)


def _experts(
    responses: Sequence[Response], rows: list[ndarray | None], batch: TokenBatch
) -> Tensor | None:
    """Pack experts into a tensor [B, S, L, K], int16, None if a row is None.

    Each row holds the experts of a response's positions, from the first prompt token on.
    """
    recorded = [experts for experts in rows if experts is not None]
    if len(recorded) < len(rows):
        return None
    shape = (*batch.tokens_BS.shape, *recorded[0].shape[1:])
    packed_BSLK = np.full(shape, NOT_RECORDED, dtype=np.int16)
    starts_B = batch.prompt_width - lengths_of([r.prompt_ids for r in responses])
    recorded_BS = _columns(starts_B, lengths_of(recorded), shape[1])
    packed_BSLK[recorded_BS] = np.concatenate(recorded)
    return torch.from_numpy(packed_BSLK)


def _kept(rows: list[KeptTokens | None], real_BT: Tensor) -> KeptSets | None:
    """Pack the kept tokens of responses, None if no response has any.

    `real_BT` marks the tokens of each response."""
    if all(kept is None for kept in rows):
        return None
    lengths = real_BT.sum(1).tolist()
    kept_rows = [
        KeptTokens.whole_vocabulary(length) if kept is None else kept
        for kept, length in zip(rows, lengths, strict=True)
    ]
    counts_N = np.concatenate([kept.counts for kept in kept_rows]).astype(np.int64)
    parts = [kept.ids for kept in kept_rows if len(kept.ids)]
    counts_BT = torch.zeros(real_BT.shape, dtype=torch.int64)
    starts_BT = torch.zeros(real_BT.shape, dtype=torch.int64)
    counts_BT[real_BT] = torch.from_numpy(counts_N)
    starts_BT[real_BT] = torch.from_numpy(counts_N.cumsum() - counts_N)
    ids = np.concatenate(parts) if parts else np.zeros(0, np.uint16)
    return KeptSets(ids, starts_BT, counts_BT)


def lengths_of(rows: Sequence[Sized]) -> ndarray:
    """Return the length of each row: int64 [B]."""
    return np.array([len(row) for row in rows])


def layout(
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    pad_id: int,
    by_policy: Sequence[ndarray] | None = None,
) -> TokenBatch:
    """Lay out the tokens of prompts and responses as a batch.

    `by_policy` says for each response which tokens the policy wrote, bool [T]. None: all.
    """
    prompt_lengths_B = lengths_of(prompts)
    response_lengths_B = lengths_of(responses)
    prompt_width = int(prompt_lengths_B.max())
    width = prompt_width + int(response_lengths_B.max())
    starts_B = prompt_width - prompt_lengths_B
    lengths_B = prompt_lengths_B + response_lengths_B
    attention_BS = _columns(starts_B, lengths_B, width)

    rows = zip(prompts, responses, strict=True)
    parts = chain.from_iterable(rows)
    tokens = chain.from_iterable(parts)
    tokens_BS = np.full(attention_BS.shape, pad_id, dtype=np.int64)
    tokens_BS[attention_BS] = np.fromiter(tokens, dtype=np.int64)

    mask_BT = attention_BS[:, prompt_width:].copy()
    if by_policy is not None:
        mask_BT[mask_BT] = np.concatenate(by_policy)

    indices: dict[tuple[int, ...], int] = {}
    prompt_indices = []
    for prompt in prompts:
        index = indices.setdefault(tuple(prompt), len(indices))
        prompt_indices.append(index)
    return TokenBatch(
        tokens_BS=torch.from_numpy(tokens_BS),
        attention_BS=torch.from_numpy(attention_BS),
        mask_BT=torch.from_numpy(mask_BT),
        sampled_BT=torch.from_numpy(mask_BT.copy()),
        prompts_B=torch.tensor(prompt_indices),
    )


def _columns(starts_B: ndarray, lengths_B: ndarray, width: int) -> ndarray:
    """Mark `lengths_B` columns of each row from column `starts_B` on: bool [B, width]."""
    offsets_BS = np.arange(width) - starts_B[:, None]
    return (offsets_BS >= 0) & (offsets_BS < lengths_B[:, None])
