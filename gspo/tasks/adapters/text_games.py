"""Text environments with the interface of Gymnasium.

This interface is reset(seed) -> observation, step(action) -> observation, reward.

    # the user's own class
    gspo train task=text_game task.env=my_pkg.games:Maze 'task.arguments={size: 5}' ...

    # an environment of the package gymnasium
    gspo train task=text_game task.id=FrozenLake-v1 \\
        'task.arguments={render_mode: ansi, is_slippery: false}' \\
        task.shows=render 'task.actions=[left, down, right, up]' ...

The policy reads the observation: a text unchanged, or numbers, lists, mappings and arrays as JSON.
With `shows=render` it reads the text of `render()`, in which brackets mark characters with a
background colour. The policy's text is the action, if the environment's action space has it.
Otherwise the policy gets a message, and the state of the game does not change.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gspo.data.problems import Problem
from gspo.io.errors import SettingError
from gspo.io.ranges import choice, outside_code, ranged
from gspo.io.user_code import import_object
from gspo.tasks.adapters.seeded_games import CannotBegin, SeededGames, invalid
from gspo.tasks.environments.player import EnvironmentFailed, Player, all_closed
from gspo.tasks.environments.protocol import Environment, Message, Outcome, Position

INSTALL = 'pip install -e ".[gymnasium]"'
TAG = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)
# terminal codes of a text with a background colour
BACKGROUND = re.compile(r"\x1b\[(?:\d+;)*4\d(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)
COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass
class TextGames(SeededGames, key="task"):
    """Games of a text environment. The seed of game i is a function of (run seed, split, i).

    All samples of a problem play the same game.

    env          MODULE:NAME, a class or function that makes the environment from `arguments`
    id           alternative to `env`: an id for `gymnasium.make`. It needs the package gymnasium.
    instruction  text before the first observation
    shows        text that the policy reads: observation, or render (the text of `render()`)
    actions      names of the actions 0, 1, ... of an environment whose actions are numbers
    form         place of the action: whole (all text of the policy) or tags (between <action> and
                 </action>)
    """

    name: str = "text_game"
    env: str = outside_code()
    id: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    instruction: str = ""
    shows: str = choice("observation", ("observation", "render"))
    actions: list[str] = field(default_factory=list)
    form: str = choice("whole", ("whole", "tags"))
    evaluation_size: int = ranged(100, least=1, most=100_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.env) == bool(self.id):
            raise SettingError(
                f"{self.key}.env",
                self.env,
                f"with {self.key}.id={self.id!r}, none or both are given",
                remedy=(
                    f"give one of them, a class of yours as {self.key}.env=MODULE:NAME or the id "
                    f"of an environment of gymnasium as {self.key}.id=FrozenLake-v1"
                ),
            )
        # gymnasium would import the module before the colon, and no hash would know its source
        if ":" in self.id:
            module = self.id.partition(":")[0]
            raise SettingError(
                f"{self.key}.id",
                self.id,
                remedy=f"to import {module} set {self.key}.env={module}:FUNCTION",
            )
        if len({name.casefold() for name in self.actions}) < len(self.actions):
            raise SettingError(
                f"{self.key}.actions", list(self.actions), "two of them have one name"
            )

    def beginning(self, seed: int) -> str:
        """Return the text with which the game of a seed begins. Raises CannotBegin."""
        _ = self._maker  # imports the user's module, which may take longer than a step
        player = Player(self.game, self.step_seconds)
        try:
            beginning = player.finish(player.begin("reset", Problem(self.name, 0, "", seed)))
        except EnvironmentFailed as failure:
            cause = failure.__cause__
            if isinstance(cause, SettingError):
                raise CannotBegin(cause.key, cause.value, cause.problem, cause.remedy) from cause
            setting = "env" if self.env else "id"
            raise CannotBegin(
                f"{self.key}.{setting}",
                self.env or self.id,
                f"the game of seed {seed} did not begin: {failure}",
            ) from cause
        finally:
            all_closed([player.close()])
        return beginning.messages[0]["content"]

    def environment(self, problem: Problem, position: Position) -> Environment:
        return self.game()

    def game(self) -> TextGame:
        """Return a new environment for an episode. Raises ValueError if it cannot be used."""
        try:
            env = self._maker(**self.arguments)
        except TypeError as error:
            raise SettingError(
                f"{self.key}.arguments", dict(self.arguments), f"does not fit: {error}"
            ) from error
        return TextGame(env, self)

    @cached_property
    def _maker(self) -> Any:
        if self.env:
            return import_object(self.env, f"{self.key}.env")
        try:
            import gymnasium  # optional, an extra of the installation
        except ImportError:
            raise SettingError(
                f"{self.key}.id", self.id, "needs the package gymnasium", INSTALL
            ) from None
        if self.id not in gymnasium.registry:
            raise SettingError(f"{self.key}.id", self.id, "gymnasium knows no such environment")
        return lambda **arguments: gymnasium.make(self.id, **arguments)


class TextGame(Environment):
    """An environment that plays a game."""

    def __init__(self, env: Any, task: TextGames) -> None:
        self.env = env
        self.task = task
        self.space: Any = getattr(env, "action_space", None)
        kind = type(self.space).__name__
        if kind not in ("NoneType", "Text", "Discrete"):
            raise SettingError(
                task.key,
                problem=f"its actions are {self.space}",
                remedy="here they can be texts, or numbers (Discrete)",
            )
        count = int(self.space.n) if kind == "Discrete" else 0
        if task.actions and len(task.actions) != count:
            raise SettingError(
                f"{task.key}.actions",
                list(task.actions),
                f"the environment has {count} numbered actions",
            )

    def reset(self, problem: Problem) -> list[Message]:
        return [{"role": "user", "content": self.begin(problem.answer)}]

    def begin(self, seed: int) -> str:
        """Begin the game of a seed, and return the text that the policy reads.

        Raises ValueError for an environment with another interface."""
        result = self.env.reset(seed=seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"reset returned {str(result)[:80]!r}, not (observation, info)")
        observation = self._shown(result[0])
        return "\n\n".join(filter(None, [self.task.instruction, observation]))

    def step(self, text: str) -> Outcome:
        """Return the outcome of the policy's action. An invalid action does not change the game."""
        try:
            action = self._action(text)
        except ValueError as error:
            return invalid(str(error))
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise ValueError(
                f"step returned {str(result)[:80]!r}, not (observation, reward, terminated, "
                "truncated, info)"
            )
        observation, reward, terminated, truncated, _ = result
        return Outcome(
            self._shown(observation),
            float(reward),
            bool(terminated or truncated),
            verdict="time-limit" if truncated and not terminated else "terminated",
            measures={"invalid_actions": 0.0},
        )

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        if hasattr(self.env, "close"):
            self.env.close()

    def _action(self, text: str) -> Any:
        """Return the action of the policy's text. Raises ValueError, which names valid actions."""
        if self.task.form == "tags":
            tagged = TAG.findall(text)
            if not tagged:
                raise ValueError("write it between <action> and </action>")
            text = tagged[-1]
        text = text.strip()
        if type(self.space).__name__ != "Discrete":
            if self.space is not None and not self.space.contains(text):
                raise ValueError("the environment does not take this text")
            return text
        names = [name.casefold() for name in self.task.actions]
        first = int(self.space.start)
        last = first + int(self.space.n) - 1
        if text.casefold() in names:
            return first + names.index(text.casefold())
        if re.fullmatch(r"-?\d{1,9}", text) and first <= int(text) <= last:
            return int(text)
        if self.task.actions:
            raise ValueError(f"the actions are {', '.join(self.task.actions)}")
        raise ValueError(f"the actions are a whole number from {first} to {last}")

    def _shown(self, observation: Any) -> str:
        """Return the text that the policy reads."""
        if self.task.shows == "render":
            observation = self.env.render()
            if not isinstance(observation, str):
                raise SettingError(
                    f"{self.task.key}.shows",
                    "render",
                    f"render() returned {type(observation).__name__}, not a text; with "
                    f"gymnasium give {self.task.key}.arguments.render_mode=ansi",
                )
            return COLOUR.sub("", BACKGROUND.sub(r"[\1]", observation)).strip("\n")
        if isinstance(observation, str):
            return observation
        return json.dumps(plain(observation), ensure_ascii=False)


def plain(value: Any) -> Any:
    """Return an observation as values of JSON.

    Raises ValueError for anything but texts, numbers, and lists, mappings and arrays of them."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufU":
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise ValueError(f"an observation of the type {type(value).__name__} cannot be shown as text")
