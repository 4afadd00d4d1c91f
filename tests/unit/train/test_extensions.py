"""Metrics and callbacks of a user's own, in a real trainer: what they are given, what they may do,
failures, resume.
"""

import json
from dataclasses import asdict, dataclass
from typing import ClassVar

import pytest
import torch

from composing import settings as composed
from gspo.algorithm.objectives import GRPO
from gspo.algorithm.objectives.base import Clipped, LossInputs, LossOutputs
from gspo.data.step_record import Header
from gspo.run.model_replay import recorded_optim
from gspo.run.rollback import Rollbacks
from gspo.train.checkpoint import TrainState
from gspo.train.extensions import Callback, CustomMetric, Extensions
from trainers import steps, trainer, weights


@dataclass
class MeanOldLogprob(CustomMetric):
    unit: ClassVar[str] = "nats"
    meaning: ClassVar[str] = "mean log-prob of the step's tokens before its updates"

    def __call__(self, trained):
        assert len(trained.responses) == len(trained.batch) and trained.step >= 1
        return trained.batch.old_logp_BT[trained.batch.mask_BT].mean()


@dataclass
class Failing(CustomMetric):
    def __call__(self, trained):
        return trained.metrics["nothing"]


@dataclass
class Infinite(CustomMetric):
    def __call__(self, trained):
        return float("inf")


def test_a_metric_is_measured_on_the_trained_batch_and_a_failing_one_is_left_out_with_one_warning():
    t = trainer()
    t.extensions = Extensions({"old": MeanOldLogprob(), "bad": Failing(), "far": Infinite()}, {})
    first, second = steps(t, 2)
    for metrics in (first, second):
        assert -10 < metrics["custom/old"] < 0
        assert "custom/bad" not in metrics and "custom/far" not in metrics
    assert t.extensions.warnings == [
        "step 1: custom/bad failed and is left out: KeyError: 'nothing'",
        "step 1: custom/far failed and is left out: it is inf",
    ]


@pytest.mark.slow
def test_a_metric_changes_nothing_that_is_trained():
    plain, measured = trainer(), trainer()
    measured.extensions = Extensions({"old": MeanOldLogprob()}, {})
    steps(plain, 2)
    steps(measured, 2)
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(measured), strict=True))


@dataclass
class Halve(Callback):
    """Halves the learning rate after every step, and stops at the third."""

    calls: int = 0

    def before_step(self, step, trainer):
        assert trainer.state.step == step - 1

    def after_step(self, step, trainer, metrics):
        self.calls += 1
        trainer.optim.lr /= 2
        return step == 3 and metrics["reward/mean"] >= 0

    def state(self):
        return {"calls": self.calls}

    def load_state(self, state):
        self.calls = state["calls"]


def fit(t, until: int) -> list[dict]:
    rows: list[dict] = []
    t.fit(
        until,
        lambda step: {},
        lambda step, metrics, rollout: rows.append(metrics),
        lambda *_: None,
        lambda: False,
    )
    return rows


def test_a_callback_acts_around_the_steps_and_ends_the_run():
    t = trainer(lr=1e-3)
    t.extensions = Extensions({}, {"halve": Halve()})
    rows = fit(t, 10)[1:]
    assert [row["optim/lr"] for row in rows] == [1e-3, 5e-4, 2.5e-4]
    assert t.state.step == 3 and t.extensions.state() == {"halve": {"calls": 3}}


def test_the_state_of_a_callback_is_restored():
    t = trainer()
    t.extensions = Extensions({}, {"halve": Halve(), "new": Halve()})
    t.restore(
        TrainState.from_json({"step": 2, "callbacks": {"halve": {"calls": 5}}, "rewards": {}})
    )
    assert (t.extensions.callbacks["halve"].calls, t.extensions.callbacks["new"].calls) == (5, 0)


def test_a_learning_rate_that_a_callback_set_goes_on_in_a_resumed_run():
    t = trainer(lr=1e-3)
    t.extensions = Extensions({}, {"halve": Halve()})
    fit(t, 2)
    content = json.loads(json.dumps(asdict(t.state)))
    resumed = trainer(lr=1e-3)
    resumed.restore(TrainState.from_json(content))
    assert resumed.optim.lr == t.optim.lr == 2.5e-4
    after_rollback = trainer(lr=1e-4)  # a rollback has lowered it before
    after_rollback.restore(TrainState.from_json(content))
    assert after_rollback.optim.lr == pytest.approx(2.5e-5)
    again = fit(after_rollback, 3)
    assert again[-1]["optim/lr"] == pytest.approx(2.5e-5)
    assert after_rollback.state.changed_lr == [1e-4, after_rollback.optim.lr]


def test_a_record_has_the_learning_rate_that_a_callback_set(tmp_path):
    t = trainer(lr=1e-3)
    t.extensions = Extensions({}, {"halve": Halve()})
    fit(t, 1)
    header = Header(step=1, state=t.loss_state())
    settings = composed("optim.lr=1e-3")
    assert recorded_optim(header, Rollbacks(tmp_path), settings).lr == 5e-4
    del header.state["lr"]  # an older record
    assert recorded_optim(header, Rollbacks(tmp_path), settings).lr == 1e-3


@dataclass
class CopyOfGRPO(Clipped):
    name: str = "copy"
    clip_low: float = 0.2
    clip_high: float = 0.27

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_BT, bounded_BT = self.token_ratio(inputs)
        return self.clipped(ratio_BT, bounded_BT, inputs)


@pytest.mark.slow
def test_a_copy_of_grpo_trains_to_the_same_bits():
    ours, copy = trainer(GRPO()), trainer(CopyOfGRPO())
    rows = [[{k: v for k, v in m.items() if not k.startswith(("time", "throughput", "compute/seconds"))} for m in s]
            for s in (steps(ours, 3), steps(copy, 3))]  # fmt: skip
    assert rows[0] == rows[1]
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(copy), strict=True))
