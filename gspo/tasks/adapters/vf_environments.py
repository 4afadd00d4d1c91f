"""Environments of the library verifiers (Prime Intellect), whose rubrics give the rewards.

    gspo train task=vf task.env=my_game 'task.arguments={rounds: 3}' model=hf model.path=MODEL \\
        cold_start.steps=0

An environment is a module with a function `load_environment` that returns a `vf.Environment`. The
module is an installed package, such as the packages of Prime Intellect's hub, or a file in the
current folder. Nothing is downloaded. The first problem imports the library. Only
gspo.tasks.adapters.vf_rollout uses it directly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gspo.data.problems import Problem
from gspo.io.errors import SettingError
from gspo.io.ranges import outside_code
from gspo.io.user_code import import_object, is_path
from gspo.tasks.base import TRAINING_SPLITS, SingleSet, check_split, epoch_order, held_out
from gspo.tasks.environments.protocol import Environment, EnvironmentTask, Position

if TYPE_CHECKING:
    from gspo.tasks.adapters.vf_rollout import Loaded

LOADER = "load_environment"
INSTALL = 'pip install -e ".[vf]"'
IDENTITY_COLUMNS = ("prompt", "answer", "info")  # rows with the same values are one problem


@dataclass
class VfEnvironments(SingleSet, EnvironmentTask):
    """Problems from the rows of an environment's data sets, in an order by the run's seed.

    env         name of the environment's module, or MODULE:FUNCTION for a function other than
                load_environment
    arguments   arguments of that function

    The evaluation data set keeps its order. Training rows that are also in it are left out. Without
    an evaluation data set, 1 in 8 rows is held out, chosen by its text.
    """

    name: str = "vf"
    turns: int = 32
    env: str = outside_code()
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.env:
            raise SettingError(
                f"{self.key}.env",
                problem="is not given",
                remedy=f"say which environment, {self.key}.env=my_game",
            )
        # the library writes names as my-game, or OWNER/my-game on the hub
        if ":" not in self.env:
            self.env = f"{self.env.rpartition('/')[2].replace('-', '_')}:{LOADER}"
        if not is_path(self.env):
            raise SettingError(
                f"{self.key}.env", self.env, remedy="give the name of a module, or MODULE:FUNCTION"
            )

    @cached_property
    def loaded(self) -> Loaded:
        """The environment. Raises ValueError if it or the library is missing or unusable."""
        try:
            # the library is optional, an extra of the installation
            from gspo.tasks.adapters.vf_rollout import load
        except ModuleNotFoundError as error:
            # newer versions of verifiers lack the last two
            if error.name not in ("verifiers", "verifiers.types", "datasets"):
                raise
            raise SettingError(
                "task", self.name, "needs the package verifiers in version 0.3", INSTALL
            ) from None
        loaded = load(
            import_object(self.env, f"{self.key}.env"), dict(self.arguments), f"{self.key}."
        )
        if loaded.env.max_turns > self.turns:
            raise SettingError(
                f"{self.key}.turns",
                self.turns,
                f"{self.env} may take max_turns={loaded.env.max_turns}, and an episode "
                "that is ended before is not scored by its rubric",
                remedy=(
                    f"give {self.key}.turns={loaded.env.max_turns}, or fewer to "
                    f"{self.key}.arguments, if it has such an argument"
                ),
            )
        return loaded

    def size(self, split: str) -> int:
        """Return the number of problems of a split. Raises ValueError for an unknown split."""
        return len(self._row_indices(split))

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split. Raises ValueError if the split has no rows."""
        row_indices = self._row_indices(split)
        if split in TRAINING_SPLITS:
            epoch, position = divmod(index, len(row_indices))
            order = epoch_order(len(row_indices), seed, self.name, split, epoch)
            row_index = row_indices[order[position]]
        else:
            row_index = row_indices[index]
        row = self._rows(split)[row_index]
        return Problem(self.name, index, shown(row["prompt"]), row)

    def environment(self, problem: Problem, position: Position) -> Environment:
        return self.loaded.episode()

    def _rows(self, split: str) -> Any:
        """Return the data set of a split. Raises ValueError if there is none."""
        if split not in TRAINING_SPLITS and self.loaded.evaluation is not None:
            return self.loaded.evaluation
        if self.loaded.train is None:
            raise SettingError(
                f"{self.key}.env", self.env, "has no training data set: it can be evaluated alone"
            )
        return self.loaded.train

    def _row_indices(self, split: str) -> list[int]:
        """Return which rows of the data set belong to a split. Raises ValueError if none do."""
        check_split(split, self.evaluation_sets())
        training = split in TRAINING_SPLITS
        row_indices = self._training_rows if training else self._evaluation_rows
        if not row_indices and training:
            raise SettingError(
                f"{self.key}.env",
                self.env,
                "each of its training problems is also one to evaluate on",
            )
        if not row_indices:
            raise SettingError(
                f"{self.key}.env",
                self.env,
                f"has no evaluation data set, and of its {len(self._rows('train'))} "
                "training problems none is among the 1 in 8 that are held out: it needs "
                "more of them",
            )
        return row_indices

    @cached_property
    def _evaluation_rows(self) -> list[int]:
        rows = self._rows(self.name)
        if self.loaded.evaluation is not None:
            return list(range(len(rows)))
        return [index for index in range(len(rows)) if held_out(identity(rows[index]))]

    @cached_property
    def _training_rows(self) -> list[int]:
        rows = self._rows("train")
        evaluation_rows = self._rows(self.name)
        evaluated = {identity(evaluation_rows[index]) for index in self._evaluation_rows}
        return [index for index in range(len(rows)) if identity(rows[index]) not in evaluated]


def identity(row: dict[str, Any]) -> str:
    """Return a text that is the same for all rows of one problem.

    Different problems may have the same prompt, as in games of guessing."""
    values = {name: row[name] for name in IDENTITY_COLUMNS if name in row}
    return json.dumps(values, sort_keys=True, default=str)


def shown(prompt: list[dict[str, Any]]) -> str:
    """Return the text of a row's prompt, without the system message."""
    contents = [message["content"] for message in prompt if message["role"] != "system"]
    return "\n\n".join(map(str, contents))
