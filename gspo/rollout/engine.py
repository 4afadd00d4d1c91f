"""What an engine is, and the in-process one: batched sampling with a key/value cache.

A response does not depend on what stands beside it in the batch: its random numbers are a function of (seed, problem,
sample, token position), prompts are padded on the left and masked, and each prompt is prefilled once for its group.

Shape suffixes: R live rows (responses still being sampled), V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gspo.core.seeding import uniforms
from gspo.core.types import Problem, Response
from gspo.model.policy import Policy
from gspo.rollout.decode import Decoder, PlainDecoder
from gspo.rollout.requests import Row, Sampling, further_rows, new_rows, to_response

LIVE_SHARE = 0.9  # rows are dropped from the cache once fewer than this share of them are unfinished


def grouped(responses: list[Response], group_size: int) -> list[list[Response]]:
    return [responses[i : i + group_size] for i in range(0, len(responses), group_size)]


class Engine(ABC):
    """Samples responses. `policy` is what it samples from, in the trainer's precision: log-probs and experts of the
    responses can be recomputed with it; its tokenizer, prompt format and stop tokens are the engine's too."""

    policy: Policy
    batch_rows: int  # at most this many responses at once (one group at least)
    shares_weights: bool  # it computes with the policy's own tensors: there is nothing to load

    @property
    def positions(self) -> int | None:
        """Tokens of prompt and response together that it can hold; None: no bound."""
        return self.policy.positions

    def fits(self, problem: Problem, new_tokens: int) -> bool:
        """Whether a problem's prompt leaves room for so many response tokens."""
        return self.room([problem], new_tokens) == new_tokens

    def room(self, problems: list[Problem], new_tokens: int) -> int:
        """How many response tokens, at most so many, all of these problems leave room for."""
        if self.positions is None:
            return new_tokens
        longest = max(len(self.policy.encode_prompt(problem.prompt)) for problem in problems)
        return min(new_tokens, self.positions - longest)

    def generate(
        self,
        problems: list[Problem],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        policy_step: int = 0,
        record_experts: bool = False,
        finished: Callable[[list[Response]], None] | None = None,
    ) -> list[list[Response]]:
        """`group_size` responses to each problem. `seed` is the position (run seed, purpose) of the random numbers.

        With `record_experts` each response holds the experts that the engine's own forward passes chose: what a replay
        of its routes, and a comparison with the trainer's, start from. `finished` is handed responses that have ended
        while others are still being sampled, each of them once, from time to time and in no order.

        Raises ValueError for a prompt that leaves no room for the response: who chooses problems asks `fits` before.
        """
        at_once = max(1, self.batch_rows // group_size)
        responses = []
        for start in range(0, len(problems), at_once):
            rows = new_rows(self.policy, problems[start : start + at_once], group_size, sampling)
            self._check_room(rows)
            made: dict[int, Response] = {}
            ended = partial(self._respond, rows, made, sampling, policy_step, finished)
            self._sample(rows, group_size, sampling, seed, record_experts, ended)
            responses += [made[i] for i in range(len(rows))]
        return grouped(responses, group_size)

    def _check_room(self, rows: list[Row]) -> None:
        for row in rows if self.positions is not None else ():
            if len(row.prefix_ids) + row.limit > self.positions:
                raise ValueError(
                    f"problem {row.problem.index} of task {row.problem.task!r}: its prompt of {len(row.prefix_ids)} "
                    f"tokens and up to {row.limit} of the response exceed the {self.positions} positions of model and "
                    "engine; leave it out, or lower max_new_tokens"
                )

    def _respond(
        self,
        rows: list[Row],
        made: dict[int, Response],
        sampling: Sampling,
        policy_step: int,
        finished: Callable[[list[Response]], None] | None,
        which: list[int],
    ) -> None:
        """Make the responses of rows that have ended, and hand them over."""
        made |= {i: to_response(self.policy, rows[i], sampling, policy_step, None) for i in which}
        if finished and which:
            finished([made[i] for i in which])

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
            self._sample(rows, 1, sampling, seed, record_experts, lambda which: None)
            pairs = zip(rows, chunk, strict=True)
            extended += [to_response(self.policy, row, sampling, policy_step, before) for row, before in pairs]
        return extended

    @abstractmethod
    def _sample(
        self,
        rows: list[Row],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        record_experts: bool,
        ended: Callable[[list[int]], None],
    ) -> None:
        """Fill rows with tokens, log-probs and, if asked for, experts; every `group_size` neighbours have the same
        prefix. `ended` is told, once of every row, which are filled."""

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
        self,
        rows: list[Row],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        record_experts: bool,
        ended: Callable[[list[int]], None],
    ) -> None:
        """Prefill each prompt once, then decode all rows together, dropping the finished ones from time to time."""
        with self.sampler.network.frozen(copy_experts=True) if self.sampler.network else nullcontext():
            taken = Taken(rows, record_experts and self.sampler.routing.layers > 0, self.sampler.device)
            for running_R in self._decode(taken, group_size, sampling, seed):
                ended(taken.hand_over(running_R))

    def _decode(
        self, taken: Taken, group_size: int, sampling: Sampling, seed: tuple[int | str, ...]
    ) -> Iterator[Tensor]:
        """Sample all rows; from time to time, and at the end, the numbers of those that are still running."""
        rows = taken.rows
        device, longest = self.sampler.device, max(row.limit for row in rows)
        stop_ids = torch.tensor(sorted(self.policy.stop_ids), device=device)
        limits_R = torch.tensor([row.limit for row in rows], device=device)
        noise = [uniforms(r.done + longest, *seed, r.problem.task, r.problem.index, r.sample)[r.done :] for r in rows]
        uniforms_RT = torch.from_numpy(np.stack(noise)).to(device)
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
                yield live_R
            logits_RV, experts = decoder.step(tokens_R)
        yield live_R[:0]


