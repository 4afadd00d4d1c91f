"""A record of a benchmark, which checks the types of its values when they are read.

A record may come from an untrusted source. A text that cannot be written as UTF-8 is refused.
"""

from dataclasses import dataclass
from typing import Any

from gspo.io.errors import RowError
from gspo.io.untrusted import check_depth

NO_DEFAULT = object()
MAX_RATING = 10_000  # the best of all people have 4,000


@dataclass(frozen=True)
class DataRow:
    """A record, and its address in a file."""

    where: str  # the address for messages, such as "aime24/test.jsonl, line 3"
    values: dict[str, Any]

    def get(self, key: str, *kinds: type, default: Any = NO_DEFAULT) -> Any:
        """Return the value of a key. Its type must be in `kinds`.

        Raises ValueError, which names file, line and key."""
        if key not in self.values:
            if default is not NO_DEFAULT:
                return default
            keys = ", ".join(map(str, self.values))
            raise RowError(self.where, key, "is missing", f"there are {keys}")
        value = self.values[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise self.wrong(key, f"must be {names}, not {type(value).__name__}")
        return value

    def text(self, key: str, default: Any = NO_DEFAULT) -> str:
        r"""Return the text of a key, with \n instead of \r\n.

        It may be empty only if there is a default."""
        value = self.get(key, str, default=default).replace("\r\n", "\n")
        if default is NO_DEFAULT and not value.strip():
            raise self.wrong(key, "is empty")
        return value

    def texts(self, key: str, default: Any = NO_DEFAULT) -> list[str]:
        r"""Return the list of texts of a key, with \n instead of \r\n."""
        values = self.get(key, list, tuple, default=default)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(key, "must be a list of texts")
        return [value.replace("\r\n", "\n") for value in values]

    def first(self, *keys: str) -> str:
        """Return the text of the first key that exists. Raises ValueError if none exists."""
        for key in keys:
            if key in self.values:
                return self.text(key)
        raise ValueError(
            f"{self.where}: one of the keys {', '.join(keys)} is needed; "
            f"there are {', '.join(self.values)}"
        )

    def rating(self, key: str) -> float:
        """Return the rating of a key, a number on Codeforces' scale."""
        rating = self.get(key, int, float)
        if not abs(rating) <= MAX_RATING:  # false for NaN too
            raise self.wrong(key, f"must be a number up to {MAX_RATING}")
        return float(rating)

    def wrong(self, key: str, problem: str) -> RowError:
        """Return the error to raise about a key."""
        return RowError(self.where, key, problem)


def checked(where: str, values: dict[str, Any]) -> DataRow:
    """Return the record.

    Raises ValueError for a key or a value that cannot be written to a run's files."""
    row = DataRow(where, values)
    for key, value in values.items():
        try:
            check_depth(value)
        except ValueError:
            raise row.wrong(key, "is nested too deeply") from None
        if not (writable(key) and writable(value)):
            raise row.wrong(
                key, "holds half a character (a lone surrogate, \\ud800 to \\udfff): fix its text"
            )
    return row


def writable(value: Any) -> bool:
    """Return whether all texts in a value can be written as UTF-8.

    JSON can escape half a surrogate pair, which cannot be written."""
    if isinstance(value, str):
        try:
            return value.isascii() or bool(value.encode())
        except UnicodeEncodeError:
            return False
    if isinstance(value, dict):
        return all(writable(key) and writable(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(writable, value))
    return True
