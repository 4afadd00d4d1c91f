"""What a check found, as a line of the terminal and as a record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK = "ok"
SLOW = "SLOW"
FAIL = "FAIL"
SKIP = "skip"
WIDTHS = (5, 46, 34)  # columns of the terminal: status, what, number


@dataclass
class Finding:
    """One line of the report. `number` is what was measured, `bound` what it is compared with, both
    with their units. `detail` is for the record alone: a traceback, or all places of a count."""

    status: str
    what: str
    number: str = ""
    bound: str = ""
    detail: Any = None

    def line(self) -> str:
        """Return the finding as a line of the terminal."""
        status, what, number = WIDTHS
        return f"{self.status:<{status}} {self.what:<{what}} {self.number:<{number}} {self.bound}".rstrip()

    def record(self) -> dict[str, Any]:
        """Return the finding as a record that can be written as JSON."""
        return asdict(self)


def header() -> str:
    """Return the line above the findings."""
    return Finding("", "what", "number", "bound").line()


def at_most(
    what: str, value: float, bound: float, unit: str = "", status: str = FAIL, detail: Any = None
) -> Finding:
    """Return `ok` if a value is at most its bound, else `status`. NaN is never ok."""
    return Finding(
        OK if value <= bound else status,
        what,
        _with(value, unit),
        f"<= {_with(bound, unit)}",
        detail,
    )


def at_least(
    what: str, value: float, bound: float, unit: str = "", status: str = FAIL, detail: Any = None
) -> Finding:
    """Return `ok` if a value is at least its bound, else `status`. NaN is never ok."""
    return Finding(
        OK if value >= bound else status,
        what,
        _with(value, unit),
        f">= {_with(bound, unit)}",
        detail,
    )


def _with(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".strip()
