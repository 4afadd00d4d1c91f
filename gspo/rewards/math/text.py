"""What a mathematical answer in normal form is made of: numbers, words, lists, tuples, intervals,
equations, formulas.

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
    """A piece of an answer. `kind` says what `parts` holds:

    number    a Literal and the unit         words     nothing
    several   nodes in any order             ordered   opening bracket, nodes, closing bracket
    named     name, "=" or "in", node        equation  left and right text
    matrix    rows of nodes                  formula   nothing
    besides   nodes: all real numbers but these numbers and intervals
    choice    the node of a choice's letter, and that of its value
    boxes     the node of the list that several boxes make together, and the node of each box
    """

    kind: str
    text: str
    parts: tuple[Any, ...] = ()


class TooMany(ValueError):
    """Raised for more elements than any answer has."""


ELEMENTS = 40
ALONE = re.compile(rf"\s*{VARIABLE}\s*")
MEMBER = re.compile(rf"\s*({VARIABLE})\s*\\in(?![A-Za-z])\s*([^=]+)\Z", re.DOTALL)
POINTS = re.compile(
    rf"\s*(\({VARIABLE}(?:\s*,\s*{VARIABLE})+\))\s*\\in(?![A-Za-z])\s*([^=]+)\Z", re.DOTALL
)
BUILDER = re.compile(
    rf"\\\{{\s*({VARIABLE})\s*(?:\\in\s*\\mathbb\s*(?:\{{\s*R\s*\}}|R)\s*)?(?:\\mid(?![A-Za-z])|\||:)(.+)\\\}}\Z",
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
    r"(?:\\begin\s*\{(cases)\}|\\\{\s*\\begin\s*\{(array)\}(?:\s*\{[lcr ]*\})?)([^&]*)\\end\s*\{(?:\1|\2)\}\Z",
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
INFINITY = Node("formula", r"\infty"), Node("formula", r"-\infty")
WORDS = re.compile(r"[^\W\d_]{3,}(?:[ -][^\W\d_]+)*|[Nn]o(?: [^\W\d_]{3,})+|\([A-Z]\)")


def squeeze(text: str) -> str:
    """Return the text without spaces, except between digits: 1 1/2 is not 11/2."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def fold(text: str) -> str:
    r"""Return the letters of a text answer, without \text{}, brackets round a choice, quotes,
    spaces and case.
    """
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"[\s\"'`\\]+", "", text).rstrip(".").casefold()
    return text[1:-1] if re.fullmatch(r"\([a-z]\)", text) else text


@lru_cache(maxsize=4096)
def structure(text: str) -> Node:
    """Return what a text in normal form is made of. Raises TooMany."""
    text = text.strip()
    if _is_text(text):
        return Node("words", text)
    if choice := CHOICE.match(text):
        return Node("choice", text, (Node("words", choice.group(1)), structure(choice.group(2))))
    bare, unit = split_unit(text)
    if (number := literal(bare)) is not None:
        return Node("number", text, (number, unit))
    if (table := TABLE.match(text)) and bool(table.group(1)) == bool(table.group(4)):
        rows = [row for row in split(table.group(3), ("\\\\",)) if row.strip()]
        return Node(
            "matrix",
            text,
            tuple(tuple(structure(cell) for cell in split(row, ("&",))) for row in rows),
        )
    if system := SYSTEM.match(text):
        lines = [
            structure(row.strip(" ,"))
            for row in split(system.group(3), ("\\\\",))
            if row.strip(" ,")
        ]
        names = {line.parts[0] for line in lines if line.kind == "named" and line.parts[1] == "="}
        return Node("several" if len(names) == len(lines) else "formula", text, tuple(lines))
    written = text
    text = re.sub(r",\s*\\text\{\s*(?:and|or)\s*\}|,\s*(?:and|or)(?![A-Za-z])", ",", text)
    for parts in (_alternatives(text), *(split(text, (sign,)) for sign in (";", ",", "\\cup"))):
        if len(parts) > 1:
            return _several(written, parts)
    return _single(text)


