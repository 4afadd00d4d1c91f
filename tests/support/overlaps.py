"""Finds texts of a drawn figure that lie over each other or outside the page."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

SLACK = 1.0  # points by which boxes may touch: a box has some room around its letters


def boxes(figure: Figure) -> list[tuple[Text, object]]:
    """Return the visible texts with their boxes, in pixels. Ticks beyond the limits of their axis
    are not drawn.
    """
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    hidden = set()
    for ax in figure.axes:
        for axis, low, high in (
            (ax.xaxis, *sorted(ax.get_xlim())),
            (ax.yaxis, *sorted(ax.get_ylim())),
        ):
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                edge = 1e-9 * (high - low)
                if (
                    not low - edge <= tick.get_loc() <= high + edge
                    or not axis.get_visible()
                    or not ax.axison
                ):
                    hidden |= {id(tick.label1), id(tick.label2)}
    found = []
    for text in figure.findobj(Text):
        if (
            text.get_text().strip()
            and text.get_visible()
            and id(text) not in hidden
            and drawn(text)
        ):
            box = text.get_window_extent(renderer)
            written = text.get_text().split("\n")
            # empty lines at the end hold a place for another text
            blank = len(written) - len(text.get_text().rstrip("\n").split("\n"))
            found.append(
                (
                    text,
                    Bbox.from_extents(
                        box.x0, box.y0 + box.height * blank / len(written), box.x1, box.y1
                    ),
                )
            )
    return found


def drawn(text: Text) -> bool:
    """Return whether the text is part of something that is shown."""
    return text.axes is None or (text.axes.get_visible() and text.axes.axison)


def overlaps(figure: Figure) -> list[str]:
    """Return a line for each pair of texts of which one covers a part of the other, and for each
    that leaves the page."""
    found = boxes(figure)
    slack = SLACK * figure.dpi / 72
    width, height = figure.canvas.get_width_height()
    lines = []
    for number, (text, box) in enumerate(found):
        if box.x0 < -slack or box.y0 < -slack or box.x1 > width + slack or box.y1 > height + slack:
            lines.append(f"{text.get_text()!r} leaves the page")
        for other, other_box in found[number + 1 :]:
            across = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
            along = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
            if across > slack and along > slack:
                lines.append(f"{text.get_text()!r} covers {other.get_text()!r}")
    return lines
