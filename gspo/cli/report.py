"""Writes the report of a run as an HTML page: `gspo report run=runs/STUDY/RUN [run=...]`.

The page is report.html in the run's directory. Every run also writes it at its end. The command
only reads the run's other files, so it is safe during the run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gspo.io.arguments import key_values
from gspo.run.entry_point import command_line, print_error
from gspo.tracking.run_report import write_page


def main() -> None:
    """Write the pages of the runs on the command line."""
    command_line(write_pages)


def write_pages() -> None:
    """Write the page of each run. An error in a run does not stop the other pages."""
    arguments = sys.argv[1:]
    if not arguments or set(arguments) <= {"-h", "--help"}:
        print(__doc__)
        sys.exit(0 if arguments else 2)
    # all arguments are checked before the first page is written
    for argument in arguments:
        key_values([argument], {"run": ""}, paths=True, empty=False)
    exit_code = 0
    for argument in arguments:
        try:
            print(write_page(Path(argument.removeprefix("run="))))
        except ValueError as error:
            exit_code = print_error(error)
    sys.exit(exit_code)
