"""Writes the reports of runs, an HTML page for each.

    gspo report runs/STUDY/RUN
    gspo report runs/STUDY/*
    gspo report outputs/checkpoint-500 objective=gspo updates_per_batch=4
    gspo report logs/verl_file_logger.jsonl out=pages

The page of a run is report.html in its directory. Every run also writes it at its end. The command
only reads the run's other files, so it is safe during the run.

Any other path may hold logs of TRL, verl, prime-rl, ROLL, slime, OpenRLHF, ms-swift, NeMo-RL or
SkyRL (docs/other_frameworks.md). The page of each log is written to the folder `out`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from gspo.io.arguments import command_options, option
from gspo.io.escaping import escape_line
from gspo.io.files import SETTINGS_FILE
from gspo.run.entry_point import command_line, print_error
from gspo.tracking.run_report import write_page


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this command."""

    paths: tuple[str, ...] = option(meaning="run directories, or logs of other frameworks")
    framework: str = option("", "of other logs: trl, verl, ...; found by the names if not given")
    objective: str = option(
        "", "of other logs: gspo, grpo, ...; what clipped shares mean depends on it"
    )
    updates_per_batch: int = option(
        0, "of other logs: optimizer steps of a rollout batch, if the steps are those", least=0
    )
    out: Path = option(Path("reports"), "the folder for the pages of other logs")


def main() -> None:
    """Write the pages of the runs on the command line."""
    command_line(write_pages)


def write_pages() -> None:
    """Write the page of each run. An error in a run does not stop the other pages."""
    exit_code = 0
    foreign_pages: set[Path] = set()
    options = command_options(Options, __doc__)
    for path in map(Path, options.paths):
        try:
            if (path / SETTINGS_FILE).exists() or not path.exists():
                print(write_page(path))
            else:
                write_foreign_pages(path, options, foreign_pages)
        except ValueError as error:
            exit_code = print_error(error)
    sys.exit(exit_code)


def write_foreign_pages(path: Path, options: Options, pages: set[Path]) -> None:
    """Write the page of each log of another framework at or below a path.

    `pages` has the pages that this command wrote before, and gets these too. Raises ValueError if
    there is none, or if one cannot be read."""
    own_runs = sorted(file.parent for file in path.rglob(SETTINGS_FILE))
    if own_runs:
        raise ValueError(
            f"{path} is no run directory, but holds {len(own_runs)}: name them, as in {own_runs[0]}"
        )
    # pandas, which a page of our own runs does not need, takes a second
    from gspo.analysis.foreign import read_foreign_runs
    from gspo.tracking.foreign_report import write_foreign_page

    runs, problems = read_foreign_runs(
        path, options.framework, options.updates_per_batch, options.objective
    )
    for run in runs:
        for note in run.notes:
            print(f"note: {escape_line(run.path)}: {escape_line(note)}", file=sys.stderr)
        page = write_foreign_page(run, options.out, taken=pages)
        pages.add(page)
        print(page)
    if problems:
        raise ValueError("; ".join(problems))
