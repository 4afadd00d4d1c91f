"""LiveCodeBench (Jain et al., arXiv:2403.07974): contest problems by date.

The reward is 1 if all public and private tests pass, else 0. The dates can be chosen after the end
of a model's training data.

Records, as released: {question_content, platform, contest_date, starter_code, difficulty,
public_test_cases, metadata, private_test_cases}. Tests are a JSON list of {input, output, testtype:
stdin or functional}. Functional tests call the function metadata["func_name"], or the method of
this name if the program has a class `Solution`. Each line of their
input is the JSON value of an argument.

Private tests may be base64 of zlib of a pickle of the JSON text. Unpickling could run any code, so
nothing is unpickled. Instead the opcodes are read, and all opcodes are refused that a pickle of a
text does not need. Tests are decoded when the file is read, to check them, and again when a
response is judged. All decoded tests together would fill the memory.
"""

import base64
import binascii
import json
import pickletools
import re
import zlib
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any, ClassVar

from gspo.io.errors import RowError, SettingError
from gspo.rewards.code.grader import FunctionCase, StdinCase
from gspo.tasks.benchmarks.base import Item
from gspo.tasks.benchmarks.data_row import DataRow, writable
from gspo.tasks.benchmarks.programs import EXPERT, READ_STDIN, CodeBenchmark, Tests

# decompressed tests of a record; a few kB of zlib can hold gigabytes
MAX_DECOMPRESSED_BYTES = 1 << 28
MAX_OPCODES = 16  # a pickled text has five
# lists, objects and values in the JSON of a problem's tests; each takes up to 60 bytes of memory
MAX_VALUES = 1 << 23
JSON_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
MAX_INTEGER_DIGITS = 30_000  # the grader accepts at most 39,000
TEXT_OPCODES = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
# the other opcodes of a pickled text
HARMLESS_OPCODES = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}
USE_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your "
    "code within delimiters."
)
# LiveCodeBench's own grader puts this before every program, lcb_runner/evaluation/testing_util.py.
MODULES = """
    string re datetime collections heapq bisect copy math random statistics itertools functools
    operator io sys json
"""
IMPORTS = "".join(
    [
        *(f"from {name} import *\n" for name in [*MODULES.split(), "builtins", "typing"]),
        *(f"import {name}\n" for name in MODULES.split()),
        "sys.setrecursionlimit(50000)\n",
    ]
)


@dataclass(frozen=True, eq=False)
class Packed:
    """The tests of a problem, not decoded, as in the file."""

    where: str
    function: str
    public: str
    private: str
    preamble: str = IMPORTS
    start: ClassVar[str] = ""  # no problem of LiveCodeBench gives the start of the function

    @property
    def entry_point(self) -> str:
        """The function that the tests call, "" for whole programs."""
        return self.function

    def decoded(self) -> Tests:
        """Return the decoded tests.

        Raises ValueError, which names the record, if they cannot be decoded."""
        tests = read_tests(self.public, self.where, "public_test_cases")
        tests += read_tests(self.private, self.where, "private_test_cases")
        row = DataRow(self.where, {})
        if not tests:
            raise row.wrong(
                "private_test_cases", "and 'public_test_cases' are empty: every program would pass"
            )
        if not writable(tests):
            raise row.wrong(
                "private_test_cases",
                "or 'public_test_cases' holds half a character (a lone surrogate)",
            )
        if sum(map(_count_values_of_test, tests)) > MAX_VALUES:
            raise row.wrong(
                "private_test_cases", f"or 'public_test_cases' holds more than {MAX_VALUES} values"
            )
        cases = tuple(_case(row, test, self.function) for test in tests)
        return Tests(self.function, cases, self.preamble)


