"""Objectives with one ratio per response or per turn: GSPO, GSPO-token, GSPO-turn, LUSPO, GMPO.

J is the objective that the papers maximise. The aggregation `seq-mean-token-mean` of the token
losses gives -J. |y_i| is the number of tokens of response i, and sg is the stop-gradient.

Shape suffixes: B responses, T response tokens, 1 an axis that is broadcast over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from gspo.algorithm.objectives.base import (
    Clipped,
    LossInputs,
    LossOutputs,
    RatioObjective,
    log_ratio,
)
from gspo.data.lazy_torch import torch
from gspo.data.masked import masked_mean
from gspo.io.ranges import ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class GSPO(Clipped):
    """Group Sequence Policy Optimization (arXiv:2507.18071, Eq 5-7): a clipped ratio per response.

        s_i = exp( 1/|y_i| sum_t log( pi(y_it|x,y_i<t) / pi_old(y_it|x,y_i<t) ) )
        J   = 1/G sum_i min( s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i )

    The gradient is s_i A_i 1/|y_i| sum_t grad log pi(y_it). Use GSPOToken for advantages that
    differ by token.
    """

    name: str = "gspo"
    clip_low: float = 3e-4  # section 5.1
    clip_high: float = 4e-4  # section 5.1
    sequence_level: ClassVar[bool] = True
    clips_sequence_ratio: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_B1, bounded_B1 = self.sequence_ratio(inputs)
        ratio_BT = ratio_B1.expand_as(inputs.mask_BT)
        bounded_BT = bounded_B1.expand_as(inputs.mask_BT)
        return self.clipped(ratio_BT, bounded_BT, inputs)


@dataclass
class GSPOAllTokens(GSPO):
    """GSPO with a known mistake: the ratio's length also counts the tokens of the environment.

        s_i = exp( 1/(|y_i| + |o_i|) sum_t log( pi(y_it) / pi_old(y_it) ) )

    o_i are the tokens that the environment wrote. The sum is over the policy's tokens, as it must
    be. If the environment wrote nine tenths of a response, the log-ratio and the gradient shrink
    to a tenth, and the clip hardly ever acts. This class exists to measure the effect
    (docs/results.md, study E). Without an environment it equals GSPO.
    """

    name: str = "gspo_all_tokens"

    def sequence_ratio(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        log_ratio_BT = log_ratio(inputs.logp_BT, inputs.old_logp_BT, inputs.mask_BT)
        lengths_B = inputs.mask_BT.sum(-1) if inputs.lengths_B is None else inputs.lengths_B
        log_B = log_ratio_BT.sum(-1) / lengths_B.clamp(min=1)
        return self.bounded_exp(log_B.unsqueeze(-1))


@dataclass
class GSPOToken(Clipped):
    """GSPO-token (arXiv:2507.18071, Eq 13-17): the response's ratio, the token's advantage.

        s_it = sg[s_i] * pi(y_it) / sg[pi(y_it)]
        J    = 1/G sum_i 1/|y_i| sum_t min( s_it A_it,
                                            clip(s_it, 1 - clip_low, 1 + clip_high) A_it )

    The value of s_it is s_i. Its gradient goes through the token's own log-prob. If A_it = A_i for
    all t, the objective equals GSPO in value, clip and gradient.
    """

    name: str = "gspo_token"
    clip_low: float = 3e-4  # section 5.1
    clip_high: float = 4e-4  # section 5.1
    sequence_level: ClassVar[bool] = True
    token_advantages: ClassVar[bool] = True
    clips_sequence_ratio: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_B1, bounded_B1 = self.sequence_ratio(inputs)
        logp_BT = torch.where(inputs.mask_BT & ~bounded_B1, inputs.logp_BT, 0.0)
        ratio_BT = ratio_B1.detach() * (logp_BT - logp_BT.detach()).exp()
        return self.clipped(ratio_BT, bounded_B1.expand_as(inputs.mask_BT), inputs)


@dataclass
class GSPOTurn(Clipped):
    """GSPO with one ratio per turn of an episode (ST-PPO's turn ratio, arXiv:2511.20718).

        s_ik = exp( 1/|y_ik| sum_{t in turn k} log( pi(y_it) / pi_old(y_it) ) )
        J    = 1/G sum_i 1/|y_i| sum_k sum_{t in turn k} min( s_it A_it,
                                            clip(s_it, 1 - clip_low, 1 + clip_high) A_it )

    A turn is an unbroken run of the policy's tokens. The value of s_it is s_ik, and its gradient
    goes through the token's own log-prob, as in GSPO-token. On responses of a single turn the
    objective equals GSPO-token, and GSPO if A_it = A_i. A turn of one token is clipped like GRPO.
    """

    name: str = "gspo_turn"
    clip_low: float = 3e-4  # GSPO's, arXiv:2507.18071
    clip_high: float = 4e-4
    token_advantages: ClassVar[bool] = True
    joint_ratio: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_BT, bounded_BT = self.turn_ratio(inputs)
        logp_BT = torch.where(inputs.mask_BT & ~bounded_BT, inputs.logp_BT, 0.0)
        ratio_BT = ratio_BT * (logp_BT - logp_BT.detach()).exp()
        return self.clipped(ratio_BT, bounded_BT, inputs)

    def turn_ratio(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Compute s_ik without gradient, and whether it is beyond the bound. Both [B, T]."""
        mask_BT = inputs.mask_BT
        log_BT = log_ratio(inputs.logp_BT, inputs.old_logp_BT, mask_BT).detach()
        turn_BT = turn_indices(mask_BT)
        zeros_BT = torch.zeros_like(log_BT)
        # the k-th column belongs to turn k
        sums_BT = zeros_BT.scatter_add(-1, turn_BT, log_BT)
        tokens_BT = zeros_BT.scatter_add(-1, turn_BT, mask_BT.to(log_BT.dtype))
        means_BT = sums_BT / tokens_BT.clamp(min=1)
        return self.bounded_exp(means_BT.gather(-1, turn_BT))


def turn_indices(mask_BT: Tensor) -> Tensor:
    """Return the index of each token's turn, an unbroken run of the mask. Shape [B, T].

    Masked tokens have the index of the turn before them, or 0.
    """
    before_BT = torch.zeros_like(mask_BT)
    before_BT[:, 1:] = mask_BT[:, :-1]
    starts_BT = mask_BT & ~before_BT
    return (starts_BT.cumsum(-1) - 1).clamp(min=0)


@dataclass
class LUSPO(GSPO):
    """Length-Unbiased Sequence Policy Optimization (arXiv:2602.05261): GSPO times the length.

        J = 1/G sum_i |y_i| min( s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i )

    The aggregation is `seq-mean-token-mean`. Any other would weight responses by their length a
    second time.
    """

    name: str = "luspo"
    clip_low: float = 2e-3
    clip_high: float = 2.5e-3
    fixed_aggregation: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        outputs = super().__call__(inputs)
        length_B1 = inputs.mask_BT.sum(-1, keepdim=True)
        return replace(
            outputs,
            loss_BT=outputs.loss_BT * length_B1,
            weight_BT=outputs.weight_BT * length_B1,
        )


@dataclass
class GMPO(RatioObjective):
    """Geometric-Mean Policy Optimization (arXiv:2507.20673): clip token log-ratios, then average.

        l_it = log( pi(y_it) / pi_old(y_it) )
        c_it = sgn(A_i) min( sgn(A_i) l_it, sgn(A_i) clip(l_it, -clip_low, clip_high) )
        J    = 1/G sum_i A_i exp( 1/|y_i| sum_t c_it )

    The clip acts on single tokens, in log space. The other tokens of the response keep the weight
    exp(mean c).
    """

    name: str = "gmpo"
    # the paper's range (e^-0.4, e^0.4)
    clip_low: float = ranged(0.4, above=0, why="it bounds a log-ratio")
    clip_high: float = ranged(0.4, above=0, why="it bounds a log-ratio")
    sequence_level: ClassVar[bool] = True
    fixed_aggregation: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        sign_BT = inputs.advantage_BT.sign()
        log_BT = log_ratio(inputs.logp_BT, inputs.old_logp_BT, inputs.mask_BT)
        clipped_BT = log_BT.clamp(-self.clip_low, self.clip_high)
        c_BT = sign_BT * torch.minimum(sign_BT * log_BT, sign_BT * clipped_BT)
        mean_c_B1 = masked_mean(c_BT, inputs.mask_BT).unsqueeze(-1)
        ratio_B1, bounded_B1 = self.bounded_exp(mean_c_B1)
        adv_B1 = masked_mean(inputs.adv_BT, inputs.mask_BT).unsqueeze(-1)
        is_clipped_BT = sign_BT * clipped_BT < sign_BT * log_BT
        return LossOutputs(
            loss_BT=(-ratio_B1 * adv_B1).expand_as(inputs.mask_BT),
            weight_BT=torch.where(is_clipped_BT | bounded_B1, 0.0, ratio_B1.detach()),
            is_clipped_BT=is_clipped_BT,
            outside_BT=clipped_BT != log_BT,
            bounded_BT=bounded_B1.expand_as(inputs.mask_BT),
        )
