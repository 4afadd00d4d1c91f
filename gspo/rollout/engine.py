"""What an engine is, and the in-process one: batched sampling with a key/value cache.

A response does not depend on what stands beside it in the batch: its random numbers are a function of (seed, problem,
sample, token position), prompts are padded on the left and masked, and each prompt is prefilled once for its group.

Shape suffixes: R live rows (responses still being sampled), V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gspo.policy.policy import Policy
from gspo.records import Problem, Response
from gspo.rollout.decode import Decoder, PlainDecoder
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
        with self.sampler.network.frozen() if self.sampler.network else nullcontext():
            self._decode(rows, group_size, sampling, seed, record_experts)

    def _decode(
        self, rows: list[Row], group_size: int, sampling: Sampling, seed: tuple[int | str, ...], record_experts: bool
    ) -> None:
        device, longest = self.sampler.device, max(row.limit for row in rows)
        stop_ids = torch.tensor(sorted(self.policy.stop_ids), device=device)
        limits_R = torch.tensor([row.limit for row in rows], device=device)
        noise = [uniforms(r.done + longest, *seed, r.problem.task, r.problem.index, r.sample)[r.done :] for r in rows]
        uniforms_RT = torch.from_numpy(np.stack(noise)).to(device)
        taken = Taken(rows, longest, record_experts and self.sampler.routing.layers > 0)
        decoder = Decoder(self.sampler) if self.sampler.network else PlainDecoder(self.sampler)
        logits_RV, experts = decoder.prefill([row.prefix_ids for row in rows[::group_size]], group_size)
        live_R = torch.arange(len(rows), device=device)  # which rows the cache holds, some of them finished
        running_R = torch.ones_like(live_R, dtype=torch.bool)
        for t in range(longest):
            tokens_R, logp_R = draw(logits_RV, uniforms_RT[live_R, t], sampling.temperature)
            taken.add(t, live_R, running_R, tokens_R, logp_R, experts)
            running_R &= ~torch.isin(tokens_R, stop_ids) & (t + 1 < limits_R[live_R])
            left = int(running_R.sum())
            if not left:
                break
            if left <= LIVE_SHARE * len(live_R):
                keep = running_R.nonzero().squeeze(-1)
                decoder.keep(keep)
                live_R, running_R, tokens_R = live_R[keep], running_R[keep], tokens_R[keep]
            logits_RV, experts = decoder.step(tokens_R)
        taken.hand_over()


class Taken:
    """What the rows of a call were given, as tensors until its end."""

    def __init__(self, rows: list[Row], longest: int, keep_experts: bool):
        self.rows, self.keep_experts = rows, keep_experts
        self.tokens_RT = torch.zeros(len(rows), longest, dtype=torch.int64)
        self.logp_RT = torch.zeros(len(rows), longest)
        self.lengths_R = torch.zeros(len(rows), dtype=torch.int64)
        self.prompt_experts: Tensor | None = None  # [R, prompt, L, K]
        self.experts_RTLK: Tensor | None = None  # of the passes that were fed the tokens

    def add(
        self, t: int, live_R: Tensor, running_R: Tensor, tokens_R: Tensor, logp_R: Tensor, experts: Tensor | None
    ) -> None:
        """The t-th token of the live rows; only the running ones grow. `experts` are those of the pass before it."""
        live_R = live_R.cpu()
        self.tokens_RT[live_R, t], self.logp_RT[live_R, t] = tokens_R.cpu(), logp_R.cpu()
        self.lengths_R[live_R] += running_R.cpu()
        if self.keep_experts:
            experts = experts.to("cpu", torch.int16)
            if t == 0:
                self.prompt_experts = experts
                self.experts_RTLK = experts.new_empty(*self.tokens_RT.shape, *experts.shape[2:])
            else:
                self.experts_RTLK[live_R, t - 1] = experts[:, 0]

    def hand_over(self) -> None:
        """Fill the rows."""
        for r, (row, length) in enumerate(zip(self.rows, self.lengths_R.tolist(), strict=True)):
            row.token_ids, row.logprobs = self.tokens_RT[r, :length].tolist(), self.logp_RT[r, :length].tolist()
            if self.keep_experts:
                prompt = self.prompt_experts[r, : len(row.prefix_ids)]
                row.experts = [prompt.numpy(), self.experts_RTLK[r, : length - 1].numpy()]


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
