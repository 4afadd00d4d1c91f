"""Checks whether the parts of a training step agree, and whether a run learns and resumes."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.objectives import GSPO
from gspo.checking.bench import (
    DENSE,
    SPARSE,
    Bench,
    Digits,
    backward,
    packed,
    relative_error,
    sampled,
    sampled_by,
)
from gspo.checking.machine import short
from gspo.checking.report import FAIL, OK, SKIP, Finding, Findings, at_least, at_most
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.off_policy import make_source
from gspo.rollout.sources.problem_sampler import Uniform
from gspo.train import diagnostics, routing
from gspo.train.accumulator import MetricAccumulator
from gspo.train.settings import Algorithm, OptimSettings, PolicySettings, TrainerSettings
from gspo.train.trainer import Trainer

MAX_STEPS = 100
MIN_STEPS = 30  # enough to see whether the reward rises
MAX_LEARNING_SECONDS = 25.0  # learning ends after this time, but not before MIN_STEPS
RESUME_SECONDS = 120  # a run of six steps that takes longer counts as hanging
MAX_OUTPUT_CHARS = 4000  # of the end of a run that is shown


def micro_batch_cuts(bench: Bench) -> Findings:
    """Compare the gradients of a batch that is cut into micro-batches of 2 and of 16."""
    for size in (DENSE, SPARSE):
        policy = bench.policy(size)
        batch = packed(policy, sampled(policy, 8, 12))
        gradients_of_16 = backward(policy, batch, 16)
        gradients_of_2 = backward(policy, batch, 2)
        error = relative_error(gradients_of_2, gradients_of_16)
        yield at_most(f"gradients of other micro-batches, {size.name}", error, 1e-4)


@torch.no_grad()
def engine_against_trainer(bench: Bench) -> Findings:
    """Compare the engine's log-probs and experts with the trainer's, on sampled responses."""
    # the largest error of log-probs, and the smallest share of equal experts
    bounds = {torch.float32: (1e-4, 0.999)}
    if bench.bfloat16:
        bounds[torch.bfloat16] = (0.1, 0.8)
    for dtype, (max_error, min_agreement) in bounds.items():
        for size in (DENSE, SPARSE):
            policy = bench.policy(size, precision=dtype, dtype=dtype)
            batch = packed(policy, sampled(policy, 8, 24, record_experts=bool(size.experts)))
            scored = policy.score(batch, 16)
            batch = batch.with_old_results(scored.logp_BT, scored.experts_BSLK)
            accumulator = MetricAccumulator()
            diagnostics.measure_mismatch(batch, accumulator)
            experts = batch.experts_BSLK
            engine_experts = batch.engine_experts_BSLK
            if experts is not None and engine_experts is not None:  # a sparse model has both
                routing.engine_agreement(experts, engine_experts, batch, accumulator)
            metrics = accumulator.result()
            name = f"{size.name}, {short(dtype)}"
            yield at_most(
                f"engine against trainer, {name}",
                metrics["mismatch/logp_abs"],
                max_error,
                "nats",
                detail=metrics["mismatch/k3"],
            )
            if size.experts:
                agreement = metrics["routing/engine_agreement"]
                yield at_least(f"engine's experts, {name}", agreement, min_agreement)


@torch.no_grad()
def routing_replay(bench: Bench) -> Findings:
    """Check that the ratio stays 1 if the trainer's experts (R2) or the engine's (R3) replay."""
    policy = bench.policy(SPARSE)
    batch = packed(policy, sampled(policy, 8, 24, record_experts=True))
    scored = policy.score(batch, 16)
    for name, experts in (("R2", scored.experts_BSLK), ("R3", batch.engine_experts_BSLK)):
        replayed = policy.score(replace(batch, replay_BSLK=experts), 16)
        ratio = (replayed.logp_BT - scored.logp_BT).exp()
        distance = float((ratio - 1).abs().max())
        yield at_most(f"distance of the ratio from 1 under {name}", distance, 1e-4)


def learning(bench: Bench) -> Findings:
    """Train a random model by GSPO on a task that it can learn, for up to 100 steps."""
    policy = bench.policy(SPARSE, precision=bench.precision)
    rollout = RolloutSettings(prompts_per_step=8, group_size=8, max_new_tokens=8)
    source = make_source(LocalEngine(policy, dtype=torch.float32), Digits(), rollout, Uniform(), 1)
    trainer = Trainer(
        policy,
        source,
        Algorithm(GSPO(clip_low=3e-2, clip_high=4e-2)),
        optim=OptimSettings(lr=1e-3, warmup_updates=1),
        settings=TrainerSettings(
            minibatches=2, micro_batch_size=32, aggregation=Aggregation("seq-mean-token-mean")
        ),
        policy_settings=PolicySettings(precision=short(bench.precision)),
        seed=1,
    )
    rewards: list[float] = []
    started = time.monotonic()
    for step in range(1, MAX_STEPS + 1):
        rollout_of_step = source.next(step)
        metrics = trainer.train_step(step, rollout_of_step)
        rewards.append(metrics["reward/mean"])
        if step >= MIN_STEPS and time.monotonic() - started > MAX_LEARNING_SECONDS:
            break
    source.close()
    first = sum(rewards[:10]) / 10
    last = sum(rewards[-10:]) / 10
    finding = at_least("reward gained by GSPO", last - first, 0.2, detail=rewards)
    finding.number = f"{first:.2f} to {last:.2f} in {len(rewards)} steps"
    finding.bound = "gain >= 0.2"
    yield finding


def resume(bench: Bench) -> Findings:
    """Kill a run of `gspo train`, start it again, and compare it with an uninterrupted run.

    The weights must be equal to the bit. On a GPU the runs have policy.deterministic."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        whole = start(bench, runs, "whole")
        killed = start(bench, runs, "killed")
        in_time = wait_for(lambda: killed.poll() is not None or rows_of(runs / "killed") >= 3)
        if killed.poll() is not None or not in_time:
            end(whole)
            output = end(killed)
            yield Finding(
                FAIL, "killed and resumed", "the run did not come to step 3", detail=output
            )
            return
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        whole_code, whole_output = finished(whole)
        resumed_code, resumed_output = finished(start(bench, runs, "killed"))
        if whole_code or resumed_code:
            output = whole_output if whole_code else resumed_output
            yield Finding(FAIL, "killed and resumed", "a run of six steps failed", detail=output)
            return
        if weights_of(runs / "whole") == weights_of(runs / "killed"):
            yield Finding(OK, "killed and resumed", "weights equal", "equal to the bit")
        else:
            yield Finding(FAIL, "killed and resumed", "weights differ", "equal to the bit")


