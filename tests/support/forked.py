"""Runs a script like `subprocess.run`, in a process of its own that need not import its libraries first.

    done = forked.run([sys.executable, "experiments/train.py", "steps=3"], cwd=folder, env=environment())
    done = forked.run([sys.executable, "-c", "import sys; print(sys.stdin.read())"], input="text", seconds=60)

Importing PyTorch, transformers and W&B takes longer than most runs of the tests. Here one server per test process has
imported them, and forks a child for each script: a real process with arguments, environment, folder, exit code and
output of its own, which may be killed. What reads the environment while it is being imported, and signals that come
while it is, are for `subprocess.run`.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import TextIO

MODULES = (  # what the scripts import, at their top or later
    "gspo.core.interrupt",  # the first, as in every script
    "wandb.sdk.launch.inputs.internal",  # by wandb.init; it searches all modules: there are few yet
    "pandas",  # for W&B's tables
    "transformers",
    "gspo.evaluation.resumable",
    "gspo.run.build",
    "gspo.run.loop",
    "gspo.run.sweeps",
    "gspo.tracking.dashboard",
    "gspo.tracking.run_report",
    "analysis.script",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
)
# transformers imports a class, and with it much else, when its name is first read.
CLASSES = ("AutoModelForCausalLM", "AutoTokenizer", "DynamicCache", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_one_at_a_time = threading.Lock()


def run(
    command: list[str],
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    input: str = "",
    seconds: int = 0,
) -> subprocess.CompletedProcess:
    """The script's end; `command` begins with sys.executable. The return code of a killed one is negative, as of one
    that SIGALRM ends because it has taken more than `seconds`."""
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
        server = _server()
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def _file() -> TextIO:
    return tempfile.TemporaryFile("w+")


@cache
def _server() -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, __file__], start_new_session=True, **pipes)
    atexit.register(server.stdin.close)  # at the end of its input it ends
    return server


def _serve() -> None:
    for module in MODULES:
        importlib.import_module(module)
    for name in CLASSES:
        getattr(sys.modules["transformers"], name)
    folders = [kept.name for kept in gc.get_objects() if type(kept) is tempfile.TemporaryDirectory]
    gc.freeze()  # else a child's first collection copies every page
    while line := sys.stdin.readline():
        asked = json.loads(line)
        if child := os.fork():
            status = os.waitpid(child, 0)[1]
            print(os.waitstatus_to_exitcode(status), flush=True)
        else:
            for folder in folders:
                os.makedirs(folder, exist_ok=True)  # W&B's, made by its import; the child before took it away
            os._exit(_become(**asked))


def _become(argv: list[str], cwd: str, env: dict[str, str], files: list[str], seconds: int) -> int:
    """This process runs the script, as if it had been started so; its exit code."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
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
    _serve()
