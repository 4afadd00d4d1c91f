"""SIGKILL in every phase of a run, again and again; its end is that of a run that was left alone,
to the last bit.

That is promised for one machine, one build of the program and its libraries, and one number of
threads.
"""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import forked
from commands import ROOT, comparable, environment, only_run, train, wandb_rows
from gspo.tracking.tracker import read_rows
from killer import MOMENTS as ALL

# test_faults.py has the moment of a rollback, test_processes.py that of a checkpoint which ranks
# write together.
MOMENTS = [
    moment
    for moment in ALL
    if not moment.startswith("rollback") and moment != "checkpoint.some_files"
]
STEPS = 2 * len(MOMENTS) + 6
# a policy that earns something, so that every step has a gradient and the monitor something to
# follow
SETTINGS = [
    "study=small", "task=math", "task.max_operands=2", "task.largest=5", f"steps={STEPS}", "threads=1",
    "cold_start.steps=500", "cold_start.batch_size=64", "model.hidden=32", "model.layers=2", "model.heads=2",
    "model.experts=4", "model.expert_width=16", "rollout.prompts_per_step=8", "rollout.group_size=4",
    "rollout.max_new_tokens=16", "trainer.minibatches=2", "evaluation.problems=4", "evaluation.every=4",
    "checkpoint.every=2", "optim.lr=1e-3", "tracking.rollouts_every=1", "monitor.warm_up=0",
    "monitor.thresholds.grad_spike=0.1",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_killed_in_every_phase_ends_as_one_that_was_left_alone(tmp_path):
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    done = train(tmp_path / "straight", *SETTINGS)
    assert done.returncode == 0, done.stderr[-3000:]
    folder, killed = tmp_path / "killed", []
    for number, moment in enumerate(MOMENTS):
        step = 5 + 2 * number  # the first checkpoints have been written by then
        resume = [f"resume={only_run(folder).relative_to(folder)}"] if number else SETTINGS
        killer = [sys.executable, str(ROOT / "tests/support/killer.py"), moment, str(step), *resume]
        process = forked.run(killer, cwd=folder, env=environment())
        assert process.returncode == -9, f"{moment}: {process.returncode} {process.stderr[-2000:]}"
        where, _, at = (folder / "killed_in").read_text().rpartition(" step ")
        assert where == moment and step <= int(at) < STEPS
        (folder / "killed_in").unlink()
        killed.append(moment)
    done = train(folder, f"resume={only_run(folder).relative_to(folder)}")
    assert done.returncode == 0, done.stderr[-3000:]
    phases = [moment.partition(".")[0] for moment in killed]
    assert len(killed) >= 20 and all(
        phases.count(p) >= 3 for p in ("rollout", "update", "checkpoint", "metrics")
    )
    same(only_run(folder), only_run(tmp_path / "straight"))


def same(killed: Path, straight: Path) -> None:
    assert [row["step"] for row in read_rows(killed / "metrics.jsonl")] == list(range(STEPS + 1)), (
        "none twice, none lost"
    )
    assert comparable(killed) == comparable(straight)
    last = [run / "checkpoints" / f"step_{STEPS:06d}" for run in (killed, straight)]
    weights = [load_file(folder / "model.safetensors") for folder in last]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    moments = [torch.load(folder / "optimizer.pt", weights_only=True)["state"] for folder in last]
    for key, state in moments[1].items():
        assert all(torch.equal(moments[0][key][name], value) for name, value in state.items())
    for path in sorted((straight / "rollouts").iterdir()):
        assert (killed / "rollouts" / path.name).read_text() == path.read_text()
    assert {p.name for p in (killed / "checkpoints").iterdir()} == {
        p.name for p in (straight / "checkpoints").iterdir()
    }
    events = (straight / "monitor.jsonl").read_text()
    assert (killed / "monitor.jsonl").read_text() == events and events.count("\n") > STEPS / 4
    rows = comparable(straight)
    assert len({row["policy/entropy"] for row in rows[1:]}) == STEPS, (
        "the test means nothing if the weights stay put"
    )
    assert sum(row["optim/grad_norm"] > 0 for row in rows[1:]) > STEPS / 2
    assert max(row["reward/mean"] for row in rows[1:]) > 0.2, "the policy earns something"
    seen = wandb_rows(killed)
    assert [row["step"] for row in seen] == list(range(STEPS + 1)), "one W&B run, whole"
    assert len({p.name.rsplit("-", 1)[1] for p in killed.glob("wandb/offline-run-*")}) == 1, (
        "of one id"
    )
