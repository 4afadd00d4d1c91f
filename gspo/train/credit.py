"""Computes the advantage of every token from scored responses.

    1. verifier's reward + overlong penalty, then shift, scale, clip: at the response's last token
       (with reward.turns=each: every turn's own reward, at the turn's last token)
    2. minus beta times the KL of every token, if KL is in the reward
    3. estimator, whitening, clip: the advantage of every token

Shape suffixes: B responses, T response tokens, K named rewards.
"""

from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from gspo.algorithm.advantages import Credit
from gspo.algorithm.kl import KL
from gspo.algorithm.otb import variance_proxies
from gspo.algorithm.reward_shaping import RewardShaping, RunningMoments
from gspo.data.batch import Critic, OldPolicyBatch, TrainBatch
from gspo.data.pack import EpisodeTurns, pack_turns
from gspo.data.samples import ScoredResponse, named_rewards_of, rewards_of
from gspo.rollout.episodes.episode import CUT
from gspo.rollout.sources.base import Rollout
from gspo.train import diagnostics
from gspo.train.accumulator import MetricAccumulator
from gspo.train.settings import Algorithm


@torch.no_grad()
def add_advantages(
    old_batch: OldPolicyBatch,
    values_BT: Tensor | None,
    rollout: Rollout,
    *,
    algorithm: Algorithm,
    kl_coefficient: float,
    mask_truncated: bool,
    running: RunningMoments,
    accumulator: MetricAccumulator,
) -> tuple[TrainBatch, float]:
    """Add advantages, and leave truncated responses out of the loss if `mask_truncated`.

    Returns the batch and the KL to the reference policy in nats per token, which adapts the KL
    coefficient. It is 0 without a KL term."""
    batch = assign_credit(
        old_batch,
        values_BT,
        rollout,
        algorithm=algorithm,
        kl_coefficient=kl_coefficient,
        running=running,
        accumulator=accumulator,
    )
    kl = algorithm.kl
    measured_kl = 0.0
    if kl.needs_reference and batch.ref_logp_BT is not None:
        kl_BT = kl.estimate(batch.old_logp_BT, batch.ref_logp_BT, batch.mask_BT)
        tokens = batch.mask_BT.sum()
        measured_kl = float(kl_BT.sum() / tokens)
        accumulator.mean("kl/ref", measured_kl)
        accumulator.mean("kl/coef", kl_coefficient)
    if mask_truncated:
        batch = without_truncated(batch, rollout.responses, accumulator)
    return batch, measured_kl


def assign_credit(
    batch: OldPolicyBatch,
    values_BT: Tensor | None,
    rollout: Rollout,
    *,
    algorithm: Algorithm,
    kl_coefficient: float,
    running: RunningMoments,
    accumulator: MetricAccumulator,
) -> TrainBatch:
    """Return the batch with advantages, and with returns if there is a critic.

    The computation is in float64. `values_BT` are the critic's, and `running` holds the moments of
    all rewards so far.
    """
    mask_BT = batch.mask_BT
    group_sizes = torch.tensor([len(group) for group in rollout.groups])
    groups_B = torch.arange(len(group_sizes)).repeat_interleave(group_sizes)
    turns = pack_turns(rollout.responses, batch)
    token_rewards_BT = token_rewards(
        batch, rollout, groups_B, turns, algorithm.reward, running, accumulator
    )
    if algorithm.kl.in_reward:
        token_rewards_BT = token_rewards_BT - kl_penalty(batch, algorithm.kl, kl_coefficient)
        token_rewards_BT = torch.where(mask_BT, token_rewards_BT, 0.0)

    credit = Credit(
        token_rewards_BT,
        mask_BT,
        groups_B,
        values_BT=None if values_BT is None else values_BT.double(),
        turns_BT=None if turns is None else turns.index_BT,
    )
    weights = algorithm.reward.weights
    if weights and algorithm.advantage.needs_named_rewards:
        credit.named_rewards_BK = named_rewards(rollout, list(weights))
        credit.weights_K = torch.tensor(list(weights.values()), dtype=torch.float64)
    if batch.sum_pi_squared_BT is not None:
        credit.old_logp_BT = batch.old_logp_BT.double()
        credit.sum_pi_squared_BT = batch.sum_pi_squared_BT.double()
        if batch.correction_BT is not None:
            credit.correction_BT = batch.correction_BT.double()
    adv64_BT = algorithm.advantage(credit)
    if algorithm.advantage.needs_sum_pi_squared:
        for name, value in variance_proxies(adv64_BT, credit).items():
            accumulator.mean(f"advantage/{name}", value)
    adv_BT = adv64_BT.float()
    diagnostics.measure_advantages(adv_BT, mask_BT, accumulator)
    critic = None
    if algorithm.advantage.needs_values and values_BT is not None:
        returns_BT = algorithm.advantage.returns(credit)
        critic = Critic(values_BT, returns_BT.float())
        diagnostics.measure_explained_variance(critic, mask_BT, accumulator)
    return batch.with_advantages(adv_BT, critic)


