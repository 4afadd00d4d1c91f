"""Programs whose right output has more than one spelling: tolerances, letter case, checkers, long
integers.
"""

import json

import pytest

from gspo.rewards.code.grader import CodeGrader, FunctionCase, StdinCase, Submission
from gspo.rewards.code.outputs import (
    CODEFORCES_TOLERANCE,
    SEVERAL,
    OutputRule,
    accepts,
    agrees,
)
from gspo.rewards.sandbox.values import same_output
from gspo.tasks.benchmarks.code_sets import RatedPrograms, output_rule
from gspo.tasks.benchmarks.data_row import DataRow
from refusals import refuses

CHECK = "def check(input, expected, output):\n    a, b = map(int, output.split())\n    return a + b == int(input)\n"
FILES = """
import sys
with open(sys.argv[1]) as file:
    total = int(file.read())
given = list(map(int, open(sys.argv[3]).read().split()))
if len(given) != 2:
    print("0"); sys.exit(0)
print(1 if sum(given) == total else 0)
"""


@pytest.fixture(scope="module")
def grader():
    with CodeGrader(slots=1, cpu_seconds=4, wall_seconds=20, memory_mb=512) as shared:
        yield shared


def verdict(grader, code: str, *cases, entry: str = "") -> str:
    (grade,) = grader.grade([Submission(code, entry, tuple(cases))])
    return grade.verdict


@pytest.mark.parametrize(
    ("expected", "printed", "alike"),
    [
        ("0.333333333333", "0.3333333333333333", True),
        ("0.333333333333", "0.33334", False),
        ("1000000.5", "1000001.0", True),  # relative
        ("1000000.5", "1000003.0", False),
        ("answer 0.5", "answer 0.5000001", True),
        ("1000000007", "1000000008", False),  # integers are exact
        ("1000000007", "1000000007.0000001", False),
        ("1.0", "1", True),
        ("0.5", "nan", False),
        ("0.5", "inf", False),
        ("1e-9", "0", True),
        ("0.5 0.5", "0.5", False),
    ],
)
def test_numbers_with_a_point_may_be_off_by_the_tolerance(expected, printed, alike):
    assert same_output(expected, printed, CODEFORCES_TOLERANCE) == alike
    if printed not in ("1",):
        assert not same_output(expected, printed), "without a tolerance they are not"


def test_letter_case_counts_unless_the_rule_says_otherwise():
    yesno = OutputRule(testlib="yesno")
    assert agrees(yesno, "YES\nno", "Yes\nNO")
    assert not agrees(OutputRule(), "YES", "Yes") and not agrees(yesno, "YES", "NO")


@pytest.mark.parametrize(
    ("testlib", "expected", "printed", "alike"),
    [
        ("rcmp6", "2", "2.0000000001", True),
        ("rcmp6", "2", "2.00001", False),
        ("rcmp4", "1 2.5\n", "1.00001\n2.5", True),
        ("rcmp9", "1000", "1000.0000001", True),
        ("rcmp9", "1", "one", False),
        ("wcmp", "a b", "a  b", True),
        ("wcmp", "a b", "a\nb", True),
        ("wcmp", "1", "1.0", False),
        ("ncmp", "1 2 3", "1\n2\n3", True),
        ("ncmp", "1 2 3", "1 2", False),
        ("lcmp", "a  b\nc", "a b\nc ", True),
        ("lcmp", "a b", "a\nb", False),
        ("fcmp", "a b", "a\nb", False),
        ("fcmp", "a b", "a  b", False),
        ("fcmp", "a b\nc\n", "a b\nc", True),
        ("fcmp", "1", "1.0", False),
        ("fcmp", "a", " a", False),
        ("rcmp", "1000000000", "1000000000.000001", True),
        ("rcmp", "1000000000", "1000000001", False),
        ("yesno", "MAYBE", "maybe", False),
        ("nyesno", "YES NO", "yes\nno", True),
    ],
)
def test_a_checker_of_testlib_compares_as_testlib_does(testlib, expected, printed, alike):
    assert agrees(OutputRule(testlib=testlib), expected, printed) == alike


@pytest.mark.parametrize("checker", [CHECK, FILES], ids=["function", "files"])
def test_a_checker_decides_in_the_sandbox(grader, checker):
    case = StdinCase("7", "3 4", OutputRule(checker=checker))
    assert verdict(grader, "print(1, 6)", case) == "pass", "another right answer"
    assert verdict(grader, "print(3, 3)", case) == "wrong"
    forged = "print('7 0')\nimport sys\nsys.stdout.flush()"
    assert verdict(grader, forged, case) == "pass"
    # outputs that the checker `CHECK` cannot read
    for unreadable in ("pass", "print('three')", "print(1, 2, 4)", "print(1.0, 6.0)"):
        assert verdict(grader, unreadable, case) == "wrong", unreadable


