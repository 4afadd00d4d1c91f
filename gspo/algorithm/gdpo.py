"""GDPO: each of several rewards is normalised by itself (arXiv:2601.05242).

Shape suffixes: B responses, K named rewards, G responses of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.algorithm.advantages import Credit, GroupAdvantage, Groups
from gspo.data.lazy_torch import torch
from gspo.io.errors import SettingError
from gspo.io.ranges import choice, ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class GDPO(GroupAdvantage):
    """Group reward-decoupled normalization (arXiv:2601.05242): one advantage of several rewards.

        z_ik = (r_ik - mean_j r_jk) / (std_j r_jk + eps)
        A_i  = whitened( sum_k w_k z_ik )

    r_ik is reward k of response i, and j runs over its group. w_k are reward.weights. The scalar
    reward, sum_k w_k r_ik, is not read. Std and whitening have ddof 1.

        whiten=responses   (A - mean) / (std + whiten_eps), over the responses (TRL, ms-swift, NeMo)
        whiten=tokens      (A - mean) / sqrt(var + 1e-8), over the tokens (verl): long responses
                           weigh more in the mean and the std
        whiten=none        no second normalisation

    With `baseline=others`, mean and std of a response are over the other responses of its group
    (NeMo-RL). If these are all equal, the difference is not divided. So in a group of 0, 0, 0, 1,
    the last has z = 1 whatever eps is.

    A group in which all values of a reward are equal has z = 0 for this reward, exactly. Other
    frameworks divide the rounding error of the difference by eps.
    """

    name: str = "gdpo"
    whiten: str = "responses"
    eps: float = ranged(1e-4, least=0)  # TRL; verl and NeMo-RL use 1e-6, ms-swift 1e-8
    whiten_eps: float = ranged(1e-4, least=0)  # TRL; ms-swift uses 1e-8, NeMo-RL none
    baseline: str = choice("all", ("all", "others"))
    needs_raw_rewards: ClassVar[bool] = True
    needs_named_rewards: ClassVar[bool] = True
    learns_from_equal_rewards: ClassVar[bool] = True
    std = "group"

    def estimate(self, credit: Credit) -> Tensor:
        rewards_BK = credit.named_rewards_BK
        weights_K = credit.weights_K
        if rewards_BK is None or weights_K is None or rewards_BK.shape[1] < 2:
            raise SettingError(
                "advantage",
                self.name,
                "needs at least two named rewards of every response, and here is a single reward",
                remedy="use advantage=group_normalized",
            )
        groups = Groups(credit.groups_B)
        adv_B = torch.zeros_like(rewards_BK[:, 0])
        for k, weight in enumerate(weights_K):
            adv_B = adv_B + weight * self.of_rewards(rewards_BK[:, k], groups)
        return adv_B

    def alone(self, rewards_B: Tensor) -> Tensor:
        return rewards_B / (1 + self.eps)

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        if self.baseline == "others":
            mean_B, std_B = statistics_of_others(rewards_B, groups)
        else:
            mean_B = groups.mean(rewards_B)
            std_B = groups.std(rewards_B)
        scale_B = torch.where(std_B > 0, std_B + self.eps, 1.0)
        return (rewards_B - mean_B) / scale_B


def statistics_of_others(x_B: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return mean and std (ddof 1) over the other members of each response's group. Shapes [B].

    The mean of no members is 0. The std of equal values, and of fewer than two, is exactly 0."""
    mean_B = torch.zeros_like(x_B)
    std_B = torch.zeros_like(x_B)
    for group in range(groups.count):
        members_G = (groups.index_B == group).nonzero().squeeze(-1)
        size = len(members_G)
        if size < 2:
            continue
        is_other_GG = ~torch.eye(size, dtype=torch.bool, device=x_B.device)
        others_GG = x_B[members_G].expand(size, size)[is_other_GG].view(size, size - 1)
        mean_B[members_G] = others_GG.mean(1)
        if size > 2:
            all_equal_G = others_GG.amin(1) == others_GG.amax(1)
            std_B[members_G] = torch.where(all_equal_G, 0.0, others_GG.std(1))
    return mean_B, std_B
