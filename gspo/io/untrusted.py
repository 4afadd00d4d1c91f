"""Readers for files that someone else may have written.

They read regular files only, within bounds of size, depth and count. Our own files stay far within
the bounds.

Unreadable (a ValueError) is raised for a path that is not a regular file, and for content that is
damaged or exceeds a bound. Its message is a single line that names the path. A missing file raises
FileNotFoundError.
"""

import errno
import json
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import yaml

MAX_SMALL_FILE_BYTES = 4 << 20  # files that are read as a whole
MAX_SETTINGS_BYTES = 256 << 10  # settings.yaml
MAX_ROWS_FILE_BYTES = 256 << 20  # files with one JSON object per line
MAX_LINE_BYTES = 8 << 20
# Bounds of this user's own runs, which may have many steps, are larger by this factor.
OWN_RUN_FACTOR = 32
MAX_DEPTH = 50  # of nested mappings and lists
INTEGER_LIMIT = 2**63  # absolute values of integers must be smaller
MAX_MAGNITUDE = 1e100  # larger numbers count as not finite: their sums and squares would overflow
# text that YAML may read as a number
YAML_NUMBER = re.compile(r"[-+0-9_:.]+|[-+]?0[xbo].*", re.IGNORECASE)
# Half characters. JSON can spell them, but no table or file can hold them. Python also decodes file
# names that are not UTF-8 to them.
SURROGATES = re.compile("[\ud800-\udfff]")
MAX_STEP = 1_000_000  # of a row
MAX_METRICS = 5_000  # different metrics of a run
MAX_NUMBERS = 20_000_000  # numbers in all rows of a run
# cells of the rows as a table, empty cells included: rows with different metrics have many
MAX_CELLS = 40_000_000
MAX_DAMAGED_LINES = 10_000  # a file with more lines that are not rows is refused
CONTAINER_TYPES = frozenset([dict, list])
FIRST_TAIL_BYTES = 64 << 10  # the first block that is read from the end of a file
MAX_TAIL_BYTES = 32 << 20  # the maximum that is read from the end of a file
SPARE_LINES = 20  # parsed beyond the requested last rows, because some may be damaged

# the loader in C is ten times faster
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Unreadable(ValueError):
    """A file is not a regular file, is damaged, or exceeds a bound."""


def plain_file_opener(path: str | Path, flags: int) -> int:
    """Open a regular file and return its descriptor: an `opener` for Python's `open`.

    Raises Unreadable for anything else. A link may lead anywhere, a pipe would block until its
    other end is opened, and a device has no end.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        # in this order: a link, a socket or a pipe, a link on BSD
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
            raise Unreadable(not_plain(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unreadable(not_plain(path))
    return descriptor


def not_plain(path: str | Path) -> str:
    """Return the message for a path that is a link, or otherwise not a regular file."""
    kind = f"is a link to {os.readlink(path)}" if os.path.islink(path) else "is no plain file"
    return (
        f"{path} {kind}: a run has files and folders of its own alone; "
        "move it out of the run directory"
    )


def open_plain_file(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes."""
    return open(path, "rb", opener=plain_file_opener)


def beginning(path: Path, max_bytes: int) -> bytes:
    """Return at most the first `max_bytes` bytes of a file, none if it cannot be read."""
    try:
        with open_plain_file(path) as file:
            return file.read(max_bytes)
    except (OSError, Unreadable):
        return b""


def read_bytes(path: Path, max_bytes: int = MAX_SMALL_FILE_BYTES) -> bytes:
    """Read a file of at most `max_bytes` bytes."""
    with open_plain_file(path) as file:
        content = b""
        if os.fstat(file.fileno()).st_size <= max_bytes:
            content = file.read(max_bytes + 1)
        # the file may have grown in between
        if os.fstat(file.fileno()).st_size > max_bytes or len(content) > max_bytes:
            raise Unreadable(
                f"{path} is larger than {max_bytes:,} bytes, the most that is read of it"
            )
    return content


