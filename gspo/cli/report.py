"""The report of a run as one HTML page: `gspo report run=runs/STUDY/RUN [run=...]`.

Written to report.html in each run's directory; every run writes its own at its end. Reads files
only: safe while the run goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gspo.io.arguments import key_values
from gspo.run.entry_point import command_line, print_error
from gspo.tracking.run_report import write_page


def main() -> None:
    """Write the pages that the command line asks for."""
    command_line(write_pages)


def write_pages() -> None:
    """Write the page of each run; what is wrong with one of them does not keep the others from
    having theirs.
    """
    arguments = sys.argv[1:]
    if not arguments or set(arguments) <= {"-h", "--help"}:
        print(__doc__)
        sys.exit(0 if arguments else 2)
    for argument in arguments:  # all arguments are checked before the first page is written
        key_values([argument], {"run": ""}, paths=True, empty=False)
    wrong = False
    for argument in arguments:
        try:
            print(write_page(Path(argument.removeprefix("run="))))
        except ValueError as error:  # the others' pages are written
            wrong = print_error(error)
    sys.exit(wrong)
