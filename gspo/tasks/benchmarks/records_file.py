"""Reads the records of a benchmark from a file, a folder or the hub.

Files are JSONL (also .jsonl.gz), JSON (a list) or Parquet. In a folder these files are read, in the
order of their names:

1. files whose names begin with the split ("test.jsonl", "test2.jsonl",
   "test-00000-of-00002.parquet") or have it as a word ("gsm_test.jsonl")
2. if there are none, files whose names have no split at all ("math500.jsonl")

If the folder has a subfolder with the name of the hub's subset ("main" of GSM8K), only this
subfolder is read. The Hugging Face hub needs the package datasets: pip install -e ".[hub]".

Every fault of a file raises a ValueError that names the setting, the file, the line and the key. A
file may come from an untrusted source. Its unpacked size is therefore bounded, and each record is
checked at once (gspo.tasks.benchmarks.data_row).
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.io.errors import SettingError
from gspo.tasks.benchmarks.data_row import DataRow, checked

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
SPLITS = ("train", "test", "validation", "val", "dev")
DESCRIPTIONS = ("dataset_infos.json", "dataset_dict.json")  # of a data set, without records
INSTALL = 'pip install -e ".[hub]"'
MAX_BYTES = 1 << 28  # of a line, of a JSON list, and of a batch of Parquet rows
MAX_LINES = 1 << 22  # of a file
# unpacked size / size of a compressed file; texts have 3 to 20
MAX_UNPACKING = 100
ALWAYS_ALLOWED_BYTES = 1 << 26  # unpacked size that any compressed file may have
PARQUET_BATCH_ROWS = 16  # rows in memory at a time
MAX_BATCH_VALUES = 1 << 22  # values in these rows, including the values within lists
MAX_ROW_GROUP_VALUES = 1 << 26  # pyarrow may decode all columns of a row group at once
# gzip raises these for a file that is cut off, damaged or not compressed
UNREADABLE = (OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class Source:
    """The source of records: a file or folder, or the hub if `path` is empty."""

    setting: str  # the name of the setting for messages, such as "task.path"
    path: str
    split: str  # chooses the files of a folder
    hub: str = ""  # a dataset's name, or files in one: "hf://datasets/OWNER/NAME/test*.jsonl"
    hub_config: str = ""
    hub_split: str = "test"
    hub_split_setting: str = ""  # the setting that chooses it, if there is one

    def rows(self) -> Iterator[DataRow]:
        """Yield the records in order, read one at a time."""
        if not self.path:
            yield from self._hub_rows()
            return
        for file in self.files():
            yield from file_rows(file)

    def files(self) -> list[Path]:
        """Return the files of the split. Raises ValueError if there are none."""
        path = Path(self.path).expanduser()
        if not path.exists():
            raise SettingError(
                self.setting, self.path, "there is no such file or folder", self._advice()
            )
        if path.is_file():
            if not path.name.lower().endswith(SUFFIXES):
                raise SettingError(
                    self.setting, self.path, f"its name must end in {', '.join(SUFFIXES)}"
                )
            return [path]
        if self.hub_config and (path / self.hub_config).is_dir():
            path = path / self.hub_config
        all_files = [file for file in sorted(path.rglob("*")) if _may_hold_records(file, path)]
        split_of = {file: _split_of(file.relative_to(path), self.split) for file in all_files}
        files = [file for file in all_files if split_of[file].startswith(self.split)]
        if not files:
            files = [file for file in all_files if not split_of[file]]
        if not files:
            raise SettingError(
                self.setting,
                self.path,
                f"no file for the split {self.split!r} in this folder: "
                f"{self.split}*.jsonl, .jsonl.gz or .parquet, or a folder {self.split}",
            )
        return files

    def _hub_rows(self) -> Iterator[DataRow]:
        if not self.hub:
            raise self._empty("no hub dataset is known")
        try:
            import datasets  # optional, an extra of the installation
        except ImportError:
            problem = f"the hub dataset {self.hub} needs the package datasets"
            raise self._empty(problem) from None
        try:
            if self.hub.startswith("hf://"):
                kind = "parquet" if self.hub.endswith(".parquet") else "json"
                records = datasets.load_dataset(kind, data_files=self.hub, split="train")
            else:
                records = datasets.load_dataset(
                    self.hub, self.hub_config or None, split=self.hub_split
                )
        # no network, no such dataset or split, or no access
        except (OSError, ValueError, RuntimeError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            problem = f"reading {self.hub} from the hub failed: {lines[0]}"
            if self.hub_split_setting:
                raise SettingError(
                    self.hub_split_setting,
                    self.hub_split,
                    problem,
                    f"choose a split that {self.hub} has, or give {self.setting}=FILE or FOLDER",
                ) from error
            raise self._empty(problem) from error
        for number, values in enumerate(records, 1):
            yield checked(f"{self.hub}, record {number}", values)

    def _empty(self, problem: str) -> SettingError:
        """Return the error of an empty path whose hub dataset cannot be read."""
        return SettingError(self.setting, "", f"is empty, and {problem}", self._advice())

    def _advice(self) -> str:
        advice = f"give {self.setting}=FILE or FOLDER"
        if self.hub:
            advice += f", or {INSTALL} and leave it empty to read {self.hub} from the hub"
        return advice


def _may_hold_records(file: Path, folder: Path) -> bool:
    """Return whether a file within a data set's folder may hold records, by its name."""
    is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    if is_hidden or file.name.lower() in DESCRIPTIONS or not file.is_file():
        return False
    return file.name.lower().endswith(SUFFIXES)


