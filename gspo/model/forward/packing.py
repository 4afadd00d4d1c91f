"""Lays out the sequences of a batch as one flat list of tokens, so that the network computes little
in vain.

Rows are sorted by length and cut into small buckets, each padded to its longest row, so that
attention sees rectangles with little padding:

    bucket 1   7 + 5 = ? 7 + 5 = 1 2 $          bucket 2   3 - 8 + 9 = ? 3 - 8 = - 5 ; - 5 + 9 = 4 ;
               # 4 $
               4 + 4 = ? 4 + 4 = 8 $ .                     6 + 1 - 2 = ? 6 + 1 = 7 ; 7 - 2 = 5 ; # 5
                                                           $ . .

Where prompts are a good part of the tokens, each prompt is computed once for all its responses,
whose attention reads the prompt's keys and values (`SharedPrompts`). The last token of a response
predicts nothing and is left out there.

Shape suffixes: B rows, S columns of the batch, T response columns, G distinct prompts, N tokens
laid out, M response tokens, L MoE layers, K experts per token, H query heads, J key/value heads, D
head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.data.batch import NOT_RECORDED, TokenBatch, to_device
from gspo.model.forward.variable_lengths import VariableLengths

BUCKET_TOKENS = 512  # tokens per bucket: fewer waste less on padding, more need fewer calls
# the least share of tokens that sharing prompts must save, since it copies keys and values
WORTH_SHARING = 0.1


def lay_out(batch: TokenBatch) -> Sequences:
    """Return the layout of the batch that computes less: `Sequences` or `SharedPrompts`."""
    tokens = int(batch.attention_BS.sum())
    distinct_G, group_B = batch.prompts_B.unique(return_inverse=True)
    first_G = torch.full_like(distinct_G, len(batch)).scatter_reduce(
        0, group_B, torch.arange(len(batch), device=group_B.device), "amin"
    )
    prompts_B = batch.attention_BS[:, : batch.prompt_width].sum(1)
    saved = int(prompts_B.sum()) - int(prompts_B[first_G].sum())
    if saved < WORTH_SHARING * tokens or not _same_replay(batch, first_G[group_B]):
        return Sequences(batch)
    return SharedPrompts(batch, first_G, group_B)


def _same_replay(batch: TokenBatch, first_B: Tensor) -> bool:
    """Return whether rows with the same prompt replay the same experts on it. They may not: engines
    may route the same prompt differently each time."""
    if batch.replay_BSLK is None:
        return True
    prompts = batch.replay_BSLK[:, : batch.prompt_width]
    return bool((prompts == prompts[first_B]).all())


class Sequences:
    """Lays out every row by itself, prompt and response. `at_BS` is the place of each position of
    the batch in the flat list, -1 if it is not in the list."""

    def __init__(self, batch: TokenBatch):
        self.attention_BS, self.prompt_width = batch.attention_BS, batch.prompt_width
        self.width, self.device = batch.attention_BS.shape[1], batch.attention_BS.device
        self.prompts_B = self.attention_BS[:, : self.prompt_width].sum(1)
        self.responses_B = self.attention_BS[:, self.prompt_width :].sum(1)
        self.at_BS = torch.full_like(batch.tokens_BS, -1)
        # (rows, columns) of each, in the order of the list
        self.rectangles: list[tuple[int, int]] = []
        self.filled, self.longest = 0, 1
        self.lengths: VariableLengths | None = None  # set by `by_lengths`
        self._index: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._place()
        self.index_N, self.positions_N = torch.cat(self._index), torch.cat(self._positions)
        self.tokens_N = batch.tokens_BS.flatten().index_select(0, self.index_N)
        self.rows_M, self.columns_M = batch.sampled_BT.nonzero(as_tuple=True)
        self.predicting_M = self.at_BS[self.rows_M, self.prompt_width + self.columns_M - 1]
        self.target_M = batch.tokens_BS[self.rows_M, self.prompt_width + self.columns_M]

    def _place(self) -> None:
        """Append all rectangles to the list."""
        lengths_B = self.prompts_B + self.responses_B
        for rows in buckets(lengths_B, torch.arange(len(lengths_B), device=self.device)):
            self._rectangle(
                rows,
                self.prompt_width - self.prompts_B[rows],
                lengths_B[rows],
                torch.zeros_like(rows),
            )

    def _rectangle(self, rows: Tensor, starts: Tensor, lengths: Tensor, positions: Tensor) -> int:
        """Append one rectangle, as wide as the longest of `lengths`, and return its first place in
        the list.

        It holds `lengths` tokens of each row from column `starts` on, whose positions begin at
        `positions`."""
        longest, begin = int(lengths.max()), self.filled
        columns = torch.arange(longest, device=self.device)
        at = (starts[:, None] + columns).clamp(max=self.width - 1)
        real = columns < lengths[:, None]
        index = rows[:, None] * self.width + at
        self._index.append(index.flatten())
        self._positions.append((positions[:, None] + columns).flatten())
        places = begin + torch.arange(index.numel(), device=self.device).view_as(index)
        self.at_BS.view(-1)[index[real]] = places[real]
        self.rectangles.append((len(rows), longest))
        self.filled += index.numel()
        self.longest = max(self.longest, int(positions.max()) + longest)
        return begin

    def by_lengths(self) -> Sequences:
        """Have attention computed by variable lengths instead of in rectangles, and return the
        layout, which must not have been moved yet."""
        self.lengths = VariableLengths(*self._places(), self.filled)
        return self

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return the places of the queries and of the keys of every sequence that attends, -1 at
        padding.
        """
        return self.at_BS, self.at_BS

    def to(self, device: torch.device) -> Sequences:
        """Move what a forward pass reads to a device, and return the layout. Sizes have been read
        before.
        """
        self.lengths = self.lengths and self.lengths.to(device)
        for name in (
            "at_BS",
            "index_N",
            "positions_N",
            "tokens_N",
            "rows_M",
            "columns_M",
            "predicting_M",
            "target_M",
        ):
            setattr(self, name, to_device(getattr(self, name), device))
        return self

    def attend(self, layer: int, q_NHD: Tensor, k_NJD: Tensor, v_NJD: Tensor) -> Tensor:
        """Compute causal attention within every row. What is computed at padding, right of its end,
        is never used.
        """
        if self.lengths:
            return self.lengths.attend(layer, q_NHD, k_NJD, v_NJD)
        sizes = [rows * columns for rows, columns in self.rectangles]
        pieces = zip(
            self.rectangles, q_NHD.split(sizes), k_NJD.split(sizes), v_NJD.split(sizes), strict=True
        )
        mixed = [
            attention(*(x.unflatten(0, shape) for x in (q, k, v))) for shape, q, k, v in pieces
        ]
        return torch.cat(mixed)

    def flat(self, x_BSLK: Tensor) -> Tensor:
        """Bring something that every position has into the order of the flat list, [N, ...]."""
        return x_BSLK.flatten(0, 1).index_select(0, self.index_N)

    def experts(self, own_NLK: Tensor) -> Tensor:
        """Bring the routers' choice back into the batch's layout [B, S, L, K], int16; NOT_RECORDED
        where nothing was computed."""
        own_BSLK = own_NLK.to(torch.int16).index_select(0, self.at_BS.flatten().clamp(min=0))
        # an index would wait for a GPU
        own_BSLK.masked_fill_((self.at_BS.flatten() < 0)[:, None, None], NOT_RECORDED)
        return own_BSLK.unflatten(0, self.at_BS.shape)

    def responses(self, x_M: Tensor, width: int) -> Tensor:
        """Bring one number per response token into the batch's layout [B, T], 0 at padding."""
        return x_M.new_zeros(len(self.at_BS), width).index_put((self.rows_M, self.columns_M), x_M)


