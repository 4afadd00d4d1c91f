"""Decoding in the trainer's process: one pass over the prompts, then one token at a time for all
live rows.

`NetworkDecoder` runs a model that gspo.model.forward.network supports over a static key/value cache: each prompt
is prefilled once for its group, keys and values are written in place, query heads that share a key
head read it without copies, and rows that have ended are dropped. Every other architecture is
decoded by gspo.rollout.engines.transformers_decode.

Shape suffixes: P prompts, G rows per prompt, R live rows (P * G at first), S cached positions, V
vocabulary, H query heads, J key/value heads, D head dimension, L MoE layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.data.batch import to_device
from gspo.model.forward.packing import attention
from gspo.model.policy import Policy

MASK_ENTRIES = 2**24  # of the mask of one pass over further tokens
# columns that the cache grows by; larger steps would set its rows apart in memory, which is slow to
# read
GROWTH = 8
# logits of the next token [R, V]; experts [R, positions fed, L, K] or None
DecodeOutput = tuple[Tensor, Tensor | None]


class NetworkDecoder:
    """Decodes with our own forward over the transformers weights. Its log-probs equal those of the
    model's own forward up to rounding."""

    live_share = 0.9  # finished rows are dropped once at most this share of the rows is unfinished

    def __init__(self, policy: Policy):
        self.network = policy.network
        self.spare = GROWTH  # columns that the cache has beyond the prompts
        self.keys: list[Tensor] = []  # per layer [R, J, S, D]
        self.values: list[Tensor] = []

    def prefill(self, prompts: list[list[int]], group_size: int) -> DecodeOutput:
        """Feed the prompts, give each of them `group_size` rows, and return the first step's logits
        and experts.
        """
        device, lengths = self.network.head.device, [len(p) for p in prompts]
        self.lengths_R = to_device(torch.tensor(lengths), device)
        self.prompt, self.group_size = max(lengths), group_size
        self.filled, self.room = self.prompt, self.prompt + self.spare
        tokens_PS = to_device(
            torch.tensor([p + [0] * (self.prompt - len(p)) for p in prompts]), device
        )
        positions_PS = torch.arange(self.prompt, device=device).expand_as(tokens_PS)
        self.shape = tokens_PS.shape
        hidden_NW, own_NLK = self.network(
            tokens_PS.flatten(), positions_PS.flatten(), self.prompt, self._attend_prompts
        )
        last_P = torch.arange(len(prompts), device=device) * self.prompt + self.lengths_R - 1
        logits_RV = self.network.logits(hidden_NW[last_P]).repeat_interleave(group_size, 0)
        self.mask_RS = None
        # after a shorter prompt the cache has columns without a token
        if min(lengths) < self.prompt:
            empty_PS = torch.arange(self.prompt, device=device) >= self.lengths_R[:, None]
            self.mask_RS = masked(empty_PS, self.keys[0].dtype).repeat_interleave(group_size, 0)
        self.lengths_R = self.lengths_R.repeat_interleave(group_size)
        experts = (
            None
            if own_NLK is None
            else own_NLK.unflatten(0, self.shape).repeat_interleave(group_size, 0)
        )
        return logits_RV, experts

    def step(self, tokens_R: Tensor) -> DecodeOutput:
        """Feed one token per row, and return the next step's logits and experts."""
        if self.filled == self.room:
            self._grow(0)
        self.filled += 1
        if self.mask_RS is not None:
            self.mask_RS = F.pad(self.mask_RS, (0, 1))
        hidden_RW, own_RLK = self.network(tokens_R, self.lengths_R, self.filled, self._attend_cache)
        self.lengths_R = self.lengths_R + 1
        return self.network.logits(hidden_RW), None if own_RLK is None else own_RLK.unsqueeze(1)

    def feed(self, tokens: list[list[int]]) -> DecodeOutput:
        """Feed further tokens to each row, and return the next step's logits and experts."""
        device, lengths = self.lengths_R.device, [len(row) for row in tokens]
        width = max(lengths)
        if self.filled + width > self.room:
            self._grow(self.filled + width - self.room)
        new_R, columns_W = torch.tensor(lengths, device=device), torch.arange(width, device=device)
        fed_RW = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=device)
        empty_RW = masked(columns_W >= new_R[:, None], self.keys[0].dtype)
        before_RS = (
            empty_RW.new_zeros(len(tokens), self.filled) if self.mask_RS is None else self.mask_RS
        )
        self.filled += width
        logits, experts = [], []
        # A few rows at a time: attention of `width` tokens to all that are cached needs a mask of
        # that size for each.
        for rows in torch.arange(len(tokens), device=device).split(
            max(1, MASK_ENTRIES // (width * self.filled))
        ):
            self.feeding = rows, before_RS[rows]
            positions = (self.lengths_R[rows, None] + columns_W).flatten()
            hidden_NW, own_NLK = self.network(
                fed_RW[rows].flatten(), positions, self.filled, self._attend_further
            )
            last_R = torch.arange(len(rows), device=device) * width + new_R[rows] - 1
            logits.append(self.network.logits(hidden_NW[last_R]))
            experts.append(None if own_NLK is None else own_NLK.unflatten(0, (len(rows), width)))
        if self.mask_RS is not None or min(lengths) < width:
            self.mask_RS = torch.cat([before_RS, empty_RW], 1)
        self.lengths_R = self.lengths_R + new_R
        return torch.cat(logits), None if experts[0] is None else torch.cat(experts)

    def take(self, rows: Tensor, lengths: list[int]) -> CachedRows:
        """Return copies of the first so many tokens of some rows, side by side from the first
        column on. Rows that have ended are fed tokens all the same until they are dropped, so they
        may have more tokens than were sampled."""
        filled = slice(0, self.filled)
        columns_RS = torch.arange(max(lengths), device=rows.device).expand(len(rows), -1)
        if self.mask_RS is not None:  # its columns with tokens come first, in their order
            columns_RS = (
                (self.mask_RS[rows] < 0)
                .to(torch.uint8)
                .argsort(dim=-1, stable=True)[:, : max(lengths)]
            )
        at = columns_RS[:, None, :, None]
        keys, values = (
            [state[rows, :, filled].take_along_dim(at, 2) for state in states]
            for states in (self.keys, self.values)
        )
        return CachedRows(keys, values, lengths)

    def put(self, pieces: list[CachedRows], order: list[int]) -> None:
        """Replace the cache by some of the rows that were taken: `order` are their numbers in all
        pieces together.
        """
        lengths = [length for piece in pieces for length in piece.lengths]
        numbers = torch.tensor(order, device=self.lengths_R.device)
        self.lengths_R = torch.tensor([lengths[i] for i in order], device=numbers.device)
        self.filled = max(lengths[i] for i in order)
        self.room = self.filled + GROWTH
        for layer in range(len(self.keys)):
            self.keys[layer] = self._joined([piece.keys[layer] for piece in pieces], numbers)
            self.values[layer] = self._joined([piece.values[layer] for piece in pieces], numbers)
        empty_RS = torch.arange(self.filled, device=numbers.device) >= self.lengths_R[:, None]
        self.mask_RS = (
            masked(empty_RS, self.keys[0].dtype)
            if min(lengths[i] for i in order) < self.filled
            else None
        )

    def _joined(self, pieces: list[Tensor], numbers: Tensor) -> Tensor:
        """Return those rows, by their numbers in all pieces together, in a tensor of `self.room`
        columns.
        """
        _, heads, _, dim = pieces[0].shape
        joined, begin = pieces[0].new_empty(len(numbers), heads, self.room, dim), 0
        for piece in pieces:
            mine = ((numbers >= begin) & (numbers < begin + len(piece))).nonzero().squeeze(-1)
            width = min(piece.shape[2], self.filled)
            joined[mine, :, :width] = piece[numbers[mine] - begin, :, :width]
            # even where it is masked, it must not be NaN by chance
            joined[mine, :, width : self.filled] = 0
            begin += len(piece)
        return joined

    def keep(self, rows: Tensor) -> None:
        """Keep these rows and drop the others."""
        for states in (self.keys, self.values):
            for layer in range(len(states)):  # one at a time: two whole caches might not fit
                states[layer] = states[layer].index_select(0, rows)
        self.lengths_R = self.lengths_R[rows]
        self.mask_RS = None if self.mask_RS is None else self.mask_RS[rows]

    def _grow(self, least: int) -> None:
        """Give the cache more columns, and keep its rows as close together in memory as before."""
        self.room += max(GROWTH, self.filled // 8, least)
        for states in (self.keys, self.values):
            for layer in range(len(states)):
                states[layer] = self._wider(states[layer])

    def _wider(self, x_RJSD: Tensor) -> Tensor:
        """Copy one layer's keys or values into a tensor of `self.room` columns."""
        rows, heads, filled, dim = x_RJSD.shape
        wider = x_RJSD.new_empty(rows, heads, self.room, dim)  # F.pad would write everything twice
        wider[:, :, :filled] = x_RJSD
        return wider

    def _attend_prompts(self, layer: int, q_NHD: Tensor, k_NJD: Tensor, v_NJD: Tensor) -> Tensor:
        """Attend within the prompts, and write their keys and values into the cache."""
        q, k, v = (x.unflatten(0, self.shape) for x in (q_NHD, k_NJD, v_NJD))
        for states, new in ((self.keys, k.transpose(1, 2)), (self.values, v.transpose(1, 2))):
            prompts, heads, _, dim = new.shape
            states.append(new.new_empty(prompts * self.group_size, heads, self.room, dim))
            states[layer][:, :, : self.prompt] = new.repeat_interleave(self.group_size, 0)
        return attention(q, k, v)

    def _attend_further(self, layer: int, q_NHD: Tensor, k_NJD: Tensor, v_NJD: Tensor) -> Tensor:
        """Write the keys and values of several tokens per row into the cache, and attend over it up
        to each token.
        """
        rows, before_RS = self.feeding
        q, k, v = (x.unflatten(0, (len(rows), -1)) for x in (q_NHD, k_NJD, v_NJD))
        width = q.shape[1]
        begin = self.filled - width
        self.keys[layer][rows, :, begin : self.filled] = k.transpose(1, 2)
        self.values[layer][rows, :, begin : self.filled] = v.transpose(1, 2)
        keys, values = (
            states[layer][rows, :, : self.filled].transpose(1, 2)
            for states in (self.keys, self.values)
        )
        causal = masked(
            torch.ones(width, width, dtype=torch.bool, device=q.device).triu(1), before_RS.dtype
        )
        mask = torch.cat(
            [before_RS[:, None].expand(-1, width, -1), causal.expand(len(rows), -1, -1)], 2
        )
        return attention(q, keys, values, mask[:, None])

    def _attend_cache(self, layer: int, q_RHD: Tensor, k_RJD: Tensor, v_RJD: Tensor) -> Tensor:
        """Write one token's keys and values per row into the cache, and attend over it."""
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self.filled - 1], values[:, :, self.filled - 1] = k_RJD, v_RJD
        mask = None if self.mask_RS is None else self.mask_RS[:, None, None]
        # The query heads of one key head take the place of several query positions: they read its
        # keys without copies.
        q = q_RHD.unflatten(1, (k_RJD.shape[1], -1))
        filled = slice(0, self.filled)
        return F.scaled_dot_product_attention(
            q, keys[:, :, filled], values[:, :, filled], attn_mask=mask
        ).flatten(1, 2)


@dataclass
class CachedRows:
    """The keys and values of some rows, per layer [R, J, S, D], and how many tokens each has."""

    keys: list[Tensor]
    values: list[Tensor]
    lengths: list[int]


def masked(empty: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to the attention's scores: -inf where a column is empty, else 0."""
    return torch.zeros(empty.shape, dtype=dtype, device=empty.device).masked_fill_(
        empty, -torch.inf
    )
