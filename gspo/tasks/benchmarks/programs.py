"""What benchmarks of programs share: from a response to a program, and from a program to a score.

The answer of a chat model is one of its fenced blocks (``` or ~~~) whose language is python, py or
not given: where the tests call a function, the last block that defines it; else the last block that
is no plain output, which means that it is Python and does more than name values. If no block is
such, it is the last one. A block that is still open where the response ended counts too, and one
that is indented under a list item loses that indentation. Without a block the verdict is
"no-answer". A base model's response continues the prompt and is cut where the next definition or
statement begins, so that a model which never stops is judged by what it wrote for this problem. A
response that was cut off by the token limit scores 0. gspo/rewards/code/grader.py documents what
programs may use, and what counts as equal.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from typing import ClassVar

from gspo.data.samples import Problem, Score
from gspo.io.ranges import SPEED_ONLY, ranged
from gspo.rewards.code.grader import Asserts, CodeGrader, FunctionCase, StdinCase, Submission
from gspo.tasks.benchmarks.base import Benchmark

PYTHON = ("", "python", "py", "python3")
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
# LiveCodeBench's prompt, lcb_runner/prompts/code_generation.py.
EXPERT = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests.\n\n"
    "### Question:\n{}\n\n### Format: {}\n```python\n{}\n```\n\n"
    "### Answer: (use the provided format with backticks)\n\n"
)
READ_STDIN = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample "
    "inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the "
    "inputs, runs the algorithm and writes output to STDOUT."
)


@dataclass(frozen=True, eq=False)
class Tests:
    """How a problem's programs are put together and judged. There is one object per problem, and
    the grader tells problems apart by it."""

    entry_point: str
    cases: tuple[FunctionCase | StdinCase | Asserts, ...]
    preamble: str = ""  # code that the problem gives, put before a program
    start: str = ""  # the start of the function, which a completion continues


@dataclass
class CodeBenchmark(Benchmark):
    """Problems whose answers are programs. Up to `slots` run at a time, within limits on CPU
    seconds, waiting and megabytes."""

    slots: int = ranged(1, least=1, most=64, metadata=SPEED_ONLY)
    cpu_seconds: float = ranged(3.0, least=0.01, most=60)
    wall_seconds: float = ranged(10.0, least=0.01, most=600)
    memory_mb: int = ranged(1024, least=64, most=65536)
    allow_weak_sandbox: bool = False

    # "the maximum generation length is set to 32,768 tokens", DeepSeek-R1 on contests
    # (arXiv:2501.12948, model card)
    max_new_tokens: ClassVar[int] = 32_768
    stops: ClassVar[tuple[str, ...]] = ()  # the texts at which a completion ends

    def __post_init__(self) -> None:
        super().__post_init__()
        self._grader = CodeGrader(
            self.slots, self.cpu_seconds, self.wall_seconds, self.memory_mb, self.allow_weak_sandbox
        )

    def completes(self) -> bool:
        """Return whether responses continue the prompt."""
        return False

    def score(self, answers: list[tuple[Problem, str, bool]]) -> list[Score]:
        """Score 1 if all tests pass, else 0. A program that could not be run, by no fault of its
        own, has no reward.
        """
        scores: list[Score | None] = []
        submissions, places = [], []
        tests: dict[int, Tests] = {}
        for place, (problem, text, ended) in enumerate(answers):
            code, verdict = self.program(problem.answer, text, ended)
            scores.append(Score(0.0, verdict) if verdict else None)
            if not verdict:
                if id(problem.answer) not in tests:  # decoded once for all responses to a problem
                    tests[id(problem.answer)] = self.tests(problem.answer)
                decoded = tests[id(problem.answer)]
                submissions.append(Submission(code, self.entry_point(decoded, code), decoded.cases))
                places.append(place)
        for place, grade in zip(places, self._grader.grade(submissions), strict=True):
            reward = None if grade.verdict == "sandbox-error" else float(grade.verdict == "pass")
            scores[place] = Score(reward, grade.verdict)
        return scores

    def program(self, answer: Tests, text: str, ended: bool) -> tuple[str, str]:
        """Return the program of a response and "", or "" and the verdict if there is no program."""
        text = text.replace("\r\n", "\n")
        if self.completes():
            places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
            if not ended and not places:
                return "", "truncated"
            text = text[: min(places, default=len(text))]
            return (answer.start + text, "") if text.strip() else ("", "no-answer")
        if not ended:
            return "", "truncated"
        code = answer_block(text, self.called_function(answer))
        return (with_preamble(answer.preamble, code), "") if code.strip() else ("", "no-answer")

    def called_function(self, answer: Tests) -> str:
        """Return the name of the function that a problem's tests call, "" if they run whole
        programs.
        """
        return answer.entry_point

    def tests(self, answer: Tests) -> Tests:
        """Return the decoded tests of a problem."""
        return answer

    def entry_point(self, tests: Tests, code: str) -> str:
        """Return the name of the function that the tests call in a program."""
        return tests.entry_point

    def ready(self) -> dict[str, str]:
        """Start the sandbox and return its layers; the first call in a process runs a few attacks
        on it.
        """
        return self._grader.layers()

    def close(self) -> None:
        """End the processes that run programs."""
        self._grader.close()


def answer_block(text: str, entry_point: str = "") -> str:
    """Return the block of a response that is its answer, "" if there is none. The rule is at the
    head of this file.
    """
    blocks = [code for language, code in code_blocks(text) if language in PYTHON and code.strip()]
    if entry_point:
        chosen = [code for code in blocks if defines(code, entry_point)]
    else:
        chosen = [code for code in blocks if not is_plain_output(code)]
    return (chosen or blocks or [""])[-1]


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a text in their order, each as its language in lower case and its
    lines.
    """
    found: list[tuple[str, str]] = []
    block: list[str] = []
    language: str | None = None  # the language of the block that is open
    fence, indentation = "", 0
    for line in text.split("\n"):
        mark = line.strip()
        if language is None:
            opening = re.match(r"(`{3,}|~{3,})(.*)", mark)
            # otherwise it opens and closes on one line, as a quotation
            if opening and opening[1][:3] not in opening[2]:
                fence, language, block = opening[1], (opening[2].lower().split() or [""])[0], []
                indentation = len(line) - len(line.lstrip())
        elif (mark.endswith(fence) or mark.startswith(fence)) and fence in line:
            block.append(without_indentation(line[: line.index(fence)], indentation))
            found.append((language, "\n".join(block).rstrip() + "\n"))
            language = None
        else:
            block.append(without_indentation(line, indentation))
    if language is not None:
        found.append((language, "\n".join(block).rstrip() + "\n"))
    return found


def without_indentation(line: str, columns: int) -> str:
    """Return a line without so many blanks at its head, or without all of them if there are fewer."""
    blanks = len(line) - len(line.lstrip())
    return line[min(columns, blanks) :]


def defines(code: str, entry_point: str) -> bool:
    """Return whether code defines a function, also as a method of a class, or gives a name to one."""
    name = re.escape(entry_point.rpartition(".")[2])
    return (
        re.search(
            rf"^\s*(?:async\s+)?def\s+{name}\b|^{name}\s*=|\bas\s+{name}\b", code, re.MULTILINE
        )
        is not None
    )


def is_plain_output(code: str) -> bool:
    """Return whether a block shows what a program prints: it is no Python, or only values such as
    42 or YES.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about "\d" in strings that are not raw
            statements = ast.parse(code).body
    # the last two are raised for code that is nested too deeply
    except (SyntaxError, ValueError, RecursionError, MemoryError):
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
    return all(isinstance(each, ast.Expr) and isinstance(each.value, values) for each in statements)


def with_preamble(preamble: str, code: str) -> str:
    """Return the code after the preamble, with imports from __future__ first, as Python demands."""
    return "".join(FUTURE.findall(code)) + preamble + FUTURE.sub("", code) if preamble else code
