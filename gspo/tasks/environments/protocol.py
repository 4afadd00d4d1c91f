"""The protocol of environments, with which the policy plays episodes of several turns.

For example, with a tool that runs Python:

    reset   user         What is 4837 * 2911?
    policy               <py>4837*2911</py>
    step    tool         14080507                     reward 0, not done
    policy               The answer is 14080507.
    step                                              reward 1, done

An object plays a single episode. Its methods may be `async` or not. Each episode has a thread,
which makes its calls in turn. Different episodes are played at the same time. All randomness of an
environment must come from the seed that it was made with. Then an episode can be sampled again
exactly.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.io.errors import SettingError
from gspo.io.ranges import ranged
from gspo.tasks.base import Answer, Task

# a turn of a chat: {"role": "system" | "user" | "assistant" | "tool", "content": text}
Message = dict[str, Any]
Position = tuple[int | str, ...]  # of an episode: (run seed, purpose, ..., task, problem, sample)


@dataclass
class Outcome:
    """The environment's reply to one turn of the policy.

    The reward of an episode is the sum of the rewards of its turns. `verdict` is a word for the
    end of the episode, and is read only if `done` is true. An environment should have few verdicts,
    because each is a metric. The first 1000 characters of `answer` are kept. `measures` are numbers
    about the turn, for example {"tool_errors": 1}. Their sums over an episode are the metrics
    `episode/<name>`, so every turn should name the same measures. Some names, such as `turns`, are
    reserved for numbers that every episode has.

    `rewards` are the episode's named rewards, for example {"correct": 1, "format": 0}, of a task
    with `names_rewards`. Only an outcome with `done` may have them. A run with `reward.weights`
    reads them: their sum with these weights is the reward of the episode, and `reward` is not read.
    Every episode that is not cut off must have the same names. Other runs read `reward`.

    An invalid outcome is a failure of the environment. Examples are a reward that is no number
    within +-1e9, a verdict of two words or of more than 40 characters, and a field of another type.
    """

    observation: str = ""  # the text that the policy reads next; unused if `done` is true
    reward: float = 0.0
    done: bool = False
    verdict: str = "done"
    answer: str = ""  # the normal form of the episode's answer, for majority votes
    measures: dict[str, float] = field(default_factory=dict)
    deferred: bool = False  # whether `settle` gives the reward of an episode that is done
    rewards: dict[str, float] = field(default_factory=dict)


# Reasoning models write their thoughts before this mark. A tool call before it is ignored.
END_OF_THOUGHTS = "</think>"


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the policy with its tokens.

    text         the text without special tokens
    context_ids  the tokens before the turn: the prompt and all earlier turns
    token_ids    the tokens of the turn
    logprobs     the log-probability of each of them under the policy that sampled it
    """

    text: str
    context_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Environment(ABC):
    """An environment that plays a single episode."""

    # The functions that the policy may call, each as {"type": "function", "function": {"name": ...,
    # "description": ..., "parameters": JSON schema}}. Chat templates that support tools write them
    # into the prompt.
    tools: tuple[dict[str, Any], ...] = ()
    role = "user"  # the chat role of observations: "user" or "tool"
    group_size = 1  # the number of samples of the problem; set before `reset`
    settles = False  # whether `settle` is also called for an episode that was cut off

    def reset(self, problem: Problem) -> list[Message] | Awaitable[list[Message]]:
        """Begin the episode, and return the messages that the policy reads first.

        They must be the same for all samples of a problem: the responses of a group share their
        prompt."""
        return [{"role": "user", "content": problem.prompt}]

    @abstractmethod
    def step(self, text: str) -> Outcome | Awaitable[Outcome]:
        """Return the outcome of the policy's turn. `text` has no special tokens."""

    def act(self, turn: SampledTurn) -> Outcome | Awaitable[Outcome]:
        """Return the outcome of the policy's turn, for environments that need its tokens."""
        return self.step(turn.text)

    def settle(self, turn: SampledTurn | None) -> Outcome | Awaitable[Outcome]:
        """Return the outcome of an episode whose reward is not known when it ends.

        It is called after all episodes of the group have ended: for every episode whose last
        outcome is `deferred`, and, if `settles` is true, for every episode that was cut off. The
        reward, the measures and the named rewards of the outcome are added to the episode's.
        `turn` is the turn at which the episode was cut off, None if `act` has received it."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Free the resources of the episode. It may take `step_seconds`.

        It is called once, also after `step` has raised."""
        return None


@dataclass
class EnvironmentTask(Task):
    """The base of tasks whose problems are played in an environment.

    Its fields are the limits of an episode.

    turns               maximum number of turns of the policy. A longer episode ends as "turns".
    observation_tokens  maximum length of an observation. The rest is cut off, and cuts are counted.
    step_seconds        time limit of a method, after which the environment has failed.
                        It does not include the wait for other environments (see `at_once`).
    replays             number of episodes that are played a second time with the same turns of the
                        policy, to check that the environment replies the same. It is per group of
                        episodes that a process samples together (`rollout.batch_rows`).
    """

    turns: int = ranged(8, least=1)
    observation_tokens: int = ranged(512, least=1)
    step_seconds: float = ranged(60.0, above=0)
    replays: int = ranged(1, least=0)
    # whether its environments give `Outcome.rewards`, which the setting reward.weights weighs
    names_rewards: ClassVar[bool] = False

    def environment(self, problem: Problem, position: Position) -> Environment:
        """Return a new environment for an episode.

        gspo.data.seeding makes a seed from `position`."""
        raise NotImplementedError

    @property
    def at_once(self) -> int:
        """The number of its environments that may run `reset`, `step` or `settle` at the same time.

        0 means no limit.

        A task needs a limit if its environments share a resource that serves only a few at a time.
        Otherwise a slow turn could make another episode exceed its time limit."""
        return 0

    def environments(self) -> dict[str, EnvironmentTask]:
        return {self.name: self}

    def demonstrated_turns(
        self, problem: Problem, wrong_step_rate: float, rng: random.Random
    ) -> list[str]:
        """Return the turns of a worked episode, without end-of-sequence tokens.

        The policy's turns alternate with the environment's. The first and the last turn are the
        policy's. Each step of the policy is wrong with probability `wrong_step_rate`.

        Raises ValueError for a task that has no demonstrations."""
        raise SettingError(
            "task",
            self.name,
            "has no demonstrations",
            remedy="start from a model that can follow instructions (model=hf cold_start.steps=0)",
        )

    def score(self, answers: list[Answer]) -> list[Score]:
        """Return [], because the environments give the rewards.

        Raises RuntimeError for responses that were not played in an episode."""
        if answers:
            raise RuntimeError(
                f"task {self.name!r} gives its rewards in episodes: "
                "responses were not played in one"
            )
        return []
