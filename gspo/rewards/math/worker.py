"""The worker: a process that says whether two formulas, or two equations, are equal.

gspo.rewards.math.verifier starts it. Parsing and computing a model's formula can take any time and
memory, so this is a process of its own. It has a memory limit, and each question has a CPU limit
after which the kernel ends the process, even if the computation ignores signals. The limit is on
CPU time, not on waiting, so a busy machine changes no verdict.

It receives messages [kind, gold, answer] of JSON. It answers true, false, "gold" if the gold cannot
be parsed, or "memory", after which it ends. Formulas are parsed by math-verify
(latex2sympy2_extended) and evaluated to 100 digits at some points. math-verify's own comparison,
which rounds, is asked only about objects that are not functions of numbers. The command line gives
megabytes, CPU seconds, the connection's descriptor and the parent's process id.
"""

import contextlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

DIGITS = 100
TOLERANCE_DIGITS = 80  # two values must agree in so many digits
# points are taken near these, different for each variable
SCALES = ((7, 5), (3, 8), (-11, 7), (23, 9), (-2, 5))


def serve(connection: Connection, parent: int, seconds: float) -> None:
    """Answer until the connection ends or the parent is gone.

    A forked copy of the parent may hold the other end open, so the parent's id is checked too."""
    connection.send_bytes(b"ready")
    reply: bool | str = ""
    while os.getppid() == parent and reply != "memory":
        if connection.poll(1.0):
            question = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, seconds)  # the timer's signal ends the process
            reply = judge(*json.loads(question))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps(reply).encode())


def judge(kind: str, gold: str, answer: str) -> bool | str:
    """Return whether the two are equal, or "gold" if the gold cannot be parsed.

    An answer that cannot be parsed or computed is not equal."""
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
    # The parser and sympy raise all kinds of exceptions on a model's formula. None means equality.
    except Exception:
        return False


def parsed(formula: str):
    """Return a formula as a sympy expression. Raises the parser's exceptions."""
    from gspo.rewards.math.formula import rewrite

    text = normalize_latex(rewrite(formula), config=CONFIG)
    expression = latex2sympy(text, is_real=True, convert_degrees=False, normalization_config=None)
    if isinstance(expression, sympy.Basic):
        units = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
        expression = expression.xreplace(units)
    return expression


def same_formula(gold_text: str, answer_text: str) -> bool:
    """Return whether the values are equal, with variables at two points or more."""
    gold = parsed(gold_text)
    answer = parsed(answer_text)
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return verify(gold, answer, float_rounding=15, numeric_precision=50, timeout_seconds=None)
    has_symbols = bool(gold.free_symbols | answer.free_symbols)
    compared_points = 0
    for gold_value, answer_value in value_pairs(gold, answer):
        if near(gold_value, answer_value):
            compared_points += 1
        elif not has_symbols or (is_real(gold_value) and is_real(answer_value)):
            return False
    return compared_points >= (2 if has_symbols else 1)


def same_equation(gold_text: str, answer_text: str) -> bool:
    """Return whether left minus right is in constant proportion, at more than two points."""
    gold_left, gold_right = map(parsed, gold_text.split("="))
    answer_left, answer_right = map(parsed, answer_text.split("="))
    gold = gold_left - gold_right
    answer = answer_left - answer_right
    ratios = []
    for gold_value, answer_value in value_pairs(gold, answer):
        if not near(answer_value, 0):
            ratios.append(gold_value / answer_value)
    if len(ratios) < 3 or near(ratios[0], 0):
        return False
    return all(near(ratios[0], ratio) for ratio in ratios)


def value_pairs(gold, answer) -> Iterator[tuple]:
    """Yield the values of both formulas at points at which both have a value.

    No two points lie on one line through the origin. On such a line y = 3x and x = 3y are in
    constant proportion. A symbol in the bounds of a sum is 3, 4, 6, 9 and 13, or a little more."""
    if depends_on_index(gold) or depends_on_index(answer):
        return
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    bounds = symbols_of_bounds(gold) | symbols_of_bounds(answer)
    for number, (above, below) in enumerate(SCALES if symbols else SCALES[:1]):
        point = {}
        for index, symbol in enumerate(symbols):
            if symbol in bounds:
                point[symbol] = sympy.Integer(3 + index + number * (number + 1) // 2)
            else:
                point[symbol] = sympy.Rational(
                    above * (37 + 10 * index + number * index * index), below * (31 + index)
                )
        values = (value(gold, point, bounds), value(answer, point, bounds))
        if None not in values:
            yield values


def sums(expression) -> set:
    """Return the sums and products with bounds in an expression."""
    return expression.atoms(sympy.Sum, sympy.Product)


def symbols_of_bounds(expression) -> set:
    """Return the symbols in the bounds of sums and products, as n in a sum from 1 to n."""
    symbols = set()
    for term in sums(expression):
        for _, low, high in term.limits:
            symbols |= low.free_symbols | high.free_symbols
    return symbols


def depends_on_index(expression) -> bool:
    """Return whether a sum has terms such as a_k, which for sympy is a constant."""
    for term in sums(expression):
        for index, *_ in term.limits:
            for symbol in term.function.free_symbols:
                if index.name in symbol.name.partition("_")[2]:
                    return True
    return False


def value(expression, point: dict, bounds: set):
    """Return the number at a point, or None if there is none.

    Sums over symbols of `bounds` are added up term by term."""
    if symbols_of_bounds(expression):
        expression = expression.subs({symbol: point[symbol] for symbol in bounds}).doit()
    number = expression.evalf(DIGITS, subs=point)
    if number.free_symbols or not number.is_number or number.has(sympy.nan, sympy.zoo, sympy.oo):
        return None
    for part in number.as_real_imag():
        if not (part.is_Float or part.is_Rational):
            return None
    return number


def is_real(number) -> bool:
    return near(number.as_real_imag()[1], 0)


def near(a, b) -> bool:
    """Return whether the numbers are equal in TOLERANCE_DIGITS digits."""
    size = max(abs(a), abs(b))
    tolerance = sympy.Float(10) ** -TOLERANCE_DIGITS
    return bool(size < tolerance or abs(a - b) <= size * tolerance)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    memory_mb, cpu_seconds, descriptor, parent_pid = sys.argv[1:5]
    memory_bytes = int(memory_mb) << 20
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
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with contextlib.suppress(EOFError, OSError):  # the connection ended
        serve(Connection(int(descriptor)), int(parent_pid), float(cpu_seconds))
