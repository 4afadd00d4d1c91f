"""A step that ends with an error is recorded, and the record never hides the error."""

import os
from types import SimpleNamespace

import pytest

from gspo.run.directory import exclusive
from gspo.run.loop import TrainingLoop
from gspo.tracking.tracker import STEP_FOLDERS


class Recorder:
    def __init__(self, problem=None):
        self.problem = problem
        self.errors = []

    def finish(self, metrics, error=""):
        self.errors.append(error)
        if self.problem:
            raise self.problem
        return {}


def loop(error: Exception, recorder: Recorder) -> TrainingLoop:
    """A loop whose trainer raises an error."""

    def fit(*_):
        raise error

    closed = SimpleNamespace(close=lambda: None)
    made = object.__new__(TrainingLoop)
    made.trainer = SimpleNamespace(fit=fit, recorder=recorder, source=closed)
    made.settings = SimpleNamespace(steps=1)
    made.progress = made.writer = closed
    return made


@pytest.mark.parametrize("error", [RuntimeError("a"), ValueError("a"), ZeroDivisionError("a")])
def test_the_step_of_any_error_is_recorded(error):
    """An objective of the user's own may raise any error."""
    recorder = Recorder()
    with pytest.raises(type(error)):
        loop(error, recorder).run()
    assert recorder.errors == [f"{type(error).__name__}: a"]


@pytest.mark.parametrize("problem", [OSError("No space left"), RuntimeError("CUDA error")])
def test_a_record_that_cannot_be_written_does_not_hide_the_error(problem):
    with pytest.raises(ValueError, match="the loss is wrong"):
        loop(ValueError("the loss is wrong"), Recorder(problem)).run()


def test_unfinished_files_of_killed_processes_are_deleted_in_all_folders_of_steps(tmp_path):
    unfinished = [tmp_path / name / f".{'0' * 16}.unfinished" for name in ("", *STEP_FOLDERS)]
    for path in unfinished:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (1e9, 1e9))
    other = tmp_path / "steps" / ".mine.unfinished"
    other.touch()
    os.utime(other, (1e9, 1e9))
    with exclusive(tmp_path):
        assert not any(path.exists() for path in unfinished) and other.exists()
