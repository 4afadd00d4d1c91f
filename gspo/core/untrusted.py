"""Reading what a stranger may have written: from regular files alone, within bounds of size, depth and number.

What is no such file, or does not hold what it should, raises Unreadable (a ValueError) in one line that names it; a
file that is not there raises FileNotFoundError. Our own files stay far within the bounds.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

SMALL = 4 << 20  # bytes of a file that is read whole
SETTINGS = 256 << 10  # bytes of settings.yaml
LONG = 256 << 20  # bytes of a file of rows
LINE = 8 << 20  # bytes of one of its lines
DEPTH = 50  # of mappings and lists within each other
LARGEST = 2**63  # integers stay below
DIGITS = re.compile(r"[-+0-9_:.]+|[-+]?0[xbo].*", re.IGNORECASE)  # what YAML may take for a number
# halves of characters, which JSON can spell and no table or file can hold; Python reads names that are not UTF-8 so
HALVES = re.compile("[\ud800-\udfff]")
STEPS = 1_000_000  # the last step that a row may describe
METRICS = 5_000  # different ones of a run
NUMBERS = 20_000_000  # of all rows of a run
CELLS = 40_000_000  # of their table, with those that are empty: rows with a metric of its own each make many of few
DAMAGED = 10_000  # lines that are no rows, after which the file is none of rows
FAR = 1e100  # sums and squares of larger numbers are infinite

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, ten times faster


class Unreadable(ValueError):
    """A file that holds something else than it should."""


def plain_file(path: str | Path, flags: int) -> int:
    """An `opener` for Python's `open`, to read or to write. Raises Unreadable for a link, and for what is no plain
    file: a pipe would make us wait for its other end, a device has no end."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):  # a link; a socket, a pipe; a link on BSD
            raise Unreadable(not_plain(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unreadable(not_plain(path))
    return descriptor


def not_plain(path: str | Path) -> str:
    what = f"is a link to {os.readlink(path)}" if os.path.islink(path) else "is no plain file"
    return f"{path} {what}: a run has files and folders of its own alone; move it out of the run directory"


def opened(path: Path) -> BinaryIO:
    return open(path, "rb", opener=plain_file)


def read_bytes(path: Path, most: int = SMALL) -> bytes:
    with opened(path) as file:
        content = b"" if os.fstat(file.fileno()).st_size > most else file.read(most + 1)
        if os.fstat(file.fileno()).st_size > most or len(content) > most:
            raise Unreadable(f"{path} is larger than {most:,} bytes, the most that is read of it")
    return content


def inside(folder: Path, name: str) -> Path:
    """The file that a listing of a folder names, which lies within it."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise Unreadable(f"{folder}: it lists {name[:100]!r}, which is not in it")
    return folder / name


def lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, with their ends."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > LONG:
            raise Unreadable(f"{path} is larger than {LONG:,} bytes, the most that is read of it")
        while line := file.readline(LINE + 1):
            if len(line) > LINE:
                raise Unreadable(f"{path} has a line of more than {LINE:,} bytes")
            yield line


# ---------------------------------------------------------------------------------------------------------------- JSON
def read_json(path: Path, kind: type = dict) -> Any:
    """The mapping, or another `kind`, that a small file holds."""
    content = read_bytes(path)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise Unreadable(f"{path} is damaged: {error}") from None
    if not isinstance(value, kind):
        raise Unreadable(f"{path} is damaged: it holds a {type(value).__name__}, where a {kind.__name__} is expected")
    return value


def parse_json(text: bytes | str) -> Any:
    """What a JSON text says. Raises ValueError, also for one that is nested too deeply or has too large an integer."""
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check(value)
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or abs(number := int(text)) >= LARGEST:
        raise ValueError(f"an integer of {len(text)} digits")
    return number


def check(value: object) -> None:
    """Raises ValueError for a tree that is nested too deeply, or holds what neither JSON nor settings do."""
    level, depth = [value], 0
    while level := [child for node in level for child in _children(node)]:
        depth += 1
        if depth > DEPTH:
            raise ValueError("it is nested too deeply")


def _children(node: object) -> list:
    if isinstance(node, dict):
        return [*(key for key in node if not isinstance(key, str)), *node.values()]
    if isinstance(node, list):
        return node
    if isinstance(node, int) and abs(node) >= LARGEST:
        raise ValueError("an integer beyond 64 bits")
    if node is not None and not isinstance(node, str | int | float):
        raise ValueError(f"a {type(node).__name__}, {str(node)[:40]!r}")
    return []


# ---------------------------------------------------------------------------------------------------------------- YAML
def read_yaml(path: Path) -> dict:
    """The mapping that a file of settings holds."""
    content = read_bytes(path, SETTINGS)
    try:
        _check_events(content)
        value = yaml.load(content, Loader)
        check(value)
    except (yaml.YAMLError, ValueError) as error:
        raise Unreadable(f"{path} holds no settings: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{path} holds no settings: {str(value)[:40]}")
    return value


def _check_events(content: bytes) -> None:
    """Before anything is built of it. Aliases, of which a few lines make gigabytes, and tags are none of ours."""
    depth = 0
    for event in yaml.parse(content, Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{event.anchor[:40]}: write the value itself")
        if getattr(event, "tag", None) is not None and isinstance(event, yaml.NodeEvent):
            raise ValueError(f"it has a tag, {event.tag[:40]}")
        plain = event.value if isinstance(event, yaml.ScalarEvent) and event.style is None else ""
        if len(plain) > 100 and DIGITS.fullmatch(plain):
            raise ValueError(f"a number of {len(plain)} digits")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH:
            raise ValueError("it is nested too deeply")


# ---------------------------------------------------------------------------------------------------------------- rows
def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[tuple[int, bytes]]]:
    """The rows of a metrics file, a step and numbers each (null where there is none that is finite), and with their
    numbers the lines that are no rows: cut short by a kill, damaged, or odd."""
    rows, damaged, names, numbers = [], [], set(), 0
    for number, line in enumerate(lines(path), start=1):
        row = _row(line)
        if row is None:
            damaged.append((number, line))
        else:
            rows.append(row)
            names |= row.keys()
            numbers += len(row)
        if len(damaged) > DAMAGED:
            raise Unreadable(f"{path} has more than {DAMAGED:,} lines that are no rows")
        check_table(path, len(rows), len(names), numbers)
    return rows, damaged


def check_table(path: Path, rows: int, names: int, numbers: int) -> None:
    """Raises Unreadable where a table of so many would fill the memory."""
    if rows > STEPS + 1 or names > METRICS or numbers > NUMBERS or rows * names > CELLS:
        raise Unreadable(
            f"{path} has more than {STEPS:,} rows, {METRICS:,} metrics or {NUMBERS:,} numbers, or a table "
            f"of them more than {CELLS:,} cells"
        )


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    if not isinstance(row, dict) or not is_step(row.get("step")) or any(map(HALVES.search, row)):
        return None
    return {name: value if name == "step" else finite(value) for name, value in row.items() if is_number(value)}


def is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= STEPS


def is_number(value: object) -> bool:
    """Whether it may stand in a row; null stands for a number that was not finite."""
    return value is None or type(value) in (int, float)


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and abs(value) <= FAR else None
