"""Published programming problems: HumanEval, MBPP and rated problem sets.

The reward is 1 if all tests pass, else 0. `wording` chooses the form of the prompt. "instruct" is
an instruction that asks for a fenced block. "completion", for base models (with
prompt.format=plain), is a text that the response continues. See gspo/tasks/benchmarks/programs.py.
"""

import ast
import json
from dataclasses import dataclass, replace
from typing import ClassVar

from gspo.io.errors import SettingError
from gspo.io.ranges import choice, ranged
from gspo.rewards.code.grader import Asserts, StdinCase
from gspo.rewards.code.outputs import CODEFORCES_TOLERANCE, SEVERAL, TESTLIB, OutputRule
from gspo.tasks.benchmarks.base import Item
from gspo.tasks.benchmarks.data_row import DataRow, writable
from gspo.tasks.benchmarks.programs import (
    EXPERT,
    MAX_PARSED_CHARS,
    READ_STDIN,
    CodeBenchmark,
    Tests,
    parsed,
)

EVALPLUS_MAX_NEW_TOKENS = 768  # evalplus/provider/base.py
HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # Chen et al., arXiv:2107.03374
MBPP_STOPS = ("[DONE]",)

# EvalPlus' instruction.
SCRIPT = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:\n```python\n{}\n```"
)
# The prompt of Austin et al., arXiv:2108.07732. Chat models are asked for a fenced block instead of
# [BEGIN] and [DONE].
MBPP = (
    "You are an expert Python programmer, and here is your task: {} "
    "Your code should pass these tests:\n\n{}\n"
)
BLOCK = "\nPut the whole program into one ```python code block."


@dataclass
class HumanEval(CodeBenchmark):
    """164 functions from signature and docstring (Chen et al., arXiv:2107.03374).

    Records: {task_id, prompt, entry_point, canonical_solution, test}. Programs may rely on the
    imports and helpers before the function in the prompt, so these are put before each program.
    """

    name: str = "humaneval"
    hub: str = "openai/openai_humaneval"
    wording: str = choice("instruct", ("instruct", "completion"))
    max_new_tokens: ClassVar[int] = EVALPLUS_MAX_NEW_TOKENS
    stops: ClassVar[tuple[str, ...]] = HUMANEVAL_STOPS

    def item(self, row: DataRow, training: bool) -> Item:
        text = row.text("prompt")
        entry_point = row.text("entry_point")
        preamble, function, _ = text.rpartition(f"def {entry_point}(")
        if not function:
            raise row.wrong("prompt", f"does not define {entry_point}, the entry_point")
        test = f"{row.text('test')}\ncheck({entry_point})\n"
        tests = Tests(entry_point, (Asserts(test, preamble),), preamble, text)
        prompt = text if self.completes() else SCRIPT.format(text.strip())
        return Item(text, prompt, tests)


@dataclass
class Mbpp(CodeBenchmark):
    """Small programs from one sentence and three asserts (Austin et al., arXiv:2108.07732).

    Records: {task_id, text, code, test_list, test_setup_code}, or sanitized {task_id, prompt, code,
    test_imports, test_list}. Test problems are 11-510, training problems 601-974. Problems 2, 3 and
    4 are the examples of the completion prompt.

    The prompt shows `shown_tests` of the asserts. With all 3, the standard, a policy can learn to
    return the expected values. With fewer, the remaining asserts are hidden tests. The asserts of
    problems 367 and 927 (367 is a test problem) build objects of the program's own class. A program
    cannot pass these objects to the tests, so both problems count as not solved.
    """

    name: str = "mbpp"
    hub: str = "google-research-datasets/mbpp"
    hub_config: str = "full"
    wording: str = choice("instruct", ("instruct", "completion"))
    shown_tests: int = ranged(3, least=1, most=3)
    cpu_seconds: float = 6.0  # one of the reference solutions takes 2.6 s
    hub_train_split = "train"
    one_file: ClassVar[bool] = True
    max_new_tokens: ClassVar[int] = EVALPLUS_MAX_NEW_TOKENS
    stops: ClassVar[tuple[str, ...]] = MBPP_STOPS

    def __post_init__(self) -> None:
        super().__post_init__()
        self._examples = ""

    def item(self, row: DataRow, training: bool) -> Item | None:
        number = row.get("task_id", int)
        if not (601 <= number <= 974 if training else 11 <= number <= 510):
            return None
        text = row.first("text", "prompt")
        code = row.text("code")
        asserts = row.texts("test_list")
        setup_lines = row.texts("test_imports", default=[])
        setup = "\n".join([*setup_lines, row.text("test_setup_code", default="")]).strip()
        entry_point = called_function(row, asserts, code)
        tests = Tests(entry_point, (Asserts("\n".join(asserts), setup),))
        question = MBPP.format(text, "\n".join(asserts[: self.shown_tests]))
        if self.completes():
            prompt = f"{self._worked_examples()}{question}[BEGIN]\n"
        else:
            prompt = question + BLOCK
        return Item(text, prompt, tests)

    def _worked_examples(self) -> str:
        """Return the three worked examples. Raises ValueError if the file does not have them."""
        if not self._examples:
            rows = {row.get("task_id", int): row for row in self._source("", "prompt").rows()}
            missing = [number for number in (2, 3, 4) if number not in rows]
            if missing:
                raise SettingError(
                    f"{self.key}.path",
                    self.path or self.hub,
                    f"task_id {missing[0]} is missing; 2, 3 and 4 are the examples of "
                    "wording=completion",
                )
            for row in (rows[2], rows[3], rows[4]):
                asserts = "\n".join(row.texts("test_list"))
                question = MBPP.format(row.first("text", "prompt"), asserts)
                self._examples += f"{question}[BEGIN]\n{row.text('code')}\n[DONE]\n\n"
        return self._examples


