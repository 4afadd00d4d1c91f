"""An environment with a Python tool, for arithmetic that is too long for mental calculation.

    prompt         48*73-91=?
    policy         <py>48*73-91</py>
    environment    3413
    policy         #3413

A turn with `<py>...</py>` calls the tool. So does the usual form of chat models,
<tool_call>{"name": "python", "arguments": {"code": "..."}}</tool_call>. The code is one expression
or a few lines. Like Python's prompt, the tool prints the value of a last expression. A turn without
a call ends the episode. Its reward is 1 if the text after its `#` is the right number. The tool
runs in the same sandbox as graded code, within the same limits.
"""

import json
import math
import random
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from gspo.data.problems import Problem
from gspo.data.seeding import generator
from gspo.io.errors import SettingError
from gspo.io.ranges import SPEED_ONLY, ranged
from gspo.rewards.sandbox.runner import CodeRunner, Limits
from gspo.tasks.base import SingleSet, draw_prompt
from gspo.tasks.environments.protocol import (
    END_OF_THOUGHTS,
    Environment,
    EnvironmentTask,
    Outcome,
    Position,
)
from gspo.tasks.testbed.chain_arithmetic import judge

CALL = re.compile(r"<py>(.*?)</py>", re.DOTALL)
CHAT_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# results of programs: the samples of a problem often call the tool with the same code
MAX_CACHED_RESULTS = 4096
MAX_CODE_CHARS = 1 << 16
MAX_OUTPUT_BYTES = 1 << 16
LOG_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# The program in the sandbox. It runs the code, and prints the value of a last expression.
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
TOOL_NAME = "python"
TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": (
            "Run Python code and return what it prints; "
            "the value of a last expression is printed too."
        ),
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}


@dataclass
class PythonTool(SingleSet, EnvironmentTask):
    """Products and sums of numbers of `digits` digits, and a Python tool.

    `slots` programs run at a time, each within the given CPU seconds and megabytes.

    factors   number of factors of the product
    terms     number of numbers that are added to it or subtracted from it
    tool      whether there is the tool. Without it the first turn must have the answer.
    log       number of random letters before each result of the tool, as in "kqzf=3413". They make
              observations of any length.
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
            raise SettingError(
                f"{self.key}.wall_seconds",
                self.wall_seconds,
                f"is below {self.key}.cpu_seconds={self.cpu_seconds}",
            )
        if self.tool and self.turns < 2:
            raise SettingError(
                f"{self.key}.turns",
                self.turns,
                "leaves no turn for the answer after a call of the tool",
                remedy="use 2 or more",
            )
        if self.tool and self.step_seconds <= self.cpu_seconds + self.wall_seconds:
            raise SettingError(
                f"{self.key}.step_seconds",
                self.step_seconds,
                f"is not above cpu_seconds={self.cpu_seconds} + "
                f"wall_seconds={self.wall_seconds}: slow code of the policy would pass for "
                "a failure of the environment",
            )
        limits = Limits(
            self.cpu_seconds, self.cpu_seconds, self.wall_seconds, self.memory_mb, MAX_OUTPUT_BYTES
        )
        self._runner = CodeRunner(limits, self.slots, self.allow_weak_sandbox)
        self._cached_result = lru_cache(MAX_CACHED_RESULTS)(self._result)

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split."""
        self.check_split(split)
        rng = generator(seed, self.name, split, index)
        prompt = draw_prompt(split, lambda: f"{self._expression(rng)}=?")
        return Problem(
            self.name, index, prompt, answer=_value(prompt), family=f"{self.factors} factors"
        )

    @property
    def at_once(self) -> int:
        """The number of slots. A program then starts at once, and always ends by its own limits."""
        return self.slots

    def environment(self, problem: Problem, position: Position) -> Environment:
        return _Episode(self, problem, position)

    def demonstrated_turns(
        self, problem: Problem, wrong_step_rate: float, rng: random.Random
    ) -> list[str]:
        """Return the turns of an episode with a call of the tool, or with the answer alone.

        With probability `wrong_step_rate` a digit of the code is wrong. Independently, a digit of
        the answer is wrong with the same probability."""
        expression = problem.prompt.removesuffix("=?")
        if not self.tool:
            return [f"#{_slip(str(problem.answer), wrong_step_rate, rng)}"]
        code = _slip(expression, wrong_step_rate, rng)
        result = str(_value(code))
        observation = self.observation(result, rng)
        answer = _slip(result, wrong_step_rate, rng)
        return [f"<py>{code}</py>", observation, f"#{answer}"]

    def run(self, code: str) -> tuple[str, bool]:
        """Run code in the sandbox, and return its output and whether it failed."""
        if len(code) > MAX_CODE_CHARS:
            return "too long", True
        return self._cached_result(code)

    def _result(self, code: str) -> tuple[str, bool]:
        program = PROGRAM.replace("CODE", repr(code), 1)
        ((output, ended),) = self._runner.each(
            lambda slot, code: slot.run_program(code, ""), [program]
        )
        if ended.why == "sandbox-error":
            raise RuntimeError(f"the sandbox failed: {ended.detail}")
        if ended.why == "exit":
            return output.decode("utf-8", "replace").rstrip("\n"), ended.code != 0
        return ended.why, True

    def observation(self, result: str, rng: random.Random) -> str:
        """Return the observation after a call: the log, and the result."""
        if not self.log:
            return result
        return "".join(rng.choices(LOG_LETTERS, k=self.log)) + "=" + result

    def ready(self) -> dict[str, str]:
        """Start the sandbox and return its layers.

        The first call in a process runs a few attacks on the sandbox."""
        return self._runner.layers() if self.tool else {}

    def close(self) -> None:
        """End the processes that run programs."""
        self._runner.close()

    def _expression(self, rng: random.Random) -> str:
        low = max(10 ** (self.digits - 1), 2)
        high = 10**self.digits - 1
        numbers = [str(rng.randint(low, high)) for _ in range(self.factors + self.terms)]
        product = "*".join(numbers[: self.factors])
        terms = [rng.choice("+-") + number for number in numbers[self.factors :]]
        return product + "".join(terms)


