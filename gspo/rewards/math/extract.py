r"""The answer of a response, and the spelling ("normal form") in which it is judged.

`form` says which part of a response is the answer:
boxed     the content of the last \boxed{} (also \fbox, \framebox, `\boxed 7`), by brace matching.
          Of boxes inside boxes the outermost counts. Boxes with nothing but commas or "and" between
          them are a list: \boxed{1}, \boxed{2}. A last box that is never closed is malformed, also
          when an earlier box was closed.
hash      the rest of the line after the last #### (GSM8K)
answer    the rest of the line after the last "Answer:" or "answer is" (DAPO, Minerva), or a formula
          between \[ and \] or $$ and $$ that begins there
A response is never searched for its last number: "I do not know. 1 2 3" would then be an answer.

The normal form removes dollar signs, \left and \right, fonts, spaces within formulas, and
spellings of the same command, which have no meaning. Full-width digits and marks, which models
trained on Chinese text write, are mapped. Superscripts are mapped only as the exponent of a power
of ten that multiplies (3×10⁴). Anything that could hide a second reading is refused before it is
parsed: control and invisible characters, digits of other scripts, circled digits, full-width
letters, other superscripts, surrogates, more than 300 characters.
"""

import re
import unicodedata
from collections import deque

FORMS = ("boxed", "hash", "answer")
# characters of a response that are read, counted from its end, where the answer is
MAX_RESPONSE_CHARS = 65536
MAX_ANSWER_CHARS = 300
# a brace that is not closed within so many characters counts as never closed
MAX_BRACED_CHARS = 2 * MAX_ANSWER_CHARS
MAX_BOXES = 9  # of a list, counted from its end
MAX_BRACKET_DEPTH = 12  # levels of brackets in an answer


class UnusableAnswer(Exception):
    """Raised if there is no answer to judge. The message is the verdict, no-answer or malformed."""


BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
# behind a colon the answer may be in the next line
ANSWER = re.compile(r"(?i)\banswer\**\s*(?:[:：]\**\s*|\bis\b:?\**[^\S\n]*)")
# a formula in lines of its own
DISPLAY = re.compile(r"(\$\$|\\\[)\s*\n(.{1,600}?)(?:\$\$|\\\])[.。 \t]*(?=\n|\Z)", re.DOTALL)
# what stands round a box in its line: the delimiters of a formula, and a name, as in x = \boxed{5}
NOT_OF_BOX = re.compile(
    r"\A[\s$\\(\[]*[A-Za-z]\s*=\s*(?=\\(?:boxed|fbox))|(?<!\\)(?:\$|\\[()\[\]])"
)
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
AND = r"(?:\\(?:text|mbox|textrm)\{\s*(?:and|or)\s*\}|(?:and|or)(?![A-Za-z]))"
BLANK = r"(?:\s|\$|\\q?quad(?![A-Za-z])|\\[,;: ])"
BETWEEN = re.compile(rf"{BLANK}*(?:[,;]{BLANK}*{AND}?|{AND}){BLANK}*")  # two boxes of one list


def extract(text: str, form: str) -> str:
    """Return the answer as it was written. Raises UnusableAnswer."""
    text = text[-MAX_RESPONSE_CHARS:]
    if form == "boxed":
        return _unwrap(", ".join(_last_boxes(text)))
    if form == "hash":
        parts = text.rsplit("####", 1)
    else:
        parts = ANSWER.split(text)
    if len(parts) == 1:
        raise UnusableAnswer("no-answer")
    rest = parts[-1].lstrip(" \t")
    line = rest.split("\n", 1)[0]
    if form == "answer":
        display = DISPLAY.match(rest)
        if display:
            line = " ".join(display[2].split())
        line = re.sub(r"\s*I hope it is correct\.?\s*$", "", line).strip().strip("*")
    if not line.strip():
        raise UnusableAnswer("no-answer")
    if BOX.search(line):
        line = NOT_OF_BOX.sub("", line).strip(" \t.。")
    return _unwrap(line)


def listed_boxes(text: str) -> list[str]:
    """Return the content of each box of a list of boxes, [] if the last box stands alone.

    Raises UnusableAnswer."""
    contents = _last_boxes(text[-MAX_RESPONSE_CHARS:])
    return [_unwrap(content) for content in contents] if len(contents) > 1 else []


def last_box(text: str) -> str:
    """Return the content of the last box of a published solution, which may end a list of boxes.

    Raises UnusableAnswer."""
    return _unwrap(_last_boxes(text[-MAX_RESPONSE_CHARS:])[-1])


