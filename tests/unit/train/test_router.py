"""What is done to the routers of an MoE model beside Routing Replay: freezing, a learning rate, the
auxiliary loss.
"""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from builders import batch_of, recorded_gradients, sample, small_policy
from composing import settings
from gspo.algorithm.aggregation import Totals
from gspo.algorithm.objectives import GSPO
from gspo.distributed.ranks import Ranks
from gspo.model.settings import TinyDense, TinyMoE
from gspo.train.accumulator import MetricAccumulator, load_metrics
from gspo.train.loss_terms import BalanceTerm, TermInputs
from gspo.train.optimizer import parameter_groups
from gspo.train.routing import old_loads
from refusals import refuses
from trainers import steps, trainer, weights


def of_routers(t) -> list[torch.Tensor]:
    return [p.detach().clone() for p in t.policy.routing.parameters()]


def balance(policy, batch, loads_LE) -> torch.Tensor:
    """E sum_e load_e p_e of every response token."""
    with policy.routing.balancing(loads_LE):
        return policy.forward(batch).balance_BT[batch.mask_BT]


def test_a_frozen_router_stays_and_all_else_learns():
    t = trainer(GSPO(), lr=1e-2, freeze_router=True)
    routers, before = of_routers(t), weights(t)
    with recorded_gradients() as given:
        steps(t, 2)
    assert all(torch.equal(a, b) for a, b in zip(routers, of_routers(t), strict=True))
    others = len(before) - len(routers)
    assert sum(not torch.equal(a, b) for a, b in zip(before, weights(t), strict=True)) == others
    assert {len(gradients) for gradients in given} == {others}, (
        "the norm that is clipped is that of what is trained"
    )


def test_the_routers_learning_rate_is_a_multiple_of_the_others():
    """The first update of Adam is lr times the sign of the gradient, so that it shows the learning
    rate itself.
    """
    moved = {}
    for factor in (1.0, 3.0, 0.0):
        t = trainer(GSPO(), lr=1e-4, minibatches=1, router_lr_factor=factor)
        routers, before = of_routers(t), weights(t)
        metrics = steps(t, 1)[0]
        moved[factor] = torch.cat(
            [(a - b).flatten() for a, b in zip(of_routers(t), routers, strict=True)]
        )
        assert metrics["optim/lr"] == pytest.approx(1e-4), "that of all other parameters"
        assert not all(torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))
    torch.testing.assert_close(moved[3.0], 3 * moved[1.0], atol=1e-6, rtol=1e-2)
    assert moved[1.0].abs().max() > 5e-5 and not moved[0.0].any()


def test_by_default_there_is_one_group_as_in_earlier_checkpoints():
    policy = small_policy()
    (group,) = parameter_groups(policy, 1.0, False)
    assert [id(p) for p in group["params"]] == [id(p) for p in policy.parameters()] and set(
        group
    ) == {"params"}


@pytest.mark.parametrize("family", ["one layer", "three layers"])
def test_the_auxiliary_loss_is_that_of_transformers_divided_by_k(family):
    """On policy. transformers pools the layers before it multiplies, so that more than one give
    another number.
    """
    sizes = dict(hidden=32, heads=2, experts=8, experts_per_token=2, expert_width=16)
    policy = small_policy(TinyMoE(layers=1 if family == "one layer" else 3, **sizes))
    batch = batch_of(policy, sample(policy))
    mean = balance(policy, batch, old_loads(batch, policy, Ranks())).mean()

    logits = []
    hooks = [
        r.register_forward_hook(lambda _, __, out: logits.append(out[0]))
        for r in policy.routing.routers
    ]
    policy.model(
        input_ids=batch.tokens_BS,
        attention_mask=batch.attention_BS.long(),
        position_ids=(batch.attention_BS.cumsum(-1) - 1).clamp(min=0),
    )
    for hook in hooks:
        hook.remove()
    predicting = torch.zeros_like(batch.attention_BS)
    predicting[:, batch.prompt_width - 1 : -1] = batch.mask_BT
    theirs = [load_balancing_loss_func((one,), 8, 2, predicting.long()) for one in logits]
    torch.testing.assert_close(mean, torch.stack(theirs).mean() / 2, atol=1e-5, rtol=1e-5)