def _is_text(text: str) -> bool:
    r"""Return whether this is words: \text{...} as a whole, a plain word of three letters or more,
    "no ...", or a choice in brackets."""
    if re.fullmatch(r"\\text\s*\{\s*\(?[A-Za-z][^{}=]*\}", text):
        return not OR.search(text[6:])
    return WORDS.fullmatch(text) is not None and not OR.search(text)


def _alternatives(text: str) -> list[str]:
    places, parts = 0, []
    for separator in OR.finditer(text):
        parts.append(text[places : separator.start()])
        places = separator.end()
    return [*parts, text[places:]]


def _several(text: str, parts: list[str]) -> Node:
    """Return elements in any order as one node; lists within lists become one list."""
    nodes: list[Node] = []
    for part in parts:
        node = structure(part)
        # the empty set is an element, and so is a set with braces of its own
        flat = node.kind == "several" and node.parts and not part.strip().startswith("\\{")
        nodes += node.parts if flat else [node]
        if len(nodes) > ELEMENTS:
            raise TooMany
    return Node("several", text, tuple(nodes))


def _single(text: str) -> Node:
    """Return the node for a text without separators at its top level."""
    if builder := BUILDER.match(text):  # {x | x > 3} is the interval that its condition gives
        condition = structure(builder.group(2))
        if condition.kind == "named" and condition.parts[:2] == (squeeze(builder.group(1)), "in"):
            return condition
    sides = COMPARISON.split(text)
    if len(sides) > 1:
        return _inequality(text, sides)
    sides = split(text, ("=",))
    if len(sides) == 2 and "\\ne" not in text and "\\approx" not in text:
        return _equation(text, *sides)
    if (member := MEMBER.match(text)) and not MEMBER.match(member.group(2)):
        return Node("named", text, (squeeze(member.group(1)), "in", structure(member.group(2))))
    if points := POINTS.match(text):
        return Node("named", text, (squeeze(points.group(1)), "in", structure(points.group(2))))
    if (unequal := UNEQUAL.match(text)) and not UNEQUAL.match(unequal.group(2)):
        return Node(
            "named", text, (squeeze(unequal.group(1)), "in", _besides(text, unequal.group(2)))
        )
    if reals := REALS.match(text):
        return _besides(text, reals.group(1))
    if text == "\\emptyset" or squeeze(text) == "\\{\\}":
        return Node("several", text)
    if text.startswith("\\{") and text.endswith("\\}"):
        return _several(text, split(text[2:-2], (",", ";")))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _encloses(text):
        inside = split(text[1:-1], (";",) if ";" in text else (",",))
        if len(inside) > 1:
            return Node("ordered", text, (text[0], *map(structure, inside), text[-1]))
    # alone it means \pm; beside \pm it is the other sign
    if "\\mp" in text and text.count("\\pm") < 2:
        upper = ("+", "-") if "\\pm" in text else ("-", "+")
        return _several(
            text, [text.replace("\\pm", pm).replace("\\mp", mp) for pm, mp in (upper, upper[::-1])]
        )
    if "\\pm" in text and text.count("\\pm") < 4 and "\\mp" not in text:
        return _several(text, [text.replace("\\pm", sign, 1) for sign in ("+", "-")])
    if squeeze(text) in ("\\infty", "+\\infty", "-\\infty"):
        return INFINITY["-" in text]
    return Node("formula", re.sub(r"^\s*\+", "", text).strip())


def _equation(text: str, left: str, right: str) -> Node:
    """Return a name and its value, whichever side names it, or else an equation. A name whose value
    contains it is to be solved."""
    if names_a_value(right) and not names_a_value(left):
        left, right = right, left
    if names := tuple_of_names(left):
        value = structure(right)
        if value.kind == "ordered" and value.parts[0] == "(" and len(value.parts) == len(names) + 2:
            return Node("named", text, (f"({','.join(names)})", "=", value))
    elif names_a_value(left):
        value = structure(right)
        name = squeeze(left)
        if (
            len(name) > 1
            or value.kind != "formula"
            or name not in letters(re.sub(r"\w_|\\text\{[^}]*\}", "", right))
        ):
            return Node("named", text, (name, "=", value))
    return Node("equation", text, (left, right))


