"""KL to a reference policy: estimators, the term's settings, and the coefficient's controller.

With d = log pi(y_t) - log pi_ref(y_t) for a sampled token (Schulman, "Approximating KL Divergence", 2020):

    k1 = d                    unbiased; negative for single tokens. As a loss its expected gradient is zero
    k2 = d^2 / 2              biased; its gradient is that of KL(pi || pi_ref)
    k3 = exp(-d) + d - 1      unbiased, never negative; its gradient is that of KL(pi_ref || pi)
    abs = |d|

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Aggregation
from gspo.core.ranges import Ranged, ranged

ESTIMATORS = ("k1", "k2", "k3", "abs")
LARGEST_BOUND = 80.0  # nats: exp of more is not finite in float32


@dataclass
class KL(Ranged, key="kl"):
    """The base of the choices. By itself it stands for no KL term and no reference policy.

    The GSPO paper has none either: it is "omitted for brevity" there.
    """

    name: str = "none"
    in_loss: ClassVar[bool] = False  # an estimate is added to the loss
    in_reward: ClassVar[bool] = False  # an estimate is taken off the rewards
    refresh_every = 0  # there is no reference policy to refresh; not annotated, so that it is no field here

    @property
    def needs_reference(self) -> bool:
        """Whether KL to a reference policy is computed, on the old log-probs too."""
        return self.in_loss or self.in_reward


@dataclass
class Penalized(KL):
    """What KL in the loss and KL in the reward share.

    The coefficient is fixed, or adaptive where `target` is given (arXiv:1909.08593, section 2.2):
        beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon),   n responses per step
    """

    estimator: str = "k3"  # k1 | k2 | k3 | abs
    coef: float = ranged(1e-3, above=0, why="for no KL term choose kl=none")  # beta
    target: float | None = ranged(None, above=0)  # nats per token; null: the coefficient is fixed
    horizon: float = ranged(10000, above=0)  # responses; of the adaptive coefficient
    log_ratio_bound: float = ranged(20.0, above=0)  # nats: d is kept within +- this; beyond it no gradient
    # the estimate is kept within +- this; null: no bound; verl, ms-swift, ROLL: 10
    value_bound: float | None = ranged(None, above=0)
    # steps after which the reference becomes the current policy; 0: held for the whole run
    refresh_every: int = ranged(0, least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"kl.estimator={self.estimator!r}: choose one of {', '.join(ESTIMATORS)}")
        if self.estimator == "k3" and self.log_ratio_bound > LARGEST_BOUND:
            raise ValueError(f"kl.log_ratio_bound={self.log_ratio_bound} must lie in (0, {LARGEST_BOUND:g}]")

    def estimate(self, logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """The estimator at every token, 0 where masked. Shape [B, T]."""
        d_BT = torch.where(mask_BT, logp_BT - ref_logp_BT.detach(), 0.0)
        value_BT = kl_estimate(d_BT, self.estimator, self.log_ratio_bound)
        return value_BT if self.value_bound is None else value_BT.clamp(-self.value_bound, self.value_bound)


@dataclass
class KLInLoss(Penalized):
    """beta * aggregate(estimate) is added to the loss.

    `gradient=k2` is verl's straight-through form (its "k3+", "k1+"): the value of the estimator, the gradient of k2.
    `times_ratio` multiplies the estimate by the importance ratio pi/pi_old: by that of the token, value and gradient of
    k1 and k3 are unbiased off policy, given the prefix (DeepSeek-V3.2, arXiv:2512.02556); `sequence`, GSPO's ratio, is
    what TRL does with it, and is unbiased for responses of one token only.
    """

    name: str = "loss"
    gradient: str = "own"  # own | k2
    times_ratio: str = "none"  # none | token | sequence
    weighted: bool = False  # multiply by the correction's weights, as ms-swift does
    aggregation: Aggregation = field(default_factory=Aggregation)  # mode=auto: the policy term's
    in_loss: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.gradient not in ("own", "k2"):
            raise ValueError(f"kl.gradient={self.gradient!r}: choose own or k2")
        if self.times_ratio not in ("none", "token", "sequence"):
            raise ValueError(f"kl.times_ratio={self.times_ratio!r}: choose none, token or sequence")
        if self.times_ratio != "none" and self.log_ratio_bound > LARGEST_BOUND:
            raise ValueError(
                f"kl.log_ratio_bound={self.log_ratio_bound} must lie in (0, {LARGEST_BOUND:g}] with kl.times_ratio="
                f"{self.times_ratio}: it bounds the ratio too"
            )
        if self.gradient == "k2" and self.times_ratio != "none":
            raise ValueError(f"kl.times_ratio={self.times_ratio} with kl.gradient=k2: the two gradients would add up")

    def estimate(self, logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        value_BT = super().estimate(logp_BT, ref_logp_BT, mask_BT)
        if self.gradient == "own":
            return value_BT
        d_BT = torch.where(mask_BT, logp_BT - ref_logp_BT.detach(), 0.0)
        k2_BT = kl_estimate(d_BT, "k2", self.log_ratio_bound)
        return value_BT.detach() + (k2_BT - k2_BT.detach())


@dataclass
class KLInReward(Penalized):
    """beta * estimate(pi_old, pi_ref) is taken off the reward of every token, before advantages (arXiv:1909.08593).

    Estimators of advantage per response see the sum over its tokens.
    """

    name: str = "reward"
    estimator: str = "k1"
    in_reward: ClassVar[bool] = True


def kl_estimate(d_BT: Tensor, estimator: str, bound: float) -> Tensor:
    """One of the estimators above of d = log pi - log pi_ref; d is kept within +-bound, beyond it without gradient."""
    d_BT = d_BT.clamp(-bound, bound)
    if estimator == "k1":
        return d_BT
    if estimator == "k2":
        return d_BT.square() / 2
    if estimator == "k3":
        return torch.expm1(-d_BT) + d_BT
    return d_BT.abs()


class KLCoefficient:
    """beta, fixed or adaptive; `value` is its whole state.

    Peers let the multiplier 1 + error n / horizon turn negative where n > 5 horizon. Here n / horizon counts at most 1.
    """

    def __init__(self, settings: Penalized):
        self.settings, self.value = settings, settings.coef

    def update(self, kl: float, responses: int) -> None:
        """After a step with mean KL `kl` (nats per token) on `responses` responses."""
        if self.settings.target is None:
            return
        error = min(max(kl / self.settings.target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(responses / self.settings.horizon, 1)
