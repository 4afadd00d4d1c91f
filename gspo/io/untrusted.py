"""Reads files that someone else may have written: regular files alone, within bounds of size, depth
and number.

A path that is not a regular file, or whose content is not what it should be, raises Unreadable (a
ValueError) in one line that names it. A missing file raises FileNotFoundError. Our own files stay
far within the bounds.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

MAX_SMALL_FILE_BYTES = 4 << 20  # the most bytes of a file that is read as a whole
MAX_SETTINGS_BYTES = 256 << 10  # the most bytes of settings.yaml
MAX_ROWS_FILE_BYTES = 256 << 20  # the most bytes of a file of rows
OWN_RUN_FACTOR = 32  # times as much is read of one's own runs, which may have many steps
MAX_LINE_BYTES = 8 << 20  # the most bytes of one line
MAX_DEPTH = 50  # how deeply mappings and lists may be nested
INTEGER_LIMIT = 2**63  # integers must be smaller
YAML_NUMBER = re.compile(
    r"[-+0-9_:.]+|[-+]?0[xbo].*", re.IGNORECASE
)  # what YAML may take for a number
# Half characters (surrogates), which JSON can spell but no table or file can hold. Python also
# decodes file names that are not UTF-8 to them.
SURROGATES = re.compile("[\ud800-\udfff]")
MAX_STEP = 1_000_000  # the last step that a row may describe
MAX_METRICS = 5_000  # the most different metrics of a run
MAX_NUMBERS = 20_000_000  # the most numbers in all rows of a run
# the most cells of the rows as a table, with empty ones, of which rows of unlike metrics have many
MAX_CELLS = 40_000_000
CONTAINER_TYPES = frozenset([dict, list])
FIRST_TAIL_BYTES = 64 << 10  # bytes from the end of a file that are read at first for its last rows
MAX_TAIL_BYTES = 32 << 20  # bytes from the end of a file that are read at most for its last rows
SPARE_LINES = 20  # lines beyond the last rows that are parsed, since some may be damaged
MAX_DAMAGED_LINES = 10_000  # a file with more lines that are not rows is refused
MAX_MAGNITUDE = (
    1e100  # larger numbers count as not finite, because their sums and squares would not be
)

# the loader in C does the same ten times faster
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Unreadable(ValueError):
    """Is raised for a file whose content is not what it should be."""


def plain_file_opener(path: str | Path, flags: int) -> int:
    """Open a regular file to read or to write; to be given to Python's `open` as its `opener`.

    Raises Unreadable for anything else: a link may lead anywhere, a pipe would make us wait for its
    other end, and a device has no end.
    """
    try:
        descriptor = os.open(
            path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666
        )
    except OSError as error:
        # a link; a socket, a pipe; a link on BSD
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
            raise Unreadable(not_plain(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unreadable(not_plain(path))
    return descriptor


def not_plain(path: str | Path) -> str:
    """Explain that a path is a link or something else than a regular file."""
    what = f"is a link to {os.readlink(path)}" if os.path.islink(path) else "is no plain file"
    return f"{path} {what}: a run has files and folders of its own alone; move it out of the run directory"


def open_plain_file(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes."""
    return open(path, "rb", opener=plain_file_opener)


def read_bytes(path: Path, most: int = MAX_SMALL_FILE_BYTES) -> bytes:
    """Read a file of at most `most` bytes."""
    with open_plain_file(path) as file:
        content = b"" if os.fstat(file.fileno()).st_size > most else file.read(most + 1)
        if os.fstat(file.fileno()).st_size > most or len(content) > most:
            raise Unreadable(f"{path} is larger than {most:,} bytes, the most that is read of it")
    return content


