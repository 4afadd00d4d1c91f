"""Chooses the problems that a training step sees.

The training split is an endless stream of problems; a place in it is an index of
`Task.problem(seed, "train", index)`. A sampler chooses places: in the order of the stream, or from
a query set. A query set is a stretch of the stream that is visited epoch after epoch and may be
replaced by the next stretch. The choice is a pure function of (seed, step, refill round); only a
sampler that sorts by difficulty also reads pass rates, which belong to a run's state. Refill rounds
are the further problems that dynamic sampling asks for.

Over a finite training set of n problems the stream consists of epochs: the places e*n ... e*n + n -
1 hold every problem once. Refill rounds stay within the epoch of their step, and query sets never
cross a border of epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from gspo.data.samples import Problem, ScoredResponse
from gspo.data.seeding import permutation
from gspo.tasks.base import Task

# on an unbounded stream refill round r starts at place r * REFILL, far from any step's own
REFILL = 2**40 + 15
# replacement number a of a problem whose prompt is too long is a * REPLACEMENT further on
REPLACEMENT = 2**50 + 55
MAX_REFILLS = REPLACEMENT // REFILL - 1
MAX_REPLACEMENTS = 1000
UNSEEN = 0.5  # the pass rate that a problem without samples is taken to have
RATE_WEIGHT = 0.5  # the weight of the newest group in the running pass rate

GROUP_KEYS = ("difficulty", "task", "length", "task_length")
ORDERS = ("shuffled", "easy_first", "hard_first")


@dataclass(frozen=True)
class QuerySet:
    """The training problems that a step may take: the places start ... start + size - 1. Size 0 is
    the whole stream.
    """

    start: int = 0
    size: int = 0
    number: int = 0  # how many query sets came before this one
    first_step: int = 1  # the first step that uses this set
    # returns the problem at a place, for samplers that look at it
    problem: Callable[[int], Problem] | None = None

    def position(self, step: int, count: int) -> tuple[int, int]:
        """Return which epoch over the set a step belongs to, and which batch of `count` problems in
        it, both from 0.
        """
        return divmod(step - self.first_step, self.size // count)


class Sampler(Protocol):
    """Chooses the problems of a step."""

    name: str
    needs_query_set: ClassVar[bool]

    @property
    def reads_pass_rates(self) -> bool:
        """Whether `choose` reads pass rates. They are recorded only if it does."""
        ...

    def choose(
        self,
        seed: int,
        step: int,
        count: int,
        query_set: QuerySet,
        pass_rates: Mapping[int, float],
        refill: int = 0,
    ) -> list[int]:
        """Return the places of `count` problems for a refill round; round 0 is the step's own
        batch. A pure function."""
        ...


@dataclass
class Uniform:
    """Chooses every problem as often as every other.

    On the stream, step s (from 1) takes the places P*(s-1) ... P*s - 1. On a query set it goes
    through epochs, each a permutation by (seed, set, epoch). Refill round r of a step takes the
    r-th next batch of the same epoch, cyclically: all rounds of a step see different problems, and
    a problem of a refill round is met again at its own step. The stream over a finite set does the
    same (TrainingProblems). The unbounded stream has other problems for refill rounds.
    """

    name: str = "uniform"
    needs_query_set: ClassVar[bool] = False
    reads_pass_rates: ClassVar[bool] = False

    def choose(
        self,
        seed: int,
        step: int,
        count: int,
        query_set: QuerySet,
        pass_rates: Mapping[int, float],
        refill: int = 0,
    ) -> list[int]:
        """Return the places of `count` problems for a refill round."""
        if not query_set.size:
            first = refill * REFILL + count * (step - 1)
            return list(range(first, first + count))
        epoch, batch = query_set.position(step, count)
        order = permutation(query_set.size, seed, "problems", query_set.number, epoch).tolist()
        block = (batch + refill) % (query_set.size // count)
        return [query_set.start + i for i in order[block * count : (block + 1) * count]]


@dataclass
class Grouped:
    """Chooses batches of similar problems: sorts the query set by a key, cuts it into batches, and
    visits those.

    by     the key. difficulty: the running pass rate (0.5 if not yet sampled); task: its name;
           length: characters of the prompt; task_length: task, then length. With `task` the batch
           on a border between tasks holds both.
    order  the order of the batches. shuffled: a permutation by (seed, set, epoch); easy_first,
           hard_first: by difficulty, or by length with shorter as easier.

    Ties are broken by a permutation by (seed, set, epoch). The pass rates are those of the epoch's
    start and do not change within an epoch, so every problem is visited exactly once in it; the
    first epoch over a set consists of random batches. Refill round r takes the r-th next batch of
    the sorted set, cyclically: the problems most similar to the step's own.
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
        """True if problems are sorted by difficulty."""
        return self.by == "difficulty"

    def choose(
        self,
        seed: int,
        step: int,
        count: int,
        query_set: QuerySet,
        pass_rates: Mapping[int, float],
        refill: int = 0,
    ) -> list[int]:
        """Return the places of `count` problems for a refill round."""
        epoch, batch = query_set.position(step, count)
        blocks = query_set.size // count
        ties = permutation(query_set.size, seed, "problems", query_set.number, epoch).tolist()
        # Sorting is stable, so places with the same key stay in the order of the permutation.
        places = sorted(
            (query_set.start + i for i in ties), key=lambda p: self._key(p, query_set, pass_rates)
        )
        if self.order == "shuffled":
            block = int(permutation(blocks, seed, "batches", query_set.number, epoch)[batch])
        else:
            block = batch if self.order == "easy_first" else blocks - 1 - batch
        block = (block + refill) % blocks
        return places[block * count : (block + 1) * count]

    def _key(self, place: int, query_set: QuerySet, pass_rates: Mapping[int, float]) -> Any:
        """Return the key that the set is sorted by; the easiest problem has the smallest."""
        if self.by == "difficulty":
            return -pass_rates.get(place, UNSEEN)
        problem = query_set.problem(place)
        length = len(problem.prompt)
        return {"task": problem.task, "length": length, "task_length": (problem.task, length)}[
            self.by
        ]


