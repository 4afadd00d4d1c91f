"""Reads the records of a benchmark from JSONL (also .jsonl.gz), JSON (a list), Parquet, a folder,
or the hub.

A folder gives the files whose names begin with the split ("test.jsonl", "test2.jsonl",
"test-00000-of-00002.parquet"), in the order of their names. If none does, it gives those that do
not begin with another split's name ("math500.jsonl"). The Hugging Face hub needs the package
datasets, which comes with pip install "gspo[hub]".

Everything that is wrong with a file is a ValueError which says where: setting, file, line, key. A
file may come from anywhere: what it unpacks to is bounded, and a text that cannot be written again
as UTF-8 is refused where it is read.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
SPLITS = ("train", "test", "validation", "val", "dev")
INSTALL = 'pip install "gspo[hub]"'
NOTHING = object()
# most bytes of a line, of a JSON list, and of the texts of a batch of Parquet rows
LONGEST = 1 << 28
LINES = 1 << 22  # most lines of a file
# a compressed file may unpack to this many times its size; texts are 3 to 20 times as long
UNPACKED = 100
SMALL = 1 << 26  # any compressed file may unpack to this many bytes
PARQUET_ROWS = 16  # rows that are in memory at a time
MOST_ELEMENTS = 1 << 22  # most values in these rows, those within lists included
# most values of all columns in one row group, which pyarrow may decode at once
MOST_VALUES = 1 << 26
# gzip raises these for a file that is cut off, damaged or not compressed
UNREADABLE = (OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class Row:
    """One record, and where it stands."""

    where: str  # for messages, such as "aime24/test.jsonl, line 3"
    values: dict[str, Any]

    def get(self, key: str, *kinds: type, default: Any = NOTHING) -> Any:
        """Return the value of a key, which must be of one of the given types. Raises ValueError
        naming file, line and key."""
        if key not in self.values:
            if default is not NOTHING:
                return default
            raise ValueError(
                f"{self.where}: the key {key!r} is missing; there are {', '.join(map(str, self.values))}"
            )
        value = self.values[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise self.wrong(key, f"must be {names}, not {type(value).__name__}")
        return value

    def text(self, key: str, default: Any = NOTHING) -> str:
        """Return a text, with Windows' line ends made plain ones. It may be empty only where there
        is a default.
        """
        value = self.get(key, str, default=default).replace("\r\n", "\n")
        if default is NOTHING and not value.strip():
            raise self.wrong(key, "is empty")
        return value

    def texts(self, key: str, default: Any = NOTHING) -> list[str]:
        """Return a list of texts."""
        values = self.get(key, list, tuple, default=default)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(key, "must be a list of texts")
        return [value.replace("\r\n", "\n") for value in values]

    def first(self, *keys: str) -> str:
        """Return the text of the first of these keys that is there. Raises ValueError if none is."""
        for key in keys:
            if key in self.values:
                return self.text(key)
        raise ValueError(
            f"{self.where}: one of the keys {', '.join(keys)} is needed; there are {', '.join(self.values)}"
        )

    def wrong(self, key: str, what: str) -> ValueError:
        """Return the error to raise about a key."""
        return ValueError(f"{self.where}: the key {key!r} {what}")


@dataclass(frozen=True)
class Source:
    """Where records come from: a file or folder, or the hub where `path` is empty."""

    setting: str  # the setting that gives the path, for messages, such as "task.path"
    path: str
    split: str  # the split, which chooses the files of a folder
    hub: str = ""  # a dataset's name, or files in one: "hf://datasets/OWNER/NAME/test*.jsonl"
    hub_config: str = ""
    hub_split: str = "test"

    def rows(self) -> Iterator[Row]:
        """Yield the records in order, read one at a time."""
        if not self.path:
            yield from self._hub_rows()
            return
        for file in self.files():
            yield from file_rows(file)

    def files(self) -> list[Path]:
        """Return the files that hold the split. Raises ValueError if there are none."""
        path = Path(self.path).expanduser()
        if not path.exists():
            raise ValueError(
                f"{self.setting}={self.path}: there is no such file or folder. {self._advice()}"
            )
        if path.is_file():
            if not path.name.lower().endswith(SUFFIXES):
                raise ValueError(
                    f"{self.setting}={self.path}: its name must end in {', '.join(SUFFIXES)}"
                )
            return [path]
        found = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and file.name.lower().endswith(SUFFIXES)
        )
        named = [file for file in found if file.name.startswith(self.split)]
        files = named or [file for file in found if not file.name.startswith(SPLITS)]
        if not files:
            raise ValueError(
                f"{self.setting}={self.path}: no file for the split {self.split!r} in this folder: "
                f"{self.split}*.jsonl, .jsonl.gz or .parquet"
            )
        return files

    def _hub_rows(self) -> Iterator[Row]:
        if not self.hub:
            raise ValueError(
                f"{self.setting} is empty, and no hub dataset is known. {self._advice()}"
            )
        try:
            import datasets  # optional, an extra of the installation
        except ImportError:
            raise ValueError(
                f"{self.setting} is empty, and the hub dataset {self.hub} needs the package datasets. {self._advice()}"
            ) from None
        try:
            if self.hub.startswith("hf://"):
                kind = "parquet" if self.hub.endswith(".parquet") else "json"
                records = datasets.load_dataset(kind, data_files=self.hub, split="train")
            else:
                records = datasets.load_dataset(
                    self.hub, self.hub_config or None, split=self.hub_split
                )
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # no network, no such dataset or split, or no access
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(
                f"{self.setting} is empty, and reading {self.hub} from the hub failed: {lines[0]}. {self._advice()}"
            ) from error
        for number, values in enumerate(records, 1):
            yield checked(f"{self.hub}, record {number}", values)

    def _advice(self) -> str:
        way = (
            f", or {INSTALL} and leave it empty to read {self.hub} from the hub" if self.hub else ""
        )
        return f"Give {self.setting}=FILE or FOLDER{way}."


def file_rows(path: Path) -> Iterator[Row]:
    """Yield the records of one file. Blank lines of JSONL are skipped. A .json file whose first
    line is a record has one per line too, as many published data sets do."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        rows = _parquet(path)
    elif name.endswith((".jsonl", ".jsonl.gz")) or _begins_with_a_record(path):
        rows = _lines(path)
    else:
        rows = _list(path)
    for where, values in rows:
        if not isinstance(values, dict):
            raise ValueError(f"{where}: must be an object with keys, not {type(values).__name__}")
        yield checked(where, values)


