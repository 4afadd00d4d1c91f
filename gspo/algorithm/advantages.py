"""Advantage estimators: from rewards to the advantage of every token of a response.

An estimator is given the reward of every token (the verifier's reward on the response's last token,
minus any KL penalty), the mask, and which responses share a problem. It returns an advantage for
every token. If the settings ask for it, advantages are then whitened over the batch and clipped, in
this order.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.data.lazy_torch import torch
from gspo.data.masked import masked_mean, masked_sum
from gspo.io.ranges import Ranged, ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Credit:
    """Holds what an estimator computes advantages from."""

    token_rewards_BT: Tensor
    mask_BT: Tensor
    groups_B: Tensor  # int64; responses with the same number answer the same problem
    values_BT: Tensor | None = None  # the critic's V(x, y_<t), for estimators that need it
    # int64, the number of the policy's turn; None where there are no episodes
    turns_BT: Tensor | None = None

    @property
    def rewards_B(self) -> Tensor:
        """The reward of each whole response, which is the sum over its tokens. Shape [B]."""
        return masked_sum(self.token_rewards_BT, self.mask_BT)


@dataclass
class Advantage(Ranged, key="advantage"):
    """The base of the estimators, with the settings that they share."""

    name: str = ""
    # whitening over the rollout batch: none | tokens (verl, ROLL; long responses weigh more) |
    # responses (ms-swift)
    whiten: str = "none"
    clip: float | None = ranged(None, above=0)  # keep advantages within +- this, after whitening
    needs_group: ClassVar[bool] = False  # rollout.group_size=1 is refused
    needs_values: ClassVar[bool] = False  # a critic is trained
    # tokens of a response can differ even when only its last token is rewarded
    per_token: ClassVar[bool] = False
    # Some estimators have these settings; for the others this is what they amount to (read by
    # gspo.config.checks). They have no annotation, so that they are not fields and leave the order
    # of the subclasses' fields as it is.
    group_of_one = "zero"
    gamma = 1.0
    std = "none"
    baseline = "none"
    value_coef = 0.5  # read if `needs_values`
    value_clip = 0.2  # read if `needs_values`

    def __post_init__(self):
        super().__post_init__()
        if self.whiten not in ("none", "tokens", "responses"):
            raise ValueError(f"advantage.whiten={self.whiten!r}: choose none, tokens or responses")

    def __call__(self, credit: Credit) -> Tensor:
        """Compute the advantages, whitened and clipped as the settings say; 0 where masked. Shape
        [B, T].
        """
        adv = self.estimate(credit)
        adv_BT = torch.where(credit.mask_BT, adv if adv.ndim == 2 else adv.unsqueeze(-1), 0.0)
        if self.whiten == "tokens":
            adv_BT = torch.where(credit.mask_BT, whitened(adv_BT, adv_BT[credit.mask_BT]), 0.0)
        elif self.whiten == "responses" and credit.mask_BT.any(-1).sum() > 1:
            mean_B = masked_mean(adv_BT, credit.mask_BT)[credit.mask_BT.any(-1)]
            adv_BT = torch.where(
                credit.mask_BT, (adv_BT - mean_B.mean()) / (mean_B.std() + 1e-4), 0.0
            )
        return adv_BT if self.clip is None else adv_BT.clamp(-self.clip, self.clip)

    def estimate(self, credit: Credit) -> Tensor:
        """Compute the advantages before whitening, one per response [B] or one per token [B, T]."""
        raise TypeError(f"advantage {self.name!r} has no formula: choose a concrete one")

    def returns(self, credit: Credit) -> Tensor:
        """Compute the returns that the critic is trained to predict. Shape [B, T]."""
        raise TypeError(f"advantage {self.name!r} trains no critic")


@dataclass
class GroupAdvantage(Advantage):
    """The base of the estimators that compare a response with the others of its group.

    A group whose rewards are all equal carries no signal, and its advantages are exactly 0. So are
    those of a group of one, unless `group_of_one=reward`, for which its mean counts as 0 and its
    std as 1 (as in verl).
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
        alone_B = (
            self.alone(rewards_B) if self.group_of_one == "reward" else torch.zeros_like(rewards_B)
        )
        return torch.where(groups.size_B == 1, alone_B, adv_B)

    def alone(self, rewards_B: Tensor) -> Tensor:
        """Compute the advantage that a group of one gets if its mean counts as 0 and its std as 1.
        Shape [B].
        """
        return rewards_B

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        """Compute the advantages of responses in groups whose rewards differ. Shape [B]."""
        raise TypeError(f"advantage {self.name!r} has no formula: choose a concrete one")


