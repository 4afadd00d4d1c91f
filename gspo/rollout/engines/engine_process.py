"""An object in a separate process, whose methods are called over a pair of unnamed sockets.

No other process can connect to such a pair, so its pickles can only come from the other end. The
process has its own session: a signal to the trainer's process group (Ctrl-C, `timeout`, a
scheduler) does not reach it. The trainer kills the process group with everything that it has
started. Each side notices at once when the other side ends.
"""

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

from gspo.io.telemetry import TELEMETRY_OFF

LENGTH = struct.Struct(">Q")  # the header of a message: its length in bytes
MAX_READ_BYTES = 1 << 20
CLOSING_SECONDS = 10.0  # how long the object may take to close before its process is killed


class EngineEnded(RuntimeError):
    """A process that samples has ended by itself.

    The message says which process, and how it ended."""


class EngineProcess:
    """A process that makes `served_class(**arguments)`, and whose methods the trainer can call.

    Only a single thread may call it at a time. It puts its temporary files into `folder`, and
    removes that folder if the trainer ends first. Its libraries report nothing to their makers,
    whatever `environment` says.
    """

    def __init__(
        self,
        name: str,
        served_class: type,
        arguments: dict[str, Any],
        folder: Path,
        environment: Mapping[str, str] = os.environ,
    ):
        """Start the process, and wait until it has made the object.

        Raises EngineEnded if the process ends, and RuntimeError with the message of an error that
        `served_class` raised."""
        self.name = name
        self.answered = True
        self.end_message = ""
        self.socket, child_socket = socket.socketpair()
        # With -P a file in the current folder cannot take the place of a library.
        command = [sys.executable, "-P", "-m", __name__]
        child_fd = child_socket.fileno()
        command += [str(child_fd), str(os.getpid()), str(folder)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**environment, **TELEMETRY_OFF, "TMPDIR": str(folder)},
            pass_fds=[child_fd],
            start_new_session=True,
        )
        child_socket.close()
        self.pidfd = os.pidfd_open(self.process.pid)  # readable when the process has ended
        self.socket.setblocking(False)
        try:
            self._exchange((served_class, arguments))
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object and return its result.

        Raises RuntimeError with the message of an error that the method raised, and EngineEnded if
        the process has ended."""
        if self.end_message:
            raise EngineEnded(self.end_message)
        return self._exchange((method, arguments))

    def close(self) -> None:
        """Let the object close, then kill the process group. May be called twice."""
        if self.process.returncode is None:
            self.socket.close()  # tells the process that there are no more calls
            if self.answered:
                wait_readable([self.pidfd], CLOSING_SECONDS)
            self._reap()

    def _exchange(self, request: Any) -> Any:
        """Send a request and return the result."""
        self.answered = False
        body = pickle.dumps(request)
        self._send(LENGTH.pack(len(body)) + body)
        (length,) = LENGTH.unpack(self._receive(LENGTH.size))
        succeeded, result = pickle.loads(self._receive(length))
        self.answered = True
        if not succeeded:
            message, trace = result
            error = RuntimeError(message)
            error.add_note(trace)
            raise error
        return result

    def _send(self, data: bytes) -> None:
        """Send all bytes, or raise EngineEnded."""
        unsent = memoryview(data)
        while unsent:
            poll = select.poll()
            poll.register(self.socket, select.POLLOUT)
            poll.register(self.pidfd, select.POLLIN)
            if any(file == self.pidfd for file, _ in poll.poll()):
                self._raise_ended()
            try:
                unsent = unsent[self.socket.send(unsent) :]
            except ConnectionError:
                self._raise_ended()

    def _receive(self, size: int) -> bytes:
        """Return the next `size` bytes, or raise EngineEnded.

        Bytes that the process sent before its end are still read."""
        data = bytearray()
        socket_fd = self.socket.fileno()
        while len(data) < size:
            if socket_fd not in wait_readable([socket_fd, self.pidfd]):
                self._raise_ended()
            try:
                part = self.socket.recv(min(MAX_READ_BYTES, size - len(data)))
            except ConnectionError:
                part = b""
            if not part:
                self._raise_ended()
            data += part
        return bytes(data)

    def _raise_ended(self) -> None:
        """Reap the process, which has ended, and raise EngineEnded."""
        # its socket may close a moment before the process ends
        wait_readable([self.pidfd], CLOSING_SECONDS)
        exit_code = self._reap()
        self.end_message = f"{self.name} (process {self.process.pid}) {how_it_ended(exit_code)}"
        raise EngineEnded(self.end_message)

    def _reap(self) -> int:
        """Kill the process group, wait for the process, and return its exit code."""
        # This must come before `wait`: until a process is reaped, no other one can get its number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.socket.close()
        os.close(self.pidfd)
        return self.process.returncode


def how_it_ended(exit_code: int) -> str:
    """Describe in words how a process ended, by its exit code in the subprocess module."""
    if exit_code >= 0:
        return f"ended by itself with exit code {exit_code}; what it said stands above"
    name = signal.Signals(-exit_code).name
    if -exit_code == signal.SIGKILL:
        return (
            f"was killed by {name}, perhaps by the kernel because memory ran out: "
            "`dmesg | grep -i oom` tells"
        )
    return f"was ended by {name}"


def wait_readable(files: list[int], seconds: float | None = None) -> list[int]:
    """Wait until a file can be read or has ended, at most `seconds`, and return all such files."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    milliseconds = None if seconds is None else 1000 * seconds
    return [file for file, _ in poll.poll(milliseconds)]


def serve(connection: socket.socket) -> None:
    """Make the object, answer calls until the other end is closed, then close the object."""
    served = None
    with connection.makefile("rb") as requests:
        while True:
            header = requests.read(LENGTH.size)
            if not header:
                break
            (length,) = LENGTH.unpack(header)
            request, arguments = pickle.loads(requests.read(length))
            try:
                if served is None:
                    served = request(**arguments)
                    result = None
                else:
                    result = getattr(served, request)(*arguments)
                answer = (True, result)
            except Exception as error:  # the trainer must hear of any error
                message = str(error) or type(error).__name__
                answer = (False, (message, traceback.format_exc()))
            body = pickle.dumps(answer)
            connection.sendall(LENGTH.pack(len(body)) + body)
    if served is not None:
        served.close()


def end_with_trainer(trainer_pid: int, folder: str) -> None:
    """Wait until the trainer has ended in any way, remove the folder, and kill this group."""
    pidfd = os.pidfd_open(trainer_pid)
    if os.getppid() == trainer_pid:
        wait_readable([pidfd])
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve an object. The arguments are the socket's number, the trainer's PID and the folder."""
    socket_number = int(sys.argv[1])
    trainer_pid = int(sys.argv[2])
    folder = sys.argv[3]
    os.set_inheritable(socket_number, False)
    watcher = threading.Thread(target=end_with_trainer, args=(trainer_pid, folder), daemon=True)
    watcher.start()
    with socket.socket(fileno=socket_number) as connection, contextlib.suppress(ConnectionError):
        serve(connection)
    # The trainer has closed its end or was killed. If it was killed, the watcher may end this group
    # first.
    shutil.rmtree(folder, ignore_errors=True)
    watcher.join(0.2)


if __name__ == "__main__":
    main()
