"""Reward shaping: what is done to a verifier's rewards before advantages are computed from them.

The order is: overlong penalty, shift, scale, clip.

Shape suffix: B responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo.algorithm.advantages import Groups, deviation
from gspo.data.lazy_torch import torch
from gspo.data.samples import LARGEST_REWARD
from gspo.io.ranges import HASHED_IF_CHANGED, Ranged, choice, ranged

if TYPE_CHECKING:
    from torch import Tensor

OVER = ("none", "batch", "group", "running")


@dataclass
class RunningMoments:
    """Holds mean and variance of all rewards of a run so far, merged batch by batch (Chan et al.
    1979).
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # the sum of squared deviations from the mean

    def update(self, x_B: Tensor) -> None:
        """Count a further batch in."""
        x_B = x_B.double()
        count, mean = len(x_B), float(x_B.mean())
        delta, total = mean - self.mean, self.count + count
        self.squares += float((x_B - mean).square().sum()) + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def std(self) -> float:
        """The standard deviation with ddof 1; 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


@dataclass
class RewardShaping(Ranged, key="reward"):
    """Adds the soft overlong penalty to a reward r, then computes (r - shift) / (scale + eps), then
    clips the result.

    shift is a mean and scale a std (ddof 1), each over the rollout batch, the group, or all rewards
    of the run so far. Where a std is 0 (but for rounding) the reward is not scaled. ROLL's
    reward_norm=X is shift=X scale=X; with its reward_shift (centre only) it is shift=X alone. Its
    reward_scale is scale=X alone for running statistics only; for batch and group ROLL centres as
    well.

    In an episode the environment may give a reward for every turn. With turns=outcome their sum is
    the reward of the response, at its last token; with turns=each every turn has its own at its
    last token, as it is: nothing of the above is done to it, but the overlong penalty stands at the
    episode's end.

    The soft overlong penalty (DAPO, arXiv:2503.14476, Eq 13), for a limit of L tokens and a cache
    of C tokens, is 0 up to L - C tokens and then falls linearly to -overlong_penalty at L tokens,
    where responses are cut off.
    """

    shift: str = choice("none", OVER)
    scale: str = choice("none", OVER)
    clip: float | None = ranged(None, above=0)  # the result is kept within +- this; null: no clip
    eps: float = ranged(1e-6, least=0)
    overlong_cache: int = ranged(0, least=0)  # C in tokens; 0: no penalty
    overlong_penalty: float = ranged(1.0, above=0)
    # what a response earns that was cut off at its limit; null: verifiers and reward functions are
    # asked about it
    truncated: float | None = ranged(
        0.0, least=-LARGEST_REWARD, most=LARGEST_REWARD, metadata=HASHED_IF_CHANGED
    )
    turns: str = choice("outcome", ("outcome", "each"), metadata=HASHED_IF_CHANGED)

    def overlong(self, length_B: Tensor, limit: int) -> Tensor:
        """Compute the penalty of responses of these lengths in tokens; it lies in
        [-overlong_penalty, 0]. Shape [B].
        """
        if not self.overlong_cache:
            return torch.zeros(length_B.shape)
        over_B = (length_B - (limit - self.overlong_cache)) / self.overlong_cache
        return -self.overlong_penalty * over_B.clamp(0, 1)

    def __call__(self, rewards_B: Tensor, groups_B: Tensor, running: RunningMoments) -> Tensor:
        """Shift, scale and clip rewards. Shape [B].

        If a setting reads the moments of all rewards so far, this batch is first counted into
        `running`.
        """
        if "running" in (self.shift, self.scale):
            running.update(rewards_B)
        groups = Groups(groups_B)
        mean = {"none": 0.0, "running": running.mean}.get(self.shift)
        if mean is None:
            mean = groups.mean(rewards_B) if self.shift == "group" else rewards_B.mean()
        shaped_B = rewards_B - mean
        if self.scale != "none":
            stds = {
                "group": groups.std,
                "batch": deviation,
                "running": lambda x_B: x_B.new_tensor(running.std),
            }
            std = stds[self.scale](rewards_B)
            rounding = 1e-6 if rewards_B.dtype == torch.float32 else 1e-12
            # the std of equal rewards is rounding, not always 0
            varied = std > rounding * rewards_B.abs().max()
            shaped_B = torch.where(varied, shaped_B / (std + self.eps), shaped_B)
        return shaped_B if self.clip is None else shaped_B.clamp(-self.clip, self.clip)
