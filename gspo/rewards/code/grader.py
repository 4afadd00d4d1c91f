"""Grades untrusted programs on tests.

Expected values and comparisons never enter a process in which such a program runs. There are three
kinds of test:

- FunctionCase: the program is loaded once, in a fresh confined process. For each case that process
  gets the arguments and sends back a value, which is compared here (values.equal). Even a forged
  result is only a value to compare.
- StdinCase: each case has a fresh process. Its standard output is compared here
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
import itertools
import json
from collections.abc import Generator
from dataclasses import astuple, dataclass
from typing import Any

from gspo.rewards.code.outputs import OutputRule, accepts, agrees, checker_input, checker_program
from gspo.rewards.sandbox.runner import CodeRunner, Limits, ProgramEnd, Slot
from gspo.rewards.sandbox.values import (
    Malformed,
    Unserialisable,
    encode,
    equal,
    require_shallow,
)

MAX_ATTEMPTS = 2
MAX_OUTPUT_BYTES = 4 << 20
CPU_LIMIT_CASES = 50  # a program may use the CPU time of this many cases in all
MAX_TOTAL_CPU_SECONDS = 36000.0
MAX_CODE_CHARS = 1 << 20
MAX_DETAIL_CHARS = 200
# the verdicts that a program's own process may report
FAILURES = ("runtime-error", "memory", "unserialisable", "missing", "compile-error")
LOADING = -1  # the index of the answer to the loading of the program
NO_KEYWORDS = ["d"]  # an empty dict in JSON form
EXACT = OutputRule()


@dataclass(frozen=True)
class FunctionCase:
    """A call of the entry point and its expected result."""

    arguments: tuple
    expected: Any


@dataclass(frozen=True)
class StdinCase:
    """A run of the program and its expected output, compared by the problem's rule."""

    stdin: str
    stdout: str
    rule: OutputRule = EXACT


@dataclass(frozen=True)
class Asserts:
    """Trusted test code that calls the program.

    Examples are HumanEval's check(candidate) and MBPP's assert lines. It runs after `prelude`. The
    program provides each name that neither of the two defines.
    """

    test: str
    prelude: str = ""


@dataclass(frozen=True)
class Submission:
    """A program and its tests.

    The entry point "Solution.name" is a method, called on a fresh Solution() for every case. It is
    "" for tests that need none."""

    code: str
    entry_point: str
    tests: tuple[FunctionCase | StdinCase | Asserts, ...]


@dataclass(frozen=True)
class Grade:
    """The verdict on a program, and the verdicts on its cases.

    Grading stops at the first case that does not pass. Its verdict is the last of `cases` and the
    verdict on the program."""

    verdict: str
    cases: tuple[str, ...]
    detail: str = ""  # a note on that case for people, partly in the program's own words


@dataclass(frozen=True)
class _Call:
    """A FunctionCase whose values are in JSON form."""

    arguments: Any
    expected: Any


@dataclass(frozen=True)
class _CaseOutcome:
    verdict: str
    detail: str = ""
    retry: bool = False  # whether it may be the machine's fault


PASS = _CaseOutcome("pass")


@dataclass
class CodeGrader:
    """A grader of `slots` programs at a time.

    The limits are per case. All cases of a program together may use the CPU time of 50 cases. The
    grader can be used from any thread, from a forked copy and, pickled, from another process.
    Raises ValueError for bad settings.
    """

    slots: int = 1
    cpu_seconds: float = 2.0
    wall_seconds: float = 10.0  # seconds of waiting, not of computing
    memory_mb: int = 512
    allow_weak_sandbox: bool = False

    def __post_init__(self) -> None:
        limits = Limits(
            cpu_seconds=self.cpu_seconds,
            total_cpu_seconds=min(MAX_TOTAL_CPU_SECONDS, CPU_LIMIT_CASES * self.cpu_seconds),
            wall_seconds=self.wall_seconds,
            memory_mb=self.memory_mb,
            output_bytes=MAX_OUTPUT_BYTES,
        )
        self._runner = CodeRunner(limits, self.slots, self.allow_weak_sandbox)

    def __enter__(self) -> CodeGrader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(self, submissions: list[Submission]) -> list[Grade]:
        """Return the grades of the submissions, in their order.

        Identical submissions are graded once. A failure that may be the machine's fault is tried
        twice. Raises ValueError for a submission without tests, for a function case without entry
        point, and for expected values or arguments that are not plain data.
        """
        # programs for one problem often share their tests
        prepared = {}
        jobs = {}
        keys = []
        for submission in submissions:
            tests_id = id(submission.tests)
            if tests_id not in prepared:
                prepared[tests_id] = _prepare(submission.tests)
            tests, digest = prepared[tests_id]
            if not submission.entry_point and any(isinstance(test, _Call) for test in tests):
                raise ValueError("entry_point='': a function case needs the name of its function")
            key = (submission.code, submission.entry_point, digest)
            keys.append(key)
            jobs.setdefault(key, (submission, tests))
        grades = dict(zip(jobs, self._runner.each(_grade, list(jobs.values())), strict=True))
        return [grades[key] for key in keys]

    def layers(self) -> dict[str, str]:
        """Return the layers that confine the programs here, in words for printing."""
        return self._runner.layers()

    def close(self) -> None:
        """End the processes, which start again if the grader is used again."""
        self._runner.close()


