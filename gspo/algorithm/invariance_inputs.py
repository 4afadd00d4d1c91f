"""Random inputs for the checks of invariances, and the loss and gradient of an objective on them.

Everything is in float64. Shape suffixes: B responses, T response tokens.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.objectives import LossInputs, Objective

# standard deviations of the log-ratios in nats, from within GSPO's clip range to beyond GRPO's
SPREADS = (1e-3, 0.05, 0.5)
BATCH_SIZE = 10
MAX_RESPONSE_TOKENS = 8
AGGREGATION = Aggregation("seq-mean-token-mean")
FIELDS = ("logp_BT", "old_logp_BT", "adv_BT", "engine_logp_BT", "ref_logp_BT")


def random_inputs(seed: int, spread: float) -> LossInputs:
    """Return log-probs, advantages and a mask of random responses.

    Response 0 has a gap in its mask, like responses of several turns. Response 1 has the
    advantage 0.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH_SIZE, MAX_RESPONSE_TOKENS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    uniform_BT = torch.rand(*shape, generator=generator, dtype=torch.float64)
    old_BT = -1 - 3 * uniform_BT
    lengths_B1 = torch.randint(1, MAX_RESPONSE_TOKENS + 1, (BATCH_SIZE, 1), generator=generator)
    mask_BT = torch.arange(MAX_RESPONSE_TOKENS) < lengths_B1
    mask_BT[0] = True
    mask_BT[0, 1:3] = False
    adv_BT = normal(BATCH_SIZE, 1).expand(shape).clone()
    adv_BT[1] = 0
    return LossInputs(
        logp_BT=(old_BT + spread * normal(*shape)).clamp(max=-0.01).requires_grad_(),
        old_logp_BT=old_BT,
        adv_BT=adv_BT,
        mask_BT=mask_BT,
        engine_logp_BT=old_BT + 0.1 * spread * normal(*shape),
        ref_logp_BT=old_BT + normal(*shape),
    )


def on_policy_inputs() -> LossInputs:
    """Return random inputs with the same log-probs under the policy, the old one and the engine."""
    inputs = random_inputs(0, 0.0)
    return changed(replace(inputs, engine_logp_BT=inputs.old_logp_BT), torch.clone)


def all_inputs(objective: Objective) -> Iterator[LossInputs]:
    """Yield the inputs of a check for each spread of the log-ratios."""
    for seed, spread in enumerate(SPREADS):
        inputs = random_inputs(seed, spread)
        yield replace(inputs, statistic=objective.statistic(inputs))


def changed(inputs: LossInputs, change: Callable[[Tensor], Tensor]) -> LossInputs:
    """Return inputs with `change` applied to every tensor. The new log-probs are a leaf tensor."""
    tensors = {name: change(getattr(inputs, name).detach()) for name in (*FIELDS, "mask_BT")}
    tensors["logp_BT"] = tensors["logp_BT"].clone().requires_grad_()
    return replace(inputs, **tensors)


def with_padding(inputs: LossInputs, value: float) -> LossInputs:
    """Return inputs that hold `value` at every masked position."""
    mask_BT = inputs.mask_BT

    def fill(x_BT: Tensor) -> Tensor:
        return x_BT if x_BT.dtype == torch.bool else torch.where(mask_BT, x_BT, value)

    return changed(inputs, fill)


def gradient(
    objective: Objective, inputs: LossInputs, totals: Totals | None = None, penalty: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient with respect to the log-probs [B, T].

    If `penalty` is false, the penalty is left out (LossOutputs.penalty_BT).
    """
    totals = totals or Totals.of(inputs.mask_BT)
    outputs = objective(inputs)
    loss_BT = outputs.loss_BT
    if not penalty and outputs.penalty_BT is not None:
        loss_BT = loss_BT - outputs.penalty_BT
    loss = AGGREGATION(loss_BT, inputs.mask_BT, totals)
    gradient_BT = None
    if loss.requires_grad:
        (gradient_BT,) = torch.autograd.grad(loss, inputs.logp_BT, allow_unused=True)
    if gradient_BT is None:
        gradient_BT = torch.zeros_like(inputs.logp_BT)
    return loss.detach(), gradient_BT


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return max |a - b| / max |b|, infinite if it is NaN."""
    error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))
    return float("inf") if math.isnan(error) else error
