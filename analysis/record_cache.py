"""A run as it was recorded, and the cache of such records in the user's cache folder.

A copy in the cache is a Parquet file. It counts until the stamp of its source changes.
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from gspo.io.files import replace_bytes

CACHE_KEY = b"gspo.2"  # of the metadata in a cache file; the number is that of its form


@dataclass
class Record:
    """A run as recorded: its settings, a row per step, and notes on damage.

    The settings are flat, as in {"optim.lr": 0.001}.
    """

    path: Path
    settings: dict[str, object]
    rows: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    id: str = ""  # W&B's
    job: str = "train"  # its job type at W&B; NOT_TRAINED names the types that are no training


def cached(
    name: str,
    stamp: list,
    read: Callable[..., Record],
    source: object,
) -> Record:
    """Return the record that `read` makes of a source, or its copy in the cache."""
    record = cached_copy(name, stamp)
    if record is None:
        record = read(source)
        keep(record, name, stamp)
    return record


def _cache_file(name: str) -> Path:
    """Return the cache file of a source, in the user's cache folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()
    return Path(folder) / "gspo" / f"{digest[:20]}.parquet"


def cached_copy(name: str, stamp: list) -> Record | None:
    """Return a source's record from the cache, None if there is none or the stamp has changed."""
    try:
        table = parquet.read_table(_cache_file(name))
        about = json.loads(table.schema.metadata[CACHE_KEY])
        if about.pop("stamp") == stamp:
            about["path"] = Path(about["path"])
            return Record(rows=table.to_pandas(), **about)
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException):
        pass  # there is none yet, or it is damaged or of another form, so it is read again
    return None


def keep(record: Record, name: str, stamp: list) -> None:
    """Put a record with rows into the cache. If the folder cannot be written, only time is lost."""
    if not len(record.rows):
        return
    file = _cache_file(name)
    about = vars(record) | {"stamp": stamp, "path": str(record.path)}
    rows = about.pop("rows")
    table = pa.Table.from_pandas(rows, preserve_index=False)
    metadata = dict(table.schema.metadata or {})
    metadata[CACHE_KEY] = json.dumps(about, default=str)
    table = table.replace_schema_metadata(metadata)
    content = io.BytesIO()
    parquet.write_table(table, content, compression="zstd")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(file, content.getvalue())
