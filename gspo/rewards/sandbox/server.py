"""The fork server: forks a fresh confined child for each untrusted program and watches it.

It sees neither code nor outputs. So a later child finds nothing of an earlier program in the memory
that it inherits. The harness (runner.py) and the server talk through a control socket:

    request   one line {"kind", "limits"} with file descriptors: the child's channel to the
              harness, and for kind "stdin" also the program's input and output
    r         an exchange begins: the CPU and waiting allowances are renewed
    p         the exchange is over: waiting does not count
    k         kill the child
    report    {"why": "exit" | "timeout" | "killed", "status", "cpu", "memory_mb", "waited"}, sent
              by the server when the child has ended
    {}        sent by the server about once a second while a child runs, as a sign of life

The child talks to the harness itself, through its channel.

Waiting = time in which no thread of the child was running or ready to run: wall clock - CPU time -
time in the queue of the scheduler (/proc/PID/task/*/schedstat). On a busy machine a program
computes later, but does not wait longer. Of several threads only the longest queue time between two
looks counts. Threads that stand in the queue at the same time would otherwise excuse their program
many times over.

The command line gives the file descriptor of the control socket, the process id of the harness (0
if it is not visible), and a spare user id.
"""

import array
import contextlib
import dataclasses
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
# the folder that contains gspo
sys.path.insert(0, os.path.normpath(os.path.join(os.path.abspath(__file__), *[os.pardir] * 4)))

from gspo.rewards.sandbox import child as code_child  # noqa: E402
from gspo.rewards.sandbox import confine  # noqa: E402
from gspo.rewards.sandbox import stdin as code_stdin  # noqa: E402
from gspo.rewards.sandbox.frames import Channel  # noqa: E402

# these are imported once here and inherited, so that each program starts faster
PRELOADED_MODULES = """
abc bisect calendar cmath collections.abc copy dataclasses datetime decimal enum fractions functools
hashlib heapq io itertools math numbers operator queue random re statistics string textwrap
threading traceback types typing unicodedata zlib bz2 lzma secrets uuid atexit concurrent.futures
asyncio pprint ast inspect locale encodings.idna encodings.latin_1 encodings.ascii encodings.utf_16
ctypes linecache warnings
""".split()  # noqa: SIM905
TICK_SECONDS = 1.0  # between signs of life
CHANNEL_FD = 3
RULES_FD = 4
MAX_TABLE_FDS = 4096  # children close all descriptors up to this number
# that a program may print or read, as in LiveCodeBench's own harness (Python allows 4,300)
MAX_INTEGER_DIGITS = 50_000


def main() -> NoReturn:
    # the lowest number, which children are certain to close
    control = socket.socket(fileno=os.dup(int(sys.argv[1])))
    os.close(int(sys.argv[1]))
    harness_pid = int(sys.argv[2])
    spare_uid = int(sys.argv[3])
    if confine.LINUX:
        confine.prctl(confine.PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if harness_pid and os.getppid() != harness_pid:  # the harness ended before we asked
            os._exit(1)
        # so that nobody of the same user reads or stops us
        confine.prctl(confine.PR_SET_DUMPABLE, 0)
        confine.drop_bounding_set()
    for module in PRELOADED_MODULES:
        with contextlib.suppress(ImportError):
            __import__(module)
    sys.set_int_max_str_digits(MAX_INTEGER_DIGITS)
    os.environ.clear()
    folders = (*LIBRARY, os.path.join(sys.base_prefix, "lib"))
    readable = [path for path in folders if os.path.exists(path)]
    sys.path[:] = LIBRARY
    os.chdir("/")
    plan, layers = confine.prepare(spare_uid, readable)
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
    data = b""
    fds = array.array("i")
    while True:
        part, ancillary, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(3 * fds.itemsize))
        if not part:
            os._exit(0)
        data += part
        for _, kind, packed in ancillary:
            if kind == socket.SCM_RIGHTS:
                fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
        lines = data.split(b"\n")
        for line in lines[:-1]:
            if line.startswith(b"{"):  # other lines were meant for the previous child
                return json.loads(line), list(fds)
        data = lines[-1]


def start(request: dict[str, Any], fds: list[int], plan: confine.ConfinementPlan) -> int:
    """Fork the child of a request and return its process id."""
    server_pid = os.getpid()
    child = os.fork()
    if child == 0:
        exit_process = os._exit  # the program may replace os._exit
        try:
            serve_child(request, fds, plan, server_pid)
        finally:
            exit_process(70)
    return child


def serve_child(
    request: dict[str, Any], fds: list[int], plan: confine.ConfinementPlan, server_pid: int
) -> None:
    """Confine the child, then run the program in it."""
    limits = request["limits"]
    os.setsid()
    channel = Channel(CHANNEL_FD, write_limit=limits["output_bytes"])
    plan = place_descriptors(fds, plan)
    try:
        bounds = confine.Bounds(
            limits["total_cpu_seconds"], limits["memory_mb"], limits["output_bytes"]
        )
        confine.confine(plan, bounds, server_pid)
    except (OSError, ValueError) as error:
        channel.write({"failed": f"{type(error).__name__}: {error}"})
        return
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # so that too much output ends the program
    gc.enable()
    channel.write({"ready": True})
    if request["kind"] == "stdin":
        code_stdin.run(channel)
    else:
        code_child.run(request["kind"], channel)
    os._exit(0)


