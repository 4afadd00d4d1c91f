"""Objectives for samples that are off policy: VESPO, CTPO, DRO, prime-rl's losses, P3O.

    sg      the stop-gradient
    d_it    the log-ratio of a token, log pi(y_it) - log pi_old(y_it)
    w_it    exp( d_it )
    mu      the policy that sampled; the engine reports its log-probs

docs/algorithms.md lists the traps of each.

Shape suffixes: B responses, T response tokens, 1 an axis that is broadcast over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.algorithm.objectives.base import (
    Clipped,
    LossInputs,
    LossOutputs,
    Objective,
    RatioObjective,
    clipped_loss,
    log_ratio,
    probability_change,
    required_engine_logp,
)
from gspo.data.lazy_torch import torch
from gspo.data.masked import masked_sum
from gspo.io.ranges import choice, ranged

if TYPE_CHECKING:
    from torch import Tensor

# The authors' bounds, in nats.
MAX_TOKEN_LOG_RATIO = 20.0  # of VESPO's and CTPO's token log-ratios, both sides
MIN_LOG_W = math.log(1e-8)  # of VESPO's log W, and of the logarithm of each engine weight
MAX_LOG_W = 20.0
MAX_KL_EXPONENT = 10.0  # of the exponential in P3O's KL


# --------------------------------------------------------------------------------------------------
# a ratio of the whole response, or of its prefix
@dataclass
class VESPO(Objective):
    """Variational Sequence-level Soft Policy Optimization (arXiv:2602.10693).

        W_i   = prod_t w_it c_it
        phi_i = W_i^k exp( lambda (1 - W_i) )
        J     = mean over tokens of sg[ phi_i ] A_it log pi(y_it)

    (k, lambda) is (k_positive, lambda_positive) if A_it >= 0, else (k_negative, lambda_negative).
    phi is 1 on policy and largest at W = k / lambda. c_it are the weights of `correction`. They are
    a factor of W and no second factor of the loss. As in the authors' code, log w_it lies within
    +-20, log c_it and log W_i within [log 1e-8, 20].
    """

    name: str = "vespo"
    k_positive: float = ranged(2.0, least=0)
    lambda_positive: float = ranged(3.0, above=0, why="phi must fall for large W")
    k_negative: float = ranged(3.0, least=0)
    lambda_negative: float = ranged(2.0, above=0, why="phi must fall for large W")
    aggregation: ClassVar[str] = "token-mean"
    weighs_by_length: ClassVar[bool] = True
    includes_correction: ClassVar[bool] = True
    joint_ratio: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        mask_BT = inputs.mask_BT
        logp_BT = torch.where(mask_BT, inputs.logp_BT, 0.0)
        log_B1, beyond_B1 = self.log_product(inputs)
        positive_BT = inputs.advantage_BT >= 0
        phi_BT = torch.where(
            positive_BT,
            gate(log_B1, self.k_positive, self.lambda_positive),
            gate(log_B1, self.k_negative, self.lambda_negative),
        )
        none_BT = torch.zeros_like(mask_BT)
        return LossOutputs(
            loss_BT=-phi_BT * inputs.advantage_BT * logp_BT,
            weight_BT=phi_BT,
            is_clipped_BT=none_BT,
            outside_BT=none_BT,
            bounded_BT=beyond_B1.expand_as(mask_BT),
        )

    def log_product(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Compute log W without gradient, and whether it is beyond its bounds. Both [B, 1]."""
        d_BT = log_ratio(inputs.logp_BT, inputs.old_logp_BT, inputs.mask_BT).detach()
        log_BT = d_BT.clamp(-MAX_TOKEN_LOG_RATIO, MAX_TOKEN_LOG_RATIO)
        if inputs.correction_BT is not None:
            weight_BT = torch.where(inputs.mask_BT, inputs.correction_BT, 1.0)
            log_BT = log_BT + weight_BT.log().clamp(MIN_LOG_W, MAX_LOG_W)
        log_B1 = masked_sum(log_BT, inputs.mask_BT).unsqueeze(-1)
        is_beyond = (log_B1 < MIN_LOG_W) | (log_B1 > MAX_LOG_W)
        return log_B1.clamp(MIN_LOG_W, MAX_LOG_W), is_beyond


