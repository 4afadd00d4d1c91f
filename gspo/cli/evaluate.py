"""Evaluates a run's checkpoint or any model on held-out sets and benchmarks; prints a table.
`--help` says more.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob
from omegaconf import DictConfig

from gspo.cli.option_files import CONF, composed
from gspo.config.commands import EvaluateCommand
from gspo.config.schema import to_dataclass
from gspo.io.user_code import is_path
from gspo.run.entry_point import command_line, one_line


def main() -> None:
    """Make the evaluation that the command line asks for."""
    command_line(start)


def start() -> None:
    """Compose the settings and evaluate."""
    sys.argv[1:] = with_benchmarks(sys.argv[1:])
    composed("evaluate", job)()


@one_line
def job(config: DictConfig) -> None:
    """Evaluate, print a table, and write the numbers and the responses."""
    find_data(config)
    command: EvaluateCommand = to_dataclass(config)
    for name, task in command.tasks.items():
        task.key = f"tasks.{name}"
    # it imports PyTorch, which takes seconds
    from gspo.cli.evaluation_job import evaluate_subject

    evaluate_subject(command)


def find_data(config: DictConfig) -> None:
    """Turn data=DIR into the benchmarks' paths where they are not given: DIR/<name>, or a file
    DIR/<name>.*.

    Raises ValueError where that changes nothing.
    """
    tasks = {name: task for name, task in config.tasks.items() if isinstance(task, DictConfig)}
    wanting = {name: task for name, task in tasks.items() if task.get("path") == ""}
    if config.data and not wanting:
        raise ValueError(
            f"data={config.data} is read by none of benchmark={list(config.benchmark)}"
        )
    for name, task in wanting.items() if config.data else ():
        folder = Path(config.data) / name
        files = [] if folder.exists() else sorted(folder.parent.glob(f"{name}.*"))
        task.path = str(files[0] if files else folder)


def with_benchmarks(arguments: list[str]) -> list[str]:
    """Return the command line with one option file for each name of benchmark=[...].
    `+task@tasks.NAME=NAME` makes Hydra put conf/task/NAME.yaml at tasks.NAME, so that it composes,
    types and refuses tasks.NAME.KEY=... like any setting. A name may also be the place of a task of
    the user's own, my_pkg.tasks:Mine, which becomes tasks.Mine.

    Raises ValueError for a name without an option file.
    """
    result, options = [], sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
    for argument in arguments:
        if not argument.startswith("benchmark="):
            result.append(argument)
            continue
        value = OverridesParser.create().parse_override(argument).value()
        if isinstance(value, Glob):
            names = value.filter(options)
        elif isinstance(value, ChoiceSweep):
            names = value.list
        else:
            names = value if isinstance(value, list) else [value]
        for name in names:
            if name not in options and not is_path(name):
                raise ValueError(
                    f"benchmark={name}: there is no such benchmark; there are {', '.join(options)}"
                )
        # of a class of the user's own, the class's name
        keys = [re.split("[.:]", name)[-1] for name in names]
        result += [f"benchmark=[{','.join(keys)}]"]
        result += [f"+task@tasks.{key}={name}" for key, name in zip(keys, names, strict=True)]
    return result
