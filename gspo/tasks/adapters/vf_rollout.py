"""Plays rollouts of the library verifiers turn by turn.

This is the interface of `vf.load_environment` of version 0.3. The library plays a whole rollout and
requests each turn from a model. Here its model is a `PolicyClient`: it passes on the messages of a
request, and waits for the text that `step` gets. The library does everything else: setup, stop
conditions, tools, clean-up and the rubric.

    reset   starts the rollout, which requests a turn   -> the messages of the request
    step    passes on the turn
            and the rollout requests another turn       -> the new messages, as the observation
            or it ends, and its rubric scores it        -> reward, metrics, and the stop condition
                                                           as the verdict

All rollouts share one event loop in a thread. The environments of several rollouts may share
clients and locks, which are bound to the first loop that uses them.
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
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import datasets
import verifiers as vf
from verifiers.types import Response, ResponseMessage, ToolCall

from gspo.data.problems import Problem
from gspo.io.errors import SettingError
from gspo.tasks.environments.player import MAX_MEASURES
from gspo.tasks.environments.protocol import Environment, Message, Outcome

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
END_OF_THOUGHTS = "</think>"
MAX_METRICS = MAX_MEASURES - 2  # two measures are added here
# Errors that the policy caused. After any other error there is no reward.
POLICY_ERRORS = ("ToolError", "ToolParseError", "ToolCallError", "OverlongPromptError")
Request = tuple[list[Any], list[Any]]  # the messages and the tools of a request of the library
FAULTS: ContextVar[list[str]] = ContextVar("the faults of the rubric's functions in one rollout")


class PolicyClient(vf.Client):
    """A client of a model for the library, which waits until `step` has the model's turn."""

    def __init__(self) -> None:
        super().__init__(None)
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.turns: asyncio.Queue[ResponseMessage] = asyncio.Queue()

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, state: Any = None
    ) -> ResponseMessage:
        self.requests.put_nowait((list(prompt), list(tools or [])))
        return await self.turns.get()

    async def from_native_response(self, response: ResponseMessage) -> Response:
        return Response(id="", created=0, model="policy", message=response)

    # Requests and turns have the library's own types, so these methods convert nothing.
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


@dataclass
class VfEpisode(Environment):
    """An environment that plays a rollout of the library."""

    env: Any
    metrics: tuple[str, ...]
    policy: PolicyClient = field(default_factory=PolicyClient)
    rollout: asyncio.Task[dict[str, Any]] | None = None
    conversation: list[Any] = field(default_factory=list)  # the messages of the last request
    faults: list[str] = field(default_factory=list)

    def reset(self, problem: Problem) -> list[Message]:
        """Start the rollout of a row, and return the messages of its first request."""
        request = on_loop(self._start(problem.answer))
        if request is None:
            verdict = self._final_outcome(bad_call=False).verdict
            raise RuntimeError(f"the rollout ended before the first turn: {verdict}")
        self.conversation, tools = request
        keys = ("name", "description", "parameters")
        self.tools = tuple(
            {"type": "function", "function": {key: tool[key] for key in keys}} for tool in tools
        )
        self.role = "tool" if self.tools else "user"
        return [
            {"role": message.role, "content": text_of(message)} for message in self.conversation
        ]

    def step(self, text: str) -> Outcome:
        """Pass on the policy's turn, and wait for the next request or the end of the rollout."""
        turn = plain(text)
        bad_call = False
        if self.tools:
            turn, bad_call = turn_with_calls(text, len(self.conversation))
        request = on_loop(self._next_request(turn))
        if request is None:
            return self._final_outcome(bad_call)
        earlier = self.conversation
        self.conversation, _ = request
        changed = self.conversation[: len(earlier)] != earlier
        if changed or self.conversation[len(earlier)].role != "assistant":
            raise RuntimeError(
                "the environment has changed earlier turns of the conversation, which is not "
                "supported"
            )
        new_texts = map(text_of, self.conversation[len(earlier) + 1 :])
        return Outcome("\n\n".join(new_texts), measures=self._measures({}, bad_call))

    def close(self) -> None:
        """End the rollout, if it has not ended. The environment then cleans up."""
        if self.rollout:
            on_loop(self._cancel(self.rollout))

    async def _start(self, row: dict[str, Any]) -> Request | None:
        FAULTS.set(self.faults)
        self.rollout = asyncio.create_task(self.env.run_rollout(row, self.policy, "policy", {}))
        return await self._next_request(None)

    async def _next_request(self, turn: ResponseMessage | None) -> Request | None:
        """Pass on a turn, and return the rollout's next request, or None if the rollout ends."""
        rollout = self._started_rollout()
        if turn is not None:
            self.policy.turns.put_nowait(turn)
        request = asyncio.create_task(self.policy.requests.get())
        await asyncio.wait({request, rollout}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return request.result()
        request.cancel()
        return None

    async def _cancel(self, rollout: asyncio.Task[dict[str, Any]]) -> None:
        rollout.cancel()
        await asyncio.wait({rollout})

    def _started_rollout(self) -> asyncio.Task[dict[str, Any]]:
        """Return the rollout. Raises RuntimeError before `reset`, which starts it."""
        if self.rollout is None:
            raise RuntimeError("the episode has not begun")
        return self.rollout

    def _final_outcome(self, bad_call: bool) -> Outcome:
        """Return the outcome of the last turn.

        Raises the exception of the rollout, if it raised one. Raises RuntimeError if the rollout
        recorded an error that the policy did not cause."""
        state = self._started_rollout().result()
        error = state["error"]
        if error and error["error"] not in POLICY_ERRORS:
            raise RuntimeError(error["error_chain_repr"])
        verdict = error["error"] if error else state["stop_condition"] or "done"
        measures = self._measures(state["metrics"], bad_call)
        return Outcome("", float(state["reward"]), done=True, verdict=verdict, measures=measures)

    def _measures(self, metrics: dict[str, float], bad_call: bool) -> dict[str, float]:
        """Return the rubric's metrics, which are 0 before the end, and the faults of the turn."""
        measures = {plain_name(name): float(metrics.get(name, 0.0)) for name in self.metrics}
        measures["malformed_calls"] = float(bad_call)
        measures["rubric_faults"] = float(len(self.faults))
        return measures


@dataclass(frozen=True)
class Loaded:
    """An environment, and its data sets. A data set that it does not have is None."""

    env: Any
    train: Any
    evaluation: Any
    metrics: tuple[str, ...]  # the names of the rubric's functions

    def episode(self) -> VfEpisode:
        """Return a new environment for one rollout."""
        return VfEpisode(self.env, self.metrics)


def load(function: Callable[..., Any], arguments: dict[str, Any], key: str) -> Loaded:
    """Call a function that makes an environment, and return the environment and its data sets.

    Raises ValueError, which names `key`, if the call fails or the environment is unusable."""
    quieten()
    name = getattr(function, "__name__", str(function))
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise SettingError(f"{key}arguments", arguments, f"does not fit {name}: {error}") from None
    try:
        env = function(**arguments)
        if not isinstance(env, vf.Environment):
            raise TypeError(
                f"{name} returned {type(env).__name__}, not an environment of verifiers"
            )
        train = env.build_dataset()
        evaluation = env.build_eval_dataset()
    except Exception as error:  # an environment may raise anything
        problem = f"{name} failed: {type(error).__name__}: {error}"
        raise SettingError(f"{key}env", problem=problem) from error
    if env.requires_group_rollouts:
        raise SettingError(
            f"{key}env",
            problem="its rubric scores whole groups at once; here each episode is scored by itself",
        )
    if env.message_type != "chat" or not env.score_rollouts:
        raise SettingError(
            f"{key}env",
            problem="it must be a chat that its rubric scores (message_type, score_rollouts)",
        )
    metrics = tuple(dict.fromkeys(env.rubric._get_reward_func_names()))[:MAX_METRICS]
    event_loop()
    return Loaded(env, train, evaluation, metrics)


@cache
def quieten() -> None:
    """Keep the library from changing the run's signal handlers, its log and its terminal."""
    # Every environment sets handlers of SIGINT and SIGTERM. A run needs its own handlers to end in
    # order.
    stand_in = {
        name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "default_int_handler")
    }
    module: Any = sys.modules[vf.Environment.__module__]
    module.signal = SimpleNamespace(**stand_in, signal=lambda number, handler: None)
    datasets.disable_progress_bars()
    log = logging.getLogger("verifiers")
    log.setLevel(log.level or logging.WARNING)
    log.propagate = True
    log.addHandler(FaultNote())


