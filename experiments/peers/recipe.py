"""Evaluates a peer's policy loss, expressed in our terms: its value and gradient on an entry's
inputs.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.corrections import EXPONENT_BOUND, Correction
from gspo.algorithm.kl import KLInLoss
from gspo.algorithm.masks import KPop
from gspo.algorithm.objectives import GMPO, SAPO, LossInputs, LossOutputs, Objective, log_ratio
from gspo.algorithm.objectives.base import RatioObjective
from gspo.data.masked import masked_mean
from peers.options import Untranslated
from peers.result import Values
from peers.vectors import Entry

UNBOUNDED = 80.0  # nats; our largest log_ratio_bound, for peers that have none
EPSILON = 1e-8
LARGE_EXPONENT = 11.5  # nats; about 12 and more


def as_given(adv_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return adv_BT


def response_mean(adv_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return masked_mean(adv_BT, mask_BT).unsqueeze(-1).expand_as(adv_BT)


def times_length(adv_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return adv_BT * mask_BT.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Epsilon:
    """Where a peer's denominators hold 1e-8, which ours do not need."""

    tokens: bool = False  # n_i + 1e-8 in the mean over a response
    responses: bool = False  # V + 1e-8 in the mean over the V responses with tokens
    weights: bool = False  # the policy term is multiplied by B / (B + 1e-8): ROLL's sample weights
    exponent: bool = False  # n_i + 1e-8 in the mean log-ratio


@dataclass
class PolicyLoss:
    """A peer's policy loss in our terms."""

    row: str  # the table's row
    objective: Objective
    aggregation: Aggregation
    kl: KLInLoss | None = None
    correction: Correction | None = None  # corrects from the behaviour policy to the old one
    weights: str = ""  # the input that holds the weights of a correction, instead of `correction`
    # computes the peer's other outputs
    outputs: Callable[[Evaluation, Entry], dict[str, Values]] | None = None
    # computes what the aggregation counts, from the mask
    totals: Callable[[Tensor], Totals] = Totals.of
    advantages: Callable[[Tensor, Tensor], Tensor] = as_given  # applied to the advantages first
    # whether the sum runs over masked positions too: our loss is then given a mask of ones
    everywhere: bool = False
    # `everywhere` with a sequence ratio: each position's log-ratio is the response's mean
    spread: bool = False
    empty_rows_cost: bool = False  # a response without tokens adds the constant -A / B (TRL's GMPO)
    bound: str = "none"  # the peer's own bound: none | upper (like ours above, none below) | same
    epsilon: Epsilon | None = None
    counts_high: bool = True  # used by clips.trl
    notes: list[str] = field(default_factory=list)  # what our conventions cannot express


@dataclass
class Evaluation:
    """Our loss on an entry's inputs, and what is needed to judge the difference."""

    loss: float
    grad_BT: Tensor
    outputs: LossOutputs
    inputs: LossInputs  # the inputs as our objective saw them
    mask_BT: Tensor  # the entry's own mask
    totals: Totals
    correction_BT: Tensor | None
    objective: Objective
    exponent: float  # the largest |log-ratio| that was exponentiated, in nats
    beyond: str  # if not empty, what lies beyond a bound of ours that the peer does not have