@dataclass
class LiveCodeBench(CodeBenchmark):
    """Problems with start_date <= contest date <= end_date.

    Both are ISO dates, or "" for no bound."""

    name: str = "livecodebench"
    hub: str = "hf://datasets/livecodebench/code_generation_lite/test*.jsonl"
    start_date: str = "2024-10-01"
    end_date: str = "2025-02-28"
    cpu_seconds: float = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("start_date", "end_date"):
            value = getattr(self, name)
            if value and not _is_date(value):
                problem = "must be a date such as 2024-10-01, or empty"
                raise SettingError(f"{self.key}.{name}", value, problem)
        if self.start_date and self.end_date and self.start_date > self.end_date:
            problem = f"is after {self.key}.end_date={self.end_date}"
            raise SettingError(f"{self.key}.start_date", self.start_date, problem)

    def item(self, row: DataRow, training: bool) -> Item | None:
        # the date is a text, or a time if the reader has parsed it
        day = str(row.values.get("contest_date", ""))[:10]
        if not _is_date(day):
            raise row.wrong(
                "contest_date", "is missing, or does not begin with a date such as 2024-10-01"
            )
        if not training and not (self.start_date or day) <= day <= (self.end_date or day):
            return None
        text = row.text("question_content")
        starter = row.text("starter_code", default="")
        function = self._function(row)
        public = _json_text(row, "public_test_cases")
        private = _json_text(row, "private_test_cases")
        packed = Packed(row.where, function, public, private)
        form = USE_STARTER if starter else READ_STDIN
        prompt = EXPERT.format(text, form, starter or "# YOUR CODE HERE")
        family = f"{row.text('platform', default='')} {row.text('difficulty', default='')}".strip()
        packed.decoded()  # raises ValueError for tests that cannot be decoded
        return Item(text, prompt, packed, family)

    def entry_point(self, tests: Tests, code: str) -> str:
        """Return the function, or the method of `Solution` if the program has that class."""
        if tests.entry_point and "class Solution" in code:
            return f"Solution.{tests.entry_point}"
        return tests.entry_point

    def _why_empty(self) -> str:
        start = self.start_date or "ever"
        end = self.end_date or "ever"
        return f"no problem has a contest_date from {start} to {end}"

    def _function(self, row: DataRow) -> str:
        """Return the name of the function of functional tests, "" if the record has none."""
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
    """Return the tests of JSON text, or of base64 of zlib of a pickled JSON text.

    Raises ValueError, which names record and key."""
    try:
        if "[" not in text:  # base64 never has a bracket
            text = unpacked(text)
        if _max_values(text) > MAX_VALUES:  # they would fill the memory
            raise ValueError(f"more than {MAX_VALUES} values")
        tests = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(where, key, f"is neither JSON nor packed JSON: {error}") from None
    if not isinstance(tests, list):
        raise RowError(where, key, "must hold a list of tests")
    return tests


def _max_values(text: str) -> int:
    """Return an upper bound on the number of values of a JSON text.

    It is the number of commas and brackets outside of strings."""
    without_strings = JSON_STRING.sub("", text)
    return sum(map(without_strings.count, ",[{"))


def _count_values_of_test(test: Any) -> int:
    """Return an upper bound on the number of values of a test.

    The input and the output of a functional test are JSON themselves."""
    if not isinstance(test, dict) or test.get("testtype") != "functional":
        return 1
    texts = [test.get("input"), test.get("output")]
    return sum(_max_values(text) for text in texts if isinstance(text, str))


def unpacked(text: str) -> str:
    """Return the text in base64 of zlib of its pickle.

    Raises ValueError if the pickle is too large, or is anything but a text."""
    try:
        decoder = zlib.decompressobj()
        data = decoder.decompress(base64.b64decode(text, validate=True), MAX_DECOMPRESSED_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from None
    if not decoder.eof:
        raise ValueError(f"cut off, or more than {MAX_DECOMPRESSED_BYTES} bytes when decompressed")
    texts = []
    # this reads the opcodes and runs nothing
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number == MAX_OPCODES:
            raise ValueError(
                f"a pickle of more than {MAX_OPCODES} opcodes: "
                "it must hold one text and nothing else"
            )
        if opcode.name in TEXT_OPCODES:
            texts.append(str(argument))
        elif opcode.name not in HARMLESS_OPCODES:
            raise ValueError(f"a pickle with {opcode.name}: it must hold one text and nothing else")
    if len(texts) != 1:
        raise ValueError(f"a pickle with {len(texts)} texts instead of one")
    return texts[0]


def _case(row: DataRow, test: Any, function: str) -> FunctionCase | StdinCase:
    """Return the test as a case for the grader. Raises ValueError if it is invalid."""
    if not isinstance(test, dict):
        raise row.wrong(
            "private_test_cases", "or 'public_test_cases' holds a test that is no object"
        )
    inner = DataRow(f"{row.where}, a test", test)
    input_text = inner.get("input", str)
    expected = inner.get("output", str)
    kind = inner.get("testtype", str)
    if kind == "stdin":
        return StdinCase(input_text, expected)
    if kind != "functional":
        raise inner.wrong("testtype", f"must be stdin or functional, not {kind[:80]!r}")
    if not function:
        raise row.wrong("metadata", "names no func_name, but there are functional tests")
    if not expected.strip():
        raise inner.wrong("output", "is empty")
    lines = [line for line in [*input_text.split("\n"), expected] if line.strip()]
    try:
        values = [json.loads(line, parse_int=_integer) for line in lines]
        if not writable(values):
            raise ValueError("half a character (a lone surrogate)")
        return FunctionCase(tuple(values[:-1]), values[-1])
    except (ValueError, RecursionError) as error:
        raise inner.wrong("input", f"or 'output' is not one JSON value per line: {error}") from None


def _integer(digits: str) -> int:
    """Return an integer, which may be longer than the 4,300 digits that int() accepts.

    A few tests have such integers."""
    if len(digits) > MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer of more than {MAX_INTEGER_DIGITS} digits")
    return int(Decimal(digits))


def _json_text(row: DataRow, key: str) -> str:
    """Return a value as JSON text, even if the hub's reader has parsed it."""
    value = row.get(key, str, list)
    return value if isinstance(value, str) else json.dumps(value)


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
