"""Responses as tensors: packing them into a batch, and cutting a batch into mini-batches and
micro-batches.

There is one row per response. The prompt is padded on its left and the response on its right, so
that all responses start in the same column, `prompt_width`:

    . . 7 + 5 = ? | 7 + 5 = 1 2 ; # 1 2 $
    3 - 8 + 9 = ? | 3 - 8 = - 5 ; - 5 + 9 = ...

In an episode, tokens of the environment stand between those of the policy. They are real tokens, to
which later ones attend, but no response tokens: neither the loss nor any statistic sees them.

Shape suffixes: B responses, T response tokens, S = prompt_width + T all tokens, L MoE layers, K
experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gspo.data.samples import Response

# stands for experts at padding, and at the last token, which engines do not feed to the model
NOT_RECORDED = -1


@dataclass
class TrainBatch:
    """Holds what an update needs of B responses."""

    tokens_BS: Tensor  # int64
    attention_BS: Tensor  # bool, True on real tokens
    # bool, True on response tokens that are trained on: those of the policy, the end-of-sequence
    # token included
    mask_BT: Tensor
    # bool, True on all tokens of the policy, also where whole responses are left out of `mask_BT`
    sampled_BT: Tensor
    engine_logp_BT: Tensor  # log-probs as the engine reported them
    adv_BT: Tensor  # advantages
    prompts_B: Tensor  # int64; rows with the same number have the same prompt
    old_logp_BT: Tensor | None = None  # log-probs under the old policy
    # experts that the trainer chose under the old policy; None for dense models
    experts_BSLK: Tensor | None = None
    # experts that the engine chose; None if it did not return them
    engine_experts_BSLK: Tensor | None = None
    # experts that forward passes must use; None: the routers choose
    replay_BSLK: Tensor | None = None
    ref_logp_BT: Tensor | None = None  # log-probs under the reference policy
    # weights for the mismatch of engine and trainer; None: no correction
    correction_BT: Tensor | None = None
    old_values_BT: Tensor | None = None  # the critic's values at the start of the step
    returns_BT: Tensor | None = None  # the returns, which the critic is trained to predict
    # int64, the number of the policy's turn from 0 on; None where there are no episodes
    turns_BT: Tensor | None = None
    turn_rewards_BT: Tensor | None = None  # float64, the reward of every turn, at its last token

    # The places of the tokens in `mask_BT` and in `sampled_BT`. `to` sets them on its copy alone.
    _brought: ClassVar[tuple[Tensor, Tensor] | None] = None
    _brought_sampled: ClassVar[tuple[Tensor, Tensor] | None] = None

    @property
    def prompt_width(self) -> int:
        """The number of columns before the responses."""
        return self.tokens_BS.shape[1] - self.mask_BT.shape[1]

    def __len__(self) -> int:
        return self.tokens_BS.shape[0]

    def of_tokens(self, x_BT: Tensor) -> Tensor:
        """Select what belongs to response tokens: [M, ...] of [B, T, ...]."""
        return x_BT.flatten(0, 1).index_select(0, self._places()[0])

    def of_rows(self, x_B: Tensor) -> Tensor:
        """Select what belongs to rows that have response tokens."""
        return x_B.index_select(0, self._places()[1])

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return the places of the response tokens in a flattened [B, T], and the numbers of the
        rows that have some: those that came along from another device, else found anew, as
        `mask_BT` may have changed."""
        return self._brought or _places_in(self.mask_BT)

    def to(self, device: torch.device) -> TrainBatch:
        """Copy all tensors to a device, and the places of the response tokens with them: finding
        these on a GPU would wait for all the work that it has."""
        present = {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None
        }
        copied = replace(
            self, **{name: to_device(value, device) for name, value in present.items()}
        )
        copied._brought = tuple(to_device(places, device) for places in self._places())
        copied._brought_sampled = copied._brought
        if not torch.equal(self.mask_BT, self.sampled_BT):
            copied._brought_sampled = tuple(
                to_device(places, device) for places in _places_in(self.sampled_BT)
            )
        return copied

    def with_all_sampled(self) -> TrainBatch:
        """Return the batch with all tokens of the policy in `mask_BT`, also those that are not
        trained on.
        """
        batch = replace(self, mask_BT=self.sampled_BT)
        batch._brought = self._brought_sampled
        return batch

    def rows(self, rows: Tensor) -> TrainBatch:
        """Select rows in the order given, and cut away the columns that are padding in all of them."""
        attention_BS = self.attention_BS[rows]
        start = self.prompt_width - int(attention_BS[:, : self.prompt_width].sum(1).max())
        # from the attention mask, because the response mask may leave out whole responses
        width = int(attention_BS[:, self.prompt_width :].sum(1).max())
        selected = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "prompts_B":
                selected[field.name] = value[rows]
                continue
            columns = (
                slice(start, self.prompt_width + width) if "_BS" in field.name else slice(0, width)
            )
            selected[field.name] = value[rows][:, columns]
        return replace(self, **selected)

    def split(self, size: int) -> list[TrainBatch]:
        """Cut the batch into micro-batches of at most `size` rows.

        Rows whose advantages are all 0 come last, so that micro-batches made of them need no
        backward pass.
        """
        return [self.rows(chunk) for chunk in self.order(~self.adv_BT.any(1)).split(size)]

    def order(self, last_B: Tensor | None = None) -> Tensor:
        """Order the rows so that micro-batches hold similar lengths and few different prompts.
        Returns row numbers [B].

        Rows of the same prompt stay together, and prompts are sorted by their longest row. Rows
        that are marked in `last_B` come after the others.
        """
        lengths_B = self.attention_BS.sum(1)
        distinct_G, group_B = self.prompts_B.unique(return_inverse=True)
        longest_G = torch.zeros_like(distinct_G).scatter_reduce(0, group_B, lengths_B, "amax")
        key_B = longest_G[group_B] * len(distinct_G) + group_B
        return (key_B if last_B is None else key_B + last_B * (1 + key_B.max())).argsort(
            stable=True
        )


