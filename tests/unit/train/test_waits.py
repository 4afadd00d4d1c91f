"""How often a step would make the CPU wait for a GPU: once for each update, and once for each sampled token."""

from collections import Counter

import pytest
import torch

import waits
from builders import problems, small_policy
from gspo.algorithm.objectives import GSPO
from gspo.model.loading import TinyDense
from gspo.rollout.local_engine import LocalEngine
from gspo.rollout.requests import Sampling
from gspo.train import accumulator as accumulators
from gspo.train.accumulator import MetricAccumulator
from trainers import trainer

DENSE = TinyDense(hidden=32, layers=2, heads=2, width=32)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """There the accumulator keeps tensors until the end of the step."""
    monkeypatch.setattr(accumulators, "_kept", lambda value: value.detach() if torch.is_tensor(value) else float(value))


def prepared(model, replay="none", **settings):
    """A trainer that has rolled out a batch, remembered its old policy and assigned credit."""
    made = trainer(
        GSPO(clip_low=3e-3, clip_high=4e-3),
        model=model,
        replay=replay,
        **settings,
    )
    rollout = made.source.next(1)
    return made, rollout


@pytest.mark.parametrize(
    ("model", "replay", "entropy_coef"),
    [(DENSE, "none", 0.0), (None, "none", 0.0), (None, "r2", 0.0), (DENSE, "none", 0.01)],
)
def test_an_update_waits_once(model, replay, entropy_coef):
    """For the norm of the gradient: whether it is finite. However many micro-batches there are."""
    made, rollout = prepared(model, replay, entropy_coef=entropy_coef)
    seen = []
    update = made.update

    def watched(batch, own_B, minibatch, accumulator):
        with waits.Waits(made.policy.parameters()) as found:
            update(batch, own_B, minibatch, accumulator)
        seen.append(found.places)

    made.update = watched
    metrics = made.train_step(1, rollout)
    assert len(seen) == 4 and metrics["optim/grad_norm"] > 0
    assert all(sum(found.values()) == 1 and "isfinite" in next(iter(found)) for found in seen), seen


def test_sampling_waits_once_for_a_token():
    """Whether a row is left; and where rows have ended, to drop them and to hand them over."""
    policy, tokens = small_policy(), 12
    with waits.Waits(policy.parameters()) as found:
        LocalEngine(policy).generate(problems(), 3, Sampling(1.0, tokens), (1, "test"))
    by_reason = Counter({place.partition(" ")[2]: count for place, count in found.places.items()})
    assert by_reason.pop("left = int(running_R.sum())") <= tokens
    assert sum(by_reason.values()) <= 6, by_reason


def test_what_would_wait_is_counted():
    """The counter itself: readings of what lies on the GPU count, readings of the CPU's own do not."""
    own = torch.arange(4.0)
    with waits.Waits([]) as found:
        there = own.to("cpu")
        float(own.sum()), own.nonzero(), own[own > 1]
        assert not found.places
        for reading in (
            lambda x: float(x.sum()), lambda x: x.nonzero(), lambda x: x[x > 1], lambda x: x.tolist(),
            lambda x: x.cpu(), lambda x: bool((x > 5).any()), lambda x: torch.bincount(x.long()),
        ):  # fmt: skip
            before = sum(found.places.values())
            reading(there * 2)
            assert sum(found.places.values()) == before + 1
    assert MetricAccumulator().result() == {}