def _split_of(file: Path, wanted: str) -> str:
    """Return the name of a file, or of its nearest folder, that begins with a split's name.

    If there is none, it is the last word of the file's name that is a split's name, else "". `file`
    is relative to the dataset's folder."""
    splits = (wanted, *SPLITS)
    for name in reversed(file.parts):
        if name.startswith(splits):
            return name
    words = re.split(r"[^a-z]+", file.name.lower())
    return next((word for word in reversed(words) if word in splits), "")


def file_rows(path: Path) -> Iterator[DataRow]:
    """Yield the records of one file. Blank lines of JSONL are skipped.

    If the first line of a .json file is a record, the file is read as JSONL. Many published data
    sets have such files."""
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
    """Return whether the first line of a JSON file, without blank lines, is a record."""
    try:
        with BoundedFile(path) as file:
            for line in file.lines():
                text = line.removeprefix(codecs.BOM_UTF8).strip()
                if text:
                    return text.startswith(b"{") and text.endswith(b"}")
    except UNREADABLE:
        pass  # reading the records raises the error again
    return False


class BoundedFile:
    """A file's bytes, unpacked if it is compressed. Reading too many bytes raises OSError."""

    def __init__(self, path: Path):
        self.bytes_left = math.inf
        if path.suffix.lower() == ".gz":
            self.bytes_left = max(ALWAYS_ALLOWED_BYTES, MAX_UNPACKING * path.stat().st_size)
            self.file = gzip.open(path, "rb")  # noqa: SIM115, closed by __exit__
        else:
            self.file = path.open("rb")

    def __enter__(self) -> BoundedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines, split as bytes, because U+2028 in a text must not end a line."""
        for _ in range(MAX_LINES):
            line = self._bounded(self.file.readline, "a line")
            if not line:
                return
            yield line
        raise OSError(f"there are more than {MAX_LINES} lines")

    def read(self) -> bytes:
        """Return all bytes of the file."""
        return self._bounded(
            self.file.read, "one list; as .jsonl, with one record per line, it can be"
        )

    def _bounded(self, read: Callable[[int], bytes], unit: str) -> bytes:
        data = read(int(min(MAX_BYTES, self.bytes_left)) + 1)
        self.bytes_left -= len(data)
        if self.bytes_left < 0:
            raise OSError(
                f"it unpacks to more than {MAX_UNPACKING} times its size: "
                "unpack it, if that is meant"
            )
        if len(data) > MAX_BYTES:
            raise OSError(f"there are more than {MAX_BYTES} bytes in {unit}")
        return data


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with BoundedFile(path) as file:
            for number, line in enumerate(file.lines(), 1):
                if line.strip():
                    yield f"{path}, line {number}", _json(line, f"{path}, line {number}")
    except UNREADABLE as error:
        raise ValueError(f"{path}, after line {number}: cannot be read: {error}") from error


def _list(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with BoundedFile(path) as file:
            values = _json(file.read(), str(path))
    except UNREADABLE as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(values, list):
        raise ValueError(
            f"{path}: must hold a list of records, not {type(values).__name__}; "
            "one per line is .jsonl"
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
        bytes_left = max(MAX_BYTES, MAX_UNPACKING * path.stat().st_size)
        for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
            batch_bytes = sum(map(bytes_of, batch.columns))
            if batch_bytes > MAX_BYTES:
                raise OSError(
                    f"there are more than {MAX_BYTES} bytes in {PARQUET_BATCH_ROWS} records"
                )
            bytes_left -= batch_bytes
            if bytes_left < 0:
                raise OSError(
                    f"it unpacks to more than {MAX_UNPACKING} times its size: "
                    "if that is meant, write it as .jsonl"
                )
            if sum(map(count_values, batch.columns)) > MAX_BATCH_VALUES:
                raise OSError(
                    f"there are more than {MAX_BATCH_VALUES} values in {PARQUET_BATCH_ROWS} records"
                )
            try:
                records = batch.to_pylist()
            # a date before the year 1 or after 9999, for example
            except (ValueError, OverflowError) as error:
                raise OSError(
                    f"records {number + 1} to {number + len(batch)} hold a value that Python has "
                    f"no type for: {error}"
                ) from None
            for values in records:
                number += 1
                yield f"{path}, record {number}", values
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {error}") from error


def check_counts(metadata: Any) -> None:
    """Raise OSError if the metadata of a Parquet file announce too many values or bytes.

    A list of 4e8 nulls takes a few bytes in the file and gigabytes in memory."""
    if metadata.num_rows > MAX_LINES:
        raise OSError(f"there are more than {MAX_LINES} records")
    for group_index in range(metadata.num_row_groups):
        group = metadata.row_group(group_index)
        columns = [group.column(column_index) for column_index in range(group.num_columns)]
        values = sum(column.num_values for column in columns)
        if values > MAX_ROW_GROUP_VALUES:
            largest = max(columns, key=lambda column: column.num_values)
            raise OSError(
                f"a row group has {values} values, more than {MAX_ROW_GROUP_VALUES}, and most of "
                f"them are of {largest.path_in_schema}: write the file with smaller row groups, or "
                "without this column"
            )
        for column in columns:
            max_bytes = max(ALWAYS_ALLOWED_BYTES, MAX_UNPACKING * column.total_compressed_size)
            if column.total_uncompressed_size > max_bytes:
                raise OSError(
                    f"{column.path_in_schema} unpacks to more than {MAX_UNPACKING} times its size"
                )


def bytes_of(array: Any) -> int:
    """Return the number of bytes that the values of a pyarrow array have in Python.

    A text that a dictionary holds once counts for each row that refers to it. Raises OSError for
    dictionaries within lists or structs."""
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_dictionary(array.type):
        texts = (pyarrow.string(), pyarrow.large_string())
        binaries = (pyarrow.binary(), pyarrow.large_binary())
        if array.type.value_type not in (*texts, *binaries):
            return array.nbytes
        # pyarrow makes its functions such as compute.sum at import, so type checkers do not see
        # them
        sizes = compute.call_function("binary_length", [array.dictionary])
        return compute.call_function("sum", [sizes.take(array.indices)]).as_py() or 0
    if "dictionary<" in str(array.type):
        raise OSError(f"a column of type {str(array.type)[:80]} is not read: write its texts out")
    return array.nbytes


def count_values(array: Any) -> int:
    """Return the number of values of a pyarrow array, including those in its lists and structs.

    Values without a reference count too, because they are in memory."""
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
    return len(array) + sum(map(count_values, inner))
