r"""Which sides of an equation name the value of the other side.

Examples are f(3) = 5, AB = 5, m + n = 16 and (x, y) = (3, -1). A side is such a name only if
nothing is left to solve. 2x = 10, x + 1 = 6, x^2 = 25, |x| = 5 and x(x-1) = 6 give no value of x.
3 + 4 = 7 and \log_2 128 = 7 restate the question. Sides are given in normal form.
"""

import re
from itertools import pairwise

from gspo.rewards.math.literal import NO_UNITS

VARIABLE = (
    r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]+\}))?'?(?:\([a-zA-Z](?:,[a-zA-Z])*\))?"
)
GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|phi|varphi|omega"
    r"|Delta|Omega|Phi|ell)(?![A-Za-z]) ?"
)
LETTER = rf"(?:[A-Za-z]|{GREEK})"
INDEX = r"(?:_(?:[0-9A-Za-z]|\\[a-z]+(?![A-Za-z])|\{(?:[^{}]|\{[^{}]*\})*\}))?"
ARGUMENT = r"\((?:[^()]|\([^()]*\))+\)"
ARROWED = r"\\(?:overline|vec|overrightarrow|widehat)(?:\{[A-Za-z]{1,3}\}| [A-Za-z])"
ANGLE = r"\\(?:angle|triangle) ?(?:[A-Z]{1,4}|\d|\{[A-Z]{1,4}\})"
QUANTITY = re.compile(
    rf"{LETTER}{INDEX}'*"
    rf"|(?P<function>[A-Za-z]|\\mathbb\{{?[EP]\}}?|\\Pr){INDEX}(?:\^\{{-1\}}|'*)"
    rf"(?:{ARGUMENT}|\[[^\[\]]*\]){INDEX}"
    rf"|\\text\{{(?P<words>[^{{}}=\d]+)\}}{INDEX}(?:{ARGUMENT})?"
    rf"|[A-Z]{{2,4}}|[A-Z]\^(?:\{{-1\}}|T)|{ARROWED}|m?{ANGLE}|\[[A-Z]{{3,6}}\]"
    rf"|\|(?:[A-Z]{{2}}|{ARROWED})\||\\lvert ?(?:[A-Z]{{2}}|{ARROWED})\\rvert"
    rf"|\\\|(?:[A-Za-z]{{1,2}}|{ARROWED}|\\text\{{[a-z]\}})\\\||\\(?:det|dim)(?: [A-Z]|{ARGUMENT})"
    r"|\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])(?:\^\{?\d\}?)? ?"
    rf"(?:\d*{LETTER}|{ANGLE}|{ARGUMENT}|[A-Z]{{3}})"
)
IN_NAMES = "the answer is are of by to between percent times point"
HEDGES = NO_UNITS - set(IN_NAMES.split())
CHINESE_HEDGES = set("不非错约或若至零一二三四五六七八九十百千万")
TERM = rf"(?:{LETTER}{INDEX}|\|[A-Z]{{2}}\||{ARROWED})(?:\^\{{?[23]\}}?)?"
PRODUCT = rf"{TERM}(?:(?:\\cdot |\\times )?{TERM})*"
QUOTIENT = rf"(?:\\frac\{{{PRODUCT}\}}\{{{PRODUCT}\}}|{PRODUCT}(?:[/:]{PRODUCT})*)"
COMBINATION = re.compile(rf"{QUOTIENT}(?:[+-]{QUOTIENT})*")
TUPLE = re.compile(rf"\(({VARIABLE}(?:[,;]{VARIABLE})+)\)")
CONSTANT = re.compile(r"\\(?:pi|infty|emptyset|ldots|dots|cdots)(?![A-Za-z])")


def tight(side: str) -> str:
    r"""Return the side without spaces, except between a command and a letter, as in \cos x."""
    return re.sub(r"(\\[A-Za-z]+ (?=[A-Za-z]))|\s+", lambda match: match.group(1) or "", side)


def names_a_value(side: str) -> bool:
    """Return whether a side is a single name.

    Names are a letter, f(3), AB, an angle, words, or the cosine of an angle."""
    name = tight(side)
    if CONSTANT.match(name):
        return False
    quantity = QUANTITY.fullmatch(name)
    if not quantity:
        return re.fullmatch(VARIABLE, name) is not None
    if quantity.group("words"):
        words = set(re.findall("[a-z]+", side.lower()))
        return not HEDGES & words and not CHINESE_HEDGES & set(side)
    function = quantity.group("function")
    if not function:
        return True
    # x(x-1) is a product, not a function's value
    alone = rf"(?<![A-Za-z\\]){re.escape(function)}(?![A-Za-z(])"
    return not re.search(alone, name[len(function) :])


def combines_values(side: str) -> bool:
    """Return whether a side is put together from two names or more: m+n, xy, x^2+y^2, AB/BC.

    A single unknown, or a coefficient, makes it an equation to be solved."""
    side = tight(side)
    commands = r"\\(?:frac|cdot|times|overline|vec|overrightarrow|widehat)"
    names = set(re.findall(LETTER + INDEX, re.sub(commands, "", side)))
    return COMBINATION.fullmatch(side) is not None and len(names) > 1


def tuple_of_names(side: str) -> tuple[str, ...]:
    """Return the names in (x,y), or none if the side is not such a tuple.

    It is none either if the tuple is reversed: (y,x) is not the wanted point."""
    match = TUPLE.fullmatch(tight(side))
    if not match:
        return ()
    names = tuple(re.split(r"[,;](?![^()]*\))", match.group(1)))
    is_usual = len(set(names)) == len(names) and usual_order(names) in ((), names)
    return names if is_usual else ()


def usual_order(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return neighbouring letters in the order of the alphabet.

    Return none if they are not neighbours and so have no usual order."""
    ordered = tuple(sorted(names))
    if len(names) < 2 or any(len(name) != 1 for name in names):
        return ()
    if any(ord(b) - ord(a) != 1 for a, b in pairwise(ordered)):
        return ()
    return ordered
