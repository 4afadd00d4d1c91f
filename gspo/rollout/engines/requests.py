"""Responses while they are being sampled: how tokens are drawn, what a row is conditioned on, and
how it ends.

Shape suffixes: L MoE layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gspo.data.samples import Problem, Response
from gspo.rollout.engines.stop_strings import StopStringDetector, check_stop
from gspo.rollout.engines.truncation import Truncation

if TYPE_CHECKING:
    from gspo.model.policy import Policy


@dataclass
class Sampling(Truncation):
    """How responses are sampled. Temperature 0 means greedy. Log-probs are those at the sampling
    temperature, and those at temperature 1 for greedy responses; they are of the whole
    distribution, whatever tokens are left out in drawing (gspo.rollout.engines.truncation)."""

    temperature: float = 1.0
    max_new_tokens: int = 80
    # the largest number of tokens sampled in one call, the rest in later ones; 0: no such limit
    budget: int = 0
    stop: tuple[str, ...] = ()  # strings that end a response: gspo.rollout.engines.stop_strings

    def __post_init__(self):
        super().__post_init__()
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or positive")
        self.refuse_greedy(self.temperature)
        check_stop(self.stop, "stop")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")

    def limit(self, done: int = 0) -> int:
        """Return how many tokens a response that has `done` tokens may get in this call."""
        return min(self.budget or self.max_new_tokens, self.max_new_tokens - done)


@dataclass
class Row:
    """One response that is being sampled: what it is conditioned on, and the tokens sampled in this
    call.
    """

    problem: Problem
    sample: int
    prefix_ids: list[int]  # the prompt, then the tokens that earlier calls sampled
    done: int  # how many tokens earlier calls sampled
    limit: int  # tokens that this call may add
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # pieces [positions fed, L, K], to be put end to end
    experts: list[np.ndarray] = field(default_factory=list)
    place: int = 0  # the number of its episode in a conversation
    rendered: str = ""  # the prompt of a new response as the policy sees it
    # whether what it samples is a turn of its own, in which a stop string must be whole
    begins_turn: bool = False

    def watch(self, policy: Policy, sampling: Sampling) -> StopStringDetector:
        """Return what finds the stop strings in this row's response; it has read what earlier calls
        sampled.
        """
        before = 0 if self.begins_turn else self.done
        earlier = self.prefix_ids[len(self.prefix_ids) - before :]
        return StopStringDetector(policy.tokenizer, policy.textless_ids, sampling.stop, earlier)

    def ends_turn(self, policy: Policy, sampling: Sampling) -> bool:
        """Return whether the last token ends the response, or the policy's turn: an end-of-sequence
        token, or one that completes a stop string."""
        *others, last = self.token_ids
        if last in policy.stop_ids or not sampling.stop:
            return last in policy.stop_ids
        watch = self.watch(policy, sampling)
        watch.read(others)
        return watch.completes(last)

    def cut_at_stop(self, policy: Policy, sampling: Sampling) -> None:
        """Leave out what an engine has sampled after the token that completes a stop string."""
        watch = self.watch(policy, sampling)
        for count, token in enumerate(self.token_ids, start=1):
            if watch.completes(token):
                self.token_ids, self.logprobs = self.token_ids[:count], self.logprobs[:count]
                return


def new_rows(
    policy: Policy, problems: list[Problem], group_size: int, sampling: Sampling
) -> list[Row]:
    """Return rows for new responses, group by group. Raises ValueError for a problem with an empty
    prompt.
    """
    rows = []
    for problem in problems:
        prompt_ids = policy.encode_prompt(problem.prompt)
        if not prompt_ids:
            raise ValueError(
                f"problem {problem.index} of task {problem.task!r} has an empty prompt"
            )
        rendered = policy.rendered(prompt_ids)
        rows += [
            Row(problem, sample, prompt_ids, 0, sampling.limit(), rendered=rendered)
            for sample in range(group_size)
        ]
    return rows


def further_rows(responses: list[Response], sampling: Sampling) -> list[Row]:
    """Return rows that continue responses. Raises ValueError for a response that has ended."""
    for r in responses:
        if r.finish_reason != "budget":
            raise ValueError(
                f"response {r.sample} to problem {r.problem.index} has ended ({r.finish_reason})"
            )
    return [
        Row(
            r.problem,
            r.sample,
            r.prompt_ids + r.token_ids,
            len(r.token_ids),
            sampling.limit(len(r.token_ids)),
        )
        for r in responses
    ]


def to_response(
    policy: Policy, row: Row, sampling: Sampling, policy_step: int, before: Response | None
) -> Response:
    """Turn a row into a response; `before` is the response that it continues, None for a new one.
    Each position keeps the experts of the pass that predicted its next token."""
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
                raise ValueError(
                    f"response {row.sample} to problem {row.problem.index} began without record_experts"
                )
            experts = np.concatenate([before.experts, experts[len(before.experts) :]])
    ended = "stop" if row.ends_turn(policy, sampling) else "budget"
    if ended != "stop" and len(token_ids) >= sampling.max_new_tokens:
        ended = "length"
    return Response(
        problem=row.problem,
        sample=row.sample,
        prompt_ids=before.prompt_ids if before else row.prefix_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=ended,
        text=policy.text(token_ids),
        policy_step=before.policy_step if before else policy_step,
        experts=experts,
        rendered=before.rendered if before else row.rendered,
        segments=segments,
        old_logprobs=before.old_logprobs if before else None,
        old_experts=before.old_experts if before else None,
    )
