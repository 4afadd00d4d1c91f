"""Passes a batch through a model's own forward, if gspo.model.forward.network does not know it.

Such a forward takes rectangles of tokens. Most architectures compute the same with padding on the
left and on the right. Some recurrent architectures (RWKV, xLSTM) read padding on the left as text,
so they need it on the right. Therefore a model is compared with itself before it is used: padded
rows must give the same logits as each row alone.

Shape suffixes: B rows, S columns of the batch, C columns of which logits are computed, T response
columns, X anything.
"""

import inspect
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from gspo.data.batch import TokenBatch
from gspo.io.errors import first_line
from gspo.model.forward.network import PROBE_TOLERANCE
from gspo.model.sharding.dtensors import architecture
from gspo.model.weights import input_embedding

Side = Literal["left", "right"]
# tokens of the rows that are compared
PROBE_LENGTHS = (12, 7)


class PaddedRows:
    """The tokens of a batch as a model's own forward takes them, with padding on one side.

    A `TokenBatch` has padding on the left of its prompts and on the right of its responses. For a
    model that needs all padding on the right, each row is moved to the left until its prompt begins
    in the first column.

    kept_columns   the number of last columns of which logits are computed
    moved_B        the number of columns by which each row is moved; None if no row is moved
    """

    def __init__(self, batch: TokenBatch, side: Side):
        self.tokens_BS = batch.tokens_BS
        self.attention_BS = batch.attention_BS
        self.replay_BSLK = batch.replay_BSLK
        self.width = batch.mask_BT.shape[1]
        self.moved_B: Tensor | None = None
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
        last_of_prompt_B = prompts_B - 1 - first_kept
        self.predicting_BT = last_of_prompt_B[:, None] + columns_S[: self.width]

    def predicting(self, x_BCX: Tensor) -> Tensor:
        """Select the tokens that predict response tokens [B, T, X] from the last `kept_columns`."""
        if self.moved_B is None:
            return x_BCX[:, -self.kept_columns : -1]
        return at_columns(x_BCX[:, -self.kept_columns :], self.predicting_BT)

    def as_in_batch(self, x_BSX: Tensor) -> Tensor:
        """Return values of tokens in the columns of the batch."""
        if self.moved_B is None:
            return x_BSX
        columns_S = torch.arange(x_BSX.shape[1], device=x_BSX.device)
        columns_BS = columns_S - self.moved_B[:, None]
        return at_columns(x_BSX, columns_BS.clamp(min=0))


def at_columns(x_BSX: Tensor, columns_BC: Tensor) -> Tensor:
    """Return the entries [B, C, ...] of the given columns of each row."""
    rows_B = torch.arange(len(x_BSX), device=x_BSX.device)
    return x_BSX[rows_B[:, None], columns_BC]


def forward_arguments(
    model: transformers.PreTrainedModel, attention_BS: Tensor, keep: int = 0
) -> dict[str, Any]:
    """Return the arguments of a model's forward beside the tokens, as far as the model has them.

    A token's position is counted from the first token of its row. `keep` is the number of last
    columns whose logits are computed, 0 for all. A model without this argument computes all."""
    arguments = {
        "attention_mask": attention_BS.long(),
        "position_ids": (attention_BS.cumsum(-1) - 1).clamp(min=0),
        "logits_to_keep": keep,
    }
    parameters = inspect.signature(model.forward).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


@torch.no_grad()
def padding_side(model: transformers.PreTrainedModel) -> Side:
    """Return the side on which padding does not change a model's logits, the left if both do not.

    Raises ValueError if padding changes the logits on both sides, if tokens see later tokens, or if
    the forward fails."""
    with no_vector_of_zeros(model):
        return probed_padding_side(model)


@contextmanager
def no_vector_of_zeros(model: transformers.PreTrainedModel) -> Generator[None]:
    """Fill every vector of parameters that is all 0 while the context lasts.

    An untrained bias of 0 hides a padded position that reaches a row's own tokens, as in
    RecurrentGemma with padding on the left: the first update would change that."""
    filled = [p for p in model.parameters() if p.ndim == 1 and not p.any()]
    for parameter in filled:
        parameter.copy_(torch.linspace(0.01, 0.05, len(parameter)))
    try:
        yield
    finally:
        for parameter in filled:
            parameter.zero_()


