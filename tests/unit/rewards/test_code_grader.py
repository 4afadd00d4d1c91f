"""Programs graded for real: every verdict, programs that try to be judged right without being it,
and killed " "servers."""

import os
import pickle
import signal
import sys
import threading
import time

import pytest

from code_hacks import HACKS, MARK
from gspo.rewards.code.grader import CodeGrader, FunctionCase, Grade, StdinCase, Submission

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LIMITS = {"cpu_seconds": 0.5, "wall_seconds": 0.5, "memory_mb": 256}


@pytest.fixture(scope="module")
def grader():
    with CodeGrader(slots=2, **LIMITS) as grader:
        yield grader


def function(code, *cases, entry_point="f"):
    return Submission(code, entry_point, tuple(FunctionCase(*case) for case in cases))


def stdin(code, *cases):
    return Submission(code, "", tuple(StdinCase(*case) for case in cases))


TWICE = [((1,), 2), ((2,), 4), ((3,), 6)]
FUNCTIONS = [  # program, verdicts of its cases
    ("def f(x): return x * 2", ["pass"] * 3),
    ("f = lambda x: x + x", ["pass"] * 3),
    ("def f(x): return x * 2.0", ["pass"] * 3),
    ("def f(x): return 2 * x if x < 3 else 7", ["pass", "pass", "wrong"]),
    ("def f(x): return 2", ["pass", "wrong"]),
    ("def f(x): pass", ["wrong"]),
    ("def f(x): return str(2 * x)", ["wrong"]),
    ("def f(x): return [2 * x]", ["wrong"]),
    ("def f(x): return {2 * x}", ["wrong"]),
    ("def f(x): return x == 1", ["wrong"]),
    ("def f(x): return 2 * x if x < 2 else 1 // 0", ["pass", "runtime-error"]),
    ("def f(x): raise SystemExit(0)", ["runtime-error"]),
    ("def f(x): raise KeyboardInterrupt", ["runtime-error"]),
    ("class E(BaseException):\n def __str__(self): 1 / 0\ndef f(x): raise E", ["runtime-error"]),
    ("def f(x):\n import os\n os._exit(0)", ["runtime-error"]),
    ("def f(x):\n import os\n if x > 1: os.kill(os.getpid(), 9)\n return 2 * x", ["pass", "runtime-error"]),
    ("def f(x):\n import ctypes\n ctypes.string_at(0)", ["runtime-error"]),
    ("def f(x): return f(x)", ["runtime-error"]),
    ("def f(x): return 2 * x + int(input())", ["runtime-error"]),
    ("import sys; sys.exit()", ["runtime-error"]),
    ("1 / 0\ndef f(x): return 2 * x", ["runtime-error"]),
    ("import numpy\ndef f(x): return 2 * x", ["runtime-error"]),
    ("def f(x, y): return 2 * x", ["runtime-error"]),
    ("def f(x):\n while x == 2: pass\n return 2 * x", ["pass", "timeout"]),
    ("while True: pass", ["timeout"]),
    ("def f(x):\n try:\n  while True: pass\n except BaseException: return 2 * x", ["timeout"]),
    ("def f(x): return [0] * 10**10", ["memory"]),
    ("def f(x): raise MemoryError", ["memory"]),
    ("a = 'a'\nwhile True: a = a + a", ["timeout", "memory"]),
    ("def g(x): return 2 * x", ["missing"]),
    ("f = 5", ["missing"]),
    ("", ["missing"]),
    ("def f(x: return 2 * x", ["compile-error"]),
    ("x = '\0'", ["compile-error"]),
    ("x = '\ud800'", ["compile-error"]),
    ("(" * 5000, ["compile-error"]),
    ("#" * (1 << 20) + "#", ["compile-error"]),
    ("if __name__ == '__main__': 1 / 0\ndef f(x): return 2 * x", ["pass"] * 3),
    ("import sys\ndef f(x):\n print('noise' * 1000, flush=True); sys.stderr.write('x')\n return 2 * x", ["pass"] * 3),
    ("import os\ndef f(x):\n os.write(1, b'x' * 10**6); os.write(2, b'x')\n return 2 * x", ["pass"] * 3),
    ("def f(x): return 'x' * 10**8", ["unserialisable"]),
    ("def f(x): return '\\x01' * 3 * 10**6", ["unserialisable"]),
    ("def f(x): return ['x' * 999] * 10**6", ["unserialisable"]),
    ("def f(x): return 1 << 10**8", ["unserialisable"]),
    ("def f(x):\n a = []\n a.append(a)\n return a", ["unserialisable"]),
    ("def f(x):\n yield 2 * x", ["unserialisable"]),
    ("async def f(x): return 2 * x", ["unserialisable"]),
    ("def f(x): return f", ["unserialisable"]),
    ("def f(x): return range(x)", ["unserialisable"]),
    ("def f(x): return '\\ud800\\udc00\\0'", ["wrong"]),
    ("def f(x): return float('nan')", ["wrong"]),
    ("def f(x): return float('inf')", ["wrong"]),
    ("def f(x): return 10**5000", ["wrong"]),
    ("def f(x): return (2**61 - 1, {(2**61 - 1) * i for i in range(9999)})", ["timeout", "wrong"]),
    ("from dataclasses import dataclass\n@dataclass\nclass A:\n x: int\ndef f(x): return A(x).x * 2", ["pass"] * 3),
    ("import sys\nsys.setrecursionlimit(10**6)\ndef g(n): return n and 1 + g(n - 1)\n"
    "def f(x): return g(2 * x + 9000) - 9000",
     ["pass"] * 3),
]  # fmt: skip


