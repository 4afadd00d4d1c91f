"""The base class of tasks, and the rule that keeps evaluation problems out of training.

A task makes problems and scores responses. Some tasks also write demonstrations. Problem i of a
split is a pure function of (seed, split, i), so every run, worker and resumed run sees the same
problem.
"""

import hashlib
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, ClassVar

from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.data.seeding import permutation
from gspo.io.errors import SettingError
from gspo.io.ranges import Ranged, check_ranges

TRAINING_SPLITS = ("train", "cold_start")
HELD_OUT_ONE_IN = 8
MAX_DRAWS = 1000
# a problem, the text of a response, and whether the response ended by itself
Answer = tuple[Problem, str, bool]
_built_key: ContextVar[str] = ContextVar("the path of the task that is built", default="task")


@contextmanager
def built_at(key: str) -> Generator[None]:
    """Let tasks that are built within this context name their settings KEY.FIELD in messages."""
    token = _built_key.set(key)
    try:
        yield
    finally:
        _built_key.reset(token)


class Task(Ranged, key="task"):
    """A source of verifiable problems. A subclass is a dataclass whose fields are its settings.

    It must define `problem`, `score` and `evaluation_sets`. The other methods have defaults that
    suit a simple task. `Problem.task` and the metric `reward/<name>` use its field `name`.
    """

    name: str
    # the path of its settings, for messages, for example tasks.NAME in `gspo evaluate`
    key = "task"
    # the response limit of published evaluations, 0 if there is none
    max_new_tokens: ClassVar[int] = 0
    # The reward of a truncated response. With None, `score` judges it like any other response. The
    # setting reward.truncated sets it.
    truncated_reward: ClassVar[float | None] = 0.0
    # The weights of named rewards, which the setting reward.weights sets. With None, outside of
    # training, all are 1.
    reward_weights: ClassVar[dict[str, float] | None] = None
    # `demonstration` writes worked responses, so a cold start is possible
    has_demonstrations: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raise ValueError for the first field whose value its range or its choices forbid."""
        self.key = _built_key.get()
        check_ranges(self, f"{self.key}.")

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split. This is a pure function.

        The split is "train", "cold_start" or one of `evaluation_sets()`."""
        raise NotImplementedError

    def score(self, answers: list[Answer]) -> list[Score]:
        """Return the scores in the order of `answers`.

        A truncated response scores 0 with the verdict "truncated", whatever its text. With
        reward.truncated=null it is passed as a response that ended by itself.
        """
        raise NotImplementedError

    def evaluation_sets(self) -> list[str]:
        """Return the names of the held-out sets. Each is also a split of `problem`."""
        raise NotImplementedError

    def check_split(self, split: str) -> None:
        """Raise ValueError for a split that the task does not have."""
        splits = [*TRAINING_SPLITS, *self.evaluation_sets()]
        if split not in splits:
            raise SettingError("split", split, f"is none of {splits}")

    def size(self, split: str) -> int | None:
        """Return the number of different problems of a split, or None if there is no end."""
        self.check_split(split)
        return None

    def data(self) -> dict[str, Any]:
        """Return facts about each set that was read from files or from the hub.

        They are the number of its problems, a digest of them, and the number of problems left out,
        by the reason. The result is empty for a task that generates its problems."""
        return {}

    def left_out_of_evaluation(self) -> str:
        """Return how many records the evaluation set leaves out and why, "" if it leaves none."""
        return ""

    def environments(self) -> dict[str, Any]:
        """Return the tasks whose problems are played in an environment, by `Problem.task`.

        They are this task, or some tasks of a mixture. `score` scores the responses to all other
        problems. See gspo.tasks.environments.protocol."""
        return {}

    def in_words(self, problem: Problem) -> str:
        """Return the words by which a message names a problem."""
        return f"problem {problem.index}"

    def demonstration(self, problem: Problem, wrong_step_rate: float, rng: random.Random) -> str:
        """Return a worked response, without the end-of-sequence token.

        Each step is wrong with probability `wrong_step_rate`. A response with a wrong step scores
        0, so its chance to score 1 is (1 - wrong_step_rate)^steps. Raises ValueError for a task
        that has no demonstrations.
        """
        raise SettingError(
            "task",
            self.name,
            "has no demonstrations",
            remedy="start from a model that can follow instructions (model=hf cold_start.steps=0)",
        )

    def ready(self) -> dict[str, str]:
        """Start the processes that scoring needs, and return the layers of the sandbox.

        The result is empty if the task runs no programs. Raises ValueError if this machine cannot
        score the task.
        """
        return {}

    def close(self) -> None:
        """End the task's processes, if it has any. The task can be used again afterwards."""


class SingleSet(Task):
    """A task with a single evaluation set, which is named like the task."""

    evaluation_size: int = 0  # its number of problems, 0 if there is no end

    def evaluation_sets(self) -> list[str]:
        return [self.name]

    def size(self, split: str) -> int | None:
        self.check_split(split)
        return None if split in TRAINING_SPLITS else self.evaluation_size or None


def held_out(prompt: str) -> bool:
    """Return whether a prompt belongs to evaluation, as 1 in 8 prompts do.

    The text alone decides, so the split is the same for every seed."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def draw_prompt(split: str, make: Callable[[], str]) -> str:
    """Call `make` until a prompt belongs to the split, and return that prompt.

    Training splits get prompts that are not held out. Evaluation sets get held-out prompts."""
    for _ in range(MAX_DRAWS):
        prompt = make()
        if held_out(prompt) == (split not in TRAINING_SPLITS):
            return prompt
    raise RuntimeError(
        f"no prompt for split {split!r} in {MAX_DRAWS} draws: the task has too few different "
        "problems"
    )


# the stream moves on, so a few epochs serve a batch that spans two
@lru_cache(maxsize=16)
def epoch_order(count: int, *position: int | str) -> list[int]:
    """Return the order of `count` training problems in an epoch, by its position."""
    return permutation(count, *position).tolist()