def probed_padding_side(model: transformers.PreTrainedModel) -> Side:
    """Return the padding side for the model's present weights, see `padding_side`."""
    tolerance = PROBE_TOLERANCE[model.dtype]
    rows = probe_rows(model, PROBE_LENGTHS)
    try:
        alone = [logits_of_row(model, row) for row in rows]
    # a forward that does not fit its configuration raises exceptions of many types
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise ValueError(
            f"{architecture(model)} cannot be used: its forward fails ({reason})"
        ) from None
    halves = [logits_of_row(model, row[: len(row) // 2]) for row in rows]
    beginnings = [logits_SV[: len(half)] for logits_SV, half in zip(alone, halves, strict=True)]
    difference = largest_difference(beginnings, halves)
    if math.isnan(difference):
        raise ValueError(
            f"{architecture(model)} cannot be trained: its logits are NaN. Its weights may be "
            "incomplete, or too large for their precision"
        )
    if not difference <= tolerance:
        raise ValueError(
            f"{architecture(model)} cannot be trained: it is not causal. Its logits at a token "
            f"change by {difference:.2g} of the largest logit when further tokens follow (some "
            "configurations need is_decoder=true)"
        )
    differences = []
    for side in ("left", "right"):
        tokens_BS, attention_BS = padded(rows, side, model.device)
        arguments = forward_arguments(model, attention_BS)
        logits_BSV = model(input_ids=tokens_BS, use_cache=False, **arguments).logits
        pairs = zip(logits_BSV, attention_BS, strict=True)
        by_row = [logits_SV[mask_S.bool()] for logits_SV, mask_S in pairs]
        difference = largest_difference(by_row, alone)
        if difference <= tolerance:
            return side
        differences.append(f"{difference:.2g} with padding on the {side}")
    raise ValueError(
        f"{architecture(model)} cannot be trained: the logits of a row that is padded must be "
        f"those of the row alone, and they differ by {' and '.join(differences)}, as a share of "
        "the largest logit"
    )


def probe_rows(model: transformers.PreTrainedModel, lengths: tuple[int, ...]) -> list[list[int]]:
    """Return rows of token ids of these lengths, for a comparison of two computations."""
    vocabulary = len(input_embedding(model))
    rows = []
    for first, length in enumerate(lengths):
        rows.append([(first + i) % vocabulary for i in range(length)])
    return rows


def padded(
    rows: list[list[int]],
    side: Side,
    device: torch.device,
    pad_id: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask [B, S] of rows, with padding on one side."""
    width = max(map(len, rows))
    tokens_BS = torch.full((len(rows), width), pad_id)
    attention_BS = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        first = width - len(row) if side == "left" else 0
        columns = slice(first, first + len(row))
        tokens_BS[i, columns] = torch.tensor(row)
        attention_BS[i, columns] = 1
    return tokens_BS.to(device), attention_BS.to(device)


def logits_of_row(model: transformers.PreTrainedModel, row: list[int]) -> Tensor:
    """Return the logits [S, V] of one row without padding and cache."""
    tokens_BS = torch.tensor([row], device=model.device)
    arguments = forward_arguments(model, torch.ones_like(tokens_BS))
    return model(input_ids=tokens_BS, use_cache=False, **arguments).logits[0]


def largest_difference(computed: list[Tensor], expected: list[Tensor]) -> float:
    """Return the difference of logits [S, V] of several rows, as a share of the largest logit.

    It is the median over the tokens of a row, because rounding may send a single token to another
    expert, and the maximum over rows."""
    medians = []
    for ours_SV, theirs_SV in zip(computed, expected, strict=True):
        differences_S = (ours_SV.float() - theirs_SV.float()).abs().amax(-1)
        medians.append(differences_S.median())
    largest_logit = max(float(logits_SV.abs().max()) for logits_SV in expected)
    return float(torch.stack(medians).max()) / max(largest_logit, 1.0)
