"""Read the frames of TensorBoard's event files, also of damaged and half-written files.

A frame is the length of an event (8 bytes), the length's checksum (4), the event, and the event's
checksum (4).
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from gspo.io import untrusted

LENGTH_BYTES = 8
CHECKSUM_BYTES = 4
HEAD_BYTES = LENGTH_BYTES + CHECKSUM_BYTES


def events(file: Path, notes: list[str]) -> Iterator[bytes]:
    """Yield the events of a file whose checksums are right. Damage becomes a note.

    Raises ImportError without TensorBoard, and Unreadable if the file is too large or no plain
    file."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    content = untrusted.read_bytes(file, untrusted.MAX_ROWS_FILE_BYTES)

    def is_right(start: int, end: int) -> bool:
        (stored,) = struct.unpack_from("<I", content, end)
        return stored == masked_crc32c(content[start:end])

    begin = 0
    events_found = 0
    events_read = 0
    while begin + HEAD_BYTES <= len(content):
        (length,) = struct.unpack_from("<Q", content, begin)
        start = begin + HEAD_BYTES
        end = start + length
        # no event is empty, because each has a time
        is_cut = length == 0 or end + CHECKSUM_BYTES > len(content)
        # after a wrong length, no frame can be found
        if is_cut or not is_right(begin, begin + LENGTH_BYTES):
            break
        events_found += 1
        if is_right(start, end):
            events_read += 1
            yield content[start:end]
        begin = end + CHECKSUM_BYTES
    if begin < len(content):
        notes.append(f"{file}: cut or damaged at byte {begin}")
    if events_read < events_found:
        notes.append(f"{file}: damaged: {events_read} of {events_found} events are read")
