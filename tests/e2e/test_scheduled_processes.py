"""A sweep of runs of several processes each: the tasks that submitit starts for a job are the ranks
of its run.
"""

import json
import os
import signal
import time

import pytest

import forked
from commands import command, comparable, environment, only_run, train
from gspo.tracking.tracker import read_rows
from learning_runs import LEARNING, near

pytestmark = pytest.mark.distributed
LAUNCHER = [
    "hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=1", "hydra.launcher.tasks_per_node=2",
    "parallel.mode=replicate", "parallel.ranks=2", "threads=1",
]  # fmt: skip
SWEEP = [o for o in LEARNING if not o.startswith(("steps=", "checkpoint.", "seed="))]


def tasks_of(files) -> list[int]:
    """The processes of the jobs that run now, in the order of their ranks."""
    found = {}
    for entry in os.scandir("/proc"):
        try:
            with open(f"/proc/{entry.name}/environ", "rb") as file:
                words = dict(word.partition(b"=")[::2] for word in file.read().split(b"\0"))
        except OSError:  # no process, or it has ended
            continue
        if (
            words.get(b"SUBMITIT_LOCAL_GLOBALID")
            and (files / ".submitit" / words[b"SUBMITIT_LOCAL_JOB_ID"].decode()).is_dir()
        ):
            found.setdefault(int(words[b"SUBMITIT_LOCAL_GLOBALID"]), int(entry.name))
    return [found[rank] for rank in sorted(found)]


def test_a_job_with_two_tasks_is_one_run_and_a_signal_to_one_of_them_queues_it_again(tmp_path):
    """SIGUSR2 is what SLURM sends when the time is nearly up, here to rank 1 alone."""
    words = [*command(), "-m", *SWEEP, *LAUNCHER, "steps=20", "seed=1", "checkpoint.every=100"]
    process = forked.start(words, cwd=tmp_path, env=environment())
    files = tmp_path / "runs" / "small"
    deadline = time.monotonic() + 180
    while not any(len(read_rows(path)) > 4 for path in files.glob("*/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    os.kill(tasks_of(files)[1], signal.SIGUSR2)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    logs = [path.read_text() for path in sorted((files / ".submitit").glob("*/*_0_log.err"))]
    assert sum("this job is preempted" in log for log in logs) == 1, logs
    run = only_run(tmp_path)
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(21))
    assert json.loads((run / "status.json").read_text())["how"] == "finished"
    assert not (run / "superseded").exists(), "the step under way was finished and saved"
    alone = tmp_path / "alone"
    alone.mkdir()
    done = train(alone, *SWEEP, "steps=20", "seed=1", "threads=1")
    assert done.returncode == 0, done.stderr
    near(comparable(run), comparable(only_run(alone)))
    for log in (files / ".submitit").glob("*/*_1_log.out"):
        assert "step" not in log.read_text(), "rank 0 alone speaks"


def test_tasks_without_a_mode_are_refused_by_rank_0(tmp_path):
    words = [
        *command(),
        "-m",
        *SWEEP,
        *LAUNCHER,
        "steps=2",
        "seed=1",
        "parallel.mode=none",
        "parallel.ranks=0",
    ]
    done = forked.run(words, cwd=tmp_path, env=environment())
    assert (
        done.returncode == 1
        and "parallel.mode=none: there are 2 processes; set parallel.mode=replicate" in done.stderr
    )
