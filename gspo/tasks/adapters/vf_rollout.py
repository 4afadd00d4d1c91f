"""Plays episodes of the library verifiers turn by turn.

This is the API `verifiers.v1` of version 0.4. The library plays a whole episode: a harness runs in
a runtime and requests each turn of the model from a local interception server, which records the
requests and turns in a trace. The server asks a client for the turn. Here this client is an
`EngineClient`: it waits until `act` has a turn of the policy, and answers with its text, its token
ids and their log-probs. The library does everything else: setup, stop conditions, tools, clean-up
and rewards.

    reset    starts the episode, whose harness requests a turn -> the messages of the request
    act      passes on the turn
             and the harness requests another turn             -> the new messages, as observation
             or the episode ends, and its trace has the reward -> reward, metrics, and the stop
                                                                  condition as the verdict
    settle   ends an episode that was cut off, or that a group's reward had to wait for

The trace of an episode has the token ids, log-probs and mask of the training sample. At the end
they are compared with those of the policy's engine, and a difference is an error.

All episodes share one event loop in a thread. The environments of several episodes may share
clients and locks, which are bound to the first loop that uses them.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import re
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import FinishReason, ToolCall, TurnTokens, Usage, content_text
from verifiers.v1.utils.loaders import (
    env_config_type,
    harness_class,
    load_environment,
    taskset_class,
)

from gspo.data.problems import Problem
from gspo.io.errors import SettingError
from gspo.tasks.adapters import vf_chat
from gspo.tasks.environments.player import MAX_MEASURES, EnvironmentFailed, new_loop
from gspo.tasks.environments.protocol import (
    Environment,
    Message,
    Outcome,
    Position,
    SampledTurn,
)

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
END_OF_THOUGHTS = "</think>"
CUT_OFF = "max_output_tokens"  # the library's stop condition of episodes that we cut off
SECONDS_BETWEEN_LOOKS = 0.02  # at the trace of a group's member, which nobody announces as ended
SECONDS_TO_STOP = 10.0
MODEL = "policy"
SERVING: list[asyncio.Task[None]] = []  # each serves an environment until the process ends


class EngineClientConfig(vf.TrainClientConfig):
    """An address that no request is sent to: `EngineClient` answers.

    It is given explicitly, because the library's default address is a paid service."""

    base_url: str = "http://127.0.0.1:9/v1"
    api_key_var: str = "GSPO_HAS_NO_KEY"


@dataclass
class Request:
    """A request of the harness that waits for a turn of the policy."""

    prompt: PendingTurn
    is_linear: bool  # whether it continues the conversation with the policy's last turn
    answer: asyncio.Future[vf.Response | None]  # None: the episode is cut off


class EngineClient(vf.Client):
    """The model of the library's episodes: it waits for turns that the policy's engine samples."""

    def __init__(self) -> None:
        self.seats: dict[str, Seat] = {}  # by the id of the trace

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        """Return the policy's turn for a request."""
        seat = self.seats.get(session_id or "")
        if seat is None or turn is None:
            raise vf.ProviderError(
                "an agent beside the training samples requests turns of the policy: it needs a "
                "client of its own in the environment's configuration",
                status_code=400,
            )
        if not isinstance(dialect, ChatDialect):
            raise vf.ProviderError(
                f"the harness speaks {type(dialect).__name__}: only chat completions are supported",
                status_code=400,
            )
        request = Request(
            turn,
            len(turn.prefix_node_ids) == len(turn.trace.nodes),
            asyncio.get_running_loop().create_future(),
        )
        seat.requests.put_nowait(request)
        response = await request.answer
        if response is None:
            turn.trace.stop(CUT_OFF)
            raise vf.ProviderError("the episode is cut off", status_code=400)
        return response


@dataclass
class Seat:
    """The place of one conversation with the policy in an episode of the library."""

    requests: asyncio.Queue[Request] = field(default_factory=asyncio.Queue)
    trace: vf.Trace | None = None  # None until the library has begun it


