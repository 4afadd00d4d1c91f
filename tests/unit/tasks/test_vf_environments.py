"""Environments of the library verifiers, played by themselves: `make test-environments` runs what
needs the library.
"""

import asyncio
import logging
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import ANY

import pytest

from gspo.tasks.adapters.vf_environments import VfEnvironments, identity, shown
from refusals import refuses

needs_verifiers = pytest.mark.environments


def test_names_are_those_of_modules_and_functions():
    places = {
        "my-game": "my_game:load_environment",
        "owner/my-game": "my_game:load_environment",
        "my_pkg.games": "my_pkg.games:load_environment",
        "my_pkg.games:maze": "my_pkg.games:maze",
    }
    assert {env: VfEnvironments(env=env).env for env in places} == places


def test_bad_settings_are_refused_by_name():
    with refuses("task.env", problem="is not given"):
        VfEnvironments()
    with refuses("task.env", "my game:load_environment", "give the name of a module"):
        VfEnvironments(env="my game")
    with refuses("turns", 0):
        VfEnvironments(env="my_game", turns=0)


@pytest.mark.parametrize("missing", ["verifiers", "verifiers.types", "datasets"])
def test_without_the_library_or_with_another_version_it_says_what_to_install(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "gspo.tasks.adapters.vf_rollout", raising=False)
    with refuses("task", "vf", "needs the package verifiers in"):
        VfEnvironments(env="vf_games").problem(1, "train", 0)


def test_rows_with_one_prompt_and_other_answers_are_other_problems():
    prompt = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Guess."}]
    rows = [{"prompt": prompt, "answer": answer, "example_id": i} for i, answer in enumerate("aba")]
    assert [identity(row) for row in rows].count(identity(rows[0])) == 2
    assert shown(prompt) == "Guess."


# --- with the library


def episode(task, answer: str, split: str = "train"):
    """The environment of the problem with this answer, begun."""
    problem = next(
        p for i in range(200) if (p := task.problem(1, split, i)).answer["answer"] == answer
    )
    environment = task.environment(problem, (1, 2))
    return environment, environment.reset(problem)


@needs_verifiers
def test_a_rollout_is_the_librarys_own():
    """The same words give the same answers, metrics and reward as the library's own loop with a
    scripted client.
    """
    import verifiers as vf

    from gspo.tasks.adapters.vf_rollout import PolicyClient, plain

    class Scripted(PolicyClient):
        async def get_native_response(self, prompt, model, sampling_args, tools=None, state=None):
            return plain(words[len(state["trajectory"])])

    task = VfEnvironments(env="vf_games")
    for words in (["x", "11", "12"], ["12"], ["1", "2", "3", "4"]):
        played, messages = episode(task, "12")
        outcomes = [played.step(word) for word in words]
        row = {"prompt": messages, "answer": "12", "example_id": 0}
        alone = asyncio.run(vf.load_environment("vf_games").run_rollout(row, Scripted(), "m", {}))
        assert (outcomes[-1].reward, outcomes[-1].verdict) == (
            alone["reward"],
            alone["stop_condition"],
        )
        assert {n: outcomes[-1].measures[n] for n in alone["metrics"]} == alone["metrics"]
        said = [m["content"] for m in alone["completion"] if m["role"] == "user"]
        assert [o.observation for o in outcomes[:-1]] == said[: len(words) - 1]


@needs_verifiers
def test_reward_verdict_and_measures_by_hand():
    task = VfEnvironments(env="vf_games")
    played, messages = episode(task, "12")
    assert messages == [
        {"role": "system", "content": "Answer by a number."}, {"role": "user", "content": "Guess my number."}
    ]  # fmt: skip
    assert (played.role, played.tools) == ("user", ())
    first, second = played.step("30"), played.step("12")
    assert (first.observation, first.reward, first.done) == ("lower", 0.0, False)
    assert (second.reward, second.done, second.verdict) == (
        1.0 + 0.5 / 2,
        True,
        "has_final_env_response",
    )
    ours = {"malformed_calls": 0.0, "rubric_faults": 0.0}
    assert first.measures == {"found": 0.0, "quick": 0.0, "num_turns": 0.0} | ours
    assert second.measures == {"found": 1.0, "quick": 0.5, "num_turns": 2.0} | ours


@needs_verifiers
def test_tools_are_called_as_qwen_writes_them():
    task = VfEnvironments(env="vf_games:load_tools")
    played, messages = episode(task, "14")
    assert messages == [{"role": "user", "content": "7+7?"}] and played.role == "tool"
    (tool,) = played.tools
    assert tool["function"]["name"] == "add" and set(
        tool["function"]["parameters"]["properties"]
    ) == {"a", "b"}
    asked = played.step(
        "<think>Not yet: <tool_call>{}</tool_call></think>I add.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 7}}\n</tool_call>'
        '<tool_call>{"name": "subtract", "arguments": {}}'
    )
    assert asked.observation == "14\n\n'subtract'" and not asked.done
    said = played.conversation[1]
    assert [(c.name, c.arguments) for c in said.tool_calls] == [
        ("add", '{"a": 7, "b": 7}'),
        ("subtract", "{}"),
    ]
    assert len({c.id for c in said.tool_calls}) == 2 and said.content.endswith("I add.\n")
    ended = played.step("It is 14.")
    assert (ended.reward, ended.verdict) == (1.0, "no_tools_called")
    assert ended.measures["add_calls"] == 1.0 and ended.measures["total_tool_calls"] == 2.0


