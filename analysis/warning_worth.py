"""The worth of a warning rule: collapses seen, lead time, false alarms, with intervals.

The lead is the number of steps from the first warning to the collapse, of the runs that were warned
before it. A healthy step is a step after the warm-up of a run that never collapses.

Intervals are 95 %. Runs of one setting, and runs of one seed, are not independent. So whole
settings are resampled with all their seeds, and whole seeds with all their settings, and the wider
of the two intervals is given. Seeds are left out if there are fewer than 5, as in the stressors.

Shape suffixes: N runs, D draws of a bootstrap, C clusters (settings or seeds).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gspo.analysis import foresight
from gspo.analysis.foresight import MIN_VALUES, NO_VALUE, WARM_UP, History, Value
from gspo.analysis.stats import REPS
from gspo.analysis.warning_rules import Judged, with_metric
from gspo.statistics import percentile_interval, resample_counts, wilson_interval

NORMAL_QUANTILE = 1.959964
# The upper 97.5 % limit of a Poisson mean if no event was seen, -ln(.025).
NO_EVENT_LIMIT = 3.689


@dataclass
class Worth:
    """The worth of a rule, on the runs that can judge it."""

    collapsed: int  # runs
    healthy: int
    seen: Value  # share of the collapsed runs with a warning before the collapse
    warned: Value  # share of the collapsed runs with a warning at any time
    lead: Value  # median steps, of the runs that were seen
    per_run: Value  # warnings per healthy run
    per_100_steps: Value  # warnings per 100 healthy steps
    # Share of the collapses that warnings at random steps would precede, if they came as often as
    # this rule's warnings in healthy runs.
    at_random: float


def worth(verdicts: list[Judged]) -> Worth:
    """Return the worth of a rule, with intervals over settings or seeds."""
    collapsed = [verdict for verdict in verdicts if verdict.run.collapsed is not None]
    healthy = [verdict for verdict in verdicts if verdict.run.collapsed is None]
    seen = [verdict for verdict in collapsed if verdict.seen]
    collapsed_runs = [verdict.run for verdict in collapsed]
    healthy_runs = [verdict.run for verdict in healthy]
    seen_runs = [verdict.run for verdict in seen]
    hits_N = np.array([verdict.seen for verdict in collapsed], float)
    warned_N = np.array([verdict.first is not None for verdict in collapsed], float)
    leads_N = np.array([verdict.run.collapsed - verdict.first for verdict in seen], float)
    false_alarms_N = np.array([verdict.warnings for verdict in healthy], float)
    steps_N = np.array([verdict.steps for verdict in healthy], float)
    rate = false_alarms_N.sum() / steps_N.sum() if len(healthy) else math.nan
    watched_N = np.array([max(0, run.collapsed - WARM_UP) for run in collapsed_runs], float)
    at_random_N = 1 - (1 - rate) ** watched_N
    return Worth(
        collapsed=len(collapsed),
        healthy=len(healthy),
        seen=share(hits_N, collapsed_runs),
        warned=share(warned_N, collapsed_runs),
        lead=median(leads_N, seen_runs),
        per_run=events_per(false_alarms_N, np.ones(len(healthy)), healthy_runs),
        per_100_steps=events_per(false_alarms_N, steps_N / 100, healthy_runs),
        at_random=float(at_random_N.mean()) if len(collapsed) else math.nan,
    )


def within_settings(runs: list[History], rule: str, lead: int) -> Value:
    """Return the AUROC of a rule's score among runs of one setting, which differ in the seed alone.

    It is the probability that a collapsed run's largest score until `lead` steps before its
    collapse exceeds a healthy run's largest score over the same steps. Equal scores count half. The
    count is of the collapsed runs that have a healthy run beside them.
    """
    runs = with_metric(runs, rule)
    wins = []
    pairs = []
    collapsed = []
    for run in runs:
        if run.collapsed is None:
            continue
        peers = [peer for peer in runs if peer.setting == run.setting and peer.collapsed is None]
        row = foresight.wins([run, *peers], rule, lead)
        if np.isfinite(row).any():
            wins.append(np.nansum(row))
            pairs.append(np.isfinite(row).sum())
            collapsed.append(run)
    if not collapsed:
        return NO_VALUE
    value = sum(wins) / sum(pairs)
    interval = ratio_interval(np.array(wins, float), np.array(pairs, float), collapsed)
    return Value(float(value), *interval, len(collapsed))


def share(hits_N: np.ndarray, runs: list[History]) -> Value:
    """Return the share of hits.

    If all are hits, or none, the interval is Wilson's, as if each setting or seed were a single
    run.
    """
    if not len(hits_N):
        return NO_VALUE
    value = float(hits_N.mean())
    if value in (0, 1):
        size = fewest_clusters(runs)
        return Value(value, *wilson_interval(value, size, NORMAL_QUANTILE), len(hits_N))
    return Value(value, *ratio_interval(hits_N, np.ones(len(hits_N)), runs), len(hits_N))


def events_per(events_N: np.ndarray, exposure_N: np.ndarray, runs: list[History]) -> Value:
    """Return the number of events per unit of exposure.

    Without any event the upper limit is Poisson's, as if each setting or seed were a single run.
    """
    if not len(events_N):
        return NO_VALUE
    if not events_N.any():
        limit = NO_EVENT_LIMIT / (fewest_clusters(runs) * exposure_N.mean())
        return Value(0.0, 0.0, limit, len(events_N))
    value = float(events_N.sum() / exposure_N.sum())
    return Value(value, *ratio_interval(events_N, exposure_N, runs), len(events_N))


def median(values_N: np.ndarray, runs: list[History]) -> Value:
    """Return the median. It has no interval for fewer than 5 runs, or if all values are equal."""
    if not len(values_N):
        return NO_VALUE
    value = float(np.median(values_N))
    if len(values_N) < MIN_VALUES or values_N.min() == values_N.max():
        return Value(value, math.nan, math.nan, len(values_N))
    order_N = np.argsort(values_N)

    def medians(counts_DC: np.ndarray, cluster_N: np.ndarray) -> np.ndarray:
        """Return the median of each draw, the lower one if there are two."""
        weights_DN = counts_DC[:, cluster_N[order_N]]
        total_DN = weights_DN.cumsum(axis=1)
        half_D = total_DN[:, -1:] / 2
        return values_N[order_N][(total_DN >= half_D).argmax(axis=1)]

    return Value(value, *widest_interval(runs, medians), len(values_N))


def ratio_interval(
    above_N: np.ndarray, below_N: np.ndarray, runs: list[History]
) -> tuple[float, float]:
    """Return the interval of sum(above) / sum(below)."""

    def ratios(counts_DC: np.ndarray, cluster_N: np.ndarray) -> np.ndarray:
        above_C = np.bincount(cluster_N, above_N)
        below_C = np.bincount(cluster_N, below_N)
        return (counts_DC @ above_C) / (counts_DC @ below_C)

    return widest_interval(runs, ratios)


def widest_interval(
    runs: list[History], statistic: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, float]:
    """Return the wider of the bootstrap intervals over settings and over seeds.

    `statistic` takes how often each cluster is drawn, [D, C], and the cluster of each run, [N].
    """
    intervals = [(math.nan, math.nan)]
    for labels in clusters(runs):
        names, cluster_N = np.unique(labels, return_inverse=True)
        counts_DC = resample_counts(len(names), REPS, np.random.default_rng(0))
        intervals.append(percentile_interval(statistic(counts_DC, cluster_N)))
    return max(intervals, key=lambda ends: np.nan_to_num(ends[1] - ends[0], nan=-1))


def clusters(runs: list[History]) -> list[list[str]]:
    """Return the runs' settings and their seeds, without the kinds that have fewer than 5 names."""
    kinds = (
        [run.setting for run in runs],
        [run.seed for run in runs],
    )
    return [labels for labels in kinds if len(set(labels)) >= MIN_VALUES]


def fewest_clusters(runs: list[History]) -> int:
    """Return the number of settings or of seeds, whichever is smaller, or 1 if both are few."""
    return min((len(set(labels)) for labels in clusters(runs)), default=1)
