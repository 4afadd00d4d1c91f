"""The article of `make paper`: its numbers are those of the studies, and none may be missing."""

import json
import math
import re
import sys

import pytest

from gspo.analysis import article
from gspo.analysis.article_doses import measured, routing
from gspo.analysis.article_entries import Numbers, p_text, plain
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import Interval, t_interval

TEXT = article.TEMPLATE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (-0.0125, "+.3f", "−.013"),
        (0.5, ".2f", ".50"),
        (1.09, ".2f", "1.09"),
        (1772, ",.0f", "1,772"),
    ],
)
def test_numbers_have_a_true_minus_and_no_zero_before_the_point(value, form, text):
    assert plain(value, form) == text


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (1.0, "1"),
        (0.3012, ".30"),
        (0.0625, ".062"),
        (0.0078, ".008"),
        (0.00195, ".002"),
        (0.0001, ".0001"),
    ],
)
def test_a_p_has_two_digits_or_three_decimals(p, text):
    assert p_text(p) == text


def test_the_numbers_of_a_recorded_study_are_those_of_its_registration(tmp_path):
    """Study D of experiments/STUDIES.md."""
    numbers = Numbers()
    routing(numbers, measured("D", article.DATA))
    article.write(tmp_path, "text", numbers, {})
    entries = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))
    assert entries["D.replay.14"]["text"] == "+.018 [+.002, +.033]"
    assert entries["D.replay.14"]["p"] == ".016"
    assert entries["D.loss.60"]["text"] == ".481 [.440, .522]"
    assert entries["D.changed.60"]["text"] == "9.7 %"
    assert (entries["D.collapsed"]["text"], entries["D.collapsed.of"]["text"]) == ("31", "32")
    assert entries["D.replay.14"]["seeds"] == 8
    assert entries["D.changed.60"]["low"] is None
    article.check_numbers('#num("D.replay.14") and #pval("D.loss.60")', numbers)


def test_a_missing_number_stops_the_build_with_one_message():
    numbers = Numbers()
    numbers.difference("known", t_interval([0.1, 0.2]))
    with pytest.raises(RunsError, match=r"names the number unknown, which .* does not compute"):
        article.check_numbers('#num("known"), #both("unknown")', numbers)
    with pytest.raises(RunsError, match="the article's number lost is missing"):
        numbers.add("lost", Interval(math.nan), ".3f")


def test_every_number_of_the_text_is_named_where_the_check_sees_it():
    calls = re.findall(r"#?\b(?:num|mean|pval|both)\(", TEXT)
    definitions = re.findall(r"#let (?:num|mean|pval|both)\(", TEXT)
    inner = len(re.findall(r"#(?:num|pval)\(name\)", TEXT))
    assert len(article.NAMED.findall(TEXT)) == len(calls) - len(definitions) - inner > 150


def test_the_text_takes_the_figures_that_are_drawn():
    code = (article.TEMPLATE.parents[1] / "article_figures.py").read_text(encoding="utf-8")
    for name in re.findall(r'#picture\("([^"]+)\.pdf"', TEXT):
        drawn_elsewhere = name in ("fig_contrast", "fig_critical_rate", "early_warning")
        assert drawn_elsewhere or name in code or name[:-1] == "study_", name


def test_without_typst_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "typst", None)
    with pytest.raises(RunsError, match="run `make paper`"):
        article.compiler()


def test_an_error_of_the_text_is_one_message(tmp_path):
    pytest.importorskip("typst")
    (tmp_path / "gspo.typ").write_text("#unknown", encoding="utf-8")
    with pytest.raises(RunsError, match=r"does not compile: .*unknown"):
        article.compile_pdf(tmp_path)
