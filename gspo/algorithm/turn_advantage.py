"""The advantage of every turn of an episode.

Shape suffixes: B responses, T response tokens, K turns of an episode, N selected responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.algorithm.advantages import Credit, GroupAdvantage, Groups
from gspo.data.lazy_torch import torch
from gspo.io.errors import SettingError
from gspo.io.ranges import ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class TurnNormalized(GroupAdvantage):
    """An advantage for every turn of an episode, normalised over the same turn of its group.

        R_ik = sum_{m >= k} gamma^(m-k) r_im
        A_ik = (R_ik - mean_j R_jk) / (std_j R_jk + eps)

    i is an episode and k a turn. The mean and the std (ddof 1) are over the episodes j of the group
    that have a turn k. All tokens of a turn have its advantage. The advantage is 0 if a single
    episode has the turn, or if all its returns are equal.

    Turn-level comparison within the group follows arXiv:2505.11821, section 4.2. GSPO-token can
    use such advantages (arXiv:2507.18071, section 4.3, does not specify any).
    """

    name: str = "turn_normalized"
    eps: float = ranged(1e-6, least=0)
    gamma: float = ranged(1.0, least=0, most=1)  # from turn to turn
    per_token: ClassVar[bool] = True
    std = "group"

    def __post_init__(self):
        super().__post_init__()
        if self.group_of_one != "zero":
            raise SettingError(
                "advantage.group_of_one",
                self.group_of_one,
                "a turn that is alone has the advantage 0",
            )

    def estimate(self, credit: Credit) -> Tensor:
        """Compute the advantages [B, T]. Without turns, a response counts as a single turn."""
        mask_BT = credit.mask_BT
        turns_BT = credit.turns_BT
        if turns_BT is None:
            turns_BT = torch.zeros_like(mask_BT, dtype=torch.int64)
        turns = int(turns_BT.max()) + 1
        rewards_BT = torch.where(mask_BT, credit.token_rewards_BT, 0.0)
        zeros_BK = rewards_BT.new_zeros(len(mask_BT), turns)
        return_BK = zeros_BK.scatter_add(1, turns_BT, rewards_BT)
        for k in reversed(range(turns - 1)):
            later_B = return_BK[:, k + 1]
            return_BK[:, k] += self.gamma * later_B
        tokens_BK = zeros_BK.long().scatter_add(1, turns_BT, mask_BT.long())
        adv_BK = torch.zeros_like(return_BK)
        for k in range(turns):
            has_turn_B = tokens_BK[:, k] > 0
            if has_turn_B.any():
                groups = Groups(credit.groups_B[has_turn_B])
                returns_N = return_BK[has_turn_B, k]
                adv_BK[has_turn_B, k] = self.of_rewards(returns_N, groups)
        return adv_BK.gather(1, turns_BT)

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        distance_B = rewards_B - groups.mean(rewards_B)
        return distance_B / (groups.std(rewards_B) + self.eps)
