"""The range of every numeric setting, stated once, beside the field: `lr: float = ranged(1e-6, least=0)`.

Whatever the range, not-a-number and infinity lie outside. A subclass that gives a field another default keeps its
range. Ranges are checked where settings are composed (gspo.config.schema, which knows the dotted key) and again by
every dataclass that derives from `Ranged`, so that a wrong number is refused in Python too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LARGEST_SEED = 2**63 - 1  # what torch's generators take


@dataclass(frozen=True)
class Range:
    """Which numbers a setting may have; `why` is added to the refusal."""

    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    why: str = ""

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )

    def text(self, whole: bool, optional: bool) -> str:
        """What a number must be, in words."""
        kind = "whole" if whole else "finite"
        low, high = self.above if self.least is None else self.least, self.below if self.most is None else self.most
        if low is not None and high is not None:
            said = f"lie in {'(['[self.above is None]}{low}, {high}{')]'[self.below is None]}"
        elif low is not None:
            said = f"be a {kind} number {'of at least' if self.above is None else 'above'} {low}"
        else:
            said = f"be a {kind} number"
        return f"must {said}" + ", or null" * optional + (f": {self.why}" if self.why else "")


def ranged(
    default: Any = dataclasses.MISSING,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    why: str = "",
    default_factory: Any = dataclasses.MISSING,
) -> Any:
    """A numeric field of a settings dataclass; of a list or mapping of numbers with `default_factory`."""
    chosen = {"default": default} if default is not dataclasses.MISSING else {"default_factory": default_factory}
    if default is default_factory:  # a field that must be given
        chosen = {}
    return dataclasses.field(**chosen, metadata={"range": Range(above, least, below, most, why)})


class Ranged:
    """Base of settings dataclasses: making one refuses numbers that lie outside of their ranges.

    `key` is where such settings stand as a rule, for the message; where they are composed, the true key is known.
    """

    _key = ""

    def __init_subclass__(cls, key: str = "") -> None:
        cls._key = f"{key}." if key else cls._key

    def __post_init__(self) -> None:
        """Raises ValueError naming key, value and range."""
        check_ranges(self, self._key)


def check_ranges(settings: Any, prefix: str = "") -> None:
    """Raises ValueError naming key, value and range for the numbers of a dataclass."""
    for field in dataclasses.fields(settings):
        if wrong := refusal(type(settings), field.name, getattr(settings, field.name), prefix + field.name):
            raise ValueError(wrong)


def declared(kind: type) -> dict[str, Range]:
    """The ranges of a dataclass by field: each from the youngest class that states one."""
    found: dict[str, Range] = {}
    for base in reversed(kind.__mro__):
        for field in base.__dict__.get("__dataclass_fields__", {}).values():
            if "range" in field.metadata:
                found[field.name] = field.metadata["range"]
    return found


def refusal(kind: type, name: str, value: Any, key: str) -> str:
    """Why a field may not have this value, where its range forbids it; else ""."""
    limits = declared(kind).get(name)
    field = next(field for field in dataclasses.fields(kind) if field.name == name)
    hint = str(field.type)
    for where, number in numbers(value, key):
        if limits is not None and number not in limits:
            return f"{where}={number} {limits.text(whole='float' not in hint, optional='None' in hint)}"
        if limits is None and not math.isfinite(number):
            return f"{where}={number} must be a finite number"
    return ""


def numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """The numbers of a value, of a list or of a mapping, with their keys."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from numbers(part, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from numbers(part, f"{key}[{place}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value
