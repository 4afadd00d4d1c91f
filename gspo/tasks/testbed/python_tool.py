"""An environment with a tool: arithmetic that is too long to do by heart, and Python in the sandbox
to do it.

    prompt         48*73-91=?
    policy         <py>48*73-91</py>
    environment    3413
    policy         #3413

A turn with `<py>...</py>` calls the tool; so does a turn in which a chat model writes the call as
it was taught to, <tool_call>{"name": "python", "arguments": {"code": "..."}}</tool_call>. The code
is one expression or a few lines, whose last expression is printed as Python's prompt would. A turn
without a call ends the episode; the reward is 1 if what follows its `#` is the right number. The
tool runs in the same sandbox, within the same limits, as code that is graded.
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from gspo.data.samples import Problem
from gspo.data.seeding import generator
from gspo.io.ranges import SPEED_ONLY, ranged
from gspo.rewards.sandbox.runner import CodeRunner, Limits, ProgramEnd, Slot
from gspo.tasks.base import check_split, draw_prompt
from gspo.tasks.environments.protocol import Environment, EnvironmentTask, Outcome
from gspo.tasks.testbed.chain_arithmetic import judge

CALL = re.compile(r"<py>(.*?)</py>", re.DOTALL)
CHAT_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# programs whose results are kept: the samples of a problem often call the tool with the same code
REMEMBERED = 4096
CODE_CHARACTERS = 1 << 16
OUTPUT_BYTES = 1 << 16
LOG_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# What runs in the sandbox: the code, whose last expression is printed as Python's prompt would.
PROGRAM = """\
import _ast, sys  # _ast is built in, while importing ast would take most of the time
try:
    body = compile(CODE, "<py>", "exec", _ast.PyCF_ONLY_AST).body
    last = _ast.Expression(body.pop().value) if body and isinstance(body[-1], _ast.Expr) else None
    names = {"__name__": "__main__"}
    exec(compile(_ast.Module(body, []), "<py>", "exec"), names)
    if last is not None and (value := eval(compile(last, "<py>", "eval"), names)) is not None:
        print(value)
except Exception as error:
    print(type(error).__name__)
    sys.exit(1)
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code and return what it prints; the value of a last expression is printed too.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}