def _last_boxes(text: str) -> list[str]:
    """Return the content of the last box, after the contents of the boxes before it in a list.

    The work is bounded: a box is followed for a few hundred characters only."""
    boxes = [
        (box.start(), box.end(), _closing(text, box.end()))
        for box in deque(BOX.finditer(text), maxlen=MAX_BOXES)
    ]
    if not boxes:
        raise UnusableAnswer("no-answer")
    next_start, opening, end = boxes.pop()
    if opening < len(text) and text[opening] != "{":
        content = text[opening : opening + MAX_BRACED_CHARS]
        return re.split(r"\$|\\\)|\\\]|\n", content, maxsplit=1)[:1]
    if end < 0:
        raise UnusableAnswer("malformed")
    for _, outer_opening, outer_end in boxes:  # look for a box around it
        if outer_end > end:
            return [text[outer_opening + 1 : outer_end]]
    contents = [text[opening + 1 : end]]
    for start, opening, end in reversed(boxes):
        if not (0 <= end < next_start and BETWEEN.fullmatch(text, end + 1, next_start)):
            break
        contents.insert(0, text[opening + 1 : end])
        next_start = start
    return contents


def _closing(text: str, opening: int) -> int:
    r"""Return the index at which the brace at `opening` is closed, or -1 if that is nowhere near.

    It is -1 too if there is no brace at `opening`. \{ and \} do not count."""
    if not text.startswith("{", opening):
        return -1
    depth = 0
    for brace in BRACE.finditer(text, opening, opening + MAX_BRACED_CHARS):
        if brace.group() == "{":
            depth += 1
        elif brace.group() == "}":
            depth -= 1
        if depth == 0:
            return brace.start()
    return -1


def _unwrap(content: str) -> str:
    """Return the content of a box, freed from any box that encloses all of it.

    Several boxes inside are guesses side by side, which are refused."""
    while True:
        stripped = content.strip()
        box = BOX.match(stripped)
        if not box or not stripped.startswith("{", box.end()):
            break
        content = stripped
        if _closing(content, box.end()) != len(content) - 1:
            break
        content = content[box.end() + 1 : -1]
    if BOX.search(content):
        raise UnusableAnswer("malformed")
    return _checked(content)


def _checked(answer: str) -> str:
    """Return the answer.

    Raises UnusableAnswer if it is empty, too long, too deep, or has misleading characters."""
    if not answer.strip():
        raise UnusableAnswer("no-answer")
    if len(answer) > MAX_ANSWER_CHARS or CONTROL.search(answer):
        raise UnusableAnswer("malformed")
    for character in _with_powers_of_ten(answer):
        if not (character.isascii() or character in MAPPED or _harmless(character)):
            raise UnusableAnswer("malformed")
    depth = 0
    for character in answer:
        bracket = MAPPED.get(character, character)[-1]
        if bracket in "({[":
            depth += 1
        elif bracket in ")}]":
            depth -= 1
        if depth > MAX_BRACKET_DEPTH:
            raise UnusableAnswer("malformed")
    return answer


def _harmless(character: str) -> bool:
    """Return whether a character beyond ASCII may stand in an answer.

    Letters of any script may, except full-width, bold and other look-alikes of ASCII. Digits and
    invisible marks may not."""
    category = unicodedata.category(character)
    if category not in ("Lu", "Ll", "Lo", "Mn"):
        return False
    return all(ord(part) > 127 for part in unicodedata.normalize("NFKC", character))


COMMAND_OF_SIGN = """
×times ·cdot ⋅cdot ÷div √sqrt πpi ∞infty ≤le ≥ge ≠ne ±pm ∓mp ∪cup ∈in ∅emptyset ∖setminus ≈approx
θtheta αalpha βbeta €euro £pounds ¥yen
"""
SPELLINGS = {word[0]: f"\\{word[1:]} " for word in COMMAND_OF_SIGN.split()} | {
    "−": "-", "–": "-", "°": r"^\circ ", "²": "^{2}", "³": "^{3}", "\xa0": r"\,", "\u2009": r"\,",
    "\u202f": r"\,", "¢": r"\text{ cents}", "’": "'", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "“": '"', "”": '"', "⁄": "/", "∕": "/", "ℝ": r"\mathbb{R}",
}  # fmt: skip
FULL_WIDTH = {chr(ord(mark) + 0xFEE0): mark for mark in "0123456789()[],.:;=+-/%<>"} | {
    # a Chinese full stop ends an answer, or spoils it
    "｛": r"\{", "｝": r"\}", "、": ", ", "　": " ", "。": "。",
}  # fmt: skip
MAPPED = SPELLINGS | FULL_WIDTH
TRANSLATION = str.maketrans(MAPPED)
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
POWER_OF_TEN = re.compile(
    r"((?:[×·⋅*]|\\times|\\cdot|\dx|\d\sx)\s*(?:10|１０))([⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)"
)