def path_inside(folder: Path, name: str) -> Path:
    """Return the path of a file that a listing of a folder names; Unreadable is raised if it is not
    in the folder.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise Unreadable(f"{folder}: it lists {name[:100]!r}, which is not in it")
    return folder / name


def read_lines(path: Path, factor: int = 1) -> Iterator[bytes]:
    """Yield the lines of a file, with their line ends. It may have LONG bytes, times a factor."""
    with open_plain_file(path) as file:
        if os.fstat(file.fileno()).st_size > factor * MAX_ROWS_FILE_BYTES:
            raise Unreadable(
                f"{path} is larger than {factor * MAX_ROWS_FILE_BYTES:,} bytes, the most that is read of it"
            )
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise Unreadable(f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes")
            yield line


# ----------------------------------------------------------------------------------------------------------------
# JSON
def read_json(path: Path, kind: type = dict) -> Any:
    """Read a small JSON file that holds a mapping, or another `kind`."""
    content = read_bytes(path)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise Unreadable(f"{path} is damaged: {error}") from None
    if not isinstance(value, kind):
        raise Unreadable(
            f"{path} is damaged: it holds a {type(value).__name__}, where a {kind.__name__} is expected"
        )
    return value


def parse_json(text: bytes | str) -> Any:
    """Parse a JSON text. Raises ValueError, also if it is nested too deeply or has too large an
    integer.
    """
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_tree(value)
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or abs(number := int(text)) >= INTEGER_LIMIT:
        raise ValueError(f"an integer of {len(text)} digits")
    return number


def check_tree(value: object) -> None:
    """Raise ValueError for a tree that is nested too deeply, or holds values that neither JSON nor
    settings have.
    """
    level, depth = [value], 0
    while level := [child for node in level for child in _children(node)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")


def _children(node: object) -> list:
    if isinstance(node, dict):
        return [*(key for key in node if not isinstance(key, str)), *node.values()]
    if isinstance(node, list):
        return node
    if isinstance(node, int) and abs(node) >= INTEGER_LIMIT:
        raise ValueError("an integer beyond 64 bits")
    if node is not None and not isinstance(node, str | int | float):
        raise ValueError(f"a {type(node).__name__}, {str(node)[:40]!r}")
    return []


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the mappings of a file that has one JSON mapping per line; lines that hold no mapping
    are left out.
    """
    for line in read_lines(path):
        try:
            value = parse_json(line)
        except ValueError:  # a kill cut the line short, or a disk damaged it
            continue
        if isinstance(value, dict):
            yield value


# ----------------------------------------------------------------------------------------------------------------
# YAML
def read_yaml(path: Path) -> dict:
    """Read a file of settings in YAML, which must hold a mapping."""
    content = read_bytes(path, MAX_SETTINGS_BYTES)
    try:
        _check_events(content)
        value = yaml.load(content, Loader)
        check_tree(value)
    except (yaml.YAMLError, ValueError) as error:
        raise Unreadable(f"{path} holds no settings: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{path} holds no settings: {str(value)[:40]}")
    return value


