"""The fork server: starts a fresh confined child for each untrusted program and watches it. See
runner.py.

It sees neither code nor outputs, so that a later child finds nothing of an earlier program in the
memory it inherits. A request is one line {"kind", "limits"} with file descriptors (the child's
channel to the harness; for kind "stdin" also the program's input and output), and the child talks
to the harness itself. While a child runs, the harness may send

    r   an exchange begins: the CPU and waiting allowances are renewed       p   it is over: waiting
        does not count
    k   kill it

and the server answers, when the child has ended, {"why": "exit" | "timeout", "status", "cpu",
"memory_mb", "waited"}; before that {} about once a second, as a sign of life.

Waiting = time in which no thread of the child was running or ready to run: wall clock - CPU time -
time in the queue of the scheduler (/proc/PID/task/*/schedstat). On a busy machine a program
computes later, but does not wait longer. Of several threads the one that queued longest between two
looks counts: threads that stand in the queue at the same time would otherwise excuse their program
many times over.

The command line gives the file descriptor of the control socket, the process id of the harness (0
where it is not visible), and a spare user id.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

# programs may import the standard library, to which the command line limits this list
LIBRARY = list(sys.path)
# above gspo
sys.path.insert(0, os.path.normpath(os.path.join(os.path.abspath(__file__), *[os.pardir] * 4)))

from gspo.rewards.sandbox import child as code_child  # noqa: E402
from gspo.rewards.sandbox import confine  # noqa: E402
from gspo.rewards.sandbox import stdin as code_stdin  # noqa: E402
from gspo.rewards.sandbox.frames import Channel  # noqa: E402

# these are imported once here and inherited, so that each program starts faster
USUAL = """
abc bisect calendar cmath collections.abc copy dataclasses datetime decimal enum fractions functools hashlib
heapq io itertools math numbers operator queue random re statistics string textwrap threading traceback types
typing unicodedata zlib bz2 lzma secrets uuid atexit concurrent.futures asyncio pprint ast inspect locale
encodings.idna encodings.latin_1 encodings.ascii encodings.utf_16 ctypes linecache warnings
""".split()  # noqa: SIM905
TICK = 1.0  # seconds between signs of life
CHANNEL_FD, RULES_FD = 3, 4
TABLE_FDS = 4096


# that a program may print or read, as in LiveCodeBench's own harness; Python allows 4,300
INTEGER_DIGITS = 50_000


def main() -> NoReturn:
    # the lowest number, which children are certain to close
    control = socket.socket(fileno=os.dup(int(sys.argv[1])))
    os.close(int(sys.argv[1]))
    parent, uid = int(sys.argv[2]), int(sys.argv[3])
    if confine.LINUX:
        confine.prctl(confine.PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if parent and os.getppid() != parent:  # the harness ended before we asked
            os._exit(1)
        # so that nobody of the same user reads or stops us
        confine.prctl(confine.PR_SET_DUMPABLE, 0)
        confine.drop_bounding_set()
    for module in USUAL:
        with contextlib.suppress(ImportError):
            __import__(module)
    sys.set_int_max_str_digits(INTEGER_DIGITS)
    os.environ.clear()
    readable = [
        path for path in (*LIBRARY, os.path.join(sys.base_prefix, "lib")) if os.path.exists(path)
    ]
    sys.path[:] = LIBRARY
    os.chdir("/")
    plan, layers = confine.prepare(uid, readable)
    control.sendall(json.dumps(layers).encode() + b"\n")
    gc.collect()
    gc.disable()
    gc.freeze()
    while True:
        request, fds = receive(control)
        child = start(request, fds, plan)
        for fd in fds:
            os.close(fd)
        ended = watch(child, request["limits"], control)
        control.sendall(json.dumps(ended).encode() + b"\n")


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next request and its descriptors. Ends the server when the harness is gone."""
    data, fds = b"", array.array("i")
    while True:
        part, extra, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(3 * fds.itemsize))
        if not part:
            os._exit(0)
        data += part
        for _, kind, packed in extra:
            if kind == socket.SCM_RIGHTS:
                fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
        lines = data.split(b"\n")
        for line in lines[:-1]:
            if line.startswith(b"{"):  # other lines were meant for the previous child
                return json.loads(line), list(fds)
        data = lines[-1]


def start(request: dict[str, Any], fds: list[int], plan: confine.Plan) -> int:
    """Fork the child of a request and return its process id."""
    server = os.getpid()
    child = os.fork()
    if child == 0:
        leave = os._exit  # kept, since the program may replace it
        try:
            serve_child(request, fds, plan, server)
        finally:
            leave(70)
    return child


def serve_child(request: dict[str, Any], fds: list[int], plan: confine.Plan, server: int) -> None:
    """Confine the child, then run the program in it."""
    kind, limits = request["kind"], request["limits"]
    os.setsid()
    channel = Channel(CHANNEL_FD, write_limit=limits["output_bytes"])
    plan = place_descriptors(fds, plan)
    try:
        bounds = confine.Bounds(
            limits["total_cpu_seconds"], limits["memory_mb"], limits["output_bytes"]
        )
        confine.confine(plan, bounds, server)
    except (OSError, ValueError) as error:
        channel.write({"failed": f"{type(error).__name__}: {error}"})
        return
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # so that too much output ends the program
    gc.enable()
    channel.write({"ready": True})
    if kind == "stdin":
        code_stdin.run(channel)
    else:
        code_child.run(kind, channel)
    os._exit(0)


