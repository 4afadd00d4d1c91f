"""The decoys that attacks aim at, all harmless and the scene's own, and how the harness sees an
attack's effects.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
PLACES = (
    "/tmp",
    "/dev/shm",
    "/var/tmp",
    "/run/lock",
    "/",
    sys.prefix,
    str(PROJECT),
    os.path.dirname(os.__file__),
)
# most bytes of the temporary folder's path, since the path of a Unix socket in it has 108 at most
LONGEST_FOLDER = 70
THREADS = 64  # more than this at the same time count as a breach
LINUX = sys.platform == "linux"


def long_seconds(limits: Any) -> float:
    """Return how long programs run that would run for ever: well beyond the limits."""
    return 2 * (limits.cpu_seconds + limits.wall_seconds) + 2


def package_folders() -> list[str]:
    """Return where packages are installed: in the environment, in the interpreter under it, and by
    the system.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = [sysconfig.get_path("purelib"), f"{sys.base_prefix}/lib/{version}/site-packages"]
    for prefix in ("/usr/lib", "/usr/local/lib"):
        found += [
            f"{prefix}/{python}/{kind}-packages"
            for python in ("python3", version)
            for kind in ("site", "dist")
        ]
    return list(dict.fromkeys(filter(os.path.isdir, found)))


class Scene:
    """Decoys in a temporary folder that is open to everybody, so that file modes are not what stops
    an attack.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # 15 characters, the most that a process's name may have
        self.name = f"a{secrets.token_hex(7)}"
        self.token = f"tok{secrets.token_hex(12)}"
        self.word = f"won{secrets.token_hex(8)}"
        folder.chmod(0o777)
        self.secret, self.inherited = folder / "secret", folder / "inherited"
        for file in (self.secret, self.inherited):
            file.write_text(self.token, encoding="utf-8")
            file.chmod(0o666)
        self.listeners = dict(self._listen())
        self.before = self._files()

    def _listen(self) -> Iterator[tuple[str, socket.socket]]:
        yield "TCP", socket.create_server(("127.0.0.1", 0))
        for name, address in (
            ("UDP", ("127.0.0.1", 0)),
            ("UNIX", str(self.folder / "socket")),
            ("ABSTRACT", f"\0{self.name}"),
        ):
            if name == "ABSTRACT" and not LINUX:
                continue
            listener = socket.socket(
                socket.AF_INET if name == "UDP" else socket.AF_UNIX, socket.SOCK_DGRAM
            )
            listener.bind(address)
            yield name, listener
        (self.folder / "socket").chmod(0o777)

    @cached_property
    def victim(self) -> subprocess.Popen[bytes]:
        """Start a process with the secret in its arguments, environment and memory."""
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            "import sys; kept = sys.argv[1] * 2; sys.stdin.read()",
            self.token,
        ]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env={"DECOY_SECRET": self.token})
        self._victim_before = state_of(process.pid)
        return process

    def fill(self, program: str, limits: Any) -> str:
        """Return the program with the addresses of the decoys in place of @NAMES@."""
        values = {
            "SECRET": lambda: self.secret,
            "FOLDER": lambda: self.folder,
            "PROJECT": lambda: PROJECT,
            "PREFIX": lambda: sys.prefix,
            "PACKAGES": lambda: os.pathsep.join(package_folders()),
            "NAME": lambda: self.name,
            "WORD": lambda: self.word,
            "TOKEN": lambda: self.token,
            "TCP": lambda: self.listeners["TCP"].getsockname()[1],
            "UDP": lambda: self.listeners["UDP"].getsockname()[1],
            "UNIX": lambda: self.folder / "socket",
            "ABSTRACT": lambda: self.name,
            "VICTIM": lambda: self.victim.pid,
            "HOST": os.getpid,
            "MEMORY": lambda: limits.memory_mb,
            "OUTPUT": lambda: limits.output_bytes,
            "LONG": lambda: long_seconds(limits),
        }
        for name, value in values.items():
            if f"@{name}@" in program:
                program = program.replace(f"@{name}@", str(value()))
        return program

    def effects(self) -> Iterator[str]:
        """Yield every effect that there is now, each once. What was changed is put back for the
        next attack.
        """
        for name, listener in self.listeners.items():
            if received(name, listener):
                yield f"something arrived at the {name} socket"
        for place in dict.fromkeys(
            Path(folder) / self.name for folder in (self.folder, *PLACES, os.getcwd())
        ):
            if place.is_symlink() or place.exists():
                place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
                yield f"{place} was made"
        if (files := self._files()) != self.before:
            yield f"the files were changed: {set(self.before) ^ set(files)}"
            for file in (self.secret, self.inherited):
                file.write_text(self.token, encoding="utf-8")
                file.chmod(0o666)
            self.before = self._files()
        if "victim" in self.__dict__ and state_of(self.victim.pid) != self._victim_before:
            yield f"another process was changed: {self._victim_before} became {state_of(self.victim.pid)}"
            self._end_victim()

    def _files(self) -> list[tuple[Any, ...]]:
        """Return what can be changed about the files, without the time of the last access."""
        found = []
        for file in (self.secret, self.inherited):
            with contextlib.suppress(OSError):
                s = file.stat()
                found.append(
                    (file.name, s.st_ino, s.st_mode, s.st_uid, s.st_nlink, s.st_size, s.st_ctime_ns)
                )
        return found

    def _end_victim(self) -> None:
        if "victim" in self.__dict__:
            self.victim.kill()
            self.victim.communicate()
            del self.victim

    def close(self) -> None:
        for listener in self.listeners.values():
            listener.close()
        self._end_victim()


def temporary_folder() -> str:
    """Return the usual temporary folder, unless a socket's path in it would be too long."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) < LONGEST_FOLDER else "/tmp"


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    """Set the scene in a temporary folder, and clear it away afterwards."""
    with tempfile.TemporaryDirectory(prefix="decoys-", dir=temporary_folder()) as folder:
        decoys = Scene(Path(folder))
        try:
            yield decoys
        finally:
            decoys.close()


