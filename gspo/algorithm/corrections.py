"""Corrections for the mismatch of engine and trainer: weights on the policy loss of every token.

The engine samples from mu, but the trainer assumes that the samples come from pi_old. The two
differ by precision, kernels and, in MoE models, by routing. The importance weights of the three
levels are

    m_t         log pi_old(y_t) - log mu(y_t)
    token       exp( m_t )
    sequence    exp( sum_t m_t )            the product over the response
    geometric   exp( 1/|y| sum_t m_t )

Weights carry no gradient and are 0 where masked. The exponent is kept within +-20, as in verl.

The corrections of this module act before the updates. gspo.algorithm.masks has further
corrections, of which some act in the updates.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.algorithm.kl import kl_estimate
from gspo.algorithm.objectives.base import LossInputs, log_ratio
from gspo.data.lazy_torch import torch
from gspo.data.masked import masked_mean, masked_sum
from gspo.io.errors import SettingError
from gspo.io.ranges import Ranged, choice, ranged

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = ("token", "sequence", "geometric")
EXPONENT_BOUND = 20.0


@dataclass
class Correction(Ranged, key="correction"):
    """The base of the corrections. The base itself corrects nothing: every weight is 1."""

    name: str = "none"
    # rollout: weights from the log-probs of old policy and engine, before the updates
    # minibatch: tokens leave the mask of a mini-batch, by statistics of the whole of it
    # loss: weights of an update, which depend on the advantages or on the current policy
    acts: ClassVar[str] = "rollout"
    weighs: ClassVar[bool] = True  # by importance weights, not only by 0 and 1
    compares_engine: ClassVar[bool] = True  # it reads the engine's log-probs
    compares_old: ClassVar[bool] = True  # it reads the old policy's log-probs
    # Some corrections have these settings. Without annotations they are no fields here.
    level = "token"
    normalize = False

    @property
    def has_rollout_weights(self) -> bool:
        """Whether there are weights before the updates."""
        return self.acts == "rollout" and self.name != "none"

    def __call__(self, old_logp_BT: Tensor, engine_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Compute the weights of the response tokens, 0 where masked. Shape [B, T]."""
        return mask_BT.to(old_logp_BT.dtype)

    def reduced_mask(self, old_logp_BT: Tensor, engine_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the mask of a whole mini-batch without the tokens that leave the loss. [B, T]."""
        return mask_BT

    def loss_weights(self, inputs: LossInputs) -> Tensor:
        """Compute the weights of the response tokens in an update, 0 where masked. [B, T]."""
        return inputs.mask_BT.to(inputs.logp_BT.dtype)


@dataclass
class BandCorrection(Correction):
    """The base of the corrections that depend on a band [low, high]."""

    # Without annotations they are not fields, which would change the order of the fields.
    low = 0.0
    high = 2.0

    def __post_init__(self):
        super().__post_init__()
        if not self.low < self.high:
            raise SettingError(
                "correction.low", self.low, f"must be below correction.high={self.high}"
            )

    def in_band(self, x_BT: Tensor) -> Tensor:
        """Return whether values lie in [low, high]. Shape [B, T]."""
        return (x_BT >= self.low) & (x_BT <= self.high)


@dataclass
class TIS(BandCorrection):
    """Truncated importance sampling (Yao et al. 2025): the weight is clipped to [low, high].

    `normalize` divides the truncated weights by their mean over the rollout batch (verl's
    rollout_is_batch_normalize). The mean is over tokens for level=token, over responses otherwise.
    """

    name: str = "tis"
    level: str = choice("token", LEVELS)
    low: float = ranged(0.0, least=0)
    high: float = ranged(2.0, above=0)  # the authors' C; MiniRL (arXiv:2512.01374) uses 5
    normalize: bool = False

    def __call__(self, old_logp_BT: Tensor, engine_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        weight_BT = importance_weight(old_logp_BT, engine_logp_BT, mask_BT, self.level)
        weight_BT = weight_BT.clamp(self.low, self.high)
        weight_BT = torch.where(mask_BT, weight_BT, 0.0)
        return normalized(weight_BT, mask_BT, self.level) if self.normalize else weight_BT


@dataclass
class MIS(BandCorrection):
    """Masked importance sampling: weights outside [low, high] become 0, the others stay.

    With `judged_by`, the weight of another level decides. For example, ms-swift keeps the token
    weights of a response if its geometric weight lies in the band.
    """

    name: str = "mis"
    level: str = choice("token", LEVELS)
    # the level of the weight that must lie in the band; empty: `level`
    judged_by: str = choice("", ("", *LEVELS))
    low: float = ranged(0.0, least=0)
    high: float = ranged(2.0, above=0)
    normalize: bool = False

    def __call__(self, old_logp_BT: Tensor, engine_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        weight_BT = importance_weight(old_logp_BT, engine_logp_BT, mask_BT, self.level)
        judge_level = self.judged_by or self.level
        judge_BT = importance_weight(old_logp_BT, engine_logp_BT, mask_BT, judge_level)
        weight_BT = torch.where(mask_BT & self.in_band(judge_BT), weight_BT, 0.0)
        return normalized(weight_BT, mask_BT, self.level) if self.normalize else weight_BT


@dataclass
class IcePop(MIS):
    """IcePop (Ring-1T report, 2025): token weights are set to 0 outside [1/2, 5]."""

    name: str = "icepop"
    low: float = 0.5
    high: float = 5.0


@dataclass
class Rejection(BandCorrection):
    """Rejection (verl's rollout_rs): the weight is 1 if the mismatch lies in [low, high], else 0.

    `measure` selects how the mismatch of a token is measured:

        ratio = exp(m)      k2 = m^2 / 2      k3 = exp(m) - 1 - m

    `level` selects how the measure is reduced over the response:

        token       no reduction
        sequence    the sum; for ratios the product
        geometric   the mean; for ratios the geometric mean
        largest     the largest value
    """

    name: str = "rejection"
    weighs: ClassVar[bool] = False
    measure: str = choice("ratio", ("ratio", "k2", "k3"))
    level: str = choice("token", (*LEVELS, "largest"))
    low: float = ranged(0.0, least=0)
    high: float = ranged(2.0, above=0)

    def __call__(self, old_logp_BT: Tensor, engine_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        if self.measure == "ratio":
            value_BT = importance_weight(old_logp_BT, engine_logp_BT, mask_BT, self.level)
        else:
            m_BT = log_ratio(old_logp_BT, engine_logp_BT, mask_BT).detach()
            value_BT = kl_estimate(-m_BT, self.measure, EXPONENT_BOUND)
            value_BT = reduce(value_BT, mask_BT, self.level)
        return (mask_BT & self.in_band(value_BT)).to(old_logp_BT.dtype)


def importance_weight(
    old_logp_BT: Tensor, engine_logp_BT: Tensor, mask_BT: Tensor, level: str
) -> Tensor:
    """Compute the untruncated weights of a level, without gradient. Shape [B, T].

    Masked positions hold no meaningful value.
    """
    m_BT = log_ratio(old_logp_BT, engine_logp_BT, mask_BT).detach()
    exponent_BT = reduce(m_BT, mask_BT, level)
    return exponent_BT.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def normalized(weight_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """Divide weights by their mean over tokens (level=token) or over responses. Shape [B, T].

    Weights that are all 0 stay 0.
    """
    if level == "token":
        mean = weight_BT.sum() / mask_BT.sum()
    else:
        mean_B = masked_mean(weight_BT, mask_BT)
        sequences = mask_BT.any(-1).sum()
        mean = mean_B.sum() / sequences
    return weight_BT / mean if mean > 0 else weight_BT


def reduce(x_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """Reduce x over the tokens of each response and repeat the result for each token. [B, T]."""
    if level == "token":
        return x_BT
    if level == "largest":
        reduced_B = torch.where(mask_BT, x_BT, -math.inf).amax(-1)
    elif level == "sequence":
        reduced_B = masked_sum(x_BT, mask_BT)
    else:
        reduced_B = masked_mean(x_BT, mask_BT)
    return reduced_B.unsqueeze(-1).expand_as(x_BT)
