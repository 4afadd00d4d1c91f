"""Plays episodes: calls an environment's methods in a thread of its own, within a time limit.

An environment is code from elsewhere, perhaps with a network behind it. It may raise, hang or
return nonsense, and none of that may end a run: its episode ends, is counted, and is left out of
its group.
"""

from __future__ import annotations

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
from functools import partial
from typing import Any

from gspo.data.samples import LARGEST_REWARD
from gspo.tasks.environments.protocol import Environment, Message, Outcome

MEASURES = 32  # an environment may name at most so many
# The names of numbers that every episode has: gspo.tracking.episodes has those that are not the
# player's own.
TAKEN = re.compile(
    r"turns|turns_max|environment_tokens|(finish|reward_turns)_\w+|escaped|cut|replay_differs"
)
NAME = re.compile(r"[A-Za-z_]\w{0,39}", re.ASCII)  # of a measure; it becomes a metric's
# characters of an answer that are kept: it is compared with others, and saved with every response
ANSWER = 1000
NO_NAME = re.compile(r"[^\w.-]")  # what is no part of a metric's name, such as a verdict is in
CANCELLED_AFTER = 1.0  # seconds after the time limit


class EnvironmentFailed(Exception):
    """Says in one line why an episode could not go on. `verdict` is the reason in one word."""

    def __init__(self, verdict: str, reason: str):
        super().__init__(reason)
        self.verdict = verdict


@dataclass
class Call:
    """A call of an environment's method that has begun."""

    future: Future[Any]
    deadline: float  # on the monotonic clock

    @property
    def left(self) -> float:
        """The seconds until its deadline; 0 after it."""
        return max(self.deadline - time.monotonic(), 0.0)


@dataclass
class Beginning:
    """How an episode begins."""

    messages: list[Message]
    tools: tuple[dict[str, Any], ...]
    role: str  # whose turn the observations are