@needs_verifiers
@pytest.mark.parametrize(
    "call",
    [
        "{",
        "7",
        "[]",
        "{}",
        '{"name": 3}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add"} and more',
        "",
    ],
)
def test_a_malformed_call_is_none_and_is_counted(call):
    good = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    played, _ = episode(VfEnvironments(env="vf_games:load_tools"), "14")
    ended = played.step(f"{good}<tool_call>{call}</tool_call>")
    assert (ended.done, ended.verdict, ended.measures["malformed_calls"]) == (
        True,
        "no_tools_called",
        1.0,
    )
    assert ended.measures["total_tool_calls"] == 0.0


@needs_verifiers
def test_a_single_turn_ends_after_one_step():
    task = VfEnvironments(env="vf_games:load_single")
    played, _ = episode(task, "6", "vf")
    ended = played.step("6")
    assert (ended.done, ended.reward) == (True, 1.0)
    with refuses("task.env", "vf_games:load_single", "has no training data set"):
        task.problem(1, "train", 0)


@needs_verifiers
def test_training_has_no_problem_of_the_evaluation():
    for env, training, evaluation in (("vf_games", 64, 16), ("vf_games:load_tools", 5, 3)):
        task, again = VfEnvironments(env=env), VfEnvironments(env=env)
        assert (task.size("train"), task.size("vf")) == (training, evaluation)
        trained = {identity(task.problem(1, "train", i).answer) for i in range(training)}
        assert not trained & {identity(task.problem(1, "vf", i).answer) for i in range(evaluation)}
        rows = [task.problem(1, "train", i).answer["example_id"] for i in range(2 * training)]
        assert sorted(rows[:training]) == sorted(rows[training:]) and len(set(rows)) == training
        assert rows != [
            task.problem(2, "train", i).answer["example_id"] for i in range(2 * training)
        ]
        assert rows == [
            again.problem(1, "train", i).answer["example_id"] for i in range(2 * training)
        ]
    with refuses("task.env", problem="of its 4 training problems none is among the 1 in 8"):
        VfEnvironments(env="vf_games", arguments={"size": 4}).problem(1, "vf", 0)


@needs_verifiers
@pytest.mark.parametrize(
    "settings, refusal",
    [
        (
            {"turns": 3},
            ("task.turns", 3, "give task.turns=4"),
        ),
        (
            {"arguments": {"round": 3}},
            ("task.arguments", {"round": 3}, "does not fit load_environment"),
        ),
        (
            {"env": "vf_games:load_nothing"},
            ("task.env", ANY, "load_nothing failed: TypeError: load_nothing returned str"),
        ),
        ({"env": "vf_games:load_group"}, ("task.env", ANY, "its rubric scores whole groups")),
        (
            {"env": "vf_games:nothing"},
            ("task.env", "vf_games:nothing", "there is no nothing in vf_games"),
        ),
        ({"env": "no_such_game"}, ("task.env", ANY, "there is no module no_such_game")),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(settings, refusal):
    with refuses(*refusal):
        VfEnvironments(**{"env": "vf_games"} | settings).problem(1, "train", 0)


@needs_verifiers
def test_an_environment_that_fails_gives_no_reward():
    task = VfEnvironments(env="vf_games")
    for word, error, said in (
        ("crash", KeyError, "said crash"),
        ("outage", RuntimeError, "the service is away"),
    ):
        played, _ = episode(task, "12")
        with pytest.raises(error, match=said):
            played.step(word)
        played.close()


@needs_verifiers
def test_a_conversation_that_is_rewritten_is_refused():
    played, _ = episode(VfEnvironments(env="vf_games:load_forgetful"), "14")
    with pytest.raises(RuntimeError, match="has changed earlier turns"):
        played.step("3")


@needs_verifiers
def test_faults_of_a_rubrics_function_are_counted_and_logged(caplog):
    played, _ = episode(VfEnvironments(env="vf_games", arguments={"fault": True}), "12")
    other, _ = episode(VfEnvironments(env="vf_games"), "12")
    with caplog.at_level(logging.ERROR):
        ended = played.step("12")
    assert (ended.reward, ended.measures["faulty"], ended.measures["rubric_faults"]) == (
        1.5,
        0.0,
        1.0,
    )
    assert other.step("12").measures["rubric_faults"] == 0.0
    assert "nothing there" in caplog.text


@needs_verifiers
def test_many_rollouts_at_once_share_what_is_bound_to_a_loop_and_clean_up():
    import vf_games

    task = VfEnvironments(env="vf_games")
    problems = [task.problem(1, "train", i) for i in range(24)]
    vf_games.ENDS.clear()

    def play(problem):
        environment = task.environment(problem, (1,))
        environment.reset(problem)
        outcome = (
            environment.step(problem.answer["answer"])
            if problem.index % 2
            else environment.step("x")
        )
        environment.close()
        return outcome.reward

    with ThreadPoolExecutor(24) as threads:
        assert list(threads.map(play, problems)) == [0.0, 1.5] * 12
    assert sorted(vf_games.ENDS) == ["cancelled"] * 12 + ["has_final_env_response"] * 12


@needs_verifiers
def test_signals_stay_those_of_the_run():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    VfEnvironments(env="vf_games").problem(1, "train", 0)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    made = []
    thread = threading.Thread(
        target=lambda: made.append(VfEnvironments(env="vf_games").problem(1, "train", 0))
    )
    thread.start()
    thread.join()
    assert made[0].task == "vf"  # signals can be set in the main thread alone
