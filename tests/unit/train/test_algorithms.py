"""The trainer under other algorithms: every objective, KL, critic, corrections, filters, on a small
real policy.
"""

from dataclasses import replace

import pytest
import torch

from builders import SMOOTH, assert_same_sums, batch_of, recorded_gradients, small_policy
from gspo.algorithm.advantages import (
    GAE,
    Credit,
    GroupMean,
    GroupNormalized,
    LeaveOneOut,
    ReinforcePP,
    Returns,
)
from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.corrections import MIS, TIS, Correction, IcePop, Rejection
from gspo.algorithm.kl import KLInLoss, KLInReward
from gspo.algorithm.masks import M2PO, OPSM, KPop, RhoMask
from gspo.algorithm.objectives import GRPO, GSPO, OBJECTIVES, P3O, PPO, GSPOToken
from gspo.algorithm.reward_shaping import RewardShaping
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.off_policy import make_source
from gspo.rollout.sources.problem_sampler import Uniform
from gspo.tracking.metrics import lookup
from gspo.train.accumulator import MetricAccumulator
from gspo.train.loss_terms import KLTerm, TermInputs
from gspo.train.trainer import PolicySettings, Trainer
from refusals import refuses
from trainers import FirstCharacter, steps, trainer, weights

MEAN = Aggregation("seq-mean-token-mean")
KL = {"aggregation": MEAN}


def timeless(metrics: dict) -> dict:
    return {
        k: v
        for k, v in metrics.items()
        if not k.startswith(("time", "throughput", "compute/seconds"))
    }


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_every_objective_trains_and_reports_registered_metrics(kind):
    t = trainer(
        kind(),
        aggregation=Aggregation(
            kind.aggregation, length=10 if "norm" in kind.aggregation else None
        ),
    )
    before = weights(t)
    for metrics in steps(t, 2):
        for name, value in metrics.items():
            lookup(name)
            assert value == value and abs(value) != float("inf"), name
    assert metrics["clip/token_active_minibatch_1"] == 0, "on policy nothing is clipped"
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))


FULL = {
    "advantage": GAE(),
    "kl": KLInLoss(coef=0.1, times_ratio="token", weighted=True, **KL),
    "correction": TIS(level="sequence"),
    "reward": RewardShaping(shift="batch", scale="running", clip=2.0, overlong_cache=4),
}


