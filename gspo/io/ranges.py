"""Facts about a setting are stated once, beside its field: which numbers it may have, and what
depends on it.

For example `lr: float = ranged(1e-6, least=0)` refuses a negative learning rate, and `device: str =
cost_only("auto")` says that the device changes the time a run takes but not its numbers.

Whatever the range, not-a-number and infinity lie outside. A subclass that gives a field another
default keeps the facts that its base stated. Ranges are checked where settings are composed
(gspo.config.schema, which knows the dotted key) and again by every dataclass that derives from
`Ranged`, so that a wrong number is refused in Python too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

LARGEST_SEED = 2**63 - 1  # torch's generators take no larger one

# The metadata of fields that the hash of a run leaves out. The numbers of a run do not depend on
# them, or by rounding at most. The second kind may also be given another value when a run is
# resumed.
OUTSIDE_RESULT = {"outside_result": True}
CHANGEABLE = {"outside_result": True, "changeable_on_resume": True}
# The metadata of settings that were added later: a run that leaves them as they are keeps the hash
# that it had.
HASHED_IF_CHANGED = {"hashed_if_changed": True}
# The metadata of a task's fields that change how fast it scores and no score: an evaluation goes on
# with others.
SPEED_ONLY = {"speed_only": True}


@dataclass(frozen=True)
class Range:
    """Describes which numbers a setting may have; the message of a refusal ends with `why`."""

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
        """Says in words what a number must be, for the message of a refusal."""
        kind = "whole" if whole else "finite"
        low, high = (
            self.above if self.least is None else self.least,
            self.below if self.most is None else self.most,
        )
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
    cost_only: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Declare a numeric field of a settings dataclass; with `default_factory` a list or mapping of
    numbers.

    `cost_only` marks a setting that changes only memory, speed or place, see the function of that
    name; `metadata` gives other facts, for example OUTSIDE_RESULT.
    """
    chosen = (
        {"default": default}
        if default is not dataclasses.MISSING
        else {"default_factory": default_factory}
    )
    if default is default_factory:  # a field that must be given
        chosen = {}
    facts = (CHANGEABLE if cost_only else {}) | dict(metadata or {})
    return dataclasses.field(
        **chosen, metadata={"range": Range(above, least, below, most, why)} | facts
    )


def cost_only(default: Any) -> Any:
    """Declare a field that changes memory, speed or place, and results by rounding at most.

    It is left out of the hash of a run and may be given another value when the run is resumed.
    """
    return dataclasses.field(default=default, metadata=CHANGEABLE)


def outside_code(default: str = "") -> Any:
    """Declare a field that names code from outside this package, for example my_pkg.rewards:score.

    The SHA-256 of its source becomes part of a run's settings (gspo.config.user_code).
    """
    return dataclasses.field(default=default, metadata={"outside_code": True})


class Ranged:
    """The base of settings dataclasses: constructing one refuses numbers that lie outside their
    ranges.

    `key` is the place where such settings usually stand, for example "optim"; a refusal names it.
    Where settings are composed by Hydra, the actual key is known and named instead.
    """

    _key = ""

    def __init_subclass__(cls, key: str = "") -> None:
        cls._key = f"{key}." if key else cls._key

    def __post_init__(self) -> None:
        """Raise ValueError, naming key, value and range, for a number outside its range."""
        check_ranges(self, self._key)


def check_ranges(settings: Any, prefix: str = "") -> None:
    """Raise ValueError, naming key, value and range, for the first number of a dataclass that its
    range forbids.
    """
    for field in dataclasses.fields(settings):
        if wrong := refusal(
            type(settings), field.name, getattr(settings, field.name), prefix + field.name
        ):
            raise ValueError(wrong)


@cache
def field_facts(kind: type) -> dict[str, dict[str, Any]]:
    """Return the metadata of a dataclass's fields; a field that a subclass declares anew keeps what
    its base stated.
    """
    found: dict[str, dict[str, Any]] = {}
    for base in reversed(kind.__mro__):
        for field in base.__dict__.get("__dataclass_fields__", {}).values():
            found[field.name] = found.get(field.name, {}) | dict(field.metadata)
    return found


@cache
def declared_ranges(kind: type) -> dict[str, Range]:
    """Return the ranges of a dataclass by field, each from the most derived class that states one."""
    return {name: facts["range"] for name, facts in field_facts(kind).items() if "range" in facts}


def fields_with(kind: type, fact: str) -> list[str]:
    """Return the names of a dataclass's fields that state a fact, for example "outside_result"."""
    return [name for name, facts in field_facts(kind).items() if facts.get(fact)]


def as_hashed(settings: Any) -> Any:
    """Return a dataclass as nested dictionaries, without the fields that were added later and have
    their default.
    """
    if isinstance(settings, dict):
        return {key: as_hashed(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [as_hashed(value) for value in settings]
    if not dataclasses.is_dataclass(settings):
        return settings
    later = fields_with(type(settings), "hashed_if_changed")
    kept = [
        (f.name, getattr(settings, f.name), default_of(f)) for f in dataclasses.fields(settings)
    ]
    return {
        name: as_hashed(value)
        for name, value, default in kept
        if name not in later or value != default
    }


def default_of(field: dataclasses.Field) -> Any:
    """Return a field's default; dataclasses.MISSING if it has none."""
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def refusal(kind: type, name: str, value: Any, key: str) -> str:
    """Return the reason why a field may not have this value; "" if its range allows it."""
    limits = declared_ranges(kind).get(name)
    field = next(field for field in dataclasses.fields(kind) if field.name == name)
    hint = str(field.type)
    for where, number in numbers(value, key):
        if limits is not None and number not in limits:
            return f"{where}={number} {limits.text(whole='float' not in hint, optional='None' in hint)}"
        if limits is None and not math.isfinite(number):
            return f"{where}={number} must be a finite number"
    return ""


def numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """Yield every number of a value, however deep in lists and mappings, with its dotted key."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from numbers(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from numbers(item, f"{key}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value
