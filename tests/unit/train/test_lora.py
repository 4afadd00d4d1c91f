"""A run that trains an adapter alone: what moves, what a checkpoint holds, and that it goes on to
the bit.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from builders import SMOOTH, recorded_gradients, small_policy
from composing import settings
from daily import daily_but
from gspo.algorithm.advantages import GAE
from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.kl import KLInLoss
from gspo.algorithm.objectives import GRPO, GSPO, PPO
from gspo.config.remarks import warnings
from gspo.data.pack import pack
from gspo.distributed.ranks import Ranks
from gspo.model.settings import LoraSettings, TinyDense
from gspo.model.value_head import ValueHead
from gspo.train.checkpoint import CheckpointWriter, load_optimizer
from gspo.train.checkpoint_files import latest_checkpoint
from ranked import ranked
from refusals import refuses
from trainers import gap_trainer, steps, trainer

LORA = LoraSettings(rank=4, alpha=8)
ATTENTION, EXPERTS = replace(LORA, targets="attention"), replace(LORA, targets="experts")
DENSE = TinyDense(hidden=32, layers=2, heads=2, width=48)
KL = {"kl": KLInLoss(coef=0.2, aggregation=Aggregation("seq-mean-token-mean"))}
CASES = {
    "all": partial(trainer, GSPO(), lora=LORA, **SMOOTH),
    "attention, r2": partial(trainer, GRPO(), lora=ATTENTION, replay="r2", **SMOOTH),
    "experts, r2": partial(trainer, GRPO(), lora=EXPERTS, replay="r2", **SMOOTH),
    "all, r3, rounded engine": partial(
        gap_trainer, GRPO(), lora=LORA, replay="r3", dtype="bfloat16", **SMOOTH
    ),
    "all, stale, beside the training": partial(
        gap_trainer, GSPO(), lora=LORA, staleness=1, overlap=True, **SMOOTH
    ),
    "dense": partial(trainer, GSPO(), lora=LORA, model=DENSE, **SMOOTH),
    "kl to the model without adapter": partial(trainer, GRPO(), lora=LORA, parts=KL, **SMOOTH),
    "critic": partial(trainer, PPO(), lora=LORA, parts={"advantage": GAE()}, **SMOOTH),
}


def own_weights(t) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().clone()
        for name, p in t.policy.model.named_parameters()
        if ".lora_" not in name
    }


@pytest.mark.parametrize("case", CASES)
def test_the_adapter_alone_is_trained(case):
    t = CASES[case]()
    before, adapter = own_weights(t), [p.detach().clone() for p in t.policy.adapter.parameters()]
    with recorded_gradients() as given:
        metrics = steps(t, 2)
    t.source.close()
    assert all(torch.equal(before[name], weight) for name, weight in own_weights(t).items())
    moved = [
        not torch.equal(a, b) for a, b in zip(adapter, t.policy.adapter.parameters(), strict=True)
    ]
    assert sum(moved) > 0.9 * len(moved)
    assert {len(update) for update in given} == {len(t.policy.parameters())}
    states = sum(state["exp_avg"].numel() for state in t.optimizer.state.values())
    assert (
        states
        == sum(p.numel() for p in t.policy.parameters())
        < sum(w.numel() for w in before.values())
    )
    assert all(row["optim/grad_norm"] > 0 for row in metrics)
    # merged in the engine, unmerged in the trainer
    if "rounded" not in case and "stale" not in case:
        assert all(row["mismatch/k3"] < 1e-8 for row in metrics)


def test_the_reference_is_where_the_run_began_without_a_second_copy():
    t = CASES["kl to the model without adapter"]()
    copied = small_policy()
    first, second = steps(t, 2)
    assert first["kl/ref_k3"] < 1e-10 < second["kl/ref_k3"], (
        "the adapter changes nothing before it has learned"
    )
    assert t.reference.model is t.policy.model
    batch = t.source.next(3)
    packed = pack(batch.responses, t.policy.tokenizer.pad_token_id)
    assert torch.equal(t.reference.score(packed, 8).logp_BT, copied.score(packed, 8).logp_BT)


def test_replay_matters_under_an_adapter_and_its_ratio_goes_through_the_old_experts():
    """With R2 the second mini-batch's tokens go to the experts of the step's start, whatever the
    adapter has moved.
    """
    moved = {}
    for replay in ("none", "r2"):
        t = trainer(GRPO(), lora=LORA, replay=replay, lr=0.1, eps=1.0, minibatches=4)
        moved[replay] = steps(t, 1)[0]
    assert moved["none"]["routing/consistency"] < 1
    assert moved["r2"]["ratio/token_log_var"] < moved["none"]["ratio/token_log_var"]


@pytest.mark.slow
def test_an_adapter_learns_a_task():
    t = trainer(GRPO(), lr=2e-2, lora=LoraSettings(4, "experts", 8))
    rewards = [row["reward/mean"] for row in steps(t, 16)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15


@pytest.mark.slow
def test_an_update_costs_a_pass_less_than_one_of_all_weights():
    lora, dense = (
        steps(trainer(GSPO(), lora=lora), 1)[0]["compute/flops"] for lora in (LORA, None)
    )
    generated_and_scored = 2  # in passes: sampling, and the old log-probs
    assert lora / dense == pytest.approx(
        (generated_and_scored + 2) / (generated_and_scored + 3), rel=0.05
    )


# ----------------------------------------------------------------------------------------------------------
# checkpoints
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    daily_but(
        ["all", "attention, r2", "dense", "kl to the model without adapter", "critic"],
        "attention, r2",
        "critic",
    ),
)
def test_a_checkpoint_holds_the_adapter_alone_and_the_run_goes_on_to_the_bit(case, tmp_path):
    t = CASES[case]()
    steps(t, 2)
    writer = CheckpointWriter(tmp_path, t.policy, t.optimizer, 2, "hash")
    writer.save(t.state)
    writer.close()
    straight = steps(t, 2)
    folder = latest_checkpoint(tmp_path)
    assert not (folder / "model.safetensors").exists() and not (folder / "reference").exists()
    stored = load_file(folder / "adapter_model.safetensors")
    assert sum(x.numel() for x in stored.values()) == sum(
        p.numel() for p in t.policy.adapter.parameters()
    )
    again = CASES[case]()
    again.policy.adapter.load(folder)
    if again.policy.value_head:
        again.policy.value_head.load_state_dict(ValueHead.open(t.policy.model, folder).state_dict())
    again.restore(load_optimizer(folder, again.optimizer, again.policy))
    resumed = steps(again, 2)
    for a, b in zip(t.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    for one, other in zip(straight, resumed, strict=True):
        timeless = [
            name for name in one if not name.startswith(("time/", "throughput/", "compute/s"))
        ]
        assert {name: one[name] for name in timeless} == {name: other[name] for name in timeless}


# ----------------------------------------------------------------------------------------------------------------
# ranks
@pytest.mark.distributed
@pytest.mark.parametrize(
    "case", ["all", "experts, r2", "kl to the model without adapter", "critic"]
)
def test_two_ranks_train_an_adapter_as_one_process_does(case):
    make = CASES[case]

    def trained(ranks, another):
        t = make(ranks=ranks, engine_ranks=another, max_grad_norm=1e9)
        with recorded_gradients() as found:
            metrics = steps(t, 2)
        return (
            found,
            [row["reward/mean"] for row in metrics],
            [p.detach().clone() for p in t.policy.parameters()],
        )

    one = trained(Ranks(), Ranks())
    first, second = ranked(2, lambda ranks: trained(ranks, ranks.new_group()))
    assert first[1] == second[1] == one[1] and len(first[0]) == len(one[0]) > 4
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))
    largest = max(float(g.abs().max()) for update in one[0] for g in update)
    assert largest > 1e-3
    for several, alone in zip(first[0], one[0], strict=True):
        for a, b in zip(several, alone, strict=True):
            torch.testing.assert_close(a, b, atol=5e-6 * max(largest, 1.0), rtol=0)


# -------------------------------------------------------------------------------------------------------------
# settings
@pytest.mark.parametrize(
    "overrides, refusal",
    [
        (["policy.lora.alpha=16"], ("policy.lora.alpha", 16, "is not read with")),
        (
            ["policy.lora.targets=attention"],
            ("policy.lora.targets", "attention", "is not read with"),
        ),
        (
            ["policy.lora.rank=8", "policy.lora.targets=router"],
            ("policy.lora.targets", "router"),
        ),
        (["policy.lora.rank=-1"], ("policy.lora.rank", -1)),
        (
            ["policy.lora.rank=8", "policy.lora.alpha=0"],
            ("policy.lora.alpha", 0),
        ),
        (
            ["policy.lora.rank=8", "policy.lora.targets=experts", "model=tiny_dense"],
            ("policy.lora.targets", "experts", "needs an MoE model;"),
        ),
        (
            ["policy.lora.rank=8", "policy.freeze_router=true"],
            ("policy.freeze_router", True, "an adapter leaves the routers as"),
        ),
        (
            ["policy.lora.rank=8", "optim.router_lr_factor=2"],
            ("optim.router_lr_factor", 2.0, "with policy.lora.rank=8"),
        ),
        (
            ["policy.lora.rank=8", "trainer.router_aux_loss_coef=0.1"],
            ("trainer.router_aux_loss_coef", 0.1, "with policy.lora.rank=8"),
        ),
        (
            ["policy.lora.rank=8", "parallel.mode=shard"],
            ("parallel.mode", "shard", "with policy.lora.rank=8"),
        ),
        (
            ["policy.lora.rank=8", "kl=loss", "kl.refresh_every=5"],
            ("kl.refresh_every", 5, "the reference is the model with"),
        ),
        (
            [
                "policy.lora.rank=8",
                "policy.precision=bfloat16",
                "policy.old_logprobs=behaviour",
                "rollout.staleness=1",
                "rollout.overlap=true",
            ],
            ("rollout.overlap", True, "policy.old_logprobs=behaviour are"),
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides, refusal):
    with refuses(*refusal):
        settings("experiment=tiny_moe", *overrides)


def test_what_works_is_composed():
    chosen = settings(
        "experiment=tiny_moe",
        "policy.lora.rank=8",
        "policy.routing_replay=r2",
        "parallel.mode=replicate",
        "kl=loss",
    )
    assert chosen.policy.lora == LoraSettings(8, "all", 32)


def test_the_learning_rate_of_all_weights_is_remarked_upon():
    said = [
        text for text in warnings(settings("policy.lora.rank=8")) if "an adapter learns" in text
    ]
    assert said == [
        "optim.lr=1e-06 with policy.lora.rank=8: that is meant for all weights; an adapter learns with about ten times "
        "as much (docs/algorithms.md)"
    ]
    assert not [
        text
        for text in warnings(settings("policy.lora.rank=8", "optim.lr=1e-5"))
        if "adapter" in text
    ]
