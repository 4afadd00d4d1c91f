"""The blocks that a report is made of, and how they are written as one self-contained HTML file and as Markdown.

analysis/wandb_report.py writes the same blocks as a W&B Report.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from gspo.core.escaping import head, in_html, in_markdown, shown

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem }
td, th { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #eee }
img { max-width: 100%; margin: .8rem 0 } pre { font-size: .8rem; overflow-x: auto }
"""


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


@dataclass(frozen=True)
class Folded:
    """Text that is shown unchanged, such as settings, and hidden until the reader opens it."""

    title: str
    text: str


Block = Heading | Text | Items | Table | Figure | Folded


# ---------------------------------------------------------------------------------------------------------------- HTML
def to_html(title: str, blocks: Sequence[Block]) -> str:
    """Return the whole page, which needs no other file."""
    body = "\n".join(map(_html, blocks))
    return f"{head(title, STYLE)}<h1>{in_html(title)}</h1>\n{body}\n</html>\n"


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{in_html(text)}</h2>"
        case Text(text):
            return f"<p>{in_html(text)}</p>"
        case Items(texts):
            return "<ul>" + "".join(f"<li>{in_html(text)}</li>" for text in texts) + "</ul>"
        case Table(names, rows):
            lines = ["".join(f"<th>{in_html(cell)}</th>" for cell in names)]
            lines += ["".join(f"<td>{_cell(cell)}</td>" for cell in row) for row in rows]
            return '<div class="wide"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"
        case Figure(png, about):
            data = base64.b64encode(png.read_bytes()).decode()
            return f'<img alt="{in_html(about)}" src="data:image/png;base64,{data}">'
        case Folded(title, text):
            return f"<details><summary>{in_html(title)}</summary><pre>{in_html(text)}</pre></details>"


def _cell(cell: str | Link) -> str:
    return f'<a href="{in_html(cell.address)}">{in_html(cell.text)}</a>' if isinstance(cell, Link) else in_html(cell)


# ------------------------------------------------------------------------------------------------------------ Markdown
def to_markdown(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """Return the report as Markdown. Figures are linked relative to `folder`, in which the text will lie."""
    return "\n\n".join([f"# {in_markdown(title)}", *(_markdown(block, folder) for block in blocks)]) + "\n"


def _markdown(block: Block, folder: Path) -> str:
    match block:
        case Heading(text):
            return f"## {in_markdown(text)}"
        case Text(text):
            return in_markdown(text)
        case Items(texts):
            return "\n".join(f"- {in_markdown(text)}" for text in texts)
        case Table(names, rows):
            lines = [" | ".join(map(_in_cell, line)) for line in (names, *rows)]
            return "\n".join(f"| {line} |" for line in (lines[0], " | ".join(["---"] * len(names)), *lines[1:]))
        case Figure(png, about):
            return f"![{in_markdown(about)}]({address(png, folder)})"
        case Folded(title, text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"<details><summary>{in_html(title)}</summary>\n\n{fence}\n{shown(text)}\n{fence}\n\n</details>"


def _in_cell(cell: str | Link) -> str:
    return f"[{in_markdown(cell.text)}]({cell.address})" if isinstance(cell, Link) else in_markdown(cell)


def address(file: Path, folder: Path) -> str:
    """Return the relative address of a file for a page that lies in `folder`, also where its name is not UTF-8."""
    return quote(os.fsencode(os.path.relpath(file, folder)))
