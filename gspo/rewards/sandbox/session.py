"""One running program from the harness's side: messages, allowances, and how it ended."""

import contextlib
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from typing import Any

from gspo.rewards.sandbox.frames import FrameDecoder, ProtocolError, TooLong, encode
from gspo.rewards.sandbox.launch import SILENCE_SECONDS, ForkServer, ServerFailure, readable
from gspo.rewards.sandbox.stdin import MEMORY_SIGNAL

REPORTS = ("exit", "timeout", "killed")
# exchanges in a row may share allowances for up to this share of cpu_seconds
SHARED_FRACTION = 0.02
# the server must report within this time the end of a child that it was told to kill
MAX_KILL_SECONDS = 30.0


@dataclass(frozen=True)
class Limits:
    """The limits of one program.

    The allowances of CPU time and waiting are per exchange (a test case). CPU time is also limited
    in all."""

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
class ProgramEnd:
    """How a program ended.

    `why` is exit, timeout, memory, output-limit, sandbox-error, protocol or compile-error.
    """

    why: str
    code: int = 0  # the exit status, or minus the signal
    cpu_seconds: float = 0.0
    memory_mb: float = 0.0
    waited: bool = False  # whether a timeout was by waiting, not by computing
    detail: str = ""  # a note on a sandbox error or a breach of protocol


