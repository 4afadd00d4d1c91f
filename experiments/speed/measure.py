"""The cost of a step of the real trainer: seconds by phase, tokens and sequences per second, share
of matmul peak.

FLOPs are useful ones: real tokens only, a prompt once per group, causal attention, a backward pass
as two forwards. The peak is that of a large matrix product, measured in the same process before and
after the steps.
"""

import resource
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median

import torch

from gspo.config.settings import Settings
from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.rollout.sources.base import Rollout
from gspo.run.build import build_trainer
from gspo.tracking.tracker import Tracker
from gspo.train.trainer import Trainer
from speed.exchanges import Exchanges

PHASES = ("rollout", "scoring", "old_logprobs", "update", "diagnostics", "tracking", "total")


def measure(settings: Settings, batches: int, ranks: Ranks | None = None) -> dict:
    """Time `batches` rollout batches after one to warm up, and return a record that can be written
    as JSON. Of several processes all measure, and seconds are means over the ranks."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    ranks = ranks or Ranks()
    trainer = build_trainer(settings, ranks=ranks)
    policy, peak = trainer.policy, matmul_peak(trainer.policy)
    if ranks.world_size == 1:
        rows = timed_batches(trainer, settings, batches)
    else:
        exchanges = Exchanges() if policy.device.type == "cpu" else None
        with exchanges.timed(trainer) if exchanges else nullcontext():
            rows = timed_batches(trainer, settings, batches, exchanges)
        rows = [means_over_ranks(own, ranks) for own in rows]
    trainer.source.close()
    peak = sum(ranks.all_gather(max(peak, matmul_peak(policy))))
    return {
        "workload": settings.study,
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "active_parameters": policy.active_parameters,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if policy.device.type == "cuda" else "cpu",
        "own_forward": policy.network is not None,
        "matmul_gflops": peak / 1e9,
        "peak_memory_mib": peak_memory(policy),
        **(
            {"ranks": ranks.world_size, "mode": settings.parallel.mode}
            if ranks.world_size > 1
            else {}
        ),
        "batches": rows[1:],
        **{key: median(r[key] for r in rows[1:]) for key in rows[0]},
    }


def timed_batches(
    trainer: Trainer, settings: Settings, batches: int, exchanges: Exchanges | None = None
) -> list[dict[str, float]]:
    """Return the rows of `batches` rollout batches and of one before them. Rank 0 also logs them,
    as in a run.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tracker = None
        if trainer.ranks.rank == 0:
            tracker = Tracker(Path(folder), settings.tracking, asdict(settings), "benchmark", [])
        for step in range(1, batches + 2):
            started = time.perf_counter()
            rollout = trainer.source.next(step)
            sampled = time.perf_counter()
            metrics = trainer.train_step(step, rollout)
            synchronize(trainer.policy)
            logging = time.perf_counter()
            if tracker:
                tracker.log(step, metrics, rollout.responses if step == 1 else None)
            now = time.perf_counter()
            rows.append(
                row(metrics, rollout, trainer, now - started, now - logging)
                | {"next_s": sampled - started}
            )
            if exchanges:
                rows[-1] |= exchanges.taken()
        if tracker:
            tracker.finish(0)
    return rows


def means_over_ranks(own: dict[str, float], ranks: Ranks) -> dict[str, float]:
    """Return a rank's row with the means of all ranks' seconds."""
    rows = ranks.all_gather(own)
    return own | {key: fmean(r[key] for r in rows) for key in own if key.endswith("_s")}


def row(
    metrics: dict[str, float], rollout: Rollout, trainer: Trainer, total: float, tracking: float
) -> dict[str, float]:
    """Return one batch's row: seconds of every phase, FLOPs of the phases that compute, tokens,
    rewards.
    """
    policy = trainer.policy
    old, diagnosing = metrics["time/old_logprobs_s"], metrics["time/diagnostics_s"]
    lengths = torch.tensor([len(r.prompt_ids) + len(r.token_ids) for r in rollout.responses])
    prompts = torch.tensor([len(group[0].prompt_ids) for group in rollout.groups])
    repeated = torch.tensor([len(r.prompt_ids) for r in rollout.responses])
    forward = (
        policy.forward_flops(lengths)
        - policy.forward_flops(repeated)
        + policy.forward_flops(prompts)
    )
    return {
        "rollout_s": metrics["time/rollout_s"],
        "scoring_s": metrics["time/score_s"],
        "old_logprobs_s": old,
        "update_s": metrics["time/train_s"] - old - diagnosing,
        "diagnostics_s": diagnosing,
        # the new weights to an engine that has weights of its own
        "handover_s": metrics.get("time/sync_s", 0.0),
        "tracking_s": tracking,
        "total_s": total,
        "rollout_flops": forward,
        "old_logprobs_flops": 0.0 if trainer.old_policy.is_skipped else forward,
        "update_flops": 3 * forward,
        "tokens": sum(len(r.token_ids) for r in rollout.responses),
        "sequences": len(rollout.responses),
        "longest": max(len(r.token_ids) for r in rollout.responses),
        "zero_variance": metrics["group/zero_variance"],
        "reward": metrics["reward/mean"],
    }


def matmul_peak(policy: Policy, seconds: float = 0.3) -> float:
    """Return the FLOP/s of the best large matrix product, in the precision that the device's
    training uses.
    """
    gpu = policy.device.type == "cuda"
    size, kind = (8192, torch.bfloat16) if gpu else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=policy.device, dtype=kind) for _ in range(2))
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        a @ b
        synchronize(policy)
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def synchronize(policy: Policy) -> None:
    """Wait until the device has done what it was given."""
    if policy.device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory(policy: Policy) -> float:
    """Return the peak memory in MiB: of the device, or on a CPU the process's resident set."""
    if policy.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resident_mib()


def resident_mib() -> float:
    """Return the largest resident set of this process so far; the kernel counts in KiB, macOS in
    bytes.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


def table(record: dict) -> str:
    """Return the record as text, in words and columns."""
    active = record["active_parameters"] / 1e6
    lines = [
        f"{record['workload']}: {record['parameters'] / 1e6:.2f} M parameters ({active:.2f} M active), "
        f"{record['sequences']:.0f} responses, {record['tokens']:,.0f} tokens (longest {record['longest']:.0f}), "
        f"{record['threads']} thread{'s' * (record['threads'] > 1)}, {record['device']}",
        f"{'phase':<14}{'s/batch':>9}{'tokens/s':>11}{'sequences/s':>13}{'of matmul peak':>16}",
    ]
    for phase in PHASES:
        seconds = record[f"{phase}_s"]
        flops = record.get(f"{phase}_flops", 0.0)
        share = (
            f"{flops / seconds / record['matmul_gflops'] / 1e9:.1%}" if flops and seconds else ""
        )
        per_s = [
            f"{record[key] / seconds:,.0f}" if seconds > 1e-4 else ""
            for key in ("tokens", "sequences")
        ]
        lines.append(f"{phase:<14}{seconds:>9.3f}{per_s[0]:>11}{per_s[1]:>13}{share:>16}")
    lines.append(
        f"median of {len(record['batches'])} batches; matmul peak {record['matmul_gflops']:,.0f} GFLOP/s; peak memory "
        f"{record['peak_memory_mib']:,.0f} MiB; reward {record['reward']:.2f}, "
        f"{record['zero_variance']:.0%} of groups without signal"
    )
    if not record["own_forward"]:
        lines.append("this architecture is not known: transformers' own forward was used")
    return "\n".join(lines)
