"""Find the logs of other frameworks below a path, and say of which files nothing is read.

The kind of a file shows in its name and its first bytes. foreign_files.py reads the logs. Every
file may be hostile.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gspo.analysis import foreign_consoles
from gspo.analysis.foreign_consoles import ROWS_WITHOUT_STEPS
from gspo.analysis.wandb_files import may_be_a_name
from gspo.io import untrusted
from gspo.io.tables import counted
from gspo.tracking.frameworks.known import STEP_KEYS

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
ABOUT = "foreign_run.yaml"  # what the user says of a log
# files that are left out with a note if they hold no rows
NAMES_OF_LOGS = (STATE_FILE, "logging.jsonl", "metrics.jsonl")
ENDS_OF_LOGS = (".jsonl", ".log", ".jsonl.gz", ".json.gz", ".log.gz")
# W&B's own, and its link to the newest run
OF_WANDB = re.compile(r"latest-run|(core-|symon-)?debug[\w.-]*\.log")
EVENT_FILE = "events.out.tfevents"
CONSOLE_SUFFIXES = (".log", ".txt", ".out")
STEPS_OF_STATE = re.compile(rb'"global_step": *(\d{1,9})')
CHECKPOINT = re.compile(r"checkpoint-(\d{1,9})")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8. Some editors write it before the first line
# how files begin that hold no UTF-8 text
OTHER_BEGINNINGS = {
    b"\x1f\x8b": "compressed by gzip: unpack it first",
    b"\xff\xfe": "UTF-16 text: convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text: convert it to UTF-8",
}

MAX_STATE_BYTES = 256 << 20
FIRST_BYTES = 1 << 20  # in which the kind of a file shows
FIRST_CONSOLE_BYTES = 64 << 20  # a console has much before its first step
MAX_FOLDER_ENTRIES = 100_000
MAX_PASSED_NAMED = 5  # files that a note names with the reason
FIRST_LINES = 20  # of a file, in which a row with a step shows


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
            kind = kind_of(file)
            if kind == TRAINER_STATE and name == STATE_FILE:
                run = folder.parent if CHECKPOINT.fullmatch(folder.name) else folder
                states.setdefault(run, []).append(file)
            elif kind == ROWS_WITHOUT_STEPS:
                without_steps.append(file)
            elif kind:
                logs.append(file)
            elif _looks_like_a_log(name) and not is_of_wandb:
                passed.append(file)
    logs += [_newest_state(files, notes) for files in states.values()]
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


def wandb_segments(path: Path, run_folders: set[Path]) -> list[Path]:
    """Return the offline W&B files below a path that lie in no run directory, by their start."""
    files = [path] if path.suffix == ".wandb" else []
    if path.is_dir():
        files = [file for file in path.rglob("*.wandb") if file.is_file()]
    outside = set()
    for file in files:
        resolved = file.resolve()
        if not run_folders & set(resolved.parents) and not _is_copy(resolved):
            outside.add(resolved)
    # .../wandb/offline-run-<time>-<id>/run-<id>.wandb: the folders' names sort by the time of their
    # start

    def start(file: Path) -> tuple[Path, str]:
        return file.parent.parent, file.parent.name

    return sorted(outside, key=start)


def _is_copy(file: Path) -> bool:
    """Return whether this is a copy of W&B's link to the latest run.

    The link becomes a folder if the copy followed links.
    """
    folder = file.parent
    return folder.name == "latest-run" and any(folder.parent.glob(f"*-run-*/{file.name}"))


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


def kind_of(file: Path) -> str:
    """Return what kind of log a file is, by its name and its first bytes; empty if it is none."""
    suffix = file.suffix.lower()
    if suffix not in (".json", ".jsonl", *CONSOLE_SUFFIXES):
        return ""
    if suffix in CONSOLE_SUFFIXES:
        return foreign_consoles.kind_of(_first_lines(file, FIRST_CONSOLE_BYTES))
    content = untrusted.beginning(file, FIRST_BYTES).removeprefix(BYTE_ORDER_MARK)
    if suffix == ".json":
        if content.lstrip().startswith(b"["):
            return LINES if HISTORY in file.name or _begins_with_a_row(content, file) else ""
        return TRAINER_STATE if b'"log_history"' in content else ""
    step_keys = _step_keys(file)
    for line in content.splitlines()[:FIRST_LINES]:
        row = json_object(line)
        if row is not None and not step_keys.isdisjoint(row):
            return FILE_LOGGER if isinstance(row.get("data"), dict) else LINES
    return ""


def _begins_with_a_row(content: bytes, file: Path) -> bool:
    """Return whether a list of JSON begins with a row that has a step."""
    row = next(objects_of_a_cut_list(content.decode(errors="replace")), None)
    return isinstance(row, dict) and not _step_keys(file).isdisjoint(row)


def _first_lines(file: Path, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of the first bytes of a file, none if it cannot be read."""
    try:
        with untrusted.open_plain_file(file) as opened:
            while opened.tell() < max_bytes:
                line = opened.readline(untrusted.MAX_LINE_BYTES)
                if not line:
                    return
                yield line.removeprefix(BYTE_ORDER_MARK)
    except (OSError, untrusted.Unreadable):
        return


