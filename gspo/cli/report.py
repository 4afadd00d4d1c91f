"""Writes the reports of runs, an HTML page for each.

    gspo report runs/STUDY/RUN
    gspo report runs/STUDY/*

The page is report.html in the run's directory. Every run also writes it at its end. The command
only reads the run's other files, so it is safe during the run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from gspo.io.arguments import command_options, option
from gspo.run.entry_point import command_line, print_error
from gspo.tracking.run_report import write_page


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this command."""

    paths: tuple[str, ...] = option(meaning="run directories")


def main() -> None:
    """Write the pages of the runs on the command line."""
    command_line(write_pages)


def write_pages() -> None:
    """Write the page of each run. An error in a run does not stop the other pages."""
    exit_code = 0
    for path in command_options(Options, __doc__).paths:
        try:
            print(write_page(Path(path)))
        except ValueError as error:
            exit_code = print_error(error)
    sys.exit(exit_code)
