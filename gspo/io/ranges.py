"""Facts about settings, stated beside their fields: allowed numbers and effects on results.

For example `lr: float = ranged(1e-6, least=0)` refuses a negative learning rate, `decay: str =
choice("none", ("none", "linear"))` refuses every other text, and `device: str = cost_only("auto")`
says that the device changes the time a run takes but not its numbers.

NaN and infinity lie outside every range. If a subclass gives a field another default, the facts of
its base stay. Ranges are checked when settings are composed (gspo.config.conversion, which knows
the dotted key), and again by every dataclass that derives from `Ranged`. So wrong numbers are
refused in Python too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from gspo.io.errors import SettingError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LARGEST_SEED = 2**63 - 1  # of torch's generators

# Metadata of fields:

# left out of the hash of a run, because its numbers do not depend on the field
OUTSIDE_RESULT = {"outside_result": True}
# the same up to rounding, and a resumed run may have another value
CHANGEABLE = {"outside_result": True, "changeable_on_resume": True}
# left out of the hash at its default, because the field was added later: old runs keep their hash
HASHED_IF_CHANGED = {"hashed_if_changed": True}
# changes a task's speed but no score: an evaluation continues with another value
SPEED_ONLY = {"speed_only": True}


@dataclass(frozen=True)
class Range:
    """The range of a setting's numbers. `why` ends the message for a number outside it."""

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
        """Return the requirement in words, for example "must be a whole number of at least 1"."""
        kind = "whole" if whole else "finite"
        low = self.above if self.least is None else self.least
        high = self.below if self.most is None else self.most
        if low is not None and high is not None:
            left = "[" if self.above is None else "("
            right = "]" if self.below is None else ")"
            requirement = f"must lie in {left}{low}, {high}{right}"
        elif low is not None:
            bound = "of at least" if self.above is None else "above"
            requirement = f"must be a {kind} number {bound} {low}"
        else:
            requirement = f"must be a {kind} number"
        if optional:
            requirement += ", or null"
        return f"{requirement}: {self.why}" if self.why else requirement


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
    """Declare a numeric field of a settings dataclass, or a list or mapping of numbers.

    A list or mapping needs `default_factory`. `cost_only` has the meaning of the function of that
    name. `metadata` adds other facts, for example OUTSIDE_RESULT.
    """
    facts: dict[str, Any] = {"range": Range(above, least, below, most, why)}
    if cost_only:
        facts |= CHANGEABLE
    return dataclasses.field(
        default=default, default_factory=default_factory, metadata=facts | dict(metadata or {})
    )


def choice(
    default: str, choices: Sequence[str], *, metadata: Mapping[str, Any] | None = None
) -> Any:
    """Declare a text field of a settings dataclass that must have one of a few values.

    An empty choice stands for "not set", and a refusal does not list it. `metadata` gives other
    facts, for example OUTSIDE_RESULT."""
    facts = {"choices": tuple(choices)} | dict(metadata or {})
    return dataclasses.field(default=default, metadata=facts)


def cost_only(default: Any) -> Any:
    """Declare a field that changes memory, speed or place, and results by rounding at most.

    The hash of a run leaves it out, and a resumed run may have another value.
    """
    return dataclasses.field(default=default, metadata=CHANGEABLE)


def outside_code(default: str = "") -> Any:
    """Declare a field that names code from outside this package, for example my_pkg.rewards:score.

    The SHA-256 of its source becomes part of a run's settings (gspo.config.user_code).
    """
    return dataclasses.field(default=default, metadata={"outside_code": True})


class Ranged:
    """The base of settings dataclasses: constructing one refuses numbers that lie outside their
    ranges, and values that are none of a field's choices.

    `key` is the usual path of such settings, for example "optim", for the error message. When Hydra
    composes settings, the message has the actual path instead.
    """

    _key = ""

    def __init_subclass__(cls, key: str = "") -> None:
        cls._key = f"{key}." if key else cls._key

    def __post_init__(self) -> None:
        """Raise ValueError for the first field whose value its range or its choices forbid."""
        check_ranges(self, self._key)


def check_ranges(settings: Any, prefix: str = "") -> None:
    """Raise ValueError for the first field whose value its range or its choices forbid.

    The message names the key, the value, and the range or the choices."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        error = refusal(type(settings), field.name, value, prefix + field.name)
        if error:
            raise error


@cache
def field_facts(kind: type) -> dict[str, dict[str, Any]]:
    """Return the metadata of a dataclass's fields, by name.

    A field that a subclass declares again keeps the facts of its base.
    """
    facts: dict[str, dict[str, Any]] = {}
    for base in reversed(kind.__mro__):
        for field in base.__dict__.get("__dataclass_fields__", {}).values():
            facts[field.name] = facts.get(field.name, {}) | dict(field.metadata)
    return facts


@cache
def declared_ranges(kind: type) -> dict[str, Range]:
    """Return the ranges of a dataclass's fields, by name. Subclasses override their bases."""
    return {name: facts["range"] for name, facts in field_facts(kind).items() if "range" in facts}


def fields_with(kind: type, fact: str) -> list[str]:
    """Return the names of a dataclass's fields with a fact, for example "outside_result"."""
    return [name for name, facts in field_facts(kind).items() if facts.get(fact)]


def as_hashed(settings: Any) -> Any:
    """Return a dataclass as nested dictionaries, the input of a run's hash.

    HASHED_IF_CHANGED fields with their default value are left out.
    """
    if isinstance(settings, dict):
        return {key: as_hashed(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [as_hashed(value) for value in settings]
    if not dataclasses.is_dataclass(settings):
        return settings
    hashed_if_changed = fields_with(type(settings), "hashed_if_changed")
    hashed = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in hashed_if_changed or value != default_of(field):
            hashed[field.name] = as_hashed(value)
    return hashed


def default_of(field: dataclasses.Field) -> Any:
    """Return a field's default, or dataclasses.MISSING if it has none."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def refusal(kind: type[DataclassInstance], name: str, value: Any, key: str) -> SettingError | None:
    """Return the error of a field that may not have this value, None if it may."""
    choices = field_facts(kind).get(name, {}).get("choices")
    if choices is not None and value not in choices:
        allowed = ", ".join(filter(None, choices))
        return SettingError(key, value, remedy=f"choose one of {allowed}")
    limits = declared_ranges(kind).get(name)
    field = next(field for field in dataclasses.fields(kind) if field.name == name)
    hint = str(field.type)
    for number_key, number in numbers(value, key):
        if limits is not None and number not in limits:
            requirement = limits.text(whole="float" not in hint, optional="None" in hint)
            return SettingError(number_key, number, requirement)
        if limits is None and not math.isfinite(number):
            return SettingError(number_key, number, "must be a finite number")
    return None


def numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """Yield the dotted key and the value of every number in nested lists and mappings."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from numbers(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from numbers(item, f"{key}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value
