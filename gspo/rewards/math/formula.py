r"""Which formulas may be compared at some cost, and how they are rewritten for that.

A formula that is not a plain number must stay in the vocabulary of the gold:
- The arithmetic signs, fractions and roots are always allowed.
- Functions must be of a family that the gold uses, so \sin 60^\circ does not answer
  \frac{\sqrt{3}}{2}.
- Sums, products, integrals, limits, factorials and binomials must occur in the gold.
- Variables must occur in the gold.
A complex gold may be answered by an exponential, and an exponential by \cos and \sin. Together with
the bounds on powers and digits this keeps out restatements of the question, and formulas that would
take long to parse or to compute.
"""

import re

MAX_NUMBER_DIGITS = 30
MAX_EXPONENT_DIGITS = 4
MAX_POWER = 10_000  # the product of nested exponents: ((x^a)^b)^c has a b c
MAX_FACTORIAL_DIGITS = 3  # of a number in a factorial or binomial
MAX_BARS = 8  # of absolute values, which a parser may try to pair in very many ways
LONG_BINOMIAL = re.compile(rf"binom.*\d{{{MAX_FACTORIAL_DIGITS + 1},}}")
THREE_DIGIT_EXPONENT = re.compile(r"\^\s*[({]?\s*\d{3}")
# long factorials, nested factorials, long numbers, long exponents, two indices
TOO_COSTLY = re.compile(
    rf"\d{{{MAX_FACTORIAL_DIGITS + 1},}}\s*[)}}]*\s*!"
    r"|!\s*[)}]*\s*!|[)}]\s*!"
    rf"|\d{{{MAX_NUMBER_DIGITS + 1},}}"
    rf"|\^\s*[({{]*\s*[-+]?\s*\d{{{MAX_EXPONENT_DIGITS + 1},}}"
    r"|_\s*(\w|\{\w*\})\s*_"
)