def worth(node: Node) -> Node | None:
    """Return the value that an equation gives for several names together, as in m+n = 16, or None
    if there is none.
    """
    for names, value in (node.parts, node.parts[::-1]) if node.kind == "equation" else ():
        if combines_values(names) and not letters(value):
            return structure(value)
    return None


def _besides(text: str, left_out: str | None) -> Node:
    """Return the real numbers without those that are left out."""
    node = structure(left_out) if left_out else Node("several", "")
    parts = node.parts if node.kind == "several" else (node,)
    return Node(
        "besides",
        text,
        tuple(p for part in parts for p in (part.parts if part.kind == "several" else (part,))),
    )


def _inequality(text: str, sides: list[str]) -> Node:
    """Return an interval for x < b, a < x or a < x < b, and otherwise a formula, which only its own
    spelling equals.
    """
    terms, signs = (
        sides[::2],
        [sign.replace("\\le", "<=").replace("\\ge", ">=") for sign in sides[1::2]],
    )
    if signs and all(sign[0] == ">" for sign in signs):  # such a chain is read from right to left
        terms, signs = terms[::-1], [sign.replace(">", "<") for sign in signs[::-1]]
    names = [
        place for place, term in enumerate(terms) if ALONE.fullmatch(term) and "infty" not in term
    ]
    if (
        len(names) != 1
        or len(terms) > 3
        or any(sign[0] != "<" for sign in signs)
        or len(terms) - names[0] > 2
    ):
        return Node("formula", text)
    place = names[0]
    if len(terms) == 3 and place != 1:
        return Node("formula", text)
    low = structure(terms[place - 1]) if place else INFINITY[1]
    high = structure(terms[place + 1]) if place + 1 < len(terms) else INFINITY[0]
    opening = "[" if place and signs[place - 1] == "<=" else "("
    closing = "]" if place + 1 < len(terms) and signs[place] == "<=" else ")"
    return Node(
        "named",
        text,
        (squeeze(terms[place]), "in", Node("ordered", text, (opening, low, high, closing))),
    )


def split(text: str, separators: tuple[str, ...]) -> list[str]:
    r"""Return the text cut at separators that stand in no bracket, brace or \begin...\end."""
    parts, start, depth = [], 0, 0
    for token in TOKEN.finditer(text):
        sign = token.group()
        if sign in ("(", "[", "{", "\\{", "\\begin"):
            depth += 1
        elif sign in (")", "]", "}", "\\}", "\\end"):
            depth -= 1
        elif depth == 0 and (
            found := next((s for s in separators if text.startswith(s, token.start())), None)
        ):
            parts.append(text[start : token.start()])
            start = token.start() + len(found)
    return [*parts, text[start:]]


def _encloses(text: str) -> bool:
    """Return whether the first bracket is closed by the last character."""
    depth = 0
    for token in TOKEN.finditer(text):
        depth += token.group() in ("(", "[", "{", "\\{")
        depth -= token.group() in (")", "]", "}", "\\}")
        if depth == 0:
            return token.end() == len(text)
    return False


def spelling(node: Node) -> str:
    """Return one spelling for answers that are the same number, list of numbers or text, for
    majority votes.
    """
    if node.kind == "number":
        return node.parts[0].text()
    if node.kind == "words":
        return fold(node.text)
    if node.kind == "named":
        return spelling(node.parts[2])
    if node.kind == "choice":
        return spelling(node.parts[1])
    if node.kind == "boxes":
        each = {spelling(box) for box in node.parts[1:]}
        return each.pop() if len(each) == 1 else spelling(node.parts[0])
    if (value := worth(node)) is not None:
        return spelling(value)
    if node.kind == "several" and node.parts:
        return "{" + ",".join(sorted(map(spelling, node.parts))) + "}"
    if node.kind == "ordered":
        return ",".join(part if isinstance(part, str) else spelling(part) for part in node.parts)
    return squeeze(node.text)
