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
"""

import asyncio
from collections.abc import Callable
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.types import FinishReason, TurnTokens, Usage

from gspo.data.problems import Problem
from gspo.tasks.adapters.vf_serving import (
    MODEL,
    LibraryEpisode,
    Loaded,
    Request,
    Seat,
    event_loop,
    on_loop,
    set_result,
)
from gspo.tasks.adapters.vf_trace import (
    by_plain_name,
    compare_tokens,
    measures_of,
    message_with_calls,
    text_of,
)
from gspo.tasks.environments.player import EnvironmentFailed
from gspo.tasks.environments.protocol import (
    Environment,
    Message,
    Outcome,
    Position,
    SampledTurn,
)

# In a group the library does not report that one agent has ended, so the agent's trace is polled.
SECONDS_BETWEEN_LOOKS = 0.02


class VfEpisode(Environment):
    """An environment that plays the conversation of one seat."""

    settles = True

    def __init__(self, load: Callable[[int], Loaded], task: int, position: Position):
        self.load = load  # returns the library's environment for a group size
        self.task = task  # the index of its task
        self.position = position
        self.in_group = False  # whether all samples of the group are one episode of the library
        self.episode: LibraryEpisode | None = None
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
        if self.episode is not None:
            on_loop(self.episode.cancel())

    async def _start(self, loaded: Loaded) -> None:
        self.episode = loaded.join(self.task, self.position[:-1], self.group_size)
        # the same sample has the same seat again in a resumed run
        self.seat = self.episode.seats[int(self.position[-1]) if self.in_group else 0]
        await self.episode.start()
        await self._next_request()

    async def _next_request(self) -> None:
        """Wait for the next request, which is None if the seat's agent or the episode ends."""
        assert self.episode is not None and self.episode.run is not None
        run = self.episode.run
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
        assert self.episode is not None
        on_loop(self.episode.end())
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
            rewards=by_plain_name(scores),
        )
