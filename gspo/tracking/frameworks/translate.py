"""Makes our rows of another framework's records.

A record is a line of a log: a step of some axis, and numbers by their names. A row of ours
describes a rollout batch. In between:

    1  the record's axis is found, and its step
    2  records of the same step are joined if they do not contradict each other
    3  steps become rollout batches. The numbers of several updates of a batch are averaged
    4  each name becomes ours, or stays what it is after the framework's name

Nothing is left out without a note that counts it.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from gspo.io.tables import counted
from gspo.tracking.frameworks.columns import Columns, listed, lost_batches
from gspo.tracking.frameworks.known import REWARD, find_table, matching
from gspo.tracking.frameworks.table import (
    OTHER,
    RELATIONS,
    SAME,
    Axis,
    Entry,
    Table,
    filled,
    match,
    other,
    reweighted,
)

MAX_UPDATES = 10_000  # of a batch
LARGEST_NORM = "optim/grad_norm_max"


@dataclass
class Log:
    """The content of a framework's log, as it stands there.

    `planned` is the number of steps that the run will have, and `steps_per_row` the number of steps
    of a row, in the units of the log's axis. They are 0 if the log does not say them."""

    path: Path
    kind: str  # of the file, in words
    records: list[dict[str, object]] = field(default_factory=list)
    config: dict[str, object] = field(default_factory=dict)  # flat
    notes: list[str] = field(default_factory=list)
    planned: int = 0
    steps_per_row: int = 0
    table: Table | None = None  # of a trainer of the user's own


@dataclass
class ForeignRun:
    """A run of another framework, in our rows."""

    path: Path
    kind: str
    table: Table
    rows: list[dict[str, float]]
    config: dict[str, object]  # theirs, flat
    settings: dict[str, object]  # ours, as far as theirs say them; and their own that make an arm
    objective: str  # empty: not known
    planned: int  # rollout batches, 0: not known
    updates_per_batch: int  # 0: not known, or of no importance
    batches_per_row: int  # a row is the mean over so many rollout batches
    counts_updates: bool  # the steps are optimizer steps, because updates_per_batch is not known
    relations: dict[str, Entry]  # of the rows' names, without the names that the table lacks
    notes: list[str]
    dropped: dict[str, int]  # reasons and counts

    @property
    def framework(self) -> str:
        """The framework's name, as in framework=NAME."""
        return self.table.name

    def mapped(self) -> list[str]:
        """Return the names of the rows that are metrics of ours."""
        return sorted(name for name, entry in self.relations.items() if entry.ours)

    def differing(self) -> dict[str, str]:
        """Return the names of the rows whose definition is not exactly ours, and how it differs."""
        texts = {}
        for name, entry in sorted(self.relations.items()):
            if entry.relation == SAME and not entry.note:
                continue
            text = entry.note
            if entry.ours:
                text = f"{entry.relation}, {entry.theirs}"
                if entry.formula() != "x":
                    text += f", {entry.formula()}"
                if entry.note:
                    text += f": {entry.note}"
            texts[name] = text
        return texts

    def unknown(self) -> list[str]:
        """Return the names of the rows that the table lacks."""
        names = {name for row in self.rows for name in row} - {"step"}
        return sorted(names - self.relations.keys())


