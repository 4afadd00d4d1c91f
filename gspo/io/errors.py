"""The errors of settings and of rows of data that cannot be used. Their texts are one line."""

import re
from typing import Any

NOT_GIVEN: Any = ...  # the value of a setting that has none; it unpickles as itself
PLAIN_WORD = re.compile(r"[\w.:/+@-]+")  # a text that a command line takes without quotes


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has no text.

    A first line that ends with a colon is joined with the next one. A KeyError's text is a key
    alone, so its type comes first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"{type(error).__name__}: {lines[0]}"
    if lines[0].endswith(":") and len(lines) > 1:
        return f"{lines[0]} {lines[1]}"
    return lines[0]


class SettingError(ValueError):
    """A refusal of a setting.

        key       its dotted name, for example "rollout.group_size"
        value     its value, or NOT_GIVEN
        problem   the reason of the refusal
        remedy    the change that helps, or ""
        where     the file that has the setting, "" for the command line

    The text is one line.

    >>> str(SettingError("rollout.group_size", 1, "there is no group mean", "use 2"))
    'rollout.group_size=1: there is no group mean; use 2'
    """

    def __init__(self, key: str, value: Any = NOT_GIVEN, problem: str = "", remedy: str = ""):
        super().__init__(key, value, problem, remedy)
        self.key = key
        self.value = value
        self.problem = problem
        self.remedy = remedy
        self.where = ""

    def __str__(self) -> str:
        setting = self.key if self.value is NOT_GIVEN else f"{self.key}={as_typed(self.value)}"
        reasons = "; ".join(filter(None, (self.problem, self.remedy)))
        return ": ".join(filter(None, (self.where, setting, reasons)))


class RowError(ValueError):
    """A refusal of a row of data.

        where     its address, for example "train.jsonl, line 3"
        field     the key of the row that is wrong
        problem   the reason of the refusal, a phrase that follows the key
        remedy    the change that helps, or the keys that there are, or ""

    >>> str(RowError("train.jsonl, line 3", "answer", "is empty"))
    "train.jsonl, line 3: the key 'answer' is empty"
    """

    def __init__(self, where: str, field: str, problem: str, remedy: str = ""):
        super().__init__(where, field, problem, remedy)
        self.where = where
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        reasons = "; ".join(filter(None, (self.problem, self.remedy)))
        return f"{self.where}: the key {self.field!r} {reasons}"


def as_typed(value: Any) -> str:
    """Write a value as a command line has it: true, null, adamw, or 'two words' in quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and not PLAIN_WORD.fullmatch(value) else str(value)