class ProgramSession:
    """A child and the two sockets to it: its own channel, and the fork server's control."""

    def __init__(self, server: ForkServer, kind: str, files: list[int], limits: Limits) -> None:
        self.server = server
        self.limits = limits
        self.ended: ProgramEnd | None = None
        self.server_failed = False  # whether the server should be replaced
        self._ready = False  # whether the child has said that it is confined
        self._paused = False
        self._renewed = time.monotonic()
        self._unsent = bytearray()
        self._decoder = FrameDecoder(limits.output_bytes)
        self._channel, child_socket = socket.socketpair()
        self._channel.setblocking(False)
        try:
            server.begin(kind, asdict(limits), [child_socket.fileno(), *files])
        except ServerFailure:
            self._channel.close()
            raise
        finally:
            child_socket.close()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message, which goes out with the next exchange."""
        self._unsent += encode(message)

    def exchange(
        self, message: dict[str, Any] | None, pause: bool = True
    ) -> dict[str, Any] | ProgramEnd:
        """Renew the allowances, send the message, and wait for a message or the program's end.

        A message that came before it was asked for breaks the protocol. With `message=None` nothing
        is sent. With `pause` the program's waiting does not count until the next exchange. Without
        it, exchanges that follow within a fiftieth of the CPU allowance share it, which spares the
        server two wake-ups each.
        """
        if self.ended is not None:
            return self.ended
        if message is not None:
            if self._ready and (self._decoder.buffer or readable(self._channel, 0)):
                return self._handle_early_data()
            self.send(message)
        now = time.monotonic()
        allowances_used = now - self._renewed > SHARED_FRACTION * self.limits.cpu_seconds
        if self._ready and (self._paused or allowances_used):
            self.server.send_command(b"r")
            self._renewed = now
            self._paused = False
        try:
            reply = self._next_message()
        except TooLong as error:
            return self._end_with("output-limit", str(error))
        except ProtocolError as error:
            return self._end_with("protocol", str(error))
        if reply is None:
            return self._wait()
        if pause:
            self.server.send_command(b"p")
            self._paused = True
        return reply

    def wait(self) -> ProgramEnd:
        """Renew the allowances and wait for the program's end, ignoring all that it sends."""
        if self.ended is None:
            self.server.send_command(b"r")
        return self._wait()

    def _wait(self) -> ProgramEnd:
        while self.ended is None:
            if readable(self.server.control, SILENCE_SECONDS):
                self._receive_report()
            else:
                self._fail("the fork server is silent")
        return self.ended

    def close(self) -> None:
        """Kill the program if it still runs."""
        if self.ended is None:
            self._kill()
        self._channel.close()

    def _next_message(self) -> dict[str, Any] | None:
        """Return the program's next message, or None at the end of its channel or itself."""
        channel = self._channel.fileno()
        control = self.server.control.fileno()
        poll = select.poll()
        poll.register(control, select.POLLIN)
        deadline = time.monotonic() + SILENCE_SECONDS
        while True:
            message = self._decoder.message()
            if message is not None and self._ready:
                return message
            if message is not None:  # the child's first message, before the program runs
                if message != {"ready": True}:
                    self._fail(str(message.get("failed", "no word")))
                    return None
                self._ready = True
                continue
            wanted = select.POLLIN
            if self._unsent:
                wanted |= select.POLLOUT
            poll.register(channel, wanted)
            events = dict(poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
            if not events:
                self._fail("the fork server is silent")
                return None
            if control in events:
                deadline = time.monotonic() + SILENCE_SECONDS
                self._receive_report()
            is_open = True
            if channel in events:
                is_open = self._transfer(events[channel])
            if not is_open and self.ended is None:
                return None
            has_more = is_open and events.get(channel, 0) & select.POLLIN
            if self.ended is not None and not has_more:
                return self._decoder.message() if self._ready else None

    def _transfer(self, event: int) -> bool:
        """Move bytes both ways. Return False at the end of the channel."""
        try:
            if event & select.POLLOUT and self._unsent:
                sent_bytes = self._channel.send(self._unsent)
                del self._unsent[:sent_bytes]
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = self._channel.recv(1 << 18)
                self._decoder.feed(data)
                return bool(data)
        except BlockingIOError:
            return True
        except OSError:  # the program closed its end of the channel
            return False
        return True

    def _receive_report(self) -> None:
        try:
            report = self.server.receive_report()
        except ServerFailure as error:
            self._fail(str(error))
            return
        if report is None:
            return
        if report.get("why") not in REPORTS:
            self._fail("the fork server says what it cannot know")
        else:
            self.ended = self._end_from(report)

    def _end_from(self, report: dict[str, Any]) -> ProgramEnd:
        """Return the server's report on a child's end as a ProgramEnd."""
        code = os.waitstatus_to_exitcode(report["status"])
        why = report["why"]
        cpu = report["cpu"]
        memory = report["memory_mb"]
        detail = ""
        was_killed = code == -signal.SIGKILL
        if why == "exit":
            if not (self._ready or self._decoder.buffer or readable(self._channel, 0)):
                why = "sandbox-error"
                detail = "the child ended before the program had its turn"
            elif code == -MEMORY_SIGNAL or (was_killed and memory >= 0.9 * self.limits.memory_mb):
                why = "memory"
            elif code == -signal.SIGXFSZ:
                why = "output-limit"
            elif (code == -signal.SIGXCPU or was_killed) and cpu >= self.limits.total_cpu_seconds:
                why = "timeout"
        return ProgramEnd(why, code, cpu, memory, report["waited"], detail)

    def _handle_early_data(self) -> ProgramEnd:
        """Handle a channel that is readable before the question.

        Either the program has ended, and there is no data, or it breaks the protocol."""
        try:
            has_data = bool(self._decoder.buffer) or self._channel.recv(1) != b""
        except OSError:
            has_data = False
        if has_data:
            return self._end_with("protocol", "a message that nobody asked for")
        return self._wait()

    def _end_with(self, why: str, detail: str) -> ProgramEnd:
        self.ended = replace(self._kill(), why=why, waited=False, detail=detail)
        return self.ended

    def _fail(self, detail: str) -> None:
        self.server_failed = True
        self.ended = ProgramEnd("sandbox-error", detail=detail)

    def _kill(self) -> ProgramEnd:
        """Let the server kill the program, and return its end."""
        self.server.send_command(b"k")
        deadline = time.monotonic() + MAX_KILL_SECONDS
        while self.ended is None:
            if readable(self.server.control, deadline - time.monotonic()):
                self._receive_report()
            else:
                self._fail("the fork server does not answer")
        return self.ended


@contextlib.contextmanager
def memory_file(content: bytes | None) -> Generator[int]:
    """Yield the descriptor of a file in memory: `content` to read or, with None, a file to write.

    It is a temporary file if the system has no files in memory."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        if content is not None:
            view = memoryview(content)
            while view:
                written_bytes = os.write(fd, view)
                view = view[written_bytes:]
            os.lseek(fd, 0, os.SEEK_SET)
            if hasattr(os, "memfd_create"):  # nobody can change the file any more
                import fcntl  # not available on every system

                seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def read_bounded(fd: int, limit: int) -> bytes:
    """Return the first `limit` bytes of a file."""
    data = b""
    while len(data) < limit:
        part = os.pread(fd, limit - len(data), len(data))
        if not part:
            break
        data += part
    return data