@pytest.mark.slow
def test_all_terms_together_do_not_depend_on_the_micro_batch_size():
    results = []
    for size in (1, 5, 32):
        t = trainer(
            GSPOToken(clip_low=0.01, clip_high=0.01), micro_batch_size=size, parts=FULL, **SMOOTH
        )
        with recorded_gradients() as gradients:
            metrics = steps(t, 2)[1]
        results.append((metrics, gradients))
    parameters = len(weights(t)) + len(list(t.policy.value_head.parameters()))
    for metrics, gradients in results[1:]:
        assert [len(update) for update in gradients] == [parameters] * 8
        for ours, others in zip(gradients, results[0][1], strict=True):
            assert_same_sums(ours, others)
        for name, value in timeless(results[0][0]).items():
            assert metrics[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name


@pytest.mark.slow
def test_kl_in_the_loss_pulls_the_policy_back_to_the_reference():
    """Without any reward signal the policy, moved away from the reference, comes back to it;
    without KL it stays.
    """
    ends = {}
    rollout = RolloutSettings(prompts_per_step=16, group_size=8, max_new_tokens=6)
    for name, parts in (("kl", {"kl": KLInLoss(coef=1.0, **KL)}), ("none", {})):
        t = trainer(lr=3e-4, parts=parts, rollout=rollout, micro_batch_size=64)
        with torch.no_grad():
            t.policy.model.lm_head.weight[7] += 0.6
        moved = weights(t)
        ends[name] = (
            flat_steps(t, 8),
            all(torch.equal(a, b) for a, b in zip(moved, weights(t), strict=True)),
        )
    series = [m["kl/ref_k3"] for m in ends["kl"][0]]
    assert series[0] > 0.1 and series[-1] < 0.3 * series[0], series
    assert all(m["kl/loss"] > 0 and m["kl/coef"] == 1.0 for m in ends["kl"][0])
    assert ends["none"][1], "no advantage and no KL: the weights stand still"


def flat_steps(t, count: int) -> list[dict]:
    """Steps in which every response has the same reward."""
    found = []
    for step in range(1, count + 1):
        rollout = t.source.next(step)
        for r in rollout.responses:
            r.score = replace(r.score, reward=0.0)
        found.append(t.train_step(step, rollout))
    return found


def test_a_kl_term_without_reference_log_probs_is_refused():
    t = trainer(parts={"kl": KLInLoss(coef=0.25, **KL)})
    with refuses("kl.coef", 0.25, "without reference policy"):
        Trainer(
            t.policy,
            t.source,
            t.algorithm,
            optim=t.optim,
            settings=t.settings,
            policy_settings=PolicySettings(),
            seed=1,
        )
    term = next(term for term in t.terms if isinstance(term, KLTerm))
    batch = batch_of(t.policy, t.source.next(1).responses)
    with pytest.raises(ValueError, match=r"kl.coef=0.25: without reference policy"):
        term(
            TermInputs(
                t.policy.forward(batch), batch, Totals.of(batch.mask_BT), 1, MetricAccumulator()
            )
        )


def test_kl_in_the_reward_is_taken_off_every_token():
    """Advantages by hand: group mean of (reward - beta * sum of k1) over the response."""
    t = trainer(parts={"kl": KLInReward(coef=0.5), "advantage": GroupMean()})
    with torch.no_grad():
        t.reference.model.lm_head.weight[7] += 0.3
    seen = []
    t.update = lambda batch, *_: seen.append(batch)
    rollout = t.source.next(1)
    t.settings.minibatches = 1
    t.train_step(1, rollout)
    batch = seen[0]
    assert batch.ref_logp_BT is not None
    lengths = batch.mask_BT.sum(-1)
    penalty = 0.5 * torch.where(batch.mask_BT, batch.old_logp_BT - batch.ref_logp_BT, 0.0).sum(-1)
    assert penalty.abs().max() > 1e-3
    by_tokens = {tuple(r.prompt_ids + r.token_ids): r.score.reward for r in rollout.responses}
    rewards = []
    for i in range(len(batch)):
        tokens = batch.tokens_BS[i][batch.attention_BS[i]].tolist()
        rewards.append(by_tokens[tuple(tokens)])
    shaped = (torch.tensor(rewards) - penalty).view(8, 4)
    expected = (shaped - shaped.mean(-1, keepdim=True)).flatten()
    for i in range(len(batch)):
        torch.testing.assert_close(
            batch.adv_BT[i, : lengths[i]], expected[i].expand(lengths[i]), atol=1e-5, rtol=1e-4
        )


def test_the_adaptive_coefficient_follows_the_measured_kl():
    t = trainer(parts={"kl": KLInLoss(coef=0.1, target=1e-6, horizon=64, **KL)})
    with torch.no_grad():
        t.policy.model.lm_head.weight[7] += 0.2
    coefficients = [m["kl/coef"] for m in steps(t, 3)]
    assert coefficients == pytest.approx(
        [0.1, 0.1 * (1 + 0.2 * 32 / 64), 0.1 * (1 + 0.2 * 32 / 64) ** 2]
    )
    assert t.state.kl_coef == t.coefficient.value > coefficients[-1]


def test_the_updates_of_a_step_use_the_coefficient_that_is_logged():
    t = trainer(parts={"kl": KLInLoss(coef=0.1, target=1e-6, horizon=64, **KL)})
    with torch.no_grad():
        t.policy.model.lm_head.weight[7] += 0.2
    used, update = [], t.update
    t.update = lambda *arguments: (used.append(t.coefficient.value), update(*arguments))
    logged = [m["kl/coef"] for m in steps(t, 2)]
    assert used == [logged[0]] * 4 + [logged[1]] * 4 and logged[0] < logged[1]


@pytest.mark.slow
def test_the_reference_is_held_or_refreshed_on_its_schedule():
    held = trainer(lr=1e-2, parts={"kl": KLInLoss(coef=1e-3, **KL)})
    moving = trainer(lr=1e-2, parts={"kl": KLInLoss(coef=1e-3, refresh_every=2, **KL)})
    a, b = steps(held, 3), steps(moving, 3)
    assert a[0]["kl/ref_k3"] < 1e-8 and b[0]["kl/ref_k3"] < 1e-8, "they start as the same policy"
    assert a[1]["kl/ref_k3"] == b[1]["kl/ref_k3"] > 1e-5
    assert a[2]["kl/ref_k3"] > 1e-5 and b[2]["kl/ref_k3"] < 1e-8, "refreshed after step 2"


@pytest.mark.slow
def test_a_critic_that_sees_the_same_responses_again_and_again_learns_their_rewards():
    rollout = RolloutSettings(prompts_per_step=8, group_size=8, max_new_tokens=8)
    t = trainer(
        PPO(),
        lr=3e-3,
        rollout=rollout,
        parts={"advantage": GAE()},
        aggregation=Aggregation("token-mean"),
    )
    batch = t.source.next(1)
    explained = [t.train_step(1, batch)["value/explained_variance"] for _ in range(15)]
    assert abs(explained[0]) < 1e-6 and explained[-1] > 0.15 and explained[-1] > explained[7], (
        explained
    )


@pytest.mark.slow
def test_ppo_learns_with_its_critic():
    rollout = RolloutSettings(prompts_per_step=8, group_size=8, max_new_tokens=8)
    t = trainer(
        PPO(),
        lr=3e-3,
        rollout=rollout,
        parts={"advantage": GAE()},
        aggregation=Aggregation("token-mean"),
    )
    found = steps(t, 30)
    rewards = [m["reward/mean"] for m in found]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3, rewards
    assert found[0]["value/explained_variance"] == pytest.approx(0, abs=1e-6), (
        "the head starts at 0"
    )
    assert {id(p) for p in t.policy.value_head.parameters()} <= {
        id(p) for g in t.optimizer.param_groups for p in g["params"]
    }


def test_a_value_head_changes_no_log_prob_and_values_stand_before_their_tokens():
    plain, with_critic = trainer(), trainer(parts={"advantage": GAE()})
    torch.nn.init.normal_(with_critic.policy.value_head.linear.weight)
    batches = []
    for t in (plain, with_critic):
        t.update = lambda batch, *_: batches.append(batch)
        t.train_step(1, t.source.next(1))
    half = len(batches) // 2
    for a, b in zip(batches[:half], batches[half:], strict=True):
        assert torch.equal(a.old_logp_BT, b.old_logp_BT)
    batch, policy = batches[half], with_critic.policy
    with torch.no_grad():
        hidden = policy.model.model(batch.tokens_BS, batch.attention_BS.long(),
                                    (batch.attention_BS.cumsum(-1) - 1).clamp(min=0)).last_hidden_state  # fmt: skip
        expected = policy.value_head.linear(hidden[:, batch.prompt_width - 1 : -1]).squeeze(-1)
    torch.testing.assert_close(
        batch.critic.old_values_BT[batch.mask_BT], expected[batch.mask_BT], atol=1e-4, rtol=1e-4
    )
    output = policy.forward(batch)
    torch.testing.assert_close(
        output.values_BT[batch.mask_BT],
        batch.critic.old_values_BT[batch.mask_BT],
        atol=1e-4,
        rtol=1e-4,
    )


def noisy(t, noise: float):
    """The first rollout of a trainer, with noise on the engine's log-probs."""
    rollout = t.source.next(1)
    g = torch.Generator().manual_seed(0)
    for r in rollout.responses:
        r.logprobs = r.logprobs + noise * torch.randn(len(r.logprobs), generator=g).numpy()
    return rollout


OF_THE_MINIBATCH = {
    "m2po": (GRPO(), M2PO(threshold=0.01), "mismatch/masked"),
    "p3o": (P3O(), Correction(), "clip/weight"),
    "opsm": (GRPO(), OPSM(delta=0.05), "mismatch/sequence_masked"),
    "tv": (GRPO(), RhoMask(measure="tv", mask_high=0.15), "mismatch/masked"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_THE_MINIBATCH)
def test_what_depends_on_the_mini_batch_does_not_depend_on_the_micro_batch_size(case):
    objective, correction, name = OF_THE_MINIBATCH[case]
    results = []
    for size in (1, 5, 32):
        t = trainer(objective, micro_batch_size=size, parts={"correction": correction}, **SMOOTH)
        with recorded_gradients() as gradients:
            metrics = t.train_step(1, noisy(t, 0.2))
        results.append((metrics, gradients))
    assert 0 < results[0][0][name] < 1
    for metrics, gradients in results[1:]:
        assert metrics[name] == pytest.approx(results[0][0][name], rel=1e-4)
        for ours, others in zip(gradients, results[0][1], strict=True):
            assert_same_sums(ours, others)


CORRECTIONS = [
    TIS(level="sequence"), MIS(level="geometric"), IcePop(), Rejection(), KPop(), M2PO(),
    OPSM(delta=0.05), RhoMask(mask_low=0.5, mask_high=2.0), RhoMask(measure="tv", mask_high=0.5),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "correction",
    [TIS(), *(pytest.param(c, marks=pytest.mark.daily) for c in CORRECTIONS)],
    ids=lambda c: c.name,
)
def test_a_correction_changes_nothing_where_engine_and_trainer_agree_and_acts_where_they_do_not(
    correction,
):
    # OPSM also sees what the step's own earlier updates have changed
    updates = {"minibatches": 1} if correction.name == "opsm" else {}
    results = {}
    for name, part, noise in (
        ("plain", Correction(), 0.0),
        ("agree", correction, 0.0),
        ("plain noisy", Correction(), 1.5),
        ("noisy", correction, 1.5),
    ):
        t = trainer(parts={"correction": part}, **updates)
        results[name] = (t.train_step(1, noisy(t, noise)), weights(t))
    for a, b in zip(results["plain"][1], results["agree"][1], strict=True):
        # Adam gives a gradient that is 0 but for rounding a full step
        differ = (a - b).abs() > 2e-5 + 1e-3 * b.abs()
        assert differ.float().mean() < 1e-3
    metrics = results["noisy"][0]
    assert metrics["mismatch/weight_token_max"] > 2 and metrics["mismatch/masked"] >= 0
    assert results["agree"][0]["mismatch/weight_token_mean"] == pytest.approx(1, abs=1e-4)
    differ = [
        (a - b).abs().max()
        for a, b in zip(results["plain noisy"][1], results["noisy"][1], strict=True)
    ]
    assert max(differ) > 1e-4


@pytest.mark.slow
def test_truncated_responses_leave_the_loss_but_stay_in_the_baseline():
    masked, plain = trainer(mask_truncated=True, minibatches=1), trainer(minibatches=1)
    batches = []
    for t in (masked, plain):
        t.update = lambda batch, *_: batches.append(batch)
        metrics = t.train_step(1, t.source.next(1))
    assert 0 < batches[0].mask_BT.any(-1).sum() < len(batches[0])
    assert torch.equal(batches[0].adv_BT, batches[1].adv_BT)
    cut = ~batches[0].mask_BT.any(-1)
    assert (batches[1].mask_BT[cut].sum(-1) == 10).all(), "those at the limit of 10 tokens"
    assert "filter/truncated" not in metrics
    # whole micro-batches without a token of the loss
    again = trainer(mask_truncated=True, micro_batch_size=1)
    before = weights(again)
    metrics = steps(again, 1)[0]
    assert metrics["filter/truncated"] == pytest.approx(cut.float().mean().item())
    assert all(v == v for v in metrics.values())
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(again), strict=True))