def translate(
    log: Log, framework: str = "", updates_per_batch: int = 0, objective: str = ""
) -> ForeignRun:
    """Return a log as our rows.

    `framework`, `updates_per_batch` and `objective` are what the user says of the run. Without
    them, the names and the configuration tell. Raises ValueError if the framework is not known, or
    if nothing can be read."""
    names = {name for record in log.records for name in record}
    if not names:
        raise ValueError(f"{log.path}: {log.kind} without a record{_reasons(log.notes)}")
    try:
        table = log.table or find_table(names, framework)
    except ValueError as error:
        raise ValueError(
            f"{log.path}: {log.kind} with {len(log.records)} records: {error}"
        ) from None
    updates = updates_per_batch or _updates(table, log.config)
    objective = objective or _objective(table, log.config)
    if objective.lower() in table.named_objectives():
        objective = objective.lower()
    columns = Columns(table, log.path)
    for record in log.records:
        columns.add(record)
    notes = [*log.notes, *columns.notes(), *_disproved(names, table, framework)]
    notes += _count_from_0(columns)
    by_batch = _in_batches(columns, updates)
    relations: dict[str, Entry] = {}
    rows = _rows(by_batch, table, objective, relations, notes)
    _add_largest_norms(rows, columns, table, objective, updates, relations)
    if not rows:
        raise ValueError(
            f"{log.path}: none of its {len(log.records)} records could be read as a row of "
            f"{table.title}{_reasons(notes)}"
        )
    settings = _settings(table, log.config)
    steps = settings.pop("steps", None)
    planned = math.ceil(log.planned / max(updates, 1))
    if not planned and type(steps) is int:
        planned = max(steps, 0)
    run = ForeignRun(
        path=log.path,
        kind=log.kind,
        table=table,
        rows=rows,
        config=log.config,
        settings=settings,
        objective=objective,
        planned=planned,
        updates_per_batch=updates,
        batches_per_row=_batches_per_row(rows, log, updates, table) if table.row_is_mean else 1,
        counts_updates=columns.counts == {"updates"} and not updates,
        relations=relations,
        notes=notes,
        dropped=dict(columns.dropped),
    )
    run.notes += _notes(run, table, columns.counts)
    return run


def _count_from_0(columns: Columns) -> list[str]:
    """Let the axes begin at 0 if a training step is numbered 0, and return a note that says so.

    The gradient norm tells it: an evaluation before the first update is at step 0 too. Older
    versions of prime-rl number their first step 0."""
    norm = columns.table.gradient_norm
    axis = columns.axes.get(norm)
    if axis is None or axis.first == 0 or 0 not in columns.values[norm]:
        return []
    columns.axes = {name: replace(axis, first=0) for name, axis in columns.axes.items()}
    return ["its training begins at step 0, which counts as the first"]


def _disproved(names: set[str], table: Table, framework: str) -> list[str]:
    """Return a note if the names are those of another framework than the user has set."""
    proved = matching(names) if framework else []
    if not proved or table in proved:
        return []
    titles = " or ".join(candidate.title for candidate in proved)
    return [f"its names are those of {titles}, and framework={framework} is set"]


def _reasons(notes: Iterable[str]) -> str:
    text = "; ".join(notes)
    return f" ({text[:500]})" if text else ""


# ------------------------------------------------------------------------------------------------
# steps to rollout batches, and names to ours
def _in_batches(columns: Columns, updates: int) -> dict[str, dict[int, float]]:
    """Return the numbers by name and rollout batch, the mean if a batch has several updates."""
    by_batch = {}
    for name, column in columns.values.items():
        axis = columns.axes[name]
        per_batch = max(updates, 1) if axis.counts == "updates" else 1
        if per_batch == 1:
            by_batch[name] = {step - axis.first + 1: value for step, value in column.items()}
            continue
        sums: dict[int, float] = {}
        numbers: Counter[int] = Counter()
        for step, value in column.items():
            batch = _batch(step, axis, per_batch)
            if math.isnan(value):
                sums.setdefault(batch, 0.0)
                continue
            sums[batch] = sums.get(batch, 0.0) + value
            numbers[batch] += 1
        by_batch[name] = {
            batch: total / numbers[batch] if numbers[batch] else math.nan
            for batch, total in sums.items()
        }
    return by_batch


def _batch(step: int, axis: Axis, updates: int) -> int:
    """Return the rollout batch, from 1, of an optimizer step."""
    return (step - axis.first) // updates + 1


