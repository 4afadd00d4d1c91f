"""The base of programming benchmarks: from a response to its program, and to the score.

A chat model's program is a fenced block (``` or ~~~) with the language python, py or none. The
fence may follow the mark of a list item, and "```python" may follow words on its line. Of several
blocks one is chosen:

1. If the tests call a function: the last block that defines this function.
2. Otherwise: the last block of Python that does more than name values (`is_plain_output`).
3. If there is no such block: the last block.

A block of more than 20,000 characters is not parsed, and rule 2 accepts it. A block that is still
open at the end of the response counts too. A block that is indented under a list item loses that
indentation. Without a block the verdict is "no-answer".

A base model's response continues the prompt. It is cut at the beginning of the next definition or
statement, because base models often continue with another problem. A truncated response scores 0.
gspo/rewards/code/grader.py documents the limits on programs and the comparison of outputs.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from typing import ClassVar, Protocol

from gspo.data.samples import Score
from gspo.io.ranges import SPEED_ONLY, ranged
from gspo.rewards.code.grader import Asserts, FunctionCase, StdinCase, Submission
from gspo.tasks.base import Answer
from gspo.tasks.benchmarks.base import Benchmark
from gspo.tasks.graded_programs import GradedPrograms

# also py3, python3.11 and {.python}, but not pycon, which is a session
PYTHON = re.compile(r"\{?\.?(?:py(?:thon)?[\d.]*)?\}?")
LANGUAGE = re.compile(r"[\w.+#{}-]+")
FENCE = re.compile(r"((?:\s*(?:[-*+]|\d{1,3}[.)])(?=\s))*\s*)(`{3,}|~{3,})(.*)")
FENCE_AFTER_WORDS = re.compile(r"(.*\s)(`{3,}|~{3,})((?:python|py)\d?\s*)\Z")
# Python's parser recurses in C. If a library has raised sys.setrecursionlimit, as torch._dynamo
# does, a long text that is nested deeply overflows the stack and kills the process.
MAX_PARSED_CHARS = 20_000
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
# LiveCodeBench's prompt, lcb_runner/prompts/code_generation.py.
EXPERT = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests."
    "\n\n"
    "### Question:\n{}\n\n### Format: {}\n```python\n{}\n```\n\n"
    "### Answer: (use the provided format with backticks)\n\n"
)
READ_STDIN = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
    "test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when "
    "the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT."
)


class ProblemTests(Protocol):
    """The tests of a problem as an answer holds them, which may be encoded as in their file."""

    @property
    def entry_point(self) -> str: ...
    @property
    def preamble(self) -> str: ...
    @property
    def start(self) -> str: ...
    def decoded(self) -> Tests: ...


@dataclass(frozen=True, eq=False)
class Tests:
    """The tests of a problem, and the parts of a program that the problem gives.

    There is one object per problem. The grader identifies problems by it."""

    entry_point: str  # the function that the tests call, "" for whole programs
    cases: tuple[FunctionCase | StdinCase | Asserts, ...]
    preamble: str = ""  # code of the problem, put before a program
    start: str = ""  # the start of the function, which a completion continues

    def decoded(self) -> Tests:
        """Return the tests themselves."""
        return self


@dataclass
class CodeBenchmark(GradedPrograms, Benchmark):
    """A benchmark whose answers are programs."""

    slots: int = ranged(1, least=1, most=64, metadata=SPEED_ONLY)
    cpu_seconds: float = ranged(3.0, least=0.01, most=60)
    wall_seconds: float = ranged(10.0, least=0.01, most=600)
    memory_mb: int = ranged(1024, least=64, most=65536)
    allow_weak_sandbox: bool = False

    # "the maximum generation length is set to 32,768 tokens", DeepSeek-R1 on contests
    # (arXiv:2501.12948, model card)
    max_new_tokens: ClassVar[int] = 32_768
    stops: ClassVar[tuple[str, ...]] = ()  # the texts at which a completion ends

    wording = "instruct"  # some benchmarks have it as a setting

    def completes(self) -> bool:
        """Return whether responses continue the prompt."""
        return self.wording == "completion"

    def score(self, answers: list[Answer]) -> list[Score]:
        scores = {}  # by the index of the answer
        submissions = {}  # by the index of the answer
        decoded = {}  # decoded once for all responses to a problem
        for index, (problem, text, ended) in enumerate(answers):
            code, verdict = self.program(problem.answer, text, ended)
            if verdict:
                scores[index] = Score(0.0, verdict)
                continue
            if id(problem.answer) not in decoded:
                decoded[id(problem.answer)] = problem.answer.decoded()
            tests = decoded[id(problem.answer)]
            submissions[index] = Submission(code, self.entry_point(tests, code), tests.cases)
        graded = self.grade(list(submissions.values()))
        scores |= zip(submissions, graded, strict=True)
        return [scores[index] for index in range(len(answers))]

    def program(self, answer: ProblemTests, text: str, ended: bool) -> tuple[str, str]:
        """Return (program, "") of a response, or ("", verdict) if there is no program."""
        text = text.replace("\r\n", "\n")
        if self.completes():
            ends = [text.index(stop) for stop in self.stops if stop in text]
            if not ended and not ends:
                return "", "truncated"
            code = text[: min(ends, default=len(text))]
            program = answer.start + code
        elif not ended:
            return "", "truncated"
        else:
            code = answer_block(text, answer.entry_point)
            program = with_preamble(answer.preamble, code)
        return (program, "") if code.strip() else ("", "no-answer")

    def entry_point(self, tests: Tests, code: str) -> str:
        """Return the name of the function that the tests call in this program."""
        return tests.entry_point


def answer_block(text: str, entry_point: str = "") -> str:
    """Return the block of a response that is its answer, "" if there is none.

    The head of this file has the rule."""
    blocks = [
        code for language, code in code_blocks(text) if PYTHON.fullmatch(language) and code.strip()
    ]
    if entry_point:
        candidates = [code for code in blocks if defines(code, entry_point)]
    else:
        candidates = [code for code in blocks if not is_plain_output(code)]
    if not candidates:
        candidates = blocks
    return candidates[-1] if candidates else ""


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a text in their order, as (language in lower case, lines).

    Fences that are indented deeper than the opening one come in pairs in the examples of a
    docstring, and belong to the block. If their number is odd, the last one closes the block. A
    fence with a language, without such indentation, opens the next block."""
    blocks = []
    block: _OpenBlock | None = None
    for line in text.split("\n"):
        if block and not block.ends_at(line):
            block.add(line)
            continue
        if block:
            was_closed_before = len(block.deeper_fences) % 2 == 1
            before, _, after = line.partition(block.fence)
            opens_next = not before.strip() and is_language(after)
            if not was_closed_before:
                block.add(before)
            blocks.append(block.finished())
            block = None
            if not opens_next and not was_closed_before:
                continue
        opening = FENCE.match(line)
        indentation = len(opening[1]) if opening else len(line) - len(line.lstrip())
        opening = opening or FENCE_AFTER_WORDS.match(line)
        # a quotation opens and closes on one line, and is no block
        if opening and opening[2][:3] not in opening[3]:
            words = opening[3].lower().split()
            block = _OpenBlock(words[0] if words else "", opening[2], indentation)
    if block:
        blocks.append(block.finished())
    return blocks


