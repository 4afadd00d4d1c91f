"""The curves of a run's page: metrics over the steps, in the coordinates of an SVG picture."""

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gspo.tracking.collapse import MAX_BATCHES_OF_A_ROW, collapse, is_finite, levels
from gspo.tracking.metrics import HELD_OUT_MEANS, Metric, lookup, stderr_of

# Each metric, and whether its axis is logarithmic. Metrics that a run does not have are left out.
CURVES = (
    ("reward/mean", False),
    ("policy/entropy", False),
    ("optim/grad_norm", True),
    ("clip/token_active", True),
    ("routing/consistency", False),
    ("length/mean", False),
    ("length/truncated", False),
    ("mismatch/k3", True),
    ("ratio/ess_token", False),
    ("group/zero_variance", False),
    ("episode/turns", False),
    ("episode/environment_tokens", False),
)
# of a line; a picture with many more points looks the same, and browsers draw it slowly
MAX_POINTS = 4_000
COLUMNS = 1_000  # of which each keeps two points of a longer line


@dataclass(frozen=True)
class Curve:
    """A metric over the steps, as the template draws it.

    Coordinates are in the units of an SVG picture of size WIDTH x HEIGHT."""

    WIDTH = 330
    HEIGHT = 170
    # the axes
    LEFT = 56
    RIGHT = 322
    TOP = 24
    BOTTOM = 152

    name: str
    about: str
    last: int  # step
    ticks: list[tuple[float, str]]  # y coordinates of the grid's lines, and their values
    points: str  # of the line, as an SVG attribute
    smooth: str  # the same for the smoothed curve, empty without one
    # coordinates of points that are drawn as dots: held-out scores, or a curve's only point
    dots: list[tuple[float, float]]
    # 95 % intervals of held-out scores: x, and the y coordinates of both ends
    errors: list[tuple[float, float, float]]
    collapse: tuple[float, int] | None  # x coordinate and step of the collapse
    is_log: bool


def curves(
    rows: list[dict], custom: dict[str, Metric], more: Sequence[str] = (), batches_per_row: int = 1
) -> list[Curve]:
    """Return one curve per metric that the run has.

    After the metrics of CURVES come the metrics `more`, then held-out scores, and the user's own
    metrics last. `custom` has the definitions of metrics that are not ours. A row is the mean over
    `batches_per_row` rollout batches."""
    recorded = {name for row in rows for name, value in row.items() if is_finite(value)}
    names = [(name, log) for name, log in CURVES if name in recorded]
    names += [(name, False) for name in more if name in recorded]
    for family in (HELD_OUT_MEANS, "custom/*"):
        names += [(name, False) for name in sorted(fnmatch.filter(recorded, family))]
    return [
        curve(rows, custom.get(name) or replace(lookup(name), name=name), log, batches_per_row)
        for name, log in names
    ]


def curve(rows: list[dict], metric: Metric, log: bool, batches_per_row: int = 1) -> Curve:
    """Return the curve of one metric.

    The reward also has its smoothed curve and its collapse, for which each row counts as so many
    rollout batches. A held-out score has dots with 95 % intervals over its problems, on an axis
    with 0. Of many points in a column of the picture, the smallest and the largest are drawn."""
    rows = [row for row in rows if is_finite(row.get(metric.name))]
    steps = [row["step"] for row in rows]
    values = [row[metric.name] for row in rows]
    log = log and min(values) > 0
    drawn = [math.log10(value) if log else value for value in values]
    low = min(drawn)
    high = max(drawn)
    last = max(*steps, 1)
    is_score = fnmatch.fnmatchcase(metric.name, HELD_OUT_MEANS)
    intervals: list[tuple[int, float, float]] = []
    if is_score:
        intervals = held_out_intervals(rows, metric.name)
        low = min([0.0, *(bottom for _, bottom, _ in intervals)])
        high = max([high, *(top for _, _, top in intervals)])

    def x(step: int) -> float:
        return round(Curve.LEFT + (Curve.RIGHT - Curve.LEFT) * step / last, 1)

    def y(value: float) -> float:
        # a metric that never changes is in the middle
        share = (high - value) / (high - low) if high > low else 0.5
        return round(Curve.TOP + (Curve.BOTTOM - Curve.TOP) * share, 1)

    def line(series: list[float]) -> str:
        shown = extremes(steps, series) if len(steps) > MAX_POINTS else range(len(steps))
        return " ".join(f"{x(steps[index])},{y(series[index])}" for index in shown)

    grid = [low, (low + high) / 2, high] if high > low else [low]
    smooth = ""
    collapse_mark = None
    if metric.name == "reward/mean":
        batches_per_row = min(batches_per_row, MAX_BATCHES_OF_A_ROW)
        by_batch = np.repeat(np.array(values), batches_per_row)
        smooth = line(levels(by_batch)[0][batches_per_row - 1 :: batches_per_row].tolist())
        collapse_index = collapse(by_batch)
        if collapse_index is not None:
            step = steps[collapse_index // batches_per_row]
            collapse_mark = (x(step), step)
    unit = f" [{metric.unit}]" if metric.unit else ""
    has_dots = is_score or len(rows) == 1
    dots = [(x(step), y(value)) for step, value in zip(steps, drawn, strict=True) if has_dots]
    return Curve(
        name=metric.name,
        about=f"{metric.name}: {metric.meaning}{unit}",
        last=last,
        ticks=[(y(value), f"{10**value if log else value:.3g}") for value in grid],
        points=line(drawn),
        smooth=smooth,
        dots=dots,
        errors=[(x(step), y(bottom), y(top)) for step, bottom, top in intervals if top > bottom],
        collapse=collapse_mark,
        is_log=log,
    )


def held_out_intervals(rows: list[dict], name: str) -> list[tuple[int, float, float]]:
    """Return the step and both ends of the 95 % interval over problems of each held-out score."""
    stderr = stderr_of(name)
    # scores that are never negative are shares of the problems
    floor = 0.0 if min(row[name] for row in rows) >= 0 else -math.inf
    intervals = []
    for row in rows:
        half = 1.96 * row[stderr] if is_finite(row.get(stderr)) else 0.0
        intervals.append((row["step"], max(floor, row[name] - half), row[name] + half))
    return intervals


def extremes(steps: Sequence[int], series: Sequence[float]) -> list[int]:
    """Return the indices of the smallest and the largest number of each column of the picture."""
    columns = np.array(steps) * COLUMNS // max(*steps, 1)
    values = np.array(series)
    # in each column, the first number is the smallest, and the last one the largest
    order = np.lexsort((values, columns))
    starts = np.flatnonzero(np.diff(columns[order], prepend=-1))
    ends = np.append(starts[1:], len(order)) - 1
    shown = {0, len(order) - 1, *order[starts].tolist(), *order[ends].tolist()}
    return sorted(shown)