def place_descriptors(fds: list[int], plan: confine.ConfinementPlan) -> confine.ConfinementPlan:
    """Place the descriptors, and close all others.

    0: input, 1: output, 2: nothing, 3: the channel, 4: the landlock rules, until they are applied.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    channel, stdin, stdout = (*fds, nothing, nothing)[:3]
    wanted = [stdin, stdout, nothing, channel]
    if plan.landlock_fd is not None:
        wanted.append(plan.landlock_fd)
    # moved up, out of each other's way
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, len(wanted)) for fd in wanted]
    for i, fd in enumerate(high):
        os.dup2(fd, i, inheritable=i < 3)
    os.closerange(len(wanted), MAX_TABLE_FDS)
    return plan if plan.landlock_fd is None else dataclasses.replace(plan, landlock_fd=RULES_FD)


def watch(child: int, limits: dict[str, Any], control: socket.socket) -> dict[str, Any]:
    """Wait for the child's end, or bring it about, then return how it ended."""
    clock = Clock(child, limits)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    exited = os.pidfd_open(child) if hasattr(os, "pidfd_open") else -1
    if exited >= 0:
        poll.register(exited, select.POLLIN)
    why = ""  # empty while the child runs
    next_sign_of_life = time.monotonic() + TICK_SECONDS
    while not why:
        milliseconds = 1000 * clock.next_look_seconds() + 1 if exited >= 0 else 5
        ready = {fd for fd, _ in poll.poll(milliseconds)}
        if exited in ready:
            why = "exit"
            break
        if exited < 0 and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            why = "exit"
            break
        if control.fileno() in ready:
            commands = control.recv(4096)
            if not commands:
                why = "gone"
            elif b"k" in commands:
                why = "killed"
            clock.apply_commands(commands)
        else:
            why = clock.check()
        if clock.active and time.monotonic() > next_sign_of_life:
            next_sign_of_life = time.monotonic() + TICK_SECONDS
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
    return {
        "why": "timeout" if why == "waited" else why,
        "status": status,
        "cpu": usage.ru_utime + usage.ru_stime,
        "memory_mb": usage.ru_maxrss / (1024 if confine.LINUX else 1 << 20),
        "waited": why == "waited",
    }


class Clock:
    """The CPU time and the waiting of a child, beside its allowances."""

    def __init__(self, child: int, limits: dict[str, Any]) -> None:
        self.limits = limits
        self.tasks = f"/proc/{child}/task"
        self.id = (~child << 3) | 2  # the kernel's number for the CPU clock of a process
        self.active = True
        self.queued: dict[str, int] = {}
        self.waited = 0.0
        self.cpu = 0.0
        self.renewed = 0.0  # `cpu` when the allowances were last renewed
        self.time = time.monotonic()

    def next_look_seconds(self) -> float:
        """Return the seconds until the next look.

        By then a limit may be reached, or waiting must be told from queueing."""
        exchange_end = self.limits["cpu_seconds"] + self.renewed
        cpu_left = min(exchange_end, self.limits["total_cpu_seconds"]) - self.cpu
        return max(0.001, min(TICK_SECONDS / 4, self.limits["wall_seconds"] / 8, cpu_left))

    def apply_commands(self, commands: bytes) -> None:
        """Note that the harness begins or ends exchanges."""
        # The queue is read at the next look. Older time in it only makes that look more lenient.
        if b"r" in commands:
            self.time = time.monotonic()
            self.cpu = self.cpu_now()
            self.renewed = self.cpu
            self.waited = 0.0
        if b"r" in commands or b"p" in commands:
            self.active = commands.rfind(b"r") > commands.rfind(b"p")

    def measure(self) -> None:
        """Bring cpu, waited and time up to date."""
        now = time.monotonic()
        cpu = self.cpu_now()
        queued = self.queue_times()
        delays = [value - self.queued.get(task, 0) for task, value in queued.items()]
        delay = max(delays, default=0) / 1e9
        if self.active:
            # Time in the queue is booked only when it is over. Until then it counts as waiting,
            # which is taken back afterwards.
            self.waited = max(0.0, self.waited + now - self.time - (cpu - self.cpu) - delay)
        self.time = now
        self.cpu = cpu
        self.queued = queued

    def check(self) -> str:
        """Return "" while no limit is passed, else "timeout" or "waited"."""
        self.measure()
        if self.cpu - self.renewed >= self.limits["cpu_seconds"]:
            return "timeout"
        if self.cpu >= self.limits["total_cpu_seconds"]:
            return "timeout"
        if self.waited >= self.limits["wall_seconds"] and not self.ready_to_run():
            return "waited"
        return ""

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
        with contextlib.suppress(OSError):  # raised if the system is not Linux
            for task in os.listdir(self.tasks):
                with (
                    contextlib.suppress(OSError),
                    open(f"{self.tasks}/{task}/schedstat", encoding="utf-8") as file,
                ):
                    times[task] = int(file.read().split()[1])  # fails if the thread has just ended
        return times


if __name__ == "__main__":
    main()
