"""The monitor on hand-made rows: when it warns, when it stops warning, when it says collapse; its
report in words.
"""

import math
import time

import pytest

from gspo.tracking.collapse import SIGNALS
from gspo.tracking.monitor import Monitor, MonitorSettings, Thresholds, stability_report
from refusals import refuses

HEALTHY = {
    "reward/mean": 0.5, "routing/consistency": 0.99, "mismatch/k3": 1e-5, "ratio/ess_token": 0.99, "kl/old_k3": 1e-4,
    "ratio/ess_sequence": 0.99, "ratio/token_max": 1.5, "ratio/token_min": 0.7, "policy/entropy": 0.4,
    "optim/grad_norm": 0.3, "optim/grad_norm_max": 0.4, "optim/skipped": 0.0, "length/repetition": 0.1,
    "length/truncated": 0.02, "group/zero_variance": 0.2, "clip/token_active": 0.15,
}  # fmt: skip


def watched(rows: list[dict], **settings) -> tuple[Monitor, list]:
    monitor = Monitor(MonitorSettings(**settings))
    return monitor, [
        event for step, row in enumerate(rows, 1) for event in monitor.observe(step, row)
    ]


def rows(count: int, **changes) -> list[dict]:
    return [HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()}] * count


def test_a_healthy_run_raises_nothing():
    monitor, events = watched(rows(200))
    assert events == [] and monitor.metrics() == {"monitor/warnings": 0, "monitor/fallen": 0}


def test_every_signal_has_a_threshold_and_every_threshold_a_signal():
    assert set(Thresholds.__dataclass_fields__) == set(SIGNALS)


