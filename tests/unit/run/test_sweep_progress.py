"""The line of a whole sweep: what it counts, how it tells the time left, who leaves out lines for
it.
"""

import json
import os
import subprocess
import sys
import time

import pytest

from gspo.run import sweep_progress
from gspo.run.sweep_progress import LAUNCHER, SweepProgress, clock, last_step, shown_by_sweep


def write(folder, steps: int, how: str = "running", half: str = "") -> dict:
    folder.mkdir()
    rows = "".join(
        json.dumps({"step": step, "reward/mean": 0.5}) + "\n" for step in range(steps + 1)
    )
    (folder / "metrics.jsonl").write_text(rows + half)
    (folder / "status.json").write_text(json.dumps({"how": how, "step": steps}))
    return {"overrides": [], "run": folder.name, "folder": str(folder), "steps": 10}


def test_what_is_counted(tmp_path):
    planned = [
        write(tmp_path / "done", 10, "finished"),
        write(tmp_path / "longer", 25, "finished"),  # an earlier sweep had more steps
        write(tmp_path / "shorter", 4, "finished"),  # or fewer: it goes on
        write(tmp_path / "collapsed", 3, "collapsed"),  # needs no more steps
        write(tmp_path / "running", 6, half='{"step": 7, "rewa'),
        {"overrides": [], "run": "missing", "folder": str(tmp_path / "missing"), "steps": 10},
        {"overrides": [], "run": "x", "reason": "its settings are refused"},
        {
            "overrides": [],
            "run": "done",
            "folder": str(tmp_path / "done"),
            "steps": 10,
            "same_as": 0,
        },
    ]
    sweep = SweepProgress("study", planned)
    assert sweep.done() == (3, 10 + 10 + 4 + 10 + 6) and (len(sweep.jobs), sweep.total) == (6, 60)


def test_the_time_left_is_that_of_the_pace_since_the_sweep_began(tmp_path, capsys, monkeypatch):
    plan = [
        write(tmp_path / "one", 4),
        {"run": "two", "folder": str(tmp_path / "two"), "steps": 10},
    ]
    sweep = SweepProgress("study", plan)
    sweep.show()
    assert (
        capsys.readouterr().out
        == "study: 0 of 2 runs, 4 of 20 steps  0.0 steps/s  time left unknown\n"
    )
    write(tmp_path / "two", 8)
    began = sweep.began
    monkeypatch.setattr(time, "monotonic", lambda: began + 16.0)
    sweep.show()  # 8 steps in 16 seconds, 8 are left; the 4 of before do not count
    assert capsys.readouterr().out == "study: 0 of 2 runs, 12 of 20 steps  0.5 steps/s  0:16 left\n"


def test_the_cold_start_before_the_first_step_says_nothing_about_the_pace(
    tmp_path, capsys, monkeypatch
):
    sweep = SweepProgress("study", [{"run": "one", "folder": str(tmp_path / "one"), "steps": 10}])
    began = sweep.began
    monkeypatch.setattr(time, "monotonic", lambda: began + 200.0)
    sweep.show()
    write(tmp_path / "one", 4)
    monkeypatch.setattr(time, "monotonic", lambda: began + 208.0)
    sweep.show()
    assert (
        capsys.readouterr().out.splitlines()[1]
        == "study: 0 of 1 runs, 4 of 10 steps  0.5 steps/s  0:12 left"
    )


@pytest.mark.slow
def test_the_line_comes_by_itself_and_a_last_time_at_the_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep_progress, "PAUSE", 0.05)
    monkeypatch.setattr(sweep_progress, "FIRST_PAUSE", 0.05)
    sweep = SweepProgress("study", [write(tmp_path / "one", 4)])
    sweep.start()
    time.sleep(0.3)
    sweep.close()
    sweep.close()  # nothing more
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3 and set(lines) == {
        "study: 0 of 1 runs, 4 of 10 steps  0.0 steps/s  time left unknown"
    }


def test_what_is_no_file_of_metrics_counts_as_no_step(tmp_path):
    pipe, link, big, deep = (tmp_path / name for name in ("pipe", "link", "big", "deep"))
    os.mkfifo(pipe)
    big.write_text('{"step": 3}\n{"step": 1e999}\n')
    deep.write_text('{"step": 4}\n' + "[" * 100_000 + "\n")
    link.symlink_to(big)
    assert [last_step(file) for file in (pipe, link, tmp_path, tmp_path / "none", big, deep)] == [
        0,
        0,
        0,
        0,
        3,
        4,
    ]


def test_only_jobs_of_the_launcher_leave_out_their_own_lines(monkeypatch):
    script = "from gspo.run.sweep_progress import shown_by_sweep; print(shown_by_sweep())"
    ours = os.environ | {LAUNCHER: str(os.getpid())}
    for environment, expected in ((ours, "True\n"), (os.environ | {LAUNCHER: "1"}, "False\n")):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == expected
    monkeypatch.delenv(LAUNCHER, raising=False)
    assert not shown_by_sweep()
    monkeypatch.setenv(LAUNCHER, str(os.getpid()))
    assert shown_by_sweep(), "jobs that run one after the other in the launching process"


def test_rows_and_durations(tmp_path):
    assert last_step(tmp_path / "none") == 0
    for content, step in (("", 0), ("nonsense\n[1]\n", 0), ('{"step": 3}\n{"step": 4}\n{"st', 4)):
        (tmp_path / "rows").write_text(content)
        assert last_step(tmp_path / "rows") == step
    (tmp_path / "rows").write_text(
        "".join(json.dumps({"step": n, "x": "y" * 900}) + "\n" for n in range(600))
    )
    assert last_step(tmp_path / "rows") == 599
    assert [clock(s) for s in (0, 61.4, 3600, 86399)] == ["0:00", "1:01", "1:00:00", "23:59:59"]
