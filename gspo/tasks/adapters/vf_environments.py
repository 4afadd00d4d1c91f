"""Tasksets of the library verifiers (Prime Intellect), whose rewards are an episode's.

    gspo train task=vf task.taskset=my_game 'task.arguments={rounds: 3}' model=hf model.path=MODEL \\
        cold_start.steps=0

A taskset is a module whose `__all__` names one subclass of `vf.Taskset`. The module is an installed
package, such as the packages of Prime Intellect's hub, or a file in the current folder. Nothing is
downloaded. The first problem imports the library. Only the modules
gspo.tasks.adapters.vf_* beside this one use it.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from gspo.data.problems import Problem
from gspo.io.errors import SettingError
from gspo.io.ranges import choice, outside_code, ranged
from gspo.io.user_code import import_object, is_path
from gspo.tasks.base import TRAINING_SPLITS, SingleSet, epoch_order, held_out
from gspo.tasks.environments.protocol import Environment, EnvironmentTask, Position

if TYPE_CHECKING:
    from gspo.tasks.adapters.vf_serving import Loaded

EXPORTS = "__all__"
INSTALL = 'pip install -e ".[vf]"'
BUILT_IN = "verifiers.v1.tasksets"  # the package of the library's own tasksets
BUILT_IN_TASKSETS = ("harbor", "nemo_gym", "openenv", "textarena")
LOADING = threading.Lock()  # the threads of episodes load environments
# Containers on this machine, or processes. The library's other runtimes are paid services.
RUNTIMES = ("subprocess", "docker", "podman", "apptainer")


@dataclass
class VfEnvironments(SingleSet, EnvironmentTask):
    """Problems from the tasks of a taskset, in an order by the run's seed.

    taskset               name of the taskset's module
    arguments             fields of the taskset's configuration
    evaluation_arguments  the same for the taskset of evaluation, for example {split: test}. Empty:
                          1 in 8 tasks is held out, chosen by its data.
    tasks                 number of tasks that are read of an infinite taskset
    env                   name of the library's environment: how agents play a task. Empty: the
                          taskset's own environment, or one agent alone.
    group                 field of the environment's configuration that counts the agents of an
                          episode, for example n of best-of-n. It gets the group size, and all
                          samples of a problem are one episode, which the environment scores. Empty:
                          each sample is an episode.
    harness               name of the harness, the program that plays the agent
    runtime               where the harness and the taskset's commands run

    The evaluation taskset keeps its order. Training tasks that are also in it are left out.
    """

    name: str = "vf"
    turns: int = 32
    taskset: str = outside_code()
    arguments: dict[str, Any] = field(default_factory=dict)
    evaluation_arguments: dict[str, Any] = field(default_factory=dict)
    tasks: int = ranged(1000, least=8)
    env: str = ""
    group: str = ""
    harness: str = "gspo-chat"
    runtime: str = choice("subprocess", RUNTIMES)
    names_rewards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.taskset:
            raise SettingError(
                f"{self.key}.taskset",
                problem="is not given",
                remedy=f"name the taskset, {self.key}.taskset=my_game",
            )
        # the library writes names as my-game, or OWNER/my-game on the hub
        module = self.taskset.removesuffix(f":{EXPORTS}").rpartition("/")[2]
        module = module.replace("-", "_").lower()
        if module in BUILT_IN_TASKSETS:
            module = f"{BUILT_IN}.{module}"
        self.taskset = f"{module}:{EXPORTS}"
        in_package = "." in module and not module.startswith(f"{BUILT_IN}.")
        if not is_path(self.taskset) or in_package:
            raise SettingError(
                f"{self.key}.taskset", self.taskset, remedy="give the name of a module"
            )
        self._loaded: dict[tuple[bool, int], Loaded] = {}

    def load(self, training: bool, group_size: int = 1) -> Loaded:
        """Return the environment that plays the tasks of training, or of evaluation.

        Raises ValueError if it or the library is missing or unusable."""
        if not self.group:
            group_size = 1
        variant = (training or not self.evaluation_arguments, group_size)
        with LOADING:
            if variant not in self._loaded:
                self._loaded[variant] = self._load(*variant)
            return self._loaded[variant]

    def _load(self, training: bool, group_size: int) -> Loaded:
        try:
            # the library is optional, an extra of the installation
            from gspo.tasks.adapters.vf_serving import EnvChoice, load
        except ImportError as error:
            # older versions of verifiers lack parts of it
            if not str(error.name).startswith("verifiers"):
                raise
            raise SettingError(
                "task", self.name, "needs the package verifiers in version 0.4", INSTALL
            ) from None
        import_object(self.taskset, f"{self.key}.taskset")
        env_choice = EnvChoice(
            self.taskset.removesuffix(f":{EXPORTS}").rpartition(".")[2],
            self.env,
            self.harness,
            self.runtime,
            self.turns,
            self.group,
        )
        arguments = dict(self.arguments)
        if not training:
            arguments |= self.evaluation_arguments
        return load(env_choice, arguments, group_size, self.tasks, f"{self.key}.")

    def size(self, split: str) -> int:
        """Return the number of problems of a split. Raises ValueError for an unknown split."""
        return len(self._indices(split))

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split. Raises ValueError if the split has no tasks."""
        indices = self._indices(split)
        training = split in TRAINING_SPLITS
        if training:
            epoch, position = divmod(index, len(indices))
            order = epoch_order(len(indices), seed, self.name, split, epoch)
            task_index = indices[order[position]]
        else:
            task_index = indices[index]
        data = self.load(training).tasks[task_index].data
        shown = data.prompt_text or data.description or data.name or f"task {task_index}"
        return Problem(self.name, index, shown, {"training": training, "task": task_index})

    def environment(self, problem: Problem, position: Position) -> Environment:
        from gspo.tasks.adapters.vf_rollout import VfEpisode

        training = problem.answer["training"]
        return VfEpisode(
            lambda group_size: self.load(training, group_size),
            problem.answer["task"],
            position,
        )

    def _indices(self, split: str) -> list[int]:
        """Return which tasks of the taskset belong to a split. Raises ValueError if none do."""
        self.check_split(split)
        training = split in TRAINING_SPLITS
        indices = self._training_tasks if training else self._evaluation_tasks
        if not indices and training:
            raise SettingError(
                f"{self.key}.taskset",
                self.taskset,
                "each of its training problems is also one to evaluate on",
            )
        if not indices:
            raise SettingError(
                f"{self.key}.taskset",
                self.taskset,
                f"of its {len(self._identities(True))} tasks none is among the 1 in 8 that are "
                f"held out: it needs more of them, or {self.key}.evaluation_arguments",
            )
        return indices

    def _identities(self, training: bool) -> list[str]:
        return [identity(task.data.model_dump(mode="json")) for task in self.load(training).tasks]

    @cached_property
    def _evaluation_tasks(self) -> list[int]:
        identities = self._identities(False)
        if self.evaluation_arguments:
            return list(range(len(identities)))
        return [index for index, text in enumerate(identities) if held_out(text)]

    @cached_property
    def _training_tasks(self) -> list[int]:
        identities = self._identities(False)
        evaluated = {identities[index] for index in self._evaluation_tasks}
        return [index for index, text in enumerate(self._identities(True)) if text not in evaluated]


def identity(data: dict[str, Any]) -> str:
    """Return a text that is the same for all tasks of one problem.

    Different problems may have the same prompt, as in games of guessing."""
    values = {name: value for name, value in data.items() if name not in ("idx", "id", "name")}
    return json.dumps(values, sort_keys=True, default=str)
