"""Grades untrusted programs on tests. Expected values and comparisons never enter a process where
such a program runs.

There are three kinds of test:

- FunctionCase: the program is loaded once, in a fresh confined process. For each case that process
  gets the arguments and sends back a value, which is compared here (values.equal). What a program
  forges is only a value to compare.
- StdinCase: each case has a fresh process, whose standard output is compared here
  (values.same_output), or by the problem's own checker in a further confined process (outputs.py).
- Asserts: trusted test code runs in a second confined process, which asks for each call of the
  program (asserts.py).

Verdicts of a case:

    pass             the value, or the output, is the expected one
    wrong            it is not, or an assert failed, or test code could not use the value
    runtime-error    any exception, SystemExit included; a non-zero exit status; a process that
                     ended by itself
    timeout          more CPU time, or more waiting, than allowed for a case
    memory           a MemoryError
    output-limit     too much output
    unserialisable   the result is not plain data (values.py)
    missing          there is no such function
    compile-error    the program is not Python
    protocol         messages that nobody asked for, or that are not messages
    sandbox-error    our own fault: no verdict on the program
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from gspo.rewards.code.outputs import OutputRule, accepts, checker_input, checker_program
from gspo.rewards.sandbox.runner import CodeRunner, Limits, ProgramEnd, ProgramSession, Slot
from gspo.rewards.sandbox.values import (
    Malformed,
    Unserialisable,
    encode,
    equal,
    require_shallow,
    same_output,
)

ATTEMPTS = 2
OUTPUT_BYTES = 4 << 20
TOTAL_CASES = 50  # a program may use the CPU time of this many cases in all
CODE_CHARACTERS = 1 << 20
DETAIL_CHARACTERS = 200
# the verdicts that a program's own process may report
FAILURES = ("runtime-error", "memory", "unserialisable", "missing", "compile-error")


EXACT = OutputRule()


@dataclass(frozen=True)
class FunctionCase:
    """One call of the entry point and what it should return."""

    arguments: tuple
    expected: Any


@dataclass(frozen=True)
class StdinCase:
    """One run of the program and what it should print, by the problem's rule."""

    stdin: str
    stdout: str
    rule: OutputRule = EXACT


@dataclass(frozen=True)
class Asserts:
    """Trusted test code that calls the program, such as HumanEval's check(candidate) or MBPP's
    assert lines.

    It runs after `prelude`. A name that neither of the two defines is taken from the program.
    """

    test: str
    prelude: str = ""


@dataclass(frozen=True)
class Submission:
    """A program and its tests. The entry point "Solution.name" is a method, called on a fresh
    Solution() for every case; "" is for tests that need none."""

    code: str
    entry_point: str
    tests: tuple[FunctionCase | StdinCase | Asserts, ...]


@dataclass(frozen=True)
class Grade:
    """A verdict on a program. It is that of the first case that does not pass, which is the last of
    `cases`, since grading stops there."""

    verdict: str
    cases: tuple[str, ...]
    detail: str = ""  # a note on that case for people, partly in the program's own words


@dataclass(frozen=True)
class _Call:
    """A FunctionCase whose values are in JSON form."""

    arguments: Any
    expected: Any


@dataclass(frozen=True)
class _Outcome:
    verdict: str
    detail: str = ""
    again: bool = False  # whether it may be the machine's fault


PASS = _Outcome("pass")


