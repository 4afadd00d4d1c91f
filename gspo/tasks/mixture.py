"""A mixture of the math task and the code task in one run, as in the paper."""

import random
from dataclasses import dataclass, field
from typing import ClassVar

from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.data.seeding import generator
from gspo.io.errors import SettingError
from gspo.io.ranges import ranged
from gspo.tasks.base import Answer, Task
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic
from gspo.tasks.testbed.function_writing import FunctionWriting


@dataclass
class Mixture(Task):
    """A mixture in which a share `code_share` of the training problems is code, the rest math.

    The evaluation sets stay separate."""

    name: str = "mixed"
    math: ChainArithmetic = field(default_factory=ChainArithmetic)
    code: FunctionWriting = field(default_factory=FunctionWriting)
    code_share: float = ranged(0.5, least=0, most=1)
    has_demonstrations: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.math.name == self.code.name:
            raise SettingError(
                f"{self.key}.math.name",
                self.math.name,
                f"is {self.key}.code.name too; the tasks of a mixture need different names",
            )

    def evaluation_sets(self) -> list[str]:
        return self.math.evaluation_sets() + self.code.evaluation_sets()

    def size(self, split: str) -> int | None:
        task = self._owner_of_set(split)
        return task.size(split) if task else None

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of the task that has the split.

        In training, a random number for the index chooses the task."""
        task = self._owner_of_set(split)
        if task is None:
            is_code = generator(seed, self.name, split, index).random() < self.code_share
            task = self.code if is_code else self.math
        return task.problem(seed, split, index)

    def demonstration(self, problem: Problem, wrong_step_rate: float, rng: random.Random) -> str:
        return self._owner(problem).demonstration(problem, wrong_step_rate, rng)

    def score(self, answers: list[Answer]) -> list[Score]:
        """Return the scores of the math task and of the code task, in the order of the answers."""
        scores = {}
        for task in (self.math, self.code):
            indices = [i for i, answer in enumerate(answers) if self._owner(answer[0]) is task]
            scores.update(zip(indices, task.score([answers[i] for i in indices]), strict=True))
        return [scores[i] for i in range(len(answers))]

    def ready(self) -> dict[str, str]:
        return self.math.ready() | self.code.ready()

    def close(self) -> None:
        self.math.close()
        self.code.close()

    def _owner_of_set(self, split: str) -> ChainArithmetic | FunctionWriting | None:
        """Return the task that has an evaluation set, or None for a training split."""
        self.check_split(split)
        tasks = (self.math, self.code)
        return next((task for task in tasks if split in task.evaluation_sets()), None)

    def _owner(self, problem: Problem) -> ChainArithmetic | FunctionWriting:
        """Return the task that made a problem. Raises KeyError for a problem of another task."""
        return {self.math.name: self.math, self.code.name: self.code}[problem.task]
