"""The math task: add and subtract small numbers from left to right, showing each partial sum.

    prompt      7+5-3+8=?
    response    7+5=12;12-3=9;9+8=17;#17

Only the answer after `#` is scored. It must be exact; the steps earn nothing.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.data.seeding import generator
from gspo.io.errors import SettingError
from gspo.io.ranges import ranged
from gspo.tasks.base import Answer, Task, draw_prompt, held_out

# one spelling per number: no leading zeros, no +, no -0, ASCII digits only
INTEGER = re.compile(r"0|-?[1-9][0-9]*")
MAX_LISTED = 99  # up to this largest number, all sums of two numbers are listed
SIGNED = re.compile(r"[+-]?[0-9]+")


@dataclass
class ChainArithmetic(Task):
    """Chains of `min_operands` to `max_operands` numbers from 1 to `largest`.

    A chain has one step fewer than operands. The evaluation sets are math_easy (the shorter half of
    these lengths), math_hard (the greatest length) and rated (up to two operands more). There are
    few chains of two small numbers, so math_easy then holds each of them once."""

    name: str = "math"
    min_operands: int = ranged(2, least=2, most=20)
    max_operands: int = ranged(6, least=2, most=20)
    # below 5 there are too few problems to hold some out
    largest: int = ranged(9, least=5, most=999)
    has_demonstrations: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_operands < self.min_operands:
            raise SettingError(
                f"{self.key}.max_operands",
                self.max_operands,
                f"is below {self.key}.min_operands={self.min_operands}",
            )

    def evaluation_sets(self) -> list[str]:
        return ["math_easy", "math_hard", "rated"]

    def size(self, split: str) -> int | None:
        self.check_split(split)
        return len(sums_of_two(self.largest)) if self._is_small(split) else None

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split.

        Rated problems have 1000 + 200 (operands - 2) Elo points: 1000 for two operands, 1800 for
        six (the longest of training by default), 2200 for eight."""
        self.check_split(split)
        low, high = self._operands(split)
        if self._is_small(split):
            sums = sums_of_two(self.largest)
            prompt = sums[index % len(sums)]
        else:
            rng = generator(seed, self.name, split, index)
            prompt = draw_prompt(split, lambda: self._chain(rng, rng.randint(low, high)) + "=?")
        terms = _terms(prompt)
        return Problem(
            task=self.name,
            index=index,
            prompt=prompt,
            answer=sum(terms),
            family=f"{len(terms)} operands",
            rating=1000.0 + 200.0 * (len(terms) - 2) if split == "rated" else None,
        )

    def demonstration(self, problem: Problem, wrong_step_rate: float, rng: random.Random) -> str:
        """Return the worked chain. The steps after a wrong step are right sums of a wrong value."""
        terms = _terms(problem.prompt)
        truth = terms[0]
        value = truth
        steps = []
        for term in terms[1:]:
            truth += term
            result = value + term
            if rng.random() < wrong_step_rate:
                # A wrong step never leads back to the true sum. A demonstration with a wrong step
                # therefore has a wrong answer.
                nearby = [result - 2, result - 1, result + 1, result + 2]
                result = rng.choice([number for number in nearby if number != truth])
            steps.append(f"{value}{term:+d}={result};")
            value = result
        return "".join(steps) + f"#{value}"

    def score(self, answers: list[Answer]) -> list[Score]:
        return [
            Score(*judge(problem, text)) if ended else Score(0.0, "truncated")
            for problem, text, ended in answers
        ]

    def _operands(self, split: str) -> tuple[int, int]:
        """Return the smallest and the largest number of operands in a split."""
        if split == "math_easy":
            return self.min_operands, (self.min_operands + self.max_operands) // 2
        if split == "math_hard":
            return self.max_operands, self.max_operands
        # beyond the longest of training, so that a good policy stays on the scale
        if split == "rated":
            return 2, self.max_operands + 2
        return self.min_operands, self.max_operands

    def _is_small(self, split: str) -> bool:
        """Return whether a set has so few problems that random draws would often repeat them."""
        is_sum_of_two = split == "math_easy" and self._operands(split) == (2, 2)
        return is_sum_of_two and self.largest <= MAX_LISTED

    def _chain(self, rng: random.Random, operands: int) -> str:
        rest = (rng.choice("+-") + str(rng.randint(1, self.largest)) for _ in range(operands - 1))
        return str(rng.randint(1, self.largest)) + "".join(rest)


@lru_cache(maxsize=8)
def sums_of_two(largest: int) -> list[str]:
    """Return all held-out sums and differences of two numbers up to `largest`, in a fixed order."""
    numbers = range(1, largest + 1)
    prompts = [
        f"{first}{sign}{second}=?" for first in numbers for sign in "+-" for second in numbers
    ]
    held_out_prompts = [prompt for prompt in prompts if held_out(prompt)]
    return sorted(held_out_prompts, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())


def _terms(prompt: str) -> list[int]:
    """Return the signed numbers of a prompt: "7+5-3=?" gives [7, 5, -3]."""
    return [int(term) for term in SIGNED.findall(prompt)]


def judge(problem: Problem, text: str) -> tuple[float, str, str]:
    """Return reward, verdict and answer of a response. The answer is the text after its only `#`.

    Numbers are compared as text, so a million digits cost nothing."""
    if "#" not in text:
        return 0.0, "no-answer", ""
    answer = text.partition("#")[2]
    # this rejects a second `#`, trailing text and hedges
    if not INTEGER.fullmatch(answer):
        return 0.0, "malformed", ""
    right = answer == str(problem.answer)
    return float(right), "correct" if right else "wrong", answer