@dataclass
class CodeGrader:
    """Grades `slots` programs at a time. The limits are per case; the CPU time of all cases
    together is limited too, to that of 50 cases.

    It can be used from any thread, from a forked copy and, pickled, from another process. Raises
    ValueError for bad settings.
    """

    slots: int = 1
    cpu_seconds: float = 2.0
    wall_seconds: float = 10.0  # seconds of waiting, not of computing
    memory_mb: int = 512
    allow_weak_sandbox: bool = False

    def __post_init__(self) -> None:
        total = min(36000.0, TOTAL_CASES * self.cpu_seconds)
        limits = Limits(self.cpu_seconds, total, self.wall_seconds, self.memory_mb, OUTPUT_BYTES)
        self._runner = CodeRunner(limits, self.slots, self.allow_weak_sandbox)

    def __enter__(self) -> CodeGrader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(self, submissions: list[Submission]) -> list[Grade]:
        """Grade the submissions in order. Identical ones are graded once; what may be the machine's
        fault is tried twice.

        Raises ValueError for a submission without tests, for a function case without entry point,
        and for expected values or arguments that are not plain data.
        """
        # programs for one problem often share their tests
        prepared: dict[int, tuple[list[Any], bytes]] = {}
        jobs: dict[tuple[str, str, bytes], tuple[Submission, list[Any]]] = {}
        keys = []
        for submission in submissions:
            if id(submission.tests) not in prepared:
                prepared[id(submission.tests)] = _prepare(submission.tests)
            tests, digest = prepared[id(submission.tests)]
            if not submission.entry_point and any(isinstance(test, _Call) for test in tests):
                raise ValueError("entry_point='': a function case needs the name of its function")
            keys.append((submission.code, submission.entry_point, digest))
            jobs.setdefault(keys[-1], (submission, tests))
        grades = dict(zip(jobs, self._runner.each(_grade, list(jobs.values())), strict=True))
        return [grades[key] for key in keys]

    def layers(self) -> dict[str, str]:
        """Return what confines the programs here, layer by layer, for printing."""
        return self._runner.layers()

    def close(self) -> None:
        """End the processes. They start anew if the grader is used again."""
        self._runner.close()


def _prepare(tests: tuple[FunctionCase | StdinCase | Asserts, ...]) -> tuple[list[Any], bytes]:
    """Return the tests with their values in JSON form, and a digest that is the same for the same
    tests.
    """
    if not tests:
        raise ValueError("tests=(): a program without tests would pass")
    prepared, texts = [], []
    for number, test in enumerate(tests):
        if isinstance(test, FunctionCase):
            try:
                test = _Call(encode(tuple(test.arguments)), encode(test.expected))
            except Unserialisable as error:
                raise ValueError(f"tests[{number}]: {error}") from None
        prepared.append(test)
        texts.append([type(test).__name__, *vars(test).values()])
    return prepared, hashlib.sha256(json.dumps(texts, default=astuple).encode()).digest()


def _grade(slot: Slot, job: tuple[Submission, list[Any]]) -> Grade:
    """Run the tests until one does not pass, and all of them once more if that may be the machine's
    fault.
    """
    for attempt in range(ATTEMPTS):
        cases = []
        with contextlib.closing(_outcomes(slot, *job)) as outcomes:
            for outcome in outcomes:
                cases.append(outcome.verdict)
                if outcome.verdict != "pass":
                    break
        if not outcome.again or attempt == ATTEMPTS - 1:
            break
    # this removes lone surrogates
    detail = outcome.detail[:DETAIL_CHARACTERS].encode("utf-8", "backslashreplace").decode()
    return Grade(outcome.verdict, tuple(cases), detail)


def _outcomes(slot: Slot, submission: Submission, tests: list[Any]) -> Iterator[_Outcome]:
    """Yield the outcomes of the tests in order; each test runs when its outcome is asked for."""
    if len(submission.code) > CODE_CHARACTERS:
        yield _Outcome("compile-error", f"longer than {CODE_CHARACTERS} characters")
        return
    calls: list[_Call] = []
    try:
        for test in (*tests, None):
            if isinstance(test, _Call):  # consecutive calls share a process
                calls.append(test)
                continue
            if calls:
                yield from _call_outcomes(slot, submission, calls)
                calls = []
            if isinstance(test, StdinCase):
                yield _run_outcome(slot, submission.code, test)
            elif isinstance(test, Asserts):
                yield _assert_outcome(slot, submission, test)
    except OSError as error:  # no process, descriptor or fork server was to be had
        yield _Outcome("sandbox-error", f"{type(error).__name__}: {error}", again=True)


def _run_outcome(slot: Slot, code: str, case: StdinCase) -> _Outcome:
    output, ended = slot.run_program(code, case.stdin)
    if ended.why != "exit" or ended.code != 0:
        return _ended(ended)
    # bytes that are not text never equal an expected text
    printed = output.decode("utf-8", "surrogateescape")
    if case.rule.checker:
        return _checked_outcome(slot, case, printed)
    alike = same_output(case.stdout, printed, case.rule.tolerance, case.rule.ignores_case)
    return PASS if alike else _Outcome("wrong")


