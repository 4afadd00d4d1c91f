"""Plays rollouts of the library verifiers (0.3: the interface of `vf.load_environment`), turn by
turn.

The library plays a rollout by itself, and asks a model for each turn. So here it gets a model that
waits: `PolicyClient` hands over what it was asked, and says what `step` was given. Setup, stop
conditions, tools, clean-up and the rubric are the library's own.

    reset   starts the rollout; it asks the policy            -> the messages that it was asked with
    step    the policy answers; the rollout asks again        -> the messages that were added, as
            the observation
            or it ends, and its rubric has scored it          -> reward, metrics, and the stop
                                                              condition as the verdict

All rollouts share one event loop in a thread, since what environments share between theirs
(clients, locks) is bound to the loop that first used it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import datasets
import verifiers as vf
from verifiers.types import Response, ResponseMessage, ToolCall

from gspo.data.samples import Problem
from gspo.tasks.environments.protocol import Environment, Message, Outcome

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
THOUGHT = "</think>"
MOST_METRICS = (
    30  # an environment may name 32 measures (gspo.tasks.environments.player), and two are ours
)
# Errors by which an environment ends a rollout for what the policy did; after any other there is no
# reward.
OF_POLICY = ("ToolError", "ToolParseError", "ToolCallError", "OverlongPromptError")
FAULTS: ContextVar[list[str]] = ContextVar("the faults of the rubric's functions in one rollout")


class PolicyClient(vf.Client):
    """Stands where the library expects the client of a model, and waits to be told what the model
    says.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[tuple[list[Any], list[Any]]] = asyncio.Queue()  # messages, tools
        self.said: asyncio.Queue[ResponseMessage] = asyncio.Queue()

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, state: Any = None
    ) -> ResponseMessage:
        self.asked.put_nowait((list(prompt), list(tools or [])))
        return await self.said.get()

    async def from_native_response(self, response: ResponseMessage) -> Response:
        return Response(id="", created=0, model="policy", message=response)

    # What is asked and said has the library's own types already, so nothing is left to do for
    # these.
    def setup_client(self, config: Any) -> None:
        return None

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def raise_from_native_response(self, response: ResponseMessage) -> None:
        return None

    async def close(self) -> None:
        return None


class VfEpisode(Environment):
    """Plays one rollout of an environment."""

    def __init__(self, env: Any, metrics: tuple[str, ...]) -> None:
        self.env, self.metrics = env, metrics
        self.policy = PolicyClient()
        self.rollout: asyncio.Task[dict[str, Any]] | None = None
        self.conversation: list[Any] = []  # what the policy was asked with last
        self.faults: list[str] = []

    def reset(self, problem: Problem) -> list[Message]:
        """Start the rollout of a row, and return what it asks the policy first."""
        asked = on_loop(self._start(problem.answer))
        if asked is None:
            raise RuntimeError(
                f"the rollout ended before the first turn: {self._ended(False).verdict}"
            )
        self.conversation, tools = asked
        parts = ("name", "description", "parameters")
        self.tools = tuple(
            {"type": "function", "function": {part: tool[part] for part in parts}} for tool in tools
        )
        self.role = "tool" if self.tools else "user"
        return [
            {"role": message.role, "content": text_of(message)} for message in self.conversation
        ]

    def step(self, text: str) -> Outcome:
        """Let the policy say this, and wait for the next question or the end."""
        said, bad = spoken(text, len(self.conversation)) if self.tools else (plain(text), False)
        asked = on_loop(self._say(said))
        if asked is None:
            return self._ended(bad)
        before, (self.conversation, _) = self.conversation, asked
        if (
            self.conversation[: len(before)] != before
            or self.conversation[len(before)].role != "assistant"
        ):
            raise RuntimeError(
                "the environment has changed earlier turns of the conversation, which is not supported"
            )
        added = map(text_of, self.conversation[len(before) + 1 :])
        return Outcome("\n\n".join(added), measures=self._measures({}, bad))

    def close(self) -> None:
        """End the rollout, if it has not ended; the environment cleans up."""
        if self.rollout:
            on_loop(self._cancel())

    async def _start(self, row: dict[str, Any]) -> tuple[list[Any], list[Any]] | None:
        FAULTS.set(self.faults)
        self.rollout = asyncio.create_task(self.env.run_rollout(row, self.policy, "policy", {}))
        return await self._asked()

    async def _say(self, said: ResponseMessage) -> tuple[list[Any], list[Any]] | None:
        self.policy.said.put_nowait(said)
        return await self._asked()

    async def _asked(self) -> tuple[list[Any], list[Any]] | None:
        """Wait until the rollout asks the policy, and return what with; None if it ends."""
        asked = asyncio.create_task(self.policy.asked.get())
        await asyncio.wait({asked, self.rollout}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        return None

    async def _cancel(self) -> None:
        self.rollout.cancel()
        await asyncio.wait({self.rollout})

    def _ended(self, bad_call: bool) -> Outcome:
        """Return how the rollout has ended. Raises what it raised, and RuntimeError for an error
        that it recorded, unless that is the policy's own."""
        ended = self.rollout.result()
        error = ended["error"]
        if error and error["error"] not in OF_POLICY:
            raise RuntimeError(error["error_chain_repr"])
        verdict = error["error"] if error else ended["stop_condition"] or "done"
        measures = self._measures(ended["metrics"], bad_call)
        return Outcome("", float(ended["reward"]), done=True, verdict=verdict, measures=measures)

    def _measures(self, metrics: dict[str, float], bad_call: bool) -> dict[str, float]:
        """Return the rubric's metrics, which are 0 before the end, and ours beside them."""
        ours = {"malformed_calls": float(bad_call), "rubric_faults": float(len(self.faults))}
        return {plain_name(name): float(metrics.get(name, 0.0)) for name in self.metrics} | ours


@dataclass(frozen=True)
class Loaded:
    """An environment, and its data sets (None where it has none)."""

    env: Any
    train: Any
    evaluation: Any
    metrics: tuple[str, ...]  # the names of the rubric's functions

    def episode(self) -> VfEpisode:
        """Make what plays one rollout."""
        return VfEpisode(self.env, self.metrics)


def load(function: Callable[..., Any], arguments: dict[str, Any], key: str) -> Loaded:
    """Make an environment and its data sets. Raises ValueError, which names `key`, if that fails or
    cannot be used.
    """
    quieten()
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"{key}arguments={arguments} does not fit {function.__name__}: {error}"
        ) from None
    try:
        env = function(**arguments)
        if not isinstance(env, vf.Environment):
            raise TypeError(
                f"{function.__name__} returned {type(env).__name__}, not an environment of verifiers"
            )
        train, evaluation = env.build_dataset(), env.build_eval_dataset()
    except Exception as error:  # an environment may raise anything
        raise ValueError(
            f"{key}env: {function.__name__} failed: {type(error).__name__}: {error}"
        ) from error
    if env.requires_group_rollouts:
        raise ValueError(
            f"{key}env: its rubric scores whole groups at once; here each episode is scored by itself"
        )
    if env.message_type != "chat" or not env.score_rollouts:
        raise ValueError(
            f"{key}env: it must be a chat that its rubric scores (message_type, score_rollouts)"
        )
    metrics = tuple(dict.fromkeys(env.rubric._get_reward_func_names()))[:MOST_METRICS]
    event_loop()
    return Loaded(env, train, evaluation, metrics)


