"""A job's share of the machine."""

import os

import pytest
import torch
from hydra.types import RunMode
from omegaconf import OmegaConf

from gspo.run import devices
from refusals import refuses


def job(kind: str, mode=RunMode.MULTIRUN, num=0, batch=None, **launcher):
    target = {
        "_target_": f"hydra_plugins.somewhere.{kind}",
        "gpus_per_node": None,
        "tasks_per_node": 1,
    }
    tree = {
        "launcher": target | launcher,
        "sweeper": {"max_batch_size": batch},
        "job": {"num": num},
        "mode": mode,
    }
    return OmegaConf.create(tree)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    """Leaves threads and environment as they were."""
    before = torch.get_num_threads()
    monkeypatch.setattr(devices, "cores", lambda: 4)
    monkeypatch.setenv(devices.DEVICES, "")
    monkeypatch.delenv(devices.DEVICES)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield
    torch.set_num_threads(before)


def test_jobs_at_once():
    assert devices.jobs_at_once(job("JoblibLauncher", RunMode.RUN, n_jobs=4)) == 1
    assert devices.jobs_at_once(job("BasicLauncher")) == 1
    assert devices.jobs_at_once(job("SlurmLauncher", batch=8)) == 1, "each has its own allocation"
    assert [devices.jobs_at_once(job("JoblibLauncher", n_jobs=n)) for n in (3, -1, -2, -9)] == [
        3,
        4,
        3,
        1,
    ]
    assert devices.jobs_at_once(job("LocalLauncher", batch=2)) == 2
    with refuses("hydra/launcher", "submitit_local", "hydra.sweeper.max_batch_size=N"):
        devices.jobs_at_once(job("LocalLauncher"))


def test_threads_are_divided_unless_the_run_says():
    for at_once, threads, expected in ((2, 0, 2), (3, 0, 1), (8, 0, 1), (2, 3, 3), (1, 2, 2)):
        devices.take_share(job("JoblibLauncher", n_jobs=at_once), threads)
        assert torch.get_num_threads() == expected, (at_once, threads)
    devices.take_share(job("LocalLauncher", batch=1, tasks_per_node=4), 0)
    assert torch.get_num_threads() == 1, "the ranks of one run share the cores too"
    torch.set_num_threads(2)
    devices.take_share(job("BasicLauncher"), 0)
    assert torch.get_num_threads() == 2, "nothing to divide: as it was"


def test_each_job_gets_gpus_of_its_own(monkeypatch):
    def visible(num, batch, gpus):
        devices.take_share(job("LocalLauncher", num=num, batch=batch, gpus_per_node=gpus), 1)
        return os.environ["CUDA_VISIBLE_DEVICES"]

    assert [visible(num, 2, 1) for num in range(4)] == ["0", "1", "0", "1"]
    assert visible(1, 2, 2) == "2,3"
    monkeypatch.setenv(devices.DEVICES, "3,6,GPU-ab,9")
    assert visible(3, 4, 1) == "9" and visible(1, 2, 2) == "GPU-ab,9" and visible(0, 2, 1) == "3"
    with refuses("hydra.launcher.gpus_per_node", 2, "has 4 GPUs, too few for job 3"):
        visible(2, 3, 2)


def test_a_gpu_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses("hydra.launcher.gpus_per_node", 1, "this machine has no GPU 3 for the"):
        devices.take_share(job("LocalLauncher", num=3, batch=4, gpus_per_node=1), 1)


def test_without_a_count_jobs_see_what_the_user_gave(monkeypatch):
    monkeypatch.setenv(devices.DEVICES, "2,3")
    devices.take_share(job("LocalLauncher", batch=2), 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.delenv(devices.DEVICES)
    devices.take_share(job("LocalLauncher", batch=2), 1)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ, "all of them, where the user gave none"


def test_what_the_user_gave_reaches_the_jobs(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    devices.keep_devices()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert devices.devices(1, 1) == ["2"]