def _checked_outcome(slot: Slot, case: StdinCase, printed: str) -> _Outcome:
    """Ask the problem's checker, in a process of its own. A checker that fails says nothing about
    the program.
    """
    given = checker_input(case.stdin, case.stdout, printed)
    said, ended = slot.run_program(checker_program(case.rule.checker), given)
    if ended.why != "exit" or ended.code != 0:
        return _Outcome(
            "sandbox-error", f"the problem's checker ended by {ended.why}, status {ended.code}"
        )
    return PASS if accepts(said.decode("utf-8", "replace")) else _Outcome("wrong")


def _call_outcomes(slot: Slot, submission: Submission, calls: list[_Call]) -> Iterator[_Outcome]:
    with slot.open("function", {"code": submission.code, "objects": False}) as session:
        _, failed = _result(session.exchange(None, pause=False), -1)
        if failed:
            yield failed
            return
        for index, call in enumerate(calls):
            reply, failed = _call(
                session, index, submission.entry_point, call.arguments, ["d"], pause=False
            )
            yield failed or _compare(call.expected, reply)


def _assert_outcome(slot: Slot, submission: Submission, test: Asserts) -> _Outcome:
    """Carry calls from the test's process to the program's, and the results back."""
    with slot.open("function", {"code": submission.code, "objects": True}) as program:
        _, failed = _result(program.exchange(None), -1)
        if failed:
            return failed
        first = {"prelude": test.prelude, "test": test.test, "entry_point": submission.entry_point}
        with slot.open("tester", first) as tester:
            said, index = tester.exchange(None), 0
            while not isinstance(said, ProgramEnd) and "verdict" not in said:
                reply, failed = _call(
                    program, index, said["call"], said["arguments"], said["keywords"]
                )
                if failed:
                    return failed
                # the value that is judged must be plain
                if "object" in reply and said["call"] == submission.entry_point:
                    return _Outcome("unserialisable", "an object that is not plain data")
                said, index = tester.exchange(reply), index + 1
    if not isinstance(said, ProgramEnd):
        return _Outcome(said["verdict"], said["detail"], again=said["verdict"] == "sandbox-error")
    if said.why == "exit":
        return _Outcome("sandbox-error", f"the test's process ended with {said.code}", again=True)
    return _ended(said)


def _call(
    session: ProgramSession,
    index: int,
    name: str,
    arguments: Any,
    keywords: Any,
    pause: bool = True,
) -> tuple[dict[str, Any], _Outcome | None]:
    """Ask a program for one call and return its answer, {"value"} or {"object"}, or how it failed."""
    message = {"index": index, "call": name, "arguments": arguments, "keywords": keywords}
    return _result(session.exchange(message, pause), index)


def _result(
    reply: dict[str, Any] | ProgramEnd, index: int
) -> tuple[dict[str, Any], _Outcome | None]:
    """Take from an untrusted answer exactly what was asked for; anything else breaks the protocol."""
    if isinstance(reply, ProgramEnd):
        return {}, _ended(reply)
    detail = reply.get("detail", "")
    if (
        type(reply.get("index")) is not int
        or reply["index"] != index
        or not isinstance(detail, str)
    ):
        return {}, _Outcome("protocol", "not the answer that was asked for")
    if "status" in reply:
        is_failure = reply["status"] in FAILURES
        return {}, _Outcome(reply["status"], detail) if is_failure else _Outcome(
            "protocol", "no known status"
        )
    if type(reply.get("object")) is int:
        return {"object": reply["object"]}, None
    try:
        require_shallow(reply["value"])
        return {"value": reply["value"]}, None
    except (KeyError, Malformed):
        return {}, _Outcome("protocol", "no value")


def _compare(expected: Any, reply: dict[str, Any]) -> _Outcome:
    if "value" not in reply:
        return _Outcome("protocol", "no value")
    try:
        return PASS if equal(expected, reply["value"]) else _Outcome("wrong")
    except Malformed as error:
        return _Outcome("protocol", str(error))


def _ended(ended: ProgramEnd) -> _Outcome:
    """Return the outcome of a case in which the process ended, and did not end well."""
    if ended.why == "exit":
        return _Outcome("runtime-error", f"ended with {ended.code}")
    detail = ended.detail or ("waiting" if ended.waited else "")
    return _Outcome(ended.why, detail, again=ended.why == "sandbox-error" or ended.waited)
