"""NSR, PSR and W-REINFORCE: learning from wrong and from correct responses (arXiv:2506.01347)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.algorithm.advantages import Advantage, Credit
from gspo.data.lazy_torch import torch
from gspo.io.errors import SettingError
from gspo.io.ranges import ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class NSR(Advantage):
    """Negative sample reinforcement and its relatives (arXiv:2506.01347, section 2.2).

        A = positive_weight    if r = 1
        A = -negative_weight   if r = 0

    There is no group, no baseline and no std.

        NSR           positive_weight 0     negative_weight 1     the default: A = r - 1
        PSR           positive_weight 1     negative_weight 0     A = r
        W-REINFORCE   positive_weight 0.1   negative_weight 1     the paper's proposal

    - Every reward must be 0 or 1. The authors' code keeps any other reward as its own advantage
      without a word. Here such rewards are refused.
    - Minimising log pi of wrong responses has no lower bound. Use an objective that clips, or KL.
      The authors' scripts have lr 1e-6 and no KL.
    - A group whose responses are all wrong is trained on too.
    """

    name: str = "nsr"
    positive_weight: float = ranged(0.0, least=0)
    negative_weight: float = ranged(1.0, least=0)
    needs_raw_rewards: ClassVar[bool] = True
    learns_from_equal_rewards: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        self.refuse_whitening("there is no baseline, and whitening would subtract one")
        if self.positive_weight == self.negative_weight == 0:
            raise SettingError(
                "advantage.negative_weight",
                0.0,
                "with advantage.positive_weight=0, every advantage is 0",
            )

    def permits_reward(self, reward: float) -> bool:
        return reward in (0, 1)

    def estimate(self, credit: Credit) -> Tensor:
        rewards_B = credit.rewards_B
        is_correct_B = rewards_B == 1
        other_N = rewards_B[~is_correct_B & (rewards_B != 0)]
        if len(other_N):
            raise SettingError(
                "advantage",
                self.name,
                f"a response has the reward {float(other_N[0]):g}, and every reward must be 0 or 1",
                remedy="use such a task, or advantage=group_mean",
            )
        zeros_B = torch.zeros_like(rewards_B)
        return torch.where(is_correct_B, zeros_B + self.positive_weight, -self.negative_weight)
