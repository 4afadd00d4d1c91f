"""Plays episodes: calls an environment's methods in a separate thread, within a time limit.

An environment is foreign code, and may use a network. It may raise, hang or return nonsense. None
of these may end a run. The episode ends instead, is counted, and is left out of its group.
"""

import asyncio
import hashlib
import inspect
import json
import queue
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from numbers import Real
from typing import Any

import numpy as np

from gspo.data.samples import LARGEST_REWARD
from gspo.tasks.environments.protocol import Environment, Message, Outcome

MAX_MEASURES = 32
# the names of the numbers that every episode has (gspo.tracking.episodes)
RESERVED_MEASURES = re.compile(
    r"turns|turns_max|environment_tokens|(finish|reward_turns)_\w+|escaped|cut|replay_differs"
)
MEASURE_NAME = re.compile(r"[A-Za-z_]\w{0,39}", re.ASCII)  # it becomes a part of a metric's name
MAX_ANSWER_CHARS = 1000  # answers are compared with each other, and saved with every response
MAX_VERDICT_CHARS = 40
# characters of a verdict that cannot be part of a metric's name
NOT_IN_METRIC_NAME = re.compile(r"[^\w.-]")
CANCELLED_AFTER = 1.0  # seconds after the time limit


class EnvironmentFailed(Exception):
    """The reason why an episode could not go on, in a line. `verdict` is the reason in one word."""

    def __init__(self, verdict: str, reason: str):
        super().__init__(reason)
        self.verdict = verdict


@dataclass
class Call:
    """A call of an environment's method that has begun."""

    future: Future[Any]
    deadline: float  # on the monotonic clock

    @property
    def seconds_left(self) -> float:
        """The seconds until its deadline, 0 after it."""
        return max(self.deadline - time.monotonic(), 0.0)


@dataclass
class Beginning:
    """The beginning of an episode."""

    messages: list[Message]
    tools: tuple[dict[str, Any], ...]
    role: str  # the chat role of the observations