# A function or an operator with its base, power or bounds. Brackets behind it hold its argument,
# and no factor.
SCRIPT = r"\s*[_^]\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|[0-9A-Za-z])"
APPLIED = re.compile(
    r"\\(?:log|ln|lg|exp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh"
    r"|sum|prod|int|lim|max|min|gcd|lcm)"
    rf"(?![A-Za-z])(?:{SCRIPT})+\s*(?=\()"
)
# A variable with its index, which is part of its name. A command is followed by its index too.
INDEXED = re.compile(r"(\\[A-Za-z]+|[A-Za-z])(?:\s*_\s*(\{[^{}\\]*\}|[0-9A-Za-z]))?")
GREEK = re.compile(
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho"
    r"|sigma|tau|upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega)"
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
    """Return the variables: single letters. Upper and lower case differ."""
    return set(re.findall(r"[A-Za-z]", COMMAND.sub(" ", formula)))


def without_bounds(formula: str) -> str:
    r"""Return the formula without the equality signs in lower bounds, as in \sum_{k=1}."""
    return re.sub(r"(_\s*\{\s*[A-Za-z])\s*=", r"\1 ", formula)


def comparable(gold: str, answer: str) -> bool:
    """Return whether an answer may be compared with a gold that is a formula.

    If not, it is wrong."""
    allowed = BASIC | commands(gold)
    for family in FAMILIES:
        if family & allowed:
            allowed |= family
    names = letters(gold)
    if "i" in names:  # a complex number may have either of its two forms
        allowed |= {"exp", "sin", "cos"} if "e" in names else {"exp"}
        if not re.search(r"e(?!\s*\^)", COMMAND.sub(" ", answer)):
            names |= {"e"}
    if not (commands(answer) <= allowed and letters(answer) <= names):
        return False
    if not ALLOWED.fullmatch(without_bounds(answer)) or TOO_COSTLY.search(answer):
        return False
    if "binom" in allowed and LONG_BINOMIAL.search(answer):
        return False
    if _is_tower(answer) and (not _is_tower(gold) or THREE_DIGIT_EXPONENT.search(answer)):
        return False
    if answer.count("!") > gold.count("!") or answer.count("|") > MAX_BARS:
        return False
    return power(answer) <= MAX_POWER and _is_balanced(answer)


def _is_tower(formula: str) -> bool:
    """Return whether there is a power in an exponent."""
    open_brackets = []  # whether each begins an exponent
    after_power_sign = False
    for character in formula:
        if character in "({":
            open_brackets.append(after_power_sign)
        elif character in ")}" and open_brackets:
            open_brackets.pop()
        elif character == "^" and (after_power_sign or any(open_brackets)):
            return True
        if character != " ":
            after_power_sign = character == "^"
    return bool(re.search(r"\^\s*[A-Za-z0-9]\s*\^", formula))


def power(formula: str) -> int:
    """Return the largest product of numeric exponents that lie on each other: 6 for (x^2+1)^3."""
    # the largest product inside each open bracket, and inside the last operand
    bracket_powers = [1]
    operand_power = 1
    for token in re.finditer(r"\^\s*[({]?\s*[-+]?\s*(\d{0,9})|[({]|[)}]|[^\s]", formula):
        sign = token.group()
        if sign[0] == "^":
            product = operand_power * int(token.group(1) or 1)
            bracket_powers[-1] = max(bracket_powers[-1], product)
            if sign.rstrip("-+ 0123456789")[-1] in "({":
                bracket_powers.append(1)
            operand_power = bracket_powers[-1]
        elif sign in "({":
            bracket_powers.append(1)
            operand_power = 1
        elif sign in ")}":
            operand_power = bracket_powers.pop() if len(bracket_powers) > 1 else 1
            bracket_powers[-1] = max(bracket_powers[-1], operand_power)
        else:
            operand_power = 1
    return max(bracket_powers)


def _is_balanced(formula: str) -> bool:
    pairs = {")": "(", "}": "{", "]": "["}
    open_brackets = []
    for character in formula:
        if character in "({[":
            open_brackets.append(character)
        elif character in pairs and (not open_brackets or open_brackets.pop() != pairs[character]):
            return False
    return not open_brackets


def rewrite(formula: str) -> str:
    r"""Return the formula in a spelling that the parser of math-verify reads rightly.

    That parser reads 2(3) as a mixed number, R and r as the same variable, I as the imaginary unit,
    and decimals as rounded. So these become products, subscripted variables and fractions. It does
    not know \lg.
    """
    formula = re.sub(r"\\lg(?![A-Za-z])", r"\\log_{10}", formula)
    argument_starts = {match.end() for match in APPLIED.finditer(formula)}

    def with_product(match: re.Match[str]) -> str:
        if match.end() - 1 in argument_starts:
            return match.group()
        return rf"{match.group(1)}\cdot ("

    formula = re.sub(r"(\d|\})\s*\(", with_product, formula)
    formula = re.sub(r"\)\s*(?=[\d(])", r")\\cdot ", formula)
    formula = re.sub(r"(\d*)\.(\d+)", _fraction, formula)
    return INDEXED.sub(_lower_case, formula).replace("*", r"\cdot ")


def _lower_case(match: re.Match[str]) -> str:
    """Return a variable or a command in lower case: z_{1} for A, z_{2,n+1} for B_{n+1}."""
    name, index = match.groups()
    if GREEK.fullmatch(name) or (index and name.islower()):
        return match.group()
    if name.startswith("\\"):  # the index of \log or \sum is a formula
        return f"{name}_{INDEXED.sub(_lower_case, index)}" if index else name
    if name.islower():
        return name
    number = ord(name) - ord("A") + 1
    return f"z_{{{number},{index.strip('{ }')}}}" if index else f"z_{{{number}}}"


def _fraction(match: re.Match[str]) -> str:
    integer, decimals = match.groups()
    return rf"\frac{{{int(integer + decimals)}}}{{{10 ** len(decimals)}}}"
