"""Calls a user's reward function in processes of its own, each call within a time limit.

The function gets (prompt, response, row), or lists of them as (prompts, responses, rows), and may
be async. It returns a number, None for a response that cannot be graded, or a
gspo.data.samples.Score. An exception, None, or a call that takes too long leaves the response
ungraded, with the reason. It ends neither the run nor the other calls.

Judges that wait, for a model behind an address for example, are called side by side. Up to 64 calls
of an async function wait at the same time. `workers` processes call any other function of a single
response.

The function is the user's own code and is not confined. If it runs code of a model, it should use a
sandbox.
"""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gspo.data.samples import Score
from gspo.io.errors import SettingError
from gspo.rewards.child_process import ChildProcess, ProcessOwner, start_child
from gspo.rewards.reward_worker import RewardCall, Trial, timeout

START_SECONDS = 300.0  # an import may load a model
GRACE_SECONDS = 2.0  # for an async call to end itself at its limit, before the process is ended
TRIAL_RESPONSE = "This is a trial of the reward function. The answer is 42."


@dataclass
class RewardFunction(ProcessOwner):
    """The function at `path`, called in `workers` processes, each call within `seconds`.

    `key` is the setting that names the function."""

    path: str
    key: str
    seconds: float
    workers: int = 1

    def _start_over(self) -> None:
        super()._start_over()
        self._lock = threading.Lock()
        self._processes = [
            RewardProcess(self.path, self.key, self.seconds) for _ in range(self.workers)
        ]

    def start(self) -> None:
        """Start the first process and import the function.

        Raises ValueError if the function is not there or has a wrong signature, or if it gets all
        responses at once although there are several processes.
        """
        self._renew_copy()
        style = self._processes[0].start()
        if style == "batch" and self.workers > 1:
            self.close()
            raise SettingError(
                f"{self.key.rpartition('.')[0]}.workers",
                self.workers,
                f"with {self.key}={self.path}, that function gets all responses at once, "
                "so one process calls it",
                remedy="leave it 1, or write a function of (prompt, response, row)",
            )

    def try_out(self, prompt: str, row: dict[str, Any]) -> Trial:
        """Call the function for a whole and a truncated response before a run depends on it.

        Raises ValueError for a mistake that no response can fix, such as a column that the row does
        not have."""
        self.start()
        truncated_response = TRIAL_RESPONSE[: len(TRIAL_RESPONSE) // 2]
        calls: list[RewardCall] = [
            (0, prompt, TRIAL_RESPONSE, row),
            (1, prompt, truncated_response, row),
        ]
        with self._lock:
            trial = self._processes[0].try_out(calls)
        if trial.is_certain:
            self.close()
            raise ValueError(trial.reason)
        return trial

    def __call__(
        self, prompts: list[str], responses: list[str], rows: list[dict[str, Any]]
    ) -> list[Score]:
        """Return the score of each response."""
        calls = list(zip(range(len(prompts)), prompts, responses, rows, strict=True))
        self.start()
        with self._lock:
            if self.workers == 1:
                scores = self._processes[0].scores(calls)
            else:
                shares = [calls[worker :: self.workers] for worker in range(self.workers)]
                scores = {}
                with ThreadPoolExecutor(self.workers) as threads:
                    for share in threads.map(RewardProcess.scores, self._processes, shares):
                        scores |= share
        return [scores[index] for index in range(len(calls))]

    def _stop(self) -> None:
        for process in self._processes:
            process.close()


@dataclass
class RewardProcess:
    """A process that calls the function. It is started when it is needed."""

    path: str
    key: str
    seconds: float
    _running: ChildProcess | None = None
    _style: str = ""

    def start(self) -> str:
        """Start the process, import the function, and return its style, "single" or "batch".

        Does nothing if the process is running. Raises ValueError if the function is not there or
        has a wrong signature."""
        self._started()
        return self._style

    def _started(self) -> ChildProcess:
        """Return the running process, started if needed. Raises ValueError as `start` does."""
        if self._running and self._running.process.poll() is None:
            return self._running
        # The current folder is searched last, by `import_object`: its files must not stand in for
        # installed modules.
        paths = os.pathsep.join(path for path in sys.path if path not in ("", os.getcwd()))
        running = start_child(
            ["-m", "gspo.rewards.reward_worker", self.path, self.key],
            os.environ | {"PYTHONPATH": paths},
        )
        self._running = running
        message = _receive(running, START_SECONDS)
        if message is None:
            reason = "its process has ended"
            if running.process.poll() is None:
                reason = f"importing it took more than {START_SECONDS:g} seconds"
            message = ("refused", f"{self.key}={self.path}: {reason}")
        kind, text = message
        if kind == "refused":
            self.close()
            raise ValueError(text)
        self._style = text
        return running

    def try_out(self, calls: list[RewardCall]) -> Trial:
        """Make these calls and return their trial, as RewardCaller.trial does."""
        running = self._started()
        running.connection.send((calls, self.seconds, True))
        # RewardCaller.trial makes the calls a second time after a KeyError
        seconds = 2 * len(calls) * self.seconds + GRACE_SECONDS
        message = _receive(running, seconds)
        if message is not None:
            return Trial(*message[1:])
        reason = self._failure(running).reason
        self.close()
        return Trial(is_certain=False, reason=f"{self.key}={self.path}: {reason}")

    def scores(self, calls: list[RewardCall]) -> dict[int, Score]:
        """Return the score of each call by its index."""
        waiting = {call[0]: call for call in calls}
        scores = {}
        while waiting:
            running = self._started()
            running.connection.send((list(waiting.values()), self.seconds, False))
            scores |= self._collect(running, waiting)
            waiting = {index: call for index, call in waiting.items() if index not in scores}
        return scores

    def _collect(self, running: ChildProcess, waiting: dict[int, RewardCall]) -> dict[int, Score]:
        """Return the scores of the calls that were sent.

        If the process ends or must be ended, the calls that had begun count as failed, and the
        others have no score yet."""
        scores = {}
        begun = {}  # the time at which calls without outcome began
        while len(scores) < len(waiting):
            oldest = min(begun.values(), default=time.monotonic())
            deadline = oldest + self.seconds + GRACE_SECONDS
            message = _receive(running, max(0.0, deadline - time.monotonic()))
            if message is None:
                failure = self._failure(running)
                self.close()
                failed = begun
                # a process that begins no call at all would be restarted for ever
                if not begun and not scores:
                    failed = waiting
                return scores | dict.fromkeys(failed, failure)
            if message[0] == "begins":
                begun |= dict.fromkeys(message[1], time.monotonic())
            else:
                _, index, score = message
                scores[index] = score
                begun.pop(index, None)
        return scores

    def _failure(self, running: ChildProcess) -> Score:
        """Return the score of calls without outcome: the process has ended, or takes too long."""
        code = running.process.poll()
        if code is None:
            return timeout(self.seconds)
        return Score(
            None, "error", reason=f"the reward function's process ended (exit status {code})"
        )

    def close(self) -> None:
        """End the process, if it is running."""
        if self._running:
            self._running.stop()
        self._running = None


def _receive(running: ChildProcess, seconds: float) -> Any:
    """Return the process's next message, or None after `seconds` or at its end."""
    try:
        return running.connection.recv() if running.connection.poll(seconds) else None
    except (EOFError, OSError):
        running.process.wait()
        return None
