r"""Where the answer stands in a response, and the one spelling ("normal form") in which it is
judged.

`form` says where the answer stands:
boxed     what the last \boxed{} holds (also \fbox, \framebox, `\boxed 7`), by brace matching; of
          boxes inside boxes the outermost counts. Boxes with nothing but commas or "and" between
          them are one list: \boxed{1}, \boxed{2}. A last box that is never closed is malformed,
          also when an earlier one was closed.
hash      the rest of the line after the last #### (GSM8K)
answer    the rest of the line after the last "Answer:" or "answer is" (DAPO, Minerva)
A response is never searched for its last number: "I do not know. 1 2 3" would then be an answer.

The normal form removes what has no meaning: dollar signs, \left and \right, fonts, spaces within
formulas, spellings of the same command. Full-width digits and marks, which models trained on
Chinese text write, are mapped one by one, and superscripts only as the exponent of a power of ten
that multiplies (3×10⁴). What could hide a second reading is refused at once, before anything is
parsed: control and invisible characters, digits of other scripts, circled digits, full-width
letters, other superscripts, surrogates, more than 300 characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque

FORMS = ("boxed", "hash", "answer")
# characters of a response that are read, counted from its end, where the answer is
TEXT_CHARACTERS = 65536
ANSWER_CHARACTERS = 300
NESTING = 12  # most levels of brackets in an answer


class Refused(Exception):
    """Raised where there is no answer to judge. The message is the verdict, "no-answer" or
    "malformed".
    """


BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
ANSWER = re.compile(r"(?i)\banswer\**\s*(?::|\bis\b:?)\**[^\S\n]*")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
AND = r"(?:\\(?:text|mbox|textrm)\{\s*(?:and|or)\s*\}|(?:and|or)(?![A-Za-z]))"
BLANK = r"(?:\s|\$|\\q?quad(?![A-Za-z])|\\[,;: ])"
BETWEEN = re.compile(rf"{BLANK}*(?:[,;]{BLANK}*{AND}?|{AND}){BLANK}*")  # two boxes of one list


def extract(text: str, form: str) -> str:
    """Return the answer as it was written. Raises Refused."""
    text = text[-TEXT_CHARACTERS:]
    if form == "boxed":
        return _unwrap(", ".join(_last_boxes(text)))
    if form == "hash":
        before, _, rest = text.rpartition("####")
        found = bool(before or text.startswith("####"))
    else:
        places = list(ANSWER.finditer(text))
        found, rest = bool(places), text[places[-1].end() :] if places else ""
    line = rest.lstrip(" \t").split("\n", 1)[0]
    if form == "answer":
        line = re.sub(r"\s*I hope it is correct\.?\s*$", "", line).strip().strip("*")
    if not found or not line.strip():
        raise Refused("no-answer")
    return _unwrap(line.strip().strip("$.。") if BOX.search(line) else line)


def listed_boxes(text: str) -> list[str]:
    """Return the content of each box of a list of boxes, [] if the last box stands alone. Raises
    Refused.
    """
    contents = _last_boxes(text[-TEXT_CHARACTERS:])
    return [_unwrap(content) for content in contents] if len(contents) > 1 else []


def last_box(text: str) -> str:
    """Return what the last box of a published solution holds, whatever stands before it. Raises
    Refused.
    """
    return _unwrap(_last_boxes(text[-TEXT_CHARACTERS:])[-1])


def _last_boxes(text: str) -> list[str]:
    """Return what the last box holds, after the contents of those that stand before it in a list.

    The work is bounded: a box is followed for a few hundred characters only."""
    boxes = list(deque(BOX.finditer(text), maxlen=9))
    if not boxes:
        raise Refused("no-answer")
    places = [box.end() for box in boxes]
    inside = places[-1]
    if inside == len(text):
        raise Refused("malformed")
    if text[inside] != "{":
        return re.split(
            r"\$|\\\)|\\\]|\n", text[inside : inside + 2 * ANSWER_CHARACTERS], maxsplit=1
        )[:1]
    end = _closing(text, inside)
    if end < 0:
        raise Refused("malformed")
    for other in places[:-1]:  # look for a box around it
        if text[other : other + 1] == "{" and (other_end := _closing(text, other)) > end:
            return [text[other + 1 : other_end]]
    contents, following = [text[inside + 1 : end]], boxes[-1].start()
    for box in reversed(boxes[:-1]):  # those that stand before it in a list
        box_end = _closing(text, box.end()) if text[box.end() : box.end() + 1] == "{" else -1
        if not (0 <= box_end < following and BETWEEN.fullmatch(text, box_end + 1, following)):
            break
        contents.insert(0, text[box.end() + 1 : box_end])
        following = box.start()
    return contents


def _closing(text: str, opening: int) -> int:
    r"""Return where the brace at `opening` is closed, or -1 if that is nowhere near. \{ and \} do
    not count.
    """
    depth = 0
    for brace in BRACE.finditer(text, opening, opening + 2 * ANSWER_CHARACTERS):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return -1


def _unwrap(content: str) -> str:
    """Return the content of a box, freed from any box that encloses all of it. Several boxes inside
    are guesses side by side."""
    while (box := BOX.match(content.strip())) and content.strip()[box.end() :][:1] == "{":
        content = content.strip()
        if _closing(content, box.end()) != len(content) - 1:
            break
        content = content[box.end() + 1 : -1]
    if BOX.search(content):
        raise Refused("malformed")
    return _checked(content)


def _checked(answer: str) -> str:
    """Return the answer. Raises Refused if it is empty, too long, too deep, or has characters that
    are not what they seem."""
    if not answer.strip():
        raise Refused("no-answer")
    if len(answer) > ANSWER_CHARACTERS:
        raise Refused("malformed")
    for character in _with_powers_of_ten(answer):
        if ord(character) < 128:
            if (character < " " and character not in "\t\n\r") or character == "\x7f":
                raise Refused("malformed")
        elif character not in MAPPED and not _harmless(character):
            raise Refused("malformed")
    depth = 0
    for character in answer:
        character = MAPPED.get(character, character)[-1]
        depth += (character in "({[") - (character in ")}]")
        if depth > NESTING:
            raise Refused("malformed")
    return answer


def _harmless(character: str) -> bool:
    """Return whether a character may stand in an answer: letters of any script, except full-width,
    bold and other look-alikes of ASCII; no digits, no invisible marks."""
    category = unicodedata.category(character)
    if category not in ("Lu", "Ll", "Lo", "Mn"):
        return False
    return all(ord(part) > 127 for part in unicodedata.normalize("NFKC", character))


SPELLINGS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "√": r"\sqrt ", "π": r"\pi ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ",
    "∅": r"\emptyset ", "°": r"^\circ ", "²": "^{2}", "³": "^{3}", "\xa0": r"\,", "\u2009": r"\,", "\u202f": r"\,",
    "€": r"\euro ", "£": r"\pounds ", "¥": r"\yen ", "¢": r"\text{ cents}", "’": "'", "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "θ": r"\theta ", "“": '"', "”": '"', "≈": r"\approx ",
    "α": r"\alpha ", "β": r"\beta ", "∓": r"\mp ", "⁄": "/", "∕": "/", "∖": r"\setminus ", "ℝ": r"\mathbb{R}",
}  # fmt: skip
FULL_WIDTH = {chr(ord(mark) + 0xFEE0): mark for mark in "0123456789()[],.:;=+-/%<>"} | {
    # a Chinese full stop ends an answer, or spoils it
    "｛": r"\{", "｝": r"\}", "、": ", ", "　": " ", "。": "。",
}  # fmt: skip
MAPPED = SPELLINGS | FULL_WIDTH
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
POWER_OF_TEN = re.compile(
    r"((?:[×·⋅*]|\\times|\\cdot|\dx|\d\sx)\s*(?:10|１０))([⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)"
)


def _with_powers_of_ten(answer: str) -> str:
    """Return 3×10⁴ with an exponent that cannot be taken for digits, 3×10^{4}."""
    return POWER_OF_TEN.sub(
        lambda m: f"{m.group(1)}^{{{m.group(2).translate(SUPERSCRIPTS)}}}", answer
    )


STEPS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # a line's end with a distance
        (r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]", r"\\\\"),
        (r"\\(?:textcolor|colorbox)\s*\{[^{}]*\}|\\color\s*\{[^{}]*\}", ""),
        (r"\\(?:boldsymbol|bm|pmb)(?![A-Za-z])", ""),
        (r"\\(?:enspace|enskip|thinspace|medspace|thickspace|nobreakspace)(?![A-Za-z])", " "),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\(?:dots|ldots|cdots|dotsc|dotsb|hdots)(?![A-Za-z])", r"\\ldots "),
        (r"(?<=\{)~", " "),
        (r"\\\$", r"\\dollar "),  # this is a currency sign, whereas a bare $ is a delimiter
        (r"\$|(?<!\\)\\[()\[\]]", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (
            r"\\(?:displaystyle|textstyle|[lL]arge|LARGE|[hH]uge|left|right|[bB]igg?[lr]?|limits|mathstrut|bf|rm|it)(?![A-Za-z])\.?",
            "",
        ),
        (r"(?:(?<!\\)\\[,;: ])?(?<!\\)\\(?:!\s*|/)", ""),
        (r"\{,\}", ","),
        (r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", r"\\,"),
        (
            r"\\(?:qquad|quad)(?![A-Za-z])|(?<!\\)\\[;:> \n]|(?<!\\)\\,(?!\d)|(?<![\d\\])\\,|~(?=\\[tm])",
            " ",
        ),
        (r"\\(?:le|leq|leqslant)(?![A-Za-z])", r"\\le "),
        (r"\\(?:ge|geq|geqslant)(?![A-Za-z])", r"\\ge "),
        (r"\\(?:neq|ne)(?![A-Za-z])", r"\\ne "),
        (r"\\(?:lt)(?![A-Za-z])", "<"),
        (r"\\(?:gt)(?![A-Za-z])", ">"),
        (r"\\(?:varnothing)(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:lbrace|\{)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace|\})(?![A-Za-z])", r"\\}"),
        (
            r"\\(?:mathrm|mathit|text|textrm|operatorname)(?:\s*\{\s*([ei])\s*\}|\s+([ei])(?![A-Za-z]))",
            r" \1\2",
        ),
        (
            r"\\(?:mbox|textbf|textrm|textit|mathrm|mathbf|mathit|textnormal|hbox|operatorname)\s*\{",
            r"\\text{",
        ),
        (r"\\text\{\s*(\\(?:dollar|euro|pounds|yen)\s*[\d.,]*)\s*\}", r"\1"),
        (r"\\text\{\s*([,;.。]?)\s*\}", r"\1 "),
        (
            r"\\degree(?:s)?(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\circ(?![A-Za-z])",
            r"\\deg ",
        ),
        (r"\\(?:ast)(?![A-Za-z])", "*"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])sqrt(?=\s*[{\d])", r"\\sqrt"),
        (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\\pi)(?![A-Za-z])", r"\\sqrt{\1}"),
        (r"\\frac\s*([0-9A-Za-z])\s*([0-9A-Za-z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9A-Za-z])\s*(?=\{)", r"\\frac{\1}"),
        (r"\\frac\s*(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac\1{\2}"),
        (r"_\s*\{\s*(\w)\s*\}", r"_\1"),
        (r"\\%", "%"),
        (r"(?<=[\w})\].,;])~", " "),  # elsewhere it says that the answer is rounded
        (r"\s+", " "),
    ]
]
WITH_ARGUMENTS = re.compile(r"\\(frac|sqrt|binom)(?![A-Za-z])")
COMMAND = re.compile(r"\\[A-Za-z]+")
EXPONENTIAL = re.compile(r"\\exp(?![A-Za-z])\s*(?=[({])")
LAST_MARK = re.compile(
    r"(?<![.,。\s])\s*[.,。]\Z"
)  # only one, since an ellipsis says something else
OVER = re.compile(r"\\over(?![A-Za-z])")
PLAIN = re.compile(r"-?[0-9][0-9.,/]*(?<=[0-9])")  # most answers are of this form
FONT = re.compile(r"\\text\{([^{}]*)\}\Z")


def normal(answer: str) -> str:
    r"""Return the normal form. Words stay in \text{}; single spaces between words, numbers and
    letters stay.
    """
    if PLAIN.fullmatch(answer):
        return answer
    answer = _with_powers_of_ten(answer)
    for character, replacement in MAPPED.items():
        if character in answer:
            answer = answer.replace(character, replacement)
    for pattern, replacement in STEPS:
        answer = pattern.sub(replacement, answer)
    answer = _with_powers_of_e(_with_braces(answer))
    answer = LAST_MARK.sub("", _over(answer.strip()))
    while answer.startswith("**") and answer.endswith("**") and len(answer) > 4:
        answer = answer[2:-2].strip()
    while answer.startswith("{") and _closing(answer, 0) == len(answer) - 1:
        answer = answer[1:-1].strip()
    whole = FONT.match(answer)
    if whole and re.fullmatch(r"[-+]?[\d.(\[].*|\([A-Z]\)|[A-Z]", whole.group(1).strip()):
        answer = whole.group(1).strip()  # a number in another font, or a choice
    return answer


def _with_braces(answer: str) -> str:
    r"""Return the formula with braces round the arguments of \frac, \binom and \sqrt, which may be
    single characters or commands: \frac\pi2 is \frac{\pi}{2}."""
    for found in reversed(list(WITH_ARGUMENTS.finditer(answer))):
        place = found.end()
        if found.group(1) == "sqrt" and (
            root := re.compile(r"\s*\[[^\[\]]*\]").match(answer, place)
        ):
            place = root.end()
        for _ in range(1 if found.group(1) == "sqrt" else 2):
            begin = re.compile(r"\s*").match(answer, place).end()
            end = _end_of_argument(answer, begin)
            if end < 0:
                break
            argument = answer[begin:end]
            argument = argument if argument.startswith("{") else f"{{{argument}}}"
            answer = answer[:place] + argument + answer[end:]
            place += len(argument)
    return answer


def _end_of_argument(answer: str, begin: int) -> int:
    """Return where an argument ends that begins here, -1 if none does. A command has its own
    arguments, in braces.
    """
    if answer[begin : begin + 1] == "{":
        return _closing(answer, begin) + 1 or -1
    if command := COMMAND.match(answer, begin):
        end = command.end()
        while answer[end : end + 1] == "{" and (closing := _closing(answer, end)) > 0:
            end = closing + 1
        return end
    return begin + 1 if answer[begin : begin + 1].isalnum() else -1


def _with_powers_of_e(answer: str) -> str:
    r"""Return the formula with e^{x} for \exp(x) and \exp{x}."""
    for found in reversed(list(EXPONENTIAL.finditer(answer))):
        opening = found.end()
        depth = 0
        for end in range(opening, len(answer)):
            depth += (answer[end] in "({") - (answer[end] in ")}")
            if depth == 0:
                answer = (
                    f"{answer[: found.start()]}e^{{{answer[opening + 1 : end]}}}{answer[end + 1 :]}"
                )
                break
    return answer


def _over(answer: str) -> str:
    r"""Return {a \over b} as \frac{a}{b}, the innermost first; as in TeX it takes all that stands
    before and after it in its braces."""
    for found in OVER.finditer(answer):
        braces = (m.start() for m in BRACE.finditer(answer, 0, found.start()) if m.group() == "{")
        around = [place for place in braces if _closing(answer, place) >= found.end()]
        start, end = (around[-1], _closing(answer, around[-1])) if around else (-1, len(answer))
        above, below = answer[start + 1 : found.start()].strip(), answer[found.end() : end].strip()
        if OVER.search(above + below) or (not around and re.search(r"[=<>,;:&]", above + below)):
            continue
        before, fraction = answer[: max(start, 0)], rf"\frac{{{above}}}{{{below}}}"
        # an argument of \sqrt or ^ keeps its braces
        if re.search(r"(?:\\[A-Za-z]+|[\]}^_])\s*\Z", before):
            fraction = f"{{{fraction}}}"
        return _over(before + fraction + answer[end + 1 :])
    return answer