class Player:
    """Calls one environment, whose methods may be async or not. A call that hangs leaves its thread
    behind: Python cannot end it, and it does not keep the process from ending."""

    def __init__(self, make: Callable[[], Environment], seconds: float):
        self.seconds = seconds
        # digests of how the episode began, and of the answer to each turn
        self.answers: list[bytes] = []
        self._given_up = False  # whether nobody waits any more for a call that may still run
        self._calls: queue.SimpleQueue[tuple[Future, str, tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(
            target=self._work, args=(make,), name="environment", daemon=True
        )
        self._thread.start()

    def begin(self, method: str, *arguments: Any) -> Call:
        """Begin a call; `finish` waits for what it returns."""
        call = Call(Future(), time.monotonic() + self.seconds)
        self._calls.put((call.future, method, arguments))
        return call

    def finish(self, call: Call) -> Any:
        """Return what a call has returned. Raises EnvironmentFailed if it raised, returned what it
        may not, or takes too long."""
        try:
            found = call.future.result(call.left)
        except (
            TimeoutError
        ) as error:  # of the waiting: what an environment raises is an EnvironmentFailed
            self._given_up = True
            raise EnvironmentFailed(
                "environment-timeout",
                f"the environment took longer than step_seconds={self.seconds:g}",
            ) from error
        self.answers.append(digest(found))
        return found

    def close(self) -> Call:
        """Begin to let the environment free what it holds; `all_closed` waits for it. Behind a call
        that was given up it is waited for only until that one would have been cancelled, because it
        may never return."""
        call = self.begin("close")
        self._calls.put(None)
        if self._given_up:
            call.deadline = min(call.deadline, time.monotonic() + 2 * CANCELLED_AFTER)
        return call

    def _work(self, make: Callable[[], Environment]) -> None:
        """Make the environment and do its calls, one after another. All that could run the
        environment's code is done here, the checks of what it returns too."""
        environment: Environment | None = None
        # made when it is needed: it takes longer than most environments do
        runner: asyncio.Runner | None = None
        with ExitStack() as opened:
            while call := self._calls.get():
                future, method, arguments = call
                if method == "close" and environment is None:
                    future.set_result(None)
                    continue
                try:
                    environment = make() if environment is None else environment
                    found = getattr(environment, method)(*arguments)
                    if inspect.isawaitable(found):
                        runner = runner or opened.enter_context(
                            asyncio.Runner(loop_factory=new_loop)
                        )
                        found = runner.run(awaited(found, self.seconds + CANCELLED_AFTER))
                    checked = {"reset": partial(beginning, environment), "step": outcome}.get(
                        method, lambda it: it
                    )
                    future.set_result(checked(found))
                except (
                    BaseException
                ) as error:  # whatever code from elsewhere raises, SystemExit too
                    future.set_exception(failure(error))


def still_running(calls: list[Call], most: int) -> list[Call]:
    """Wait until fewer than `most` of some calls are running, and return these. One past its
    deadline does not count: it may never end."""
    while len(calls := [call for call in calls if call.left and not call.future.done()]) >= most:
        wait([call.future for call in calls], min(call.left for call in calls), FIRST_COMPLETED)
    return calls


def all_closed(closing: list[Call]) -> int:
    """Wait until environments are closed, each until its deadline. Returns how many are not; one
    whose `close` has raised is."""
    for call in closing:
        wait([call.future], call.left)
    return sum(not call.future.done() for call in closing)


class DaemonThreads(ThreadPoolExecutor):
    """The threads of `asyncio.to_thread`: one for each call, which does not keep the process from
    ending.
    """

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Begin a call in a thread."""
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(call(*arguments, **named))
            except BaseException as error:  # it is raised where the call is awaited
                future.set_exception(error)

        threading.Thread(target=work, name="environment-call", daemon=True).start()
        return future


def new_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop whose threads do not keep the process from ending."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads())
    return loop


async def awaited(found: Any, seconds: float) -> Any:
    """Await anything that can be awaited. It is cancelled when nobody waits for it any more, so
    that the environment can be closed."""
    async with asyncio.timeout(seconds):
        return await found


def failure(error: BaseException) -> EnvironmentFailed:
    """Return what an environment has raised as a failure, in one line."""
    if isinstance(error, EnvironmentFailed):
        return error
    try:
        text = str(error)[:1000]
    except Exception:  # an exception from elsewhere, whose text is made by code from elsewhere
        text = "(it cannot be written)"
    return EnvironmentFailed(
        "environment-error", f"{type(error).__name__}: {' '.join(text.split())}"[:300]
    )


def beginning(environment: Environment, messages: Any) -> Beginning:
    """Return how an episode begins, of what `reset` returned. Raises EnvironmentFailed if that is
    no beginning, and TypeError where a message or a tool is no plain data."""
    if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
        raise EnvironmentFailed(
            "environment-error",
            f"reset returned {repr(messages)[:80]}, not a list of messages with a role and a text",
        )
    tools, role = environment.tools, environment.role
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
        raise EnvironmentFailed(
            "environment-error", f"tools={repr(tools)[:80]}, not a tuple of JSON objects"
        )
    if role not in ("user", "tool"):
        raise EnvironmentFailed(
            "environment-error", f"role={repr(role)[:80]}; it must be 'user' or 'tool'"
        )
    messages, tools = json.loads(
        readable(json.dumps([messages, tools], allow_nan=False, ensure_ascii=False))
    )
    return Beginning(messages, tuple(tools), role)


def outcome(found: Any) -> Outcome:
    """Return a copy of what `step` returned, which the environment may change, with a verdict that
    can be part of a metric's name and an answer that is not too long. Raises EnvironmentFailed if
    it is no outcome."""
    if fault := fault_of(found):
        raise EnvironmentFailed("environment-error", f"step returned {fault}")
    return Outcome(
        readable(found.observation),
        float(found.reward),
        found.done,
        NO_NAME.sub("_", found.verdict),
        readable(found.answer[:ANSWER]),
        {name: float(value) for name, value in found.measures.items()},
    )


def digest(said: Beginning | Outcome) -> bytes:
    """Return what tells beginnings or outcomes apart, in every field and in little memory: a text
    may be long.
    """
    return hashlib.blake2b(repr(astuple(said)).encode(), digest_size=16).digest()


def readable(text: str) -> str:
    """Return a text without halves of surrogate pairs, which cannot be encoded."""
    return text.encode(errors="replace").decode()


def is_message(message: Any) -> bool:
    """Return whether this is a message of a chat."""
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def fault_of(outcome: Any) -> str:
    """Return in words what is wrong with what `step` returned, "" if nothing is."""
    if not isinstance(outcome, Outcome):
        return f"{type(outcome).__name__}, not an Outcome"
    for name, kind in (
        ("observation", str),
        ("verdict", str),
        ("answer", str),
        ("done", bool),
        ("measures", dict),
    ):
        if not isinstance(getattr(outcome, name), kind):
            return f"{name}={repr(getattr(outcome, name))[:80]}, not {kind.__name__}"
    if len(outcome.verdict.split()) != 1 or len(outcome.verdict) > 40:
        return f"verdict={outcome.verdict[:80]!r}, not one word of up to 40 characters"
    if not _number(outcome.reward):
        return f"reward={repr(outcome.reward)[:80]}, not a number within +-{LARGEST_REWARD:g}"
    if len(outcome.measures) > MEASURES:
        return f"{len(outcome.measures)} measures; {MEASURES} is the most"
    for name, value in outcome.measures.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or not _number(value):
            measure = f"{{{repr(name)[:40]}: {repr(value)[:40]}}}"
            return f"measures={measure}, not a name and a number within +-{LARGEST_REWARD:g}"
        if TAKEN.fullmatch(name):
            return (
                f"a measure {name!r}, but every episode has a number of this name: choose another"
            )
    return ""


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and -LARGEST_REWARD <= value <= LARGEST_REWARD