@dataclass
class RatedPrograms(CodeBenchmark):
    """Problems with a rating on Codeforces' scale, for an Elo rating of the policy.

    There is no standard file. Records: {id, prompt or statement, rating, tests: [{stdin, stdout},
    ...]}. The tests should be the hidden tests. Training records need no rating. Instead of tests
    they may have `input_output` with JSON {inputs, outputs} of texts, as in APPS and TACO. Such
    problems are left out if they call a function (fn_name).

    Numbers with a decimal point may have a relative or absolute error of `tolerance` (default
    1e-6). A record may have a `checker` (or `generated_checker`), which decides instead. It is the
    name of a checker of testlib, such as yesno or rcmp9, or Python code that the sandbox runs. The
    code is a function check(input, expected, output), or a program that reads three files and
    prints 1 or 0.

    A problem may accept several answers (`several_answers: true`, or a statement such as "if there
    are multiple answers, print any"). Without a checker right programs would fail, so the problem
    is left out and counted.
    """

    name: str = "codeforces"
    cpu_seconds: float = 4.0

    def item(self, row: DataRow, training: bool) -> Item | None:
        text = row.first("prompt", "statement", "question")
        rating = None
        if not training or "rating" in row.values:
            rating = row.rating("rating")
        rule = output_rule(row)
        several_answers = row.get("several_answers", bool, default=False) or SEVERAL.search(text)
        if several_answers and not rule.checker:
            self.skipped[training]["with several answers and no checker"] += 1
            return None
        if training and "tests" not in row.values:
            cases = apps_cases(row)
        else:
            cases = self._cases(row)
        if not cases:
            self.skipped[training]["with tests of a function, or none"] += 1
            return None
        prompt = EXPERT.format(text, READ_STDIN, "# YOUR CODE HERE")
        tests = Tests("", tuple(replace(case, rule=rule) for case in cases))
        return Item(text, prompt, tests, rating=rating)

    def _cases(self, row: DataRow) -> tuple[StdinCase, ...]:
        tests = row.get("tests", list)
        if not tests:
            raise row.wrong("tests", "is empty: every program would pass")
        cases = []
        for number, test in enumerate(tests, 1):
            if not isinstance(test, dict):
                raise row.wrong(
                    "tests", f"must hold objects with stdin and stdout; test {number} is none"
                )
            inner = DataRow(f"{row.where}, test {number}", test)
            cases.append(StdinCase(inner.get("stdin", str), inner.get("stdout", str)))
        return tuple(cases)


def output_rule(row: DataRow) -> OutputRule:
    """Return the rule that compares outputs of a record. Raises ValueError for invalid values."""
    tolerance = row.get("tolerance", int, float, default=CODEFORCES_TOLERANCE)
    if not 0 <= tolerance < 1:
        raise row.wrong("tolerance", "must be a number from 0 to 1")
    checker = row.get("checker", str, type(None), default=None)
    if not checker:
        checker = row.get("generated_checker", str, type(None), default=None)
    if not checker:
        return OutputRule(tolerance)
    name = checker.strip().removeprefix("std::").removesuffix(".cpp")
    if name in TESTLIB:
        return OutputRule(testlib=name)
    if "\n" not in checker.strip():
        raise row.wrong(
            "checker", f"is {name!r}: neither Python nor one of testlib's, {', '.join(TESTLIB)}"
        )
    return OutputRule(checker=checker)


def apps_cases(row: DataRow) -> tuple[StdinCase, ...]:
    """Return the tests of `input_output` in the form of APPS and TACO.

    The result is empty if the tests call a function."""
    try:
        tests = json.loads(row.text("input_output"))
        if tests.get("fn_name"):
            return ()
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        cases = tuple(StdinCase(stdin, stdout) for stdin, stdout in pairs)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise row.wrong(
            "input_output", f"must be JSON with inputs and outputs: {error!r}"
        ) from None
    texts = [text for case in cases for text in (case.stdin, case.stdout)]
    if not all(isinstance(text, str) and writable(text) for text in texts):
        raise row.wrong(
            "input_output", "must hold texts as inputs and outputs, without half characters"
        )
    return cases


def called_function(row: DataRow, asserts: list[str], code: str) -> str:
    """Return the name of the reference solution's function that the asserts call.

    Raises ValueError if a text is too long or is not Python, or if no such function is called.
    """
    for key, texts in (("code", [code]), ("test_list", asserts)):
        if max(map(len, texts), default=0) > MAX_PARSED_CHARS:
            raise row.wrong(key, f"holds more than {MAX_PARSED_CHARS:,} characters of Python")
    try:
        statements = parsed(code).body
        tests = [parsed(test) for test in asserts]
    except ValueError as error:
        raise row.wrong("code", f"or 'test_list' is not Python: {error}") from None
    defined = {node.name for node in statements if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for test in tests:
        for node in ast.walk(test):
            match node:
                case ast.Call(func=ast.Name(id=name)) if name in defined:
                    return name
    raise row.wrong("test_list", "calls no function that 'code' defines")
