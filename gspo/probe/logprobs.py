"""Measures the log-probs of a batch: clip fractions, ratios, the effect of rounding.

All functions take tensors [responses, tokens]. Masked entries may be NaN.

    logp_BT      log-probs of the current policy, float32 or better
    old_logp_BT  log-probs of the old policy
    mask_BT      1 on the response tokens
    advantages   per response [B] or per token [B, T]
    objective    GSPO(clip_low=3e-4, clip_high=4e-4), GRPO(...) or another of
                 gspo.algorithm.objectives whose ratio is to the old policy

Shape suffixes: B responses, T response tokens.
"""

import torch
from torch import Tensor

from gspo.algorithm.objectives import LossInputs, Objective
from gspo.data.batch import TrainBatch
from gspo.train import diagnostics
from gspo.train.accumulator import MetricAccumulator


@torch.no_grad()
def clip_shares(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    objective: Objective,
) -> dict[str, float]:
    """Return clip/token_active, clip/sequence_active, clip/token_outside, ...

    They are by the sign of the advantage too. An objective with a statistic of the mini-batch takes
    the batch for one. Raises ValueError for an objective that needs more than these log-probs.
    """
    check_objective(objective)
    accumulator = MetricAccumulator()
    inputs = loss_inputs(logp_BT, old_logp_BT, advantages, mask_BT)
    diagnostics.measure_clips(objective(inputs), inputs, 1, accumulator)
    metrics = accumulator.result()
    return {name: value for name, value in metrics.items() if "_minibatch_" not in name}


@torch.no_grad()
def ratio_statistics(
    logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor, log_ratio_bound: float = 20.0
) -> dict[str, float]:
    """Return ratio/sequence_*, ratio/token_*, ratio/ess_*, kl/old_k1 and kl/old_k3."""
    accumulator = MetricAccumulator()
    inputs = loss_inputs(logp_BT, old_logp_BT, None, mask_BT)
    add_ratios(inputs, log_ratio_bound, accumulator)
    return accumulator.result()


@torch.no_grad()
def rounding_floor(
    logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor, objective: Objective
) -> dict[str, float]:
    """Return ratio/floor_* of two passes through the same weights, whose ratios should be 1."""
    accumulator = MetricAccumulator()
    inputs = loss_inputs(logp_BT, old_logp_BT, None, mask_BT)
    diagnostics.measure_rounding_floor(objective, inputs, accumulator)
    return accumulator.result()


def check_objective(objective: Objective) -> None:
    """Raise ValueError for an objective that needs log-probs of the engine."""
    if objective.ratio_to == "engine":
        raise ValueError(
            f"objective={objective.name} reads log-probs of the engine, which the probe is not given; "
            "measure an objective whose ratio is to the old policy"
        )


def loss_inputs(
    logp_BT: Tensor, old_logp_BT: Tensor, advantages: Tensor | None, mask_BT: Tensor
) -> LossInputs:
    """Return the inputs of an objective. Without advantages they are 0.

    Raises ValueError if the shapes differ.
    """
    if advantages is None:
        advantages = torch.zeros_like(logp_BT)
    if advantages.ndim == 1:
        advantages = advantages.unsqueeze(-1)
    shapes = {
        "logp": logp_BT.shape,
        "old_logp": old_logp_BT.shape,
        "mask": mask_BT.shape,
        "advantages": advantages.shape,
    }
    allowed_advantages = (mask_BT.shape, (*mask_BT.shape[:1], 1))
    same = logp_BT.shape == old_logp_BT.shape == mask_BT.shape
    if mask_BT.ndim != 2 or not same or advantages.shape not in allowed_advantages:
        named = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"the shapes do not agree: {named}. All must be [responses, tokens]; advantages may "
            "be [responses]"
        )
    return LossInputs(
        logp_BT=logp_BT,
        old_logp_BT=old_logp_BT,
        adv_BT=advantages.expand(mask_BT.shape),
        mask_BT=mask_BT.bool(),
    )


def add_ratios(inputs: LossInputs, log_ratio_bound: float, accumulator: MetricAccumulator) -> None:
    """Add the importance ratios of a micro-batch to the metrics of a step."""
    mask_BT = inputs.mask_BT
    # the ratios depend on the log-probs and the mask alone
    no_tokens_BT = torch.zeros_like(mask_BT, dtype=torch.int64)
    batch = TrainBatch(
        tokens_BS=no_tokens_BT,
        attention_BS=mask_BT,
        mask_BT=mask_BT,
        sampled_BT=mask_BT,
        prompts_B=no_tokens_BT[:, 0],
        engine_logp_BT=inputs.old_logp_BT,
        old_logp_BT=inputs.old_logp_BT,
        adv_BT=inputs.adv_BT,
    )
    diagnostics.measure_ratios(
        inputs.logp_BT, batch, log_ratio_bound, accumulator, has_groups=False
    )
