"""The tool runs in the sandbox, and what it says is what the demonstrations show."""

import random

import pytest

from gspo.tasks.testbed.python_tool import PythonTool, code_of
from refusals import refuses


@pytest.fixture(scope="module")
def task():
    task = PythonTool(cpu_seconds=0.2, wall_seconds=0.5)
    yield task
    task.close()


def call(task, code: str):
    return task.environment(task.problem(0, "train", 0), (1,)).step(f"<py>{code}</py>")


def test_demonstrations_are_what_the_environment_would_say(task):
    for index in range(20):
        problem = task.problem(1, "train", index)
        asked, said, answer = task.demonstrated_turns(problem, 0.4, random.Random(index))
        game = task.environment(problem, (1,))
        first, last = game.step(asked), game.step(answer)
        assert first.observation == said and not first.done and last.done
        right = asked == f"<py>{problem.prompt[:-2]}</py>" and answer == f"#{problem.answer}"
        assert last.reward == float(answer == f"#{problem.answer}") and (
            not right or last.verdict == "correct"
        )


@pytest.mark.parametrize(
    "code, said, failed",
    [
        ("2**100", str(2**100), False),
        ("x=6\nx*7", "42", False),
        ("print(1)\nprint(2)", "1\n2", False),
        ("1/0", "ZeroDivisionError", True),
        ("(", "SyntaxError", True),
        ("", "", False),
        ("'''", "SyntaxError", True),
        ("import os\nos.fork()", "PermissionError", True),
        ("open('/etc/passwd')", "PermissionError", True),
        ("import socket\nsocket.socket()", "PermissionError", True),
        ("while 1:pass", "timeout", True),
        ("x=[0]*10**9", "MemoryError", True),
        ("import sys\nsys.exit(0)", "", False),
        ("import os\nos._exit(3)", "exit", True),
        ("\x00", "SyntaxError", True),
    ],
)
def test_what_a_call_returns(task, code, said, failed):
    outcome = call(task, code)
    if "Error" in said and failed:
        assert outcome.observation.endswith("Error") or outcome.observation == "memory"
    elif said != "exit":
        assert outcome.observation == said
    assert outcome.measures == {"tool_calls": 1, "tool_errors": int(failed)} and not outcome.done
    assert outcome.reward == 0


def test_the_same_code_runs_once_and_another_run_starts_anew(task):
    assert call(task, "3*3").observation == call(task, "3*3").observation == "9"
    assert call(task, "globals().get('kept')\nkept=1").observation == ""
    assert call(task, "kept").observation == "NameError"


def test_the_answer_ends_an_episode_whatever_the_tool_printed(task):
    problem = task.problem(0, "train", 5)
    game = task.environment(problem, (1,))
    game.step(f"<py>print('#{problem.answer}')</py>")  # what the tool prints is no answer
    assert game.step("no idea").verdict == "no-answer"
    assert task.environment(problem, (1,)).step(f"#{problem.answer}").reward == 1
    assert task.environment(problem, (1,)).step(f"#{problem.answer + 1}").reward == 0
    both = task.environment(problem, (1,)).step(f"<py>1</py>#{problem.answer}")
    assert not both.done and both.reward == 0  # a turn with a call is no answer


def test_the_log_is_as_long_as_asked_and_the_same_for_the_same_seed():
    task = PythonTool(log=40)
    problem = task.problem(0, "train", 0)
    said = [task.environment(problem, (seed,)).step("<py>1</py>").observation for seed in (1, 1, 2)]
    task.close()
    assert said[0] == said[1] != said[2] and all(
        len(text) == 42 and text.endswith("=1") for text in said
    )


def test_without_the_tool_the_first_turn_is_the_answer():
    task = PythonTool(tool=False, turns=1)
    problem = task.problem(0, "train", 0)
    assert task.environment(problem, (1,)).step("<py>1</py>").done
    assert task.demonstrated_turns(problem, 0.0, random.Random(0)) == [f"#{problem.answer}"]
    with refuses("task.turns", 1, "leaves no turn"):
        PythonTool(turns=1)


def test_a_call_may_not_take_longer_than_the_environment_has():
    with refuses("task.step_seconds", 2.5, "is not above cpu_seconds=0.5 +"):
        PythonTool(step_seconds=2.5)
    PythonTool(step_seconds=2.6).close()
    PythonTool(step_seconds=0.5, tool=False).close()  # nothing runs


@pytest.mark.parametrize(
    "text, code",
    [
        ("<py>1+1</py>", "1+1"),
        ("<py>a\nb</py><py>c</py>", "a\nb"),
        ('<tool_call>\n{"name": "python", "arguments": {"code": "1+1"}}\n</tool_call>', "1+1"),
        (
            '<tool_call>{"name": "python", "arguments": "{\\"code\\": \\"1+1\\"}"}</tool_call>',
            "1+1",
        ),
        ("<think><py>1</py></think>#12", None),
        ("<think><py>1</py></think><py>2</py>", "2"),
        ("<py>print('</think>')</py>", "print('</think>')"),
        ("<py>1+1", None),
        ("#12", None),
    ],
)
def test_calls_are_found_in_both_spellings(text, code):
    assert code_of(text) == code


@pytest.mark.parametrize(
    ("call", "observation"),
    [
        ("{}", "malformed call"),
        ("[" * 100_000, "malformed call"),
        ('{"name": "python", "arguments": {"code": 5}}', "malformed call"),
        ('{"name": "python", "arguments": "code"}', "malformed call"),
        ('{"arguments": {"code": "1"}}', "malformed call"),
        ('{"name": "rm", "arguments": {"code": "1"}}', "unknown tool"),
    ],
)
def test_a_call_that_cannot_be_made_is_an_error_that_the_policy_reads(call, observation):
    task = PythonTool()
    game = task.environment(task.problem(1, "train", 0), (1, 2))
    outcome = game.step(f"<tool_call>{call}</tool_call>")
    assert (outcome.observation, outcome.done) == (observation, False)
    assert outcome.measures == {"tool_calls": 1, "tool_errors": 1}
    task.close()
