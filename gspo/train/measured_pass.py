"""Measures the forward pass of a micro-batch in an update, for the trainer and for a replay.

Shape suffixes: B responses, T response tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from gspo.algorithm.corrections import Correction
from gspo.algorithm.objectives import Objective
from gspo.data.batch import TrainBatch
from gspo.model.forward.outputs import PolicyOutput
from gspo.train import diagnostics, routing
from gspo.train.accumulator import MetricAccumulator
from gspo.train.engine_comparison import EngineComparison
from gspo.train.loss_terms import loss_inputs


@torch.no_grad()
def reduce_minibatch(
    minibatch: TrainBatch, correction: Correction, accumulator: MetricAccumulator
) -> TrainBatch:
    """Leave tokens out of a whole mini-batch if the correction does so, and measure their share.

    All ranks hold the whole mini-batch, so the result does not depend on their number.
    """
    if correction.acts != "minibatch":
        return minibatch
    mask_BT = minibatch.mask_BT
    reduced_BT = correction.reduced_mask(minibatch.old_logp_BT, minibatch.engine_logp_BT, mask_BT)
    diagnostics.measure_masked(reduced_BT, mask_BT, minibatch.choice_BT, accumulator)
    return replace(minibatch, mask_BT=reduced_BT)


@torch.no_grad()
def start_at_old_policy(
    output: PolicyOutput,
    micro: TrainBatch,
    objective: Objective,
    engine_is_old: bool,
    statistic: Tensor | None,
    accumulator: MetricAccumulator,
) -> TrainBatch:
    """Measure the effect of rounding on the first ratios, then make them exactly 1.

    The policy still is the old policy in the first mini-batch, and this pass has just computed its
    log-probs. The log-probs of the pass under the old policy differ from these by rounding alone,
    because other matrix shapes round otherwise. Returns the micro-batch with this pass's log-probs
    as its old log-probs. With policy.old_logprobs=engine (`engine_is_old`) the ratio is to the
    engine, and the micro-batch stays as it is. `statistic` is Objective.statistic of the whole
    mini-batch.
    """
    inputs = loss_inputs(output, micro, statistic)
    diagnostics.measure_rounding_floor(objective, inputs, accumulator)
    if engine_is_old:
        return micro
    return micro.with_old_results(output.logp_BT.detach(), micro.experts_BSLK)


@torch.no_grad()
def measure_pass(
    output: PolicyOutput,
    micro: TrainBatch,
    update_number: int,
    objective: Objective,
    experts: int,
    accumulator: MetricAccumulator,
) -> None:
    """Measure ratios, entropy and routing of an update's forward pass.

    `update_number` counts from 1, and `experts` is the number of experts of each MoE layer.
    """
    diagnostics.measure_ratios(output.logp_BT, micro, objective.log_ratio_bound, accumulator)
    if output.entropy_BT is not None:
        diagnostics.measure_entropy(output.entropy_BT, micro, accumulator)
    routing.measure_update(
        output.experts_BSLK, micro.experts_BSLK, micro, experts, update_number, accumulator
    )


@torch.no_grad()
def compare_with_engine(
    output: PolicyOutput,
    micro: TrainBatch,
    comparison: EngineComparison,
    accumulator: MetricAccumulator,
) -> None:
    """Compare the engine with a pass of the first mini-batch, in which the policy is still old."""
    sampled = micro.with_all_sampled()
    sampled = sampled.with_old_results(output.logp_BT, output.experts_BSLK)
    comparison.measure(sampled, accumulator)
