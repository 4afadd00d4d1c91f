"""The verdicts of the article follow from its numbers, and no verdict is written by hand."""

import math
import re

import pytest

from gspo.analysis import article, article_registered
from gspo.analysis import article_criteria as criteria
from gspo.analysis.article_criteria import Criterion, Part
from gspo.analysis.article_doses import measured, routing
from gspo.analysis.article_entries import Numbers
from gspo.analysis.stats import Interval, t_interval

TEXT = article.TEMPLATE.read_text(encoding="utf-8")
TABLE = TEXT[TEXT.index("#let criteria = (") : TEXT.index("#let judged")]
WORDS = {*criteria.STRENGTH, "points to", "points against"}
EIGHT = [0.01, 0.02, 0.015, 0.012, 0.018, 0.011, 0.016, 0.013]


@pytest.mark.parametrize(
    ("rule", "low", "high", "p", "word"),
    [
        ("above", 0.1, 0.2, 0.01, "seen"),
        ("above", 0.1, 0.2, 0.05, "points to it"),
        ("above", -0.1, 0.2, 0.01, "undecided"),
        ("above", -0.2, -0.1, 0.01, "contradicted"),
        ("above", -0.2, -0.1, 0.2, "points against it"),
        ("above", math.nan, math.nan, math.nan, "undecided"),
        ("below", -0.2, -0.1, 0.01, "seen"),
        ("below", 0.1, 0.2, 0.01, "contradicted"),
        ("not_above", 0.1, 0.2, 0.01, "contradicted"),
        ("not_above", 0.1, 0.2, 0.06, "seen"),
        ("changes", -0.2, -0.1, 0.01, "seen"),
        ("changes", 0.1, 0.2, 0.2, "points to it"),
        ("changes", -0.2, -0.1, 0.2, "points to it"),
        ("changes", -0.1, 0.2, 0.01, "undecided"),
        ("within", 0.92, 1.12, 1.0, "same"),
        ("within", 0.92, 1.16, 1.0, "undecided"),
        ("within", 0.86, 1.12, 1.0, "undecided"),
    ],
)
def test_a_rule_takes_the_interval_and_p(rule, low, high, p, word):
    interval = Interval((low + high) / 2, low, high, 8)
    assert criteria.word(Part("x", rule), interval, p) == word


@pytest.mark.parametrize(
    ("low", "high", "p", "word"),
    [
        (1.02, 1.2, 0.003, "seen"),
        (1.02, 1.2, 0.0032, "undecided"),
        (0.85, 0.98, 0.003, "contradicted"),
        (0.92, 1.09, 1.0, "same"),
        (0.9, 1.09, 1.0, "undecided"),
        (0.92, 1.11, 1.0, "undecided"),
        (1.02, 1.09, 0.01, "same"),
    ],
)
def test_a_look_decides_by_its_own_level(low, high, p, word):
    interval = Interval((low + high) / 2, low, high, 20, level=0.0031)
    assert criteria.word(Part("x", "decided", 1), interval, p) == word


def test_same_needs_the_interval_and_p_against_both_ends():
    small = t_interval(EIGHT)
    few = t_interval(EIGHT[:4])
    wide = t_interval([0.05, -0.05, 0.04, -0.06, 0.05, -0.04, 0.06, -0.05])
    far = t_interval([value + 0.1 for value in EIGHT])
    same = Part("x", "same")
    assert criteria.word(same, small, math.nan) == "same"
    assert criteria.word(same, few, math.nan) == "points to it"
    assert criteria.word(same, wide, math.nan) == "undecided"
    assert criteria.word(same, far, math.nan) == "contradicted"
    assert criteria.word(Part("x", "level"), small, small.p()) == "contradicted"
    assert criteria.word(Part("x", "frozen"), far, far.p()) == "seen"


def test_an_unknown_rule_is_refused():
    with pytest.raises(KeyError):
        criteria.word(Part("x", "larger"), t_interval(EIGHT), 0.01)


@pytest.mark.parametrize(
    ("expected", "words", "agrees"),
    [
        (True, ["seen", "same"], "yes"),
        (True, ["seen", "undecided"], "in part"),
        (True, ["points to it", "undecided"], "not shown"),
        (True, ["contradicted"], "no"),
        (True, ["seen", "contradicted"], "in part"),
        (False, ["contradicted"], "yes"),
        (False, ["undecided"], "not shown"),
        (False, ["undecided", "seen"], "no"),
        ("same", ["same"], "yes"),
        ("same", ["undecided"], "not shown"),
        ("seen", ["same"], "no"),
        ("undecided", ["undecided"], "not shown"),
        ("undecided", ["same"], "no"),
        (None, ["seen"], "–"),
    ],
)
def test_what_was_expected_is_compared_with_each_verdict(expected, words, agrees):
    assert criteria.overall({criteria.agreement(word, expected) for word in words}) == agrees


def test_if_parts_must_hold_together_the_weakest_decides():
    numbers = Numbers()
    numbers.difference("clear", t_interval(EIGHT))
    numbers.difference("open", t_interval([0.05, -0.05, 0.04, -0.06]))
    both = (Part("clear"), Part("open"))
    assert criteria.judge(Criterion("yes", both), numbers)["verdict"] == "seen; undecided"
    together = criteria.judge(Criterion("yes", both, joint=True), numbers)
    assert together == {"expected": "yes", "verdict": "undecided", "agrees": "not shown"}


def test_the_verdicts_of_a_recorded_study_are_those_of_its_registration():
    """Study D of experiments/STUDIES.md."""
    numbers = Numbers()
    routing(numbers, measured("D", article.DATA))
    verdicts = {
        name: criteria.judge(rule, numbers)
        for name, rule in article_registered.REGISTERED.items()
        if name.startswith("D.")
    }
    assert {name: verdict["verdict"] for name, verdict in verdicts.items()} == {
        "D.harm": "seen",
        "D.replay": "seen; undecided",
        "D.without": "seen",
        "D.frozen": "same; undecided",
    }
    assert verdicts["D.without"]["agrees"] == "no"


def test_the_table_has_every_registered_criterion_once_and_in_order():
    assert re.findall(r'row\("([^"]+)"', TABLE) == list(article_registered.REGISTERED)


def test_only_the_unfinished_study_has_a_verdict_by_hand():
    rows = [line for line in TABLE.splitlines() if line.startswith("  ([")]
    assert len(rows) == 1
    assert all(line.endswith('"open", "–"),') for line in rows)
    claims = TEXT[TEXT.index("table.header(rule, [*claim*]") : TEXT.index("<table-claims>")]
    cells = re.sub(r'#\w+\("[^"]+"\)', "", claims)
    assert not re.findall(r"\b(?:seen|contradicted|undecided|points to)\b", cells)
    assert "same" not in cells


def test_a_missing_criterion_stops_the_build_with_one_message():
    article.check_verdicts('#says("A")', {"A": {}})
    with pytest.raises(article.RunsError, match=r"names the criterion B, which .* does not judge"):
        article.check_verdicts('row("A", [x]), #says("B")', {"A": {}})
