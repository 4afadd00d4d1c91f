"""The report of a run as one HTML page: `python experiments/report.py run=runs/STUDY/RUN [run=...]`.

Written to report.html in each run's directory; every run writes its own at its end. Reads files only: safe while the
run goes on.
"""

from __future__ import annotations

import gspo.interrupt  # noqa: F401

# isort: split

import sys
from pathlib import Path

from gspo.process import command_line
from gspo.run_report import write


def main() -> None:
    arguments = sys.argv[1:]
    runs = [argument.removeprefix("run=") for argument in arguments if argument.startswith("run=")]
    if not runs or len(runs) != len(arguments):
        print(__doc__)
        sys.exit(0 if arguments in (["-h"], ["--help"]) else 2)
    for run in runs:
        print(write(Path(run)))


if __name__ == "__main__":
    command_line(main)
