"""The operations of the code task, and the families of functions composed of them.

Each operation is written twice: as the line of code of a demonstration, and as the Python function
that computes expected outputs. The two are independent, so a mistake in either makes a
demonstration fail. Every operation is defined for every value of its kind, including 0, negative
numbers, empty lists and empty strings.
"""

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DIGITS = tuple(range(1, 10))
LETTERS = tuple("abcdefgh")
INPUT_LETTERS = "abcd"  # few letters, so that replacing and counting them makes a difference
PAIRS = tuple(old + new for old in INPUT_LETTERS for new in INPUT_LETTERS if old != new)


@dataclass(frozen=True)
class Operation:
    """An elementary operation on an int `x`, a list of ints `a` or a string `s`."""

    word: str  # its name in the prompt
    code: str  # its line in the program, with {} for the parameter
    apply: Callable[[Any, Any], Any]  # the reference implementation, (value, parameter) -> value
    parameters: tuple[int | str | None, ...] = (None,)
    # whether it turns a list or a string into a number, and therefore can only come last
    ends: bool = False

    def line(self, parameter: int | str | None) -> str:
        line = self.code.format(parameter)
        return f"return {line}" if self.ends else line


Step = tuple[Operation, Any]  # an operation and its parameter
Family = tuple[str, tuple[str, ...]]  # the variable (x, a or s) and the operations' names

_OPERATIONS = {
    "x": [
        Operation("times", "x=x*{}", operator.mul, DIGITS[1:]),
        Operation("add", "x=x+{}", operator.add, DIGITS),
        Operation("sub", "x=x-{}", operator.sub, DIGITS),
        Operation("mod", "x=x%{}", operator.mod, DIGITS[2:]),
        Operation("div", "x=x//{}", operator.floordiv, DIGITS[1:]),
        Operation("square", "x=x*x", lambda x, _: x**2),
        Operation("neg", "x=-x", lambda x, _: 0 - x),
        Operation("abs", "x=abs(x)", lambda x, _: max(x, 0 - x)),
    ],
    "a": [
        Operation("add", "a=[v+{} for v in a]", lambda a, k: list(map(k.__add__, a)), DIGITS),
        Operation("times", "a=[v*{} for v in a]", lambda a, k: list(map(k.__mul__, a)), DIGITS[1:]),
        Operation(
            "above", "a=[v for v in a if v>{}]", lambda a, k: list(filter(k.__lt__, a)), DIGITS[:6]
        ),
        Operation("push", "a=a+[{}]", lambda a, k: [*a, k], DIGITS),
        Operation(
            "drop", "a=a[{}:]", lambda a, k: [v for i, v in enumerate(a) if i >= k], DIGITS[:4]
        ),
        Operation(
            "take", "a=a[:{}]", lambda a, k: [v for i, v in enumerate(a) if i < k], DIGITS[:4]
        ),
        Operation("rev", "a=a[::-1]", lambda a, _: list(reversed(a))),
        Operation("sort", "a=sorted(a)", lambda a, _: sorted(a)),
        Operation("sum", "sum(a)", lambda a, _: sum(a), ends=True),
        Operation("len", "len(a)", lambda a, _: len(a), ends=True),
    ],
    "s": [
        Operation("end", "s=s+'{}'", lambda s, c: "".join([s, c]), LETTERS),
        Operation("start", "s='{}'+s", lambda s, c: "".join([c, s]), LETTERS),
        Operation(
            "swap", "s=s.replace('{0[0]}','{0[1]}')", lambda s, p: p[1].join(s.split(p[0])), PAIRS
        ),
        Operation("times", "s=s*{}", lambda s, k: "".join(s for _ in range(k)), DIGITS[1:5]),
        Operation(
            "drop",
            "s=s[{}:]",
            lambda s, k: "".join(c for i, c in enumerate(s) if i >= k),
            DIGITS[:4],
        ),
        Operation(
            "take",
            "s=s[:{}]",
            lambda s, k: "".join(c for i, c in enumerate(s) if i < k),
            DIGITS[:4],
        ),
        Operation("rev", "s=s[::-1]", lambda s, _: "".join(reversed(s))),
        Operation("upper", "s=s.upper()", lambda s, _: s.upper()),
        Operation("len", "len(s)", lambda s, _: len(s), ends=True),
        Operation(
            "count",
            "s.count('{}')",
            lambda s, c: len([d for d in s if d == c]),
            tuple(INPUT_LETTERS),
            ends=True,
        ),
    ],
}
CATALOGUE = {
    variable: {op.word: op for op in operations} for variable, operations in _OPERATIONS.items()
}


def _families(**words: str) -> list[Family]:
    return [
        (variable, tuple(line.split()))
        for variable, text in words.items()
        for line in text.split(",")
    ]


FAMILIES = _families(
    x="times add, add times, times sub mod, square add mod, square sub, times add mod, "
    "sub times add, add square mod,add div, times neg add, sub abs times, div times add, "
    "neg mod times, times add times sub",
    a="add rev push, times push, sort drop times, rev take add, above times sum, add above len, "
    "times add sum,push sort take, drop times rev, rev drop push, take add sum, sort rev take add",
    s="rev end start, swap end, start times, take end rev, drop start upper, swap rev start, "
    "end count, swap count,start swap times, end start swap len, upper end take times",
)
# Training never sees these compositions, though it sees their operations.
HELD_OUT_FAMILIES = _families(
    x="add times mod, sub square add, div neg sub",
    a="above add rev, push times sum, drop sort push",
    s="rev swap end, take times start",
)


def draw_steps(family: Family, rng: random.Random) -> list[Step]:
    variable, words = family
    operations = [CATALOGUE[variable][word] for word in words]
    return [(operation, rng.choice(operation.parameters)) for operation in operations]


def wrong_step(variable: str, step: Step, rng: random.Random) -> Step:
    """Return a step that may replace this step: another parameter, or another operation.

    Each happens half of the time if both exist."""
    operation, parameter = step
    other_parameters = [value for value in operation.parameters if value != parameter]
    if other_parameters and rng.random() < 0.5:
        return operation, rng.choice(other_parameters)
    other_operations = [
        candidate
        for candidate in CATALOGUE[variable].values()
        if candidate.ends == operation.ends and candidate != operation
    ]
    replacement = rng.choice(other_operations)
    return replacement, rng.choice(replacement.parameters)


def reference(steps: list[Step], value: Any) -> Any:
    """Return the right output of the steps for one input."""
    for operation, parameter in steps:
        value = operation.apply(value, parameter)
    return value


def hidden_inputs(variable: str, rng: random.Random) -> list[Any]:
    """Return eight inputs: edge cases, and random inputs that tell similar functions apart."""
    if variable == "x":
        return [
            0,
            1,
            -1,
            rng.randint(-9, -2),
            rng.randint(2, 9),
            *(rng.randint(10, 99) for _ in range(2)),
            -37,
        ]
    lengths = [0, 1, *(rng.randint(3, 8) for _ in range(6))]
    if variable == "a":
        return [[rng.randint(-5, 12) for _ in range(length)] for length in lengths]
    return ["".join(rng.choices(INPUT_LETTERS, k=length)) for length in lengths]
