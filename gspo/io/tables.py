"""Tables of text with aligned columns."""

from collections.abc import Sequence
from itertools import zip_longest


def pad_columns(rows: Sequence[Sequence[str]], right_aligned: bool = False) -> list[list[str]]:
    """Return the rows with every cell padded to the width of its column.

    With `right_aligned`, all columns but the first are aligned right. Rows may be of different
    lengths.
    """
    columns = zip_longest(*rows, fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    padded = []
    for row in rows:
        cells = []
        for column, cell in enumerate(row):
            to_right = right_aligned and column > 0
            cells.append(cell.rjust(widths[column]) if to_right else cell.ljust(widths[column]))
        padded.append(cells)
    return padded


def text_table(rows: Sequence[Sequence[str]], right_aligned: bool = False) -> list[str]:
    """Return the rows as lines for a terminal, with two spaces between the columns."""
    return ["  ".join(cells).rstrip() for cells in pad_columns(rows, right_aligned)]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 run, 2 runs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