class SharedPrompts(Sequences):
    """Lays out every distinct prompt once, then the responses without their last tokens, in
    buckets.
    """

    def __init__(self, batch: TokenBatch, first_G: Tensor, group_B: Tensor):
        self.first_G, self.group_B = first_G, group_B
        # rows, columns of the queries, and columns of the prompts
        self.buckets: list[tuple[int, int, int]] = []
        self._keys: list[Tensor] = []
        self._in_prompt: list[Tensor] = []
        self._masks: list[Tensor] = []
        super().__init__(batch)
        self.keys = torch.cat(self._keys) if self._keys else None
        # Whether there is a token at each column before a bucket's responses: of all buckets in one
        # list.
        self.in_prompt = torch.cat(self._in_prompt) if self._in_prompt else None

    def _place(self) -> None:
        """Append all rectangles to the list: that of the prompts first."""
        prompts_G = self.prompts_B[self.first_G]
        self._rectangle(
            self.first_G, self.prompt_width - prompts_G, prompts_G, torch.zeros_like(prompts_G)
        )
        stride = self.rectangles[0][1]
        columns = torch.arange(self.prompt_width, device=self.device)
        # All rows of a group find their prompt's tokens where those of the group's first row are.
        in_prompt = columns - (self.prompt_width - self.prompts_B[:, None])
        places = self.group_B[:, None] * stride + in_prompt
        self.at_BS[:, : self.prompt_width] = torch.where(in_prompt >= 0, places, -1)
        for rows in buckets(self.responses_B, (self.responses_B > 1).nonzero().squeeze(-1)):
            self._bucket(rows)

    def _bucket(self, rows: Tensor) -> None:
        """Append the responses of some rows as one rectangle, and note which keys they may attend
        to.
        """
        prompts, fed = self.prompts_B[rows], self.responses_B[rows] - 1
        begin = self._rectangle(rows, torch.full_like(rows, self.prompt_width), fed, prompts)
        longest = self.rectangles[-1][1]
        before = int(prompts.max())
        own = begin + torch.arange(len(rows) * longest, device=self.device).view(len(rows), longest)
        prompt = self.at_BS[rows, self.prompt_width - before : self.prompt_width]
        self._keys.append(torch.cat([prompt.clamp(min=0), own], 1).flatten())
        self._in_prompt.append((prompt >= 0).flatten())
        self.buckets.append((len(rows), longest, before))

    def _places(self) -> tuple[Tensor, Tensor]:
        prompts, responses = self.at_BS[self.first_G], self.at_BS[self.responses_B > 1]
        prompts[:, self.prompt_width :] = -1
        queries = responses.clone()
        queries[:, : self.prompt_width] = -1
        return torch.cat([prompts, queries]), torch.cat([prompts, responses])

    def to(self, device: torch.device) -> SharedPrompts:
        super().to(device)
        if self.keys is not None:
            self.keys, self.in_prompt = (
                to_device(self.keys, device),
                to_device(self.in_prompt, device),
            )
        return self

    def masks(self, dtype: torch.dtype) -> list[Tensor]:
        """Return 0 where a bucket's responses may attend to and -inf elsewhere, [rows, 1, queries,
        keys] each. They are made on the layout's device, once for all layers."""
        if not self._masks or self._masks[0].dtype != dtype:
            in_prompt = self.in_prompt.split([rows * before for rows, _, before in self.buckets])
            self._masks = [
                response_mask(x.view(rows, before), columns, dtype)
                for x, (rows, columns, before) in zip(in_prompt, self.buckets, strict=True)
            ]
        return self._masks

    def attend(self, layer: int, q_NHD: Tensor, k_NJD: Tensor, v_NJD: Tensor) -> Tensor:
        """Compute attention: prompts attend within themselves, responses to their prompt and to
        themselves.
        """
        if self.lengths:
            return self.lengths.attend(layer, q_NHD, k_NJD, v_NJD)
        q_pieces = q_NHD.split([rows * columns for rows, columns in self.rectangles])
        prompts, count = self.rectangles[0], len(q_pieces[0])
        own = (x.unflatten(0, prompts) for x in (q_pieces[0], k_NJD[:count], v_NJD[:count]))
        mixed = [attention(*own)]
        if self.keys is not None:
            shapes = [(rows, before + columns) for rows, columns, before in self.buckets]
            sizes = [rows * columns for rows, columns in shapes]
            keys, values = (x.index_select(0, self.keys).split(sizes) for x in (k_NJD, v_NJD))
            masks, queries = self.masks(q_NHD.dtype), self.rectangles[1:]
            for q, k, v, query_shape, shape, mask in zip(
                q_pieces[1:], keys, values, queries, shapes, masks, strict=True
            ):
                mixed.append(
                    attention(
                        q.unflatten(0, query_shape),
                        k.unflatten(0, shape),
                        v.unflatten(0, shape),
                        mask,
                    )
                )
        return torch.cat(mixed)


