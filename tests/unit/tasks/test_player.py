"""What plays environments, against environments that raise, hang, lie or return too much."""

import asyncio
import concurrent.futures
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from gspo.data.problems import Problem
from gspo.data.samples import LARGEST_REWARD
from gspo.tasks.environments.player import EnvironmentFailed, Player, all_closed
from gspo.tasks.environments.protocol import Environment, Outcome

PROBLEM = Problem("game", 0, "Begin.", None)


class Game(Environment):
    """Returns or raises what it is told to, in `step`."""

    def __init__(self, what=None, closed=None):
        self.what, self.closed = what, closed

    def step(self, text):
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what(text) if callable(self.what) else self.what

    def close(self):
        if self.closed:
            self.closed.set()


class AsyncGame(Game):
    async def step(self, text):
        await asyncio.sleep(0)
        return super().step(text)


def failure(game: Environment, method="step", argument="hello", seconds=20.0) -> EnvironmentFailed:
    player = Player(lambda: game, seconds)
    with pytest.raises(EnvironmentFailed) as failed:
        player.finish(player.begin(method, argument))
    player.close()
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 400
    return failed.value


class Unwritable(Exception):
    def __str__(self):
        raise ValueError("not even that")


@pytest.mark.parametrize("kind", [Game, AsyncGame])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("board"), "KeyError: 'board'"),
        (TimeoutError("my own"), "TimeoutError: my own"),
        (concurrent.futures.TimeoutError("of a pool"), "TimeoutError: of a pool"),
        (asyncio.CancelledError(), "CancelledError: "),
        (concurrent.futures.CancelledError(), "CancelledError: "),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (GeneratorExit(), "GeneratorExit: "),
        (MemoryError(), "MemoryError: "),
        (RuntimeError("two\nlines " + "x" * 10_000_000), "RuntimeError: two lines xxx"),
        (Unwritable(), "Unwritable: (it cannot be written)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_an_environment_raises_is_its_failure_in_one_line(kind, error, text):
    closed = threading.Event()
    failed = failure(kind(error, closed))
    assert failed.verdict == "environment-error" and str(failed).startswith(text)
    assert closed.wait(5), "it is closed also after it has raised"


@pytest.mark.parametrize("kind", [Game, AsyncGame])
def test_stop_iteration_too(kind):
    """A coroutine cannot raise it: Python makes it a RuntimeError."""
    assert "StopIteration" in str(failure(kind(StopIteration())))


def test_a_constructor_that_raises_fails_its_first_call_and_there_is_nothing_to_close():
    def broken():
        raise FileNotFoundError("no board")

    player = Player(broken, 20.0)
    for method in ("reset", "step"):
        with pytest.raises(EnvironmentFailed, match="FileNotFoundError: no board"):
            player.finish(player.begin(method, PROBLEM))
    player.close()
    player._thread.join(5)
    assert not player._thread.is_alive()


def test_an_environment_without_length_is_made_once():
    """One that is false in a condition, as an empty container is."""
    made = []

    class Empty(Game):
        def __len__(self):
            return 0

    def make():
        made.append(Empty(lambda text: Outcome("so")))
        return made[-1]

    player = Player(make, 20.0)
    for _ in range(3):
        assert player.finish(player.begin("step", "hello")).observation == "so"
    player.close()
    assert len(made) == 1


@pytest.mark.slow
def test_closes_are_waited_for_at_the_same_time_each_until_its_deadline():
    released = threading.Event()

    class Slow(Game):
        def close(self):
            released.wait(10 if self.what else 0.3)
            super().close()

    closed = [threading.Event() for _ in range(4)]
    players = [Player(lambda event=event: Slow(None, event), 20.0) for event in closed]
    # the last is never made
    players += [Player(lambda: Slow("hang"), 0.5), Player(lambda: Slow(), 20.0)]
    for player in players[:-1]:
        player.finish(player.begin("reset", PROBLEM))
    started = time.perf_counter()
    assert all_closed([player.close() for player in players]) == 1
    assert all(event.is_set() for event in closed) and 0.5 <= time.perf_counter() - started < 5
    released.set()


def test_a_failing_close_is_nobodys_business():
    class Sticky(Game):
        def close(self):
            raise SystemExit("never")

    player = Player(lambda: Sticky(Outcome("so")), 20.0)
    assert player.finish(player.begin("step", "hello")).observation == "so"
    assert all_closed([player.close()]) == 0
    player._thread.join(5)
    assert not player._thread.is_alive()


async def forever(_):
    await asyncio.sleep(1000)


async def blocking(_):
    time.sleep(3)  # what nobody should write in a coroutine


async def in_a_thread(_):
    await asyncio.to_thread(time.sleep, 1000)


@pytest.mark.parametrize("hang", [lambda _: time.sleep(3), forever, blocking, in_a_thread])
def test_a_call_that_hangs_ends_at_the_time_limit(hang):
    started = time.perf_counter()
    failed = failure(Game(hang), seconds=0.1)
    assert failed.verdict == "environment-timeout" and "step_seconds=0.1" in str(failed)
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("hang", [forever, in_a_thread])
def test_an_environment_that_awaits_for_ever_is_cancelled_and_closed(hang, monkeypatch):
    monkeypatch.setattr("gspo.tasks.environments.player.CANCELLED_AFTER", 0.1)
    closed = threading.Event()
    player = Player(lambda: Game(hang, closed), 0.1)
    with pytest.raises(EnvironmentFailed, match="took longer"):
        player.finish(player.begin("step", "hello"))
    player.close()
    assert closed.wait(5)
    player._thread.join(5)
    assert not player._thread.is_alive(), "no thread stays behind"


HANGING = """
import asyncio, time
from gspo.tasks.environments.protocol import Environment
from gspo.tasks.environments.player import EnvironmentFailed, Player
async def forever(): await asyncio.sleep(1000)
async def blocking(): time.sleep(1000)
async def in_a_thread(): await asyncio.to_thread(time.sleep, 1000)
class Game(Environment):
    def __init__(self, hang): self.hang = hang
    def step(self, text): return self.hang()
for hang in (lambda: time.sleep(1000), forever, blocking, in_a_thread):
    player = Player(lambda: Game(hang), 0.1)
    try: player.finish(player.begin("step", "hello"))
    except EnvironmentFailed as error: print(error.verdict)
    player.close()
"""


@pytest.mark.slow
def test_calls_that_hang_do_not_keep_the_process_from_ending():
    ended = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0 and ended.stdout.split() == ["environment-timeout"] * 4, (
        ended.stderr
    )


@dataclass
class Sly(Outcome):
    """Its words are made by code that raises."""

    def __getattribute__(self, name):
        if name == "observation":
            raise SystemExit("got you")
        return super().__getattribute__(name)


class Boastful:
    def __repr__(self):
        raise RuntimeError("no words")


NOT_OUTCOMES = [
    (None, "step returned NoneType, not an Outcome"),
    (b"bytes", "step returned bytes, not an Outcome"),
    (("said", 1.0, True), "step returned tuple, not an Outcome"),
    (lambda text: Outcome, "step returned type, not an Outcome"),
    (Outcome(b"bytes"), "observation=b'bytes', not str"),
    (Outcome(None), "observation=None, not str"),
    (Outcome(Boastful()), "RuntimeError: no words"),
    (Outcome(b"x" * 10_000_000), "observation=b'xxx"),
    (Outcome(done=1), "done=1, not bool"),
    (Outcome(done=None), "done=None, not bool"),
    (Outcome(verdict=None), "verdict=None, not str"),
    (Outcome(verdict=""), "verdict='', not one word"),
    (Outcome(verdict="two words"), "verdict='two words', not one word"),
    (Outcome(verdict="x" * 41), "not one word of up to 40 characters"),
    (Outcome(answer=3), "answer=3, not str"),
    (Outcome(reward=None), "reward=None, not a number"),
    (Outcome(reward="1"), "reward='1', not a number"),
    (Outcome(done="yes"), "done='yes', not bool"),
    (Outcome(reward=float("nan")), "reward=nan, not a number"),
    (Outcome(reward=float("inf")), "reward=inf, not a number"),
    (Outcome(reward=-float("inf")), "reward=-inf, not a number"),
    (Outcome(reward=10**400), "reward=1000"),
    (Outcome(reward=1e39), "reward=1e+39, not a number within +-1e+09"),
    (Outcome(measures=None), "measures=None, not dict"),
    (Outcome(rewards=None), "rewards=None, not dict"),
    (Outcome(rewards=[1.0], done=True), "rewards=[1.0], not dict"),
    (Outcome(rewards={"a": 1.0}), "rewards={'a': 1.0} with done=False; give them at the end"),
    (Outcome(rewards={"a": None}, done=True), "rewards={'a': None}, not a name and a number"),
    (Outcome(rewards={"a": "1"}, done=True), "rewards={'a': '1'}, not a name and a number"),
    (Outcome(rewards={"a/b": 1}, done=True), "rewards={'a/b': 1}, not a name"),
    (Outcome(rewards={3: 1}, done=True), "rewards={3: 1}, not a name"),
    (Outcome(rewards={"a": float("nan")}, done=True), "rewards={'a': nan}, not a name"),
    (Outcome(rewards={"a": 1e10}, done=True), "rewards={'a': 10000000000.0}, not a name"),
    (Outcome(measures={"a b": 1}), "measures={'a b': 1}, not a name"),
    (Outcome(measures={"a/b": 1}), "measures={'a/b': 1}, not a name"),
    (Outcome(measures={"": 1}), "measures={'': 1}, not a name"),
    (Outcome(measures={3: 1}), "measures={3: 1}, not a name"),
    (Outcome(measures={"größe": 1}), "measures={'größe': 1}, not a name"),
    (Outcome(measures={"x" * 41: 1}), "not a name"),
    (
        Outcome(measures={"seconds": float("nan")}),
        "measures={'seconds': nan}, not a name and a number",
    ),
    (Outcome(measures={"seconds": 10**400}), "not a name and a number"),
    (Outcome(measures={"seconds": "1"}), "measures={'seconds': '1'}"),
    (Outcome(measures={f"m{i}": 1 for i in range(33)}), "33 measures; 32 is the most"),
    (Outcome(measures={"escaped": 1}), "a measure 'escaped', but every episode has"),
    (Outcome(measures={"replay_differs": 1}), "a measure 'replay_differs', but every episode has"),
    (Sly(), "SystemExit: got you"),
]


@pytest.mark.parametrize(
    ("found", "text"), NOT_OUTCOMES, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_what_is_no_outcome_is_refused_in_words(found, text):
    failed = failure(Game(found))
    assert failed.verdict == "environment-error" and text in str(failed)


@pytest.mark.parametrize(
    "reward", [0, 1, True, -0.5, np.float32(0.5), np.int64(1), LARGEST_REWARD, -LARGEST_REWARD]
)
def test_every_ordinary_number_is_a_reward(reward):
    player = Player(
        lambda: Game(Outcome("so", reward, np.False_, measures={"seconds": 2, "_x1": reward})), 20.0
    )
    found = player.finish(player.begin("step", "hello"))
    player.close()
    assert found.reward == reward and found.measures == {"seconds": 2, "_x1": reward}
    assert type(found.reward) is float and found.done is False


def test_an_outcome_is_as_it_was_returned_whatever_the_environment_does_with_it_later():
    kept = Outcome("first", 1.0, measures={"calls": 1})

    def again(text):
        kept.observation, kept.measures["calls"] = text, kept.measures["calls"] + 1
        return kept

    player = Player(lambda: Game(again), 20.0)
    first, second = (player.finish(player.begin("step", text)) for text in ("one", "two"))
    player.close()
    assert (first.observation, first.measures) == ("one", {"calls": 2})
    assert (second.observation, second.measures) == ("two", {"calls": 3})


def test_halves_of_surrogate_pairs_are_replaced_since_no_tokenizer_takes_them():
    player = Player(lambda: Game(Outcome("a\ud800b")), 20.0)
    assert player.finish(player.begin("step", "hello")).observation == "a?b"
    player.close()


@pytest.mark.parametrize(
    ("verdict", "kept"),
    [
        ("time-limit", "time-limit"),
        ("größe_2.0", "größe_2.0"),
        ("a/b:\x1b[1m", "a_b___1m"),
        ("\ud800", "_"),
    ],
)
def test_a_verdict_can_be_part_of_a_metrics_name(verdict, kept):
    player = Player(lambda: Game(Outcome(done=True, verdict=verdict)), 20.0)
    assert player.finish(player.begin("step", "hello")).verdict == kept
    player.close()


def test_of_a_long_answer_the_beginning_is_kept():
    player = Player(lambda: Game(Outcome(done=True, answer="\udfff4" + "2" * 10_000_000)), 20.0)
    assert player.finish(player.begin("step", "hello")).answer == "?4" + "2" * 998
    player.close()


def beginner(messages, tools=(), role="user") -> Environment:
    class Begins(Game):
        def reset(self, problem):
            return messages

    game = Begins()
    game.tools, game.role = tools, role
    return game


USER = {"role": "user", "content": "Begin."}


@pytest.mark.parametrize(
    ("game", "text"),
    [
        (beginner(None), "reset returned None, not a list of messages"),
        (beginner([]), "reset returned [], not a list of messages"),
        (beginner("Begin."), "reset returned 'Begin.', not a list"),
        (beginner([b"bytes"]), "reset returned [b'bytes'], not a list"),
        (beginner((USER,)), "not a list of messages"),
        (beginner([{"role": "user"}]), "not a list of messages with a role and a text"),
        (
            beginner([{"role": "user", "content": None}]),
            "not a list of messages with a role and a text",
        ),
        (beginner([{"role": 1, "content": "a"}]), "not a list of messages with a role and a text"),
        (
            beginner([USER | {"extra": {1, 2}}]),
            "TypeError: Object of type set is not JSON serializable",
        ),
        (beginner([USER], tools=None), "tools=None, not a tuple of JSON objects"),
        (beginner([USER], tools=("search",)), "tools=('search',), not a tuple of JSON objects"),
        (
            beginner([USER], tools=({"call": print},)),
            "TypeError: Object of type builtin_function_or_method",
        ),
        (beginner([USER], role="assistant"), "role='assistant'; it must be 'user' or 'tool'"),
        (beginner([USER], role=["user"]), "role=['user']; it must be 'user' or 'tool'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_no_beginning_is_refused_in_words(game, text):
    failed = failure(game, "reset", PROBLEM)
    assert failed.verdict == "environment-error" and text in str(failed)


def test_a_beginning_is_copied_and_readable():
    messages = [{"role": "user", "content": "a\udfffb", "name": "x"}]
    game = beginner(messages, tools=[{"type": "function"}], role="tool")
    player = Player(lambda: game, 20.0)
    begun = player.finish(player.begin("reset", PROBLEM))
    player.close()
    messages.clear()
    assert begun.messages == [{"role": "user", "content": "a?b", "name": "x"}]
    assert begun.tools == ({"type": "function"},) and begun.role == "tool"


def test_calls_of_one_environment_come_in_order_and_those_of_several_at_the_same_time():
    barrier = threading.Barrier(8, timeout=10)

    def together(text):
        barrier.wait()  # passes only if all eight are inside
        return Outcome(text)

    players = [Player(lambda: Game(together), 20.0) for _ in range(8)]
    calls = [[player.begin("step", text) for text in ("a", "b")] for player in players]
    for player, (first, second) in zip(players, calls, strict=True):
        assert [player.finish(first).observation, player.finish(second).observation] == ["a", "b"]
        player.close()
