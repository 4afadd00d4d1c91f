"""analysis/warning_*.py: rules, verdicts, intervals and the logs of frameworks, by hand."""

import math
from dataclasses import fields

import numpy as np
import pandas as pd
import pytest

from gspo.analysis import (
    foresight,
    warning_logs,
    warning_probe,
    warning_rules,
    warning_table,
    warning_worth,
)
from gspo.analysis.early_warning import RECORDED
from gspo.analysis.foresight import History
from gspo.analysis.warning_rules import COUNTER_THRESHOLDS, RULES, Judged
from gspo.tracking.frameworks.known import TABLES
from gspo.tracking.monitor import Monitor, MonitorSettings, Thresholds

WARM_UP = foresight.WARM_UP


def run(scores=(), collapsed=None, group="a", setting="one", seed="1") -> History:
    """A run whose rule `mismatch` has these scores after the warm-up."""
    series = np.array([0.0] * WARM_UP + list(scores))
    return History("run", group, math.nan, collapsed, {"mismatch": series}, setting, seed)


def judged(first, count, collapsed=None, steps=10, setting="one", seed="1") -> Judged:
    return Judged(run([0.0] * steps, collapsed, setting=setting, seed=seed), first, count)


# ------------------------------------------------------------------------------------------------
# rules
def test_counters_count_steps_in_a_row():
    scores = RULES["no_signal"].score([0.5, 1.0, 1.0, None, 1.0, 0.9, 1.0])
    assert scores.tolist() == [0, 1, 2, 2, 3, 0, 1], "a step without a number changes nothing"
    assert RULES["reward_zero"].score([0.0, 0.0, 0.1, 0.0]).tolist() == [1, 2, 0, 1]


def test_fallen_counts_the_steps_of_the_registered_rule():
    """After n steps at 0 the smoothed reward is about 0.9^n: below 0.7 from the fourth step on."""
    scores = RULES["fallen"].score([1.0] * 200 + [0.0] * 6 + [1.0] * 5)
    assert scores[199:].tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0]


@pytest.mark.parametrize(("rule", "event"), [("fallen", "fallen"), ("reward_zero", "warning")])
def test_counters_warn_when_the_monitor_does(rule, event):
    rewards = [0.6] * 30 + [0.0] * 40 + [0.6] * 30 + [0.0] * 12 + [0.5] * 5
    monitor = Monitor(MonitorSettings())
    steps = []
    for step, reward in enumerate(rewards, start=1):
        for raised in monitor.observe(step, {"reward/mean": reward}):
            is_reward_fall = raised.kind == "warning" and raised.signal == "reward_fall"
            if raised.kind == event and not is_reward_fall:
                steps.append(step - 1)
    scores = RULES[rule].score(rewards)
    assert foresight.warnings(scores, COUNTER_THRESHOLDS[rule]) == steps
    assert len(steps) == (1 if rule == "fallen" else 2)


# ------------------------------------------------------------------------------------------------
# verdicts
def test_a_rule_is_judged_where_its_metric_was_recorded():
    without = History("run", "a", math.nan, None, {"clip_share": np.zeros(20)}, "one", "1")
    verdicts = warning_rules.as_shipped([run([0, 9]), without], {"mismatch": 1.0}, "mismatch")
    assert [(verdict.first, verdict.warnings) for verdict in verdicts] == [(WARM_UP + 1, 1)]


def test_each_group_is_judged_by_the_threshold_of_the_others():
    quiet = [run([0.1 * i], group="quiet") for i in range(5)]
    loud = [run([3.0 + i], group="loud") for i in range(5)]
    warned = [verdict.warnings for verdict in warning_rules.held_out([*quiet, *loud], "mismatch")]
    assert warned == [0] * 5 + [1] * 5, "quiet runs do not exceed 7; loud runs exceed .4"
    assert warning_rules.held_out(quiet, "mismatch") == [], "no other group"
    thresholds = warning_rules.held_out_thresholds([*quiet, *loud], "mismatch")
    assert thresholds == {"quiet": 7.0, "loud": 0.4}


def test_together_takes_the_monitors_rules_alone():
    scores = {"no_signal": np.full(20, 9.0), "mismatch": np.zeros(20)}
    both = History("run", "a", math.nan, None, scores)
    (verdict,) = warning_rules.together([both], {"no_signal": 2.0, "mismatch": 1.0})
    assert verdict.warnings == 0


