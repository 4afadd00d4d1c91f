"""The stop of a sweep that reaches its launcher alone."""

import os
import signal
import threading
import time

import pytest

from gspo.run.entry_point import STOP_MARKER, StopSignal


@pytest.mark.slow
def test_workers_learn_of_a_stop_that_reached_their_launcher_alone(monkeypatch):
    monkeypatch.setenv(STOP_MARKER, "")
    launcher = StopSignal()
    worker = StopSignal()
    launcher.tell_workers()
    watcher = threading.Thread(target=worker._watch, args=(os.getppid(),), daemon=True)
    watcher.start()
    time.sleep(1.2)
    assert not worker.requested()
    launcher._note(signal.SIGINT, None)
    deadline = time.monotonic() + 60
    while not worker.requested():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # a Ctrl-C reaches all processes of the terminal: this is no second one
    worker._note(signal.SIGINT, None)
    assert worker.number == signal.SIGINT and worker.repeats == 0
    launcher._marker.unlink()
