"""Ctrl-C while an entry point's libraries load: one line and exit code 130, not a traceback through the libraries.

Every entry point imports this module first. `gspo.run.cli.command_line` ends its reign: from there on Ctrl-C means what
the command makes of it.
"""

import multiprocessing
import os
import signal
import sys


def _leave(number: int, frame: object) -> None:
    print("\nstopped before it had begun; nothing was written", file=sys.stderr)
    os._exit(128 + number)  # no exception: a library that is being imported might catch it


def start() -> None:
    """In the process that the user started, unless it ignores Ctrl-C (nohup) or has a handler already."""
    if multiprocessing.parent_process() is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def end() -> None:
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


start()
