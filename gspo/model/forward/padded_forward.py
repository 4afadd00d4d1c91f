"""Passes a batch through a model's own forward, for the architectures that gspo.model.forward.network does
not know.

Such a forward takes rectangles of tokens. Most architectures compute the same whether a rectangle
is padded on the left or on the right. Some recurrent ones (RWKV, xLSTM) read padding on the left as
text, so it must stand on the right. A model is therefore compared with itself before it is used:
rows that are padded must give the logits that each row gives alone.

Shape suffixes: B rows, S columns of the batch, C columns of which logits are computed, T response
columns, X anything.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from gspo.data.batch import TokenBatch
from gspo.model.forward.network import PROBE_TOLERANCE
from gspo.model.sharding.dtensors import architecture

Side = Literal["left", "right"]
PROBE_LENGTHS = (12, 7)  # tokens of the rows that are compared


class PaddedRows:
    """The tokens of a batch as a model's own forward takes them, with padding on one side.

    A `TokenBatch` has padding on the left of its prompts and on the right of its responses. For a
    model that needs all padding on the right, each row is moved to the left until its prompt begins
    in the first column."""

    def __init__(self, batch: TokenBatch, side: Side):
        self.tokens_BS = batch.tokens_BS
        self.attention_BS = batch.attention_BS
        self.replay_BSLK = batch.replay_BSLK
        self.width = batch.mask_BT.shape[1]
        self.moved_B = None  # by how many columns each row is moved, None if none is
        # the last prompt token predicts the first response token
        self.kept_columns = self.width + 1
        if side == "left":
            return
        columns = self.tokens_BS.shape[1]
        columns_S = torch.arange(columns, device=self.tokens_BS.device)
        prompts_B = self.attention_BS[:, : batch.prompt_width].sum(1)
        self.moved_B = batch.prompt_width - prompts_B
        source_BS = columns_S + self.moved_B[:, None]
        inside_BS = source_BS < columns
        source_BS = source_BS.clamp(max=columns - 1)
        self.tokens_BS = self.tokens_BS.gather(1, source_BS)
        self.attention_BS = self.attention_BS.gather(1, source_BS) & inside_BS
        if self.replay_BSLK is not None:
            self.replay_BSLK = at_columns(self.replay_BSLK, source_BS)
        self.kept_columns = columns - int(prompts_B.min()) + 1
        first_kept = columns - self.kept_columns
        self.predicting_BT = (prompts_B - 1 - first_kept)[:, None] + columns_S[: self.width]

    def predicting(self, x_BCX: Tensor) -> Tensor:
        """Return what the last `kept_columns` columns hold at the tokens that predict a response
        token, [B, T, X].
        """
        if self.moved_B is None:
            return x_BCX[:, -self.kept_columns : -1]
        return at_columns(x_BCX[:, -self.kept_columns :], self.predicting_BT)

    def as_in_batch(self, x_BSX: Tensor) -> Tensor:
        """Return something of each token in the columns that the batch has it in."""
        if self.moved_B is None:
            return x_BSX
        columns_S = torch.arange(x_BSX.shape[1], device=x_BSX.device)
        return at_columns(x_BSX, (columns_S - self.moved_B[:, None]).clamp(min=0))


def at_columns(x_BSX: Tensor, columns_BC: Tensor) -> Tensor:
    """Return the entries [B, C, ...] of the given columns of each row."""
    return x_BSX[torch.arange(len(x_BSX), device=x_BSX.device)[:, None], columns_BC]


def forward_arguments(
    model: transformers.PreTrainedModel, attention_BS: Tensor, keep: int = 0
) -> dict[str, Any]:
    """Return the arguments beside the tokens that a model's forward is called with, of those that
    it has.

    A token's position counts from the first token of its row; `keep` is from how many last columns
    on logits are wanted, 0 for all. A model that has no such argument computes all logits."""
    arguments = {
        "attention_mask": attention_BS.long(),
        "position_ids": (attention_BS.cumsum(-1) - 1).clamp(min=0),
        "logits_to_keep": keep,
    }
    taken = inspect.signature(model.forward).parameters
    return {name: value for name, value in arguments.items() if name in taken}


@torch.no_grad()
def padding_side(model: transformers.PreTrainedModel) -> Side:
    """Return the side on which padding does not change what a model computes: the left, if both are
    right.

    Raises ValueError for a model that computes something else on either side, for one whose tokens
    see later tokens, and for one whose forward fails."""
    rows = probe_rows(model, PROBE_LENGTHS)
    try:
        alone = [logits_of_row(model, row) for row in rows]
    except (
        Exception
    ) as error:  # a forward that does not fit its configuration raises exceptions of many types
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(
            f"{architecture(model)} cannot be used: its forward fails ({reason})"
        ) from None
    begin = [logits_of_row(model, row[: len(row) // 2]) for row in rows]
    error = largest_difference(
        [whole[: len(half)] for whole, half in zip(alone, begin, strict=True)], begin
    )
    if not error <= PROBE_TOLERANCE[model.dtype]:
        raise ValueError(
            f"{architecture(model)} cannot be trained: it is not causal. Its logits at a token change by {error:.2g} "
            "of the largest logit when further tokens follow (some configurations need is_decoder=true)"
        )
    errors = []
    for side in ("left", "right"):
        tokens_BS, attention_BS = padded(rows, side, model.device)
        logits_BSV = model(
            input_ids=tokens_BS,
            use_cache=False,
            **forward_arguments(model, attention_BS),
        ).logits
        by_row = [
            logits_SV[mask_S.bool()]
            for logits_SV, mask_S in zip(logits_BSV, attention_BS, strict=True)
        ]
        error = largest_difference(by_row, alone)
        if error <= PROBE_TOLERANCE[model.dtype]:
            return side
        errors.append(f"{error:.2g} with padding on the {side}")
    raise ValueError(
        f"{architecture(model)} cannot be trained: the logits of a row that is padded must be those of the row alone, "
        f"and they differ by {' and '.join(errors)}, as a share of the largest logit"
    )


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, cut to a readable length."""
    return str(error).strip().partition("\n")[0][:200]


def probe_rows(model: transformers.PreTrainedModel, lengths: tuple[int, ...]) -> list[list[int]]:
    """Return rows of token ids of these lengths to compare two ways to compute with."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [
        [(start + i) % vocabulary for i in range(length)] for start, length in enumerate(lengths)
    ]


def padded(
    rows: list[list[int]], side: Side, device: torch.device, pad_id: int = 0
) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask [B, S] of rows, with padding on one side."""
    width = max(map(len, rows))
    tokens_BS = torch.full((len(rows), width), pad_id)
    attention_BS = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens_BS[i, columns] = torch.tensor(row)
        attention_BS[i, columns] = 1
    return tokens_BS.to(device), attention_BS.to(device)


def logits_of_row(model: transformers.PreTrainedModel, row: list[int]) -> Tensor:
    """Return the logits [S, V] that a model computes of one row without padding and cache."""
    tokens_BS = torch.tensor([row], device=model.device)
    arguments = forward_arguments(model, torch.ones_like(tokens_BS))
    return model(input_ids=tokens_BS, use_cache=False, **arguments).logits[0]


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return how far logits [S, V] of several rows are off, as a share of the largest logit.

    Of each row the median over its tokens counts, because rounding may send a single token to
    another expert. Of the rows the worst counts."""
    offs = [
        (a.float() - b.float()).abs().amax(-1).median()
        for a, b in zip(found, expected, strict=True)
    ]
    scale = max(float(logits_SV.abs().max()) for logits_SV in expected)
    return float(torch.stack(offs).max()) / max(scale, 1.0)
