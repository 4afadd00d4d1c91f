"""Read the frames of TensorBoard's event files, also of damaged and half-written files.

A frame is the length of an event (8 bytes), the length's checksum (4), the event, and the event's
checksum (4). TensorBoard computes the checksums in pure Python, which takes minutes for a million
events. Here numpy computes those of many events at once.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gspo.io import untrusted

LENGTH_BYTES = 8
CHECKSUM_BYTES = 4
HEAD_BYTES = LENGTH_BYTES + CHECKSUM_BYTES
# CRC-32C (Castagnoli), and the mask that TensorBoard puts on it
POLYNOMIAL = 0x82F63B78
MASK = 0xA282EAD8
BITS = 0xFFFFFFFF
CHUNK = 1 << 16  # events whose checksums are computed at once
MAX_COLUMN_BYTES = 4096  # longer events are checked one by one


def events(file: Path, notes: list[str]) -> Iterator[bytes]:
    """Yield the events of a file whose checksums are right. Damage becomes a note.

    Raises Unreadable if the file is too large or no plain file."""
    content = untrusted.read_bytes(file, untrusted.MAX_ROWS_FILE_BYTES)
    starts, lengths, end = _frames(content)
    if end < len(content):
        notes.append(f"{file}: cut or damaged at byte {end}")
    right = _are_right(content, starts, lengths)
    if not right.all():
        notes.append(f"{file}: damaged: {int(right.sum())} of {len(right)} events are read")
    for start, length in zip(starts[right].tolist(), lengths[right].tolist(), strict=True):
        yield content[start : start + length]


def _frames(content: bytes) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the starts and lengths of the events, and the end of the last complete frame."""
    starts = []
    lengths = []
    position = 0
    while position + HEAD_BYTES <= len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        end = position + HEAD_BYTES + length + CHECKSUM_BYTES
        # no event is empty, because each has a time
        if length == 0 or end > len(content):
            break
        starts.append(position + HEAD_BYTES)
        lengths.append(length)
        position = end
    all_starts = np.array(starts, dtype=np.int64)
    all_lengths = np.array(lengths, dtype=np.int64)
    # after a wrong length, no frame can be found
    heads = np.full(len(starts), LENGTH_BYTES, dtype=np.int64)
    wrong = np.flatnonzero(~_are_right(content, all_starts - HEAD_BYTES, heads))
    if len(wrong):
        position = starts[wrong[0]] - HEAD_BYTES
        all_starts = all_starts[: wrong[0]]
        all_lengths = all_lengths[: wrong[0]]
    return all_starts, all_lengths, position


def _are_right(content: bytes, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return for each part of the content whether the checksum that follows it is right."""
    data = np.frombuffer(content, dtype=np.uint8)
    right = np.zeros(len(starts), dtype=bool)
    order = np.argsort(-lengths, kind="stable")
    for begin in range(0, len(order), CHUNK):
        chunk = order[begin : begin + CHUNK]
        ends = starts[chunk] + lengths[chunk]
        stored = np.zeros(len(chunk), dtype=np.uint32)
        for byte in range(CHECKSUM_BYTES):
            stored |= data[ends + byte].astype(np.uint32) << np.uint32(8 * byte)
        right[chunk] = stored == _checksums(content, data, starts[chunk], lengths[chunk])
    return right


def _checksums(
    content: bytes, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Return the masked CRC-32C of parts of the content, which are sorted from long to short."""
    registers = np.full(len(starts), BITS, dtype=np.uint32)
    long_parts = int((lengths > MAX_COLUMN_BYTES).sum())
    for index in range(long_parts):
        part = content[starts[index] : starts[index] + lengths[index]]
        registers[index] = _register(part)
    starts = starts[long_parts:]
    lengths = lengths[long_parts:]
    columns = registers[long_parts:]
    for position in range(int(lengths.max(initial=0))):
        active = int((lengths > position).sum())
        keys = (columns[:active] ^ data[starts[:active] + position]) & np.uint32(0xFF)
        columns[:active] = TABLE[keys] ^ (columns[:active] >> np.uint32(8))
    checksums = registers ^ np.uint32(BITS)
    rotated = (checksums >> np.uint32(15)) | (checksums << np.uint32(17))
    return rotated + np.uint32(MASK)


def _register(part: bytes) -> int:
    register = BITS
    for byte in part:
        register = TABLE_LIST[(register ^ byte) & 0xFF] ^ (register >> 8)
    return register


def _table() -> list[int]:
    """Return the CRC-32C of each byte."""
    table = []
    for byte in range(256):
        register = byte
        for _ in range(8):
            register = (register >> 1) ^ (POLYNOMIAL if register & 1 else 0)
        table.append(register)
    return table


TABLE_LIST = _table()
TABLE = np.array(TABLE_LIST, dtype=np.uint32)