def _begins_with_a_record(path: Path) -> bool:
    """Return whether the first line of a file of JSON that is not blank is one record."""
    try:
        with Opened(path) as file:
            for line in file.lines():
                if text := line.removeprefix(codecs.BOM_UTF8).strip():
                    return text.startswith(b"{") and text.endswith(b"}")
    except UNREADABLE:
        pass  # the reader says what is wrong with it
    return False


def checked(where: str, values: dict[str, Any]) -> Row:
    """Return the record. Raises ValueError for a key or value that cannot be written to a run's
    files.
    """
    row = Row(where, values)
    for key, value in values.items():
        try:
            whole = writable(key) and writable(value)
        except RecursionError:
            raise row.wrong(key, "is too deep: lists in lists in lists") from None
        if not whole:
            raise row.wrong(
                key, "holds half a character (a lone surrogate, \\ud800 to \\udfff): mend its text"
            )
    return row


def writable(value: Any) -> bool:
    """Return whether all texts in a value can be written as UTF-8, which some of JSON's escapes
    prevent.
    """
    if isinstance(value, str):
        try:
            return value.isascii() or bool(value.encode())
        except UnicodeEncodeError:
            return False
    if isinstance(value, dict):
        return all(writable(key) and writable(inner) for key, inner in value.items())
    return not isinstance(value, list | tuple) or all(map(writable, value))


