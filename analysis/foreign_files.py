"""Read the logs of other frameworks as records, whatever the framework.

    file                           what is in it                     written by
    trainer_state.json             `log_history`, a list of rows     transformers: TRL, ms-swift
    *.json                         the list alone, rows with steps   scripts of users
    *.jsonl                        a row of numbers per line         prime-rl, exported histories
    *.jsonl                        {"step": 1, "data": {...}}        verl's file logger
    logging.jsonl                  rows, steps as "3/160"            ms-swift
    *.log, *.txt, *.out            a console (foreign_consoles.py)   verl, TRL, slime, ROLL
    events.out.tfevents.*          TensorBoard's events              all but prime-rl
    *.wandb                        W&B's records (wandb_files.py)    all

foreign_search.py finds them. Every file may be hostile. Files are read within bounds, and damaged
parts become notes.
gspo.tracking.frameworks knows what the names mean.
"""

import math
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from gspo.analysis import event_frames, foreign_consoles, wandb_files
from gspo.analysis.foreign_consoles import CONSOLE, take_steps_as_text
from gspo.analysis.foreign_search import (
    BYTE_ORDER_MARK,
    CONSOLE_SUFFIXES,
    EVENT_FILE,
    EVENTS,
    FILE_LOGGER,
    HISTORY,
    LINES,
    MAX_STATE_BYTES,
    TRAINER_STATE,
    WANDB,
    content_of,
    json_object,
    kind_of,
    objects_of_a_cut_list,
)
from gspo.io import untrusted
from gspo.io.nested import dotted
from gspo.io.tables import counted
from gspo.tracking.frameworks.translate import Log

# numbers that are not finite, as W&B's server and some writers of JSON spell them
SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
MAX_DAMAGE_NAMED = 10  # damaged places of a file that notes name


def read_log(path: Path) -> Log:
    """Return the records of a log. Raises Unreadable if the path holds none."""
    if path.is_dir():
        return event_files(path)
    if path.name.startswith(EVENT_FILE):
        return event_files(path.parent, [path])
    kind = kind_of(path)
    if kind == TRAINER_STATE:
        return trainer_state(path)
    if path.suffix.lower() in CONSOLE_SUFFIXES and path.is_file():
        # its first step may come after the first bytes
        log = Log(path, CONSOLE)
        foreign_consoles.read(log, _lines(path, log.notes))
        if log.records:
            return log
    if path.suffix.lower() == ".json" and kind == LINES:
        return trainer_state(path)
    if kind in (LINES, FILE_LOGGER):
        return json_lines(path, kind)
    raise untrusted.Unreadable(f"{path}: {content_of(path)}")


def trainer_state(path: Path) -> Log:
    """Read the `log_history` of a trainer_state.json, or a list of rows, also of a cut file."""
    log = Log(path, TRAINER_STATE)
    content = untrusted.read_bytes(path, MAX_STATE_BYTES)
    try:
        state = untrusted.parse_json(content)
        if isinstance(state, list):
            log.kind = LINES
            state = {HISTORY: state}
        history = state.get(HISTORY) if isinstance(state, dict) else None
    except ValueError as error:
        state = {}
        history = list(objects_of_a_cut_list(content.decode(errors="replace")))
        log.notes.append(
            f"{path} is damaged ({error}): the first {len(history)} rows of its log_history are read"
        )
    if not isinstance(history, list):
        raise untrusted.Unreadable(f"{path} is damaged: its log_history is no list")
    log.records = [as_numbers(row) for row in history if isinstance(row, dict)]
    if log.kind == LINES:
        _drop_empty_cells(log)
    if len(log.records) < len(history):
        log.notes.append(f"left out: {len(history) - len(log.records)} rows that are no mapping")
    max_steps = state.get("max_steps")
    if untrusted.is_step(max_steps):
        log.planned = max_steps
    logging_steps = state.get("logging_steps")
    if untrusted.is_step(logging_steps):
        log.steps_per_row = logging_steps
    return log


def json_lines(path: Path, kind: str = LINES) -> Log:
    """Read a file with a row of JSON per line."""
    log = Log(path, kind)
    damaged = 0
    for line in _lines(path, log.notes):
        row = json_object(line)
        if row is None:
            damaged += bool(line.strip())
            continue
        data = row.get("data")
        if kind == FILE_LOGGER and isinstance(data, dict):
            row = {"step": row.get("step")} | data
        if any(isinstance(value, dict) for value in row.values()):
            row = flat(row)
        take_steps_as_text(row, log)
        log.records.append(as_numbers(row))
    if damaged:
        log.notes.append(f"left out: {damaged} lines that are no rows (cut or damaged)")
    _drop_empty_cells(log)
    return log


