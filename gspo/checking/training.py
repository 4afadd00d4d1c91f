"""Whether the parts of a training step agree with each other on this machine, and whether a run
learns and resumes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.objectives import GSPO
from gspo.checking.bench import DENSE, SPARSE, Bench, Digits, backward, packed, sampled
from gspo.checking.machine import short
from gspo.checking.report import FAIL, OK, SKIP, Finding, at_least, at_most
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.off_policy import make_source
from gspo.rollout.sources.problem_sampler import Uniform
from gspo.train import diagnostics
from gspo.train.accumulator import MetricAccumulator
from gspo.train.settings import Algorithm, OptimSettings, PolicySettings, TrainerSettings
from gspo.train.trainer import Trainer

STEPS = 100
AT_LEAST = 30  # steps that are enough to tell whether the reward rises, if the time is short
MOST_SECONDS = 25.0  # of learning, once so many steps were made
RESUME_SECONDS = 120  # after so many seconds a run of six steps is taken for one that hangs


def micro_batch_cuts(bench: Bench) -> Iterator[Finding]:
    """Compare the gradients of one batch that is cut into micro-batches of 2 and of 16."""
    for size in (DENSE, SPARSE):
        policy = bench.policy(size)
        batch = packed(policy, sampled(policy, 8, 12))
        whole, cut = backward(policy, batch, 16), backward(policy, batch, 2)
        off = difference(cut, whole)
        yield at_most(f"gradients of other micro-batches, {size.name}", off, 1e-4)


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference of tensors, each as a share of the largest number of the wanted
    one.
    """
    scales = [b.abs().max().clamp(min=1e-6) for b in wanted]
    offs = [(a - b).abs().max() / scale for a, b, scale in zip(found, wanted, scales, strict=True)]
    return float(torch.stack(offs).max())


@torch.no_grad()
def engine_against_trainer(bench: Bench) -> Iterator[Finding]:
    """Compare the engine's log-probs and experts with the trainer's, on responses that the engine
    sampled.
    """
    kinds = [(torch.float32, 1e-4, 0.999)]
    if bench.bfloat16:
        kinds.append((torch.bfloat16, 0.1, 0.8))
    for dtype, bound, least in kinds:
        for size in (DENSE, SPARSE):
            policy = bench.policy(size, precision=dtype, dtype=dtype)
            batch = packed(policy, sampled(policy, 8, 24, record_experts=bool(size.experts)))
            scored = policy.score(batch, 16)
            batch = batch.with_old_results(scored.logp_BT, scored.experts_BSLK)
            accumulator = MetricAccumulator()
            diagnostics.mismatch(batch, accumulator)
            if size.experts:
                diagnostics.engine_routes(
                    batch.experts_BSLK, batch.engine_experts_BSLK, batch, accumulator
                )
            metrics = accumulator.result()
            name = f"{size.name}, {short(dtype)}"
            off = metrics["mismatch/logp_abs"]
            yield at_most(
                f"engine against trainer, {name}", off, bound, "nats", detail=metrics["mismatch/k3"]
            )
            if size.experts:
                yield at_least(
                    f"engine's experts, {name}", metrics["routing/engine_agreement"], least
                )


@torch.no_grad()
def routing_replay(bench: Bench) -> Iterator[Finding]:
    """Check that replaying the trainer's own experts (R2) and the engine's (R3) leaves the ratio at
    1.
    """
    policy = bench.policy(SPARSE)
    batch = packed(policy, sampled(policy, 8, 24, record_experts=True))
    scored = policy.score(batch, 16)
    for name, record in (("R2", scored.experts_BSLK), ("R3", batch.engine_experts_BSLK)):
        replayed = policy.score(replace(batch, replay_BSLK=record), 16)
        ratio = (replayed.logp_BT - scored.logp_BT).exp()
        yield at_most(
            f"distance of the ratio from 1 under {name}", float((ratio - 1).abs().max()), 1e-4
        )


def learning(bench: Bench) -> Iterator[Finding]:
    """Train a random model for 100 steps of GSPO on a task that it can learn, or for as many as
    there is time for.
    """
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
    for step in range(1, STEPS + 1):
        rewards.append(trainer.train_step(step, source.next(step))["reward/mean"])
        if step >= AT_LEAST and time.monotonic() - started > MOST_SECONDS:
            break
    source.close()
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    finding = at_least("reward gained by GSPO", last - first, 0.2, detail=rewards)
    finding.number = f"{first:.2f} to {last:.2f} in {len(rewards)} steps"
    finding.bound = "gain >= 0.2"
    yield finding


