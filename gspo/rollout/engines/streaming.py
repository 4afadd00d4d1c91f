"""The requests of a stream: what an engine outside the trainer's process holds, and which groups
wait for what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gspo.data.samples import Problem, Response
from gspo.model.policy import Policy
from gspo.rollout.engines.requests import (
    Row,
    Sampling,
    SamplingRequest,
    new_rows,
    to_response,
)
from gspo.rollout.engines.vllm_host import Sampled

Ended, Whole = list[Response], list[list[Response]]


class UnderWay:
    """Holds the requests that an engine was given and has not answered yet, and the groups that are
    not whole.

    `ask` calls a method of the engine, `params` gives the arguments of vLLM's SamplingParams for a
    row, and `check` raises for rows that the engine has no room for.
    """

    def __init__(
        self,
        policy: Policy,
        request: SamplingRequest,
        ask: Callable[..., Any],
        params: Callable[[Row], dict[str, Any]],
        check: Callable[[list[Row]], None],
    ):
        self.policy, self.request = policy, request
        self.ask, self.params, self.check = ask, params, check
        # by the request's name: the number of its group, and the row
        self.rows: dict[str, tuple[int, Row]] = {}
        self.groups: dict[int, list[Response | None]] = {}  # None for a response that has not ended
        self.given = 0  # how many problems the engine was given

    def add(self, problem: Problem) -> None:
        """Give the engine a request for each of a group's responses."""
        rows = new_rows(self.policy, self.request.with_problems([problem]))
        self.check(rows)
        names = [f"{self.given}x{row.sample}" for row in rows]
        self.ask("add", names, [row.prefix_ids for row in rows], [self.params(row) for row in rows])
        self.rows |= {name: (self.given, row) for name, row in zip(names, rows, strict=True)}
        self.groups[self.given] = [None] * self.request.group_size
        self.given += 1

    def collect(self) -> tuple[Ended, Whole]:
        """Wait until a response has ended. Return those that have, and the groups that are whole by
        that.
        """
        ended, whole = [], []
        for name, sampled in self.ask("ended").items():
            number, row = self.rows.pop(name)
            fill(row, sampled, self.policy, self.request.sampling)
            group = self.groups[number]
            group[row.sample] = to_response(self.policy, row, self.request, None)
            ended.append(group[row.sample])
            if None not in group:
                whole.append(self.groups.pop(number))
        return ended, whole


def fill(row: Row, sampled: Sampled, policy: Policy, sampling: Sampling) -> None:
    """Give a row the tokens and log-probs that were sampled for it, up to the first stop string."""
    if not sampled.token_ids:
        raise RuntimeError(
            f"vLLM returned no token for problem {row.problem.index} ({sampled.finish_reason})"
        )
    row.token_ids, row.logprobs = sampled.token_ids, sampled.logprobs
    if sampling.stop:  # vLLM knows no earlier tokens of the response, and its server knows no text
        row.cut_at_stop(policy, sampling)
