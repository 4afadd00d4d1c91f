"""How far a sweep is: `gspo sweep-status runs/STUDY`. Reads files only; safe while the sweep runs.

States: finished, collapsed (the monitor ended it), running, stopped (by a signal, saved), died
(killed), failed (with the reason), missing. The sweep's own command, typed again, runs what is not
finished or collapsed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gspo.io.arguments import key_values
from gspo.io.escaping import escape_line, escape_output
from gspo.run.sweep_state import jobs, table, upload


def main() -> None:
    """Print how far the sweep is that the command line names."""
    escape_output()
    sys.exit(print_status(sys.argv[1:]))


def print_status(arguments: list[str]) -> int:
    """Print a line for each job of a sweep; return the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        _, (study,) = key_values(arguments, {}, paths=True)
        print(table(jobs(Path(study))))
        if command := upload(Path(study)):
            print(f"to upload them to W&B: {command}")
    except (ValueError, OSError) as error:
        print(f"error: {escape_line(error)}", file=sys.stderr)
        return 2
    return 0