def _step_keys(file: Path) -> frozenset[object]:
    """Return the keys of a row's step that are known, and the key that foreign_run.yaml names."""
    about = next((place for place in about_files(file) if place.is_file()), None)
    if about is None:
        return STEP_KEYS
    try:
        return STEP_KEYS | {untrusted.read_yaml(about).get("step")}
    except (OSError, ValueError, TypeError):
        return STEP_KEYS  # read_about reports the error


def about_files(log: Path) -> list[Path]:
    """Return the places of a log's foreign_run.yaml in its folder and the folder above.

    The first that exists counts."""
    folder = log if log.is_dir() else log.parent
    places = [folder / ABOUT, folder.parent / ABOUT]
    name_alone = f"{log.stem}.{ABOUT}"
    if not log.is_dir() and may_be_a_name(name_alone):
        places.insert(0, log.with_name(name_alone))
    return places


def _newest_state(files: list[Path], notes: list[str]) -> Path:
    """Return the state with the most steps: each checkpoint holds the history up to it.

    If it is damaged, the state with the most readable rows is returned. A note names a state that
    was written later."""

    def steps(file: Path) -> int:
        matched = CHECKPOINT.fullmatch(file.parent.name)
        if matched:
            return int(matched[1])
        written = STEPS_OF_STATE.search(untrusted.beginning(file, FIRST_BYTES))
        # a state beside the checkpoints is written at the end
        return int(written[1]) if written else untrusted.MAX_STEP

    # of equal ones the outermost
    most_steps = max(files, key=lambda file: (steps(file), -len(file.parts)))
    if len(files) > 1 and not _state_rows(most_steps)[1]:
        readable = max(files, key=lambda file: (_state_rows(file), steps(file)))
        if readable != most_steps:
            notes.append(f"{most_steps} is damaged, so {readable} is read")
            return readable
    last_written = max(files, key=lambda file: file.stat().st_mtime)
    if steps(last_written) < steps(most_steps):
        notes.append(
            f"{most_steps} has the most steps and is read, but {last_written} was written later: "
            "if another run wrote it, name it alone"
        )
    return most_steps


def _state_rows(file: Path) -> tuple[int, bool]:
    """Return the number of readable rows of a trainer state, and whether the file is whole."""
    try:
        content = untrusted.read_bytes(file, MAX_STATE_BYTES)
    except (OSError, untrusted.Unreadable):
        return 0, False
    try:
        state = untrusted.parse_json(content)
    except ValueError:
        return sum(1 for _ in objects_of_a_cut_list(content.decode(errors="replace"))), False
    history = state.get(HISTORY) if isinstance(state, dict) else state
    return (len(history), True) if isinstance(history, list) else (0, False)


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
        return (
            f"no line of its first {FIRST_CONSOLE_BYTES >> 20} MB is a row as verl, TRL, ms-swift, "
            "slime or ROLL print it"
        )
    return f"the file is none of {FINDABLE}"


def objects_of_a_cut_list(text: str) -> Iterator[object]:
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


def json_object(line: bytes) -> dict | None:
    """Return the mapping of a line of JSON, None if it is none."""
    try:
        value = untrusted.parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
