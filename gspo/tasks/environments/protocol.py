"""The protocol of environments: the other side of an episode of several turns.

For example, with a tool that runs Python:

    reset   user         What is 4837 * 2911?
    policy               <py>4837*2911</py>
    step    tool         14080507                     reward 0, not done
    policy               The answer is 14080507.
    step                                              reward 1, done

One object plays one episode. Its methods may be `async` or not; each episode's calls are made one
after another, in a thread of its own, and those of different episodes at the same time. What an
environment draws at random must be a function of the seed that it was made with, so that an episode
can be sampled again exactly.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from gspo.data.samples import Problem, Score
from gspo.io.ranges import ranged
from gspo.tasks.base import Task

# a turn of a chat: {"role": "system" | "user" | "assistant" | "tool", "content": text}
Message = dict[str, Any]


@dataclass
class Outcome:
    """What an environment returns for one turn of the policy.

    The reward of an episode is the sum of those of its turns. `verdict` says in one word how the
    episode has ended, and is read where `done` is true; it should be one of a few, since each is a
    metric. Of `answer` the first 1000 characters are kept. `measures` are numbers about the turn,
    for example {"tool_errors": 1}; their sums over an episode are the metrics `episode/<name>`, so
    every turn should name the same ones. Names that every episode has a number of, such as `turns`,
    are taken.

    An outcome that does not fit is a failure of the environment: a reward that is no number within
    +-1e9, a verdict of more than one word or 40 characters, a field of another type.
    """

    observation: str = ""  # what the policy reads next; nobody reads it where `done` is true
    reward: float = 0.0
    done: bool = False
    verdict: str = "done"
    answer: str = ""  # the normal form of the episode's answer, for majority votes
    measures: dict[str, float] = field(default_factory=dict)


class Environment(ABC):
    """Plays one episode."""

    # The functions that the policy may call, each as {"type": "function", "function": {"name": ...,
    # "description": ..., "parameters": JSON schema}}: chat templates that know tools write them
    # into the prompt.
    tools: tuple[dict[str, Any], ...] = ()
    role = "user"  # whose turn an observation is, in a chat: "user" or "tool"

    def reset(self, problem: Problem) -> list[Message] | Awaitable[list[Message]]:
        """Begin the episode, and return the messages that the policy reads first. They must be the
        same for all samples of a problem, since a group is made of responses to one prompt."""
        return [{"role": "user", "content": problem.prompt}]

    @abstractmethod
    def step(self, text: str) -> Outcome | Awaitable[Outcome]:
        """Take what the policy wrote in its turn: its text, without special tokens."""

    def close(self) -> Awaitable[None] | None:
        """Free what the episode holds. It is called once, also after `step` has raised, and waited
        for at most `step_seconds`."""
        return None


@dataclass
class EnvironmentTask(Task):
    """The base of tasks whose problems are played in an environment. Its fields are the limits of
    an episode.

    turns               the most turns of the policy; an episode that needs more ends as "turns"
    observation_tokens  longer observations are cut to their first so many tokens, and counted
    step_seconds        an environment whose `reset` or `step` takes longer has failed; of those
                        that wait until others have answered (`at_once`) the time begins when `step`
                        does
    replays             how many of the episodes that a process samples together
                        (`rollout.batch_rows`) are played a second time, with the same words of the
                        policy, to see whether the environment says the same
    """

    turns: int = ranged(8, least=1)
    observation_tokens: int = ranged(512, least=1)
    step_seconds: float = ranged(60.0, above=0)
    replays: int = ranged(1, least=0)

    def environment(self, problem: Problem, position: tuple[int | str, ...]) -> Environment:
        """Make the environment of one episode. `position` is the place of its random numbers: (run
        seed, purpose, ..., task, problem, sample), from which gspo.data.seeding makes a seed."""
        raise NotImplementedError

    @property
    def at_once(self) -> int:
        """How many of its environments answer (`step`) at the same time; 0 is all of them. A task
        whose environments share what serves only a few at a time says so here, so that none fails
        because it had to wait for the others: what a policy makes slow must not be the failure of
        another's episode."""
        return 0

    def environments(self) -> dict[str, Task]:
        return {self.name: self}

    def demonstrated_turns(
        self, problem: Problem, wrong_step_rate: float, rng: random.Random
    ) -> list[str]:
        """Return the turns of a worked episode, the policy's and the environment's in turn, without
        end-of-sequence tokens; the last is the policy's. Each step of the policy is wrong with
        probability `wrong_step_rate`.

        Raises ValueError for a task that has no demonstrations."""
        raise ValueError(
            f"task={self.name} has no demonstrations: start from a model that can follow instructions "
            "(model=hf cold_start.steps=0)"
        )

    def score(self, answers: list[tuple[Problem, str, bool]]) -> list[Score]:
        """Score nothing: the environments give the rewards. Raises RuntimeError for responses that
        were not played.
        """
        if answers:
            raise RuntimeError(
                f"task {self.name!r} gives its rewards in episodes: responses were not played in one"
            )
        return []
