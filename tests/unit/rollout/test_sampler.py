"""Which problems a step sees: streams, epochs, groups of like problems, schedules, the same choice
after a resume.
"""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest

from gspo.data.problems import Problem
from gspo.data.samples import Score, ScoredResponse
from gspo.data.seeding import permutation
from gspo.rollout.sources.problem_sampler import (
    REFILL,
    REPLACEMENT,
    Grouped,
    QuerySet,
    TrainingProblems,
    Uniform,
)
from gspo.tasks.mixture import Mixture
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic
from refusals import refuses

SAMPLERS = [
    Uniform(),
    *(Grouped(by=by) for by in ("difficulty", "task", "length", "task_length")),
    *(
        Grouped(by=by, order=order)
        for by in ("difficulty", "length")
        for order in ("easy_first", "hard_first")
    ),
]


def a_problem(place: int) -> Problem:
    return Problem("code" if place % 3 else "math", place, "x" * (place * 7 % 20 + 1), None)


def query_set(size: int = 24, number: int = 0, first_step: int = 1) -> QuerySet:
    return QuerySet(a_problem, number * size, size, number, first_step)


def epoch(
    sampler,
    seed: int = 1,
    rates: dict | None = None,
    first: int = 1,
    prompts_per_step: int = 4,
    **options,
) -> list[list]:
    """The batches of the epoch that begins at step `first`."""
    chosen = query_set(**options)
    steps = range(first, first + chosen.size // prompts_per_step)
    return [sampler.choose(seed, step, prompts_per_step, chosen, rates or {}) for step in steps]


def group(problem: Problem, rewards: list[float]) -> list[ScoredResponse]:
    parts = dict(
        prompt_ids=[1], token_ids=[2], logprobs=None, finish_reason="stop", text="", policy_step=0
    )
    return [
        ScoredResponse(problem, i, **parts, score=Score(reward, ""))
        for i, reward in enumerate(rewards)
    ]


def stream(
    sampler=None, task=None, prompts_per_step: int = 4, size: int = 24, **options
) -> TrainingProblems:
    return TrainingProblems(
        task or ChainArithmetic(), 7, sampler or Uniform(), prompts_per_step, size, **options
    )


@dataclass
class Finite:
    """A task whose training set has `count` problems; epoch e is a permutation by (seed, e), as of
    any benchmark.
    """

    count: int = 512
    name: str = "finite"

    def size(self, split: str) -> int:
        return self.count

    def problem(self, seed: int, split: str, index: int) -> Problem:
        epoch, place = divmod(index % REPLACEMENT, self.count)
        number = (
            permutation(self.count, seed, epoch)[place]
            if index < REPLACEMENT
            else index // REPLACEMENT
        )
        return Problem("finite", index, f"{number}" + "!" * (9 if number % 10 == 3 else 0), None)


def prompts(problems: list[Problem]) -> list[str]:
    return [problem.prompt for problem in problems]


def indices(problems: list[Problem]) -> list[int]:
    return [problem.index for problem in problems]


def test_the_unbounded_stream_is_taken_in_order():
    batches = [Uniform().choose(1, step, 4, QuerySet(a_problem), {}) for step in (1, 2, 3)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    task, problems = ChainArithmetic(), stream(size=0)
    assert problems.take(5) == [task.problem(7, "train", index) for index in range(16, 20)]
    refills = [
        Uniform().choose(1, step, 4, QuerySet(a_problem), {}, refill)
        for step in (1, 2)
        for refill in (0, 1, 2)
    ]
    assert len({place for batch in refills for place in batch}) == 24
    assert refills[4] == [REFILL + place for place in batches[1]]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_every_epoch_visits_every_problem_once(sampler):
    rates = {place: place % 5 / 4 for place in range(24, 44)}
    for first in (1, 7, 13):
        batches = epoch(sampler, rates=rates, first=first, number=1)
        assert sorted(place for batch in batches for place in batch) == list(range(24, 48))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_a_choice_is_a_function_of_its_arguments(sampler):
    rates = {place: place % 5 / 4 for place in range(20)}
    first = epoch(sampler, rates=rates)
    assert epoch(sampler, rates=dict(reversed(rates.items()))) == first
    changed = [epoch(sampler, seed=2, rates=rates), epoch(sampler, rates=rates, first=7)]
    assert first not in changed and changed[0] != changed[1]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_refill_rounds_of_a_step_see_different_problems(sampler):
    for step in (1, 3, 6):
        rounds = [sampler.choose(1, step, 4, query_set(), {}, refill) for refill in range(6)]
        assert len({place for batch in rounds for place in batch}) == 24


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 8])
@pytest.mark.parametrize("count", [512, 100, 97])
def test_refill_rounds_of_a_finite_set_take_its_unused_problems_and_then_no_more(count, limit):
    """Whatever the step's place in its epoch, also across the border of two epochs."""
    problems = stream(task=Finite(count), prompts_per_step=16, size=0, max_prompt_tokens=limit)
    own = stream(task=Finite(count), prompts_per_step=16, size=0, max_prompt_tokens=limit)
    everything = prompts([Finite(count).problem(7, "train", i) for i in range(count)])
    usable = {prompt for prompt in everything if len(prompt) <= (limit or 99)}
    for step in (1, 2, 5, 6, 7, 32, 33):
        rounds = [problems.take(step, refill) for refill in range(12)]
        assert rounds[0] == own.take(step), "the step's own batch is that of a run without refill"
        more = prompts([problem for taken in rounds[1:] for problem in taken])
        assert len(more) == len(set(more)) and not set(more) & set(prompts(rounds[0]))
        unused = usable - set(prompts(rounds[0]))
        assert set(more) <= unused and len(more) == min(11 * 16, len(unused))
        assert rounds[3] == stream(
            task=Finite(count), prompts_per_step=16, size=0, max_prompt_tokens=limit
        ).take(step, 3)
    random_numbers = {problems.revisits(refill) for refill in (1, 2)}
    assert random_numbers == {True} and not problems.revisits(0), (
        "a refilled problem comes again at its own step"
    )