@dataclass
class GroupNormalized(GroupAdvantage):
    """The group-normalized advantage of GRPO and of the GSPO paper (Eq 3 and 6, which leave std and
    eps open):

        A_i = (r_i - mean_j r_j) / (std r + eps)

    The std has ddof 1. It is that of the group, or with `std=batch` that of all rewards of the
    batch (TRL's scale_rewards=batch; Lite PPO, arXiv:2508.08221).
    """

    name: str = "group_normalized"
    # verl and ROLL use 1e-6, TRL and ms-swift 1e-4, OpenRLHF 1e-9
    eps: float = ranged(1e-6, least=0)
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
    """The advantage of Dr.GRPO (arXiv:2503.20783) and MiniRL (arXiv:2512.01374): A_i = r_i - mean_j
    r_j.
    """

    name: str = "group_mean"

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        return rewards_B - groups.mean(rewards_B)


@dataclass
class LeaveOneOut(GroupAdvantage):
    """The leave-one-out advantage, RLOO (arXiv:2402.14740): A_i = r_i - the mean of the other r_j
    of the group.

    It is G / (G - 1) times the advantage of GroupMean, for groups of G responses.
    """

    name: str = "rloo"

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        others_B = (groups.size_B - 1).clamp(min=1)
        return (rewards_B - groups.mean(rewards_B)) * groups.size_B / others_B


@dataclass
class TurnNormalized(GroupAdvantage):
    """An advantage for every turn of an episode: its return, compared with that of the same turn in
    the group.

        R_ik = sum_{m >= k} gamma^(m-k) r_im,      A_ik = (R_ik - mean_j R_jk) / (std_j R_jk + eps)

    The mean and the std (ddof 1) are over the members j of the group that have a turn k. All tokens
    of a turn have its advantage. A turn that only one member has, or that all returns of are equal,
    has the advantage 0. It is the advantage that GSPO-token was made for (arXiv:2507.18071, section
    4.3, leaves open which); turn-level comparison within the group is that of arXiv:2505.11821,
    section 4.2.
    """

    name: str = "turn_normalized"
    eps: float = ranged(1e-6, least=0)
    gamma: float = ranged(1.0, least=0, most=1)  # from turn to turn
    per_token: ClassVar[bool] = True
    std = "group"

    def __post_init__(self):
        super().__post_init__()
        if self.group_of_one != "zero":
            raise ValueError(
                f"advantage.group_of_one={self.group_of_one!r}: a turn that is alone has the advantage 0"
            )

    def estimate(self, credit: Credit) -> Tensor:
        """Compute the advantages [B, T]. Without turns a response is one turn."""
        mask_BT = credit.mask_BT
        turns_BT = (
            torch.zeros_like(mask_BT, dtype=torch.int64)
            if credit.turns_BT is None
            else credit.turns_BT
        )
        rewards_BT = torch.where(mask_BT, credit.token_rewards_BT, 0.0)
        shape = (len(mask_BT), int(turns_BT.max()) + 1)
        return_BK = rewards_BT.new_zeros(shape).scatter_add(1, turns_BT, rewards_BT)
        present_BK = torch.zeros(shape, dtype=torch.int64, device=mask_BT.device)
        present_BK = present_BK.scatter_add(1, turns_BT, mask_BT.long()) > 0
        for k in reversed(range(shape[1] - 1)):
            return_BK[:, k] += self.gamma * return_BK[:, k + 1]
        adv_BK = torch.zeros_like(return_BK)
        for k in range(shape[1]):
            here = present_BK[:, k]
            if here.any():
                adv_BK[here, k] = self._compared(return_BK[here, k], Groups(credit.groups_B[here]))
        return adv_BK.gather(1, turns_BT)

    def _compared(self, return_B: Tensor, groups: Groups) -> Tensor:
        """Compare the returns of one turn within each group."""
        adv_B = (return_B - groups.mean(return_B)) / (groups.std(return_B) + self.eps)
        return torch.where(groups.same(return_B), 0.0, adv_B)


@dataclass
class Returns(Advantage):
    """The discounted return without a baseline (ROLL's adv_estimator=reinforce): A_t = sum_{u >= t}
    gamma^(u-t) r_u.

    Masked positions inside a response (text that the policy did not write) are not discounted.
    """

    name: str = "returns"
    gamma: float = ranged(1.0, above=0, most=1)

    def estimate(self, credit: Credit) -> Tensor:
        return discounted(credit.token_rewards_BT, credit.mask_BT, self.gamma)


