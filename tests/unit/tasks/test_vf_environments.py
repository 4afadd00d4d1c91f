"""Tasksets of the library verifiers, played by themselves: `make test-environments` runs the tests
that need the library.
"""

import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from builders import small_policy
from gspo.algorithm.gdpo import GDPO
from gspo.algorithm.reward_shaping import RewardShaping
from gspo.data.pack import pack
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.episodes.sampling import play
from gspo.rollout.settings import RolloutSettings
from gspo.tasks.adapters.vf_environments import VfEnvironments, identity
from gspo.tasks.environments.player import EnvironmentFailed, fault_of
from gspo.tasks.environments.protocol import Outcome, SampledTurn
from gspo.train.accumulator import MetricAccumulator
from refusals import refuses
from trainers import trainer, with_advantages

SUPPORT = Path(__file__).parents[2] / "support"


def needs_verifiers(test):
    """Mark a test that needs the library. It has other versions of packages than OpenEnv has."""
    return pytest.mark.environments(pytest.mark.verifiers(test))


def test_names_are_those_of_modules():
    modules = {
        "my-game": "my_game:__all__",
        "owner/My-Game": "my_game:__all__",
        "my_game:__all__": "my_game:__all__",
        "textarena": "verifiers.v1.tasksets.textarena:__all__",
    }
    assert {name: VfEnvironments(taskset=name).taskset for name in modules} == modules


def test_bad_settings_are_refused_by_name():
    with refuses("task.taskset", problem="is not given"):
        VfEnvironments()
    for name in ("my game", "my_pkg.games", "my_game:Game"):
        with refuses("task.taskset", ANY, "give the name of a module"):
            VfEnvironments(taskset=name)
    with refuses("task.turns", 0):
        VfEnvironments(taskset="my_game", turns=0)
    with refuses("task.runtime", "prime"):  # a paid service, and the library's default
        VfEnvironments(taskset="my_game", runtime="prime")


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "gspo.tasks.adapters.vf_serving", raising=False)
    with refuses("task", "vf", "needs the package verifiers in"):
        VfEnvironments(taskset="vf_games").problem(1, "train", 0)


def test_tasks_with_the_same_prompt_and_other_answers_are_other_problems():
    tasks = [{"idx": i, "prompt": "Guess.", "secret": secret} for i, secret in enumerate("aba")]
    assert [identity(task) for task in tasks].count(identity(tasks[0])) == 2


# --- with the library


def episode(task, secret: int):
    """Return the environment of a problem with this secret number, and its first messages."""
    tasks = task.load(True).tasks
    for index in range(100):
        problem = task.problem(1, "train", index)
        if tasks[problem.answer["task"]].data.secret == secret:
            environment = task.environment(problem, (1, 2))
            return environment, environment.reset(problem)
    raise AssertionError(f"no problem has the number {secret}")


def sampled(*words: str) -> list[SampledTurn]:
    """Return turns with tokens: two each, with one token of the environment between them."""
    turns, context = [], [1, 2, 3]
    for number, word in enumerate(words):
        turns.append(SampledTurn(word, context, [10 + number, 20], [-0.5, -0.25]))
        context = [*context, 10 + number, 20, 4]
    return turns


@needs_verifiers
def test_reward_verdict_measures_and_the_tokens_of_the_trace_by_hand():
    played, messages = episode(VfEnvironments(taskset="vf_games"), 12)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"] == "Answer by a number."
    assert messages[1]["content"].startswith("Guess my number, below 40.")
    assert (played.role, played.tools) == ("user", ())
    first, second = (played.act(turn) for turn in sampled("30", "12"))
    assert (first.observation, first.reward, first.done) == ("lower", 0.0, False)
    assert (second.reward, second.done, second.verdict) == (1.0 + 0.5 / 2, True, "user_closed")
    assert first.measures == {"malformed_calls": 0.0}
    assert second.measures == first.measures | {"found": 1.0, "quick": 0.5, "guesses": 2.0}
    # before the taskset's weights, 1 and .5
    assert (first.rewards, second.rewards) == ({}, {"found": 1.0, "quick": 0.5})
    (branch,) = played.seat.trace.branches
    assert branch.token_ids == [1, 2, 3, 10, 20, 4, 11, 20]
    assert branch.sampled_mask == [False] * 3 + [True, True, False, True, True]
    assert branch.logprobs == [0, 0, 0, -0.5, -0.25, 0, -0.5, -0.25]


