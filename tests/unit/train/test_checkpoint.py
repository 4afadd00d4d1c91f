"""Checkpoints are written beside the training: from copies, whole or not at all, and what fails is
raised.
"""

import errno
import json
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from gspo.model.loading import load
from gspo.train import checkpoint
from gspo.train.checkpoint import CheckpointWriter, TrainState, load_optimizer
from gspo.train.checkpoint_files import latest_checkpoint
from gspo.train.sharded_checkpoint import ShardedCheckpointWriter
from ranked import ranked
from trainers import steps, trainer


@pytest.fixture
def held_up(monkeypatch):
    """Writing waits until the event is set."""
    go_on, save = threading.Event(), checkpoint.save

    def slow(*args):
        assert go_on.wait(20)
        save(*args)

    monkeypatch.setattr(checkpoint, "save", slow)
    return go_on


def test_a_checkpoint_holds_the_weights_of_its_step_whatever_is_trained_while_it_is_written(
    tmp_path, held_up
):
    t = trainer()
    steps(t, 1)
    writer = CheckpointWriter(tmp_path, t.policy, t.optimizer, 2, "hash")
    weights = {name: tensor.clone() for name, tensor in t.policy.model.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in t.optimizer.state.values()]
    writer.save(t.state)
    steps(t, 1)  # goes on at once
    assert latest_checkpoint(tmp_path) is None, "not whole yet"
    held_up.set()
    writer.close()
    folder = latest_checkpoint(tmp_path)
    assert (
        folder.name == "step_000001"
        and json.loads((folder / "state.json").read_text())["settings"] == "hash"
    )
    stored = load(str(folder))[0].state_dict()
    assert stored.keys() == weights.keys() and all(
        torch.equal(stored[name], weights[name]) for name in weights
    )
    now = [state["exp_avg"] for state in t.optimizer.state.values()]
    assert not any(torch.equal(a, b) for a, b in zip(moments, now, strict=True))
    again = trainer()
    state = load_optimizer(folder, again.optimizer, again.policy)
    assert state.step == 1
    for a, b in zip(moments, (s["exp_avg"] for s in again.optimizer.state.values()), strict=True):
        assert torch.equal(a, b)


def test_tied_weights_are_stored_once(tmp_path):
    t = trainer()
    assert t.policy.model.config.tie_word_embeddings
    writer = CheckpointWriter(tmp_path, t.policy, t.optimizer, 2, "hash")
    writer.save(t.state)
    writer.wait()
    stored = load_file(latest_checkpoint(tmp_path) / "model.safetensors")
    assert sum(x.numel() for x in stored.values()) == sum(
        p.numel() for p in t.policy.model.parameters()
    )


def test_what_fails_beside_the_training_is_raised_and_the_last_whole_one_stays(
    tmp_path, monkeypatch
):
    t = trainer()
    writer = CheckpointWriter(tmp_path, t.policy, t.optimizer, 2, "hash")
    writer.save(t.state)
    writer.wait()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    steps(t, 1)
    writer.save(t.state)
    with pytest.raises(OSError, match="No space left"):
        for _ in range(200):  # as soon as a step finds out
            writer.check()
            time.sleep(0.01)
    assert latest_checkpoint(tmp_path).name == "step_000000"
    writer.close()


def test_a_checkpoint_after_a_million_steps_is_the_latest_and_older_ones_are_deleted(tmp_path):
    t = trainer()
    writer = CheckpointWriter(tmp_path, t.policy, t.optimizer, 2, "hash")
    for step in (999_990, 1_000_000, 1_000_010):
        t.state.step = step
        writer.save(t.state)
    writer.close()
    assert latest_checkpoint(tmp_path).name == "step_1000010"
    names = {folder.name for folder in (tmp_path / "checkpoints").glob("step_*")}
    assert names == {"step_1000000", "step_1000010"}


@pytest.mark.distributed
def test_every_rank_raises_the_error_of_the_rank_that_makes_the_folder(tmp_path):
    def save(ranks):
        writer = object.__new__(ShardedCheckpointWriter)
        writer.ranks = ranks
        writer.writing = None
        writer.folder = tmp_path

        def begin(*_):
            raise OSError(errno.ENOSPC, "no space left")

        writer._begin = begin
        with pytest.raises(OSError) as raised:
            writer.save(TrainState(step=1))
        return raised.value.errno

    assert ranked(2, save) == [errno.ENOSPC] * 2
