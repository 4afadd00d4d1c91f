"""The stop of a sweep that reaches its launcher alone."""

import os
import signal
import threading
import time

import pytest

from gspo.run.entry_point import STOP_MARKER, StopSignal


def test_a_signal_before_a_single_run_begins_ends_the_process_at_once(capfd):
    child = os.fork()
    if child == 0:
        stop = StopSignal()
        stop.ends_at_once = True
        stop._note(signal.SIGTERM, None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == "\nstopped before it had begun; nothing was written\n"


def test_a_terminal_that_closes_may_say_so_twice():
    stop = StopSignal()
    stop._note(signal.SIGHUP, None)
    stop._note(signal.SIGHUP, None)
    assert stop.number == signal.SIGHUP


def test_under_nohup_the_end_of_the_terminal_is_ignored():
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        StopSignal().install(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, earlier)


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