@dataclass
class TrainingProblems:
    """Gives every step of a run its problems, and keeps the pass rates that a sampler may read.

    A problem whose prompt is too long is replaced, at its place, by the problem REPLACEMENT further
    on in the stream, and that one by the next if it is too long as well. So what stands at a place
    does not depend on what was replaced elsewhere.
    """

    task: Task
    seed: int
    sampler: Sampler
    count: int  # problems per step and round
    query_set_size: int = 0  # 0: the whole stream
    refresh_every: int = 0  # steps after which the next query set takes over; 0: never
    max_prompt_tokens: int | None = None
    # returns a prompt's tokens; used only with max_prompt_tokens
    prompt_length: Callable[[str], int] = len
    # what sets max_prompt_tokens, in words for messages; "": the setting of that name
    limited_by: str = ""
    # by place: the running mean reward of its groups
    pass_rates: dict[int, float] = field(default_factory=dict)
    epoch_rates: dict[int, float] = field(
        default_factory=dict
    )  # pass_rates at the epoch's start: the sampler reads them
    # problems of one query set, by place
    _cache: dict[int, Problem] = field(default_factory=dict, repr=False)
    _cached_set: int = 0  # the number of the query set that `_cache` belongs to

    def take(self, step: int, refill: int = 0) -> list[Problem]:
        """Return the problems of a step's refill round. Round 0 is the step's own batch and must be
        asked for first.
        """
        if refill and self.revisits(refill) and not self.query_set_size:
            return self._unused(step, refill)
        query_set = self.query_set(step)
        if (
            self.sampler.reads_pass_rates
            and refill == 0
            and query_set.position(step, self.count)[1] == 0
        ):
            places = range(query_set.start, query_set.start + query_set.size)
            self.pass_rates = {
                place: rate for place, rate in self.pass_rates.items() if place in places
            }
            self.epoch_rates = dict(self.pass_rates)
        places = self.sampler.choose(
            self.seed, step, self.count, query_set, self.epoch_rates, refill
        )
        return [self.problem(place) for place in places]

    def revisits(self, refill: int) -> bool:
        """Return whether the problems of such a round are met again later in the run, at the same
        places.
        """
        return bool(self.query_set_size or (refill and self.task.size("train")))

    def _unused(self, step: int, refill: int) -> list[Problem]:
        """Return a refill round over a finite training set: the next problems of the step's epoch,
        cyclically, that the step has not met yet and whose prompts fit. Returns fewer, or none,
        when the epoch has no more of them."""
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
        """Return the query set that a step takes its problems from."""
        size, every = self.query_set_size, self.refresh_every
        number = (step - 1) // every if every else 0
        if number != self._cached_set:
            self._cache, self._cached_set = {}, number
        start, available = number * size, self.task.size("train") if number else None
        if available:
            epoch, within = divmod(number, available // size)
            start = epoch * available + within * size
        return QuerySet(start, size, number, number * every + 1, self.problem)

    def _fits(self, problem: Problem) -> bool:
        """Return whether a problem's prompt is short enough."""
        return (
            self.max_prompt_tokens is None
            or self.prompt_length(problem.prompt) <= self.max_prompt_tokens
        )

    def problem(self, place: int) -> Problem:
        """Return the problem at a place. Raises ValueError if no replacement has a prompt that
        fits.
        """
        if place in self._cache:
            return self._cache[place]
        for index in range(place, place + MAX_REPLACEMENTS * REPLACEMENT, REPLACEMENT):
            problem = self.task.problem(self.seed, "train", index)
            if self._fits(problem):
                # a place of the stream is visited once, so caching it would be useless
                if self.query_set_size:
                    self._cache[place] = problem
                return problem
        limited_by = self.limited_by or f"rollout.max_prompt_tokens={self.max_prompt_tokens}"
        raise ValueError(
            f"{limited_by}: {MAX_REPLACEMENTS} problems of task={self.task.name} in a row have longer prompts, so "
            "there is nothing to train on"
        )

    def skipped(self, problems: list[Problem]) -> int:
        """Return how many problems, whose prompts are too long, were replaced to get these
        problems.
        """
        return sum(problem.index // REPLACEMENT for problem in problems)

    def record(self, groups: list[list[ScoredResponse]]) -> None:
        """Update the pass rates with scored groups: a problem's first mean reward, then a running
        mean with weight 0.5."""
        if not self.sampler.reads_pass_rates:
            return
        for group in groups:
            place = group[0].problem.index % REPLACEMENT
            mean = sum(response.reward for response in group) / len(group)
            before = self.pass_rates.get(place, mean)
            self.pass_rates[place] = before + RATE_WEIGHT * (mean - before)

    def state(self) -> dict[str, dict[str, float]]:
        """Return what a checkpoint must keep, ready for JSON; empty for a sampler that reads no
        pass rates.
        """
        if not self.sampler.reads_pass_rates:
            return {}
        both = {"pass_rates": self.pass_rates, "epoch_rates": self.epoch_rates}
        return {
            name: {str(place): rate for place, rate in rates.items()}
            for name, rates in both.items()
        }

    def load_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore what `state` returned. Raises ValueError if the sampler reads pass rates and the
        state has none.
        """
        if not self.sampler.reads_pass_rates:
            return
        if not {"pass_rates", "epoch_rates"} <= state.keys():
            raise ValueError(
                f"sampler={self.sampler.name} reads pass rates; the state has {sorted(state) or 'none'}"
            )
        self.pass_rates = {int(place): rate for place, rate in state["pass_rates"].items()}
        self.epoch_rates = {int(place): rate for place, rate in state["epoch_rates"].items()}
