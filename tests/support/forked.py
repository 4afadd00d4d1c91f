"""Runs a script like `subprocess.run`, in a process of its own that need not import its libraries
first.

    done = forked.run([sys.executable, "-P", "-m", "gspo", "train", "steps=3"], cwd=folder)
    done = forked.run([sys.executable, "-c", "print(input())"], input="text", seconds=60)
    process = forked.start([sys.executable, "-P", "-m", "gspo", "train"], cwd=folder)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)

A shell runs `python forked.py -P -m gspo train` with the server's address in its environment.

Importing PyTorch, transformers and W&B takes longer than most runs of the tests. Here one server,
for all processes of a test run, has imported them. It forks a handler for each connection, and the
handler forks the script: a real process with arguments, environment, folder, session, exit code and
output of its own, which may be killed. What reads the environment while it is being imported, and
signals that come while it is, are for `subprocess.run`.
"""

import atexit
import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

HAS_WANDB = find_spec("wandb") is not None  # a machine without it runs the tests that need none
MODULES = (  # what the scripts import, at their top or later
    "gspo.io.interrupt",  # the first, as in every script
    # by wandb.init; it searches all modules: there are few yet
    *(["wandb.sdk.launch.inputs.internal"] if HAS_WANDB else []),
    "pandas",  # for W&B's tables
    "pytest",  # for functions of the tests (ranked.py)
    "transformers",
    "gspo.evaluation.resumable",
    "gspo.run.build",
    "gspo.run.loop",
    "gspo.run.sweeps",
    *(["gspo.tracking.dashboard"] if HAS_WANDB else []),
    "gspo.tracking.run_report",
    "gspo.analysis.script",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    *(["verifiers.v1"] if find_spec("verifiers") else []),  # in `make test-environments` alone
)
# transformers imports a class, and with it much else, when its name is first read.
CLASSES = (
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "DynamicCache",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
ADDRESS = "TESTS_FORKED_ADDRESS"
NUMBER = struct.Struct("i")  # what a handler sends: the script's process id, then its return code


def _file() -> TextIO:
    return tempfile.TemporaryFile("w+")


class Script:
    """A script that was started. Its attributes and methods are those of `subprocess.Popen`."""

    def __init__(self, command: list[str], cwd: Path | None, env: dict[str, str] | None):
        assert command[0] == sys.executable, command[0]
        self.args = command
        self.returncode: int | None = None
        self._cwd = str(cwd or os.getcwd())
        self._env = dict(os.environ if env is None else env)
        self._files = [_file() for _ in ("stdin", "stdout", "stderr")]

    def begin(self, text: str, seconds: int) -> None:
        self._files[0].write(text)
        self._files[0].flush()
        request = {
            "argv": self.args[1:],
            "cwd": self._cwd,
            "env": self._env,
            "files": [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._files],
            "seconds": seconds,
        }
        self._connection = connect(server())
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._number()

    def _number(self) -> int:
        received = self._connection.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(received) < NUMBER.size:
            raise OSError("the server of the forked scripts has ended")
        return NUMBER.unpack(received)[0]

    def poll(self) -> int | None:
        """The return code, None while the script runs. It is negative after a deadly signal."""
        ended = self.returncode is None and select.select([self._connection], [], [], 0)[0]
        return self.wait() if ended else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self._number()
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What the script wrote to its output and to its error output."""
        self.wait(timeout)
        for file in self._files:
            file.seek(0)
        output, errors = (file.read() for file in self._files[1:])
        return output, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait_for_session(self, seconds: float) -> None:
        """Wait until the processes that the script started, and it itself, have ended."""
        deadline = time.monotonic() + seconds
        while left := in_session(self.pid):
            assert time.monotonic() < deadline, f"processes {left} of {self.args} have not ended"
            time.sleep(0.1)


def in_session(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                pids.append(int(path.parent.name))
    return pids


def start(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> Script:
    """The script, started as the leader of a session and process group of its own."""
    script = Script(command, cwd, env)
    script.begin("", 0)
    return script


def run(
    command: list[str],
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    input: str = "",
    seconds: int = 0,
) -> subprocess.CompletedProcess:
    """The script's end; `command` begins with sys.executable. The return code of a killed one is
    negative, as of one that SIGALRM ends because it has taken more than `seconds`."""
    script = Script(command, cwd, env)
    script.begin(input, seconds)
    output, errors = script.communicate()
    return subprocess.CompletedProcess(command, script.wait(), output, errors)


@cache
def server() -> str:
    """The server's address. The first of the test processes to ask starts the server, which ends
    with the last of them.
    """
    if ADDRESS in os.environ:
        return f"\0{os.environ[ADDRESS]}"
    address = f"\0tests-forked-{os.environ.get('PYTEST_XDIST_TESTRUNUID') or os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            listener.listen()
            inherited = listener.fileno()
            subprocess.Popen(
                [sys.executable, __file__, str(inherited)],
                start_new_session=True,
                pass_fds=[inherited],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
    _lifelines.append(connect(address))
    return address


_lifelines: list[socket.socket] = []  # whose handler, and so the server, ends with this process


def connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + 60
    # bound by another process, which has yet to listen
    while error := connection.connect_ex(address):
        if time.monotonic() > deadline:
            message = f"the server of the forked scripts does not listen: {os.strerror(error)}"
            raise OSError(error, message)
        time.sleep(0.01)
    return connection


def _serve(listener: socket.socket) -> None:
    """Import once; fork a handler per connection. When the last handler has ended, the server ends."""
    for module in MODULES:
        importlib.import_module(module)
    for name in CLASSES:
        getattr(sys.modules["transformers"], name)
    # W&B's
    folders = [kept for kept in gc.get_objects() if type(kept) is tempfile.TemporaryDirectory]
    for folder in folders:
        folder.cleanup()
    gc.freeze()  # else a child's first collection copies every page
    handlers = {_handler(listener, folders)}  # of the process that started the server
    listener.settimeout(1)
    while handlers:
        with suppress(TimeoutError):
            handlers.add(_handler(listener, folders))
        handlers = {handler for handler in handlers if os.waitpid(handler, os.WNOHANG) == (0, 0)}


def _handler(listener: socket.socket, folders: list[tempfile.TemporaryDirectory]) -> int:
    """Wait for a connection, and fork the process that runs its script and says how it ended."""
    connection, _ = listener.accept()
    if handler := os.fork():
        connection.close()
        return handler
    listener.close()
    connection.settimeout(None)
    request = connection.makefile().readline()
    if not request:  # a test process has ended
        os._exit(0)
    if child := os.fork():
        with suppress(ConnectionError):  # the test process has ended
            connection.sendall(NUMBER.pack(child))
            _wait(child, connection)
        os._exit(0)
    code = 1
    try:
        connection.close()
        for folder in folders:
            folder.__init__()  # each process makes its own, and removes it at its end
        code = _become(**json.loads(request))
    except BaseException:  # no error may lead back into the loop of the server
        traceback.print_exc()
    os._exit(code)


def _wait(child: int, connection: socket.socket) -> None:
    """Send the return code of the script. If the test process ends before, end its session."""
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    # its id is not used again before the test has the code
    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    connection.sendall(NUMBER.pack(code))
    os.waitpid(child, 0)


def _become(argv: list[str], cwd: str, env: dict[str, str], files: list[str], seconds: int) -> int:
    """This process runs the script, as if it had been started so; its exit code."""
    os.setsid()
    # a background job of a shell ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(seconds)
    for descriptor, path in enumerate(files):
        opened = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    code = 0
    try:
        if argv[0] == "-c":
            sys.argv[:], sys.path[0] = ["-c", *argv[2:]], ""
            exec(argv[1], {"__name__": "__main__"})
        elif argv[:3] == ["-P", "-m", "gspo"]:
            sys.argv[:], sys.path[0] = ["gspo", *argv[3:]], str(Path(sys.executable).parent)
            runpy.run_module("gspo", run_name="__main__")
        else:
            sys.argv[:], sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    # what the interpreter does at its end, but for taking every module apart
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    return code


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        _serve(socket.socket(fileno=int(sys.argv[1])))
    else:
        ended = run([sys.executable, *sys.argv[1:]])
        print(ended.stdout, end="")
        print(ended.stderr, end="", file=sys.stderr)
        sys.exit(ended.returncode)
