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

Every file may be hostile. Files are read within bounds, and damaged parts become notes.
gspo.tracking.frameworks knows what the names mean.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from gspo.analysis import event_frames, foreign_consoles, wandb_files
from gspo.analysis.foreign_consoles import (
    CONSOLE,
    ROWS_WITHOUT_STEPS,
    STEP_OF_ALL,
    STEPS_AS_TEXT,
)
from gspo.io import untrusted
from gspo.io.tables import counted
from gspo.tracking.frameworks.known import STEP_KEYS
from gspo.tracking.frameworks.translate import Log

TRAINER_STATE = "transformers' trainer state"
LINES = "rows of JSON"
FILE_LOGGER = "verl's file logger"
EVENTS = "TensorBoard's event files"
WANDB = "a W&B file"
FINDABLE = (
    "trainer_state.json, JSON lines with steps, a console of verl, TRL, ms-swift, slime or ROLL, "
    "TensorBoard's event files, or *.wandb"
)

HISTORY = "log_history"  # a list of rows; also in the names of files that hold the list alone
STATE_FILE = "trainer_state.json"
# files that are left out with a note if they hold no rows
NAMES_OF_LOGS = (STATE_FILE, "logging.jsonl", "metrics.jsonl")
ENDS_OF_LOGS = (".jsonl", ".log", ".jsonl.gz", ".json.gz", ".log.gz")
# W&B's own, and its link to the newest run
OF_WANDB = re.compile(r"latest-run|(core-|symon-)?debug[\w.-]*\.log")
EVENT_FILE = "events.out.tfevents"
CONSOLE_SUFFIXES = (".log", ".txt", ".out")
CHECKPOINT = re.compile(r"checkpoint-(\d{1,9})")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8. Some editors write it before the first line
# how files begin that hold no UTF-8 text
OTHER_BEGINNINGS = {
    b"\x1f\x8b": "compressed by gzip: unpack it first",
    b"\xff\xfe": "UTF-16 text: convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text: convert it to UTF-8",
}
# numbers that W&B's server spells as text
SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

FIRST_BYTES = 1 << 20  # in which the kind of a file shows
FIRST_CONSOLE_BYTES = 4 << 20  # a console has much before its first step
MAX_STATE_BYTES = 256 << 20
MAX_FOLDER_ENTRIES = 100_000
MAX_DAMAGE_NAMED = 10  # damaged places of a file that notes name
MAX_PASSED_NAMED = 5  # files that a note names with the reason
FIRST_LINES = 20  # of a file, in which a row with a step shows


# ------------------------------------------------------------------------------------------------
# finding
def find_logs(path: Path, without: Iterable[Path], notes: list[str]) -> list[Path]:
    """Return the logs at or below a path: files, and for event files their folders.

    Nothing in the folders `without` is looked at. W&B's files are left to the caller. The notes
    tell of files and links that look like logs and hold no rows that can be read."""
    if path.is_file():
        return [path]
    skipped = {folder.resolve() for folder in without}
    logs: list[Path] = []
    states: dict[Path, list[Path]] = {}  # of a run's folder
    without_steps: list[Path] = []
    passed: list[Path] = []
    entries = 0
    for folder_name, subfolders, names in os.walk(path):
        folder = Path(folder_name)
        if folder.resolve() in skipped:
            subfolders.clear()
            continue
        subfolders.sort()
        entries += len(names) + len(subfolders)
        if entries > MAX_FOLDER_ENTRIES:
            notes.append(f"{path}: only the first {MAX_FOLDER_ENTRIES:,} entries were looked at")
            break
        if any(name.startswith(EVENT_FILE) for name in names):
            logs.append(folder)
        links = [folder / name for name in subfolders if (folder / name).is_symlink()]
        passed += [link for link in links if not OF_WANDB.fullmatch(link.name)]
        # beside the numbers in a *.wandb, W&B keeps the console and its own logs
        is_of_wandb = folder.name in ("files", "logs") and any(folder.parent.glob("*.wandb"))
        for name in sorted(names):
            file = folder / name
            kind = _kind(file)
            if kind == TRAINER_STATE and name == STATE_FILE:
                run = folder.parent if CHECKPOINT.fullmatch(folder.name) else folder
                states.setdefault(run, []).append(file)
            elif kind == ROWS_WITHOUT_STEPS:
                without_steps.append(file)
            elif kind:
                logs.append(file)
            elif _looks_like_a_log(name) and not is_of_wandb:
                passed.append(file)
    logs += [_newest_state(files) for files in states.values()]
    if skipped:
        # runs of ours have files beside them that are no logs
        passed = [file for file in passed if _is_named_as_a_log(file.name)]
    if passed:
        notes.append(_passed_over(passed))
    if logs and without_steps:
        names = ", ".join(str(file) for file in without_steps[:3])
        notes.append(
            f"left out: {len(without_steps)} consoles whose rows have no step, because other logs "
            f"have steps ({names})"
        )
        return logs
    return logs + without_steps


