"""Decoding in the trainer's process: a prefill of the prompts, then token by token.

`NetworkDecoder` runs a model that gspo.model.forward.network supports, over a KV cache. Each prompt
is prefilled once for its group. Keys and values are written in place. Query heads that share a key
head read it without copies. Rows that have ended are dropped. Every other architecture is decoded
by gspo.rollout.engines.transformers_decode.

Shape suffixes: P prompts, R rows (responses that are being sampled, at first P * group_size), S
columns of the cache, T tokens fed per row, N all tokens fed, W hidden width, V vocabulary, H query
heads, J key/value heads, D head dimension, L MoE layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.data.batch import to_device
from gspo.model.forward.network import Network
from gspo.model.forward.packing import attention

MAX_MASK_ENTRIES = 2**24  # of the attention mask of one pass in `feed`
# The cache grows by so many columns. With larger steps its rows would lie apart in memory, which is
# slow to read.
GROWTH_COLUMNS = 8
# logits of the next token [R, V]; experts [R, T, L, K] or None
DecodeOutput = tuple[Tensor, Tensor | None]


class Decoder(Protocol):
    """A decoder of many rows: it reads tokens, and returns the logits of each row's next token."""

    # ended rows are dropped when at most this share of the rows is unfinished
    max_unfinished_share: float

    def prefill(self, prompts: list[list[int]], group_size: int) -> DecodeOutput:
        """Feed the prompts, give each of them `group_size` rows, and return the first output."""
        ...

    def step(self, tokens_R: Tensor) -> DecodeOutput:
        """Feed a token per row, and return the next output."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Keep these rows and drop the others."""
        ...