def test_a_checker_that_fails_says_nothing_about_the_program(grader):
    case = StdinCase(
        "7",
        "3 4",
        OutputRule(checker="def check(input, expected, output):\n    raise RuntimeError\n"),
    )
    assert verdict(grader, "print(3, 4)", case) == "sandbox-error"


@pytest.mark.slow
def test_a_checker_that_takes_too_long_says_nothing_about_the_program(grader):
    """It may only take longer for this right output than for the expected one."""
    checker = "def check(input, expected, output):\n    while output != expected:\n        pass\n"
    case = StdinCase("7", "3 4", OutputRule(checker=checker + "    return True\n"))
    with CodeGrader(slots=1, cpu_seconds=0.5, wall_seconds=20, memory_mb=512) as quick:
        assert verdict(quick, "print(1, 6)", case) == "sandbox-error"


def test_what_a_checker_says():
    assert all(map(accepts, ("1", "0.5", "checking\n1\n", "True", "OK")))
    assert not any(map(accepts, ("0", "0.0", "", "1\n0", "False", "wrong answer", "nan", "-1")))


@pytest.mark.parametrize("digits", [4299, 6021, 49_000])
def test_integers_of_many_digits_are_printed_read_and_compared(grader, digits):
    """2**20000 has 6,021 digits; Python prints 4,300."""
    number = 10 ** (digits - 1) + 7
    text = "1" + "0" * (digits - 2) + "7"
    assert verdict(grader, "print(int(input()) + 1)", StdinCase(text, text[:-1] + "8")) == "pass"
    assert verdict(grader, "print(int(input()) + 1)", StdinCase(text, text)) == "wrong"
    load = "import json\ndef f(x):\n    return json.loads(json.dumps(x)) + int(str(x))"
    assert verdict(grader, load, FunctionCase((number,), 2 * number), entry="f") == "pass"


def test_a_power_that_python_would_not_print(grader):
    expected = hex(2**20000)
    assert verdict(grader, "print(hex(int(str(2**20000))))", StdinCase("", expected)) == "pass"


def rule(**values) -> OutputRule:
    return output_rule(DataRow("row 1", values))


def test_the_rule_of_a_record():
    assert rule() == OutputRule(1e-6)
    assert rule(tolerance=1e-4) == OutputRule(1e-4) and rule(tolerance=0) == OutputRule(0)
    assert rule(checker="yesno") == OutputRule(testlib="yesno")
    assert rule(checker="std::rcmp9.cpp") == OutputRule(testlib="rcmp9")
    assert rule(generated_checker=FILES, checker=None).checker == FILES
    with pytest.raises(
        ValueError, match=r"checker.*is 'mystery': neither Python nor one of testlib's, yesno"
    ):
        rule(checker="mystery")
    with pytest.raises(ValueError, match=r"tolerance.*must be a number from 0 to 1"):
        rule(tolerance=-1)


@pytest.mark.parametrize(
    ("text", "has_several"),
    [
        ("If there are multiple such sequences, output any of them.", True),
        ("If several permutations fit, print any.", True),
        ("If there is more than one solution, you may report any.", True),
        ("If there are many answers, find any.", True),
        ("There are many lines. Print any three of them.", False),
        ("With several test cases, do not print any blank lines.", False),
        ("Print how many ways there are.", False),
    ],
)
def test_words_that_tell_of_several_answers(text, has_several):
    assert bool(SEVERAL.search(text)) == has_several


def test_problems_with_several_answers_and_no_checker_are_left_out_and_counted(tmp_path):
    tests = [{"stdin": "7", "stdout": "3 4"}]
    rows = [
        {"prompt": f"Problem {i}. {text}", "rating": 1000 + i, "tests": tests} | more
        for i, (text, more) in enumerate(
            [
                ("Print the sum.", {}),
                ("Print two numbers. If there are multiple answers, print any of them.", {}),
                (
                    "Print two numbers. If there are several solutions you can output any.",
                    {"checker": CHECK},
                ),
                ("Print two numbers.", {"several_answers": True}),
            ]
        )
    ]
    path = tmp_path / "rated.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = RatedPrograms(path=str(path), train_path=str(path), allow_weak_sandbox=True)
    assert task.size("codeforces") == 2
    assert [
        case.rule.checker
        for i in range(2)
        for case in task.problem(0, "codeforces", i).answer.cases
    ] == [
        "",
        CHECK,
    ]
    with refuses("task.train_path", problem="none is left"):
        task.size("train")
    assert task.skipped[False] == {"with several answers and no checker": 2}
    assert task.left_out_of_evaluation() == (
        "codeforces: problems are left out of the evaluation set: 2 with several answers and no checker"
    )