def test_a_history_has_the_rules_of_its_metrics():
    frame = pd.DataFrame({"step": range(91), "reward/mean": [0.1] + [0.6] * 30 + [0.1] * 60})
    frame["group/zero_variance"] = np.nan
    made = warning_rules.history(frame.sample(frac=1, random_state=0), "r", "a", "one", "1")
    assert set(made.scores) == {"reward_fall", "fallen", "reward_zero"}
    assert made.collapsed is not None and 30 < made.collapsed < 40, "row 0 is no step"


def test_stressed_runs_have_the_learning_rate_as_a_score():
    columns = {"run": "r", "stress": "s", "arm": "GRPO", "seed": 1, "lr": 1e-4}
    frame = pd.DataFrame({"step": range(1, 91), "reward/mean": [0.6] * 30 + [0.1] * 60})
    (made,) = warning_rules.stressor_runs(frame.assign(**columns).sample(frac=1, random_state=0))
    assert (made.run, made.group, made.setting, made.lr) == ("r", "s", "s, GRPO, 0.0001", 1e-4)
    assert 30 < made.collapsed < 40 and made.scores["reward_fall"][-1] > 0.8
    assert made.scores[warning_rules.LR].tolist() == [1e-4] * 90


# ------------------------------------------------------------------------------------------------
# worth
def test_the_worth_of_a_rule_by_hand():
    at = WARM_UP + 20
    sick = [judged(at - 8, 2, at), judged(at - 3, 1, at), judged(at, 1, at), judged(None, 0, at)]
    well = [judged(None, 0, steps=30), judged(15, 3, steps=30), judged(11, 1, steps=140)]
    result = warning_worth.worth(sick + well)
    assert (result.collapsed, result.healthy) == (4, 3)
    assert (result.seen.value, result.warned.value) == (0.5, 0.75)
    assert (result.lead.value, result.lead.count) == (5.5, 2)
    assert result.per_run.value == pytest.approx(4 / 3)
    assert result.per_100_steps.value == pytest.approx(2.0), "4 warnings in 200 steps"
    assert result.at_random == pytest.approx(1 - 0.98**20)


def test_runs_of_one_setting_count_as_one():
    """Ten settings whose ten runs all agree: the interval is that of ten runs, not of a hundred."""
    hits = np.repeat([1.0, 0.0], 50)
    runs = [run(setting=f"s{i // 10}", seed=f"{i}") for i in range(100)]
    alone = [run(setting=f"s{i}", seed=f"{i}") for i in range(100)]
    clustered = warning_worth.share(hits, runs)
    single = warning_worth.share(hits, alone)
    assert clustered.value == single.value == 0.5
    # the standard errors are .5 / sqrt(10) = .158 and .05
    assert (clustered.low, clustered.high) == pytest.approx((0.2, 0.8), abs=0.011)
    assert (single.low, single.high) == pytest.approx((0.4, 0.6), abs=0.011)
    seeds = [run(setting=f"s{i % 10}", seed=f"{i // 10}") for i in range(100)]
    other = warning_worth.share(hits, seeds)
    assert (other.low, other.high) == (clustered.low, clustered.high), "the wider one: over seeds"


def test_fewer_than_five_clusters_give_no_bootstrap():
    runs = [run(setting=f"s{i}", seed=str(i % 2)) for i in range(8)]
    assert warning_worth.clusters(runs) == [[f"s{i}" for i in range(8)]], "two seeds"
    few = warning_worth.share(np.array([1.0, 0.0]), [run(), run()])
    assert few.value == 0.5 and math.isnan(few.low)


def test_no_event_has_an_upper_limit():
    runs = [run(setting=f"s{i % 10}", seed=str(i)) for i in range(20)]
    share = warning_worth.share(np.zeros(20), runs)
    assert (share.low, share.high) == pytest.approx((0, 0.27753), abs=1e-4), "Wilson's, 0 of 10"
    per_run = warning_worth.events_per(np.zeros(20), np.ones(20), runs)
    assert (per_run.low, per_run.high) == (0, pytest.approx(0.3689)), "exp(-10 x .3689) = .025"
    per_100 = warning_worth.events_per(np.zeros(20), np.full(20, 0.5), runs)
    assert per_100.high == pytest.approx(2 * 0.3689)
    assert warning_worth.events_per(np.zeros(0), np.zeros(0), []) == foresight.NO_VALUE


def test_the_median_lead_and_its_interval():
    runs = [run(setting=f"s{i}", seed=str(i)) for i in range(9)]
    lead = warning_worth.median(np.arange(1.0, 10.0), runs)
    assert lead.low < lead.value == 5 < lead.high
    same = warning_worth.median(np.full(9, 4.0), runs)
    assert same.value == 4 and math.isnan(same.low)


