"""Computes the advantage of every token from scored responses.

    verifier's reward + overlong penalty -> shift, scale, clip -> the response's last token
    (reward.turns=each: every
                                                                  turn's own reward -> its last
                                                                  token)
    - beta KL of every token, where KL is in the reward          -> estimator, whitening, clip

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.algorithm.advantages import Credit
from gspo.algorithm.kl import KLCoefficient
from gspo.algorithm.reward_shaping import RunningMoments
from gspo.data.batch import TrainBatch
from gspo.train import diagnostics
from gspo.train.accumulator import MetricAccumulator
from gspo.train.settings import Algorithm


def assign_credit(
    batch: TrainBatch,
    rewards_B: Tensor,
    groups_B: Tensor,
    *,
    limit: int,
    algorithm: Algorithm,
    coefficient: KLCoefficient | None,
    running: RunningMoments,
    accumulator: MetricAccumulator,
) -> None:
    """Set the batch's advantages, and its returns if there is a critic. The computation is in
    float64.

    `limit` is the largest number of tokens a response may have, and `running` holds the moments of
    all rewards so far.
    """
    mask_BT, advantage = batch.mask_BT, algorithm.advantage
    lengths_B = mask_BT.sum(-1)
    penalty_B = algorithm.reward.overlong(lengths_B, limit).double()
    accumulator.mean("reward/overlong_penalty", penalty_B.sum(), len(penalty_B))
    shaped_B = algorithm.reward(rewards_B.double() + penalty_B, groups_B, running)
    token_rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    if algorithm.reward.turns == "each" and batch.turn_rewards_BT is not None:
        token_rewards_BT, shaped_B = batch.turn_rewards_BT.clone(), penalty_B
    token_rewards_BT[torch.arange(len(batch)), last_token(mask_BT)] += shaped_B
    if algorithm.kl.in_reward:
        kl_BT = algorithm.kl.estimate(
            batch.old_logp_BT.double(), batch.ref_logp_BT.double(), mask_BT
        )
        token_rewards_BT = torch.where(mask_BT, token_rewards_BT - coefficient.value * kl_BT, 0.0)
    values_BT = None if batch.old_values_BT is None else batch.old_values_BT.double()
    credit = Credit(token_rewards_BT, mask_BT, groups_B, values_BT, batch.turns_BT)
    batch.adv_BT = advantage(credit).float()
    diagnostics.advantages(batch, accumulator)
    if advantage.needs_values:
        batch.returns_BT = advantage.returns(credit).float()
        diagnostics.explained_variance(batch, accumulator)


def last_token(mask_BT: Tensor) -> Tensor:
    """Find the column of each response's last token; 0 for a response without tokens. Shape [B]."""
    return (mask_BT * torch.arange(mask_BT.shape[1])).amax(-1)
