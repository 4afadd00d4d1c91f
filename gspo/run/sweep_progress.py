"""Show how far a whole sweep is, in one line: runs done, steps done, time left.

    paper_figures: 9 of 24 runs, 1180 of 2880 steps  3.4 steps/s  8:20 left

The process that launches the jobs reads their run directories every few seconds, so the jobs may
run anywhere. Jobs that write to the same terminal then print no progress of their own.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gspo.io import untrusted
from gspo.io.escaping import escape_line
from gspo.io.files import ENDED_EARLY, METRICS_FILE, read_status
from gspo.io.tables import clock

# the id of the process that shows the line; its jobs inherit the variable
LAUNCHER = "GSPO_SWEEP_LAUNCHER"
PAUSE = 60.0  # seconds between two lines
FIRST_PAUSE = 10.0  # seconds before the first line
PAUSE_OF_BAR = 2.0  # on a terminal: seconds between two updates of the bar


def shown_by_sweep() -> bool:
    """Return whether this process is a job of a sweep that shows a line on the same terminal."""
    return os.environ.get(LAUNCHER) in (str(os.getpid()), str(os.getppid()))


class SweepProgress(threading.Thread):
    """The line of a sweep, from `start` to `close`.

    `planned` is the result of gspo.run.sweeps.plan."""

    def __init__(self, study: str, planned: list[dict[str, Any]]):
        super().__init__(daemon=True)
        self.study = study
        self.jobs = [
            (Path(job["folder"]), job["steps"])
            for job in planned
            if "folder" in job and "same_as" not in job
        ]
        self.total = sum(steps for _, steps in self.jobs)
        _, self.first_steps = self.done()  # the steps at the start
        self.began = time.monotonic()
        self.closing = threading.Event()
        self.bar: tqdm | None = None
        os.environ[LAUNCHER] = str(os.getpid())

    def run(self) -> None:
        """Show the line again and again until `close` is called."""
        if sys.stderr.isatty():
            self.bar = tqdm(
                total=self.total,
                initial=self.first_steps,
                unit="step",
                dynamic_ncols=True,
                desc=escape_line(self.study),
            )
        pause = PAUSE_OF_BAR if self.bar else FIRST_PAUSE
        while not self.closing.wait(pause):
            self.show()
            pause = PAUSE_OF_BAR if self.bar else PAUSE

    def close(self) -> None:
        """Show the line a last time."""
        if not self.closing.is_set():
            self.closing.set()
            self.join()
            self.show()
            if self.bar:
                self.bar.close()

    def show(self) -> None:
        """Print the line, or update the bar."""
        runs, steps = self.done()
        # a cold start and the start of the workers do not count for the pace
        if steps == self.first_steps:
            self.began = time.monotonic()
        counted = f"{runs} of {len(self.jobs)} runs"
        if self.bar:
            self.bar.set_postfix_str(counted, refresh=False)
            self.bar.update(steps - self.bar.n)
            return
        pace = (steps - self.first_steps) / max(time.monotonic() - self.began, 1e-9)
        left = f"{clock((self.total - steps) / pace)} left" if pace else "time left unknown"
        print(
            escape_line(
                f"{self.study}: {counted}, {steps} of {self.total} steps  "
                f"{pace:.1f} steps/s  {left}"
            ),
            flush=True,
        )

    def done(self) -> tuple[int, int]:
        """Return how many runs have ended and how many steps are done.

        All steps of a run that has ended early or collapsed count as done."""
        runs = 0
        counted = 0
        for folder, steps in self.jobs:
            step = min(last_step(folder / METRICS_FILE), steps)
            # "finished" may be of an earlier sweep with fewer steps
            how = read_status(folder).get("how")
            ended = step == steps or how in (ENDED_EARLY, "collapsed")
            runs += ended
            counted += steps if ended else step
        return runs, counted


def last_step(file: Path) -> int:
    """Return the step of the last complete row of a run's metrics, 0 if there is none."""
    try:
        rows = untrusted.last_rows(file, 1)
    except (OSError, untrusted.Unreadable):
        return 0
    return rows[0]["step"] if rows else 0
