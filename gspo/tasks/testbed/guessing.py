"""A game of several turns whose optimal policy is known: guess a number in an interval.

    prompt         40-54
    policy         47
    environment    >          (it is larger)
    policy         51
    environment    <
    policy         49         found: reward 1 - 2/turns, because two guesses were wasted

A turn that is no number of the remaining interval ends the episode without reward.

The optimal policy halves the interval every time: it needs the fewest guesses on average. The
regret of an episode is the mean reward of the optimal policy minus the reward of the episode. Its
mean is 0 for the optimal policy, and positive for any other policy.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from gspo.data.problems import Problem
from gspo.data.seeding import generator
from gspo.io.ranges import ranged
from gspo.tasks.base import SingleSet, draw_prompt
from gspo.tasks.environments.protocol import (
    Environment,
    EnvironmentTask,
    Outcome,
    Position,
    SampledTurn,
)
from gspo.tasks.testbed.chain_arithmetic import INTEGER

MAX_GUESS_CHARS = 8


@dataclass
class Guessing(SingleSet, EnvironmentTask):
    """Intervals of `numbers` numbers below 100. An episode has at most `turns` guesses."""

    name: str = "guessing"
    turns: int = ranged(8, least=1)
    numbers: int = ranged(15, least=2, most=60)
    has_demonstrations: ClassVar[bool] = True

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split. Its answer is the number to guess."""
        self.check_split(split)
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

    def environment(self, problem: Problem, position: Position) -> Environment:
        return _Game(self, problem)

    def demonstrated_turns(
        self, problem: Problem, wrong_step_rate: float, rng: random.Random
    ) -> list[str]:
        """Return the turns of an episode in which each guess is the middle of the interval.

        With probability `wrong_step_rate` a guess is a random number of the interval instead."""
        low, high = bounds(problem.prompt)
        turns = []
        for _ in range(self.turns):
            guess = rng.randint(low, high) if rng.random() < wrong_step_rate else (low + high) // 2
            turns.append(str(guess))
            if guess == problem.answer:
                break
            if problem.answer > guess:
                turns.append(">")
                low = guess + 1
            else:
                turns.append("<")
                high = guess - 1
        # the last turn is the policy's
        return turns if len(turns) % 2 == 1 else turns[:-1]

    @property
    def best_reward(self) -> float:
        """The mean reward of the optimal policy, over all numbers of an interval."""
        return sum(self.reward(guesses) for guesses in best_guesses(self.numbers)) / self.numbers

    def reward(self, guesses: int) -> float:
        """Return the reward of an episode in which the last of `guesses` guesses was right.

        It is 0 for more guesses than `turns`."""
        return max(0.0, 1 - (guesses - 1) / self.turns)

    def _interval(self, low: int) -> str:
        return f"{low}-{low + self.numbers - 1}"


class _Game(Environment):
    settles = True  # for the regret of an episode that is cut off in its first turn

    def __init__(self, task: Guessing, problem: Problem):
        self.task = task
        self.answer = problem.answer
        self.guesses = 0
        self.low, self.high = bounds(problem.prompt)

    def step(self, text: str) -> Outcome:
        self.guesses += 1
        is_number = INTEGER.fullmatch(text) is not None and len(text) <= MAX_GUESS_CHARS
        valid = is_number and self.low <= int(text) <= self.high
        right = valid and int(text) == self.answer
        reward = self.task.reward(self.guesses) if right else 0.0
        # The first turn counts the whole best reward, so an episode that is cut off later has its
        # regret too.
        best_reward = self.task.best_reward if self.guesses == 1 else 0.0
        measures = {"guesses": 1, "invalid": int(not valid), "regret": best_reward - reward}
        if right or not valid or self.guesses == self.task.turns:
            if right:
                verdict = "found"
            elif valid:
                verdict = "not-found"
            else:
                verdict = "invalid"
            return Outcome("", reward, True, verdict, text[:9], measures)
        guess = int(text)
        if self.answer > guess:
            self.low = guess + 1
            return Outcome(">", measures=measures)
        self.high = guess - 1
        return Outcome("<", measures=measures)

    def settle(self, turn: SampledTurn | None) -> Outcome:
        measures = {} if self.guesses else {"regret": self.task.best_reward}
        return Outcome(done=True, measures=measures)


def bounds(prompt: str) -> tuple[int, int]:
    """Return the smallest and the largest number that a prompt names."""
    low, high = prompt.split("-")
    return int(low), int(high)


def best_guesses(numbers: int) -> list[int]:
    """Return the number of guesses that halving the interval needs for each number in it.

    >>> best_guesses(7)
    [3, 2, 3, 1, 3, 2, 3]
    """
    if numbers < 1:
        return []
    below_middle = best_guesses((numbers - 1) // 2)
    above_middle = best_guesses(numbers // 2)
    return [*(n + 1 for n in below_middle), 1, *(n + 1 for n in above_middle)]
