"""Runs a script like `subprocess.run`, in a process of its own that need not import its libraries
first.

    done = forked.run([sys.executable, "-P", "-m", "gspo", "train", "steps=3"], cwd=folder)
    done = forked.run([sys.executable, "-c", "print(input())"], input="text", seconds=60)

Importing PyTorch, transformers and W&B takes longer than most runs of the tests. Here one server,
for all processes of a test run, has imported them. It forks a handler for each test process that
connects, and the handler forks a child for each script: a real process with arguments, environment,
folder, exit code and output of its own, which may be killed. What reads the environment while it is
being imported, and signals that come while it is, are for `subprocess.run`.
"""

import atexit
import errno
import gc
import importlib
import json
import os
import runpy
import signal
import socket
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
_one_at_a_time = threading.Lock()


def run(
    command: list[str],
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    input: str = "",
    seconds: int = 0,
) -> subprocess.CompletedProcess:
    """The script's end; `command` begins with sys.executable. The return code of a killed one is
    negative, as of one that SIGALRM ends because it has taken more than `seconds`."""
    assert command[0] == sys.executable, command[0]
    with _file() as given, _file() as out, _file() as err, _one_at_a_time:
        given.write(input)
        given.flush()
        asked = {
            "argv": command[1:],
            "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "files": [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (given, out, err)],
            "seconds": seconds,
        }
        connection = server()
        connection.write(json.dumps(asked) + "\n")
        connection.flush()
        code = int(connection.readline())
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def _file() -> TextIO:
    return tempfile.TemporaryFile("w+")


@cache
def server() -> TextIO:
    """The connection to this process's handler. The first of the test processes to ask starts the
    server.
    """
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
            command, env = (
                [sys.executable, __file__, str(inherited)],
                os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
            subprocess.Popen(
                command,
                start_new_session=True,
                pass_fds=[inherited],
                stdin=subprocess.DEVNULL,
                env=env,
            )
    connection, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + 60
    # bound by another process, which has yet to listen
    while failed := connection.connect_ex(address):
        if time.monotonic() > deadline:
            raise OSError(
                failed, f"the server of the forked scripts does not listen: {os.strerror(failed)}"
            )
        time.sleep(0.01)
    return connection.makefile("rw")


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
    """Wait for a test process to connect, and fork the process that runs its scripts, one after the
    other.
    """
    connection, _ = listener.accept()
    if handler := os.fork():
        connection.close()
        return handler
    listener.close()
    with connection, connection.makefile("rw") as words:
        while line := words.readline():
            asked = json.loads(line)
            if child := os.fork():
                words.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
                words.flush()
                continue
            os.close(connection.fileno())
            for folder in folders:
                folder.__init__()  # each process makes its own, and removes it at its end
            os._exit(_become(**asked))
    os._exit(0)


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
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
