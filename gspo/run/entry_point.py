"""The process of an entry point: its reaction to signals, its errors and exit codes.

Exit codes: 0 done; 1 the run failed, or a job of a sweep did; 2 the settings are wrong; 4 the
monitor ended the run; 128 + n the process was stopped by signal n, with everything saved, so that a
scheduler may start the same command again (130 after Ctrl-C, 143 after SIGTERM, 129 if the terminal
was closed).
"""

from __future__ import annotations

import atexit
import errno
import functools
import logging
import math
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from gspo.config.refusals import plain_words
from gspo.io import interrupt
from gspo.io.escaping import escape_line, escape_output
from gspo.io.files import SETTINGS_FILE
from gspo.io.untrusted import SURROGATES
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.run.launched import say_error

STOP_MARKER = "GSPO_STOP_MARKER"  # the variable with the path of a sweep's file for its workers
COLLAPSED = 4  # the exit code of a run that the monitor ended
# The error numbers of a disk that is full, over quota, broken or read-only.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class Failed(RuntimeError):
    """A run failed after it had begun.

    The settings were right, so the traceback is shown and the exit code is 1."""


class Broken(RuntimeError):
    """Something outside a run failed after it had begun, in most cases a file could not be written.

    The message says how to continue, and the exit code is 1."""


class Ended(Broken):
    """A run has ended for a reason other than the disk, and the other jobs of a sweep may run.

    A process has ended, no response can be graded, or a response shows that a setting is wrong."""


class SaidByRankZero(Ended):
    """A run has ended for a reason that rank 0 prints. The other ranks print nothing."""


class Collapsed(Exception):
    """The monitor ended a run because it has collapsed."""


class Stopped(Exception):
    """A run was asked to stop before it had anything to save."""


class StopSignal:
    """A request to stop after the current step, made by SIGINT, SIGTERM or SIGHUP.

    A second signal stops at once. Each process has its own object: a process that was asked to stop
    runs no further jobs of its sweep.
    """

    def __init__(self):
        self.number = 0  # the signal that asked for a stop; 0: none
        self.repeats = 0  # this many further signals count as repetitions of the first
        # whether this process tells the user; a sweep's workers leave that to their parent
        self.loud = False
        # whether a signal finds nothing to save: in a process for a single run, before it begins
        self.ends_at_once = False
        self.busy = threading.Lock()  # locked during a run
        self._watcher: threading.Thread | None = None
        self._marker: Path | None = None  # a sweep's file that tells its workers to stop
        # submitit's own signal handler, if there is one
        self._requeue: Callable[[int, FrameType | None], object] | None = None

    def install(self, *numbers: int) -> None:
        """Listen to these signals. Under nohup SIGHUP stays ignored."""
        for number in numbers:
            under_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not under_nohup:
                signal.signal(number, self._note)

    def install_scheduler(self) -> None:
        """Inside a job of submitit, listen to SIGUSR2, which means that the job's time is up.

        The current step is then finished and saved before `requeue` lets submitit queue the job
        again."""
        handler = signal.getsignal(signal.SIGUSR2)
        is_function = callable(handler) and not isinstance(handler, int)
        if is_function and handler != self._note:
            self._requeue = handler
            signal.signal(signal.SIGUSR2, self._note)

    def requeue(self) -> None:
        """Let submitit queue the job again if it asked for the stop, and then do not return.

        Call this once everything is saved."""
        if self.number == signal.SIGUSR2 and self._requeue:
            self._requeue(self.number, None)

    def end_with_parent(self) -> None:
        """Make a worker of a sweep finish its step, save and exit after its parent's end."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, args=(os.getppid(),), daemon=True)
            self._watcher.start()

    def tell_workers(self) -> None:
        """Let the workers of a sweep stop too, once this process is asked to.

        Ctrl-C reaches them anyway, but `kill -INT` of this process alone does not."""
        name = f"gspo-stop-{secrets.token_hex(8)}"
        self._marker = Path(tempfile.gettempdir()) / name
        os.environ[STOP_MARKER] = str(self._marker)
        atexit.register(self._marker.unlink, missing_ok=True)

    def _watch(self, parent: int) -> None:
        """Wait for the parent's end, ask for a stop, and exit when the run has stopped."""
        marker = os.environ.get(STOP_MARKER)
        while os.getppid() == parent:
            time.sleep(0.5)
            if marker and not self.number and os.path.exists(marker):
                self.number = signal.SIGINT
                self.repeats = 1  # the parent's Ctrl-C may still come here
        self.number = self.number or signal.SIGTERM
        with self.busy:  # wait for the run to end
            os._exit(128 + self.number)

    def requested(self) -> bool:
        """Return whether a stop was requested."""
        return self.number != 0

    def raise_if_requested(self) -> None:
        """Raise Stopped if a stop was requested."""
        if self.requested():
            raise Stopped

    def _note(self, number: int, frame: object) -> None:
        """Handle a signal: the first requests a stop, and the second ends the process."""
        if self._requeue:
            self._note_scheduler(number)
            return
        if self.number and self.repeats:
            self.repeats -= 1
            return
        if self.number and number == signal.SIGHUP:  # a shell and the kernel send one each
            return
        if self.number:
            if self._marker:  # the workers see that this process has ended
                self._marker.unlink(missing_ok=True)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.ends_at_once:
            interrupt.end_at_once(number)
        self.number = number
        if self._marker:
            with suppress(OSError):
                self._marker.touch(mode=0o600)
        if self.loud:
            text = (
                "\nstopping after the current step "
                "(once more: stop now and lose what no checkpoint holds)\n"
            )
            # The signal may have come amid a print, and then another print raises RuntimeError.
            # The same Ctrl-C may have ended the reader of the output.
            with suppress(OSError):
                os.write(1, text.encode())

    def _note_scheduler(self, number: int) -> None:
        """Handle a signal of a scheduler, which may send several in any order.

        SIGTERM after SIGUSR2 means that SIGKILL is near. Then the job is queued again at once, and
        will resume from its last checkpoint."""
        if self.number == signal.SIGUSR2 and number == signal.SIGTERM:
            # queueing the job again sends another SIGTERM
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.requeue()
        self.number = signal.SIGUSR2 if number == signal.SIGUSR2 else self.number or number