def _is_named_as_a_log(name: str) -> bool:
    """Return whether a framework's log has this name."""
    return name in NAMES_OF_LOGS or HISTORY in name


def _looks_like_a_log(name: str) -> bool:
    """Return whether a file with this name may be a log."""
    if OF_WANDB.fullmatch(name):
        return False
    return _is_named_as_a_log(name) or name.lower().endswith(ENDS_OF_LOGS)


def _passed_over(paths: Sequence[Path]) -> str:
    """Return the note on files of which nothing is read, with the reasons of the first."""
    texts = [f"{path}: {_why_no_log(path)}" for path in paths[:MAX_PASSED_NAMED]]
    more = len(paths) - MAX_PASSED_NAMED
    if more > 0:
        texts.append(f"and {more} more")
    return f"left out: {counted(len(paths), 'file')} without rows of a run ({'; '.join(texts)})"


def _kind(file: Path) -> str:
    """Return what kind of log a file is, by its name and its first bytes; empty if it is none."""
    suffix = file.suffix.lower()
    if suffix not in (".json", ".jsonl", *CONSOLE_SUFFIXES):
        return ""
    try:
        with untrusted.open_plain_file(file) as opened:
            size = FIRST_CONSOLE_BYTES if suffix in CONSOLE_SUFFIXES else FIRST_BYTES
            content = opened.read(size).removeprefix(BYTE_ORDER_MARK)
    except (OSError, untrusted.Unreadable):
        return ""
    if suffix == ".json":
        if content.lstrip().startswith(b"["):
            return LINES if HISTORY in file.name or _begins_with_a_row(content) else ""
        return TRAINER_STATE if b'"log_history"' in content else ""
    if suffix in CONSOLE_SUFFIXES:
        return foreign_consoles.kind_of(content)
    for line in content.splitlines()[:FIRST_LINES]:
        row = _object(line)
        if row is not None and any(key in row for key in STEP_KEYS):
            return FILE_LOGGER if isinstance(row.get("data"), dict) else LINES
    return ""


def _begins_with_a_row(content: bytes) -> bool:
    """Return whether a list of JSON begins with a row that has a step."""
    row = next(_objects_of_a_cut_list(content.decode(errors="replace")), None)
    return isinstance(row, dict) and any(key in row for key in STEP_KEYS)


def _newest_state(files: list[Path]) -> Path:
    """Return the state with the most steps: each checkpoint holds the history up to it."""

    def steps(file: Path) -> int:
        matched = CHECKPOINT.fullmatch(file.parent.name)
        # a state beside the checkpoints is written at the end
        return int(matched[1]) if matched else untrusted.MAX_STEP

    return max(files, key=steps)


def content_of(path: Path) -> str:
    """Return in words what a path holds, for a message that nothing could be read of it."""
    if not path.is_dir():
        return _why_no_log(path)
    suffixes: dict[str, int] = {}
    for number, file in enumerate(path.rglob("*")):
        if number > MAX_FOLDER_ENTRIES:
            break
        if file.is_symlink():
            suffixes["links"] = suffixes.get("links", 0) + 1
        elif file.is_file():
            suffix = file.suffix or "no suffix"
            suffixes[suffix] = suffixes.get(suffix, 0) + 1
    if not suffixes:
        return "the folder holds no file"
    most = sorted(suffixes, key=lambda suffix: -suffixes[suffix])[:5]
    counts = ", ".join(f"{suffixes[suffix]} {suffix}" for suffix in most)
    return f"the folder holds {sum(suffixes.values())} files ({counts}), none of them {FINDABLE}"


