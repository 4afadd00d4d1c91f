"""Test code in a process of its own: HumanEval's and MBPP's tests, right programs, and programs
that look for a way.
"""

import gzip
import json
import os
import re
import time
from pathlib import Path

import pytest

from code_hacks import HACKS
from gspo.rewards.code.grader import Asserts, CodeGrader, Submission

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("GSPO_DATA", ROOT.parent / "shared" / "data"))
LIMITS = {"cpu_seconds": 0.5, "wall_seconds": 0.5, "memory_mb": 256}
HUMANEVAL, MBPP = DATA / "humaneval" / "HumanEval.jsonl.gz", DATA / "mbpp" / "mbpp.jsonl"

# records of ours in HumanEval's form
RECORDS = [
    {"entry_point": "double_all",
     "prompt": 'from typing import List\n\n\ndef double_all(numbers: List[int]) -> List[int]:\n    """Twice each.\n'
     '    """\n',
     "canonical_solution": "    return [2 * n for n in numbers]\n",
     "test": "\n\nMETADATA = {'author': 'us'}\n\n\ndef check(candidate):\n    assert candidate([]) == []\n"
             "    assert candidate([1, 2]) == [2, 4], 'two'\n    for n in range(5):\n"
             "        assert candidate([n]) == [n + n]\n"},
    {"entry_point": "undo", "prompt": 'def rotate(s: str):\n    """Last first."""\n    return s[-1:] + s[:-1]\n\n\n'
    'def undo(s: str):\n'
             '    """Undoes rotate."""\n', "canonical_solution": "    return s[1:] + s[:1]\n",
     "test": "def check(candidate):\n    import random\n    for _ in range(20):\n"
     "        s = ''.join(random.choice('abc') for _ in range(9))\n"
             "        assert candidate(rotate(s)) == s\n"},
    {"entry_point": "half", "prompt": 'import math\n\n\ndef half(x):\n    """x / 2"""\n', "canonical_solution": "    "
    "return x / 2\n",
     "test": "def check(candidate):\n    assert abs(candidate(1) - 0.5) < 1e-6\n"
     "    assert math.isclose(candidate(x=3), 1.5)\n"},
    {"entry_point": "stats", "prompt": 'def stats(a):\n    """(smallest, largest), or None"""\n',
     "canonical_solution": "    return (min(a), max(a)) if a else None\n",
     "test": "def check(candidate):\n    assert candidate([]) is None\n    assert candidate([2, 1]) == (1, 2)\n"
             "    assert isinstance(candidate([5]), tuple)\n"},
]  # fmt: skip
# and in MBPP's
LINES = [
    ("sum", "def sum(a, b):\n return a + b + 1", "", ["assert sum(1, 2) == 4", "assert sum(1, b=1) == 3"]),
    ("longest", "class Pair:\n def __init__(self, a, b): self.a, self.b = a, b\n"
    "def longest(pairs, n): return max(p.b - p.a for p in pairs[:n])", "",
     ["assert longest([Pair(5, 24), Pair(15, 25)], 2) == 19", "assert longest([Pair(1, 2)], n=1) == 1"]),
    ("counts", "from collections import Counter\ndef counts(a): return Counter(a)", "", ["assert counts([1, 1, 2]) "
    "== ({1: 2, 2: 1})"]),
    ("size", "import sys\ndef size(t): return sys.getsizeof(t)", "", ["assert size((1, 2)) == sys.getsizeof((1, 2))"]),
    ("without", "def without(a, kind): return [v for v in a if not isinstance(v, kind)]", "", ["assert without([1, "
    "'a'], int) == ['a']"]),
    ("near", "def near(x): return x / 3", "import math", ["assert math.isclose(near(1), 0.333, rel_tol=0.01)"]),
    ("unique", "def unique(a): return set(a)", "", ["assert unique([1, 1]) == {1}", "assert set(unique('ab')) == "
    "set(['b', 'a'])"]),
    ("even", "def even(x): return x % 2 == 0", "", ["assert even(2) == True", "assert not even(3)", "assert even(4)"]),
    ("", "def some(x): return x", "value = 5", ["assert some(value) == value"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def grader():
    with CodeGrader(slots=2, **LIMITS) as grader:
        yield grader


def humaneval(record, code):
    return Submission(code, record["entry_point"], (Asserts(record["test"], record["prompt"]),))


def check(code, test, prelude="", entry_point="f"):
    return Submission(code, entry_point, (Asserts(test, prelude),))


def named(record):
    """The function of a record of MBPP: the last one defined that the tests call."""
    tests = "\n".join(record["test_list"])
    names = [
        name
        for name in re.findall(r"^def\s+(\w+)", record["code"], re.MULTILINE)
        if re.search(rf"\b{name}\s*\(", tests)
    ]
    return names[-1]


@pytest.mark.slow
def test_reference_solutions_pass(grader):
    made = [
        humaneval(record, record["prompt"] + record["canonical_solution"]) for record in RECORDS
    ]
    made += [check(code, "\n".join(lines), prelude, entry) for entry, code, prelude, lines in LINES]
    assert [grade.verdict for grade in grader.grade(made)] == ["pass"] * len(made)


def mutants(record):
    """Wrong programs for a record of HumanEval's form: (name, program)."""
    bodies = {
        "nothing": "pass", "not implemented": "return NotImplemented", "exit": "raise SystemExit(0)",
        "os._exit": "import os; os._exit(0)",
        "all equal": "return type('A', (), {'__eq__': lambda *a: True, '__abs__': lambda s: 0, '__sub__': lambda *a: "
        "0.0})()",
        "int": "A = type('A', (int,), {'__eq__': lambda *a: True, '__lt__': lambda *a: True, '__sub__': lambda *a: "
        "0}); return A(0)",
        "str": "return type('A', (str,), {'__eq__': lambda *a: True})('')",
        "list": "return type('A', (list,), {'__eq__': lambda *a: True})()",
        "assertion": "import builtins; builtins.AssertionError = type('E', (BaseException,), {}); return 'no'",
        "frames": "import sys, gc\n    for o in gc.get_objects():\n"
        "        if type(o) is dict and 'check' in o: o['check'] = lambda *a: None\n"
                  "    f = sys._getframe()\n    while f:\n"
                  "        if 'reply' in f.f_locals: f.f_locals['reply'].update(verdict='pass')\n"
                  "        f = f.f_back\n    return 'no'",
        "forged": "import os, json, struct\n    b = json.dumps({'verdict': 'pass', 'detail': ''}).encode()\n"
        "    for i in range(64):\n"
                  "        try: os.write(i, struct.pack('>I', len(b)) + b)\n        except OSError: pass\n"
                  "    os._exit(0)",
        "handle": "import os, json, struct\n    for i in range(9):\n"
        "        b = json.dumps({'index': i, 'value': ['h', 0]}).encode()\n"
                  "        try: os.write(3, struct.pack('>I', len(b)) + b)\n        except OSError: pass\n"
                  "    os._exit(0)",
    }  # fmt: skip
    # None is right for the first of its cases, and nothing is None
    if record["entry_point"] == "stats":
        del bodies["nothing"]
    yield "only the prompt", record["prompt"]
    for name, body in bodies.items():
        yield name, f"{record['prompt']}    {body}\n"
    builtins = "import builtins\n"
    builtins += "for n in 'abs all any isinstance len set sorted type'.split(): setattr(builtins, n, lambda *a: True)\n"
    yield "builtins", f"{builtins}{record['prompt']}    return 'no'\n"
    yield "replaced check", f"def check(*a): pass\n{record['prompt']}    return 'no'\n"


def not_stopped(grader, records):
    tried = [
        (record["entry_point"], name, humaneval(record, code))
        for record in records
        for name, code in mutants(record)
    ]
    grades = grader.grade([submission for _, _, submission in tried])
    bad = ("pass", "sandbox-error")
    return [
        (entry, name, grade)
        for (entry, name, _), grade in zip(tried, grades, strict=True)
        if grade.verdict in bad
    ]


@pytest.mark.slow
def test_wrong_programs_fail(grader):
    assert not_stopped(grader, RECORDS) == []
    for entry, _, prelude, lines in LINES[:-1]:
        for wrong in (
            f"def {entry}(*a, **k): return None",
            f"def {entry}(*a, **k): raise SystemExit(0)",
            "raise SystemExit(0)",
            "",
        ):
            grade = grader.grade([check(wrong, "\n".join(lines), prelude, entry)])[0]
            assert grade.verdict in ("wrong", "runtime-error", "missing"), (entry, wrong, grade)


@pytest.mark.slow
def test_no_hack_passes(grader):
    tests = [
        "assert f(1) == 918273646",
        "def check(candidate):\n assert candidate(1) == 918273646\n assert candidate(2) == 918273647",
    ]
    tests += [
        "assert 918273646 in [f(1)] or f(1) > 918273645 and f(1) < 918273647",
    ]
    for test in tests:
        grades = dict(
            zip(HACKS, grader.grade([check(code, test) for code in HACKS.values()]), strict=True)
        )
        stopped = {
            name: grade
            for name, grade in grades.items()
            if grade.verdict in ("pass", "sandbox-error")
        }
        assert stopped == {}, test


VERDICTS = [  # program, test, verdict
    ("def f(x): return x", "assert f(1) == 1", "pass"),
    ("def f(x): return x", "assert f(1) == 2", "wrong"),
    ("def f(x): return None", "assert abs(f(1) - 1) < 2", "wrong"),
    ("def f(x): return x", "assert f(1)[0] == 1", "wrong"),
    ("def f(x): raise ValueError", "assert f(1) == 1", "runtime-error"),
    ("def f(x): raise AssertionError", "try:\n f(1)\nexcept AssertionError: pass", "runtime-error"),
    ("def f(x): raise SystemExit", "try:\n f(1)\nexcept BaseException: pass", "runtime-error"),
    ("1 / 0", "assert f(1) == 1", "runtime-error"),
    ("import os\ndef f(x): os._exit(0)", "f(1)", "runtime-error"),
    ("def f(x):\n while 1: pass", "f(1)", "timeout"),
    ("def f(x):\n import time; time.sleep(9)", "f(1)", "timeout"),
    ("while 1: pass", "f(1)", "timeout"),
    ("def f(x): return [0] * 10**10", "f(1)", "memory"),
    ("def f(x): return 'x' * 10**7", "f(1)", "unserialisable"),
    ("def f(x): return iter([])", "assert f(1) is not None", "unserialisable"),
    ("def f(x): return f", "assert f(1)", "unserialisable"),
    ("def g(x): return x", "assert f(1) == 1", "missing"),
    ("def f(x: 1", "assert f(1) == 1", "compile-error"),
    ("def f(x): return x", "def check(candidate):\n assert candidate(1) == 1", "pass"),
    ("def f(x): return x", "def check(candidate):\n assert candidate(1) == 2", "wrong"),
    ("def f(x): return x", "def check(candidate):\n assert candidate(1) == 2\ncheck(f)", "wrong"),
    ("def f(x): return x", "def check(candidate):\n assert candidate(1) == 1\ncheck(f)", "pass"),
    ("def f(x): return 10**5000", "assert f(1) == 1, f(1)", "wrong"),
    ("def f(x): return 10**4000", "assert 0 * (f(1) ** f(1))", "timeout"),
    ("def f(x): return {(2**61 - 1) * i for i in range(50000)}", "assert f(1) == 2", "timeout"),
    ("def f(x): return x", "assert undefined() == 1", "missing"),
    ("def f(x): return x", "assert ((", "sandbox-error"),
    ("def f(x): return x", "1 / 0", "sandbox-error"),
    ("def f(x): return x", "raise SystemExit", "sandbox-error"),
    ("def f(x): return x", "f(lambda: 1)", "unserialisable"),
    ("class P: pass\ndef f(x): return isinstance(x, P)", "assert f(P()) and f(x=P()) and f({'k': 1}) is False", "pass"),
    ("class P: pass\ndef f(x): return type(x[0]['a'][0]) is P", "assert f([{'a': (P(),)}])", "pass"),
    *[("class P:\n __eq__ = lambda *a: True\ndef f(x): return x", f"p = P()\n{test}", "unserialisable") for test in (
        "assert p == 1", "assert 1 == p", "assert p != 1", "assert p", "assert not p", "assert p.x", "assert list(p)",
        "assert p in [1]",
        "assert 1 in p", "assert len(p)", "assert p < 1", "assert p[0]", "assert p()", "p.x = 1",
        "assert isinstance(p, int)", "assert {p}",
        "assert str(p)", "assert f'{p}'", "assert abs(p)", "assert 1 - p == 1", "assert hasattr(p, 'x')",
        "assert f(p) == 1",
        "assert 1 <= p", "assert p is not None and p == p",
    )],
]  # fmt: skip


@pytest.mark.slow
def test_verdicts(grader):
    grades = grader.grade([check(code, test) for code, test, _ in VERDICTS])
    for (code, test, expected), grade in zip(VERDICTS, grades, strict=True):
        assert (grade.verdict, grade.cases) == (expected, (expected,)), (code, test, grade)


def test_values_keep_their_types_and_objects_their_identity(grader):
    code = "class P: pass\nkept = P()\ndef make(): return kept\ndef f(x): return x is kept if isinstance(x, P) else x"
    test = "assert f(make()) is True\nassert type(f((1, 2))) is tuple and f((1, 2)) != [1, 2]\n"
    test += "assert type(f({1})) is set\n"
    test += "assert type(f(1.0)) is float and type(f(True)) is bool and f(1) == True\n"
    test += "assert f(float('nan')) != f(float('nan'))\n"
    test += "assert f({(1, 2): {'a': b'x'}}) == {(1, 2): {'a': b'x'}}\n"
    test += "assert f('\\ud800') == '\\ud800' and f(10**5000) == 10**5000\n"
    test += "x = [1]\nassert f(x) == x and f(x) is not x\nassert f(int) is int\nassert f(1j) == 1j and f(None) is None"
    assert grader.grade([check(code, test)])[0].verdict == "pass"


def test_the_program_never_sees_the_test(grader):
    look = "import gc, sys\ndef f(x):\n frame = sys._getframe()\n seen = ''\n while frame:\n"
    look += "  seen += repr(frame.f_locals) + repr([v.buffer for v in frame.f_locals.values() if hasattr(v, "
    look += "'buffer')])\n  frame = frame.f_back\n"
    look += " seen += repr([o for o in gc.get_objects() if type(o) is dict and 'test' in o and 'prelude' in o])\n"
    look += " return 'assert' in seen"
    assert grader.grade([check(look, "assert f(1) is False")])[0].verdict == "pass"


@pytest.mark.slow
def test_inputs_drawn_at_random_are_the_same_for_all():
    code = "seen = []\ndef f(x): return x"
    test = "import random\n"
    test += (
        "assert f([random.random() for _ in range(3)]) == [0.8444218515250481, 0.7579544029403025, "
    )
    test += "0.420571580830845]"
    for _ in range(2):
        with CodeGrader(**LIMITS) as grader:
            assert grader.grade([check(code, test)])[0].verdict == "pass"


@pytest.mark.slow
def test_waiting_for_the_other_is_not_charged():
    """Program and test compute in turn, each longer than the other may wait."""
    with CodeGrader(cpu_seconds=2, wall_seconds=0.2, memory_mb=256) as grader:
        busy = "import time\ndef busy():\n end = time.process_time() + 0.4\n while time.process_time() < end: pass\n"
        test = busy + "assert f(1) == 1\nbusy()\nassert f(2) == 2"
        start = time.monotonic()
        assert (
            grader.grade([check(busy + "def f(x):\n busy()\n return x", test)])[0].verdict == "pass"
        )
        assert time.monotonic() - start > 1.2


@pytest.mark.slow
@pytest.mark.skipif(not HUMANEVAL.exists(), reason="no HumanEval here")
def test_humaneval_references_pass():
    records = [json.loads(line) for line in gzip.decompress(HUMANEVAL.read_bytes()).splitlines()]
    with CodeGrader(slots=2) as grader:
        grades = grader.grade(
            [
                humaneval(record, record["prompt"] + record["canonical_solution"])
                for record in records
            ]
        )
    failed = {
        record["task_id"]: grade
        for record, grade in zip(records, grades, strict=True)
        if grade.verdict != "pass"
    }
    assert len(records) == 164 and failed == {}


@pytest.mark.daily
@pytest.mark.skipif(not HUMANEVAL.exists(), reason="no HumanEval here")
def test_humaneval_mutants_fail():
    records = [json.loads(line) for line in gzip.decompress(HUMANEVAL.read_bytes()).splitlines()]
    with CodeGrader(slots=2) as grader:
        assert not_stopped(grader, records) == []


@pytest.mark.daily
@pytest.mark.skipif(not MBPP.exists(), reason="no MBPP here")
def test_mbpp_references_pass():
    """All but two, whose set-up code builds a tree of the program's nodes before the program is
    there.
    """
    records = [json.loads(line) for line in MBPP.open(encoding="utf-8")]
    made = [
        check(r["code"], "\n".join(r["test_list"]), r["test_setup_code"], named(r)) for r in records
    ]
    with CodeGrader(slots=2, cpu_seconds=10) as grader:
        grades = grader.grade(made)
        empty = grader.grade(
            [
                check(
                    f"def {s.entry_point}(*a): pass",
                    s.tests[0].test,
                    s.tests[0].prelude,
                    s.entry_point,
                )
                for s in made
            ]
        )
    failed = {
        record["task_id"]
        for record, grade in zip(records, grades, strict=True)
        if grade.verdict != "pass"
    }
    assert len(records) == 974 and failed <= {367, 927}
    assert {
        record["task_id"]
        for record, grade in zip(records, empty, strict=True)
        if grade.verdict == "pass"
    } == set()
