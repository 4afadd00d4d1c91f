"""Environments of the library verifiers (Prime Intellect), by name: its rollout is played here, its
rubric rewards it.

    gspo train task=vf task.env=my_game 'task.arguments={rounds: 3}' model=hf model.path=MODEL
    cold_start.steps=0

An environment is a module with a function `load_environment`, which returns a `vf.Environment`: an
installed package, as those of Prime Intellect's hub are, or a file in the current folder. Nothing
is downloaded here. The library is imported when the first problem is asked for; what knows it is in
gspo.tasks.adapters.vf_rollout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from gspo.data.samples import Problem
from gspo.data.seeding import permutation
from gspo.io.ranges import outside_code
from gspo.io.user_code import import_object, is_path
from gspo.tasks.base import TRAINING_SPLITS, check_split, held_out
from gspo.tasks.environments.protocol import Environment, EnvironmentTask

if TYPE_CHECKING:
    from gspo.tasks.adapters.vf_rollout import Loaded

LOADER = "load_environment"
INSTALL = 'pip install "gspo[vf]"'
IDENTITY = ("prompt", "answer", "info")  # the columns by which two rows are one problem


@dataclass
class VfEnvironments(EnvironmentTask):
    """Problems are the rows of an environment's data sets, in an order by the run's seed.

    env         the environment: its name, which is that of its module, or MODULE:FUNCTION; what
                returns it is then another function than load_environment
    arguments   what that function is called with

    It is evaluated on its evaluation data set, in the order of that. Rows of the training set that
    are also there are left out. Where it has none, 1 in 8 rows is held out, chosen by its text.
    """

    name: str = "vf"
    turns: int = 32
    env: str = outside_code()
    arguments: dict[str, Any] = field(default_factory=dict)

    key: ClassVar[str] = "task"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.env:
            raise ValueError(
                f"{self.key}.env is not given: say which environment, {self.key}.env=my_game"
            )
        # a name as the library writes it: my-game, or OWNER/my-game on the hub
        if ":" not in self.env:
            self.env = f"{self.env.rpartition('/')[2].replace('-', '_')}:{LOADER}"
        if not is_path(self.env):
            raise ValueError(
                f"{self.key}.env={self.env}: give the name of a module, or MODULE:FUNCTION"
            )

    @cached_property
    def loaded(self) -> Loaded:
        """The environment. Raises ValueError if it, or the library, is not there or cannot be used."""
        try:
            # the library is optional, an extra of the installation
            from gspo.tasks.adapters.vf_rollout import load
        except ModuleNotFoundError as error:
            # newer versions lack the last two
            if error.name not in ("verifiers", "verifiers.types", "datasets"):
                raise
            raise ValueError(
                f"task={self.name} needs the package verifiers in version 0.3: {INSTALL}"
            ) from None
        loaded = load(
            import_object(self.env, f"{self.key}.env"), dict(self.arguments), f"{self.key}."
        )
        if loaded.env.max_turns > self.turns:
            raise ValueError(
                f"{self.key}.turns={self.turns}: {self.env} may take max_turns={loaded.env.max_turns}, and an episode "
                f"that is ended before is not scored by its rubric; give {self.key}.turns={loaded.env.max_turns}, or "
                f"fewer to {self.key}.arguments, if it has such an argument"
            )
        return loaded

    def evaluation_sets(self) -> list[str]:
        return [self.name]

    def size(self, split: str) -> int:
        """Return the number of problems of a split. Raises ValueError for an unknown split."""
        return len(self._places(split))

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split. Raises ValueError if the environment has no such rows."""
        places = self._places(split)
        if split in TRAINING_SPLITS:
            epoch, place = divmod(index, len(places))
            place = _order(len(places), seed, self.name, split, epoch)[place]
        else:
            place = index
        row = self._rows(split)[places[place]]
        return Problem(self.name, index, shown(row["prompt"]), row)

    def environment(self, problem: Problem, position: tuple[int | str, ...]) -> Environment:
        return self.loaded.episode()

    def _rows(self, split: str) -> Any:
        """Return the data set that a split's rows are in."""
        own = split not in TRAINING_SPLITS and self.loaded.evaluation is not None
        rows = self.loaded.evaluation if own else self.loaded.train
        if rows is None:
            raise ValueError(
                f"{self.key}.env={self.env} has no training data set: it can be evaluated alone"
            )
        return rows

    def _places(self, split: str) -> list[int]:
        """Return where a split's problems are in their data set. Raises ValueError if there is
        none.
        """
        check_split(split, self.evaluation_sets())
        training = split in TRAINING_SPLITS
        places = self._training_places if training else self._evaluation_places
        if not places and training:
            raise ValueError(
                f"{self.key}.env={self.env}: each of its training problems is also one to evaluate on"
            )
        if not places:
            raise ValueError(
                f"{self.key}.env={self.env} has no evaluation data set, and of its {len(self._rows('train'))} training "
                "problems none is among the 1 in 8 that are held out: it needs more of them"
            )
        return places

    @cached_property
    def _evaluation_places(self) -> list[int]:
        rows = self._rows(self.name)
        if self.loaded.evaluation is not None:
            return list(range(len(rows)))
        return [place for place in range(len(rows)) if held_out(identity(rows[place]))]

    @cached_property
    def _training_places(self) -> list[int]:
        rows = self._rows("train")
        kept = self._rows(self.name)
        evaluated = {identity(kept[place]) for place in self._evaluation_places}
        return [place for place in range(len(rows)) if identity(rows[place]) not in evaluated]


def identity(row: dict[str, Any]) -> str:
    """Return what makes two rows the same problem, as a text. Prompts alone may be alike, as in
    games of guessing.
    """
    return json.dumps(
        {name: row[name] for name in IDENTITY if name in row}, sort_keys=True, default=str
    )


def shown(prompt: list[dict[str, Any]]) -> str:
    """Return what a row's prompt says, without the system's turn, as one text."""
    turns = [turn for turn in prompt if turn["role"] != "system"]
    return "\n\n".join(
        turn["content"] if isinstance(turn["content"], str) else str(turn["content"])
        for turn in turns
    )


@lru_cache(maxsize=16)  # the stream moves on, so a handful of epochs serves a batch that spans two
def _order(count: int, *position: int | str) -> list[int]:
    return permutation(count, *position).tolist()
