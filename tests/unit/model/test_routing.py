"""Routing record and replay on Qwen3-MoE and other MoE families, and the consistency metric."""

from dataclasses import replace

import pytest
import torch

from builders import batch_of, fed, perturb, sample, small_policy
from families import other_family
from gspo.data.batch import NOT_RECORDED
from gspo.model.forward import network
from gspo.model.forward.packing import lay_out
from gspo.model.policy import Policy
from gspo.model.routing_replay import Routing
from gspo.train.accumulator import MetricAccumulator, load_metrics
from gspo.train.routing import consistency, measure_update


@pytest.fixture(params=["qwen3_moe", "mixtral", "olmoe"])
def policy(request) -> Policy:
    return small_policy() if request.param == "qwen3_moe" else other_family(request.param)


def test_replay_of_the_own_record_changes_nothing(policy):
    batch = batch_of(policy, sample(policy))
    free, replayed = (
        policy.forward(batch),
        policy.forward(replace(batch, replay_BSLK=batch.experts_BSLK)),
    )
    assert torch.equal(free.logp_BT[batch.mask_BT], replayed.logp_BT[batch.mask_BT])
    assert torch.equal(free.experts_BSLK, replayed.experts_BSLK)


def test_after_a_weight_change_replay_restores_the_old_experts_exactly(policy, monkeypatch):
    batch = batch_of(policy, sample(policy))
    perturb(policy, 0.1)
    used, computed = [], network.run_experts

    def watched(own, h_NW, weights_NK, experts_NK, *others):
        used.append(experts_NK)
        return computed(own, h_NW, weights_NK, experts_NK, *others)

    monkeypatch.setattr(network, "run_experts", watched)
    with torch.no_grad():
        own = policy.forward(batch).experts_BSLK
        used.clear()
        policy.forward(replace(batch, replay_BSLK=batch.experts_BSLK))
    replayed, record = lay_out(batch).experts(torch.stack(used, 1)), batch.experts_BSLK
    assert torch.equal(replayed, record)
    assert not torch.equal(own, record), "the change should have moved some routes"
    assert (record[~batch.attention_BS] == NOT_RECORDED).all() and (record[fed(batch)] >= 0).all()
    assert (torch.stack(used) >= 0).all()


def test_the_hooks_replay_as_our_own_forward_does(policy):
    """The model's own forward with hooks on its routers is the way of every architecture that we do
    not know.
    """
    batch = batch_of(policy, sample(policy))
    perturb(policy, 0.1)
    replayed = replace(batch, replay_BSLK=batch.experts_BSLK)
    with torch.no_grad():
        ours = policy.forward(batch), policy.forward(replayed)
        assert policy.network, "a known family"
        policy.network = None
        hooked = policy.forward(batch), policy.forward(replayed)
    real = fed(batch)
    for a, b in zip(ours, hooked, strict=True):
        torch.testing.assert_close(
            a.logp_BT[batch.mask_BT], b.logp_BT[batch.mask_BT], atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            a.entropy_BT[batch.mask_BT], b.entropy_BT[batch.mask_BT], atol=1e-5, rtol=1e-5
        )
        assert torch.equal(a.experts_BSLK[real], b.experts_BSLK[real])


def test_replay_changes_log_probs_once_weights_have_moved(policy):
    batch = batch_of(policy, sample(policy))
    perturb(policy, 0.1)
    with torch.no_grad():
        free, replayed = (
            policy.forward(batch),
            policy.forward(replace(batch, replay_BSLK=batch.experts_BSLK)),
        )
    assert (free.logp_BT - replayed.logp_BT)[batch.mask_BT].abs().max() > 1e-3


def test_the_router_keeps_its_gradient_under_replay(policy):
    batch = batch_of(policy, sample(policy))
    perturb(policy, 0.1)
    policy.forward(replace(batch, replay_BSLK=batch.experts_BSLK)).logp_BT[
        batch.mask_BT
    ].sum().backward()
    for router in policy.routing.routers:
        assert router.weight.grad.abs().max() > 0


