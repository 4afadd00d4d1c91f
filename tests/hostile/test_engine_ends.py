"""The engine's process ends at some moment of a run: what is whole is saved, and the run goes on as if it had not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_runs import SMALL, comparable, environment, only_run, train

from gspo.tracking import read_rows

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "ending_engine.py"
# an engine that must be handed weights; the checkpoints that are due anyway come too late
RUN = [*SMALL, "rollout.dtype=bfloat16", "steps=7", "evaluation.every=3", "checkpoint.every=100"]
KINDS = {
    "plain": [],
    "refilled": [
        "rollout.refill_rounds=2", "rollout.query_set=12", "sampler=curriculum", "sampler.by=difficulty",
    ],
    "partial": ["rollout.token_budget=5", "rollout.in_flight=12", "policy.old_logprobs=behaviour"],
    "stale": ["rollout.staleness=2", "policy.old_logprobs=behaviour"],
}  # fmt: skip


def ended(folder: Path, method: str, calls: int, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), method, str(calls), *overrides]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The rows of runs without interruption."""
    made = {}

    def rows(kind: str) -> list[dict]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            done = train(folder, *RUN, *KINDS[kind])
            assert done.returncode == 0, done.stderr[-3000:]
            made[kind] = comparable(only_run(folder))
        return made[kind]

    return rows


@pytest.mark.parametrize("kind, method, calls", [
    ("plain", "_sample", 12), ("plain", "load_weights", 4), ("refilled", "_sample", 9), ("refilled", "_sample", 13),
    ("partial", "_sample", 21), ("partial", "load_weights", 5), ("stale", "_sample", 13), ("stale", "load_weights", 4),
])  # fmt: skip
def test_the_step_before_is_saved_and_the_run_goes_on(tmp_path, straight, kind, method, calls):
    done = ended(tmp_path, method, calls, *RUN, *KINDS[kind])
    run = only_run(tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
    step = max(row["step"] for row in read_rows(run / "metrics.jsonl"))
    assert 1 < step < 7
    assert last == (
        "error: vLLM's process (process 12) was killed by SIGKILL; "
        f"saved up to step_{step:06d}; go on with resume={run.relative_to(tmp_path)}"
    )
    said = json.loads((run / "status.json").read_text())
    assert said["how"] == "failed" and "killed by SIGKILL" in said["reason"]
    again = train(tmp_path, f"resume={run}")
    assert again.returncode == 0, again.stderr[-3000:]
    assert comparable(run) == straight(kind)


def test_an_engine_that_ends_in_an_evaluation_lets_the_step_be_whole(tmp_path):
    done = ended(tmp_path, "_sample", 1, *RUN)
    assert done.returncode == 1 and "held-out problems are sampled in this process" in done.stderr
    assert "nothing was saved yet; go on with resume=runs/small/" in done.stderr.splitlines()[-1]
    assert [row["step"] for row in read_rows(only_run(tmp_path) / "metrics.jsonl")] == [0]


def test_in_a_sweep_the_other_runs_go_on(tmp_path):
    done = ended(tmp_path, "_sample", 12, "-m", *RUN, "seed=1,2")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: 2 of the jobs did not finish" in done.stderr and done.stderr.count("killed by SIGKILL") >= 2