class Play:
    """An episode of the library, in which one or more samples of a group have a seat each."""

    def __init__(self, loaded: Loaded, task: vf.Task, size: int):
        self.loaded = loaded
        self.seats = [Seat() for _ in range(size)]
        self.joined = 0  # the number of samples that have joined
        self.run: asyncio.Task[vf.Episode] | None = None
        self._task = task

    async def start(self) -> None:
        """Start the episode, if no other sample has started it."""
        if self.run is None:
            context = vf.ModelContext(MODEL, self.loaded.client_config)
            self.run = asyncio.create_task(
                self.loaded.env.run_episode(self._task, context, on_trace=self._seat)
            )

    def _seat(self, trace: vf.Trace) -> None:
        """Give the next seat to an agent of the policy whose trace begins."""
        agent = trace.agent
        if not agent.trainable or not isinstance(agent.config.client, EngineClientConfig):
            return
        for seat in self.seats:
            if seat.trace is None:
                seat.trace = trace
                self.loaded.client.seats[trace.id] = seat
                return

    async def cancel(self) -> None:
        """End the episode, if it has not ended, and forget its traces."""
        if self.run is not None:
            self.run.cancel()
            await asyncio.wait({self.run})
        plays = self.loaded.plays
        for group in [group for group, play in plays.items() if play is self]:
            del plays[group]
        for seat in self.seats:
            if seat.trace is not None:
                self.loaded.client.seats.pop(seat.trace.id, None)

    async def end(self) -> vf.Episode:
        """Wait for the end of the episode. Raises RuntimeError if it is not ok."""
        if self.run is None:
            raise RuntimeError("the episode has not begun")
        episode = await self.run
        if not episode.ok:
            errors = list(episode.errors)
            errors += [error for trace in episode.traces for error in trace.errors]
            reasons = [f"{error.type}: {error.message}" for error in errors] or ["no error"]
            raise RuntimeError(f"the episode is not ok: {'; '.join(reasons)}")
        return episode


class VfEpisode(Environment):
    """An environment that plays the conversation of one seat."""

    settles = True

    def __init__(self, load: Callable[[int], Loaded], task: int, position: Position):
        self.load = load  # returns the library's environment for a group size
        self.task = task  # the index of its task
        self.position = position
        self.in_group = False  # whether all samples of the group are one episode of the library
        self.play: Play | None = None
        self.seat = Seat()
        self.request: Request | None = None  # waits for the policy's turn
        self.messages: list[Any] = []  # of the last request
        self.turns: list[SampledTurn] = []

    def reset(self, problem: Problem) -> list[Message]:
        """Start the episode, and return the messages of its first request."""
        loaded = self.load(self.group_size)
        self.in_group = loaded.group
        on_loop(self._start(loaded))
        if self.request is None:
            self._result()
            raise RuntimeError("the episode ended before the first turn")
        self.messages = self.request.prompt.prompt
        keys = ("name", "description", "parameters")
        self.tools = tuple(
            {"type": "function", "function": {key: getattr(tool, key) for key in keys}}
            for tool in self.request.prompt.tools
        )
        self.role = "tool" if self.tools else "user"
        return [{"role": message.role, "content": text_of(message)} for message in self.messages]

    def step(self, text: str) -> Outcome:
        """Pass on a turn without tokens, as a test does."""
        return self.act(SampledTurn(text))

    def act(self, turn: SampledTurn) -> Outcome:
        """Pass on the policy's turn, and wait for the next request or the end of the episode."""
        message, bad_call = self._message(turn.text)
        self._answer(turn, message, "tool_calls" if message.tool_calls else "stop")
        on_loop(self._next_request())
        measures = {"malformed_calls": float(bad_call)}
        if self.request is None and self.in_group:
            return Outcome("", done=True, measures=measures, deferred=True)
        if self.request is None:
            outcome = self._result()
            outcome.measures |= measures
            return outcome
        if not self.request.is_linear:
            raise RuntimeError(
                "the environment has changed earlier turns of the conversation, which is not "
                "supported"
            )
        new_messages = self.request.prompt.prompt[len(self.messages) + 1 :]
        self.messages = self.request.prompt.prompt
        return Outcome("\n\n".join(map(text_of, new_messages)), measures=measures)

    def settle(self, turn: SampledTurn | None) -> Outcome:
        """Return the outcome of an episode that was cut off, or whose group has now ended.

        The library calls an episode truncated if the last turn is cut off. It scores the
        conversation up to there."""
        if self.request is not None and turn is not None:
            self._answer(turn, self._message(turn.text)[0], "length")
            on_loop(self._next_request())
        if self.request is not None:
            self._reply(self.request, None)
        return self._result()

    def close(self) -> None:
        """End the episode, if it has not ended. The environment then cleans up."""
        if self.play is not None:
            on_loop(self.play.cancel())

    async def _start(self, loaded: Loaded) -> None:
        self.play = loaded.join(self.task, self.position[:-1], self.group_size)
        # the same sample has the same seat again in a resumed run
        self.seat = self.play.seats[int(self.position[-1]) if self.in_group else 0]
        await self.play.start()
        await self._next_request()

    async def _next_request(self) -> None:
        """Wait for the next request, which is None if the seat's agent or the episode ends."""
        assert self.play is not None and self.play.run is not None
        run = self.play.run
        request = asyncio.ensure_future(self.seat.requests.get())
        while not request.done() and not run.done() and not self._agent_has_ended():
            await asyncio.wait(
                {request, run},
                return_when=asyncio.FIRST_COMPLETED,
                timeout=SECONDS_BETWEEN_LOOKS if self.in_group else None,
            )
        self.request = request.result() if request.done() else None
        request.cancel()

    def _agent_has_ended(self) -> bool:
        """Return whether the seat's agent of a group has ended, and will request no more turns."""
        trace = self.seat.trace
        return self.in_group and trace is not None and trace.is_completed

    def _message(self, text: str) -> tuple[vf.AssistantMessage, bool]:
        """Return the policy's message, and whether it has a malformed call of a tool."""
        if self.tools:
            return message_with_calls(text, len(self.turns))
        return vf.AssistantMessage(content=text), False

    def _answer(
        self, turn: SampledTurn, message: vf.AssistantMessage, finish_reason: FinishReason
    ) -> None:
        """Answer the request that waits, with the tokens of the policy's turn."""
        assert self.request is not None
        self.turns.append(turn)
        tokens = TurnTokens(
            prompt_ids=turn.context_ids,
            completion_ids=turn.token_ids,
            completion_logprobs=turn.logprobs,
            bridged=len(self.turns) > 1,
        )
        usage = Usage(prompt_tokens=len(turn.context_ids), completion_tokens=len(turn.token_ids))
        response = vf.Response(
            id="", created=0, model=MODEL, message=message, finish_reason=finish_reason,
            usage=usage, tokens=tokens,
        )  # fmt: skip
        response.raw = serialize_completion(response, MODEL)
        self._reply(self.request, response)

    def _reply(self, request: Request, response: vf.Response | None) -> None:
        event_loop().call_soon_threadsafe(set_result, request.answer, response)
        self.request = None

    def _result(self) -> Outcome:
        """Return the outcome of an episode that ends: its trace has the reward.

        Raises RuntimeError if the episode is not ok, because its traces are unusable: such a trace
        has the reward 0. Raises it as well if the tokens of the trace are not the policy's."""
        assert self.play is not None
        on_loop(self.play.end())
        trace = self.seat.trace
        if trace is None:
            raise RuntimeError("the environment began no trace for this sample")
        if trace.is_timeout:
            raise EnvironmentFailed(
                "environment-timeout",
                f"a time limit of the library ended the episode: {trace.stop_condition}",
            )
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward}
        if not scores or len(scores) < len(trace.rewards):
            raise RuntimeError(f"the episode was not scored: its rewards are {trace.rewards}")
        compare_tokens(trace, self.turns)
        return Outcome(
            reward=trace.reward,
            done=True,
            verdict=trace.stop_condition or "done",
            measures=measures_of(scores | trace.metrics),
        )


