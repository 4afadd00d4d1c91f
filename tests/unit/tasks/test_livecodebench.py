"""LiveCodeBench: release records, packed tests without unpickling, the window of dates, and scores
from end to end.
"""

import base64
import json
import os
import pickle
import zlib

import pytest

from gspo.tasks.benchmarks import livecodebench
from gspo.tasks.benchmarks.livecodebench import IMPORTS, LiveCodeBench, read_tests, unpacked
from refusals import refuses


def pack(value, protocol: int = 4) -> str:
    """As the release packs its private tests; for anything but a text, as an attacker would."""
    data = value if isinstance(value, bytes) else pickle.dumps(value, protocol)
    return base64.b64encode(zlib.compress(data)).decode()


def case(given: str, expected: str, kind: str = "stdin") -> dict:
    return {"input": given, "output": expected, "testtype": kind}


def record(day: str = "2024-11-02T00:00:00", private=None, **more) -> dict:
    private = [case("4 4\n", "8")] if private is None else private
    return {
        "question_title": "Sum",
        "question_content": f"Add two numbers. {day} {{x}}",
        "platform": "atcoder",
        "question_id": "abc1",
        "contest_id": "abc",
        "contest_date": day,
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([case("1 2\n", "3\n")]),
        "private_test_cases": private if isinstance(private, str) else pack(json.dumps(private)),
        "metadata": "{}",
    } | more


def functional(
    private: list[dict],
    starter: str = "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        ",
):
    public = json.dumps([case("1\n[2, 3]", "[1, [2, 3]]", "functional")])
    return record(private=private, starter_code=starter, platform="leetcode", public_test_cases=public,
                  metadata=json.dumps({"func_name": "add"}))  # fmt: skip


def task_of(tmp_path, *records: dict, **settings) -> LiveCodeBench:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return LiveCodeBench(path=str(path), **settings)


def verdicts(task: LiveCodeBench, *programs: str) -> list[str]:
    problem = task.problem(0, "livecodebench", 0)
    scores = task.score(
        [(problem, f"So:\n```python\n{program}\n```", True) for program in programs]
    )
    assert [score.reward for score in scores] == [
        float(score.verdict == "pass") for score in scores
    ]
    task.close()
    return [score.verdict for score in scores]


