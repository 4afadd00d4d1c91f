"""From rewards to advantages: what every token of a response is credited with.

An estimator sees the reward of every token (the verifier's on the response's last one, minus any KL penalty), the mask,
and which responses share a problem, and gives an advantage for every token. Then, in this order and only if asked for:
whitening over the batch, and a clip.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gspo.core.masked import masked_mean, masked_sum
from gspo.core.ranges import Ranged, ranged


@dataclass
class Credit:
    """What an estimator works from."""

    token_rewards_BT: Tensor
    mask_BT: Tensor
    groups_B: Tensor  # int64: responses with the same number answer the same problem
    values_BT: Tensor | None = None  # the critic's V(x, y_<t), for estimators that need it

    @property
    def rewards_B(self) -> Tensor:
        """The whole response's reward: the sum over its tokens."""
        return masked_sum(self.token_rewards_BT, self.mask_BT)


@dataclass
class Advantage(Ranged, key="advantage"):
    """Base of the estimators: the settings they share."""

    name: str = ""
    whiten: str = (
        "none"  # over the rollout batch: tokens (verl, ROLL: long responses weigh more) | responses (ms-swift)
    )
    clip: float | None = ranged(None, above=0)  # keep advantages within +- this, after whitening
    needs_group: ClassVar[bool] = False  # rollout.group_size=1 is refused
    needs_values: ClassVar[bool] = False  # a critic is trained
    per_token: ClassVar[bool] = False  # tokens of a response can differ even when only its last token is rewarded
    # Some estimators have these settings; for the others this is what they amount to (read by gspo.config.checks). They
    # have no annotation, so that they are not fields and leave the order of the subclasses' fields as it is.
    group_of_one = "zero"
    gamma = 1.0
    std = "none"
    baseline = "none"

    def __post_init__(self):
        super().__post_init__()
        if self.whiten not in ("none", "tokens", "responses"):
            raise ValueError(f"advantage.whiten={self.whiten!r}: choose none, tokens or responses")

    def __call__(self, credit: Credit) -> Tensor:
        """Advantages [B, T], 0 where masked."""
        adv = self.estimate(credit)
        adv_BT = torch.where(credit.mask_BT, adv if adv.ndim == 2 else adv.unsqueeze(-1), 0.0)
        if self.whiten == "tokens":
            adv_BT = torch.where(credit.mask_BT, whitened(adv_BT, adv_BT[credit.mask_BT]), 0.0)
        elif self.whiten == "responses" and credit.mask_BT.any(-1).sum() > 1:
            mean_B = masked_mean(adv_BT, credit.mask_BT)[credit.mask_BT.any(-1)]
            adv_BT = torch.where(credit.mask_BT, (adv_BT - mean_B.mean()) / (mean_B.std() + 1e-4), 0.0)
        return adv_BT if self.clip is None else adv_BT.clamp(-self.clip, self.clip)

    def estimate(self, credit: Credit) -> Tensor:
        """[B] or [B, T]"""
        raise TypeError(f"advantage {self.name!r} has no formula: choose a concrete one")


@dataclass
class GroupAdvantage(Advantage):
    """Base of the estimators that compare a response with the others of its group.

    A group whose rewards are all equal carries no signal and gets exactly 0. So does a group of one, unless
    `group_of_one=reward`, which takes its mean for 0 and its std for 1 (verl).
    """

    group_of_one: str = "zero"  # zero | reward
    needs_group: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.group_of_one not in ("zero", "reward"):
            raise ValueError(f"advantage.group_of_one={self.group_of_one!r}: choose zero or reward")

    def estimate(self, credit: Credit) -> Tensor:
        rewards_B = credit.rewards_B
        groups = Groups(credit.groups_B)
        adv_B = torch.where(groups.same(rewards_B), 0.0, self.compare(rewards_B, groups))
        alone_B = self.alone(rewards_B) if self.group_of_one == "reward" else torch.zeros_like(rewards_B)
        return torch.where(groups.size_B == 1, alone_B, adv_B)

    def alone(self, rewards_B: Tensor) -> Tensor:
        """The advantage of a group of one: as if the mean were 0 and the std 1."""
        return rewards_B

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        raise TypeError(f"advantage {self.name!r} has no formula: choose a concrete one")


@dataclass
class GroupNormalized(GroupAdvantage):
    """A_i = (r_i - mean_j r_j) / (std r + eps): GRPO and the GSPO paper (Eq 3 and 6, which leave std and eps open).

    The std has ddof 1 and is the group's, or that of all rewards of the batch (`std=batch`: TRL's scale_rewards=batch;
    Lite PPO, arXiv:2508.08221).
    """

    name: str = "group_normalized"
    eps: float = ranged(1e-6, least=0)  # as verl and ROLL; TRL and ms-swift 1e-4, OpenRLHF 1e-9
    std: str = "group"  # group | batch

    def __post_init__(self):
        super().__post_init__()
        if self.std not in ("group", "batch"):
            raise ValueError(f"advantage.std={self.std!r}: choose group or batch")

    def alone(self, rewards_B: Tensor) -> Tensor:
        return rewards_B / (1 + self.eps)

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        std = groups.std(rewards_B) if self.std == "group" else deviation(rewards_B)
        return (rewards_B - groups.mean(rewards_B)) / (std + self.eps)


@dataclass
class GroupMean(GroupAdvantage):
    """A_i = r_i - mean_j r_j: Dr.GRPO (arXiv:2503.20783), MiniRL (arXiv:2512.01374)."""

    name: str = "group_mean"

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        return rewards_B - groups.mean(rewards_B)


