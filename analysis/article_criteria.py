"""How a criterion of the article (article.py) is judged by its numbers.

A criterion names numbers of article_numbers.py and the rule that was registered for them in
experiments/STUDIES.md. article_registered.py has all criteria. A verdict follows from a number's
interval and p, so the article cannot print a word that its rows contradict. The rules are those of
verdicts.py:

    above, below    seen if the interval lies above (below) the line and p is below .05,
                    contradicted if it lies on the other side; "points to it" and "points against
                    it" if only the interval says so
    same            the interval lies within the margin, and p is below .05 at both of its ends;
                    contradicted if it lies outside
    level           same, but contradicted if the interval leaves 0 out and p is below .05
    frozen          same, or seen if it is above 0
    within          same by the interval alone; the margin is a factor
    changes         seen if "above" or "below" is seen, points to it likewise
    not_above       seen unless "above" is seen
    decided         above, or same if the interval lies within 10 % of the line. The rule of
                    ratios in sequential designs, which know no "points to it"

All else is undecided. In a sequential design interval and p have the level of the look in place of
.05 (sequential.py).
"""

import itertools
import math
import re
from dataclasses import dataclass

from gspo.analysis.article_entries import Numbers
from gspo.analysis.claims import SAME
from gspo.analysis.foresight import Value
from gspo.analysis.stats import LEVEL, Interval

SEEN = "seen"
THE_SAME = "same"
POINTS_TO = "points to it"
UNDECIDED = "undecided"
POINTS_AGAINST = "points against it"
CONTRADICTED = "contradicted"
STRENGTH = (CONTRADICTED, POINTS_AGAINST, UNDECIDED, POINTS_TO, SEEN, THE_SAME)  # weakest first
NOT_SHOWN = "not shown"
IN_PART = "in part"
NO_EXPECTATION = "–"
STEP_SIZE_FACTOR = 1.15
SEQUENTIAL_FACTOR = 1.1
MAX_LISTED_PARTS = 3  # more parts are counted by their words


@dataclass(frozen=True)
class Part:
    """A number and the rule that judges it.

    `expected` says whether the rule was expected to hold, or names the verdict that was expected.
    It is None without an expectation.
    """

    number: str
    rule: str = "above"
    line: float = 0.0
    expected: bool | str | None = True


@dataclass(frozen=True)
class Criterion:
    """A registered criterion: the expectation in words, and its parts.

    If it is `joint`, all parts must hold together, and the weakest part decides.
    """

    expected: str
    parts: tuple[Part, ...]
    joint: bool = False


def criterion(expected: str, *numbers: str, rule: str = "above", line: float = 0.0) -> Criterion:
    """Return a criterion whose parts share a rule.

    The numbers are names, in which "{4,16}" stands for two names, as in a shell.

    The expectation is "yes", "no", a verdict as in STRENGTH, or other words. Other words are
    printed, and nothing is compared with them.
    """
    holds: bool | str | None = {"yes": True, "no": False}.get(expected)
    if expected in STRENGTH:
        holds = expected
    elif rule == "decided" and expected == "yes":
        holds = SEEN  # this rule may also find that a ratio is the same as the line
    names = [name for pattern in numbers for name in expanded(pattern)]
    parts = [Part(name, rule, line, holds) for name in names]
    return Criterion(expected, tuple(parts))


def expanded(pattern: str) -> list[str]:
    """Return the names that a pattern stands for.

    >>> expanded("A.{4,16}.ratio")
    ['A.4.ratio', 'A.16.ratio']
    """
    pieces = re.split(r"\{(.*?)\}", pattern)
    choices = [piece.split(",") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(combination) for combination in itertools.product(*choices)]


