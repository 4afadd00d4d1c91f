"""A job's share of the machine, where a sweep runs several at once: its threads, its GPUs."""

from __future__ import annotations

import os

import torch
from hydra.types import RunMode
from omegaconf import DictConfig

DEVICES = "GSPO_DEVICES"  # CUDA_VISIBLE_DEVICES as the user set it: submitit gives its jobs another


def keep_devices() -> None:
    """In the process that starts a sweep: let its jobs know which GPUs it was given."""
    os.environ.pop(DEVICES, None)
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        os.environ[DEVICES] = os.environ["CUDA_VISIBLE_DEVICES"]


def take_share(job: DictConfig, threads: int) -> None:
    """Set this process's threads, and its GPUs if its launcher left that open. `job`: Hydra's settings of it.

    `threads`: the run's own choice; 0: the cores divided by the jobs that run at once (all of them for a single run).
    Before CUDA is first used. Raises ValueError as `jobs_at_once` does.
    """
    jobs = jobs_at_once(job)
    if threads or jobs > 1:
        torch.set_num_threads(threads or max(1, cores() // jobs))
    if job.mode == RunMode.MULTIRUN and _launcher(job) == "LocalLauncher":
        _take_devices(job.job.num % jobs, job.launcher.gpus_per_node)


def _take_devices(place: int, count: int | None) -> None:
    """Without a count a job sees what the user gave, as under the other launchers (submitit would hide all)."""
    if count:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices(place, count))
        if not torch.cuda.is_available():
            shown = os.environ["CUDA_VISIBLE_DEVICES"]
            raise ValueError(f"hydra.launcher.gpus_per_node={count}: this machine has no GPU {shown} for the job")
    elif DEVICES in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[DEVICES]
    else:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)


def jobs_at_once(job: DictConfig) -> int:
    """How many jobs of the sweep run on this machine at the same time.

    Raises ValueError for submitit_local without hydra.sweeper.max_batch_size: it starts all jobs of a batch."""
    if job.mode != RunMode.MULTIRUN:
        return 1
    kind = _launcher(job)
    if kind == "JoblibLauncher":  # -1: as many as there are cores, -2: one less
        return job.launcher.n_jobs if job.launcher.n_jobs > 0 else max(1, cores() + 1 + job.launcher.n_jobs)
    if kind == "LocalLauncher":
        size = job.sweeper.get("max_batch_size")
        if not size:
            raise ValueError(
                "hydra/launcher=submitit_local starts all jobs of a sweep at once: "
                "say how many this machine can hold with hydra.sweeper.max_batch_size=N"
            )
        return size
    return 1


def devices(place: int, count: int) -> list[str]:
    """The GPUs of the job at this place among those that run at once: `count` of those that the user gave.

    Raises ValueError if they are too few."""
    given = [name for name in os.environ.get(DEVICES, "").split(",") if name]
    mine = range(place * count, (place + 1) * count)
    if given and mine[-1] >= len(given):
        raise ValueError(
            f"hydra.launcher.gpus_per_node={count} for job {place + 1} of those that run at once, and "
            f"CUDA_VISIBLE_DEVICES has {len(given)}: lower hydra.sweeper.max_batch_size"
        )
    return [given[i] if given else str(i) for i in mine]


def cores() -> int:
    """Of this process, where the system tells (Linux), else of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _launcher(job: DictConfig) -> str:
    return job.launcher._target_.rpartition(".")[2]