class Player:
    """The caller of an environment, whose methods may be async or not.

    Python cannot end the thread of a call that hangs. The thread stays, but it does not keep the
    process from ending."""

    def __init__(self, make: Callable[[], Environment], seconds: float):
        self.seconds = seconds
        # a digest of the beginning, then of each outcome
        self.result_digests: list[bytes] = []
        self._given_up = False  # whether a call has timed out, which may still run
        self._calls: queue.SimpleQueue[tuple[Future, str, tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(
            target=self._work, args=(make,), name="environment", daemon=True
        )
        self._thread.start()

    def begin(self, method: str, *arguments: Any) -> Call:
        """Begin a call, and return it for `finish`."""
        call = Call(Future(), time.monotonic() + self.seconds)
        self._calls.put((call.future, method, arguments))
        return call

    def finish(self, call: Call) -> Any:
        """Wait for a call, and return its result.

        Raises EnvironmentFailed if the call raises, returns an invalid result, or takes too long.
        """
        try:
            result = call.future.result(call.seconds_left)
        # only the wait raises this: errors of an environment become EnvironmentFailed
        except TimeoutError as error:
            self._given_up = True
            raise EnvironmentFailed(
                "environment-timeout",
                f"the environment took longer than step_seconds={self.seconds:g}",
            ) from error
        self.result_digests.append(digest(result))
        return result

    def close(self) -> Call:
        """Begin to close the environment, and return the call for `all_closed`.

        A call that has timed out may never return, and this call comes after it. The deadline is
        then the time at which the earlier call has certainly been cancelled."""
        call = self.begin("close")
        self._calls.put(None)
        if self._given_up:
            call.deadline = min(call.deadline, time.monotonic() + 2 * CANCELLED_AFTER)
        return call

    def _work(self, make: Callable[[], Environment]) -> None:
        """Make the environment and do its calls, one after another.

        This thread runs all code of the environment, including code that the checks of its results
        may run."""
        environment: Environment | None = None
        # made when it is needed: making it takes longer than most environments do
        runner: asyncio.Runner | None = None
        with ExitStack() as stack:
            while True:
                call = self._calls.get()
                if call is None:
                    return
                future, method, arguments = call
                if method == "close" and environment is None:
                    future.set_result(None)
                    continue
                try:
                    if environment is None:
                        environment = make()
                    result = getattr(environment, method)(*arguments)
                    if inspect.isawaitable(result):
                        if runner is None:
                            runner = stack.enter_context(asyncio.Runner(loop_factory=new_loop))
                        result = runner.run(awaited(result, self.seconds + CANCELLED_AFTER))
                    if method == "reset":
                        result = beginning(environment, result)
                    elif method in ("step", "act", "settle"):
                        result = outcome(result)
                    future.set_result(result)
                # foreign code may raise anything, SystemExit too
                except BaseException as error:
                    future.set_exception(failure(error))


def still_running(calls: list[Call], limit: int) -> list[Call]:
    """Wait until fewer than `limit` of the calls are running, and return the running calls.

    A call past its deadline does not count, because it may never end."""
    while True:
        running = [call for call in calls if call.seconds_left and not call.future.done()]
        if len(running) < limit:
            return running
        seconds = min(call.seconds_left for call in running)
        wait([call.future for call in running], seconds, FIRST_COMPLETED)


def all_closed(closing: list[Call]) -> int:
    """Wait until environments are closed, and return how many are not.

    Each call of `close` has until its deadline. A call that has raised counts as closed."""
    for call in closing:
        wait([call.future], call.seconds_left)
    return sum(not call.future.done() for call in closing)


class DaemonThreads(ThreadPoolExecutor):
    """The threads of `asyncio.to_thread`, one for each call.

    They do not keep the process from ending."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Begin a call in a new thread."""
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(call(*arguments, **named))
            except BaseException as error:  # whoever awaits the call gets the error
                future.set_exception(error)

        threading.Thread(target=work, name="environment-call", daemon=True).start()
        return future


def new_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop whose threads do not keep the process from ending."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads())
    return loop


async def awaited(awaitable: Any, seconds: float) -> Any:
    """Await anything that can be awaited, and cancel it after `seconds`.

    Nobody waits for it by then. After the cancellation the environment can be closed."""
    async with asyncio.timeout(seconds):
        return await awaitable


def failure(error: BaseException) -> EnvironmentFailed:
    """Return an error of an environment as a failure, in a line."""
    if isinstance(error, EnvironmentFailed):
        return error
    try:
        text = str(error)[:1000]
    except Exception:  # foreign code makes the text of its exception
        text = "(it cannot be written)"
    failed = EnvironmentFailed(
        "environment-error", f"{type(error).__name__}: {' '.join(text.split())}"[:300]
    )
    failed.__cause__ = error
    return failed


def beginning(environment: Environment, messages: Any) -> Beginning:
    """Return the beginning of an episode from the result of `reset`.

    Raises EnvironmentFailed if the result is invalid, and TypeError if a message or a tool is not
    plain data."""
    if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
        raise EnvironmentFailed(
            "environment-error",
            f"reset returned {repr(messages)[:80]}, not a list of messages with a role and a text",
        )
    tools = environment.tools
    role = environment.role
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
        raise EnvironmentFailed(
            "environment-error", f"tools={repr(tools)[:80]}, not a tuple of JSON objects"
        )
    if role not in ("user", "tool"):
        raise EnvironmentFailed(
            "environment-error", f"role={repr(role)[:80]}; it must be 'user' or 'tool'"
        )
    as_json = json.dumps([messages, tools], allow_nan=False, ensure_ascii=False)
    messages, tools = json.loads(readable(as_json))
    return Beginning(messages, tuple(tools), role)


def outcome(result: Any) -> Outcome:
    """Return a copy of the result of `step`, because the environment may change the result.

    The copy has a verdict that can be part of a metric's name, and a shortened answer. Raises
    EnvironmentFailed if the result is invalid."""
    fault = fault_of(result)
    if fault:
        raise EnvironmentFailed("environment-error", f"step returned {fault}")
    return Outcome(
        readable(result.observation),
        float(result.reward),
        bool(result.done),
        NOT_IN_METRIC_NAME.sub("_", result.verdict),
        readable(result.answer[:MAX_ANSWER_CHARS]),
        {name: float(value) for name, value in result.measures.items()},
        result.deferred,
        {name: float(value) for name, value in result.rewards.items()},
    )


def digest(value: Beginning | Outcome) -> bytes:
    """Return a hash of all fields. It needs less memory than a long text."""
    return hashlib.blake2b(repr(astuple(value)).encode(), digest_size=16).digest()


def readable(text: str) -> str:
    """Return a text with "?" for halves of surrogate pairs, which cannot be encoded."""
    return text.encode(errors="replace").decode()


def is_message(message: Any) -> bool:
    """Return whether this is a message of a chat."""
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def fault_of(outcome: Any) -> str:
    """Return in words why a result of `step` is invalid, "" if it is valid."""
    if not isinstance(outcome, Outcome):
        return f"{type(outcome).__name__}, not an Outcome"
    types: dict[str, type] = {"observation": str, "verdict": str, "answer": str, "measures": dict}
    types |= {"deferred": bool, "rewards": dict}
    for name, kind in types.items():
        if not isinstance(getattr(outcome, name), kind):
            return f"{name}={repr(getattr(outcome, name))[:80]}, not {kind.__name__}"
    if not isinstance(outcome.done, bool | np.bool_):
        return f"done={repr(outcome.done)[:80]}, not bool"
    if len(outcome.verdict.split()) != 1 or len(outcome.verdict) > MAX_VERDICT_CHARS:
        verdict = outcome.verdict[:80]
        return f"verdict={verdict!r}, not one word of up to {MAX_VERDICT_CHARS} characters"
    if not _is_number(outcome.reward):
        return f"reward={repr(outcome.reward)[:80]}, not a number within +-{LARGEST_REWARD:g}"
    if len(outcome.measures) > MAX_MEASURES:
        return f"{len(outcome.measures)} measures; {MAX_MEASURES} is the most"
    for name in outcome.measures:
        if isinstance(name, str) and RESERVED_MEASURES.fullmatch(name):
            return (
                f"a measure {name!r}, but every episode has a number of this name: choose another"
            )
    if outcome.rewards and not outcome.done:
        return f"rewards={repr(outcome.rewards)[:80]} with done=False; give them at the end"
    return _fault_of_named("measures", outcome.measures) or _fault_of_named(
        "rewards", outcome.rewards
    )


def _fault_of_named(field: str, values: dict[Any, Any]) -> str:
    """Return in words why a field of names and numbers is invalid, "" if it is valid."""
    for name, value in values.items():
        is_name = isinstance(name, str) and MEASURE_NAME.fullmatch(name)
        if not is_name or not _is_number(value):
            shown = f"{{{repr(name)[:40]}: {repr(value)[:40]}}}"
            return f"{field}={shown}, not a name and a number within +-{LARGEST_REWARD:g}"
    return ""


def _is_number(value: Any) -> bool:
    # a Real also is a number of NumPy
    return isinstance(value, Real) and -LARGEST_REWARD <= value <= LARGEST_REWARD
