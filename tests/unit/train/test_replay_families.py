"""Routing Replay in training steps of models with other routers: R2, R3, a resumed run."""

import pytest
import torch

from gspo.data.batch import NOT_RECORDED
from gspo.model.loading import load
from gspo.model.routers import SELECTION_BIAS
from gspo.train.checkpoint import CheckpointWriter, load_optimizer
from gspo.train.checkpoint_files import latest_checkpoint
from moe_families import MOE_FAMILIES
from trainers import gap_trainer, steps, trainer, weights

# a sigmoid with bias and groups after a dense layer; a softmax over the selected; a recurrent layer
FAMILIES = ("glm4_moe", "gpt_oss", "qwen3_next")


def biases(t) -> dict[str, torch.Tensor]:
    tensors = t.policy.model.state_dict().items()
    return {name: tensor.clone() for name, tensor in tensors if name.endswith(SELECTION_BIAS)}


@pytest.mark.parametrize("replay", ["r2", "r3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_experts_reach_every_update(family, replay, monkeypatch):
    make = gap_trainer if replay == "r3" else trainer
    t = make(lr=1e-2, replay=replay, model=MOE_FAMILIES[family], max_grad_norm=1e9)
    computed, seen = t.policy.forward, []

    def watched(batch, *arguments, **named):
        if torch.is_grad_enabled():
            recorded = batch.experts_BSLK if replay == "r2" else batch.engine_experts_BSLK
            seen.append((batch.replay_BSLK, recorded, batch.attention_BS))
        return computed(batch, *arguments, **named)

    monkeypatch.setattr(t.policy, "forward", watched)
    before, weights_before = biases(t), weights(t)
    rows = steps(t, 2)
    assert len(seen) >= 8, "four mini-batches in each of two steps"
    for replay_BSLK, recorded_BSLK, attention_BS in seen:
        assert torch.equal(replay_BSLK, recorded_BSLK)
        assert (replay_BSLK != NOT_RECORDED).any(-1).any(-1).sum() >= attention_BS.sum() - len(
            attention_BS
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in biases(t).items())
    pairs = zip(weights(t), weights_before, strict=True)
    assert sum(not torch.equal(a, b) for a, b in pairs) > len(weights_before) / 2
    for row in rows:
        assert 0 < row["routing/consistency"] < 1, "the routers' own choice moves"
        assert 0 < row["routing/load_entropy"] <= 1
        if replay == "r3":
            assert row["routing/engine_agreement"] > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss"])
def test_a_resumed_run_goes_on_to_the_bit(family, tmp_path):
    t = trainer(replay="r2", model=MOE_FAMILIES[family])
    steps(t, 1)
    writer = CheckpointWriter(tmp_path, t.policy, t.optimizer, 2, "hash")
    writer.save(t.state)
    writer.wait()
    folder = latest_checkpoint(tmp_path)
    stored = load(str(folder), "eager")[0].state_dict()
    again = trainer(replay="r2", model=MOE_FAMILIES[family])
    for name in biases(again):
        again.policy.model.get_buffer(name).zero_()
    again.policy.load_tensors(stored.items())
    again.restore(load_optimizer(folder, again.optimizer, again.policy))
    assert all(torch.equal(tensor, biases(t)[name]) for name, tensor in biases(again).items())
    rows = [steps(one, 1)[0] for one in (t, again)]
    assert rows[0]["optim/grad_norm"] == rows[1]["optim/grad_norm"] > 0
    assert rows[0]["routing/consistency"] == rows[1]["routing/consistency"]
    assert all(torch.equal(a, b) for a, b in zip(weights(t), weights(again), strict=True))