@needs_verifiers
def test_other_tokens_than_the_policys_are_an_error():
    played, _ = episode(VfEnvironments(taskset="vf_games"), 12)
    first, second = sampled("30", "12")
    played.act(first)
    played.turns[0] = SampledTurn("30", [1, 2, 3], [10, 20], [-0.5, -0.75])
    with pytest.raises(RuntimeError, match="not those that the policy has sampled"):
        played.act(second)


@needs_verifiers
def test_a_cut_episode_is_truncated_and_scored_up_to_there():
    for was_heard in (False, True):
        played, _ = episode(VfEnvironments(taskset="vf_games"), 12)
        first, second = sampled("30", "1")
        played.act(first)
        ended = played.settle(None if was_heard else second)
        assert (ended.reward, ended.verdict) == (0.5 if was_heard else 0.25, "max_output_tokens")
        trace = played.seat.trace
        assert trace.is_truncated and trace.ok and trace.num_turns == 2 - was_heard
    played, _ = episode(VfEnvironments(taskset="vf_games", turns=2), 12)
    assert [played.act(turn).done for turn in sampled("30", "1")] == [False, True]
    assert played.seat.trace.stop_condition == "max_turns" and played.seat.trace.is_truncated


@needs_verifiers
def test_an_episode_that_is_not_ok_gives_no_reward():
    played, _ = episode(VfEnvironments(taskset="vf_games"), 12)
    with pytest.raises(RuntimeError, match=r"not ok.*KeyError: 'said crash'"):
        played.step("crash")
    played, _ = episode(VfEnvironments(taskset="vf_games", arguments={"fault": True}), 12)
    with pytest.raises(RuntimeError, match=r"not ok.*IndexError: nothing there"):
        played.step("12")
    assert played.seat.trace.reward == 0.0  # which is not a reward of the policy
    played, _ = episode(VfEnvironments(taskset="vf_games", arguments={"slow": True}), 12)
    with pytest.raises(EnvironmentFailed, match="a time limit of the library"):
        played.step("12")


@needs_verifiers
def test_more_conversations_than_one_are_refused():
    task = VfEnvironments(taskset="vf_games", arguments={"friends": 1})
    played, _ = episode(task, 12)
    with pytest.raises(RuntimeError, match="an agent beside the training samples"):
        played.step("12")
    with pytest.raises(RuntimeError, match="an agent beside the training samples"):
        episode(VfEnvironments(taskset="vf_games", env="user-sim"), 12)  # the policy as the user
    played, _ = episode(VfEnvironments(taskset="vf_games", harness="vf-forgetful"), 12)
    with pytest.raises(RuntimeError, match="has changed earlier turns"):
        played.step("3")