@dataclass
class PythonTool(EnvironmentTask):
    """Products and sums of numbers of `digits` digits, and a Python tool. `slots` programs run at a
    time, each within the given CPU seconds and megabytes.

    factors   how many numbers are multiplied
    terms     how many numbers are then added or taken off
    tool      whether there is the tool; without it the first turn must have the answer
    log       random letters that the tool writes before each result, as "kqzf=3413": they make
              observations as long as wanted
    """

    name: str = "python_tool"
    turns: int = ranged(3, least=1)
    digits: int = ranged(2, least=1, most=9)
    factors: int = ranged(2, least=1, most=8)
    terms: int = ranged(1, least=0, most=20)
    tool: bool = True
    log: int = ranged(0, least=0, most=100_000)
    slots: int = ranged(1, least=1, most=64, metadata=SPEED_ONLY)
    cpu_seconds: float = ranged(0.5, least=0.01, most=60)
    wall_seconds: float = ranged(2.0, least=0.01, most=600)
    memory_mb: int = ranged(256, least=64, most=65536)
    allow_weak_sandbox: bool = False
    has_demonstrations: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wall_seconds < self.cpu_seconds:
            raise ValueError(
                f"wall_seconds={self.wall_seconds} is below cpu_seconds={self.cpu_seconds}"
            )
        if self.tool and self.turns < 2:
            raise ValueError(
                f"turns={self.turns} leaves no turn for the answer after a call of the tool; use 2 or more"
            )
        if self.tool and self.step_seconds <= self.cpu_seconds + self.wall_seconds:
            raise ValueError(
                f"step_seconds={self.step_seconds} is not above cpu_seconds={self.cpu_seconds} + wall_seconds="
                f"{self.wall_seconds}: slow code of the policy would pass for a failure of the environment"
            )
        limits = Limits(
            self.cpu_seconds, self.cpu_seconds, self.wall_seconds, self.memory_mb, OUTPUT_BYTES
        )
        self._runner = CodeRunner(limits, self.slots, self.allow_weak_sandbox)
        self._results: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        self._lock = threading.Lock()

    def evaluation_sets(self) -> list[str]:
        return [self.name]

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split."""
        check_split(split, self.evaluation_sets())
        rng = generator(seed, self.name, split, index)
        prompt = draw_prompt(split, lambda: f"{self._expression(rng)}=?")
        return Problem(
            self.name, index, prompt, answer=_value(prompt), family=f"{self.factors} factors"
        )

    @property
    def at_once(self) -> int:
        """As many as there are slots: so a program's time begins when its call does, and it always
        ends by its own limits."""
        return self.slots

    def environment(self, problem: Problem, position: tuple[int | str, ...]) -> Environment:
        return _Episode(self, problem, position)

    def demonstrated_turns(
        self, problem: Problem, wrong_step_rate: float, rng: random.Random
    ) -> list[str]:
        """Return the turns of an episode, the policy's first and the environment's in between. With
        probability `wrong_step_rate` the code, and again the answer, has another digit than it
        should."""
        expression = problem.prompt.removesuffix("=?")
        if not self.tool:
            return [f"#{_slip(str(problem.answer), wrong_step_rate, rng)}"]
        called = _slip(expression, wrong_step_rate, rng)
        result = str(_value(called))
        return [
            f"<py>{called}</py>",
            self.said(result, rng),
            f"#{_slip(result, wrong_step_rate, rng)}",
        ]

    def run(self, code: str) -> tuple[str, bool]:
        """Run code in the sandbox. Returns what it printed, and whether it went wrong."""
        with self._lock:
            if code in self._results:
                self._results.move_to_end(code)
                return self._results[code]
        if len(code) > CODE_CHARACTERS:
            return "too long", True
        program = PROGRAM.replace("CODE", repr(code), 1)
        output, ended = self._runner.each(_run, [program])[0]
        found = (
            output.decode("utf-8", "replace").rstrip("\n"),
            ended.why != "exit" or ended.code != 0,
        )
        if ended.why == "sandbox-error":
            raise RuntimeError(f"the sandbox failed: {ended.detail}")
        if ended.why != "exit":
            found = ended.why, True
        with self._lock:
            self._results[code] = found
            if len(self._results) > REMEMBERED:
                self._results.popitem(last=False)
        return found

    def said(self, result: str, rng: random.Random) -> str:
        """Return what the policy reads after a call: the log, and the result."""
        return "".join(rng.choices(LOG_LETTERS, k=self.log)) + "=" * (self.log > 0) + result

    def ready(self) -> dict[str, str]:
        """Start the sandbox and return its layers; the first call in a process runs a few attacks
        on it.
        """
        return self._runner.layers() if self.tool else {}

    def close(self) -> None:
        """End the processes that run programs."""
        self._runner.close()

    def _expression(self, rng: random.Random) -> str:
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        numbers = [str(rng.randint(max(low, 2), high)) for _ in range(self.factors + self.terms)]
        added = "".join(rng.choice("+-") + number for number in numbers[self.factors :])
        return "*".join(numbers[: self.factors]) + added


class _Episode(Environment):
    role = "tool"

    def __init__(self, task: PythonTool, problem: Problem, position: tuple[int | str, ...]):
        self.task, self.problem = task, problem
        self.rng = generator(*position, "log")
        self.tools = (TOOL,) if task.tool else ()

    def step(self, text: str) -> Outcome:
        code = code_of(text) if self.task.tool else None
        if code is None:
            score = judge(self.problem, text)
            return Outcome(
                "",
                score.reward,
                True,
                score.verdict,
                score.answer,
                {"tool_calls": 0, "tool_errors": 0},
            )
        result, failed = self.task.run(code)
        return Outcome(
            self.task.said(result, self.rng), measures={"tool_calls": 1, "tool_errors": int(failed)}
        )


def code_of(text: str) -> str | None:
    """Return the code of a turn's first call of the tool; None for a turn without a call."""
    if found := CALL.search(text):
        return found[1]
    if found := CHAT_CALL.search(text):
        try:
            code = json.loads(found[1])["arguments"]["code"]
        except (
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ):  # whatever the policy wrote in place of a call
            return ""
        return code if isinstance(code, str) else ""
    return None


def _run(slot: Slot, program: str) -> tuple[bytes, ProgramEnd]:
    return slot.run_program(program, "")


def _value(expression: str) -> int:
    """Compute the value of a product plus or minus some numbers: of "48*73-91=?" it is 3413."""
    product, *added = re.findall(r"[+-]?[0-9*]+", expression)
    return math.prod(map(int, product.split("*"))) + sum(map(int, added))


def _slip(text: str, rate: float, rng: random.Random) -> str:
    """Return the text, with probability `rate` with one digit replaced by another."""
    if rng.random() >= rate:
        return text
    place = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    other = rng.choice([digit for digit in "123456789" if digit != text[place]])
    return text[:place] + other + text[place + 1 :]