def evaluate(peer: PolicyLoss, entry: Entry, epsilon: Epsilon | None = None) -> Evaluation:
    """Return value and gradient of our translation, with a peer's 1e-8 put back if given.

    Raises Untranslated if the entry lacks an input.
    """
    epsilon = epsilon or Epsilon()
    logp_BT = entry.inputs["logp"].clone().requires_grad_()
    inputs, correction_BT = loss_inputs(peer, entry, logp_BT)
    # M2PO reduces the mask, and the peer divides by what remains
    is_reduced = peer.correction is not None and peer.correction.acts == "minibatch"
    totals = peer.totals(inputs.mask_BT if is_reduced else entry.mask_BT)
    length_B1 = entry.mask_BT.sum(-1, keepdim=True).double()
    share_B1 = shrunk(length_B1) if epsilon.tokens else torch.ones_like(length_B1)
    if epsilon.responses:
        share_B1 = share_B1 * shrunk(totals.sequences)
    outputs = (
        with_exponents_shrunk(peer, inputs, shrunk(length_B1))
        if epsilon.exponent
        else peer.objective(inputs)
    )
    loss_BT = outputs.loss_BT if correction_BT is None else outputs.loss_BT * correction_BT
    weight = shrunk(len(length_B1)) if epsilon.weights else 1.0
    loss = weight * peer.aggregation(loss_BT * share_B1, inputs.mask_BT, totals)
    if peer.kl is not None:
        loss = loss + kl_term(peer.kl, inputs, correction_BT, totals, share_B1)
    if peer.empty_rows_cost:
        loss = loss - entry.inputs["advantages"][~entry.mask_BT.any(-1)].sum() / len(entry.mask_BT)
    (grad_BT,) = torch.autograd.grad(loss, logp_BT)
    exponent_BT = exponents(peer.objective, inputs)
    return Evaluation(
        loss=float(loss.detach()),
        grad_BT=grad_BT,
        outputs=outputs,
        inputs=inputs,
        mask_BT=entry.mask_BT,
        totals=totals,
        correction_BT=correction_BT,
        objective=peer.objective,
        exponent=float(exponent_BT.abs().max()),
        beyond=beyond(peer, inputs, outputs, exponent_BT),
    )


def shrunk(count: Tensor | float) -> Tensor | float:
    """Return n / (n + 1e-8), the factor that 1e-8 in a denominator amounts to."""
    return count / (count + EPSILON)


def with_exponents_shrunk(peer: PolicyLoss, inputs: LossInputs, share_B1: Tensor) -> LossOutputs:
    """Apply the objective with every log-ratio of a response, and so their mean, multiplied by n_i
    / (n_i + 1e-8).
    """
    objective = peer.objective
    # GMPO clips the log-ratios first, so its bounds shrink with them
    if isinstance(objective, GMPO):
        objective = copy(objective)
        objective.clip_low, objective.clip_high = (
            objective.clip_low * share_B1,
            objective.clip_high * share_B1,
        )
    log_BT = inputs.logp_BT - inputs.old_logp_BT
    return objective(replace(inputs, logp_BT=inputs.old_logp_BT + share_B1 * log_BT))


def loss_inputs(
    peer: PolicyLoss, entry: Entry, logp_BT: Tensor
) -> tuple[LossInputs, Tensor | None]:
    """Return the entry's tensors, prepared as the peer prepares them, and the correction."""
    given, mask_BT = entry.inputs, entry.mask_BT
    adv = given["advantages"]
    adv_BT = (adv if adv.ndim == 2 else adv.unsqueeze(-1)).expand_as(logp_BT)
    if peer.spread:
        log_BT = log_ratio(logp_BT, given["old_logp"], mask_BT)
        mean_B = masked_mean(log_BT, mask_BT)
        logp_BT = given["old_logp"] + mean_B.unsqueeze(-1)
    inputs = LossInputs(
        logp_BT=logp_BT,
        # prime-rl has no old policy
        old_logp_BT=given["old_logp"] if "old_logp" in given else given["rollout_logp"],
        adv_BT=peer.advantages(adv_BT, mask_BT),
        mask_BT=torch.ones_like(mask_BT) if peer.everywhere else mask_BT,
        engine_logp_BT=given.get("rollout_logp"),
        ref_logp_BT=given.get("ref_logp"),
    )
    if peer.everywhere and not (inputs.logp_BT.isfinite() & inputs.old_logp_BT.isfinite()).all():
        raise Untranslated("the peer's loss reads padding, which holds NaN or infinity here")
    if peer.kl is not None and inputs.ref_logp_BT is None:
        raise Untranslated("a KL term without ref_logp among the inputs")
    if peer.weights:
        if peer.objective.includes_correction:
            return replace(inputs, correction_BT=given[peer.weights]), None
        return inputs, torch.where(mask_BT, given[peer.weights], 0.0)
    if peer.correction is None:
        return inputs, None
    if peer.correction.compares_engine and inputs.engine_logp_BT is None:
        raise Untranslated("rollout weights without rollout_logp among the inputs")
    if peer.correction.acts == "loss":
        return inputs, peer.correction.loss_weights(inputs)
    if peer.correction.acts == "minibatch":
        reduced_BT = peer.correction.reduced_mask(
            inputs.old_logp_BT, inputs.engine_logp_BT, mask_BT
        )
        return replace(inputs, mask_BT=reduced_BT), None
    return inputs, peer.correction(inputs.old_logp_BT, inputs.engine_logp_BT, mask_BT)


