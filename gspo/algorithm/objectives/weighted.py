"""Objectives that weight A grad log pi, without PPO's clip: REINFORCE, CISPO, MiniRL, DPPO, SAPO.

    sg      the stop-gradient
    w_it    the token ratio pi(y_it) / pi_old(y_it)
    M_it    a mask of 0 and 1

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.algorithm.objectives.base import (
    LossInputs,
    LossOutputs,
    Objective,
    RatioObjective,
    probability_change,
    required_engine_logp,
)
from gspo.data.lazy_torch import torch
from gspo.io.ranges import choice, ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Reinforce(Objective):
    """REINFORCE: no ratio and no clip.

        J = mean over tokens of A_it log pi(y_it)

    Without a ratio, stale samples count like fresh samples.
    """

    name: str = "reinforce"
    ratio_to: ClassVar[str] = "none"
    aggregation: ClassVar[str] = "token-mean"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        logp_BT = torch.where(inputs.mask_BT, inputs.logp_BT, 0.0)
        none_BT = torch.zeros_like(inputs.mask_BT)
        return LossOutputs(
            loss_BT=-inputs.advantage_BT * logp_BT,
            weight_BT=torch.ones_like(logp_BT, requires_grad=False),
            is_clipped_BT=none_BT,
            outside_BT=none_BT,
            bounded_BT=none_BT,
        )


@dataclass
class Weighted(RatioObjective):
    """The base of CISPO and MiniRL, which share a band and the loss -M sg[weight] A log pi."""

    clip_low: float = ranged(0.2, above=0, most=1, why="weights are not negative")
    clip_high: float = ranged(0.2, above=0, why="the band ends at 1 + clip_high")

    def harmful(self, ratio_BT: Tensor, adv_BT: Tensor) -> Tensor:
        """Return PPO's mask [B, T]: the ratio left the band on the side that the advantage favours.

        (A > 0 and w > 1 + clip_high) or (A < 0 and w < 1 - clip_low)
        """
        above_BT = (adv_BT > 0) & (ratio_BT > 1 + self.clip_high)
        below_BT = (adv_BT < 0) & (ratio_BT < 1 - self.clip_low)
        return above_BT | below_BT

    def weighted(
        self,
        weight_BT: Tensor,
        ratio_BT: Tensor,
        bounded_BT: Tensor,
        kept_BT: Tensor,
        inputs: LossInputs,
    ) -> LossOutputs:
        """Compute the loss -M sg[weight] A log pi. `kept_BT` is the mask M."""
        logp_BT = torch.where(inputs.mask_BT & kept_BT, inputs.logp_BT, 0.0)
        return LossOutputs(
            loss_BT=-weight_BT.detach() * inputs.advantage_BT * logp_BT,
            weight_BT=torch.where(kept_BT, weight_BT.detach(), 0.0),
            is_clipped_BT=self.harmful(ratio_BT, inputs.advantage_BT) & ~kept_BT,
            outside_BT=self.outside(ratio_BT),
            bounded_BT=bounded_BT,
        )


@dataclass
class CISPO(Weighted):
    """Clipped IS-weight Policy Optimization (MiniMax-M1, arXiv:2506.13585, Eq 4-7).

        J = mean over tokens of M_it sg[ clip(w_it, 1 - clip_low, 1 + clip_high) ] A_it log pi(y_it)

    The weight is truncated, but every token keeps its gradient: M = 1 (Eq 4-5). With
    `mask_harmful`, M_it is 0 for the tokens that PPO clips (Eq 6-7). clip_low = 1 sets no lower
    bound, as in the paper.
    """

    name: str = "cispo"
    clip_low: float = 1.0
    # truncates weights at 5; ScaleRL (arXiv:2510.13786) sees no difference between 4, 5 and 8
    clip_high: float = 4.0
    mask_harmful: bool = False
    aggregation: ClassVar[str] = "token-mean"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_BT, bounded_BT = self.token_ratio(inputs)
        # All ratios above the cap have the same weight. So tokens beyond the numerical bound keep
        # their gradient.
        weight_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high)
        kept_BT = torch.ones_like(bounded_BT)
        if self.mask_harmful:
            kept_BT = ~self.harmful(ratio_BT, inputs.advantage_BT)
        return self.weighted(weight_BT, ratio_BT, bounded_BT, kept_BT, inputs)


@dataclass
class MiniRL(Weighted):
    """MiniRL (arXiv:2512.01374): the token ratio is a weight without gradient, under PPO's mask.

        J    = 1/B sum_i sum_t M_it sg[w_it] A_it log pi(y_it)
        M_it = 0 if (A_it > 0 and w_it > 1 + clip_high) or (A_it < 0 and w_it < 1 - clip_low)
               1 otherwise

    The paper's weight is pi / mu, with the behaviour policy mu. It equals w_it pi_old / mu, and
    `correction=tis` supplies pi_old / mu, truncated at 5.
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
    """Divergence PPO with binary total variation (arXiv:2602.04879).

        w_it = pi(y_it) / mu(y_it)
        J    = mean over tokens of M_it w_it A_it
        M_it = 0 if (A_it > 0 and pi - mu > delta) or (A_it < 0 and mu - pi > delta)
               1 otherwise

    pi and mu are probabilities of the sampled token. mu is the behaviour policy, and the engine
    reports its log-probs. The mask depends on a difference of probabilities, not on their ratio.
    """

    name: str = "dppo"
    # the value of the authors' runs in bfloat16
    delta: float = ranged(0.15, above=0, below=1, why="it bounds a difference of probabilities")
    aggregation: ClassVar[str] = "token-mean"
    ratio_to: ClassVar[str] = "engine"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the loss of every token. Raises ValueError without inputs.engine_logp_BT."""
        adv_BT = inputs.advantage_BT
        engine_logp_BT = required_engine_logp(inputs, "objective", self.name)
        ratio_BT, bounded_BT = self.token_ratio(inputs, engine_logp_BT)
        change_BT = probability_change(inputs, engine_logp_BT)
        above_BT = (adv_BT > 0) & (change_BT > self.delta)
        below_BT = (adv_BT < 0) & (change_BT < -self.delta)
        removed_BT = above_BT | below_BT  # M = 0
        return LossOutputs(
            loss_BT=torch.where(removed_BT, 0.0, -ratio_BT * adv_BT),
            weight_BT=torch.where(removed_BT | bounded_BT, 0.0, ratio_BT.detach()),
            is_clipped_BT=removed_BT,
            outside_BT=change_BT.abs() > self.delta,
            bounded_BT=bounded_BT,
        )


@dataclass
class SAPO(RatioObjective):
    """Soft Adaptive Policy Optimization (arXiv:2511.20347): a smooth gate instead of a clip.

        tau  = tau_positive if A_it > 0, else tau_negative
        p    = sigmoid( tau (r_it - 1) )
        f    = 4/tau p
        J    = 1/G sum_i 1/|y_i| sum_t f(r_it) A_it

    The weight on A grad log pi is f'(r) r = 4 p (1 - p) r. It is 1 at r = 1 and falls to 0 on both
    sides. No token is ever clipped, so the active and outside fractions are 0. `clip/weight` is
    the mean of the weight. With `level=sequence`, r_it is GSPO's s_i, as in TRL and ms-swift.
    """

    name: str = "sapo"
    tau_positive: float = ranged(1.0, above=0)
    tau_negative: float = ranged(1.05, above=0)
    level: str = choice("token", ("token", "sequence"))

    # a setting here, a fact of the class in all others
    @property
    def sequence_level(self) -> bool:  # ty: ignore[incompatible-property-override]
        """Whether a response has a single ratio: a setting of this objective."""
        return self.level == "sequence"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        adv_BT = inputs.advantage_BT
        ratios_of_level = self.token_ratio if self.level == "token" else self.sequence_ratio
        ratio, bounded = ratios_of_level(inputs)
        ratio_BT = ratio.expand_as(adv_BT)
        bounded_BT = bounded.expand_as(inputs.mask_BT)
        tau_BT = torch.full_like(ratio_BT.detach(), self.tau_negative)
        tau_BT = tau_BT.masked_fill(adv_BT > 0, self.tau_positive)
        p_BT = (tau_BT * (ratio_BT - 1)).sigmoid()
        weight_BT = 4 * p_BT * (1 - p_BT) * ratio_BT
        none_BT = torch.zeros_like(inputs.mask_BT)
        return LossOutputs(
            loss_BT=-4 / tau_BT * p_BT * adv_BT,
            weight_BT=torch.where(bounded_BT, 0.0, weight_BT.detach()),
            is_clipped_BT=none_BT,
            outside_BT=none_BT,
            bounded_BT=bounded_BT,
        )