class FaultNote(logging.Handler):
    """A log handler that notes the faults of a rubric's functions in their rollout.

    The library logs a fault and continues with 0 as the function's value."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        faults = FAULTS.get(None)
        if faults is not None and message.startswith("Error calling reward function"):
            faults.append(message)


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all rollouts, which runs in a separate thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def on_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on the event loop of all rollouts, and return its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


def plain(text: str) -> ResponseMessage:
    """Return a turn of the policy that calls no tool."""
    return ResponseMessage(content=text, is_truncated=False, finish_reason="stop")


def turn_with_calls(text: str, turn: int) -> tuple[ResponseMessage, bool]:
    """Return a turn of the policy, and whether it has a malformed call of a tool.

    A call is <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, after the thoughts.
    With a malformed call, the turn is the plain text and calls no tool. vLLM's parser of this form
    (hermes) does the same."""
    begin = text.rfind(END_OF_THOUGHTS) + len(END_OF_THOUGHTS) if END_OF_THOUGHTS in text else 0
    matches = list(CALL.finditer(text, begin))
    try:
        calls = [
            tool_call(match[1], f"call_{turn}_{number}") for number, match in enumerate(matches)
        ]
    except ValueError:
        return plain(text), True
    if not calls:
        return plain(text), False
    content = text[: matches[0].start()]
    message = ResponseMessage(
        content=content, tool_calls=calls, is_truncated=False, finish_reason="tool_calls"
    )
    return message, False


def tool_call(text: str, call_id: str) -> ToolCall:
    """Return the call in a JSON text. Raises ValueError if it is malformed."""
    call = json.loads(text)
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a call needs a name, and an object of arguments")
    return ToolCall(id=call_id, name=call["name"], arguments=json.dumps(arguments))


def text_of(message: Any) -> str:
    """Return the text of a message.

    Raises ValueError for images, and for calls of tools in the prompt."""
    if message.role == "assistant" and message.tool_calls:
        raise ValueError(
            "the environment's messages contain calls of tools by the assistant, which is not "
            "supported"
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
    """Return a function's name as the name of a measure."""
    name = re.sub(r"\W", "_", name)
    return name if name.isidentifier() else f"_{name}"
