"""The rules by which a program's output agrees with the expected output.

A contest's problem may accept numbers within a tolerance, letters of either case, or any of several
answers. A checker decides on the answers: a program of the problem's author that sees the input,
the expected output and the printed output. It runs in the sandbox, in a process of its own.
"""

import json
import re
from dataclasses import dataclass

from gspo.rewards.sandbox.values import near, same_output

CODEFORCES_TOLERANCE = 1e-6  # relative or absolute, as most of Codeforces' problems have it
# testlib's checkers of real numbers, and their tolerance: relative or absolute, but that of rcmp is
# absolute
TESTLIB_TOLERANCES = {"rcmp": 1.5e-6, "rcmp4": 1e-4, "rcmp6": 1e-6, "rcmp9": 1e-9}
TESTLIB_CASELESS = ("yesno", "nyesno")
TESTLIB_LINES = ("fcmp", "lcmp")
TESTLIB_WORDS = ("hcmp", "icmp", "ncmp", "wcmp", "nwcmp")
TESTLIB = (*TESTLIB_CASELESS, *TESTLIB_TOLERANCES, *TESTLIB_LINES, *TESTLIB_WORDS)
SEVERAL = re.compile(
    r"\b(?:multiple|several|many|more than one)\b[^.]*(?<!not )\b(?:print|output|find|report)\s+any\b",
    re.IGNORECASE,
)
# For a checker that reads three files, as testlib's do: gives it their texts.
AS_FILES = """
import builtins, io, json, sys
_texts = json.loads(sys.stdin.read())
_open = builtins.open
def _open_text(name, *args, **kw):
    return io.StringIO(_texts[name]) if name in _texts else _open(name, *args, **kw)
builtins.open = _open_text
sys.argv = ["checker.py", "input.txt", "expected.txt", "output.txt"]
sys.stdin = io.StringIO("")
__name__ = "__main__"
"""
AS_FUNCTION = """
_texts = __import__("json").loads(__import__("sys").stdin.read())
print(int(bool(check(_texts["input.txt"], _texts["expected.txt"], _texts["output.txt"]))))
"""


@dataclass(frozen=True)
class OutputRule:
    """The rule by which a printed text agrees with the expected text."""

    # of a number that is written with a point or an exponent, relative or absolute
    tolerance: float = 0.0
    # the name of a checker of testlib, which decides instead
    testlib: str = ""
    # Python: a function check(input, expected, output), or a program that reads three files
    checker: str = ""


def agrees(rule: OutputRule, expected: str, printed: str) -> bool:
    """Return whether two outputs agree by a rule without Python code.

    The checkers of testlib compare words and ignore where lines end, but for two: lcmp compares the
    words of each line, and fcmp the lines. Those of real numbers have a tolerance for integers too.
    """
    if not rule.testlib:
        return same_output(expected, printed, rule.tolerance)
    if rule.testlib == "fcmp":
        return expected.rstrip("\n").split("\n") == printed.rstrip("\n").split("\n")
    if rule.testlib == "lcmp":
        expected_lines = expected.strip().split("\n")
        printed_lines = printed.strip().split("\n")
        return [line.split() for line in expected_lines] == [line.split() for line in printed_lines]
    expected_words = expected.split()
    printed_words = printed.split()
    if rule.testlib in TESTLIB_CASELESS:
        expected_words = expected.lower().split()
        printed_words = printed.lower().split()
        if not {"yes", "no"}.issuperset(printed_words):
            return False
    tolerance = TESTLIB_TOLERANCES.get(rule.testlib)
    if tolerance is None:
        return expected_words == printed_words
    return len(expected_words) == len(printed_words) and all(
        near(x, y, tolerance, is_relative=rule.testlib != "rcmp")
        for x, y in zip(expected_words, printed_words, strict=True)
    )


def checker_program(checker: str) -> str:
    """Return a program that reads the three texts as JSON and runs the checker on them.

    Its last line is 1 if the checker accepts the output."""
    if re.search(r"^def check\(", checker, re.MULTILINE):
        return checker + AS_FUNCTION
    return AS_FILES + checker


def checker_input(stdin: str, expected: str, printed: str) -> str:
    """Return the input of `checker_program`."""
    return json.dumps({"input.txt": stdin, "expected.txt": expected, "output.txt": printed})


def accepts(output: str) -> bool:
    """Return whether a checker accepts: its last word is a number above 0, or True or OK."""
    words = output.split()
    last = words[-1].lower() if words else ""
    if last in ("true", "ok"):
        return True
    return re.fullmatch(r"\d+(?:\.\d+)?", last) is not None and float(last) > 0