def _with_powers_of_ten(answer: str) -> str:
    """Return 3×10⁴ with an exponent that cannot be taken for digits, 3×10^{4}."""
    return POWER_OF_TEN.sub(lambda m: f"{m[1]}^{{{m[2].translate(SUPERSCRIPTS)}}}", answer)


STEPS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # a line's end with a distance
        (r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]", r"\\\\"),
        (r"\\(?:textcolor|colorbox)\s*\{[^{}]*\}|\\color\s*\{[^{}]*\}", ""),
        (r"\\(?:boldsymbol|bm|pmb)(?![A-Za-z])", ""),
        # unit vectors: i, j and k in bold, with a hat, or both
        (r"\\(?:mathbf|vec|hat)\s*\{\s*([ijk])\s*\}", r" \1"),
        (r"\\(?:hat|vec)\s*\{\s*([ijk])\s*\}", r" \1"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\(?:enspace|enskip|thinspace|medspace|thickspace|nobreakspace)(?![A-Za-z])", " "),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\(?:dots|ldots|cdots|dotsc|dotsb|hdots)(?![A-Za-z])", r"\\ldots "),
        (r"(?<=\{)~", " "),
        (r"\\\$", r"\\dollar "),  # this is a currency sign, whereas a bare $ is a delimiter
        (r"\$|(?<!\\)\\[()\[\]]", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (
            r"\\(?:displaystyle|textstyle|[lL]arge|LARGE|[hH]uge|left|right|[bB]igg?[lr]?|limits"
            r"|mathstrut|bf|rm|it)(?![A-Za-z])\.?",
            "",
        ),
        (r"(?:(?<!\\)\\[,;: ])?(?<!\\)\\(?:!\s*|/)", ""),
        (r"\{,\}", ","),
        (r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", r"\\,"),
        (
            r"\\(?:qquad|quad)(?![A-Za-z])|(?<!\\)\\[;:> \n]|(?<!\\)\\,(?!\d)|(?<![\d\\])\\,"
            r"|~(?=\\[tm])",
            " ",
        ),
        (r"\\(?:le|leq|leqslant)(?![A-Za-z])", r"\\le "),
        (r"\\(?:ge|geq|geqslant)(?![A-Za-z])", r"\\ge "),
        (r"\\(?:neq|ne)(?![A-Za-z])", r"\\ne "),
        (r"\\(sin|cos|tan)\s*\^\s*\{\s*-\s*1\s*\}", r"\\arc\1 "),
        (r"\\pmod\s+(\d+)", r"\\pmod{\1}"),
        (r"\\(?:lt)(?![A-Za-z])", "<"),
        (r"\\(?:gt)(?![A-Za-z])", ">"),
        (r"\\(?:varnothing)(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:lbrace|\{)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace|\})(?![A-Za-z])", r"\\}"),
        (
            r"\\(?:mathrm|mathit|text|textrm|operatorname)"
            r"(?:\s*\{\s*([ei])\s*\}|\s+([ei])(?![A-Za-z]))",
            r" \1\2",
        ),
        (
            r"\\(?:mbox|textbf|textrm|textit|mathrm|mathbf|mathit|textnormal|hbox|operatorname)"
            r"\s*\{",
            r"\\text{",
        ),
        (r"\\text\{\s*(\\(?:dollar|euro|pounds|yen)\s*[\d.,]*)\s*\}", r"\1"),
        (r"\\text\{\s*([,;.。]?)\s*\}", r"\1 "),
        (
            r"\\degree(?:s)?(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])"
            r"|\\circ(?![A-Za-z])",
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
ROOT_DEGREE = re.compile(r"\s*\[[^\[\]]*\]")
COMMAND = re.compile(r"\\[A-Za-z]+")
EXPONENTIAL = re.compile(r"\\exp(?![A-Za-z])\s*(?=[({])")
# a single mark, since an ellipsis says something else
LAST_MARK = re.compile(r"(?<![.,。\s])\s*[.,。]\Z")
OVER = re.compile(r"\\over(?![A-Za-z])")
PLAIN = re.compile(r"-?[0-9][0-9.,/]*(?<=[0-9])")  # most answers are of this form
FONT = re.compile(r"\\text\{([^{}]*)\}\Z")


def normal(answer: str) -> str:
    r"""Return the normal form of an answer.

    Words stay in \text{}. Single spaces between words, numbers and letters stay."""
    if PLAIN.fullmatch(answer):
        return answer
    answer = _with_powers_of_ten(answer)
    answer = answer.translate(TRANSLATION)
    for pattern, replacement in STEPS:
        answer = pattern.sub(replacement, answer)
    answer = _with_powers_of_e(_with_braces(answer))
    answer = LAST_MARK.sub("", _with_fractions(answer.strip()))
    while answer.startswith("**") and answer.endswith("**") and len(answer) > 4:
        answer = answer[2:-2].strip()
    while answer.startswith("{") and _closing(answer, 0) == len(answer) - 1:
        answer = answer[1:-1].strip()
    in_font = FONT.match(answer)
    if in_font:
        content = in_font.group(1).strip()
        if re.fullmatch(r"[-+]?[\d.(\[].*|\([A-Z]\)|[A-Z]", content):
            return content  # a number in another font, or a choice
    return answer


def _with_braces(answer: str) -> str:
    r"""Return the formula with braces round the arguments of \frac, \binom and \sqrt.

    The arguments may be single characters or commands: \frac\pi2 is \frac{\pi}{2}."""
    for command in reversed(list(WITH_ARGUMENTS.finditer(answer))):
        position = command.end()
        is_root = command.group(1) == "sqrt"
        degree = ROOT_DEGREE.match(answer, position) if is_root else None
        if degree:
            position = degree.end()
        for _ in range(1 if is_root else 2):
            begin = len(answer) - len(answer[position:].lstrip())
            end = _end_of_argument(answer, begin)
            if end < 0:
                break
            argument = answer[begin:end]
            if not argument.startswith("{"):
                argument = f"{{{argument}}}"
            answer = answer[:position] + argument + answer[end:]
            position += len(argument)
    return answer


def _end_of_argument(answer: str, begin: int) -> int:
    """Return the end of the argument that begins here, or -1 if none does.

    A command has arguments of its own, in braces."""
    if answer.startswith("{", begin):
        closing = _closing(answer, begin)
        return closing + 1 if closing >= 0 else -1
    command = COMMAND.match(answer, begin)
    if not command:
        return begin + 1 if answer[begin : begin + 1].isalnum() else -1
    end = command.end()
    while _closing(answer, end) >= 0:
        end = _closing(answer, end) + 1
    return end


def _with_powers_of_e(answer: str) -> str:
    r"""Return the formula with e^{x} for \exp(x) and \exp{x}."""
    for command in reversed(list(EXPONENTIAL.finditer(answer))):
        opening = command.end()
        depth = 0
        for end in range(opening, len(answer)):
            if answer[end] in "({":
                depth += 1
            elif answer[end] in ")}":
                depth -= 1
            if depth == 0:
                before = answer[: command.start()]
                exponent = answer[opening + 1 : end]
                answer = f"{before}e^{{{exponent}}}{answer[end + 1 :]}"
                break
    return answer


def _with_fractions(answer: str) -> str:
    r"""Return the formula with \frac{a}{b} for {a \over b}, the innermost first.

    As in TeX, \over takes all before and after it in its braces."""
    for over in OVER.finditer(answer):
        start = -1
        end = len(answer)
        for brace in BRACE.finditer(answer, 0, over.start()):
            if brace.group() == "{":
                closing = _closing(answer, brace.start())
                if closing >= over.end():
                    start = brace.start()
                    end = closing
        above = answer[start + 1 : over.start()].strip()
        below = answer[over.end() : end].strip()
        if OVER.search(above + below):
            continue
        if start < 0 and re.search(r"[=<>,;:&]", above + below):
            continue
        before = answer[: max(start, 0)]
        fraction = rf"\frac{{{above}}}{{{below}}}"
        # an argument of \sqrt or ^ keeps its braces
        if re.search(r"(?:\\[A-Za-z]+|[\]}^_])\s*\Z", before):
            fraction = f"{{{fraction}}}"
        return _with_fractions(before + fraction + answer[end + 1 :])
    return answer
