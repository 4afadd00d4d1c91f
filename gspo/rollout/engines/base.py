"""The interface of every engine: it samples responses in chunks, in streams, or turn by turn.

A response does not depend on the other responses in the batch: its random numbers are a function
of (random key, problem, sample, token position).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from gspo.data.pack import layout
from gspo.data.problems import Problem
from gspo.data.samples import Response
from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.rollout.engines.requests import (
    Row,
    SamplingRequest,
    further_rows,
    new_rows,
    to_response,
)

T = TypeVar("T")
Groups = list[list[Response]]
# rows of given tokens that pass through the model at once
SCORED_ROWS = 16
# called with responses that have ended while others are still being sampled
OnFinished = Callable[[list[Response]], None]


def grouped(items: list[T], group_size: int) -> list[list[T]]:
    """Cut a list of responses or episodes into groups of `group_size`."""
    return [items[i : i + group_size] for i in range(0, len(items), group_size)]


def policy_logprobs(
    policy: Policy, prompts: list[list[int]], responses: list[list[int]]
) -> list[list[float]]:
    """Return the policy's log-probs of given response tokens at temperature 1, row by row."""
    batch = layout(prompts, responses, policy.pad_id)
    temperature = policy.temperature
    policy.temperature = 1.0
    try:
        logp_BT = policy.score(batch, SCORED_ROWS).logp_BT
    finally:
        policy.temperature = temperature
    rows = zip(logp_BT.tolist(), responses, strict=True)
    return [logprobs[: len(response)] for logprobs, response in rows]


