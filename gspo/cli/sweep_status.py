"""Prints the state of each run of a sweep: `gspo sweep-status runs/STUDY`.

States: finished, collapsed (the monitor ended it), running, stopped (by a signal, saved), died
(killed), failed (with the reason), missing. To run the jobs that are neither finished nor
collapsed, type the sweep's command again. This command only reads files, so it is safe during the
sweep.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gspo.io.arguments import key_values
from gspo.io.escaping import escape_line, escape_output
from gspo.run.sweep_state import jobs, table, upload


def main() -> None:
    """Print the state of the sweep that the command line names."""
    escape_output()
    sys.exit(print_status(sys.argv[1:]))


def print_status(arguments: list[str]) -> int:
    """Print a line for each job of a sweep and return the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        _, (study,) = key_values(arguments, {}, paths=True)
        print(table(jobs(Path(study))))
        command = upload(Path(study))
        if command:
            print(f"to upload them to W&B: {command}")
    except (ValueError, OSError) as error:
        print(f"error: {escape_line(error)}", file=sys.stderr)
        return 2
    return 0