@contextlib.contextmanager
def exposed(decoys: Scene) -> Iterator[None]:
    """Put the secret also into the environment, and into a descriptor, that processes started
    meanwhile inherit.
    """
    fd = os.open(decoys.inherited, os.O_RDWR)
    os.set_inheritable(fd, True)
    os.environ["DECOY_SECRET"] = decoys.token
    try:
        yield
    finally:
        os.environ.pop("DECOY_SECRET", None)
        os.close(fd)


def state_of(pid: int) -> tuple[Any, ...]:
    """Return what others could change about a process: whether it is alive, stopped or traced, its
    limits and scheduling."""
    if not LINUX:
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return ("alive",)
        return ()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        # on a busy machine a killed process lives on for a moment, with the signal pending
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        pending = [line for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
        limits = [
            resource.prlimit(pid, kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)
        ]
        scheduling = (
            os.getpriority(os.PRIO_PROCESS, pid),
            os.sched_getaffinity(pid),
            os.sched_getscheduler(pid),
        )
    except OSError:
        return ()
    state = fields[0] if fields[0] in "TtZX" else "alive"
    return (state, *pending, tuple(limits), *scheduling)


class Watch(threading.Thread):
    """Counts, while a program runs, the most processes, threads and MB that processes of its name
    had at one time (Linux)."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True)
        self.marker = name
        self.ended = threading.Event()
        self.processes = self.threads = self.megabytes = 0

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()

    def run(self) -> None:
        while not self.ended.wait(0.03):
            pids = named(self.marker)
            self.processes = max(self.processes, len(pids))
            self.threads = max(self.threads, sum(count(f"/proc/{pid}/task") for pid in pids))
            self.megabytes = max(self.megabytes, sum(map(resident_mb, pids)))

    def breaches(self, memory_mb: int) -> Iterator[str]:
        if self.processes > 1:
            yield f"{self.processes} processes at a time"
        if self.threads > THREADS:
            yield f"{self.threads} threads at a time"
        if self.megabytes > 1.25 * memory_mb + 32:
            yield f"{self.megabytes} MB, allowed {memory_mb}"


def named(name: str) -> list[int]:
    """Return the processes of a name, in any namespace; zombies do not count."""
    found = []
    for entry in os.listdir("/proc") if LINUX else ():
        if entry.isdigit():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8")
                if f"({name})" in text and text.rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(entry))
    return found


def left_over(name: str, seconds: float = 0.5) -> list[int]:
    """Return the processes of a name that are still there after some time, and kill them."""
    deadline = time.monotonic() + seconds
    while (pids := named(name)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return pids


def count(folder: str) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def resident_mb(pid: int) -> int:
    try:
        return (
            int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
            * resource.getpagesize()
            >> 20
        )
    except OSError:
        return 0


def received(name: str, listener: socket.socket) -> bool:
    """Take in everything that arrived at a socket, and return whether anything did."""
    listener.setblocking(False)
    arrived = False
    with contextlib.suppress(BlockingIOError):
        while True:
            if name == "TCP":
                connection, _ = listener.accept()
                connection.close()
            else:
                listener.recv(100)
            arrived = True
    return arrived
