"""Calls a user's reward function, in processes of its own that are ended when a call takes too
long.

The function gets (prompt, response, row), or lists of them as (prompts, responses, rows), and may
be async. It returns a number, None for a response that cannot be graded, or a
gspo.data.samples.Score. An exception, None, or a call that takes too long leaves the response
ungraded, with the reason; it ends neither the run nor the other calls.

Judges that wait, for a model behind an address for example, are called side by side: up to 64 calls
of an async function wait at the same time, and `workers` processes call any other function of one
response.

The function is the user's own code and is not confined. If it runs what a model wrote, it should do
so in a sandbox.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from typing import Any

from gspo.data.samples import Score
from gspo.rewards.reward_worker import Question, timeout

START_SECONDS = 300.0  # an import may load a model
GRACE_SECONDS = 2.0  # an async call ends itself at its limit; this much later the process is ended
TRIAL_RESPONSE = "This is a trial of the reward function. The answer is 42."


@dataclass
class RewardFunction:
    """Scores responses by the function at `path`, each call within `seconds`, in `workers`
    processes. `key` is the setting that names it."""

    path: str
    key: str
    seconds: float
    workers: int = 1

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._processes = [
            RewardProcess(self.path, self.key, self.seconds) for _ in range(self.workers)
        ]

    def __reduce__(self) -> tuple[type[RewardFunction], tuple]:
        return RewardFunction, astuple(self)

    def start(self) -> None:
        """Start the first process and import the function. Raises ValueError if it is not there,
        has a wrong signature, or gets all responses at once although there are several processes.
        """
        if self._owner != os.getpid():  # a forked copy: the processes belong to its parent
            self.__post_init__()
        style = self._processes[0].start()
        if style == "batch" and self.workers > 1:
            self.close()
            raise ValueError(
                f"{self.key.rpartition('.')[0]}.workers={self.workers} with {self.key}={self.path}: that function gets "
                "all responses at once, so one process calls it; leave it 1, or write a function of (prompt, response, "
                "row)"
            )

    def try_out(self, prompt: str, row: dict[str, Any]) -> str:
        """Call the function for a whole response and for one that breaks off, before anything
        depends on it.

        Return in words what went wrong, "" if nothing did. Raises ValueError for a mistake that no
        response can mend, such as a column that the row does not have."""
        self.start()
        half = TRIAL_RESPONSE[: len(TRIAL_RESPONSE) // 2]
        questions: list[Question] = [(0, prompt, TRIAL_RESPONSE, row), (1, prompt, half, row)]
        with self._lock:
            is_certain, text = self._processes[0].try_out(questions)
        if is_certain:
            self.close()
            raise ValueError(text)
        return text

    def __call__(
        self, prompts: list[str], responses: list[str], rows: list[dict[str, Any]]
    ) -> list[Score]:
        """Return the score of each response."""
        questions: list[Question] = [
            (place, *question)
            for place, question in enumerate(zip(prompts, responses, rows, strict=True))
        ]
        self.start()
        with self._lock:
            shares = [questions[number :: self.workers] for number in range(self.workers)]
            if self.workers == 1:
                scores = self._processes[0].scores(questions)
            else:
                with ThreadPoolExecutor(self.workers) as threads:
                    found = threads.map(RewardProcess.scores, self._processes, shares)
                    scores = {place: score for share in found for place, score in share.items()}
        return [scores[place] for place in range(len(questions))]

    def close(self) -> None:
        """End the processes. The function can be called again."""
        for process in self._processes if self._owner == os.getpid() else ():
            process.close()


class RewardProcess:
    """One process that calls the function. It is started when it is needed."""

    def __init__(self, path: str, key: str, seconds: float):
        self.path = path
        self.key = key
        self.seconds = seconds
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._style = ""

    def start(self) -> str:
        """Start the process, if it is not running, and import the function. Return its style,
        "single" or "batch". Raises ValueError if it is not there or has a wrong signature."""
        if self._process and self._process.poll() is None:
            return self._style
        ours, theirs = multiprocessing.Pipe()
        words = [
            sys.executable,
            "-P",
            "-m",
            "gspo.rewards.reward_worker",
            str(theirs.fileno()),
            self.path,
            self.key,
        ]
        # The current folder is searched last, by `import_object`: its files must not stand in for
        # installed modules.
        paths = os.pathsep.join(path for path in sys.path if path not in ("", os.getcwd()))
        self._process = subprocess.Popen(
            [*words, str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is for the run, which finishes its step
        )
        theirs.close()
        self._connection = ours
        kind, text = self._receive(START_SECONDS) or (
            "refused",
            f"{self.key}={self.path}: its process has ended",
        )
        if kind == "refused":
            self.close()
            raise ValueError(text)
        self._style = text
        return text

    def try_out(self, questions: list[Question]) -> tuple[bool, str]:
        """Call the function for these questions; return whether it has a mistake that no response
        can mend, and what went wrong."""
        self.start()
        self._connection.send((questions, self.seconds, True))
        message = self._receive(len(questions) * self.seconds + GRACE_SECONDS)
        if message is not None:
            return message[1:]
        reason = self._ended().reason
        self.close()
        return False, f"{self.key}={self.path}: {reason}"

    def scores(self, questions: list[Question]) -> dict[int, Score]:
        """Return the score of each question, by its place."""
        waiting = {question[0]: question for question in questions}
        scores: dict[int, Score] = {}
        while waiting:
            self.start()
            self._connection.send((list(waiting.values()), self.seconds, False))
            ended = self._collect(waiting)
            scores |= ended
            waiting = {place: question for place, question in waiting.items() if place not in ended}
        return scores

    def _collect(self, waiting: dict[int, Question]) -> dict[int, Score]:
        """Return the outcomes of the questions that were sent: of all, or until the process must be
        ended or has ended. Then the calls that had begun count as failed, and the others are asked
        again."""
        scores: dict[int, Score] = {}
        begun: dict[int, float] = {}  # the time at which calls without outcome began
        while len(scores) < len(waiting):
            oldest = min(begun.values(), default=time.monotonic())
            message = self._receive(
                max(0.0, oldest + self.seconds + GRACE_SECONDS - time.monotonic())
            )
            if message is None:
                why = self._ended()
                self.close()
                return scores | {place: why for place in begun or waiting}
            if message[0] == "begins":
                begun |= dict.fromkeys(message[1], time.monotonic())
            else:
                scores[message[1]] = message[2]
                begun.pop(message[1], None)
        return scores

    def _ended(self) -> Score:
        """Return the score of calls that have no outcome: the process has ended, or takes too long."""
        code = self._process.poll()
        if code is None:
            return timeout(self.seconds)
        return Score(
            None, "error", reason=f"the reward function's process ended (exit status {code})"
        )

    def _receive(self, seconds: float) -> Any:
        """Return the process's next message; None after `seconds`, or if the process has ended."""
        try:
            return self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, OSError):
            self._process.wait()
            return None

    def close(self) -> None:
        """End the process, if it is running."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self._process = self._connection = None