def resume(bench: Bench) -> Iterator[Finding]:
    """Kill a run of `gspo train`, start it again, and compare it with one that was not killed.

    On a CPU they are equal to the bit. On a GPU the runs have policy.deterministic."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        whole = start(bench, runs, "whole")
        killed = start(bench, runs, "killed")
        ended = wait_for(lambda: killed.poll() is not None or rows_of(runs / "killed") >= 3)
        if killed.poll() is not None or not ended:
            end(whole)
            end(killed)
            yield Finding(
                FAIL, "killed and resumed", "the run did not come to step 3", detail=output(killed)
            )
            return
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        whole_code = finished(whole)
        again = start(bench, runs, "killed")
        again_code = finished(again)
        if whole_code or again_code:
            failed = whole if whole_code else again
            yield Finding(
                FAIL, "killed and resumed", "a run of six steps failed", detail=output(failed)
            )
            return
        same = weights_of(runs / "whole") == weights_of(runs / "killed")
        yield Finding(
            OK if same else FAIL,
            "killed and resumed",
            f"weights {'equal' if same else 'differ'}",
            "equal to the bit",
        )


def start(bench: Bench, runs: Path, study: str) -> subprocess.Popen:
    """Start a run of six steps that saves every second one. An entropy bonus gives it gradients
    without a reward.
    """
    words = [
        "experiment=micro_moe", "cold_start.steps=0", "steps=6", "checkpoint.every=2", "trainer.entropy_coef=0.01",
        "rollout.prompts_per_step=4", "rollout.max_new_tokens=12", "evaluation.every=0", "tracking.wandb=disabled",
        f"policy.device={bench.device}", f"policy.deterministic={str(bench.on_gpu).lower()}", f"runs={runs}",
        f"study={study}", "threads=1",
    ]  # fmt: skip
    command = [sys.executable, "-P", "-m", "gspo.cli.main", "train", *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        cwd=runs,
    )


def rows_of(study: Path) -> int:
    """Return how many steps of the run of a study are in its metrics."""
    files = list(study.glob("*/metrics.jsonl"))
    return max((len(file.read_text(encoding="utf-8").splitlines()) for file in files), default=0)


def wait_for(condition) -> bool:
    """Wait until a condition holds, at most RESUME_SECONDS. Returns whether it does."""
    end_at = time.monotonic() + RESUME_SECONDS
    while time.monotonic() < end_at:
        if condition():
            return True
        time.sleep(0.05)
    return False


def finished(run: subprocess.Popen) -> int:
    """Wait for a run's end and return its exit code; one that hangs is killed."""
    try:
        run.detail = run.communicate(timeout=RESUME_SECONDS)[0]
    except subprocess.TimeoutExpired:
        end(run)
    return run.returncode


def end(run: subprocess.Popen) -> None:
    """Kill a run that was started here."""
    run.kill()
    run.detail = run.communicate()[0]


def output(run: subprocess.Popen) -> str:
    """Return the last lines that a run printed."""
    return getattr(run, "detail", "")[-4000:]


def weights_of(study: Path) -> dict[str, str]:
    """Return the checksums of the last checkpoint's weights and optimizer, by file."""
    (run,) = [path.parent for path in study.glob("*/metrics.jsonl")]
    checkpoint = run / "checkpoints" / "step_000006"
    sums = json.loads((checkpoint / "checksums.json").read_text(encoding="utf-8"))
    return {name: value for name, value in sums.items() if name.startswith(("model", "optimizer"))}


def vllm_engine(bench: Bench) -> Iterator[Finding]:
    """Compare vLLM, where it is installed, with the trainer: log-probs, experts' weights after an
    update, sleep.
    """
    from gspo.rollout.engines.vllm import VLLMEngine, check_installed, installed_version

    if not installed_version():
        yield Finding(SKIP, "vLLM", "not installed")
        return
    try:
        check_installed()
    except ValueError as error:
        yield Finding(SKIP, "vLLM", installed_version(), detail=str(error))
        return
    from gspo.checking.bench import problems
    from gspo.rollout.engines.requests import Sampling, SamplingRequest
    from gspo.rollout.settings import VLLMRollout

    size = replace(DENSE, heads=2, key_value_heads=1, head_dim=32)
    policy = bench.policy(size)
    settings = VLLMRollout(batch_rows=64, max_new_tokens=24, sleep=bench.on_gpu)
    engine = VLLMEngine(policy, settings)
    try:
        for name in ("vLLM against trainer", "vLLM after new weights"):
            groups = engine.generate(
                SamplingRequest(problems(), 8, Sampling(1.0, 24), (1, "check"))
            )
            batch = packed(policy, [response for group in groups for response in group])
            accumulator = MetricAccumulator()
            with torch.no_grad():
                batch = batch.with_old_results(policy.score(batch, 16).logp_BT, None)
            diagnostics.mismatch(batch, accumulator)
            yield at_most(name, accumulator.result()["mismatch/logp_abs"], 1e-3, "nats")
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.mul_(1.05)
            engine.rest()
            engine.load_weights(policy.named_tensors())
    finally:
        engine.close()
