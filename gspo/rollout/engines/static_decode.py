"""Decoding on a GPU with tensors whose shapes and addresses are the same for every token.

A token is then the same list of kernels each time. It is captured once as a CUDA graph and
replayed, which is one launch in place of about fifty per layer. The cache has its
full length from the start. Counts on the device say how many columns of each row are filled. A
graph is valid for its number of rows. If attention needs a mask, it is valid for its window of
columns only. For other numbers a new graph is captured.

Shape suffixes: P prompts, R rows, S columns of the cache, N all tokens fed, W hidden width, H query
heads, J key/value heads, D head dimension, L MoE layers, K experts per token.
"""

import math
import sys

import torch
from torch import Tensor

from gspo.io.errors import first_line
from gspo.model.forward.network import Network
from gspo.model.forward.packing import attention
from gspo.rollout.engines.cached_attention import (
    FilledColumns,
    flash_attention,
    flash_attention_works,
    masked_attention,
)
from gspo.rollout.engines.decode import DecodeOutput, NetworkDecoder, attention_bias

WINDOW = 256  # attention reads the filled columns, rounded up to a multiple of it
_reported: set[str] = set()  # the reasons against CUDA graphs that this process has printed


class StaticDecoder(NetworkDecoder):
    """A decoder of at most `new_tokens` tokens after the prompts, in tensors of fixed shapes.

    With `records` a token is captured as a CUDA graph."""

    # Rows that have ended are dropped late. For another number of rows the graph is captured again,
    # which takes as long as about ten tokens. An ended row costs little beside the weights, which
    # are read once for all rows.
    max_unfinished_share = 0.5

    def __init__(self, network: Network, new_tokens: int, records: bool):
        super().__init__(network)
        self.extra_columns = new_tokens
        self.records = records
        self.graph: tuple[torch.cuda.CUDAGraph, DecodeOutput] | None = None
        # The rows and the window of the last token. The next token of this shape is captured.
        self.graph_shape = (0, 0)

    def prefill(self, prompts: list[list[int]], group_size: int) -> DecodeOutput:
        """Feed the prompts, give each of them `group_size` rows, and return the first output."""
        output = super().prefill(prompts, group_size)
        self.mask_RS = None  # counts take its place
        self.tokens_R = torch.zeros_like(self.lengths_R)
        self._set_rows()
        return output

    def _attend_prompts(self, layer: int, q_NHD: Tensor, k_NJD: Tensor, v_NJD: Tensor) -> Tensor:
        """Attend within the prompts, and write keys and values into the cache [R, S, J, D]."""
        q = q_NHD.unflatten(0, self.prompts_shape)
        k = k_NJD.unflatten(0, self.prompts_shape)
        v = v_NJD.unflatten(0, self.prompts_shape)
        if layer == 0:
            heads = q.shape[2]
            key_heads, head_dim = k.shape[2:]
            self.uses_counts = flash_attention_works(k.device, k.dtype, heads, key_heads, head_dim)
        for cache, x_PSJD in ((self.keys, k), (self.values, v)):
            prompts, width, heads, dim = x_PSJD.shape
            x_RSJD = x_PSJD.new_empty(prompts * self.group_size, self.capacity, heads, dim)
            x_RSJD[:, :width] = x_PSJD.repeat_interleave(self.group_size, 0)
            if not self.uses_counts:
                x_RSJD[:, width:] = 0  # even a masked column must not be NaN
            cache.append(x_RSJD)
        return attention(q, k, v)

    def _set_rows(self) -> None:
        """Compute the tensors that depend on the number of rows, after it has changed."""
        device = self.lengths_R.device
        self.filled_columns = FilledColumns.of(self.lengths_R, self.capacity)
        self.columns_S = torch.arange(self.capacity, device=device)
        self.begins_R = torch.arange(len(self.lengths_R), device=device) * self.capacity

    def step(self, tokens_R: Tensor) -> DecodeOutput:
        """Feed a token per row, and return the next output, which the next call overwrites."""
        self.filled += 1
        window = math.ceil(self.filled / WINDOW) * WINDOW
        self.window = self.capacity if self.uses_counts else min(self.capacity, window)
        self.tokens_R.copy_(tokens_R)
        shape = (len(tokens_R), self.window)
        if not self.records or shape != self.graph_shape:
            # The first token of a shape also allocates the workspaces of its kernels.
            self.graph = None
            self.graph_shape = shape
            return self._advance()
        if self.graph is None:
            self._capture()
        if self.graph is None:
            return self._advance()
        graph, output = self.graph
        graph.replay()
        return output

    def _capture(self) -> None:
        """Capture a token as a CUDA graph.

        If that fails, the reason is printed once, and tokens are computed kernel by kernel."""
        try:
            graph = torch.cuda.CUDAGraph()
            # the trainer may allocate memory in another thread meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                output = self._advance()
        except RuntimeError as error:
            self.records = False
            torch.cuda.synchronize()
            reason = first_line(error)
            if reason not in _reported:
                _reported.add(reason)
                print(
                    f"warning: decoding without CUDA graphs, which is slower: {reason}",
                    file=sys.stderr,
                )
            return
        self.graph = graph, output

    def _advance(self) -> DecodeOutput:
        """Compute a token per row from `tokens_R`, and change the tensors of the step in place."""
        self.slots_R = self.begins_R + self.lengths_R
        self.filled_columns.counts_R.add_(1)
        if not self.uses_counts:
            is_empty_RS = self.columns_S[: self.window] > self.lengths_R[:, None]
            self.mask_RS = attention_bias(is_empty_RS, self.keys[0].dtype)
        hidden_RW, experts_RLK = self.network(
            self.tokens_R, self.lengths_R, self.capacity, self._attend_cache
        )
        self.lengths_R.add_(1)
        experts = None if experts_RLK is None else experts_RLK.unsqueeze(1)
        return self.network.logits(hidden_RW), experts

    def _attend_cache(self, layer: int, q_RHD: Tensor, k_RJD: Tensor, v_RJD: Tensor) -> Tensor:
        """Write the new keys and values of each row, and attend over the filled columns."""
        keys = self.keys[layer]
        values = self.values[layer]
        keys.flatten(0, 1).index_copy_(0, self.slots_R, k_RJD)
        values.flatten(0, 1).index_copy_(0, self.slots_R, v_RJD)
        if self.mask_RS is None:  # with counts there is no mask
            return flash_attention(q_RHD, keys, values, self.filled_columns)
        return masked_attention(q_RHD, keys, values, self.mask_RS)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows and drop the others."""
        self.mask_RS = None
        super().keep(rows)
        self.tokens_R = self.tokens_R[rows]
        self._set_rows()
        self.graph = None
        self.graph_shape = (0, 0)
