r"""The rules by which a mathematical answer agrees with a gold (the right answer).

1. A gold that is a number requires a number (see gspo.rewards.math.literal), and an exact number: a
   rounded decimal is wrong.
2. A gold has a single answer. Lists, sets, "or", \pm and chains of equalities (x=8=7) are wrong
   unless the gold is of the same kind. Several boxes are a list, unless each by itself agrees:
   \boxed{15\frac{39}{40}} or \boxed{\frac{639}{40}}. An equation that names the value answers it,
   either way round: x=7, 7=n, f(3)=7, AB=7, m+n=7 answer 7 (see gspo.rewards.math.names). 2x=14
   and 3+4=7 do not. If both name something, it must be the same.
3. Lists and sets agree in any order, element by element. No element may be missing and none too
   many. The braces of a set may be left out. Tuples, points and intervals keep their order and
   brackets. Unions agree in any order. A point may be given by its names: (x,y)=(3,-1), or x=3,
   y=-1 if the alphabet says which comes first. An inequality is its interval: x \le 3 is
   (-\infty,3], and \mathbb{R}\setminus[-1,4] is (-\infty,-1)\cup(4,\infty). Matrices agree entry by
   entry, whatever their brackets.
4. Text answers agree letter by letter without regard to case. A choice (B) is B. A choice with its
   value, (B) 12, answers B and 12, and is answered by either. If both sides have both, both must
   agree.
5. Other formulas agree if they are equal for all values of their variables (see formula.py for the
   words an answer may use). Equations agree if they are multiples of each other, but x=5 is not
   answered by 2x=10.
6. An answer that is written as the gold is, spaces aside, is correct. But a formula that cannot be
   parsed is no gold, whatever the answer: if its spelling alone were graded, right answers would
   count and wrong ones would be left out.
"""

import re
from collections.abc import Callable, Iterable

from gspo.rewards.math.formula import comparable, letters, without_bounds
from gspo.rewards.math.literal import Literal, split_unit
from gspo.rewards.math.names import usual_order
from gspo.rewards.math.text import (
    MINUS_INFINITY,
    PLUS_INFINITY,
    Node,
    fold,
    squeeze,
    structure,
    worth,
)

MAX_RATIO_CHARS = 120  # of a number that is compared with a formula
# (kind, gold, answer) -> whether two formulas or equations are the same. With kind "readable" only
# the gold is parsed.
Equal = Callable[[str, str, str], bool]


# 1011_2, 1011_{\text{two}} and, with letters as digits, A5_{16}
IN_BASE = re.compile(r"\s*(?:\d+\s*_.*|[0-9A-F]+\s*_\s*\{\s*1[1-6]\s*\})\s*")
SINGLE_IN_BRACES = re.compile(r"(?<=[_^])\{(\w)\}(?!\d)")


def agree(gold: Node, answer: Node, equal: Equal) -> bool:
    """Return whether an answer agrees with a gold.

    `equal` decides on formulas and equations that are spelled differently."""
    if _same_spelling(gold.text, answer.text):
        _ask_if_readable(gold, equal)
        return True
    if answer.kind == "boxes":
        together, *boxes = answer.parts
        return all(agree(gold, box, equal) for box in boxes) or agree(gold, together, equal)
    if "choice" in (gold.kind, answer.kind):
        return _agree_with_choice(gold, answer, equal)
    if gold.kind == "words" or re.fullmatch(r"[A-E]", gold.text):
        return fold(gold.text) == fold(answer.text)
    gold, answer = _in_same_form(gold, answer)
    if gold.kind == "named" or answer.kind == "named":
        return _agree_named(gold, answer, equal)
    if gold.kind == "equation" and answer.kind == "equation":
        return _same_equation(gold, answer, equal)
    if gold.kind == "number":
        return answer.kind == "number" and _same_number(gold, answer)
    if gold.kind == "formula":
        return _same_formula(gold, answer, equal)
    if gold.kind != answer.kind or len(gold.parts) != len(answer.parts):
        return False
    if gold.kind in ("several", "complement"):
        return _same_elements(gold.parts, answer.parts, equal)
    if gold.kind == "ordered":
        same_brackets = gold.parts[0] == answer.parts[0] and gold.parts[-1] == answer.parts[-1]
        return same_brackets and _all_agree(gold.parts[1:-1], answer.parts[1:-1], equal)
    if gold.kind != "matrix":
        return False
    row_pairs = list(zip(gold.parts, answer.parts, strict=True))
    same_shape = all(len(gold_row) == len(answer_row) for gold_row, answer_row in row_pairs)
    return same_shape and all(_all_agree(*row_pair, equal) for row_pair in row_pairs)


