"""One running program as the harness sees it: messages, allowances, and how it ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gspo.rewards.sandbox.frames import Decoder, ProtocolError, TooLong, encode
from gspo.rewards.sandbox.launch import SILENCE_SECONDS, Server, ServerFailure, readable
from gspo.rewards.sandbox.stdin import MEMORY_SIGNAL

REPORTS = ("exit", "timeout", "killed")
SHARED = 0.02  # exchanges in a row may share allowances up to this share of cpu_seconds
# most seconds for a server to report the end of a child that it was told to kill
END_SECONDS = 30.0


@dataclass(frozen=True)
class Limits:
    """What one program may use. The allowances of CPU time and waiting are per exchange (a test
    case); CPU time is also limited in all."""

    cpu_seconds: float = 2.0  # CPU time, so that the load of the machine does not matter
    total_cpu_seconds: float = 30.0
    wall_seconds: float = 10.0  # time in which no thread was running or ready to run
    memory_mb: int = 512  # the address space
    output_bytes: int = 1 << 20  # most bytes of standard output, and of one message

    def __post_init__(self) -> None:
        for name, low, high in (
            ("cpu_seconds", 0.01, 3600),
            ("total_cpu_seconds", self.cpu_seconds, 36000),
            ("wall_seconds", 0.05, 3600),
            ("memory_mb", 64, 1 << 20),
            ("output_bytes", 256, 1 << 28),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)}: {low} to {high}")


@dataclass(frozen=True)
class Ended:
    """How a program ended. why: exit | timeout | memory | output-limit | sandbox-error | protocol |
    compile-error.
    """

    why: str
    code: int = 0  # the exit status, or minus the signal
    cpu_seconds: float = 0.0
    memory_mb: float = 0.0
    waited: bool = False  # whether a timeout was by waiting, not by computing
    detail: str = ""  # a note on a sandbox error or a breach of protocol


class Session:
    """A child and the two sockets to it: its own channel, and the fork server's control."""

    def __init__(self, server: Server, kind: str, files: list[int], limits: Limits) -> None:
        self.server, self.limits = server, limits
        self.ended: Ended | None = None
        self.surprised = False  # whether the server should be replaced
        self._ready = self._paused = False
        self._renewed = time.monotonic()
        self._out = bytearray()
        self._decoder = Decoder(limits.output_bytes)
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        try:
            server.begin(kind, asdict(limits), [theirs.fileno(), *files])
        except ServerFailure:
            self._channel.close()
            raise
        finally:
            theirs.close()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; it goes out with the next exchange."""
        self._out += encode(message)

    def exchange(
        self, message: dict[str, Any] | None, pause: bool = True
    ) -> dict[str, Any] | Ended:
        """Renew the allowances, send the message (if any), and wait for one message or the
        program's end.

        A message that came before it was asked for breaks the protocol. `pause` says that we have
        something else to do before the next exchange, so the program's waiting does not count until
        then. Without it, exchanges that follow within a fiftieth of the CPU allowance share it,
        which spares the server two wake-ups each.
        """
        if self.ended is not None:
            return self.ended
        if (
            self._ready
            and message is not None
            and (self._decoder.buffer or readable(self._channel, 0))
        ):
            return self._unasked()
        if message is not None:
            self.send(message)
        now = time.monotonic()
        if self._ready and (self._paused or now - self._renewed > SHARED * self.limits.cpu_seconds):
            self.server.say(b"r")
            self._renewed, self._paused = now, False
        try:
            reply = self._next_message()
        except TooLong as error:
            return self._refuse("output-limit", str(error))
        except ProtocolError as error:
            return self._refuse("protocol", str(error))
        if reply is None:
            return self._wait()
        if pause:
            self.server.say(b"p")
            self._paused = True
        return reply

    def wait(self) -> Ended:
        """Renew the allowances and wait for the program's end; what it still sends is ignored."""
        if self.ended is None:
            self.server.say(b"r")
        return self._wait()

    def _wait(self) -> Ended:
        silent = time.monotonic() + SILENCE_SECONDS
        while self.ended is None:
            if readable(self.server.control, silent - time.monotonic()):
                self._hear()
                silent = time.monotonic() + SILENCE_SECONDS
            else:
                self._fail("the fork server is silent")
        return self.ended

    def close(self) -> None:
        """Kill the program if it still runs."""
        if self.ended is None:
            self._kill()
        self._channel.close()

    def _next_message(self) -> dict[str, Any] | None:
        """Return the program's next message, or None at the end of its channel or of the program."""
        channel, control = self._channel.fileno(), self.server.control.fileno()
        poll = select.poll()
        poll.register(control, select.POLLIN)
        silent = time.monotonic() + SILENCE_SECONDS
        while True:
            if (message := self._decoder.message()) is not None:
                if self._ready:
                    return message
                self._ready = message == {"ready": True}
                if not self._ready:
                    return self._fail(str(message.get("failed", "no word")))
                continue
            poll.register(channel, select.POLLIN | (select.POLLOUT if self._out else 0))
            events = dict(poll.poll(max(0.0, 1000 * (silent - time.monotonic()))))
            if not events:
                return self._fail("the fork server is silent")
            if control in events:
                silent = time.monotonic() + SILENCE_SECONDS
                self._hear()
            open_still = channel not in events or self._transfer(events[channel])
            if not open_still and self.ended is None:
                return None
            if self.ended is not None and not (
                open_still and events.get(channel, 0) & select.POLLIN
            ):
                return self._decoder.message() if self._ready else None

    def _transfer(self, event: int) -> bool:
        """Move bytes both ways. Returns False at the end of the channel."""
        try:
            if event & select.POLLOUT and self._out:
                del self._out[: self._channel.send(self._out)]
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = self._channel.recv(1 << 18)
                self._decoder.feed(data)
                return bool(data)
        except BlockingIOError:
            return True
        except OSError:  # the program closed its end of the channel
            return False
        return True

    def _hear(self) -> None:
        try:
            report = self.server.hear()
        except ServerFailure as error:
            self._fail(str(error))
            return
        if report is None:
            return
        if report.get("why") not in REPORTS:
            self._fail("the fork server says what it cannot know")
        else:
            self.ended = self._judge(report)

    def _judge(self, report: dict[str, Any]) -> Ended:
        """Return the server's report in the words of Ended."""
        code = os.waitstatus_to_exitcode(report["status"])
        why, cpu, memory = report["why"], report["cpu"], report["memory_mb"]
        if (
            why == "exit"
            and not self._ready
            and not self._decoder.buffer
            and not readable(self._channel, 0)
        ):
            return Ended(
                "sandbox-error",
                code,
                cpu,
                memory,
                detail="the child ended before the program had its turn",
            )
        if why == "exit":
            if code == -MEMORY_SIGNAL or (
                code == -signal.SIGKILL and memory >= 0.9 * self.limits.memory_mb
            ):
                why = "memory"
            elif code == -signal.SIGXFSZ:
                why = "output-limit"
            elif (
                code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu >= self.limits.total_cpu_seconds
            ):
                why = "timeout"
        return Ended(why, code, cpu, memory, waited=report["waited"])

    def _unasked(self) -> Ended:
        """Handle data that came before the question: either the program has ended (and there is no
        data), or it breaks the protocol."""
        try:
            data = bool(self._decoder.buffer) or self._channel.recv(1) != b""
        except OSError:
            data = False
        return self._refuse("protocol", "a message that nobody asked for") if data else self._wait()

    def _refuse(self, why: str, detail: str) -> Ended:
        self._kill()
        spent = self.ended
        self.ended = Ended(why, spent.code, spent.cpu_seconds, spent.memory_mb, detail=detail)
        return self.ended

    def _fail(self, detail: str) -> None:
        self.surprised = True
        self.ended = Ended("sandbox-error", detail=detail)

    def _kill(self) -> None:
        self.server.say(b"k")
        deadline = time.monotonic() + END_SECONDS
        while self.ended is None:
            if readable(self.server.control, deadline - time.monotonic()):
                self._hear()
            else:
                self._fail("the fork server does not answer")


@contextlib.contextmanager
def memory_file(content: bytes | None) -> Iterator[int]:
    """Yield a file in memory to read `content` from or, with None, an empty one to write; a
    temporary file where there is no such."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        if content is not None:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            os.lseek(fd, 0, os.SEEK_SET)
            _seal(fd)
        yield fd
    finally:
        os.close(fd)


def _seal(fd: int) -> None:
    """Make sure that nobody can change the file any more."""
    if hasattr(os, "memfd_create"):
        import fcntl  # not available on every system

        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        )


def read_bounded(fd: int, limit: int) -> bytes:
    """Return the first `limit` bytes of a file."""
    parts, at = [], 0
    while at < limit and (part := os.pread(fd, limit - at, at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)