def _drop_empty_cells(log: Log) -> None:
    """Remove the nulls of a log whose records all have the same names, with a note.

    pandas exports such tables: its null means that the record has no number of this name. In any
    other log a null is a number that was not finite."""
    names = log.records[0].keys() if log.records else set()
    if any(record.keys() != names for record in log.records):
        return
    empty = sum(value is None for record in log.records for value in record.values())
    if not empty:
        return
    log.records = [_without_nulls(record) for record in log.records]
    log.notes.append(
        f"its records all have the same names, so {empty} nulls mean no number. An export may also "
        "have written null for numbers that were not finite"
    )


def _without_nulls(record: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value for name, value in record.items() if value is not None}


def _lines(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Yield the lines of a file. Lines that are too long are left out, with a note.

    The last line of ms-swift's logging.jsonl has the whole history again, and may be one."""
    too_long = 0
    limit = untrusted.MAX_LINE_BYTES
    with untrusted.open_plain_file(path) as file:
        if os.fstat(file.fileno()).st_size > untrusted.MAX_ROWS_FILE_BYTES:
            raise untrusted.Unreadable(
                f"{path} is larger than {untrusted.MAX_ROWS_FILE_BYTES:,} bytes, "
                "the most that is read of it"
            )
        is_rest = False  # of a line that is too long
        for number, part in enumerate(iter(partial(file.readline, limit), b"")):
            if number == 0:
                part = part.removeprefix(BYTE_ORDER_MARK)
            is_whole = part.endswith(b"\n") or len(part) < limit
            if is_whole and not is_rest:
                yield part
            too_long += not is_whole and not is_rest
            is_rest = not is_whole
    if too_long:
        notes.append(f"left out: {too_long} lines of more than {limit:,} bytes")


# ------------------------------------------------------------------------------------------------
# TensorBoard
def event_files(folder: Path, files: Iterable[Path] = ()) -> Log:
    """Read all scalars of a folder's event files, in the order in which they were written."""
    from google.protobuf.message import DecodeError

    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise untrusted.Unreadable(
            f"{folder}: its event files need TensorBoard: pip install 'gspo[tensorboard]'"
        ) from None
    log = Log(folder, EVENTS)
    # the names hold the time of the start
    for file in sorted(files) or sorted(folder.glob(f"{EVENT_FILE}*")):
        damaged = 0
        try:
            for payload in event_frames.events(file, log.notes):
                try:
                    event = Event.FromString(payload)
                    record: dict[str, object] = {"step": event.step}
                    for value in event.summary.value:
                        if value.HasField("simple_value"):
                            record[value.tag] = value.simple_value
                        elif value.HasField("tensor") and not value.tensor.tensor_shape.dim:
                            array = make_ndarray(value.tensor)
                            if array.dtype.kind == "f" and array.size == 1:
                                record[value.tag] = float(array)
                except (DecodeError, ValueError, TypeError, KeyError):
                    damaged += 1
                    continue
                if len(record) > 1:
                    log.records.append(record)
        except (OSError, untrusted.Unreadable) as error:
            log.notes.append(f"left out: {error}")
        if damaged:
            log.notes.append(f"{file}: left out: {damaged} events that cannot be decoded")
    return log


# ------------------------------------------------------------------------------------------------
# W&B
def wandb_logs(segments: Iterable[wandb_files.Segment]) -> list[Log]:
    """Return a log for each run among W&B's files, which are in the order of their start."""
    runs: dict[str, list[wandb_files.Segment]] = {}
    for segment in segments:
        runs.setdefault(segment.id or str(segment.path), []).append(segment)
    return [wandb_log(files) for files in runs.values()]


def own_run(segment: wandb_files.Segment) -> str:
    """Return the message on a W&B file of ours, where a run of another framework is asked for."""
    return (
        f"{segment.path}: a run of this repository ({segment.name or segment.id}), with "
        f"{counted(len(segment.rows), 'row')}. Its page is made from its run directory: gspo report "
        "runs/STUDY/RUN. `gspo compare`, `gspo view` and the figures read the file itself"
    )


def wandb_log(segments: list[wandb_files.Segment]) -> Log:
    """Return the records of the files of one W&B run, in the order of their start."""
    log = Log(segments[-1].path, WANDB)
    for segment in segments:
        log.records += [as_numbers(record) for record in segment.records]
        log.config |= flat(segment.config)
        log.notes += [f"{segment.path}: {damage}" for damage in segment.damage[:MAX_DAMAGE_NAMED]]
        more = len(segment.damage) - MAX_DAMAGE_NAMED
        if more > 0:
            log.notes.append(f"{segment.path}: {more} more places are damaged")
    return log


def as_numbers(record: dict[str, object]) -> dict[str, object]:
    """Return a record in which numbers that are not finite are numbers, not text."""
    if not any(isinstance(value, str) for value in record.values()):
        return record
    return {
        key: SPELLED.get(value, value) if isinstance(value, str) else value
        for key, value in record.items()
    }


def flat(tree: dict) -> dict[str, object]:
    """Return a nested configuration with dotted keys. Lists are left out."""
    entries = dotted(tree).items()
    return {key: value for key, value in entries if not isinstance(value, dict | list)}