def _same_spelling(gold: str, answer: str) -> bool:
    """Return whether the texts are the same, apart from spaces and the braces of x^{n}."""
    gold_text, answer_text = (SINGLE_IN_BRACES.sub(r"\1", squeeze(text)) for text in (gold, answer))
    return gold_text == answer_text


def _agree_with_choice(gold: Node, answer: Node, equal: Equal) -> bool:
    """Return whether a choice with its value, as in (B) 12, agrees with the other side.

    The other side may have the letter, the value or both."""
    if gold.kind == answer.kind:
        return _all_agree(gold.parts, answer.parts, equal)
    if gold.kind == "choice":
        return any(agree(part, answer, equal) for part in gold.parts)
    letter, value = answer.parts
    is_letter = re.fullmatch(r"[A-E]", fold(gold.text).upper()) is not None
    return agree(gold, letter if is_letter else value, equal)


def _all_agree(golds: Iterable[Node], answers: Iterable[Node], equal: Equal) -> bool:
    return all(agree(gold, answer, equal) for gold, answer in zip(golds, answers, strict=True))


def _in_same_form(gold: Node, answer: Node) -> tuple[Node, Node]:
    """Return the two in a form in which they can be compared."""
    kinds = {gold.kind, answer.kind}
    # here 100,200 is a list, not a number
    if kinds == {"several", "number"} and gold.kind == "several" and "," in answer.text:
        elements = tuple(map(structure, answer.text.split(",")))
        return gold, Node("several", answer.text, elements)
    if kinds == {"several", "ordered"}:
        return _as_point(gold), _as_point(answer)
    # x=2, y=3 is answered by 2, 3 if the alphabet says which comes first, and not by 3, 2
    if kinds == {"several"} and len(_names(gold)) > 1 and not _names(answer):
        return _as_point(gold), Node("ordered", answer.text, ("(", *answer.parts, ")"))
    if kinds == {"several", "named"}:
        several = gold if gold.kind == "several" else answer
        if {part.kind for part in several.parts} == {"named"}:
            return _by_name(gold), _by_name(answer)
        return gold, answer
    if "complement" in kinds and kinds & {"several", "ordered"}:
        return _as_complement(gold), _as_complement(answer)
    if gold.kind not in ("equation", "named"):
        return gold, worth(answer) or answer
    return gold, answer


def _names(several: Node) -> set[str]:
    """Return the names to which the elements of a list give values, as in x=2, y=3."""
    return {part.parts[0] for part in several.parts if part.kind == "named"}


def _as_point(node: Node) -> Node:
    """Turn x=3, y=-1 into (3,-1)."""
    if node.kind != "several":
        return node
    values = {part.parts[0]: part.value for part in node.parts if part.kind == "named"}
    order = usual_order(tuple(values))
    if len(values) < len(node.parts) or not order or re.search(r"\bor\b|\\cup", node.text):
        return node
    return Node("ordered", node.text, ("(", *(values[name] for name in order), ")"))


def _by_name(node: Node) -> Node:
    """Turn (x,y)=(3,-1) into x=3, y=-1."""
    if node.kind != "named" or not node.parts[0].startswith("("):
        return node
    names = node.parts[0][1:-1].split(",")
    values = node.value.parts[1:-1]
    equations = [
        Node("named", f"{name}={value.text}", (name, "=", value))
        for name, value in zip(names, values, strict=True)
    ]
    return Node("several", node.text, tuple(equations))


