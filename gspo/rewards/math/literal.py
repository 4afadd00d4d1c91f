r"""Numbers that are written out, with their units, as exact values, without a slow parser.

Literals are integers (thousands commas, leading zeros), decimals (also 0.\overline{3}), fractions
of integers, mixed numbers, scientific notation and percentages. An expression that has to be
evaluated is not a literal: sums, products, powers, roots, functions, factorials, binomials, and
disguises of them such as 7+0x, 7^1, \frac{14}{1+1} and 7\pm 0.

Units, currency and degree signs may be left out on either side. If both sides have a unit, the
units must agree. Words that change or hedge a number (half, million, or, not, about) are not units.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from gspo.rewards.math.formula import FAMILIES

MAX_EXPONENT = 300  # of ten: larger numbers are no answers, so they are not literals


@dataclass(frozen=True)
class Literal:
    """An exact value. With `percent` it had a percent sign: 50% has the value 50."""

    value: Fraction
    percent: bool = False

    def equals(self, other: Literal) -> bool:
        """Return whether two literals agree.

        50% is 50%, 50 and 0.5, but not 0.5%. Decimals are exact: 0.333 is not 1/3."""
        if self.percent == other.percent:
            return self.value == other.value
        percentage, plain = (self, other) if self.percent else (other, self)
        return plain.value in (percentage.value, percentage.value / 100)

    def text(self) -> str:
        return f"{self.value}%" if self.percent else str(self.value)


DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?:\\,\d{3})+|\d+)"
DECIMAL = rf"(?:{DIGITS}(?:\.\d*)?|\.\d+)"
TEN = r"10\s*\^\s*(?:\{\s*([-+]?\d{1,6})\s*\}|(-?\d)(?!\d)|\(\s*([-+]?\d{1,6})\s*\))"
DECIMAL_PATTERN = re.compile(DECIMAL)
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")
SCIENTIFIC = re.compile(
    rf"({DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*{TEN}|({DECIMAL})[eE]([-+]?\d{{1,6}})"
)
SLASH = re.compile(rf"({DIGITS})\s*/\s*({DIGITS})")
FRAC = re.compile(rf"\\frac\s*\{{\s*([-+]?\s*{DIGITS})\s*\}}\s*\{{\s*([-+]?\s*{DIGITS})\s*\}}")
MIXED = re.compile(
    rf"({DIGITS})\s*(?:\\frac\s*\{{\s*(\d+)\s*\}}\s*\{{\s*(\d+)\s*\}}"
    r"|(?<=\d)\s(?<=\s)(\d+)\s*/\s*(\d+))"
)
PERCENT = re.compile(r"\s*(?:%|\\text\{\s*(?:percent|%)\s*\}|percent)\Z")


def literal(text: str) -> Literal | None:
    """Return the value of a number in normal form without a unit, or None if it is no literal."""
    text = text.strip()
    number = PERCENT.sub("", text)
    percent = number != text
    number = number.strip()
    while number.startswith("(") and number.endswith(")") and not re.search("[(,]", number[1:]):
        number = number[1:-1].strip()
    sign = 1
    if number[:1] in ("-", "+"):
        sign = -1 if number[0] == "-" else 1
        number = number[1:].strip()
    magnitude = _magnitude(number)
    return None if magnitude is None else Literal(sign * magnitude, percent)


def _magnitude(text: str) -> Fraction | None:
    """Return the value of an unsigned number.

    The work is bounded by the length of an answer and MAX_EXPONENT.
    """
    if DECIMAL_PATTERN.fullmatch(text):
        return Fraction(_plain(text))
    fraction = SLASH.fullmatch(text) or FRAC.fullmatch(text)
    if fraction:
        above, below = (int(_plain(part)) for part in fraction.groups())
        return Fraction(above, below) if below else None
    mixed = MIXED.fullmatch(text)
    if mixed:
        integer, above, below = (_plain(part) for part in mixed.groups() if part is not None)
        if not 0 < int(above) < int(below):
            return None
        return int(integer) + Fraction(int(above), int(below))
    scientific = SCIENTIFIC.fullmatch(text)
    if scientific:
        mantissa, exponent = (part for part in scientific.groups() if part is not None)
        if abs(int(exponent)) > MAX_EXPONENT:
            return None
        return Fraction(_plain(mantissa)) * Fraction(10) ** int(exponent)
    repeating = REPEATING.fullmatch(text)
    if repeating:
        integer, fixed, repeated = repeating.groups()
        scale = 10 ** len(fixed)
        tail = Fraction(int(repeated), (10 ** len(repeated) - 1) * scale)
        return Fraction(int((integer or "0") + fixed), scale) + tail
    return None


def _plain(digits: str) -> str:
    return digits.replace("\\,", "").replace(",", "").replace(" ", "")


# Words behind a number that are not its unit: they change the number, hedge it or take it back.
_CHANGING = """
or and not no never isn wrong incorrect false less more least most than about approximately approx
around nearly almost roughly plus minus times over divided by squared cubed factorial mod modulo
base hundred thousand million billion trillion dozen half halves third thirds fourths fifth fifths
sixths eighths tenth tenths hundredths thousandths zero one two three four five six seven eight nine
ten eleven twelve twenty maybe perhaps possibly between to through either neither if unless except
is are was equals equal also alternatively otherwise unknown percent k bn point unsolvable undefined
infinity pi the answer guess
"""
NO_UNITS = frozenset(_CHANGING.split())
LETTERS = set("mglhsLCFNJWVA")  # the single letters that are units
# each unit, and its other spellings without a plural s
UNITS = """
cm centimeter centimetre
m meter metre
km kilometer kilometre
mm millimeter millimetre
foot feet ft
inch inche in
yard yd
mile mi
g gram
kg kilogram
lb pound
oz ounce
$ dollar usd
cents cent
€ euro eur
° degree deg
min minute
sec second s
h hour hr
l liter litre
mileperh mph
square sq
c celsiu
f fahrenheit
"""
UNIT_WORDS = {
    word: line.split()[0] for line in UNITS.strip().splitlines() for word in line.split()[1:]
}
WORDS = r"[A-Za-z][A-Za-z.'/-]*(?:\s+[A-Za-z/][A-Za-z.'/-]*){0,4}"
POWER = r"(?:\s*\^\s*(?:\{\s*[23]\s*\}|[23]))?"
TAILS = [
    re.compile(rf"\s*\\text\{{\s*({WORDS}(?:\s*\^\s*[23])?)\s*\}}({POWER})\s*\Z"),
    re.compile(r"(?<=[\d.)}$])\s*()\\deg\s*(?:\\text\{\s*)?([CF]?)(?:\s*\})?\s*\Z"),
    re.compile(r"\s*()(\\(?:dollar|euro|pounds|yen))\s*\Z"),
]
# other short units. Units that may be a product of variables, such as pa and um, are left out.
SHORT_UNITS = """
ml mg kw kwh hz khz mhz ghz kb mb gb tb yr yrs wk wks hrs pts kmh kmph ppm rpm bpm psi kpa kcal
tbsp tsp lbs sqft mol
"""
KNOWN_UNITS = frozenset(f"{UNITS} {SHORT_UNITS}".split())
FUNCTIONS = frozenset().union(*FAMILIES)
PLAIN_TAIL = re.compile(rf"(?<=[\d.)}}])(\s+{WORDS}|[a-z]{{2,}}|\s*[cmk]?m|\s*k?g)({POWER})\s*\Z")
HEAD = re.compile(r"([-+]?)\s*\\(dollar|euro|pounds|yen)\s*(?=[-+\d.\\])")
SIGNS = {"dollar": "$", "euro": "€", "pounds": "£", "yen": "¥"}


def split_unit(text: str) -> tuple[str, str]:
    r"""Return the text without its unit, and the unit ("" if there is none), both in normal form.

    Units are a currency sign on either side, a degree sign, words in \text{} and, after a number
    that stands alone, words without it.
    """
    units = set()
    head = HEAD.match(text)
    if head:
        units.add(SIGNS[head.group(2)])
        text = head.group(1) + text[head.end() :]
    for pattern in TAILS:
        tail = pattern.search(text)
        if tail and tail.start() > 0 and _is_unit(tail.group(1)):
            words, mark = tail.groups()
            units.add(_unit(words, mark) if words else _sign(mark))
            text = text[: tail.start()].strip()
    tail = PLAIN_TAIL.search(text)
    is_plain = tail and not units and _is_unit(tail.group(1))
    if is_plain and not _may_be_variables(tail.group(1)) and literal(text[: tail.start()]):
        units.add(_unit(*tail.groups()))
        text = text[: tail.start()].strip()
    return text, " ".join(sorted(units))


def _sign(mark: str) -> str:
    """Return the sign of the unit for the mark after the number: a currency, C, F or nothing."""
    return SIGNS[mark[1:]] if mark.startswith("\\") else "°" + mark.lower()


def _is_unit(words: str) -> bool:
    """Return whether words may follow a number as its unit.

    A single letter is a variable unless it is a unit's symbol."""
    for name in re.findall(r"[A-Za-z]+", words):
        if len(name) == 1:
            if name not in LETTERS:
                return False
        elif name.lower() in NO_UNITS:
            return False
    return True


def _may_be_variables(words: str) -> bool:
    """Return whether letters behind a number may be variables or a function: 3xy, 2lw, 2 sin x.

    Letters that touch the number are a unit only if the unit is known, as in 5km."""
    is_attached = not words[:1].isspace()
    for word in re.findall(r"[a-z]{2,}", words.lower()):
        if word in KNOWN_UNITS or word.removesuffix("s") in KNOWN_UNITS or word == "of":
            continue
        if is_attached or word in FUNCTIONS or len(word) == 2 or not re.search("[aeiou]", word):
            return True
    return False


def _unit(words: str, power: str) -> str:
    """Return the same spelling for a unit's spellings: cm for centimeters, cm^2 for "square cm"."""
    names = []
    for word in re.findall(r"[a-z]+", words.lower()):
        if word.endswith("s") and word not in ("s", "cents"):
            word = word[:-1]
        names.append(UNIT_WORDS.get(word, word))
    digits = re.findall(r"[23]", words + power)
    for word, digit in (("square", "2"), ("squared", "2"), ("cubic", "3"), ("cubed", "3")):
        if word in names:
            names.remove(word)
            digits.append(digit)
    name = "".join(names)
    return f"{name}^{digits[0]}" if digits else name
