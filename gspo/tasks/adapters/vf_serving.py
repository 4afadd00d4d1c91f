"""Serves environments of the library verifiers: their event loop, their model and their episodes.

All episodes share one event loop in a thread. The environments of several episodes may share
clients and locks, which are bound to the first loop that uses them.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import PendingTurn
from verifiers.v1.utils.loaders import (
    env_config_type,
    harness_class,
    load_environment,
    taskset_class,
)

from gspo.io.errors import SettingError
from gspo.tasks.adapters import vf_chat
from gspo.tasks.environments.player import new_loop
from gspo.tasks.environments.protocol import Position

CUT_OFF = "max_output_tokens"  # the library's stop condition of episodes that we cut off
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


class LibraryEpisode:
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
        open_episodes = self.loaded.open_episodes
        for group in [group for group, episode in open_episodes.items() if episode is self]:
            del open_episodes[group]
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
    # by group: the episodes that other samples may join
    open_episodes: dict[Position, LibraryEpisode] = field(default_factory=dict)

    def join(self, task: int, group: Position, group_size: int) -> LibraryEpisode:
        """Return the episode that a sample of a group joins. Runs on the event loop."""
        if not self.group:
            return LibraryEpisode(self, self.tasks[task], 1)
        episode = self.open_episodes.get(group)
        if episode is None:
            episode = LibraryEpisode(self, self.tasks[task], group_size)
            self.open_episodes[group] = episode
        episode.joined += 1
        if episode.joined == group_size:  # the same samples may be played again
            del self.open_episodes[group]
        return episode

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
