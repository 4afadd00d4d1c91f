"""Lays out the sequences of a batch as one flat list of tokens with little padding.

Rows are sorted by length and cut into small buckets. Each bucket is padded to its longest row, so
attention computes rectangles with little padding:

    bucket 1   3 - 8 + 9 = ? 3 - 8 = - 5 ; - 5 + 9 = 4 ; # 4 $
               6 + 1 - 2 = ? 6 + 1 = 7 ; 7 - 2 = 5 ; # 5 $ . .

    bucket 2   7 + 5 = ? 7 + 5 = 1 2 $
               4 + 4 = ? 4 + 4 = 8 $ .

If prompts are a large part of the tokens, each prompt is computed once for all its responses. Their
attention reads the prompt's keys and values (`SharedPrompts`). The last token of a response
predicts nothing and is left out there.

A slot is an index of the flat list.

Shape suffixes: B rows, S columns of the batch, T response columns, G distinct prompts, N slots, M
response tokens, L MoE layers, K experts per token, H query heads, J key/value heads, D head
dimension, C sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo.data.batch import NOT_RECORDED, TokenBatch, to_device
from gspo.model.forward.kept_softmax import KeptColumns, columns_at
from gspo.model.forward.variable_lengths import VariableLengths

# Fewer tokens per bucket waste less on padding. More tokens need fewer calls.
BUCKET_TOKENS = 512
# the minimum share of tokens that sharing prompts must save, because it copies keys and values
WORTH_SHARING = 0.1


def lay_out(batch: TokenBatch) -> Sequences:
    """Return the layout of the batch that computes less: `Sequences` or `SharedPrompts`."""
    tokens = int(batch.attention_BS.sum())
    distinct_G, group_B = batch.prompts_B.unique(return_inverse=True)
    first_G = torch.full_like(distinct_G, len(batch)).scatter_reduce(
        0, group_B, torch.arange(len(batch), device=group_B.device), "amin"
    )
    prompts_B = batch.attention_BS[:, : batch.prompt_width].sum(1)
    prompts_G = prompts_B[first_G]
    saved = int(prompts_B.sum()) - int(prompts_G.sum())
    if saved < WORTH_SHARING * tokens or not _same_replay(batch, first_G[group_B]):
        return Sequences(batch)
    return SharedPrompts(batch, first_G, group_B)


def _same_replay(batch: TokenBatch, first_B: Tensor) -> bool:
    """Return whether rows with the same prompt replay the same experts on it.

    Engines may route the same prompt differently each time."""
    if batch.replay_BSLK is None:
        return True
    prompts = batch.replay_BSLK[:, : batch.prompt_width]
    return bool((prompts == prompts[first_B]).all())


class Sequences:
    """A layout of every row by itself, prompt and response.

    slot_BS      the slot of each token of the batch, -1 if it has none
    index_N      the index of each slot's token in the flattened batch
    rectangles   (rows, columns) of each bucket, in the order of the list
    longest      exceeds all positions
    """

    def __init__(self, batch: TokenBatch):
        self.attention_BS = batch.attention_BS
        self.prompt_width = batch.prompt_width
        self.width = batch.attention_BS.shape[1]
        self.device = batch.attention_BS.device
        self.prompts_B = self.attention_BS[:, : self.prompt_width].sum(1)
        self.responses_B = self.attention_BS[:, self.prompt_width :].sum(1)
        self.slot_BS = torch.full_like(batch.tokens_BS, -1)
        self.rectangles: list[tuple[int, int]] = []
        self.slots = 0
        self.longest = 1
        # set by `use_varlen`
        self.varlen: VariableLengths | None = None
        self._index: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._append_all()
        self.index_N = torch.cat(self._index)
        self.positions_N = torch.cat(self._positions)
        self.tokens_N = batch.tokens_BS.flatten().index_select(0, self.index_N)
        self.rows_M, self.columns_M = batch.sampled_BT.nonzero(as_tuple=True)
        self.predicting_M = self.slot_BS[self.rows_M, self.prompt_width + self.columns_M - 1]
        self.target_M = batch.tokens_BS[self.rows_M, self.prompt_width + self.columns_M]
        # the tokens over which the softmax of each response token runs; None: all tokens
        self.kept: KeptColumns | None = None
        if batch.kept is not None:
            counts_M = batch.kept.counts_BT[self.rows_M, self.columns_M]
            starts_M = batch.kept.starts_BT[self.rows_M, self.columns_M]
            self.kept = columns_at(batch.kept, counts_M, starts_M)

    def _append_all(self) -> None:
        """Append all rectangles to the list."""
        lengths_B = self.prompts_B + self.responses_B
        starts_B = self.prompt_width - self.prompts_B
        all_rows = torch.arange(len(lengths_B), device=self.device)
        for rows in buckets(lengths_B, all_rows):
            positions = torch.zeros_like(rows)
            self._append_rectangle(rows, starts_B[rows], lengths_B[rows], positions)

    def _append_rectangle(
        self,
        rows: Tensor,
        starts: Tensor,
        lengths: Tensor,
        positions: Tensor,
    ) -> int:
        """Append one rectangle, and return its first slot.

        It holds `lengths` tokens of each row from column `starts` on, padded to the longest. Their
        positions begin at `positions`."""
        longest = int(lengths.max())
        first_slot = self.slots
        offsets = torch.arange(longest, device=self.device)
        columns = (starts[:, None] + offsets).clamp(max=self.width - 1)
        is_token = offsets < lengths[:, None]
        index = rows[:, None] * self.width + columns
        self._index.append(index.flatten())
        self._positions.append((positions[:, None] + offsets).flatten())
        slots = torch.arange(index.numel(), device=self.device).view_as(index)
        slots = first_slot + slots
        self.slot_BS.view(-1)[index[is_token]] = slots[is_token]
        self.rectangles.append((len(rows), longest))
        self.slots += index.numel()
        self.longest = max(self.longest, int(positions.max()) + longest)
        return first_slot

    def use_varlen(self) -> Sequences:
        """Compute attention by variable lengths instead of in rectangles, and return the layout.

        Call this before `to`."""
        self.varlen = VariableLengths(*self._attention_slots(), self.slots)
        return self

    def _attention_slots(self) -> tuple[Tensor, Tensor]:
        """Return the slots of queries and of keys of every sequence [C, S], -1 at padding."""
        return self.slot_BS, self.slot_BS

    def to(self, device: torch.device) -> Sequences:
        """Move the tensors that a forward pass reads to a device, and return the layout."""
        if self.varlen:
            self.varlen.to(device)
        if self.kept:
            self.kept = self.kept.to(device)
        for name in (
            "slot_BS",
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

    def attend(
        self,
        layer: int,
        q_NHD: Tensor,
        k_NJD: Tensor,
        v_NJD: Tensor,
    ) -> Tensor:
        """Compute causal attention within every row.

        Padding is to the right of a row, so no token attends to it."""
        if self.varlen:
            return self.varlen.attend(layer, q_NHD, k_NJD, v_NJD)
        sizes = [rows * columns for rows, columns in self.rectangles]
        qs = q_NHD.split(sizes)
        ks = k_NJD.split(sizes)
        vs = v_NJD.split(sizes)
        mixed = []
        for shape, q, k, v in zip(self.rectangles, qs, ks, vs, strict=True):
            q = q.unflatten(0, shape)
            k = k.unflatten(0, shape)
            v = v.unflatten(0, shape)
            mixed.append(attention(q, k, v))
        return torch.cat(mixed)

    def flat(self, x_BSLK: Tensor) -> Tensor:
        """Bring values of all tokens of the batch into the order of the flat list [N, ...]."""
        return x_BSLK.flatten(0, 1).index_select(0, self.index_N)

    def experts(self, experts_NLK: Tensor) -> Tensor:
        """Bring the routers' choice back into the batch's layout [B, S, L, K], int16.

        It is NOT_RECORDED if a token has no slot."""
        slots = self.slot_BS.flatten()
        experts_BSLK = experts_NLK.to(torch.int16).index_select(0, slots.clamp(min=0))
        # an index would wait for a GPU
        experts_BSLK.masked_fill_((slots < 0)[:, None, None], NOT_RECORDED)
        return experts_BSLK.unflatten(0, self.slot_BS.shape)

    def responses(self, x_M: Tensor, width: int) -> Tensor:
        """Bring one number per response token into the batch's layout [B, T], 0 at padding."""
        zeros_BT = x_M.new_zeros(len(self.slot_BS), width)
        return zeros_BT.index_put((self.rows_M, self.columns_M), x_M)