def response_mask(in_prompt: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return 0 where responses may attend to and -inf elsewhere, [rows, 1, queries, keys]: to the
    prompt's tokens, of which `in_prompt` [rows, columns] says where they are, and to themselves,
    causally."""
    rows, device = len(in_prompt), in_prompt.device
    causal = (
        torch.ones(columns, columns, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)
    )
    seen = torch.cat([in_prompt.unsqueeze(1).expand(-1, columns, -1), causal], 2).unsqueeze(1)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


def buckets(lengths_B: Tensor, rows: Tensor) -> list[Tensor]:
    """Cut the rows into buckets of similar length, each of about BUCKET_TOKENS tokens, the longest
    rows first.
    """
    order = rows[lengths_B[rows].argsort(descending=True, stable=True)]
    lengths, found, start = lengths_B[order].tolist(), [], 0
    while start < len(order):
        count = max(1, BUCKET_TOKENS // lengths[start])
        found.append(order[start : start + count])
        start += count
    return found


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute attention of q, k and v, [rows, columns, heads, D] each, as a flat list [rows *
    columns, heads, D].

    Without `mask` it is causal."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask.to(q.dtype)
    shared = q.shape[1] // k.shape[1]
    if shared > 1 and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # On a GPU only the flash kernel takes heads that share keys, and it takes neither a mask
        # nor float32.
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        shared = 1
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=shared > 1
    )
    return mixed.transpose(1, 2).flatten(0, 1)
