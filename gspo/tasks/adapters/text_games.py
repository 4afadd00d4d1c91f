"""Text environments with the interface of Gymnasium: reset(seed) -> observation, step(action) ->
observation, reward.

    gspo train task=text_game task.env=my_pkg.games:Maze 'task.arguments={size: 5}' ...        a
                                                                                               class
                                                                                               of
                                                                                               one's
                                                                                               own
    gspo train task=text_game task.id=FrozenLake-v1 'task.arguments={render_mode: ansi, is_slippery:
    false}' \\
        task.shows=render 'task.actions=[left, down, right, up]' ...                           one
                                                                                               of
                                                                                               gymnasium's

What the policy reads is the observation: a text as it is, numbers, lists, mappings and arrays as
JSON. With `shows=render` it is what `render()` returns, in which characters on a coloured ground
are put in brackets. What the policy writes is the action, if the environment's action space allows
it; if not, the policy is told so and the game stands still.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from gspo.data.samples import Problem
from gspo.data.seeding import seed_for
from gspo.io.ranges import choice, outside_code, ranged
from gspo.io.user_code import import_object
from gspo.tasks.base import TRAINING_SPLITS, check_split
from gspo.tasks.environments.protocol import Environment, EnvironmentTask, Message, Outcome

INSTALL = 'pip install "gspo[gymnasium]"'
TAG = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)
# terminal codes: a coloured ground
GROUND = re.compile(r"\x1b\[(?:\d+;)*4\d(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)
COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass
class TextGames(EnvironmentTask, key="task"):
    """Problem i is a game whose seed is a function of (run seed, split, i); all samples of it play
    the same game.

    env          MODULE:NAME, a class or function that makes the environment from `arguments`
    id           instead of it: what `gymnasium.make` knows; needs the package gymnasium
    instruction  text before the first observation
    shows        what the policy reads: observation, or render: the text that `render()` returns
    actions      names of the actions 0, 1, ... of an environment whose actions are numbers
    form         where the action stands: whole (all that the policy writes) or tags (between
                 <action> and </action>)
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

    key: ClassVar[str] = "task"

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.env) == bool(self.id):
            raise ValueError(
                f"{self.key}.env={self.env!r} and {self.key}.id={self.id!r}: give one of them, a class of yours as "
                f"{self.key}.env=MODULE:NAME or the id of an environment of gymnasium as {self.key}.id=FrozenLake-v1"
            )
        # gymnasium would import the module before the colon, and no hash would know its source
        if ":" in self.id:
            module = self.id.partition(":")[0]
            raise ValueError(
                f"{self.key}.id={self.id}: to import {module} say {self.key}.env={module}:FUNCTION"
            )
        if len({name.casefold() for name in self.actions}) < len(self.actions):
            raise ValueError(f"{self.key}.actions={list(self.actions)}: two of them have one name")

    def evaluation_sets(self) -> list[str]:
        return [self.name]

    def size(self, split: str) -> int | None:
        check_split(split, self.evaluation_sets())
        return None if split in TRAINING_SPLITS else self.evaluation_size

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return game `index` of a split: its prompt is its beginning, its answer the seed of the
        environment.
        """
        check_split(split, self.evaluation_sets())
        position = seed_for(seed, self.name, split, index) % 2**31
        if position not in self._beginnings:
            if len(self._beginnings) >= self.evaluation_size:
                self._beginnings.clear()
            game = self.game()
            self._beginnings[position] = game.begin(position)
            game.close()
        return Problem(self.name, index, self._beginnings[position], position)

    def environment(self, problem: Problem, position: tuple[int | str, ...]) -> Environment:
        return self.game()

    def game(self) -> TextGame:
        """Make the environment of one episode. Raises ValueError for one that cannot be used."""
        try:
            made = self._maker(**self.arguments)
        except TypeError as error:
            raise ValueError(
                f"{self.key}.arguments={dict(self.arguments)} does not fit: {error}"
            ) from error
        return TextGame(made, self)

    @cached_property
    def _beginnings(self) -> dict[int, str]:
        """What games begin with, by seed: evaluations ask for the same ones again and again."""
        return {}

    @cached_property
    def _maker(self) -> Any:
        if self.env:
            return import_object(self.env, f"{self.key}.env")
        try:
            import gymnasium  # optional, an extra of the installation
        except ImportError:
            raise ValueError(
                f"{self.key}.id={self.id} needs the package gymnasium: {INSTALL}"
            ) from None
        if self.id not in gymnasium.registry:
            raise ValueError(f"{self.key}.id={self.id}: gymnasium knows no such environment")
        return lambda **arguments: gymnasium.make(self.id, **arguments)


class TextGame(Environment):
    """Plays one game."""

    def __init__(self, env: Any, task: TextGames) -> None:
        self.env, self.task = env, task
        self.space = getattr(env, "action_space", None)
        kind = type(self.space).__name__
        if kind not in ("NoneType", "Text", "Discrete"):
            raise ValueError(
                f"{task.key}: its actions are {self.space}; here they can be texts, or numbers (Discrete)"
            )
        count = int(self.space.n) if kind == "Discrete" else 0
        if task.actions and len(task.actions) != count:
            raise ValueError(
                f"{task.key}.actions={list(task.actions)}: the environment has {count} numbered actions"
            )

    def reset(self, problem: Problem) -> list[Message]:
        return [{"role": "user", "content": self.begin(problem.answer)}]

    def begin(self, seed: int) -> str:
        """Begin the game of a seed, and return what the policy reads. Raises ValueError for another
        interface.
        """
        began = self.env.reset(seed=seed)
        if not isinstance(began, tuple) or len(began) != 2:
            raise ValueError(f"reset returned {str(began)[:80]!r}, not (observation, info)")
        return "\n\n".join(filter(None, [self.task.instruction, self._shown(began[0])]))

    def step(self, text: str) -> Outcome:
        """Take the policy's action, unless it is none."""
        try:
            action = self._action(text)
        except ValueError as error:
            return Outcome(f"Invalid action: {error}.", measures={"invalid_actions": 1.0})
        stepped = self.env.step(action)
        if not isinstance(stepped, tuple) or len(stepped) != 5:
            raise ValueError(
                f"step returned {str(stepped)[:80]!r}, not (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, _ = stepped
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
        """Return what the policy has written as an action. Raises ValueError, which says what is
        allowed.
        """
        if self.task.form == "tags":
            found = TAG.findall(text)
            if not found:
                raise ValueError("write it between <action> and </action>")
            text = found[-1]
        text = text.strip()
        if type(self.space).__name__ != "Discrete":
            if self.space is not None and not self.space.contains(text):
                raise ValueError("the environment does not take this text")
            return text
        names, first, count = (
            [name.casefold() for name in self.task.actions],
            int(self.space.start),
            int(self.space.n),
        )
        if text.casefold() in names:
            return first + names.index(text.casefold())
        if re.fullmatch(r"-?\d{1,9}", text) and first <= int(text) < first + count:
            return int(text)
        allowed = (
            ", ".join(self.task.actions) or f"a whole number from {first} to {first + count - 1}"
        )
        raise ValueError(f"the actions are {allowed}")

    def _shown(self, observation: Any) -> str:
        """Return what the policy reads."""
        if self.task.shows == "render":
            observation = self.env.render()
            if not isinstance(observation, str):
                raise ValueError(
                    f"{self.task.key}.shows=render: render() returned {type(observation).__name__}, not a text; with "
                    f"gymnasium give {self.task.key}.arguments.render_mode=ansi"
                )
            return COLOUR.sub("", GROUND.sub(r"[\1]", observation)).strip("\n")
        return (
            observation
            if isinstance(observation, str)
            else json.dumps(plain(observation), ensure_ascii=False)
        )


def plain(value: Any) -> Any:
    """Return an observation as JSON has it. Raises ValueError for anything but texts, numbers, and
    lists, mappings and arrays of them."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufU":
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise ValueError(f"an observation of the type {type(value).__name__} cannot be shown as text")
