"""Further corrections for the mismatch of engine and trainer: KPop, M2PO, OPSM, rho.

    m_t    log pi_old(y_t) - log mu(y_t), with the policy mu that sampled

They act at different points (Correction.acts):

    KPop       before the updates, like the corrections of gspo.algorithm.corrections
    M2PO       on a whole mini-batch
    OPSM, rho  in the loss of an update, because they depend on the advantage

docs/algorithms.md lists the traps of each.

Shape suffixes: B responses, T response tokens, N response tokens of all responses, 1 an axis that
is broadcast over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.algorithm.corrections import (
    MIS,
    TIS,
    Correction,
    IcePop,
    Rejection,
    importance_weight,
    reduce,
)
from gspo.algorithm.objectives.base import LossInputs, log_ratio, required_engine_logp
from gspo.data.lazy_torch import torch
from gspo.data.masked import masked_mean
from gspo.io.errors import SettingError
from gspo.io.ranges import choice, ranged

if TYPE_CHECKING:
    from torch import Tensor

RHO_EXPONENT_BOUND = 10.0  # nats; open-instruct's bound
MIN_PROBABILITY = 1e-8  # KPop's divergences clamp probabilities to [1e-8, 1 - 1e-8]


@dataclass
class KPop(Correction):
    """KPop (Ring-2.6, arXiv:2606.15079): token weights, 0 if the probabilities diverge.

        D(p, q)   p log(p/q) + (1 - p) log((1 - p)/(1 - q))     the KL of two Bernoulli variables
        weight    p/q if max( D(p, q), D(q, p) ) <= high, else 0

    p and q are the probabilities of the sampled token by pi_old and mu. Unlike a ratio, the
    divergence hardly sees rare tokens.
    """

    name: str = "kpop"
    high: float = ranged(2.0, above=0)  # nats; AReaL's example

    def __call__(self, old_logp_BT: Tensor, engine_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        forward_BT = binary_kl(old_logp_BT, engine_logp_BT, mask_BT)
        reverse_BT = binary_kl(engine_logp_BT, old_logp_BT, mask_BT)
        kept_BT = torch.maximum(forward_BT, reverse_BT) <= self.high
        weight_BT = importance_weight(old_logp_BT, engine_logp_BT, mask_BT, "token")
        return torch.where(mask_BT & kept_BT, weight_BT, 0.0)


@dataclass
class M2PO(Correction):
    """M2PO (arXiv:2510.01161): the tokens with the largest m_t^2 leave the mini-batch.

        M2 = mean over the remaining tokens of m_t^2

    The fewest tokens leave that bring M2 below `threshold`, the largest m_t^2 first. If no number
    of tokens suffices, the token with the smallest m_t^2 stays. Equal values leave in the order of
    their positions. The loss is divided by the counts of the remaining tokens.

    AReaL takes the mean over a micro-batch. Here it is over the mini-batch, so it does not depend
    on the size of micro-batches or on the number of ranks.
    """

    name: str = "m2po"
    threshold: float = ranged(0.04, above=0)
    acts: ClassVar[str] = "minibatch"
    weighs: ClassVar[bool] = False

    def reduced_mask(self, old_logp_BT: Tensor, engine_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
        m_BT = log_ratio(old_logp_BT, engine_logp_BT, mask_BT).detach().double()
        square_N = m_BT[mask_BT].square()
        if not len(square_N):
            return mask_BT
        largest_first = square_N.sort(descending=True, stable=True)
        # entry n: how many values remain if the n largest leave
        counts_N = torch.arange(len(square_N), 0, -1, device=square_N.device)
        # entry n: the mean of the values that remain if the n largest leave. It falls with n
        means_N = largest_first.values.flip(0).cumsum(0).flip(0) / counts_N
        remaining = (means_N < self.threshold).sum().clamp(min=1)
        kept_N = torch.zeros_like(square_N, dtype=torch.bool)
        kept_N[largest_first.indices] = counts_N <= remaining
        kept_BT = torch.zeros_like(mask_BT)
        kept_BT[mask_BT] = kept_N
        return kept_BT


@dataclass
class OPSM(Correction):
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556).

        weight = 0 if A < 0 and 1/|y| sum_t ( log mu(y_t) - log pi(y_t) ) > delta, else 1

    pi is the current policy. With `against=old`, pi_old takes the place of mu. The condition says
    that the geometric mean of pi / mu is below exp(-delta). The aggregation counts dropped
    responses too.
    """

    name: str = "opsm"
    delta: float = ranged(0.5, above=0)  # nats; the example of TRL's docs
    against: str = choice("engine", ("engine", "old"))
    acts: ClassVar[str] = "loss"
    weighs: ClassVar[bool] = False

    @property
    def compares_engine(self) -> bool:  # ty: ignore[incompatible-property-override]
        """Whether it reads the engine's log-probs: a setting."""
        return self.against == "engine"

    @property
    def compares_old(self) -> bool:  # ty: ignore[incompatible-property-override]
        """Whether it reads the old policy's log-probs: a setting."""
        return self.against == "old"

    def loss_weights(self, inputs: LossInputs) -> Tensor:
        mask_BT = inputs.mask_BT
        behaviour_BT = inputs.old_logp_BT
        if self.against == "engine":
            behaviour_BT = required_engine_logp(inputs, "correction", self.name)
        fall_BT = -log_ratio(inputs.logp_BT.detach(), behaviour_BT, mask_BT)
        is_far_B1 = masked_mean(fall_BT, mask_BT).unsqueeze(-1) > self.delta
        dropped_BT = is_far_B1 & (inputs.advantage_BT < 0)
        return (mask_BT & ~dropped_BT).to(inputs.logp_BT.dtype)


