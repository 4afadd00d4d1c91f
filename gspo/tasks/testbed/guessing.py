"""A game of several turns whose best play is known: find a number by asking whether it is larger or
smaller.

    prompt         40-54
    policy         47
    environment    >          (it is larger)
    policy         51
    environment    <
    policy         49         found: reward 1 - 2/turns, because two guesses were wasted

A turn that is no number of what is left ends the episode without reward.

Who halves the interval every time needs the fewest guesses on average. So every episode has a
regret: the mean reward of that play minus the reward of the episode. Its mean is 0 for the best
play, and more for any other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from gspo.data.samples import Problem
from gspo.data.seeding import generator
from gspo.io.ranges import ranged
from gspo.tasks.base import check_split, draw_prompt
from gspo.tasks.environments.protocol import Environment, EnvironmentTask, Outcome
from gspo.tasks.testbed.chain_arithmetic import INTEGER


@dataclass
class Guessing(EnvironmentTask):
    """Intervals of `numbers` numbers below 100. An episode has at most `turns` guesses."""

    name: str = "guessing"
    turns: int = ranged(8, least=1)
    numbers: int = ranged(15, least=2, most=60)
    has_demonstrations: ClassVar[bool] = True

    def evaluation_sets(self) -> list[str]:
        return [self.name]

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split; the answer is the number to be found."""
        check_split(split, self.evaluation_sets())
        rng = generator(seed, self.name, split, index)
        prompt = draw_prompt(split, lambda: self._interval(rng.randint(1, 100 - self.numbers)))
        low, high = bounds(prompt)
        return Problem(
            self.name,
            index,
            prompt,
            answer=rng.randint(low, high),
            family=f"{self.numbers} numbers",
        )

    def environment(self, problem: Problem, position: tuple[int | str, ...]) -> Environment:
        return _Game(self, problem)

    def demonstrated_turns(
        self, problem: Problem, wrong_step_rate: float, rng: random.Random
    ) -> list[str]:
        """Return the turns of an episode. A guess is the middle of what is left, or with
        probability `wrong_step_rate` any number that is left."""
        low, high = bounds(problem.prompt)
        turns: list[str] = []
        for _ in range(self.turns):
            guess = rng.randint(low, high) if rng.random() < wrong_step_rate else (low + high) // 2
            turns.append(str(guess))
            if guess == problem.answer:
                break
            turns.append(">" if problem.answer > guess else "<")
            low, high = (guess + 1, high) if problem.answer > guess else (low, guess - 1)
        return turns if len(turns) % 2 else turns[:-1]

    @property
    def best_reward(self) -> float:
        """The mean reward of the best play, over all numbers of an interval."""
        return sum(self.reward(guesses) for guesses in best_guesses(self.numbers)) / self.numbers

    def reward(self, guesses: int) -> float:
        """Return the reward for finding the number with so many guesses; 0 for more than there are
        turns.
        """
        return max(0.0, 1 - (guesses - 1) / self.turns)

    def _interval(self, low: int) -> str:
        return f"{low}-{low + self.numbers - 1}"


class _Game(Environment):
    def __init__(self, task: Guessing, problem: Problem):
        self.task, self.answer, self.guesses = task, problem.answer, 0
        self.low, self.high = bounds(problem.prompt)

    def step(self, text: str) -> Outcome:
        self.guesses += 1
        valid = (
            bool(INTEGER.fullmatch(text)) and len(text) < 9 and self.low <= int(text) <= self.high
        )
        found, last = valid and int(text) == self.answer, self.guesses == self.task.turns
        reward = self.task.reward(self.guesses) if found else 0.0
        # with the first guess, so that an episode that is cut off later has its regret too
        missed = self.task.best_reward if self.guesses == 1 else 0.0
        measures = {"guesses": 1, "invalid": int(not valid), "regret": missed - reward}
        if found or last or not valid:
            verdict = "found" if found else "not-found" if valid else "invalid"
            return Outcome("", reward, True, verdict, text[:9], measures)
        guess = int(text)
        larger = self.answer > guess
        self.low, self.high = (guess + 1, self.high) if larger else (self.low, guess - 1)
        return Outcome(">" if larger else "<", measures=measures)


def bounds(prompt: str) -> tuple[int, int]:
    """Return the smallest and the largest number that a prompt names."""
    low, high = prompt.split("-")
    return int(low), int(high)


def best_guesses(numbers: int) -> list[int]:
    """Return how many guesses each of so many numbers takes when the interval is halved every time.

    >>> best_guesses(7)
    [3, 2, 3, 1, 3, 2, 3]
    """
    if numbers < 1:
        return []
    left, right = (numbers - 1) // 2, numbers // 2
    return [*(n + 1 for n in best_guesses(left)), 1, *(n + 1 for n in best_guesses(right))]