class SharedPrompts(Sequences):
    """A layout of every distinct prompt once, then of the responses without their last tokens.

    first_G     the first row of each prompt
    group_B     the index of each row's prompt
    buckets     (rows, response columns, prompt columns) of each bucket of responses
    keys        the slots of the keys of all buckets in one list
    in_prompt   whether there is a token at each prompt column, of all buckets in one list
    """

    def __init__(self, batch: TokenBatch, first_G: Tensor, group_B: Tensor):
        self.first_G = first_G
        self.group_B = group_B
        self.buckets: list[tuple[int, int, int]] = []
        self._keys: list[Tensor] = []
        self._in_prompt: list[Tensor] = []
        self._masks: list[Tensor] = []
        super().__init__(batch)
        no_slots = self.index_N.new_empty(0)
        self.keys = torch.cat(self._keys) if self._keys else no_slots
        self.in_prompt = torch.cat(self._in_prompt) if self._in_prompt else no_slots.bool()

    def _append_all(self) -> None:
        """Append all rectangles to the list: first the prompts, then the responses."""
        prompts_G = self.prompts_B[self.first_G]
        positions = torch.zeros_like(prompts_G)
        self._append_rectangle(self.first_G, self.prompt_width - prompts_G, prompts_G, positions)
        columns_of_prompts = self.rectangles[0][1]
        columns = torch.arange(self.prompt_width, device=self.device)
        # All rows of a group have the slots of their common prompt.
        offsets = columns - (self.prompt_width - self.prompts_B[:, None])
        slots = self.group_B[:, None] * columns_of_prompts + offsets
        self.slot_BS[:, : self.prompt_width] = torch.where(offsets >= 0, slots, -1)
        # a response of one token is left out, as all last tokens are
        long_enough = (self.responses_B > 1).nonzero().squeeze(-1)
        for rows in buckets(self.responses_B, long_enough):
            self._append_responses(rows)

    def _append_responses(self, rows: Tensor) -> None:
        """Append the responses of rows as one rectangle, and the slots of their keys."""
        prompts = self.prompts_B[rows]
        starts = torch.full_like(rows, self.prompt_width)
        first_slot = self._append_rectangle(rows, starts, self.responses_B[rows] - 1, prompts)
        longest = self.rectangles[-1][1]
        longest_prompt = int(prompts.max())
        slots = first_slot + torch.arange(len(rows) * longest, device=self.device)
        slots = slots.view(len(rows), longest)
        prompt = self.slot_BS[rows, self.prompt_width - longest_prompt : self.prompt_width]
        keys = torch.cat([prompt.clamp(min=0), slots], 1)
        self._keys.append(keys.flatten())
        self._in_prompt.append((prompt >= 0).flatten())
        self.buckets.append((len(rows), longest, longest_prompt))

    def _attention_slots(self) -> tuple[Tensor, Tensor]:
        prompts = self.slot_BS[self.first_G]
        responses = self.slot_BS[self.responses_B > 1]
        prompts[:, self.prompt_width :] = -1
        queries = responses.clone()
        queries[:, : self.prompt_width] = -1
        return torch.cat([prompts, queries]), torch.cat([prompts, responses])

    def to(self, device: torch.device) -> SharedPrompts:
        super().to(device)
        if self.buckets:
            self.keys = to_device(self.keys, device)
            self.in_prompt = to_device(self.in_prompt, device)
        return self

    def masks(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the mask [rows, 1, queries, keys] of each bucket: 0 for a visible key, else -inf.

        The masks are made on the layout's device, once for all layers."""
        if not self._masks or self._masks[0].dtype != dtype:
            sizes = [rows * prompt_columns for rows, _, prompt_columns in self.buckets]
            self._masks = []
            parts = self.in_prompt.split(sizes)
            for in_prompt, shape in zip(parts, self.buckets, strict=True):
                rows, columns, prompt_columns = shape
                self._masks.append(
                    response_mask(in_prompt.view(rows, prompt_columns), columns, dtype)
                )
        return self._masks

    def attend(
        self,
        layer: int,
        q_NHD: Tensor,
        k_NJD: Tensor,
        v_NJD: Tensor,
    ) -> Tensor:
        """Compute attention: prompts see themselves, responses see their prompt and themselves."""
        if self.varlen:
            return self.varlen.attend(layer, q_NHD, k_NJD, v_NJD)
        sizes = [rows * columns for rows, columns in self.rectangles]
        prompt_q, *response_qs = q_NHD.split(sizes)
        shape = self.rectangles[0]
        prompt_k = k_NJD[: len(prompt_q)].unflatten(0, shape)
        prompt_v = v_NJD[: len(prompt_q)].unflatten(0, shape)
        mixed = [attention(prompt_q.unflatten(0, shape), prompt_k, prompt_v)]
        if self.buckets:
            sizes = [rows * (prompt + response) for rows, response, prompt in self.buckets]
            ks = k_NJD.index_select(0, self.keys).split(sizes)
            vs = v_NJD.index_select(0, self.keys).split(sizes)
            masks = self.masks(q_NHD.dtype)
            for q, k, v, mask in zip(response_qs, ks, vs, masks, strict=True):
                shape = (len(mask), -1)
                q = q.unflatten(0, shape)
                k = k.unflatten(0, shape)
                v = v.unflatten(0, shape)
                mixed.append(attention(q, k, v, mask))
        return torch.cat(mixed)


def response_mask(in_prompt: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of responses [rows, 1, queries, keys]: 0 for a visible key, else -inf.

    The keys belong to the prompt and the response. A response sees all tokens of its prompt, and
    itself causally. `in_prompt` [rows, prompt columns] says which columns are tokens."""
    rows = len(in_prompt)
    device = in_prompt.device
    causal = torch.ones(columns, columns, dtype=torch.bool, device=device).tril()
    prompt_part = in_prompt.unsqueeze(1).expand(-1, columns, -1)
    response_part = causal.expand(rows, -1, -1)
    visible = torch.cat([prompt_part, response_part], 2).unsqueeze(1)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, -torch.inf)


def buckets(lengths_B: Tensor, rows: Tensor) -> list[Tensor]:
    """Cut the rows into buckets of similar length, with about BUCKET_TOKENS tokens each.

    The longest rows come first."""
    order = rows[lengths_B[rows].argsort(descending=True, stable=True)]
    lengths = lengths_B[order].tolist()
    result = []
    start = 0
    while start < len(order):
        count = max(1, BUCKET_TOKENS // lengths[start])
        result.append(order[start : start + count])
        start += count
    return result


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute attention of q, k and v [rows, columns, heads, D] as a list [rows * columns, ...].

    Without `mask` it is causal."""
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    if mask is not None:
        mask = mask.to(q.dtype)
    queries_per_key = q.shape[1] // k.shape[1]
    if queries_per_key > 1 and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # On a GPU only the flash kernel takes heads that share keys. It takes neither a mask nor
        # float32.
        k = k.repeat_interleave(queries_per_key, 1)
        v = v.repeat_interleave(queries_per_key, 1)
        queries_per_key = 1
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=queries_per_key > 1
    )
    return mixed.transpose(1, 2).flatten(0, 1)
