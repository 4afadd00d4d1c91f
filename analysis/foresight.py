"""How well a score foresees a collapse: AUROC at a lead, thresholds from other runs, lead times,
false alarms.

A run either collapses at some step or does not, by the registered rule (gspo/tracking/collapse.py);
a run that does not is called healthy. A score warns at its first step above a threshold. Only
warnings before the collapse count as seen; the rule itself is certain only 20 steps after it.
Intervals are 95 %, by resampling runs, with collapsed and healthy runs resampled apart. They treat
runs as independent, which runs of one seed and one setting are not quite. No interval is given for
fewer than 5 runs, nor where all have the same value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from gspo.analysis.stats import REPS

from gspo.statistics import percentile_interval, resample_counts, wilson_interval
from gspo.tracking.collapse import SIGNALS, collapse

LR = "learning rate alone"  # a score that looks at no metric, which the others have to beat
NORMAL_QUANTILE = 1.959964  # the 97.5 % quantile
FEWEST = 5  # the fewest values for an interval
WARM_UP = 10  # steps at the start without warnings, as in the monitor by default
RATE = 0.05  # the share of the healthy runs that may warn, where a threshold is fitted
# a warning is over when the score falls below this share of the threshold, as in the monitor
CLEARED = 0.8


@dataclass
class History:
    """One run: its stress, its learning rate, the index of the step at which it collapsed (None if
    it did not), and its scores [T] by signal."""

    run: str
    stress: str
    lr: float
    collapsed: int | None
    scores: dict[str, np.ndarray]

    def highest(self, signal: str, end: int | None = None) -> float:
        """Return the largest score from the warm-up to before `end`, or NaN if there is none."""
        part = self.scores[signal][WARM_UP:end]
        part = part[np.isfinite(part)]
        return float(part.max()) if len(part) else math.nan


def histories(frame: pd.DataFrame) -> list[History]:
    """Return the runs of a tidy frame (columns run, stress, arm, step and the signals' metrics)."""
    found = []
    for name, rows in frame.sort_values("step").groupby("run", sort=True):
        scores = {s: signal.score(_series(rows, signal.metric)) for s, signal in SIGNALS.items()}
        first = rows.iloc[0]
        scores[LR] = np.full(len(rows), first["lr"])
        fell = collapse(_series(rows, "reward/mean"))
        found.append(History(name, first["stress"], float(first["lr"]), fell, scores))
    return found


def _series(rows: pd.DataFrame, metric: str) -> list[float]:
    return rows[metric].astype(float).tolist() if metric in rows else [math.nan] * len(rows)


# ----------------------------------------------------------------------------------------------------------
# ranking
def wins(runs: list[History], signal: str, lead: int, same_lr: bool = False) -> np.ndarray:
    """Return [collapsed, healthy]: 1 where the collapsed run's largest score is above the healthy
    one's, 0.5 where equal.

    Both are taken over the same steps, from the warm-up until `lead` steps before the collapse;
    otherwise a long healthy run would have more chances of a high score. NaN where either has none
    or, with `same_lr`, where the learning rates differ.
    """
    healthy = [run for run in runs if run.collapsed is None]
    rows = []
    for run in runs:
        if run.collapsed is not None:
            # the last step counted is `lead` before the collapse
            end = max(0, run.collapsed - lead + 1)
            mine, others = (
                run.highest(signal, end),
                np.array([other.highest(signal, end) for other in healthy]),
            )
            out = np.isnan(mine - others) | np.array(
                [same_lr and run.lr != other.lr for other in healthy], bool
            )
            rows.append(np.where(out, np.nan, (mine > others) + 0.5 * (mine == others)))
    return np.array(rows).reshape(len(rows), len(healthy))


@dataclass
class Value:
    """An estimate, its interval (NaN where there is none), and the number of runs behind it."""

    value: float
    low: float
    high: float
    count: int

    def text(self, form: str = ".2f") -> str:
        """Return the estimate with its interval, as in "0.91 [0.83, 0.97]"."""
        if math.isnan(self.value):
            return "-"
        interval = "" if math.isnan(self.low) else f" [{self.low:{form}}, {self.high:{form}}]"
        return f"{self.value:{form}}{interval}"


NOTHING = Value(math.nan, math.nan, math.nan, 0)


def auroc(runs: list[History], signal: str, lead: int = 1, same_lr: bool = False) -> Value:
    """Return the probability that a collapsed run scores above a healthy one, taken `lead` steps
    before its collapse or earlier. With `same_lr` only pairs of one learning rate are compared. The
    count is of the collapsed runs that have steps so early and a run to be compared with."""
    table = wins(runs, signal, lead, same_lr)
    table = table[np.isfinite(table).any(axis=1)] if table.size else table
    if not table.size:
        return NOTHING
    there, won, (sick, well) = np.isfinite(table), np.nan_to_num(table), table.shape
    rng = np.random.default_rng(0)
    rows = resample_counts(sick, REPS, rng)
    columns = resample_counts(well, REPS, rng)
    pairs = np.einsum("ri,ij,rj->r", rows, there, columns, optimize=True)
    draws = (
        np.einsum("ri,ij,rj->r", rows, won, columns, optimize=True)[pairs > 0] / pairs[pairs > 0]
    )
    low, high = percentile_interval(draws) if sick >= FEWEST else (math.nan, math.nan)
    return Value(float(np.nanmean(table)), float(low), float(high), sick)


# ----------------------------------------------------------------------------------------------------------
# warning
def fitted(runs: list[History], signal: str) -> float:
    """Return the lowest threshold above which at most 5 % of the healthy ones among these runs ever
    score.
    """
    tops = [run.highest(signal) for run in runs if run.collapsed is None]
    tops = sorted(top for top in tops if not math.isnan(top))
    return tops[math.ceil((1 - RATE) * len(tops)) - 1] if tops else math.nan


def warnings(scores: np.ndarray, threshold: float) -> list[int]:
    """Return the steps at which a warning begins. It is over when the score falls below 0.8 x a
    positive threshold.
    """
    steps, active = [], False
    clear = CLEARED * threshold if threshold > 0 else threshold
    for step, score in enumerate(scores[WARM_UP:], start=WARM_UP):
        if not active and score > threshold:
            steps.append(step)
        active = score > threshold or (active and not score < clear)
    return steps


@dataclass
class Verdict:
    """A run's warnings: when the first came, how many there were, and when the run collapsed."""

    first: int | None
    count: int
    collapsed: int | None

    @property
    def seen(self) -> bool:
        """Whether a collapsed run was warned of before its collapse."""
        return self.first is not None and self.first < self.collapsed


def judged(run: History, thresholds: dict[str, float]) -> Verdict:
    """Return the warnings that these signals give together for one run."""
    steps = sorted(
        s for name, threshold in thresholds.items() for s in warnings(run.scores[name], threshold)
    )
    return Verdict(steps[0] if steps else None, len(steps), run.collapsed)


def held_out(runs: list[History], signal: str) -> list[Verdict]:
    """Judge each run by a threshold that was fitted on the runs under other stresses; runs without
    such a threshold are left out."""
    verdicts = []
    for stress in sorted({run.stress for run in runs}):
        threshold = fitted([run for run in runs if run.stress != stress], signal)
        if not math.isnan(threshold):
            verdicts += [judged(run, {signal: threshold}) for run in runs if run.stress == stress]
    return verdicts


@dataclass
class Alarm:
    """What a warning rule is worth."""

    seen: Value  # share of the collapsed runs that it warned of
    lead: Value  # median steps before the collapse, of those
    false: Value  # warnings per healthy run


def worth(verdicts: list[Verdict]) -> Alarm:
    """Sum up the verdicts on all runs."""
    sick = [v for v in verdicts if v.collapsed is not None]
    leads = [v.collapsed - v.first for v in sick if v.seen]
    counts = [v.count for v in verdicts if v.collapsed is None]
    return Alarm(
        share([v.seen for v in sick]), resampled(leads, np.median), resampled(counts, np.mean)
    )


def share(hits: list[bool]) -> Value:
    """Return the proportion of hits with Wilson's interval."""
    n = len(hits)
    if not n:
        return NOTHING
    p = sum(hits) / n
    return Value(p, *wilson_interval(p, n, NORMAL_QUANTILE), n)


def resampled(values: list[int], statistic: Callable[[np.ndarray], float]) -> Value:
    """Return a statistic of the values with its percentile interval."""
    numbers = np.array(values, float)
    if not len(numbers):
        return NOTHING
    low = high = math.nan
    if len(numbers) >= FEWEST and numbers.min() < numbers.max():
        rng = np.random.default_rng(0)
        draws = [
            statistic(numbers[rng.integers(len(numbers), size=len(numbers))]) for _ in range(REPS)
        ]
        low, high = percentile_interval(draws)
    return Value(float(statistic(numbers)), low, high, len(numbers))