def token_rewards(
    batch: OldPolicyBatch,
    rollout: Rollout,
    groups_B: Tensor,
    turns: EpisodeTurns | None,
    shaping: RewardShaping,
    running: RunningMoments,
    accumulator: MetricAccumulator,
) -> Tensor:
    """Return the shaped reward of every token: float64 [B, T].

    The last token of a response has its reward and its overlong penalty. With reward.turns=each the
    last token of every turn has the turn's own reward."""
    lengths_B = batch.mask_BT.sum(-1)
    penalty_B = shaping.overlong(lengths_B, rollout.limit).double()
    accumulator.mean_of("reward/overlong_penalty", penalty_B)
    rewards = [reward for group in rollout.groups for reward in rewards_of(group)]
    rewards_B = torch.tensor(rewards).double()
    last_rewards_B = shaping(rewards_B + penalty_B, groups_B, running)
    token_rewards_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
    if shaping.turns == "each" and turns is not None:
        token_rewards_BT = turns.rewards_BT
        last_rewards_B = penalty_B
    rows_B = torch.arange(len(batch))
    token_rewards_BT[rows_B, last_token(batch.mask_BT)] += last_rewards_B
    return token_rewards_BT


def kl_penalty(batch: OldPolicyBatch, kl: KL, kl_coefficient: float) -> Tensor:
    """Return the penalty for the KL of every token to the reference policy: float64 [B, T]."""
    if batch.ref_logp_BT is None:
        raise ValueError("KL in the reward needs log-probs of the reference policy")
    old_logp_BT = batch.old_logp_BT.double()
    ref_logp_BT = batch.ref_logp_BT.double()
    return kl_coefficient * kl.estimate(old_logp_BT, ref_logp_BT, batch.mask_BT)


def named_rewards(rollout: Rollout, names: list[str]) -> Tensor | None:
    """Return the named rewards of all responses, float64 [B, K], or None if one has none."""
    if any(set(names) - set(r.score.rewards) for r in rollout.responses):
        return None
    columns = []
    for name in names:
        values = [named_rewards_of(group, name) for group in rollout.groups]
        columns.append(torch.tensor(list(chain.from_iterable(values)), dtype=torch.float64))
    return torch.stack(columns, dim=1)


def without_truncated(
    batch: TrainBatch, responses: list[ScoredResponse], accumulator: MetricAccumulator
) -> TrainBatch:
    """Leave truncated responses out of the loss, and measure their share."""
    truncated_B = torch.tensor([r.finish_reason in CUT for r in responses])
    accumulator.mean_of("filter/truncated", truncated_B)
    mask_BT = batch.mask_BT & ~truncated_B.unsqueeze(-1)
    return replace(batch, mask_BT=mask_BT)


def last_token(mask_BT: Tensor) -> Tensor:
    """Return the column of each response's last token, 0 for a response without tokens: [B]."""
    columns = torch.arange(mask_BT.shape[1])
    return (mask_BT * columns).amax(-1)
