"""Chooses the problems of a training step.

The training split is an endless stream of problems. A position in it is an index of
`Task.problem(seed, "train", index)`. A sampler chooses positions: in the order of the stream, or
from a query set. A query set is a range of the stream that is visited epoch after epoch, and may be
replaced by the next range. The choice is a pure function of (seed, step, refill round). Only a
sampler that sorts by difficulty also reads pass rates, which belong to a run's state. A refill
round is a further batch of problems that dynamic sampling draws.

Over a finite training set of n problems the stream consists of epochs: the positions e*n ... e*n +
n - 1 hold every problem once. Refill rounds stay within the epoch of their step, and a query set
lies within one epoch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from gspo.data.problems import ChatPrompt, Problem
from gspo.data.samples import ScoredResponse
from gspo.data.seeding import permutation
from gspo.io.errors import SettingError
from gspo.io.ranges import Ranged, choice
from gspo.tasks.base import Task

# on an unbounded stream refill round r starts at position r * REFILL, far from any step's own
REFILL = 2**40 + 15
# replacement number a of a problem whose prompt is too long is at its position + a * REPLACEMENT
REPLACEMENT = 2**50 + 55
# the last refill round ends before the first replacement
MAX_REFILLS = REPLACEMENT // REFILL - 1
MAX_REPLACEMENTS = 1000
UNSEEN_PASS_RATE = 0.5  # the assumed pass rate of a problem without samples
RATE_WEIGHT = 0.5  # the weight of the newest group in the running pass rate

GROUP_KEYS = ("difficulty", "task", "length", "task_length")
ORDERS = ("shuffled", "easy_first", "hard_first")


@dataclass(frozen=True)
class QuerySet:
    """The positions start ... start + size - 1 of the stream; size 0: the whole stream."""

    # returns the problem at a position, for samplers that read it
    problem: Callable[[int], Problem]
    start: int = 0
    size: int = 0
    number: int = 0  # how many query sets came before
    first_step: int = 1  # the first step that uses this set

    def epoch_and_batch(self, step: int, prompts_per_step: int) -> tuple[int, int]:
        """Return a step's epoch over the set, and its batch, both from 0."""
        return divmod(step - self.first_step, self.size // prompts_per_step)


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
        prompts_per_step: int,
        query_set: QuerySet,
        pass_rates: Mapping[int, float],
        refill: int = 0,
    ) -> list[int]:
        """Return the positions of `prompts_per_step` problems for a refill round. A pure function.

        Round 0 is the step's own batch."""
        ...