def _prepare(tests: tuple[FunctionCase | StdinCase | Asserts, ...]) -> tuple[list[Any], bytes]:
    """Return the tests with their values in JSON form, and a digest of the tests."""
    if not tests:
        raise ValueError("tests=(): a program without tests would pass")
    prepared = []
    contents = []
    for number, test in enumerate(tests):
        if isinstance(test, FunctionCase):
            try:
                test = _Call(encode(tuple(test.arguments)), encode(test.expected))
            except Unserialisable as error:
                raise ValueError(f"tests[{number}]: {error}") from None
        prepared.append(test)
        contents.append([type(test).__name__, *vars(test).values()])
    text = json.dumps(contents, default=astuple)
    return prepared, hashlib.sha256(text.encode()).digest()


def _grade(slot: Slot, job: tuple[Submission, list[Any]]) -> Grade:
    """Run the tests until one does not pass.

    Run all of them once more if that may be the machine's fault."""
    for _ in range(MAX_ATTEMPTS):
        cases = []
        with contextlib.closing(_outcomes(slot, *job)) as outcomes:
            for outcome in outcomes:
                cases.append(outcome.verdict)
                if outcome.verdict != "pass":
                    break
        if not outcome.retry:
            break
    # this removes lone surrogates
    detail = outcome.detail[:MAX_DETAIL_CHARS].encode("utf-8", "backslashreplace").decode()
    return Grade(outcome.verdict, tuple(cases), detail)


def _outcomes(slot: Slot, submission: Submission, tests: list[Any]) -> Generator[_CaseOutcome]:
    """Yield the outcomes of the tests in order. Each test runs when the caller asks for it."""
    if len(submission.code) > MAX_CODE_CHARS:
        yield _CaseOutcome("compile-error", f"longer than {MAX_CODE_CHARS} characters")
        return
    try:
        for kind, group in itertools.groupby(tests, key=type):
            if kind is _Call:  # consecutive calls share a process
                yield from _call_outcomes(slot, submission, list(group))
            elif kind is StdinCase:
                yield from (_run_outcome(slot, submission.code, test) for test in group)
            else:
                yield from (_assert_outcome(slot, submission, test) for test in group)
    except OSError as error:  # no process, descriptor or fork server was to be had
        yield _CaseOutcome("sandbox-error", f"{type(error).__name__}: {error}", retry=True)


def _run_outcome(slot: Slot, code: str, case: StdinCase) -> _CaseOutcome:
    output, ended = slot.run_program(code, case.stdin)
    if ended.why != "exit" or ended.code != 0:
        return _ended(ended)
    # bytes that are not text never equal an expected text
    printed = output.decode("utf-8", "surrogateescape")
    if case.rule.checker:
        return _checked_outcome(slot, case, printed)
    return PASS if agrees(case.rule, case.stdout, printed) else _CaseOutcome("wrong")


def _checked_outcome(slot: Slot, case: StdinCase, printed: str) -> _CaseOutcome:
    """Return the outcome by the problem's checker, which runs in a process of its own.

    Many checkers raise an exception for an output that they cannot read. Such an output is wrong if
    the checker accepts the expected output. Any other failure says nothing about the program."""
    is_right, ended = _check(slot, case, printed)
    if ended.why == "exit" and ended.code == 0:
        return PASS if is_right else _CaseOutcome("wrong")
    failure = f"the problem's checker ended by {ended.why}, status {ended.code}"
    # a right output may take the checker longer than the expected one
    if ended.why == "exit":
        is_right, ended = _check(slot, case, case.stdout)
        if is_right and ended.why == "exit" and ended.code == 0:
            return _CaseOutcome("wrong", failure)
    return _CaseOutcome("sandbox-error", failure)