def gate(log_W: Tensor, k: float, lam: float) -> Tensor:
    """Compute W^k exp( lam (1 - W) ) from log W."""
    return (lam + k * log_W - lam * log_W.exp()).exp()


@dataclass
class CumulativeRatio(Clipped):
    """The base of CTPO and CTPO-LA, which weight a token by the ratio of its prefix.

        product     R_it = exp( sum_{u<=t} d_iu )
        geometric   R_it = exp( 1/t sum_{u<=t} d_iu )

    t counts the response tokens up to the token. The value of the ratio is R_it. Its gradient goes
    through the token's own log-prob alone. d_iu lies within +-20, and log R_it is at most
    log_ratio_bound.
    """

    prefix: str = choice("product", ("product", "geometric"))
    log_ratio_bound: float = 10.0  # the authors' bound
    joint_ratio: ClassVar[bool] = True

    def prefix_ratio(self, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Compute R_it, whether log R_it is beyond its bound, and t. All [B, T]."""
        d_BT = log_ratio(inputs.logp_BT, inputs.old_logp_BT, inputs.mask_BT).detach()
        log_BT = d_BT.clamp(-MAX_TOKEN_LOG_RATIO, MAX_TOKEN_LOG_RATIO).cumsum(-1)
        position_BT = inputs.mask_BT.cumsum(-1).clamp(min=1)
        if self.prefix == "geometric":
            log_BT = log_BT / position_BT
        bounded_BT = log_BT > self.log_ratio_bound
        # the value 0, with the gradient of log pi
        own_BT = torch.where(inputs.mask_BT, inputs.logp_BT - inputs.logp_BT.detach(), 0.0)
        ratio_BT = (log_BT + own_BT).clamp(max=self.log_ratio_bound).exp()
        return ratio_BT, bounded_BT, position_BT


@dataclass
class CTPO(CumulativeRatio):
    """Cumulative Token Policy Optimization (arXiv:2605.07331) under PPO's clip.

    J = mean over tokens of min( R_it A_it, clip(R_it, 1 - clip_low, 1 + clip_high) A_it )
    """

    name: str = "ctpo"
    aggregation: ClassVar[str] = "token-mean"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_BT, bounded_BT, _ = self.prefix_ratio(inputs)
        return self.clipped(ratio_BT, bounded_BT, inputs)


@dataclass
class CTPOLA(CumulativeRatio):
    """CTPO with a length-adaptive clip (arXiv:2605.07331, CTPO-LA).

        J = mean over tokens of min( R_it A_it,
                                     exp( clip(log R_it, -clip_low t^power, clip_high t^power) ) A_it )

    If A_it < 0, the loss is at most exp(dual_clip t^power) |A_it|. In the authors' scripts `power`
    is 0.5 for prefix=product and -0.5 for prefix=geometric.
    """

    name: str = "ctpo_la"
    clip_low: float = ranged(0.025, above=0, why="it bounds a log-ratio")
    clip_high: float = ranged(0.05, above=0, why="it bounds a log-ratio")
    dual_clip: float | None = ranged(0.05, above=0, why="it bounds a log-ratio")
    power: float = ranged(0.5, least=-1, most=1)
    aggregation: ClassVar[str] = "token-mean"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_BT, bounded_BT, position_BT = self.prefix_ratio(inputs)
        scale_BT = position_BT.to(ratio_BT.dtype) ** self.power
        lowest_BT = (-self.clip_low * scale_BT).exp()
        highest_BT = (self.clip_high * scale_BT).exp()
        clipped_BT = ratio_BT.clamp(lowest_BT, highest_BT)
        dual_BT = None
        if self.dual_clip is not None:
            dual_BT = (self.dual_clip * scale_BT).exp()
        return clipped_loss(ratio_BT, clipped_BT, bounded_BT, dual_BT, inputs)


# --------------------------------------------------------------------------------------------------
# a penalty on the log-ratio instead of a clip
@dataclass
class DRO(Objective):
    """Direct Reward Optimization, its policy part (arXiv:2405.19107), as verl computes it.

        J = mean over tokens of A_it log pi(y_it) - beta/2 d_it^2

    The gradient is (A_it - beta d_it) grad log pi, so d_it is drawn to A_it / beta.
    """

    name: str = "dro"
    beta: float = ranged(1.0, above=0)
    aggregation: ClassVar[str] = "token-mean"
    needs_every_row: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        logp_BT = torch.where(inputs.mask_BT, inputs.logp_BT, 0.0)
        d_BT = log_ratio(inputs.logp_BT, inputs.old_logp_BT, inputs.mask_BT)
        penalty_BT = self.beta / 2 * d_BT.square()
        none_BT = torch.zeros_like(inputs.mask_BT)
        return LossOutputs(
            loss_BT=penalty_BT - inputs.advantage_BT * logp_BT,
            weight_BT=torch.ones_like(d_BT, requires_grad=False),
            is_clipped_BT=none_BT,
            outside_BT=none_BT,
            bounded_BT=none_BT,
            penalty_BT=penalty_BT,
        )


@dataclass
class EngineRatio(RatioObjective):
    """The base of prime-rl's losses.

        r_it  = pi(y_it) / mu(y_it)
        p_it  = pi(y_it) - mu(y_it)
        J     = mean over tokens of M_it adv_scale r_it A_it - kl_coef ( log r_it )^2

    pi and mu are probabilities of the sampled token. M_it depends on p_it. The penalty acts on
    every token, also if M_it or A_it is 0.
    """

    adv_scale: float = ranged(1.0, least=0)  # prime-rl's adv_tau
    kl_coef: float = ranged(1e-3, least=0)  # prime-rl's kl_tau
    aggregation: ClassVar[str] = "token-mean"
    ratio_to: ClassVar[str] = "engine"
    needs_every_row: ClassVar[bool] = True

    def probability_change(self, inputs: LossInputs) -> Tensor:
        """Compute p_it without gradient, 0 at masked tokens. Shape [B, T]."""
        engine_logp_BT = required_engine_logp(inputs, "objective", self.name)
        return probability_change(inputs, engine_logp_BT)

    def masked(self, removed_BT: Tensor, outside_BT: Tensor, inputs: LossInputs) -> LossOutputs:
        """Compute the loss. `removed_BT` is M_it = 0."""
        adv_BT = self.adv_scale * inputs.advantage_BT
        engine_logp_BT = required_engine_logp(inputs, "objective", self.name)
        ratio_BT, bounded_BT = self.token_ratio(inputs, engine_logp_BT)
        log_BT = log_ratio(inputs.logp_BT, engine_logp_BT, inputs.mask_BT)
        penalty_BT = self.kl_coef * log_BT.square()
        weight_BT = self.adv_scale * ratio_BT.detach()
        return LossOutputs(
            loss_BT=torch.where(removed_BT, 0.0, -ratio_BT * adv_BT) + penalty_BT,
            weight_BT=torch.where(removed_BT | bounded_BT, 0.0, weight_BT),
            is_clipped_BT=removed_BT & (inputs.advantage_BT != 0),
            outside_BT=outside_BT,
            bounded_BT=bounded_BT,
            penalty_BT=penalty_BT,
        )


@dataclass
class PrimeRL(EngineRatio):
    """prime-rl's default loss: DPPO's mask (arXiv:2602.04879) and a quadratic penalty.

    The penalty is from Kimi K2.5 (arXiv:2602.02276).

        M_it = 0 if (A_it > 0 and p_it > delta_high) or (A_it <= 0 and p_it < -delta_low)
               1 otherwise

    EngineRatio has the loss.
    """

    name: str = "prime_rl"
    # prime-rl's dppo_mask_low and dppo_mask_high
    delta_low: float = ranged(0.2, least=0, below=1, why="it bounds a difference of probabilities")
    delta_high: float = ranged(0.2, least=0, below=1, why="it bounds a difference of probabilities")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the loss of every token. Raises ValueError without inputs.engine_logp_BT."""
        change_BT = self.probability_change(inputs)
        too_high_BT = change_BT > self.delta_high
        too_low_BT = change_BT < -self.delta_low
        removed_BT = torch.where(inputs.advantage_BT > 0, too_high_BT, too_low_BT)
        return self.masked(removed_BT, too_high_BT | too_low_BT, inputs)


@dataclass
class PrimeIPO(EngineRatio):
    """prime-rl's loss `ipo`: the mask does not depend on the sign of the advantage.

        M_it = 0 if |p_it| > delta, 1 otherwise

    EngineRatio has the loss.
    """

    name: str = "prime_rl_ipo"
    delta: float = ranged(0.1, least=0, below=1, why="it bounds a difference of probabilities")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the loss of every token. Raises ValueError without inputs.engine_logp_BT."""
        removed_BT = self.probability_change(inputs).abs() > self.delta
        return self.masked(removed_BT, removed_BT, inputs)


@dataclass
class P3O(RatioObjective):
    """P3O, Policy-on Policy-off Policy Optimization (arXiv:1905.01756), as FeynRL computes it.

        ESS = ( sum w )^2 / ( n sum w^2 )     over the n tokens of the mini-batch
        J   = mean over tokens of sg[ min(w_it, ESS) ] A_it log pi(y_it)
                                  - (1 - ESS) ( d_it + exp(-d_it) - 1 )

    ESS is 1 on policy. It has no gradient. The less even the ratios are, the smaller are the
    weights, and the stronger is the pull back to the old policy. The exponent -d_it lies within
    +-10.
    """

    name: str = "p3o"
    aggregation: ClassVar[str] = "token-mean"
    needs_every_row: ClassVar[bool] = True
    needs_statistic: ClassVar[bool] = True

    def statistic(self, inputs: LossInputs) -> Tensor:
        """Compute the ESS of the tokens of `inputs`, 1 without tokens. A scalar, float64."""
        ratio_BT, _ = self.token_ratio(inputs)
        ratio_BT = torch.where(inputs.mask_BT, ratio_BT.detach(), 0.0).double()
        square_sum = ratio_BT.square().sum() * inputs.mask_BT.sum()
        ess = ratio_BT.sum().square() / square_sum
        return torch.where(square_sum > 0, ess, 1.0)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the loss of every token, with the ESS of `inputs.statistic`.

        Without it the ESS is that of the tokens of `inputs`.
        """
        ess = inputs.statistic
        if ess is None:
            ess = self.statistic(inputs)
        ess = ess.to(inputs.logp_BT.device, inputs.logp_BT.dtype)
        logp_BT = torch.where(inputs.mask_BT, inputs.logp_BT, 0.0)
        ratio_BT, bounded_BT = self.token_ratio(inputs)
        ratio_BT = ratio_BT.detach()
        weight_BT = torch.minimum(ratio_BT, ess)
        d_BT = log_ratio(inputs.logp_BT, inputs.old_logp_BT, inputs.mask_BT)
        inverse_BT = (-d_BT).clamp(-MAX_KL_EXPONENT, MAX_KL_EXPONENT).exp()
        penalty_BT = (1 - ess) * (d_BT + inverse_BT - 1)
        return LossOutputs(
            loss_BT=penalty_BT - weight_BT * inputs.advantage_BT * logp_BT,
            weight_BT=weight_BT,
            is_clipped_BT=torch.zeros_like(inputs.mask_BT),
            outside_BT=ratio_BT > ess,
            bounded_BT=bounded_BT,
            penalty_BT=penalty_BT,
        )