@cache
def quieten() -> None:
    """Keep the library from taking over what is the run's: signals, where the log goes, bars of
    progress.
    """
    # Every environment sets handlers of SIGINT and SIGTERM, which a run needs to end in order.
    stand_in = {
        name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "default_int_handler")
    }
    sys.modules[vf.Environment.__module__].signal = SimpleNamespace(
        **stand_in, signal=lambda number, handler: None
    )
    datasets.disable_progress_bars()
    log = logging.getLogger("verifiers")
    log.setLevel(log.level or logging.WARNING)
    log.propagate = True
    log.addHandler(FaultNote())


class FaultNote(logging.Handler):
    """Notes faults of a rubric's functions in the rollout that they belong to. The library logs
    them and goes on with 0 as the function's value."""

    def emit(self, record: logging.LogRecord) -> None:
        said, faults = record.getMessage(), FAULTS.get(None)
        if faults is not None and said.startswith("Error calling reward function"):
            faults.append(said)


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all rollouts, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def on_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on the loop of all rollouts, and return what it returns."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


def plain(text: str) -> ResponseMessage:
    """Return a turn of the policy that calls no tool."""
    return ResponseMessage(content=text, is_truncated=False, finish_reason="stop")


def spoken(text: str, turn: int) -> tuple[ResponseMessage, bool]:
    """Return a turn of the policy, which may call tools after its thoughts, and whether a call is
    malformed.

    A call is written <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>. If one is
    malformed, none is made, and the turn is the plain text, as vLLM's parser of this form (hermes)
    has it."""
    begin = text.rfind(THOUGHT) + len(THOUGHT) if THOUGHT in text else 0
    written = list(CALL.finditer(text, begin))
    calls = []
    for number, match in enumerate(written):
        try:
            call = json.loads(match[1])
        except ValueError:
            return plain(text), True
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return plain(text), True
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return plain(text), True
        calls.append(
            ToolCall(id=f"call_{turn}_{number}", name=call["name"], arguments=json.dumps(arguments))
        )
    if not calls:
        return plain(text), False
    content = text[: written[0].start()]
    said = ResponseMessage(
        content=content, tool_calls=calls, is_truncated=False, finish_reason="tool_calls"
    )
    return said, False


def text_of(message: Any) -> str:
    """Return the text of a message. Raises ValueError for images, and for calls of tools in the
    prompt.
    """
    if message.role == "assistant" and message.tool_calls:
        raise ValueError(
            "the environment's messages contain calls of tools by the assistant, which is not supported"
        )
    if message.role not in ("system", "user", "assistant", "tool"):
        raise ValueError(
            f"the environment's messages have the role {message.role!r}, which is not supported"
        )
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    if any(part["type"] != "text" for part in parts):
        raise ValueError("the environment's messages are not text alone, which is not supported")
    return "".join(part["text"] for part in parts)


def plain_name(name: str) -> str:
    """Return a function's name as that of a measure."""
    name = re.sub(r"\W", "_", name)
    return name if name.isidentifier() else f"_{name}"