@dataclass
class Loaded:
    """An environment of the library that serves episodes, and its tasks.

    env       the library's environment
    tasks     the tasks of its taskset, in their order
    group     whether all samples of a problem have seats in one episode
    """

    env: Any
    tasks: list[Any]
    group: bool
    client: EngineClient = field(default_factory=EngineClient)
    client_config: EngineClientConfig = field(default_factory=EngineClientConfig)
    plays: dict[Position, Play] = field(default_factory=dict)  # that other samples may join

    def join(self, task: int, group: Position, group_size: int) -> Play:
        """Return the episode that a sample of a group joins. Runs on the event loop."""
        if not self.group:
            return Play(self, self.tasks[task], 1)
        play = self.plays.get(group)
        if play is None:
            play = self.plays[group] = Play(self, self.tasks[task], group_size)
        play.joined += 1
        if play.joined == group_size:  # the same samples may be played again
            del self.plays[group]
        return play

    async def serve(self) -> None:
        """Begin to serve episodes, until the process ends."""
        ready = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(self._serve(ready))
        await asyncio.wait({ready, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            serving.result()
        SERVING.append(serving)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        async with self.env.serving():
            # the server asks this client instead of making one for the address
            self.env._interception.clients[self.client_config.model_dump_json()] = self.client
            ready.set_result(None)
            await asyncio.Event().wait()


@dataclass(frozen=True)
class EnvChoice:
    """Which environment of the library to load; see `VfEnvironments` for the fields."""

    taskset: str
    env: str
    harness: str
    runtime: str
    turns: int
    group: str


def load(
    choice: EnvChoice, arguments: dict[str, Any], group_size: int, max_tasks: int, key: str
) -> Loaded:
    """Load an environment of the library and its tasks.

    Raises ValueError, which names `key`, if that fails or the environment is unusable."""
    quieten()
    find("taskset", choice.taskset, taskset_class, key)
    find("harness", choice.harness, harness_class, key)
    config_type = find("env", choice.env, partial(env_config_type, choice.taskset), key)
    if choice.group and choice.group not in config_type.model_fields:
        problem = f"the environment's configuration has no field {choice.group}"
        raise SettingError(f"{key}group", choice.group, problem)
    roles = agent_config_fields(config_type.model_construct())
    taskset = {"id": choice.taskset, **arguments}
    data: dict[str, Any] = {"id": choice.env, "taskset": taskset, "max_concurrent_agents": None}
    data["interception"] = {"type": "server"}
    for name, role in roles.items():
        limit = choice.turns if role.max_turns is None else min(role.max_turns, choice.turns)
        data[name] = {
            "harness": {"id": choice.harness},
            "runtime": {"type": choice.runtime},
            "max_turns": limit,
        }
    if choice.group:
        data[choice.group] = group_size
    try:
        config = config_type.model_validate(data)
    except ValueError as error:  # of pydantic
        reason = " ".join(str(error).split())
        raise SettingError(f"{key}arguments", arguments, f"does not fit: {reason}") from None
    try:
        env = load_environment(config)
        taskset_tasks = iter(env.taskset)
        if env.taskset.bounded:
            tasks = list(taskset_tasks)
        else:
            tasks = [next(taskset_tasks) for _ in range(max_tasks)]
        loaded = Loaded(env, tasks, bool(choice.group))
        on_loop(loaded.serve())
    except Exception as error:  # an environment may raise anything
        problem = f"loading it failed: {type(error).__name__}: {error}"
        raise SettingError(f"{key}taskset", choice.taskset, problem) from error
    return loaded


def find(field: str, name: str, function: Callable[[str], Any], key: str) -> Any:
    """Return the result of a function of the library that finds a plugin by its name.

    Raises ValueError, which names the field, if it finds none."""
    try:
        return function(name)
    except Exception as error:  # the module is foreign code
        raise SettingError(f"{key}{field}", name, f"{type(error).__name__}: {error}") from error


def compare_tokens(trace: vf.Trace, turns: list[SampledTurn]) -> None:
    """Compare the token ids, log-probs and mask of a trace with the turns that the policy sampled.

    Raises RuntimeError if they differ, or if the trace has several branches, as compaction and
    sub-agents make."""
    branches = trace.branches
    if len(branches) != 1:
        raise RuntimeError(
            f"the conversation has {len(branches)} branches, and one is supported: the harness "
            "has rewritten its history or begun a conversation beside it"
        )
    if not turns or not turns[-1].token_ids:
        return
    branch = branches[0]
    token_ids = turns[-1].context_ids + turns[-1].token_ids
    mask = [False] * len(token_ids)
    logprobs = [0.0] * len(token_ids)
    for turn in turns:
        span = slice(len(turn.context_ids), len(turn.context_ids) + len(turn.token_ids))
        mask[span] = [True] * len(turn.token_ids)
        logprobs[span] = turn.logprobs
    ours = (token_ids, mask, logprobs)
    if (branch.token_ids, branch.sampled_mask, branch.logprobs) != ours:
        raise RuntimeError("the tokens of the trace are not those that the policy has sampled")


def measures_of(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return rewards and metrics of a trace as measures, without those that have no value."""
    measures = {
        plain_name(name): float(value) for name, value in values.items() if value is not None
    }
    return dict(list(measures.items())[: MAX_MEASURES - 1])


@cache
def quieten() -> None:
    """Let the library find our harness, and write its warnings into the run's log."""
    vf_chat.register()
    log = logging.getLogger("verifiers.v1")
    log.setLevel(log.level or logging.WARNING)


@atexit.register
def stop_serving() -> None:
    """End all servers, and let the environments clean up what they share."""
    if SERVING:
        stopping = asyncio.run_coroutine_threadsafe(cancelled(SERVING), event_loop())
        wait([stopping], SECONDS_TO_STOP)


async def cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait for their ends. Errors do not matter when the process ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all episodes, which runs in a separate thread."""
    loop = new_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def on_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on the event loop of all episodes, and return its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


def set_result(future: asyncio.Future[Any], result: Any) -> None:
    """Set the result of a future, unless the library has given up waiting for it."""
    if not future.done():
        future.set_result(result)


def message_with_calls(text: str, turn: int) -> tuple[vf.AssistantMessage, bool]:
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
        return vf.AssistantMessage(content=text), True
    if not calls:
        return vf.AssistantMessage(content=text), False
    content = text[: matches[0].start()]
    return vf.AssistantMessage(content=content, tool_calls=calls), False


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
    content = message.content
    if isinstance(content, list) and any(part.type != "text" for part in content):
        raise ValueError("the environment's messages are not text alone, which is not supported")
    return content_text(content)


def plain_name(name: str) -> str:
    """Return a function's name as the name of a measure."""
    name = re.sub(r"\W", "_", name)
    return name if name.isidentifier() else f"_{name}"