def _places_in(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of the marked tokens in a flattened [B, T], and the numbers of the rows
    that have some.
    """
    return mask_BT.flatten().nonzero().squeeze(-1), mask_BT.any(-1).nonzero().squeeze(-1)


def runs_ahead(device: torch.device) -> bool:
    """Return whether the CPU hands work to a device without waiting for it, as to a GPU."""
    return device.type not in ("cpu", "mps")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device. The CPU does not wait for a copy to a GPU, because it
    is made from pinned memory."""
    if runs_ahead(device):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_cpu(*tensors: Tensor) -> list[Tensor]:
    """Return tensors of one device on the CPU, with one wait for all of them."""
    copied = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    wait_for_copies(tensors[0].device)
    return copied


def wait_for_copies(device: torch.device) -> None:
    """Wait until the copies from a device that were begun before are complete."""
    if runs_ahead(device):
        torch.get_device_module(device).current_stream().synchronize()


def pack(responses: list[Response], pad_id: int) -> TrainBatch:
    """Pack responses into a batch with the layout above and the engine's log-probs. Advantages are
    still 0.

    Where all responses have them, the engine's experts and the log-probs and experts of the policy
    that sampled are packed too. Raises ValueError for a response without tokens, or without one
    log-prob per token: only a broken engine returns such.
    """
    for r in responses:
        if not r.token_ids or len(r.token_ids) != len(r.logprobs):
            raise ValueError(
                f"response {r.sample}, problem {r.problem.index}: {len(r.token_ids)} tokens, {len(r.logprobs)} logprobs"
            )
    batch = layout([(r.prompt_ids, r.token_ids) for r in responses], pad_id)
    batch.engine_logp_BT = _logprobs([r.logprobs for r in responses], batch)
    if any(r.turns for r in responses):
        _lay_out_turns(batch, responses)
    batch.engine_experts_BSLK = _experts([(len(r.prompt_ids), r.experts) for r in responses], batch)
    if all(
        r.old_logprobs is not None and len(r.old_logprobs) == len(r.token_ids) for r in responses
    ):
        batch.old_logp_BT = _logprobs([r.old_logprobs for r in responses], batch)
        batch.experts_BSLK = _experts(
            [(len(r.prompt_ids), r.old_experts) for r in responses], batch
        )
    return batch


def _lay_out_turns(batch: TrainBatch, responses: list[Response]) -> None:
    """Take the environments' tokens out of the batch's masks, and note the turns and their rewards."""
    batch.turns_BT = torch.zeros_like(batch.mask_BT, dtype=torch.int64)
    batch.turn_rewards_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
    for i, r in enumerate(responses):
        own = torch.from_numpy(r.own_tokens)
        batch.mask_BT[i, : len(own)] &= own
        end = number = 0
        for turn in r.turns:
            begin, end = end, end + turn.tokens
            if turn.author == "policy":
                batch.turns_BT[i, begin:end] = number
                batch.turn_rewards_BT[i, end - 1] = turn.reward
                number += 1
        if not r.turns and r.score:
            batch.turn_rewards_BT[i, len(own) - 1] = r.score.reward
    batch.sampled_BT = batch.mask_BT.clone()


def _logprobs(rows: list[np.ndarray], batch: TrainBatch) -> Tensor:
    """Pack one number for each response token, 0 at padding: [B, T], float32."""
    packed_BT = np.zeros(batch.mask_BT.shape, dtype=np.float32)
    packed_BT[batch.attention_BS[:, batch.prompt_width :].numpy()] = np.concatenate(rows)
    return torch.from_numpy(packed_BT)


def _experts(rows: list[tuple[int, np.ndarray | None]], batch: TrainBatch) -> Tensor | None:
    """Pack the experts of all rows into one tensor [B, S, L, K], int16. Returns None if a row has
    none.

    A row is (number of prompt tokens, experts of the positions from the first prompt token on).
    """
    if any(experts is None for _, experts in rows):
        return None
    packed_BSLK = np.full(
        (*batch.tokens_BS.shape, *rows[0][1].shape[1:]), NOT_RECORDED, dtype=np.int16
    )
    prompts_B = np.array([prompt for prompt, _ in rows])
    recorded_B = np.array([len(experts) for _, experts in rows])
    packed_BSLK[_columns(batch.prompt_width - prompts_B, recorded_B, packed_BSLK.shape[1])] = (
        np.concatenate([experts for _, experts in rows])
    )
    return torch.from_numpy(packed_BSLK)


def layout(rows: list[tuple[list[int], list[int]]], pad_id: int) -> TrainBatch:
    """Lay out rows of (prompt tokens, response tokens) as a batch. Advantages and log-probs are
    still 0.
    """
    prompts_B = np.array([len(prompt) for prompt, _ in rows])
    responses_B = np.array([len(response) for _, response in rows])
    prompt_width = int(prompts_B.max())
    width = int(responses_B.max())
    attention_BS = _columns(prompt_width - prompts_B, prompts_B + responses_B, prompt_width + width)
    tokens_BS = np.full(attention_BS.shape, pad_id, dtype=np.int64)
    tokens_BS[attention_BS] = np.fromiter(
        chain.from_iterable(chain.from_iterable(rows)), dtype=np.int64
    )
    zeros_BT = torch.zeros(len(rows), width)
    mask_BT = torch.from_numpy(attention_BS[:, prompt_width:].copy())
    numbers = {}
    group_B = torch.tensor([numbers.setdefault(tuple(prompt), len(numbers)) for prompt, _ in rows])
    return TrainBatch(
        torch.from_numpy(tokens_BS),
        torch.from_numpy(attention_BS),
        mask_BT,
        mask_BT.clone(),
        zeros_BT,
        zeros_BT.clone(),
        group_B,
    )


def _columns(starts_B: np.ndarray, lengths_B: np.ndarray, width: int) -> np.ndarray:
    """Mark `lengths_B` columns of each row from column `starts_B` on: bool [B, width]."""
    columns = np.arange(width)
    return (columns >= starts_B[:, None]) & (columns < (starts_B + lengths_B)[:, None])
