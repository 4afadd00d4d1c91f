"""The console script `gspo`: `gspo train steps=3` calls `main` of gspo.cli.train.

A command's module is imported only when that command is called. This keeps `gspo --help` fast.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn

from gspo.io.arguments import HELP, nearest


class Command(NamedTuple):
    """A command: the module with its `main`, a short summary, and arguments for an example."""

    module: str
    summary: str
    example: str


RUN = "runs/STUDY/RUN"
STUDY = "runs/STUDY"
COMMANDS = {
    "train": Command(
        "gspo.cli.train",
        "Train a policy; with -m, a sweep of runs.",
        "experiment=micro_moe seed=1",
    ),
    "plan": Command(
        "gspo.cli.plan",
        "Plan a run before it starts: memory of its GPUs, traffic, time of a step.",
        "parallel.ranks=16 ...",
    ),
    "check": Command(
        "gspo.cli.check", "Check that this machine computes correctly, and how fast.", "seconds=150"
    ),
    "serve": Command(
        "gspo.cli.serve",
        "Start a vLLM server that runs sample with.",
        "experiment=tiny_moe rollout=vllm_server",
    ),
    "evaluate": Command("gspo.cli.evaluate", "Score a run or a model on held-out problems.", RUN),
    "sample": Command(
        "gspo.cli.sample", "Print what a run's policy writes, with the verdicts.", RUN
    ),
    "report": Command(
        "gspo.cli.report", "Write the reports of runs, HTML pages.", "runs/STUDY/RUN"
    ),
    "replay": Command(
        "gspo.cli.replay",
        "Compute the loss of a recorded step again, under any objective.",
        f"{RUN} step=123 objective=grpo",
    ),
    "compare": Command(
        "gspo.cli.compare",
        "Compare runs, or two evaluations, in the terminal.",
        "runs/STUDY/A runs/STUDY/B",
    ),
    "sweep-status": Command(
        "gspo.cli.sweep_status", "Print the progress of a sweep's runs.", STUDY
    ),
    "view": Command("gspo.cli.view", "Show the curves of runs in the browser, live.", STUDY),
    "dashboard": Command(
        "gspo.cli.dashboard", "Make W&B dashboards of all metrics.", "project=NAME"
    ),
    "figure": Command("", "Draw one figure; `gspo figure --help` lists them.", f"curves {STUDY}"),
    "figures": Command(
        "gspo.analysis.reproduce", "Draw the paper's figures and judge its claims.", STUDY
    ),
    "check-objective": Command(
        "gspo.cli.check_objective",
        "Check your own loss by the invariances that every objective must satisfy.",
        "my_losses:Mine",
    ),
    "study-report": Command(
        "gspo.analysis.study_report", "Write the report of a study, an HTML page.", STUDY
    ),
}


def main() -> None:
    """Call the command that the first word of the command line names, with the other words."""
    open_closed_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        print("error: the current folder no longer exists: change to another", file=sys.stderr)
        sys.exit(2)
    try:
        dispatch()
        flush_output()
    except SystemExit:
        flush_output()
        raise
    except BrokenPipeError:
        end_without_reader()
    except OSError as error:
        if error.errno is None:  # of a library, with a message of its own
            raise
        end_with_error(error)
    except KeyboardInterrupt:  # of a command that has nothing to save
        print("\nstopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def open_closed_streams() -> None:
    """Connect the standard streams that the caller has closed to /dev/null.

    Otherwise the next file that is opened would get the stream's number, and its output."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number is `number`
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def flush_output() -> None:
    """Write out what is left of the output. Python does so too, where no error can be caught."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        end_without_reader()
    except OSError as error:
        end_with_error(error)


def end_with_error(error: OSError) -> NoReturn:
    """End with an error of a file, or without a file's name of the output."""
    # Python would flush the output again
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)


def end_without_reader() -> NoReturn:
    """End after the reader of the output, such as `head`, has ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)


def dispatch() -> None:
    """Call the command that the command line names."""
    name, words = choice("command", "gspo", sys.argv[1:], COMMANDS, commands_help)
    if name != "figure":
        call(COMMANDS[name].module, f"gspo {name}", words)
        return
    figures = figure_files()
    name, words = choice("figure", "gspo figure", words, figures, lambda: figures_help(figures))
    call(f"gspo.analysis.{figures[name].stem}", f"gspo figure {name}", words)


def choice(
    kind: str, program: str, words: list[str], names: Collection[str], text: Callable[[], str]
) -> tuple[str, list[str]]:
    """Return the first word, the name of a command or figure, and the words after it.

    Without a word, or for --help, it prints the help and ends the process. For an unknown name, it
    prints an error with the nearest name and ends the process."""
    if not words or words[0] in HELP:
        print(text())
        sys.exit(0 if words else 2)
    if words[0].startswith("-"):
        print(f"error: {words[0]}: the only option here is --help", file=sys.stderr)
        sys.exit(2)
    if words[0] not in names:
        suggestion = f"{program} {nearest(words[0], names)}"
        print(
            f"error: there is no {kind} {words[0]!r}; the nearest is `{suggestion}`",
            file=sys.stderr,
        )
        sys.exit(2)
    return words[0], words[1:]


def call(module: str, program: str, words: list[str]) -> None:
    """Import a module and call its `main` as a command, with these arguments."""
    # Importing this makes Ctrl-C print one line while the libraries load.
    from gspo.io import interrupt

    sys.argv = [program, *words]
    command = import_module(module).main
    interrupt.end()
    if module.startswith("gspo.analysis."):
        import_module("gspo.analysis.script").command(command)
    else:
        command()


def commands_help() -> str:
    """Return the help of `gspo`: the summary and an example of each command."""
    width = max(map(len, COMMANDS))
    lines = [
        "Train language models by GSPO and its rivals, and look at what the runs did. "
        "`gspo COMMAND --help` says more.",
        "",
        *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()),
        "",
        "Examples:",
        *(f"  gspo {name} {command.example}" for name, command in COMMANDS.items()),
    ]
    return "\n".join(lines)


def figure_files() -> dict[str, Path]:
    """Return the file of every figure by its name, e.g. analysis/fig_curves.py for "curves"."""
    package = find_spec("gspo.analysis")  # importing it would take seconds
    if package is None or package.origin is None:
        raise ModuleNotFoundError("gspo.analysis is not installed")
    folder = Path(package.origin).parent
    files = [*sorted(folder.glob("fig*_*.py")), folder / "early_warning.py"]
    return {re.sub(r"^fig\d*_", "", file.stem).replace("_", "-"): file for file in files}


def figures_help(figures: dict[str, Path]) -> str:
    """Return the help of `gspo figure`: the name of each figure and the first line of its file."""
    width = max(map(len, figures))
    lines = ["Draw one figure from recorded runs. `gspo figure NAME --help` says more.", ""]
    for name, file in figures.items():
        question = file.read_text(encoding="utf-8").splitlines()[0].strip('"')
        lines.append(f"  {name:<{width}}  {question}")
    return "\n".join([*lines, "", "Example:", f"  gspo figure curves {STUDY}"])


if __name__ == "__main__":
    main()
