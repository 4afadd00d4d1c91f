"""Decoding through a model's own forward, for the architectures that gspo.model.forward.network does not
know.

`CachedDecoder` keeps what transformers' own `generate` keeps from token to token: keys and values,
the states of recurrent layers, or both. The model says by itself which cache it needs, and the
cache how its rows are repeated and chosen. `UncachedDecoder` passes whole rows through the model
for every token, which is slow and always right.

`transformers_decoder` compares the two on a few tokens and returns the first unless it computes something
else.

Shape suffixes: P prompts, R live rows, S columns, L MoE layers, K experts per token, V vocabulary.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.generation.utils import GenerationMode

from gspo.model.forward.network import PROBE_TOLERANCE
from gspo.model.forward.padded_forward import (
    at_columns,
    first_line,
    forward_arguments,
    largest_difference,
    logits_of_row,
    padded,
    probe_rows,
)
from gspo.model.policy import Policy
from gspo.model.sharding.dtensors import architecture
from gspo.rollout.engines.decode import DecodeOutput, NetworkDecoder

PROBE_PROMPTS = (12, 7)  # tokens of the prompts that the decoders are compared on
PROBE_STEPS = 5  # tokens that each of them goes on with
GROWTH = 64  # columns by which the rows of `UncachedDecoder` grow


def transformers_decoder(policy: Policy) -> type[CachedDecoder] | type[UncachedDecoder]:
    """Return the decoder for a model that runs through its own forward, and say on the terminal if
    it is the slow one."""
    reason = disagreement(policy)
    if not reason:
        return CachedDecoder
    print(
        f"{architecture(policy.model)}: its cache is not used, because {reason}. Every token is computed from its "
        "whole row, which is slow for long responses: choose rollout=vllm if vLLM knows the model",
        file=sys.stderr,
    )
    return UncachedDecoder


@torch.no_grad()
def disagreement(policy: Policy) -> str:
    """Return in what way decoding with the model's cache differs from a forward pass over whole
    rows, "" if it does not.

    Two prompts of unequal length are each continued twice, and some rows are dropped on the way."""
    model = policy.model
    prompts = probe_rows(model, PROBE_PROMPTS)
    (further,) = probe_rows(model, (PROBE_STEPS,))
    group_size = 2
    problems = [i for i in range(len(prompts)) for _ in range(group_size)]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    try:
        decoder = CachedDecoder(policy)
        step = decoder.prefill(prompts, group_size)
        for t, token in enumerate(further):
            for row, problem in enumerate(problems):
                logits[problem].append(step[0][row])
            if t == 1:
                decoder.keep(torch.tensor([1, 2], device=model.device))
                problems = [problems[1], problems[2]]
            step = decoder.step(torch.full((len(problems),), token, device=model.device))
    except (
        Exception
    ) as error:  # a model that `generate` cannot drive raises exceptions of many types
        return f"it cannot be driven as `generate` drives others ({type(error).__name__}: {first_line(error)})"
    found, expected = [], []
    for prompt, own in zip(prompts, logits, strict=True):
        row = prompt + further[:-1]
        alone_SV = logits_of_row(model, row)[len(prompt) - 1 :]
        expected.append(
            alone_SV.repeat_interleave(torch.tensor([2, 2, 1, 1, 1], device=model.device), 0)
        )
        found.append(torch.stack(own))
    off = largest_difference(found, expected)
    if off <= PROBE_TOLERANCE[model.dtype]:
        return ""
    return f"its logits differ from those of a whole forward by {off:.2g} of the largest logit"


class TransformersDecoder:
    """What the two decoders through a model's own forward share."""

    live_share = NetworkDecoder.live_share

    def __init__(self, policy: Policy):
        self.model = policy.model
        self.routing = policy.routing
        self.pad_id = policy.pad_id


