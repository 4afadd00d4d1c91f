"""The numbers of another framework's log by name and step.

Records of the same step are joined if they do not contradict each other. Of two that do, the first
counts. A resumed run writes some steps again: its later records count. Everything that is left out
is counted.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from gspo.io import untrusted
from gspo.io.untrusted import MAX_MAGNITUDE
from gspo.tracking.frameworks.table import Axis, Table, has

# A run that is restarted goes on, each time from a later step. A file whose steps go back in
# another way more often holds no run.
MAX_REWINDS = 20
MAX_RESTARTS = 200
MAX_REWINDS_NAMED = 5
NO_STEP = "records without a step"
NO_METRIC = "records without a metric of training"
CONTRADICTION = "records that contradict an earlier record of the same step"
UNKNOWN_WRITER = "numbers whose writer cannot be told"
NOT_FINITE = "numbers that are not finite (NaN in the rows, left out of means over updates)"
TWICE = "numbers whose name stands in a record with and without a tracker's prefix"
ODD_NAME = "names that are too long or no text"
MAX_NAME_CHARS = 200
MAX_NAMED = 8  # names in a note
MAX_LOST_NAMED = 3  # lost batches that a note names


class Columns:
    """The numbers of a log by name and step, from records in the order of the log."""

    def __init__(self, table: Table, path: Path):
        self.table = table
        self.path = path
        self.values: dict[str, dict[int, float]] = {}
        self.axes: dict[str, Axis] = {}  # by name
        self.counts: set[str] = set()  # the kinds of axes that records had
        self.dropped: Counter[str] = Counter()
        self.contradiction = ""  # the first number that contradicts an earlier number, in words
        self.texts: set[str] = set()  # names whose values are no numbers
        self.first: dict[str, int] = {}  # the step of a name's first number
        self.last: dict[str, int] = {}  # the step of a name's newest number
        self.largest_step = -1
        self.rewinds = 0
        self.restarts = 0  # the rewinds as of a run that goes on
        self.restarted_at: dict[str, int] = {}  # the step of the last rewind, by the axis's counts
        self.late = 0  # records with an earlier step than their metrics had before
        self.left_out: list[str] = []  # sentences about rows that were written again
        self.bare_names: dict[str, str] = {}  # empty: no metric
        self.known = {entry.theirs for entry in table.entries}  # names and patterns
        self.count = 0  # of numbers
        self.longest = 0  # the largest number of steps of a name

    def add(self, record: Mapping[str, object]) -> None:
        """Take in a record."""
        axis = self._axis(record)
        if axis is None:
            self.dropped[NO_STEP] += 1
            return
        step = int(_number(record[axis.key]))
        numbers = self._numbers(record)
        if not numbers:
            # a step alone is no loss
            if not all(self._is_axis(name) for name in record):
                self.dropped[NO_METRIC] += 1
            return
        self.counts.add(axis.counts)
        if step < self.largest_step:
            if any(self._is_again(name, step) for name in numbers):
                self._go_back(axis, step)
            elif any(self.last.get(name, 0) > step for name in numbers):
                self.late += 1
        self.largest_step = max(self.largest_step, step)
        for name, number in numbers.items():
            if self._contradicts(name, step, number):
                self.dropped[CONTRADICTION] += 1
                if not self.contradiction:
                    earlier = self.values[name][step]
                    self.contradiction = f"{name} of step {step} is {earlier:.6g} and {number:.6g}"
                return
        for name, number in numbers.items():
            self._put(name, step, number, axis)
        untrusted.check_table(self.path, self.longest, len(self.values), self.count)

    def _is_again(self, name: str, step: int) -> bool:
        """Return whether a name had this step, or later steps alone, before its newest number."""
        if self.last.get(name, 0) <= step:
            return False
        return step in self.values[name] or step < self.first[name]

    def _numbers(self, record: Mapping[str, object]) -> dict[str, float]:
        """Return the metrics of a record by their names in the table."""
        writer = self._writer(record)
        numbers = {}
        for name, value in record.items():
            if name not in self.bare_names:
                self.bare_names[name] = self._bare(name)
            bare = self.bare_names[name]
            if not bare:
                continue
            if bare in self.table.shared:
                if not writer:
                    self.dropped[UNKNOWN_WRITER] += 1
                    continue
                bare = f"{writer}/{bare}"
            if bare in numbers:
                self.dropped[TWICE] += 1
                if name == bare:
                    continue
            # most values are such numbers
            if type(value) is float and -MAX_MAGNITUDE <= value <= MAX_MAGNITUDE:
                numbers[bare] = value
                continue
            if not untrusted.is_number(value):
                self.texts.add(bare)
                continue
            number = untrusted.finite(value)
            if number is None:
                self.dropped[NOT_FINITE] += 1
                number = math.nan
            numbers[bare] = number
        return numbers

    def _axis(self, record: Mapping[str, object]) -> Axis | None:
        for axis in self.table.axes:
            if axis.key not in record or not _is_step(record[axis.key]):
                continue
            if not axis.prefix or any(
                name.startswith(axis.prefix) and name != axis.key for name in record
            ):
                return axis
        return None

    def _bare(self, name: str) -> str:
        """Return a name as the table has it, empty for an axis and for names that are ignored."""
        bare = self.table.bare(name)
        if self._is_axis(name):
            return ""
        if any(has((bare, name), pattern) for pattern in self.table.ignored):
            return ""
        if len(bare) > MAX_NAME_CHARS or untrusted.SURROGATES.search(bare):
            self.dropped[ODD_NAME] += 1
            return ""
        return bare

    def _is_axis(self, name: str) -> bool:
        """Return whether a name is that of a step, or one of W&B's own."""
        is_of_wandb = name[:1] == "_" and name not in self.known
        return is_of_wandb or any(name == axis.key for axis in self.table.axes)

    def _writer(self, record: Mapping[str, object]) -> str:
        """Return the writer of a record, empty if its names do not tell."""
        writers = [name for name, proof in self.table.writers.items() if has(record, proof)]
        return writers[0] if len(writers) == 1 else ""

    def _contradicts(self, name: str, step: int, number: float) -> bool:
        """Return whether a name has another number at this step."""
        column = self.values.get(name)
        return column is not None and step in column and not _equal(column[step], number)

    def _put(self, name: str, step: int, number: float, axis: Axis) -> None:
        column = self.values.setdefault(name, {})
        if not column:
            self.first[name] = step
        column[step] = number
        self.last[name] = step
        self.axes[name] = axis
        self.count += 1
        self.longest = max(self.longest, len(column))

    def _go_back(self, axis: Axis, step: int) -> None:
        """Leave out an axis's numbers from this step on: a resumed run writes them again."""
        self._count_rewind(axis, step)
        removed: set[int] = set()
        is_empty = True
        for name, column in self.values.items():
            # several keys may hold the same steps
            if (self.axes[name].counts, self.axes[name].first) != (axis.counts, axis.first):
                continue
            removed |= {old_step for old_step in column if old_step >= step}
            kept = {old_step: number for old_step, number in column.items() if old_step < step}
            self.values[name] = kept
            self.last[name] = max(kept, default=0)
            is_empty = is_empty and not kept
        if self.rewinds + self.restarts > MAX_REWINDS_NAMED:
            return
        if is_empty:
            self.left_out.append(
                f"its steps begin again at {step}: it holds two runs, or a run that was started "
                f"anew. The last one counts, {len(removed)} earlier rows are left out"
            )
        else:
            self.left_out.append(
                f"its steps go back to {step}, as those of a resumed run do. The later rows count, "
                f"{len(removed)} earlier rows are left out"
            )

    def _count_rewind(self, axis: Axis, step: int) -> None:
        """Count that the steps go back. Raises ValueError if they do so too often for a run."""
        if step > self.restarted_at.get(axis.counts, step) and not self.late:
            self.restarts += 1
        else:
            self.rewinds += 1
        self.restarted_at[axis.counts] = step
        if self.rewinds > MAX_REWINDS or self.restarts > MAX_RESTARTS:
            most = MAX_REWINDS if self.rewinds > MAX_REWINDS else MAX_RESTARTS
            raise ValueError(
                f"{self.path}: its steps go back more than {most} times, so it is not the log of "
                "one run"
            )

    def notes(self) -> list[str]:
        """Return sentences about everything that was left out."""
        notes = list(self.left_out)
        count = self.rewinds + self.restarts
        if count > MAX_REWINDS_NAMED:
            notes.append(
                f"its steps go back {count} times in all: it holds a run that was restarted so "
                "often, or several runs. The later rows count each time"
            )
        if self.late:
            notes.append(
                f"{self.late} records have an earlier step than records before them, so several runs "
                "may have written it"
            )
        for reason, count in sorted(self.dropped.items()):
            example = f" (the first: {self.contradiction})" if reason == CONTRADICTION else ""
            notes.append(f"left out: {count} {reason}{example}")
        if self.texts:
            notes.append(f"left out, because they are no numbers: {listed(self.texts)}")
        return notes


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else math.nan


def _is_step(value: object) -> bool:
    """Return whether a value can be a step. TensorBoard and W&B may write it as a float."""
    if type(value) not in (int, float):
        return False
    number = _number(value)
    return number == number and 0 <= number <= untrusted.MAX_STEP and number == int(number)


def _equal(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def lost_batches(steps: Iterable[int]) -> str:
    """Return the rollout batches before the last that have no row, as "batches 7, 8", or "".

    >>> lost_batches([1, 4])
    'batches 2, 3'
    """
    recorded = set(steps)
    lost = [str(step) for step in range(1, max(recorded, default=0)) if step not in recorded]
    if not lost:
        return ""
    text = ", ".join(lost[:MAX_LOST_NAMED])
    if len(lost) > MAX_LOST_NAMED:
        text += f", ... ({len(lost)} in all)"
    return f"batches {text}" if len(lost) > 1 else f"batch {text}"


def listed(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    ordered = sorted(names)
    text = ", ".join(ordered[:MAX_NAMED])
    more = len(ordered) - MAX_NAMED
    return f"{text} and {more} more" if more > 0 else text