# ------------------------------------------------------------------------------------------------
# rules
def word(part: Part, interval: Interval | Value, p: float) -> str:
    """Return the verdict on a number. p is the number's own, against the line.

    Raises KeyError for a rule that does not exist.
    """
    low = interval.low
    high = interval.high
    if math.isnan(low):
        return UNDECIDED
    level = LEVEL
    if isinstance(interval, Interval):
        level = interval.level
    above = side(low > part.line, high < part.line, p < level)
    if part.rule == "above":
        return above
    if part.rule == "below":
        return side(high < part.line, low > part.line, p < level)
    if part.rule == "changes":
        return {CONTRADICTED: SEEN, POINTS_AGAINST: POINTS_TO}.get(above, above)
    if part.rule == "not_above":
        return CONTRADICTED if above == SEEN else SEEN
    if part.rule == "within":
        inside = low > 1 / STEP_SIZE_FACTOR and high < STEP_SIZE_FACTOR
        return THE_SAME if inside else UNDECIDED
    if part.rule == "decided":
        if above in (SEEN, CONTRADICTED):
            return above
        inside = low > part.line / SEQUENTIAL_FACTOR and high < part.line * SEQUENTIAL_FACTOR
        return THE_SAME if inside else UNDECIDED
    if part.rule == "level" and above in (SEEN, CONTRADICTED):
        return CONTRADICTED
    if part.rule == "frozen" and above == SEEN:
        return SEEN
    if part.rule not in ("same", "level", "frozen"):
        raise KeyError(part.rule)
    return sameness(interval)


def side(on_side: bool, on_other_side: bool, is_certain: bool) -> str:
    """Return the verdict from the side of the line on which the interval lies.

    `is_certain` says whether p is below the level.
    """
    if on_side:
        return SEEN if is_certain else POINTS_TO
    if on_other_side:
        return CONTRADICTED if is_certain else POINTS_AGAINST
    return UNDECIDED


def sameness(interval: Interval) -> str:
    """Return the verdict on "the same as 0 within ±.03"."""
    is_certain = interval.p_within(-SAME, SAME) < interval.level
    if interval.low > -SAME and interval.high < SAME:
        return THE_SAME if is_certain else POINTS_TO
    if interval.low > SAME or interval.high < -SAME:
        return CONTRADICTED if is_certain else POINTS_AGAINST
    return UNDECIDED


def agreement(verdict: str, expected: bool | str | None) -> str:
    """Return whether a verdict is what was expected: yes, no or not shown."""
    if expected is None:
        return NO_EXPECTATION
    if verdict not in (SEEN, THE_SAME, CONTRADICTED):
        return NOT_SHOWN
    if isinstance(expected, str):
        return "yes" if verdict == expected else "no"
    return "yes" if expected == (verdict != CONTRADICTED) else "no"


# ------------------------------------------------------------------------------------------------
# verdicts
def judge(rule: Criterion, numbers: Numbers) -> dict[str, str]:
    """Return a criterion's expectation, its verdict in words, and whether they agree."""
    verdicts = [word(part, *numbers.judged[part.number]) for part in rule.parts]
    expectations = [part.expected for part in rule.parts]
    if rule.joint:
        # one verdict, and the expectation that the parts share
        verdicts = [min(verdicts, key=STRENGTH.index)]
        expectations = expectations[:1]
    pairs = zip(verdicts, expectations, strict=True)
    agrees = overall({agreement(verdict, expected) for verdict, expected in pairs})
    return {"expected": rule.expected, "verdict": in_words(verdicts), "agrees": agrees}


def overall(agreements: set[str]) -> str:
    """Return whether a criterion came out as expected, from the agreements of its parts."""
    if agreements == {NO_EXPECTATION}:
        return NO_EXPECTATION
    agreements = agreements - {NO_EXPECTATION}
    if agreements == {"no", NOT_SHOWN}:
        return "no"
    return agreements.pop() if len(agreements) == 1 else IN_PART


def in_words(words: list[str]) -> str:
    """Return the verdicts of the parts: one word if they agree, else each, or how many of each.

    >>> in_words(["seen", "undecided"])
    'seen; undecided'
    >>> in_words(["same", "same", "same", "undecided"])
    '3 of 4 same, 1 undecided'
    """
    if len(set(words)) == 1:
        return words[0]
    if len(words) <= MAX_LISTED_PARTS:
        return "; ".join(words)
    counts = [(words.count(kind), kind) for kind in reversed(STRENGTH) if kind in words]
    first_count, first_kind = counts[0]
    texts = [f"{first_count} of {len(words)} {first_kind}"]
    texts += [f"{count} {kind}" for count, kind in counts[1:]]
    return ", ".join(texts)
