"""Logs that a framework wrote of the same run in one folder, as a single log.

    outputs/checkpoint-12/trainer_state.json        the trainer
    outputs/runs/Nov28_12-00-00_host/events...      TensorBoard, a folder for each start
    outputs/wandb/run-20261128_120000-abc/*.wandb   W&B
    outputs/logging.jsonl                           ms-swift

Two logs are of the same run if they are of different kinds and the same framework, and if all
numbers agree that both have. Where one begins after the end of the other, it continues the run. The
numbers that only one of them has are added. If a run was resumed, each start has a log. Its numbers
count up to the first step of the next start. Logs that disagree stay two runs. Notes say all this.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gspo.analysis.foreign_consoles import CONSOLE
from gspo.analysis.foreign_search import (
    CHECKPOINT,
    EVENT_FILE,
    EVENTS,
    FILE_LOGGER,
    LINES,
    STATE_FILE,
    TRAINER_STATE,
    WANDB,
)
from gspo.tracking.frameworks.columns import NOT_FINITE, Columns
from gspo.tracking.frameworks.known import find_table
from gspo.tracking.frameworks.table import Axis
from gspo.tracking.frameworks.translate import Log

# the most precise kinds first: TensorBoard writes float32, a console may round
KINDS = (TRAINER_STATE, WANDB, FILE_LOGGER, LINES, EVENTS, CONSOLE)
MAX_DISAGREEMENTS = 2  # of a log, that are noted
# how far two records of a number may differ: float32 has 24 bits, ms-swift writes 8 decimals
RELATIVE_ROUNDING = 1e-6
ABSOLUTE_ROUNDING = 1e-8


@dataclass
class Part:
    """A log with its numbers by name and step."""

    log: Log
    framework: str
    columns: Columns

    def first_steps(self) -> dict[str, int]:
        """Return the first step by the kind of axis: batches or updates."""
        steps: dict[str, int] = {}
        for name, column in self.columns.values.items():
            counts = self.columns.axes[name].counts if column else ""
            for step in column:
                steps[counts] = min(steps.get(counts, step), step)
        return steps


@dataclass
class Comparison:
    """The numbers of a log beside those of another log of its folder."""

    agreeing: int = 0
    added: list[tuple[str, int, float]] = field(default_factory=list)  # name, step, value
    undone: set[int] = field(default_factory=set)  # steps that a later start wrote again
    is_later: bool = False  # whether all common names begin after the other log's last step
    difference: tuple[int, str, float, float] | None = None  # the first: step, name, both values

    def is_same_run(self) -> bool:
        return self.difference is None and (self.agreeing > 0 or self.is_later)


def joined(logs: Sequence[Log], frameworks: Sequence[str]) -> list[tuple[Log, str]]:
    """Return the logs with their frameworks. Logs of the same run in one folder are a single log.

    `frameworks` are those that the user has named, "" if the names of the metrics tell it."""
    folders = {folders_of(log.path)[-1] for log in logs if log.kind not in (EVENTS, WANDB)}
    groups: dict[Path, list[tuple[Log, str]]] = {}
    for log, framework in zip(logs, frameworks, strict=True):
        candidates = folders_of(log.path)
        folder = next((folder for folder in candidates if folder in folders), candidates[-1])
        groups.setdefault(folder, []).append((log, framework))
    results: list[tuple[Log, str]] = []
    for group in groups.values():
        results += _joined_group(group) if len(group) > 1 else group
    return results


def folders_of(log: Path) -> list[Path]:
    """Return the folders that may be that of the run, the innermost first.

    Checkpoints lie below the run's folder. Event files and W&B's files may lie below it, in a
    folder for each start, with TensorBoard's hyperparameters one folder further below."""
    path = log.resolve()
    folder = path if path.is_dir() else path.parent
    if CHECKPOINT.fullmatch(folder.name):
        return [folder.parent]
    folder_of_starts = ""
    if path.is_dir() or path.name.startswith(EVENT_FILE):
        folder_of_starts = "runs"
    elif path.suffix == ".wandb":
        folder_of_starts = "wandb"
    above = [
        parent.parent for parent in (folder, *folder.parents[:2]) if parent.name == folder_of_starts
    ]
    return [folder, *above[:1]]


def run_folder(log: Path) -> Path:
    """Return the folder of the run that wrote a log, as far as its path tells."""
    return folders_of(log)[-1]


def lasting_path(log: Path) -> Path:
    """Return the path of a run's log, or the run's folder if newer checkpoints replace the log."""
    if CHECKPOINT.fullmatch(log.parent.name) or log.name == STATE_FILE:
        return run_folder(log)
    return log.resolve()


def _joined_group(group: list[tuple[Log, str]]) -> list[tuple[Log, str]]:
    """Return the logs of one folder, those of the same run as a single log."""
    parts: list[Part] = []
    others: list[tuple[Log, str]] = []  # which their translation will refuse
    empty: list[Log] = []
    for log, framework in group:
        if not log.records:
            empty.append(log)
            continue
        part = _part(log, framework)
        if part is None:
            others.append((log, framework))
        else:
            parts.append(part)
    if not parts:
        return group
    runs: list[Part] = []
    for kind in KINDS:
        starts = [part for part in parts if part.log.kind == kind]
        runs = _with_starts(runs, sorted(starts, key=_start))
    runs[0].log.notes += [f"{log.path}: {log.kind} without a record" for log in empty]
    return [(part.log, part.framework) for part in runs] + others


def _part(log: Log, framework: str) -> Part | None:
    """Return a log with its numbers, None if its framework or its numbers cannot be told."""
    names = {name for record in log.records for name in record}
    try:
        table = log.table or find_table(names, framework)
        columns = Columns(table, log.path)
        for record in log.records:
            columns.add(record)
    except ValueError:
        return None
    return Part(log, table.name, columns)


