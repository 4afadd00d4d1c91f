"""The table of a framework: what its metrics are called, and how they are defined.

Each metric of another framework has one of four relations to a metric of ours:

    same          the same definition: our metric has their number
    scaled        our metric is factor * theirs + offset (or its exponential)
    reweighted    the same quantity of a token or response, but with other weights in the mean or at
                  another moment of the step. It stands under our name, and every report says so
    other         another definition, or none of ours. It keeps its own name, after the framework's:
                  trl/kl

In names, `*` stands for any text.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from gspo.tracking.metrics import lookup

SAME = "same"
SCALED = "scaled"
REWEIGHTED = "reweighted"
OTHER = "other"
RELATIONS = (SAME, SCALED, REWEIGHTED, OTHER)
AXIS_COUNTS = ("batches", "updates")
# the names that gspo.probe puts into the logs of other trainers
PROBE = "gspo/*"
ANY = "*"  # our name is the text of the star, if we have such a metric
MAX_EXPONENT = 200.0  # a larger one would overflow what we call finite


@dataclass(frozen=True)
class Entry:
    """A metric of a framework, and its relation to ours."""

    theirs: str
    ours: str  # empty with the relation `other`
    relation: str
    note: str = ""
    factor: float = 1.0
    offset: float = 0.0
    is_log: bool = False  # ours is exp(factor * theirs + offset)
    # A second metric of theirs that is added before the factor. The entry holds only if the run
    # has it. Stars stand for the same texts as in `theirs`.
    plus: str = ""
    # The entry holds for runs with one of these objectives. Empty: for all runs. An entry that
    # depends on the objective does not hold while the objective is unknown.
    objectives: tuple[str, ...] = ()
    # The entry holds only if the run has one of these names.
    beside: tuple[str, ...] = ()
    # The entry holds only if no second name of the run matches it.
    if_only: bool = False
    # If every row has 0, the framework did not compute the metric: it is absent, not 0.
    absent_if_all_zero: bool = False
    # A number that stands for no number. Such numbers are absent.
    absent_value: float | None = None

    def value(self, theirs: float) -> float:
        """Return our number from theirs."""
        number = self.factor * theirs + self.offset
        if not self.is_log:
            return number
        return math.exp(number) if abs(number) < MAX_EXPONENT else math.nan

    def formula(self) -> str:
        """Return how our number is computed from theirs, as text."""
        text = "x"
        if self.plus:
            text = f"x + {self.plus}" if self.factor == 1 else f"(x + {self.plus})"
        if self.factor == -1:
            text = f"-{text}"
        elif self.factor != 1:
            text = f"{self.factor:g} {text}"
        if self.offset:
            text += f" + {self.offset:g}"
        return f"exp({text})" if self.is_log else text


def same(theirs: str, ours: str, note: str = "", **fields) -> Entry:
    """Return an entry of a metric with our definition."""
    return Entry(theirs, ours, SAME, note, **fields)


def scaled(theirs: str, ours: str, note: str = "", **fields) -> Entry:
    """Return an entry of a metric that differs from ours by a factor or an offset."""
    return Entry(theirs, ours, SCALED, note, **fields)


def reweighted(theirs: str, ours: str, note: str, **fields) -> Entry:
    """Return an entry of a metric whose mean has other weights than ours."""
    return Entry(theirs, ours, REWEIGHTED, note, **fields)


def other(theirs: str, note: str, **fields) -> Entry:
    """Return an entry of a metric with another definition than any of ours."""
    return Entry(theirs, "", OTHER, note, **fields)


@dataclass(frozen=True)
class Axis:
    """A step axis of a framework: the key of a record that holds its step.

    An axis with a `prefix` is only for records in which a name begins so. The first axis whose key
    and prefix a record has is the record's."""

    key: str
    counts: str = "batches"  # one of AXIS_COUNTS
    first: int = 1  # the number of the first batch or update
    prefix: str = ""