def test_function_verdicts(grader):
    grades = grader.grade([function(code, *TWICE) for code, _ in FUNCTIONS])
    for (code, expected), grade in zip(FUNCTIONS, grades, strict=True):
        if len(expected) == 2 and expected[0] == "timeout":  # either will do
            assert grade.verdict in expected, code
        else:
            assert list(grade.cases) == expected and grade.verdict == expected[-1], (
                code[:200],
                grade,
            )


STDIN = [  # program that should double a number, verdicts
    ("print(int(input()) * 2)", ["pass", "pass"]),
    (
        "import sys\nfor line in sys.stdin: print(float(line) * 2, end='\\r\\n\\n')",
        ["pass", "pass"],
    ),
    ("if __name__ == '__main__': print(int(open(0).read()) * 2)", ["pass", "pass"]),
    (
        "import sys; x = int(input()); print(2 * x); print('noise', file=sys.stderr)",
        ["pass", "pass"],
    ),
    ("import sys; print(int(input()) * 2); sys.exit(0)", ["pass", "pass"]),
    ("print(2)", ["pass", "wrong"]),
    ("pass", ["wrong"]),
    ("print(2.0000001)", ["wrong"]),
    ("print(int(input()) * 2); raise SystemExit(1)", ["runtime-error"]),
    ("print(int(input()) * 2); 1 / 0", ["runtime-error"]),
    ("x = int(input()); print(2 * x); assert x < 2", ["pass", "runtime-error"]),
    ("import os; print(2, flush=True); os._exit(1)", ["runtime-error"]),
    ("import os; print(2); os._exit(0)", ["wrong"]),  # what was not flushed was not printed
    ("import os; print(2, flush=True); os.kill(os.getpid(), 15)", ["runtime-error"]),
    ("print(2, flush=True)\nwhile True: pass", ["timeout"]),
    ("while True: print('x' * 10**5)", ["output-limit"]),
    ("print('x' * 10**7)", ["output-limit", "memory"]),
    ("x = [0] * 10**10", ["memory"]),
    ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe2')", ["wrong"]),
    ("print('\\ud8002')", ["wrong", "runtime-error"]),
    ("print(2\0)", ["compile-error"]),
    ("print(2", ["compile-error"]),
]


@pytest.mark.slow
def test_stdin_verdicts(grader):
    grades = grader.grade([stdin(code, ("1", "2\n"), ("4\n", "8")) for code, _ in STDIN])
    for (code, expected), grade in zip(STDIN, grades, strict=True):
        if len(expected) == 2 and "pass" not in expected:
            assert grade.verdict in expected, (code, grade)
        else:
            assert list(grade.cases) == expected and grade.verdict == expected[-1], (code, grade)


def test_every_case_has_fresh_arguments_and_a_fresh_solution(grader):
    keeps = "class Solution:\n def __init__(self): self.seen = []\n def f(self, a):\n"
    keeps += "  self.seen.append(1); a.append(len(self.seen)); return a"
    submission = function(
        keeps, (([],), [1]), (([],), [1]), (([5],), (5, 1)), entry_point="Solution.f"
    )
    assert grader.grade([submission])[0].verdict == "pass"
    shared = [1]
    for code in ("def f(a):\n a.append(2)\n return a", "def f(a, b=[]):\n b += a\n return b"):
        cases = (
            [((shared,), [1, 2]), ((shared,), [1, 2])]
            if "append" in code
            else [((shared,), [1]), ((shared,), [1, 1])]
        )
        assert grader.grade([function(code, *cases)])[0].verdict == "pass" and shared == [1]
    for code, verdict in (
        ("class Solution: pass", "missing"), ("class Solution:\n f = 1", "missing"), ("def f(a): return a", "missing"),
        ("class Solution:\n def __init__(self): 1 / 0\n def f(self, a): return a", "runtime-error"),
        ("class Solution:\n @staticmethod\n def f(a): return a", "pass"),
        ("class Solution:\n def f(self, a): return a", "pass"),
    ):  # fmt: skip
        assert (
            grader.grade([function(code, ((1,), 1), entry_point="Solution.f")])[0].verdict
            == verdict
        ), code


