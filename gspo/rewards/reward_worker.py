"""The process that calls a user's reward function.

gspo.rewards.reward_function starts it. The command line gives the function's path, the setting that
names it, the connection's descriptor, and the parent's process id. The process sends these messages
on the connection:

    ("ready", "batch" or "single")    the function was imported
    ("refused", reason)               or it was not, and the process ends
    ("begins", indices)               the calls for these responses begin
    ("outcome", index, Score)         a response has its score
    ("tried", is_certain, reason, scores)    the result of a trial, the fields of Trial

Output of the function goes to the standard error.
"""

import asyncio
import inspect
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, SupportsFloat

from gspo.data.samples import LARGEST_REWARD, Score
from gspo.io.user_code import import_object

SINGLE_PARAMETERS = ("prompt", "response", "row")
BATCH_PARAMETERS = ("prompts", "responses", "rows")
MAX_CONCURRENT_CALLS = 64  # calls of an async function that wait at the same time
MAX_REASON_CHARS = 500
RewardCall = tuple[int, str, str, dict[str, Any]]  # index, prompt, response, row


def style_of(function: Callable[..., Any], message_start: str) -> str:
    """Return the style of a reward function by its signature.

    It is "single" for (prompt, response, row) and "batch" for (prompts, responses, rows). Raises
    ValueError, which begins with `message_start`, for another signature."""
    wanted = (
        f"def NAME({', '.join(SINGLE_PARAMETERS)}) or, for all responses at once, "
        f"def NAME({', '.join(BATCH_PARAMETERS)})"
    )
    if not callable(function):
        raise ValueError(f"{message_start}: must be a function, {wanted}")
    signature = inspect.signature(function)
    names = tuple(signature.parameters)[:3]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        p for p in signature.parameters.values() if p.default is p.empty and p.kind not in variable
    ]
    if names not in (SINGLE_PARAMETERS, BATCH_PARAMETERS) or len(required) > 3:
        raise ValueError(f"{message_start}{signature}: must be {wanted}")
    return "batch" if names == BATCH_PARAMETERS else "single"


class NotAScore(ValueError):
    """Raised when the returned value of a reward function is no score."""


class AbsentColumn(KeyError):
    """Raised when a column is read that the row does not have."""


class TrialRow(dict):
    """A row that tells its own KeyErrors from the KeyErrors of other mappings."""

    def __missing__(self, column: str) -> Any:
        raise AbsentColumn(column)


def as_score(value: Any) -> Score:
    """Return the value of a reward function as a Score.

    The value is a number, True or False, None for no reward, a mapping of named numbers, or a
    Score. Raises NotAScore for anything else, and ValueError for a number that is not finite or too
    large."""
    if isinstance(value, Score):
        score = checked_score(value)
    elif isinstance(value, Mapping):
        score = named_score(value)
    elif value is None:
        score = Score(None, "none", reason="the reward function returned None")
    else:
        refusal = NotAScore(f"it returned {type(value).__name__} {str(value)[:40]!r}, not a number")
        if isinstance(value, str | bytes):  # `float` reads "1.0"
            raise refusal
        try:
            reward = float(value)
        except (TypeError, ValueError):
            raise refusal from None
        score = Score(reward, {0.0: "wrong", 1.0: "correct"}.get(reward, "partial"))
    for reward in (score.reward, *score.rewards.values()):
        if reward is not None and not abs(reward) <= LARGEST_REWARD:
            raise ValueError(f"the reward is {reward}, not a number within +-{LARGEST_REWARD:g}")
    return score


def as_list(values: Any) -> list[Any]:
    """Return the rewards of a function of lists. Raises NotAScore for no list of rewards."""
    # the order of a set is arbitrary; of a text or a mapping the list is no list of rewards
    if not isinstance(values, str | bytes | Set | Mapping):
        with suppress(TypeError):
            return list(values)
    raise NotAScore(f"it returned {type(values).__name__}, not a list of rewards")


def checked_score(score: Score) -> Score:
    """Return a user's Score with plain numbers. Raises NotAScore for a field of another type."""
    for name in ("verdict", "answer", "reason"):
        value = getattr(score, name)
        if not isinstance(value, str):
            raise NotAScore(f"it returned a Score with {name}={str(value)[:40]}, not a text")
    rewards = named_score(score.rewards).rewards if score.rewards else {}
    if score.reward is None:
        return replace(score, rewards=rewards)
    if not isinstance(score.reward, SupportsFloat):
        raise NotAScore(f"it returned a Score with reward={str(score.reward)[:40]!r}, not a number")
    return replace(score, reward=float(score.reward), rewards=rewards)