def start(bench: Bench, runs: Path, study: str) -> subprocess.Popen:
    """Start a run of six steps, with a checkpoint every two steps.

    An entropy bonus gives it gradients without a reward."""
    words = [
        "experiment=micro_moe",
        "cold_start.steps=0",
        "steps=6",
        "checkpoint.every=2",
        "trainer.entropy_coef=0.01",
        "rollout.prompts_per_step=4",
        "rollout.max_new_tokens=12",
        "evaluation.every=0",
        "tracking.wandb=disabled",
        f"policy.device={bench.device}",
        f"policy.deterministic={str(bench.on_gpu).lower()}",
        f"runs={runs}",
        f"study={study}",
        "threads=1",
    ]
    command = [sys.executable, "-P", "-m", "gspo.cli.main", "train", *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        cwd=runs,
    )


def rows_of(study: Path) -> int:
    """Return the number of steps in the metrics of a study's run."""
    counts = [0]
    for file in study.glob("*/metrics.jsonl"):
        text = file.read_text(encoding="utf-8")
        counts.append(len(text.splitlines()))
    return max(counts)


def wait_for(condition) -> bool:
    """Wait until a condition holds, at most RESUME_SECONDS, and return whether it holds."""
    end_at = time.monotonic() + RESUME_SECONDS
    while time.monotonic() < end_at:
        if condition():
            return True
        time.sleep(0.05)
    return False


def finished(run: subprocess.Popen) -> tuple[int, str]:
    """Wait for a run's end, and return its exit code and the end of its output.

    A run that hangs is killed."""
    try:
        output = run.communicate(timeout=RESUME_SECONDS)[0][-MAX_OUTPUT_CHARS:]
    except subprocess.TimeoutExpired:
        output = end(run)
    return run.returncode, output


def end(run: subprocess.Popen) -> str:
    """Kill a run, and return the end of its output."""
    run.kill()
    return run.communicate()[0][-MAX_OUTPUT_CHARS:]


def weights_of(study: Path) -> dict[str, str]:
    """Return the checksums of the last checkpoint's weights and optimizer, by file."""
    (run,) = [path.parent for path in study.glob("*/metrics.jsonl")]
    file = run / "checkpoints" / "step_000006" / "checksums.json"
    checksums = json.loads(file.read_text(encoding="utf-8"))
    return {
        name: checksum
        for name, checksum in checksums.items()
        if name.startswith(("model", "optimizer"))
    }


def vllm_engine(bench: Bench) -> Findings:
    """Compare vLLM, if it is installed, with the trainer: log-probs, new weights, and sleep."""
    from gspo.rollout.engines.vllm import VLLMEngine, check_installed, installed_version

    if not installed_version():
        yield Finding(SKIP, "vLLM", "not installed")
        return
    try:
        check_installed()
    except ValueError as error:
        yield Finding(SKIP, "vLLM", installed_version(), detail=str(error))
        return
    from gspo.rollout.vllm_settings import VLLMRollout

    size = replace(DENSE, heads=2, key_value_heads=1, head_dim=32)
    policy = bench.policy(size)
    settings = VLLMRollout(batch_rows=64, max_new_tokens=24, sleep=bench.on_gpu)
    engine = VLLMEngine(policy, settings)
    try:
        for name in ("vLLM against trainer", "vLLM after new weights"):
            batch = packed(policy, sampled_by(engine, 8, 24))
            accumulator = MetricAccumulator()
            with torch.no_grad():
                scored = policy.score(batch, 16)
            batch = batch.with_old_results(scored.logp_BT, None)
            diagnostics.measure_mismatch(batch, accumulator)
            metrics = accumulator.result()
            yield at_most(name, metrics["mismatch/logp_abs"], 1e-3, "nats")
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.mul_(1.05)
            engine.rest()
            engine.load_weights(policy.named_tensors())
    finally:
        engine.close()
