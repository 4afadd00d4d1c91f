"""Decoding in the trainer's process: one pass over the prompts, then one token at a time for all live rows.

`Decoder` runs a model that gspo.model.network supports over a static key/value cache: each prompt is prefilled once for
its group, keys and values are written in place, query heads that share a key head read it without copies, and rows that
have ended are dropped. `PlainDecoder` does the same through the model's own forward, for every other architecture.

Shape suffixes: P prompts, G rows per prompt, R live rows (P * G at first), S cached positions, V vocabulary, H query
heads, J key/value heads, D head dimension, L MoE layers, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from gspo.model.packing import attention
from gspo.model.policy import Policy

GROWTH = 8  # columns that the cache grows by; larger steps would set its rows apart in memory, which is slow to read
Step = tuple[Tensor, Tensor | None]  # logits of the next token [R, V]; experts [R, positions fed, L, K] or None


class Decoder:
    """Decodes with our own forward over the transformers weights. Its log-probs equal those of the model's own forward
    up to rounding."""

    def __init__(self, policy: Policy):
        self.network = policy.network
        self.keys: list[Tensor] = []  # per layer [R, J, S, D]
        self.values: list[Tensor] = []

    def prefill(self, prompts: list[list[int]], group_size: int) -> Step:
        """Feed the prompts, give each of them `group_size` rows, and return the first step's logits and experts."""
        device = self.network.head.device
        self.lengths_R = torch.tensor([len(p) for p in prompts], device=device)
        self.prompt, self.group_size = int(self.lengths_R.max()), group_size
        self.filled, self.room = self.prompt, self.prompt + GROWTH
        tokens_PS = torch.zeros(len(prompts), self.prompt, dtype=torch.int64, device=device)
        for row, prompt in zip(tokens_PS, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        positions_PS = torch.arange(self.prompt, device=device).expand_as(tokens_PS)
        self.shape = tokens_PS.shape
        hidden_NW, own_NLK = self.network(
            tokens_PS.flatten(), positions_PS.flatten(), self.prompt, self._attend_prompts
        )
        last_P = torch.arange(len(prompts), device=device) * self.prompt + self.lengths_R - 1
        logits_RV = F.linear(hidden_NW[last_P], self.network.head).repeat_interleave(group_size, 0)
        self.mask_RS = None
        if bool((self.lengths_R < self.prompt).any()):  # after a shorter prompt the cache has columns without a token
            empty_PS = torch.arange(self.prompt, device=device) >= self.lengths_R[:, None]
            mask_PS = torch.zeros(empty_PS.shape, dtype=self.keys[0].dtype, device=device)
            self.mask_RS = mask_PS.masked_fill_(empty_PS, -torch.inf).repeat_interleave(group_size, 0)
        self.lengths_R = self.lengths_R.repeat_interleave(group_size)
        experts = None if own_NLK is None else own_NLK.unflatten(0, self.shape).repeat_interleave(group_size, 0)
        return logits_RV, experts

    def step(self, tokens_R: Tensor) -> Step:
        """Feed one token per row, and return the next step's logits and experts."""
        if self.filled == self.room:
            self._grow()
        self.filled += 1
        if self.mask_RS is not None:
            self.mask_RS = F.pad(self.mask_RS, (0, 1))
        hidden_RW, own_RLK = self.network(tokens_R, self.lengths_R, self.filled, self._attend_cache)
        self.lengths_R = self.lengths_R + 1
        return F.linear(hidden_RW, self.network.head), None if own_RLK is None else own_RLK.unsqueeze(1)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows and drop the others."""
        self.keys = [x.index_select(0, rows) for x in self.keys]
        self.values = [x.index_select(0, rows) for x in self.values]
        self.lengths_R = self.lengths_R[rows]
        self.mask_RS = None if self.mask_RS is None else self.mask_RS[rows]

    def _grow(self) -> None:
        """Give the cache more columns, and keep its rows as close together in memory as before."""
        more = max(GROWTH, self.filled // 8)
        self.room += more
        self.keys, self.values = ([self._wider(x) for x in states] for states in (self.keys, self.values))

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

    def _attend_cache(self, layer: int, q_RHD: Tensor, k_RJD: Tensor, v_RJD: Tensor) -> Tensor:
        """Write one token's keys and values per row into the cache, and attend over it."""
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self.filled - 1], values[:, :, self.filled - 1] = k_RJD, v_RJD
        mask = None if self.mask_RS is None else self.mask_RS[:, None, None]
        # The query heads of one key head take the place of several query positions: they read its keys without copies.
        q = q_RHD.unflatten(1, (k_RJD.shape[1], -1))
        filled = slice(0, self.filled)
        return F.scaled_dot_product_attention(q, keys[:, :, filled], values[:, :, filled], attn_mask=mask).flatten(1, 2)


class PlainDecoder:
    """Decodes with the model's own forward and a growing cache. Prompts are padded on the left; hooks record the
    routing."""

    def __init__(self, policy: Policy):
        self.model, self.routing = policy.model, policy.routing
        self.pad_id = policy.tokenizer.pad_token_id
        self.cache = transformers.DynamicCache(config=policy.model.config)

    def prefill(self, prompts: list[list[int]], group_size: int) -> Step:
        """Feed the prompts, give each of them `group_size` rows, and return the first step's logits and experts."""
        width = max(map(len, prompts))
        device = self.model.device
        tokens = torch.tensor([[self.pad_id] * (width - len(p)) + p for p in prompts], device=device)
        self.attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        logits, experts = self._forward(tokens, (self.attention.cumsum(-1) - 1).clamp(min=0))
        if experts is not None:  # move them to the first column, where `Decoder` has them
            starts = width - self.attention.sum(1)
            columns = (torch.arange(width, device=device) + starts[:, None]).clamp(max=width - 1)
            experts = experts[torch.arange(len(prompts), device=device)[:, None], columns].repeat_interleave(
                group_size, 0
            )
        self.cache.batch_repeat_interleave(group_size)
        self.attention = self.attention.repeat_interleave(group_size, 0)
        return logits.repeat_interleave(group_size, 0), experts

    def step(self, tokens_R: Tensor) -> Step:
        """Feed one token per row, and return the next step's logits and experts."""
        self.attention = F.pad(self.attention, (0, 1), value=1)
        return self._forward(tokens_R[:, None], self.attention.sum(-1, keepdim=True) - 1)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows and drop the others."""
        self.cache.batch_select_indices(rows)
        self.attention = self.attention[rows]

    def _forward(self, tokens: Tensor, positions: Tensor) -> Step:
        """Feed tokens to the model, and return the last logits of each row and the experts that were used."""
        with self.routing.recording():
            logits = self.model(
                input_ids=tokens,
                attention_mask=self.attention,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            return logits, self.routing.recorded(len(tokens)) if self.routing.layers else None
