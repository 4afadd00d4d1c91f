r"""Rules of judgement for mathematical answers: when an answer agrees with a gold (the right
answer).

1. A gold that is a number requires a number (see gspo.rewards.math.literal), and an exact one: a
   rounded decimal is wrong.
2. One answer is given for one gold. Lists, sets, "or", \pm and chains of equalities (x=8=7) are
   wrong unless the gold is one. Several boxes are a list, unless each by itself agrees:
   \boxed{15\frac{39}{40}} or \boxed{\frac{639}{40}}. An equation that names the value answers it,
   either way round: x=7, 7=n, f(3)=7, AB=7, m+n=7 answer 7 (see gspo.rewards.math.names; 2x=14
   and 3+4=7 do not). Where both name something, it must be the same.
3. Lists and sets agree in any order, element by element, with no element missing and none too many;
   the braces of a set may be left out. Tuples, points and intervals keep their order and brackets;
   unions agree in any order. A point may be given by its names: (x,y)=(3,-1), or x=3, y=-1 where
   the alphabet says which comes first. An inequality is its interval: x \le 3 is (-\infty,3];
   \mathbb{R}\setminus[-1,4] is (-\infty,-1)\cup(4,\infty). Matrices agree entry by entry, whatever
   their brackets.
4. Text answers agree letter by letter without regard to case; a choice (B) is B. A choice with its
   value, (B) 12, answers B and 12, and is answered by either; where both sides have both, both must
   agree.
5. Other formulas agree if they are equal for all values of their variables (see formula.py for the
   words an answer may use). Equations agree if they are multiples of each other, but x=5 is not
   answered by 2x=10.
6. An answer that is written as the gold is, spaces aside, is correct.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gspo.rewards.math.formula import comparable, letters, without_bounds
from gspo.rewards.math.literal import Literal, split_unit
from gspo.rewards.math.names import usual_order
from gspo.rewards.math.text import INFINITY, Node, fold, squeeze, structure, worth

# (kind, gold, answer) -> whether two formulas or equations are the same; of kind "readable" the
# gold alone is parsed
Equal = Callable[[str, str, str], bool]


def agree(gold: Node, answer: Node, equal: Equal) -> bool:
    """Return whether an answer agrees with a gold. `equal` decides on formulas and equations that
    are spelled differently."""
    if squeeze(gold.text) == squeeze(answer.text):
        return True
    if answer.kind == "boxes":
        together, *boxes = answer.parts
        return all(agree(gold, box, equal) for box in boxes) or agree(gold, together, equal)
    if "choice" in (gold.kind, answer.kind):
        return _agree_with_choice(gold, answer, equal)
    if gold.kind == "words" or re.fullmatch(r"[A-E]", gold.text):
        return fold(gold.text) == fold(answer.text)
    gold, answer = _alike(gold, answer)
    if gold.kind == "named" or answer.kind == "named":
        return _agree_named(gold, answer, equal)
    if gold.kind == "equation" and answer.kind == "equation":
        return _same_equation(gold, answer, equal)
    if gold.kind == "number":
        return answer.kind == "number" and _same_number(gold, answer)
    if gold.kind == "formula":
        _check_readable(gold, equal)
        return answer.kind in ("number", "formula") and _same_formula(gold, answer, equal)
    if gold.kind != answer.kind or len(gold.parts) != len(answer.parts):
        return False
    if gold.kind in ("several", "besides"):
        return _same_elements(gold.parts, answer.parts, equal)
    if gold.kind == "ordered":
        pairs = zip(gold.parts[1:-1], answer.parts[1:-1], strict=True)
        return (
            gold.parts[0] == answer.parts[0]
            and gold.parts[-1] == answer.parts[-1]
            and _all(pairs, equal)
        )
    if gold.kind != "matrix":
        return False
    rows = list(zip(gold.parts, answer.parts, strict=True))
    same_shape = all(len(one) == len(other) for one, other in rows)
    return same_shape and _all(
        [pair for one, other in rows for pair in zip(one, other, strict=True)], equal
    )


def _agree_with_choice(gold: Node, answer: Node, equal: Equal) -> bool:
    """Return whether a choice with its value, as in (B) 12, agrees: in what the other side has of
    the two.
    """
    if gold.kind == answer.kind:
        return all(
            agree(one, other, equal) for one, other in zip(gold.parts, answer.parts, strict=True)
        )
    if gold.kind == "choice":
        return any(agree(part, answer, equal) for part in gold.parts)
    letter, value = answer.parts
    is_letter = re.fullmatch(r"[A-E]", fold(gold.text).upper()) is not None
    return agree(gold, letter if is_letter else value, equal)


def _all(pairs: Any, equal: Equal) -> bool:
    return all(agree(one, other, equal) for one, other in pairs)


def _alike(gold: Node, answer: Node) -> tuple[Node, Node]:
    """Return the two in a form in which they can be compared."""
    kinds = {gold.kind, answer.kind}
    # here 100,200 is a list, not a number
    if kinds == {"several", "number"} and gold.kind == "several" and "," in answer.text:
        return gold, Node("several", answer.text, tuple(map(structure, answer.text.split(","))))
    if kinds == {"several", "ordered"}:
        return _as_point(gold), _as_point(answer)
    if kinds == {"several", "named"}:
        listed = gold if gold.kind == "several" else answer
        return (
            (_by_name(gold), _by_name(answer))
            if {p.kind for p in listed.parts} == {"named"}
            else (gold, answer)
        )
    if "besides" in kinds and kinds & {"several", "ordered"}:
        return _as_besides(gold), _as_besides(answer)
    if gold.kind not in ("equation", "named") and (value := worth(answer)) is not None:
        return gold, value
    return gold, answer


def _as_point(node: Node) -> Node:
    """Turn x=3, y=-1 into (3,-1)."""
    named = {
        p.parts[0]: p.parts[2] for p in node.parts if node.kind == "several" and p.kind == "named"
    }
    order = usual_order(tuple(named))
    if len(named) < len(node.parts) or not order or re.search(r"\bor\b|\\cup", node.text):
        return node
    return Node("ordered", node.text, ("(", *(named[name] for name in order), ")"))


def _by_name(node: Node) -> Node:
    """Turn (x,y)=(3,-1) into x=3, y=-1."""
    if node.kind != "named" or not node.parts[0].startswith("("):
        return node
    names = node.parts[0][1:-1].split(",")
    pairs = zip(names, node.parts[2].parts[1:-1], strict=True)
    named = [Node("named", f"{name}={value.text}", (name, "=", value)) for name, value in pairs]
    return Node("several", node.text, tuple(named))


def _as_besides(node: Node) -> Node:
    r"""Turn a union of intervals into what it leaves out: (-\infty,2)\cup(2,\infty) into 2. The
    intervals are taken from left to right as written, except that the endless ones go first and
    last."""
    parts = node.parts if node.kind == "several" else (node,)
    if len({part.parts[:2] if part.kind == "named" else "" for part in parts}) == 1:  # x<2 or x>3
        parts = tuple(part.parts[2] if part.kind == "named" else part for part in parts)
    if node.kind == "besides" or not all(
        part.kind == "ordered" and len(part.parts) == 4 for part in parts
    ):
        return node
    intervals = sorted(
        (p.parts for p in parts), key=lambda p: (p[2] == INFINITY[0]) - (p[1] == INFINITY[1])
    )
    left_out, (start, opening) = [], (INFINITY[1], "(")
    for left, low, high, right in (*intervals, ("[", INFINITY[0], INFINITY[0], "]")):
        closing = {"(": "]", "[": ")"}[left]
        if squeeze(start.text) != squeeze(low.text):
            text = f"{opening}{start.text},{low.text}{closing}"
            left_out.append(Node("ordered", text, (opening, start, low, closing)))
        elif opening + closing == "[]":
            left_out.append(start)
        elif "infty" not in low.text:
            return node
        start, opening = high, {")": "[", "]": "("}[right]
    return Node("besides", node.text, tuple(left_out))


def _agree_named(gold: Node, answer: Node, equal: Equal) -> bool:
    if gold.kind == answer.kind == "named":
        if gold.parts[0] == answer.parts[0]:
            return agree(gold.parts[2], answer.parts[2], equal)
        return _same_equation(gold, answer, equal)
    if gold.kind == "named" and answer.kind == "equation":
        return _same_equation(gold, answer, equal)
    if gold.kind == "equation":
        return answer.kind == "named" and _same_equation(gold, answer, equal)
    return (
        agree(gold.parts[2], answer, equal)
        if gold.kind == "named"
        else agree(gold, answer.parts[2], equal)
    )


def _same_equation(gold: Node, answer: Node, equal: Equal) -> bool:
    """Return whether the equations are multiples of each other. A gold that gives a variable its
    value is not answered by another equation."""
    if gold.kind == "named" and (gold.parts[1] != "=" or not letters(gold.parts[2].text)):
        return False
    sides = [side for text in (gold.text, answer.text) for side in text.split("=")]
    if len(sides) != 4 or not all(
        comparable(gold.text.replace("=", "+"), side) for side in sides[2:]
    ):
        return False
    return equal("equation", gold.text, answer.text)


def _same_number(gold: Node, answer: Node) -> bool:
    (value, unit), (other, other_unit) = gold.parts, answer.parts
    unit, other_unit = unit or "%" * value.percent, other_unit or "%" * other.percent
    return (unit == other_unit or not unit or not other_unit) and value.equals(other)


def _check_readable(gold: Node, equal: Equal) -> None:
    """Have the gold parsed, whatever the answer: where it cannot be, no response is to blame."""
    text, _ = split_unit(gold.text)
    if "infty" not in text and _plain(text):
        equal("readable", text, "")


def _same_formula(gold: Node, answer: Node, equal: Equal) -> bool:
    (text, unit), (other, other_unit) = split_unit(gold.text), split_unit(answer.text)
    if unit and other_unit and unit != other_unit:
        return False
    if squeeze(text) == squeeze(other):
        return True
    if answer.kind == "number":
        number: Literal = answer.parts[0]
        if "infty" in text or len(number.value.as_integer_ratio().__str__()) > 120:
            return False
        value = f"({number.value.numerator})/({number.value.denominator})"
        return not number.percent and _plain(text) and equal("formula", text, value)
    return (
        "infty" not in text + other
        and _plain(text)
        and comparable(text, other)
        and equal("formula", text, other)
    )


def _plain(gold: str) -> bool:
    """Return whether a gold is a formula that can be computed at all, without words, relations or
    bases of number systems."""
    number_system = re.fullmatch(r"\s*[0-9A-F]+\s*_.*", gold)
    return (
        not re.search(r"[=<>:;,&?'\"]|\\text|\\ne|\\approx|\\deg", without_bounds(gold))
        and not number_system
    )


def _same_elements(golds: tuple[Node, ...], answers: tuple[Node, ...], equal: Equal) -> bool:
    """Return whether every element has a partner, each used once."""
    left = list(answers)
    for gold in golds:
        partner = next(
            (place for place, answer in enumerate(left) if agree(gold, answer, equal)), None
        )
        if partner is None:
            return False
        del left[partner]
    return not left