@dataclass(frozen=True)
class Table:
    """Everything that is known of a framework's logs."""

    name: str  # as in framework=NAME and before the names of its own metrics
    title: str
    version: str  # in whose source the definitions were read
    entries: tuple[Entry, ...]
    axes: tuple[Axis, ...]
    # A run is this framework's if it has all names of one of these tuples ...
    proofs: tuple[tuple[str, ...], ...]
    # ... and none of these, which another framework of the same family adds
    disproofs: tuple[str, ...] = ()
    # the beginnings that trackers give to names, and the beginnings in the table: train/ is nothing
    prefixes: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # names that are no metrics of training
    # names that several writers use for different things, and a name of each writer's own records
    shared: tuple[str, ...] = ()
    writers: Mapping[str, str] = field(default_factory=dict)
    # whether a row is the mean over the steps since the last row
    row_is_mean: bool = False
    gradient_norm: str = ""  # their own metric that tells best of the gradient, if none is ours
    # from our setting to the keys of their configuration, of which the first that is there counts
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # from our setting to the key of theirs without which it is 0: false switches it off
    switches: Mapping[str, str] = field(default_factory=dict)
    # keys of their configuration that say how a run is trained, and that are no setting of ours
    trained_by: tuple[str, ...] = ()
    # their settings that name the objective, and its name: the first line that holds counts
    objectives: tuple[tuple[Mapping[str, object], str], ...] = ()
    # The updates of a batch: the product of the settings in the first tuple, divided by the product
    # of those in the second. The first pair of which the configuration has all settings counts.
    updates: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()

    @property
    def full_title(self) -> str:
        """The title and the version."""
        return f"{self.title} {self.version}".strip()

    def named_objectives(self) -> set[str]:
        """Return the objectives that some entry is for."""
        return {name for entry in self.entries for name in entry.objectives}

    def bare(self, name: str) -> str:
        """Return a name as the table has it, without the prefix of a tracker."""
        for prefix, replacement in self.prefixes.items():
            if name.startswith(prefix):
                return replacement + name.removeprefix(prefix)
        return name

    def entry(
        self, name: str, objective: str = "", names: Collection[str] = ()
    ) -> tuple[Entry | None, str]:
        """Return the entry of a metric of theirs, and our name for it.

        The entry is None for a name that the table lacks. Our name then is theirs, after the
        framework's. `objective` is empty if it is unknown. `names` are all names of the run."""
        own_name = f"{self.name}/{name}"
        for entry in self.entries:
            parts = match(entry.theirs, name)
            if parts is None or (entry.objectives and objective not in entry.objectives):
                continue
            if entry.if_only and not is_only(names, entry.theirs):
                continue
            if entry.beside and not any(has(names, pattern) for pattern in entry.beside):
                continue
            if entry.plus and filled(entry.plus, parts) not in names:
                continue
            if entry.relation == OTHER:
                return entry, own_name
            ours = filled(entry.ours, parts)
            if entry.ours == ANY and not is_registered(ours):
                continue
            return entry, ours
        return None, own_name


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("(.+)".join(map(re.escape, name.split("*"))))


def is_registered(name: str) -> bool:
    """Return whether we have a metric of this name."""
    try:
        lookup(name)
    except KeyError:
        return False
    return True


def match(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return the texts that the stars of a pattern stand for in a name, None if it does not match.

    >>> match("rewards/*/mean", "rewards/format/mean")
    ('format',)
    """
    if "*" not in pattern:
        return () if pattern == name else None
    matched = _pattern(pattern).fullmatch(name)
    return matched.groups() if matched else None


def filled(pattern: str, parts: Iterable[str]) -> str:
    """Return a pattern with these texts in the places of its stars.

    >>> filled("eval/*/avg@*", ("math", "4"))
    'eval/math/avg@4'
    """
    for part in parts:
        pattern = pattern.replace("*", part, 1)
    return pattern


def is_only(names: Iterable[str], pattern: str) -> bool:
    """Return whether exactly one of the names matches a pattern."""
    matches = (name for name in names if match(pattern, name) is not None)
    return next(matches, None) is not None and next(matches, None) is None


def has(names: Iterable[str], pattern: str) -> bool:
    """Return whether any of the names matches a pattern."""
    return any(match(pattern, name) is not None for name in names)
