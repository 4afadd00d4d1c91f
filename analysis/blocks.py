"""A report's parts, and how they are written: as one HTML file that needs nothing else, as Markdown.

analysis/wandb_report.py writes the same parts as a W&B Report.
"""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

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
    """A cell of a table that leads somewhere."""

    text: str
    address: str


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str | Link, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A PNG with what one would say of it to someone who cannot see it."""

    png: Path
    about: str


@dataclass(frozen=True)
class Folded:
    """Text as it is, such as settings, that one opens if one wants it."""

    title: str
    text: str


Block = Heading | Text | Items | Table | Figure | Folded


# ---------------------------------------------------------------------------------------------------------------- HTML
def to_html(title: str, blocks: Sequence[Block]) -> str:
    body = "\n".join(map(_html, blocks))
    head = f'<meta charset="utf-8"><title>{_e(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}<h1>{_e(title)}</h1>\n{body}\n</html>\n'


def _e(text: str) -> str:
    return html.escape(text)


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{_e(text)}</h2>"
        case Text(text):
            return f"<p>{_e(text)}</p>"
        case Items(texts):
            return "<ul>" + "".join(f"<li>{_e(text)}</li>" for text in texts) + "</ul>"
        case Table(head, rows):
            lines = ["".join(f"<th>{_e(cell)}</th>" for cell in head)]
            lines += ["".join(f"<td>{_cell(cell)}</td>" for cell in row) for row in rows]
            return '<div class="wide"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"
        case Figure(png, about):
            data = base64.b64encode(png.read_bytes()).decode()
            return f'<img alt="{_e(about)}" src="data:image/png;base64,{data}">'
        case Folded(title, text):
            return f"<details><summary>{_e(title)}</summary><pre>{_e(text)}</pre></details>"


def _cell(cell: str | Link) -> str:
    return f'<a href="{_e(cell.address)}">{_e(cell.text)}</a>' if isinstance(cell, Link) else _e(cell)


# ------------------------------------------------------------------------------------------------------------ Markdown
def to_markdown(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """Figures are named relative to `folder`, in which the text will lie."""
    return "\n\n".join([f"# {plain(title)}", *(_markdown(block, folder) for block in blocks)]) + "\n"


def _markdown(block: Block, folder: Path) -> str:
    match block:
        case Heading(text):
            return f"## {plain(text)}"
        case Text(text):
            return plain(text)
        case Items(texts):
            return "\n".join(f"- {plain(text)}" for text in texts)
        case Table(head, rows):
            return "\n".join(["| " + " | ".join(map(bar, line)) + " |" for line in (head, ["---"] * len(head), *rows)])
        case Figure(png, about):
            return f"![{plain(about)}]({quote(os.path.relpath(png, folder))})"
        case Folded(title, text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"<details><summary>{_e(title)}</summary>\n\n{fence}\n{text}\n{fence}\n\n</details>"


def bar(cell: str | Link) -> str:
    """A cell of a Markdown table."""
    if isinstance(cell, Link):
        return f"[{bar(cell.text)}]({cell.address})"
    return plain(cell).replace("|", "\\|").replace("\n", " ")


def plain(text: str) -> str:
    """Text that Markdown shows as it is, where names of studies and arms may hold its signs."""
    return re.sub(r"([<\\`])", r"\\\1", text)