class Engine(ABC):
    """Samples responses to problems.

    `policy` is the policy that the engine samples from, in the trainer's precision. The trainer can
    compute log-probs and experts of the responses again with it. The engine uses its tokenizer,
    prompt format and stop tokens. `ranks` are the processes whose engines share the problems.
    """

    policy: Policy
    batch_rows: int  # the largest number of responses sampled at once, but at least one group
    # whether the engine computes with the policy's own tensors: then there is nothing to load
    shares_weights: bool
    ranks = Ranks()
    # whether `stream` yields chunk by chunk, in the order of the problems. A resumed evaluation
    # then samples whole chunks again, because the last bits of log-probs depend on a chunk's shape.
    in_chunks = True

    @property
    def positions(self) -> int | None:
        """How many tokens of prompt and response together the engine can hold; None: no bound."""
        return self.policy.positions

    def fits(self, problem: Problem, new_tokens: int) -> bool:
        """Return whether a problem's prompt leaves room for `new_tokens` response tokens."""
        return self.room([problem], new_tokens) == new_tokens

    def room(self, problems: Sequence[Problem], new_tokens: int) -> int:
        """Return how many response tokens, at most `new_tokens`, fit behind each of the prompts."""
        if self.positions is None:
            return new_tokens
        longest = max(len(self.policy.encode_prompt(problem.prompt)) for problem in problems)
        return min(new_tokens, self.positions - longest)

    def problems_at_once(self, group_size: int) -> int:
        """Return how many problems are sampled together, with `group_size` responses to each."""
        return max(1, self.batch_rows // group_size)

    def generate(self, request: SamplingRequest, on_finished: OnFinished | None = None) -> Groups:
        """Sample the responses of a request, and return them group by group.

        `on_finished` is called from time to time with responses that have ended: once with each of
        them, in no particular order.

        Raises ValueError for a prompt that leaves no room for the response. Callers check `fits`
        first.
        """
        responses = []
        for chunk in self.chunks(request):
            responses += self._generate_chunk(chunk, on_finished)
        return grouped(responses, request.group_size)

    def _generate_chunk(
        self, request: SamplingRequest, on_finished: OnFinished | None
    ) -> list[Response]:
        """Sample the responses of a request all at once."""
        rows = new_rows(self.policy, request)
        self._check_room(rows)
        responses: dict[int, Response] = {}

        def on_ended(indices: list[int]) -> None:
            ended = {i: to_response(self.policy, rows[i], request, None) for i in indices}
            responses.update(ended)
            if on_finished and ended:
                on_finished(list(ended.values()))

        self._sample(rows, request.group_size, request, on_ended)
        return [responses[i] for i in range(len(rows))]

    def stream(
        self, request: SamplingRequest, on_finished: OnFinished | None = None
    ) -> Iterator[Groups]:
        """Sample as `generate` does, but yield groups as soon as they are complete.

        So no caller has to hold all of them. This method yields chunk by chunk, in the order of the
        problems."""
        for chunk in self.chunks(request):
            yield self.generate(chunk, on_finished)

    def chunks(self, request: SamplingRequest) -> Iterator[SamplingRequest]:
        """Cut a request into requests that are each sampled all at once.

        If all ranks must sample equally often, the last chunks of some ranks are empty."""
        at_once = self.problems_at_once(request.group_size)
        for start in range(0, self._largest_count(len(request.problems)), at_once):
            yield request.with_problems(request.problems[start : start + at_once])

    def _largest_count(self, count: int) -> int:
        """Return the largest count of all ranks if they must sample equally often, else `count`."""
        return count

    def _check_room(self, rows: list[Row]) -> None:
        """Raise ValueError for a row whose prompt and response exceed the engine's positions."""
        if self.positions is None:
            return
        for row in rows:
            if len(row.prefix_ids) + row.limit > self.positions:
                raise ValueError(
                    f"problem {row.problem.index} of task {row.problem.task!r}: its prompt of "
                    f"{len(row.prefix_ids)} tokens and up to {row.limit} of the response exceed "
                    f"the {self.positions} positions of model and engine; leave it out, or lower "
                    "max_new_tokens"
                )

    def converse(
        self,
        rows: list[Row],
        rows_per_prefix: int,
        request: SamplingRequest,
        reply: Callable[[list[Row]], list[Row]],
    ) -> None:
        """Sample rows turn by turn, until `reply` returns no more rows.

        `reply` receives the filled rows of a turn, and returns the rows of the next turn. A
        returned row continues the episode: its prefix begins with the prefix and the tokens of the
        episode's previous row. In the first turn each block of `rows_per_prefix` rows has the same
        prefix. The request's problems and group size are not read."""
        while self._largest_count(len(rows)):
            for row in rows:
                # the pass over the whole prefix records those of earlier turns again
                row.experts = []
            self._sample(rows, rows_per_prefix, request, lambda indices: None)
            rows = reply(rows)
            rows_per_prefix = 1

    def extend(self, responses: Sequence[Response], request: SamplingRequest) -> list[Response]:
        """Continue unfinished responses under the present weights, and keep their tokens.

        The request's problems and group size are not read."""
        extended = []
        for start in range(0, self._largest_count(len(responses)), self.batch_rows):
            chunk = responses[start : start + self.batch_rows]
            rows = further_rows(chunk, request.sampling)
            self._sample(rows, 1, request, lambda indices: None)
            for row, earlier in zip(rows, chunk, strict=True):
                extended.append(to_response(self.policy, row, request, earlier))
        return extended

    @abstractmethod
    def _sample(
        self,
        rows: list[Row],
        rows_per_prefix: int,
        request: SamplingRequest,
        on_ended: Callable[[list[int]], None],
    ) -> None:
        """Fill rows with tokens, log-probs and, if the request records them, experts.

        Each block of `rows_per_prefix` rows has the same prefix. `on_ended` is called with the
        indices of rows that are filled, once for every row."""

    def logprobs_of(
        self, prompts: list[list[int]], responses: list[list[int]]
    ) -> list[list[float]] | None:
        """Return the engine's log-probs of given response tokens at temperature 1, row by row.

        Returns None if the engine cannot compute them. All ranks must call this together."""
        return None

    @abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sample from these weights from now on. Names and shapes must be the policy's."""

    def rest(self) -> None:  # noqa: B027 (most engines have nothing to do)
        """Give memory back to the trainer until the next weights are loaded."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine's resources, except the policy. May be called twice."""
