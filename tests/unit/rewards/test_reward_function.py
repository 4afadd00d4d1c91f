"""A user's reward function in a process of its own: what it is given, exceptions, calls without
end, its death.
"""

import os
import pickle
import re
import sys
import time
from types import SimpleNamespace

import pytest

import user_code
from gspo.data.samples import Score
from gspo.rewards import reward_function
from gspo.rewards.reward_function import RewardFunction, RewardProcess
from processes import gone
from refusals import refuses

ROW = {"answer": "abc"}


@pytest.fixture
def function(tmp_path, monkeypatch):
    user_code.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = []

    def make(name, seconds=20.0, workers=1):
        made.append(RewardFunction(f"own_package.rewards:{name}", "task.reward", seconds, workers))
        return made[-1]

    yield make
    for one in made:
        one.close()
    user_code.forget()


def ask(function, *responses):
    return function(["prompt"] * len(responses), list(responses), [ROW] * len(responses))


@pytest.mark.slow
def test_numbers_of_one_response_of_a_batch_and_of_async_calls(function):
    assert [s.reward for s in ask(function("digits"), "12ab", "")] == [0.5, 0.0]
    assert [s.reward for s in ask(function("batch"), "x", "xyz")] == [4.0, 6.0]
    started, answers = time.monotonic(), ask(function("later"), *["right", "wrong"] * 60)
    assert answers == [Score(1.0, "correct"), Score(0.0, "wrong")] * 60
    assert time.monotonic() - started < 60
    assert ask(function("decorated"), "right") == [Score(1.0, "correct")]


@pytest.mark.slow
def test_a_semaphore_of_the_users_module_serves_all_batches(function):
    limited = function("limited")
    for _ in range(3):
        assert ask(limited, *"abcdefgh") == [Score(1.0, "correct")] * 8


@pytest.mark.slow
def test_threads_that_hang_do_not_take_the_threads_of_later_calls(function):
    in_threads = function("hangs_in_a_thread", seconds=5.0)
    assert {s.verdict for s in ask(in_threads, *["hang"] * 40)} == {"timeout"}
    assert ask(in_threads, *"abcdefgh") == [Score(1.0, "correct")] * 8


def test_exceptions_none_and_odd_numbers_leave_a_response_ungraded_with_the_reason(function, capfd):
    good, bad, none, nan = ask(function("raises"), "good", "bad", "none", "nan")
    assert good == Score(0.5, "partial")
    assert (bad.reward, bad.verdict) == (None, "error")
    assert bad.reason.startswith(
        "task.reward=own_package.rewards:raises: it raised KeyError: 'gold' (rewards.py, line "
    )
    assert (none.reward, none.verdict, none.reason) == (
        None,
        "none",
        "the reward function returned None",
    )
    assert nan.reward is None and "the reward is nan" in nan.reason
    output = capfd.readouterr()
    assert output.out == "" and "a word on the standard output" in output.err


def test_a_process_that_ends_takes_one_response_with_it(function):
    before, dead, after = ask(function("raises"), "good", "exit", "good")
    assert before == after == Score(0.5, "partial")
    assert (
        dead.reward is None and dead.reason == "the reward function's process ended (exit status 3)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blocks", "hangs"])
def test_a_call_that_takes_too_long_is_ended_and_the_others_are_answered(function, name):
    one, hung, other = ask(function(name, seconds=0.5), "x", "hang", "y")
    assert one == other == Score(1.0, "correct")
    assert (hung.reward, hung.verdict) == (
        None,
        "timeout",
    ) and "more than 0.5 seconds" in hung.reason


@pytest.mark.parametrize("name", ["times_out", "batch_times_out"])
def test_a_timeout_of_the_functions_own_is_not_said_to_be_the_limit(function, name):
    (score,) = ask(function(name), "x")
    assert score.verdict == "error" and score.reward is None
    assert "it raised TimeoutError: the server did not answer" in score.reason


def test_a_value_of_a_batch_that_is_no_reward_leaves_out_its_response_alone(function):
    scores = ask(function("spoiled_batch"), "x", "nan", "text", "y")
    assert [score.reward for score in scores] == [1.0, None, None, 1.0]
    assert "the reward is nan" in scores[1].reason
    assert "it returned str 'a text', not a number" in scores[2].reason


@pytest.mark.parametrize(
    ("name", "kind"), [("text", "str"), ("digits_batch", "str"), ("set_batch", "set")]
)
def test_texts_and_sets_are_no_rewards(function, name, kind):
    for score in ask(function(name), "x", "y"):
        assert score.reward is None and f"it returned {kind}" in score.reason


def test_a_function_may_take_more_arguments(function):
    assert ask(function("more"), "x") == [Score(1.0, "correct")]


def test_a_batch_of_the_wrong_length_is_ungraded(function):
    assert {s.reason for s in ask(function("short_batch"), "x", "y")} == {
        "task.reward=own_package.rewards:short_batch: it returned 1 rewards for 2 responses"
    }


