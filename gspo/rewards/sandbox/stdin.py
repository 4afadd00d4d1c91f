"""Runs a whole program, in the confined child, as `python program.py` would.

Its input and output are files. The channel is used only before the program: {"code"} comes in,
{"compiled": true | false} goes out, and it is closed. The exit status follows Python's rules. A
MemoryError that nobody catches ends the process by MEMORY_SIGNAL.
"""

import _sitebuiltins
import atexit
import builtins
import io
import os
import signal
import sys
import threading
import traceback
import types
from typing import Literal

from gspo.rewards.sandbox.frames import Channel

MEMORY_SIGNAL = signal.SIGUSR2
RESERVE_BYTES = 1 << 16  # freed when memory has run out, so that there is enough to report it
# ValueError is for NUL and surrogates
COMPILE_ERRORS = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)


def run(channel: Channel) -> None:
    """Read the program, run it, and end the process."""
    exit_process = os._exit  # the program may replace os._exit
    code = channel.read_first()["code"]
    try:
        program = compile(code, "program.py", "exec", dont_inherit=True)
    except COMPILE_ERRORS:
        channel.write({"compiled": False})
        exit_process(1)
    channel.write({"compiled": True})
    channel.close()
    del code
    sys.stdin = sys.__stdin__ = text_file(0, "r")
    sys.stdout = sys.__stdout__ = text_file(1, "w")
    sys.stderr = sys.__stderr__ = text_file(2, "w")
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __file__="program.py")
    sys.modules["__main__"] = main
    sys.argv[:] = ["program.py"]
    for name in ("exit", "quit"):  # `site` adds these, and the server starts without it
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    status = 1
    try:
        status = execute(program, main)
        status = finish(status)
    # the program's exit handlers and patched streams may raise anything, which is its own failure
    except BaseException:
        status = status or 1
    finally:
        exit_process(status)


def text_file(fd: int, mode: Literal["r", "w"]) -> io.TextIOWrapper:
    return open(
        fd,
        mode,
        encoding="utf-8",
        errors="surrogateescape",
        newline=None if mode == "r" else "\n",
        closefd=False,
    )


def execute(program: types.CodeType, main: types.ModuleType) -> int:
    """Run the program and return the exit status of the main thread."""
    reserve = bytes(RESERVE_BYTES)
    try:
        exec(program, main.__dict__)
        return 0
    except SystemExit as error:
        if error.code is None:
            return 0
        return error.code & 0xFF if isinstance(error.code, int) else 1
    except MemoryError:
        del reserve
        signal.signal(MEMORY_SIGNAL, signal.SIG_DFL)
        os.kill(os.getpid(), MEMORY_SIGNAL)
        return 1
    except BaseException:  # any exception of the program ends it with status 1
        traceback.print_exc()
        return 1


def finish(status: int) -> int:
    """Wait for threads, run exit handlers, write the buffered output, and return the exit status.

    It is 120 if the writing fails, as in Python."""
    # a private function, which type checkers do not know
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except (OSError, ValueError):
        return 120
    return status
