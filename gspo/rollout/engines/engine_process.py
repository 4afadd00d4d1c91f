"""Runs an object in a process of its own and calls its methods over a pair of unnamed sockets.

No other process can connect to such a pair, so pickles that arrive over it come from the other end.
The process has a session of its own: a signal to the trainer's process group (Ctrl-C, `timeout`, a
scheduler) does not reach it, and the trainer ends its whole group, with everything it has started.
Each side notices at once when the other one ends.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LENGTH = struct.Struct(">Q")
CHUNK = 1 << 20  # the largest number of bytes read at once
CLOSING_SECONDS = 10.0  # how long the object has to close before its process is killed


class EngineEnded(RuntimeError):
    """A process that samples has ended without being asked to. The message says which process, and
    how it ended.
    """


class EngineProcess:
    """Makes `kind(**arguments)` in a new process and calls its methods there. It serves one thread
    at a time.

    The process puts its temporary files into `folder`, and removes that folder if the trainer ends
    first.
    """

    def __init__(
        self,
        name: str,
        kind: type,
        arguments: dict[str, Any],
        folder: Path,
        environment: Mapping[str, str] = os.environ,
    ):
        """Raises EngineEnded if the process ends, and RuntimeError with the message of an error
        that `kind` raised.
        """
        self.name, self.answered, self.ended = name, True, ""
        self.socket, theirs = socket.socketpair()
        # With -P a file in the current folder cannot take the place of a library.
        command = [
            sys.executable,
            "-P",
            "-m",
            __name__,
            str(theirs.fileno()),
            str(os.getpid()),
            str(folder),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**environment, "TMPDIR": str(folder)},
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
        """Call a method of the object and return its result. Raises RuntimeError with the message
        of an error that the method raised, and EngineEnded if the process has ended."""
        if self.ended:
            raise EngineEnded(self.ended)
        return self._exchange((method, arguments))

    def close(self) -> None:
        """Let the object close, then end its process and everything that it started. May be called
        twice.
        """
        if self.process.returncode is None:
            self.socket.close()  # tells the process that there are no more calls
            if self.answered:
                readable([self.end], CLOSING_SECONDS)
            self._collect()

    def _exchange(self, request: Any) -> Any:
        """Send a request and return the answer."""
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
        """Send all bytes, or raise EngineEnded."""
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
        """Return the next `size` bytes, or raise EngineEnded. What the process sent before its end
        is still read.
        """
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
        """Collect the process, which has ended, and raise EngineEnded."""
        # its socket may close a moment before the process ends
        readable([self.end], CLOSING_SECONDS)
        code = self._collect()
        self.ended = f"{self.name} (process {self.process.pid}) {how_it_ended(code)}"
        raise EngineEnded(self.ended)

    def _collect(self) -> int:
        """End the process and all others of its group, and return its exit code."""
        # This must come before `wait`: until a process is collected, its number cannot belong to
        # another one.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.socket.close()
        os.close(self.end)
        return self.process.returncode


def how_it_ended(code: int) -> str:
    """Describe in words how a process ended, from its exit code as the subprocess module gives it."""
    if code >= 0:
        return f"ended by itself with exit code {code}; what it said stands above"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return f"was killed by {name}, perhaps by the kernel for want of memory: `dmesg | grep -i oom` tells"
    return f"was ended by {name}"


def readable(files: list[int], seconds: float | None = None) -> list[int]:
    """Wait until one of the files can be read or has ended, at most `seconds`, and return all such
    files.
    """
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(None if seconds is None else 1000 * seconds)]


def serve(connection: socket.socket) -> None:
    """Make the object, answer calls until the other end is closed, then close the object."""
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
            except Exception as error:  # the trainer must hear of any error
                answer = False, (str(error) or type(error).__name__, traceback.format_exc())
            body = pickle.dumps(answer)
            connection.sendall(LENGTH.pack(len(body)) + body)
    if thing is not None:
        thing.close()


def end_with(trainer: int, folder: str) -> None:
    """Wait until the process `trainer` has ended in whatever way, then remove the folder and kill
    this process's group."""
    handle = os.pidfd_open(trainer)
    if os.getppid() == trainer:
        readable([handle])
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve one object; the command line holds the socket's number, the trainer's process number,
    and the folder.
    """
    file, trainer, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.set_inheritable(file, False)
    watcher = threading.Thread(target=end_with, args=(trainer, folder), daemon=True)
    watcher.start()
    with socket.socket(fileno=file) as connection, contextlib.suppress(ConnectionError):
        serve(connection)
    # The trainer has closed its end or was killed. If it was killed, the watcher may end this group
    # first.
    shutil.rmtree(folder, ignore_errors=True)
    watcher.join(0.2)


if __name__ == "__main__":
    main()