def kl_term(
    kl: KLInLoss,
    inputs: LossInputs,
    correction_BT: Tensor | None,
    totals: Totals,
    share_B1: Tensor,
) -> Tensor:
    """Return coef * aggregate( estimate [* importance ratio] [* correction] ), as
    gspo.train.loss_terms.KLTerm computes it."""
    kl_BT = kl.estimate(inputs.logp_BT, inputs.ref_logp_BT, inputs.mask_BT)
    exponent = RatioObjective(log_ratio_bound=min(kl.log_ratio_bound, UNBOUNDED))
    if kl.times_ratio == "token":
        kl_BT = kl_BT * exponent.token_ratio(inputs)[0]
    elif kl.times_ratio == "sequence":
        kl_BT = kl_BT * exponent.sequence_ratio(inputs)[0]
    if kl.weighted and correction_BT is not None:
        kl_BT = kl_BT * correction_BT
    return kl.coef * kl.aggregation(kl_BT * share_B1, inputs.mask_BT, totals)


def exponents(objective: Objective, inputs: LossInputs) -> Tensor:
    """Return the log-ratio of the objective at every token, before any bound; 0 where masked. [B,
    T]
    """
    log_BT = log_ratio(inputs.logp_BT.detach(), inputs.old_logp_BT, inputs.mask_BT)
    if by_sequence(objective):
        return torch.where(inputs.mask_BT, masked_mean(log_BT, inputs.mask_BT).unsqueeze(-1), 0.0)
    return log_BT


def by_sequence(objective: Objective) -> bool:
    """Return whether the objective has one exponent per response: GSPO, GSPO-token, LUSPO, SAPO at
    the sequence level."""
    if isinstance(objective, SAPO):
        return objective.level == "sequence"
    return objective.sequence_level and not isinstance(objective, GMPO)


def beyond(peer: PolicyLoss, inputs: LossInputs, outputs: LossOutputs, exponent_BT: Tensor) -> str:
    """Return why the values may differ, because log-ratios lie beyond a bound of ours that the peer
    does not have, or ""."""
    outside_BT = outputs.bounded_BT & inputs.mask_BT
    if peer.bound == "same":
        outside_BT = torch.zeros_like(outside_BT)
    elif peer.bound == "upper":
        outside_BT = outside_BT & (exponent_BT < 0)
    if outside_BT.any():
        furthest = float(exponent_BT[outside_BT].abs().max())
        bound = peer.objective.log_ratio_bound if peer.bound == "none" else 20
        return f"a log-ratio of {furthest:.4g} nats lies beyond our bound of {bound:g}; the peer has none there"
    if isinstance(peer.correction, KPop):
        furthest = largest_mismatch(inputs)
        if furthest > EXPONENT_BOUND:
            return (
                f"log pi_old/mu of {furthest:.4g} nats lies beyond our bound of {EXPONENT_BOUND:g}"
            )
    if peer.kl is not None and peer.kl.value_bound is None:
        d = log_ratio(inputs.logp_BT.detach(), inputs.ref_logp_BT, inputs.mask_BT).abs().max()
        if d > peer.kl.log_ratio_bound:
            return f"log pi/pi_ref of {float(d):.4g} nats lies beyond our bound of {peer.kl.log_ratio_bound:g} for KL"
    return ""


def largest_mismatch(inputs: LossInputs) -> float:
    """Return the largest |log pi_old - log mu| of a response token."""
    return float(log_ratio(inputs.old_logp_BT, inputs.engine_logp_BT, inputs.mask_BT).abs().max())


def described(settings: object) -> str:
    """Return a dataclass of settings as `Name(what differs from its defaults)`."""
    if not is_dataclass(settings):
        return str(settings)
    plain = {f.name: f for f in fields(settings)}
    said = []
    for name, f in plain.items():
        value = getattr(settings, name)
        default = f.default_factory() if callable(f.default_factory) else f.default
        if name != "name" and value != default:
            said.append(
                f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={described(value)}"
            )
    return f"{type(settings).__name__}({', '.join(said)})"
