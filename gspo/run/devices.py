"""Gives each job its threads and GPUs when a sweep runs several jobs on one machine at once."""

from __future__ import annotations

import os

from hydra.types import RunMode
from omegaconf import DictConfig

from gspo.data.lazy_torch import torch

# CUDA_VISIBLE_DEVICES as the user set it, because submitit changes that of its jobs
DEVICES = "GSPO_DEVICES"


def keep_devices() -> None:
    """Note which GPUs this process was given, for the jobs of the sweep that it starts."""
    os.environ.pop(DEVICES, None)
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        os.environ[DEVICES] = os.environ["CUDA_VISIBLE_DEVICES"]


def take_share(job: DictConfig, threads: int) -> None:
    """Set this process's number of threads, and its GPUs if its launcher has left those open.

    `job` is Hydra's own configuration of the job. `threads` is the run's setting; with 0 the cores
    are divided by the number of jobs that run at once. Call this before CUDA is first used. Raises
    ValueError as `jobs_at_once` does, and for GPUs that are not there.
    """
    jobs = jobs_at_once(job)
    tasks = (
        job.launcher.tasks_per_node
        if job.mode == RunMode.MULTIRUN and _launcher(job) == "LocalLauncher"
        else 1
    )
    if threads or jobs * tasks > 1:
        torch.set_num_threads(threads or max(1, cores() // (jobs * tasks)))
    if job.mode == RunMode.MULTIRUN and _launcher(job) == "LocalLauncher":
        _take_devices(job.job.num % jobs, job.launcher.gpus_per_node)


def _take_devices(place: int, count: int | None) -> None:
    """Let the job see its own `count` GPUs. Without a count it sees all that the user gave, as
    under other launchers: submitit would hide them all."""
    if count:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices(place, count))
        if not torch.cuda.is_available():
            shown = os.environ["CUDA_VISIBLE_DEVICES"]
            raise ValueError(
                f"hydra.launcher.gpus_per_node={count}: this machine has no GPU {shown} for the job"
            )
    elif DEVICES in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[DEVICES]
    else:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)


def jobs_at_once(job: DictConfig) -> int:
    """Return how many jobs of the sweep run on this machine at the same time.

    Raises ValueError for submitit_local without hydra.sweeper.max_batch_size: it starts all jobs of
    a batch."""
    if job.mode != RunMode.MULTIRUN:
        return 1
    kind = _launcher(job)
    if kind == "JoblibLauncher":  # -1 means as many jobs as cores, -2 one fewer
        return (
            job.launcher.n_jobs
            if job.launcher.n_jobs > 0
            else max(1, cores() + 1 + job.launcher.n_jobs)
        )
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
    """Return the `count` GPUs of the job that is number `place` among those that run at once.

    Raises ValueError if the user gave too few GPUs."""
    given = [name for name in os.environ.get(DEVICES, "").split(",") if name]
    mine = range(place * count, (place + 1) * count)
    if given and mine[-1] >= len(given):
        raise ValueError(
            f"hydra.launcher.gpus_per_node={count} for job {place + 1} of those that run at once, and "
            f"CUDA_VISIBLE_DEVICES has {len(given)}: lower hydra.sweeper.max_batch_size"
        )
    return [given[i] if given else str(i) for i in mine]


def cores() -> int:
    """Return the number of cores that this process may use; where the system does not tell, those
    of the machine.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _launcher(job: DictConfig) -> str:
    """Return the class name of the launcher."""
    return job.launcher._target_.rpartition(".")[2]
