"""KL to a reference policy: estimators, settings of the KL term, and its adaptive coefficient.

See Schulman, "Approximating KL Divergence", 2020, for the estimators. For a sampled token, with
d = log pi(y_t) - log pi_ref(y_t):

    k1  = d                   unbiased, may be negative, expected gradient as a loss: zero
    k2  = d^2 / 2             biased, gradient of KL(pi || pi_ref)
    k3  = exp(-d) + d - 1     unbiased, never negative, gradient of KL(pi_ref || pi)
    abs = |d|

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.objectives.base import log_ratio
from gspo.data.lazy_torch import torch
from gspo.io.errors import SettingError
from gspo.io.ranges import Ranged, choice, ranged

if TYPE_CHECKING:
    from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3", "abs")
MAX_LOG_RATIO_BOUND = 80.0  # nats; exp(89) is infinite in float32


@dataclass
class KL(Ranged, key="kl"):
    """The base of the KL terms. The base itself means no KL term and no reference policy.

    The GSPO paper shows no KL term either: it is "omitted for brevity" there.
    """

    name: str = "none"
    in_loss: ClassVar[bool] = False  # an estimate is added to the loss
    in_reward: ClassVar[bool] = False  # an estimate is subtracted from the rewards
    # The other choices have these settings. They have no annotation, so they are no fields here.
    coef = 0.0
    target = cast("float | None", None)
    horizon = 1.0
    refresh_every = 0  # there is no reference policy to refresh

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is loaded and KL to it is computed."""
        return self.in_loss or self.in_reward

    def estimate(self, logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Compute the estimate for every token, 0 if it is masked. Shape [B, T]."""
        raise TypeError(f"kl={self.name} has no estimate: choose kl=loss or kl=reward")


@dataclass
class Penalized(KL):
    """The settings that KL in the loss and KL in the reward share.

    The coefficient beta is fixed, or adaptive if `target` is set (arXiv:1909.08593, section 2.2):

        beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) min(n / horizon, 1))

    n is the number of responses in a step.
    """

    estimator: str = choice("k3", ESTIMATORS)
    coef: float = ranged(1e-3, above=0, why="for no KL term choose kl=none")  # beta
    target: float | None = ranged(None, above=0)  # nats per token; null: the coefficient is fixed
    horizon: float = ranged(10000, above=0)  # responses; larger: beta changes more slowly
    # nats; d is kept within +- this bound, without gradient beyond it
    log_ratio_bound: float = ranged(20.0, above=0)
    # the estimate is kept within +- this bound; null: no bound; verl, ms-swift and ROLL use 10
    value_bound: float | None = ranged(None, above=0)
    # every so many steps the reference becomes the current policy; 0: never
    refresh_every: int = ranged(0, least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.estimator == "k3" and self.log_ratio_bound > MAX_LOG_RATIO_BOUND:
            raise SettingError(
                "kl.log_ratio_bound",
                self.log_ratio_bound,
                f"must lie in (0, {MAX_LOG_RATIO_BOUND:g}]",
            )

    def estimate(self, logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        d_BT = log_ratio(logp_BT, ref_logp_BT, mask_BT)
        value_BT = kl_estimate(d_BT, self.estimator, self.log_ratio_bound)
        if self.value_bound is not None:
            value_BT = value_BT.clamp(-self.value_bound, self.value_bound)
        return value_BT


@dataclass
class KLInLoss(Penalized):
    """KL in the loss: beta * aggregate(estimate) is added to it.

    `gradient=k2` keeps the estimator's value, but takes the gradient of k2. This is verl's
    straight-through form (its "k3+" and "k1+").

    `times_ratio` multiplies the estimate by the importance ratio pi / pi_old. With the token's
    ratio, value and gradient of k1 and k3 are unbiased off policy, given the prefix (DeepSeek-V3.2,
    arXiv:2512.02556). With the response's ratio, they are unbiased only for responses with a
    single token. TRL uses the response's ratio for GSPO.
    """

    name: str = "loss"
    gradient: str = choice("own", ("own", "k2"))
    times_ratio: str = choice("none", ("none", "token", "sequence"))
    weighted: bool = False  # multiply by the correction's weights, as ms-swift does
    aggregation: Aggregation = field(default_factory=Aggregation)  # mode=auto: the policy term's
    in_loss: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.times_ratio != "none" and self.log_ratio_bound > MAX_LOG_RATIO_BOUND:
            raise SettingError(
                "kl.log_ratio_bound",
                self.log_ratio_bound,
                f"must lie in (0, {MAX_LOG_RATIO_BOUND:g}] with "
                f"kl.times_ratio={self.times_ratio}: it bounds the ratio too",
            )
        if self.gradient == "k2" and self.times_ratio != "none":
            raise SettingError(
                "kl.times_ratio",
                self.times_ratio,
                "with kl.gradient=k2, the two gradients would add up",
            )

    def estimate(self, logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        value_BT = super().estimate(logp_BT, ref_logp_BT, mask_BT)
        if self.gradient == "own":
            return value_BT
        d_BT = log_ratio(logp_BT, ref_logp_BT, mask_BT)
        k2_BT = kl_estimate(d_BT, "k2", self.log_ratio_bound)
        return value_BT.detach() + (k2_BT - k2_BT.detach())


@dataclass
class KLInReward(Penalized):
    """KL in the reward (arXiv:1909.08593): each token's reward is reduced by its KL penalty.

        r_t <- r_t - beta * estimate(pi_old, pi_ref)

    Advantages are computed from these rewards. Estimators that give a response a single advantage
    use the sum over its tokens.
    """

    name: str = "reward"
    estimator: str = "k1"
    in_reward: ClassVar[bool] = True


def kl_estimate(d_BT: Tensor, estimator: str, bound: float) -> Tensor:
    """Compute an estimator from d = log pi - log pi_ref. Shape [B, T].

    d is kept within +-bound and has no gradient beyond it.
    """
    d_BT = d_BT.clamp(-bound, bound)
    if estimator == "k1":
        return d_BT
    if estimator == "k2":
        return d_BT.square() / 2
    if estimator == "k3":
        return torch.expm1(-d_BT) + d_BT
    return d_BT.abs()


class KLCoefficient:
    """The coefficient beta of the KL term, adaptive if `target` is set. `value` is the whole state.

    The formula stands at `Penalized`. Other frameworks do not bound n / horizon, so for
    n > 5 horizon their factor of beta can become negative.
    """

    def __init__(self, settings: KL):
        self.settings = settings
        self.value = settings.coef

    def update(self, kl: float, responses: int) -> None:
        """Adapt beta after a step of `responses` responses and a mean KL of `kl` nats per token.

        A KL that is not finite changes nothing."""
        settings = self.settings
        if settings.target is None or not math.isfinite(kl):
            return
        error = kl / settings.target - 1
        clipped = min(max(error, -0.2), 0.2)
        self.value *= 1 + clipped * min(responses / settings.horizon, 1)
