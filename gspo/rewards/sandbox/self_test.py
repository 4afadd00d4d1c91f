"""The start check of the sandbox: a few probes, and refusal to run if one of them gets through.

A probe is a program that tries a forbidden action and prints `granted` if that works. Each probe
aims at another part of the confinement. All attacks are in experiments/audit.
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

PRELUDE = """
import ctypes, os, socket, time
FOLDER = input()
HARNESS_PID = int(input())
MEMORY_MB = int(input())

def attempt(*actions):
    for action in actions:
        try:
            result = action()
        except (OSError, MemoryError):
            continue
        if result != -1:
            os.write(1, b"granted")
"""
PROBES = {
    "read a file": 'attempt(lambda: open(FOLDER + "/secret").read())',
    "write a file": """
folders = (FOLDER, "/tmp", "/var/tmp", "/dev/shm", ".", os.path.dirname(os.__file__))
attempt(lambda: open(FOLDER + "/new", "w"), lambda: open(FOLDER + "/secret", "a"))
attempt(*[lambda f=f: os.open(f, os.O_TMPFILE | os.O_RDWR) for f in folders])
""",
    "open a socket": """
families = (socket.AF_INET, socket.AF_UNIX)
attempt(*[lambda f=f: socket.socket(f, socket.SOCK_DGRAM) for f in families])
""",
    "start a process": "attempt(lambda: os.fork() or os._exit(0))",
    "start a shell": 'attempt(lambda: os.execv("/bin/sh", ["sh", "-c", "echo granted"]))',
    "signal the harness": """
others = {HARNESS_PID, os.getppid()} - {os.getpid()}  # bubblewrap counts process ids anew
attempt(*[lambda pid=pid: os.kill(pid, 0) for pid in others])
""",
    "be traced": "attempt(lambda: ctypes.CDLL(None).ptrace(0, 0, 0, 0))",
    "exceed the memory limit": "attempt(lambda: bytearray((MEMORY_MB + 32) << 20))",
    "exceed the CPU limit": """
while time.process_time() < 4: pass  # beyond the kernel's own limit too
os.write(1, b"granted")
""",
}
CPU_PROBE_SECONDS = 0.25  # the CPU limit of the last probe, so that the check takes little time
# the results by user and layers, of this process or its parent
_results: dict[tuple[Any, ...], dict[str, str]] = {}


def require(slot: Any, allow_weak: bool) -> None:
    """Raise ValueError, with the reason, unless the slot confines programs or `allow_weak`."""
    if allow_weak:
        return
    problem = weakness(slot.layers())
    if not problem:
        results = run_probes(slot)
        problem = "; ".join(f"probe {n!r}: {r}" for n, r in results.items() if r != "stopped")
    if problem:
        raise ValueError(
            "allow_weak_sandbox=False: programs would not be confined on this machine: "
            f"{problem}; only the command line can allow that: allow_weak_sandbox=true for gspo "
            "evaluate and gspo sample, in training task.allow_weak_sandbox=true (of mixed tasks "
            "task.code.allow_weak_sandbox=true; beside resume= with ++)"
        )


def weakness(layers: dict[str, str]) -> str:
    """Return why the layers are too few, or "" if they suffice.

    Landlock together with seccomp suffices, and so does bubblewrap."""
    missing = [name for name in ("landlock", "seccomp") if layers[name].startswith("off")]
    if not missing or layers["bubblewrap"] == "on":
        return ""
    names = " and ".join(missing)
    return f"{names} not offered by the kernel, and bubblewrap is {layers['bubblewrap']}"


def run_probes(slot: Any) -> dict[str, str]:
    """Return the result of each probe: "stopped", or how the sandbox failed.

    The probes run once per user and kind of confinement."""
    # "user" contains a number that differs for each slot
    layers = {name: state for name, state in slot.layers().items() if name != "user"}
    key = (os.geteuid(), *sorted(layers.items()))
    if key in _results:
        return _results[key]
    results = {}
    # everybody may read and write the files, so the file modes do not stop a probe
    with tempfile.TemporaryDirectory(prefix="decoys-") as folder:
        Path(folder).chmod(0o777)
        Path(folder, "secret").touch()
        Path(folder, "secret").chmod(0o666)
        stdin = f"{folder}\n{os.getpid()}\n{slot.limits.memory_mb}\n"
        for name, program in PROBES.items():
            limits = slot.limits
            if name == "exceed the CPU limit":
                seconds = min(CPU_PROBE_SECONDS, limits.cpu_seconds)
                limits = replace(limits, cpu_seconds=seconds, total_cpu_seconds=seconds)
            output, ended = slot.run_program(PRELUDE + program, stdin, limits)
            results[name] = "the program did it" if b"granted" in output else "stopped"
            if ended.why in ("sandbox-error", "compile-error", "protocol"):
                results[name] = f"the sandbox failed: {ended.why} {ended.detail}"
    output, ended = slot.run_program("print(6 * 7)", "")
    if output != b"42\n":
        results["an honest program"] = f"it printed {output[:40]!r} ({ended.why})"
    _results[key] = results
    return results