@pytest.fixture(scope="module")
def sums():
    """A task of sums with a tool, whose server starts once: another process takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        folders = (str(SUPPORT), os.environ.get("PYTHONPATH", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        task = VfEnvironments(taskset="vf_tools")
        task.load(True)
        yield task


@needs_verifiers
def test_tools_are_called_as_qwen_writes_them(sums):
    problems = [sums.problem(1, "train", i) for i in range(8)]
    problem = next(p for p in problems if p.prompt == "3+3?")
    played = sums.environment(problem, (1, 2))
    assert played.reset(problem) == [{"role": "user", "content": "3+3?"}]
    (tool,) = played.tools
    assert played.role == "tool" and tool["function"]["name"] == "calculator_add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    asked = played.step(
        "<think>Not yet: <tool_call>{}</tool_call></think>I add.\n"
        '<tool_call>\n{"name": "calculator_add", "arguments": {"a": 3, "b": 3}}\n</tool_call>'
        '<tool_call>{"name": "subtract", "arguments": {}}'
    )
    assert asked.observation == "6\n\nerror: unknown tool 'subtract'" and not asked.done
    said = played.seat.trace.nodes[1].message
    assert [(c.name, c.arguments) for c in said.tool_calls] == [
        ("calculator_add", '{"a": 3, "b": 3}'),
        ("subtract", "{}"),
    ]
    assert len({c.id for c in said.tool_calls}) == 2 and said.content.endswith("I add.\n")
    ended = played.step("It is 6.")
    assert (ended.reward, ended.verdict) == (1.0, "agent_completed")

    good = '<tool_call>{"name": "calculator_add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    no_object = '{"name": "add", "arguments": [1]}'
    for call in ("{", "7", "[]", "{}", '{"name": 3}', no_object, '{"name": "add"} and more', ""):
        played = sums.environment(problem, (1, 2))
        played.reset(problem)
        ended = played.step(f"{good}<tool_call>{call}</tool_call>")
        assert (ended.done, ended.reward, ended.measures["malformed_calls"]) == (True, 0.0, 1.0)
        assert played.seat.trace.nodes[-1].message.tool_calls is None


@needs_verifiers
def test_every_name_of_a_reward_becomes_one_that_a_measure_may_have():
    from gspo.tasks.adapters.vf_trace import by_plain_name, measures_of, message_with_calls

    long = "the_final_answer_matches_the_reference_exactly"
    values = {"a-b": 1.0, "a_b": 2.0, "turns": 3.0, "größe": 4.0, long: 5.0, f"{long}!": 6.0}
    named = by_plain_name(values)
    assert list(named.values()) == list(values.values())
    assert list(named)[:4] == ["a_b", "a_b_2", "_turns", "gr__e"]
    assert list(named)[4:] == [long[:40], f"{long[:37]}_2"]
    assert fault_of(Outcome(done=True, measures=named, rewards=named)) == ""
    same_names = measures_of({"a-b": None, "a_b": 2.0})
    assert same_names == {"a_b_2": 2.0}, "a name does not depend on which values there are"
    reserved = {f"reward_turns_{'x' * n}{end}": 1.0 for n in (0, 40) for end in ("", "!", "?")}
    assert len(by_plain_name(reserved)) == 6
    assert "reward_turns_2" not in by_plain_name({"reward_turns": 1.0, "reward-turns": 2.0})
    assert measures_of({"kept": 1.0, "nan": math.nan, "inf": math.inf, "none": None}) == {
        "kept": 1.0
    }
    _, is_malformed = message_with_calls("<tool_call>" + "[" * 100_000 + "</tool_call>", 0)
    assert is_malformed, "it is not a failure of the environment"


@needs_verifiers
def test_the_librarys_best_of_n_scores_a_group():
    task = VfEnvironments(taskset="vf_games", env="best-of-n", group="n")
    problem = task.problem(1, "train", 0)
    secret = task.load(True).tasks[problem.answer["task"]].data.secret
    samples = [task.environment(problem, (1, "a", sample)) for sample in range(3)]
    for sample in samples:
        sample.group_size = 3
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda sample: sample.reset(problem), samples))
        for sample, word in zip(samples, ("x", str(secret), "y"), strict=True):
            assert sample.step(word).deferred
        outcomes = list(threads.map(lambda sample: sample.settle(None), samples))
    assert [outcome.reward for outcome in outcomes] == [0.5, 1.5, 0.5]
    assert [outcome.measures["best"] for outcome in outcomes] == [0.0, 1.0, 0.0]
    assert outcomes[1].rewards == {"found": 1.0, "quick": 1.0}
    assert [outcome.measures["pass_at_n"] for outcome in outcomes] == [1.0] * 3
    assert {outcome.verdict for outcome in outcomes} == {"agent_completed"}


@needs_verifiers
def test_gdpo_compares_each_of_the_tasksets_rewards_by_itself():
    task = VfEnvironments(taskset="vf_games", arguments={"numbers": 3})
    weights = {"quick": 0.25, "found": 1.0}
    task.reward_weights = weights
    rollout = RolloutSettings(
        prompts_per_step=4, group_size=4, max_new_tokens=40, stop=list("0123456789")
    )
    parts = {"advantage": GDPO(), "reward": RewardShaping(weights=weights)}
    t = trainer(rollout=rollout, task=task, parts=parts)
    batch = t.source.next(1)
    responses = batch.responses
    for r in responses:
        found, guesses = r.measures["found"], r.measures["guesses"]
        assert r.score.rewards == {"found": found, "quick": pytest.approx(1 / guesses)}
        assert r.reward == pytest.approx(found + 0.25 / guesses)  # .5 in the taskset
    # z of each reward over its group, weighed and summed, and then whitened over all responses
    sums = np.zeros((4, 4))
    for name, weight in weights.items():
        scores = np.array([r.score.rewards[name] for r in responses]).reshape(4, 4)
        spread = scores.std(1, ddof=1, keepdims=True)
        sums += weight * (scores - scores.mean(1, keepdims=True)) / (spread + 1e-4)
    expected = ((sums - sums.mean()) / (sums.std(ddof=1) + 1e-4)).reshape(-1)
    assert len(set(expected.round(6))) > 2
    packed = pack(responses, t.policy.tokenizer.pad_token_id)
    rows = torch.arange(len(packed))
    old = t.old_policy.add(packed, responses, rows, t.ranks, MetricAccumulator())
    advantages_BT = with_advantages(t, old, batch).adv_BT
    for row, r in enumerate(responses):
        of_policy = advantages_BT[row, : len(r.token_ids)][torch.from_numpy(r.policy_mask)]
        assert of_policy.tolist() == pytest.approx([expected[row]] * r.length, abs=1e-5)


@needs_verifiers
def test_training_has_no_problem_of_the_evaluation():
    def numbers(task, split, count, seed=1):
        return [task.problem(seed, split, i).answer["task"] for i in range(count)]

    settings = ({}, {"evaluation_arguments": {"size": 10}})
    for options, training, evaluation in zip(settings, (70, 70), (10, 10), strict=True):
        task, again = (VfEnvironments(taskset="vf_games", **options) for _ in range(2))
        if not options:
            evaluation = task.size("vf")
            training = 80 - evaluation
            assert 4 <= evaluation <= 18
        assert (task.size("train"), task.size("vf")) == (training, evaluation)
        trained = numbers(task, "train", 2 * training)
        assert not set(trained) & set(numbers(task, "vf", evaluation))
        assert sorted(trained[:training]) == sorted(trained[training:])
        assert len(set(trained)) == training
        assert trained != numbers(task, "train", 2 * training, seed=2)
        assert trained == numbers(again, "train", 2 * training)
    with refuses("task.taskset", problem="of its 1 tasks none is among the 1 in 8"):
        VfEnvironments(taskset="vf_games", arguments={"size": 1}).problem(1, "vf", 0)


@needs_verifiers
@pytest.mark.parametrize(
    "settings, refusal",
    [
        ({"arguments": {"round": 3}}, ("task.arguments", {"round": 3}, "does not fit: ")),
        ({"taskset": "no_such_game"}, ("task.taskset", ANY, "there is no module no_such_game")),
        ({"taskset": "vf_forgetful"}, ("task.taskset", ANY, "exports no Taskset subclass")),
        ({"env": "no-such-env"}, ("task.env", "no-such-env", "not found")),
        ({"group": "n"}, ("task.group", "n", "the environment's configuration has no field n")),
        ({"harness": "no-such"}, ("task.harness", "no-such", "not found")),
    ],
)
def test_unusable_settings_are_refused_by_name(settings, refusal):
    with refuses(*refusal):
        VfEnvironments(**{"taskset": "vf_games"} | settings).problem(1, "train", 0)


@needs_verifiers
def test_many_episodes_at_once_share_objects_of_one_loop_and_clean_up():
    import vf_games

    task = VfEnvironments(taskset="vf_games")
    problems = [task.problem(1, "train", i) for i in range(24)]
    tasks = task.load(True).tasks
    vf_games.ENDS.clear()

    def play_one(problem):
        environment = task.environment(problem, (1, problem.index))
        environment.reset(problem)
        secret = tasks[problem.answer["task"]].data.secret
        outcome = environment.step(str(secret) if problem.index % 2 else "x")
        environment.close()
        return outcome.reward

    with ThreadPoolExecutor(24) as threads:
        assert list(threads.map(play_one, problems)) == [0.0, 1.5] * 12
    assert sorted(vf_games.ENDS) == ["cancelled"] * 12 + ["ended"] * 12
    assert task.load(True).client.seats == {}


@needs_verifiers
@pytest.mark.parametrize("group", ["", "players"])
def test_the_samples_of_an_engine_are_the_traces(group):
    """With `group` all samples of a problem are one episode, which the environment scores."""
    import vf_games

    vf_games.EPISODES.clear()
    options = {"arguments": {"relative": bool(group)}, "group": group, "replays": bool(group)}
    task = VfEnvironments(taskset="vf_games", **options)
    problems = [task.problem(1, "train", i) for i in range(2)]
    sampling = Sampling(1.0, 40, stop=tuple("0123456789"))
    request = SamplingRequest(problems, 3, sampling, (1, "sample"))
    responses = [r for g in play(LocalEngine(small_policy()), task, request) for r in g]
    traces = [trace for episode in vf_games.EPISODES for trace in episode.traces]
    assert len(vf_games.EPISODES) == (2 if group else 6) and len(traces) == len(responses) == 6
    by_tokens = {tuple(trace.branches[0].token_ids): trace for trace in traces}
    for r in responses:
        trace = by_tokens[(*r.prompt_ids, *r.token_ids)]
        branch = trace.branches[0]
        begin = len(r.prompt_ids)
        assert branch.sampled_mask == [False] * begin + r.policy_mask.tolist()
        assert branch.logprobs[begin:] == pytest.approx(
            [0.0 if math.isnan(value) else value for value in r.logprobs.tolist()]
        )
        assert r.score.reward == pytest.approx(trace.reward)
        assert trace.is_truncated == (r.finish_reason == "length")
        assert r.measures["found"] == trace.rewards["found"].score
    if group:
        best = [sum(r.measures["best"] for r in responses if r.problem is p) for p in problems]
        assert all(count >= 1 for count in best)
