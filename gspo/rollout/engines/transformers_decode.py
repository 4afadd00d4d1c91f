"""Decoding through a model's own forward in transformers.

It serves the architectures that gspo.model.forward.network does not support.

`CachedDecoder` keeps the same cache as transformers' own `generate`: keys and values, the states of
recurrent layers, or both. The model chooses its kind of cache, and the cache repeats and selects
its rows. `UncachedDecoder` passes whole rows through the model for every token, which is slow and
always right.

`transformers_decoder` compares the two on a few tokens. It returns `CachedDecoder` if they agree.

Shape suffixes: P prompts, R rows, S columns, L MoE layers, K experts per token, V vocabulary.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.generation.utils import GenerationMixin, GenerationMode

from gspo.io.errors import first_line
from gspo.model.forward.network import PROBE_TOLERANCE
from gspo.model.forward.padded_forward import (
    at_columns,
    forward_arguments,
    largest_difference,
    logits_of_row,
    padded,
    probe_rows,
)
from gspo.model.policy import Policy
from gspo.model.sharding.dtensors import architecture
from gspo.rollout.engines.decode import DecodeOutput, NetworkDecoder

PROBE_PROMPTS = (12, 7)  # tokens of the prompts on which the decoders are compared
PROBE_TOKENS = 5  # tokens that continue each of these prompts
GROWTH_COLUMNS = 64  # by which the rows of `UncachedDecoder` grow


def transformers_decoder(policy: Policy) -> type[CachedDecoder] | type[UncachedDecoder]:
    """Return the decoder for a model that runs through its own forward.

    If it is `UncachedDecoder`, which is slow, a line on stderr says why."""
    reason = disagreement(policy)
    if not reason:
        return CachedDecoder
    print(
        f"{architecture(policy.model)}: its cache is not used, because {reason}. Every token is "
        "computed from its whole row, which is slow for long responses: choose rollout=vllm if "
        "vLLM knows the model",
        file=sys.stderr,
    )
    return UncachedDecoder


@torch.no_grad()
def disagreement(policy: Policy) -> str:
    """Return how decoding with the cache differs from a forward over whole rows, "" if it does not.

    Two prompts of unequal length get two rows each. After two tokens, a row of each is dropped.
    """
    model = policy.model
    prompts = probe_rows(model, PROBE_PROMPTS)
    (continuation,) = probe_rows(model, (PROBE_TOKENS,))
    prompt_of_row = [0, 0, 1, 1]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    try:
        decoder = CachedDecoder(policy)
        logits_RV, _ = decoder.prefill(prompts, group_size=2)
        for t, token in enumerate(continuation):
            for row, prompt in enumerate(prompt_of_row):
                logits[prompt].append(logits_RV[row])
            if t == 1:
                kept_rows = torch.tensor([1, 2], device=model.device)
                decoder.keep(kept_rows)
                prompt_of_row = [0, 1]
            tokens_R = torch.full((len(prompt_of_row),), token, device=model.device)
            logits_RV, _ = decoder.step(tokens_R)
    # a model that `generate` cannot run raises exceptions of many types
    except Exception as error:
        return (
            "it cannot be driven as `generate` drives others "
            f"({type(error).__name__}: {first_line(error)[:200]})"
        )
    decoded = [torch.stack(rows) for rows in logits]
    rows_at_each_token = torch.tensor([2, 2, 1, 1, 1], device=model.device)
    expected = []
    for prompt in prompts:
        logits_SV = logits_of_row(model, prompt + continuation[:-1])
        predictions_SV = logits_SV[len(prompt) - 1 :]
        expected.append(predictions_SV.repeat_interleave(rows_at_each_token, 0))
    difference = largest_difference(decoded, expected)
    if difference <= PROBE_TOLERANCE[model.dtype]:
        return ""
    return (
        f"its logits differ from those of a whole forward by {difference:.2g} of the largest logit"
    )


class TransformersDecoder:
    """The base class of both decoders through a model's own forward."""

    max_unfinished_share = NetworkDecoder.max_unfinished_share

    def __init__(self, policy: Policy):
        self.model = policy.model
        self.routing = policy.routing
        self.pad_id = policy.pad_id
        self.positions = policy.positions

    def _recorded_experts(self, rows: int) -> Tensor | None:
        """Return the experts of the last forward of `rows` rows, None without MoE layers."""
        return self.routing.recorded(rows) if self.routing.layers else None


