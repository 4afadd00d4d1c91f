"""Which problems a training step sees.

The training split is an endless stream; a place of it is an index of `Task.problem(seed, "train", index)`. A sampler
chooses places: in the order of the stream, or from a query set, a stretch of it that is visited epoch after epoch and
may be replaced by the next one. The choice is a pure function of (seed, step, refill round) and, by difficulty alone,
of pass rates that belong to a run's state. Refill rounds are the further problems that dynamic sampling asks for.

The stream of a finite training set of n problems is its epochs end to end: the places e*n ... e*n + n - 1 hold every
problem once. Refill rounds stay within the epoch of their step, and query sets never cross a border of epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from gspo.core.seeding import permutation
from gspo.core.types import Problem, Response
from gspo.tasks.base import Task

REFILL = 2**40 + 15  # refill round r of a stream without end takes places from r * REFILL on, far from any step's own
REPLACEMENT = 2**50 + 55  # the a-th replacement of a problem with too long a prompt lies a * REPLACEMENT further on
MAX_REFILLS = REPLACEMENT // REFILL - 1
MAX_REPLACEMENTS = 1000
UNSEEN = 0.5  # the pass rate of a problem that was not sampled yet
RATE_WEIGHT = 0.5  # of the newest group in the running pass rate

GROUP_KEYS = ("difficulty", "task", "length", "task_length")
ORDERS = ("shuffled", "easy_first", "hard_first")


@dataclass(frozen=True)
class QuerySet:
    """The training problems that a step may take: the places start ... start + size - 1; size 0 is the whole stream."""

    start: int = 0
    size: int = 0
    number: int = 0  # how many sets came before it
    first_step: int = 1  # the step from which it is used
    problem: Callable[[int], Problem] | None = None  # the problem at a place, for samplers that look at it

    def position(self, step: int, count: int) -> tuple[int, int]:
        """Which epoch over the set a step belongs to, and which batch of `count` in it; both from 0."""
        return divmod(step - self.first_step, self.size // count)


class Sampler(Protocol):
    """Chooses the problems of a step."""

    name: str
    needs_query_set: ClassVar[bool]

    @property
    def reads_pass_rates(self) -> bool:
        """Whether `choose` looks at pass rates; they are recorded only then."""
        ...

    def choose(
        self, seed: int, step: int, count: int, query_set: QuerySet, pass_rates: Mapping[int, float], refill: int = 0
    ) -> list[int]:
        """The places of `count` problems for a refill round (0: the step's own batch). A pure function."""
        ...


@dataclass
class Uniform:
    """Every problem as often as every other.

    Stream: step s (from 1) takes the places P*(s-1) ... P*s - 1. Query set: epochs over it, each a permutation by
    (seed, set, epoch). Refill round r of a step takes the batch r places further on in the same epoch, cyclically: all
    rounds of a step see different problems, and a refilled problem is met again at its own step. So it is in a stream
    over a finite set too (TrainingProblems); a stream without end has other problems for refill rounds.
    """

    name: str = "uniform"
    needs_query_set: ClassVar[bool] = False
    reads_pass_rates: ClassVar[bool] = False

    def choose(
        self, seed: int, step: int, count: int, query_set: QuerySet, pass_rates: Mapping[int, float], refill: int = 0
    ) -> list[int]:
        if not query_set.size:
            first = refill * REFILL + count * (step - 1)
            return list(range(first, first + count))
        epoch, batch = query_set.position(step, count)
        order = permutation(query_set.size, seed, "problems", query_set.number, epoch).tolist()
        block = (batch + refill) % (query_set.size // count)
        return [query_set.start + i for i in order[block * count : (block + 1) * count]]


@dataclass
class Grouped:
    """Batches of problems that are alike: the query set is sorted by a key, cut into batches, and those are visited.

    by     difficulty: the running pass rate (0.5 if not yet sampled); task: its name; length: characters of the
           prompt; task_length: task, then length. With `task` the batch on a border holds two tasks.
    order  shuffled: a permutation by (seed, set, epoch); easy_first, hard_first: by difficulty, or by length with
           shorter as easier.

    Ties are broken by a permutation by (seed, set, epoch). The pass rates are those of the epoch's start: they
    stand still within an epoch, so every problem is visited exactly once in it, and the first epoch over a set is
    in random batches. Refill round r takes the r-th next batch of the sorted set, cyclically: the most alike.
    """

    name: str = "grouped"
    by: str = "difficulty"
    order: str = "shuffled"
    needs_query_set: ClassVar[bool] = True

    def __post_init__(self):
        if self.by not in GROUP_KEYS:
            raise ValueError(f"sampler.by={self.by!r}: choose one of {', '.join(GROUP_KEYS)}")
        if self.order not in ORDERS:
            raise ValueError(f"sampler.order={self.order!r}: choose one of {', '.join(ORDERS)}")
        if self.order != "shuffled" and self.by not in ("difficulty", "length"):
            raise ValueError(
                f"sampler.order={self.order} with sampler.by={self.by}: only difficulty and length say what is easy"
            )

    @property
    def reads_pass_rates(self) -> bool:
        return self.by == "difficulty"

    def choose(
        self, seed: int, step: int, count: int, query_set: QuerySet, pass_rates: Mapping[int, float], refill: int = 0
    ) -> list[int]:
        epoch, batch = query_set.position(step, count)
        blocks = query_set.size // count
        ties = permutation(query_set.size, seed, "problems", query_set.number, epoch).tolist()
        # sorting is stable: places with the same key stay in the order of the permutation
        places = sorted((query_set.start + i for i in ties), key=lambda p: self._key(p, query_set, pass_rates))
        if self.order == "shuffled":
            block = int(permutation(blocks, seed, "batches", query_set.number, epoch)[batch])
        else:
            block = batch if self.order == "easy_first" else blocks - 1 - batch
        block = (block + refill) % blocks
        return places[block * count : (block + 1) * count]

    def _key(self, place: int, query_set: QuerySet, pass_rates: Mapping[int, float]) -> Any:
        """What the set is sorted by, the easiest first."""
        if self.by == "difficulty":
            return -pass_rates.get(place, UNSEEN)
        problem = query_set.problem(place)
        length = len(problem.prompt)
        return {"task": problem.task, "length": length, "task_length": (problem.task, length)}[self.by]


@dataclass
class TrainingProblems:
    """The problems of every step of a run, and the pass rates that a sampler may read.

    A problem with a prompt that does not fit is replaced at its place by the problem REPLACEMENT further on in the
    stream, and so on: what stands at a place does not depend on what was skipped elsewhere.
    """

    task: Task
    seed: int
    sampler: Sampler
    count: int  # problems per step and round
    query_set_size: int = 0  # 0: the unbounded stream
    refresh_every: int = 0  # steps after which the next query set takes over; 0: never
    max_prompt_tokens: int | None = None
    prompt_length: Callable[[str], int] = len  # in tokens; read only with max_prompt_tokens
    limited_by: str = ""  # what sets max_prompt_tokens, for messages; "": the setting of that name
    pass_rates: dict[int, float] = field(default_factory=dict)  # by place: running mean reward of its groups
    epoch_rates: dict[int, float] = field(default_factory=dict)  # the same as of the epoch's start: the sampler's view
    _known: dict[int, Problem] = field(default_factory=dict, repr=False)  # of the current query set, by place
    _number: int = 0  # of the query set that `_known` is about

    def take(self, step: int, refill: int = 0) -> list[Problem]:
        """The problems of a step's refill round; round 0 is the step's own batch, and must be asked for first."""
        if refill and self.revisits(refill) and not self.query_set_size:
            return self._unused(step, refill)
        query_set = self.query_set(step)
        if self.sampler.reads_pass_rates and refill == 0 and query_set.position(step, self.count)[1] == 0:
            places = range(query_set.start, query_set.start + query_set.size)
            self.pass_rates = {place: rate for place, rate in self.pass_rates.items() if place in places}
            self.epoch_rates = dict(self.pass_rates)
        places = self.sampler.choose(self.seed, step, self.count, query_set, self.epoch_rates, refill)
        return [self.problem(place) for place in places]

    def revisits(self, refill: int) -> bool:
        """Whether the problems of such a round are met again in the run, at the same places."""
        return bool(self.query_set_size or (refill and self.task.size("train")))

    def _unused(self, step: int, refill: int) -> list[Problem]:
        """A refill round over a finite set: the next problems of the step's epoch, cyclically, that the step has not
        met yet and that fit. Fewer, and at last none, where there are no more."""
        size = self.task.size("train")
        epoch = self.count * (step - 1) // size
        met, found = {problem.prompt for problem in self.take(step)}, []
        for further in range(size):
            place = epoch * size + (self.count * step + further) % size
            problem = self.task.problem(self.seed, "train", place)
            if problem.prompt not in met and self._fits(problem):
                met.add(problem.prompt)
                found.append(problem)
                if len(found) == refill * self.count:
                    break
        return found[(refill - 1) * self.count :]

    def query_set(self, step: int) -> QuerySet:
        """The set that a step takes its problems from."""
        size, every = self.query_set_size, self.refresh_every
        number = (step - 1) // every if every else 0
        if number != self._number:
            self._known, self._number = {}, number
        start, available = number * size, self.task.size("train") if number else None
        if available:
            epoch, within = divmod(number, available // size)
            start = epoch * available + within * size
        return QuerySet(start, size, number, number * every + 1, self.problem)

    def _fits(self, problem: Problem) -> bool:
        return self.max_prompt_tokens is None or self.prompt_length(problem.prompt) <= self.max_prompt_tokens

    def problem(self, place: int) -> Problem:
        """The problem at a place. Raises ValueError if no replacement has a prompt that fits."""
        if place in self._known:
            return self._known[place]
        for index in range(place, place + MAX_REPLACEMENTS * REPLACEMENT, REPLACEMENT):
            problem = self.task.problem(self.seed, "train", index)
            if self._fits(problem):
                if self.query_set_size:  # a place of the unbounded stream is visited once
                    self._known[place] = problem
                return problem
        limited_by = self.limited_by or f"rollout.max_prompt_tokens={self.max_prompt_tokens}"
        raise ValueError(
            f"{limited_by}: {MAX_REPLACEMENTS} problems of task={self.task.name} in a row have longer prompts, so "
            "there is nothing to train on"
        )

    def skipped(self, problems: list[Problem]) -> int:
        """How many problems with too long prompts these ones stand in for."""
        return sum(problem.index // REPLACEMENT for problem in problems)

    def record(self, groups: list[list[Response]]) -> None:
        """Take scored groups into the pass rates: the first mean reward, then a running mean with weight 0.5."""
        if not self.sampler.reads_pass_rates:
            return
        for group in groups:
            place = group[0].problem.index % REPLACEMENT
            mean = sum(response.score.reward for response in group) / len(group)
            before = self.pass_rates.get(place, mean)
            self.pass_rates[place] = before + RATE_WEIGHT * (mean - before)

    def state(self) -> dict[str, dict[str, float]]:
        """What a checkpoint must keep, ready for JSON; empty for a sampler that reads no pass rates."""
        if not self.sampler.reads_pass_rates:
            return {}
        both = {"pass_rates": self.pass_rates, "epoch_rates": self.epoch_rates}
        return {name: {str(place): rate for place, rate in rates.items()} for name, rates in both.items()}

    def load_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Put back what `state` gave. Raises ValueError if the sampler reads pass rates and there are none in it."""
        if not self.sampler.reads_pass_rates:
            return
        if not {"pass_rates", "epoch_rates"} <= state.keys():
            raise ValueError(f"sampler={self.sampler.name} reads pass rates; the state has {sorted(state) or 'none'}")
        self.pass_rates = {int(place): rate for place, rate in state["pass_rates"].items()}
        self.epoch_rates = {int(place): rate for place, rate in state["epoch_rates"].items()}
