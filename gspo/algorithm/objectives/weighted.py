"""Objectives that put a weight on A grad log pi instead of clipping the ratio: REINFORCE, CISPO,
MiniRL, DPPO, SAPO.

sg is the stop-gradient, w_it the token ratio pi(y_it) / pi_old(y_it), and M_it a mask of 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.algorithm.objectives.base import LossInputs, LossOutputs, Objective, RatioObjective
from gspo.data.lazy_torch import torch
from gspo.io.ranges import ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Reinforce(Objective):
    """REINFORCE has no ratio and no clip, so it treats stale samples as if they were fresh.

    J = mean of A_it log pi(y_it)
    """

    name: str = "reinforce"
    ratio_to: ClassVar[str] = "none"
    aggregation: ClassVar[str] = "token-mean"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        logp_BT = torch.where(inputs.mask_BT, inputs.logp_BT, 0.0)
        nothing_BT = torch.zeros_like(inputs.mask_BT)
        weight_BT = torch.ones_like(logp_BT, requires_grad=False)
        return LossOutputs(
            -inputs.advantage_BT * logp_BT, weight_BT, nothing_BT, nothing_BT, nothing_BT
        )


@dataclass
class Weighted(RatioObjective):
    """The base of CISPO and MiniRL, which share a band and the loss -M sg(weight) A log pi."""

    clip_low: float = ranged(0.2, above=0, most=1, why="weights are not negative")
    clip_high: float = ranged(0.2, above=0, why="the band ends at 1 + clip_high")

    def harmful(self, ratio_BT: Tensor, adv_BT: Tensor) -> Tensor:
        """Tell where the ratio has left the band on the side to which the advantage pushes it
        (PPO's mask). [B, T].
        """
        return ((adv_BT > 0) & (ratio_BT > 1 + self.clip_high)) | (
            (adv_BT < 0) & (ratio_BT < 1 - self.clip_low)
        )

    def weighted(
        self,
        weight_BT: Tensor,
        ratio_BT: Tensor,
        bounded_BT: Tensor,
        kept_BT: Tensor,
        inputs: LossInputs,
    ) -> LossOutputs:
        """Compute the loss -sg(weight) A log pi of the tokens that are kept; that of the others is
        0.
        """
        logp_BT = torch.where(inputs.mask_BT & kept_BT, inputs.logp_BT, 0.0)
        return LossOutputs(
            loss_BT=-weight_BT.detach() * inputs.advantage_BT * logp_BT,
            weight_BT=torch.where(kept_BT, weight_BT.detach(), 0.0),
            active_BT=self.harmful(ratio_BT, inputs.advantage_BT) & ~kept_BT,
            outside_BT=(ratio_BT < 1 - self.clip_low) | (ratio_BT > 1 + self.clip_high),
            bounded_BT=bounded_BT,
        )


@dataclass
class CISPO(Weighted):
    """Clipped IS-weight Policy Optimization (MiniMax-M1, arXiv:2506.13585, Eq 4-5; mask: Eq 6-7).

        J = mean over tokens of M_it sg[ clip(w_it, 1 - clip_low, 1 + clip_high) ] A_it log pi(y_it)

    The weight is truncated, and no token's gradient is removed (M = 1), except with `mask_harmful`,
    where M_it is PPO's mask. clip_low = 1 means that there is no lower bound, as in the paper.
    """

    name: str = "cispo"
    clip_low: float = 1.0
    clip_high: float = 4.0  # a cap of 5; ScaleRL (arXiv:2510.13786) finds 4, 5 and 8 alike
    mask_harmful: bool = False
    aggregation: ClassVar[str] = "token-mean"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_BT, bounded_BT = self.token_ratio(inputs)
        # the weight is the same for all ratios above the cap, so tokens beyond the numerical bound
        # keep their gradient
        weight_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high)
        kept_BT = torch.ones_like(bounded_BT)
        if self.mask_harmful:
            kept_BT = ~self.harmful(ratio_BT, inputs.advantage_BT)
        return self.weighted(weight_BT, ratio_BT, bounded_BT, kept_BT, inputs)


@dataclass
class MiniRL(Weighted):
    """MiniRL (arXiv:2512.01374) takes the token ratio as a weight, without gradient, under PPO's
    mask.

        J    = 1/B sum_i sum_t M_it sg[w_it] A_it log pi(y_it)
        M_it = 0 where (A > 0 and w_it > 1 + clip_high) or (A < 0 and w_it < 1 - clip_low), else 1

    The paper's weight is pi / mu, where mu is the sampling policy. This is w_it times pi_old / mu,
    which correction=tis supplies, truncated at 5.
    """

    name: str = "minirl"
    clip_low: float = 0.2
    clip_high: float = 0.27
    aggregation: ClassVar[str] = "seq-mean-token-sum"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_BT, bounded_BT = self.token_ratio(inputs)
        kept_BT = ~self.harmful(ratio_BT, inputs.advantage_BT) & ~bounded_BT
        return self.weighted(ratio_BT, ratio_BT, bounded_BT, kept_BT, inputs)


@dataclass
class DPPO(RatioObjective):
    """Divergence PPO with binary total variation (arXiv:2602.04879) masks tokens by a difference of
    probabilities.

        J    = mean over tokens of M_it w_it A_it,   w_it = pi(y_it) / mu(y_it)
        M_it = 0 where (A > 0 and pi - mu > delta) or (A < 0 and mu - pi > delta), else 1

    pi and mu are probabilities of the sampled token; mu is that of the policy which sampled, as the
    engine reported it.
    """

    name: str = "dppo"
    # the value of the authors' runs in bfloat16
    delta: float = ranged(0.15, above=0, below=1, why="it bounds a difference of probabilities")
    aggregation: ClassVar[str] = "token-mean"
    ratio_to: ClassVar[str] = "engine"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the loss of every token. Raises ValueError without inputs.engine_logp_BT."""
        if inputs.engine_logp_BT is None:
            raise ValueError(
                "objective=dppo compares with the sampling policy: engine_logp_BT is missing"
            )
        adv_BT, engine_BT = inputs.advantage_BT, inputs.engine_logp_BT.detach()
        ratio_BT, bounded_BT = self.token_ratio(inputs, engine_BT)
        change_BT = torch.where(
            inputs.mask_BT, inputs.logp_BT.detach().exp() - engine_BT.exp(), 0.0
        )
        removed_BT = ((adv_BT > 0) & (change_BT > self.delta)) | (
            (adv_BT < 0) & (change_BT < -self.delta)
        )
        return LossOutputs(
            loss_BT=torch.where(removed_BT, 0.0, -ratio_BT * adv_BT),
            weight_BT=torch.where(removed_BT | bounded_BT, 0.0, ratio_BT.detach()),
            active_BT=removed_BT,
            outside_BT=change_BT.abs() > self.delta,
            bounded_BT=bounded_BT,
        )


@dataclass
class SAPO(RatioObjective):
    """Soft Adaptive Policy Optimization (arXiv:2511.20347) has a smooth gate instead of a clip.

        f(r) = 4/tau sigmoid( tau (r - 1) ),   tau = tau_positive where A > 0, else tau_negative
        J    = 1/G sum_i 1/|y_i| sum_t f(r_it) A_it

    The weight on A grad log pi is f'(r) r = 4 p (1 - p) r with p = sigmoid(tau (r - 1)). It is 1 at
    r = 1 and falls to 0 on both sides. Nothing is ever clipped, so the active and outside fractions
    are 0; `clip/weight` is the mean of the weight. With `level=sequence` r_it is GSPO's s_i, which
    TRL and ms-swift allow.
    """

    name: str = "sapo"
    tau_positive: float = ranged(1.0, above=0)
    tau_negative: float = ranged(1.05, above=0)
    level: str = "token"  # token | sequence

    def __post_init__(self):
        super().__post_init__()
        if self.level not in ("token", "sequence"):
            raise ValueError(f"objective.level={self.level!r}: choose token or sequence")

    # a setting here, a fact of the class in all others
    @property
    def sequence_level(self) -> bool:  # ty: ignore[incompatible-property-override]
        """Whether there is one ratio per response, which is a setting here."""
        return self.level == "sequence"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        adv_BT = inputs.advantage_BT
        ratio, bounded = (
            self.token_ratio(inputs) if self.level == "token" else self.sequence_ratio(inputs)
        )
        ratio_BT, bounded_BT = ratio.expand_as(adv_BT), bounded.expand_as(inputs.mask_BT)
        tau_BT = torch.full_like(ratio_BT.detach(), self.tau_negative).masked_fill(
            adv_BT > 0, self.tau_positive
        )
        p_BT = (tau_BT * (ratio_BT - 1)).sigmoid()
        nothing_BT = torch.zeros_like(inputs.mask_BT)
        return LossOutputs(
            loss_BT=-4 / tau_BT * p_BT * adv_BT,
            weight_BT=torch.where(bounded_BT, 0.0, (4 * p_BT * (1 - p_BT) * ratio_BT).detach()),
            active_BT=nothing_BT,
            outside_BT=nothing_BT,
            bounded_BT=bounded_BT,
        )
