"""The code task: write the body of a small Python function, which is run on hidden tests.

    prompt      #times 3, add 4, mod 7      response     x=x*3
                def f(x):                                x=x+4
                                                         x=x%7
                                                         return x

Each line of the response begins with one space. The reward is 1 if all hidden tests pass, else 0.
"""

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.data.seeding import generator
from gspo.io.errors import SettingError
from gspo.io.ranges import HASHED_IF_CHANGED, SPEED_ONLY, ranged
from gspo.rewards.code.grader import FunctionCase, Submission
from gspo.tasks.base import Answer, draw_prompt
from gspo.tasks.graded_programs import GradedPrograms
from gspo.tasks.testbed.operations import (
    CATALOGUE,
    FAMILIES,
    HELD_OUT_FAMILIES,
    Family,
    Step,
    draw_steps,
    hidden_inputs,
    reference,
    wrong_step,
)

MAX_DRAWS = 100


@dataclass
class FunctionWriting(GradedPrograms):
    """Functions of 2-4 operations on a number, a list or a string.

    `variables` names the kinds of arguments: x for numbers, a for lists, s for strings. Functions
    of numbers are the shortest, with at most 40 characters. `slots` programs run at a time, each
    within the given CPU seconds and megabytes.
    """

    name: str = "code"
    variables: str = field(default="xas", metadata=HASHED_IF_CHANGED)
    slots: int = ranged(1, least=1, most=64, metadata=SPEED_ONLY)
    cpu_seconds: float = ranged(0.5, least=0.01, most=60)
    wall_seconds: float = ranged(2.0, least=0.01, most=600)
    memory_mb: int = ranged(256, least=64, most=65536)
    allow_weak_sandbox: bool = False
    has_demonstrations: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.variables or not set(self.variables) <= set(CATALOGUE):
            raise SettingError(
                f"{self.key}.variables",
                self.variables,
                f"name one or more of {''.join(CATALOGUE)}",
            )
        if self.wall_seconds < self.cpu_seconds:
            raise SettingError(
                f"{self.key}.wall_seconds",
                self.wall_seconds,
                f"is below {self.key}.cpu_seconds={self.cpu_seconds}",
            )

    def evaluation_sets(self) -> list[str]:
        return ["code", "code_heldout"]

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split.

        "code_heldout" has the families of functions that training never sees."""
        self.check_split(split)
        families = HELD_OUT_FAMILIES if split == "code_heldout" else FAMILIES
        families = [family for family in families if family[0] in self.variables]
        rng = generator(seed, self.name, split, index)
        for _ in range(MAX_DRAWS):
            prompt = draw_prompt(split, lambda: _prompt(rng.choice(families), rng))
            variable, steps = _parse(prompt)
            tests = [((value,), reference(steps, value)) for value in hidden_inputs(variable, rng)]
            # otherwise a program that returns a constant would pass
            if any(expected != tests[0][1] for _, expected in tests):
                family = f"{variable}: {' '.join(operation.word for operation, _ in steps)}"
                return Problem(self.name, index, prompt, answer=tests, family=family)
        raise RuntimeError(f"no function with two different outputs in {MAX_DRAWS} draws")

    def demonstration(self, problem: Problem, wrong_step_rate: float, rng: random.Random) -> str:
        """Return the body of the function.

        A wrong step has another operation or another parameter, which the tests catch."""
        variable, steps = _parse(problem.prompt)
        is_wrong = [rng.random() < wrong_step_rate for _ in steps]
        if not any(is_wrong):
            return _body(variable, steps)
        # some changes have no effect (two that cancel, sort instead of reverse before a sum)
        for _ in range(MAX_DRAWS):
            changed = [
                wrong_step(variable, step, rng) if wrong else step
                for step, wrong in zip(steps, is_wrong, strict=True)
            ]
            if any(reference(changed, value) != expected for (value,), expected in problem.answer):
                return _body(variable, changed)
        raise RuntimeError(
            f"no wrong step that the hidden tests of {problem.prompt!r} catch in {MAX_DRAWS} draws"
        )

    def score(self, answers: list[Answer]) -> list[Score]:
        """Run the programs and return their scores."""
        scores = [Score(0.0, "no-answer" if ended else "truncated") for _, _, ended in answers]
        to_run = [i for i, (_, text, ended) in enumerate(answers) if ended and text.strip()]
        submissions = [submission(answers[i][0], answers[i][1]) for i in to_run]
        for i, score in zip(to_run, self.grade(submissions), strict=True):
            scores[i] = score
        return scores


def submission(problem: Problem, response: str) -> Submission:
    """Return the program (the signature with the response as its body) and the hidden tests."""
    signature = problem.prompt.split("\n")[1]
    cases = tuple(FunctionCase(arguments, expected) for arguments, expected in problem.answer)
    return Submission(f"{signature}\n{response}", "f", cases)


def _prompt(family: Family, rng: random.Random) -> str:
    variable, _ = family
    steps = draw_steps(family, rng)
    words = [op.word if parameter is None else f"{op.word} {parameter}" for op, parameter in steps]
    return f"#{', '.join(words)}\ndef f({variable}):\n"


def _parse(prompt: str) -> tuple[str, list[Step]]:
    """Return the variable and the steps that a prompt describes."""
    description, signature, _ = prompt.split("\n")
    variable = signature[len("def f(")]
    return variable, [_step(variable, words) for words in description[1:].split(", ")]


def _step(variable: str, words: str) -> Step:
    word, _, text = words.partition(" ")
    operation = CATALOGUE[variable][word]
    parameter: Any = next(
        value for value in operation.parameters if value is None or str(value) == text
    )
    return operation, parameter


def _body(variable: str, steps: list[Step]) -> str:
    lines = [operation.line(parameter) for operation, parameter in steps]
    if not steps[-1][0].ends:
        lines.append(f"return {variable}")
    return "\n".join(f" {line}" for line in lines)
