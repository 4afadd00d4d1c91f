"""Everything that a run remembers beside its weights survives SIGKILL: the whole is bit-identical to no interruption.

On one machine, with one build of the program and its libraries and one number of threads.

Critic, refreshed reference policy, adaptive KL coefficient, running reward statistics, pass rates of a curriculum.
"""

import json
import signal
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from commands import SMALL, command, comparable, environment, only_run, train, wait_for_step

SHAPED = ["reward.overlong_cache=11", "reward.shift=running", "reward.scale=running"]  # rewards that differ by length
RUNS = {
    "critic": [
        "preset=ppo", "kl=loss", "kl.target=1e-4", "kl.horizon=100", "kl.refresh_every=3",
        "sampler=grouped", "rollout.query_set=16", *SHAPED,
    ],
    "dynamic": [
        "objective=gspo_token", "advantage=returns", "kl=reward", "kl.target=1e-4", "kl.horizon=100",
        "correction=tis", "rollout.refill_rounds=1", "rollout.extend={4:14,8:16}", *SHAPED,
    ],
    "stale": [
        "rollout.staleness=2", "rollout.dtype=bfloat16", "policy.old_logprobs=behaviour", "policy.routing_replay=r3",
        "sampler=grouped", "rollout.query_set=16", "reward.overlong_cache=11",
    ],
    "partial": [
        "rollout.staleness=1", "rollout.overlap=true", "rollout.token_budget=5", "rollout.in_flight=12",
        "policy.old_logprobs=behaviour", "rollout.routes=true", "reward.overlong_cache=11",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_remembers_everything(name, tmp_path):
    overrides = [*SMALL, *RUNS[name], "checkpoint.every=1", "optim.warmup_updates=0"]
    (tmp_path / "straight").mkdir()
    done = train(tmp_path / "straight", *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    straight = only_run(tmp_path / "straight")
    (tmp_path / "killed").mkdir()
    process = subprocess.Popen(
        command(*overrides, "steps=200"),
        cwd=tmp_path / "killed",
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_step(tmp_path / "killed", 5, process)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    run = only_run(tmp_path / "killed")
    done = train(tmp_path / "killed", f"resume={run}", "steps=12")
    assert done.returncode == 0, done.stderr[-3000:]
    assert comparable(run) == comparable(straight)
    last = [folder / "checkpoints" / "step_000012" for folder in (run, straight)]
    tensors = [load_file(folder / "model.safetensors") for folder in last]
    assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[1])
    states = [json.loads((folder / "state.json").read_text()) for folder in last]
    for state in states:
        state.pop("seconds")
    assert states[0] == states[1]
    check_that_it_was_used(name, comparable(straight), states[1], last[1])


def check_that_it_was_used(name, rows, state, checkpoint):
    """The test means nothing if the state never moved."""
    if name in ("stale", "partial"):
        assert (checkpoint / "held.json").exists() and (checkpoint / "held.npz").exists()
        assert rows[12]["staleness/mean"] >= RUNS[name].count("rollout.staleness=2") + 1
        assert rows[12]["clip/token_outside_minibatch_1"] > 0
        assert (name == "partial") == (rows[12]["staleness/segments"] > 1)
        return
    assert state["rewards"]["count"] >= 12 * 16 and state["rewards"]["squares"] > 0
    coefficients = {row["kl/coef"] for row in rows[1:]}
    assert len(coefficients) > 3 and state["kl_coef"] not in (None, rows[1]["kl/coef"])
    assert any(row["kl/ref_k3"] > 1e-6 for row in rows[1:])
    if name == "critic":
        assert (checkpoint / "value_head.pt").exists() and (checkpoint / "reference" / "model.safetensors").exists()
        assert rows[4]["kl/ref_k3"] < 1e-9 < rows[3]["kl/ref_k3"], "refreshed after step 3"
        assert state["source"], "pass rates"
    else:
        assert [rows[step]["length/limit"] for step in (3, 4, 8)] == [12, 14, 16]
        assert all(row["filter/refill_rounds"] == 1 for row in rows[1:])


@pytest.mark.slow
def test_overlap_changes_no_row(tmp_path):
    rows = []
    for overlap in ("false", "true"):
        folder = tmp_path / overlap
        folder.mkdir()
        ahead = ["rollout.staleness=1", f"rollout.overlap={overlap}", "rollout.dtype=bfloat16"]
        fast = ["optim.lr=5e-2", "optim.warmup_updates=0", "evaluation.problems=32"]
        done = train(folder, *SMALL, *ahead, *fast, "policy.old_logprobs=behaviour", "reward.overlong_cache=11")
        assert done.returncode == 0, done.stderr[-3000:]
        rows.append(comparable(only_run(folder)))
    assert rows[0] == rows[1], "held-out evaluation included"
    tokens = [row["eval/math_easy/tokens"] for row in rows[0] if "eval/math_easy/tokens" in row]
    assert len(set(tokens)) > 1, "the evaluated weights moved"
