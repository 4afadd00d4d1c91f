"""Decoding on a GPU with tensors whose shapes and places do not change from token to token.

A token is then the same list of kernels each time. It is recorded once as a CUDA graph and replayed, which hands the
GPU one order in place of some fifty for each layer. The cache has its full length from the start, and a mask says which
columns are filled. What is recorded holds for a number of rows and a window of columns, with others it is recorded
anew.

Shape suffixes: R live rows, S cached positions, H query heads, J key/value heads, D head dimension.
"""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.core.batch import to_device
from gspo.model.policy import Policy
from gspo.rollout.decode import Decoder, Step, masked

WINDOW = 256  # columns: attention reads the least multiple of it that holds all filled ones
_reported: set[str] = set()  # why tokens could not be recorded, as far as this process has said it


class StaticDecoder(Decoder):
    """Decodes at most `new_tokens` tokens after the prompts. With `records` a token is recorded as a CUDA graph."""

    # Rows that have ended are dropped once so few are left: another number of rows must be recorded again.
    live_share = 0.75

    def __init__(self, policy: Policy, new_tokens: int, records: bool):
        super().__init__(policy)
        self.spare = new_tokens
        self.records = records
        self.recorded: tuple[torch.cuda.CUDAGraph, Step] | None = None
        self.recorded_for = (0, 0)  # rows and window; a token of this shape was computed at least once

    def prefill(self, prompts: list[list[int]], group_size: int) -> Step:
        """Feed the prompts, give each of them `group_size` rows, and return the first step's logits and experts."""
        step = super().prefill(prompts, group_size)
        for states in (self.keys, self.values):
            for state in states:
                state[:, :, self.filled :] = 0  # what is masked must still be a number
        dtype, device = self.keys[0].dtype, self.lengths_R.device
        mask_RS = masked(torch.ones(len(self.lengths_R), self.room, dtype=torch.bool, device=device), dtype)
        mask_RS[:, : self.filled] = 0.0 if self.mask_RS is None else self.mask_RS
        self.mask_RS = mask_RS
        self.column = to_device(torch.tensor([self.filled]), device)
        self.tokens_R = torch.zeros_like(self.lengths_R)
        return step

    def step(self, tokens_R: Tensor) -> Step:
        """Feed one token per row, and return the next step's logits and experts, which the next call overwrites."""
        self.filled += 1
        self.window = min(self.room, math.ceil(self.filled / WINDOW) * WINDOW)
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
        """Record one token. What cannot be recorded is said once, and computed kernel by kernel from then on."""
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
                print(f"warning: decoding without CUDA graphs, which is slower: {reason}", file=sys.stderr)
            return
        self.recorded = graph, step

    def _advance(self) -> Step:
        """Compute one token from `tokens_R`, and move on by a column. Everything that changes is changed in place."""
        self.mask_RS.index_fill_(1, self.column, 0.0)
        hidden_RW, own_RLK = self.network(self.tokens_R, self.lengths_R, self.room, self._attend_cache)
        self.lengths_R.add_(1)
        self.column.add_(1)
        return self.network.logits(hidden_RW), None if own_RLK is None else own_RLK.unsqueeze(1)

    def _attend_cache(self, layer: int, q_RHD: Tensor, k_RJD: Tensor, v_RJD: Tensor) -> Tensor:
        """Write one token's keys and values per row into the cache, and attend over the filled columns."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, self.column, k_RJD.unsqueeze(2))
        values.index_copy_(2, self.column, v_RJD.unsqueeze(2))
        window = slice(0, self.window)
        mask = self.mask_RS[:, None, None, window]
        # The query heads of one key head take the place of several query positions: they read its keys without copies.
        q = q_RHD.unflatten(1, (k_RJD.shape[1], -1))
        return F.scaled_dot_product_attention(q, keys[:, :, window], values[:, :, window], attn_mask=mask).flatten(1, 2)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows and drop the others."""
        super().keep(rows)
        self.tokens_R = self.tokens_R[rows]
        self.recorded, self.recorded_for = None, (0, 0)
