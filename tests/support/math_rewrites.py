"""Other spellings of a mathematical answer, which must not change a verdict, and near misses, which
must.
"""

import re
from collections.abc import Iterator


def rewrites(answer: str) -> Iterator[str]:
    """Yield other spellings of the same answer: spaces, delimiters, names of commands, the way
    digits are decorated.
    """
    yield f"${answer}$"
    yield rf"\({answer}\)"
    yield f" {answer} "
    yield answer + "."
    yield answer.replace(r"\frac", r"\dfrac")
    yield answer.replace(r"\frac", r"\tfrac")
    yield rf"\displaystyle {answer}"
    if "\\text" not in answer:
        yield (
            re.sub(r"(?<=[+=,])|(?=[+=])", r"\\;", answer)
            if not re.search(r"\d,\d{3}", answer)
            else answer
        )
    if (
        answer.count("(") + answer.count("[") == answer.count(")") + answer.count("]")
        and "\\in" not in answer
    ):
        yield re.sub(
            r"(?<![\\A-Za-z])([(\[])", r"\\left\1", re.sub(r"(?<!\\)([)\]])", r"\\right\1", answer)
        )
    if re.fullmatch(r"-?\d+", answer):
        sign, digits = (
            answer[: -len(answer.lstrip("-"))] if answer[0] == "-" else "",
            answer.lstrip("-"),
        )
        number = int(answer)
        yield sign + "0" + digits
        yield answer + ".0"
        yield rf"\frac{{{2 * number}}}{{2}}"
        yield f"{3 * number}/3"
        yield f"{number:,}"
        yield f"{number:,}".replace(",", r"\,")
        yield f"x={answer}"
        yield rf"{answer}\text{{ units}}"
        yield rf"\text{{{answer}}}"
        yield rf"\mathbf{{{answer}}}"
        yield rf"{answer}.000"
    if match := re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", answer):
        sign, above, below = match.group(1), int(match.group(2)), int(match.group(3))
        yield f"{sign}{above}/{below}"
        yield rf"{sign}\frac{{{3 * above}}}{{{3 * below}}}"
        yield rf"\frac{{{sign}{above}}}{{{below}}}"
        if above > below and above % below:
            yield rf"{sign}{above // below}\frac{{{above % below}}}{{{below}}}"


def changes(answer: str) -> Iterator[str]:
    """Yield near misses of an answer: one of its numbers increased or decreased by one, or the sign
    turned.
    """
    for match in re.finditer(r"(?<![\d.])\d{1,15}(?![\d.])", answer):
        for step in (1, -1):
            yield answer[: match.start()] + str(int(match.group()) + step) + answer[match.end() :]
    if re.match(r"[1-9]|\\frac|\\sqrt|\\pi", answer):
        yield "-" + answer
