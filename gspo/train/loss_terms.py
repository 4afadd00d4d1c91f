"""The terms of the loss. The loss is their sum. Each term aggregates by itself and has its metrics.

A term gets a micro-batch and returns its share of the step's loss. The trainer adds up the terms of
a list, so a new term is a new object in the list, not a branch.

Shape suffixes: B responses, T response tokens.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gspo.algorithm.advantages import Advantage
from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.corrections import Correction
from gspo.algorithm.entropy import EntropyCoefficient
from gspo.algorithm.kl import KLCoefficient, KLInLoss
from gspo.algorithm.objectives import LossInputs, LossOutputs, Objective
from gspo.algorithm.objectives.base import RatioObjective
from gspo.data.batch import TrainBatch
from gspo.data.step_record import ACTIVE, BOUNDED, DUAL, OUTSIDE
from gspo.distributed.ranks import Ranks
from gspo.io.errors import SettingError
from gspo.model.forward.outputs import PolicyOutput
from gspo.train import diagnostics
from gspo.train.accumulator import MetricAccumulator
from gspo.train.settings import Algorithm, TrainerSettings

TOKEN_MEAN = Aggregation("token-mean")


@dataclass
class TermInputs:
    """The inputs of a term."""

    output: PolicyOutput  # the result of the forward pass over the micro-batch
    batch: TrainBatch  # the micro-batch
    totals: Totals  # the counts of the whole optimizer step
    update_number: int  # in its step, counted from 1
    accumulator: MetricAccumulator
    outputs: LossOutputs | None = None  # the objective's, which PolicyTerm adds
    statistic: Tensor | None = None  # Objective.statistic of the whole mini-batch


class Term:
    """The base of the terms, which are the addends of the loss."""

    # rows whose advantages are all 0 have a gradient too
    needs_every_row: bool = True

    def __call__(self, inputs: TermInputs) -> Tensor:
        """Compute the micro-batch's share of the term, a scalar."""
        raise NotImplementedError


@dataclass
class PolicyTerm(Term):
    """The policy term: aggregate( correction * objective )."""

    objective: Objective
    aggregation: Aggregation
    correction: Correction = field(default_factory=Correction)

    def __post_init__(self):
        self.needs_every_row = self.objective.needs_every_row

    def __call__(self, inputs: TermInputs) -> Tensor:
        batch = inputs.batch
        accumulator = inputs.accumulator
        tensors = loss_inputs(inputs.output, batch, inputs.statistic)
        outputs = self.objective(tensors)
        if self.correction.acts == "minibatch":
            # a record of the step shows which tokens have left the mini-batch
            weight_BT = torch.where(batch.mask_BT, outputs.weight_BT, 0.0)
            outputs = replace(outputs, weight_BT=weight_BT)
        inputs.outputs = outputs
        with torch.no_grad(), accumulator.timed("time/diagnostics_s"):
            diagnostics.measure_clips(
                outputs, tensors, inputs.update_number, accumulator, batch.choice_BT
            )
            if self.objective.weighs_by_length:
                diagnostics.measure_weights_by_length(outputs.weight_BT, batch.mask_BT, accumulator)
        loss_BT = outputs.loss_BT
        used_BT = outputs.weight_BT.detach().float()
        if not self.objective.includes_correction:
            loss_BT = corrected(loss_BT, batch)
            used_BT = corrected(used_BT, batch)
        if self.correction.acts == "loss":
            weights_BT = self.correction.loss_weights(tensors)
            loss_BT = loss_BT * weights_BT
            used_BT = used_BT * weights_BT
            with torch.no_grad(), accumulator.timed("time/diagnostics_s"):
                diagnostics.measure_update_correction(
                    weights_BT, batch.mask_BT, batch.choice_BT, accumulator
                )
        with torch.no_grad(), accumulator.timed("time/diagnostics_s"):
            accumulator.row_weights("ratio", "_used", batch.prompts_B, used_BT, batch.mask_BT)
        return self.aggregation(loss_BT, batch.mask_BT, inputs.totals)


