"""The blocks that a report is made of, and how they are written as one self-contained HTML file and
as Markdown.

templates/blocks.html.j2 is the HTML; analysis/wandb_report.py writes the same blocks as a W&B
Report.
"""

from __future__ import annotations

import html
import os
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from gspo.io.escaping import escape, escape_markdown
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
    return fill(TEMPLATE, title, {"blocks": [(type(block).__name__, block) for block in blocks]})


# ------------------------------------------------------------------------------------------------------------
# Markdown
def to_markdown(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """Return the report as Markdown. Figures are linked relative to `folder`, in which the text
    will lie.
    """
    return (
        "\n\n".join(
            [f"# {escape_markdown(title)}", *(_markdown(block, folder) for block in blocks)]
        )
        + "\n"
    )


def _markdown(block: Block, folder: Path) -> str:
    match block:
        case Heading(text):
            return f"## {escape_markdown(text)}"
        case Text(text):
            return escape_markdown(text)
        case Items(texts):
            return "\n".join(f"- {escape_markdown(text)}" for text in texts)
        case Table(names, rows):
            lines = [" | ".join(map(_in_cell, line)) for line in (names, *rows)]
            return "\n".join(
                f"| {line} |" for line in (lines[0], " | ".join(["---"] * len(names)), *lines[1:])
            )
        case Figure(png, about):
            return f"![{escape_markdown(about)}]({address(png, folder)})"
        case Folded(title, text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            summary = html.escape(escape(title))
            return f"<details><summary>{summary}</summary>\n\n{fence}\n{escape(text)}\n{fence}\n\n</details>"


def _in_cell(cell: str | Link) -> str:
    return (
        f"[{escape_markdown(cell.text)}]({cell.address})"
        if isinstance(cell, Link)
        else escape_markdown(cell)
    )


def aligned_table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Return rows of cells, the first of which is the head, as the lines of a Markdown table with
    aligned columns. It reads well on a terminal too."""
    cells = [[escape_markdown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def address(file: Path, folder: Path) -> str:
    """Return the relative address of a file for a page that lies in `folder`, also where its name
    is not UTF-8.
    """
    return quote(os.fsencode(os.path.relpath(file, folder)))
