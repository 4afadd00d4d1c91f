"""Decoding on a GPU with tensors whose shapes and places do not change from token to token.

A token is then the same list of kernels each time. It is recorded once as a CUDA graph and
replayed, which hands the GPU one order in place of some fifty for each layer. The cache has its
full length from the start, and counts on the device say how many columns of each row are filled.
What is recorded holds for a number of rows. Where attention needs a mask it also holds for a window
of columns. With others it is recorded anew.

Shape suffixes: R live rows, S columns of the cache, H query heads, J key/value heads, D head
dimension.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from gspo.model.forward.packing import attention
from gspo.model.policy import Policy
from gspo.rollout.engines.cached_attention import (
    by_counts,
    by_mask,
    counts_are_used,
    filled_columns,
)
from gspo.rollout.engines.decode import DecodeOutput, NetworkDecoder, masked

WINDOW = 256  # columns: attention reads the least multiple of it that holds all filled ones
_reported: set[str] = set()  # why tokens could not be recorded, as far as this process has said it


class StaticDecoder(NetworkDecoder):
    """Decodes at most `new_tokens` tokens after the prompts. With `records` a token is recorded as
    a CUDA graph.
    """

    # Rows that have ended are dropped once so few are left: another number of rows must be recorded
    # again, which takes as long as some ten tokens, and an ended row costs little beside the
    # weights that are read for all rows.
    live_share = 0.5

    def __init__(self, policy: Policy, new_tokens: int, records: bool):
        super().__init__(policy)
        self.spare = new_tokens
        self.records = records
        self.recorded: tuple[torch.cuda.CUDAGraph, DecodeOutput] | None = None
        # rows and window; a token of this shape was computed at least once
        self.recorded_for = (0, 0)

    def prefill(self, prompts: list[list[int]], group_size: int) -> DecodeOutput:
        """Feed the prompts, give each of them `group_size` rows, and return the first step's logits
        and experts.
        """
        step = super().prefill(prompts, group_size)
        self.mask_RS = None  # counts take its place
        self.tokens_R = torch.zeros_like(self.lengths_R)
        self._count()
        return step

    def _attend_prompts(self, layer: int, q_NHD: Tensor, k_NJD: Tensor, v_NJD: Tensor) -> Tensor:
        """Attend within the prompts, and write their keys and values into the cache [R, S, J, D]."""
        q, k, v = (x.unflatten(0, self.shape) for x in (q_NHD, k_NJD, v_NJD))
        if layer == 0:
            sizes = q.shape[2], k.shape[2], k.shape[3]
            self.uses_counts = counts_are_used(k.device, k.dtype, *sizes)
        for states, new in ((self.keys, k), (self.values, v)):
            prompts, _, heads, dim = new.shape
            state = new.new_empty(prompts * self.group_size, self.room, heads, dim)
            state[:, : self.prompt] = new.repeat_interleave(self.group_size, 0)
            if not self.uses_counts:
                state[:, self.prompt :] = 0  # what is masked must still be a number
            states.append(state)
        return attention(q, k, v)

    def _count(self) -> None:
        """Set what depends on the number of rows, after it has changed."""
        self.filled_columns = filled_columns(self.lengths_R, self.room)
        self.columns_S = torch.arange(self.room, device=self.lengths_R.device)
        self.begins_R = torch.arange(len(self.lengths_R), device=self.lengths_R.device) * self.room

    def step(self, tokens_R: Tensor) -> DecodeOutput:
        """Feed one token per row, and return the next step's logits and experts, which the next
        call overwrites.
        """
        self.filled += 1
        window = math.ceil(self.filled / WINDOW) * WINDOW
        self.window = self.room if self.uses_counts else min(self.room, window)
        self.tokens_R.copy_(tokens_R)
        shape = len(tokens_R), self.window
        if not self.records or shape != self.recorded_for:
            # The first token of a shape also prepares what its kernels need beside their operands.
            self.recorded, self.recorded_for = None, shape
            return self._advance()
        if self.recorded is None:
            self._record()
        if self.recorded is None:
            return self._advance()
        graph, step = self.recorded
        graph.replay()
        return step

    def _record(self) -> None:
        """Record one token. What cannot be recorded is said once, and computed kernel by kernel
        from then on.
        """
        try:
            graph = torch.cuda.CUDAGraph()
            # Another thread, in which the trainer works, may allocate memory meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step = self._advance()
        except RuntimeError as error:
            self.records = False
            torch.cuda.synchronize()
            reason = str(error).splitlines()[0]
            if reason not in _reported:
                _reported.add(reason)
                print(
                    f"warning: decoding without CUDA graphs, which is slower: {reason}",
                    file=sys.stderr,
                )
            return
        self.recorded = graph, step

    def _advance(self) -> DecodeOutput:
        """Compute one token from `tokens_R`, and move on by a column. Everything that changes is
        changed in place.
        """
        self.places_R = self.begins_R + self.lengths_R
        self.filled_columns.counts_R.add_(1)
        if not self.uses_counts:
            empty_RS = self.columns_S[: self.window] > self.lengths_R[:, None]
            self.mask_RS = masked(empty_RS, self.keys[0].dtype)
        hidden_RW, own_RLK = self.network(
            self.tokens_R, self.lengths_R, self.room, self._attend_cache
        )
        self.lengths_R.add_(1)
        return self.network.logits(hidden_RW), None if own_RLK is None else own_RLK.unsqueeze(1)

    def _attend_cache(self, layer: int, q_RHD: Tensor, k_RJD: Tensor, v_RJD: Tensor) -> Tensor:
        """Write one token's keys and values per row into the cache, and attend over the filled
        columns.
        """
        keys, values = self.keys[layer], self.values[layer]
        keys.flatten(0, 1).index_copy_(0, self.places_R, k_RJD)
        values.flatten(0, 1).index_copy_(0, self.places_R, v_RJD)
        if self.uses_counts:
            return by_counts(q_RHD, keys, values, self.filled_columns)
        return by_mask(q_RHD, keys, values, self.mask_RS)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows and drop the others."""
        self.mask_RS = None
        super().keep(rows)
        self.tokens_R = self.tokens_R[rows]
        self._count()
        self.recorded, self.recorded_for = None, (0, 0)