def _start(part: Part) -> str:
    """Return a text by which the starts of a run are in order: event files have the time in it."""
    if part.log.kind != EVENTS or not part.log.path.is_dir():
        return ""
    return min((file.name for file in part.log.path.glob(f"{EVENT_FILE}*")), default="")


def _with_starts(runs: list[Part], starts: list[Part]) -> list[Part]:
    """Return the runs, to which the logs of their starts were added, and all other starts.

    The newest start comes first. An earlier one counts up to the first step of a later one."""
    others = []
    limits: list[dict[str, int]] = [{} for _ in runs]
    for start in reversed(starts):
        comparisons = [
            _compared(run, start, limit) if run.framework == start.framework else None
            for run, limit in zip(runs, limits, strict=True)
        ]
        for number, comparison in enumerate(comparisons):
            if comparison is None or not comparison.is_same_run():
                continue
            united = _united(runs[number], start, comparison)
            if united is None:
                continue
            runs[number] = united
            for counts, step in start.first_steps().items():
                limits[number][counts] = min(step, limits[number].get(counts, step))
            break
        else:
            notes = [
                _disagreement(run.log, comparison)
                for run, comparison in zip(runs, comparisons, strict=True)
                if comparison is not None
            ]
            start.log.notes += notes[:MAX_DISAGREEMENTS]
            others.append(start)
    return runs + others[::-1]


def _compared(run: Part, start: Part, limit: dict[str, int]) -> Comparison:
    """Return what a start's numbers before its limit say of a run's."""
    comparison = Comparison()
    begin_later: set[bool] = set()
    for name, column in start.columns.values.items():
        numbers = run.columns.values.get(name, {})
        axis = start.columns.axes[name] if column else Axis("")
        if numbers and _unit(run.columns.axes[name]) != _unit(axis):
            continue
        for step, value in column.items():
            if step >= limit.get(axis.counts, step + 1):
                comparison.undone.add(step)
                continue
            if step not in numbers:
                comparison.added.append((name, step, value))
                continue
            if _agree(numbers[step], value):
                comparison.agreeing += 1
                continue
            first = comparison.difference
            if first is None or step < first[0]:
                comparison.difference = (step, name, numbers[step], value)
        if numbers and column:
            begin_later.add(min(column) > max(numbers))
    comparison.is_later = begin_later == {True}
    return comparison


def _unit(axis: Axis) -> tuple[str, int]:
    return axis.counts, axis.first


def _agree(first: float, second: float) -> bool:
    """Return whether two records are of the same number, up to rounding."""
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return math.isclose(first, second, rel_tol=RELATIVE_ROUNDING, abs_tol=ABSOLUTE_ROUNDING)


def _united(run: Part, start: Part, comparison: Comparison) -> Part | None:
    """Return a run with the numbers and the configuration that the log of a start adds.

    None if they are too many together."""
    columns = run.columns
    # numbers that are not finite are among the united records, whose reading notes them
    run_notes = [note for note in columns.notes() if NOT_FINITE not in note]
    start_notes = [note for note in start.columns.notes() if NOT_FINITE not in note]
    notes = [*run.log.notes, *run_notes]
    notes += [f"{start.log.path}: {note}" for note in (*start.log.notes, *start_notes)]
    notes.append(_agreement(start.log, comparison))
    values = {name: dict(column) for name, column in columns.values.items()}
    axes = dict(columns.axes)
    for name, step, value in comparison.added:
        values.setdefault(name, {})[step] = value
        axes.setdefault(name, start.columns.axes[name])
    log = dataclasses.replace(
        run.log,
        kind=f"{run.log.kind} and {start.log.kind}",
        records=_records(values, axes),
        config=start.log.config | run.log.config,
        notes=notes,
        planned=run.log.planned or start.log.planned,
        steps_per_row=run.log.steps_per_row or start.log.steps_per_row,
    )
    if start.log.kind in run.log.kind:
        log.kind = run.log.kind
    return _part(log, run.framework)


def _records(values: dict[str, dict[int, float]], axes: dict[str, Axis]) -> list[dict[str, object]]:
    """Return a record for each axis and step, in the order of the steps."""
    records: dict[tuple[int, str, str], dict[str, object]] = {}
    for name, column in values.items():
        axis = axes.get(name)
        for step, value in column.items() if axis else ():
            key = (step, axis.key, axis.prefix)
            records.setdefault(key, {axis.key: step})[name] = value
    return [records[key] for key in sorted(records)]


def _agreement(log: Log, comparison: Comparison) -> str:
    """Return the note on a log that was joined with another one."""
    text = f"{log.path} ({log.kind}) is of the same run: {comparison.agreeing} numbers agree"
    if not comparison.agreeing:
        text = f"{log.path} ({log.kind}) begins after the last step, and continues the run"
    text += f", {len(comparison.added)} were added"
    if comparison.undone:
        text += (
            f". Its {len(comparison.undone)} steps from {min(comparison.undone)} on are left out: "
            "a later start wrote them again"
        )
    return text


def _disagreement(log: Log, comparison: Comparison) -> str:
    """Return the note on a log that is another run than a log of its folder."""
    if comparison.difference is None and comparison.undone:
        return f"a later start wrote all its steps again, so it and {log.path} count as two runs"
    if comparison.difference is None:
        return f"it and {log.path} have no number in common, so they count as two runs"
    step, name, first, second = comparison.difference
    return (
        f"{log.path} disagrees with it at step {step} ({name} is {first:.6g} there and "
        f"{second:.6g} here), so they count as two runs"
    )