def named_score(values: Mapping[Any, Any]) -> Score:
    """Return the score of named rewards, with their sum as its reward until weights are known.

    Raises NotAScore for an empty mapping, for a name that is no text, and for no number."""
    rewards = {}
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, SupportsFloat):
            raise NotAScore(f"it returned a mapping with {name!r}: {str(value)[:40]}, not a number")
        rewards[name] = float(value)
    if not rewards:
        raise NotAScore("it returned an empty mapping, not named rewards")
    distinct = set(rewards.values())
    verdict = "partial"
    if distinct == {1.0}:
        verdict = "correct"
    elif distinct == {0.0}:
        verdict = "wrong"
    return Score(sum(rewards.values()), verdict, rewards=rewards)


@dataclass
class Trial:
    """The result of calls before a run.

    is_certain  whether a call failed for a mistake that no response can fix: a column that the rows
                do not have, a name that is not defined, a module that cannot be imported, or a
                value that is no number. Other exceptions may be due to the trial's responses.
    reason      why a call failed, in words, "" if none did
    scores      the scores of the calls, in no order
    """

    is_certain: bool
    reason: str = ""
    scores: list[Score] = field(default_factory=list)


@dataclass
class RewardCaller:
    """Calls the function and sends the score of each response."""

    send: Callable[[tuple], None]  # sends a message, or keeps it in a trial
    function: Callable[..., Any]
    style: str
    name: str  # the setting and its value, for messages
    errors: list[Exception] = field(default_factory=list)  # the function's exceptions
    # One event loop for all calls: a lock or a client of the user's module belongs to its first.
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def failure(self, error: Exception) -> Score:
        """Return the score of a response whose reward function raised an exception.

        The reason names the function, the exception, and the last line of the user's own code in
        its traceback."""
        self.errors.append(error)
        frames = traceback.extract_tb(error.__traceback__)
        # a class's instance has none
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        user_folder = os.path.dirname(code.co_filename) if code else ""
        user_frames = [frame for frame in frames if os.path.dirname(frame.filename) == user_folder]
        location = ""
        if user_frames:
            last = user_frames[-1]
            location = f" ({os.path.basename(last.filename)}, line {last.lineno})"
        kind = "KeyError" if isinstance(error, AbsentColumn) else type(error).__name__
        what = str(error) if isinstance(error, NotAScore) else f"it raised {kind}: {error}"
        return Score(None, "error", reason=f"{self.name}: {what}{location}"[:MAX_REASON_CHARS])

    def too_slow(self, seconds: float) -> Score:
        """Return the score of a response whose reward took too long.

        Threads of the event loop (asyncio.to_thread) may hang in that call, so later calls get
        other threads."""
        self.runner.get_loop().set_default_executor(ThreadPoolExecutor())
        return timeout(seconds)

    def trial(self, calls: list[RewardCall], seconds: float) -> Trial:
        """Make these calls before a run, and return their result. Nothing is sent."""
        scores, errors = self._try(calls, seconds)
        if any(isinstance(error, KeyError) for error in errors):
            trial_calls: list[RewardCall] = [(*call[:3], TrialRow(call[3])) for call in calls]
            scores, errors = self._try(trial_calls, seconds)
        reasons = [score.reason for score in scores if score.verdict in ("error", "timeout")]
        reason = reasons[0] if reasons else ""
        for error in errors:
            if isinstance(error, AbsentColumn):
                columns = ", ".join(map(str, calls[0][3]))
                column = error.args[0]
                reason += f"; the rows have no column {column!r}, they have {columns}"
                return Trial(is_certain=True, reason=reason)
        # an unbound local name is a NameError too, and may be due to the response
        is_certain = any(
            isinstance(error, NameError | ImportError | NotAScore)
            and not isinstance(error, UnboundLocalError)
            for error in errors
        )
        return Trial(is_certain, reason, scores)

    def _try(self, calls: list[RewardCall], seconds: float) -> tuple[list[Score], list[Exception]]:
        """Call the function without sending anything, and return its scores and exceptions."""
        messages = []
        caller = replace(self, send=messages.append, errors=[])
        caller.answer(calls, seconds)
        scores = [message[2] for message in messages if message[0] == "outcome"]
        return scores, caller.errors

    def answer(self, calls: list[RewardCall], seconds: float) -> None:
        """Make all calls and send their outcomes."""
        if self.style == "batch":
            self.answer_batch(calls, seconds)
        elif inspect.iscoroutinefunction(self.function):
            self.runner.run(self.answer_async(calls, seconds))
        else:
            for index, *arguments in calls:
                self.send(("begins", [index]))
                try:
                    value = self.function(*arguments)
                    # a decorated function, or an object that can be called, hides that it is async
                    if inspect.isawaitable(value):
                        value = self.runner.run(within(value, seconds))
                    score = as_score(value)
                except TooSlow:
                    score = self.too_slow(seconds)
                except Exception as error:  # the user's function may raise anything
                    score = self.failure(error)
                self.send(("outcome", index, score))

    def answer_batch(self, calls: list[RewardCall], seconds: float) -> None:
        """Call a function of lists once."""
        indices, prompts, responses, rows = map(list, zip(*calls, strict=True))
        self.send(("begins", indices))
        try:
            values = self.function(prompts, responses, rows)
            if inspect.iscoroutine(values):
                values = self.runner.run(within(values, seconds))
            values = as_list(values)
            if len(values) != len(indices):
                raise NotAScore(f"it returned {len(values)} rewards for {len(indices)} responses")
            scores = [self.score_of(value) for value in values]
        except TooSlow:
            scores = [self.too_slow(seconds)] * len(indices)
        except Exception as error:  # the user's function may raise anything
            scores = [self.failure(error)] * len(indices)
        for index, score in zip(indices, scores, strict=True):
            self.send(("outcome", index, score))

    def score_of(self, value: Any) -> Score:
        """Return a value of a function of lists as a Score, without a reward if it is none."""
        try:
            return as_score(value)
        except Exception as error:  # it is the user's object
            return self.failure(error)

    async def answer_async(self, calls: list[RewardCall], seconds: float) -> None:
        """Make all calls of an async function, up to MAX_CONCURRENT_CALLS at the same time."""
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

        async def answer_call(index: int, *arguments: Any) -> None:
            async with semaphore:
                self.send(("begins", [index]))
                try:
                    score = as_score(await within(self.function(*arguments), seconds))
                except TooSlow:
                    score = self.too_slow(seconds)
                except Exception as error:  # the user's function may raise anything
                    score = self.failure(error)
                self.send(("outcome", index, score))

        await asyncio.gather(*(answer_call(*call) for call in calls))


