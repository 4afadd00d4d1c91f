"""The blocks of a report, written as a self-contained HTML file or as Markdown.

templates/blocks.html.j2 is the HTML. analysis/wandb_report.py writes the same blocks as a W&B
Report.
"""

import html
import os
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from gspo.io.escaping import escape, escape_markdown
from gspo.io.tables import pad_columns
from gspo.tracking.pages import fill

TEMPLATE = Path(__file__).parent / "templates" / "blocks.html.j2"


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Items:
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """A cell of a table that links to an address."""

    text: str
    address: str


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str | Link, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A PNG file, and a description of it for readers who cannot see it."""

    png: Path
    about: str

    def base64(self) -> str:
        return b64encode(self.png.read_bytes()).decode()


@dataclass(frozen=True)
class Folded:
    """Text that is shown unchanged, such as settings, and hidden until the reader opens it."""

    title: str
    text: str


Block = Heading | Text | Items | Table | Figure | Folded


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """Return the whole page, which needs no other file."""
    named = [(type(block).__name__, block) for block in blocks]
    return fill(TEMPLATE, title, {"blocks": named})


# ------------------------------------------------------------------------------------------------
# Markdown
def to_markdown(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """Return the report as Markdown, for a file in `folder`.

    Figures are linked relative to this folder.
    """
    parts = [f"# {escape_markdown(title)}", *(_markdown(block, folder) for block in blocks)]
    return "\n\n".join(parts) + "\n"


def _markdown(block: Block, folder: Path) -> str:
    match block:
        case Heading(text):
            return f"## {escape_markdown(text)}"
        case Text(text):
            return escape_markdown(text)
        case Items(texts):
            return "\n".join(f"- {escape_markdown(text)}" for text in texts)
        case Table(head, rows):
            cells = [[_in_cell(cell) for cell in row] for row in (head, *rows)]
            cells.insert(1, ["---"] * len(head))
            return "\n".join(f"| {' | '.join(row)} |" for row in cells)
        case Figure(png, about):
            return f"![{escape_markdown(about)}]({address(png, folder)})"
        case Folded(title, text):
            fences = re.findall("`+", text)
            longest_fence = max(map(len, fences), default=0)
            fence = "`" * max(3, 1 + longest_fence)
            code = f"{fence}\n{escape(text)}\n{fence}"
            summary = html.escape(escape(title))
            return f"<details><summary>{summary}</summary>\n\n{code}\n\n</details>"


def _in_cell(cell: str | Link) -> str:
    if isinstance(cell, Link):
        return f"[{escape_markdown(cell.text)}]({cell.address})"
    return escape_markdown(cell)


def markdown_table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Return rows of cells, the first of which is the head, as the lines of a Markdown table.

    The columns are aligned, so it reads well on a terminal too.
    """
    cells = pad_columns([[escape_markdown(cell) for cell in row] for row in rows])
    head, *lines = ["| " + " | ".join(row) + " |" for row in cells]
    rule = "|".join("-" * (len(cell) + 2) for cell in cells[0])
    return [head, f"|{rule}|", *lines]


def address(file: Path, folder: Path) -> str:
    """Return the relative address of a file for a page in `folder`.

    The file's name need not be UTF-8.
    """
    return quote(os.fsencode(os.path.relpath(file, folder)))
