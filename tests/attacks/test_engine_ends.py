"""The engine's process ends at some moment of a run: what is whole is saved, and the run goes on as
if it had not.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from builders import small_policy
from commands import SMALL, comparable, environment, only_run, train
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.off_policy import make_source
from gspo.rollout.sources.problem_sampler import Grouped
from gspo.tracking.tracker import read_rows
from trainers import FirstCharacter, flat

SCRIPT = Path(__file__).parents[1] / "support/ending_engine.py"
# an engine that must be handed weights; the checkpoints that are due anyway come too late
RUN = [*SMALL, "rollout.dtype=bfloat16", "steps=7", "evaluation.every=3", "checkpoint.every=100"]
KINDS = {
    "plain": [],
    "refilled": [
        "rollout.refill_rounds=2", "rollout.query_set=12", "sampler=grouped", "sampler.by=difficulty",
    ],
    "partial": ["rollout.token_budget=5", "rollout.in_flight=12", "policy.old_logprobs=behaviour"],
    "stale": ["rollout.staleness=2", "policy.old_logprobs=behaviour"],
}  # fmt: skip


def ended(folder: Path, method: str, calls: int, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), method, str(calls), *overrides]
    return forked.run(command, cwd=folder, env=environment())


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


class Failing(LocalEngine):
    """Gone at one call, and there again at the next: what `next` left behind shows in what comes
    then.
    """

    def __init__(self, policy, gone_at: int):
        super().__init__(policy)
        self.gone_at = gone_at
        self.calls = 0

    def _sample(self, *arguments) -> None:
        self.calls += 1
        super()._sample(*arguments)  # the rows are filled, and lost
        if self.calls == self.gone_at:
            raise EngineEnded("vLLM's process (process 12) was killed by SIGKILL")


SOURCES = {
    "plain": {"query_set": 12},
    "refilled": {"query_set": 12, "refill_rounds": 2},
    "partial": {"query_set": 12, "token_budget": 4, "in_flight": 8},
    "stale": {"query_set": 12, "staleness": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_whose_engine_ends_is_as_before(kind):
    policy, sizes = small_policy(), {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 8}

    def batches(gone_at: int) -> tuple[list, Failing]:
        engine, found = Failing(policy, gone_at), []
        settings = RolloutSettings(**sizes, **SOURCES[kind])
        source = make_source(engine, FirstCharacter(), settings, Grouped(by="difficulty"), 1)
        for step in range(1, 5):
            before = source.state(), source.pending()
            try:
                rollout = source.next(step)
            except EngineEnded:
                assert kind == "stale" or (source.state(), source.pending()) == before
                rollout = source.next(step)
            found.append((flat(rollout.groups), rollout.filtered, json.dumps(source.state())))
            source.update(step)
        return found, engine

    straight, engine = batches(0)
    assert engine.calls >= 4
    for call in range(1, engine.calls + 1):
        assert batches(call)[0] == straight, f"call {call}"


@pytest.mark.slow
@pytest.mark.parametrize("kind, method, calls", [
    ("plain", "_sample", 12), ("plain", "load_weights", 4), ("refilled", "_sample", 13), ("partial", "_sample", 21),
    ("stale", "load_weights", 4),
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


@pytest.mark.slow
def test_an_engine_that_ends_in_an_evaluation_lets_the_step_be_whole(tmp_path):
    done = ended(tmp_path, "_sample", 2, *RUN)  # the first is the guard at the start
    assert done.returncode == 1 and "held-out problems are sampled in this process" in done.stderr
    assert "nothing was saved yet; go on with resume=runs/small/" in done.stderr.splitlines()[-1]
    assert [row["step"] for row in read_rows(only_run(tmp_path) / "metrics.jsonl")] == [0]


@pytest.mark.slow
def test_in_a_sweep_the_other_runs_go_on(tmp_path):
    done = ended(tmp_path, "_sample", 12, "-m", *RUN, "seed=1,2")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        "error: 2 of the jobs did not finish" in done.stderr
        and done.stderr.count("killed by SIGKILL") >= 2
    )
