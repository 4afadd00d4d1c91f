"""Writes the reports of runs, an HTML page for each.

    gspo report runs/STUDY/RUN
    gspo report runs/STUDY
    gspo report outputs/checkpoint-500 objective=gspo updates_per_batch=4
    gspo report logs/verl_file_logger.jsonl out=pages
    gspo report wandb:ENTITY/PROJECT

The page of a run is report.html in its directory. Every run also writes it at its end. The command
only reads the run's other files, so it is safe during the run. A folder of run directories stands
for all its runs.

Any other path may hold logs of TRL, verl, prime-rl, ROLL, slime, OpenRLHF, ms-swift, NeMo-RL or
SkyRL (docs/other_frameworks.md), and so may wandb:ENTITY/PROJECT[/GROUP or /RUN_ID]. The page of
each run is written to the folder `out`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gspo.io.arguments import command_options, option
from gspo.io.escaping import escape_line
from gspo.io.files import SETTINGS_FILE
from gspo.io.tables import counted
from gspo.run.entry_point import command_line, print_error
from gspo.tracking.foreign_options import ForeignOptions
from gspo.tracking.run_report import write_page

if TYPE_CHECKING:
    from gspo.tracking.frameworks.translate import ForeignRun

SERVER = "wandb:"


@dataclass(frozen=True, kw_only=True)
class Options(ForeignOptions):
    """The options of this command."""

    paths: tuple[str, ...] = option(
        meaning="run directories, folders of them, or logs of other frameworks; "
        "wandb:ENTITY/PROJECT[/GROUP or /RUN_ID]"
    )
    out: Path = option(Path("reports"), "the folder for the pages of other logs")


def main() -> None:
    """Write the pages of the runs on the command line."""
    command_line(write_pages)


def write_pages() -> None:
    """Write the page of each run. An error in a run does not stop the other pages."""
    exit_code = 0
    pages: set[Path] = set()
    options = command_options(Options, __doc__)
    paths: list[str] = []
    own_runs: set[str] = set()
    for path in options.paths:
        runs = own_runs_in(path)
        own_runs.update(runs)
        paths += runs or [path]
    if options.given() and own_runs.issuperset(paths):
        raise ValueError(options.without_effect())
    if options.out != Options.out and own_runs.issuperset(paths):
        raise ValueError(
            f"out={options.out}: the page of a run is written into the run's directory"
        )
    for path in paths:
        try:
            if path in own_runs or not is_there(path):
                print(write_page(Path(path)))
            elif path.startswith(SERVER):
                write_server_pages(path, options, pages)
            else:
                write_foreign_pages(Path(path), options, pages)
        except BrokenPipeError:
            raise  # gspo.cli.main handles it
        except (ValueError, OSError) as error:
            exit_code = print_error(error)
    sys.exit(exit_code)


def own_runs_in(path: str) -> list[str]:
    """Return the run directories of this repository at or below a path."""
    if (Path(path) / SETTINGS_FILE).exists():
        return [path]
    if path.startswith(SERVER):
        return []
    return sorted(str(file.parent) for file in Path(path).rglob(SETTINGS_FILE))


def is_there(path: str) -> bool:
    """Return whether a path exists, or is an address of W&B's server."""
    return path.startswith(SERVER) or Path(path).exists()


def write_foreign_pages(path: Path, options: Options, pages: set[Path]) -> None:
    """Write the page of each log of another framework at or below a path.

    `pages` has the pages that this command wrote before, and gets these too. Raises ValueError if
    there is none, or if one cannot be read."""
    # pandas, which a page of our own runs does not need, takes a second
    from gspo.analysis.foreign import read_foreign_runs

    runs, problems, notes = read_foreign_runs(path, options)
    for note in notes:
        print(f"note: {escape_line(note)}", file=sys.stderr)
    print_pages(runs, options.out, pages)
    if problems:
        raise ValueError("; ".join(problems))


def write_server_pages(source: str, options: Options, pages: set[Path]) -> None:
    """Write the page of each run of another framework of W&B's server.

    Raises ValueError if there is none, if one cannot be read, and for runs of this repository."""
    from gspo.analysis.sources import foreign_server_runs

    runs, problems, own_names = foreign_server_runs(source, options)
    print_pages(runs, options.out, pages)
    if own_names:
        problems.append(
            f"{source}: {counted(len(own_names), 'run')} of this repository ({own_names[0]}), whose "
            "page is made from the run directory: gspo report runs/STUDY/RUN"
        )
    if not runs and not problems:
        problems.append(f"{source}: there is no training run")
    if problems:
        raise ValueError("; ".join(problems))


def print_pages(runs: list[ForeignRun], folder: Path, pages: set[Path]) -> None:
    """Write the pages of runs of other frameworks, and print their paths and the notes.

    `pages` has the pages that this command wrote before, and gets these too."""
    from gspo.tracking.foreign_report import write_foreign_page

    for run in runs:
        for note in run.notes:
            print(f"note: {escape_line(run.path)}: {escape_line(note)}", file=sys.stderr)
        page = write_foreign_page(run, folder, taken=pages)
        pages.add(page)
        print(page)
