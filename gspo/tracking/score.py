"""The score of a run: a number about its last steps, which sweeps optimise."""

import math
import re

HELD_OUT = re.compile(r"eval/.+/avg@\d+")  # the mean reward of a held-out set
LAST = 0.1  # the score is a mean over this share of a run's steps, at its end


def score(rows: list[dict], collapsed: bool = False) -> float:
    """Return a run's mean held-out reward over the last tenth of its steps.

    A run without evaluation has its training reward `reward/mean` instead. `rows` are the rows of
    metrics.jsonl. The run may be under way. The last tenth of S steps are the last S/10, rounded
    up. The held-out reward of a row is the mean of `eval/<set>/avg@k` over the sets. If the last
    tenth has no held-out reward, the newest counts. If the run has collapsed, its lowest counts,
    because the newest may be older than the fall. Values that were not finite (null) are left out.
    The result is NaN if no value is left.

    >>> score([{"step": s, "reward/mean": s / 10} for s in range(1, 21)])  # of steps 19 and 20
    1.95
    """
    return of_points([point(row) for row in rows], collapsed)


def point(row: dict) -> tuple[int, float, float]:
    """Return a row's step, held-out reward and training reward, NaN for a missing reward.

    The score depends only on these."""
    held_out = [row[name] for name in row if HELD_OUT.fullmatch(name) and row[name] is not None]
    reward = row.get("reward/mean")
    mean = sum(held_out) / len(held_out) if held_out else math.nan
    training_reward = math.nan if reward is None else reward
    return row["step"], mean, training_reward


def of_points(points: list[tuple[int, float, float]], collapsed: bool = False) -> float:
    """Return the score of a run from the `point` of every row, in their order."""
    held_out = [(step, mean) for step, mean, _ in points if not math.isnan(mean)]
    values = held_out or [(step, reward) for step, _, reward in points if not math.isnan(reward)]
    if not values:
        return math.nan
    last = points[-1][0]
    first = last - math.ceil(LAST * last)
    at_end = [value for step, value in values if step > first or step == last]
    if at_end:
        return sum(at_end) / len(at_end)
    if collapsed:
        return min(value for _, value in values)
    return values[-1][1]
