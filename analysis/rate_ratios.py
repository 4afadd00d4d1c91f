"""The ratios of critical rates of a study's arms, and what a look of a sequential design decides.

The tables are those of fig_critical_rate.measure: a row per run with arm, seed, rate and collapsed.
Shape suffixes: S seeds, A arms, R rates.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from gspo.analysis.critical_rate import Counts, fit, ratio
from gspo.analysis.sequential import Design, level_of
from gspo.analysis.stats import LEVEL, Interval


@dataclass(frozen=True)
class RateRatio:
    """The ratio of the critical rates of two arms, and its permutation p.

    `least` and `most` bound the ratio. They are equal if some runs of both arms collapsed and
    others did not. An arm of which no run collapsed has a critical rate anywhere above its rates,
    and the fitted one comes from the prior.
    """

    interval: Interval
    p: float
    least: float
    most: float

    @property
    def measured(self) -> bool:
        return self.least == self.most

    def text(self) -> str:
        """Return the ratio with its interval, or on which side of a number it lies, or "-"."""
        if self.measured:
            return self.interval.text(".2f")
        if self.least > 0:
            return f"above {self.least:.2f}"
        if np.isfinite(self.most):
            return f"below {self.most:.2f}"
        return "-"


Ratios = dict[tuple[str, str], RateRatio]


def in_order(numbers: pd.DataFrame) -> list[str]:
    """Return the arms' names in the order in which the paper has them ahead."""

    def order(arm: str) -> tuple:
        return not arm.startswith("GSPO"), "Replay" not in arm, arm

    return sorted(numbers["arm"].unique(), key=order)


def collapse_counts(numbers: pd.DataFrame) -> tuple[Counts, list[str]]:
    """Return the runs for the fit, and the arms' names in their order there."""
    arms = in_order(numbers)
    rates = np.sort(numbers["rate"].unique())
    seeds = np.sort(numbers["seed"].unique())
    shape = (len(seeds), len(arms), len(rates))
    runs_SAR = np.zeros(shape, int)
    collapsed_SAR = np.zeros_like(runs_SAR)
    cells = (
        np.searchsorted(seeds, numbers["seed"]),
        numbers["arm"].map(arms.index),
        np.searchsorted(rates, numbers["rate"]),
    )
    runs_SAR[cells] = 1
    collapsed_SAR[cells] = numbers["collapsed"]
    return Counts(rates, runs_SAR, collapsed_SAR), arms


def compare(numbers: pd.DataFrame, design: Design | None = None) -> Ratios:
    """Return the ratio of the critical rates of each pair of arms, over the seeds of both.

    In a sequential design a pair has the seeds that ran at every rate in both arms, and its
    interval has the level of the look. Raises RunsError if the design has no look at their number.
    """
    counts, arms = collapse_counts(numbers)
    if len(counts.rates_R) < 2:
        return {}
    seeds = numbers.groupby("arm")["seed"].agg(set)
    if design:
        seeds = pd.Series({arm: complete_seeds(numbers, arm) for arm in arms})
    ratios = {}
    for a, b in combinations(arms, 2):
        shared = seeds[a] & seeds[b]
        if not shared:
            continue
        level = level_of(design, len(shared), f"{a} and {b}") if design else LEVEL
        of_pair = of_seeds(counts, numbers, shared)
        interval, p = ratio(of_pair, arms.index(a), arms.index(b), level)
        _, critical_A = fit_pooled(of_pair)
        of_shared = numbers[numbers["seed"].isin(shared)]
        a_low, a_high = rate_bounds(of_shared[of_shared["arm"] == a], critical_A[arms.index(a)])
        b_low, b_high = rate_bounds(of_shared[of_shared["arm"] == b], critical_A[arms.index(b)])
        most = a_high / b_low if b_low else np.inf
        ratios[a, b] = RateRatio(interval, p, a_low / b_high, most)
    return ratios


def complete_seeds(numbers: pd.DataFrame, arm: str) -> set[int]:
    """Return the seeds of an arm that ran at every rate at which the arm ran."""
    runs = numbers[numbers["arm"] == arm]
    rates = runs.groupby("seed")["rate"].nunique()
    return set(rates.index[rates == runs["rate"].nunique()])


def of_seeds(counts: Counts, numbers: pd.DataFrame, seeds: set[int]) -> Counts:
    """Return the counts of these seeds alone."""
    chosen_S = np.isin(np.sort(numbers["seed"].unique()), list(seeds))
    return Counts(counts.rates_R, counts.runs_SAR[chosen_S], counts.collapsed_SAR[chosen_S])


def rate_bounds(runs: pd.DataFrame, critical: float) -> tuple[float, float]:
    """Return two bounds of the critical rate of an arm's runs.

    Both are the fitted rate if some runs collapsed and others did not. An arm without a critical
    rate (NaN) has the bounds 0 and infinity.
    """
    if not runs["collapsed"].any():
        return runs["rate"].max(), np.inf
    if runs["collapsed"].all():
        return 0.0, runs["rate"].min()
    if np.isnan(critical):
        return 0.0, np.inf
    return critical, critical


def incomplete_seeds(numbers: pd.DataFrame) -> list[str]:
    """Return a line per arm with the seeds that a look leaves out, as they lack some rate."""
    lines = []
    for arm, runs in numbers.groupby("arm"):
        seeds = sorted(set(runs["seed"]) - complete_seeds(numbers, arm))
        if seeds:
            names = ", ".join(map(str, seeds))
            lines.append(f"Not in the looks: {arm}, seeds {names}, which lack runs at some rates.")
    return lines


def decision(rate_ratio: RateRatio, names: tuple[str, str], design: Design, margin: float) -> str:
    """Return what a look decides about the ratio of two critical rates.

    With a margin m, two rates are the same if the interval lies within 1 / (1 + m) to 1 + m. An
    arm of which all runs collapsed, or none, is never the same as another."""
    interval = rate_ratio.interval
    p = rate_ratio.p
    a, b = names
    if p < interval.level and interval.low > 1:
        return f"{a} has the higher critical rate"
    if p < interval.level and interval.high < 1:
        return f"{b} has the higher critical rate"
    within = interval.low > 1 / (1 + margin) and interval.high < 1 + margin
    if margin and within and rate_ratio.measured:
        return f"the same within {100 * margin:g} %"
    following = design.next_look(interval.seeds + 1)
    if not following:
        return "undecided at the last look"
    smallest_p = 2.0 ** (1 - interval.seeds)
    if smallest_p >= interval.level:
        return f"too few seeds for a p below {interval.level:.2g}: go on to {following}"
    return f"go on to {following} seeds"


def fit_pooled(counts: Counts) -> tuple[np.ndarray, np.ndarray]:
    """Return the slope and the critical rates of the runs of all seeds together."""
    runs_AR = counts.runs_SAR.sum(0)
    collapsed_AR = counts.collapsed_SAR.sum(0)
    return fit(counts.rates_R, runs_AR, collapsed_AR)
