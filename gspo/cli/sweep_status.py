"""Prints the state of each run of a sweep.

    gspo sweep-status runs/STUDY

States: finished, ended early (by a callback), collapsed (the monitor ended it), running, stopped
(by a signal, saved), died (killed), failed (with the reason), missing. To run the jobs that are
stopped, died, failed or missing, type the sweep's command again. This command only reads files, so
it is safe during the sweep.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from gspo.io.arguments import command_options, option
from gspo.io.escaping import escape_line, escape_output
from gspo.run.sweep_state import jobs, table, upload


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this command."""

    paths: tuple[str, ...] = option(meaning="folders of sweeps")


def main() -> None:
    """Print a line for each job of the sweeps that the command line names."""
    escape_output()
    try:
        for path in command_options(Options, __doc__).paths:
            print(table(jobs(Path(path))))
            command = upload(Path(path))
            if command:
                print(f"to upload them to W&B: {command}")
    except BrokenPipeError:
        raise  # gspo.cli.main handles it
    except (ValueError, OSError) as error:
        print(f"error: {escape_line(error)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)
