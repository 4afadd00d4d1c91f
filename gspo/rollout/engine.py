"""The interface of every engine, and the engine that samples in the trainer's process with a key/value cache.

A response does not depend on which other responses are in the batch: its random numbers are a function of (seed,
problem, sample, token position), prompts are padded on the left and masked, and each prompt is prefilled once for its
group.

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

from gspo.core.ranks import Ranks
from gspo.core.seeding import uniforms
from gspo.core.types import Problem, Response
from gspo.model.policy import Policy
from gspo.rollout.decode import Decoder, PlainDecoder
from gspo.rollout.quantization import quantize
from gspo.rollout.requests import Row, Sampling, further_rows, new_rows, to_response

LIVE_SHARE = 0.9  # finished rows are dropped from the cache once at most this share of its rows is unfinished


def grouped(responses: list[Response], group_size: int) -> list[list[Response]]:
    """Cut a list of responses into groups of `group_size`."""
    return [responses[i : i + group_size] for i in range(0, len(responses), group_size)]


class Engine(ABC):
    """Samples responses to problems.

    `policy` is what the engine samples from, in the trainer's precision. The trainer can compute log-probs and experts
    of the responses again with it. Its tokenizer, prompt format and stop tokens are the engine's too.
    """

    policy: Policy
    batch_rows: int  # the largest number of responses sampled at once, but at least one group
    shares_weights: bool  # whether the engine computes with the policy's own tensors, so that there is nothing to load
    ranks = Ranks()  # the processes whose engines share the problems that are to be sampled

    @property
    def positions(self) -> int | None:
        """How many tokens of prompt and response together the engine can hold; None for no bound."""
        return self.policy.positions

    def fits(self, problem: Problem, new_tokens: int) -> bool:
        """Return whether a problem's prompt leaves room for `new_tokens` response tokens."""
        return self.room([problem], new_tokens) == new_tokens

    def room(self, problems: list[Problem], new_tokens: int) -> int:
        """Return how many response tokens, at most `new_tokens`, every one of the problems leaves room for."""
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
        *,
        record_experts: bool = False,
        finished: Callable[[list[Response]], None] | None = None,
    ) -> list[list[Response]]:
        """Sample `group_size` responses to each problem, and return them group by group.

        `seed` is the position of the random numbers, such as (run seed, purpose). With `record_experts` each response
        holds the experts that the engine's own forward passes chose, which Routing Replay R3 and the comparison with
        the trainer's routing need. `finished` is called from time to time with responses that have ended while others
        are still being sampled: with each of them once, in no particular order.

        Raises ValueError for a prompt that leaves no room for the response; callers ask `fits` first.
        """
        at_once = max(1, self.batch_rows // group_size)
        responses = []
        for start in range(0, self._most(len(problems)), at_once):
            rows = new_rows(self.policy, problems[start : start + at_once], group_size, sampling)
            self._check_room(rows)
            made: dict[int, Response] = {}
            ended = partial(self._respond, rows, made, sampling, policy_step, finished)
            self._sample(rows, group_size, sampling, seed, record_experts, ended)
            responses += [made[i] for i in range(len(rows))]
        return grouped(responses, group_size)

    def _most(self, count: int) -> int:
        """Return the largest count of all ranks where they must sample as often as each other, else this rank's."""
        return count

    def _check_room(self, rows: list[Row]) -> None:
        """Raise ValueError for a row whose prompt and response together exceed the engine's positions."""
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
        """Turn the rows numbered `which`, which have ended, into responses, and call `finished` with them."""
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
        """Continue unfinished responses under the present weights; the tokens that they have stay as they are."""
        extended = []
        for start in range(0, self._most(len(responses)), self.batch_rows):
            chunk = responses[start : start + self.batch_rows]
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
        """Fill rows with tokens, log-probs and, with `record_experts`, experts. Each block of `group_size` rows has the
        same prefix. Calls `ended` with the numbers of the rows that are filled, once for every row."""

    @abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sample from these weights from now on. Names and shapes are those of the policy's model."""

    def rest(self) -> None:  # noqa: B027 (nothing to do is the usual case)
        """Give memory back to the trainer: no responses are wanted before the next weights."""

    @abstractmethod
    def close(self) -> None:
        """Free what the engine holds beside the policy. May be called twice."""


class LocalEngine(Engine):
    """Samples in the trainer's process.

    With `dtype` equal to the policy's it samples with the policy's own tensors, or with a copy where those are spread
    over ranks. With another `dtype` it samples with a copy that computes as an engine of that precision would: weights
    and activations are rounded, and the softmax of the logits is taken in float32. With a `quantization` the weights of
    that copy are rounded further.
    """

    def __init__(
        self,
        policy: Policy,
        batch_rows: int = 512,
        dtype: torch.dtype = torch.float32,
        quantization: str = "none",
    ):
        self.policy = policy
        self.batch_rows = batch_rows
        self.quantization = quantization
        self.shares_weights = dtype == policy.model.dtype and quantization == "none" and not policy.shards
        self.sampler = policy if self.shares_weights else policy.copy(dtype)
        self._quantize()

    def _quantize(self) -> None:
        if self.quantization != "none":
            quantize(self.sampler, self.quantization)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights into the engine's own tensors, if it has any."""
        if not self.shares_weights:
            self.sampler.load_tensors(named_tensors)
            self._quantize()

    def close(self) -> None:
        """Do nothing: the tensors are freed with the object."""

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
        """Prefill each prompt once, then decode all rows together, and drop the finished ones from time to time."""
        with self.sampler.network.frozen(copy_experts=True) if self.sampler.network else nullcontext():
            sampled = SampledTokens(rows, record_experts and self.sampler.routing.layers > 0, self.sampler.device)
            for running_R in self._decode(sampled, group_size, sampling, seed):
                ended(sampled.fill_ended_rows(running_R))

    def _decode(
        self, sampled: SampledTokens, group_size: int, sampling: Sampling, seed: tuple[int | str, ...]
    ) -> Iterator[Tensor]:
        """Sample all rows. Yields, from time to time and at the end, the numbers of the rows that are unfinished."""
        rows = sampled.rows
        device, longest = self.sampler.device, max(row.limit for row in rows)
        stop_ids = torch.tensor(sorted(self.policy.stop_ids), device=device)
        limits_R = torch.tensor([row.limit for row in rows], device=device)
        noise = [uniforms(r.done + longest, *seed, r.problem.task, r.problem.index, r.sample)[r.done :] for r in rows]
        uniforms_RT = torch.from_numpy(np.stack(noise)).to(device)
        decoder = Decoder(self.sampler) if self.sampler.network else PlainDecoder(self.sampler)
        logits_RV, experts = decoder.prefill([row.prefix_ids for row in rows[::group_size]], group_size)
        live_R = torch.arange(len(rows), device=device)  # the rows that the cache holds; some of them are finished
        running_R = torch.ones_like(live_R, dtype=torch.bool)
        for t in range(longest):
            tokens_R, logp_R = draw(logits_RV, uniforms_RT[live_R, t], sampling.temperature)
            sampled.add(t, live_R, running_R, tokens_R, logp_R, experts)
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


class SampledTokens:
    """The tokens, log-probs and experts that were sampled for the rows of one call, kept as tensors until rows end."""

    def __init__(self, rows: list[Row], keep_experts: bool, device: torch.device):
        self.rows, self.keep_experts = rows, keep_experts
        longest = max(row.limit for row in rows)
        self.filled_R = torch.zeros(len(rows), dtype=torch.bool)  # rows that have got their tokens as lists
        self.tokens_RT = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
        self.logp_RT = torch.zeros(len(rows), longest, device=device)
        self.lengths_R = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self.prompt_experts: Tensor | None = None  # [R, prompt, L, K]
        self.experts_RTLK: Tensor | None = None  # at t: the experts of the pass that was fed the t-th token

    def add(
        self, t: int, live_R: Tensor, running_R: Tensor, tokens_R: Tensor, logp_R: Tensor, experts: Tensor | None
    ) -> None:
        """Store the t-th token of the live rows; only unfinished rows become longer. `experts` are those of the pass
        that predicted the token."""
        self.tokens_RT[live_R, t], self.logp_RT[live_R, t] = tokens_R, logp_R
        self.lengths_R[live_R] += running_R
        if self.keep_experts:
            experts = experts.to(torch.int16)
            if t == 0:
                self.prompt_experts = experts
                self.experts_RTLK = experts.new_empty(*self.tokens_RT.shape, *experts.shape[2:])
            else:
                self.experts_RTLK[live_R, t - 1] = experts[:, 0]

    def fill_ended_rows(self, running_R: Tensor) -> list[int]:
        """Fill the rows that have ended and were not filled before, and return their numbers. `running_R` holds the
        numbers of those that have not ended."""
        ended_R = ~self.filled_R
        ended_R[running_R.cpu()] = False
        self.filled_R |= ended_R
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
    """Draw one token per row: the likeliest at temperature 0, else by inverting the cumulative distribution.

    Returns the tokens [R] and their log-probs [R]. A drawn token is the first whose cumulative probability exceeds the
    row's uniform number in [0, 1). The sum runs in float64, so that rounding does not change the chances where the
    vocabulary is large.
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