def _check_events(content: bytes) -> None:
    """Raise ValueError for YAML that must not be built: aliases, tags, huge numbers, deep nesting.

    A dozen lines of aliases can stand for gigabytes. Our own files have neither aliases nor tags.
    """
    depth = 0
    for event in yaml.parse(content, Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{event.anchor[:40]}: write the value itself")
        if getattr(event, "tag", None) is not None and isinstance(event, yaml.NodeEvent):
            raise ValueError(f"it has a tag, {event.tag[:40]}")
        plain = event.value if isinstance(event, yaml.ScalarEvent) and event.style is None else ""
        if len(plain) > 100 and YAML_NUMBER.fullmatch(plain):
            raise ValueError(f"a number of {len(plain)} digits")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")


# ----------------------------------------------------------------------------------------------------------------
# rows
def read_rows(path: Path, factor: int = 1) -> tuple[list[dict[str, Any]], list[tuple[int, bytes]]]:
    """Read the rows of a metrics file. Returns the rows, and as (number, line) the lines that are
    not rows.

    A row is a step and numbers, None for a number that is not finite. Lines that a kill cut short
    or a disk damaged are not rows. The bounds of size and number are multiplied by `factor`, which
    is OWN for one's own run.
    """
    rows, damaged, names, numbers = [], [], set(), 0
    for number, line in enumerate(read_lines(path, factor), start=1):
        row = _row(line, names)
        if row is None:
            damaged.append((number, line))
        else:
            rows.append(row)
            names |= row.keys()
            numbers += len(row)
        if len(damaged) > MAX_DAMAGED_LINES:
            raise Unreadable(f"{path} has more than {MAX_DAMAGED_LINES:,} lines that are no rows")
        check_table(path, len(rows), len(names), numbers, factor)
    return rows, damaged


def last_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Read the last `count` rows of a metrics file, or all if it has fewer, without reading what
    comes before them.

    At most TAIL bytes are read from its end, and lines that are longer than LINE are no rows."""
    with open_plain_file(path) as file:
        begin = os.fstat(file.fileno()).st_size
        tail, rows = b"", []
        while begin and len(rows) < count and len(tail) < MAX_TAIL_BYTES:
            size = min(begin, max(len(tail), FIRST_TAIL_BYTES))
            begin -= size
            file.seek(begin)
            tail = file.read(size) + tail
            # the first line may have begun before
            whole = tail if not begin else tail.partition(b"\n")[2]
            rows = []
            for line in reversed(whole.rsplit(b"\n", count + SPARE_LINES)[1 if begin else 0 :]):
                if (
                    len(rows) < count
                    and len(line) <= MAX_LINE_BYTES
                    and (row := _row(line)) is not None
                ):
                    rows.append(row)
    return rows[::-1]


def check_table(path: Path, rows: int, names: int, numbers: int, factor: int = 1) -> None:
    """Raise Unreadable if a table of so many rows, metrics and numbers would fill the memory."""
    if (
        rows > MAX_STEP + 1
        or names > MAX_METRICS
        or numbers > factor * MAX_NUMBERS
        or rows * names > factor * MAX_CELLS
    ):
        raise Unreadable(
            f"{path} has more than {MAX_STEP:,} rows, {MAX_METRICS:,} metrics or {MAX_NUMBERS:,} numbers, or a table "
            f"of them more than {MAX_CELLS:,} cells"
        )


def _row(line: bytes, known: Collection[str] = ()) -> dict[str, Any] | None:
    """Parse a line of a metrics file; None if it is not a row. `known` are names that earlier rows
    had.
    """
    try:
        row = json.loads(line, parse_int=_integer)
        if not CONTAINER_TYPES.isdisjoint(map(type, row.values())):
            check_tree(row)
        step = row.get("step")
    except (ValueError, RecursionError, AttributeError):  # it is not JSON, not UTF-8, or no mapping
        return None
    if not is_step(step) or any(name not in known and SURROGATES.search(name) for name in row):
        return None
    found: dict[str, Any] = {}
    for name, value in row.items():
        # else every row would hold all names anew, which takes more memory than its numbers
        name = sys.intern(name)
        kind = type(value)
        if kind is float:
            found[name] = (
                value if -MAX_MAGNITUDE <= value <= MAX_MAGNITUDE else None
            )  # NaN compares as neither
        elif value is None or kind is int:
            found[name] = value if name == "step" else finite(value)
    return found


def is_step(value: object) -> bool:
    """Tell whether a value can be the number of a step."""
    return type(value) is int and 0 <= value <= MAX_STEP


def is_number(value: object) -> bool:
    """Tell whether a value can be that of a metric; None stands for a number that was not finite."""
    return value is None or type(value) in (int, float)


def finite(value: float | None) -> float | None:
    """Return a number of reasonable size as it is, None for any other."""
    return (
        value
        if value is not None and math.isfinite(value) and abs(value) <= MAX_MAGNITUDE
        else None
    )
