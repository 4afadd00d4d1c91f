"""Evaluates a run's checkpoint or any model on held-out sets and benchmarks, and prints a table.

`--help` says more.
"""

import re
import sys
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob
from omegaconf import DictConfig

from gspo.cli.option_files import CONF, composed
from gspo.config.commands import EvaluateCommand
from gspo.config.conversion import to_dataclass
from gspo.config.settings import CONSENT
from gspo.io.errors import SettingError
from gspo.io.user_code import is_path
from gspo.run.entry_point import command_line, one_line


def main() -> None:
    """Evaluate, with the settings of the command line."""
    command_line(start)


def start() -> None:
    """Compose the settings and evaluate."""
    sys.argv[1:] = with_benchmarks(sys.argv[1:])
    composed("evaluate", job)()


@one_line
def job(config: DictConfig) -> None:
    """Evaluate, print a table, and write the numbers and the responses."""
    command = command_of(config)
    # it imports PyTorch, which takes seconds
    from gspo.cli.evaluation_job import evaluate_subject

    evaluate_subject(command)


def command_of(config: DictConfig) -> EvaluateCommand:
    """Return the command of a composed configuration. Raises ValueError for unfit settings."""
    find_data(config)
    if config[CONSENT]:
        give_consent(config.tasks)
    return to_dataclass(config)


def find_data(config: DictConfig) -> None:
    """Set the empty paths of the benchmarks from data=DIR: DIR/<name>, or a file DIR/<name>.*.

    Raises ValueError if no benchmark has an empty path."""
    if not config.data:
        return
    without_path = {
        name: task
        for name, task in config.tasks.items()
        if isinstance(task, DictConfig) and task.get("path") == ""
    }
    if not without_path:
        raise SettingError(
            "data", config.data, f"is read by none of benchmark={list(config.benchmark)}"
        )
    for name, task in without_path.items():
        folder = Path(config.data) / name
        files = [] if folder.exists() else sorted(folder.parent.glob(f"{name}.*"))
        task.path = str(files[0] if files else folder)


def give_consent(tasks: DictConfig) -> None:
    """Set every `allow_weak_sandbox` of the benchmarks' settings, also of nested ones, to true."""
    for key in tasks:
        value = tasks[key]
        if key == CONSENT:
            tasks[key] = True
        elif isinstance(value, DictConfig):
            give_consent(value)


def with_benchmarks(arguments: list[str]) -> list[str]:
    """Return the command line with an option file for each name of benchmark=[...].

    The word `+task@tasks.NAME=NAME` makes Hydra put conf/task/NAME.yaml at tasks.NAME. Hydra then
    composes and checks tasks.NAME.KEY=... like any setting. A name may also be the import path of
    the user's own task. For example, my_pkg.tasks:Mine becomes tasks.Mine.

    Raises ValueError for a name without an option file."""
    options = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
    result: list[str] = []
    for argument in arguments:
        if not argument.startswith("benchmark="):
            result.append(argument)
            continue
        value = OverridesParser.create().parse_override(argument).value()
        if isinstance(value, Glob):
            names = value.filter(options)
        elif isinstance(value, ChoiceSweep):
            names = list(map(str, value.list))
        elif isinstance(value, list):
            names = list(map(str, value))
        else:
            names = [str(value)]
        for name in names:
            if name not in options and not is_path(name):
                raise SettingError(
                    "benchmark", name, f"there is no such benchmark; there are {', '.join(options)}"
                )
        # the key of the user's own task is the name of its class
        keys = [re.split("[.:]", name)[-1] for name in names]
        result.append(f"benchmark=[{','.join(keys)}]")
        result += [f"+task@tasks.{key}={name}" for key, name in zip(keys, names, strict=True)]
    return result
