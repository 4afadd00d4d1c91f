"""Whole runs: directory, tracking, resume after SIGKILL and SIGTERM, refusal. Real processes, the
real W&B client.
"""

import gzip
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import forked
from builders import small_policy
from commands import (
    SMALL,
    command,
    comparable,
    environment,
    evaluate,
    only_run,
    train,
    wait_for_step,
    wandb_rows,
)
from daily import daily_but
from families import other_family
from gspo.model.loading import save
from gspo.model.settings import TinyDense
from gspo.run.directory import exclusive
from gspo.tracking.tracker import read_rows
from gspo.train.checkpoint_files import seal


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run of twelve steps without interruption."""
    folder = tmp_path_factory.mktemp("straight")
    done = train(folder, *SMALL)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "finished at step 12/12" in done.stdout and "wandb sync runs/small/" in done.stdout
    assert "UserWarning" not in done.stderr
    return only_run(folder)


def test_a_run_directory_holds_everything(straight):
    rows = read_rows(straight / "metrics.jsonl")
    assert straight.name.startswith("gspo-seed1-")
    assert (
        yaml.safe_load((straight / "settings.yaml").read_text())["options"]["objective"] == "gspo"
    )
    assert "objective gspo" in (straight / "report.html").read_text()
    assert [row["step"] for row in rows] == list(range(13))
    assert "eval/math_easy/avg@2" in rows[0] and "reward/mean" not in rows[0]
    assert all("reward/mean" in row and "routing/consistency" in row for row in rows[1:])
    assert ["eval/elo" in row for row in rows] == [step % 2 == 0 for step in range(13)]
    first = [
        json.loads(line)
        for line in (straight / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert len(first) == 16 and set(first[0]) >= {
        "prompt",
        "response",
        "reward",
        "verdict",
        "length",
        "finish_reason",
    }
    mean = sum(row["reward"] for row in first) / 16
    assert mean == pytest.approx(rows[1]["reward/mean"])
    assert (straight / "checkpoints" / "latest").read_text() == "step_000012"
    assert {p.name for p in (straight / "checkpoints").glob("step_*")} == {
        "step_000010",
        "step_000012",
    }
    assert {"commit", "changed_files", "versions", "command"} <= set(
        json.loads((straight / "code.json").read_text())
    )
    assert "step 12/12" in (straight / "train.log").read_text()


@pytest.mark.slow
def test_steps_are_profiled_into_a_trace_and_a_table(straight, tmp_path):
    shutil.copytree(straight.parents[1] / "cold_starts", tmp_path / "runs" / "cold_starts")
    done = train(tmp_path, *SMALL, "steps=3", "profile.steps=[2,9]")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "profile.steps=[2, 9]: step 9 lies beyond steps=3" in done.stderr
    run = only_run(tmp_path)
    assert sorted(path.name for path in (run / "profile").iterdir()) == [
        "step_000002.json",
        "step_000002.trace.json.gz",
    ]
    trace = json.loads(
        gzip.decompress((run / "profile" / "step_000002.trace.json.gz").read_bytes())
    )
    names = Counter(event.get("name") for event in trace["traceEvents"])
    assert names["Optimizer.step#AdamW.step"] == 2, "two mini-batches of one step"
    table = json.loads((run / "profile" / "step_000002.json").read_text())
    shares = [each["share"] for each in table]
    assert len(table) == 10 and shares == sorted(shares, reverse=True) and 0.2 < sum(shares) <= 1
    page = (run / "report.html").read_text()
    assert "The most expensive operations of step_000002" in page and table[0]["operation"] in page
    rows = read_rows(run / "metrics.jsonl")[:3]
    mine, theirs = (
        [{k: v for k, v in row.items() if k.startswith("optim/")} for row in r]
        for r in (rows, read_rows(straight / "metrics.jsonl")[:3])
    )
    assert mine == theirs, "it is the same run"


@pytest.mark.slow
def test_a_run_without_evaluations_trains_as_one_with_them(straight, tmp_path):
    done = train(tmp_path, *SMALL, "evaluation.every=0")
    assert done.returncode == 0, done.stderr[-3000:]
    mine, theirs = (read_rows(run / "metrics.jsonl") for run in (only_run(tmp_path), straight))
    rewards = [[row.get("reward/mean") for row in rows if row["step"]] for rows in (mine, theirs)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 12
    assert not any(name.startswith("eval/") for row in mine for name in row)


def test_wandb_has_the_same_numbers(straight):
    rows, seen = read_rows(straight / "metrics.jsonl"), wandb_rows(straight)
    assert [row["step"] for row in seen] == list(range(13))
    for row, other in zip(rows, seen, strict=True):
        for key, value in row.items():
            assert other[key] == pytest.approx(value), key
    assert "rollouts" in " ".join(seen[1])


@pytest.mark.slow
def test_an_existing_directory_is_refused_and_left_alone(straight):
    before = {p: p.stat().st_mtime_ns for p in straight.rglob("*") if p.is_file()}
    done = train(straight.parents[2], *SMALL)
    assert done.returncode == 2 and "exists already" in done.stderr and done.stderr.count("\n") == 1
    assert before == {p: p.stat().st_mtime_ns for p in straight.rglob("*") if p.is_file()}
    again = train(straight.parents[2], *SMALL, "on_existing=resume")
    assert again.returncode == 0 and "has reached step 12 already" in again.stdout


def interrupted(folder: Path, number: int, *overrides: str, reader_ends: bool = False) -> int:
    """The return code of a run of 200 steps that got a signal once step 3 was in its metrics.

    With `reader_ends` the reader of its output has ended before, as `tee` does at Ctrl-C."""
    words = command(*SMALL, "steps=200", *overrides)
    if reader_ends:
        with subprocess.Popen(
            words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                wait_for_step(folder, 3, process)
                process.stdout.close()
                process.stderr.close()
                process.send_signal(number)
                return process.wait(timeout=120)
            finally:
                process.kill()
    process = forked.start(words, cwd=folder, env=environment())
    wait_for_step(folder, 3, process)
    process.send_signal(number)
    return process.wait(timeout=120)


def same_weights(a: Path, b: Path) -> bool:
    first, second = (
        load_file(run / "checkpoints" / "step_000012" / "model.safetensors") for run in (a, b)
    )
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.slow
def test_a_run_killed_by_sigkill_ends_as_if_it_had_not_been(straight, tmp_path):
    assert interrupted(tmp_path, signal.SIGKILL) == -signal.SIGKILL
    run = only_run(tmp_path)
    done = train(tmp_path, f"resume={run}", "steps=12")
    assert done.returncode == 0, done.stderr[-2000:]
    assert comparable(run) == comparable(straight)
    assert same_weights(run, straight)
    assert [row["step"] for row in wandb_rows(run)] == list(range(13)), (
        "the newest W&B segment holds the whole history"
    )
    for step in (1, 12):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (run / name).read_text() == (straight / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reader_ends"),
    [
        (signal.SIGTERM, False),
        (signal.SIGINT, True),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.daily),
        pytest.param(signal.SIGHUP, False, marks=pytest.mark.daily),
    ],
)
def test_a_polite_stop_finishes_the_step_writes_a_checkpoint_and_goes_on_later(
    straight, tmp_path, number, reader_ends
):
    assert interrupted(tmp_path, number, reader_ends=reader_ends) == 128 + number
    run = only_run(tmp_path)
    last = read_rows(run / "metrics.jsonl")[-1]["step"]
    assert (run / "checkpoints" / "latest").read_text() == f"step_{last:06d}", (
        "nothing that was computed is lost"
    )
    assert [row["step"] for row in wandb_rows(run)] == list(range(last + 1))
    assert last < 12, "the signal came too late to show anything"
    if reader_ends:
        fewer = train(tmp_path, f"resume={run}", "steps=2")
        assert fewer.returncode == 0 and "its own number of steps is 200" in fewer.stdout
        assert json.loads((run / "status.json").read_text())["how"] == "stopped"
    # the same command does it too
    again = SMALL if number == signal.SIGINT else [f"resume={run}", "steps=12"]
    assert train(tmp_path, *again).returncode == 0
    assert comparable(run) == comparable(straight)
    assert same_weights(run, straight)


@pytest.mark.slow
def test_resume_moves_later_rows_aside(straight, tmp_path):
    run = tmp_path / "copy"
    shutil.copytree(straight, run)
    (run / "checkpoints" / "latest").write_text("step_000010")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "reward/me')  # a line that a kill cut short
    done = train(tmp_path, f"resume={run}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "continued once, from the checkpoint of step 10." in (run / "report.html").read_text()
    assert comparable(run) == comparable(straight)
    assert [row["step"] for row in read_rows(run / "superseded" / "1" / "metrics.jsonl")] == [
        11,
        12,
    ]
    assert {p.name for p in (run / "superseded" / "1").glob("*step*")} == {
        "rollouts_step_000011.jsonl",
        "rollouts_step_000012.jsonl",
        "checkpoints_step_000012",
    }


@pytest.mark.slow
def test_a_run_that_was_evaluated_goes_on(tmp_path):
    """By resume=, and by its sweep typed again; an evaluation of a checkpoint that is gone back
    behind moves aside.
    """
    assert train(tmp_path, *SMALL, "steps=4").returncode == 0
    run = only_run(tmp_path)
    for step, again in ((4, [f"resume={run}", "steps=6"]), (6, ["-m", *SMALL, "steps=8"])):
        assert evaluate(run).returncode == 0
        done = train(tmp_path, *again)
        assert done.returncode == 0, done.stderr[-2000:]
        assert len(list((run / "evaluations").glob(f"step_{step:06d}-*"))) == 1
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(9))
    assert not (run / "superseded").exists()
    (run / "checkpoints" / "latest").write_text("step_000006")
    assert evaluate(run, "step=8").returncode == 0
    assert train(tmp_path, f"resume={run}").returncode == 0
    moved = {p.name[:23] for p in (run / "superseded" / "1").glob("evaluations_*")}
    assert moved == {"evaluations_step_000008"}


@pytest.mark.slow
def test_a_missing_or_foreign_checkpoint_is_refused(straight, tmp_path):
    run = tmp_path / "copy"
    shutil.copytree(straight, run)
    state = run / "checkpoints" / "step_000012" / "state.json"
    # as another run wrote it
    state.write_text(json.dumps(json.loads(state.read_text()) | {"settings": "0123456789"}))
    (state.parent / "checksums.json").unlink()
    seal(state.parent)
    before = (run / "metrics.jsonl").read_text()
    done = train(tmp_path, f"resume={run}", "steps=20")
    assert (
        done.returncode == 2
        and "belongs to a run with other settings (their hash is 0123456789" in done.stderr
    )
    shutil.rmtree(run / "checkpoints")
    done = train(tmp_path, f"resume={run}", "steps=20")
    assert (
        done.returncode == 2
        and f"{run} has no checkpoint, although it has rows up to step 12" in done.stderr
    )
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_a_foreign_folder_is_refused(straight, tmp_path):
    done = train(tmp_path, f"resume={straight / 'rollouts'}")
    assert done.returncode == 2 and "is not a run directory" in done.stderr
    done = train(tmp_path, f"resume={straight}", "seed=3")
    assert done.returncode == 2 and "only steps, checkpoint, tracking" in done.stderr


@pytest.mark.slow
def test_evaluate_and_sample_read_a_run(straight):
    def script(name, *overrides):
        command = [sys.executable, "-P", "-m", "gspo", name, f"run={straight}", *overrides]
        return forked.run(command, cwd=straight)

    done = script("evaluate", "problems=8", "k=2")
    assert done.returncode == 0, done.stderr
    (result,) = (straight / "evaluations").glob("step_000012-*/result.json")
    average = json.loads(result.read_text())["sets"]["math_easy"]["avg"]["value"]
    assert f"{average:.3f}" in done.stdout and "Elo" in done.stdout
    done = script("sample", "set=math_hard", "problems=2", "samples=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("=?") >= 2 and done.stdout.count("mean log-prob") == 6
    assert script("sample", "set=nothing").returncode == 2
    bad = script("evaluate", "step=3")
    assert bad.returncode == 2 and "step_000010, step_000012" in bad.stderr


@pytest.mark.slow
def test_two_processes_cannot_write_one_run(straight):
    with exclusive(straight):
        done = train(straight.parents[2], f"resume={straight}", "steps=20")
    assert done.returncode == 2 and "is being written by another process" in done.stderr


@pytest.mark.slow
def test_a_sweep_finishes_its_good_jobs_and_names_the_bad_one(tmp_path):
    """A grid with an impossible combination; the same grid again runs nothing twice
    (on_existing=auto).
    """
    grid = ["-m", *SMALL, "steps=2", "rollout.group_size=1,2"]
    for _ in range(2):
        done = train(tmp_path, *[o for o in grid if o != "rollout.group_size=4"])
        assert (
            done.returncode == 1 and "rollout.group_size=1: leaves" in done.stderr.splitlines()[-1]
        )
    assert [row["step"] for row in read_rows(only_run(tmp_path) / "metrics.jsonl")] == [0, 1, 2]
    assert "has reached step 2 already" in done.stdout


@pytest.mark.slow
def test_a_failure_inside_training_keeps_its_traceback(tmp_path):
    """A checkpoint folder that cannot be made: exit 1, said in one line, rows kept, traceback in
    train.log.
    """
    words = command(*SMALL, "steps=200", "checkpoint.every=50")
    process = forked.start(words, cwd=tmp_path, env=environment())
    wait_for_step(tmp_path, 2, process)
    (only_run(tmp_path) / "checkpoints").write_text("in the way")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "what was written is kept" in errors
    run = only_run(tmp_path)
    assert (
        len(read_rows(run / "metrics.jsonl")) > 50
        and "Traceback" in (run / "train.log").read_text()
    )


@pytest.mark.slow
def test_any_model_folder_can_be_trained_and_replay_needs_a_router(tmp_path):
    """model=hf on another MoE family and on a dense model, as folders that `transformers` wrote."""
    dense = small_policy(TinyDense(hidden=16, layers=1, heads=2))
    for name, policy in (("olmoe", other_family("olmoe")), ("dense", dense)):
        save(policy.model, policy.tokenizer, tmp_path / name)
    small = [o for o in SMALL if not o.startswith("model.")] + [
        "steps=2",
        "model=hf",
        "cold_start.steps=0",
    ]
    done = train(tmp_path, *small, f"model.path={tmp_path / 'olmoe'}", "policy.routing_replay=r2")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_rows(only_run(tmp_path) / "metrics.jsonl")
    assert "routing/consistency_layer_1" in rows[2] and rows[2]["mismatch/logp_abs_max"] < 1e-4
    refused = train(
        tmp_path, *small, f"model.path={tmp_path / 'dense'}", "policy.routing_replay=r2"
    )
    assert refused.returncode == 2 and "no router to replay" in refused.stderr
    mixed = ["policy.precision=bfloat16", "policy.checkpointing=true"]
    done = train(tmp_path, *small, f"model.path={tmp_path / 'dense'}", *mixed)
    assert done.returncode == 0 and "known architecture" not in done.stderr, done.stderr[-2000:]


@pytest.mark.slow
def test_an_unknown_architecture_is_trained_by_its_own_forward_which_is_said(tmp_path):
    tokenizer = small_policy().tokenizer
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=16,
        n_layer=1,
        n_head=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    save(GPT2LMHeadModel(config), tokenizer, tmp_path / "gpt2")
    # such a file can be read and not written; at the first checkpoint the run would end
    generation = {
        "do_sample": False,
        "temperature": 0.6,
        "top_p": 0.95,
        "eos_token_id": tokenizer.eos_token_id,
    }
    (tmp_path / "gpt2" / "generation_config.json").write_text(json.dumps(generation))
    small = [o for o in SMALL if not o.startswith("model.")] + [
        "steps=2",
        "model=hf",
        "cold_start.steps=0",
    ]
    small.append(f"model.path={tmp_path / 'gpt2'}")
    refused = train(tmp_path, *small, "policy.checkpointing=true")
    assert refused.returncode == 2 and "policy.checkpointing=true" in refused.stderr
    done = train(tmp_path, *small)
    assert (
        done.returncode == 0
        and "GPT2LMHeadModel" in done.stderr
        and "known architecture" in done.stderr
    )
    (saved,) = tmp_path.glob("runs/*/*/checkpoints/step_000002/generation_config.json")
    written = json.loads(saved.read_text())
    assert written["do_sample"] and (written["temperature"], written["top_p"]) == (0.6, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("again", daily_but(["resume", "the same command"], "resume"))
def test_a_run_killed_before_its_first_checkpoint_starts_over(straight, tmp_path, again):
    assert interrupted(tmp_path, signal.SIGKILL, "checkpoint.every=1000") == -signal.SIGKILL
    run = only_run(tmp_path)
    assert not list(run.glob("checkpoints/step_*"))
    done = train(
        tmp_path,
        *([f"resume={run}", "steps=12", "checkpoint.every=2"] if again == "resume" else SMALL),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        "was interrupted before its first checkpoint: it starts from the beginning" in done.stdout
    )
    assert comparable(run) == comparable(straight)
    assert same_weights(run, straight)


@pytest.mark.slow
def test_a_run_killed_in_its_cold_start_can_be_resumed(tmp_path):
    words = command(*SMALL, "cold_start.steps=100000")
    process = forked.start(words, cwd=tmp_path, env=environment())
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/small/*/settings.yaml")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    run = only_run(tmp_path)
    written = (run / "settings.yaml").read_text()
    # as if it had been a short one
    (run / "settings.yaml").write_text(written.replace("steps: 100000", "steps: 4"))
    done = train(tmp_path, f"resume={run}", "steps=1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize(
    "program",
    [
        ["-P", "-m", "gspo", "train"],
        ["-P", "-m", "gspo", "evaluate"],
        ["-m", "gspo.cli.main", "train"],
    ],
)
def test_ctrl_c_while_the_libraries_load_is_one_line(tmp_path, program):
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *program],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stderr:
        # some library has begun to load
        if line.rstrip().endswith(("numpy", "torch._C", "yaml", "omegaconf")):
            break
    process.send_signal(signal.SIGINT)
    said = [line for line in process.stderr if not line.startswith("import time:")]
    assert (
        process.wait(60) == 130
        and "".join(said).strip() == "stopped before it had begun; nothing was written"
    )
    assert not list(tmp_path.iterdir())
