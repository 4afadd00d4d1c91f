r"""Which sides of an equation name what the other side is worth: f(3) = 5, AB = 5, m + n = 16, (x,
y) = (3, -1).

A side is such a name only if nothing is left to solve. 2x = 10, x + 1 = 6, x^2 = 25, |x| = 5 and
x(x-1) = 6 give no value of x; 3 + 4 = 7 and \log_2 128 = 7 restate the question. Sides are given in
normal form.
"""

from __future__ import annotations

import re
from itertools import pairwise

from gspo.rewards.math.literal import NO_UNITS

VARIABLE = (
    r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]+\}))?'?(?:\([a-zA-Z](?:,[a-zA-Z])*\))?"
)
GREEK = r"\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|phi|varphi|omega|Delta|Omega|Phi|ell)(?![A-Za-z]) ?"
LETTER = rf"(?:[A-Za-z]|{GREEK})"
INDEX = r"(?:_(?:[0-9A-Za-z]|\\[a-z]+(?![A-Za-z])|\{(?:[^{}]|\{[^{}]*\})*\}))?"
ARGUMENT = r"\((?:[^()]|\([^()]*\))+\)"
ARROWED = r"\\(?:overline|vec|overrightarrow|widehat)(?:\{[A-Za-z]{1,3}\}| [A-Za-z])"
ANGLE = r"\\(?:angle|triangle) ?(?:[A-Z]{1,4}|\d|\{[A-Z]{1,4}\})"
QUANTITY = re.compile(
    rf"{LETTER}{INDEX}'*"
    rf"|(?P<function>[A-Za-z]|\\mathbb\{{?[EP]\}}?|\\Pr){INDEX}(?:\^\{{-1\}}|'*)(?:{ARGUMENT}|\[[^\[\]]*\]){INDEX}"
    rf"|\\text\{{(?P<words>[^{{}}=\d]+)\}}{INDEX}(?:{ARGUMENT})?"
    rf"|[A-Z]{{2,4}}|[A-Z]\^(?:\{{-1\}}|T)|{ARROWED}|m?{ANGLE}|\[[A-Z]{{3,6}}\]"
    rf"|\|(?:[A-Z]{{2}}|{ARROWED})\||\\lvert ?(?:[A-Z]{{2}}|{ARROWED})\\rvert"
    rf"|\\\|(?:[A-Za-z]{{1,2}}|{ARROWED}|\\text\{{[a-z]\}})\\\||\\(?:det|dim)(?: [A-Z]|{ARGUMENT})"
    rf"|\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])(?:\^\{{?\d\}}?)? ?(?:\d*{LETTER}|{ANGLE}|{ARGUMENT}|[A-Z]{{3}})"
)
HEDGES = NO_UNITS - {
    "the",
    "answer",
    "is",
    "are",
    "of",
    "by",
    "to",
    "between",
    "percent",
    "times",
    "point",
}
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
    """Return whether a side is one name: a letter, f(3), AB, an angle, words, or the cosine of an
    angle.
    """
    name = tight(side)
    if CONSTANT.match(name):
        return False
    if not (found := QUANTITY.fullmatch(name)):
        return re.fullmatch(VARIABLE, name) is not None
    if found.group("words"):
        return not HEDGES & set(re.findall("[a-z]+", side.lower())) and not CHINESE_HEDGES & set(
            side
        )
    own = found.group("function")  # x(x-1) is a product, not a function's value
    return not (
        own and re.search(rf"(?<![A-Za-z\\]){re.escape(own)}(?![A-Za-z(])", name[len(own) :])
    )


def combines_values(side: str) -> bool:
    """Return whether a side is put together from two names or more: m+n, xy, x^2+y^2, AB/BC. A
    single unknown, or a coefficient, makes it an equation to be solved."""
    side = tight(side)
    names = re.findall(
        LETTER + INDEX,
        re.sub(r"\\(?:frac|cdot|times|overline|vec|overrightarrow|widehat)", "", side),
    )
    return COMBINATION.fullmatch(side) is not None and len(set(names)) > 1


def tuple_of_names(side: str) -> tuple[str, ...]:
    """Return the names in (x,y), or none if it is not such a tuple or is reversed: (y,x) is not the
    point asked for.
    """
    found = TUPLE.fullmatch(tight(side))
    names = tuple(re.split(r"[,;](?![^()]*\))", found.group(1))) if found else ()
    return names if len(set(names)) == len(names) and usual_order(names) in ((), names) else ()


def usual_order(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return neighbouring letters in the order of the alphabet, or none if they are not neighbours
    and so have no usual order."""
    ordered = tuple(sorted(names))
    neighbours = all(len(name) == 1 for name in names) and all(
        ord(b) - ord(a) == 1 for a, b in pairwise(ordered)
    )
    return ordered if neighbours and len(names) > 1 else ()
