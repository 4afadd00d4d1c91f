"""Handles Ctrl-C while the libraries of an entry point load: one line and exit code 130 in place of
a long traceback.

Every entry point imports this module first. `gspo.run.entry_point.command_line` calls `end`; from there on
the command itself decides what Ctrl-C does.
"""

import multiprocessing
import os
import signal
import sys


def _leave(number: int, frame: object) -> None:
    """Handle the signal: print one line and end the process."""
    print("\nstopped before it had begun; nothing was written", file=sys.stderr)
    os._exit(128 + number)  # no exception: a library that is being imported might catch it


def start() -> None:
    """Install the handler in the process that the user started, unless it ignores Ctrl-C (nohup) or
    has a handler.
    """
    if (
        multiprocessing.parent_process() is None
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _leave)


def end() -> None:
    """Remove the handler, if it is still installed."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


start()
