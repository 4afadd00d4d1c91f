"""The registered criteria of the article (article.py), and the verdict of each.

A criterion names numbers of article_numbers.py and the rule that was registered for them in
experiments/STUDIES.md. Its verdict follows from a number's interval and p, so the article cannot
print a word that its rows contradict. The rules are those of verdicts.py:

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

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gspo.analysis.article_doses import ENOUGH
from gspo.analysis.article_entries import Numbers
from gspo.analysis.claims import SAME
from gspo.analysis.foresight import Value
from gspo.analysis.stability_claims import CHANGED, MIN_DECLINE
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


def parts(
    numbers: Iterable[str],
    rule: str = "above",
    line: float = 0.0,
    expected: bool | str | None = True,
) -> tuple[Part, ...]:
    """Return a part for each of these numbers, with the same rule."""
    return tuple(Part(number, rule, line, expected) for number in numbers)


def criterion(
    expected: str, *numbers: str, rule: str = "above", line: float = 0.0, joint: bool = False
) -> Criterion:
    """Return a criterion whose parts share a rule.

    The expectation is "yes", "no", a verdict as in STRENGTH, or other words. Other words are
    printed, and nothing is compared with them.
    """
    holds: bool | str | None = {"yes": True, "no": False}.get(expected)
    if expected in STRENGTH:
        holds = expected
    elif rule == "decided" and expected == "yes":
        holds = SEEN  # this rule may also find that a ratio is the same as the line
    return Criterion(expected, parts(numbers, rule, line, holds), joint)


EDGE = "edge.paper_ranges"
ARMS_OF_B = ("GSPO", "replay", "CISPO", "GMPO", "SAPO", "MiniRL")
RATES = ("low", "high")
OBJECTIVES_OF_F = ("GSPO", "GSPO-token", "GRPO", "CISPO")
OBJECTIVES_OF_H = ("GSPO", "GRPO")
TRUNCATIONS = ("p90", "p95", "p99")
ARMS_OF_I = (
    "GSPO",
    "GRPO [clip range 0.2]",
    "GRPO [clip range 0.05]",
    "GRPO + Routing Replay (R2)",
    "GRPO [OPSM]",
    "CISPO",
    "SAPO",
    "GMPO",
    "MiniRL",
    "VESPO",
    "CTPO",
    "prime-rl",
    "DPPO",
)
# in the order of the article's table
REGISTERED = {
    "edge.stopped": criterion("yes", f"{EDGE}_at_3.5e-4.replay"),
    "edge.comfortable": criterion(
        "yes", *(f"edge.comfortable.{pair}" for pair in ("replay", "plain", "none")), rule="same"
    ),
    "edge.paper.replay": criterion("yes", f"{EDGE}.replay"),
    "edge.paper.plain": criterion("yes", f"{EDGE}.plain"),
    "edge.paper.none": criterion("yes", f"{EDGE}.none"),
    "edge.own.replay": criterion("yes", "edge.edge_rate.replay", rule="same"),
    "edge.own.plain": criterion("yes", "edge.edge_rate.plain", rule="same"),
    "edge.own.none": criterion("yes", "edge.edge_rate.none", rule="same"),
    "edge.quarter": criterion("yes", "edge.own_range.replay", "edge.own_range.plain"),
    "edge.again": criterion(
        "yes",
        *(f"edge.edge_rate_again.{pair}" for pair in ("replay", "plain", "none")),
        rule="same",
    ),
    "beyond.plain": criterion("yes", "edge.beyond_edge.plain"),
    "beyond.replay": criterion("yes", "edge.beyond_edge.replay"),
    "beyond.falls": criterion("yes", "edge.fall.grpo", "edge.fall.replay", line=100 * MIN_DECLINE),
    "beyond.gspo": criterion("yes", "edge.fall.gspo", line=100 * MIN_DECLINE),
    "beyond.held_out": criterion("yes", "edge.beyond_edge.held_out"),
    "sums.plain": criterion("yes", "sums.plain"),
    "sums.quarter": criterion("yes", "sums.quarter", rule="same"),
    "sums.replay": criterion("not said", "sums.replay"),
    "effect.edge": criterion("yes", "effect.edge.replay"),
    "effect.comfortable": criterion("yes", "effect.comfortable.replay", rule="same"),
    "effect.range": Criterion(
        "yes",
        (Part("effect.gain"), Part("effect.range.replay", "not_above")),
        joint=True,
    ),
    "A.plain": criterion(
        "yes", *(f"A.{setting}.ratio.plain" for setting in ("4", "16", "top1")), line=1
    ),
    "A.replay": criterion(
        "yes", *(f"A.{setting}.ratio.replay" for setting in ("4", "16", "top1")), line=1
    ),
    "A.step": criterion("yes", "A.4.ratio.quarter", rule="within", line=1),
    "A.none": criterion(
        "open", *(f"A.{setting}.ratio.none" for setting in ("4", "16", "top1")), line=1
    ),
    "decided.plain": criterion("yes", "decided.4.ratio.plain", rule="decided", line=1),
    "decided.replay": criterion("yes", "decided.4.ratio.replay", rule="decided", line=1),
    "decided.step": criterion("same", "decided.4.ratio.quarter", rule="decided", line=1),
    "decided.none": criterion("undecided", "decided.4.ratio.none", rule="decided", line=1),
    "K.plain": criterion("yes", "K.ratio.plain", rule="decided", line=1),
    "K.replay": criterion("yes", "K.ratio.replay", rule="decided", line=1),
    "K.step": criterion("undecided", "K.ratio.quarter", rule="decided", line=1),
    "K.none": criterion("undecided", "K.ratio.none", rule="decided", line=1),
    "B.turn": Criterion(
        "no",
        (
            Part("B.plain.16", "above", expected=False),
            Part("B.plain.32", "below", expected=False),
        ),
        joint=True,
    ),
    "B.level": criterion(
        "yes", *(f"B.{arm}.{number}" for arm in ARMS_OF_B for number in (2, 4)), rule="level"
    ),
    "B.falls": criterion("yes", *(f"B.loss.{arm}" for arm in ("GRPO", *ARMS_OF_B))),
    "C.two_bits": criterion("yes", "C.harm.none.GRPO.int2", "C.harm.none.GSPO.int2", rule="below"),
    "C.four_bits": criterion(
        "yes", "C.harm.none.GRPO.fp4_e2m1", "C.harm.none.GSPO.fp4_e2m1", rule="same"
    ),
    "C.most": criterion("yes", "C.most.fp4_e2m1", rule="below"),
    "C.tis": criterion("yes", "C.tis.GRPO.int2"),
    "C.r3": criterion("little", "C.r3.GSPO.int2", "C.r3.GRPO.int2"),
    "C.better": criterion("no", "C.plain.engine.fp4_e2m1", "C.plain.engine.int3"),
    "D.harm": criterion("yes", "D.loss.14", "D.loss.60"),
    "D.replay": Criterion(
        "at 14 perhaps, at 60 no",
        (Part("D.replay.14", expected=None), Part("D.replay.60", expected=False)),
    ),
    "D.without": Criterion(
        "no",
        (
            Part("D.plain.60", expected=False),
            Part("D.gspo_replay.60", "not_above", expected=False),
        ),
        joint=True,
    ),
    "D.frozen": criterion("yes", "D.frozen.GSPO", "D.frozen.GRPO", rule="frozen"),
    "E.grpo": criterion("yes", "E.grpo.0", "E.grpo.28", "E.grpo.290", rule="same"),
    "E.others": criterion(
        "yes",
        *(f"E.{arm}.{level}" for arm in ("cispo", "token") for level in (0, 28, 290)),
        rule="same",
    ),
    "E.clip": Criterion(
        "at 50 and 90 %",
        (
            Part("E.below_half.0", "below", expected=False),
            Part("E.below_half.28", "below"),
            Part("E.below_half.290", "below"),
        ),
    ),
    "E.cost": criterion("no", "E.mistake.0", "E.mistake.28", "E.mistake.290"),
    "F.share": criterion(
        "yes",
        *(
            f"F.{rate}.{precision}.clipped"
            for rate in RATES
            for precision in ("head", "all", "engine")
        ),
    ),
    "F.head": criterion("yes", "F.low.help.GSPO", "F.high.help.GSPO"),
    "F.enough": criterion("no", "F.low.head.floor", "F.high.head.floor", rule="below", line=ENOUGH),
    "F.reward": criterion(
        "yes",
        *(
            f"F.{rate}.{precision}.reward.{objective}"
            for rate in RATES
            for precision in ("head", "all")
            for objective in OBJECTIVES_OF_F
        ),
        rule="level",
    ),
    "F.engine": criterion("yes", *(f"F.{rate}.engine.reward.GSPO" for rate in RATES), rule="below"),
    "H.gain": criterion("yes", "H.high.p90.reward.GSPO"),
    "H.harm": criterion(
        "not said",
        *(
            f"H.{rate}.{top_p}.held_out.{objective}"
            for rate in RATES
            for top_p in TRUNCATIONS
            for objective in OBJECTIVES_OF_H
        ),
        rule="below",
    ),
    "H.nothing": criterion(
        "yes",
        *(
            f"H.low.{top_p}.{outcome}.{objective}"
            for top_p in ("p95", "p99")
            for outcome in ("reward", "held_out")
            for objective in OBJECTIVES_OF_H
        ),
        rule="same",
    ),
    "H.cut": criterion(
        "yes",
        *(f"H.{rate}.p90.cut.{objective}" for rate in RATES for objective in OBJECTIVES_OF_H),
        rule="below",
    ),
    "H.cut_little": criterion(
        "yes",
        *(f"H.{rate}.p99.cut.{objective}" for rate in RATES for objective in OBJECTIVES_OF_H),
        rule="same",
    ),
    "I.head": criterion("yes", *(f"I.head.reward.{arm}" for arm in ARMS_OF_I), rule="same"),
    "I.all": criterion("yes", "I.all.reward.CISPO", "I.all.reward.SAPO", rule="below"),
    "I.engine": criterion("yes", "I.engine.reward.GSPO", "I.engine.reward.MiniRL", rule="below"),
    "I.clip": criterion(
        "yes",
        *(f"I.{precision}.clip.GSPO" for precision in ("head", "all", "engine")),
        rule="changes",
    ),
    "I.clip_others": criterion(
        "yes",
        *(f"I.engine.clip.{arm}" for arm in ("GMPO", "MiniRL", "GRPO + Routing Replay (R2)")),
        rule="changes",
    ),
    "arena.sapo": criterion("yes", "arena.tools_edge.SAPO", rule="below"),
}
# what the text and the table of the paper's claims say beside these
CLAIMS = {
    "claim.comfortable.replay": criterion("", "edge.comfortable.replay", rule="same"),
    "claim.twenty.replay": criterion("", "edge.twenty.replay", rule="same"),
    "claim.twenty.plain": criterion("", "edge.twenty.plain", rule="same"),
    "claim.compute": criterion("", "edge.comfortable.compute", line=1),
    "claim.held_out.comfortable": criterion("", "edge.comfortable.held_out", rule="same"),
    "claim.held_out.edge": criterion("", "edge.edge_rate.held_out", rule="same"),
    "claim.held_out.paper": criterion("", f"{EDGE}_at_3.5e-4.held_out"),
    "claim.clips": criterion("", f"{EDGE}.clip", line=1),
    "claim.declines": criterion(
        "", "edge.comfortable.fall", "edge.edge_rate.fall", line=100 * MIN_DECLINE
    ),
    "claim.declines.beyond": criterion("", "edge.fall.grpo", line=100 * MIN_DECLINE),
    "claim.replay": criterion("", "edge.comfortable.none", "edge.edge_rate.none", rule="same"),
    "claim.tuned": criterion("", "edge.own_range.plain", rule="below"),
    "claim.stable": criterion("", "edge.fall.gspo", rule="below", line=100 * MIN_DECLINE),
    "claim.experts": criterion("", "edge.changed.interval", line=100 * CHANGED[0]),
    "claim.protects": criterion("", "D.replay.60"),
    "claim.withstands": criterion("", "D.loss.GSPO.60", rule="below"),
    "claim.engine": criterion("", "C.plain.engine.fp4_e2m1"),
    "claim.r3": criterion("", "C.r3.GRPO.int2"),
    "claim.turn.ahead": criterion("", "B.plain.16"),
    "claim.turn.behind": criterion("", "B.plain.32", rule="below"),
    "claim.tools": criterion("", "E.grpo.28", "E.grpo.290", rule="same"),
    "claim.all_tokens": criterion("", "E.mistake.290", rule="below"),
    "claim.bfloat16": criterion("", "F.low.all.reward.GSPO", rule="same"),
    "claim.head": criterion("", "F.low.help.GSPO"),
    "I.all_cispo": criterion("", "I.all.reward.CISPO", rule="below"),
    "claim.head_first": criterion("", "F.low.help_first.GSPO"),
}


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
    return {"same": sameness, "level": sameness, "frozen": sameness}[part.rule](interval)


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
    is_certain = max(interval.p(-SAME), interval.p(SAME)) < interval.level
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
    words = [word(part, *numbers.judged[part.number]) for part in rule.parts]
    if rule.joint:
        words = [min(words, key=STRENGTH.index)]
    expectations = [part.expected for part in rule.parts]
    agreements = {agreement(*pair) for pair in zip(words, expectations, strict=False)}
    agrees = overall(agreements)
    return {"expected": rule.expected, "verdict": in_words(words), "agrees": agrees}


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


def judge_all(numbers: Numbers) -> dict[str, dict[str, str]]:
    """Return the verdicts of all registered criteria and claims by their names."""
    return {name: judge(rule, numbers) for name, rule in (REGISTERED | CLAIMS).items()}
