"""Starts fork servers and carries their control messages (see server.py).

The servers run inside bubblewrap if that works."""

import array
import contextlib
import itertools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gspo.rewards.child_process import bare_environment

SCRIPT = Path(__file__).resolve().with_name("server.py")
START_SECONDS = 120.0  # a server that has not answered by then is given up
SILENCE_SECONDS = 60.0  # a server with a running child gives a sign of life every second
# the capabilities that root keeps inside bubblewrap
CAPABILITIES = ("SETUID", "SETGID", "SETPCAP", "KILL", "DAC_READ_SEARCH")
FIRST_UID = 0x40000000

_counter = itertools.count()
_launcher: dict[int, ThreadPoolExecutor] = {}  # by process id, since threads do not survive a fork
_bubblewrap_works: dict[int, bool] = {}  # by user id


class ServerFailure(OSError):
    """Raised when the fork server could not be started, or has died."""


class ForkServer:
    """One fork server: its process, its control socket, and the layers that it found."""

    def __init__(self, bubblewrap: bool) -> None:
        self.programs = 0
        self.lines: list[bytes] = []
        self.rest = b""
        self.layers: dict[str, str] = {}
        boxed = bubblewrap and _bubblewrap_works.get(
            os.geteuid(), shutil.which("bwrap") is not None
        )
        if boxed:
            try:
                self._start(boxed=True)
            except ServerFailure:
                boxed = False
                _bubblewrap_works[os.geteuid()] = False
        if not boxed:
            self._start(boxed=False)
        if boxed:
            state = "on"
        elif not bubblewrap:
            state = "off: switched off"
        else:
            state = "off: it does not work here" if shutil.which("bwrap") else "off: not installed"
        self.layers = {"bubblewrap": state, **self.layers}

    def begin(self, kind: str, limits: dict[str, Any], fds: list[int]) -> None:
        """Ask for a child that gets the descriptors. Raises ServerFailure if the server is gone."""
        self.programs += 1
        request = json.dumps({"kind": kind, "limits": limits}).encode() + b"\n"
        descriptors = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        try:
            self.control.sendmsg([request], [descriptors])
        except OSError as error:
            raise ServerFailure(f"the fork server is gone: {error}") from None

    def send_command(self, command: bytes) -> None:
        """Send r, p or k (server.py). `receive_report` notices if the server is dead."""
        with contextlib.suppress(OSError):
            self.control.send(command + b"\n")

    def receive_report(self) -> dict[str, Any] | None:
        """Wait for a message. Return the report of a child's end, or None for a sign of life.

        Raises ServerFailure if the server has died."""
        if not self.lines:
            try:
                data = self.control.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                raise ServerFailure("the fork server has died")
            *self.lines, self.rest = (self.rest + data).split(b"\n")
        while self.lines:
            line = self.lines.pop(0)
            if line != b"{}":
                return json.loads(line)
        return None

    def stop(self) -> None:
        """End the server and collect it. Its child dies with it."""
        self.control.close()
        self.process.kill()
        self.process.wait()

    def _start(self, boxed: bool) -> None:
        self.control, server_socket = socket.socketpair()
        # a user id that nobody else has, so that limits count one child
        uid = FIRST_UID + (os.getpid() % (1 << 20)) * 256 + next(_counter) % 256
        # With an otherwise empty environment -s -P -S isolate as -I does, which would ignore the
        # hash seed: the order of a program's sets, and with it a reward, must not depend on the
        # run.
        command = [sys.executable, "-s", "-P", "-S", "-B", "-X", "utf8", str(SCRIPT)]
        harness_pid = 0 if boxed else os.getpid()
        command += [str(server_socket.fileno()), str(harness_pid), str(uid)]
        if boxed:
            command = [*bubblewrap_command(), *command]
        # with one arena threads reserve no memory
        environment = bare_environment() | {"MALLOC_ARENA_MAX": "1"}
        self.process = _launch(
            lambda: subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if boxed else None,
                env=environment,
                pass_fds=[server_socket.fileno()],
                # Ctrl-C reaches the harness alone, which then ends the server
                start_new_session=True,
            )
        )
        server_socket.close()
        deadline = time.monotonic() + START_SECONDS
        while not self.layers:
            if not readable(self.control, deadline - time.monotonic()):
                self.stop()
                raise ServerFailure(f"the fork server did not start in {START_SECONDS:.0f} s")
            try:
                self.layers = self.receive_report() or {}
            except ServerFailure:
                self.stop()
                raise


def readable(connection: socket.socket, seconds: float) -> bool:
    """Return whether the connection can be read within `seconds`."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * seconds)))


def _launch(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start a process from a thread that lives as long as this process.

    Linux sends the death signal when the starting thread ends, not the starting process."""
    pid = os.getpid()
    if pid not in _launcher:
        _launcher.setdefault(pid, ThreadPoolExecutor(1, thread_name_prefix="launcher"))
    return _launcher[pid].submit(start).result()


def bubblewrap_command() -> list[str]:
    """Return the command that starts bubblewrap with own namespaces and few readable files.

    The file system is read-only. It holds the interpreter, the shared libraries and this package.
    """
    command = [
        shutil.which("bwrap") or "bwrap",
        "--die-with-parent",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
    ]
    command += ["--unshare-cgroup-try", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    # no user namespace for root, since only in this one are there unused users to become
    if os.geteuid() == 0:
        command += ["--cap-drop", "ALL"]
        for name in CAPABILITIES:
            command += ["--cap-add", f"CAP_{name}"]
    else:
        command += ["--unshare-user"]
    for path in ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin"):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    package = SCRIPT.parents[2]
    paths = [sys.prefix, sys.base_prefix]
    paths += [str(package / name) for name in ("__init__.py", "io", "rewards")]
    paths = [path for path in dict.fromkeys(paths) if path not in ("/", "/usr")]
    for path in [*paths, "/etc/ld.so.cache", "/etc/localtime"]:
        if os.path.exists(path):
            command += ["--ro-bind", os.path.realpath(path), path]
    return [*command, "--chdir", "/", "--"]
