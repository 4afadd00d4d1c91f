"""Environments behind a server of OpenEnv (github.com/meta-pytorch/OpenEnv), played by its client.

    # the environment's own server, which needs no container
    uvicorn my_env.server.app:app --port 8000 &
    gspo train task=openenv task.url=http://127.0.0.1:8000 task.text=prompt task.action=message ...

Each episode has its own session. The server must allow a session for each episode that is played
at the same time (`max_concurrent_envs` of `create_app`). The policy's text is sent to the server.
"""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gspo.data.problems import Problem
from gspo.io.errors import SettingError
from gspo.io.ranges import ranged
from gspo.io.untrusted import check_depth
from gspo.tasks.adapters.seeded_games import CannotBegin, SeededGames, invalid
from gspo.tasks.environments.player import readable
from gspo.tasks.environments.protocol import Environment, Message, Outcome, Position

INSTALL = 'pip install -e ".[openenv]"'
CONNECT_SECONDS = 10.0
MAX_MESSAGE_MB = 8.0  # of one message of the server
RESERVED = ("seed", "episode_id")  # arguments of `reset` that the user cannot set


@dataclass
class OpenEnv(SeededGames):
    """Games of a server. `reset` gets the seed of game i, a function of (run seed, split, i).

    url          address of the server
    text         field of the observation that the policy reads. "" is all fields, as JSON.
    action       field of the action for the policy's text. With "" the policy's text is the whole
                 action, as JSON.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise SettingError(
                f"{self.key}.url",
                self.url,
                remedy=f"set the address of the server, {self.key}.url=http://127.0.0.1:8000",
            )
        reserved_options = set(RESERVED) & set(self.options)
        if reserved_options:
            raise SettingError(
                f"{self.key}.options.{min(reserved_options)}",
                problem="set by the harness, from the run's seed",
            )
        if self.action in self.values:
            raise SettingError(
                f"{self.key}.values.{self.action}",
                problem=f"it is what the policy writes ({self.key}.action)",
            )

    def beginning(self, seed: int) -> str:
        return asyncio.run(self._beginning(seed))

    def environment(self, problem: Problem, position: Position) -> Environment:
        return OpenEnvSession(self)

    async def _beginning(self, seed: int) -> str:
        """Return the beginning of a game. Raises CannotBegin, in a line, for any failure."""
        session = OpenEnvSession(self)
        try:
            async with asyncio.timeout(self.step_seconds + CONNECT_SECONDS):
                return await session.begin(seed)
        except SettingError as error:  # the observation lacks what a setting names
            raise CannotBegin(error.key, error.value, error.problem, error.remedy) from error
        # unreachable, refused, or an answer that the client cannot read
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CannotBegin(f"{self.key}.url", self.url, reason) from error
        finally:
            with suppress(Exception):  # the server forgets a session that cannot be closed
                async with asyncio.timeout(CONNECT_SECONDS):
                    await session.close()


class OpenEnvSession(Environment):
    """An environment that plays a game, in a session with the server."""

    def __init__(self, task: OpenEnv) -> None:
        try:
            from openenv import GenericEnvClient  # optional, an extra of the installation
        except ImportError:
            raise SettingError("task", task.name, "needs the package openenv", INSTALL) from None
        self.task = task
        self.client = GenericEnvClient(
            base_url=task.url,
            connect_timeout_s=CONNECT_SECONDS,
            message_timeout_s=task.step_seconds,
            max_message_size_mb=MAX_MESSAGE_MB,
        )

    async def reset(self, problem: Problem) -> list[Message]:
        return [{"role": "user", "content": await self.begin(problem.answer)}]

    async def begin(self, seed: int) -> str:
        """Begin the game of a seed, and return the text that the policy reads."""
        result = await self.client.reset(seed=seed, **self.task.options)
        observation = self._shown(result.observation)
        return readable("\n\n".join(filter(None, [self.task.instruction, observation])))

    async def step(self, text: str) -> Outcome:
        """Send the policy's action, and return its outcome. An invalid action is not sent."""
        try:
            action = self._action(text)
        except ValueError as error:
            return invalid(str(error))
        try:
            result = await self.client.step(action)
        except RuntimeError as error:
            # the server refuses the action, and the session goes on
            if "VALIDATION_ERROR" in str(error):
                return invalid(str(error))
            raise
        reward = 0.0 if result.reward is None else float(result.reward)
        observation = "" if result.done else self._shown(result.observation)
        return Outcome(observation, reward, bool(result.done), measures={"invalid_actions": 0.0})

    async def close(self) -> None:
        """End the session."""
        await self.client.close()

    def _action(self, text: str) -> dict[str, Any]:
        """Return the action of the policy's text. Raises ValueError if the text is no action."""
        if self.task.action:
            return {**self.task.values, self.task.action: text.strip()}
        try:
            action = json.loads(text)
            check_depth(action)
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise ValueError("write it as a JSON object, and nothing else")
        return {**action, **self.task.values}

    def _shown(self, observation: dict[str, Any]) -> str:
        """Return the text of an observation that the policy reads.

        Raises ValueError if the observation is no object, or lacks the field."""
        if not isinstance(observation, dict):
            raise ValueError(
                f"the server's observation is no object but {type(observation).__name__}"
            )
        if not self.task.text:
            fields = {name: value for name, value in observation.items() if name != "metadata"}
            return json.dumps(fields, ensure_ascii=False)
        if self.task.text not in observation:
            raise SettingError(
                f"{self.task.key}.text",
                self.task.text,
                f"the observation has {', '.join(observation)}",
            )
        value = observation[self.task.text]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
