"""Readers for the rows of a run's metrics file, with wider bounds for this user's own runs."""

from pathlib import Path

from gspo.io import untrusted
from gspo.io.ownership import is_own_file


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a metrics file, without damaged lines.

    Raises ValueError if the file holds something other than rows.
    """
    rows, _ = rows_and_damage(path)
    return rows


def rows_and_damage(path: Path) -> tuple[list[dict], list[str]]:
    """Return the rows of a metrics file and its damaged lines. Both are empty without a file."""
    is_own_run = is_own_file(path.with_name("settings.yaml"))
    factor = untrusted.OWN_RUN_FACTOR if is_own_run else 1
    try:
        rows, damaged = untrusted.read_rows(path, factor)
    except FileNotFoundError:
        return [], []
    return rows, [line.decode(errors="replace") for _, line in damaged]