@dataclass
class ReinforcePP(Returns):
    """REINFORCE++ (arXiv:2501.03262): the returns, whitened over all tokens of the batch.

    With `baseline=group` the advantage before whitening is the response's reward minus the group's
    mean ("REINFORCE++-baseline").
    """

    name: str = "reinforce_pp"
    whiten: str = "tokens"
    baseline: str = "none"  # none | group

    def __post_init__(self):
        super().__post_init__()
        if self.baseline not in ("none", "group"):
            raise ValueError(f"advantage.baseline={self.baseline!r}: choose none or group")
        if self.whiten == "none":
            raise ValueError(
                "advantage.whiten=none: REINFORCE++ is whitened; without it choose advantage=returns"
            )

    def estimate(self, credit: Credit) -> Tensor:
        if self.baseline == "none":
            return super().estimate(credit)
        return GroupMean().estimate(credit)


@dataclass
class GAE(Advantage):
    """Generalized advantage estimation (arXiv:1506.02438, Eq 16) with a critic V. gamma is 1, as is
    usual for LLMs.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t

    V_t is the value before token t; after the last token it is 0. Masked positions inside a
    response are skipped. The critic is trained on R_t by 1/2 max( (V - R)^2, (clip(V, V_old +-
    value_clip) - R)^2 ), times value_coef.
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
        """Compute the advantages [B, T] by going backwards over the tokens. Raises ValueError
        without values.
        """
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
        """Compute R_t = A_t + V_t, before any whitening, which the critic is trained to predict.
        Shape [B, T].
        """
        if credit.values_BT is None:
            raise ValueError("advantage=gae needs the critic's values")
        return torch.where(credit.mask_BT, self.estimate(credit) + credit.values_BT, 0.0)


class Groups:
    """Computes statistics over the responses that share a problem, repeated for each of these. All
    shapes are [B].
    """

    def __init__(self, groups_B: Tensor):
        _, self.index_B, size = groups_B.unique(return_inverse=True, return_counts=True)
        self.count, self.size_B = len(size), size[self.index_B]

    def mean(self, x_B: Tensor) -> Tensor:
        """Compute the mean of each response's group."""
        sums = torch.zeros(self.count, dtype=x_B.dtype, device=x_B.device).index_add(
            0, self.index_B, x_B
        )
        return sums[self.index_B] / self.size_B

    def std(self, x_B: Tensor) -> Tensor:
        """Compute the standard deviation (ddof 1) of each response's group; 0 for a group of one."""
        squares_B = self.mean((x_B - self.mean(x_B)).square())
        return (squares_B * self.size_B / (self.size_B - 1).clamp(min=1)).sqrt()

    def same(self, x_B: Tensor) -> Tensor:
        """Tell for each response whether all values of its group are equal, exactly: rounding plays
        no part in it.
        """
        ends = torch.zeros(self.count, dtype=x_B.dtype, device=x_B.device)
        low = ends.scatter_reduce(0, self.index_B, x_B, "amin", include_self=False)
        high = ends.scatter_reduce(0, self.index_B, x_B, "amax", include_self=False)
        return (low == high)[self.index_B]


def discounted(x_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """Compute sum_{u >= t} gamma^(u-t) x_u over the response's own tokens; masked positions are
    skipped. [B, T].
    """
    x_BT = torch.where(mask_BT, x_BT, 0.0)
    result_BT, later_B = torch.zeros_like(x_BT), torch.zeros_like(x_BT[:, 0])
    for t in reversed(range(x_BT.shape[1])):
        later_B = torch.where(mask_BT[:, t], x_BT[:, t] + gamma * later_B, later_B)
        result_BT[:, t] = later_B
    return result_BT


def whitened(x: Tensor, sample: Tensor) -> Tensor:
    """Compute (x - mean) / sqrt(var + 1e-8), with the mean and the variance (ddof 1) of `sample`.

    x is returned as it is if the sample has fewer than two values.
    """
    return x if len(sample) < 2 else (x - sample.mean()) * (sample.var() + 1e-8).rsqrt()


def deviation(x_B: Tensor) -> Tensor:
    """Compute the standard deviation (ddof 1) of all values; 0 for a single value."""
    return x_B.std() if len(x_B) > 1 else torch.zeros((), dtype=x_B.dtype)
