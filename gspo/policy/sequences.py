"""The sequences of a batch laid out for the network: real tokens in a row, in buckets of similar length.

The network works on one flat list of tokens. Rows are sorted by length and cut into buckets of a few; within a bucket
they are padded to its longest, so that attention sees rectangles (views, no copies) and little is computed in vain:

    bucket 1   7 + 5 = ? 7 + 5 = 1 2 $          bucket 2   3 - 8 + 9 = ? 3 - 8 = - 5 ; - 5 + 9 = 4 ; # 4 $
               4 + 4 = ? 4 + 4 = 8 $ .                     6 + 1 - 2 = ? 6 + 1 = 7 ; 7 - 2 = 5 ; # 5 $ . .

Shape suffixes: B rows, S columns of the batch, T response columns, N tokens laid out, M response tokens, L MoE layers,
K experts per token, H query heads, J key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.batch import NOT_RECORDED, TrainBatch

BUCKET_ROWS = 16  # rows that attention takes together: fewer waste less on padding, more cost fewer calls


class Sequences:
    """Where the tokens of a batch stand in the network's list, and which of them predict response tokens."""

    def __init__(self, batch: TrainBatch):
        attention_BS, prompt_width = batch.attention_BS, batch.prompt_width
        self.shape = attention_BS.shape
        width, device = self.shape[1], attention_BS.device
        lengths_B = attention_BS.sum(1)
        prompts_B = attention_BS[:, :prompt_width].sum(1)
        starts_B = torch.empty_like(lengths_B)
        index, real, positions, self.buckets = [], [], [], []
        filled = 0
        for rows in lengths_B.argsort(stable=True).split(BUCKET_ROWS):
            longest = int(lengths_B[rows].max())
            columns = torch.arange(longest, device=device)
            at = (prompt_width - prompts_B[rows, None] + columns).clamp(max=width - 1)
            index.append((rows[:, None] * width + at).flatten())
            real.append((columns < lengths_B[rows, None]).flatten())
            positions.append(columns.repeat(len(rows)))
            starts_B[rows] = filled + longest * torch.arange(len(rows), device=device)
            self.buckets.append((filled, len(rows), longest))
            filled += len(rows) * longest
        self.longest = max(longest for _, _, longest in self.buckets)
        self.index_N, self.real_N, self.positions_N = torch.cat(index), torch.cat(real), torch.cat(positions)
        self.tokens_N = batch.tokens_BS.flatten().index_select(0, self.index_N)
        rows_M, self.columns_M = attention_BS[:, prompt_width:].nonzero(as_tuple=True)
        self.rows_M = rows_M
        self.predicting_M = starts_B[rows_M] + prompts_B[rows_M] + self.columns_M - 1
        self.taken_M = batch.tokens_BS[rows_M, prompt_width + self.columns_M]

    def attend(self, layer: int, q_NHD: Tensor, k_NJD: Tensor, v_NJD: Tensor) -> Tensor:
        """Causal attention of every sequence; what stands to the right of one is computed and never looked at."""
        mixed = []
        for start, rows, longest in self.buckets:
            shape = (rows, longest)
            q, k, v = (
                x[start : start + rows * longest].unflatten(0, shape).transpose(1, 2) for x in (q_NHD, k_NJD, v_NJD)
            )
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            mixed.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(mixed) if len(mixed) > 1 else mixed[0]

    def flat(self, x_BSLK: Tensor) -> Tensor:
        """Something of every position in the network's order, [N, ...]."""
        return x_BSLK.flatten(0, 1).index_select(0, self.index_N)

    def experts(self, own_NLK: Tensor) -> Tensor:
        """The routers' choice back in the batch's layout, int16, NOT_RECORDED at padding."""
        experts_BSLK = own_NLK.new_full((self.shape[0] * self.shape[1], *own_NLK.shape[1:]), NOT_RECORDED)
        experts_BSLK[self.index_N[self.real_N]] = own_NLK[self.real_N]
        return experts_BSLK.unflatten(0, self.shape).to(torch.int16)

    def responses(self, x_M: Tensor, width: int) -> Tensor:
        """A number of every response token in the batch's layout, 0 at padding. [B, T]"""
        return x_M.new_zeros(self.shape[0], width).index_put((self.rows_M, self.columns_M), x_M)
