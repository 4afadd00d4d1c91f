"""AdamW with moments of 8 bits: that it is AdamW, takes less memory, is resumed to the bit, and is
refused by name.
"""

from importlib.util import find_spec

import pytest
import torch

from gspo.algorithm.objectives import GSPO
from gspo.model.settings import TinyDense
from gspo.train.checkpoint import CheckpointWriter, load_optimizer
from gspo.train.checkpoint_files import latest_checkpoint
from gspo.train.optimizer import check_optimizer
from gspo.train.settings import OptimSettings
from ranked import ranked
from refusals import refuses
from trainers import steps, trainer, weights

there = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
WIDE = TinyDense(hidden=64, layers=2, heads=2, width=128)  # most tensors have 4096 numbers and more


def eight_bit(name="adamw_8bit", **options):
    return trainer(GSPO(), model=WIDE, optimizer=name, **options)


def state_bytes(optimizer) -> int:
    """Bytes of all states; what several parameters share, bitsandbytes' tables of 256 numbers,
    counts once.
    """
    tensors = {
        t.data_ptr(): t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)
    }
    return sum(t.nbytes for t in tensors.values())


@there
def test_its_first_update_is_adamws_and_the_later_ones_are_near_it():
    """The first moments are rounded after they have been used."""
    plain, ours = trainer(GSPO(), model=WIDE, eps=1e-8), eight_bit(eps=1e-8)
    start = weights(plain)
    for t in (plain, ours):
        t.settings.minibatches = 1
    for furthest in (1e-6, 5e-4):
        moved, apart = 0.0, 0.0
        steps(plain, 1)
        steps(ours, 1)
        for before, a, b in zip(start, weights(plain), weights(ours), strict=True):
            moved = max(moved, float((a - before).abs().max()))
            apart = max(apart, float((a - b).abs().mean()))
        assert moved > 9e-4 and apart < furthest
    assert apart > 1e-9, "there are 8 bits"


@there
def test_its_state_takes_a_quarter():
    plain, ours = trainer(GSPO(), model=WIDE), eight_bit()
    for t in (plain, ours):
        steps(t, 1)
    kinds = {s["state1"].dtype for s in ours.optimizer.state.values()}
    assert kinds == {torch.uint8, torch.float32}, "large and small tensors"
    assert state_bytes(ours.optimizer) < 0.35 * state_bytes(plain.optimizer)


@pytest.mark.slow
@there
def test_a_checkpoint_goes_on_to_the_bit(tmp_path):
    t = eight_bit()
    steps(t, 2)
    writer = CheckpointWriter(tmp_path, t.policy, t.optimizer, 2, "hash")
    writer.save(t.state)
    writer.wait()
    again = eight_bit()
    with torch.no_grad():
        for ours, theirs in zip(
            again.policy.model.parameters(), t.policy.model.parameters(), strict=True
        ):
            ours.copy_(theirs)
    again.restore(load_optimizer(latest_checkpoint(tmp_path), again.optimizer, again.policy))
    rows = [steps(one, 2) for one in (t, again)]
    assert rows[0][-1]["optim/grad_norm"] == rows[1][-1]["optim/grad_norm"] > 0
    assert all(torch.equal(a, b) for a, b in zip(weights(t), weights(again), strict=True))
    fresh = eight_bit()
    assert not all(torch.equal(a, b) for a, b in zip(weights(t), weights(fresh), strict=True))


@there
def test_routers_have_their_learning_rate():
    t = trainer(GSPO(), optimizer="adamw_8bit", router_lr_factor=0.5)
    steps(t, 1)
    first, second = t.optimizer.param_groups
    assert second["lr"] == first["lr"] / 2 > 0


@there
@pytest.mark.distributed
def test_ranks_keep_the_same_weights():
    def trained(ranks):
        t = eight_bit(ranks=ranks, engine_ranks=ranks.new_group())
        steps(t, 2)
        return weights(t)

    first, second = ranked(2, trained)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@there
def test_pages_need_a_gpu():
    with refuses("optim.name", "paged_adamw_8bit", "the policy is on cpu; use"):
        eight_bit("paged_adamw_8bit")
    check_optimizer(OptimSettings("paged_adamw_8bit"), "cuda:0")


@pytest.mark.skipif(bool(find_spec("bitsandbytes")), reason="bitsandbytes is installed")
def test_it_is_refused_where_bitsandbytes_is_not_installed():
    with refuses("optim.name", "adamw_8bit", "bitsandbytes is not installed; pip install -e '.["):
        eight_bit()