def _rows(
    by_batch: dict[str, dict[int, float]],
    table: Table,
    objective: str,
    relations: dict[str, Entry],
    notes: list[str],
) -> list[dict[str, float]]:
    """Return the rows under our names, and put the relation of each name into `relations`."""
    rows: dict[int, dict[str, float]] = {}
    absent = []
    none_values: Counter[tuple[str, float]] = Counter()  # names and the numbers that stand for none
    sources: dict[str, str] = {}  # the name of theirs by the row's
    entries = {name: table.entry(name, objective, by_batch) for name in by_batch}
    # If two names are the same metric of ours, the name with the nearer definition counts.
    for name in sorted(by_batch, key=lambda name: _distance(entries[name][0])):
        column = by_batch[name]
        entry, ours = entries[name]
        if entry is None:  # the table lacks it: it keeps its name and its numbers
            for batch, value in column.items():
                rows.setdefault(batch, {})[ours] = value
            continue
        if entry.absent_if_all_zero and not any(column.values()):
            absent.append(name)
            continue
        if ours in sources:
            note = f"{sources[ours]} counts as {ours}"
            notes.append(f"{name} keeps its name, because {note}")
            entry = other(name, note)
            ours = f"{table.name}/{name}"
        sources[ours] = name
        relations[ours] = entry
        if entry.plus:
            second_name = filled(entry.plus, match(entry.theirs, name) or ())
            second = by_batch[second_name]
            alone = len(column.keys() - second.keys())
            if alone:
                notes.append(
                    f"absent: {counted(alone, 'number')} of {name}, because {second_name} is "
                    "missing beside it"
                )
            column = {
                batch: value + second[batch] for batch, value in column.items() if batch in second
            }
        for batch, value in column.items():
            if value == entry.absent_value:
                none_values[name, value] += 1
                continue
            if entry.ours:
                value = entry.value(value)
            rows.setdefault(batch, {})[ours] = value
    if absent:
        notes.append(
            f"absent, because they are 0 in every row and may not be computed: {listed(absent)}"
        )
    for (name, value), count in sorted(none_values.items()):
        notes.append(f"absent: {counted(count, 'number')} of {name}, because {value:g} means none")
    return [{"step": batch} | rows[batch] for batch in sorted(rows)]


def _add_largest_norms(
    rows: list[dict[str, float]],
    columns: Columns,
    table: Table,
    objective: str,
    updates: int,
    relations: dict[str, Entry],
) -> None:
    """Add the largest gradient norm of each batch's updates, if a row stands for several updates.

    It is NaN if one of them is. Their mean, which leaves NaN out, would hide both."""
    if updates < 2:
        return
    for name, column in columns.values.items():
        axis = columns.axes[name]
        entry, ours = table.entry(name, objective, columns.values)
        if entry is None or ours != table.gradient_norm or axis.counts != "updates":
            continue
        largest: dict[int, float] = {}
        for step, value in column.items():
            batch = _batch(step, axis, updates)
            before = largest.get(batch, value)
            largest[batch] = math.nan if math.isnan(before + value) else max(before, value)
        for row in rows:
            if int(row["step"]) in largest and LARGEST_NORM not in row:
                row[LARGEST_NORM] = largest[int(row["step"])]
        note = "the largest of the norms that the log has of a batch's updates"
        relations.setdefault(LARGEST_NORM, reweighted(name, LARGEST_NORM, note))


def _distance(entry: Entry | None) -> int:
    """Return how far a metric's definition is from ours: 0 is the same."""
    return RELATIONS.index(entry.relation) if entry is not None else len(RELATIONS)


def _batches_per_row(rows: list[dict[str, float]], log: Log, updates: int, table: Table) -> int:
    """Return the median distance of two successive rows of training.

    The framework's gradient norm is in every such row. The reward is not, if a batch has several
    updates. The log may say of how many steps a row is the mean, which need not be whole
    batches."""
    steps = [int(row["step"]) for row in rows if table.gradient_norm in row]
    if not steps:
        steps = [int(row["step"]) for row in rows if REWARD in row]
    distances = [later - step for step, later in pairwise(steps)]
    stated = max(math.ceil(log.steps_per_row / max(updates, 1)), 1)
    return max(statistics.median_low(distances), stated) if distances else stated