def place_descriptors(fds: list[int], plan: confine.Plan) -> confine.Plan:
    """Place the descriptors, and close all others. 0, 1, 2: input, output, nothing; 3: the channel;
    4: the landlock rules, until they are applied."""
    nothing = os.open(os.devnull, os.O_RDWR)
    channel, stdin, stdout = (*fds, nothing, nothing)[:3]
    wanted = [
        stdin,
        stdout,
        nothing,
        channel,
        *([plan.landlock_fd] if plan.landlock_fd is not None else []),
    ]
    # moved up, out of each other's way
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, len(wanted)) for fd in wanted]
    for i, fd in enumerate(high):
        os.dup2(fd, i, inheritable=i < 3)
    os.closerange(len(wanted), TABLE_FDS)
    return plan if plan.landlock_fd is None else confine.replace(plan, landlock_fd=RULES_FD)


def watch(child: int, limits: dict[str, Any], control: socket.socket) -> dict[str, Any]:
    """Wait for the child's end, or bring it about, then return how it ended."""
    clock = Clock(child, limits)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    exited = os.pidfd_open(child) if hasattr(os, "pidfd_open") else -1
    if exited >= 0:
        poll.register(exited, select.POLLIN)
    why = "exit"
    alive = time.monotonic() + TICK
    while why == "exit":
        ready = {fd for fd, _ in poll.poll(1000 * clock.patience() + 1 if exited >= 0 else 5)}
        if exited in ready or (
            exited < 0 and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ):
            break
        if control.fileno() in ready:
            said = control.recv(4096)
            if not said or b"k" in said:
                why = "killed" if said else "gone"
            clock.hear(said)
        else:
            why = clock.check()
        if clock.active and time.monotonic() > alive:
            alive = time.monotonic() + TICK
            with contextlib.suppress(BlockingIOError):
                control.send(b"{}\n", socket.MSG_DONTWAIT)
    if exited >= 0:
        os.close(exited)
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    if why == "gone":
        os._exit(0)
    memory = usage.ru_maxrss / (1024 if confine.LINUX else 1 << 20)
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "why": why if why != "waited" else "timeout",
        "status": status,
        "cpu": cpu,
        "memory_mb": memory,
        "waited": why == "waited",
    }


class Clock:
    """What a child has used of its allowances."""

    def __init__(self, child: int, limits: dict[str, Any]) -> None:
        self.limits = limits
        self.tasks = f"/proc/{child}/task"
        self.id = (~child << 3) | 2  # the kernel's number for the CPU clock of a process
        self.active = True
        self.queued: dict[str, int] = {}
        self.waited = self.cpu = self.renewed = 0.0
        self.time = time.monotonic()

    def patience(self) -> float:
        """Return the seconds until the next look, when a limit may be reached or waiting must be
        told from queueing.
        """
        cpu_left = (
            min(self.limits["cpu_seconds"] + self.renewed, self.limits["total_cpu_seconds"])
            - self.cpu
        )
        return max(0.001, min(TICK / 4, self.limits["wall_seconds"] / 8, cpu_left))

    def hear(self, said: bytes) -> None:
        """Note that the harness begins or ends exchanges."""
        # the queue is read at the next look; older time in it only makes that look more lenient
        if b"r" in said:
            self.time, self.cpu = time.monotonic(), self.cpu_now()
            self.renewed, self.waited = self.cpu, 0.0
        if b"r" in said or b"p" in said:
            self.active = said.rfind(b"r") > said.rfind(b"p")

    def measure(self) -> None:
        """Bring cpu, waited and time up to date."""
        now, cpu, queued = time.monotonic(), self.cpu_now(), self.queue_times()
        delay = (
            max((value - self.queued.get(task, 0) for task, value in queued.items()), default=0)
            / 1e9
        )
        if self.active:
            # Time in the queue is booked only when it is over; until then it looks like waiting,
            # and is afterwards taken back.
            self.waited = max(0.0, self.waited + now - self.time - (cpu - self.cpu) - delay)
        self.time, self.cpu, self.queued = now, cpu, queued

    def check(self) -> str:
        """Return "exit" while no limit is passed, else "timeout" or "waited"."""
        self.measure()
        if (
            self.cpu - self.renewed >= self.limits["cpu_seconds"]
            or self.cpu >= self.limits["total_cpu_seconds"]
        ):
            return "timeout"
        return (
            "waited"
            if self.waited >= self.limits["wall_seconds"] and not self.ready_to_run()
            else "exit"
        )

    def ready_to_run(self) -> bool:
        """Return whether a thread runs or stands in the queue just now."""
        with contextlib.suppress(OSError):
            for task in os.listdir(self.tasks):
                with open(f"{self.tasks}/{task}/stat", encoding="utf-8") as file:
                    if file.read().rpartition(")")[2].split()[0] == "R":
                        return True
        return False

    def cpu_now(self) -> float:
        try:
            return time.clock_gettime(self.id) if confine.LINUX else 0.0
        except OSError:  # the child has just ended
            return self.cpu

    def queue_times(self) -> dict[str, int]:
        """Return the nanoseconds that each thread spent ready to run but not running."""
        times = {}
        with contextlib.suppress(OSError):  # raised where the system is not Linux
            for task in os.listdir(self.tasks):
                with (
                    contextlib.suppress(OSError),
                    open(f"{self.tasks}/{task}/schedstat", encoding="utf-8") as file,
                ):
                    times[task] = int(file.read().split()[1])  # fails if the thread has just ended
        return times


if __name__ == "__main__":
    main()