def test_within_settings_only_runs_of_one_setting_are_compared():
    at = WARM_UP + 3
    runs = [
        run([1, 5, 9, 99], collapsed=at, setting="x"),
        run([0, 5, 0, 0], setting="x"),
        run([0, 0, 50, 0], setting="x"),  # a lead of two steps leaves out the 50 and the 9
        run([99, 99, 99, 99], setting="y"),
        run([7, 0, 0, 0], collapsed=at, setting="z"),
    ]
    value = warning_worth.within_settings(runs, "mismatch", lead=2)
    assert (value.value, value.count) == (0.75, 1), "one draw and one win; z has no healthy run"


# ------------------------------------------------------------------------------------------------
# tables
def test_every_rule_has_a_row_of_the_frameworks():
    marks = {
        metric: dict(zip(TABLES, warning_logs.marks(metric), strict=True))
        for metric in {signal.metric for signal in RULES.values()}
    }
    assert set(marks["reward/mean"].values()) == {warning_logs.SAME, warning_logs.NEARLY}
    assert set(marks["routing/consistency"].values()) == {warning_logs.MISSING}
    assert set(marks["optim/grad_norm_max"].values()) == {warning_logs.NEARLY}, "any norm will do"
    assert marks["mismatch/k3"] == {
        "trl": "-",
        "ms_swift": "same",
        "verl": "same",
        "prime_rl": "other",
        "roll": "-",
        "slime": "-",
        "openrlhf": "other",
        "nemo_rl": "other",
        "skyrl": "-",
    }
    assert set(RULES) - set(COUNTER_THRESHOLDS) == {field.name for field in fields(Thresholds)}


def test_a_lookalike_is_a_metric_of_the_framework_with_another_definition():
    rule_metrics = {signal.metric for signal in RULES.values()}
    for metric, names in warning_logs.LOOKALIKES.items():
        assert metric in rule_metrics
        for framework, name in names.items():
            table = TABLES[framework]
            entries = [entry for entry in table.entries if entry.theirs == name]
            assert entries, f"{name} is not in the table of {table.title}"
            assert all(entry.ours != metric for entry in entries), (metric, name)
            assert warning_logs.mark(table, metric) == warning_logs.OTHER, (framework, metric)


@pytest.mark.slow
def test_the_tables_and_the_figure_of_few_runs(tmp_path):
    rng = np.random.default_rng(0)
    runs = []
    for group in ("stressors", "other"):
        for number in range(6):
            scores = rng.random(40)
            collapsed = WARM_UP + 30 if number < 2 else None
            labels = (f"{group}, s{number // 3}", f"{group} {number}")
            runs.append(run(scores, collapsed, group, *labels))
    rows = warning_table.all_rows(runs, {"mismatch": 0.5})
    assert [row.rule for row in rows] == ["mismatch", warning_table.ANY]
    lines = warning_table.tables(rows)
    (shipped,) = (line for line in lines if line.startswith("| mismatch ") and "4, 8" in line)
    assert "1.00" in shipped
    paths = warning_table.draw(rows, runs, tmp_path, warning_table.style.DEFAULTS)
    assert [path.name for path in paths] == ["early_warning_rules.pdf", "early_warning_rules.png"]


@pytest.mark.slow
@pytest.mark.daily
def test_the_recorded_runs_give_the_numbers_of_the_log():
    runs = warning_rules.recorded_runs(pd.read_parquet(RECORDED))
    assert len(runs) == 1772 and sum(run.collapsed is not None for run in runs) == 474
    assert len({run.run for run in runs}) == len(runs), "each run once"
    fall = warning_worth.worth(warning_rules.as_shipped(runs, {"reward_fall": 0.3}, "reward_fall"))
    assert fall.seen.value == pytest.approx(175 / 474) and fall.lead.value == 13
    thresholds = COUNTER_THRESHOLDS
    fallen = warning_worth.worth(warning_rules.as_shipped(runs, thresholds, "fallen"))
    assert (fallen.per_run.value, fallen.seen.value, fallen.warned.value) == (0, 0, 1)


def test_the_probes_table_has_a_row_per_run():
    lines = warning_probe.table(warning_rules.DATA)
    assert len(lines) == 2 + 8
    (row,) = (line for line in lines if line.startswith("| tool_moe, 0.0016, seed 1 "))
    assert "| 1.05 / 0.96 / 0.75 " in row, "steps 1 to 10, 3 to 12, 41 to 50"
