"""The fork server: runs one untrusted program at a time in a child of its own. Started by gspo.rewards.code_runner.

A standalone script on the standard library alone, so that it stays small (a fork costs what its pages cost) and holds
nothing worth reading: no torch, no expected values, an empty environment. It answers each line on its input,
{"code", "function", "arguments"}, with one line

    {"ended": "exit" | "timeout" | "wall" | "output_limit", "output": what the child wrote}

`output` is a space, written before the program had its turn, and then the program's own word for what happened, which
must not be believed further than its values can be compared.
The command line gives CPU seconds, wall-clock seconds, megabytes, bytes of output, and the parent's process id.
"""

import contextlib
import ctypes
import gc
import heapq  # noqa: F401  the modules marked so are for the programs: a child may not be able to read the library
import itertools  # noqa: F401
import json
import math
import os
import resource
import select
import signal
import string  # noqa: F401
import sys
import time

CPU_SECONDS, WALL_SECONDS = float(sys.argv[1]), float(sys.argv[2])
MEMORY_MB, OUTPUT_BYTES, PARENT = int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
RESULT_FD = 3
NOBODY = 65534
DEEPEST = 8  # levels of nested lists in a result
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38


class Unserialisable(Exception):
    """A value that is not plain data."""


def prctl(option, value):
    if LIBC:
        LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def serve():
    die_with(PARENT)
    os.environ.clear()
    for _ in range(20):  # specialised bytecode and allocated arenas are inherited: each child starts faster
        execute("def f(x):\n a=[x for _ in 'ab']\n return sum(a)", "f", [[1], [2]])
    gc.disable()
    gc.freeze()
    for line in sys.stdin.buffer:
        # no name for the reply: the next program must not find the values of this one in our frames
        sys.stdout.buffer.write(json.dumps(run(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


def die_with(parent):
    """Has the kernel kill this process when its parent ends (Linux; elsewhere the end of input does it)."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def run(request):
    """Forks a child for one program, watches it, and leaves nothing of it behind."""
    reading, writing = os.pipe()
    server = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            confine(server, writing)
            write_all(RESULT_FD, b" ")  # "the program's turn": without it the failure is ours
            write_all(RESULT_FD, json.dumps(execute(**request)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    output, ended = watch(child, reading)
    os.close(reading)
    end_group(child)
    _, status, _ = os.wait4(child, 0)
    if ended == "exit" and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        ended = "timeout"
    return {"ended": ended, "output": output.decode("latin-1")}


def watch(child, reading):
    """The child's output until it closes the pipe or passes a limit, and which.

    The limit that counts is CPU time: on a busy machine an innocent program waits, and must not be blamed for it.
    """
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    deadline = time.monotonic() + WALL_SECONDS
    output = bytearray()
    while True:
        cpu_left, wall_left = CPU_SECONDS - cpu_time(child), deadline - time.monotonic()
        if cpu_left <= 0 or wall_left <= 0:
            return output, "timeout" if cpu_left <= 0 else "wall"
        if poll.poll(math.ceil(1000 * min(cpu_left, wall_left))):
            chunk = os.read(reading, 65536)
            output += chunk
            if not chunk:
                return output, "exit"
            if len(output) > OUTPUT_BYTES:
                return output[:0], "output_limit"


def cpu_time(child):
    """CPU seconds of a child so far; 0 where the system cannot tell (there RLIMIT_CPU's whole seconds must do)."""
    if not LIBC:
        return 0.0
    return time.clock_gettime((~child << 3) | 2)  # the kernel's number for the CPU clock of a process


def end_group(child):
    """Kills the child, and the session it leads."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)


def confine(server, writing):
    """Takes away what the program does not need. The order matters: limits, then rights, then the death signal."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.dup2(writing, RESULT_FD)
    os.closerange(RESULT_FD + 1, 256)
    os.chdir("/")
    seconds = math.ceil(CPU_SECONDS) + 1
    limits = [("CPU", seconds), ("AS", MEMORY_MB << 20), ("FSIZE", 0), ("NOFILE", 16), ("CORE", 0), ("NPROC", 0)]
    for name, limit in limits:
        number = getattr(resource, f"RLIMIT_{name}")
        bounds = [limit, *(bound for bound in resource.getrlimit(number) if bound != resource.RLIM_INFINITY)]
        resource.setrlimit(number, (min(bounds), min(bounds)))
    if os.geteuid() == 0:  # NPROC does not bind root, and root may read the memory of the process with the answers
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    die_with(server)  # last: a change of user clears it


def execute(code, function, arguments):
    """[status, values]: "ok" and one value per argument list, or what went wrong first."""
    try:
        compiled = compile(code, "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):  # ValueError: NUL bytes, surrogates
        return ["compile_error", []]
    try:
        namespace = {"__name__": "program"}
        exec(compiled, namespace)
        values = [plain(namespace[function](*each)) for each in arguments]
    except Unserialisable:
        return ["unserialisable", []]
    except MemoryError:
        return ["memory", []]
    except BaseException:  # an untrusted program raises what it likes, SystemExit and KeyboardInterrupt included
        return ["runtime_error", []]
    return ["ok", values]


def plain(value, depth=0):
    """The value as plain data. Types are compared exactly: a subclass with its own `__eq__` is not plain."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int and value.bit_length() <= 4096:  # longer ones cannot be an answer, and cost time to print
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) in (list, tuple) and depth < DEEPEST:
        return [plain(item, depth + 1) for item in value]
    raise Unserialisable


def write_all(fd, data):
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    serve()
