"""Processes that answer questions over a connection, and the base of their owners."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

LIBRARY_PATHS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # some Pythons need these to start


class ProcessOwner:
    """The base of dataclasses with processes, which end with `close` or a `with` block.

    Their fields are their settings. A forked or unpickled copy starts processes of its own."""

    def __post_init__(self) -> None:
        self._start_over()

    def __reduce__(self) -> tuple[Any, ...]:
        settings: Any = self
        return type(self), tuple(getattr(self, field.name) for field in fields(settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. They start again if the object is used again."""
        if self._owner == os.getpid():
            self._stop()

    def _start_over(self) -> None:
        """Forget all processes. The next use starts others."""
        self._owner = os.getpid()

    def _renew_copy(self) -> None:
        """Start over in a forked copy, whose processes belong to the process that started them."""
        if self._owner != os.getpid():
            self._start_over()

    def _stop(self) -> None:
        """End the processes that this process started."""
        raise NotImplementedError


class ChildProcess(NamedTuple):
    """A running process, and the connection to it."""

    process: subprocess.Popen[bytes]
    connection: Connection

    def receive(self, seconds: float | None = 0.0) -> bytes:
        """Return the next message, or b"" after `seconds` or at the end of the process."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll(seconds):
                return self.connection.recv_bytes()
        return b""

    def stop(self) -> None:
        """End the process and collect it, so that no zombie stays."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


def start_child(
    arguments: list[str], environment: dict[str, str], stdout: int | None = None
) -> ChildProcess:
    """Start Python with these arguments, then its end of the connection and our process id."""
    connection, child_end = multiprocessing.Pipe()
    descriptor = child_end.fileno()
    process = subprocess.Popen(
        [sys.executable, "-P", *arguments, str(descriptor), str(os.getpid())],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env=environment,
        # Ctrl-C is for the harness alone, which finishes its step or ends the process
        start_new_session=True,
    )
    child_end.close()
    return ChildProcess(process, connection)


def bare_environment() -> dict[str, str]:
    """Return the few variables that Python needs, with the same order of sets in every run."""
    paths = {key: os.environ[key] for key in LIBRARY_PATHS if key in os.environ}
    return {"PYTHONHASHSEED": "0"} | paths