_STOP = StopSignal()


def stop_signal() -> StopSignal:
    """Return this process's StopSignal. Each worker of a sweep has its own."""
    return _STOP


class JobResult(float):
    """The result of a job for Hydra: its score, and the reason if it did not finish.

    Sweepers optimise the score, which is NaN if the job has none. `unfinished` is {"reason": why it
    failed}, {"stopped": the signal that stopped it}, or {} if it finished.
    """

    unfinished: dict[str, str]

    def __new__(cls, score: float | None = None, **unfinished: str) -> JobResult:
        outcome = super().__new__(cls, math.nan if score is None else score)
        outcome.unfinished = unfinished
        return outcome


USER_ERRORS = (ValueError, HydraException, OmegaConfBaseException, yaml.YAMLError)


def one_line(job: Callable[[DictConfig], float | None]) -> Callable[[DictConfig], JobResult]:
    """Wrap a job: its errors become a line and an exit code, before Hydra adds lines of its own.

    For example, a wrong setting becomes "error: ..." and exit code 2. In a sweep the wrapped job
    returns a JobResult instead, with the reason if it did not finish."""

    @functools.wraps(job)
    def wrapped(config: DictConfig) -> JobResult:
        escape_output()  # needed in each worker of a sweep
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return _one_of_many(job, config)
        try:
            return JobResult(job(config))
        except Collapsed:
            sys.exit(COLLAPSED)
        except BrokenPipeError:
            raise  # as in `command_line`
        except (*USER_ERRORS, OSError, Broken, EngineEnded) as error:
            sys.exit(print_error(error))

    return wrapped


# the failure of the disk that ended a job of the sweep in this process
_disk_failures: list[Exception] = []


def _one_of_many(job: Callable[[DictConfig], float | None], config: DictConfig) -> JobResult:
    """Run a job of a sweep and return its score, or the reason why it did not finish.

    Errors do not leave this function, because Hydra would start no further jobs after an error.
    Only a failure of the disk does: the other jobs would fail as well, and their reasons could not
    be written."""
    if _disk_failures:
        raise _disk_failures[0]
    try:
        score = job(config)
    except Exception as error:
        broken = isinstance(error, Broken) and not isinstance(error, Ended)
        if broken or (isinstance(error, OSError) and error.errno in DISK_ERRORS):
            _disk_failures.append(error)
            raise
        if not isinstance(error, (*USER_ERRORS, OSError, Ended)):
            traceback.print_exc()
        return JobResult(reason=explain(error) or type(error).__name__)
    # a job that finished although a stop was requested has a score
    if _STOP.number and (score is None or math.isnan(score)):
        return JobResult(
            stopped=f"by {signal.Signals(_STOP.number).name}: the same command continues it"
        )
    return JobResult(score)


