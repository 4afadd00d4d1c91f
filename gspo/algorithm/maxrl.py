"""MaxRL: maximum-likelihood reinforcement learning (arXiv:2602.02710).

Shape suffix: B responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.algorithm.advantages import Credit, GroupAdvantage, Groups
from gspo.io.errors import SettingError
from gspo.io.ranges import ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class MaxRL(GroupAdvantage):
    """The distance to the group's mean, in units of the mean (arXiv:2602.02710).

        A_i = (r_i - mean_j r_j) / (mean_j r_j + eps)

    For rewards of 0 and 1 and a group of G responses, this is an unbiased gradient of

        sum_{k=1..G-1} -(1 - p)^k / k

    which is log p cut off after G - 1 terms. p is the probability of a correct response. The paper
    reaches G terms: its estimator is the mean score of the correct responses. All implementations
    subtract the mean score of the group, except in a group without a correct response, where they
    give 0. This removes the last term, so G - 1 terms remain.

    - If a share p of the group is correct, a correct response has the advantage (1 - p) / p and a
      wrong one -1. For p = 1/16 that is 15: expect large gradients, or set `clip`.
    - Rewards must not be negative. Otherwise the mean can be 0 or negative, so advantages explode
      or change their sign. Such rewards are refused.
    - A group of one has the advantage 0, as in prime-rl. With `group_of_one=reward` it is the
      reward, as in SkyRL. The authors' code divides that by eps, so it is 1e6 r.
    """

    name: str = "maxrl"
    eps: float = ranged(0.0, least=0)  # prime-rl has none, the authors and SkyRL use 1e-6
    needs_raw_rewards: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        self.refuse_whitening("the mean reward is the only scale, which whitening would undo")

    def permits_reward(self, reward: float) -> bool:
        return reward >= 0

    def estimate(self, credit: Credit) -> Tensor:
        lowest = float(credit.rewards_B.min())
        if lowest < 0:
            raise SettingError(
                "advantage",
                self.name,
                f"a response has the reward {lowest:g}, and MaxRL divides by the group's mean "
                "reward, so no reward may be negative",
                remedy="let rewards begin at 0, or use advantage=group_mean",
            )
        return super().estimate(credit)

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        mean_B = groups.mean(rewards_B)
        # a group with only zeros has equal rewards, so its advantage is 0 in the end
        scale_B = (mean_B + self.eps).masked_fill(mean_B == 0, 1.0)
        return (rewards_B - mean_B) / scale_B
