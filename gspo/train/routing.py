"""Measures the routing of MoE models in a training step.

Only the positions that predict a response token count. The position before a token predicts it.

Shape suffixes: B responses, T response tokens, S all tokens, N selected tokens, L MoE layers, K
experts per token, E experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gspo.data.batch import TokenBatch, TrainBatch, to_device
from gspo.distributed.ranks import Ranks
from gspo.train.accumulator import MetricAccumulator

if TYPE_CHECKING:
    # it imports transformers, which gspo.probe does without
    from gspo.model.policy import Policy


def predicting(x_BS: Tensor, batch: TokenBatch) -> Tensor:
    """Select the positions that predict the response tokens: [B, T, ...]."""
    return x_BS[:, batch.prompt_width - 1 : -1]


def consistency(experts_BSLK: Tensor, old_experts_BSLK: Tensor) -> Tensor:
    """Compute the share of the K old experts that are also among the new: [B, S, L].

    The share is |new intersect old| / K. One minus it is the share of changed experts in section
    5.3 of the GSPO paper.
    """
    same_BSLKK = old_experts_BSLK.unsqueeze(-1) == experts_BSLK.unsqueeze(-2)
    chosen_again_BSLK = same_BSLKK.any(-1)
    return chosen_again_BSLK.float().mean(-1)


def token_consistency(experts_BSLK: Tensor, old_experts_BSLK: Tensor, batch: TokenBatch) -> Tensor:
    """Compute the consistency of the response tokens: [N, L]."""
    experts_BTLK = predicting(experts_BSLK, batch)
    old_experts_BTLK = predicting(old_experts_BSLK, batch)
    share_BTL = consistency(experts_BTLK, old_experts_BTLK)
    return batch.of_tokens(share_BTL)


def expert_counts(experts_BSLK: Tensor, batch: TokenBatch, num_experts: int) -> Tensor:
    """Count the choices of each expert for the response tokens: [L, E]."""
    experts_BTLK = predicting(experts_BSLK, batch)
    return count_choices(batch.of_tokens(experts_BTLK), num_experts)


def count_choices(experts_NLK: Tensor, num_experts: int) -> Tensor:
    """Count the choices of each expert: [L, E]."""
    chosen_LM = experts_NLK.long().transpose(0, 1).flatten(1)
    ones_LM = torch.ones_like(chosen_LM)
    counts_LE = chosen_LM.new_zeros(len(chosen_LM), num_experts)
    # bincount would wait for a GPU
    return counts_LE.scatter_add_(1, chosen_LM, ones_LM)


def old_loads(local: TrainBatch | None, policy: Policy, ranks: Ranks) -> Tensor:
    """Return the share of each expert in a mini-batch's choices under the old policy: [L, E].

    Each rank counts its local rows, None stands for no rows. The result is on the policy's device.
    """
    routing = policy.routing
    counts_LE = torch.zeros(routing.layers, routing.experts, dtype=torch.int64)
    if local and local.experts_BSLK is not None:
        counts_LE = expert_counts(local.experts_BSLK, local, routing.experts)
    counts_LE = ranks.all_reduce(counts_LE)
    total_L1 = counts_LE.sum(-1, keepdim=True).clamp(min=1)
    share_LE = counts_LE.float() / total_L1
    return to_device(share_LE, policy.device)


def measure_update(
    experts_BSLK: Tensor | None,
    old_experts_BSLK: Tensor | None,
    batch: TokenBatch,
    num_experts: int,
    update_number: int,
    accumulator: MetricAccumulator,
) -> None:
    """Measure the loads of the experts, and the agreement of the routers with the step's start.

    `update_number` counts from 1. The agreement of the first mini-batch is left out, because its
    routing is the routing at the start itself. Dense models have no experts to measure.
    """
    if experts_BSLK is None or old_experts_BSLK is None:
        return
    counts_LE = expert_counts(experts_BSLK, batch, num_experts)
    accumulator.expert_loads(counts_LE)
    if update_number == 1:
        return
    same_NL = token_consistency(experts_BSLK, old_experts_BSLK, batch)
    measure_consistency(same_NL, update_number, accumulator)


def measure_consistency(
    same_NL: Tensor, update_number: int, accumulator: MetricAccumulator
) -> None:
    """Measure the consistency of tokens in the update of a mini-batch, by layer too."""
    changed_NL = same_NL < 1
    accumulator.mean_of("routing/consistency", same_NL)
    accumulator.mean_of(f"routing/consistency_minibatch_{update_number}", same_NL)
    accumulator.mean_of("routing/changed_any_layer", changed_NL.any(-1))
    for layer, same_N in enumerate(same_NL.unbind(1)):
        accumulator.mean_of(f"routing/consistency_layer_{layer}", same_N)


@torch.no_grad()
def measure_after_step(
    policy: Policy,
    sample: TrainBatch,
    is_local_B: Tensor,
    micro_batch_size: int,
    accumulator: MetricAccumulator,
) -> None:
    """Measure the agreement of the routers after the last update with the step's start.

    `sample` holds some of the step's responses. Each rank passes its local rows through the model.
    """
    local_mask_BT = sample.mask_BT & is_local_B.unsqueeze(-1)
    sample = replace(sample, mask_BT=local_mask_BT)
    local_rows_N = is_local_B.nonzero().squeeze(-1)
    output = policy.score(sample, micro_batch_size, local_rows_N)
    if output.experts_BSLK is not None and sample.experts_BSLK is not None:
        same_NL = token_consistency(output.experts_BSLK, sample.experts_BSLK, sample)
        accumulator.mean_of("routing/consistency_after_step", same_NL)


def engine_agreement(
    experts_BSLK: Tensor,
    engine_experts_BSLK: Tensor,
    batch: TokenBatch,
    accumulator: MetricAccumulator,
) -> Tensor:
    """Measure and return the share of the engine's experts that the old policy chooses too.

    `experts_BSLK` are the old policy's. The share is the mean over layers and response tokens. It
    is measured for each layer too, and so is the share of tokens for which the experts of any layer
    differ.
    """
    same_NL = token_consistency(experts_BSLK, engine_experts_BSLK, batch)
    accumulator.mean_of("routing/engine_agreement", same_NL)
    for layer, same_N in enumerate(same_NL.unbind(1)):
        accumulator.mean_of(f"routing/engine_agreement_layer_{layer}", same_N)
    changed_NL = same_NL < 1
    accumulator.mean_of("routing/engine_changed_any_layer", changed_NL.any(-1))
    return same_NL.mean()
