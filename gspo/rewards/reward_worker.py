"""The process that a user's reward function runs in; gspo.rewards.reward_function starts it and
says what is asked.

It answers on a connection: ("ready", "batch" or "single") or ("refused", why) at first. Then for
each call it begins it sends ("begins", places), and for each place that has an outcome ("outcome",
place, Score). After a trial it sends one ("tried", certain, what went wrong). Printing in the
function goes to the standard error. The command line gives the connection's descriptor and the
place of the function.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from gspo.data.samples import LARGEST_REWARD, Score
from gspo.io.user_code import import_object

ONE, MANY = ("prompt", "response", "row"), ("prompts", "responses", "rows")
AT_ONCE = 64  # most calls of an async function that wait at the same time
LONGEST_REASON = 500  # characters
Question = tuple[int, str, str, dict[str, Any]]  # place, prompt, response, row


def style_of(function: Callable[..., Any], start: str) -> str:
    """Return "single" for a function of (prompt, response, row), "batch" for one of (prompts,
    responses, rows).

    Raises ValueError, which begins with `start`, for another signature."""
    wanted = (
        f"def NAME({', '.join(ONE)}) or, for all responses at once, def NAME({', '.join(MANY)})"
    )
    if not callable(function):
        raise ValueError(f"{start}: must be a function, {wanted}")
    signature = inspect.signature(function)
    names, needed = (
        tuple(signature.parameters)[:3],
        [p for p in signature.parameters.values() if p.default is p.empty],
    )
    if names not in (ONE, MANY) or len(needed) > 3:
        raise ValueError(f"{start}{signature}: must be {wanted}")
    return "batch" if names == MANY else "single"


class NoScore(ValueError):
    """Raised for what a reward function returned if that is no score."""


class AbsentColumn(KeyError):
    """Raised when a column is read that the row does not have."""


class TrialRow(dict):
    """A row that tells its own KeyErrors from those of other mappings."""

    def __missing__(self, column: str) -> Any:
        raise AbsentColumn(column)


def as_score(value: Any) -> Score:
    """Return what a reward function gave as a score: a number, True or False, None for no reward,
    or a Score. Raises NoScore for anything else, and ValueError for a number that is not finite or
    too large."""
    if isinstance(value, Score):
        score = value
    elif value is None:
        score = Score(None, "none", reason="the reward function returned None")
    else:
        try:
            reward = float(value)
        except (TypeError, ValueError):
            raise NoScore(
                f"it returned {type(value).__name__} {str(value)[:40]!r}, not a number"
            ) from None
        score = Score(reward, {0.0: "wrong", 1.0: "correct"}.get(reward, "partial"))
    if score.reward is not None and not abs(score.reward) <= LARGEST_REWARD:
        raise ValueError(f"the reward is {score.reward}, not a number within +-{LARGEST_REWARD:g}")
    return score


class Worker:
    """Calls the function and sends what became of each response."""

    def __init__(self, connection: Connection, function: Callable[..., Any], style: str, name: str):
        self.connection = connection
        self.function = function
        self.style = style
        self.name = name  # the setting and its value, for messages
        self.errors: list[Exception] = []  # what the function raised in the latest call of `answer`

    def failure(self, error: Exception) -> Score:
        """Return the score of a response whose reward function raised an exception: the reason
        names the function, the exception, and the last line of the user's own code that it came
        from."""
        self.errors.append(error)
        frames = traceback.extract_tb(error.__traceback__)
        # a class's instance has none
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        own_folder = os.path.dirname(code.co_filename) if code else ""
        own = [frame for frame in frames if os.path.dirname(frame.filename) == own_folder]
        place = ""
        if own:
            place = f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})"
        kind = "KeyError" if isinstance(error, AbsentColumn) else type(error).__name__
        what = str(error) if isinstance(error, NoScore) else f"it raised {kind}: {error}"
        return Score(None, "error", reason=f"{self.name}: {what}{place}"[:LONGEST_REASON])

    def trial(self, questions: list[Question], seconds: float) -> tuple[bool, str]:
        """Call the function for these questions before a run. Return whether it has a mistake that
        no response can mend, and in words what went wrong; "" if nothing did.

        Such mistakes are a column that the rows do not have, a name that is not defined, a module
        that cannot be imported, and a value that is no number. Other exceptions may be due to the
        trial's responses."""
        reason, errors = self._tried(questions, seconds)
        if any(isinstance(error, KeyError) for error in errors):
            reason, errors = self._tried(
                [(*question[:3], TrialRow(question[3])) for question in questions], seconds
            )
        for error in errors:
            if isinstance(error, AbsentColumn):
                columns = ", ".join(map(str, questions[0][3]))
                return (
                    True,
                    f"{reason}; the rows have no column {error.args[0]!r}, they have {columns}",
                )
        # an unbound local name is a NameError too, and may be due to the response
        certain = [e for e in errors if isinstance(e, NameError | ImportError | NoScore)]
        return any(not isinstance(error, UnboundLocalError) for error in certain), reason

    def _tried(self, questions: list[Question], seconds: float) -> tuple[str, list[Exception]]:
        """Call the function and send nothing. Return the first reason for which a response was left
        ungraded, "" if there is none, and what was raised."""
        scores: list[Score] = []

        class Outcomes:
            """Keeps the scores that would be sent."""

            def send(self, message: tuple) -> None:
                if message[0] == "outcome":
                    scores.append(message[2])

        trying = Worker(Outcomes(), self.function, self.style, self.name)
        trying.answer(questions, seconds)
        reason = next(
            (score.reason for score in scores if score.verdict in ("error", "timeout")), ""
        )
        return reason, trying.errors

    def answer(self, questions: list[Question], seconds: float) -> None:
        """Call the function for all questions."""
        if self.style == "batch":
            self.answer_batch(questions, seconds)
        elif inspect.iscoroutinefunction(self.function):
            asyncio.run(self.answer_async(questions, seconds))
        else:
            for place, *arguments in questions:
                self.connection.send(("begins", [place]))
                try:
                    score = as_score(self.function(*arguments))
                except Exception as error:  # the user's function may raise anything
                    score = self.failure(error)
                self.connection.send(("outcome", place, score))

    def answer_batch(self, questions: list[Question], seconds: float) -> None:
        """Call a function of lists once."""
        places = [place for place, *_ in questions]
        self.connection.send(("begins", places))
        try:
            values = self.function(
                *(list(column) for column in list(zip(*questions, strict=True))[1:])
            )
            if inspect.iscoroutine(values):
                values = asyncio.run(asyncio.wait_for(values, seconds))
            try:
                values = list(values)
            except TypeError:
                raise NoScore(
                    f"it returned {type(values).__name__}, not a list of rewards"
                ) from None
            if len(values) != len(places):
                raise NoScore(f"it returned {len(values)} rewards for {len(places)} responses")
            scores = [as_score(value) for value in values]
        except TimeoutError:
            scores = [timeout(seconds)] * len(places)
        except Exception as error:  # the user's function may raise anything
            scores = [self.failure(error)] * len(places)
        for place, score in zip(places, scores, strict=True):
            self.connection.send(("outcome", place, score))

    async def answer_async(self, questions: list[Question], seconds: float) -> None:
        """Call an async function for all questions, up to AT_ONCE at the same time."""
        room = asyncio.Semaphore(AT_ONCE)

        async def ask(place: int, *arguments: Any) -> None:
            async with room:
                self.connection.send(("begins", [place]))
                try:
                    score = as_score(await asyncio.wait_for(self.function(*arguments), seconds))
                except TimeoutError:
                    score = timeout(seconds)
                except Exception as error:  # the user's function may raise anything
                    score = self.failure(error)
                self.connection.send(("outcome", place, score))

        await asyncio.gather(*(ask(*question) for question in questions))


def timeout(seconds: float) -> Score:
    """Return the score of a response whose reward took too long."""
    return Score(None, "timeout", reason=f"the reward function took more than {seconds:g} seconds")


def end_with_parent(parent: int) -> None:
    """End this process when the one that started it has ended, also during a call that never
    returns.
    """
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def main() -> None:
    descriptor, path, key, parent = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    os.dup2(2, 1)  # what the function prints is shown at once, beside the run's own output
    sys.stdout.reconfigure(line_buffering=True)
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    try:
        function = import_object(path, key)
        style = style_of(function, f"{key}={path}")
    except ValueError as error:
        connection.send(("refused", str(error)))
        return
    connection.send(("ready", style))
    worker = Worker(connection, function, style, f"{key}={path}")
    while True:
        try:
            questions, seconds, is_trial = connection.recv()
        except EOFError:
            return
        if is_trial:
            connection.send(("tried", *worker.trial(questions, seconds)))
        else:
            worker.answer(questions, seconds)


if __name__ == "__main__":
    main()