def test_by_hand_and_of_equal_loads():
    policy = small_policy()
    batch = batch_of(policy, sample(policy))
    output = policy.forward(batch)
    output.balance_BT = torch.full_like(output.logp_BT, float("nan"))
    output.balance_BT[batch.mask_BT] = 1.5
    accumulator = MetricAccumulator()
    loss = BalanceTerm(0.01)(TermInputs(output, batch, Totals.of(batch.mask_BT), 1, accumulator))
    assert loss.item() == pytest.approx(0.015) and accumulator.result()[
        "routing/balance"
    ] == pytest.approx(1.5)
    assert load_metrics(torch.tensor([[5, 5, 5, 5], [0, 0, 8, 0]]))[
        "routing/load_max"
    ] == pytest.approx((1 + 4) / 2)

    policy = small_policy()
    batch = batch_of(policy, sample(policy))
    equal = balance(policy, batch, torch.full((3, 8), 1 / 8))
    torch.testing.assert_close(equal, torch.ones_like(equal))


def test_both_forwards_give_the_same_and_the_same_gradient():
    policy = small_policy()
    assert policy.padding_side == "left"  # it is found by passes of its own, before others
    batch, found = batch_of(policy, sample(policy)), []
    for network in (policy.network, None):
        policy.network = network
        policy.model.zero_grad()
        computed = balance(policy, batch, old_loads(batch, policy, Ranks()))
        computed.mean().backward()
        found.append((computed.detach(), [p.grad.clone() for p in policy.routing.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-3)


@pytest.mark.slow
def test_its_gradient_does_not_depend_on_the_micro_batches_and_goes_through_checkpointing():
    found = []
    for size, checkpointing in ((32, False), (8, False), (3, True)):
        t = trainer(GSPO(), lr=0.0, minibatches=1, micro_batch_size=size, router_aux_loss_coef=0.1)
        t.policy.network.checkpointing = checkpointing
        with recorded_gradients() as given:
            metrics = steps(t, 1)[0]
        found.append((given[0], metrics["routing/balance"]))
    for gradients, balance in found[1:]:
        assert balance == pytest.approx(found[0][1], rel=1e-5)
        for a, b in zip(gradients, found[0][0], strict=True):
            torch.testing.assert_close(a, b, atol=2e-5 * float(b.abs().max()) + 1e-9, rtol=1e-3)


@pytest.mark.slow
def test_it_balances_the_loads():
    ends = {}
    for coef in (0.0, 1.0):
        t = trainer(GSPO(), lr=3e-3, router_aux_loss_coef=coef)
        metrics = steps(t, 8)
        ends[coef] = metrics[-1]
        assert ("routing/balance" in metrics[0]) == (coef > 0)
    assert ends[1.0]["routing/load_entropy"] > ends[0.0]["routing/load_entropy"] + 0.01
    assert ends[1.0]["routing/load_max"] < ends[0.0]["routing/load_max"]


@pytest.mark.parametrize(
    "key, value",
    [
        ("policy.freeze_router", True),
        ("optim.router_lr_factor", 2.0),
        ("trainer.router_aux_loss_coef", 0.001),
    ],
)
def test_a_dense_model_has_no_router(key, value):
    with refuses(key, value, "needs an MoE model; model=tiny_dense is dense"):
        settings(f"{key}={value}", "model=tiny_dense")


def test_a_frozen_router_has_no_learning_rate_and_no_loss():
    with refuses("optim.router_lr_factor", 2.0, "is not read with"):
        settings("policy.freeze_router=true", "optim.router_lr_factor=2")
    with pytest.raises(ValueError, match="this model has no supported router"):
        parameter_groups(small_policy(TinyDense(hidden=32, layers=2, heads=2, width=48)), 1.0, True)