def is_language(text: str) -> bool:
    """Return whether the text behind a fence names a language: ```python, but not ```Better: so."""
    words = text.split()
    if not words or text[:1].isspace() or not LANGUAGE.fullmatch(words[0]):
        return False
    return len(words) == 1 or PYTHON.fullmatch(words[0].lower()) is not None


class _OpenBlock:
    """A fenced block whose end has not been read."""

    def __init__(self, language: str, fence: str, indentation: int):
        self.language = language
        self.fence = fence
        self.indentation = indentation
        self.lines: list[str] = []
        # the indices of lines that are fences with a deeper indentation
        self.deeper_fences: list[int] = []

    def ends_at(self, line: str) -> bool:
        """Return whether a line ends the block, and note a fence that is indented deeper."""
        stripped = line.strip()
        if not stripped.endswith(self.fence) and not stripped.startswith(self.fence):
            return False
        columns = line.expandtabs(4)
        blanks = len(columns) - len(columns.lstrip())
        is_deeper = blanks > self.indentation + 1 and stripped.startswith(self.fence)
        if is_deeper:
            self.deeper_fences.append(len(self.lines))
        return not is_deeper

    def add(self, line: str) -> None:
        """Add a line without the indentation of the block."""
        self.lines.append(without_indentation(line, self.indentation))

    def finished(self) -> tuple[str, str]:
        """Return the language and the text, up to the deeper fence that closes the block if any."""
        if len(self.deeper_fences) % 2 == 1:
            self.lines = self.lines[: self.deeper_fences[-1]]
        return self.language, "\n".join(self.lines).rstrip() + "\n"


def without_indentation(line: str, columns: int) -> str:
    """Return a line without its first `columns` blanks, or without all its leading blanks."""
    blanks = len(line) - len(line.lstrip())
    return line[min(columns, blanks) :]


def defines(code: str, entry_point: str) -> bool:
    """Return whether code defines a function or a method, or gives this name to an object."""
    name = re.escape(entry_point.rpartition(".")[2])
    pattern = rf"^\s*(?:async\s+)?def\s+{name}\b|^{name}\s*=|\bas\s+{name}\b"
    return re.search(pattern, code, re.MULTILINE) is not None


def is_plain_output(code: str) -> bool:
    """Return whether a block shows the output of a program.

    Such a block is no Python, or has only values such as 42 or YES. A block of more than
    MAX_PARSED_CHARS characters is not parsed and counts as a program."""
    if len(code) > MAX_PARSED_CHARS:
        return False
    try:
        statements = parsed(code).body
    except ValueError:
        return True
    values = (
        ast.Constant,
        ast.Name,
        ast.List,
        ast.Tuple,
        ast.Set,
        ast.Dict,
        ast.UnaryOp,
        ast.BinOp,
    )
    return all(
        isinstance(statement, ast.Expr) and isinstance(statement.value, values)
        for statement in statements
    )


def parsed(code: str) -> ast.Module:
    """Return the syntax tree of code. Raises ValueError if it is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about "\d" in strings that are not raw
            return ast.parse(code)
    # the last two are raised for code that is nested too deeply
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def with_preamble(preamble: str, code: str) -> str:
    """Return the preamble and the code, with imports from __future__ first, as Python demands."""
    if not preamble:
        return code
    return "".join(FUTURE.findall(code)) + preamble + FUTURE.sub("", code)