@pytest.mark.parametrize(
    "path, text",
    [
        (
            "own_package.rewards:digit",
            "there is no digit in own_package.rewards; the nearest is digits",
        ),
        (
            "own_package.rewards:two",
            r"own_package.rewards:two\(prompt, response\): must be def NAME\(prompt, response",
        ),
        ("own_package.rewards:number", "own_package.rewards:number: must be a function"),
        (
            "own_package.broken:f",
            r"importing own_package.broken failed: OSError: no network \(.*broken.py, line 2\)",
        ),
        (
            "own_package.unclosed:f",
            r"importing own_package.unclosed failed: SyntaxError: .*\(unclosed.py, line 1\)$",
        ),
        ("nowhere:f", "task.reward=nowhere:f: there is no module nowhere"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(function, path, text):
    one = RewardFunction(path, "task.reward", 20.0)
    with pytest.raises(ValueError, match=text):
        one.start()


@pytest.mark.slow
def test_the_process_ends_with_close_and_a_copy_starts_its_own(function):
    one = function("digits")
    ask(one, "1")
    pid = one._processes[0]._running.process.pid
    copy = pickle.loads(pickle.dumps(one))
    assert [s.reward for s in ask(copy, "1")] == [1.0] and copy._processes[
        0
    ]._running.process.pid not in (
        pid,
        os.getpid(),
    )
    copy.close()
    one.close()
    assert gone(pid)
    assert [s.reward for s in ask(one, "1")] == [1.0]


MISTAKES = [
    (
        "missing",
        r"it raised KeyError: 'gold' \(rewards.py, line \d+\); the rows have no column 'gold', .* answer$",
    ),
    ("misspelt", r"it raised NameError: name 'flaot' is not defined \(rewards.py, line \d+\)$"),
    (
        "imports",
        r"it raised ModuleNotFoundError: No module named 'no_such_module' \(rewards.py, line \d+\)$",
    ),
    ("word", "it returned str 'good', not a number$"),
    ("pair", "it returned float, not a list of rewards$"),
    ("short_batch", "it returned 1 rewards for 2 responses$"),
]


@pytest.mark.parametrize(("name", "text"), MISTAKES)
def test_a_trial_refuses_a_mistake_that_no_response_can_mend(function, name, text):
    with pytest.raises(ValueError, match=f"^task.reward=own_package.rewards:{name}: {text}"):
        function(name).try_out("prompt", ROW)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("parsed", r"it raised IndexError: list index out of range \(rewards.py, line \d+\)"),
        # the function handles the absent column itself, and the response alone lacks the answer
        ("falls_back", r"it raised IndexError: list index out of range \(rewards.py, line \d+\)"),
        (
            "unbound",
            r"it raised UnboundLocalError: cannot access local variable 'found' .* \(rewards.py, line \d+\)",
        ),
        # the line is the user's own, not that of the library that it calls
        ("nested", r"it raised JSONDecodeError: Expecting value: .* \(rewards.py, line \d+\)"),
    ],
)
def test_a_trial_names_what_may_be_due_to_its_response(function, name, text):
    found = function(name).try_out("prompt", ROW).reason
    assert re.fullmatch(f"task.reward=own_package.rewards:{name}: {text}", found), found


@pytest.mark.parametrize("name", ["digits", "batch", "later", "optional", "raises", "plain"])
def test_a_trial_of_a_sound_function_says_nothing_and_it_works_afterwards(function, name):
    one = function(name)
    trial = one.try_out("prompt", ROW)
    assert not trial.reason and len(trial.scores) == 2
    assert all(score.reward is not None for score in ask(one, "x", "y"))


@pytest.mark.slow
def test_a_trial_that_takes_too_long_says_so(function):
    one = function("blocks", seconds=0.5)
    one._processes[0].start()
    trial = one._processes[0].try_out([(0, "prompt", "hang", ROW)])
    assert not trial.is_certain
    assert trial.reason.endswith("the reward function took more than 0.5 seconds")


@pytest.mark.slow
def test_several_workers_call_at_the_same_time(function, tmp_path):
    row = {"folder": str(tmp_path / "begun")}
    (tmp_path / "begun").mkdir()
    one = function("together", seconds=90.0, workers=3)
    assert [s.reward for s in one(["prompt"] * 5, list("abcde"), [row] * 5)] == [1.0] * 5


@pytest.mark.slow
def test_several_workers_keep_the_order_and_a_dead_one_takes_one_response_with_it(function):
    scores = ask(function("raises", workers=2), "good", "exit", "good", "bad", "good")
    assert [score.reward for score in scores] == [0.5, None, 0.5, None, 0.5]
    assert "exit status 3" in scores[1].reason and "KeyError" in scores[3].reason


def test_a_function_of_all_responses_has_one_worker(function):
    with refuses("task.workers", 2, "that function gets all responses"):
        function("batch", workers=2).start()


def test_a_process_that_ends_between_two_calls_keeps_the_scores_before(monkeypatch):
    process = RewardProcess("own_package.rewards:digits", "task.reward", seconds=1.0)
    messages = [("begins", [0]), ("outcome", 0, Score(1.0, "correct")), None]
    monkeypatch.setattr(reward_function, "_receive", lambda *_: messages.pop(0))
    ended = SimpleNamespace(process=SimpleNamespace(poll=lambda: 3))
    assert process._collect(ended, {0: None, 1: None}) == {0: Score(1.0, "correct")}
    messages.append(None)
    scores = process._collect(ended, {1: None})
    assert scores[1].reward is None, "a process that begins no call is not restarted for ever"
