"""What a task is, and the one rule that keeps evaluation problems out of training.

A task makes problems, can write demonstrations for them, and scores responses. Problem i of a split
is a pure function of (seed, split, i), so every run, worker and resumed run sees the same one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, ClassVar

from gspo.data.samples import Problem, Score
from gspo.io.ranges import Ranged

TRAINING_SPLITS = ("train", "cold_start")
HELD_OUT_ONE_IN = 8
MAX_DRAWS = 1000


class Task(Ranged):
    """The base of all tasks: a source of verifiable problems. A subclass is a dataclass whose
    fields are its settings.

    It must have `problem`, `score` and `evaluation_sets`; the other methods say what holds for a
    simple task. Its field `name` is what `Problem.task` and the metric `reward/<name>` say.
    """

    name: str
    # the response limit of published evaluations; 0 where there is none
    max_new_tokens: ClassVar[int] = 0
    # what a response that was cut off earns; None: `score` is asked about it as about any other. It
    # is set from reward.truncated
    truncated_reward: ClassVar[float | None] = 0.0
    # `demonstration` writes worked responses, so a cold start is possible
    has_demonstrations: ClassVar[bool] = False

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split, which is "train", "cold_start" or one of
        `evaluation_sets()`; a pure function."""
        raise NotImplementedError

    def score(self, answers: list[tuple[Problem, str, bool]]) -> list[Score]:
        """Return the scores in the order of `answers` = (problem, response text, whether the
        response ended by itself).

        A response that was cut off scores 0 with the verdict "truncated", whatever it says so far.
        With reward.truncated=null it is passed as one that ended by itself.
        """
        raise NotImplementedError

    def evaluation_sets(self) -> list[str]:
        """Return the names of the held-out sets; each is also a split of `problem`."""
        raise NotImplementedError

    def size(self, split: str) -> int | None:
        """Return the number of different problems of a split, or None where they are made without
        end.
        """
        check_split(split, self.evaluation_sets())
        return None

    def data(self) -> dict[str, Any]:
        """Return, for each set that was read from files or from the hub, the number of its problems
        and a digest of them, and of the training set how many were left out and why. Empty for a
        task that makes its problems."""
        return {}

    def left_out_of_evaluation(self) -> str:
        """Return, in words, how many records of the evaluation set are no problems here and why, ""
        if all are.
        """
        return ""

    def environments(self) -> dict[str, Task]:
        """Return the tasks whose problems are played in an environment (gspo.tasks.environments.protocol), by
        the `task` of their problems: this one, or some of a mixture. Responses to other problems
        are scored by `score`."""
        return {}

    def in_words(self, problem: Problem) -> str:
        """Return how a message names a problem."""
        return f"problem {problem.index}"

    def demonstration(self, problem: Problem, wrong_step_rate: float, rng: random.Random) -> str:
        """Return a worked response, without the end-of-sequence token. Each step is wrong with
        probability `wrong_step_rate`.

        A response with at least one wrong step scores 0, so its chance to score 1 is (1 -
        wrong_step_rate)^steps. Raises ValueError for a task that has no demonstrations.
        """
        raise ValueError(
            f"task={self.name} has no demonstrations: start from a model that can follow instructions "
            "(model=hf cold_start.steps=0)"
        )

    def ready(self) -> dict[str, str]:
        """Start what scoring needs. Returns what confines programs here, layer by layer; empty
        where no programs are run.

        Raises ValueError if this machine cannot score the task.
        """
        return {}

    def close(self) -> None:
        """End the task's processes, if it has any. The task can be used again afterwards."""


def held_out(prompt: str) -> bool:
    """Return whether a prompt belongs to evaluation. 1 in 8 prompts do; the text alone decides, so
    the split is the same for every seed."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def draw_prompt(split: str, make: Callable[[], str]) -> str:
    """Draw prompts from `make` until one lies on the split's side of `held_out`: outside for
    training, inside otherwise."""
    for _ in range(MAX_DRAWS):
        prompt = make()
        if held_out(prompt) == (split not in TRAINING_SPLITS):
            return prompt
    raise RuntimeError(
        f"no prompt for split {split!r} in {MAX_DRAWS} draws: the task has too few different problems"
    )


def check_split(split: str, evaluation_sets: list[str]) -> None:
    """Raise ValueError for a split that the task does not have."""
    if split not in TRAINING_SPLITS and split not in evaluation_sets:
        raise ValueError(f"split={split!r} is none of {[*TRAINING_SPLITS, *evaluation_sets]}")