class NetworkDecoder:
    """A decoder that uses our own forward over the transformers weights.

    Its log-probs equal the log-probs of the model's own forward, up to rounding."""

    max_unfinished_share = 0.9

    def __init__(self, network: Network):
        self.network = network
        self.extra_columns = GROWTH_COLUMNS  # of the cache, after the prompts
        self.keys: list[Tensor] = []  # per layer [R, J, S, D]
        self.values: list[Tensor] = []
        # -inf for a column without a token, else 0; None if every column holds one
        self.mask_RS: Tensor | None = None

    def prefill(self, prompts: list[list[int]], group_size: int) -> DecodeOutput:
        """Feed the prompts, give each of them `group_size` rows, and return the first output."""
        device = self.network.head.device
        lengths = [len(prompt) for prompt in prompts]
        width = max(lengths)
        self.group_size = group_size
        self.prompt_width = width
        self.filled = width  # columns that hold tokens
        self.capacity = width + self.extra_columns
        padded = [prompt + [0] * (width - len(prompt)) for prompt in prompts]
        tokens_PS = to_device(torch.tensor(padded), device)
        lengths_P = to_device(torch.tensor(lengths), device)
        columns_S = torch.arange(width, device=device)
        positions_PS = columns_S.expand_as(tokens_PS)
        self.prompts_shape = tokens_PS.shape
        hidden_NW, experts_NLK = self.network(
            tokens_PS.flatten(), positions_PS.flatten(), width, self._attend_prompts
        )
        first_P = torch.arange(len(prompts), device=device) * width
        last_P = first_P + lengths_P - 1
        logits_PV = self.network.logits(hidden_NW[last_P])
        self.mask_RS = None
        # after a shorter prompt the cache has columns without a token
        if min(lengths) < width:
            is_empty_PS = columns_S >= lengths_P[:, None]
            mask_PS = attention_bias(is_empty_PS, self.keys[0].dtype)
            self.mask_RS = mask_PS.repeat_interleave(group_size, 0)
        self.lengths_R = lengths_P.repeat_interleave(group_size)
        experts = None
        if experts_NLK is not None:
            experts = experts_NLK.unflatten(0, tokens_PS.shape).repeat_interleave(group_size, 0)
        return logits_PV.repeat_interleave(group_size, 0), experts

    def step(self, tokens_R: Tensor) -> DecodeOutput:
        """Feed a token per row, and return the next output."""
        if self.filled == self.capacity:
            self._grow(0)
        self.filled += 1
        if self.mask_RS is not None:
            self.mask_RS = F.pad(self.mask_RS, (0, 1))
        hidden_RW, experts_RLK = self.network(
            tokens_R, self.lengths_R, self.filled, self._attend_cache
        )
        self.lengths_R = self.lengths_R + 1
        experts = None if experts_RLK is None else experts_RLK.unsqueeze(1)
        return self.network.logits(hidden_RW), experts

    def feed(self, tokens: list[list[int]]) -> DecodeOutput:
        """Feed further tokens to each row, and return the next output."""
        device = self.lengths_R.device
        lengths = [len(row) for row in tokens]
        width = max(lengths)
        if self.filled + width > self.capacity:
            self._grow(self.filled + width - self.capacity)
        padded = [row + [0] * (width - len(row)) for row in tokens]
        tokens_RT = torch.tensor(padded, device=device)
        lengths_R = torch.tensor(lengths, device=device)
        columns_T = torch.arange(width, device=device)
        is_empty_RT = columns_T >= lengths_R[:, None]
        mask_RT = attention_bias(is_empty_RT, self.keys[0].dtype)
        cached_mask_RS = self.mask_RS
        if cached_mask_RS is None:
            cached_mask_RS = mask_RT.new_zeros(len(tokens), self.filled)
        self.filled += width
        # A few rows at a time, because the attention mask of a row has width * filled entries.
        rows_per_pass = max(1, MAX_MASK_ENTRIES // (width * self.filled))
        logits = []
        experts = []
        all_rows = torch.arange(len(tokens), device=device)
        for rows in all_rows.split(rows_per_pass):
            self.fed_rows = rows
            self.fed_mask_RS = cached_mask_RS[rows]
            tokens_N = tokens_RT[rows].flatten()
            positions_RT = self.lengths_R[rows, None] + columns_T
            hidden_NW, experts_NLK = self.network(
                tokens_N, positions_RT.flatten(), self.filled, self._attend_fed
            )
            first_R = torch.arange(len(rows), device=device) * width
            last_R = first_R + lengths_R[rows] - 1
            logits.append(self.network.logits(hidden_NW[last_R]))
            if experts_NLK is not None:
                experts.append(experts_NLK.unflatten(0, (len(rows), width)))
        if self.mask_RS is not None or min(lengths) < width:
            self.mask_RS = torch.cat([cached_mask_RS, mask_RT], 1)
        self.lengths_R = self.lengths_R + lengths_R
        return torch.cat(logits), torch.cat(experts) if experts else None

    def extract(self, rows: Tensor, lengths: list[int]) -> CachedRows:
        """Return copies of the first `lengths` tokens of some rows, without empty columns.

        Rows that have ended are still fed tokens until they are dropped. So they may have more
        tokens in the cache than were sampled."""
        max_length = max(lengths)
        if self.mask_RS is None:
            columns_RS = torch.arange(max_length, device=rows.device).expand(len(rows), -1)
        else:
            # the columns that hold tokens come first, in their order
            is_empty_RS = (self.mask_RS[rows] < 0).to(torch.uint8)
            columns_RS = is_empty_RS.argsort(dim=-1, stable=True)[:, :max_length]
        columns = columns_RS[:, None, :, None]
        filled = slice(0, self.filled)
        keys = [layer[rows, :, filled].take_along_dim(columns, 2) for layer in self.keys]
        values = [layer[rows, :, filled].take_along_dim(columns, 2) for layer in self.values]
        return CachedRows(keys, values, lengths)

    def restore(self, saved: list[CachedRows], indices: list[int]) -> None:
        """Replace the cache by saved rows.

        `indices` are the indices of the rows in the concatenation of all entries of `saved`."""
        saved_lengths = [length for cached in saved for length in cached.lengths]
        lengths = [saved_lengths[i] for i in indices]
        device = self.lengths_R.device
        indices_R = torch.tensor(indices, device=device)
        self.lengths_R = torch.tensor(lengths, device=device)
        self.filled = max(lengths)
        self.capacity = self.filled + GROWTH_COLUMNS
        for layer in range(len(self.keys)):
            keys = [cached.keys[layer] for cached in saved]
            values = [cached.values[layer] for cached in saved]
            self.keys[layer] = self._merge(keys, indices_R)
            self.values[layer] = self._merge(values, indices_R)
        self.mask_RS = None
        if min(lengths) < self.filled:
            columns_S = torch.arange(self.filled, device=device)
            is_empty_RS = columns_S >= self.lengths_R[:, None]
            self.mask_RS = attention_bias(is_empty_RS, self.keys[0].dtype)

    def _merge(self, saved: list[Tensor], indices_R: Tensor) -> Tensor:
        """Return a layer's saved keys or values in a tensor of `self.capacity` columns."""
        _, heads, _, dim = saved[0].shape
        merged = saved[0].new_empty(len(indices_R), heads, self.capacity, dim)
        first = 0
        for cached in saved:
            is_here_R = (indices_R >= first) & (indices_R < first + len(cached))
            rows = is_here_R.nonzero().squeeze(-1)
            cached_rows = indices_R[rows] - first
            width = min(cached.shape[2], self.filled)
            merged[rows, :, :width] = cached[cached_rows, :, :width]
            # even a masked column must not be NaN by chance
            merged[rows, :, width : self.filled] = 0
            first += len(cached)
        return merged

    def keep(self, rows: Tensor) -> None:
        """Keep these rows and drop the others."""
        for cache in (self.keys, self.values):
            for layer in range(len(cache)):  # one at a time: two whole caches might not fit
                cache[layer] = cache[layer].index_select(0, rows)
        self.lengths_R = self.lengths_R[rows]
        if self.mask_RS is not None:
            self.mask_RS = self.mask_RS[rows]

    def _grow(self, min_columns: int) -> None:
        """Give the cache more columns, and keep its rows as close in memory as before."""
        self.capacity += max(GROWTH_COLUMNS, self.filled // 8, min_columns)
        for cache in (self.keys, self.values):
            for layer in range(len(cache)):
                cache[layer] = self._widened(cache[layer])

    def _widened(self, x_RJSD: Tensor) -> Tensor:
        """Copy a layer's keys or values into a tensor of `self.capacity` columns."""
        rows, heads, filled, dim = x_RJSD.shape
        # F.pad would write everything twice
        widened = x_RJSD.new_empty(rows, heads, self.capacity, dim)
        widened[:, :, :filled] = x_RJSD
        return widened

    def _attend_prompts(self, layer: int, q_NHD: Tensor, k_NJD: Tensor, v_NJD: Tensor) -> Tensor:
        """Attend within the prompts, and write their keys and values into the cache."""
        q = q_NHD.unflatten(0, self.prompts_shape)
        k = k_NJD.unflatten(0, self.prompts_shape)
        v = v_NJD.unflatten(0, self.prompts_shape)
        for cache, x_PSJD in ((self.keys, k), (self.values, v)):
            x_PJSD = x_PSJD.transpose(1, 2)
            prompts, heads, width, dim = x_PJSD.shape
            rows = prompts * self.group_size
            x_RJSD = x_PJSD.new_empty(rows, heads, self.capacity, dim)
            x_RJSD[:, :, :width] = x_PJSD.repeat_interleave(self.group_size, 0)
            cache.append(x_RJSD)
        return attention(q, k, v)

    def _attend_fed(self, layer: int, q_NHD: Tensor, k_NJD: Tensor, v_NJD: Tensor) -> Tensor:
        """Write the keys and values of `feed` into the cache, and attend up to each token."""
        rows = self.fed_rows
        width = len(q_NHD) // len(rows)
        fed_shape = (len(rows), width)
        q = q_NHD.unflatten(0, fed_shape)
        k = k_NJD.unflatten(0, fed_shape)
        v = v_NJD.unflatten(0, fed_shape)
        filled = slice(0, self.filled)
        new = slice(self.filled - width, self.filled)
        self.keys[layer][rows, :, new] = k.transpose(1, 2)
        self.values[layer][rows, :, new] = v.transpose(1, 2)
        keys = self.keys[layer][rows, :, filled].transpose(1, 2)
        values = self.values[layer][rows, :, filled].transpose(1, 2)
        columns_T = torch.arange(width, device=q.device)
        is_later_TT = columns_T > columns_T[:, None]
        causal_TT = attention_bias(is_later_TT, self.fed_mask_RS.dtype)
        causal_RTT = causal_TT.expand(len(rows), -1, -1)
        cached_RTS = self.fed_mask_RS[:, None].expand(-1, width, -1)
        mask_RTS = torch.cat([cached_RTS, causal_RTT], 2)
        return attention(q, keys, values, mask_RTS[:, None])

    def _attend_cache(self, layer: int, q_RHD: Tensor, k_RJD: Tensor, v_RJD: Tensor) -> Tensor:
        """Write the new keys and values of each row into the cache, and attend over it."""
        self.keys[layer][:, :, self.filled - 1] = k_RJD
        self.values[layer][:, :, self.filled - 1] = v_RJD
        keys = self.keys[layer][:, :, : self.filled]
        values = self.values[layer][:, :, : self.filled]
        mask = None if self.mask_RS is None else self.mask_RS[:, None, None]
        # The query heads that share a key head are passed as query positions, so they read its keys
        # without copies.
        key_heads = k_RJD.shape[1]
        q = q_RHD.unflatten(1, (key_heads, -1))
        output = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return output.flatten(1, 2)


@dataclass
class CachedRows:
    """The keys and values of some rows, per layer [R, J, S, D], and their numbers of tokens."""

    keys: list[Tensor]
    values: list[Tensor]
    lengths: list[int]


def attention_bias(is_empty: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the term of the attention scores: -inf for an empty column, else 0."""
    bias = torch.zeros(is_empty.shape, dtype=dtype, device=is_empty.device)
    return bias.masked_fill_(is_empty, -torch.inf)
