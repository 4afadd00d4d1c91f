"""Makes text from data harmless where it is displayed: on a terminal, in Markdown (in HTML:
gspo/tracking/pages.py).

Rows from the web, a model's responses and a run from someone else can hold any character.
Characters that would act on a terminal or deceive a reader are written as their code: control
characters (terminal escapes begin with one), marks that turn the direction of writing, characters
without width, half characters. `guard` does this to everything that a process prints.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TextIO

UNSAFE_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad"  # control characters but tab and newline; the soft hyphen
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that turn the direction of writing
    # fillers and joiners that show nothing
    "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\U0001d173-\U0001d17a"
    # without any width
    "\u180e\u200b\u2028\u2029\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff"
    "\ud800-\udfff]"  # half characters
    # joiners and variants after ASCII; Persian, Hindi, emoji use them
    "|(?<![^\x00-\x7f])[\u200c\u200d\ufe00-\ufe0e]"
)
MARKDOWN_SYNTAX = re.compile(
    r"[\\`*<|~$]"
    r"|&(?=#?\w+;)"  # an entity
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis; an underscore inside a_name is none
    r"|\](?=[(\[:])|^[#>=\[]|^[-+](?=\s)"  # a link, a heading, a quotation, an item
    # an address, which GitHub makes a link; a numbered item
    r"|(?<=:)/(?=/)|(?<=www)\.|(?<=^\d)[.)](?=\s)",
    re.IGNORECASE,
)
# tqdm writes it to move the cursor up to the first of several progress bars
CURSOR_MOVES = re.compile("(\x1b\\[A)+")


def escape(text: object) -> str:
    """Replace characters that act or deceive by their codes, an escape by "\\x1b"; newlines and
    tabs stay.
    """
    return UNSAFE_CHARACTERS.sub(_code, str(text))


def escape_line(text: object) -> str:
    """Do the same and write newlines and tabs as codes too, for text that must stay in one line."""
    return escape(text).replace("\n", "\\n").replace("\t", "\\t")


def _code(match: re.Match) -> str:
    number = ord(match[0])
    return (
        f"\\x{number:02x}"
        if number < 0x100
        else f"\\u{number:04x}"
        if number < 0x10000
        else f"\\U{number:08x}"
    )


def escape_markdown(text: object) -> str:
    """Escape text for one line of Markdown, so that no program takes it for markup, a link or a
    picture.
    """
    return MARKDOWN_SYNTAX.sub(r"\\\g<0>", " ".join(escape(text).split()))


# ------------------------------------------------------------------------------------------------------------
# terminal
class EscapingStream:
    """A text stream that passes everything written to it through `shown`.

    Progress bars still work: a carriage return is passed on at the start of a line, or after
    another one.
    """

    def __init__(self, stream: TextIO):
        self.stream, self.fresh, self.bar = stream, True, False
        if hasattr(stream, "reconfigure"):
            # do not fail if the locale lacks a character
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        back = text.startswith("\r") and (self.fresh or self.bar)
        moves = self.bar and CURSOR_MOVES.fullmatch(text)
        self.stream.write(text if moves else "\r" * back + escape(text[back:]))
        if text:
            self.fresh, self.bar = text.endswith("\n"), bool(back or moves)
        return len(text)

    def writelines(self, texts: list[str]) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def escape_output() -> None:
    """Make this process print nothing that acts on a terminal, from whatever library it comes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, EscapingStream):
            setattr(sys, name, EscapingStream(stream))


class EscapingFormatter(logging.Formatter):
    """Formats the lines of a log file with `shown`, because they may be read on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return escape(super().format(record))