def _check(slot: Slot, case: StdinCase, printed: str) -> tuple[bool, ProgramEnd]:
    """Run the problem's checker, and return whether it accepts the output, and how it ended."""
    texts = checker_input(case.stdin, case.stdout, printed)
    output, ended = slot.run_program(checker_program(case.rule.checker), texts)
    return accepts(output.decode("utf-8", "replace")), ended


def _call_outcomes(
    slot: Slot, submission: Submission, calls: list[_Call]
) -> Generator[_CaseOutcome]:
    with slot.open("function", {"code": submission.code, "objects": False}) as session:
        _, failure = _result(session.exchange(None, pause=False), LOADING)
        if failure:
            yield failure
            return
        for index, call in enumerate(calls):
            request = {
                "index": index,
                "call": submission.entry_point,
                "arguments": call.arguments,
                "keywords": NO_KEYWORDS,
            }
            reply, failure = _result(session.exchange(request, pause=False), index)
            yield failure or _compare(call.expected, reply)


def _assert_outcome(slot: Slot, submission: Submission, test: Asserts) -> _CaseOutcome:
    """Carry calls from the test's process to the program's, and the results back."""
    with slot.open("function", {"code": submission.code, "objects": True}) as program:
        _, failure = _result(program.exchange(None), LOADING)
        if failure:
            return failure
        first = {"prelude": test.prelude, "test": test.test, "entry_point": submission.entry_point}
        with slot.open("tester", first) as tester:
            message = tester.exchange(None)
            index = 0
            while not isinstance(message, ProgramEnd) and "verdict" not in message:
                reply, failure = _result(program.exchange({**message, "index": index}), index)
                if failure:
                    return failure
                # the value that is judged must be plain
                if "object" in reply and message["call"] == submission.entry_point:
                    return _CaseOutcome("unserialisable", "an object that is not plain data")
                message = tester.exchange(reply)
                index += 1
    if not isinstance(message, ProgramEnd):
        verdict = message["verdict"]
        return _CaseOutcome(verdict, message["detail"], retry=verdict == "sandbox-error")
    if message.why == "exit":
        detail = f"the test's process ended with {message.code}"
        return _CaseOutcome("sandbox-error", detail, retry=True)
    return _ended(message)


def _result(
    reply: dict[str, Any] | ProgramEnd, index: int
) -> tuple[dict[str, Any], _CaseOutcome | None]:
    """Return the result in an untrusted answer, {"value"} or {"object"}, or how the call failed.

    Anything but the answer to call `index` breaks the protocol."""
    if isinstance(reply, ProgramEnd):
        return {}, _ended(reply)
    detail = reply.get("detail", "")
    reply_index = reply.get("index")
    if type(reply_index) is not int or reply_index != index or not isinstance(detail, str):
        return {}, _CaseOutcome("protocol", "not the answer that was asked for")
    if "status" in reply:
        if reply["status"] in FAILURES:
            return {}, _CaseOutcome(reply["status"], detail)
        return {}, _CaseOutcome("protocol", "no known status")
    if type(reply.get("object")) is int:
        return {"object": reply["object"]}, None
    try:
        require_shallow(reply["value"])
        return {"value": reply["value"]}, None
    except (KeyError, Malformed):
        return {}, _CaseOutcome("protocol", "no value")


def _compare(expected: Any, reply: dict[str, Any]) -> _CaseOutcome:
    if "value" not in reply:
        return _CaseOutcome("protocol", "no value")
    try:
        return PASS if equal(expected, reply["value"]) else _CaseOutcome("wrong")
    except Malformed as error:
        return _CaseOutcome("protocol", str(error))


def _ended(ended: ProgramEnd) -> _CaseOutcome:
    """Return the outcome of a case in which the process ended, and did not end well."""
    if ended.why == "exit":
        return _CaseOutcome("runtime-error", f"ended with {ended.code}")
    detail = ended.detail or ("waiting" if ended.waited else "")
    retry = ended.why == "sandbox-error" or ended.waited
    return _CaseOutcome(ended.why, detail, retry=retry)
