"""How well a score foresees a collapse: AUROC at a lead, thresholds from other runs, lead times, false alarms.

A run is healthy or collapses at a step, by the registered rule (gspo/collapse.py). A score warns at its first step
above a threshold; only warnings before the collapse count. Intervals are 95 %, by resampling runs (collapsed and
healthy ones apart); runs of one seed share their problems, so they are not quite independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from stats import REPS

from gspo.collapse import SIGNALS, collapse

WARM_UP = 10  # steps without warnings: the monitor's own default
RATE = 0.05  # of the healthy runs may warn, where a threshold is fitted
CLEARED = 0.8  # of the threshold: below it a warning is over, as in the monitor


@dataclass
class History:
    """One run: under what stress, the index of the step at which it collapsed (None: healthy), scores [T] by signal."""

    run: str
    stress: str
    arm: str
    collapsed: int | None
    scores: dict[str, np.ndarray]

    def highest(self, signal: str, end: int | None = None) -> float:
        """The largest score from the warm-up to before `end`; NaN if there is none."""
        part = self.scores[signal][WARM_UP:end]
        part = part[np.isfinite(part)]
        return float(part.max()) if len(part) else math.nan


def histories(frame: pd.DataFrame) -> list[History]:
    """The runs of a tidy frame (columns run, stress, arm, step and the signals' metrics)."""
    found = []
    for name, rows in frame.sort_values("step").groupby("run", sort=True):
        scores = {s: signal.score(_series(rows, signal.metric)) for s, signal in SIGNALS.items()}
        first = rows.iloc[0]
        found.append(History(name, first["stress"], first["arm"], collapse(_series(rows, "reward/mean")), scores))
    return found


def _series(rows: pd.DataFrame, metric: str) -> list[float]:
    return rows[metric].astype(float).tolist() if metric in rows else [math.nan] * len(rows)


# ---------------------------------------------------------------------------------------------------------- ranking
def wins(runs: list[History], signal: str, lead: int) -> np.ndarray:
    """[collapsed, healthy] 1 where the collapsed run's largest score is above the healthy one's, 0.5 where equal.

    Both over the same steps: from the warm-up until `lead` steps before the collapse. Without that a long healthy run
    would have more chances of a high score. NaN where either has none.
    """
    healthy = [run for run in runs if run.collapsed is None]
    rows = []
    for run in runs:
        if run.collapsed is not None:
            end = max(0, run.collapsed - lead + 1)  # the last step counted is `lead` before the collapse
            mine, others = run.highest(signal, end), np.array([other.highest(signal, end) for other in healthy])
            rows.append(np.where(np.isnan(mine - others), np.nan, (mine > others) + 0.5 * (mine == others)))
    return np.array(rows).reshape(len(rows), len(healthy))


def auroc(runs: list[History], signal: str, lead: int = 1) -> tuple[float, float, float, int]:
    """P(a collapsed run scores above a healthy one, `lead` steps before its collapse or earlier), its interval, and the
    number of collapsed runs that have steps so early."""
    table = wins(runs, signal, lead)
    table = table[np.isfinite(table).any(axis=1)] if table.size else table
    if not table.size:
        return math.nan, math.nan, math.nan, 0
    rng = np.random.default_rng(0)
    rows, columns = table.shape
    draws = [
        np.nanmean(table[np.ix_(rng.integers(rows, size=rows), rng.integers(columns, size=columns))])
        for _ in range(REPS)
    ]
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return float(np.nanmean(table)), float(low), float(high), rows


# ---------------------------------------------------------------------------------------------------------- warning
def fitted(runs: list[History], signal: str) -> float:
    """The lowest threshold above which at most 5 % of the healthy ones of these runs ever score."""
    tops = [run.highest(signal) for run in runs if run.collapsed is None]
    tops = sorted(top for top in tops if not math.isnan(top))
    return tops[math.ceil((1 - RATE) * len(tops)) - 1] if tops else math.nan


def warnings(scores: np.ndarray, threshold: float) -> list[int]:
    """The steps at which a warning begins; it is over when the score falls below 0.8 x a positive threshold."""
    steps, active = [], False
    clear = CLEARED * threshold if threshold > 0 else threshold
    for step, score in enumerate(scores[WARM_UP:], start=WARM_UP):
        if not active and score > threshold:
            steps.append(step)
        active = score > threshold or (active and not score < clear)
    return steps


@dataclass
class Verdict:
    """A run's warnings: when the first came, how many there were, and when it collapsed."""

    first: int | None
    count: int
    collapsed: int | None

    @property
    def seen(self) -> bool:
        """Of a collapsed run: warned before."""
        return self.first is not None and self.first < self.collapsed


def judged(run: History, thresholds: dict[str, float]) -> Verdict:
    """The warnings of these signals together."""
    steps = sorted(s for name, threshold in thresholds.items() for s in warnings(run.scores[name], threshold))
    return Verdict(steps[0] if steps else None, len(steps), run.collapsed)


def held_out(runs: list[History], signal: str) -> list[Verdict]:
    """Each run judged by a threshold that was fitted on the runs under other stresses."""
    verdicts = []
    for stress in sorted({run.stress for run in runs}):
        threshold = fitted([run for run in runs if run.stress != stress], signal)
        verdicts += [judged(run, {signal: threshold}) for run in runs if run.stress == stress]
    return verdicts


@dataclass
class Alarm:
    """What a rule is worth. Each entry: (value, low, high)."""

    seen: tuple[float, float, float]  # share of the collapsed runs that it warned of
    lead: tuple[float, float, float]  # median steps before the collapse, of those
    false: tuple[float, float, float]  # warnings per healthy run
    wrong: tuple[float, float, float]  # share of the healthy runs with a warning


def worth(verdicts: list[Verdict]) -> Alarm:
    """Over all runs, with intervals."""
    sick = [v for v in verdicts if v.collapsed is not None]
    well = [v for v in verdicts if v.collapsed is None]
    leads = np.array([v.collapsed - v.first for v in sick if v.seen], float)
    return Alarm(
        share([v.seen for v in sick]),
        resampled(leads, np.median),
        resampled(np.array([v.count for v in well], float), np.mean),
        share([v.count > 0 for v in well]),
    )


def share(hits: list[bool]) -> tuple[float, float, float]:
    """A proportion with Wilson's interval; NaN of none."""
    n, z = len(hits), 1.959964
    if not n:
        return math.nan, math.nan, math.nan
    p = sum(hits) / n
    middle, half = (p + z * z / (2 * n)) / (1 + z * z / n), z / (1 + z * z / n)
    half *= math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return p, max(0.0, middle - half), min(1.0, middle + half)


def resampled(values: np.ndarray, statistic) -> tuple[float, float, float]:
    """A statistic with its percentile interval; NaN of nothing."""
    if not len(values):
        return math.nan, math.nan, math.nan
    rng = np.random.default_rng(0)
    draws = [statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(REPS)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(statistic(values)), float(low), float(high)
