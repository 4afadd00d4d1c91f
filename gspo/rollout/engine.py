"""What an engine is, and the in-process one: batched sampling with a key/value cache.

A response does not depend on what stands beside it in the batch: its random numbers are a function of (seed, problem,
sample, token position), prompts are padded on the left and masked, and each prompt is prefilled once for its group.

Shape suffixes: R live rows (responses still being sampled), V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from gspo.policy.policy import Policy
from gspo.records import Problem, Response
from gspo.seeding import uniforms

LIVE_SHARE = 0.8  # rows are dropped from the cache once fewer than this share of them are unfinished


@dataclass
class Sampling:
    """How responses are drawn. Temperature 0 is greedy; log-probs are those at the sampling temperature (greedy: 1)."""

    temperature: float = 1.0
    max_new_tokens: int = 80
    budget: int = 0  # at most so many tokens in this call, the rest later; 0: to the end

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or positive")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")

    def limit(self, done: int = 0) -> int:
        """How many tokens a response that has `done` may get in this call."""
        return min(self.budget or self.max_new_tokens, self.max_new_tokens - done)


@dataclass
class Row:
    """One response under way: what it is conditioned on, and the tokens of this call."""

    problem: Problem
    sample: int
    prefix_ids: list[int]  # the prompt, and the tokens that earlier calls sampled
    done: int  # how many those are
    limit: int  # tokens that this call may add
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)  # [positions fed, L, K] each


def new_rows(policy: Policy, problems: list[Problem], group_size: int, sampling: Sampling) -> list[Row]:
    """Rows for fresh responses, group by group. Raises ValueError for a problem without prompt."""
    rows = []
    for problem in problems:
        prompt_ids = policy.encode_prompt(problem.prompt)
        if not prompt_ids:
            raise ValueError(f"problem {problem.index} of task {problem.task!r} has an empty prompt")
        rows += [Row(problem, sample, prompt_ids, 0, sampling.limit()) for sample in range(group_size)]
    return rows


def further_rows(responses: list[Response], sampling: Sampling) -> list[Row]:
    """Rows that go on with responses. Raises ValueError for one that has ended."""
    for r in responses:
        if r.finish_reason != "budget":
            raise ValueError(f"response {r.sample} to problem {r.problem.index} has ended ({r.finish_reason})")
    return [
        Row(r.problem, r.sample, r.prompt_ids + r.token_ids, len(r.token_ids), sampling.limit(len(r.token_ids)))
        for r in responses
    ]


def to_response(policy: Policy, row: Row, sampling: Sampling, policy_step: int, before: Response | None) -> Response:
    """What a row gave, joined to the response that it went on with. Each position keeps the experts of the pass that
    predicted its next token."""
    token_ids = (before.token_ids if before else []) + row.token_ids
    logprobs = np.array(row.logprobs, dtype=np.float32)
    experts = np.concatenate(row.experts) if row.experts else None
    segments = []
    if before:
        logprobs = np.concatenate([before.logprobs, logprobs])
        segments = before.segments or [(before.policy_step, len(before.token_ids))]
        segments = [*segments, (policy_step, len(row.token_ids))]
        if experts is not None:
            if before.experts is None:
                raise ValueError(f"response {row.sample} to problem {row.problem.index} began without record_experts")
            experts = np.concatenate([before.experts, experts[len(before.experts) :]])
    ended = "stop" if row.token_ids[-1] in policy.stop_ids else "budget"
    if ended != "stop" and len(token_ids) >= sampling.max_new_tokens:
        ended = "length"
    return Response(
        problem=row.problem,
        sample=row.sample,
        prompt_ids=before.prompt_ids if before else row.prefix_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=ended,
        text=policy.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        policy_step=before.policy_step if before else policy_step,
        experts=experts,
        segments=segments,
        old_logprobs=before.old_logprobs if before else None,
        old_experts=before.old_experts if before else None,
    )


def grouped(responses: list[Response], group_size: int) -> list[list[Response]]:
    return [responses[i : i + group_size] for i in range(0, len(responses), group_size)]


class Engine(ABC):
    """Samples responses. `policy` is what it samples from, in the trainer's precision: log-probs and experts of the
    responses can be recomputed with it; its tokenizer, prompt format and stop tokens are the engine's too."""

    policy: Policy
    batch_rows: int  # at most this many responses at once (one group at least)
    shares_weights: bool  # it computes with the policy's own tensors: there is nothing to load

    def generate(
        self,
        problems: list[Problem],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        policy_step: int = 0,
        record_experts: bool = False,
    ) -> list[list[Response]]:
        """`group_size` responses to each problem. `seed` is the position (run seed, purpose) of the random numbers.

        With `record_experts` each response holds the experts that the engine's own forward passes chose: what a replay
        of its routes, and a comparison with the trainer's, start from.
        """
        at_once = max(1, self.batch_rows // group_size)
        responses = []
        for start in range(0, len(problems), at_once):
            rows = new_rows(self.policy, problems[start : start + at_once], group_size, sampling)
            self._sample(rows, group_size, sampling, seed, record_experts)
            responses += [to_response(self.policy, row, sampling, policy_step, None) for row in rows]
        return grouped(responses, group_size)

    def extend(
        self,
        responses: list[Response],
        sampling: Sampling,
        seed: tuple[int | str, ...],
        policy_step: int = 0,
        record_experts: bool = False,
    ) -> list[Response]:
        """The same responses with further tokens under the present weights; what they had stays as it was."""
        extended = []
        for chunk in grouped(responses, self.batch_rows):
            rows = further_rows(chunk, sampling)
            self._sample(rows, 1, sampling, seed, record_experts)
            pairs = zip(rows, chunk, strict=True)
            extended += [to_response(self.policy, row, sampling, policy_step, before) for row, before in pairs]
        return extended

    @abstractmethod
    def _sample(
        self, rows: list[Row], group_size: int, sampling: Sampling, seed: tuple[int | str, ...], record_experts: bool
    ) -> None:
        """Fill rows with tokens, log-probs and, if asked for, experts; every `group_size` neighbours have the same
        prefix."""

    @abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sample from these weights from now on (names and shapes of the policy's model)."""

    def rest(self) -> None:  # noqa: B027 (nothing to do is the usual case)
        """No responses are wanted before the next weights: the trainer may have the memory."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the engine holds beside the policy. May be called twice."""


class LocalEngine(Engine):
    """Samples in the trainer's process.

    In the trainer's precision it samples with the policy's own tensors; in another one with a copy, which computes as
    an engine of that precision would: weights and activations rounded, the logits' softmax in float32.
    """

    def __init__(self, policy: Policy, batch_rows: int = 512, dtype: torch.dtype = torch.float32):
        self.policy = policy
        self.batch_rows = batch_rows
        self.shares_weights = dtype == policy.model.dtype
        self.sampler = policy if self.shares_weights else policy.copy(dtype)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if not self.shares_weights:
            self.sampler.load_tensors(named_tensors)

    def close(self) -> None:
        """Nothing: the tensors go with the object."""

    @torch.no_grad()
    def _sample(
        self, rows: list[Row], group_size: int, sampling: Sampling, seed: tuple[int | str, ...], record_experts: bool
    ) -> None:
        """Prefill each prompt once, then decode all rows together, dropping the finished ones from time to time."""
        model, routing, device = self.sampler.model, self.sampler.routing, self.sampler.device
        prompts = [row.prefix_ids for row in rows[::group_size]]
        longest = max(row.limit for row in rows)
        tokens, attention = _left_padded(prompts, self.policy.tokenizer.pad_token_id, device)
        live = list(range(len(rows)))  # which rows the cache holds; finished ones keep being fed until they are dropped
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        noise = [uniforms(r.done + longest, *seed, r.problem.task, r.problem.index, r.sample)[r.done :] for r in rows]
        uniforms_RT = torch.from_numpy(np.stack(noise)).to(device)
        for t in range(longest):
            with routing.recording():
                logits_RV = model(
                    input_ids=tokens,
                    attention_mask=attention,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
                experts = routing.recorded(len(tokens)) if record_experts and routing.layers else None
            if t == 0:
                cache.batch_repeat_interleave(group_size)
                attention = attention.repeat_interleave(group_size, 0)
                logits_RV = logits_RV.repeat_interleave(group_size, 0)
                experts = None if experts is None else experts.repeat_interleave(group_size, 0)
            tokens_R, logp_R = draw(logits_RV, uniforms_RT[:, t], sampling.temperature)
            self._append(rows, live, tokens_R, logp_R, experts, attention if t == 0 else None)
            unfinished = [i for i, r in enumerate(live) if not self._finished(rows[r])]
            if not unfinished:
                break
            if len(unfinished) <= LIVE_SHARE * len(live):
                keep = torch.tensor(unfinished, device=device)
                cache.batch_select_indices(keep)
                live, uniforms_RT = [live[i] for i in unfinished], uniforms_RT[keep]
                tokens_R, attention = tokens_R[keep], attention[keep]
            attention = torch.cat([attention, attention.new_ones(len(live), 1)], dim=1)
            tokens, positions = tokens_R[:, None], attention.sum(-1, keepdim=True) - 1

    def _append(
        self,
        rows: list[Row],
        live: list[int],
        tokens_R: Tensor,
        logp_R: Tensor,
        experts: Tensor | None,
        prompt_attention: Tensor | None,
    ) -> None:
        """Add one token to every unfinished row, and the experts of the positions that were just fed."""
        experts = None if experts is None else experts.cpu().numpy()
        for i, (r, token, logp) in enumerate(zip(live, tokens_R.tolist(), logp_R.tolist(), strict=True)):
            row = rows[r]
            if self._finished(row):
                continue
            row.token_ids.append(token)
            row.logprobs.append(logp)
            if experts is not None:
                fed = slice(None) if prompt_attention is None else prompt_attention[i].bool().cpu().numpy()
                row.experts.append(experts[i][fed])

    def _finished(self, row: Row) -> bool:
        tokens = row.token_ids
        return len(tokens) >= row.limit or bool(tokens and tokens[-1] in self.policy.stop_ids)


def draw(logits_RV: Tensor, uniform_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob: greedy at temperature 0, else by inverting the cumulative distribution.

    The token is the first whose cumulative probability exceeds the row's uniform number in [0, 1); in float64, so that
    a token's chance is its probability also where the vocabulary is large.
    """
    logprobs_RV = (logits_RV.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        tokens_R = logprobs_RV.argmax(-1)
    else:
        cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
        threshold_R1 = (uniform_R * cumulative_RV[:, -1]).unsqueeze(-1)
        tokens_R = torch.searchsorted(cumulative_RV, threshold_R1, right=True).squeeze(-1)
        tokens_R = tokens_R.clamp(max=logits_RV.shape[-1] - 1)
    return tokens_R, logprobs_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1)


def _left_padded(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts], device=device)
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return tokens, attention
