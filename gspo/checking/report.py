"""The findings of the checks, as lines of the terminal and as records."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

OK = "ok"
SLOW = "SLOW"
FAIL = "FAIL"
SKIP = "skip"
# columns of the terminal
STATUS_WIDTH = 5
WHAT_WIDTH = 46
NUMBER_WIDTH = 34


@dataclass
class Finding:
    """A line of the report.

    status   OK, SLOW, FAIL or SKIP
    what     the measured quantity, in words
    number   the measured value, with its unit
    bound    the bound on the value, with its unit
    detail   only for the record, e.g. a traceback, or all source lines of a count
    """

    status: str
    what: str
    number: str = ""
    bound: str = ""
    detail: Any = None

    def line(self) -> str:
        """Return the finding as a line of the terminal."""
        line = f"{self.status:<{STATUS_WIDTH}} {self.what:<{WHAT_WIDTH}} "
        line += f"{self.number:<{NUMBER_WIDTH}} {self.bound}"
        return line.rstrip()

    def record(self) -> dict[str, Any]:
        """Return the finding as a record that can be written as JSON."""
        return asdict(self)


Findings = Iterator[Finding]  # the result of a check


def header() -> str:
    """Return the line above the findings."""
    return Finding("", "what", "number", "bound").line()


def at_most(
    what: str, value: float, bound: float, unit: str = "", status: str = FAIL, detail: Any = None
) -> Finding:
    """Return a finding: OK if the value is at most its bound, else `status`. NaN is never OK."""
    bound_text = f"<= {_with_unit(bound, unit)}"
    verdict = OK if value <= bound else status
    return Finding(verdict, what, _with_unit(value, unit), bound_text, detail)


def at_least(
    what: str, value: float, bound: float, unit: str = "", status: str = FAIL, detail: Any = None
) -> Finding:
    """Return a finding: OK if the value is at least its bound, else `status`. NaN is never OK."""
    bound_text = f">= {_with_unit(bound, unit)}"
    verdict = OK if value >= bound else status
    return Finding(verdict, what, _with_unit(value, unit), bound_text, detail)


def _with_unit(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".strip()