class Opened:
    """A file's bytes, unpacked if it is compressed. Reading raises OSError beyond what may be read."""

    def __init__(self, path: Path):
        packed = path.suffix == ".gz"
        # None for no bound
        self.room = max(SMALL, UNPACKED * path.stat().st_size) if packed else None
        self.file = gzip.open(path, "rb") if packed else path.open("rb")  # noqa: SIM115, closed by __exit__

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines. They are split as bytes, so that U+2028 inside a text does not end a
        line.
        """
        for _ in range(LINES):
            if not (line := self._bounded(self.file.readline, "a line")):
                return
            yield line
        raise OSError(f"there are more than {LINES} lines")

    def whole(self) -> bytes:
        return self._bounded(
            self.file.read, "one list; as .jsonl, with one record per line, it can be"
        )

    def _bounded(self, read: Callable[[int], bytes], what: str) -> bytes:
        data = read(1 + (LONGEST if self.room is None else min(LONGEST, self.room)))
        if self.room is not None:
            self.room -= len(data)
            if self.room < 0:
                raise OSError(
                    f"it unpacks to more than {UNPACKED} times its size: unpack it, if that is meant"
                )
        if len(data) > LONGEST:
            raise OSError(f"there are more than {LONGEST} bytes in {what}")
        return data


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with Opened(path) as file:
            for number, line in enumerate(file.lines(), 1):
                if line.strip():
                    yield f"{path}, line {number}", _json(line, f"{path}, line {number}")
    except UNREADABLE as error:
        raise ValueError(f"{path}, after line {number}: cannot be read: {error}") from error


def _list(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with Opened(path) as file:
            values = _json(file.whole(), str(path))
    except UNREADABLE as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(values, list):
        raise ValueError(
            f"{path}: must hold a list of records, not {type(values).__name__}; one per line is .jsonl"
        )
    for number, value in enumerate(values, 1):
        yield f"{path}, record {number}", value


def _json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    # not JSON, not UTF-8, a number of many thousand digits, or nested too deeply
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow  # imported here because it takes a moment
    from pyarrow import parquet

    number = 0
    try:
        file = parquet.ParquetFile(path)
        check_counts(file.metadata)
        room = max(LONGEST, UNPACKED * path.stat().st_size)
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            size = sum(map(bytes_of, batch.columns))
            if size > LONGEST:
                raise OSError(f"there are more than {LONGEST} bytes in {PARQUET_ROWS} records")
            room -= size
            if room < 0:
                raise OSError(
                    f"it unpacks to more than {UNPACKED} times its size: if that is meant, write it as .jsonl"
                )
            if sum(map(elements, batch.columns)) > MOST_ELEMENTS:
                raise OSError(
                    f"there are more than {MOST_ELEMENTS} values in {PARQUET_ROWS} records"
                )
            try:
                records = batch.to_pylist()
            except (
                ValueError,
                OverflowError,
            ) as error:  # a date before the year 1 or after 9999, for example
                place = f"records {number + 1} to {number + len(batch)}"
                raise OSError(
                    f"{place} hold a value that Python has no type for: {error}"
                ) from None
            for values in records:
                number += 1
                yield f"{path}, record {number}", values
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {error}") from error


def check_counts(metadata: Any) -> None:
    """Raise OSError if a Parquet file says that it unpacks to more than is read. A list of 4e8
    nulls takes a few bytes in the file and gigabytes in memory."""
    if metadata.num_rows > LINES:
        raise OSError(f"there are more than {LINES} records")
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = list(map(group.column, range(group.num_columns)))
        if (values := sum(column.num_values for column in columns)) > MOST_VALUES:
            most = max(columns, key=lambda column: column.num_values)
            raise OSError(
                f"a row group has {values} values, more than {MOST_VALUES}, and most of them are of "
                f"{most.path_in_schema}: write the file with smaller row groups, or without this column"
            )
        for column in columns:
            if column.total_uncompressed_size > max(SMALL, UNPACKED * column.total_compressed_size):
                raise OSError(
                    f"{column.path_in_schema} unpacks to more than {UNPACKED} times its size"
                )


def bytes_of(array: Any) -> int:
    """Return how many bytes the values of an array of pyarrow take as Python gets them: a text that
    a dictionary holds once counts for each row that refers to it. Raises OSError for such
    dictionaries within lists or structs."""
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_dictionary(array.type):
        kind = array.type.value_type
        if kind not in (
            pyarrow.string(),
            pyarrow.large_string(),
            pyarrow.binary(),
            pyarrow.large_binary(),
        ):
            return array.nbytes
        return compute.sum(compute.binary_length(array.dictionary).take(array.indices)).as_py() or 0
    if "dictionary<" in str(array.type):
        raise OSError(f"a column of type {str(array.type)[:80]} is not read: write its texts out")
    return array.nbytes


def elements(array: Any) -> int:
    """Return how many values an array of pyarrow has, those within its lists and structs included.
    Values that nothing refers to count too, since they are in memory."""
    import pyarrow

    kind = array.type
    if pyarrow.types.is_map(kind):
        inner = [array.keys, array.items]
    elif (
        pyarrow.types.is_list(kind)
        or pyarrow.types.is_large_list(kind)
        or pyarrow.types.is_fixed_size_list(kind)
    ):
        inner = [array.values]
    elif pyarrow.types.is_struct(kind):
        inner = [array.field(i) for i in range(kind.num_fields)]
    else:
        inner = []
    return len(array) + sum(map(elements, inner))
