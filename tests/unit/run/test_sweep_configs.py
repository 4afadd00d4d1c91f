"""The configurations of a sweep's jobs, composed once for the same choices: they are Hydra's own."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf, open_dict

from composing import CONF
from gspo.run.entry_point import explain
from gspo.run.sweep_configs import SweepConfigs

JOBS = [
    ["seed=3", "objective=grpo", "optim.lr=0.5"],
    ["seed=4", "objective=grpo", "optim.lr=0.25"],
    ["experiment=edge_moe", "seed=1", "arm=edge_gspo"],
    ["task.max_operands=4", "task=math"],
    ["task.math.max_operands=3", "task=mixed"],
    ["rollout.stop=[a,b]", "steps=5"],
    ["+options.x=1", "seed=2"],
    ["++monitor.x=1"],
    ["optim.lr=0.5", "++optim.lr=0.25"],
    ["++optim.lr=0.25", "optim.lr=0.5"],
    ["~rollout.top_p"],
    ["optim.lr=bad"],
    ["nosuch=1"],
    ["objective=nosuch"],
    ["hydra.launcher.n_jobs=3", "seed=1"],
]


def outcome(make) -> tuple:
    """The settings and choices that a configuration has, or how its making failed."""
    try:
        config = make()
    except Exception as error:
        return type(error), explain(error)
    choices, plain = dict(config.hydra.runtime.choices), config.copy()
    with open_dict(plain):
        plain.pop("hydra")
    return OmegaConf.to_yaml(plain), choices


@pytest.fixture(scope="module")
def sweep():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", overrides=["hydra.mode=MULTIRUN"], return_hydra_config=True)
        yield config, GlobalHydra.instance().config_loader()


@pytest.mark.slow
def test_they_are_what_hydra_composes_for_each_job_alone(sweep):
    config, loader = sweep
    configs = SweepConfigs(loader, config)
    for job in JOBS:
        assert outcome(lambda job=job: configs.of_job(job)) == outcome(
            lambda job=job: loader.load_sweep_config(config, job)
        )


def test_files_are_read_once_for_the_same_choices(sweep, monkeypatch):
    config, loader = sweep
    asked = []
    compose_one = loader.load_sweep_config
    monkeypatch.setattr(
        loader, "load_sweep_config", lambda *a: asked.append(a[1]) or compose_one(*a)
    )
    configs = SweepConfigs(loader, config)
    for seed in range(5):
        for objective in ("gspo", "grpo"):
            own = configs.of_job([f"seed={seed}", f"objective={objective}"])
            assert (own.seed, own.objective.name) == (seed, objective)
    assert asked == [["objective=gspo"], ["objective=grpo"]]
