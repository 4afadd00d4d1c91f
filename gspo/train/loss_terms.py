"""The terms of the loss. The total is their sum; each aggregates by itself and measures its own
metrics.

A term is called with the tensors of a micro-batch and the counts of the whole optimizer step, and
returns its share of the step's loss. The trainer adds up the terms of a list, so a further term is
a further object in it, not a branch.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from gspo.algorithm.advantages import GAE
from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.entropy import EntropyCoefficient
from gspo.algorithm.kl import KLCoefficient, KLInLoss
from gspo.algorithm.objectives import LossInputs, Objective
from gspo.algorithm.objectives.base import RatioObjective
from gspo.data.batch import TrainBatch
from gspo.distributed.ranks import Ranks
from gspo.model.forward.outputs import PolicyOutput
from gspo.train import diagnostics
from gspo.train.accumulator import MetricAccumulator
from gspo.train.settings import Algorithm


class Term(Protocol):
    """Describes one addend of the loss."""

    @property
    def needs_every_row(self) -> bool:
        """Whether rows whose advantages are all 0 have a gradient too."""
        ...

    def __call__(
        self, inputs: LossInputs, totals: Totals, minibatch: int, accumulator: MetricAccumulator
    ) -> Tensor:
        """Compute the micro-batch's share of the term, a scalar. `minibatch` counts the updates of
        the step from 1.
        """
        ...


@dataclass
class PolicyTerm:
    """The policy term: aggregate( correction * objective )."""

    objective: Objective
    aggregation: Aggregation

    @property
    def needs_every_row(self) -> bool:
        """Whether the objective's gradient is not 0 where the advantage is."""
        return self.objective.needs_every_row

    def __call__(
        self, inputs: LossInputs, totals: Totals, minibatch: int, accumulator: MetricAccumulator
    ) -> Tensor:
        outputs = self.objective(inputs)
        with torch.no_grad(), accumulator.timed("time/diagnostics_s"):
            diagnostics.clips(outputs, inputs, minibatch, accumulator)
        return self.aggregation(corrected(outputs.loss_BT, inputs), inputs.mask_BT, totals)


@dataclass
class KLTerm:
    """The KL term, beta * aggregate( KL estimate ), see KLInLoss. It raises ValueError without
    reference log-probs.
    """

    settings: KLInLoss
    coefficient: KLCoefficient
    needs_every_row: ClassVar[bool] = True

    def __call__(
        self, inputs: LossInputs, totals: Totals, minibatch: int, accumulator: MetricAccumulator
    ) -> Tensor:
        if inputs.ref_logp_BT is None:
            raise ValueError(
                f"kl.coef={self.settings.coef} without reference policy: ref_logp_BT is missing"
            )
        kl_BT = self.settings.estimate(inputs.logp_BT, inputs.ref_logp_BT, inputs.mask_BT)
        if self.settings.times_ratio != "none":
            exponent = RatioObjective(log_ratio_bound=self.settings.log_ratio_bound)
            ratio = (
                exponent.token_ratio
                if self.settings.times_ratio == "token"
                else exponent.sequence_ratio
            )
            kl_BT = kl_BT * ratio(inputs)[0]
        if self.settings.weighted:
            kl_BT = corrected(kl_BT, inputs)
        loss = self.coefficient.value * self.settings.aggregation(kl_BT, inputs.mask_BT, totals)
        accumulator.mean(
            "kl/loss", loss.detach(), inputs.mask_BT.any(-1).sum() / max(totals.sequences, 1)
        )
        return loss


@dataclass
class ValueTerm:
    """The critic's term, see GAE: value_coef * the mean over tokens of

    1/2 max( (V - R)^2, (clip(V, V_old +- value_clip) - R)^2 )
    """

    settings: GAE
    needs_every_row: ClassVar[bool] = True

    def __call__(
        self, inputs: LossInputs, totals: Totals, minibatch: int, accumulator: MetricAccumulator
    ) -> Tensor:
        mask_BT, clip = inputs.mask_BT, self.settings.value_clip
        values_BT, old_BT, returns_BT = (
            torch.where(mask_BT, x, 0.0)
            for x in (inputs.values_BT, inputs.old_values_BT, inputs.returns_BT)
        )
        clipped_BT = old_BT + (values_BT - old_BT).clamp(-clip, clip)
        error_BT = (
            torch.maximum((values_BT - returns_BT).square(), (clipped_BT - returns_BT).square()) / 2
        )
        with torch.no_grad():
            diagnostics.values(inputs, clip, accumulator)
        return self.settings.value_coef * Aggregation("token-mean")(error_BT, mask_BT, totals)


