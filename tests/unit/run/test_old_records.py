"""A run with tracking.record_last keeps the records of its end and of the steps before each fall."""

import pytest

from gspo.data.step_record_files import record_file, recorded_steps
from gspo.io.errors import SettingError
from gspo.run.old_records import delete_old_records
from gspo.tracking.monitor import Monitor, MonitorSettings
from gspo.tracking.settings import TrackingSettings


def kept(rewards: list[float], tmp_path, **tracking) -> list[int]:
    """The recorded steps that are left after a run with these rewards."""
    monitor = Monitor(MonitorSettings())
    (tmp_path / "steps").mkdir()
    for step, reward in enumerate(rewards, start=1):
        record_file(tmp_path, step).touch()
        monitor.observe(step, {"reward/mean": reward})
        delete_old_records(tmp_path, step, TrackingSettings(**tracking), monitor)
    return recorded_steps(tmp_path)


def test_the_last_steps_are_kept(tmp_path):
    assert kept([0.5] * 20, tmp_path, record_last=3) == [18, 19, 20]


def test_due_steps_are_kept_too(tmp_path):
    steps = kept([0.5] * 20, tmp_path, record_last=2, record_every=6)
    assert steps == [6, 12, 18, 19, 20]


def test_the_steps_before_a_fall_are_kept_from_its_beginning_on(tmp_path):
    # the smoothed reward, with factor .9, is below .7 x its peak from the fourth low batch on
    rewards = [0.5] * 30 + [0.0] * 40
    monitor = Monitor(MonitorSettings())
    for step, reward in enumerate(rewards, start=1):
        monitor.observe(step, {"reward/mean": reward})
    (began,) = monitor.falls
    assert began == monitor.fall_began == 34
    assert kept(rewards, tmp_path, record_last=4) == [31, 32, 33, 34, 67, 68, 69, 70]


def test_a_short_fall_keeps_nothing(tmp_path):
    rewards = [0.5] * 30 + [0.0] * 6 + [0.6] * 30
    assert kept(rewards, tmp_path, record_last=2) == [65, 66]


@pytest.mark.parametrize(("name", "value"), [("record_experts", False), ("record_after", True)])
def test_a_setting_without_effect_is_refused(name, value):
    with pytest.raises(SettingError) as refused:
        TrackingSettings(**{name: value})
    assert refused.value.key == f"tracking.{name}"
    TrackingSettings(**{name: value}, record_last=1)
