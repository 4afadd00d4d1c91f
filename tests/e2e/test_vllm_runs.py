"""A whole run with vLLM as the engine: trained, killed, resumed. In an environment with vLLM: `make
test-vllm`.
"""

import shutil
import signal
import subprocess

import pytest

from commands import ROOT, SMALL, command, comparable, environment, only_run, train, wait_for_step
from daily import daily_but
from gspo.io.rows import read_rows
from rank_processes import launch
from served import free_url, served

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.vllm
MOE = [
    *SMALL,
    "model.hidden=64",
    "rollout=vllm",
    "policy.routing_replay=r3",
    "reward.overlong_cache=11",
]


def engines(pid: int) -> list[psutil.Process]:
    """The engine's processes below a trainer."""
    family = psutil.Process(pid).children(recursive=True)
    return [p for p in family if "gspo.rollout.engines.engine_process" in p.cmdline()]


def test_a_killed_run_leaves_no_engine_and_goes_on(tmp_path):
    process = subprocess.Popen(
        command(*MOE, "steps=100"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_step(tmp_path, 3, process)
    below = engines(process.pid)
    assert below, "the engine has a process of its own"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive, "an engine outlived its trainer"
    run = only_run(tmp_path)
    done = train(tmp_path, f"resume={run}", "steps=6")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(7))
    for row in rows[1:]:
        assert row["mismatch/logp_abs"] < 1e-5 and row["mismatch/after_sync"] < 1e-5
        assert row["routing/engine_agreement"] > 0.999
    assert any(row["optim/grad_norm"] > 0 for row in rows[1:]), "the weights moved"


def test_overlapped_and_partial_rollouts_through_vllm(tmp_path):
    no_replay = ["policy.routing_replay=none", "rollout.routes=true"]
    ahead = [
        "rollout.staleness=1",
        "rollout.overlap=true",
        "rollout.token_budget=5",
        "rollout.in_flight=12",
    ]
    done = train(
        tmp_path,
        *MOE,
        *ahead,
        *no_replay,
        "policy.old_logprobs=behaviour",
        "steps=5",
        "rollout.dtype=bfloat16",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_rows(only_run(tmp_path) / "metrics.jsonl")
    last = rows[-1]
    assert last["staleness/mean"] >= 1 and last["staleness/segments"] > 1
    assert 1e-5 < last["mismatch/logp_abs"] < 0.1 and last["mismatch/after_sync"] < 0.1
    assert 0.8 < last["routing/engine_agreement"] <= 1


def test_episodes_in_a_sweeps_worker_and_resumed(tmp_path):
    cut = "cold_start.steps=300 cold_start.batch_size=16 rollout.prompts_per_step=4 rollout.group_size=4 threads=1"
    sums = [
        "experiment=tool_moe",
        "task.terms=0",
        "rollout=vllm",
        *cut.split(),
        "evaluation.problems=4",
        "study=small",
    ]
    done = train(
        tmp_path,
        "-m",
        *sums,
        "steps=1",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=1",
        "seed=1,2",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = sorted((tmp_path / "runs" / "small").glob("*-seed*"))
    assert len(runs) == 2
    done = train(tmp_path, f"resume={runs[0]}", "steps=3")
    assert done.returncode == 0, done.stderr[-3000:]
    for run, steps in zip(runs, (3, 1), strict=True):
        rows = read_rows(run / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(steps + 1))
        for row in rows[1:]:
            assert row["mismatch/logp_abs"] < 1e-5 and row["mismatch/after_sync"] < 1e-5
            assert (
                row["episode/tool_calls"] > 0
                and row["episode/turns"] > 1
                and row["episode/environment_tokens"] > 0
            )


def test_a_wrong_setting_is_one_line(tmp_path):
    done = train(tmp_path, *MOE, "rollout.kv_cache_gib=1e6")
    assert done.returncode == 2 and "rollout.kv_cache_gib=1000000.0" in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert not list((tmp_path / "runs" / "small").glob("*"))


# ------------------------------------------------------------------------------------------------------
# several ranks
SEVERAL = [
    *MOE,
    "steps=4",
    "optim.eps=1e-6",
    "rollout.kv_cache_gib=0.25",
    "rollout.max_model_len=256",
]
SECONDS = 500  # two engines start on a busy machine


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process, with vLLM."""
    folder = tmp_path_factory.mktemp("alone")
    done = train(folder, *SEVERAL)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "runs" / "cold_starts", comparable(only_run(folder))


KILLING = """
import os
from dataclasses import dataclass
from gspo.train.extensions import Callback


@dataclass
class OnRankOne(Callback):
    def before_step(self, step, trainer):
        if step == 5 and trainer.ranks.rank == 1:
            os.kill(trainer.source.engine.host.process.pid, 9)
"""


@pytest.mark.parametrize("mode", daily_but(["replicate", "shard"], "shard"))
def test_two_ranks_with_a_vllm_each_write_what_one_process_writes_until_one_is_killed(
    tmp_path, alone, mode
):
    """Then the step before is saved."""
    cold_starts, expected = alone
    shutil.copytree(cold_starts, tmp_path / "runs" / "cold_starts")
    (tmp_path / "killing.py").write_text(KILLING)
    several = [
        *SEVERAL,
        "steps=9",
        f"parallel.mode={mode}",
        "checkpoint.every=100",
        "callbacks.it=killing:OnRankOne",
    ]
    there = {rank: {"PYTHONPATH": f".:{ROOT}"} for rank in (0, 1)}
    ranks = launch(tmp_path, 2, *several, env=there, seconds=SECONDS)
    assert [rank.code for rank in ranks] == [1, 1], [rank.err[-3000:] for rank in ranks]
    rows = comparable(only_run(tmp_path))
    assert [row["step"] for row in rows] == list(range(5))
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        rounding = {
            name
            for name in row
            if name.startswith(("mismatch/", "routing/engine_", "ratio/floor_"))
        }
        for name in row.keys() - rounding:
            assert row[name] == pytest.approx(other[name], rel=2e-3, abs=2e-4), (row["step"], name)
    for row in rows[1:]:
        assert row["mismatch/logp_abs"] < 1e-5 and row["mismatch/after_sync"] < 1e-5
        assert row["routing/engine_agreement"] > 0.999
    error = ranks[0].err.strip().splitlines()[-1]
    assert (
        error.startswith("error: vLLM's process of rank 1 (process ")
        and "was killed by SIGKILL" in error
    )
    assert "; saved up to step_000004; go on with resume=" in error
    assert (
        not ranks[1].out
        and "error" not in ranks[1].err
        and "Traceback" not in ranks[0].err + ranks[1].err
    )


# ------------------------------------------------------------------------------------------------------------
# a server
def test_two_ranks_with_a_server_write_what_one_process_writes_and_need_it(tmp_path, alone):
    cold_starts, expected = alone
    shutil.copytree(cold_starts, tmp_path / "runs" / "cold_starts")
    url = free_url()
    words = [word for word in SEVERAL if word != "rollout=vllm"] + [
        "rollout=vllm_server",
        f"rollout.url={url}",
    ]
    with served(tmp_path, url, *words):
        ranks = launch(tmp_path, 2, *words, "parallel.mode=replicate", seconds=SECONDS)
        assert [rank.code for rank in ranks] == [0, 0], [rank.err[-3000:] for rank in ranks]
    rows = comparable(only_run(tmp_path))
    assert [row["reward/mean"] for row in rows[1:]] == [row["reward/mean"] for row in expected[1:]]
    for row in rows[1:]:
        assert row["mismatch/logp_abs"] < 1e-5 and row["mismatch/after_sync"] < 1e-5
        assert row["routing/engine_agreement"] > 0.999
    ranks = launch(
        tmp_path,
        2,
        *words,
        "parallel.mode=replicate",
        "steps=9",
        "on_existing=resume",
        seconds=SECONDS,
    )
    assert [rank.code for rank in ranks] == [2, 2]
    assert f"error: rollout.url={url}: the vLLM server at {url} does not answer: " in ranks[0].err
    assert (
        "start one with `gspo serve` and the settings of this run" in ranks[0].err
        and "Traceback" not in ranks[0].err
    )
