"""The structure of a mathematical answer in normal form: numbers, words, lists, intervals, ...

gspo.rewards.math.agree says when two of them agree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gspo.rewards.math.formula import letters
from gspo.rewards.math.literal import literal, split_unit
from gspo.rewards.math.names import VARIABLE, combines_values, names_a_value, tuple_of_names


@dataclass(frozen=True)
class Node:
    """A piece of an answer. `parts` depends on the kind:

    number    a Literal and the unit         words     nothing
    several   nodes in any order             ordered   opening bracket, nodes, closing bracket
    named     name, "=" or "in", node        equation  left and right text
    matrix    rows of nodes                  formula   nothing
    complement  nodes: the numbers and intervals that the set of real numbers leaves out
    choice    the node of a choice's letter, and the node of its value
    boxes     the node of the list that several boxes make together, and the node of each box
    """

    kind: str
    text: str
    parts: tuple[Any, ...] = ()

    @property
    def value(self) -> Node:
        """The value of a named node, and any other node itself."""
        return self.parts[2] if self.kind == "named" else self


class TooManyElements(ValueError):
    """Raised for more elements than any answer has."""


MAX_ELEMENTS = 40
ALONE = re.compile(rf"\s*{VARIABLE}\s*")
MEMBER = re.compile(rf"\s*({VARIABLE})\s*\\in(?![A-Za-z])\s*([^=]+)\Z", re.DOTALL)
POINTS = re.compile(
    rf"\s*(\({VARIABLE}(?:\s*,\s*{VARIABLE})+\))\s*\\in(?![A-Za-z])\s*([^=]+)\Z", re.DOTALL
)
BUILDER = re.compile(
    rf"\\\{{\s*({VARIABLE})\s*(?:\\in\s*\\mathbb\s*(?:\{{\s*R\s*\}}|R)\s*)?"
    r"(?:\\mid(?![A-Za-z])|\||:)(.+)\\\}\Z",
    re.DOTALL,
)
UNEQUAL = re.compile(rf"\s*({VARIABLE})\s*\\ne(?![A-Za-z])\s*(.+)\Z", re.DOTALL)
COMPARISON = re.compile(r"(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|<=|>=|<|>)")
TABLE = re.compile(
    r"([(\[]?)\s*\\begin\s*\{([pbB]?matrix|smallmatrix|array)\}(?:\s*\{[lcr| ]*\})?"
    r"(.*)\\end\s*\{\2\}\s*([)\]]?)\Z",
    re.DOTALL,
)
SYSTEM = re.compile(
    r"(?:\\begin\s*\{(cases)\}|\\\{\s*\\begin\s*\{(array)\}(?:\s*\{[lcr ]*\})?)"
    r"([^&]*)\\end\s*\{(?:\1|\2)\}\Z",
    re.DOTALL,
)
REALS = re.compile(
    r"(?:\\mathbb\s*(?:\{\s*R\s*\}|R)|\(-\s*\\infty\s*,\s*\+?\\infty\s*\)(?=\s*\\))\s*"
    r"(?:(?:\\(?:setminus|backslash)(?![A-Za-z])|-(?=\s*\\\{))(.+))?\Z",
    re.DOTALL,
)
CHOICE = re.compile(r"\\text\s*\{\s*\(([A-E])\)\s*\}\s*(.*\S.*)\Z", re.DOTALL)  # \textbf{(B)}\ 12
OR = re.compile(r"\\text\s*\{\s*,?\s*(?:or|and)\s*\}|(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
TOKEN = re.compile(r"\\begin|\\end|\\[{}]|\\.|.", re.DOTALL)
PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")  # not of \pmod
SEGMENT = re.compile(r"\\overline\s*\{\s*[A-Z]{2,3}\s*\}")
PLUS_INFINITY = Node("formula", r"\infty")
MINUS_INFINITY = Node("formula", r"-\infty")
WORDS = re.compile(r"[^\W\d_]{3,}(?:[ -][^\W\d_]+)*|[Nn]o(?: [^\W\d_]{3,})+|\([A-Z]\)")


def squeeze(text: str) -> str:
    """Return the text without spaces, except between digits: 1 1/2 is not 11/2."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def fold(text: str) -> str:
    r"""Return the letters of a text answer.

    They are without \text{} and \overline{}, brackets round a choice, quotes, spaces and case.
    """
    text = re.sub(r"\\(?:text|overline)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"[\s\"'`\\]+", "", text).rstrip(".").casefold()
    return text[1:-1] if re.fullmatch(r"\([a-z]\)", text) else text


@lru_cache(maxsize=4096)
def structure(text: str) -> Node:
    """Return the structure of a text in normal form. Raises TooManyElements."""
    text = text.strip()
    if _is_words(text):
        return Node("words", text)
    choice = CHOICE.match(text)
    if choice:
        letter, value = choice.groups()
        return Node("choice", text, (Node("words", letter), structure(value)))
    number_text, unit = split_unit(text)
    number = literal(number_text)
    if number is not None:
        return Node("number", text, (number, unit))
    table = TABLE.match(text)
    if table and bool(table.group(1)) == bool(table.group(4)):
        rows = [row for row in split(table.group(3), "\\\\") if row.strip()]
        nodes = tuple(tuple(map(structure, split(row, "&"))) for row in rows)
        return Node("matrix", text, nodes)
    system = SYSTEM.match(text)
    if system:
        lines = [line.strip(" ,") for line in split(system.group(3), "\\\\")]
        nodes = tuple(structure(line) for line in lines if line)
        names = {node.parts[0] for node in nodes if node.kind == "named" and node.parts[1] == "="}
        kind = "several" if len(names) == len(nodes) else "formula"
        return Node(kind, text, nodes)
    without_and = re.sub(r",\s*\\text\{\s*(?:and|or)\s*\}|,\s*(?:and|or)(?![A-Za-z])", ",", text)
    alternatives = OR.split(without_and)
    if len(alternatives) > 1:
        return _several(text, alternatives)
    for separator in (";", ",", "\\cup"):
        elements = split(without_and, separator)
        if len(elements) > 1:
            return _several(text, elements)
    return _without_separators(without_and)


def _is_words(text: str) -> bool:
    r"""Return whether the text is words.

    Words are \text{...} as a whole, a plain word of three letters or more, "no ...", a choice in
    brackets, and a line segment \overline{AB}."""
    if SEGMENT.fullmatch(text):
        return True
    if re.fullmatch(r"\\text\s*\{\s*\(?[A-Za-z][^{}=]*\}", text):
        return not OR.search(text[6:])
    return WORDS.fullmatch(text) is not None and not OR.search(text)


def _several(text: str, elements: list[str]) -> Node:
    """Return elements in any order as a single node. Lists within lists become a single list."""
    nodes = []
    for element in elements:
        node = structure(element)
        # the empty set is an element, and so is a set with braces of its own
        is_list = node.kind == "several" and node.parts and not element.strip().startswith("\\{")
        nodes += node.parts if is_list else [node]
        if len(nodes) > MAX_ELEMENTS:
            raise TooManyElements
    return Node("several", text, tuple(nodes))


def _without_separators(text: str) -> Node:
    """Return the node for a text without separators at its top level."""
    builder = BUILDER.match(text)
    if builder:  # {x | x > 3} is the interval that its condition gives
        condition = structure(builder.group(2))
        if condition.kind == "named" and condition.parts[:2] == (squeeze(builder.group(1)), "in"):
            return condition
    sides = COMPARISON.split(text)
    if len(sides) > 1:
        return _inequality(text, sides)
    sides = split(text, "=")
    if len(sides) == 2 and "\\ne" not in text and "\\approx" not in text:
        return _equation(text, *sides)
    named = _membership(text)
    if named:
        return named
    reals = REALS.match(text)
    if reals:
        return _complement(text, reals.group(1))
    if text == "\\emptyset" or squeeze(text) == "\\{\\}":
        return Node("several", text)
    if text.startswith("\\{") and text.endswith("\\}"):
        return _several(text, split(text[2:-2], ",", ";"))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _encloses(text):
        elements = split(text[1:-1], ";" if ";" in text else ",")
        if len(elements) > 1:
            return Node("ordered", text, (text[0], *map(structure, elements), text[-1]))
    # alone \mp means \pm, beside \pm it is the other sign
    plus_minus_count = len(PLUS_MINUS.findall(text))
    if "\\mp" in text and plus_minus_count < 2:
        minus_plus = PLUS_MINUS.sub("-", text).replace("\\mp", "+")
        plus_minus = PLUS_MINUS.sub("+", text).replace("\\mp", "-")
        signs = [plus_minus, minus_plus] if plus_minus_count else [minus_plus, plus_minus]
        return _several(text, signs)
    if 0 < plus_minus_count < 4 and "\\mp" not in text:
        return _several(text, [PLUS_MINUS.sub(sign, text, count=1) for sign in ("+", "-")])
    if squeeze(text) in ("\\infty", "+\\infty", "-\\infty"):
        return MINUS_INFINITY if "-" in text else PLUS_INFINITY
    return Node("formula", re.sub(r"^\s*\+", "", text).strip())


def _membership(text: str) -> Node | None:
    r"""Return the node for x \in S, (x,y) \in S or x \ne a, or None if the text is none of them."""
    member = MEMBER.match(text)
    if member and MEMBER.match(member.group(2)):
        member = None
    member = member or POINTS.match(text)
    if member:
        return Node("named", text, (squeeze(member.group(1)), "in", structure(member.group(2))))
    unequal = UNEQUAL.match(text)
    if unequal and not UNEQUAL.match(unequal.group(2)):
        others = _complement(text, unequal.group(2))
        return Node("named", text, (squeeze(unequal.group(1)), "in", others))
    return None


def _equation(text: str, left: str, right: str) -> Node:
    """Return a name and its value, whichever side names it, or else an equation.

    A name whose value contains it is to be solved."""
    if names_a_value(right) and not names_a_value(left):
        left, right = right, left
    names = tuple_of_names(left)
    if names:
        value = structure(right)
        if value.kind == "ordered" and value.parts[0] == "(" and len(value.parts) == len(names) + 2:
            return Node("named", text, (f"({','.join(names)})", "=", value))
    elif names_a_value(left):
        value = structure(right)
        name = squeeze(left)
        variables = letters(re.sub(r"\w_|\\text\{[^}]*\}", "", right))
        if len(name) > 1 or value.kind != "formula" or name not in variables:
            return Node("named", text, (name, "=", value))
    return Node("equation", text, (left, right))


def worth(node: Node) -> Node | None:
    """Return the value that an equation gives for several names together, as in m+n = 16.

    Return None if there is none."""
    if node.kind != "equation":
        return None
    left, right = node.parts
    for names, value in ((left, right), (right, left)):
        if combines_values(names) and not letters(value):
            return structure(value)
    return None


def _complement(text: str, left_out: str | None) -> Node:
    """Return the real numbers without the numbers that are left out."""
    node = structure(left_out) if left_out else Node("several", "")
    parts = []
    for part in node.parts if node.kind == "several" else (node,):
        parts += part.parts if part.kind == "several" else (part,)
    return Node("complement", text, tuple(parts))


def _inequality(text: str, sides: list[str]) -> Node:
    """Return an interval for x < b, a < x or a < x < b.

    Return a formula for all others, which only its own spelling equals."""
    terms = sides[::2]
    signs = [sign.replace("\\le", "<=").replace("\\ge", ">=") for sign in sides[1::2]]
    if all(sign[0] == ">" for sign in signs):  # such a chain is read from right to left
        terms = terms[::-1]
        signs = [sign.replace(">", "<") for sign in signs[::-1]]
    positions = [i for i, term in enumerate(terms) if ALONE.fullmatch(term) and "infty" not in term]
    if len(positions) != 1 or len(terms) > 3 or any(sign[0] != "<" for sign in signs):
        return Node("formula", text)
    (position,) = positions
    if len(terms) == 3 and position != 1:
        return Node("formula", text)
    left: tuple[Any, ...] = ("(", MINUS_INFINITY)
    right: tuple[Any, ...] = (PLUS_INFINITY, ")")
    if position > 0:
        left = ("[" if signs[position - 1] == "<=" else "(", structure(terms[position - 1]))
    if position + 1 < len(terms):
        right = (structure(terms[position + 1]), "]" if signs[position] == "<=" else ")")
    interval = Node("ordered", text, left + right)
    return Node("named", text, (squeeze(terms[position]), "in", interval))


def split(text: str, *separators: str) -> list[str]:
    r"""Return the text cut at separators that stand in no bracket, brace or \begin...\end."""
    parts = []
    start = 0
    depth = 0
    for token in TOKEN.finditer(text):
        sign = token.group()
        if sign in ("(", "[", "{", "\\{", "\\begin"):
            depth += 1
        elif sign in (")", "]", "}", "\\}", "\\end"):
            depth -= 1
        elif depth == 0:
            for separator in separators:
                if text.startswith(separator, token.start()):
                    parts.append(text[start : token.start()])
                    start = token.start() + len(separator)
                    break
    return [*parts, text[start:]]


def _encloses(text: str) -> bool:
    """Return whether the first bracket is closed by the last character."""
    depth = 0
    for token in TOKEN.finditer(text):
        if token.group() in ("(", "[", "{", "\\{"):
            depth += 1
        elif token.group() in (")", "]", "}", "\\}"):
            depth -= 1
        if depth == 0:
            return token.end() == len(text)
    return False


def spelling(node: Node) -> str:
    """Return a spelling for majority votes: equal numbers, lists and texts have the same."""
    if node.kind == "number":
        return node.parts[0].text()
    if node.kind == "words":
        return fold(node.text)
    if node.kind == "named":
        return spelling(node.value)
    if node.kind == "choice":
        return spelling(node.parts[1])
    if node.kind == "boxes":
        together, *boxes = node.parts
        spellings = set(map(spelling, boxes))
        return spellings.pop() if len(spellings) == 1 else spelling(together)
    value = worth(node)
    if value is not None:
        return spelling(value)
    if node.kind == "several" and node.parts:
        return "{" + ",".join(sorted(map(spelling, node.parts))) + "}"
    if node.kind == "ordered":
        return ",".join(part if isinstance(part, str) else spelling(part) for part in node.parts)
    return squeeze(node.text)
