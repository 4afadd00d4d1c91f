"""Runs untrusted programs, each in a fresh confined process.

This module is the harness's side, and server.py is the other side. A runner has slots, which work
side by side. A slot has a fork server for candidate programs. It starts a second fork server when
it first needs one for trusted test code. So the expected results of the tests never enter a
process that candidates are forked from. The servers' children confine themselves (confine.py). The
servers run inside bubblewrap if it is installed and works. Everything ends with this process, also
when it is killed.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from gspo.rewards.child_process import ProcessOwner
from gspo.rewards.sandbox import self_test
from gspo.rewards.sandbox.launch import ForkServer, ServerFailure
from gspo.rewards.sandbox.session import (
    Limits,
    ProgramEnd,
    ProgramSession,
    memory_file,
    read_bounded,
)

T = TypeVar("T")
R = TypeVar("R")
MAX_PROGRAMS_PER_SERVER = 2000  # a new server replaces it after so many programs


@dataclass
class Slot:
    """A pair of fork servers that runs one program at a time."""

    limits: Limits
    _bubblewrap: bool
    _servers: dict[str, ForkServer] = field(default_factory=dict)

    def run_program(
        self, code: str, stdin: str, limits: Limits | None = None
    ) -> tuple[bytes, ProgramEnd]:
        """Run a whole program and return its output (at most output_bytes) and how it ended.

        The slot's limits apply unless `limits` are given. Here ProgramEnd.why may also be
        "compile-error", for a program that did not start.
        """
        limits = limits or self.limits
        with (
            memory_file(stdin.encode("utf-8", "surrogateescape")) as input_fd,
            memory_file(None) as output_fd,
        ):
            with self._session("stdin", [input_fd, output_fd], limits) as session:
                reply = session.exchange({"code": code})
                ended = reply if isinstance(reply, ProgramEnd) else session.wait()
            if reply == {"compiled": False}:
                return b"", ProgramEnd("compile-error", 1, ended.cpu_seconds, ended.memory_mb)
            output = read_bounded(output_fd, limits.output_bytes)
        if len(output) >= limits.output_bytes and ended.why in ("exit", "timeout"):
            ended = replace(ended, why="output-limit", waited=False)
        return output, ended

    @contextlib.contextmanager
    def open(self, kind: str, first_message: dict[str, Any]) -> Generator[ProgramSession]:
        """Yield a session with a fresh child, to which the first message was sent.

        `kind` is "function" for candidates and "tester" for trusted test code."""
        with self._session(kind, [], self.limits) as session:
            session.send(first_message)
            yield session

    def layers(self) -> dict[str, str]:
        """Return the layers that confine the programs here."""
        return self._server("candidate").layers

    def server_pids(self) -> list[int]:
        """Return the process ids of the started servers (inside bubblewrap: of bubblewrap)."""
        return [server.process.pid for server in self._servers.values()]

    def close(self) -> None:
        """End the servers, which start again when they are needed."""
        for role in list(self._servers):
            self._servers.pop(role).stop()

    @contextlib.contextmanager
    def _session(self, kind: str, files: list[int], limits: Limits) -> Generator[ProgramSession]:
        role = "tester" if kind == "tester" else "candidate"
        server = self._server(role)  # raises ServerFailure if it does not start
        try:
            session = ProgramSession(server, kind, files, limits)
        except ServerFailure:
            # the server died since its last program, so try once more with a new server
            self._servers.pop(role).stop()
            session = ProgramSession(self._server(role), kind, files, limits)
        try:
            yield session
        finally:
            session.close()
            if session.server_failed or session.server.programs >= MAX_PROGRAMS_PER_SERVER:
                self._servers.pop(role).stop()

    def _server(self, role: str) -> ForkServer:
        if role in self._servers and self._servers[role].process.poll() is not None:
            self._servers.pop(role).stop()
        if role not in self._servers:
            self._servers[role] = ForkServer(self._bubblewrap)
        return self._servers[role]


@dataclass
class CodeRunner(ProcessOwner):
    """Slots for untrusted programs, which threads may share.

    Each piece of work takes a free slot. Servers start with the first program. A forked or
    unpickled copy starts its own servers. At the first use in a process a few probes are run
    against the sandbox (self_test.py). Raises ValueError if a probe gets through, or if the layers
    are too few: landlock or seccomp is missing, and bubblewrap too. `allow_weak_sandbox` skips this
    check.
    """

    limits: Limits = field(default_factory=Limits)
    slots: int = 1
    allow_weak_sandbox: bool = False
    bubblewrap: bool = True  # whether to run inside bubblewrap if it is installed and works

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= 256:
            raise ValueError(f"slots={self.slots}: 1 to 256")
        super().__post_init__()

    def each(self, work: Callable[[Slot, T], R], items: list[T]) -> list[R]:
        """Return work(slot, item) for every item, in the order of the items.

        As many items are worked on at a time as there are slots. `work` must not call `each` of the
        same runner. Its first exception ends the call after the work in progress.
        """
        self._check()
        if self.slots == 1 or len(items) < 2:
            return [self._with_slot(work, item) for item in items]
        with ThreadPoolExecutor(min(self.slots, len(items))) as pool:
            return list(pool.map(lambda item: self._with_slot(work, item), items))

    def layers(self) -> dict[str, str]:
        """Return the layers that confine the programs here, in words for printing."""
        self._check()
        return self._with_slot(lambda slot, _: slot.layers(), None)

    def server_pids(self) -> list[int]:
        """Return the process ids of the servers that were started and not stopped."""
        return [pid for slot in self._slots for pid in slot.server_pids()]

    def _stop(self) -> None:
        """End the servers. No other thread may use the runner during this call."""
        for slot in self._slots:
            slot.close()

    def _start_over(self) -> None:
        super()._start_over()
        self._checked = False
        self._lock = threading.Lock()
        self._slots = [Slot(self.limits, self.bubblewrap) for _ in range(self.slots)]
        self._free: queue.LifoQueue[Slot] = queue.LifoQueue()
        for slot in self._slots:
            self._free.put(slot)

    def _with_slot(self, work: Callable[[Slot, T], R], item: T) -> R:
        slot = self._free.get()
        try:
            return work(slot, item)
        finally:
            self._free.put(slot)

    def _check(self) -> None:
        """Run the start check (self_test.py) if this process has not run it yet."""
        self._renew_copy()
        with self._lock:
            if not self._checked:
                self._with_slot(
                    lambda slot, _: self_test.require(slot, self.allow_weak_sandbox), None
                )
                self._checked = True
