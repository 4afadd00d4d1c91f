"""The policy objectives: one small dataclass each. Its fields are its settings, calling it gives the loss.

Shape suffixes: B responses, T response tokens. All log-probabilities are natural, in float32 or better.
An objective returns the loss of every token; how tokens are averaged is a separate choice (gspo.masked.aggregate).

How these differ from the paper's formulas (arXiv:2507.18071):
1. Log-ratios are bounded to +-log_ratio_bound before exp (default 20, a factor of 5e8). Beyond it a token carries no
   gradient and is counted in `clip/log_ratio_bounded`. Below the bound nothing changes.
2. The clip range has two sides, as in section 5.1: [1 - clip_low, 1 + clip_high].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.masked import masked_mean


@dataclass
class LossInputs:
    """What an objective may look at. Masked entries hold anything, NaN included."""

    logp_BT: Tensor  # log pi_theta(y_t | x, y_<t), with gradient
    old_logp_BT: Tensor  # log pi_old, without
    adv_BT: Tensor  # advantage of every token
    mask_BT: Tensor  # bool, True on response tokens


@dataclass
class LossOutputs:
    """Loss and clip statistics of every token; meaningful where the mask is True."""

    loss_BT: Tensor
    active_BT: Tensor  # bool: the clip removed this token's gradient
    outside_BT: Tensor  # bool: the ratio lies outside the clip range, whatever the sign of the advantage
    bounded_BT: Tensor  # bool: the log-ratio left the numerical bound


@dataclass
class Objective:
    """Base of the clipped objectives: the settings they share and their check."""

    name: str = ""
    clip_low: float = 0.0  # the band is [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.0
    log_ratio_bound: float = 20.0  # nats

    def __post_init__(self):
        if not 0 < self.clip_low < 1:
            raise ValueError(
                f"objective.clip_low={self.clip_low} must lie in (0, 1): the band starts at 1 - clip_low > 0"
            )
        if not self.clip_high > 0:
            raise ValueError(f"objective.clip_high={self.clip_high} must be positive: the band ends at 1 + clip_high")
        if not 0 < self.log_ratio_bound <= 80:
            raise ValueError(f"objective.log_ratio_bound={self.log_ratio_bound} must lie in (0, 80]: exp(88) overflows")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        raise TypeError("choose a concrete objective: gspo, gspo_token, grpo")

    def clipped(self, ratio_BT: Tensor, bounded_BT: Tensor, inputs: LossInputs) -> LossOutputs:
        """loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with its clip masks."""
        gain_BT = ratio_BT * inputs.adv_BT
        clipped_gain_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high) * inputs.adv_BT
        return LossOutputs(
            loss_BT=-torch.minimum(gain_BT, clipped_gain_BT),
            active_BT=clipped_gain_BT < gain_BT,
            outside_BT=(ratio_BT < 1 - self.clip_low) | (ratio_BT > 1 + self.clip_high),
            bounded_BT=bounded_BT,
        )


@dataclass
class GSPO(Objective):
    """Group Sequence Policy Optimization (Eq 5-7): one ratio per response, whole responses clipped.

        s_i = exp( 1/|y_i| sum_t log( pi(y_it|x,y_i<t) / pi_old(y_it|x,y_i<t) ) )
        J   = 1/G sum_i min( s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i )

    Every token of a response carries s_i, so with aggregation `sequence_mean` the loss is -J and the gradient is
    s_i A_i 1/|y_i| sum_t grad log pi(y_it). A_i is taken as the mean of the response's token advantages; give all its
    tokens the same (for advantages that differ by token: GSPOToken).
    """

    name: str = "gspo"
    clip_low: float = 3e-4  # section 5.1
    clip_high: float = 4e-4  # section 5.1

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_B1, bounded_B1 = sequence_ratio(inputs.logp_BT, inputs.old_logp_BT, inputs.mask_BT, self.log_ratio_bound)
        adv_BT = masked_mean(inputs.adv_BT, inputs.mask_BT).unsqueeze(-1).expand_as(inputs.mask_BT)
        same = LossInputs(inputs.logp_BT, inputs.old_logp_BT, adv_BT, inputs.mask_BT)
        return self.clipped(ratio_B1.expand_as(adv_BT), bounded_B1.expand_as(inputs.mask_BT), same)


@dataclass
class GSPOToken(Objective):
    """GSPO-token (Eq 13-17): the ratio of the response, an advantage for every token.

        s_it = sg[s_i] * pi(y_it) / sg[pi(y_it)]            (value s_i; gradient through the token's own log-prob)
        J    = 1/G sum_i 1/|y_i| sum_t min( s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it )

    Equal to GSPO in value, clip and gradient when A_it = A_i for all t.
    """

    name: str = "gspo_token"
    clip_low: float = 3e-4  # section 5.1
    clip_high: float = 4e-4  # section 5.1

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_B1, bounded_B1 = sequence_ratio(inputs.logp_BT, inputs.old_logp_BT, inputs.mask_BT, self.log_ratio_bound)
        logp_BT = torch.where(inputs.mask_BT & ~bounded_B1, inputs.logp_BT, 0.0)
        ratio_BT = ratio_B1.detach() * (logp_BT - logp_BT.detach()).exp()
        adv_BT = torch.where(inputs.mask_BT, inputs.adv_BT, 0.0)
        same = LossInputs(inputs.logp_BT, inputs.old_logp_BT, adv_BT, inputs.mask_BT)
        return self.clipped(ratio_BT, bounded_B1.expand_as(inputs.mask_BT), same)


@dataclass
class GRPO(Objective):
    """Group Relative Policy Optimization as the GSPO paper writes it (Eq 2-3): one ratio per token.

    w_it = pi(y_it|x,y_i<t) / pi_old(y_it|x,y_i<t)
    J    = 1/G sum_i 1/|y_i| sum_t min( w_it A_it, clip(w_it, 1 - clip_low, 1 + clip_high) A_it )
    """

    name: str = "grpo"
    clip_low: float = 0.2  # section 5.1
    clip_high: float = 0.27  # section 5.1

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_BT, bounded_BT = token_ratio(inputs.logp_BT, inputs.old_logp_BT, inputs.mask_BT, self.log_ratio_bound)
        adv_BT = torch.where(inputs.mask_BT, inputs.adv_BT, 0.0)
        same = LossInputs(inputs.logp_BT, inputs.old_logp_BT, adv_BT, inputs.mask_BT)
        return self.clipped(ratio_BT, bounded_BT, same)


def log_ratio(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log( pi / pi_old ) of every token, 0 where masked; no gradient reaches the old log-probs."""
    return torch.where(mask_BT, logp_BT - old_logp_BT.detach(), 0.0)


def token_ratio(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """w_it = pi / pi_old, and which tokens left the bound. Both [B, T]."""
    log_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
    return log_BT.clamp(-bound, bound).exp(), log_BT.abs() > bound


def sequence_ratio(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """s_i = exp(mean over the response of log(pi / pi_old)), and which responses left the bound. Both [B, 1]."""
    log_B1 = masked_mean(log_ratio(logp_BT, old_logp_BT, mask_BT), mask_BT).unsqueeze(-1)
    return log_B1.clamp(-bound, bound).exp(), log_B1.abs() > bound