def path_inside(folder: Path, name: str) -> Path:
    """Return the path of a file that someone else's listing of a folder names.

    Raises Unreadable if the path leads out of the folder.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise Unreadable(f"{folder}: it lists {name[:100]!r}, which is not in it")
    return folder / name


def read_lines(
    path: Path, factor: int = 1, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends. `factor` multiplies MAX_ROWS_FILE_BYTES."""
    max_bytes = factor * MAX_ROWS_FILE_BYTES
    with open_plain_file(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise Unreadable(
                f"{path} is larger than {max_bytes:,} bytes, the most that is read of it"
            )
        for line in iter(partial(file.readline, max_line_bytes + 1), b""):
            if len(line) > max_line_bytes:
                raise Unreadable(f"{path} has a line of more than {max_line_bytes:,} bytes")
            yield line


# --------------------------------------------------------------------------------------------------
# JSON
def read_json(path: Path, kind: type = dict) -> Any:
    """Read a small JSON file that holds a value of type `kind`."""
    content = read_bytes(path)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise Unreadable(f"{path} is damaged: {error}") from None
    if not isinstance(value, kind):
        raise Unreadable(
            f"{path} is damaged: it holds a {type(value).__name__}, "
            f"where a {kind.__name__} is expected"
        )
    return value


def parse_json(text: bytes | str) -> Any:
    """Parse a JSON text.

    Raises ValueError if it is not JSON, is nested too deeply, or has too large an integer.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        value = DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(value)
    return value


def _integer(text: str) -> int:
    # int() would take long for a long text
    if len(text) > 20 or abs(int(text)) >= INTEGER_LIMIT:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


# json.loads would make a decoder for each call
DECODER = json.JSONDecoder(parse_int=_integer)


def check_depth(value: object) -> None:
    """Raise ValueError for a value of JSON whose lists and objects nest deeper than MAX_DEPTH.

    The bound is the same in every process. Python's own limit on recursion is not: compiling a
    model raises it. `check_tree` also checks types, and is several times slower."""
    containers: list[Any] = [value] if type(value) in CONTAINER_TYPES else []
    depth = 0
    while any(containers):
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        inner: list[Any] = []
        for container in containers:
            children = container.values() if type(container) is dict else container
            if not CONTAINER_TYPES.isdisjoint(map(type, children)):
                inner += [child for child in children if type(child) in CONTAINER_TYPES]
        containers = inner


def check_tree(value: object) -> None:
    """Raise ValueError for a tree that is nested too deeply, or has values unknown to JSON."""
    level = _children(value)
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        level = [child for node in level for child in _children(node)]


def _children(node: object) -> list:
    """Return the children of a mapping or list. Raises ValueError for a value unknown to JSON."""
    if isinstance(node, dict):
        # a key that is no string counts as a child, so its type is checked too
        return [*(key for key in node if not isinstance(key, str)), *node.values()]
    if isinstance(node, list):
        return node
    if isinstance(node, int) and abs(node) >= INTEGER_LIMIT:
        raise ValueError("an integer beyond 64 bits")
    if node is not None and not isinstance(node, str | int | float):
        raise ValueError(f"a {type(node).__name__}, {str(node)[:40]!r}")
    return []


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON mappings of a file with a mapping per line. Other lines are skipped."""
    for line in read_lines(path):
        try:
            value = parse_json(line)
        except ValueError:  # the process was killed while it wrote the line, or the disk is damaged
            continue
        if isinstance(value, dict):
            yield value


# --------------------------------------------------------------------------------------------------
# YAML
def read_yaml(path: Path) -> dict:
    """Read a file of settings in YAML. Raises Unreadable if it holds no mapping."""
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
    """Raise ValueError for YAML that must not be loaded: aliases, tags, huge numbers, deep nesting.

    A dozen lines of aliases can expand to gigabytes. Our own files have neither aliases nor tags.
    """
    depth = 0
    for event in yaml.parse(content, Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{event.anchor[:40]}: write the value itself")
        if getattr(event, "tag", None) is not None and isinstance(event, yaml.NodeEvent):
            raise ValueError(f"it has a tag, {event.tag[:40]}")
        is_plain = isinstance(event, yaml.ScalarEvent) and event.style is None
        if is_plain and len(event.value) > 100 and YAML_NUMBER.fullmatch(event.value):
            raise ValueError(f"a number of {len(event.value)} digits")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")


# --------------------------------------------------------------------------------------------------
# rows
def read_bounded_rows(
    path: Path, factor: int = 1
) -> tuple[list[dict[str, Any]], list[tuple[int, bytes]]]:
    """Return the rows of a metrics file, and its damaged lines as (line number, line).

    A row is a step and numbers, or None for a number that is not finite. A line is damaged if the
    process was killed while it wrote the line, or if the disk is damaged. `factor` multiplies the
    bounds of size and count. It is OWN_RUN_FACTOR for this user's own runs.
    """
    rows = []
    damaged = []
    names: set[str] = set()
    number_count = 0
    for line_number, line in enumerate(read_lines(path, factor), start=1):
        row = _row(line, names)
        if row is None:
            damaged.append((line_number, line))
        else:
            rows.append(row)
            names |= row.keys()
            number_count += len(row)
        if len(damaged) > MAX_DAMAGED_LINES:
            raise Unreadable(f"{path} has more than {MAX_DAMAGED_LINES:,} lines that are no rows")
        check_table(path, len(rows), len(names), number_count, factor)
    return rows, damaged


def last_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last `count` rows of a metrics file, or all rows if it has fewer.

    At most MAX_TAIL_BYTES are read from the end of the file. Damaged lines and lines of more than
    MAX_LINE_BYTES are skipped.
    """
    with open_plain_file(path) as file:
        begin = os.fstat(file.fileno()).st_size
        tail = b""
        rows: list[dict[str, Any]] = []
        while begin and len(rows) < count and len(tail) < MAX_TAIL_BYTES:
            size = min(begin, max(len(tail), FIRST_TAIL_BYTES))
            begin -= size
            file.seek(begin)
            tail = file.read(size) + tail
            if begin:  # the first line may be incomplete, and the first part may hold many lines
                complete = tail.partition(b"\n")[2]
                lines = complete.rsplit(b"\n", count + SPARE_LINES)[1:]
            else:
                lines = tail.rsplit(b"\n", count + SPARE_LINES)
            parsed = (_row(line) for line in reversed(lines) if len(line) <= MAX_LINE_BYTES)
            rows = list(islice((row for row in parsed if row is not None), count))
    return rows[::-1]


def check_table(path: Path, rows: int, names: int, numbers: int, factor: int = 1) -> None:
    """Raise Unreadable if a table of so many rows, metrics and numbers needs too much memory."""
    if (
        rows > MAX_STEP + 1
        or names > MAX_METRICS
        or numbers > factor * MAX_NUMBERS
        or rows * names > factor * MAX_CELLS
    ):
        raise Unreadable(
            f"{path} has more than {MAX_STEP:,} rows, {MAX_METRICS:,} metrics or "
            f"{MAX_NUMBERS:,} numbers, or a table of them more than {MAX_CELLS:,} cells"
        )


def _row(line: bytes, checked_names: Collection[str] = ()) -> dict[str, Any] | None:
    """Parse a line of a metrics file. Return None if it is not a row.

    `checked_names` are metrics of earlier rows, whose names need no second check.
    """
    try:
        entries = DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
        if not CONTAINER_TYPES.isdisjoint(map(type, entries.values())):
            check_tree(entries)
        step = entries.get("step")
    except (ValueError, RecursionError, AttributeError):  # not JSON, not UTF-8, or no mapping
        return None
    if not is_step(step):
        return None
    if any(name not in checked_names and SURROGATES.search(name) for name in entries):
        return None
    row: dict[str, Any] = {}
    for name, value in entries.items():
        # Rows share their names. Copies of the names would take more memory than the numbers.
        name = sys.intern(name)
        kind = type(value)
        if kind is float:
            row[name] = value if -MAX_MAGNITUDE <= value <= MAX_MAGNITUDE else None  # NaN: None
        elif value is None or kind is int:
            row[name] = value if name == "step" else finite(value)
    return row


def is_step(value: object) -> bool:
    """Return whether a value can be a step."""
    return type(value) is int and 0 <= value <= MAX_STEP


def is_number(value: object) -> TypeGuard[float | None]:
    """Return whether a value can be a metric's. None stands for a number that was not finite."""
    return value is None or type(value) in (int, float)


def finite(value: float | None) -> float | None:
    """Return the number, or None if it is not finite or larger than MAX_MAGNITUDE."""
    if value is None or not abs(value) <= MAX_MAGNITUDE:  # `not` also catches NaN
        return None
    return value