@dataclass
class KLTerm(Term):
    """The KL term, beta * aggregate( KL estimate ), see KLInLoss.

    It raises ValueError without reference log-probs.
    """

    settings: KLInLoss
    coefficient: KLCoefficient

    def __call__(self, inputs: TermInputs) -> Tensor:
        settings = self.settings
        output = inputs.output
        batch = inputs.batch
        mask_BT = batch.mask_BT
        if batch.ref_logp_BT is None:
            raise SettingError(
                "kl.coef", settings.coef, "without reference policy: ref_logp_BT is missing"
            )
        kl_BT = settings.estimate(output.logp_BT, batch.ref_logp_BT, mask_BT)
        if settings.times_ratio != "none":
            bounded = RatioObjective(log_ratio_bound=settings.log_ratio_bound)
            tensors = loss_inputs(output, batch)
            if settings.times_ratio == "token":
                ratio_BT, _ = bounded.token_ratio(tensors)
                kl_BT = kl_BT * ratio_BT
            else:
                ratio_B1, _ = bounded.sequence_ratio(tensors)
                kl_BT = kl_BT * ratio_B1
        if settings.weighted:
            kl_BT = corrected(kl_BT, batch)
        kl = settings.aggregation(kl_BT, mask_BT, inputs.totals)
        loss = self.coefficient.value * kl
        sequences = mask_BT.any(-1).sum()
        share = sequences / max(inputs.totals.sequences, 1)
        inputs.accumulator.mean("kl/loss", loss.detach(), share)
        return loss


@dataclass
class ValueTerm(Term):
    """The critic's term, the squared error of its values (see GAE) as the mean over tokens.

        value_coef * mean  1/2 max( (V - R)^2, (clip(V, V_old +- value_clip) - R)^2 )

    It raises ValueError without values.
    """

    settings: Advantage

    def __call__(self, inputs: TermInputs) -> Tensor:
        values_BT = inputs.output.values_BT
        critic = inputs.batch.critic
        if values_BT is None or critic is None:
            raise SettingError("advantage", self.settings.name, "needs the critic's values")
        mask_BT = inputs.batch.mask_BT
        clip = self.settings.value_clip
        with torch.no_grad():
            diagnostics.measure_values(values_BT, critic, mask_BT, clip, inputs.accumulator)
        values_BT = torch.where(mask_BT, values_BT, 0.0)
        old_values_BT = torch.where(mask_BT, critic.old_values_BT, 0.0)
        returns_BT = torch.where(mask_BT, critic.returns_BT, 0.0)
        change_BT = values_BT - old_values_BT
        clipped_BT = old_values_BT + change_BT.clamp(-clip, clip)
        error_BT = (values_BT - returns_BT).square()
        clipped_error_BT = (clipped_BT - returns_BT).square()
        loss_BT = torch.maximum(error_BT, clipped_error_BT) / 2
        loss = TOKEN_MEAN(loss_BT, mask_BT, inputs.totals)
        return self.settings.value_coef * loss


@dataclass
class BalanceTerm(Term):
    """The auxiliary loss that balances the loads of the experts, as the mean over MoE layers.

        router_aux_loss_coef * E * sum_e f_e P_e        (arXiv:2101.03961, equation 4)

    P_e is the mean over the response tokens of the probability that the router gives expert e. f_e
    is the share of expert e in the mini-batch's choices under the old policy. It is fixed for the
    whole optimizer step, so the gradient does not depend on the micro-batches. If all experts are
    used equally, E * sum_e f_e P_e is 1. The term raises ValueError outside Routing.balancing.
    """

    coef: float

    def __call__(self, inputs: TermInputs) -> Tensor:
        balance_BT = inputs.output.balance_BT
        mask_BT = inputs.batch.mask_BT
        if balance_BT is None:
            raise ValueError("the auxiliary loss needs the routers' loads: balance_BT is missing")
        balance = TOKEN_MEAN(balance_BT, mask_BT, inputs.totals)
        share = mask_BT.sum() / max(inputs.totals.tokens, 1)
        inputs.accumulator.mean("routing/balance", balance.detach(), share)
        return self.coef * balance


