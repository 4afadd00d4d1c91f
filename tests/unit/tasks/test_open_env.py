"""Environments behind a server of OpenEnv, which `make test-environments` starts: a process,
without a container.
"""

import asyncio
import random
import sys
import threading
from contextlib import contextmanager, suppress
from unittest.mock import ANY

import pytest

from gspo.io.errors import SettingError
from gspo.tasks.adapters.open_env import OpenEnv
from gspo.tasks.environments.player import EnvironmentFailed, Player
from refusals import refuses

URL = "http://127.0.0.1:1"
needs_openenv = pytest.mark.environments


@pytest.mark.parametrize(
    "settings, refusal",
    [
        ({}, ("task.url", "", "set the address of the server")),
        ({"url": "127.0.0.1:8000"}, ("task.url", ANY, "set the address")),
        ({"url": URL, "options": {"seed": 3}}, ("task.options.seed", ANY, "set by the harness")),
        (
            {"url": URL, "action": "a", "values": {"a": 1}},
            ("task.values.a", ANY, "it is what the policy writes"),
        ),
        ({"url": URL, "evaluation_size": 0}, ("task.evaluation_size", 0)),
    ],
)
def test_bad_settings_are_refused_by_name(settings, refusal):
    with refuses(*refusal):
        OpenEnv(**settings)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv", None)
    with refuses("task", "openenv", 'pip install -e ".[openenv]"'):
        OpenEnv(url=URL).problem(1, "train", 0)


# --- with the library


@pytest.fixture(scope="module")
def url():
    from openenv_server import serving

    with serving() as address:
        yield address


def played(task: OpenEnv, problem, *texts: str):
    """What the policy reads first, and the outcomes of what it writes."""

    async def play():
        session = task.environment(problem, (1, 2))
        try:
            return await session.reset(problem), [await session.step(text) for text in texts]
        finally:
            await session.close()

    return asyncio.run(play())


def secret(problem, most: int = 9) -> int:
    return random.Random(problem.answer).randint(1, most)


@needs_openenv
def test_a_game_by_hand(url):
    task = OpenEnv(
        url=url, text="prompt", action="message", options={"most": 5}, instruction="Play."
    )
    problem = task.problem(1, "train", 0)
    number = secret(problem, 5)
    messages, (wrong, right) = played(task, problem, "0", f" {number}\n")
    assert messages == [{"role": "user", "content": problem.prompt}]
    assert problem.prompt == "Play.\n\nGuess a number from 1 to 5."
    assert (wrong.observation, wrong.reward, wrong.done) == ("wrong", 0.0, False)
    assert (right.reward, right.done, right.measures) == (1.0, True, {"invalid_actions": 0.0})


@needs_openenv
def test_whole_observations_and_actions_are_json(url):
    task = OpenEnv(url=url)
    problem = task.problem(1, "train", 1)
    assert problem.prompt == '{"prompt": "Guess a number from 1 to 9.", "tries": 0}'
    texts = ["0", "[" * 100_000, '{"massage": "0"}', '{"message": "0"}']
    _, outcomes = played(task, problem, *texts)
    assert [o.measures["invalid_actions"] for o in outcomes] == [1, 1, 1, 0]
    assert outcomes[0].observation == "Invalid action: write it as a JSON object, and nothing else."
    # in the server's words; the session goes on
    assert "VALIDATION_ERROR" in outcomes[2].observation
    assert outcomes[3].observation == '{"prompt": "wrong", "tries": 1}'


@needs_openenv
def test_problems_are_seeds_by_position(url):
    task = OpenEnv(url=url, text="prompt", action="message")
    seeds = [task.problem(1, "train", i).answer for i in range(5)]
    assert seeds == [OpenEnv(url=url).problem(1, "train", i).answer for i in range(5)]
    assert len({*seeds, *(task.problem(1, "openenv", i).answer for i in range(5))}) == 10


@needs_openenv
def test_many_sessions_at_once(url):
    task = OpenEnv(url=url, text="prompt", action="message")
    problems = [task.problem(1, "train", i) for i in range(16)]

    async def play(problem):
        session = task.environment(problem, ())
        await session.reset(problem)
        outcome = await session.step(str(secret(problem)))
        await session.close()
        return outcome.reward

    async def together():
        return await asyncio.gather(*map(play, problems))

    assert asyncio.run(together()) == [1.0] * 16


@needs_openenv
def test_a_failure_of_the_server_is_no_reward(url):
    task = OpenEnv(url=url, text="prompt", action="message")
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR"):
        played(task, task.problem(1, "train", 0), "crash")
    with refuses("task.text", "said", "the observation has metadata, prompt, tries"):
        OpenEnv(url=url, text="said").problem(1, "train", 0)
    with refuses("task.url", URL, "ConnectionError"):
        OpenEnv(url=URL).problem(1, "train", 0)


# --- a server that is something else


HOSTILE = {
    "a list": "[]",
    "null": "null",
    "no JSON": "<html>",
    "deep": "[" * 100_000,
    "data is a list": '{"type": "observation", "data": []}',
    "no data": '{"type": "observation"}',
    "observation is a list": '{"type": "observation", "data": {"observation": [1], "reward": 0, "done": false}}',
    "observation is null": '{"type": "observation", "data": {"observation": null, "reward": 0, "done": false}}',
    "90 MB": '{"type": "observation", "data": {"observation": {"prompt": "'
    + "x" * 90_000_000
    + '"}}}',
    "nothing": None,
}


@contextmanager
def answering(answers: list):
    """A server that answers each message with the next of these texts, the last of them for ever."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.server import serve

    left = list(answers)

    def handle(connection):
        with suppress(ConnectionClosed):
            for _ in connection:
                answer = left.pop(0) if len(left) > 1 else left[0]
                if answer is not None:
                    connection.send(answer)

    with serve(handle, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


@needs_openenv
@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_a_server_answers_to_reset_is_one_line(kind):
    with answering([HOSTILE[kind]]) as address:
        task = OpenEnv(url=address, text="prompt", step_seconds=2.0)
        with pytest.raises(SettingError) as caught:
            task.problem(1, "train", 0)
        wrong = ("task.text", "prompt") if kind == "no data" else ("task.url", address)
        assert (caught.value.key, caught.value.value) == wrong
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@needs_openenv
@pytest.mark.parametrize("kind", ["observation is a list", "90 MB", "nothing"])
def test_a_server_that_fails_later_ends_no_run(kind):
    """The reason takes the prompt's place, and episodes that ask again are failures of the
    environment.
    """
    good = '{"type": "observation", "data": {"observation": {"prompt": "Guess."}, "reward": 0, "done": false}}'
    with answering([good, HOSTILE[kind]]) as address:
        task = OpenEnv(url=address, text="prompt", step_seconds=2.0)
        assert task.problem(1, "train", 0).prompt == "Guess."
        later = task.problem(1, "train", 1)
        assert later.prompt.startswith(f"(no beginning: task.url={address}: ")
        assert task.problem(1, "train", 0).prompt == "Guess."
        player = Player(lambda: task.environment(later, (1,)), task.step_seconds)
        with pytest.raises(EnvironmentFailed):
            player.finish(player.begin("reset", later))
        player.close()


@needs_openenv
def test_half_characters_of_a_server_do_not_reach_the_tokenizer():
    half = '{"type": "observation", "data": {"observation": {"prompt": "a \\ud800 b"}, "reward": 0, "done": false}}'
    with answering([half]) as address:
        assert (
            OpenEnv(url=address, text="prompt", step_seconds=9.0).problem(1, "train", 0).prompt
            == "a ? b"
        )
