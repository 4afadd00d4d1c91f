"""analysis/foresight.py: rankings, thresholds and warnings against hand-worked numbers and the
monitor itself.
"""

import math

import numpy as np
import pytest

from gspo.analysis import foresight
from gspo.analysis.foresight import History
from gspo.tracking.collapse import SIGNALS
from gspo.tracking.monitor import Monitor, MonitorSettings


def history(scores, collapsed=None, lr=1e-4) -> History:
    scores = np.array([0.0] * foresight.WARM_UP + list(scores))
    return History("run", "a", lr, collapsed, {"mismatch": scores})


def at(step: int) -> int:
    return foresight.WARM_UP + step


def test_a_collapsed_run_is_compared_over_the_steps_before_its_collapse():
    sick = history([1, 5, 9, 99], collapsed=at(3))  # 99 comes with the collapse: not counted
    others = [history([0, 0, 0, 50]), history([2, 2, 9, 0]), history([7, 0, 0, 0])]
    assert foresight.wins([sick, *others], "mismatch", 1).tolist() == [[1.0, 0.5, 1.0]]
    assert foresight.wins([sick, *others], "mismatch", 2).tolist() == [[1.0, 1.0, 0.0]], (
        "two steps before: 1, 5"
    )
    area = foresight.auroc([sick, *others], "mismatch", 1)
    assert area.value == pytest.approx(2.5 / 3) and area.count == 1 and math.isnan(area.low), (
        "one run: no interval"
    )


def test_at_one_learning_rate_only_its_runs_are_compared():
    sick = [history([5.0, 0], at(1), lr=2e-4), history([5.0, 0], at(1), lr=8e-4)]
    well = [history([1.0, 1], lr=1e-4), history([9.0, 9], lr=2e-4)]
    assert foresight.auroc(sick + well, "mismatch").value == 0.5
    area = foresight.auroc(sick + well, "mismatch", same_lr=True)
    assert (area.value, area.count) == (0.0, 1), "one pair; the rate 8e-4 has no healthy run"


def test_what_cannot_be_ranked_is_left_out():
    early = history([9, 9], collapsed=foresight.WARM_UP)  # nothing between warm-up and collapse
    nothing = history([math.nan, math.nan, math.nan], collapsed=at(2))
    area = foresight.auroc([early, nothing, history([1, 1, 1])], "mismatch")
    assert math.isnan(area.value) and area.count == 0
    late = history([0, 3, 3, 3], collapsed=at(3))
    area = foresight.auroc([early, nothing, late, history([1, 1, 1, 1])], "mismatch")
    assert (area.value, area.count) == (1.0, 1)
    assert math.isnan(foresight.auroc([late], "mismatch").value), "no healthy run"


def test_scores_that_say_nothing_rank_as_chance():
    rng = np.random.default_rng(0)
    runs = [history(rng.random(40), at(30) if i < 60 else None) for i in range(120)]
    area = foresight.auroc(runs, "mismatch")
    assert (
        area.low < 0.5 < area.high
        and abs(area.value - 0.5) < 0.1
        and 0.1 < area.high - area.low < 0.3
    )


def test_a_threshold_lets_five_of_a_hundred_healthy_runs_warn():
    for count, allowed in ((20, 1), (39, 1), (40, 2), (19, 0), (1, 0)):
        runs = [history([float(i)]) for i in range(count)] + [history([1e9], collapsed=at(1))]
        threshold = foresight.fitted(runs, "mismatch")
        above = sum(
            len(foresight.warnings(run.scores["mismatch"], threshold)) for run in runs[:count]
        )
        assert above == allowed and threshold == count - 1 - allowed
    assert math.isnan(foresight.fitted([history([1.0], collapsed=at(1))], "mismatch"))


def test_warnings_are_those_that_the_monitor_raises():
    rng = np.random.default_rng(1)
    raised = 0
    for name, signal in SIGNALS.items():
        settings = MonitorSettings()
        walk = 0.5 + 0.5 * np.sin(np.arange(80) / 6) + 0.2 * rng.random(80)
        scores = signal.score(walk.tolist())
        threshold = float(np.nanquantile(scores, 0.7))
        if threshold <= 0:  # the monitor takes these as switched off
            continue
        setattr(settings.thresholds, name, threshold)
        monitor = Monitor(settings)
        events = [
            e
            for i, value in enumerate(walk)
            for e in monitor.observe(i + 1, {signal.metric: value})
        ]
        steps = [e.step - 1 for e in events if e.kind == "warning" and e.signal == name]
        assert foresight.warnings(scores, threshold) == steps, name
        raised += len(steps)
    assert raised > 20