def test_soft_overlong_penalty_and_the_response_limit_on_a_schedule():
    rollout = RolloutSettings(prompts_per_step=8, group_size=4, max_new_tokens=6, extend={2: 9})
    found = steps(trainer(rollout=rollout, parts={"reward": RewardShaping(overlong_cache=4)}), 2)
    assert [m["length/limit"] for m in found] == [6, 9]
    assert all(-1 <= m["reward/overlong_penalty"] < 0 for m in found)
    assert steps(trainer(rollout=rollout), 1)[0]["reward/overlong_penalty"] == 0


ESTIMATORS = [
    GroupNormalized(std="batch"),
    GroupMean(),
    LeaveOneOut(),
    Returns(whiten="responses"),
    ReinforcePP(clip=1),
]


@pytest.mark.parametrize("advantage", ESTIMATORS, ids=lambda a: a.name)
def test_every_estimator_reaches_the_gradient(advantage):
    t = trainer(parts={"advantage": advantage})
    before = weights(t)
    metrics = steps(t, 1)[0]
    assert 0 < metrics["advantage/abs_max"] <= (advantage.clip or 10)
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))


def test_running_reward_statistics_are_part_of_the_state():
    t = trainer(parts={"reward": RewardShaping(shift="running"), "advantage": Returns()})
    found = steps(t, 2)
    assert t.state.rewards.count == 64
    assert t.state.rewards.mean == pytest.approx(sum(m["reward/mean"] for m in found) / 2)


