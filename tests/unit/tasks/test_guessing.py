"""The guessing game: its best play is known, and is the best."""

import random
from functools import cache

import pytest

from gspo.data.problems import Problem
from gspo.tasks.environments.protocol import SampledTurn
from gspo.tasks.testbed.guessing import Guessing, best_guesses, bounds


def play(task: Guessing, problem: Problem, choose) -> tuple[float, dict, list[str]]:
    game, said, rewards, measures = task.environment(problem, (0,)), [], 0.0, {}
    for _ in range(task.turns):
        outcome = game.step(choose(said))
        said.append(outcome.observation)
        rewards += outcome.reward
        for name, value in outcome.measures.items():
            measures[name] = measures.get(name, 0) + value
        if outcome.done:
            break
    return rewards, measures, said


def halving(problem: Problem):
    low, high = bounds(problem.prompt)
    guess = None

    def choose(said: list[str]) -> str:
        nonlocal low, high, guess
        if said:
            low, high = (guess + 1, high) if said[-1] == ">" else (low, guess - 1)
        guess = (low + high) // 2
        return str(guess)

    return choose


def test_no_other_way_of_asking_needs_fewer_guesses():
    @cache
    def least(count: int) -> int:  # the sum over all numbers, of the best first guess
        return count and count + min(least(i) + least(count - 1 - i) for i in range(count))

    for numbers in range(1, 30):
        assert sum(best_guesses(numbers)) == least(numbers)


def test_halving_has_no_regret_on_average_and_every_number_is_found():
    task, regrets = Guessing(), []
    for number in range(60, 75):
        problem = Problem("guessing", 0, "60-74", number)
        reward, measures, said = play(task, problem, halving(problem))
        assert set(said) <= {"<", ">", ""} and reward > 0
        regrets.append(measures["regret"])
    assert sum(regrets) / len(regrets) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "guess", ["", "x", "067", "+67", "59", "75", "6" * 100, "６７", "67\n", "6.7e1"]
)
def test_what_is_no_number_of_what_is_left_ends_the_episode(guess):
    problem = Problem("guessing", 0, "60-74", 67)
    reward, measures, said = play(Guessing(), problem, lambda said: guess)
    assert reward == 0 and said == [""] and measures["invalid"] == measures["guesses"] == 1
    assert measures["regret"] == pytest.approx(Guessing().best_reward)
    # the second time it is no longer possible
    _, measures, said = play(Guessing(), problem, lambda said: "70")
    assert said == ["<", ""] and measures["invalid"] == 1


def test_who_does_not_find_the_number_regrets_all_that_there_was_to_win():
    task = Guessing(turns=3)
    reward, measures, said = play(
        task, Problem("guessing", 0, "60-74", 74), lambda said: str(60 + len(said))
    )
    assert (
        reward == 0
        and said == [">", ">", ""]
        and measures["guesses"] == 3
        and not measures["invalid"]
    )
    assert measures["regret"] == pytest.approx(task.best_reward)


def test_who_is_cut_off_in_the_first_turn_has_that_regret_too():
    task = Guessing()
    problem = Problem("guessing", 0, "60-74", 74)
    game = task.environment(problem, (1, 2))
    assert game.settles
    assert game.settle(SampledTurn("6")).measures == {"regret": task.best_reward}
    game.step("67")
    assert game.settle(SampledTurn("7")).measures == {}, "the first turn has counted it"


def test_problems_are_pure_and_demonstrations_find_the_number():
    task = Guessing()
    for index in range(50):
        problem = task.problem(3, "train", index)
        low, high = bounds(problem.prompt)
        assert (
            problem == task.problem(3, "train", index)
            and high - low == 14
            and low <= problem.answer <= high
        )
        turns = task.demonstrated_turns(problem, 0.9, random.Random(index))
        game = task.environment(problem, (0,))
        for guess, said in zip(turns[::2], [*turns[1::2], None], strict=True):
            outcome = game.step(guess)
            assert said is None or outcome.observation == said
        assert outcome.done == (len(turns[::2]) == task.turns or turns[-1] == str(problem.answer))
