"""analysis/foresight.py: rankings, thresholds and warnings against hand-worked numbers and the monitor itself."""

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))

import foresight
from foresight import History, Verdict

from gspo.collapse import SIGNALS
from gspo.monitor import Monitor, MonitorSettings


def history(scores, collapsed=None, stress="a", name="run") -> History:
    return History(name, stress, "GSPO", collapsed, {"mismatch": np.array([0.0] * foresight.WARM_UP + list(scores))})


def at(step: int) -> int:
    return foresight.WARM_UP + step


def test_a_collapsed_run_is_compared_over_the_steps_before_its_collapse():
    sick = history([1, 5, 9, 99], collapsed=at(3))  # 99 comes with the collapse: not counted
    others = [history([0, 0, 0, 50]), history([2, 2, 9, 0]), history([7, 0, 0, 0])]
    assert foresight.wins([sick, *others], "mismatch", 1).tolist() == [[1.0, 0.5, 1.0]]
    assert foresight.wins([sick, *others], "mismatch", 2).tolist() == [[1.0, 1.0, 0.0]], "two steps before: 1, 5"
    area, low, high, count = foresight.auroc([sick, *others], "mismatch", 1)
    assert area == pytest.approx(2.5 / 3) and low <= area <= high and count == 1


def test_what_cannot_be_ranked_is_left_out():
    early = history([9, 9], collapsed=foresight.WARM_UP)  # nothing between warm-up and collapse
    nothing = history([math.nan, math.nan, math.nan], collapsed=at(2))
    area = foresight.auroc([early, nothing, history([1, 1, 1])], "mismatch")
    assert math.isnan(area[0]) and area[3] == 0
    late = history([0, 3, 3, 3], collapsed=at(3))
    assert foresight.auroc([early, nothing, late, history([1, 1, 1, 1])], "mismatch")[0::3] == (1.0, 1)
    assert math.isnan(foresight.auroc([late], "mismatch")[0]), "no healthy run"


def test_scores_that_say_nothing_rank_as_chance():
    rng = np.random.default_rng(0)
    runs = [history(rng.random(40), at(30) if i < 60 else None) for i in range(120)]
    area, low, high, _ = foresight.auroc(runs, "mismatch")
    assert low < 0.5 < high and abs(area - 0.5) < 0.1 and 0.1 < high - low < 0.3


def test_a_threshold_lets_five_of_a_hundred_healthy_runs_warn():
    for count, allowed in ((20, 1), (39, 1), (40, 2), (19, 0), (1, 0)):
        runs = [history([float(i)]) for i in range(count)] + [history([1e9], collapsed=at(1))]
        threshold = foresight.fitted(runs, "mismatch")
        above = sum(foresight.judged(run, {"mismatch": threshold}).count for run in runs[:count])
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
        events = [e for i, value in enumerate(walk) for e in monitor.observe(i + 1, {signal.metric: value})]
        steps = [e.step - 1 for e in events if e.kind == "warning" and e.signal == name]
        assert foresight.warnings(scores, threshold) == steps, name
        raised += len(steps)
    assert raised > 20


def test_each_stress_is_judged_by_a_threshold_of_the_others():
    quiet = [history([0.1 * i], stress="quiet") for i in range(5)]  # thresholds: .4 from these, 7 from the loud ones
    loud = [history([3.0 + i], stress="loud") for i in range(5)]
    sick = [history([5.0, 0], at(1), stress="quiet"), history([5.0, 0], at(1), stress="loud")]
    verdicts = foresight.held_out([*quiet, *loud, *sick], "mismatch")
    healthy = [v.count for v in verdicts if v.collapsed is None]
    assert sorted(healthy) == [0] * 5 + [1] * 5, "all of the loud ones exceed what the quiet ones never do"
    assert sorted(v.seen for v in verdicts if v.collapsed is not None) == [False, True]


def test_what_a_rule_is_worth():
    sick = [Verdict(12, 2, 20), Verdict(17, 1, 20), Verdict(20, 1, 20), Verdict(None, 0, 30)]
    well = [Verdict(None, 0, None)] * 3 + [Verdict(15, 3, None)]
    alarm = foresight.worth(sick + well)
    assert alarm.seen[0] == 0.5, "a warning at the collapse or after it comes too late"
    assert alarm.lead[0] == 5.5 and alarm.false[0] == 0.75 and alarm.wrong[0] == 0.25
    assert foresight.share([False] * 10) == pytest.approx((0, 0, 0.27753), abs=1e-4)  # Wilson's, by hand
    assert foresight.share([True, False] * 5) == pytest.approx((0.5, 0.23659, 0.76341), abs=1e-4)
    assert all(math.isnan(x) for x in (*foresight.share([]), *foresight.worth(well).lead))


def test_histories_apply_the_registered_rule():
    rewards = [0.6] * 30 + [0.1] * 60
    frame = pd.DataFrame({"run": "r", "stress": "s", "arm": "GRPO", "step": range(1, 91), "reward/mean": rewards})
    (run,) = foresight.histories(frame.sample(frac=1, random_state=0))
    assert run.collapsed is not None and 30 < run.collapsed < 40
    assert run.scores["reward_fall"][-1] > 0.8 and np.isnan(run.scores["mismatch"]).all()