def _why_no_log(path: Path) -> str:
    """Return in words why no rows are read of a file or a link."""
    if path.is_symlink():
        return "the file is a link, and links are not followed: name the file that it points to"
    try:
        with untrusted.open_plain_file(path) as opened:
            content = opened.read(2)
    except OSError as error:
        return f"the file cannot be read: {error.strerror}"
    except untrusted.Unreadable:
        return "it is no file with a content, but a pipe or a device"
    if not content:
        return "the file is empty"
    if content in OTHER_BEGINNINGS:
        return f"the file is {OTHER_BEGINNINGS[content]}"
    suffix = path.suffix.lower()
    if path.name == STATE_FILE or (suffix == ".json" and HISTORY in path.name):
        return f"the file has no {HISTORY}, or was cut before it"
    if suffix == ".jsonl":
        return f"none of its first {FIRST_LINES} lines is a row with a step"
    if suffix == ".log":
        return "no line is a row as verl, TRL, ms-swift, slime or ROLL print it"
    return f"the file is none of {FINDABLE}"


# ------------------------------------------------------------------------------------------------
# reading
def read_log(path: Path) -> Log:
    """Return the records of a log. Raises Unreadable if the path holds none."""
    if path.is_dir():
        return event_files(path)
    if path.suffix == ".wandb":
        segment = wandb_files.read(path)
        if segment.rows:
            raise untrusted.Unreadable(own_run(segment))
        return wandb_log([segment])
    if path.name.startswith(EVENT_FILE):
        return event_files(path.parent, [path])
    kind = _kind(path)
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
    """Read the `log_history` of a trainer_state.json, or a list of rows, also if the file is cut."""
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
        history = list(_objects_of_a_cut_list(content.decode(errors="replace")))
        log.notes.append(
            f"{path} is damaged ({error}): the first {len(history)} rows of its log_history are read"
        )
    if not isinstance(history, list):
        raise untrusted.Unreadable(f"{path} is damaged: its log_history is no list")
    log.records = [row for row in history if isinstance(row, dict)]
    if len(log.records) < len(history):
        log.notes.append(f"left out: {len(history) - len(log.records)} rows that are no mapping")
    max_steps = state.get("max_steps")
    if untrusted.is_step(max_steps):
        log.planned = max_steps
    logging_steps = state.get("logging_steps")
    if untrusted.is_step(logging_steps):
        log.steps_per_row = logging_steps
    return log


def _objects_of_a_cut_list(text: str) -> Iterator[object]:
    """Yield the complete objects at the start of the list `log_history` in a damaged text."""
    position = text.find("[", max(text.find(f'"{HISTORY}"'), 0))
    decoder = json.JSONDecoder()
    while position >= 0:
        position += 1
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        try:
            value, end = decoder.raw_decode(text, position)
            untrusted.check_tree(value)
        except (ValueError, RecursionError):
            return
        yield value
        position = end - 1


def json_lines(path: Path, kind: str = LINES) -> Log:
    """Read a file with a row of JSON per line."""
    log = Log(path, kind)
    damaged = 0
    for line in _lines(path, log.notes):
        row = _object(line)
        if row is None:
            damaged += bool(line.strip())
            continue
        data = row.get("data")
        if kind == FILE_LOGGER and isinstance(data, dict):
            row = {"step": row.get("step")} | data
        for key in STEPS_AS_TEXT:
            counted = STEP_OF_ALL.fullmatch(str(row.get(key)))
            if counted:
                row[key] = int(counted[1])
                log.planned = int(counted[2])
        log.records.append(row)
    if damaged:
        log.notes.append(f"left out: {damaged} lines that are no rows (cut or damaged)")
    return log


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


def _object(line: bytes) -> dict | None:
    """Return the mapping of a line of JSON, None if it is none."""
    try:
        value = untrusted.parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


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
    """Return a record of W&B in which numbers that are not finite are numbers, not text."""
    if not any(isinstance(value, str) for value in record.values()):
        return record
    return {
        key: SPELLED.get(value, value) if isinstance(value, str) else value
        for key, value in record.items()
    }


def flat(tree: dict, prefix: str = "") -> dict[str, object]:
    """Return a nested configuration with dotted keys. Lists are left out."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            leaves[f"{prefix}{key}"] = value
    return leaves