@dataclass
class BalanceTerm:
    """The auxiliary loss that balances the loads of the experts (arXiv:2101.03961, equation 4),
    mean over MoE layers:

    router_aux_loss_coef * E * sum_e f_e P_e

    P_e is the mean over the response tokens of the probability that the router gives expert e. f_e
    is the share of the mini-batch's choices that fell on e under the old policy: fixed for the
    whole optimizer step, so that the gradient does not depend on the micro-batches. The sum is 1
    where all experts are used equally.
    """

    coef: float
    needs_every_row: ClassVar[bool] = True

    def __call__(
        self, inputs: LossInputs, totals: Totals, minibatch: int, accumulator: MetricAccumulator
    ) -> Tensor:
        balance = Aggregation("token-mean")(inputs.balance_BT, inputs.mask_BT, totals)
        accumulator.mean(
            "routing/balance", balance.detach(), inputs.mask_BT.sum() / max(totals.tokens, 1)
        )
        return self.coef * balance


class EntropyTerm:
    """The entropy bonus, -alpha * aggregate( H ), with the policy term's aggregation, as in verl
    and ROLL.

    H = -sum_v pi_v log pi_v is the entropy of the whole distribution at the sampling temperature,
    of which the ratio is too. alpha is the coefficient that acts in this update, see
    EntropyCoefficient.
    """

    needs_every_row: ClassVar[bool] = True

    def __init__(self, coefficient: EntropyCoefficient, aggregation: Aggregation):
        self.coefficient, self.aggregation = coefficient, aggregation
        # nats: the sum over the tokens of the mini-batch that have been passed so far
        self.passed = 0.0

    def __call__(
        self, inputs: LossInputs, totals: Totals, minibatch: int, accumulator: MetricAccumulator
    ) -> Tensor:
        """Compute the micro-batch's share. Raises ValueError without inputs.entropy_BT."""
        if inputs.entropy_BT is None:
            raise ValueError(
                "the entropy bonus needs the entropy of every token: entropy_BT is missing"
            )
        own_BT = torch.where(inputs.mask_BT, inputs.entropy_BT.detach(), 0.0)
        self.passed = self.passed + own_BT.double().sum()
        share, alpha = inputs.mask_BT.sum() / max(totals.tokens, 1), self.coefficient.acting
        accumulator.mean("policy/entropy_coef", alpha * share, share)
        return -alpha * self.aggregation(inputs.entropy_BT, inputs.mask_BT, totals)

    def end_update(self, totals: Totals, ranks: Ranks) -> None:
        """Adapt the coefficient by the entropy of the whole mini-batch, of which each rank has
        passed a share. A fixed one reads no number, for which a GPU would have to be waited for."""
        passed, self.passed = self.passed, 0.0
        if totals.tokens and self.coefficient.target is not None:
            total = torch.tensor(float(passed), dtype=torch.float64)
            self.coefficient.update(float(ranks.all_reduce(total)) / totals.tokens)


def corrected(loss_BT: Tensor, inputs: LossInputs) -> Tensor:
    """Multiply the loss of every token by the correction for the mismatch of engine and trainer, if
    there is one.
    """
    return loss_BT if inputs.correction_BT is None else loss_BT * inputs.correction_BT.detach()


def loss_terms(
    algorithm: Algorithm,
    aggregation: Aggregation,
    coefficient: KLCoefficient | None,
    router_aux_loss_coef: float,
) -> list[Term]:
    """List the addends of the loss: the policy term, the KL and value terms of algorithms that have
    them, and the auxiliary loss of the routers if its coefficient is not 0. The trainer adds the
    entropy term."""
    terms: list[Term] = [PolicyTerm(algorithm.objective, aggregation)]
    if algorithm.kl.in_loss:
        terms.append(KLTerm(algorithm.kl, coefficient))
    if algorithm.advantage.needs_values:
        terms.append(ValueTerm(algorithm.advantage))
    if router_aux_loss_coef:
        terms.append(BalanceTerm(router_aux_loss_coef))
    return terms


def loss_inputs(output: PolicyOutput, batch: TrainBatch) -> LossInputs:
    """Collect what the loss terms may read: the results of this forward pass and what the batch
    holds.
    """
    return LossInputs(
        logp_BT=output.logp_BT,
        old_logp_BT=batch.old_logp_BT,
        adv_BT=batch.adv_BT,
        mask_BT=batch.mask_BT,
        engine_logp_BT=batch.engine_logp_BT,
        ref_logp_BT=batch.ref_logp_BT,
        correction_BT=batch.correction_BT,
        values_BT=output.values_BT,
        old_values_BT=batch.old_values_BT,
        returns_BT=batch.returns_BT,
        balance_BT=output.balance_BT,
        entropy_BT=output.entropy_BT,
        lengths_B=batch.attention_BS[:, batch.prompt_width :].sum(-1),
    )