class Taken:
    """What the rows of a call were given, as tensors until its end."""

    def __init__(self, rows: list[Row], keep_experts: bool, device: torch.device):
        self.rows, self.keep_experts = rows, keep_experts
        longest = max(row.limit for row in rows)
        self.handed_over = torch.zeros(len(rows), dtype=torch.bool)
        self.tokens_RT = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
        self.logp_RT = torch.zeros(len(rows), longest, device=device)
        self.lengths_R = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self.prompt_experts: Tensor | None = None  # [R, prompt, L, K]
        self.experts_RTLK: Tensor | None = None  # of the passes that were fed the tokens

    def add(
        self, t: int, live_R: Tensor, running_R: Tensor, tokens_R: Tensor, logp_R: Tensor, experts: Tensor | None
    ) -> None:
        """The t-th token of the live rows; only the running ones grow. `experts` are those of the pass before it."""
        self.tokens_RT[live_R, t], self.logp_RT[live_R, t] = tokens_R, logp_R
        self.lengths_R[live_R] += running_R
        if self.keep_experts:
            experts = experts.to(torch.int16)
            if t == 0:
                self.prompt_experts = experts
                self.experts_RTLK = experts.new_empty(*self.tokens_RT.shape, *experts.shape[2:])
            else:
                self.experts_RTLK[live_R, t - 1] = experts[:, 0]

    def hand_over(self, running_R: Tensor) -> list[int]:
        """Fill the rows that have ended and were not filled before; which these are."""
        ended_R = ~self.handed_over
        ended_R[running_R.cpu()] = False
        self.handed_over |= ended_R
        which = ended_R.nonzero().squeeze(-1)
        here = which.to(self.tokens_RT.device)
        tokens, logp = self.tokens_RT[here].tolist(), self.logp_RT[here].tolist()
        lengths, which = self.lengths_R[here].tolist(), which.tolist()
        if self.keep_experts:
            prompts, fed = self.prompt_experts[here].cpu().numpy(), self.experts_RTLK[here].cpu().numpy()
        for i, (r, length) in enumerate(zip(which, lengths, strict=True)):
            row = self.rows[r]
            row.token_ids, row.logprobs = tokens[i][:length], logp[i][:length]
            if self.keep_experts:
                row.experts = [prompts[i, : len(row.prefix_ids)], fed[i, : length - 1]]
        return which


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
