"""Read runs from W&B's offline files, also from damaged and half-written files.

Unreadable parts become notes. A `.wandb` file has 7 bytes of header (":W&B", 0xBEE1, version 0),
then blocks of 32 KiB in LevelDB's log format. These hold records of (CRC-32 of type and payload,
length, type) and a payload. A payload that crosses a block is cut into FIRST, MIDDLE and LAST. The
payloads are W&B's protobuf messages. A resumed run has a file per segment, whose rows are joined by
our `step`. The records of other frameworks' runs are left as they are (foreign_files.py).
"""

import math
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gspo.io import untrusted

BLOCK_BYTES = 32768
HEADER_BYTES = 7  # of the file, and of a record
SCORE = "score"
FULL = 1
FIRST = 2
MIDDLE = 3
LAST = 4
# the checksum covers the type too: its value after the type, to which the payload is added
TYPE_CHECKSUMS = {kind: zlib.crc32(bytes([kind])) for kind in (FULL, FIRST, MIDDLE, LAST)}
MAX_NAME_BYTES = 255  # of a file


@dataclass
class Segment:
    """The content of a file."""

    path: Path
    id: str = ""
    name: str = ""
    job: str = "train"
    config: dict[str, object] = field(default_factory=dict)
    rows: dict[int, dict[str, float]] = field(default_factory=dict)  # numbers by step, of our runs
    # the history as it is written, of runs of other frameworks
    records: list[dict[str, object]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=lambda: {"step"})
    without_step: int = 0  # records of ours that were left out
    overwritten: int = 0  # numbers of ours that a later record of the same step replaced

    def add(self, row: dict[str, object]) -> None:
        """Take in a record of the history. Raises Unreadable if there are too many."""
        if not is_ours(self.config):
            self.names |= row.keys()
            self.records.append(row)
            untrusted.check_table(self.path, len(self.records), len(self.names), 0)
            return
        step = row.pop("step", None)
        metrics = numbers(row)
        if not untrusted.is_step(step):
            self.without_step += bool(metrics)
            return
        earlier = self.rows.setdefault(step, {})
        self.overwritten += sum(name in earlier for name in metrics)
        earlier.update(metrics)
        self.names |= earlier.keys()
        if len(self.rows) * len(self.names) > untrusted.MAX_CELLS:
            raise untrusted.Unreadable(
                f"its rows make a table of more than {untrusted.MAX_CELLS:,} cells"
            )


def payloads(data: bytes, damage: list[str]) -> Iterator[bytes]:
    """Yield the complete payloads. After damage, reading goes on with the next block."""
    if len(data) < HEADER_BYTES or struct.unpack_from("<4sHB", data) != (b":W&B", 0xBEE1, 0):
        damage.append("no W&B file, or its first bytes are damaged")
        return
    position = HEADER_BYTES
    parts = None  # of a payload that has begun
    while position < len(data):
        block_rest = BLOCK_BYTES - position % BLOCK_BYTES
        if block_rest < HEADER_BYTES:  # the end of a block is left empty
            position += block_rest
            continue
        if len(data) - position < HEADER_BYTES:
            damage.append(f"cut at byte {position}")
            return
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        end = position + HEADER_BYTES + length
        fits = kind in TYPE_CHECKSUMS and length <= block_rest - HEADER_BYTES
        if fits and end > len(data):
            damage.append(f"cut at byte {position}")
            return
        body = data[position + HEADER_BYTES : end]
        if not fits or zlib.crc32(body, TYPE_CHECKSUMS[kind]) != checksum:
            damage.append(f"damaged at byte {position}")
            parts = None
            position += block_rest
            continue
        position = end
        if kind in (FULL, FIRST):
            parts = [body]
        elif parts is not None:
            parts.append(body)
        if kind in (FULL, LAST) and parts is not None:
            yield b"".join(parts)
            parts = None


def read(path: Path) -> Segment:
    """Read a file. Nothing in it raises; damage becomes a note."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # imported here because wandb takes a second

    segment = Segment(path)
    try:
        content = untrusted.read_bytes(path, untrusted.MAX_ROWS_FILE_BYTES)
    except (OSError, untrusted.Unreadable) as error:
        segment.damage.append(str(error))
        return segment
    ended = False
    for payload in payloads(content, segment.damage):
        record = Record()
        try:
            record.ParseFromString(payload)
        except DecodeError:
            segment.damage.append("a record that is not W&B's")
            continue
        kind = record.WhichOneof("record_type")
        if kind == "run":
            segment.id = record.run.run_id
            segment.name = record.run.display_name
            segment.job = record.run.job_type or segment.job
            segment.config |= _values(record.run.config.update, segment.damage)
        elif kind == "config":
            segment.config |= _values(record.config.update, segment.damage)
        elif kind == "exit":
            ended = True
        elif kind == "history":
            items = record.history.item
            # tables, pictures and the like are mappings with a type
            typed = {item.nested_key[0] for item in items if "_type" in item.nested_key}
            kept = [item for item in items if item.key or not typed & set(item.nested_key[:1])]
            try:
                segment.add(_values(kept, segment.damage))
            except untrusted.Unreadable as error:
                segment.rows = {}
                segment.records = []
                segment.damage.append(str(error))
                break
    if segment.without_step:
        segment.damage.append(f"left out: {segment.without_step} records without a step")
    if segment.overwritten:
        segment.damage.append(
            f"{segment.overwritten} numbers were written twice for a step: the last ones count"
        )
    display_name = segment.name if may_be_a_name(segment.name) else ""
    # WANDB_NAME may have replaced the display name
    segment.name = recorded_name(segment.config) or display_name
    segment.config.pop("_wandb", None)
    if not ended:
        segment.damage.append("has no end: it is being written, or was killed, or cut")
    return segment


def _values(items: Iterable, damage: list[str]) -> dict[str, object]:
    """Return the keys and values of a record; W&B writes each value as JSON."""
    # W&B's server joins the keys of a mapping in the same way
    keys = [item.key or ".".join(item.nested_key) for item in items]
    try:
        values = untrusted.parse_json("[" + ",".join(item.value_json for item in items) + "]")
        return dict(zip(keys, values, strict=True))
    except ValueError:
        damage.append(f"a value that is not JSON, among {', '.join(keys[:3])} ...")
        return {}


def is_ours(config: dict[str, object]) -> bool:
    """Return whether a configuration is that of a run of this repository."""
    record = config.get("record")
    objective = config.get("objective")
    if isinstance(record, dict) and "run" in record:
        return True
    return isinstance(objective, dict) and "name" in objective and "steps" in config


def recorded_name(config: dict[str, object]) -> str:
    """Remove the run directory's name from the configuration, and return it."""
    record = config.pop("record", None)
    name = record.get("run") if isinstance(record, dict) else None
    return name if isinstance(name, str) and may_be_a_name(name) else ""


def may_be_a_name(text: str) -> bool:
    """Return whether a file or folder could have this name.

    With any other name, every system call on the path fails.
    """
    short_enough = len(text.encode(errors="replace")) <= MAX_NAME_BYTES
    return short_enough and "\0" not in text and not untrusted.SURROGATES.search(text)


def numbers(row: dict[str, object]) -> dict[str, float]:
    """Return the metrics of a row that metrics.jsonl has too; infinite values become NaN.

    W&B's own keys, tables and the run's score so far are left out.
    """
    values = {}
    for key, value in row.items():
        if key[:1] != "_" and key != SCORE and untrusted.is_number(value):
            number = untrusted.finite(value)
            values[key] = math.nan if number is None else number
    return values
