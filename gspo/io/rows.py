"""Readers for the rows of a run's metrics file, with wider bounds for this user's own runs."""

from pathlib import Path

from gspo.io import untrusted
from gspo.io.files import SETTINGS_FILE
from gspo.io.ownership import is_own_file


def own_run_factor(metrics: Path) -> int:
    """Return the factor of the bounds of a metrics file, above 1 for a run of this user's."""
    return untrusted.OWN_RUN_FACTOR if is_own_file(metrics.with_name(SETTINGS_FILE)) else 1


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a metrics file, without damaged lines.

    Raises ValueError if the file holds something other than rows.
    """
    rows, _ = rows_and_damage(path)
    return rows


def rows_and_damage(path: Path) -> tuple[list[dict], list[str]]:
    """Return the rows of a metrics file and its damaged lines. Both are empty without a file."""
    try:
        rows, damaged = untrusted.read_bounded_rows(path, own_run_factor(path))
    except FileNotFoundError:
        return [], []
    return rows, [line.decode(errors="replace") for _, line in damaged]