class TooSlow(Exception):
    """A call took longer than its limit. The user's function may raise TimeoutError itself."""


async def within(call: Awaitable[Any], seconds: float) -> Any:
    """Await a call, and raise TooSlow if it takes longer than `seconds`."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await call
    except TimeoutError:
        if limit.expired():
            raise TooSlow from None
        raise


def timeout(seconds: float) -> Score:
    """Return the score of a response whose reward took too long."""
    return Score(None, "timeout", reason=f"the reward function took more than {seconds:g} seconds")


def end_with_parent(parent: int) -> None:
    """End this process when its parent has ended, also during a call that never returns."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def main() -> None:
    path, key, descriptor, parent = sys.argv[1:5]
    os.dup2(2, 1)  # the function's output is shown at once, beside the run's own output
    if isinstance(sys.stdout, io.TextIOWrapper):  # as at the start of every process
        sys.stdout.reconfigure(line_buffering=True)
    threading.Thread(target=end_with_parent, args=(int(parent),), daemon=True).start()
    connection = Connection(int(descriptor))
    try:
        function = import_object(path, key)
        style = style_of(function, f"{key}={path}")
    except ValueError as error:
        connection.send(("refused", str(error)))
        return
    connection.send(("ready", style))
    caller = RewardCaller(connection.send, function, style, f"{key}={path}")
    while True:
        try:
            calls, seconds, is_trial = connection.recv()
        except EOFError:
            return
        if is_trial:
            # this module is __main__ here, so the parent could not read a Trial
            trial = caller.trial(calls, seconds)
            connection.send(("tried", trial.is_certain, trial.reason, trial.scores))
        else:
            caller.answer(calls, seconds)


if __name__ == "__main__":
    main()
