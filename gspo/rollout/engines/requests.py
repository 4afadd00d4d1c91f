"""Requests to an engine, and the rows into which it turns them: one row per response.

Shape suffixes: L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from gspo.data.kept_tokens import KeptTokens
from gspo.data.problems import Problem
from gspo.data.samples import Response
from gspo.io.errors import SettingError
from gspo.rollout.engines.stop_strings import StopStringDetector, check_stop
from gspo.rollout.engines.truncation import Truncation

if TYPE_CHECKING:
    from gspo.model.policy import Policy

# Identifies a stream of random numbers, such as (run seed, "rollout"). It takes the place of a
# generator whose state would have to be saved.
RandomKey = tuple[int | str, ...]


@dataclass
class Sampling(Truncation):
    """The sampling parameters of responses: temperature, lengths and stop strings.

    Temperature 0 means greedy. Log-probs are those at the sampling temperature, or at temperature 1
    for greedy responses. They are of the full distribution, also if truncation
    (gspo.rollout.engines.truncation) excludes tokens from the draw. With `keep_mask` they are of
    the softmax over the tokens that the truncation keeps, and every response holds these tokens
    (gspo.data.kept_tokens).
    """

    temperature: float = 1.0
    max_new_tokens: int = 80
    # the largest number of tokens sampled in one call, the rest in later calls; 0: no such limit
    budget: int = 0
    stop: tuple[str, ...] = ()  # strings that end a response: gspo.rollout.engines.stop_strings
    keep_mask: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not self.temperature >= 0:
            raise SettingError("temperature", self.temperature, "must be 0 (greedy) or positive")
        self.refuse_greedy(self.temperature)
        check_stop(self.stop, "stop")
        if self.max_new_tokens < 1:
            raise SettingError("max_new_tokens", self.max_new_tokens, "must be at least 1")

    @property
    def keeps_mask(self) -> bool:
        """Whether responses hold the kept tokens. Without rules all tokens are kept."""
        return self.keep_mask and bool(self.rules)

    def limit(self, done: int = 0) -> int:
        """Return how many tokens this call may add to a response that has `done` tokens."""
        return min(self.budget or self.max_new_tokens, self.max_new_tokens - done)


MAX_SHOWN_CHARS = 100  # of a prompt in a message


@dataclass(frozen=True)
class SamplingRequest:
    """A request to an engine: `group_size` responses to each problem.

    For example, SamplingRequest(problems, 8, Sampling(1.0, 80), (1, "rollout")) requests groups of
    eight responses of up to 80 tokens. The engine appends task, problem, sample and token position
    to the random key. Equal keys give equal responses, whatever else is in the batch.
    """

    problems: Sequence[Problem]
    group_size: int
    sampling: Sampling
    random_key: RandomKey
    # the step whose weights the engine has; every response records it
    policy_step: int = 0
    # whether each response holds the experts that the engine's own forward passes chose. Routing
    # Replay R3 and the comparison with the trainer's routing need them.
    record_experts: bool = False

    def with_problems(self, problems: Sequence[Problem]) -> SamplingRequest:
        """Return the same request for other problems."""
        return replace(self, problems=problems)


@dataclass
class Row:
    """A response that is being sampled: its prefix, and the tokens that this call has added."""

    problem: Problem
    sample: int
    prefix_ids: list[int]  # the prompt, then the tokens that earlier calls sampled
    done: int  # the number of the response's tokens before this call
    limit: int  # the number of tokens that this call may add
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # pieces [positions fed, L, K], to be concatenated
    experts: list[np.ndarray] = field(default_factory=list)
    kept: KeptTokens | None = None  # of the tokens that this call has added
    episode_index: int = 0  # Episode.index: its episode in the chunk
    rendered: str = ""  # the prompt of a new response as the policy sees it
    # whether this call samples a turn of its own: then a stop string lies within the turn
    begins_turn: bool = False

    def stop_detector(self, policy: Policy, sampling: Sampling) -> StopStringDetector:
        """Return a detector of stop strings that has read the tokens of earlier calls."""
        earlier_tokens = 0 if self.begins_turn else self.done
        earlier_ids = self.prefix_ids[len(self.prefix_ids) - earlier_tokens :]
        return StopStringDetector(policy.tokenizer, policy.textless_ids, sampling.stop, earlier_ids)

    def ends_turn(self, policy: Policy, sampling: Sampling) -> bool:
        """Return whether the last token ends the response, or the policy's turn.

        An end-of-sequence token does, and so does a token that completes a stop string."""
        *earlier_ids, last_id = self.token_ids
        if last_id in policy.stop_ids:
            return True
        if not sampling.stop:
            return False
        detector = self.stop_detector(policy, sampling)
        detector.read(earlier_ids)
        return detector.completes(last_id)

    def cut_at_stop(self, policy: Policy, sampling: Sampling) -> None:
        """Remove the tokens after the token that completes the first stop string."""
        detector = self.stop_detector(policy, sampling)
        for count, token in enumerate(self.token_ids, start=1):
            if detector.completes(token):
                self.token_ids = self.token_ids[:count]
                self.logprobs = self.logprobs[:count]
                if self.kept is not None:
                    self.kept = self.kept.first(count)
                return


def new_rows(policy: Policy, request: SamplingRequest) -> list[Row]:
    """Return the rows of a request, group by group.

    Raises SettingError for a problem whose prompt cannot be written, or is empty."""
    rows = []
    for problem in request.problems:
        fault = ""
        try:
            prompt_ids = policy.encode_prompt(problem.prompt)
        except ValueError as error:
            fault = str(error)
        else:
            if not prompt_ids:
                fault = "an empty prompt: no token of this tokenizer stands for its text"
        if fault:
            shown = repr(problem.prompt[:MAX_SHOWN_CHARS])
            raise SettingError(
                "task",
                problem.task,
                f"problem {problem.index} ({shown}): {fault}",
                remedy="leave it out",
            )
        rendered = policy.rendered(prompt_ids)
        limit = request.sampling.limit()
        rows += [
            Row(problem, sample, prompt_ids, 0, limit, rendered=rendered)
            for sample in range(request.group_size)
        ]
    return rows


def further_rows(responses: Sequence[Response], sampling: Sampling) -> list[Row]:
    """Return rows that continue responses. Raises ValueError for a response that has ended."""
    rows = []
    for r in responses:
        if r.finish_reason != "budget":
            raise ValueError(
                f"response {r.sample} to problem {r.problem.index} has ended ({r.finish_reason})"
            )
        done = len(r.token_ids)
        prefix_ids = r.prompt_ids + r.token_ids
        rows.append(Row(r.problem, r.sample, prefix_ids, done, sampling.limit(done)))
    return rows


def to_response(
    policy: Policy, row: Row, request: SamplingRequest, earlier: Response | None
) -> Response:
    """Return a row as a response. `earlier` is the response that it continues, None for a new one.

    Each position keeps the experts of the pass that predicted its next token."""
    token_ids = row.token_ids
    logprobs = np.array(row.logprobs, dtype=np.float32)
    experts = np.concatenate(row.experts) if row.experts else None
    kept = row.kept
    segments = []
    if earlier:
        token_ids = earlier.token_ids + token_ids
        logprobs = np.concatenate([earlier.logprobs, logprobs])
        segments = list(earlier.segments) or [(earlier.policy_step, len(earlier.token_ids))]
        last_step, last_tokens = segments[-1]
        if last_step == request.policy_step:  # the same policy goes on
            segments[-1] = (last_step, last_tokens + len(row.token_ids))
        else:
            segments.append((request.policy_step, len(row.token_ids)))
        if kept is not None:
            if earlier.kept is None:
                raise ValueError(
                    f"response {row.sample} to problem {row.problem.index} began without keep_mask"
                )
            kept = earlier.kept.followed_by(kept)
        if experts is not None:
            if earlier.experts is None:
                raise ValueError(
                    f"response {row.sample} to problem {row.problem.index} began without "
                    "record_experts"
                )
            experts = np.concatenate([earlier.experts, experts[len(earlier.experts) :]])
    if row.ends_turn(policy, request.sampling):
        finish_reason = "stop"
    elif len(token_ids) >= request.sampling.max_new_tokens:
        finish_reason = "length"
    else:
        finish_reason = "budget"
    return Response(
        problem=row.problem,
        sample=row.sample,
        prompt_ids=earlier.prompt_ids if earlier else row.prefix_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        text=policy.text(token_ids),
        policy_step=earlier.policy_step if earlier else request.policy_step,
        experts=experts,
        rendered=earlier.rendered if earlier else row.rendered,
        segments=segments,
        kept=kept,
        old_logprobs=earlier.old_logprobs if earlier else None,
        old_experts=earlier.old_experts if earlier else None,
    )
