"""The score of a run: one number of its end, which sweeps optimise."""

from __future__ import annotations

import math
import re

HELD_OUT = re.compile(r"eval/.+/avg@\d+")  # the mean reward of a held-out set
LAST = 0.1  # the share of a run's steps, at its end, that the score is a mean over


def score(rows: list[dict], collapsed: bool = False) -> float:
    """Return the mean over the last tenth of a run's steps of its held-out reward, or, if it
    evaluates nothing, of its training reward `reward/mean`.

    `rows` are those of metrics.jsonl, also of a run that is not at its end. The last tenth of S
    steps are the last S/10, rounded up. The held-out reward of a row is the mean of
    `eval/<set>/avg@k` over the sets. If none was measured there the newest one counts; or, of a run
    that has collapsed, its lowest, because the newest may be older than the fall. Values that were
    not finite (null) are left out. NaN if there is none.

    >>> score([{"step": s, "reward/mean": s / 10} for s in range(1, 21)])  # of steps 19 and 20
    1.95
    """
    return of_points([point(row) for row in rows], collapsed)


def point(row: dict) -> tuple[int, float, float]:
    """Return of a row what the score depends on: step, held-out reward, training reward; NaN for
    what is not there.
    """
    held_out = [row[name] for name in row if HELD_OUT.fullmatch(name) and row[name] is not None]
    reward = row.get("reward/mean")
    mean = sum(held_out) / len(held_out) if held_out else math.nan
    return row["step"], mean, math.nan if reward is None else reward


def of_points(points: list[tuple[int, float, float]], collapsed: bool = False) -> float:
    """Return the score of a run from the `point` of every row, in their order."""
    held_out = [(step, mean) for step, mean, _ in points if not math.isnan(mean)]
    values = held_out or [(step, reward) for step, _, reward in points if not math.isnan(reward)]
    if not values:
        return math.nan
    last = points[-1][0]
    end = [value for step, value in values if step > last - math.ceil(LAST * last) or step == last]
    if end:
        return sum(end) / len(end)
    return min(value for _, value in values) if collapsed else values[-1][1]
