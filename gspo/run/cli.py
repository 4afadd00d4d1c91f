"""The process of an entry point: how it is stopped, its exit codes, and how errors become one line.

Exit codes: 0 done; 1 failed, or a job of a sweep did; 2 wrong settings; 4 ended by the monitor; 128 + n stopped by
signal n, with everything saved: a scheduler may start the same command again (130 after Ctrl-C, 143 after SIGTERM).
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from gspo.config.schema import plain_words
from gspo.core import interrupt
from gspo.core.escaping import guard, line
from gspo.core.untrusted import HALVES

COLLAPSED = 4
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class Failed(RuntimeError):
    """A run failed after it had begun: no mistake in its settings, so its traceback is shown and it exits with 1."""


class Broken(RuntimeError):
    """Something outside a run failed after it had begun, a file that could not be written or read in most cases. Its
    message says how to go on; exit code 1."""


class Ended(Broken):
    """A process that a run needs has ended. Nothing is wrong with the disk: the other jobs of a sweep may run."""


class Collapsed(Exception):
    """The monitor ended a run: it has collapsed."""


class Stopped(Exception):
    """Raised where a run that was asked to stop has nothing to save yet."""


class StopSignal:
    """SIGINT and SIGTERM ask for a stop after the current step; a second one stops at once.

    One per process: a process that was asked to stop runs no further jobs of its sweep.
    """

    def __init__(self):
        self.number = 0  # the signal that asked
        self.loud = False  # whether this process tells the user; a sweep's workers leave it to the process above them
        self.busy = threading.Lock()  # held during a run
        self._watcher: threading.Thread | None = None
        self._requeue: Callable[[int, None], None] | None = None  # a scheduler's own handler: submitit's

    def install(self, *numbers: int) -> None:
        for number in numbers:
            signal.signal(number, self._note)

    def install_scheduler(self) -> None:
        """Inside a job of submitit, SIGUSR2 says that its time is up: the step is finished and saved first, then
        `requeue` lets submitit queue the job again."""
        handler = signal.getsignal(signal.SIGUSR2)
        if callable(handler) and handler != self._note:
            self._requeue = handler
            signal.signal(signal.SIGUSR2, self._note)

    def requeue(self) -> None:
        """Once everything is saved. Does not return if a scheduler asked for the stop."""
        if self.number == signal.SIGUSR2:
            self._requeue(self.number, None)

    def end_with_parent(self) -> None:
        """For a sweep's worker: when the process above is gone, killed perhaps, end the step, save, and leave."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, args=(os.getppid(),), daemon=True)
            self._watcher.start()

    def _watch(self, parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        self.number = self.number or signal.SIGTERM
        with self.busy:  # waits for the run to end
            os._exit(128 + self.number)

    def requested(self) -> bool:
        return self.number != 0

    def raise_if_requested(self) -> None:
        if self.requested():
            raise Stopped

    def _note(self, number: int, frame: object) -> None:
        if self._requeue:
            self._note_scheduler(number)
            return
        if self.number:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number
        if self.loud:
            print(
                "\nstopping after the current step (once more: stop now and lose what no checkpoint holds)", flush=True
            )

    def _note_scheduler(self, number: int) -> None:
        """Schedulers send several signals, in any order. SIGTERM after SIGUSR2 means that SIGKILL is near: the job is
        queued again at once, and goes on from its last checkpoint."""
        if self.number == signal.SIGUSR2 and number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # queueing it again sends another
            self.requeue()
        self.number = signal.SIGUSR2 if number == signal.SIGUSR2 else self.number or number


_STOP = StopSignal()


def stop_signal() -> StopSignal:
    """This process's. Entry points must ask here: a sweep's launcher copies their globals into its workers."""
    return _STOP


USER_ERRORS = (ValueError, HydraException, OmegaConfBaseException)


def one_line(job: Callable[[DictConfig], None]) -> Callable[[DictConfig], dict[str, str]]:
    """A job whose wrong settings become one line and exit code 2, before Hydra can add its own lines to it. In a sweep
    the result is why it did not finish: {"reason": why it failed}, {"stopped": by what}, or {}."""

    @functools.wraps(job)
    def reported(config: DictConfig) -> dict[str, str]:
        guard()  # in a sweep's worker too
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return _one_of_many(job, config)
        try:
            job(config)
        except Collapsed:
            sys.exit(COLLAPSED)
        except (*USER_ERRORS, OSError, Broken) as error:
            sys.exit(report(error))
        return {}

    return reported


_DISK: list[Exception] = []  # the failure that ended a job of the sweep in this process


def _one_of_many(job: Callable[[DictConfig], None], config: DictConfig) -> dict[str, str]:
    """A job of a sweep. Whatever ends it, the others are to run: Hydra would start no further batch after an error.
    Where the disk fails none is begun: they would fail too, and why could not be written down."""
    if _DISK:
        raise _DISK[0]
    try:
        job(config)
    except Exception as error:
        broken = isinstance(error, Broken) and not isinstance(error, Ended)
        if broken or (isinstance(error, OSError) and error.errno in DISK):
            _DISK.append(error)
            raise
        if not isinstance(error, (*USER_ERRORS, OSError, Ended)):
            traceback.print_exc()
        return {"reason": explain(error) or type(error).__name__}
    if _STOP.number:
        return {"stopped": f"by {signal.Signals(_STOP.number).name}: the same command continues it"}
    return {}


UNFINISHED_JOBS: dict[str, str] = {}  # of the sweep that this process started: run and reason


def command_line(main: Callable[[], None]) -> None:
    """Run an entry point, and leave with its exit code."""
    interrupt.end()
    guard()
    os.environ.setdefault("PYTHONIOENCODING", ":backslashreplace")  # for the jobs of a sweep
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise composition errors instead of printing them over several lines
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.raiseExceptions = False  # on a full disk train.log cannot grow either: the error below says so once
    try:
        if HALVES.search(folder := os.environ.get("TMPDIR", "")):
            raise ValueError(f"TMPDIR={folder} is not UTF-8, which W&B cannot read: choose another temporary folder")
        main()
    except (*USER_ERRORS, OSError, Broken) as error:
        sys.exit(report(error))
    except KeyboardInterrupt:
        print("\nstopped; the same command continues each run from its last checkpoint", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    if _STOP.number:
        sys.exit(128 + _STOP.number)
    if UNFINISHED_JOBS:
        lines = [f"  {run}: {reason}" for run, reason in UNFINISHED_JOBS.items()]
        print("\n".join([f"error: {len(lines)} of the jobs did not finish", *lines]), file=sys.stderr)
        sys.exit(1)


def report(error: BaseException) -> int:
    """Say in one line what went wrong; the exit code."""
    if isinstance(error, Broken):
        print(f"error: {line(error)}", file=sys.stderr)
        return 1
    disk = isinstance(error, OSError) and error.errno in DISK
    mend = "; what was written is kept: mend this and go on with resume=RUN" if disk else ""
    print(f"error: {line(explain(error))}{mend}", file=sys.stderr)
    return 1 if mend else 2


def explain(error: BaseException) -> str:
    """The messages of an error and its causes in one line, without Hydra's advice to its own developers."""
    if isinstance(error, HydraException) and (odd := list(filter(HALVES.search, sys.argv))):
        return f"{odd[0]} is not UTF-8, and a setting must be: rename that file or folder, or work in it"
    if said := plain_words(error):
        return said
    parts = []
    while error is not None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        parts += [line for line in lines if not line.startswith(("full_key", "object_type", "reference_type"))]
        error = error.__cause__
    return " ".join(dict.fromkeys(parts))
