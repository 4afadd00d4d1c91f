"""Runs programs written by the policy: the parent's side of gspo/rewards/code_server.py.

A runner keeps one fork server per slot; each program runs in a fresh child of it. What is covered:
- a program cannot learn the expected outputs from what it is given: they are compared here and never sent;
- one program leaves nothing for the next; its prints go nowhere; what it says is parsed as JSON, checked and bounded;
- CPU time, memory, open files, file sizes (0) and, but for a root that cannot change its user, processes are limited;
  started by root, programs run as the user "nobody";
- everything ends with this process, also when it is killed (Linux).
What is not (no landlock, seccomp or namespaces here): programs can read the files their user can read, open network
connections and, where the harness does not run as root, signal it and read the memory of its user's processes. Run
the harness in a container or virtual machine if the policy might be hostile, not merely wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import astuple, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("code_server.py")
OUTPUT_BYTES = 65536  # what one program may send back, all values together
GRACE_SECONDS = 10.0  # beyond the wall-clock limit until the server itself is given up
LIBRARY_PATHS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # some Pythons need them to start
# what a child may say of itself; time-outs and too much output are the server's to say
STATUSES = {"ok", "runtime_error", "compile_error", "memory", "unserialisable"}


@dataclass(frozen=True)
class Program:
    """Source text, the function to call, and the argument list of each call (JSON data)."""

    code: str
    function: str
    arguments: list[list[Any]]

    def request(self) -> bytes:
        """The line that the server gets; all that the program can know."""
        request = {"code": self.code, "function": self.function, "arguments": self.arguments}
        return json.dumps(request).encode() + b"\n"


@dataclass(frozen=True)
class Result:
    """What became of a program: status "ok" and one JSON value per call, or why not.

    The other statuses: runtime_error (also: died), compile_error, timeout, memory, output_limit, unserialisable (a
    value that is not plain data), protocol (the child sent nonsense), sandbox_error (our failure, not the program's).
    """

    status: str
    values: list[Any] = field(default_factory=list)


@dataclass
class CodeRunner:
    """Runs up to `slots` programs at a time. Servers start with the first program and again whenever they die.

    A forked or unpickled copy starts servers of its own. Threads may share a runner; they take turns.
    """

    slots: int = 1
    cpu_seconds: float = 0.5  # per program, all calls together: the time-out
    wall_seconds: float = 2.0  # for programs that wait without computing; judged on the second occurrence
    memory_mb: int = 256  # address space of a child

    def __post_init__(self) -> None:
        self._start_over()

    def __reduce__(self) -> tuple[type[CodeRunner], tuple[Any, ...]]:
        return CodeRunner, astuple(self)

    def __enter__(self) -> CodeRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, programs: list[Program]) -> list[Result]:
        """Results in the order of `programs`. Identical programs run once."""
        requests = [program.request() for program in programs]
        calls = {request: len(program.arguments) for request, program in zip(requests, programs, strict=True)}
        if self._owner != os.getpid():  # we are a forked copy: the servers belong to the process that started them
            self._start_over()
        with self._lock:
            results = self._run_all(calls)
        return [results[request] for request in requests]

    def close(self) -> None:
        """Ends the servers. The runner can be used again."""
        if self._owner == os.getpid():
            for server in self._servers:
                server.stop()

    def server_pids(self) -> list[int]:
        """Process ids of the servers that were started and not stopped."""
        return [server.process.pid for server in self._servers if server.process]

    def _start_over(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._servers = [_Server(self.cpu_seconds, self.wall_seconds, self.memory_mb) for _ in range(self.slots)]

    def _run_all(self, calls: dict[bytes, int]) -> dict[bytes, Result]:
        """Keeps the servers busy until every request has a result."""
        results: dict[bytes, Result] = {}
        waiting, tries = deque(calls), Counter()
        idle, running = list(self._servers), {}
        while waiting or running:
            while waiting and idle:
                server, request = idle.pop(), waiting.popleft()
                server.send(request)
                running[server] = request
            for server in _ready(list(running)):
                request = running.pop(server)
                idle.append(server)
                result = read_result(server.receive(), calls[request])
                tries[request] += 1
                if result.status in ("wall", "sandbox_error") and tries[request] == 1:
                    waiting.append(request)  # perhaps the machine was busy, or another program killed the server
                else:
                    results[request] = Result("timeout") if result.status == "wall" else result
        return results


class _Server:
    """One fork server and the pipes to it."""

    def __init__(self, cpu_seconds: float, wall_seconds: float, memory_mb: int) -> None:
        self.limits = (cpu_seconds, wall_seconds, memory_mb, OUTPUT_BYTES)
        self.patience = wall_seconds + GRACE_SECONDS
        self.process: subprocess.Popen[bytes] | None = None
        self.deadline = 0.0

    def send(self, request: bytes) -> None:
        """Hands over a program; starts the server if it is not there."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.start()
        self.deadline = time.monotonic() + self.patience
        with contextlib.suppress(BrokenPipeError):  # it died just now: receive() will find the end of its output
            self.process.stdin.write(request)
            self.process.stdin.flush()

    def receive(self) -> bytes:
        """The server's line; empty, and the server stopped, if it died or is late."""
        line = self.process.stdout.readline() if wait([self.process.stdout], timeout=0) else b""
        if not line.endswith(b"\n"):
            self.stop()
            return b""
        return line

    def start(self) -> None:
        # With an otherwise empty environment -s -P -S isolate as -I does, which would ignore the hash seed: the order
        # of a program's sets, and with it a reward, must not depend on the run.
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-S", "-B", str(SERVER), *map(str, self.limits), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0"} | {key: os.environ[key] for key in LIBRARY_PATHS if key in os.environ},
            start_new_session=True,  # Ctrl-C is for the harness, which then ends the server
        )

    def stop(self) -> None:
        """Ends the server and collects it, so that no zombie stays. Its child dies with it."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.process = None


def _ready(servers: list[_Server]) -> list[_Server]:
    """The servers that answered, died or are late; waits until there is one."""
    while True:
        patience = min(server.deadline for server in servers) - time.monotonic()
        answered = wait([server.process.stdout for server in servers], timeout=max(0.0, patience))
        now = time.monotonic()
        ready = [server for server in servers if server.process.stdout in answered or server.deadline <= now]
        if ready:
            return ready


def read_result(line: bytes, calls: int) -> Result:
    """Checks what came back. Only the envelope is the server's; what is inside was written by the program's process."""
    try:
        reply = json.loads(line)
    except ValueError:
        return Result("sandbox_error")
    if reply["ended"] != "exit":
        return Result(reply["ended"])
    if not reply["output"]:
        return Result("sandbox_error")  # the child failed before the program had its turn
    if reply["output"].isspace():
        return Result("runtime_error")  # os._exit, a crash, a kill: it went without a word
    try:
        said = json.loads(reply["output"], parse_constant=_refuse)
    except (ValueError, RecursionError):
        return Result("protocol")
    if not (isinstance(said, list) and len(said) == 2 and isinstance(said[0], str) and said[0] in STATUSES):
        return Result("protocol")
    status, values = said
    if not isinstance(values, list) or len(values) != (calls if status == "ok" else 0):
        return Result("protocol")
    return Result(status, values)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
