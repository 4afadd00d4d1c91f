"""How well a score foresees a collapse: AUROC at a lead, fitted thresholds, warnings.

A run either collapses at some step or does not, by the registered rule (gspo/tracking/collapse.py).
A run that does not is called healthy. A score warns at its first step above a threshold, which is
fitted on other runs. warning_worth.py says what its warnings are worth.

The interval of an AUROC is 95 %, by resampling runs, with collapsed and healthy runs resampled
apart. It treats runs as independent, which runs of the same seed or setting are not quite. No
interval is given for fewer than 5 runs.
"""

import math
from dataclasses import dataclass

import numpy as np

from gspo.analysis.stats import REPS
from gspo.statistics import percentile_interval, resample_counts

MIN_VALUES = 5  # for an interval
WARM_UP = 10  # steps at the start without warnings, as in the monitor by default
FALSE_ALARM_SHARE = 0.05  # of the healthy runs, at a fitted threshold
# a warning is over when the score falls below this share of the threshold, as in the monitor
CLEARED = 0.8


@dataclass
class History:
    """A run: its group, its learning rate, its collapse, and its scores [T] by rule.

    `collapsed` is the index of the step at which the run collapsed, or None. A group is a study, or
    a stress of the stressors. Runs of one `setting` differ in the seed alone, and runs of one
    `seed` have the same problems in the same order.
    """

    run: str
    group: str
    lr: float
    collapsed: int | None
    scores: dict[str, np.ndarray]
    setting: str = ""
    seed: str = ""

    def highest(self, rule: str, end: int | None = None) -> float:
        """Return the largest score from the warm-up to before `end`, or NaN if there is none."""
        part = self.scores[rule][WARM_UP:end]
        part = part[np.isfinite(part)]
        return float(part.max()) if len(part) else math.nan


# ------------------------------------------------------------------------------------------------
# ranking
def wins(
    runs: list[History],
    rule: str,
    lead: int,
    same_lr: bool = False,
) -> np.ndarray:
    """Return [collapsed, healthy]: 1 if the collapsed run's largest score is higher, 0.5 if equal.

    Both scores are taken over the same steps, from the warm-up until `lead` steps before the
    collapse. Otherwise a long healthy run would have more chances of a high score. An entry is NaN
    if either run has no score or, with `same_lr`, if the learning rates differ.
    """
    healthy = [run for run in runs if run.collapsed is None]
    rates = np.array([run.lr for run in healthy])
    rows = []
    for run in runs:
        if run.collapsed is None:
            continue
        # the last counted step is `lead` before the collapse
        end = max(0, run.collapsed - lead + 1)
        score = run.highest(rule, end)
        scores = [other.highest(rule, end) for other in healthy]
        healthy_scores = np.array(scores)
        row = (score > healthy_scores) + 0.5 * (score == healthy_scores)
        row[np.isnan(score - healthy_scores)] = np.nan
        if same_lr:
            row[rates != run.lr] = np.nan
        rows.append(row)
    return np.array(rows).reshape(len(rows), len(healthy))


@dataclass
class Value:
    """An estimate, its interval (NaN if there is none), and the number of runs behind it."""

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


NO_VALUE = Value(math.nan, math.nan, math.nan, 0)


def auroc(
    runs: list[History],
    rule: str,
    lead: int = 1,
    same_lr: bool = False,
) -> Value:
    """Return the probability that a collapsed run scores above a healthy run.

    The scores are taken `lead` steps before the collapse or earlier. With `same_lr` only pairs of
    the same learning rate are compared. The count is of the collapsed runs that have steps so
    early and a run to be compared with.
    """
    table = wins(runs, rule, lead, same_lr)
    if table.size:
        table = table[np.isfinite(table).any(axis=1)]
    if not table.size:
        return NO_VALUE
    collapsed, healthy = table.shape
    low = math.nan
    high = math.nan
    if collapsed >= MIN_VALUES:
        rng = np.random.default_rng(0)
        collapsed_counts = resample_counts(collapsed, REPS, rng)
        healthy_counts = resample_counts(healthy, REPS, rng)

        def totals(values: np.ndarray) -> np.ndarray:
            """Return the sum of the values over the drawn pairs, for each draw."""
            terms = (collapsed_counts, values, healthy_counts)
            return np.einsum("ri,ij,rj->r", *terms, optimize=True)

        pairs = totals(np.isfinite(table))
        won = totals(np.nan_to_num(table))
        low, high = percentile_interval(won[pairs > 0] / pairs[pairs > 0])
    return Value(float(np.nanmean(table)), low, high, collapsed)


# ------------------------------------------------------------------------------------------------
# warning
def fitted(runs: list[History], rule: str) -> float:
    """Return the lowest threshold above which at most 5 % of the healthy runs ever score."""
    healthy = [run for run in runs if run.collapsed is None]
    highest = [run.highest(rule) for run in healthy]
    highest = sorted(score for score in highest if not math.isnan(score))
    if not highest:
        return math.nan
    below = math.ceil((1 - FALSE_ALARM_SHARE) * len(highest))
    return highest[below - 1]


def warnings(scores: np.ndarray, threshold: float) -> list[int]:
    """Return the steps at which a warning begins.

    A warning is over when the score falls below 0.8 x a positive threshold.
    """
    steps = []
    active = False
    clear = CLEARED * threshold if threshold > 0 else threshold
    for step, score in enumerate(scores[WARM_UP:], start=WARM_UP):
        if not active and score > threshold:
            steps.append(step)
        active = score > threshold or (active and not score < clear)
    return steps