class CachedDecoder(TransformersDecoder):
    """Decodes with the model's own forward and the cache that `generate` would use. Prompts are
    padded on the left, and hooks record the routing."""

    def prefill(self, prompts: list[list[int]], group_size: int) -> DecodeOutput:
        """Feed the prompts, give each of them `group_size` rows, and return the first step's logits
        and experts.
        """
        device = self.model.device
        tokens_PS, attention_PS = padded(prompts, "left", device, self.pad_id)
        width = tokens_PS.shape[1]
        self.tokens_RS = tokens_PS
        # The arguments of the model's forward that `generate` hands on from token to token.
        self.kept: dict[str, Any] = {"use_cache": True} | forward_arguments(
            self.model, attention_PS, keep=1
        )
        self.model._prepare_cache_for_generation(
            transformers.GenerationConfig(), self.kept, GenerationMode.SAMPLE, len(prompts), width
        )
        logits_PV, experts = self._forward(is_first_iteration=True)
        if experts is not None:  # move them to the first column, where `NetworkDecoder` has them
            starts_P = width - attention_PS.sum(1)
            columns_PS = (torch.arange(width, device=device) + starts_P[:, None]).clamp(
                max=width - 1
            )
            experts = at_columns(experts, columns_PS).repeat_interleave(group_size, 0)
        self.keep(torch.arange(len(prompts), device=device).repeat_interleave(group_size))
        return logits_PV.repeat_interleave(group_size, 0), experts

    def step(self, tokens_R: Tensor) -> DecodeOutput:
        """Feed one token per row, and return the next step's logits and experts."""
        self.tokens_RS = torch.cat([self.tokens_RS, tokens_R[:, None]], 1)
        return self._forward(next_sequence_length=1)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, each as often as it is named, and drop the others."""
        self.tokens_RS = self.tokens_RS.index_select(0, rows)
        self.kept = {name: rows_of(value, rows) for name, value in self.kept.items()}

    def _forward(self, **which: bool | int) -> DecodeOutput:
        """Feed the tokens that were not fed before, and return the last logits of each row and the
        experts.
        """
        inputs = self.model.prepare_inputs_for_generation(self.tokens_RS, **which, **self.kept)
        with self.routing.recording():
            outputs = self.model(**inputs, return_dict=True)
            experts = self.routing.recorded(len(self.tokens_RS)) if self.routing.layers else None
        self.kept = self.model._update_model_kwargs_for_generation(outputs, self.kept)
        return outputs.logits[:, -1], experts


class UncachedDecoder(TransformersDecoder):
    """Decodes with the model's own forward over whole rows. Padding stands on the right, where it
    cannot change what a causal model computes."""

    def prefill(self, prompts: list[list[int]], group_size: int) -> DecodeOutput:
        """Feed the prompts, give each of them `group_size` rows, and return the first step's logits
        and experts.
        """
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
        """Feed one token per row, and return the next step's logits and experts."""
        if self.filled == self.tokens_RS.shape[1]:
            self.tokens_RS = F.pad(self.tokens_RS, (0, GROWTH), value=self.pad_id)
        self.filled += 1
        self.tokens_RS[torch.arange(len(tokens_R), device=tokens_R.device), self.lengths_R] = (
            tokens_R
        )
        self.lengths_R = self.lengths_R + 1
        logits_RV, experts = self._forward()
        if experts is not None:
            experts = at_columns(experts, self.lengths_R[:, None] - 1)
        return logits_RV, experts

    def keep(self, rows: Tensor) -> None:
        """Keep these rows and drop the others."""
        self.tokens_RS = self.tokens_RS.index_select(0, rows)
        self.lengths_R = self.lengths_R.index_select(0, rows)

    def _forward(self) -> DecodeOutput:
        """Feed whole rows to the model, and return the last logits of each row and the experts of
        all tokens.
        """
        tokens_RS = self.tokens_RS[:, : self.filled]
        attention_RS = torch.arange(self.filled, device=tokens_RS.device) < self.lengths_R[:, None]
        with self.routing.recording():
            logits_RSV = self.model(
                input_ids=tokens_RS,
                use_cache=False,
                **forward_arguments(self.model, attention_RS),
            ).logits
            experts = self.routing.recorded(len(tokens_RS)) if self.routing.layers else None
        return at_columns(logits_RSV, self.lengths_R[:, None] - 1).squeeze(1), experts


def rows_of(value: Any, rows: Tensor) -> Any:
    """Return an argument of a model's forward with these rows of the batch alone. A cache is
    changed in place.
    """
    if isinstance(value, Tensor):
        return value.index_select(0, rows)
    if isinstance(value, (list, tuple)):
        return type(value)(rows_of(item, rows) for item in value)
    if hasattr(value, "reorder_cache"):
        value.reorder_cache(rows)
    elif value is not None and not isinstance(value, (bool, int)):
        raise TypeError(f"the rows of a {type(value).__name__} cannot be chosen")
    return value