ILL = {
    "reward_fall": ("reward/mean", 0.0), "routing_drift": ("routing/consistency", 0.1),
    "mismatch": ("mismatch/k3", 1.0),
    "ess_token": ("ratio/ess_token", 0.01), "ess_sequence": ("ratio/ess_sequence", 0.01),
    "ratio_high": ("ratio/token_max", 1e6), "ratio_low": ("ratio/token_min", 1e-9), "policy_drift": ("kl/old_k3", 1.0),
    "entropy_fall": ("policy/entropy", 1e-3), "entropy_rise": ("policy/entropy", 4.0),
    "grad_spike": ("optim/grad_norm_max", 40.0), "grad_growth": ("optim/grad_norm", 60.0),
    "repetition": ("length/repetition", 0.9), "truncation": ("length/truncated", 0.9),
    "zero_variance": ("group/zero_variance", 1.0), "clip_share": ("clip/token_active", 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_warns_once_and_is_cleared(name):
    metric, bad = ILL[name]
    events = watched(rows(40) + [HEALTHY | {metric: bad}] * 60 + rows(120))[1]
    mine = [event for event in events if event.signal == name and event.kind != "fallen"]
    assert [event.kind for event in mine] == ["warning", "cleared"]
    assert 41 <= mine[0].step <= 75 and mine[0].score > mine[0].threshold == getattr(
        Thresholds(), name
    )
    assert metric in mine[0].text and SIGNALS[name].meaning in mine[0].text
    off = watched(rows(40) + [HEALTHY | {metric: bad}] * 60, thresholds=Thresholds(**{name: 0}))[1]
    assert name not in {event.signal for event in off if event.kind == "warning"}, (
        "0 switches it off"
    )


def test_nothing_is_said_while_baselines_are_measured_nor_about_metrics_that_are_not_there():
    bad = HEALTHY | {metric: value for metric, value in ILL.values()}
    assert {event.signal for event in watched([bad] * 10)[1]} == {"reward_zero"}, (
        "it needs no baseline"
    )
    assert watched([bad | {"reward/mean": 0.01}] * 10)[1] == []
    dense = [{k: v for k, v in row.items() if not k.startswith("routing")} for row in rows(30)]
    assert watched(dense)[1] == []


def test_a_metric_that_appears_late_is_scored_from_then_on():
    late = [{k: v for k, v in HEALTHY.items() if k != "mismatch/k3"}] * 20 + rows(
        5, mismatch__k3=1.0
    )
    (event,) = watched(late)[1]
    assert (event.signal, event.step) == ("mismatch", 21)


def test_a_fall_is_said_after_twenty_steps_once():
    monitor, events = watched(rows(100) + rows(80, reward__mean=0.0))
    (fallen,) = (event for event in events if event.kind == "fallen")
    assert fallen.step == 100 + 4 + 19, "below from the fourth step on, for twenty"
    assert monitor.metrics()["monitor/fallen"] and "0.7 x its peak for 20 steps" in fallen.text
    assert monitor.last_healthy_step == 99, "the rollouts of step 100 came from these weights"
    events = watched((rows(100) + rows(80, reward__mean=0.0)) * 2)[1]
    assert [event.kind for event in events].count("fallen") == 2, "a second one is said again"


def test_a_run_that_fell_before_its_tenth_row_is_not_healthy_afterwards():
    """The collapse rule's peak begins anew with the tenth number; what counts as healthy does not:
    the weights from step 5 on are those of a run that has lost nearly everything."""
    monitor, _ = watched(rows(5) + rows(40, reward__mean=0.05))
    assert monitor.last_healthy_step == 4, "the rollouts of step 5 came from these weights"
    monitor, _ = watched(rows(5) + rows(40, reward__mean=0.05) + rows(60))
    assert monitor.last_healthy_step == 104, "back at its best level, it is healthy again"


@pytest.mark.parametrize("hole", [None, float("nan"), float("inf")])
def test_a_step_without_a_number_neither_crashes_nor_counts(hole):
    """The gradient explodes during the warm-up, and then there is none: every update was left out."""
    growing = [HEALTHY | {"optim/grad_norm": 2.0**t} for t in range(10)]
    without = HEALTHY | {"optim/grad_norm": hole, "optim/skipped": 4.0}
    series = [*growing, without, without, without, HEALTHY | {"optim/grad_norm": 6000.0}]
    monitor, events = watched(series)
    assert [event.step for event in events if event.signal == "grad_growth"] == [14]
    written = [
        {k: v if v is not None and math.isfinite(v) else None for k, v in row.items()}
        for row in series
    ]
    again, same = watched(written)  # as metrics.jsonl holds them
    assert same == events and again.active == monitor.active


@pytest.mark.slow
def test_it_costs_little_in_a_long_run():
    monitor, started = Monitor(MonitorSettings()), time.process_time()
    for step in range(1, 5001):
        monitor.observe(step, HEALTHY)
    assert time.process_time() - started < 10, "2 ms a step; a resume observes all steps at once"


def test_what_it_knows_is_a_function_of_the_rows():
    series = rows(30) + rows(30, policy__entropy=0.01) + rows(30)
    whole, events = watched(series)
    half = Monitor(MonitorSettings())
    for step, row in enumerate(series[:45], 1):
        half.observe(step, row)
    later = [event for step, row in enumerate(series[45:], 46) for event in half.observe(step, row)]
    assert later == [event for event in events if event.step > 45] and half.active == whole.active


def test_skipped_updates_are_an_event():
    (event,) = watched([*rows(3), HEALTHY | {"optim/skipped": 2.0}])[1]
    assert (event.kind, event.step, event.score) == ("skipped", 4, 2)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"action": "panic"}, ("monitor.action", "panic")),
        ({"warm_up": -1}, ("monitor.warm_up", -1)),
    ],
)
def test_bad_settings_are_refused(settings, refusal):
    with refuses(*refusal):
        MonitorSettings(**settings)
    with refuses("monitor.thresholds.mismatch", -1):
        Thresholds(mismatch=-1)


def numbered(series: list[dict]) -> list[dict]:
    return [{"step": 0}] + [row | {"step": step} for step, row in enumerate(series, 1)]


def test_the_report_answers_the_three_questions():
    rising = [HEALTHY | {"reward/mean": 0.2 + 0.005 * t + 0.01 * (t % 2)} for t in range(60)]
    text = stability_report(numbered(rising)).splitlines()
    assert (
        text[0].startswith("Does the reward keep rising? Yes (")
        and "0.456 at the end, peak 0.456 at step 60" in text[0]
    )
    assert text[1].startswith(
        "Is the gradient norm in a reasonable range? Yes (median 0.3, largest of an update 0.4;"
    )
    assert (
        text[2].startswith("Does expert activation stay consistent? Yes (")
        and "mean 0.9900" in text[2]
    )


def test_the_report_of_a_run_that_went_wrong():
    series = rows(100) + rows(60, reward__mean=0.0, routing__consistency=0.3, optim__skipped=1.0)
    series[120] = series[120] | {"optim/grad_norm_max": 99.0, "routing/consistency_layer_1": 0.2}
    text = stability_report(numbered(series)).splitlines()
    assert "No: it collapsed at step 104 (" in text[0] and "peak 0.500 at step 1" in text[0]
    assert (
        "No (" in text[1] and "largest of an update 99" in text[1] and "usual norm: 1;" in text[1]
    )
    assert "finite: 60" in text[1]
    assert "No (" in text[2] and "lowest 0.3000 at step 101" in text[2]
    stopped = stability_report(numbered(series[:124]), "collapsed")
    assert "the monitor ended the run 20 steps into a fall, and it might have recovered" in stopped