def test_query_sets_of_a_finite_set_hold_no_problem_twice():
    problems = stream(task=Finite(100), prompts_per_step=8, size=40, refresh_every=5)
    for number in range(6):
        steps = range(5 * number + 1, 5 * number + 6)
        assert len({p for step in steps for p in prompts(problems.take(step))}) == 40
    assert indices(problems.take(6)) == [40 + i for i in permutation(40, 7, "problems", 1, 0)[:8]]


def test_batches_hold_like_problems():
    batches = epoch(Grouped(by="length"))
    spans = [
        (min(lengths), max(lengths))
        for lengths in ([len(a_problem(p).prompt) for p in b] for b in batches)
    ]
    assert all(low[1] <= high[0] for low, high in pairwise(sorted(spans)))
    tasks = [
        Counter(a_problem(place).task for place in batch) for batch in epoch(Grouped(by="task"))
    ]
    assert sorted(map(dict, tasks), key=str) == [{"code": 4}] * 4 + [{"math": 4}] * 2
    both = epoch(Grouped(by="task_length"))
    for task in ("code", "math"):
        mine = [
            [len(a_problem(p).prompt) for p in batch]
            for batch in both
            if a_problem(batch[0]).task == task
        ]
        assert all(max(low) <= min(high) for low, high in pairwise(sorted(mine)))


def test_a_real_mixture_is_grouped_by_task():
    problems = stream(Grouped(by="task"), Mixture(), prompts_per_step=8, size=64)
    kinds = [{problem.task for problem in problems.take(step)} for step in range(1, 9)]
    assert sum(len(kind) == 2 for kind in kinds) <= 1 and {"math"} in kinds and {"code"} in kinds


def test_orders_of_difficulty_and_length():
    rates = {0: 1.0, 1: 0.0, 2: 0.25, 3: 0.75, 4: 0.9, 5: 0.1, 6: 0.8}  # 7 is not seen yet: 0.5
    options = dict(rates=rates, prompts_per_step=2, size=8)
    easy = epoch(Grouped(order="easy_first"), **options)
    assert easy == [[0, 4], [6, 3], [7, 2], [5, 1]]
    assert epoch(Grouped(order="hard_first"), **options) == easy[::-1]
    shuffled = epoch(Grouped(), **options)
    assert sorted(shuffled) == sorted(easy)
    assert len({str(epoch(Grouped(), seed=seed, **options)) for seed in range(5)}) > 1
    lengths = [
        len(a_problem(place).prompt)
        for batch in epoch(Grouped("grouped", "length", "easy_first"))
        for place in batch
    ]
    assert lengths == sorted(lengths)
    assert Grouped(order="easy_first").choose(1, 4, 2, query_set(8), rates, refill=1) == easy[0], (
        "cyclic"
    )


