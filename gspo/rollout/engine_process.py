"""An object in a process of its own, whose methods are asked over a pair of sockets without name.

Nobody else can connect to such a pair, so that what comes over it, pickled, comes from the other end. The process has a
session of its own: a signal to the trainer's group (Ctrl-C, `timeout`, a scheduler) does not reach it, and it is ended
as a group, with whatever it started. Whoever waits for an answer sees its end at once; it sees the trainer's.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

LENGTH = struct.Struct(">Q")
CHUNK = 1 << 20  # bytes that are read at once
CLOSING_SECONDS = 10.0


class EngineEnded(RuntimeError):
    """A process that samples has ended although nobody asked it to. Its message says which one and how."""


class EngineProcess:
    """`kind(**arguments)` in a new process. Not for two threads at a time.

    `folder` is the process's own: its temporary files lie there, and it removes the folder if the trainer ends first.
    """

    def __init__(self, name: str, kind: type, arguments: dict[str, Any], folder: Path):
        """Raises EngineEnded, or RuntimeError with the message of the error that `kind` raised."""
        self.name, self.answered, self.ended = name, True, ""
        self.socket, theirs = socket.socketpair()
        # -P: a file in the present folder must not stand in for a library
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid()), str(folder)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"TMPDIR": str(folder)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.end = os.pidfd_open(self.process.pid)
        self.socket.setblocking(False)
        try:
            self._exchange((kind, arguments))
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *arguments: Any) -> Any:
        """What the object's method returns. Raises RuntimeError for what it raised, EngineEnded if nobody is there."""
        if self.ended:
            raise EngineEnded(self.ended)
        return self._exchange((method, arguments))

    def close(self) -> None:
        """Let the object close, and end its process with all that it started. May be called twice."""
        if self.process.returncode is None:
            self.socket.close()  # the end of what is asked
            if self.answered:
                readable([self.end], CLOSING_SECONDS)
            self._collect()

    def _exchange(self, request: Any) -> Any:
        self.answered = False
        body = pickle.dumps(request)
        self._send(LENGTH.pack(len(body)) + body)
        (length,) = LENGTH.unpack(self._receive(LENGTH.size))
        fine, result = pickle.loads(self._receive(length))
        self.answered = True
        if not fine:
            message, trace = result
            error = RuntimeError(message)
            error.add_note(trace)
            raise error
        return result

    def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            poll = select.poll()
            poll.register(self.socket, select.POLLOUT)
            poll.register(self.end, select.POLLIN)
            if any(file == self.end for file, _ in poll.poll()):
                self._notice()
            try:
                left = left[self.socket.send(left) :]
            except ConnectionError:
                self._notice()

    def _receive(self, size: int) -> bytes:
        """So many bytes, or EngineEnded. What was sent before the end is still read."""
        data = bytearray()
        while len(data) < size:
            if self.socket.fileno() not in readable([self.socket.fileno(), self.end]):
                self._notice()
            try:
                part = self.socket.recv(min(CHUNK, size - len(data)))
            except ConnectionError:
                part = b""
            if not part:
                self._notice()
            data += part
        return bytes(data)

    def _notice(self) -> None:
        """Raises EngineEnded, once the process has been collected."""
        readable([self.end], CLOSING_SECONDS)  # its socket may be closed a moment before
        code = self._collect()
        self.ended = f"{self.name} (process {self.process.pid}) {how_it_ended(code)}"
        raise EngineEnded(self.ended)

    def _collect(self) -> int:
        """End the process and those that it started, all of them in its group; its exit code."""
        with contextlib.suppress(ProcessLookupError):  # before it is collected: until then the number is its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.socket.close()
        os.close(self.end)
        return self.process.returncode


def how_it_ended(code: int) -> str:
    """An exit code as subprocess has it, in words."""
    if code >= 0:
        return f"ended by itself with exit code {code}; what it said stands above"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return f"was killed by {name}, perhaps by the kernel for want of memory: `dmesg | grep -i oom` tells"
    return f"was ended by {name}"


def readable(files: list[int], seconds: float | None = None) -> list[int]:
    """Those of the files that can be read, or have come to their end. Waits until there is one."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(None if seconds is None else 1000 * seconds)]


def serve(connection: socket.socket) -> None:
    """Make the object, answer what is asked until the other end is closed, then close the object."""
    thing = None
    with connection.makefile("rb") as requests:
        while header := requests.read(LENGTH.size):
            request = pickle.loads(requests.read(LENGTH.unpack(header)[0]))
            try:
                if thing is None:
                    kind, arguments = request
                    thing, result = kind(**arguments), None
                else:
                    method, arguments = request
                    result = getattr(thing, method)(*arguments)
                answer = True, result
            except Exception as error:  # whatever it is, the trainer is to hear of it
                answer = False, (str(error) or type(error).__name__, traceback.format_exc())
            body = pickle.dumps(answer)
            connection.sendall(LENGTH.pack(len(body)) + body)
    if thing is not None:
        thing.close()


def end_with(trainer: int, folder: str) -> None:
    """Once the process `trainer` has ended, however it may, end this one's group and remove its folder."""
    handle = os.pidfd_open(trainer)
    if os.getppid() == trainer:
        readable([handle])
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    file, trainer, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.set_inheritable(file, False)
    watcher = threading.Thread(target=end_with, args=(trainer, folder), daemon=True)
    watcher.start()
    with socket.socket(fileno=file) as connection, contextlib.suppress(ConnectionError):
        serve(connection)
    # the trainer has closed its end, or was killed: then the watcher ends the group, unless this process is faster
    shutil.rmtree(folder, ignore_errors=True)
    watcher.join(0.2)


if __name__ == "__main__":
    main()
