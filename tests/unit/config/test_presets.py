"""Every preset trains: composed as a user would, with a small model and small batches."""

import pytest

from composing import options, settings
from gspo.run.build import build_trainer
from gspo.tracking.metrics import lookup

SMALL = [
    "experiment=tiny_moe", "cold_start.steps=0", "model.hidden=16", "model.layers=2", "model.heads=2",
    "model.experts=4", "model.expert_width=8", "task=math", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "rollout.max_new_tokens=12", "trainer.minibatches=2", "optim.lr=1e-3", "optim.warmup_updates=0",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("preset", options("preset"))
def test_every_preset_trains(preset):
    overrides = [*SMALL, "reward.overlong_cache=4"] if preset == "dapo" else SMALL
    trainer = build_trainer(settings(*overrides, f"preset={preset}"))
    for step in (1, 2):
        metrics = trainer.train_step(step, trainer.source.next(step))
        for name, value in metrics.items():
            lookup(name)
            assert value == value and abs(value) != float("inf"), name
    assert metrics["optim/updates"] == 4
    assert ("kl/coef" in metrics) == (trainer.algorithm.kl.name != "none")
    assert ("value/error" in metrics) == (preset == "ppo")
