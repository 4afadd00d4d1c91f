"""Sequential designs: published boundaries, the error rate of all looks together, decisions."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from gspo.analysis import rate_ratios
from gspo.analysis.runs import RunsError
from gspo.analysis.sequential import Design, level_of
from gspo.analysis.stats import LEVEL, Interval, t_interval
from gspo.analysis.verdicts import judge


def test_the_boundaries_are_the_published_ones():
    """Lan and DeMets 1983 with O'Brien and Fleming's shape, two-sided .05: ldbounds, gsDesign."""
    assert Design((1,)).boundaries[0] == pytest.approx(norm.ppf(0.975))
    assert Design((10, 20)).boundaries == pytest.approx((2.9626, 1.9686), abs=1e-4)
    assert Design((10, 20, 30)).boundaries == pytest.approx((3.7103, 2.5114, 1.9930), abs=1e-4)
    assert Design((10, 20, 30, 40)).boundaries == pytest.approx(
        (4.3326, 2.9631, 2.3590, 2.0141), abs=1e-4
    )


@pytest.mark.parametrize("looks", [(20, 30, 40), (7, 9, 40)])
def test_the_looks_together_err_at_the_rate(looks):
    design = Design(looks)
    shares = np.array(looks) / design.maximum
    earlier = np.minimum.outer(shares, shares)
    later = np.maximum.outer(shares, shares)
    walk = multivariate_normal(cov=np.sqrt(earlier / later))
    bounds = np.array(design.boundaries)
    assert 1 - walk.cdf(bounds, lower_limit=-bounds) == pytest.approx(0.05, abs=2e-4)
    assert design.spent()[-1] == pytest.approx(0.05)
    assert design.level(looks[0]) == pytest.approx(design.spent()[0]), "nothing was spent before"


def test_a_look_that_may_spend_nothing_decides_nothing():
    assert Design((2, 40)).level(2) < 1e-14
    assert Design((2, 40)).level(40) == pytest.approx(0.05)


def test_a_look_has_a_level_and_other_numbers_of_seeds_have_none():
    design = Design((20, 30, 40))
    levels = [design.level(seeds) for seeds in design.looks]
    assert levels == pytest.approx([0.00305, 0.01832, 0.04400], abs=1e-5)
    with pytest.raises(ValueError, match="25 seeds: the design looks at 20, 30, 40 seeds alone"):
        design.level(25)
    assert [design.next_look(n) for n in (1, 20, 21, 41)] == [20, 20, 30, 0]


@pytest.mark.parametrize("looks", [(), (0, 10), (10, 10), (20, 10)])
def test_looks_that_do_not_rise_are_refused(looks):
    with pytest.raises(ValueError, match="looks="):
        Design(looks)
    with pytest.raises(ValueError, match="alpha=1"):
        Design((10, 20), alpha=1.0)


def test_verdicts_use_the_level_of_the_look():
    values = 0.3 + np.array([-0.5, 0.5] * 9 + [-0.1, 0.1])
    plain = t_interval(values)
    look = t_interval(values, Design((20, 40)).level(20))
    assert plain.low > 0 > look.low and plain.mean == look.mean
    assert judge(plain, 0, "0").startswith("seen (interval over 20 seeds, above 0")
    assert judge(look, 0, "0").startswith("undecided (interval over 20 seeds at the look's level")
    # an interval above 0 alone is not enough: the exact p must be below the level too
    narrow = t_interval(np.full(6, 0.3) + np.linspace(-0.01, 0.01, 6), 0.01)
    assert judge(narrow, 0, "0").startswith("points to it")
    assert "a verdict needs p < 0.01" in judge(narrow, 0, "0")


@pytest.mark.parametrize(
    ("low", "high", "p", "seeds", "words"),
    [
        (1.01, 1.2, 0.001, 20, "A has the higher critical rate"),
        (0.8, 0.99, 0.001, 20, "B has the higher critical rate"),
        (1.01, 1.2, 0.02, 20, "go on to 30 seeds"),  # p is above the level
        (0.95, 1.09, 0.5, 20, "the same within 10 %"),
        (0.90, 1.09, 0.5, 20, "go on to 30 seeds"),  # 1 / 1.1 is .909
        (0.8, 1.3, 0.5, 40, "undecided at the last look"),
    ],
)
def test_decisions_about_a_ratio(low, high, p, seeds, words):
    design = Design((20, 30, 40))
    interval = Interval(1.0, low, high, seeds, logarithmic=True, level=design.level(seeds))
    rate_ratio = rate_ratios.RateRatio(interval, p, 1.0, 1.0)
    assert rate_ratios.decision(rate_ratio, ("A", "B"), design, 0.1) == words


def test_a_look_with_too_few_seeds_for_its_level_says_so():
    """The p of ten seeds is 2 / 1024 at least, and the first of these looks has the level 1.5e-5."""
    design = Design((10, 20, 30, 40))
    interval = Interval(1.2, 1.1, 1.3, 10, logarithmic=True, level=design.level(10))
    rate_ratio = rate_ratios.RateRatio(interval, 2 / 1024, 1.0, 1.0)
    words = "too few seeds for a p below 1.5e-05: go on to 20"
    assert rate_ratios.decision(rate_ratio, ("A", "B"), design, 0.1) == words


def test_a_number_of_seeds_without_a_look_is_refused_with_the_next():
    with pytest.raises(RunsError, match=r"12 seeds: the design looks at 20, 40.*: run 8 more"):
        level_of(Design((20, 40)), 12)
    assert LEVEL == 0.05
