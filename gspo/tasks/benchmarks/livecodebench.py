"""LiveCodeBench (Jain et al., arXiv:2403.07974): contest problems by date. Reward 1 if all tests
pass, else 0.

A window of dates can be chosen that a model cannot have seen. Both public and private tests must
pass.

Records, as released: {question_content, platform, contest_date, starter_code, difficulty,
public_test_cases, metadata, private_test_cases}. Tests are a JSON list of {input, output, testtype:
stdin or functional}. Functional tests call the function metadata["func_name"], a method of
`Solution` where the program has that class; the input is one JSON value per line, one for each
argument.

Private tests may be base64 of zlib of a pickle of the JSON text. Unpickling would run whatever a
file says, so nothing is unpickled: the opcodes are read, and all but those that make up one text
are refused. Tests are decoded when the file is read, to see that they can be, and again when a
response is judged: all of them decoded would fill the memory.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
import zlib
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

from gspo.rewards.code.grader import FunctionCase, StdinCase
from gspo.tasks.benchmarks.base import Item
from gspo.tasks.benchmarks.programs import EXPERT, READ_STDIN, CodeBenchmark, Tests
from gspo.tasks.benchmarks.records_file import Row, writable

# most bytes of a record's decompressed tests; a few kB of zlib can hold gigabytes
LARGEST = 1 << 28
OPCODES = 16  # most opcodes; a pickled text has five
# most lists, objects and values in the JSON of a problem's tests; each takes up to 60 bytes of
# memory
PARTS = 1 << 23
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # a string of JSON
LONGEST_INTEGER = 30_000  # digits; the grader hands over at most 39,000
TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
# the other opcodes of a pickled text
HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
USE_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your code within "
    "delimiters."
)
# LiveCodeBench's own grader puts this before every program, lcb_runner/evaluation/testing_util.py.
STAR = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
IMPORTS = "".join(
    [
        *(f"from {name} import *\n" for name in [*STAR.split(), "builtins", "typing"]),
        *(f"import {name}\n" for name in STAR.split()),
        "sys.setrecursionlimit(50000)\n",
    ]
)


@dataclass(frozen=True, eq=False)
class Packed:
    """The tests of a problem, undecoded, as they stand in the file."""

    where: str
    function: str
    public: str
    private: str
    preamble: str = IMPORTS


@dataclass
class LiveCodeBench(CodeBenchmark):
    """Problems with start_date <= contest date <= end_date (ISO dates; "" leaves that side open)."""

    name: str = "livecodebench"
    hub: str = "hf://datasets/livecodebench/code_generation_lite/test*.jsonl"
    start_date: str = "2024-10-01"
    end_date: str = "2025-02-28"
    cpu_seconds: float = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("start_date", "end_date"):
            value = getattr(self, key)
            if value and not _is_date(value):
                raise ValueError(f"{key}={value!r} must be a date such as 2024-10-01, or empty")
        if self.start_date and self.end_date and self.start_date > self.end_date:
            raise ValueError(f"start_date={self.start_date} is after end_date={self.end_date}")

    def item(self, row: Row, training: bool) -> Item | None:
        # the date is a text, or a time if the reader has parsed it
        day = str(row.values.get("contest_date", ""))[:10]
        if not _is_date(day):
            raise row.wrong(
                "contest_date", "is missing, or does not begin with a date such as 2024-10-01"
            )
        if not training and not (self.start_date or day) <= day <= (self.end_date or day):
            return None
        text, starter = row.text("question_content"), row.text("starter_code", default="")
        packed = Packed(row.where, self._function(row), _json_text(row, "public_test_cases"),
                        _json_text(row, "private_test_cases"))  # fmt: skip
        prompt = EXPERT.format(
            text, USE_STARTER if starter else READ_STDIN, starter or "# YOUR CODE HERE"
        )
        family = f"{row.text('platform', default='')} {row.text('difficulty', default='')}".strip()
        self.tests(packed)
        return Item(text, prompt, packed, family)

    def tests(self, answer: Packed) -> Tests:
        """Return the decoded tests. Raises ValueError naming the record if they cannot be decoded."""
        tests = read_tests(answer.public, answer.where, "public_test_cases")
        tests += read_tests(answer.private, answer.where, "private_test_cases")
        row = Row(answer.where, {})
        if not tests:
            raise row.wrong(
                "private_test_cases", "and 'public_test_cases' are empty: every program would pass"
            )
        if not writable(tests):
            raise row.wrong(
                "private_test_cases",
                "or 'public_test_cases' holds half a character (a lone surrogate)",
            )
        if sum(map(_parts, tests)) > PARTS:
            raise row.wrong(
                "private_test_cases", f"or 'public_test_cases' holds more than {PARTS} values"
            )
        return Tests(
            answer.function,
            tuple(_case(row, test, answer.function) for test in tests),
            answer.preamble,
        )

    def called_function(self, answer: Packed) -> str:
        return answer.function

    def entry_point(self, tests: Tests, code: str) -> str:
        """Return what LiveCodeBench calls: a method of `Solution` if the program has that class,
        else a function.
        """
        if tests.entry_point and "class Solution" in code:
            return f"Solution.{tests.entry_point}"
        return tests.entry_point

    def _why_empty(self) -> str:
        return f"no problem has a contest_date from {self.start_date or 'ever'} to {self.end_date or 'ever'}"

    def _function(self, row: Row) -> str:
        """Return the function that functional tests call, or "" for tests by standard input."""
        metadata = row.get("metadata", str, dict, default="")
        try:
            fields = json.loads(metadata or "{}") if isinstance(metadata, str) else metadata
            name = fields.get("func_name") or ""
        except (ValueError, AttributeError, RecursionError):
            raise row.wrong("metadata", "must be a JSON object") from None
        if not isinstance(name, str) or (name and not name.isidentifier()):
            raise row.wrong("metadata", f"has a func_name that is no name: {str(name)[:80]!r}")
        return name


def read_tests(text: str, where: str, key: str) -> list[Any]:
    """Return the tests of JSON text, or of base64 of zlib of a pickled JSON text. Raises ValueError
    naming record and key."""
    try:
        tests = _loads(text if "[" in text else unpacked(text))  # base64 never has a bracket
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: the key {key!r} is neither JSON nor packed JSON: {error}"
        ) from None
    if not isinstance(tests, list):
        raise ValueError(f"{where}: the key {key!r} must hold a list of tests")
    return tests


def _loads(text: str) -> Any:
    """Parse JSON. Raises ValueError before parsing if it has so many values that they would fill
    the memory.
    """
    if _values(text) > PARTS:
        raise ValueError(f"more than {PARTS} values")
    return json.loads(text)


def _values(text: str) -> int:
    """Return an upper bound on the values of a JSON text: its commas and brackets outside of
    strings.
    """
    bare = STRING.sub("", text)
    return sum(map(bare.count, ",[{"))


def _parts(test: Any) -> int:
    """Return how many values a functional test has, whose input and output are JSON in turn."""
    if not isinstance(test, dict) or test.get("testtype") != "functional":
        return 1
    return sum(
        _values(text) for key in ("input", "output") if isinstance(text := test.get(key), str)
    )


def unpacked(text: str) -> str:
    """Return the text in base64 of zlib of its pickle. Raises ValueError if it is too large, or
    anything but one text."""
    try:
        decoder = zlib.decompressobj()
        data = decoder.decompress(base64.b64decode(text, validate=True), LARGEST)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from None
    if not decoder.eof:
        raise ValueError(f"cut off, or more than {LARGEST} bytes when decompressed")
    found = []
    # this reads the opcodes and runs nothing
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number == OPCODES:
            raise ValueError(
                f"a pickle of more than {OPCODES} opcodes: it must hold one text and nothing else"
            )
        if opcode.name in TEXTS:
            found.append(argument)
        elif opcode.name not in HARMLESS:
            raise ValueError(f"a pickle with {opcode.name}: it must hold one text and nothing else")
    if len(found) != 1:
        raise ValueError(f"a pickle with {len(found)} texts instead of one")
    return found[0]


def _case(row: Row, test: Any, function: str) -> FunctionCase | StdinCase:
    """Return one test case. Raises ValueError if it is wrong."""
    if not isinstance(test, dict):
        raise row.wrong(
            "private_test_cases", "or 'public_test_cases' holds a test that is no object"
        )
    inner = Row(f"{row.where}, a test", test)
    given, expected, kind = (inner.get(key, str) for key in ("input", "output", "testtype"))
    if kind == "stdin":
        return StdinCase(given, expected)
    if kind != "functional":
        raise inner.wrong("testtype", f"must be stdin or functional, not {kind[:80]!r}")
    if not function:
        raise row.wrong("metadata", "names no func_name, but there are functional tests")
    if not expected.strip():
        raise inner.wrong("output", "is empty")
    try:
        values = [
            json.loads(line, parse_int=_integer)
            for line in [*given.split("\n"), expected]
            if line.strip()
        ]
        if not writable(values):
            raise ValueError("half a character (a lone surrogate)")
        return FunctionCase(tuple(values[:-1]), values[-1])
    except (ValueError, RecursionError) as error:
        raise inner.wrong("input", f"or 'output' is not one JSON value per line: {error}") from None


def _integer(digits: str) -> int:
    """Return an integer, also one longer than the 4,300 digits that int() reads; a few tests have
    such.
    """
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"an integer of more than {LONGEST_INTEGER} digits")
    return int(Decimal(digits))


def _json_text(row: Row, key: str) -> str:
    """Return a value as JSON text, also where the hub's reader has parsed it already."""
    value = row.get(key, str, list)
    return value if isinstance(value, str) else json.dumps(value)


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