def test_replayed_gate_weights_come_from_the_current_router(policy):
    """The gradient of a replayed forward with respect to the router's weights equals the finite
    difference.
    """
    batch = batch_of(policy, sample(policy)[:2])
    perturb(policy, 0.1)
    router = policy.routing.routers[0]

    def total():
        return (
            policy.forward(replace(batch, replay_BSLK=batch.experts_BSLK))
            .logp_BT.double()[batch.mask_BT]
            .sum()
        )

    total().backward()
    index = divmod(int(router.weight.grad.abs().argmax()), router.weight.shape[1])
    step = 1e-2
    with torch.no_grad():
        router.weight[index] += step
        up = total()
        router.weight[index] -= 2 * step
        down = total()
    assert ((up - down) / (2 * step)).item() == pytest.approx(
        router.weight.grad[index].item(), rel=2e-2
    )


def test_a_router_with_another_gate_formula_is_refused_for_replay():
    class Qwen2MoeTopKRouter(torch.nn.Module):
        """Has the name of a router we know, but weighs experts by sigmoid."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 8))
            self.top_k, self.num_experts = 2, 4

        def forward(self, x):
            logits = x @ self.weight.T
            weights, experts = logits.sigmoid().topk(2)
            return logits, weights, experts

    with pytest.raises(ValueError, match=r"Qwen2MoeTopKRouter .* cannot be replayed"):
        Routing(Qwen2MoeTopKRouter()).check_replay()


def test_replay_without_a_router_is_refused(dense, moe):
    moe.routing.check_replay()
    with pytest.raises(ValueError, match="no router to replay"):
        dense.routing.check_replay()


def test_dense_models_have_no_routing(dense):
    batch = batch_of(dense, sample(dense))
    assert dense.routing.layers == 0 and batch.experts_BSLK is None
    assert dense.forward(batch).experts_BSLK is None


def test_consistency_by_hand():
    old = torch.tensor([[[[0, 1], [2, 3]]]])  # one token, two layers
    own = torch.tensor([[[[1, 0], [2, 7]]]])  # order does not matter; one of two changed
    assert consistency(own, old).tolist() == [[[1.0, 0.5]]]
    three = consistency(torch.tensor([[[[4, 5, 6]]]]), torch.tensor([[[[6, 1, 2]]]]))
    assert three.item() == pytest.approx(1 / 3)


def test_routing_metrics_look_at_the_positions_that_predict_response_tokens(moe):
    batch = batch_of(moe, sample(moe)[:2])
    own = batch.experts_BSLK.clone()
    start = batch.prompt_width
    # prompt positions before the last predict no response token
    own[0, : start - 1] = 7 - own[0, : start - 1]
    own[0, start + int(batch.mask_BT[0].sum()) - 1 :] = 7  # the last token predicts nothing
    accumulator = MetricAccumulator()
    measure_update(own, batch.experts_BSLK, batch, 8, 2, accumulator)
    assert accumulator.result()["routing/consistency"] == 1
    # now one that predicts the first token
    own[0, start - 1, 1] = (batch.experts_BSLK[0, start - 1, 1] + 1) % 8
    kept = consistency(
        own[:1, start - 1 : start, 1:2], batch.experts_BSLK[:1, start - 1 : start, 1:2]
    ).item()
    accumulator = MetricAccumulator()
    measure_update(own, batch.experts_BSLK, batch, 8, 2, accumulator)
    tokens, result = int(batch.mask_BT.sum()), accumulator.result()
    assert result["routing/consistency"] == pytest.approx(1 - (1 - kept) / tokens / 3)
    assert result["routing/consistency_layer_1"] == pytest.approx(1 - (1 - kept) / tokens)
    assert result["routing/consistency_minibatch_2"] == result["routing/consistency"]
    assert result["routing/changed_any_layer"] == pytest.approx(1 / tokens)


def test_load_entropy_by_hand():
    def load_entropy(loads: list[list[int]]) -> float:
        return load_metrics(torch.tensor(loads))["routing/load_entropy"]

    assert load_entropy([[5, 5, 5, 5]]) == pytest.approx(1)
    assert load_entropy([[9, 0, 0, 0]]) == 0
    assert load_entropy([[1, 1, 0, 0], [1, 1, 1, 1]]) == pytest.approx((0.5 + 1) / 2)
