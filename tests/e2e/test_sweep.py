"""A sweep as users type it: Ctrl-C reaches every worker, the same command continues, finished arms
stay as they are.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import forked
from commands import ROOT, SMALL, environment
from gspo.run.devices import cores
from gspo.tracking.tracker import read_rows

COMMAND = [
    sys.executable,
    "-P",
    "-m",
    "gspo",
    "train",
    "-cd",
    str(ROOT / "sweeps"),
    "-cn",
    "paper_figures",
    "-m",
]
OVERRIDES = [o for o in SMALL if not o.startswith(("study=", "steps=", "checkpoint."))]


TYPED = [*COMMAND, *OVERRIDES, "seed=1", "steps=40", "checkpoint.every=100"]


def steps_of(folder) -> dict[str, int]:
    paths = (folder / "runs" / "paper_figures").glob("*/metrics.jsonl")
    return {path.parent.name: read_rows(path)[-1]["step"] for path in paths if read_rows(path)}


def two_runs_under_way(folder, *more: str) -> forked.Script:
    process = forked.start([*TYPED, *more], cwd=folder, env=environment())
    deadline = time.monotonic() + 180
    while sum(step >= 3 for step in steps_of(folder).values()) < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    return process


def latest(folder, name: str) -> str:
    path = folder / "runs" / "paper_figures" / name / "checkpoints" / "latest"
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.daily)]
)
def test_workers_whose_sweep_is_killed_save_their_work_and_end(tmp_path, number):
    # one may begin long after the other
    process = two_runs_under_way(tmp_path, "steps=1000", "checkpoint.every=1000")
    process.send_signal(number)  # only the process above them: no signal reaches the workers
    deadline = time.monotonic() + 60
    while not all(
        latest(tmp_path, name) == f"step_{step:06d}" for name, step in steps_of(tmp_path).items()
    ):
        assert time.monotonic() < deadline, steps_of(tmp_path)
        time.sleep(0.2)
    stopped = steps_of(tmp_path)
    time.sleep(3)
    assert steps_of(tmp_path) == stopped and max(stopped.values()) < 1000 and len(stopped) == 2
    process.wait_for_session(60)
    if number == signal.SIGTERM:
        assert process.wait(60) == 128 + number, "it has waited for its workers"


@pytest.mark.slow
def test_a_sweep_can_be_interrupted_and_continued_by_typing_it_again(tmp_path):
    process = two_runs_under_way(tmp_path)
    # what a terminal's Ctrl-C does: everyone in the foreground gets it
    os.killpg(process.pid, signal.SIGINT)
    process.wait_for_session(120)
    written = "".join(process.communicate())
    assert process.returncode == 130, written
    assert "Traceback" not in written and written.count("stopping after the current step") == 1
    stopped = steps_of(tmp_path)
    for name, step in stopped.items():  # no step that was computed is lost
        assert latest(tmp_path, name) == f"step_{step:06d}"
    again = forked.run(TYPED, cwd=tmp_path, env=environment())
    assert again.returncode == 0, again.stdout + again.stderr
    assert set(steps_of(tmp_path).values()) == {40} and len(steps_of(tmp_path)) == 3
    for name, step in stopped.items():
        rows = read_rows(tmp_path / "runs" / "paper_figures" / name / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(41))
        assert not (tmp_path / "runs" / "paper_figures" / name / "superseded").exists(), (
            f"{name} lost steps before {step}"
        )


TRAIN = [sys.executable, "-P", "-m", "gspo", "train"]
SIX = [*TRAIN, "-m", *SMALL, "steps=10", "objective=gspo_tiny,grpo", "seed=1,2,3"]


def status(folder) -> list[str]:
    command = [sys.executable, "-P", "-m", "gspo", "sweep-status", "runs/small"]
    done = forked.run(command, cwd=folder, env=environment())
    return [line for line in done.stdout.splitlines() if not line.startswith("to upload")]


def states(folder) -> list[str]:
    return sorted(line.split()[1] for line in status(folder)[:-1])


@pytest.mark.slow
def test_a_sweep_of_six_killed_after_two_is_completed_by_the_same_command(tmp_path):
    process = forked.start(SIX, cwd=tmp_path, env=environment())
    deadline = time.monotonic() + 300
    while not (tmp_path / "runs" / "small").exists() or states(tmp_path).count("finished") < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.3)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    left = states(tmp_path)
    assert left.count("finished") in (2, 3) and left.count("missing") >= 2 and len(left) == 6
    assert "running" not in left
    assert re.search(r"left with 1 at a time: \d min$", status(tmp_path)[-1])
    rows = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/small/*/metrics.jsonl")}
    finished = {line.split()[0] for line in status(tmp_path) if " finished " in line}
    again = forked.run(SIX, cwd=tmp_path, env=environment())
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stdout.count("has reached step 10 already") == len(finished)
    assert states(tmp_path) == ["finished"] * 6
    for path, stamp in rows.items():
        assert (path.stat().st_mtime_ns == stamp) == (path.parent.name in finished), (
            "finished runs stay as they are"
        )


@pytest.mark.slow
def test_a_failed_job_is_listed_with_its_reason_and_the_others_run(tmp_path):
    command = [*TRAIN, "-m", *SMALL, "steps=2", "seed=1,2", "rollout.max_new_tokens=100000,12"]
    # Hydra itself would start no batch after one with an error
    command += ["hydra.sweeper.max_batch_size=1"]
    done = forked.run(command, cwd=tmp_path, env=environment())
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        "error: 2 of the jobs did not finish\n" in done.stderr
        and done.stderr.count("no room for a prompt") == 2
    )
    assert "to upload all runs of the study to W&B: wandb sync runs/small/*/wandb\n" in done.stdout
    assert "to upload it" not in done.stdout, "one command for all of them"
    found = status(tmp_path)
    assert states(tmp_path) == ["failed", "failed", "finished", "finished"], found
    assert sum("leaves no room for a prompt" in line for line in found) == 2, found


@pytest.mark.slow
def test_option_files_edited_while_a_sweep_runs_make_no_other_runs(tmp_path):
    mine = tmp_path / "mine" / "study.yaml"
    mine.parent.mkdir()
    words = "defaults: [train, _self_]\noptim: {lr: 1e-3}\nhydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}\n"
    mine.write_text(words)
    options = [option for option in SMALL if not option.startswith("optim.lr=")]
    command = [*TRAIN, "-cd", "mine", "-cn", "study", "-m", *options]
    process = forked.start(command, cwd=tmp_path, env=environment())
    deadline = time.monotonic() + 180
    while not list(tmp_path.glob("runs/small/*-seed1-*/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    mine.write_text(words.replace("1e-3", "2e-3"))
    _, errors = process.communicate(timeout=120)
    assert (
        process.returncode == 1
        and "its option files were edited after the sweep had begun" in errors
    )
    assert [run.name.split("-")[1] for run in tmp_path.glob("runs/small/*-seed*")] == ["seed1"]
    again = forked.run(command, cwd=tmp_path, env=environment())
    assert again.returncode == 0 and len(list(tmp_path.glob("runs/small/*-seed*"))) == 3, (
        again.stderr[-2000:]
    )


def signal_jobs(files, number: int) -> None:
    """To the jobs' own processes, as a scheduler does: the children of submitit's controllers."""
    controllers = {
        folder.name for folder in (files / ".submitit").iterdir() if folder.name.isdecimal()
    }
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if entry.read_text().rpartition(")")[2].split()[1] in controllers:
                os.kill(int(entry.parent.name), number)


@pytest.mark.slow
def test_jobs_of_submitit_save_and_are_queued_again_when_their_time_is_up(tmp_path):
    """Two processes at once, each with its share of the machine; SIGUSR2 is what submitit's
    schedulers send.
    """
    launcher = ["hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=2"]
    options = [o for o in SMALL if not o.startswith(("steps=", "checkpoint.", "threads="))]
    command = [*TRAIN, "-m", *options, *launcher, "steps=30", "seed=1,2", "checkpoint.every=100"]
    devices = {"CUDA_VISIBLE_DEVICES": "5,7"}
    process = forked.start(command, cwd=tmp_path, env=environment() | devices)
    files = tmp_path / "runs" / "small"
    deadline = time.monotonic() + 180
    while sum(len(read_rows(path)) > 3 for path in files.glob("*/metrics.jsonl")) < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    signal_jobs(files, signal.SIGUSR2)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    logs = [path.read_text() for path in (files / ".submitit").glob("*/*_log.err")]
    assert sum("this job is preempted" in log for log in logs) == 2, logs
    runs = sorted(files.glob("*-seed*"))
    for run in runs:
        assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(31))
        assert not (run / "superseded").exists(), "the step under way was finished and saved"
    codes = [json.loads((run / "code.json").read_text()) for run in runs]
    assert [code["devices"] for code in codes] == ["5,7", "5,7"], (
        "what the user gave, which submitit hides"
    )
    assert {code["threads"] for code in codes} == {max(1, cores() // 2)}


@pytest.mark.slow
def test_submitit_on_one_machine_wants_to_know_how_many_jobs_it_holds(tmp_path):
    command = [*TRAIN, "-m", *SMALL, "steps=2", "seed=1,2", "hydra/launcher=submitit_local"]
    done = forked.run(command, cwd=tmp_path, env=environment())
    assert done.returncode == 2 and "hydra.sweeper.max_batch_size=N" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "runs").exists(), "before any job is started"


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_of_submitit_and_the_command_continues_it(tmp_path):
    launcher = ["hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=1"]
    command = [*TRAIN, "-m", *SMALL, "steps=40", "seed=1,2", *launcher]
    process = forked.start(command, cwd=tmp_path, env=environment())
    files, deadline = tmp_path / "runs" / "small", time.monotonic() + 180
    while sum(len(read_rows(path)) > 5 for path in files.glob("*/metrics.jsonl")) < 1:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command continues" in errors
    time.sleep(2)
    assert len(list(files.glob("*-seed*/metrics.jsonl"))) == 1, "no further job was started"
    again = forked.run(command, cwd=tmp_path, env=environment())
    assert again.returncode == 0 and states(tmp_path) == ["finished", "finished"], again.stderr[
        -3000:
    ]


@pytest.mark.slow
def test_a_job_of_submitit_that_is_terminated_is_said_to_be_unfinished(tmp_path):
    launcher = ["hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=1"]
    command = [*TRAIN, "-m", *SMALL, "steps=60", "seed=1", *launcher]
    process = forked.start(command, cwd=tmp_path, env=environment())
    files, deadline = tmp_path / "runs" / "small", time.monotonic() + 180
    while sum(len(read_rows(path)) > 3 for path in files.glob("*/metrics.jsonl")) < 1:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    signal_jobs(files, signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "stopped by SIGTERM: the same command continues it" in errors
    assert states(tmp_path) == ["stopped"]