@dataclass
class RhoMask(Correction):
    """open-instruct's correction: weights rho = pi_old / mu, masked by a ratio or by a divergence.

        weight     clip( rho, low, high )           level=token or geometric
        measure    ratio: rho of the level
                   tv:    1/|y| sum_t | exp(m_t) - 1 |    (VACO, arXiv:2603.01365)

    The weight is 0 if the measure lies outside [mask_low, mask_high]. With measure=tv only tokens
    that the update would move further apart get 0, those with sgn(m_t) A_t > 0. m_t lies within
    +-10.
    """

    name: str = "rho"
    measure: str = choice("ratio", ("ratio", "tv"))
    level: str = choice("token", ("token", "geometric"))
    mask_low: float | None = ranged(None, above=0)  # null: no bound
    mask_high: float | None = ranged(None, above=0)  # null: no bound
    low: float = ranged(0.0, least=0)
    high: float | None = ranged(2.0, above=0)  # null: no bound
    acts: ClassVar[str] = "loss"

    def __post_init__(self):
        super().__post_init__()
        if self.mask_low is None and self.mask_high is None:
            raise SettingError(
                "correction.mask_high",
                None,
                "with correction.mask_low=null, nothing is masked",
                remedy="use correction=tis",
            )
        pairs = [("mask_low", self.mask_low, self.mask_high), ("low", self.low, self.high)]
        for key, low, high in pairs:
            if low is not None and high is not None and not low < high:
                upper = key.replace("low", "high")
                raise SettingError(
                    f"correction.{key}", low, f"must be below correction.{upper}={high:g}"
                )

    def loss_weights(self, inputs: LossInputs) -> Tensor:
        mask_BT = inputs.mask_BT
        engine_logp_BT = required_engine_logp(inputs, "correction", self.name)
        m_BT = log_ratio(inputs.old_logp_BT, engine_logp_BT, mask_BT).detach()
        m_BT = m_BT.clamp(-RHO_EXPONENT_BOUND, RHO_EXPONENT_BOUND)
        weight_BT = reduce(m_BT, mask_BT, self.level).exp()
        if self.measure == "ratio":
            removed_BT = self.outside(weight_BT)
        else:
            distance_BT = (m_BT.exp() - 1).abs()
            apart_BT = m_BT.sign() * inputs.advantage_BT > 0
            removed_BT = self.outside(reduce(distance_BT, mask_BT, "geometric")) & apart_BT
        clipped_BT = weight_BT.clamp(min=self.low, max=self.high)
        return torch.where(mask_BT & ~removed_BT, clipped_BT, 0.0)

    def outside(self, x_BT: Tensor) -> Tensor:
        """Return whether values lie outside [mask_low, mask_high]. Shape [B, T]."""
        outside_BT = torch.zeros_like(x_BT, dtype=torch.bool)
        if self.mask_low is not None:
            outside_BT = outside_BT | (x_BT < self.mask_low)
        if self.mask_high is not None:
            outside_BT = outside_BT | (x_BT > self.mask_high)
        return outside_BT


CORRECTIONS = (Correction, TIS, MIS, IcePop, Rejection, KPop, M2PO, OPSM, RhoMask)


def binary_kl(p_logp_BT: Tensor, q_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Compute p log(p/q) + (1 - p) log((1 - p)/(1 - q)) of each token, without gradient.

    The result is [B, T], float64, and 0 at masked tokens. In float32, 1 - 1e-8 would be 1.
    """
    p_BT = torch.where(mask_BT, p_logp_BT, 0.0).detach().double().exp()
    q_BT = torch.where(mask_BT, q_logp_BT, 0.0).detach().double().exp()
    p_BT = p_BT.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    q_BT = q_BT.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    return p_BT * (p_BT / q_BT).log() + (1 - p_BT) * ((1 - p_BT) / (1 - q_BT)).log()
