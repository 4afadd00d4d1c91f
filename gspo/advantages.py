"""From rewards to advantages. Shapes: P problems, G responses per problem; rewards and results are [P, G]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass
class GroupNormalized:
    """A_i = (r_i - mean_j r_j) / (std_j r_j + eps), over the group of the same problem (GSPO paper, Eq 3 and 6).

    The paper leaves std and eps open. Here std has ddof 1 and eps is 1e-6, as peers use; a group whose rewards are all
    equal carries no signal and gets exactly 0. A group of one has no std: group size 1 is refused.
    """

    name: str = "group_normalized"
    eps: float = 1e-6
    needs_group: ClassVar[bool] = True  # rollout.group_size=1 is refused

    def __call__(self, rewards_PG: Tensor) -> Tensor:
        centred_PG = rewards_PG - rewards_PG.mean(-1, keepdim=True)
        adv_PG = centred_PG / (rewards_PG.std(-1, keepdim=True) + self.eps)
        same_P1 = (rewards_PG == rewards_PG[:, :1]).all(
            -1, keepdim=True
        )  # equal rewards: rounding must not leave a trace
        return adv_PG.masked_fill(same_P1, 0.0)