class _Episode(Environment):
    role = "tool"

    def __init__(self, task: PythonTool, problem: Problem, position: Position):
        self.task = task
        self.problem = problem
        self.rng = generator(*position, "log")
        self.tools = (TOOL,) if task.tool else ()

    def step(self, text: str) -> Outcome:
        try:
            code = code_of(text) if self.task.tool else None
        except ValueError as error:
            measures = {"tool_calls": 1, "tool_errors": 1}
            return Outcome(self.task.observation(str(error), self.rng), measures=measures)
        if code is None:
            reward, verdict, answer = judge(self.problem, text)
            measures = {"tool_calls": 0, "tool_errors": 0}
            return Outcome("", reward, True, verdict, answer, measures)
        result, failed = self.task.run(code)
        measures = {"tool_calls": 1, "tool_errors": int(failed)}
        return Outcome(self.task.observation(result, self.rng), measures=measures)


def code_of(text: str) -> str | None:
    """Return the code of a turn's first call of the tool, or None for a turn without a call.

    Calls in thoughts that have ended do not count. The arguments may be a text of JSON, as OpenAI
    writes them. Raises ValueError for a malformed call, and for another tool."""
    end_of_thoughts = text.rfind(END_OF_THOUGHTS)
    calls = [call for call in CALL.finditer(text) if call.end() > end_of_thoughts]
    if calls:
        return calls[0][1]
    chat_calls = [call for call in CHAT_CALL.finditer(text) if call.end() > end_of_thoughts]
    if not chat_calls:
        return None
    chat_call = chat_calls[0]
    try:
        request = json.loads(chat_call[1])
        arguments = request["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        name = request["name"]
        code = arguments["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("malformed call") from None
    if name != TOOL_NAME:
        raise ValueError("unknown tool")
    if not isinstance(code, str):
        raise ValueError("malformed call")
    return code


def _value(expression: str) -> int:
    """Compute a product plus or minus some numbers: "48*73-91=?" gives 3413."""
    product, *terms = re.findall(r"[+-]?[0-9*]+", expression)
    return math.prod(map(int, product.split("*"))) + sum(map(int, terms))


def _slip(text: str, rate: float, rng: random.Random) -> str:
    """Return the text, in which a digit is wrong with probability `rate`."""
    if rng.random() >= rate:
        return text
    position = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    digit = rng.choice([digit for digit in "123456789" if digit != text[position]])
    return text[:position] + digit + text[position + 1 :]
