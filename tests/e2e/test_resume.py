"""Everything that a run remembers beside its weights survives SIGKILL: the whole is bit-identical
to no interruption.

On one machine, with one build of the program and its libraries and one number of threads.

Critic, refreshed reference policy, adaptive coefficients of KL and entropy, running reward
statistics, pass rates.
"""

import json
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import forked
from commands import (
    ROOT,
    SMALL,
    command,
    comparable,
    environment,
    evaluate,
    only_run,
    train,
    wait_for_step,
)
from daily import daily_but
from gspo.model.loading import load
from gspo.run.directory import settings_and_checkpoint
from gspo.run.policies import open_policy

# rewards that differ by length
SHAPED = ["reward.overlong_cache=11", "reward.shift=running", "reward.scale=running"]
RUNS = {
    "critic": [
        "preset=ppo", "kl=loss", "kl.target=1e-4", "kl.horizon=100", "kl.refresh_every=3",
        "sampler=grouped", "rollout.query_set=16", *SHAPED,
    ],
    "dynamic": [
        "objective=gspo_token", "advantage=returns", "kl=reward", "kl.target=1e-4", "kl.horizon=100",
        "correction=tis", "rollout.refill_rounds=1", "rollout.extend={4:14,8:16}", *SHAPED,
        "trainer.entropy_target=9", "trainer.entropy_coef_delta=1e-4",
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
@pytest.mark.parametrize("name", daily_but(RUNS, "critic", "dynamic", "partial"))
def test_a_killed_run_remembers_everything(name, tmp_path):
    overrides = [*SMALL, *RUNS[name], "checkpoint.every=1", "optim.warmup_updates=0"]
    (tmp_path / "straight").mkdir()
    done = train(tmp_path / "straight", *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    straight = only_run(tmp_path / "straight")
    (tmp_path / "killed").mkdir()
    words = command(*overrides, "steps=200")
    process = forked.start(words, cwd=tmp_path / "killed", env=environment())
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
        assert (checkpoint / "value_head.pt").exists() and (
            checkpoint / "reference" / "model.safetensors"
        ).exists()
        assert rows[4]["kl/ref_k3"] < 1e-9 < rows[3]["kl/ref_k3"], "refreshed after step 3"
        assert state["source"], "pass rates"
    else:
        assert [rows[step]["length/limit"] for step in (3, 4, 8)] == [12, 14, 16]
        assert all(row["filter/refill_rounds"] == 1 for row in rows[1:])
        assert len({row["policy/entropy_coef"] for row in rows[1:]}) == 12, (
            "it rises at every update"
        )


@pytest.mark.slow
def test_overlap_changes_no_row(tmp_path):
    rows = []
    for overlap in ("false", "true"):
        folder = tmp_path / overlap
        folder.mkdir()
        ahead = ["rollout.staleness=1", f"rollout.overlap={overlap}", "rollout.dtype=bfloat16"]
        fast = ["optim.lr=5e-2", "optim.warmup_updates=0", "evaluation.problems=32"]
        done = train(
            folder,
            *SMALL,
            *ahead,
            *fast,
            "policy.old_logprobs=behaviour",
            "reward.overlong_cache=11",
        )
        assert done.returncode == 0, done.stderr[-3000:]
        rows.append(comparable(only_run(folder)))
    assert rows[0] == rows[1], "held-out evaluation included"
    tokens = [row["eval/math_easy/tokens"] for row in rows[0] if "eval/math_easy/tokens" in row]
    assert len(set(tokens)) > 1, "the evaluated weights moved"


LORA = [
    "policy.lora.rank=4",
    "optim.lr=1e-2",
    "kl=loss",
    "policy.routing_replay=r2",
    "reward.overlong_cache=11",
]


@pytest.mark.slow
def test_a_killed_run_of_an_adapter_goes_on_to_the_bit_and_can_be_evaluated_sampled_and_merged(
    tmp_path,
):
    overrides = [*SMALL, *LORA, "checkpoint.every=1", "optim.warmup_updates=0"]
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    done = train(tmp_path / "straight", *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    straight = only_run(tmp_path / "straight")
    words = command(*overrides, "steps=200")
    process = forked.start(words, cwd=tmp_path / "killed", env=environment())
    wait_for_step(tmp_path / "killed", 5, process)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    run = only_run(tmp_path / "killed")
    done = train(tmp_path / "killed", f"resume={run}", "steps=12")
    assert done.returncode == 0, done.stderr[-3000:]
    assert comparable(run) == comparable(straight)
    assert any(row["kl/ref_k3"] > 1e-6 for row in comparable(run)[1:]), "the adapter has moved"
    last = [folder / "checkpoints" / "step_000012" for folder in (run, straight)]
    assert not list(last[0].glob("model*.safetensors"))
    adapters = [load_file(folder / "adapter_model.safetensors") for folder in last]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][key], adapters[1][key]) for key in adapters[1])
    evaluated = evaluate(run)
    assert evaluated.returncode == 0, evaluated.stderr[-3000:]
    script = [
        sys.executable,
        "-P",
        "-m",
        "gspo",
        "sample",
        f"run={run}",
        "problems=1",
        "samples=1",
    ]
    sampled = forked.run(script, cwd=tmp_path / "killed", env=environment())
    assert sampled.returncode == 0 and "tokens, mean log-prob" in sampled.stdout, sampled.stderr[
        -3000:
    ]
    refused = train(
        tmp_path / "killed", "model=hf", f"model.path={last[0]}", "task=math", "cold_start.steps=0"
    )
    assert (
        refused.returncode == 2
        and "is a LoRA adapter without its model: merge the two" in refused.stderr
    )
    check_that_the_documented_merge_gives_what_the_engine_samples_with(run, last[0], tmp_path)


def check_that_the_documented_merge_gives_what_the_engine_samples_with(run, checkpoint, tmp_path):
    page = (ROOT / "docs" / "algorithms.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    code = code.replace("runs/STUDY/RUN/checkpoints/step_000100", str(checkpoint))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    settings, _ = settings_and_checkpoint(str(run), 12, False, False)
    settings.runs = str(run.parents[1])
    policy = open_policy(
        settings, checkpoint, on_cold_start_step=lambda *_: pytest.fail("the cold start is there")
    )
    merged = load(str(tmp_path / "merged"))[0].state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in policy.named_tensors())
    base = load(str(next((run.parents[1] / "cold_starts").glob("*-*/config.json")).parent))[
        0
    ].state_dict()
    assert any(not torch.equal(base[name], tensor) for name, tensor in merged.items())