def test_values_of_every_kind_go_both_ways(grader):
    values = [
        None,
        True,
        10**5000,
        -(2**63),
        0.1,
        float("nan"),
        float("-inf"),
        "\ud83d\ude00\0",
        b"\xff",
        1j,
        {1: {2.5}, (1, 2): frozenset("ab")},
    ]
    cases = [((value, [value]), (value, [value])) for value in values]
    assert grader.grade([function("def f(*a): return a", *cases)])[0].verdict == "pass"
    code = "import collections as c\n"
    code += "def f(k): return [c.Counter('aab'), c.OrderedDict(a=2, b=1), c.defaultdict(int, a=2, b=1)][k]"
    assert (
        grader.grade([function(code, *[((k,), {"a": 2, "b": 1}) for k in range(3)])])[0].verdict
        == "pass"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "stdin"])
def test_no_wrong_program_passes(grader, kind):
    if kind == "function":
        made = [function(code, ((1,), 1 + MARK), ((2,), 2 + MARK)) for code in HACKS.values()]
    else:
        made = [
            stdin(code + "\nprint(f(int(input())))", ("1", str(1 + MARK)), ("2", str(2 + MARK)))
            for code in HACKS.values()
        ]
    grades = dict(zip(HACKS, grader.grade(made), strict=True))
    assert {
        name: grade for name, grade in grades.items() if grade.cases[0] in ("pass", "sandbox-error")
    } == {}
    assert all(
        len(grade.cases) == 1 and grade.verdict == grade.cases[0] for grade in grades.values()
    )
    if kind == "function":
        exact = {
            "unserialisable": ["int subclass", "equal to all"],
            "wrong": ["true"],
            "runtime-error": ["exit at once", "os._exit"],
            "protocol": [
                "forged verdict",
                "forged before",
                "forged types",
                "forged sandbox error",
                "no frame",
            ],
            "output-limit": ["huge frame"],
        }
        assert {
            verdict: [name for name in names if grades[name].verdict == verdict]
            for verdict, names in exact.items()
        } == exact


def test_details_are_short_and_can_be_written(grader):
    codes = [
        "raise ValueError('\\ud800' * 999)",
        "raise type('\\ud800', (Exception,), {})",
        "raise ValueError(10**5000)",
    ]
    codes += [
        "class E(Exception):\n def __str__(self): raise SystemExit\nraise E",
        "def f(x): raise OSError('\\0')",
    ]
    for grade in grader.grade([function(code, ((1,), 1)) for code in codes]):
        assert grade.verdict == "runtime-error" and len(grade.detail.encode()) < 2000, grade


@pytest.mark.slow
def test_a_program_may_print_noise_and_hang_later(grader):
    code = "def f(x):\n print('noise')\n while x > 1: pass\n return x"
    grade = grader.grade([function(code, ((1,), 1), ((2,), 2), ((3,), 3))])[0]
    assert grade.cases == ("pass", "timeout") and grade.verdict == "timeout"


def test_expected_values_are_not_sent():
    """All bytes that go to a program, by way of the program: it sends back what it got."""
    code = "import sys\ndef f(*a):\n frame = sys._getframe()\n seen = ''\n while frame:\n"
    code += "  seen += repr(frame.f_locals) + repr([v.buffer for v in frame.f_locals.values() if hasattr(v, 'buffer')])\n"
    code += "  frame = frame.f_back\n return ['SEEN', str(918273645) in seen, 'arguments' in seen]"
    with CodeGrader(**LIMITS) as grader:
        case = ((1,), ["SEEN", False, True])
        assert grader.grade([function(code, case, ((1,), MARK))])[0].cases == ("pass", "wrong")


def test_identical_submissions_are_graded_once(grader):
    count = "import time\ndef f(x): return time.perf_counter_ns()"
    many = [function(count, ((1,), None)) for _ in range(200)]
    start = time.monotonic()
    assert {grade.verdict for grade in grader.grade(many)} == {"wrong"}
    assert time.monotonic() - start < 2
    mixed = [function("def f(x): return x", ((1,), x)) for x in (1, 2, True, 1.0, [1])]
    assert [grade.verdict for grade in grader.grade(mixed)] == [
        "pass",
        "wrong",
        "wrong",
        "pass",
        "wrong",
    ]
    assert grader.grade([]) == []


