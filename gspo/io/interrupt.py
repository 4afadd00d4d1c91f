"""Ctrl-C while the libraries of a command load: a short message and exit code 130, no traceback.

Every entry point imports this module first, which installs the handler. Once
`gspo.run.entry_point.command_line` has called `end`, the command itself handles Ctrl-C.
"""

import multiprocessing
import os
import signal
from contextlib import suppress
from typing import NoReturn


def _exit(number: int, frame: object) -> None:
    """Handle the signal."""
    end_at_once(number)


def end_at_once(number: int) -> NoReturn:
    """End the process after a signal that came before its work, with a message."""
    text = "\nstopped before it had begun; nothing was written\n"
    # the signal may have come amid a print, and then another print raises RuntimeError
    with suppress(OSError):
        os.write(2, text.encode())
    os._exit(128 + number)  # an exception could be caught by a library that is being imported


def start() -> None:
    """Install the handler in the process that the user started.

    A process that ignores Ctrl-C (nohup) or has its own handler stays as it is.
    """
    is_main_process = multiprocessing.parent_process() is None
    if is_main_process and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def end() -> None:
    """Remove the handler, if it is still installed."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


start()