def test_dynamic_sampling_pays_for_what_it_drops():
    rollout = RolloutSettings(prompts_per_step=8, group_size=2, max_new_tokens=10, refill_rounds=2)
    t = trainer(GRPO(), rollout=rollout)
    first = t.source.next(1)
    metrics = t.train_step(1, first)
    assert first.dropped and metrics["filter/zero_variance"] > 0
    dropped = sum(len(r.token_ids) for group in first.dropped for r in group)
    trained = sum(len(r.token_ids) for r in first.responses)
    assert (
        metrics["compute/dropped_tokens"] == dropped
        and metrics["compute/tokens"] == dropped + trained
    )
    rewards = [r.score.reward for group in first.sampled for r in group]
    assert metrics["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert metrics["group/zero_variance"] > 0


def test_credit_needs_values_for_gae():
    ones = torch.ones(2, 3)
    with refuses("advantage", "gae", "critic's values"):
        GAE()(Credit(ones, ones.bool(), torch.tensor([0, 0])))


def test_gspo_on_advantages_per_token_keeps_finite_and_gspo_token_is_what_ppo_advantages_want():
    t = trainer(GSPOToken(), parts={"advantage": GAE()})
    assert all(v == v for v in steps(t, 1)[0].values())


def test_sources_and_policies_of_tests_are_the_real_ones():
    policy = small_policy()
    source = make_source(
        LocalEngine(policy), FirstCharacter(), RolloutSettings(prompts_per_step=2), Uniform(), 1
    )
    assert len(source.next(1).groups) == 2 and isinstance(GSPO(), GSPO)
