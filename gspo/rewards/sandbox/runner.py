"""Runs untrusted programs, each in a fresh confined process. This is the harness's side; server.py
is the other.

A runner has slots, which work side by side. A slot has a fork server for candidate programs and,
once needed, a separate one for trusted test code, so that what the tests expect never enters a
process from which candidates are forked. The servers' children confine themselves (confine.py);
where bubblewrap is installed and works the servers run inside it. Everything ends with this
process, also when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gspo.rewards.sandbox import self_test
from gspo.rewards.sandbox.launch import Server, ServerFailure
from gspo.rewards.sandbox.session import Ended, Limits, Session, memory_file, read_bounded

__all__ = ["CodeRunner", "Ended", "Limits", "Session", "Slot"]

T, R = TypeVar("T"), TypeVar("R")
RECYCLE = 2000  # a server is replaced after so many programs


class Slot:
    """Runs one program at a time."""

    def __init__(self, limits: Limits, bubblewrap: bool) -> None:
        self.limits = limits
        self._bubblewrap = bubblewrap
        self._servers: dict[str, Server] = {}

    def run_program(self, code: str, stdin: str) -> tuple[bytes, Ended]:
        """Run a whole program on an input. Returns what it wrote (at most output_bytes) and how it
        ended.

        Here Ended.why may also be "compile-error", for a program that did not start.
        """
        with (
            memory_file(stdin.encode("utf-8", "surrogateescape")) as given,
            memory_file(None) as written,
        ):
            with self._session("stdin", [given, written]) as session:
                reply = session.exchange({"code": code})
                ended = reply if isinstance(reply, Ended) else session.wait()
            if reply == {"compiled": False}:
                return b"", Ended("compile-error", 1, ended.cpu_seconds, ended.memory_mb)
            output = read_bounded(written, self.limits.output_bytes)
        if len(output) >= self.limits.output_bytes and ended.why in ("exit", "timeout"):
            ended = Ended("output-limit", ended.code, ended.cpu_seconds, ended.memory_mb)
        return output, ended

    @contextlib.contextmanager
    def open(self, kind: str, first: dict[str, Any]) -> Iterator[Session]:
        """Yield a session with a fresh child of kind "function" (candidates) or "tester" (trusted
        code), to which `first` was sent."""
        with self._session(kind, []) as session:
            session.send(first)
            yield session

    def layers(self) -> dict[str, str]:
        """Return what confines the programs here."""
        return self._server("candidate").layers

    def server_pids(self) -> list[int]:
        """Return the process ids of the servers that were started (in bubblewrap, of bubblewrap)."""
        return [server.process.pid for server in self._servers.values()]

    def close(self) -> None:
        """End the servers; they start again when needed."""
        for role in list(self._servers):
            self._servers.pop(role).stop()

    @contextlib.contextmanager
    def _session(self, kind: str, files: list[int]) -> Iterator[Session]:
        role = "tester" if kind == "tester" else "candidate"
        try:
            session = Session(self._server(role), kind, files, self.limits)
        except (
            ServerFailure
        ):  # the server died since its last program, so try once more with a new one
            self._servers.pop(role).stop()
            session = Session(self._server(role), kind, files, self.limits)
        try:
            yield session
        finally:
            session.close()
            if session.surprised or session.server.programs >= RECYCLE:
                self._servers.pop(role).stop()

    def _server(self, role: str) -> Server:
        server = self._servers.get(role)
        if server is None or not server.alive():
            if server is not None:
                self._servers.pop(role).stop()
            server = self._servers[role] = Server(self._bubblewrap)
        return server


@dataclass
class CodeRunner:
    """Slots for untrusted programs. Servers start with the first program; a forked or unpickled
    copy starts its own.

    Threads may share a runner: each piece of work takes a free slot. At the first use in a process
    a few attacks are run against the sandbox. Raises ValueError where programs would not be
    confined (landlock or seccomp is missing, and bubblewrap too) or an attack came through, unless
    `allow_weak_sandbox`.
    """

    limits: Limits = field(default_factory=Limits)
    slots: int = 1
    allow_weak_sandbox: bool = False
    bubblewrap: bool = True  # whether to run inside bubblewrap where it is installed and works

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= 256:
            raise ValueError(f"slots={self.slots}: 1 to 256")
        self._start_over()

    def __reduce__(self) -> tuple[Any, ...]:
        return CodeRunner, (self.limits, self.slots, self.allow_weak_sandbox, self.bubblewrap)

    def __enter__(self) -> CodeRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def each(self, work: Callable[[Slot, T], R], items: list[T]) -> list[R]:
        """Return work(slot, item) for every item, in the order of the items, with as many at a time
        as there are slots.

        `work` must not call `each` of the same runner. Its first exception ends the call, after
        what is already running.
        """
        self._check()
        if self.slots == 1 or len(items) < 2:
            return [self._with_slot(work, item) for item in items]
        with ThreadPoolExecutor(min(self.slots, len(items))) as pool:
            return list(pool.map(lambda item: self._with_slot(work, item), items))

    def layers(self) -> dict[str, str]:
        """Return what confines the programs here, layer by layer, for printing."""
        self._check()
        return self._with_slot(lambda slot, _: slot.layers(), None)

    def server_pids(self) -> list[int]:
        """Return the process ids of the servers that were started and not stopped."""
        return [pid for slot in self._slots for pid in slot.server_pids()]

    def close(self) -> None:
        """End the servers. The runner can be used again. No other thread may use it during this
        call.
        """
        if self._owner == os.getpid():
            for slot in self._slots:
                slot.close()

    def _start_over(self) -> None:
        self._owner = os.getpid()
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
        """Check once per process and kind of confinement that the confinement is as strong as it
        says.
        """
        # in a forked copy, the servers belong to the process that started them
        if self._owner != os.getpid():
            self._start_over()
        with self._lock:
            if not self._checked:
                self._with_slot(
                    lambda slot, _: self_test.require(slot, self.allow_weak_sandbox), None
                )
                self._checked = True