@dataclass
class LeaveOneOut(GroupAdvantage):
    """A_i = r_i - mean of the other r_j of the group: RLOO (arXiv:2402.14740). G/(G-1) times GroupMean."""

    name: str = "rloo"

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        others_B = (groups.size_B - 1).clamp(min=1)
        return (rewards_B - groups.mean(rewards_B)) * groups.size_B / others_B


@dataclass
class Returns(Advantage):
    """A_t = sum_{u >= t} gamma^(u-t) r_u: the return, without baseline (ROLL's adv_estimator=reinforce).

    Masked positions inside a response (text the policy did not write) pass the return on unchanged.
    """

    name: str = "returns"
    gamma: float = ranged(1.0, above=0, most=1)

    def estimate(self, credit: Credit) -> Tensor:
        return discounted(credit.token_rewards_BT, credit.mask_BT, self.gamma)


@dataclass
class ReinforcePP(Returns):
    """REINFORCE++ (arXiv:2501.03262): returns, whitened over all tokens of the batch.

    `baseline=group` first takes the group's mean off every response's reward ("REINFORCE++-baseline").
    """

    name: str = "reinforce_pp"
    whiten: str = "tokens"
    baseline: str = "none"  # none | group

    def __post_init__(self):
        super().__post_init__()
        if self.baseline not in ("none", "group"):
            raise ValueError(f"advantage.baseline={self.baseline!r}: choose none or group")
        if self.whiten == "none":
            raise ValueError("advantage.whiten=none: REINFORCE++ is whitened; without it choose advantage=returns")

    def estimate(self, credit: Credit) -> Tensor:
        if self.baseline == "none":
            return super().estimate(credit)
        return GroupMean().estimate(credit)


@dataclass
class GAE(Advantage):
    """Generalized advantage estimation (arXiv:1506.02438, Eq 16) with a critic V; gamma = 1, as is usual for LLMs.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t

    V_t is the value before token t; after the last token it is 0. Masked positions inside a response are passed over.
    The critic is trained on R_t by 1/2 max( (V - R)^2, (clip(V, V_old +- value_clip) - R)^2 ), times value_coef.
    """

    name: str = "gae"
    whiten: str = "tokens"
    gamma: float = ranged(1.0, least=0, most=1)
    lam: float = ranged(0.95, least=0, most=1)
    value_coef: float = ranged(0.5, above=0)
    value_clip: float = ranged(0.2, above=0)
    needs_values: ClassVar[bool] = True
    per_token: ClassVar[bool] = True

    def estimate(self, credit: Credit) -> Tensor:
        """Raises ValueError without values."""
        if credit.values_BT is None:
            raise ValueError("advantage=gae needs the critic's values")
        adv_BT = torch.zeros_like(credit.token_rewards_BT)
        later_B, value_B = torch.zeros_like(adv_BT[:, 0]), torch.zeros_like(adv_BT[:, 0])
        for t in reversed(range(adv_BT.shape[1])):
            here_B = credit.mask_BT[:, t]
            delta_B = credit.token_rewards_BT[:, t] + self.gamma * value_B - credit.values_BT[:, t]
            later_B = torch.where(here_B, delta_B + self.gamma * self.lam * later_B, later_B)
            value_B = torch.where(here_B, credit.values_BT[:, t], value_B)
            adv_BT[:, t] = later_B
        return adv_BT

    def returns(self, credit: Credit) -> Tensor:
        """R_t = A_t + V_t, before any whitening: what the critic should predict. [B, T]"""
        return torch.where(credit.mask_BT, self.estimate(credit) + credit.values_BT, 0.0)


class Groups:
    """Statistics over the responses that share a problem, spread back to the responses. All [B]."""

    def __init__(self, groups_B: Tensor):
        _, self.index_B, size = groups_B.unique(return_inverse=True, return_counts=True)
        self.count, self.size_B = len(size), size[self.index_B]

    def mean(self, x_B: Tensor) -> Tensor:
        sums = torch.zeros(self.count, dtype=x_B.dtype, device=x_B.device).index_add(0, self.index_B, x_B)
        return sums[self.index_B] / self.size_B

    def std(self, x_B: Tensor) -> Tensor:
        """With ddof 1; 0 for a group of one."""
        squares_B = self.mean((x_B - self.mean(x_B)).square())
        return (squares_B * self.size_B / (self.size_B - 1).clamp(min=1)).sqrt()

    def same(self, x_B: Tensor) -> Tensor:
        """Whether all of a group are equal: exactly, for rounding must not leave a trace."""
        ends = torch.zeros(self.count, dtype=x_B.dtype, device=x_B.device)
        low = ends.scatter_reduce(0, self.index_B, x_B, "amin", include_self=False)
        high = ends.scatter_reduce(0, self.index_B, x_B, "amax", include_self=False)
        return (low == high)[self.index_B]


def discounted(x_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """sum_{u >= t} gamma^(u-t) x_u over the response's own tokens; masked positions are passed over. [B, T]"""
    x_BT = torch.where(mask_BT, x_BT, 0.0)
    result_BT, later_B = torch.zeros_like(x_BT), torch.zeros_like(x_BT[:, 0])
    for t in reversed(range(x_BT.shape[1])):
        later_B = torch.where(mask_BT[:, t], x_BT[:, t] + gamma * later_B, later_B)
        result_BT[:, t] = later_B
    return result_BT


def whitened(x: Tensor, sample: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) with mean and var (ddof 1) of the sample; unchanged if that is under two values."""
    return x if len(sample) < 2 else (x - sample.mean()) * (sample.var() + 1e-8).rsqrt()


def deviation(x_B: Tensor) -> Tensor:
    """Std with ddof 1; 0 for a single value."""
    return x_B.std() if len(x_B) > 1 else torch.zeros((), dtype=x_B.dtype)
