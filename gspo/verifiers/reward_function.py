"""Calls a user's reward function, in a process of its own that is ended when a call takes too long.

The function gets (prompt, response, row), or lists of them as (prompts, responses, rows), and may be async. It returns
a number, None for a response that cannot be graded, or a gspo.core.types.Score. An exception, None, or a call that
takes too long leaves the response ungraded, with the reason; it ends neither the run nor the other calls.

The function is the user's own code and is not confined. If it runs what a model wrote, it should do so in a sandbox.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from typing import Any

from gspo.core.types import Score
from gspo.verifiers.reward_worker import Question, timeout

START_SECONDS = 300.0  # an import may load a model
GRACE_SECONDS = 2.0  # an async call ends itself at its limit; this much later the process is ended


@dataclass
class RewardFunction:
    """Scores responses by the function at `path`, each call within `seconds`. `key` is the setting that names it."""

    path: str
    key: str
    seconds: float

    def __post_init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def __reduce__(self) -> tuple[type[RewardFunction], tuple]:
        return RewardFunction, astuple(self)

    def start(self) -> None:
        """Start the process and import the function. Raises ValueError if it is not there or has a wrong signature."""
        if self._owner != os.getpid():  # a forked copy: the process belongs to its parent
            self.__post_init__()
        if self._process and self._process.poll() is None:
            return
        ours, theirs = multiprocessing.Pipe()
        words = [sys.executable, "-P", "-m", "gspo.verifiers.reward_worker", str(theirs.fileno()), self.path, self.key]
        # The current folder is searched last, by `import_object`: its files must not stand in for installed modules.
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
        kind, text = self._receive(START_SECONDS) or ("refused", f"{self.key}={self.path}: its process has ended")
        if kind == "refused":
            self.close()
            raise ValueError(text)

    def __call__(self, prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[Score]:
        """Return the score of each response."""
        questions = zip(prompts, responses, rows, strict=True)
        waiting: dict[int, Question] = {place: (place, *question) for place, question in enumerate(questions)}
        scores: dict[int, Score] = {}
        with self._lock:
            while waiting:
                self.start()
                self._connection.send((list(waiting.values()), self.seconds))
                ended = self._collect(waiting)
                scores |= ended
                waiting = {place: question for place, question in waiting.items() if place not in ended}
        return [scores[place] for place in range(len(responses))]

    def _collect(self, waiting: dict[int, Question]) -> dict[int, Score]:
        """Return the outcomes of the questions that were sent: of all, or until the process must be ended or has ended.
        Then the calls that had begun count as failed, and the others are asked again."""
        scores: dict[int, Score] = {}
        begun: dict[int, float] = {}  # the time at which calls without outcome began
        while len(scores) < len(waiting):
            oldest = min(begun.values(), default=time.monotonic())
            message = self._receive(max(0.0, oldest + self.seconds + GRACE_SECONDS - time.monotonic()))
            if message is None:
                why, code = timeout(self.seconds), self._process.poll()
                if code is not None:
                    why = Score(None, "error", reason=f"the reward function's process ended (exit status {code})")
                self.close()
                return scores | {place: why for place in begun or waiting}
            if message[0] == "begins":
                begun |= dict.fromkeys(message[1], time.monotonic())
            else:
                scores[message[1]] = message[2]
                begun.pop(message[1], None)
        return scores

    def _receive(self, seconds: float) -> Any:
        """Return the process's next message; None after `seconds`, or if the process has ended."""
        try:
            return self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, OSError):
            self._process.wait()
            return None

    def close(self) -> None:
        """End the process. The function can be called again."""
        if self._process and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self._process = self._connection = None