def test_the_prompt_is_the_benchmarks(tmp_path):
    problem = task_of(tmp_path, record()).problem(0, "livecodebench", 0)
    assert problem.prompt == (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests.\n\n"
        "### Question:\nAdd two numbers. 2024-11-02T00:00:00 {x}\n\n"
        "### Format: Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test "
        "on the sample inputs). Enclose your code within delimiters as follows. Ensure that when the python program "
        "runs, it reads the inputs, runs the algorithm and writes output to STDOUT.\n"
        "```python\n# YOUR CODE HERE\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )
    assert problem.family == "atcoder easy"
    prompt = task_of(tmp_path, functional([])).problem(0, "livecodebench", 0).prompt
    assert (
        "### Format: You will use the following starter code" in prompt
        and "```python\nclass Solution:\n" in prompt
    )
    assert "8" not in prompt and "stdin" not in prompt


def test_the_window_includes_both_ends(tmp_path):
    days = [
        "2024-09-30",
        "2024-10-01T00:00:00",
        "2025-01-05T12:30:00",
        "2025-02-28 23:00:00",
        "2025-03-01T00:00:00",
    ]

    def found(**settings):
        task = task_of(tmp_path, *map(record, days), **settings)
        problems = [task.problem(0, "livecodebench", i) for i in range(task.size("livecodebench"))]
        return [day for day in days if any(f" {day} " in problem.prompt for problem in problems)]

    assert found() == days[1:4]
    assert found(start_date="") == days[:4]
    assert found(start_date="", end_date="") == days
    assert found(start_date="2025-03-01", end_date="") == days[4:]
    with refuses("task.path", problem="no problem has a contest_date from"):
        found(start_date="2026-01-01", end_date="")


@pytest.mark.parametrize(
    "setting", [{"start_date": "2024-13-01"}, {"end_date": "1 May"}, {"start_date": "20241001"}]
)
def test_bad_dates_are_refused_by_name(setting):
    ((key, value),) = setting.items()
    with refuses(f"task.{key}", value, "must be a date"):
        LiveCodeBench(**setting)
    with refuses("task.start_date", "2025-05-01", "is after task.end_date=2025-02-28"):
        LiveCodeBench(start_date="2025-05-01")


def test_programs_on_standard_input_need_public_and_private_tests(tmp_path):
    both = "print(sum(map(int, input().split())))"
    imported = (
        "a, b = map(int, sys.stdin.read().split())\nprint(Counter([a + b]).most_common()[0][0])"
    )
    future = "from __future__ import annotations\n" + both
    only_public, only_private = "print(3)", "print(8)"
    task = task_of(tmp_path, record())
    assert (
        verdicts(task, both, imported, future, only_public, only_private)
        == ["pass"] * 3 + ["wrong"] * 2
    )


def test_functional_tests_are_one_value_per_line(tmp_path):
    private = [
        case('"a\\nb"\n[]', '["a\\nb", []]', "functional"),
        case("null\n[1.5]\n", "[null, [1.5000000001]]", "functional"),
    ]
    programs = {
        # a tuple counts as a list
        "class Solution:\n    def add(self, a, b):\n        return (a, b)": "pass",
        # a function where the starter code has a class
        "def add(a, b):\n    return [a, b]": "pass",
        "class Solution:\n  seen = []\n  def __init__(self): self.n = 0\n  def add(self, a, b):\n"
        # a fresh Solution per case
        "    self.n += 1\n    return [a, b] if self.n == 1 else None": "pass",
        "class Solution:\n    def add(self, a, b):\n        return [1, [2, 3]]": "wrong",
        "class Solution:\n    def plus(self, a, b):\n        return [a, b]": "missing",
        "class Solution:\n    def add(self, a):\n        return [a, a]": "runtime-error",
    }
    assert verdicts(task_of(tmp_path, functional(private)), *programs) == list(programs.values())


def test_long_integers_are_read_exactly(tmp_path):
    digits = "7" * 5000
    private = [case(f"-3\n{digits}", f"[-3, {digits}]", "functional")]
    program = "def add(a, b): return [a, b]"
    assert verdicts(
        task_of(tmp_path, functional(private)), program, program + " if a > 0 else [a, b + 1]"
    ) == [
        "pass",
        "wrong",
    ]
    with pytest.raises(ValueError, match="more than 30000 digits"):
        verdicts(task_of(tmp_path, functional([case("1\n2", "7" * 40_000, "functional")])), program)


def test_an_empty_expected_value_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the key 'output' is empty"):
        verdicts(
            task_of(tmp_path, functional([case("1\n2", " ", "functional")])),
            "def add(a, b): return 2",
        )


def test_the_imports_of_the_benchmarks_grader_work(tmp_path):
    names: dict = {}
    exec(IMPORTS, names)
    assert (
        names["pow"] is pow
        and names["open"] is open
        and names["datetime"].datetime
        and names["List"]
    )


# --- packed tests


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("text", ["[]", "é\ud800" * 10, "x" * 70_000])
def test_packed_texts_come_back(protocol, text):
    if protocol in (0, 3) and "é" in text:
        text = "plain"
    if protocol == 0:
        with pytest.raises(ValueError, match="a pickle with UNICODE"):
            # nobody writes protocol 0; its texts are lines, and not accepted
            unpacked(pack(text, 0))
    else:
        assert unpacked(pack(text, protocol)) == text


class Runs:
    def __reduce__(self):
        return os.system, ("touch /tmp/gspo-must-not-exist",)


HOSTILE = [
    (pack(Runs()), "a pickle with"),
    (pack(["a", "b"]), "a pickle with EMPTY_LIST"),
    (pack(("a",)), "a pickle with TUPLE1"),
    (pack(b"\x80\x04C\x01a."), "a pickle with SHORT_BINBYTES"),
    (pack(7), "a pickle with BININT1"),
    (pack(b"\x80\x04cos\nsystem\n\x8c\x02ls\x85R."), "a pickle with GLOBAL"),
    (pack(b"\x80\x04\x8c\x01a\x8c\x01b."), "a pickle with 2 texts"),
    (pack(b"\x80\x04."), "a pickle with 0 texts"),
    # claims 2^63 bytes
    (pack(b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc"), "expected .* bytes"),
    (pack(b"\x80\x04\x8c\x01"), "expected 1 bytes"),  # cut off
    (pack(b""), "pickle exhausted"),
    (pack(b"\x80\x04\x8c\x02[]."), None),  # harmless: the same with the smallest pickle
    (base64.b64encode(zlib.compress(b"x")[:-3]).decode(), "cut off"),
    (base64.b64encode(b"no zlib").decode(), "incorrect header"),
    ("not base64!", "neither JSON nor packed JSON"),
    (pack(json.dumps({"a": 1})), "must hold a list"),
    (pack("[" * 100_000), "neither JSON nor packed JSON"),
]  # fmt: skip


@pytest.mark.parametrize("packed, message", HOSTILE)
def test_hostile_pickles_are_read_not_run(packed, message):
    if message is None:
        assert read_tests(packed, "x.jsonl, line 1", "private_test_cases") == []
        return
    with pytest.raises(ValueError, match=message) as error:
        read_tests(packed, "x.jsonl, line 1", "private_test_cases")
    assert "x.jsonl, line 1: the key 'private_test_cases'" in str(error.value)
    assert not os.path.exists("/tmp/gspo-must-not-exist")


def test_a_decompression_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(livecodebench, "MAX_DECOMPRESSED_BYTES", 1 << 20)
    bomb = pack(pickle.dumps("x" * (1 << 24)))
    assert len(bomb) < 1 << 16
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        unpacked(bomb)


BAD = [
    (
        {"contest_date": "soon"},
        r"line 1: the key 'contest_date' is missing, or does not begin with a date",
    ),
    ({"metadata": "{"}, r"line 1: the key 'metadata' must be a JSON object"),
    (
        {"metadata": json.dumps({"func_name": "a.b()"})},
        r"line 1: the key 'metadata' has a func_name that is no name",
    ),
    ({"question_content": ""}, r"line 1: the key 'question_content' is empty"),
    ({"public_test_cases": 3}, r"line 1: the key 'public_test_cases' must be str or list"),
]


@pytest.mark.parametrize("change, message", BAD)
def test_bad_records_name_line_and_key(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        task_of(tmp_path, record(**change)).size("livecodebench")


BAD_TESTS = [
    (
        [case("1", "2", "other")],
        r"line 1, a test: the key 'testtype' must be stdin or functional, not 'other'",
    ),
    ([case("1", "1", "functional")], r"line 1: the key 'metadata' names no func_name"),
    ([{"input": "1", "testtype": "stdin"}], r"line 1, a test: the key 'output' is missing"),
    (
        ["x"],
        r"line 1: the key 'private_test_cases' or 'public_test_cases' holds a test that is no object",
    ),
    ("no json", r"line 1: the key 'private_test_cases' is neither JSON nor packed JSON"),
]


@pytest.mark.parametrize("private, message", BAD_TESTS)
def test_bad_tests_name_line_and_key(tmp_path, private, message):
    with pytest.raises(ValueError, match=message):
        verdicts(task_of(tmp_path, record(private=private)), "print(1)")


def test_no_tests_at_all_is_no_pass(tmp_path):
    with pytest.raises(ValueError, match="are empty: every program would pass"):
        verdicts(task_of(tmp_path, record(private=[], public_test_cases="[]")), "print(1)")
    with pytest.raises(ValueError, match="'input' or 'output' is not one JSON value per line"):
        verdicts(
            task_of(tmp_path, functional([case("[1", "1", "functional")])),
            "def add(a, b): return 1",
        )


def test_unpacked_lists_and_times_are_taken_too(tmp_path):
    """What other readers make of a record: Parquet and the hub give lists and times."""
    task = task_of(tmp_path, record(day="2024-11-02 00:00:00", private="[]",
                                    public_test_cases=[case("1 2", "3")], metadata={"func_name": None}))  # fmt: skip
    assert verdicts(task, "print(3)") == ["pass"]