# ------------------------------------------------------------------------------------------------
# configuration
def _settings(table: Table, config: Mapping[str, object]) -> dict[str, object]:
    """Return our settings and those that make an arm, as far as the configuration has them.

    Their own keys stand after the framework's name, as in trl.delta. A null is a value of them."""
    settings: dict[str, object] = {}
    for ours, keys in table.settings.items():
        values = [config[key] for key in keys if config.get(key) is not None]
        if values and isinstance(values[0], str | int | float):
            is_off = config.get(table.switches.get(ours, "")) is False
            settings[ours] = 0.0 if is_off else values[0]
    for key in table.trained_by:
        if key in config and isinstance(config[key], str | int | float | None):
            settings[f"{table.name}.{key}"] = config[key]
    return settings


def _objective(table: Table, config: Mapping[str, object]) -> str:
    """Return the name of the objective, empty if the configuration does not tell."""
    for conditions, name in table.objectives:
        if all(config.get(key) == value for key, value in conditions.items()):
            return name
    return ""


def _updates(table: Table, config: Mapping[str, object]) -> int:
    """Return the optimizer steps of a rollout batch, 0 if the configuration does not tell."""
    for factor_keys, divisor_keys in table.updates:
        factors = _whole_numbers(config, factor_keys)
        divisors = _whole_numbers(config, divisor_keys)
        if factors is None or divisors is None:
            continue
        updates, rest = divmod(math.prod(factors), math.prod(divisors))
        return updates if rest == 0 and updates <= MAX_UPDATES else 0
    return 0


def _whole_numbers(config: Mapping[str, object], keys: Iterable[str]) -> list[int] | None:
    """Return these settings, None if one of them is no whole number of at least 1."""
    values = [config.get(key) for key in keys]
    numbers = [value for value in values if type(value) is int and value > 0]
    return numbers if len(numbers) == len(values) else None


def _notes(run: ForeignRun, table: Table, counts: set[str]) -> list[str]:
    """Return sentences about the axis, and about names that the table lacks.

    `counts` has the kinds of the axes that the records had."""
    notes = []
    if len(counts) > 1 and not run.updates_per_batch:
        notes.append(
            "some of its rows count optimizer steps and others rollout batches. The log does not "
            "say how many updates a batch has, so each of its optimizer steps is taken as a batch: "
            "set updates_per_batch="
        )
    rewards = sum(REWARD in row for row in run.rows)
    norms = sum(table.gradient_norm in row for row in run.rows)
    if run.counts_updates and 0 < 2 * rewards <= norms + 1 and norms > 1:
        notes.append(
            f"only {rewards} of {norms} rows of training have a reward, so a batch seems to have "
            "several updates: set updates_per_batch="
        )
    if run.counts_updates:
        notes.append(
            "its steps are optimizer steps, taken as rollout batches: the log does not say how many "
            "updates a batch has (updates_per_batch=)"
        )
    if run.batches_per_row > 1:
        unit = "steps" if run.counts_updates else "rollout batches"
        notes.append(f"a row is the mean over {run.batches_per_row} {unit}, also of extremes")
    else:
        lost = lost_batches(int(row["step"]) for row in run.rows)
        if lost:
            notes.append(f"lost: it has no row of {lost}")
    objectives = table.named_objectives()
    conditional = [entry.theirs for entry in table.entries if entry.objectives]
    kept = {
        entry.theirs
        for entry in run.relations.values()
        if entry.relation == OTHER and entry.theirs in conditional
    }
    if kept and not run.objective:
        notes.append(
            "the objective is not logged, so the clipped shares keep the framework's name "
            "(objective=)"
        )
    elif kept and run.objective not in objectives:
        notes.append(
            f"the table has no line for objective={run.objective[:80]}, so the clipped shares keep "
            f"the framework's name. It has lines for {', '.join(sorted(objectives))}"
        )
    unknown = run.unknown()
    if unknown:
        notes.append(
            f"{len(unknown)} names are not in the table of {table.full_title}, and keep their "
            f"names: {listed(unknown)}"
        )
    return notes