def _as_complement(node: Node) -> Node:
    r"""Turn a union of intervals into the numbers that it leaves out.

    For example (-\infty,2)\cup(2,\infty) becomes 2. The intervals are read from left to right as
    written, except that the endless intervals go first and last."""
    if node.kind == "complement":
        return node
    parts = node.parts if node.kind == "several" else (node,)
    names = {part.parts[:2] if part.kind == "named" else "" for part in parts}
    if len(names) == 1:  # x<2 or x>3
        parts = tuple(part.value for part in parts)
    if not all(part.kind == "ordered" and len(part.parts) == 4 for part in parts):
        return node

    def order(interval: tuple) -> int:
        _, low, high, _ = interval
        return int(high == PLUS_INFINITY) - int(low == MINUS_INFINITY)

    intervals = sorted((part.parts for part in parts), key=order)
    gaps = []
    gap_start = MINUS_INFINITY
    gap_bracket = "("
    for left, low, high, right in (*intervals, ("[", PLUS_INFINITY, PLUS_INFINITY, "]")):
        closing = {"(": "]", "[": ")"}[left]
        if squeeze(gap_start.text) != squeeze(low.text):
            text = f"{gap_bracket}{gap_start.text},{low.text}{closing}"
            gaps.append(Node("ordered", text, (gap_bracket, gap_start, low, closing)))
        elif gap_bracket == "[" and closing == "]":
            gaps.append(gap_start)
        elif "infty" not in low.text:
            return node
        gap_start = high
        gap_bracket = {")": "[", "]": "("}[right]
    return Node("complement", node.text, tuple(gaps))


def _agree_named(gold: Node, answer: Node, equal: Equal) -> bool:
    other_name = gold.kind == answer.kind and gold.parts[0] != answer.parts[0]
    if other_name or "equation" in (gold.kind, answer.kind):
        return _same_equation(gold, answer, equal)
    return agree(gold.value, answer.value, equal)


def _same_equation(gold: Node, answer: Node, equal: Equal) -> bool:
    """Return whether the equations are multiples of each other.

    A gold that gives a variable its value is not answered by another equation."""
    if gold.kind == "named" and (gold.parts[1] != "=" or not letters(gold.value.text)):
        return False
    sides = [*gold.text.split("="), *answer.text.split("=")]
    vocabulary = gold.text.replace("=", "+")
    if len(sides) != 4 or not all(comparable(vocabulary, side) for side in sides[2:]):
        return False
    return equal("equation", gold.text, answer.text)


def _same_number(gold: Node, answer: Node) -> bool:
    gold_value, gold_unit = gold.parts
    answer_value, answer_unit = answer.parts
    if gold_value.percent:
        gold_unit = gold_unit or "%"
    if answer_value.percent:
        answer_unit = answer_unit or "%"
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    return gold_value.equals(answer_value)


def _same_formula(gold: Node, answer: Node, equal: Equal) -> bool:
    _ask_if_readable(gold, equal)
    gold_text, gold_unit = split_unit(gold.text)
    answer_text, answer_unit = split_unit(answer.text)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    if answer.kind not in ("number", "formula"):
        return False
    if _same_spelling(gold_text, answer_text):
        return True
    if not _can_be_computed(gold_text):
        return False
    if answer.kind == "number":
        number: Literal = answer.parts[0]
        ratio = number.value.as_integer_ratio()
        if number.percent or len(str(ratio)) > MAX_RATIO_CHARS:
            return False
        return equal("formula", gold_text, f"({ratio[0]})/({ratio[1]})")
    if "infty" in answer_text or not comparable(gold_text, answer_text):
        return False
    return equal("formula", gold_text, answer_text)


def _ask_if_readable(gold: Node, equal: Equal) -> None:
    """Ask whether the formulas of a gold can be parsed, also those of its parts."""
    if gold.kind == "formula":
        text, _ = split_unit(gold.text)
        if _can_be_computed(text):
            equal("readable", text, "")
    for part in gold.parts:
        for element in part if isinstance(part, tuple) else (part,):
            if isinstance(element, Node):
                _ask_if_readable(element, equal)


def _can_be_computed(gold: str) -> bool:
    """Return whether a gold has no infinity, dots, words, relations or bases of number systems."""
    if "infty" in gold or "dots" in gold or IN_BASE.fullmatch(gold):
        return False
    return not re.search(r"[=<>:;,&?'\"]|\\text|\\ne|\\approx|\\deg|\\pmod", without_bounds(gold))


def _same_elements(golds: tuple[Node, ...], answers: tuple[Node, ...], equal: Equal) -> bool:
    """Return whether every element has a partner, each used once."""
    unused = list(answers)
    for gold in golds:
        for index, answer in enumerate(unused):
            if agree(gold, answer, equal):
                del unused[index]
                break
        else:
            return False
    return not unused
