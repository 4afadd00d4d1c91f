"""Give each job its threads and GPUs when a sweep runs several jobs on one machine at once."""

import os

from hydra.conf import HydraConf
from hydra.types import RunMode

from gspo.data.lazy_torch import torch
from gspo.io.errors import SettingError
from gspo.run.sweep_configs import launcher_of

# CUDA_VISIBLE_DEVICES as the user set it, because submitit changes that of its jobs
DEVICES = "GSPO_DEVICES"


def keep_devices() -> None:
    """Record the GPUs that this process may use, for the jobs of the sweep that it starts."""
    os.environ.pop(DEVICES, None)
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        os.environ[DEVICES] = os.environ["CUDA_VISIBLE_DEVICES"]


def take_share(job: HydraConf, threads: int) -> None:
    """Set this process's number of threads, and its GPUs if its launcher does not set them.

    `job` is Hydra's own configuration of the job. `threads` is the run's setting. With 0 the cores
    are divided by the number of jobs that run at once. Call this before CUDA is first used. Raises
    ValueError as `jobs_at_once` does, and for missing GPUs.
    """
    jobs = jobs_at_once(job)
    is_submitit_local = job.mode == RunMode.MULTIRUN and launcher_of(job) == "LocalLauncher"
    processes = jobs * job.launcher.tasks_per_node if is_submitit_local else jobs
    if threads or processes > 1:
        torch.set_num_threads(threads or max(1, cores() // processes))
    if is_submitit_local:
        _take_devices(job.job.num % jobs, job.launcher.gpus_per_node)


def _take_devices(slot: int, count: int | None) -> None:
    """Let the job see its own `count` GPUs, or without a count all GPUs of the user.

    Other launchers let it see all. submitit would hide all."""
    if count:
        visible = ",".join(devices(slot, count))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        if not torch.cuda.is_available():
            raise SettingError(
                "hydra.launcher.gpus_per_node",
                count,
                f"this machine has no GPU {visible} for the job",
            )
    elif DEVICES in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[DEVICES]
    else:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)


def jobs_at_once(job: HydraConf) -> int:
    """Return how many jobs of the sweep run on this machine at the same time.

    Raises ValueError for submitit_local without hydra.sweeper.max_batch_size: it starts all jobs of
    a batch at once."""
    if job.mode != RunMode.MULTIRUN:
        return 1
    kind = launcher_of(job)
    if kind == "JoblibLauncher":
        count = job.launcher.n_jobs
        # -1 means as many jobs as cores, -2 one fewer
        return count if count > 0 else max(1, cores() + 1 + count)
    if kind == "LocalLauncher":
        size = job.sweeper.get("max_batch_size")
        if not size:
            raise SettingError(
                "hydra/launcher",
                "submitit_local",
                "starts all jobs of a sweep at once",
                remedy="set how many this machine can hold with hydra.sweeper.max_batch_size=N",
            )
        return size
    return 1


def devices(slot: int, count: int) -> list[str]:
    """Return the `count` GPUs of the job in a slot.

    Jobs that run at once have different slots. Raises ValueError for too few GPUs of the user."""
    users_gpus = [name for name in os.environ.get(DEVICES, "").split(",") if name]
    indices = range(slot * count, (slot + 1) * count)
    if not users_gpus:
        return [str(index) for index in indices]
    if indices[-1] >= len(users_gpus):
        raise SettingError(
            "hydra.launcher.gpus_per_node",
            count,
            f"CUDA_VISIBLE_DEVICES has {len(users_gpus)} GPUs, too few for job {slot + 1} of those "
            "that run at once",
            remedy="lower hydra.sweeper.max_batch_size",
        )
    return [users_gpus[index] for index in indices]


def cores() -> int:
    """Return the number of cores that this process may use, or if unknown the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
