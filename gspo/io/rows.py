"""Reads the rows of a run's metrics file: within bounds, which are wider if the run is this user's
own.
"""

from __future__ import annotations

from pathlib import Path

from gspo.io import untrusted
from gspo.io.ownership import is_own_file


def read_rows(path: Path) -> list[dict]:
    """Read the rows of a metrics file. Lines that a kill cut short or a disk damaged are left out.

    Raises ValueError if the content is not rows at all.
    """
    return rows_and_damage(path)[0]


def rows_and_damage(path: Path) -> tuple[list[dict], list[str]]:
    """Read the rows of a metrics file, and separately the lines that are damaged. That of one's own
    run may be larger."""
    try:
        rows, damaged = untrusted.read_rows(
            path, untrusted.OWN_RUN_FACTOR if is_own_file(path.with_name("settings.yaml")) else 1
        )
    except FileNotFoundError:
        return [], []
    return rows, [line.decode(errors="replace") for _, line in damaged]