# by run: why a job of the sweep that this process started did not finish
UNFINISHED_JOBS: dict[str, str] = {}
# each call adds the unfinished jobs of a sweep to UNFINISHED_JOBS, also after an error of the sweep
REASON_COLLECTORS: list[Callable[[], None]] = []


def command_line(main: Callable[[], None], after_stop: str = "") -> None:
    """Run an entry point, print its error as a line, and exit with its exit code.

    `after_stop` says what the same command does after Ctrl-C."""
    interrupt.end()
    escape_output()
    # for the processes of a sweep's jobs
    os.environ.setdefault("PYTHONIOENCODING", ":backslashreplace")
    # Hydra raises composition errors instead of printing them over several lines
    os.environ["HYDRA_FULL_ERROR"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # on a full disk train.log cannot grow either, and the error below says so once
    logging.raiseExceptions = False
    try:
        temporary = os.environ.get("TMPDIR", "")
        if SURROGATES.search(temporary):
            raise ValueError(
                f"TMPDIR={temporary} is not UTF-8, which W&B cannot read: "
                "choose another temporary folder"
            )
        main()
    except BrokenPipeError:
        raise  # the reader of the output, such as `head`, has ended: gspo.cli.main handles it
    except (*USER_ERRORS, OSError, Broken) as error:
        if isinstance(error, ValueError):
            for collect_reasons in REASON_COLLECTORS:
                collect_reasons()
        if not UNFINISHED_JOBS:
            sys.exit(print_error(error))  # else a sweeper could not go on without a job's score
    except KeyboardInterrupt:
        print(f"\nstopped{after_stop}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    if _STOP.number:
        sys.exit(128 + _STOP.number)
    if UNFINISHED_JOBS:
        print(f"error: {len(UNFINISHED_JOBS)} of the jobs did not finish", file=sys.stderr)
        for run, reason in UNFINISHED_JOBS.items():
            print(f"  {run}: {reason}", file=sys.stderr)
        sys.exit(1)


def print_error(error: BaseException) -> int:
    """Print an error as a line, and return the exit code."""
    if isinstance(error, SaidByRankZero):
        return 1
    if isinstance(error, Broken | EngineEnded):
        say_error(f"error: {escape_line(error)}", is_more=True)
        return 1
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        run = run_of(error.filename)
        is_training = sys.argv[0].endswith("train")
        command = f"resume={run}" if run and is_training else "the same command"
        remedy = f"what was written is kept: fix this and continue with {command}"
        say_error(f"error: {escape_line(explain(error))}; {remedy}")
        return 1
    say_error(f"error: {escape_line(explain(error))}")
    return 2


def run_of(file: object) -> Path | None:
    """Return the run directory that a file lies in, None if it lies in none."""
    if not isinstance(file, str | bytes | os.PathLike):
        return None
    for folder in Path(os.fsdecode(file)).parents:
        if (folder / SETTINGS_FILE).is_file():
            return folder
    return None


def explain(error: BaseException) -> str:
    """Return the messages of an error and of its causes as a line.

    Hydra's advice to its own developers is left out, and a text that a message before it holds."""
    if isinstance(error, HydraException):
        not_utf8 = [word for word in sys.argv if SURROGATES.search(word)]
        if not_utf8:
            return (
                f"{not_utf8[0]} is not UTF-8, and a setting must be: rename that file or folder, "
                "or work in it"
            )
    plain = plain_words(error)
    if plain:
        return plain
    advice = ("full_key", "object_type", "reference_type")
    messages: list[str] = []
    # loky's _RemoteTraceback repeats the error of a worker
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ != "_RemoteTraceback":
        lines = [text.strip() for text in str(cause).splitlines() if text.strip()]
        for text in lines:
            if not text.startswith(advice) and not any(text in message for message in messages):
                messages.append(text)
        cause = cause.__cause__
    return " ".join(messages)
