"""Environments behind a server of OpenEnv (github.com/meta-pytorch/OpenEnv), played by its client.

    uvicorn my_env.server.app:app --port 8000 &            the environment's own server; no
                                                           container is needed
    gspo train task=openenv task.url=http://127.0.0.1:8000 task.text=prompt task.action=message ...

Each episode is a session of its own, so the server must allow as many at once as episodes are
played at once (`max_concurrent_envs` of `create_app`). What the policy writes is sent to the
server.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from gspo.data.samples import Problem
from gspo.data.seeding import seed_for
from gspo.io.ranges import ranged
from gspo.tasks.base import TRAINING_SPLITS, check_split
from gspo.tasks.environments.player import readable
from gspo.tasks.environments.protocol import Environment, EnvironmentTask, Message, Outcome

INSTALL = 'pip install "gspo[openenv]"'
CONNECT_SECONDS = 10.0
MOST_MEGABYTES = 8.0  # of one message of the server
RESERVED = ("seed", "episode_id")  # arguments of `reset` that are ours to give


@dataclass
class OpenEnv(EnvironmentTask):
    """Problem i is a game whose seed is a function of (run seed, split, i): `reset(seed=...)`.

    url          where the server is
    text         the field of the observation that the policy reads; "": all fields, as JSON
    action       the field of the action that is what the policy writes; "": it writes the whole
                 action, as JSON
    values       other fields of every action
    options      other arguments of `reset`
    instruction  text before the first observation
    """

    name: str = "openenv"
    url: str = ""
    text: str = ""
    action: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    instruction: str = ""
    evaluation_size: int = ranged(100, least=1, most=100_000)

    key: ClassVar[str] = "task"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(
                f"{self.key}.url={self.url!r}: say where the server is, {self.key}.url=http://127.0.0.1:8000"
            )
        if taken := set(RESERVED) & set(self.options):
            raise ValueError(
                f"{self.key}.options.{min(taken)}: set by the harness, from the run's seed"
            )
        if self.action in self.values:
            raise ValueError(
                f"{self.key}.values.{self.action}: it is what the policy writes ({self.key}.action)"
            )

    def evaluation_sets(self) -> list[str]:
        return [self.name]

    def size(self, split: str) -> int | None:
        check_split(split, self.evaluation_sets())
        return None if split in TRAINING_SPLITS else self.evaluation_size

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return game `index` of a split: its prompt is its beginning, its answer the seed.

        Raises ValueError if the server does not begin the first game that it is asked for. Later
        the reason takes the prompt's place: the episodes ask for the game themselves, and count it
        as a failure if they do not get it."""
        check_split(split, self.evaluation_sets())
        position = seed_for(seed, self.name, split, index) % 2**31
        if position in self._beginnings:
            return Problem(self.name, index, self._beginnings[position], position)
        try:
            beginning = asyncio.run(self._beginning(position))
        except ValueError as error:
            if not self._beginnings:
                raise
            return Problem(self.name, index, f"(no beginning: {error})", position)
        if len(self._beginnings) >= self.evaluation_size:
            self._beginnings.clear()
        self._beginnings[position] = beginning
        return Problem(self.name, index, beginning, position)

    def environment(self, problem: Problem, position: tuple[int | str, ...]) -> Environment:
        return OpenEnvSession(self)

    @cached_property
    def _beginnings(self) -> dict[int, str]:
        """What games begin with, by seed: evaluations ask for the same ones again and again."""
        return {}

    async def _beginning(self, seed: int) -> str:
        """Return what a game begins with. Raises ValueError in one line for whatever the server
        does instead.
        """
        session = OpenEnvSession(self)
        try:
            async with asyncio.timeout(self.step_seconds + CONNECT_SECONDS):
                return await session.begin(seed)
        except (
            Exception
        ) as error:  # not reached, refused, or an answer from elsewhere that its client cannot read
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(f"{self.key}.url={self.url}: {reason}") from error
        finally:
            with suppress(Exception):  # a session that cannot be ended is the server's to forget
                async with asyncio.timeout(CONNECT_SECONDS):
                    await session.close()


class OpenEnvSession(Environment):
    """Plays one game, in a session with the server."""

    def __init__(self, task: OpenEnv) -> None:
        try:
            from openenv import GenericEnvClient  # optional, an extra of the installation
        except ImportError:
            raise ValueError(f"task={task.name} needs the package openenv: {INSTALL}") from None
        self.task = task
        self.client = GenericEnvClient(
            base_url=task.url,
            connect_timeout_s=CONNECT_SECONDS,
            message_timeout_s=task.step_seconds,
            max_message_size_mb=MOST_MEGABYTES,
        )

    async def reset(self, problem: Problem) -> list[Message]:
        return [{"role": "user", "content": await self.begin(problem.answer)}]

    async def begin(self, seed: int) -> str:
        """Begin the game of a seed, and return what the policy reads."""
        began = await self.client.reset(seed=seed, **self.task.options)
        return readable(
            "\n\n".join(filter(None, [self.task.instruction, self._shown(began.observation)]))
        )

    async def step(self, text: str) -> Outcome:
        """Send the policy's action, unless it is none."""
        try:
            action = self._action(text)
        except ValueError as error:
            return invalid(str(error))
        try:
            stepped = await self.client.step(action)
        except RuntimeError as error:
            # the server does not take such an action; the session goes on
            if "VALIDATION_ERROR" in str(error):
                return invalid(str(error))
            raise
        reward = 0.0 if stepped.reward is None else float(stepped.reward)
        shown = "" if stepped.done else self._shown(stepped.observation)
        return Outcome(shown, reward, bool(stepped.done), measures={"invalid_actions": 0.0})

    async def close(self) -> None:
        """End the session."""
        await self.client.close()

    def _action(self, text: str) -> dict[str, Any]:
        """Return what the policy has written as an action. Raises ValueError if it is none."""
        if self.task.action:
            return {**self.task.values, self.task.action: text.strip()}
        try:
            written = json.loads(text)
        except ValueError:
            written = None
        if not isinstance(written, dict):
            raise ValueError("write it as a JSON object, and nothing else")
        return {**written, **self.task.values}

    def _shown(self, observation: dict[str, Any]) -> str:
        """Return what the policy reads of an observation. Raises ValueError if it is no object, or
        lacks the field.
        """
        if not isinstance(observation, dict):
            raise ValueError(
                f"the server's observation is no object but {type(observation).__name__}"
            )
        if not self.task.text:
            return json.dumps(
                {k: v for k, v in observation.items() if k != "metadata"}, ensure_ascii=False
            )
        if self.task.text not in observation:
            raise ValueError(
                f"{self.task.key}.text={self.task.text}: the observation has {', '.join(observation)}"
            )
        value = observation[self.task.text]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def invalid(why: str) -> Outcome:
    """Return what the policy is told when it has written no action."""
    return Outcome(f"Invalid action: {why}.", measures={"invalid_actions": 1.0})