def test_query_sets_replace_each_other_on_schedule():
    problems = stream(refresh_every=9)  # an epoch has 6 steps
    batches = {step: indices(problems.take(step)) for step in range(1, 28)}
    for number in range(3):
        steps = range(9 * number + 1, 9 * number + 10)
        assert sorted(i for step in steps[:6] for i in batches[step]) == list(
            range(24 * number, 24 * number + 24)
        )
        assert {i for step in steps for i in batches[step]} == set(
            range(24 * number, 24 * number + 24)
        )
    fresh = stream(refresh_every=9)
    assert [indices(fresh.take(step)) for step in (20, 3, 12)] == [
        batches[step] for step in (20, 3, 12)
    ]


@pytest.mark.parametrize("size", [0, 24])
def test_too_long_prompts_are_replaced_in_their_place(size):
    free, limited = (stream(size=size, max_prompt_tokens=limit) for limit in (None, 8))
    skipped = 0
    for step in (1, 2, 3, 9):
        before, after = free.take(step), limited.take(step)
        assert all(len(problem.prompt) <= 8 for problem in after)
        for old, new in zip(before, after, strict=True):
            assert (
                new == old
                if len(old.prompt) <= 8
                else (new.index % REPLACEMENT == old.index != new.index)
            )
        skipped += limited.skipped(after)
        assert limited.skipped(after) >= sum(len(problem.prompt) > 8 for problem in before)
        assert limited.take(step) == after == stream(size=size, max_prompt_tokens=8).take(step)
    assert skipped
    with refuses("rollout.max_prompt_tokens", 2, "task=math"):
        stream(max_prompt_tokens=2).take(1)


def test_pass_rates_are_running_means_recorded_only_where_they_are_read():
    problem = Problem("math", 3 + 2 * REPLACEMENT, "1+1=?", 2)  # stands at place 3
    difficulty, uniform = stream(Grouped()), stream()
    for source in (difficulty, uniform):
        for rewards in ([1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]):
            source.record([group(problem, rewards)])
    assert difficulty.pass_rates == {3: 0.4375} and uniform.pass_rates == {} == uniform.state()


def play(problems: TrainingProblems, steps) -> list[list[int]]:
    """Take the steps' problems and record rewards that depend on problem and step."""
    chosen = []
    for step in steps:
        batch = problems.take(step)
        problems.record(
            [
                group(problem, [float((problem.index * step + i) % 5 < 2) for i in range(3)])
                for problem in batch
            ]
        )
        chosen.append(indices(batch))
    return chosen


@pytest.mark.parametrize("refresh_every", [0, 15])
@pytest.mark.parametrize("order", ["shuffled", "easy_first"])
def test_a_resumed_run_chooses_the_same_problems(order, refresh_every):
    options = dict(sampler=Grouped(order=order), refresh_every=refresh_every)
    whole = play(stream(**options), range(1, 31))
    for first in range(0, 30, 6):
        assert len({i for batch in whole[first : first + 6] for i in batch}) == 24 or refresh_every
    for stop in (1, 6, 8, 12, 15, 17, 29):
        before, after = stream(**options), stream(**options)
        play(before, range(1, stop + 1))
        after.load_state(json.loads(json.dumps(before.state())))
        assert play(after, range(stop + 1, 31)) == whole[stop:], stop
    without = stream(**options)
    assert play(without, range(9, 31)) != whole[8:], "the case should depend on the rates"
    assert len(before.pass_rates) <= 24, "rates of replaced query sets are dropped"


def test_rates_stand_still_within_an_epoch():
    problems = stream(Grouped(order="hard_first"))
    play(problems, range(1, 7))
    seen = dict(problems.pass_rates)
    batches = play(problems, range(7, 13))
    rates = [[seen[i] for i in batch] for batch in batches]
    assert all(max(harder) <= min(easier) for harder, easier in pairwise(rates))
    assert problems.epoch_rates == seen != problems.pass_rates


def test_wrong_samplers_and_states_are_refused():
    for options, refusal in (
        (dict(by="colour"), ("sampler.by", "colour")),
        (dict(order="random"), ("sampler.order", "random")),
        (
            dict(by="task", order="easy_first"),
            ("sampler.order", "easy_first", "with sampler.by=task"),
        ),
        (
            dict(by="task_length", order="hard_first"),
            ("sampler.order", "hard_first", "with sampler.by=task_length"),
        ),
    ):
        with refuses(*refusal):
            Grouped(**options)
    with refuses("sampler", "grouped", "reads pass rates; the state has"):
        stream(Grouped()).load_state({})
    stream().load_state({})
