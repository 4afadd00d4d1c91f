"""Responses as tensors: packing, mini-batches, trimming.

One row per response: the prompt padded on its left, the response padded on its right, so that all responses start in
the same column `prompt_width`:

    . . 7 + 5 = ? | 7 + 5 = 1 2 ; # 1 2 $
    3 - 8 + 9 = ? | 3 - 8 = - 5 ; - 5 + 9 = ...

Shape suffixes: B responses, T response tokens, S = prompt_width + T all tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from gspo.core.types import Response

NOT_RECORDED = -1  # in place of experts at padding, and at the last token, which no engine feeds to the model


@dataclass
class TrainBatch:
    """What an update needs of B responses."""

    tokens_BS: Tensor  # int64
    attention_BS: Tensor  # bool, True on real tokens
    mask_BT: Tensor  # bool, True on response tokens (the end-of-sequence token included)
    engine_logp_BT: Tensor  # log-probs as the engine reported them
    adv_BT: Tensor  # advantages
    prompts_B: Tensor  # int64, rows with the same number have the same prompt
    old_logp_BT: Tensor | None = None  # log-probs under the old policy
    experts_BSLK: Tensor | None = None  # experts that the trainer chose under the old policy; None for dense models
    engine_experts_BSLK: Tensor | None = None  # those that the engine chose; None if it did not return them
    replay_BSLK: Tensor | None = None  # experts that forward passes go through; None: the routers' own choice
    ref_logp_BT: Tensor | None = None  # log-probs under the reference policy
    correction_BT: Tensor | None = None  # weights for the mismatch of engine and trainer; None: no correction
    old_values_BT: Tensor | None = None  # the critic's values at the step's start
    returns_BT: Tensor | None = None  # what the critic should predict

    @property
    def prompt_width(self) -> int:
        return self.tokens_BS.shape[1] - self.mask_BT.shape[1]

    def __len__(self) -> int:
        return self.tokens_BS.shape[0]

    def to(self, device: torch.device) -> TrainBatch:
        present = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(self, **{name: value.to(device) for name, value in present.items()})

    def rows(self, rows: Tensor) -> TrainBatch:
        """Some rows, in the order given, with the columns that are padding in all of them cut away."""
        attention_BS = self.attention_BS[rows]
        start = self.prompt_width - int(attention_BS[:, : self.prompt_width].sum(1).max())
        width = int(
            attention_BS[:, self.prompt_width :].sum(1).max()
        )  # not of the mask: it may leave out whole responses
        taken = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "prompts_B":
                taken[field.name] = value[rows]
                continue
            columns = slice(start, self.prompt_width + width) if "_BS" in field.name else slice(0, width)
            taken[field.name] = value[rows][:, columns]
        return replace(self, **taken)

    def split(self, size: int) -> list[TrainBatch]:
        """Micro-batches of at most `size` rows; rows without advantage apart from the others, so that they need no
        backward pass."""
        return [self.rows(chunk) for chunk in self.order(~self.adv_BT.any(1)).split(size)]

    def order(self, last_B: Tensor | None = None) -> Tensor:
        """All rows by the length of the longest with the same prompt, so that micro-batches hold similar lengths, and
        prompts of which each is needed once; those marked in `last_B` after the others."""
        lengths_B = self.attention_BS.sum(1)
        distinct_G, group_B = self.prompts_B.unique(return_inverse=True)
        longest_G = torch.zeros_like(distinct_G).scatter_reduce(0, group_B, lengths_B, "amax")
        key_B = longest_G[group_B] * len(distinct_G) + group_B
        return (key_B if last_B is None else key_B + last_B * (1 + key_B.max())).argsort(stable=True)


def pack(responses: list[Response], pad_id: int) -> TrainBatch:
    """Lay out responses as above, with the engine's log-probs and what else all of them hold: the engine's experts, the
    log-probs and experts of the policy that sampled. Advantages are still 0.

    Raises ValueError if a response has no token or not one log-prob per token (an engine that returns such is broken).
    """
    for r in responses:
        if not r.token_ids or len(r.token_ids) != len(r.logprobs):
            raise ValueError(
                f"response {r.sample}, problem {r.problem.index}: {len(r.token_ids)} tokens, {len(r.logprobs)} logprobs"
            )
    batch = layout([(r.prompt_ids, r.token_ids) for r in responses], pad_id)
    for i, r in enumerate(responses):
        batch.engine_logp_BT[i, : len(r.token_ids)] = torch.from_numpy(r.logprobs)
    batch.engine_experts_BSLK = _experts([(len(r.prompt_ids), r.experts) for r in responses], batch)
    if all(r.old_logprobs is not None and len(r.old_logprobs) == len(r.token_ids) for r in responses):
        batch.old_logp_BT = torch.zeros_like(batch.engine_logp_BT)
        for i, r in enumerate(responses):
            batch.old_logp_BT[i, : len(r.token_ids)] = torch.from_numpy(r.old_logprobs)
        batch.experts_BSLK = _experts([(len(r.prompt_ids), r.old_experts) for r in responses], batch)
    return batch


def _experts(rows: list[tuple[int, np.ndarray | None]], batch: TrainBatch) -> Tensor | None:
    """(prompt tokens, experts of the positions from the prompt's first on) of every row as one tensor."""
    if any(experts is None for _, experts in rows):
        return None
    packed_BSLK = torch.full((*batch.tokens_BS.shape, *rows[0][1].shape[1:]), NOT_RECORDED, dtype=torch.int16)
    for i, (prompt, experts) in enumerate(rows):
        start = batch.prompt_width - prompt
        packed_BSLK[i, start : start + len(experts)] = torch.from_numpy(experts.astype(np.int16))
    return packed_BSLK


def layout(rows: list[tuple[list[int], list[int]]], pad_id: int) -> TrainBatch:
    """(prompt, response) token lists as a batch, advantages and log-probs still 0."""
    prompt_width = max(len(prompt) for prompt, _ in rows)
    width = max(len(response) for _, response in rows)
    tokens_BS = torch.full((len(rows), prompt_width + width), pad_id, dtype=torch.int64)
    attention_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
    for i, (prompt, response) in enumerate(rows):
        columns = slice(prompt_width - len(prompt), prompt_width + len(response))
        tokens_BS[i, columns] = torch.tensor(prompt + response)
        attention_BS[i, columns] = True
    zeros_BT = torch.zeros(len(rows), width)
    mask_BT = attention_BS[:, prompt_width:].clone()
    numbers = {}
    prompts_B = torch.tensor([numbers.setdefault(tuple(prompt), len(numbers)) for prompt, _ in rows])
    return TrainBatch(tokens_BS, attention_BS, mask_BT, zeros_BT, zeros_BT.clone(), prompts_B)
