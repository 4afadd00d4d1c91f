r"""Formulas that are not plain numbers: which ones may be compared at some cost, and how they are
rewritten for that.

A formula must stay in the vocabulary of the gold: the arithmetic signs, fractions and roots;
functions only of a family that the gold uses (so that \sin 60^\circ does not answer
\frac{\sqrt{3}}{2}); sums, products, integrals, limits, factorials and binomials only where the gold
has them; variables only those of the gold. A complex gold may be answered by an exponential, and an
exponential by \cos and \sin. Together with the bounds on powers and digits this keeps out
restatements of the question, and formulas that would take long to parse or to compute.
"""

from __future__ import annotations

import re

DIGITS = 30  # most digits of one number
EXPONENT_DIGITS = 4
LARGEST_POWER = 10_000  # largest product of nested exponents: ((x^a)^b)^c has a b c
FACTORIAL_DIGITS = 3
BARS = 8  # most bars of absolute values, which a parser may try to pair in very many ways

# A function or an operator with its base, power or bounds: what follows in brackets is its
# argument, and no factor.
SCRIPT = r"\s*[_^]\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|[0-9A-Za-z])"
APPLIED = re.compile(
    r"\\(?:log|ln|lg|exp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|sum|prod|int|lim|max|min|gcd|lcm)"
    rf"(?![A-Za-z])(?:{SCRIPT})+\s*(?=\()"
)
BASIC = {"frac", "sqrt", "cdot", "times", "div", "pi"}
FAMILIES = [
    {"sin", "cos", "tan", "cot", "sec", "csc"},
    {"arcsin", "arccos", "arctan"},
    {"sinh", "cosh", "tanh"},
    {"ln", "log", "lg", "exp"},
]
COMMAND = re.compile(r"\\([A-Za-z]+|.)")
ALLOWED = re.compile(r"[0-9A-Za-z\\{}()\[\]+\-*/^_.|! ]*")


def commands(formula: str) -> set[str]:
    return set(COMMAND.findall(formula))


def letters(formula: str) -> set[str]:
    """Return the variables: single letters, where case counts."""
    return set(re.findall(r"[A-Za-z]", COMMAND.sub(" ", formula)))


def without_bounds(formula: str) -> str:
    r"""Return the formula without the equality signs in lower bounds, as in \sum_{k=1}."""
    return re.sub(r"(_\s*\{\s*[A-Za-z])\s*=", r"\1 ", formula)


def comparable(gold: str, answer: str) -> bool:
    """Return whether an answer may be compared with a gold that is a formula. If not, it is wrong."""
    allowed = BASIC | commands(gold)
    for family in FAMILIES:
        if family & allowed:
            allowed |= family
    names = letters(gold)
    if "i" in names:  # a complex number may have either of its two forms
        allowed |= {"exp", "sin", "cos"} if "e" in names else {"exp"}
        names |= set() if re.search(r"e(?!\s*\^)", COMMAND.sub(" ", answer)) else {"e"}
    return (
        ALLOWED.fullmatch(without_bounds(answer)) is not None
        and commands(answer) <= allowed
        and letters(answer) <= names
        and answer.count("!") <= gold.count("!")
        and not re.search(
            rf"\d{{{FACTORIAL_DIGITS + 1},}}\s*[)}}]*\s*!|!\s*[)}}]*\s*!|[)}}]\s*!", answer
        )
        and not ("binom" in allowed and re.search(rf"binom.*\d{{{FACTORIAL_DIGITS + 1},}}", answer))
        and not re.search(rf"\d{{{DIGITS + 1},}}", answer)
        and not re.search(rf"\^\s*[({{]*\s*[-+]?\s*\d{{{EXPONENT_DIGITS + 1},}}", answer)
        and (not _tower(answer) or (_tower(gold) and not re.search(r"\^\s*[({]?\s*\d{3}", answer)))
        and answer.count("|") <= BARS
        and not re.search(r"_\s*(\w|\{\w*\})\s*_", answer)
        and power(answer) <= LARGEST_POWER
        and _balanced(answer)
    )


def _tower(formula: str) -> bool:
    """Return whether there is a power in an exponent."""
    depths: list[str] = []
    exponent = False
    for character in formula:
        if character in "({":
            depths.append("^" if exponent else "")
        elif character in ")}" and depths:
            depths.pop()
        elif character == "^" and ("^" in depths or exponent):
            return True
        if character != " ":
            exponent = character == "^"
    return bool(re.search(r"\^\s*[A-Za-z0-9]\s*\^", formula))


def power(formula: str) -> int:
    """Return the largest product of numeric exponents that lie on each other: 6 for (x^2+1)^3."""
    stack, last = [1], 1
    for token in re.finditer(r"\^\s*[({]?\s*[-+]?\s*(\d{0,9})|[({]|[)}]|[^\s]", formula):
        sign = token.group()
        if sign[0] == "^":
            stack[-1] = max(stack[-1], last * int(token.group(1) or 1))
            stack += [1] if sign.rstrip("-+ 0123456789")[-1] in "({" else []
            last = stack[-1] if stack[-1] > 1 else 1
        elif sign in "({":
            stack.append(1)
            last = 1
        elif sign in ")}":
            last = stack.pop() if len(stack) > 1 else 1
            stack[-1] = max(stack[-1], last)
        else:
            last = 1
    return max(stack)


def _balanced(formula: str) -> bool:
    closing = {")": "(", "}": "{", "]": "["}
    opened: list[str] = []
    for character in formula:
        if character in "({[":
            opened.append(character)
        elif character in closing and (not opened or opened.pop() != closing[character]):
            return False
    return not opened


def rewrite(formula: str) -> str:
    r"""Return the formula in a spelling that the parser of math-verify reads rightly.

    That parser reads 2(3) as a mixed number, R and r as the same variable, I as the imaginary unit,
    and decimals as rounded, so these become products, subscripted variables and fractions. It does
    not know \lg.
    """
    formula = re.sub(r"\\lg(?![A-Za-z])", r"\\log_{10}", formula)
    arguments = {found.end() for found in APPLIED.finditer(formula)}
    formula = re.sub(
        r"(\d|\})\s*\(",
        lambda found: (
            found.group() if found.end() - 1 in arguments else rf"{found.group(1)}\cdot ("
        ),
        formula,
    )
    formula = re.sub(r"\)\s*(?=[\d(])", r")\\cdot ", formula)
    formula = re.sub(r"(\d*)\.(\d+)", _fraction, formula)
    parts = re.split(r"(\\[A-Za-z]+)", formula)
    parts[::2] = [
        re.sub(r"[A-Z]", lambda m: f"z_{{{ord(m.group()) - 64}}}", part) for part in parts[::2]
    ]
    return "".join(parts).replace("*", r"\cdot ")


def _fraction(match: re.Match[str]) -> str:
    whole, decimals = match.groups()
    return rf"\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}}"
