"""TensorBoard's event files hold the rows of a run, also of one that was resumed or asked for them
late.
"""

import math

import numpy as np
import pytest

from composing import settings
from gspo.run import event_files
from gspo.run.event_files import FOLDER, EventFiles, check_event_files
from refusals import refuses

# `make setup` installs it; the environment of vLLM has it not
reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def rows(first: int, last: int, factor: float = 1.0) -> list[dict]:
    return [
        {"step": step, "reward/mean": factor * step / 3, "eval/x/avg@2": step}
        for step in range(first, last + 1)
    ]


def read(run) -> dict[str, dict[int, float]]:
    """By name and step, as TensorBoard reads the folder."""
    events = reader.EventAccumulator(str(run / FOLDER))
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def written(run, before: list[dict], new: list[dict]) -> None:
    files = EventFiles(run, before)
    for row in new:
        files.send(row)
    files.close()


def expected(made: list[dict]) -> dict[str, dict[int, float]]:
    return {
        name: {row["step"]: float(np.float32(row[name])) for row in made}
        for name in ("reward/mean", "eval/x/avg@2")
    }


def test_names_steps_and_numbers_are_those_of_the_rows(tmp_path):
    written(tmp_path, [], rows(0, 5))
    assert read(tmp_path) == expected(rows(0, 5))


def test_a_resumed_run_supersedes_what_came_after_its_checkpoint(tmp_path):
    written(tmp_path, [], rows(0, 5))
    written(tmp_path, rows(0, 3), rows(4, 7, factor=2))
    assert read(tmp_path) == expected(rows(0, 3) + rows(4, 7, factor=2))


def test_a_run_that_starts_again_supersedes_everything(tmp_path):
    written(tmp_path, [], rows(0, 5))
    written(tmp_path, [], rows(0, 2, factor=2))
    assert read(tmp_path) == expected(rows(0, 2, factor=2))


def test_asked_for_late_they_hold_the_earlier_rows_too(tmp_path):
    written(tmp_path, rows(0, 3), rows(4, 5))
    assert read(tmp_path) == expected(rows(0, 5))


def test_rows_of_a_time_without_event_files_are_not_missing(tmp_path):
    written(tmp_path, [], rows(0, 6))
    # resumed after step 4 without event files, then with them
    before = rows(0, 4) + rows(5, 8, factor=2)
    written(tmp_path, before, rows(9, 9))
    assert read(tmp_path) == expected(before + rows(9, 9))
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_a_row_is_on_the_disk_at_once_and_what_was_not_finite_is_nan(tmp_path):
    files = EventFiles(tmp_path, [])
    files.send({"step": 1, "optim/grad_norm": None, "reward/mean": 0.5})
    found = read(tmp_path)  # as after a kill
    assert found["reward/mean"] == {1: 0.5} and math.isnan(found["optim/grad_norm"][1])
    files.close()


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    asked = settings("tracking.tensorboard=true")
    check_event_files(asked)
    monkeypatch.setattr(event_files.importlib.util, "find_spec", lambda name: None)
    with refuses("tracking.tensorboard", True, "needs the package tensorboard"):
        check_event_files(asked)
    check_event_files(settings())