class CachedDecoder(TransformersDecoder):
    """A decoder that uses the model's own forward and the cache of `generate`.

    Prompts are padded on the left, and hooks record the routing."""

    def __init__(self, policy: Policy):
        super().__init__(policy)
        if not isinstance(policy.model, GenerationMixin):
            raise TypeError("it does not inherit GenerationMixin")
        self.generation = policy.model

    def prefill(self, prompts: list[list[int]], group_size: int) -> DecodeOutput:
        """Feed the prompts, give each of them `group_size` rows, and return the first output."""
        device = self.model.device
        tokens_PS, attention_PS = padded(prompts, "left", device, self.pad_id)
        width = tokens_PS.shape[1]
        self.tokens_RS = tokens_PS
        # the keyword arguments of the forward that `generate` passes on from token to token
        self.model_kwargs: dict[str, Any] = {"use_cache": True}
        self.model_kwargs |= forward_arguments(self.model, attention_PS, keep=1)
        self.generation._prepare_cache_for_generation(
            transformers.GenerationConfig(),
            self.model_kwargs,
            GenerationMode.SAMPLE,
            len(prompts),
            width,
        )
        logits_PV, experts = self._forward({"is_first_iteration": True})
        if experts is not None:
            # move them to the first column, as in `NetworkDecoder`
            starts_P = width - attention_PS.sum(1)
            columns_PS = torch.arange(width, device=device) + starts_P[:, None]
            experts = at_columns(experts, columns_PS.clamp(max=width - 1))
            experts = experts.repeat_interleave(group_size, 0)
        prompts_P = torch.arange(len(prompts), device=device)
        self.keep(prompts_P.repeat_interleave(group_size))
        return logits_PV.repeat_interleave(group_size, 0), experts

    def step(self, tokens_R: Tensor) -> DecodeOutput:
        """Feed a token per row, and return the next output."""
        self.tokens_RS = torch.cat([self.tokens_RS, tokens_R[:, None]], 1)
        return self._forward({"next_sequence_length": 1})

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, repeated if an index is repeated, and drop the others."""
        self.tokens_RS = self.tokens_RS.index_select(0, rows)
        for name, value in self.model_kwargs.items():
            self.model_kwargs[name] = rows_of(value, rows)

    def _forward(self, stage: dict[str, Any]) -> DecodeOutput:
        """Feed the tokens that were not fed before, and return the next output.

        `stage` are the arguments by which `generate` tells a prefill from a later token."""
        inputs = self.generation.prepare_inputs_for_generation(
            self.tokens_RS, **stage, **self.model_kwargs
        )
        with self.routing.recording():
            outputs = self.model(**inputs, return_dict=True)
            experts = self._recorded_experts(len(self.tokens_RS))
        self.model_kwargs = self.generation._update_model_kwargs_for_generation(
            outputs, self.model_kwargs
        )
        return outputs.logits[:, -1], experts


class UncachedDecoder(TransformersDecoder):
    """A decoder that passes whole rows through the model's own forward for every token.

    Rows are padded on the right, which cannot change the results of a causal model. A row that has
    ended is fed until it is dropped, but never beyond the model's last position."""

    def prefill(self, prompts: list[list[int]], group_size: int) -> DecodeOutput:
        """Feed the prompts, give each of them `group_size` rows, and return the first output."""
        tokens_PS, attention_PS = padded(prompts, "right", self.model.device, self.pad_id)
        self.tokens_RS = tokens_PS
        self.lengths_R = attention_PS.sum(1)
        self.filled = tokens_PS.shape[1]
        logits_PV, experts = self._forward()
        self.tokens_RS = tokens_PS.repeat_interleave(group_size, 0)
        self.lengths_R = self.lengths_R.repeat_interleave(group_size)
        if experts is not None:
            experts = experts.repeat_interleave(group_size, 0)
        return logits_PV.repeat_interleave(group_size, 0), experts

    def step(self, tokens_R: Tensor) -> DecodeOutput:
        """Feed a token per row, and return the next output."""
        if self.filled == self.tokens_RS.shape[1]:
            self.tokens_RS = F.pad(self.tokens_RS, (0, GROWTH_COLUMNS), value=self.pad_id)
        self.lengths_R = self.lengths_R + 1
        self.filled += 1
        if self.positions:
            self.lengths_R = self.lengths_R.clamp(max=self.positions)
            self.filled = min(self.filled, self.positions)
        rows = torch.arange(len(tokens_R), device=tokens_R.device)
        self.tokens_RS[rows, self.lengths_R - 1] = tokens_R
        logits_RV, experts = self._forward()
        if experts is not None:
            experts = at_columns(experts, self.lengths_R[:, None] - 1)
        return logits_RV, experts

    def keep(self, rows: Tensor) -> None:
        """Keep these rows and drop the others."""
        self.tokens_RS = self.tokens_RS.index_select(0, rows)
        self.lengths_R = self.lengths_R.index_select(0, rows)

    def _forward(self) -> DecodeOutput:
        """Feed whole rows, and return the last logits of each row and the experts of all tokens."""
        tokens_RS = self.tokens_RS[:, : self.filled]
        columns_S = torch.arange(self.filled, device=tokens_RS.device)
        attention_RS = columns_S < self.lengths_R[:, None]
        arguments = forward_arguments(self.model, attention_RS)
        with self.routing.recording():
            logits_RSV = self.model(input_ids=tokens_RS, use_cache=False, **arguments).logits
            experts = self._recorded_experts(len(tokens_RS))
        last_logits_R1V = at_columns(logits_RSV, self.lengths_R[:, None] - 1)
        return last_logits_R1V.squeeze(1), experts


def rows_of(value: Any, rows: Tensor) -> Any:
    """Return an argument of a model's forward for these rows only. A cache is changed in place."""
    if isinstance(value, Tensor):
        return value.index_select(0, rows)
    if isinstance(value, (list, tuple)):
        return type(value)(rows_of(item, rows) for item in value)
    if hasattr(value, "reorder_cache"):
        value.reorder_cache(rows)
    elif value is not None and not isinstance(value, (bool, int)):
        raise TypeError(f"the rows of a {type(value).__name__} cannot be chosen")
    return value
