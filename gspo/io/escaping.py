"""Escaping of untrusted text for terminals and Markdown (for HTML: gspo/tracking/pages.py).

Rows from the web, a model's responses and a run from someone else can hold any character. Some
characters act on a terminal or deceive a reader. They are replaced by their codes:

    control characters, with which every terminal escape begins
    marks that change the direction of writing
    characters without width
    half characters

`escape_output` does this to all output of a process.
"""

import errno
import logging
import os
import re
import sys
from typing import TextIO

UNSAFE_CHARACTERS = re.compile(
    # control characters except tab and newline, and the soft hyphen
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad"
    # marks that change the direction of writing
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    # invisible fillers and joiners
    "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\U0001d173-\U0001d17a"
    # without any width
    "\u180e\u200b\u2028\u2029\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff"
    # half characters
    "\ud800-\udfff]"
    # joiners and variants after ASCII only, because Persian, Hindi and emoji use them
    "|(?<![^\x00-\x7f])[\u200c\u200d\ufe00-\ufe0e]"
)
MARKDOWN_SYNTAX = re.compile(
    r"[\\`*<|~$]"
    # an entity
    r"|&(?=#?\w+;)"
    # emphasis, but no underscore inside a_name
    r"|(?<![^\W_])_|_(?![^\W_])"
    # a link, a heading, a quotation, an item
    r"|\](?=[(\[:])|^[#>=\[]|^[-+](?=\s)"
    # an address that GitHub turns into a link, a numbered item
    r"|(?<=:)/(?=/)|(?<=www)\.|(?<=^\d)[.)](?=\s)",
    re.IGNORECASE,
)
# the error numbers of a pipe whose reader has ended, and of a terminal that is gone
READER_ENDED = (errno.EPIPE, errno.EIO)
# tqdm writes it to move the cursor up to the first of several progress bars
CURSOR_MOVES = re.compile("(\x1b\\[A)+")


def escape(text: object) -> str:
    """Replace unsafe characters by their codes, for example an escape by "\\x1b".

    Newlines and tabs stay.
    """
    return UNSAFE_CHARACTERS.sub(_code, str(text))


def escape_line(text: object) -> str:
    """Replace unsafe characters, newlines and tabs by their codes, for text on a single line."""
    return escape(text).replace("\n", "\\n").replace("\t", "\\t")


def _code(match: re.Match) -> str:
    number = ord(match[0])
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def escape_markdown(text: object) -> str:
    """Escape text for a line of Markdown, in which it is no markup, link or picture."""
    return MARKDOWN_SYNTAX.sub(r"\\\g<0>", " ".join(escape(text).split()))


# --------------------------------------------------------------------------------------------------
# terminal
class EscapingStream:
    """A text stream that escapes everything that is written to it.

    Progress bars still work. A carriage return is passed on at the start of a line, and after
    another carriage return. If `outlives_reader` is set, output is discarded from the moment at
    which its reader has ended.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.outlives_reader = False
        self.at_line_start = True
        self.in_progress_bar = False
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # do not fail if the locale lacks a character
            reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        starts_bar = text.startswith("\r") and (self.at_line_start or self.in_progress_bar)
        moves_cursor = self.in_progress_bar and CURSOR_MOVES.fullmatch(text) is not None
        escaped = escape(text)
        if moves_cursor:
            escaped = text
        elif starts_bar:
            escaped = "\r" + escape(text[1:])
        try:
            self.stream.write(escaped)
        except OSError as error:
            self._discard_output(error)
        if text:
            self.at_line_start = text.endswith("\n")
            self.in_progress_bar = starts_bar or moves_cursor
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._discard_output(error)

    def _discard_output(self, error: OSError) -> None:
        """Discard all later output, or raise the error if it does not mean the reader's end."""
        if not self.outlives_reader or error.errno not in READER_ENDED:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())
        os.close(nowhere)

    def writelines(self, texts: list[str]) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def escape_output() -> None:
    """Escape everything that this process prints, from all libraries."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, EscapingStream):
            setattr(sys, name, EscapingStream(stream))


def outlive_reader() -> None:
    """Let this process go on if the reader of its output has ended, such as `| tee log`.

    Call it once there is work to lose. Its further output is discarded."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, EscapingStream):
            stream.outlives_reader = True


class EscapingFormatter(logging.Formatter):
    """A formatter that escapes the lines of a log file, which may be read on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return escape(super().format(record))
