"""The worker: says whether two formulas, or two equations, are equal. gspo.rewards.math.verifier
starts it.

It is a process of its own, because parsing and computing what a model wrote can take any time and
memory. It has a memory limit, and each question has a CPU limit after which the kernel ends the
process, even if the computation ignores signals. The limit is on CPU time, not on waiting, so that
a busy machine changes no verdict.

It reads lines [kind, gold, answer] of JSON and answers true, false, "gold" where the gold cannot be
parsed, or "memory", after which it ends. Formulas are parsed by math-verify (latex2sympy2_extended)
and evaluated to 100 digits at some points. math-verify's own comparison, which rounds, is asked
only about objects that are not functions of numbers. The command line gives the parent's process
id, megabytes and CPU seconds.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

DIGITS = 100
TOLERANCE = 80  # digits in which two values must agree
# points are taken near these, different for each variable
SCALES = ((7, 5), (3, 8), (-11, 7), (23, 9), (-2, 5))
LONGEST_LINE = 65536


def serve(parent: int, seconds: float) -> None:
    """Answer until the input ends or the parent is gone. It asks for its parent's id, since a
    forked copy of the parent may hold the other end of the input open."""
    print("ready", flush=True)
    pending = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        received = os.read(0, LONGEST_LINE)
        if not received:
            return
        pending += received
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            signal.setitimer(signal.ITIMER_PROF, seconds)  # the timer's signal ends the process
            reply = judge(*json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(reply), flush=True)
            if reply == "memory":
                return


def judge(kind: str, gold: str, answer: str) -> bool | str:
    """Return whether the two are equal, "gold" if the gold cannot be parsed. An answer that cannot
    be parsed or computed is not equal."""
    try:
        for side in gold.split("=") if kind == "equation" else [gold]:
            parsed(side)
    except MemoryError:
        return "memory"
    except Exception:  # the parser raises all kinds of exceptions
        return "gold"
    if kind == "readable":
        return True
    try:
        return same_equation(gold, answer) if kind == "equation" else same_formula(gold, answer)
    except MemoryError:
        return "memory"
    except Exception:  # the parser and sympy raise all kinds of exceptions on what a model writes; none means equality
        return False


def parsed(formula: str):
    """Return a formula as a sympy expression. Raises what the parser raises."""
    from gspo.rewards.math.formula import rewrite

    text = normalize_latex(rewrite(formula), config=CONFIG)
    expression = latex2sympy(text, is_real=True, convert_degrees=False, normalization_config=None)
    if isinstance(expression, sympy.Basic):
        units = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
        expression = expression.xreplace(units)
    return expression


def same_formula(gold_text: str, answer_text: str) -> bool:
    gold, answer = parsed(gold_text), parsed(answer_text)
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return verify(gold, answer, float_rounding=15, numeric_precision=50, timeout_seconds=None)
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    compared = 0
    for point in points(symbols):
        one, other = value(gold, point), value(answer, point)
        if one is None or other is None:
            continue
        if not near(one, other):
            if not symbols or (real(one) and real(other)):
                return False
            continue
        compared += 1
    return compared >= (2 if symbols else 1)


def same_equation(gold_text: str, answer_text: str) -> bool:
    """Return whether left minus right is in constant proportion, at more than two points."""
    gold, answer = ([parsed(side) for side in text.split("=")] for text in (gold_text, answer_text))
    one, other = gold[0] - gold[1], answer[0] - answer[1]
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    ratios = []
    for point in points(symbols):
        above, below = value(one, point), value(other, point)
        if above is not None and below is not None and not near(below, sympy.Integer(0)):
            ratios.append(above / below)
    if len(ratios) < 3 or near(ratios[0], sympy.Integer(0)):
        return False
    return all(near(ratios[0], ratio) for ratio in ratios)


def points(symbols: list) -> Iterator[dict]:
    """Yield points of which no two lie on one line through the origin, where y = 3x and x = 3y are
    in constant proportion."""
    for number, (above, below) in enumerate(SCALES if symbols else SCALES[:1]):
        yield {
            symbol: sympy.Rational(
                above * (37 + 10 * place + number * place * place), below * (31 + place)
            )
            for place, symbol in enumerate(symbols)
        }


def value(expression, point: dict):
    """Return the number at a point, or None where there is none."""
    number = expression.evalf(DIGITS, subs=point)
    if number.free_symbols or not number.is_number or number.has(sympy.nan, sympy.zoo, sympy.oo):
        return None
    return (
        number
        if all(
            part.is_Float or part.is_Integer or part.is_Rational for part in number.as_real_imag()
        )
        else None
    )


def real(number) -> bool:
    return near(number.as_real_imag()[1], sympy.Integer(0))


def near(one, other) -> bool:
    """Return whether the numbers are equal in TOLERANCE digits."""
    size = max(abs(one), abs(other))
    return bool(
        size < sympy.Float(10) ** -TOLERANCE
        or abs(one - other) <= size * sympy.Float(10) ** -TOLERANCE
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    megabytes, cpu_seconds = int(sys.argv[2]), float(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    import sympy
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify import verify

    CONFIG = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    logging.disable(logging.CRITICAL)
    # elsewhere the limit counts the system's own mappings, or is refused
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    serve(int(sys.argv[1]), cpu_seconds)