@dataclass
class Uniform:
    """Chooses all problems equally often.

    On the stream, step s (from 1) takes the positions P*(s-1) ... P*s - 1. On a query set it goes
    through epochs, each a permutation by (seed, set, epoch). Refill round r of a step takes the
    r-th next batch of the same epoch, cyclically. So all rounds of a step have different problems,
    and a problem of a refill round is met again at its own step. The stream over a finite set does
    the same (TrainingProblems). The unbounded stream has other problems for refill rounds.
    """

    name: str = "uniform"
    needs_query_set: ClassVar[bool] = False
    reads_pass_rates: ClassVar[bool] = False

    def choose(
        self,
        seed: int,
        step: int,
        prompts_per_step: int,
        query_set: QuerySet,
        pass_rates: Mapping[int, float],
        refill: int = 0,
    ) -> list[int]:
        """Return the positions of `prompts_per_step` problems for a refill round."""
        if not query_set.size:
            first = refill * REFILL + prompts_per_step * (step - 1)
            return list(range(first, first + prompts_per_step))
        epoch, batch = query_set.epoch_and_batch(step, prompts_per_step)
        order = permutation(query_set.size, seed, "problems", query_set.number, epoch).tolist()
        batch = (batch + refill) % (query_set.size // prompts_per_step)
        begin = batch * prompts_per_step
        return [query_set.start + i for i in order[begin : begin + prompts_per_step]]


@dataclass
class Grouped(Ranged, key="sampler"):
    """Chooses batches of similar problems: it sorts the query set, and cuts it into batches.

    by     the sort key
           difficulty   the running pass rate (0.5 before the first sample)
           task         its name; a batch on a border between tasks holds both
           length       characters of the prompt
           task_length  task, then length
    order  the order of the batches
           shuffled                a permutation by (seed, set, epoch)
           easy_first, hard_first  by difficulty, or by length with shorter as easier

    Ties are broken by a permutation by (seed, set, epoch). The pass rates are frozen at the start
    of an epoch, so every problem is visited exactly once in it. The first epoch over a set consists
    of random batches. Refill round r takes the r-th next batch of the sorted set, cyclically: the
    problems most similar to the step's own.
    """

    name: str = "grouped"
    by: str = choice("difficulty", GROUP_KEYS)
    order: str = choice("shuffled", ORDERS)
    needs_query_set: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.order != "shuffled" and self.by not in ("difficulty", "length"):
            raise SettingError(
                "sampler.order",
                self.order,
                f"with sampler.by={self.by}, only difficulty and length say what is easy",
            )

    @property
    def reads_pass_rates(self) -> bool:
        """True if problems are sorted by difficulty."""
        return self.by == "difficulty"

    def choose(
        self,
        seed: int,
        step: int,
        prompts_per_step: int,
        query_set: QuerySet,
        pass_rates: Mapping[int, float],
        refill: int = 0,
    ) -> list[int]:
        """Return the positions of `prompts_per_step` problems for a refill round."""
        epoch, batch = query_set.epoch_and_batch(step, prompts_per_step)
        batches = query_set.size // prompts_per_step
        order = permutation(query_set.size, seed, "problems", query_set.number, epoch).tolist()
        positions = [query_set.start + i for i in order]
        # sorting is stable: equal keys stay in the order of the permutation
        positions.sort(key=lambda position: self._sort_key(position, query_set, pass_rates))
        if self.order == "shuffled":
            batch = int(permutation(batches, seed, "batches", query_set.number, epoch)[batch])
        elif self.order == "hard_first":
            batch = batches - 1 - batch
        batch = (batch + refill) % batches
        begin = batch * prompts_per_step
        return positions[begin : begin + prompts_per_step]

    def _sort_key(self, position: int, query_set: QuerySet, pass_rates: Mapping[int, float]) -> Any:
        """Return the sort key of a problem. The easiest problem has the smallest key."""
        if self.by == "difficulty":
            return -pass_rates.get(position, UNSEEN_PASS_RATE)
        problem = query_set.problem(position)
        length = len(problem.prompt)
        keys = {"task": problem.task, "length": length, "task_length": (problem.task, length)}
        return keys[self.by]


def check_chats(task: Task, seed: int, encode: Callable[[str], list[int]]) -> None:
    """Raise SettingError for a training problem that the model's chat template refuses.

    `encode` returns the tokens of a prompt. Of the problems with the same roles one is tried."""
    if task.environments():
        return
    tried: set[tuple[str, ...]] = set()
    for index in range(task.size("train") or 0):
        problem = task.problem(seed, "train", index)
        prompt = problem.prompt
        if not isinstance(prompt, ChatPrompt):
            continue
        roles = tuple(message["role"] for message in prompt.messages)
        if roles in tried:
            continue
        tried.add(roles)
        try:
            encode(prompt)
        except ValueError as error:
            raise unfit_prompt(task, problem, str(error)) from None


def unfit_prompt(task: Task, problem: Problem, reason: str) -> SettingError:
    """Return the error of a training problem whose prompt cannot be written."""
    remedy = "leave such problems out, or set prompt.format=plain"
    return SettingError("task", task.name, f"{task.in_words(problem)}: {reason}", remedy)


@dataclass
class TrainingProblems:
    """Returns every step's problems, and keeps the pass rates that a sampler may read.

    A problem whose prompt is too long is replaced, at its position, by the problem REPLACEMENT
    further on in the stream. If that prompt is too long too, the next multiple follows. So the
    problem at a position does not depend on replacements at other positions.
    """

    task: Task
    seed: int
    sampler: Sampler
    prompts_per_step: int  # problems of a step, and of a refill round
    query_set_size: int = 0  # 0: the whole stream
    refresh_every: int = 0  # steps after which the next query set takes over; 0: never
    max_prompt_tokens: int | None = None
    # returns the number of a prompt's tokens; used only with max_prompt_tokens
    prompt_length: Callable[[str], int] = len
    # the reason for max_prompt_tokens in words, for messages; "": the setting of that name
    limited_by: str = ""
    # by position: the running mean reward of its groups
    pass_rates: dict[int, float] = field(default_factory=dict)
    # pass_rates at the epoch's start, which the sampler reads
    epoch_rates: dict[int, float] = field(default_factory=dict)
    # problems of one query set, by position
    _cache: dict[int, Problem] = field(default_factory=dict, repr=False)
    _cached_set: int = 0  # the number of the query set of `_cache`

    def take(self, step: int, refill: int = 0) -> list[Problem]:
        """Return the problems of a step's refill round.

        Round 0 is the step's own batch. It must be taken first."""
        training_set_size = None
        if refill and not self.query_set_size:
            training_set_size = self.task.size("train")
        if training_set_size:
            return self._refill_of_epoch(step, refill, training_set_size)
        query_set = self.query_set(step)
        if self.sampler.reads_pass_rates and refill == 0:
            _, batch = query_set.epoch_and_batch(step, self.prompts_per_step)
            if batch == 0:
                self._begin_epoch(query_set)
        positions = self.sampler.choose(
            self.seed, step, self.prompts_per_step, query_set, self.epoch_rates, refill
        )
        return [self.problem(position) for position in positions]

    def _begin_epoch(self, query_set: QuerySet) -> None:
        """Drop the pass rates of replaced query sets, and freeze the others for an epoch."""
        positions = range(query_set.start, query_set.start + query_set.size)
        self.pass_rates = {
            position: rate for position, rate in self.pass_rates.items() if position in positions
        }
        self.epoch_rates = dict(self.pass_rates)

    def revisits(self, refill: int) -> bool:
        """Return whether the problems of a round occur again in the run, at the same positions."""
        return bool(self.query_set_size or (refill and self.task.size("train")))

    def _refill_of_epoch(self, step: int, refill: int, size: int) -> list[Problem]:
        """Return the problems of a refill round over a training set of `size` problems.

        They are the next problems of the step's epoch, cyclically, that the step has not met yet
        and whose prompts fit. There are fewer, or none, if the epoch has no more of them."""
        epoch = self.prompts_per_step * (step - 1) // size
        met = {problem.prompt for problem in self.take(step)}
        refills: list[Problem] = []
        for offset in range(size):
            position = epoch * size + (self.prompts_per_step * step + offset) % size
            problem = self.task.problem(self.seed, "train", position)
            if problem.prompt not in met and self._fits(problem):
                met.add(problem.prompt)
                refills.append(problem)
                if len(refills) == refill * self.prompts_per_step:
                    break
        return refills[(refill - 1) * self.prompts_per_step :]

    def query_set(self, step: int) -> QuerySet:
        """Return the query set of a step."""
        size = self.query_set_size
        every = self.refresh_every
        number = (step - 1) // every if every else 0
        if number != self._cached_set:
            self._cache = {}
            self._cached_set = number
        start = number * size
        training_set_size = self.task.size("train") if number else None
        if training_set_size:
            epoch, index = divmod(number, training_set_size // size)
            start = epoch * training_set_size + index * size
        return QuerySet(self.problem, start, size, number, number * every + 1)

    def _fits(self, problem: Problem) -> bool:
        """Return whether a problem's prompt is short enough.

        Raises SettingError if the chat template refuses the prompt."""
        if self.max_prompt_tokens is None:
            return True
        try:
            return self.prompt_length(problem.prompt) <= self.max_prompt_tokens
        except ValueError as error:
            raise unfit_prompt(self.task, problem, str(error)) from None

    def problem(self, position: int) -> Problem:
        """Return the problem at a position. Raises ValueError if no replacement's prompt fits."""
        if position in self._cache:
            return self._cache[position]
        for index in range(position, position + MAX_REPLACEMENTS * REPLACEMENT, REPLACEMENT):
            problem = self.task.problem(self.seed, "train", index)
            if self._fits(problem):
                # without a query set a position is visited only once
                if self.query_set_size:
                    self._cache[position] = problem
                return problem
        reason = f"{self.limited_by}, and " if self.limited_by else ""
        raise SettingError(
            "rollout.max_prompt_tokens",
            self.max_prompt_tokens,
            f"{reason}{MAX_REPLACEMENTS} problems of task={self.task.name} in a row have longer "
            "prompts, so there is nothing to train on",
        )

    def skipped(self, problems: list[Problem]) -> int:
        """Return how many problems with too long prompts were replaced to get these problems."""
        return sum(problem.index // REPLACEMENT for problem in problems)

    def record(self, groups: list[list[ScoredResponse]]) -> None:
        """Update the pass rates with scored groups.

        A problem's rate is its first mean reward, then a running mean with weight 0.5."""
        if not self.sampler.reads_pass_rates:
            return
        for group in groups:
            position = group[0].problem.index % REPLACEMENT
            mean = sum(response.reward for response in group) / len(group)
            previous = self.pass_rates.get(position, mean)
            self.pass_rates[position] = previous + RATE_WEIGHT * (mean - previous)

    def state(self) -> dict[str, dict[str, float]]:
        """Return the pass rates, ready for JSON; empty if the sampler reads none."""
        if not self.sampler.reads_pass_rates:
            return {}
        return {
            "pass_rates": {str(position): rate for position, rate in self.pass_rates.items()},
            "epoch_rates": {str(position): rate for position, rate in self.epoch_rates.items()},
        }

    def load_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore the result of `state`.

        Raises ValueError if the sampler reads pass rates and the state has none."""
        if not self.sampler.reads_pass_rates:
            return
        if not {"pass_rates", "epoch_rates"} <= state.keys():
            raise SettingError(
                "sampler",
                self.sampler.name,
                f"reads pass rates; the state has {sorted(state) or 'none'}",
            )
        self.pass_rates = {int(position): rate for position, rate in state["pass_rates"].items()}
        self.epoch_rates = {int(position): rate for position, rate in state["epoch_rates"].items()}
