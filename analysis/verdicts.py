"""What may be said of a number from its interval: the rule that every verdict follows.

    seen                       the interval lies above the line, and the exact sign-flip p is below
                               .05
    not seen: contradicted     the interval lies below the line, and the exact sign-flip p is below
                               .05
    points to it, against it   the interval lies on one side, but p is not below .05
    the same within ±m         the interval lies within m of the line, and p is below .05 at both of
                               its ends; "points to the same" where only the interval says so
    undecided                  none of these

An interval over a few seeds relies on their being normally distributed, and with three seeds a
rounding difference of the machine can reverse it. The sign-flip test does not rely on that. Its
smallest p over S seeds is 2 / 2^S, so a verdict requires 6 seeds. One seed gives an interval within
the run and no p: it can point to something, no more.
"""

from __future__ import annotations

import math

from gspo.analysis.stats import Interval

LEVEL, FEWEST = 0.05, 6


def judge(interval: Interval, line: float, name: str, margin: float = 0.0) -> str:
    """Return the verdict on "above the line" and, with a margin, also on "the same as the line
    within ±margin".
    """
    if math.isnan(interval.low):
        return "undecided (no interval)"
    same = alike(interval, line, margin) if margin else ""
    if interval.low <= line <= interval.high:
        return same or f"undecided (interval {interval.kind}, includes {name})"
    above, p = interval.low > line, interval.p(line)
    side = f"interval {interval.kind}, {'above' if above else 'below'} {name}"
    return _words(above, p, side, interval.seeds) + (f"; {same}" if same else "")


def between(interval: Interval, low: float, high: float, name: str) -> str:
    """Return the verdict on "lies between low and high"; `name` says what these two are."""
    if math.isnan(interval.low):
        return "undecided (no interval)"
    if low < interval.low and interval.high < high:
        p = max(interval.p(low), interval.p(high))
        return _words(True, p, f"interval {interval.kind}, {name}", interval.seeds)
    if interval.high < low or interval.low > high:
        p = interval.p(low if interval.high < low else high)
        return _words(False, p, f"interval {interval.kind}, not {name}", interval.seeds)
    return f"undecided (interval {interval.kind}, only in part {name})"


def alike(interval: Interval, line: float, margin: float) -> str:
    """Return "the same within ±margin" if that can be said, "points to the same ..." if only the
    interval says so, or ""."""
    if not (line - margin < interval.low and interval.high < line + margin):
        return ""
    p = max(interval.p(line - margin), interval.p(line + margin))
    verdict = f"{'' if p < LEVEL else 'points to '}the same within ±{margin:g}"
    return (
        f"{verdict} (interval {interval.kind}; against ±{margin:g} {certainty(p, interval.seeds)})"
    )


def certainty(p: float, seeds: int) -> str:
    """Return the exact p in words, and what a verdict would still require."""
    if math.isnan(p):
        return f"no p from one seed: a verdict needs {FEWEST}"
    text = f"exact p = {p:.2g}"
    if p < LEVEL:
        return text
    return f"{text}: a verdict needs p < {LEVEL:g}" + (
        f", so {FEWEST} seeds" if seeds < FEWEST else ""
    )


def _words(holds: bool, p: float, why: str, seeds: int) -> str:
    sure = (
        ("seen" if holds else "not seen: contradicted")
        if p < LEVEL
        else f"points {'to' if holds else 'against'} it"
    )
    return f"{sure} ({why}; {certainty(p, seeds)})"
