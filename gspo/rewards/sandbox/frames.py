"""Messages between the harness and a confined program: JSON objects of limited size.

    frame = 4 bytes, big-endian: length of the rest   |   one JSON object, UTF-8

Neither end trusts the other's length and content. This module uses the standard library only, since
both ends import it.
"""

import json
import os
import struct
from dataclasses import dataclass, field
from typing import Any

HEADER = struct.Struct(">I")
MAX_TO_CHILD_BYTES = 1 << 26  # of a message to a program, which holds its arguments


class ProtocolError(Exception):
    """Raised for bytes that are not a frame: not JSON, not an object, or cut off in the middle."""


class TooLong(ProtocolError):
    """Raised for a frame that announces more bytes than allowed."""


def encode(message: dict[str, Any], limit: int = MAX_TO_CHILD_BYTES) -> bytes:
    """Return the frame of a message.

    Raises TooLong beyond `limit` bytes, and ValueError or TypeError if it is not JSON."""
    # ASCII keeps lone surrogates escaped
    body = json.dumps(message, allow_nan=False).encode("ascii")
    if len(body) > limit:
        raise TooLong(f"a message of {len(body)} bytes; at most {limit}")
    return HEADER.pack(len(body)) + body


@dataclass
class FrameDecoder:
    """A buffer that cuts a stream of bytes into messages."""

    limit: int
    buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> None:
        self.buffer += data

    def message(self) -> dict[str, Any] | None:
        """Return the next whole message, or None if more bytes are needed.

        Raises ProtocolError or TooLong.
        """
        if len(self.buffer) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self.buffer)
        if length > self.limit:
            raise TooLong(f"a frame of {length} bytes; at most {self.limit}")
        end = HEADER.size + length
        if len(self.buffer) < end:
            return None
        body = bytes(self.buffer[HEADER.size : end])
        del self.buffer[:end]
        return _parse(body)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body.decode("utf-8"), parse_constant=_refuse)
    # bad UTF-8, bad JSON, integers of more than 4300 digits, or deep nesting
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise ProtocolError("not an object")
    return message


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


class Channel:
    """The program's side: blocking reads and writes of frames on a file descriptor."""

    def __init__(
        self, fd: int, write_limit: int = 1 << 20, read_limit: int = MAX_TO_CHILD_BYTES
    ) -> None:
        self.fd = fd
        self.write_limit = write_limit
        self.decoder = FrameDecoder(read_limit)

    def write(self, message: dict[str, Any]) -> None:
        """Send one message. If it is too long, tell the other end so and raise TooLong."""
        try:
            data = memoryview(encode(message, self.write_limit))
        except TooLong:
            os.write(self.fd, HEADER.pack(0xFFFFFFFF))
            raise
        while data:
            written_bytes = os.write(self.fd, data)
            data = data[written_bytes:]

    def read(self) -> dict[str, Any] | None:
        """Return the next message, or None at the end of the stream.

        Raises ProtocolError, also if the stream ends inside a frame."""
        message = self.decoder.message()
        while message is None:
            data = os.read(self.fd, 1 << 16)
            if not data:
                if self.decoder.buffer:
                    raise ProtocolError("the stream ended inside a frame")
                return None
            self.decoder.feed(data)
            message = self.decoder.message()
        return message

    def read_first(self) -> dict[str, Any]:
        """Return the first message. Raises ProtocolError if there is none."""
        message = self.read()
        if message is None:
            raise ProtocolError("the stream ended before the first message")
        return message

    def close(self) -> None:
        os.close(self.fd)