@pytest.mark.slow
def test_a_waiting_program_is_tried_again():
    with CodeGrader(cpu_seconds=0.3, wall_seconds=0.3, memory_mb=256) as grader:
        start = time.monotonic()
        sleeps, spins = (
            function("import time\ndef f(x): time.sleep(9)", ((1,), 1)),
            function("def f(x):\n while 1: pass", ((1,), 1)),
        )
        assert grader.grade([sleeps]) == [Grade("timeout", ("timeout",), "waiting")]
        assert time.monotonic() - start > 0.6
        assert grader.grade([spins])[0] == Grade("timeout", ("timeout",))


def descendants(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            found = [int(word) for word in file.read().split()]
    except OSError:
        return []
    return found + [below for child in found for below in descendants(child)]


@pytest.mark.slow
@LINUX
def test_killed_servers_lose_no_submission():
    with CodeGrader(slots=2, **LIMITS) as grader:
        made = [
            function(
                f"def f(x):\n t = 0\n for i in range(40000): t += i\n return x + {i}", ((1,), 1 + i)
            )
            for i in range(60)
        ]
        assert grader.grade(made[:2])[0].verdict == "pass"
        killed = []

        def kill():
            for _ in range(2):  # each slot's once: a program that is hit twice is a sandbox error
                time.sleep(0.1)
                pids = grader._runner.server_pids()
                victim = pids[len(killed) % len(pids)] if pids else None
                if victim:
                    os.kill(victim, signal.SIGKILL)
                    killed.append(victim)

        killer = threading.Thread(target=kill)
        killer.start()
        grades = grader.grade(made)
        killer.join()
        assert len(set(killed)) >= 2 and [grade.verdict for grade in grades] == ["pass"] * 60


@pytest.mark.slow
@LINUX
def test_a_sandbox_error_twice_is_no_reward():
    with CodeGrader(wall_seconds=20, cpu_seconds=1) as grader:
        waits = function("import time\ndef f(x): time.sleep(15)", ((1,), 1))
        grader.grade([function("def f(x): return x", ((1,), 1))])
        done = threading.Event()

        def kill():
            while not done.wait(0.2):
                for pid in grader._runner.server_pids():
                    if descendants(pid):
                        os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        grade = grader.grade([waits])[0]
        done.set()
        killer.join()
        assert (
            grade.verdict == "sandbox-error" and grade.cases == ("sandbox-error",) and grade.detail
        )


@pytest.mark.slow
def test_threads_forks_and_pickles(grader):
    def check(grader, start):
        made = [
            function(f"def f(x): return x + {i}", ((1,), 1 + i), ((2,), 3))
            for i in range(start, start + 5)
        ]
        return [grade.verdict for grade in grader.grade(made)] == [
            "pass" if i == 1 else "wrong" for i in range(start, start + 5)
        ]

    results = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(check(grader, i))) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        fine = check(grader, 0)
        grader.close()
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    with pickle.loads(pickle.dumps(grader)) as copy:
        assert copy == grader and check(copy, 0)
    closed = CodeGrader(**LIMITS)
    assert check(closed, 0)
    closed.close()
    assert check(closed, 0)
    closed.close()


def test_bad_settings_and_tests_are_refused():
    for key, value in (("slots", 0), ("cpu_seconds", 0), ("wall_seconds", 0), ("memory_mb", 1)):
        with pytest.raises(ValueError, match=f"{key}={value}"):
            CodeGrader(**{key: value})
    with CodeGrader(**LIMITS) as grader:
        for made, message in (
            (Submission("", "f", ()), "without tests"),
            (function("", ((1,), object())), r"tests\[0\]"),
            (function("", ((1,), 1), ((iter(()),), 1)), r"tests\[1\]"),
            (function("", ((1,), 1), entry_point=""), "entry_point=''"),
        ):
            with pytest.raises(ValueError, match=message):
                grader.grade([made])


@pytest.mark.slow
def test_speed():
    """150 small function programs of 8 cases a second on 2 cores, if nothing else runs; a third of
    it on a busy " "machine."""
    cases = [((i, [i] * 5), 2 * i) for i in range(8)]
    with CodeGrader(slots=2) as grader:
        best = 0.0
        for attempt in range(4):
            made = [
                function(f"def f(x, y): return x * 2 # {attempt} {i}", *cases) for i in range(150)
            ]
            start = time.monotonic()
            assert {grade.verdict for grade in grader.grade(made)} == {"pass"}
            best = max(best, 150 / (time.monotonic() - start))
    assert best > (150 if os.getloadavg()[0] < 2 else 50)
