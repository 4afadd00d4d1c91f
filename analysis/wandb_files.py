"""Read runs from W&B's offline files, also damaged and half-written ones: what can be read is read,
the rest noted.

A `.wandb` file has 7 bytes of header (":W&B", 0xBEE1, version 0), then blocks of 32 KiB in
LevelDB's log format. These hold records of (CRC-32 of type and payload, length, type) and a
payload; a payload that crosses a block is cut into FIRST, MIDDLE and LAST. The payloads are W&B's
protobuf messages. A resumed run has a file per segment, whose rows are joined by our `step`.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gspo.io import untrusted

BLOCK, HEADER = 32768, 7
SCORE = "score"
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
# the checksum covers the type too
STARTED = {kind: zlib.crc32(bytes([kind])) for kind in (FULL, FIRST, MIDDLE, LAST)}


@dataclass
class Segment:
    """What one file holds."""

    path: Path
    id: str = ""
    name: str = ""
    job: str = "train"
    config: dict[str, object] = field(default_factory=dict)
    rows: dict[int, dict[str, float]] = field(default_factory=dict)  # by step: numbers alone
    damage: list[str] = field(default_factory=list)


def payloads(data: bytes, damage: list[str]) -> Iterator[bytes]:
    """Yield the payloads that are whole. After damage, reading goes on with the next block, as in
    LevelDB.
    """
    if len(data) < HEADER or struct.unpack_from("<4sHB", data) != (b":W&B", 0xBEE1, 0):
        damage.append("no W&B file, or its first bytes are damaged")
        return
    position, parts = HEADER, None
    while position < len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:  # the end of a block is left empty
            position += left
            continue
        if len(data) - position < HEADER:
            damage.append(f"cut at byte {position}")
            return
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        end = position + HEADER + length
        fits = kind in STARTED and length <= left - HEADER
        if fits and end > len(data):
            damage.append(f"cut at byte {position}")
            return
        body = data[position + HEADER : end]
        if not fits or zlib.crc32(body, STARTED[kind]) != checksum:
            damage.append(f"damaged at byte {position}")
            parts, position = None, position + left
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
    """Read one file. Neither its content nor its kind raises an exception; what is wrong becomes a
    note.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # imported here because wandb takes a second

    segment, ended, names = Segment(path), False, {"step"}
    try:
        content = untrusted.read_bytes(path, untrusted.MAX_ROWS_FILE_BYTES)
    except (OSError, untrusted.Unreadable) as error:
        segment.damage.append(str(error))
        return segment
    for payload in payloads(content, segment.damage):
        record = Record()
        try:
            record.ParseFromString(payload)
        except DecodeError:
            segment.damage.append("a record that is not W&B's")
            continue
        kind = record.WhichOneof("record_type")
        if kind == "run":
            segment.id, segment.name = record.run.run_id, record.run.display_name
            segment.job = record.run.job_type or segment.job
            segment.config |= _values(record.run.config.update, segment.damage)
        elif kind == "config":
            segment.config |= _values(record.config.update, segment.damage)
        elif kind == "exit":
            ended = True
        elif kind == "history":
            # others are parts of tables
            plain = [item for item in record.history.item if len(item.nested_key) < 2]
            row = _values(plain, segment.damage)
            step = row.pop("step", None)
            if untrusted.is_step(step):
                segment.rows.setdefault(step, {}).update(numbers(row))
                names |= segment.rows[step].keys()
                if len(segment.rows) * len(names) > untrusted.MAX_CELLS:
                    segment.rows = {}
                    segment.damage.append(
                        f"its rows make a table of more than {untrusted.MAX_CELLS:,} cells"
                    )
                    break
    named = segment.name if may_be_a_name(segment.name) else ""
    # WANDB_NAME may have replaced the display name
    segment.name = recorded_name(segment.config) or named
    segment.config.pop("_wandb", None)
    if not ended:
        segment.damage.append("has no end: it is being written, or was killed, or cut")
    return segment


def _values(items: Iterable, damage: list[str]) -> dict[str, object]:
    """Return the keys and values of a record; W&B writes each value as JSON."""
    keys = [item.key or "/".join(item.nested_key) for item in items]
    try:
        values = untrusted.parse_json("[" + ",".join(item.value_json for item in items) + "]")
        return dict(zip(keys, values, strict=True))
    except ValueError:
        damage.append(f"a value that is not JSON, among {', '.join(keys[:3])} ...")
        return {}


def recorded_name(config: dict[str, object]) -> str:
    """Remove the run directory's name from the configuration, which holds it beside the settings,
    and return it.
    """
    record = config.pop("record", None)
    name = record.get("run") if isinstance(record, dict) else None
    return name if isinstance(name, str) and may_be_a_name(name) else ""


def may_be_a_name(text: str) -> bool:
    """Return whether a file or folder could have this name; with any other, every question about
    the path fails.
    """
    return (
        len(text.encode(errors="replace")) <= 255
        and "\0" not in text
        and not untrusted.SURROGATES.search(text)
    )


def numbers(row: dict[str, object]) -> dict[str, float]:
    """Return a row without W&B's own keys, tables and the run's score so far, which metrics.jsonl
    does not have; values that are not finite become NaN."""
    own = {key: value for key, value in row.items() if key[:1] != "_" and key != SCORE}
    kept = {
        key: untrusted.finite(value) for key, value in own.items() if untrusted.is_number(value)
    }
    return {key: math.nan if value is None else value for key, value in kept.items()}