class EntropyTerm(Term):
    """The entropy bonus, -alpha * aggregate( H ), with the policy term's aggregation.

    verl and ROLL have it too. H = -sum_v pi_v log pi_v is the entropy of the distribution that the
    ratio is of, at the sampling temperature: the whole one, or that of the kept tokens. alpha is
    the coefficient that acts in this update, see EntropyCoefficient. The term raises ValueError
    without the entropy of every token.
    """

    def __init__(self, coefficient: EntropyCoefficient, aggregation: Aggregation):
        self.coefficient = coefficient
        self.aggregation = aggregation
        # nats: the sum over the tokens of the mini-batch that have been passed so far
        self.entropy_sum: Tensor | float = 0.0

    def __call__(self, inputs: TermInputs) -> Tensor:
        entropy_BT = inputs.output.entropy_BT
        mask_BT = inputs.batch.mask_BT
        if entropy_BT is None:
            raise ValueError(
                "the entropy bonus needs the entropy of every token: entropy_BT is missing"
            )
        measured_BT = torch.where(mask_BT, entropy_BT.detach(), 0.0)
        self.entropy_sum = self.entropy_sum + measured_BT.double().sum()
        share = mask_BT.sum() / max(inputs.totals.tokens, 1)
        alpha = self.coefficient.acting
        inputs.accumulator.mean("policy/entropy_coef", alpha * share, share)
        entropy = self.aggregation(entropy_BT, mask_BT, inputs.totals)
        return -alpha * entropy

    def end_update(self, totals: Totals, ranks: Ranks) -> None:
        """Adapt the coefficient by the entropy of the whole mini-batch.

        Each rank has passed a share of it. With a fixed coefficient no number is read, because that
        would wait for a GPU."""
        entropy_sum = self.entropy_sum
        self.entropy_sum = 0.0
        if totals.tokens and self.coefficient.target is not None:
            local = torch.tensor(float(entropy_sum), dtype=torch.float64)
            total = float(ranks.all_reduce(local))
            self.coefficient.update(total / totals.tokens)

    def state(self) -> list[float | None]:
        """Return the state of the coefficient, ready for JSON."""
        return [self.coefficient.value, self.coefficient.measured]

    def load_state(self, state: list[float | None]) -> None:
        """Restore the result of `state`."""
        value, measured = state
        if value is not None:
            self.coefficient.value = value
        self.coefficient.measured = measured


def corrected(loss_BT: Tensor, batch: TrainBatch) -> Tensor:
    """Multiply the loss of every token by the batch's correction, if any."""
    if batch.correction_BT is None:
        return loss_BT
    return loss_BT * batch.correction_BT.detach()


def loss_terms(
    algorithm: Algorithm,
    settings: TrainerSettings,
    coefficient: KLCoefficient,
    entropy: EntropyTerm | None,
) -> list[Term]:
    """Return the addends of the loss.

    PolicyTerm    always
    KLTerm        if the loss has a KL term
    ValueTerm     if the advantages need a critic
    BalanceTerm   if trainer.router_aux_loss_coef is not 0
    EntropyTerm   if there is an entropy bonus
    """
    terms: list[Term] = [
        PolicyTerm(algorithm.objective, settings.aggregation, algorithm.correction)
    ]
    if isinstance(algorithm.kl, KLInLoss):
        terms.append(KLTerm(algorithm.kl, coefficient))
    if algorithm.advantage.needs_values:
        terms.append(ValueTerm(algorithm.advantage))
    if settings.router_aux_loss_coef:
        terms.append(BalanceTerm(settings.router_aux_loss_coef))
    if entropy:
        terms.append(entropy)
    return terms


def loss_inputs(
    output: PolicyOutput, batch: TrainBatch, statistic: Tensor | None = None
) -> LossInputs:
    """Return the tensors that an objective may read."""
    return LossInputs(
        logp_BT=output.logp_BT,
        old_logp_BT=batch.old_logp_BT,
        adv_BT=batch.adv_BT,
        mask_BT=batch.mask_BT,
        engine_logp_BT=batch.engine_logp_BT,
        ref_logp_BT=batch.ref_logp_BT,
        lengths_B=batch.real_BT.sum(-1),
        correction_BT=batch.correction_BT,
        statistic=statistic,
    )


def clip_bits(outputs: LossOutputs) -> Tensor:
    """Return the clip masks of an objective as a sum of bits: uint8 [B, T]."""
    bits_BT = ACTIVE * outputs.is_clipped_BT.byte() + OUTSIDE * outputs.outside_BT.byte()
    bits_BT = bits_BT + BOUNDED * outputs.bounded_BT.byte()
    if outputs.dual_BT is not None:
        bits_BT = bits_BT + DUAL * outputs.dual_BT.byte()
    return bits_BT
