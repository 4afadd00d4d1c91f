"""The rule that every verdict follows: how strong a statement an interval permits.

    seen                       the interval lies above the line, and the exact sign-flip p is below
                               .05
    not seen: contradicted     the interval lies below the line, and the exact sign-flip p is below
                               .05
    points to it, against it   the interval lies on one side, but p is not below .05
    the same within ±m         the interval lies within m of the line, and p is below .05 at both
                               of its ends; "points to the same" if only the interval says so
    undecided                  none of these

An interval over a few seeds relies on their being normally distributed, and with three seeds a
rounding difference of the machine can reverse it. The sign-flip test relies on less, namely that
the differences are symmetric about the line. Paired runs of two arms that are the same give such
differences. Its smallest p over S seeds is 2 / 2^S, so a verdict requires 6 seeds. In a sequential
design the level of a look takes the place of .05, in the interval and for the p (sequential.py). A
single seed gives an interval within the run and no p: it can point to something, no more.
"""

import math
from dataclasses import dataclass

from gspo.analysis.stats import LEVEL, Interval

MIN_SEEDS = 6
NO_INTERVAL = "undecided (no interval)"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper: its place in the paper, its words, our finding, and the verdict."""

    where: str
    claim: str
    finding: str
    verdict: str

    def sentence(self) -> str:
        """Return the claim, the finding and the verdict as a line for a caption."""
        return f"Claim ({self.where}): {self.claim}. Here: {self.finding}. Verdict: {self.verdict}."


def with_verdicts(caption: str, claims: list[Claim]) -> str:
    """Return a caption with a line for each claim below it."""
    sentences = [claim.sentence() for claim in claims]
    return "\n".join([caption, *sentences])


def judge(
    interval: Interval,
    line: float,
    name: str,
    margin: float = 0.0,
) -> str:
    """Return the verdict on "above the line".

    With a margin, it also judges "the same as the line within ±margin". `name` is the line in
    words.
    """
    if math.isnan(interval.low):
        return NO_INTERVAL
    sameness = judge_sameness(interval, line, margin) if margin else ""
    if interval.low <= line <= interval.high:
        return sameness or f"undecided (interval {interval.kind}, includes {name})"
    above = interval.low > line
    side = "above" if above else "below"
    reason = f"interval {interval.kind}, {side} {name}"
    verdict = _words(above, interval.p(line), reason, interval)
    return f"{verdict}; {sameness}" if sameness else verdict


def between(interval: Interval, low: float, high: float, name: str) -> str:
    """Return the verdict on "lies between low and high"; `name` is this range in words."""
    if math.isnan(interval.low):
        return NO_INTERVAL
    if low < interval.low and interval.high < high:
        p = interval.p_within(low, high)
        return _words(True, p, f"interval {interval.kind}, {name}", interval)
    if interval.high < low or interval.low > high:
        nearest_limit = low if interval.high < low else high
        p = interval.p(nearest_limit)
        return _words(False, p, f"interval {interval.kind}, not {name}", interval)
    return f"undecided (interval {interval.kind}, only in part {name})"


def direction(interval: Interval, margin: float) -> str:
    """Return "above", "below", "same" or "undecided" of a difference: the verdict in a word.

    "above" and "below" are of 0, "same" is within ±margin. All need the interval and the exact p.
    """
    decided = interval.p() < interval.level
    if decided and interval.low > 0:
        return "above"
    if decided and interval.high < 0:
        return "below"
    if margin and -margin < interval.low and interval.high < margin:
        p = interval.p_within(-margin, margin)
        if p < interval.level:
            return "same"
    return "undecided"


def judge_sameness(interval: Interval, line: float, margin: float) -> str:
    """Return the verdict on "the same within ±margin", or "" if the interval permits none."""
    low = line - margin
    high = line + margin
    if interval.low <= low or interval.high >= high:
        return ""
    p = interval.p_within(low, high)
    same = f"the same within ±{margin:g}"
    if p >= interval.level:
        same = f"points to {same}"
    reason = certainty(p, interval.seeds, interval.level)
    return f"{same} (interval {interval.kind}; against ±{margin:g} {reason})"


def certainty(p: float, seeds: int, level: float = LEVEL) -> str:
    """Return the exact p in words, and the further requirements of a verdict."""
    if math.isnan(p):
        return f"no p from one seed: a verdict needs {MIN_SEEDS}"
    text = f"exact p = {p:.2g}"
    if p >= level:
        text += f": a verdict needs p < {level:.2g}"
        if seeds < MIN_SEEDS:
            text += f", so {MIN_SEEDS} seeds"
    return text


def _words(holds: bool, p: float, why: str, interval: Interval) -> str:
    if p < interval.level:
        verdict = "seen" if holds else "not seen: contradicted"
    else:
        verdict = f"points {'to' if holds else 'against'} it"
    return f"{verdict} ({why}; {certainty(p, interval.seeds, interval.level)})"