def test_a_spike_in_the_first_steps_is_one():
    series = rows(40)
    series[3] = series[3] | {"optim/grad_norm_max": 99.0}
    text = stability_report(numbered(series)).splitlines()[1]
    assert "No (" in text and "usual norm: 1;" in text


@pytest.mark.filterwarnings("error")
def test_the_report_of_runs_with_holes():
    holes = rows(30) + rows(
        20, reward__mean=None, optim__grad_norm=float("nan"), routing__consistency=None
    )
    text = stability_report(numbered(holes))
    assert "nan" not in text and "It is level" in text
    assert "Unknown: 3 rows have a reward" in stability_report(numbered(rows(3)))
    old = [{k: v for k, v in row.items() if k != "optim/grad_norm_max"} for row in rows(20)]
    assert "reasonable range? Unknown" in stability_report(numbered(old))


def test_the_report_of_level_falling_dense_and_empty_runs():
    level = stability_report(
        numbered([HEALTHY | {"reward/mean": 0.5 + 0.02 * (-1) ** t} for t in range(60)])
    )
    assert "It is level" in level
    falling = stability_report(
        numbered([HEALTHY | {"reward/mean": 0.6 - 0.002 * t} for t in range(60)])
    )
    assert "No: it is falling" in falling
    dense = stability_report(
        numbered([{k: v for k, v in row.items() if not k.startswith("routing")} for row in rows(5)])
    )
    assert "the model is dense, its router is none of those that are read" in dense
    assert stability_report([{"step": 0}]) == "no step was made"


def test_a_reward_of_0_is_said_after_three_steps_once_and_cleared():
    monitor = Monitor(MonitorSettings())
    rewards = [0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0]
    events = [
        event
        for step, reward in enumerate(rewards, 1)
        for event in monitor.observe(step, {"reward/mean": reward})
    ]
    assert [(event.step, event.kind, event.signal) for event in events] == [
        (3, "warning", "reward_zero"),
        (5, "cleared", "reward_zero"),
        (8, "warning", "reward_zero"),
    ]
    assert "the reward has been 0 for 3 steps" in events[0].text


def test_nsr_learns_from_rewards_that_are_all_0():
    """Its advantages are not 0, so `group/steps_without_signal` is 0."""
    row = {"reward/mean": 0.0, "group/zero_variance": 1.0, "group/steps_without_signal": 0.0}
    row |= {"optim/grad_norm": 0.1, "optim/grad_norm_max": 0.1}
    rows = [{"step": step} | row for step in range(1, 41)]
    monitor = Monitor(MonitorSettings(thresholds=Thresholds(zero_variance=1.0)))
    assert not [event for row in rows for event in monitor.observe(row["step"], row)]
    assert "no signal" not in stability_report(rows)
    for row in rows:
        row["group/steps_without_signal"] = row["step"]
    assert "range? No: no signal from rewards (median" in stability_report(rows)


def test_no_warning_speaks_of_growth_from_0():
    """In steps without signal the gradient is 0; what follows is no growth of it."""
    rows = [{"step": step, "optim/grad_norm": 0.0 if step < 15 else 0.3} for step in range(1, 60)]
    monitor = Monitor(MonitorSettings())
    assert not [event for row in rows for event in monitor.observe(row["step"], row)]
    rising = [
        {"step": step, "optim/grad_norm": 0.0 if step < 15 else 0.3 * 2 ** max(0, step - 30)}
        for step in range(1, 60)
    ]
    monitor = Monitor(MonitorSettings())
    events = [event for row in rising for event in monitor.observe(row["step"], row)]
    assert events[0].signal == "grad_growth" and events[0].step > 30


def test_rewards_whose_mean_is_0_are_not_all_0():
    rows = [{"reward/mean": 0.0, "group/zero_variance": 0.1}] * 9
    monitor = Monitor(MonitorSettings())
    assert not [event for step, row in enumerate(rows, 1) for event in monitor.observe(step, row)]


def test_a_reward_that_has_lost_most_of_its_peak_is_not_level():
    rewards = [0.094, 0.094, 0.141, 0.086, 0.078, 0.07, 0.008, 0, 0, 0.008, 0.008, 0]
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    assert "keep rising? Too few steps to tell (smoothed" in stability_report(rows), (
        "the collapse rule needs 30"
    )
    longer = [
        *rows,
        *({"step": step, "reward/mean": 0.4 if step < 40 else 0.2} for step in range(13, 60)),
    ]
    assert "keep rising? No: it has lost 42% of its peak" in stability_report(longer)
