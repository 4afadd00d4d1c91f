"""The report of a run as one HTML page: `python experiments/report.py run=runs/STUDY/RUN [run=...]`.

Written to report.html in each run's directory; every run writes its own at its end. Reads files only: safe while the
run goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gspo.run_report import write


def main(arguments: list[str]) -> int:
    runs = [argument.removeprefix("run=") for argument in arguments if argument.startswith("run=")]
    if not runs or len(runs) != len(arguments):
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        for run in runs:
            print(write(Path(run)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
