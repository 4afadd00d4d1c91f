"""The interface of every engine: it samples responses, in chunks, in streams, or turn by turn.

A response does not depend on which other responses are in the batch: its random numbers are a
function of (seed, problem, sample, token position).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from torch import Tensor

from gspo.data.samples import Problem, Response
from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.rollout.engines.requests import Row, Sampling, further_rows, new_rows, to_response


def grouped(responses: list[Response], group_size: int) -> list[list[Response]]:
    """Cut a list of responses into groups of `group_size`."""
    return [responses[i : i + group_size] for i in range(0, len(responses), group_size)]


class Engine(ABC):
    """Samples responses to problems.

    `policy` is what the engine samples from, in the trainer's precision. The trainer can compute
    log-probs and experts of the responses again with it. Its tokenizer, prompt format and stop
    tokens are the engine's too.
    """

    policy: Policy
    batch_rows: int  # the largest number of responses sampled at once, but at least one group
    # whether the engine computes with the policy's own tensors, so that there is nothing to load
    shares_weights: bool
    ranks = Ranks()  # the processes whose engines share the problems that are to be sampled
    # whether `stream` yields chunks in order, whose shape the last bits of the numbers depend on
    in_chunks = True

    @property
    def positions(self) -> int | None:
        """How many tokens of prompt and response together the engine can hold; None for no bound."""
        return self.policy.positions

    def fits(self, problem: Problem, new_tokens: int) -> bool:
        """Return whether a problem's prompt leaves room for `new_tokens` response tokens."""
        return self.room([problem], new_tokens) == new_tokens

    def room(self, problems: list[Problem], new_tokens: int) -> int:
        """Return how many response tokens, at most `new_tokens`, every one of the problems leaves
        room for.
        """
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

        `seed` is the position of the random numbers, such as (run seed, purpose). With
        `record_experts` each response holds the experts that the engine's own forward passes chose,
        which Routing Replay R3 and the comparison with the trainer's routing need. `finished` is
        called from time to time with responses that have ended while others are still being
        sampled: with each of them once, in no particular order.

        Raises ValueError for a prompt that leaves no room for the response; callers ask `fits`
        first.
        """
        responses = []
        for chunk in self.chunks(problems, group_size):
            rows = new_rows(self.policy, chunk, group_size, sampling)
            self._check_room(rows)
            made: dict[int, Response] = {}
            ended = partial(self._respond, rows, made, sampling, policy_step, finished)
            self._sample(rows, group_size, sampling, seed, record_experts, ended)
            responses += [made[i] for i in range(len(rows))]
        return grouped(responses, group_size)

    def stream(
        self,
        problems: list[Problem],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        policy_step: int = 0,
        finished: Callable[[list[Response]], None] | None = None,
    ) -> Iterator[list[list[Response]]]:
        """Sample as `generate` does, and yield groups as soon as they are whole, so that nobody has
        to hold all of them. Here that is chunk by chunk, in the order of the problems, each with as
        many as are sampled at once."""
        for chunk in self.chunks(problems, group_size):
            yield self.generate(chunk, group_size, sampling, seed, policy_step, finished=finished)

    def chunks(self, problems: list[Problem], group_size: int) -> Iterator[list[Problem]]:
        """Cut problems into as many as are sampled at once, with `group_size` responses to each.
        Where ranks must sample as often as each other, the last chunks of some are empty."""
        at_once = max(1, self.batch_rows // group_size)
        for start in range(0, self._most(len(problems)), at_once):
            yield problems[start : start + at_once]

    def _most(self, count: int) -> int:
        """Return the largest count of all ranks where they must sample as often as each other, else
        this rank's.
        """
        return count

    def _check_room(self, rows: list[Row]) -> None:
        """Raise ValueError for a row whose prompt and response together exceed the engine's
        positions.
        """
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
        """Turn the rows numbered `which`, which have ended, into responses, and call `finished`
        with them.
        """
        made |= {i: to_response(self.policy, rows[i], sampling, policy_step, None) for i in which}
        if finished and which:
            finished([made[i] for i in which])

    def converse(
        self,
        rows: list[Row],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        record_experts: bool,
        reply: Callable[[list[Row]], list[Row]],
    ) -> None:
        """Sample rows turn by turn: fill them, and then the rows that `reply` returns for the next
        turn, until there are none. `reply` is given the filled rows of a turn, which have all ended
        it; a row that it returns for one of them has that one's prefix and tokens as the beginning
        of its prefix.

        At first each block of `group_size` rows has the same prefix."""
        while self._most(len(rows)):
            for row in rows:
                # those of earlier turns come again, because all that was before is fed again
                row.experts = []
            self._sample(rows, group_size, sampling, seed, record_experts, lambda which: None)
            rows, group_size = reply(rows), 1

    def extend(
        self,
        responses: list[Response],
        sampling: Sampling,
        seed: tuple[int | str, ...],
        policy_step: int = 0,
        record_experts: bool = False,
    ) -> list[Response]:
        """Continue unfinished responses under the present weights; the tokens that they have stay
        as they are.
        """
        extended = []
        for start in range(0, self._most(len(responses)), self.batch_rows):
            chunk = responses[start : start + self.batch_rows]
            rows = further_rows(chunk, sampling)
            self._sample(rows, 1, sampling, seed, record_experts, lambda which: None)
            pairs = zip(rows, chunk, strict=True)
            extended += [
                to_response(self.policy, row, sampling, policy_step, before)
                for row, before in pairs
            ]
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
        """Fill rows with tokens, log-probs and, with `record_experts`, experts. Each block of
        `group_size` rows has the same prefix. Calls `ended` with the numbers of the rows that are
        filled, once for every row."""

    @abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sample from these weights from now on. Names and shapes are those of the policy's model."""

    def rest(self) -> None:  # noqa: B027 (nothing to do is the usual case)
        """Give memory back to the trainer: no responses are wanted before the next weights."""

    @abstractmethod
    def close(self) -> None:
        """Free what the engine holds beside the policy. May be called twice."""
