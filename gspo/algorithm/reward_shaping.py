"""Reward shaping: changes to a verifier's rewards before advantages are computed from them.

The order is: overlong penalty, shift, scale, clip.

Shape suffix: B responses.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo.algorithm.advantages import Groups, deviation
from gspo.data.lazy_torch import torch
from gspo.data.samples import LARGEST_REWARD
from gspo.io.errors import SettingError
from gspo.io.ranges import HASHED_IF_CHANGED, Ranged, choice, ranged

if TYPE_CHECKING:
    from torch import Tensor

PLAIN_NAME = re.compile(r"[\w-]{1,60}", re.ASCII)
OVER = ("none", "batch", "group", "running")


@dataclass
class RunningMoments:
    """The mean and variance of all rewards of a run so far, merged batch by batch.

    n old rewards are merged with m new rewards (Chan et al. 1979), delta = mean_new - mean:

        squares <- squares + squares_new + delta^2 n m / (n + m)
        mean    <- mean + delta m / (n + m)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # the sum of squared deviations from the mean

    def update(self, x_B: Tensor) -> None:
        """Add a batch of rewards."""
        x_B = x_B.double()
        count = len(x_B)
        total = self.count + count
        mean = float(x_B.mean())
        delta = mean - self.mean
        squares = float((x_B - mean).square().sum())
        self.squares += squares + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def std(self) -> float:
        """The standard deviation with ddof 1, or 0 for fewer than two values."""
        if self.count < 2:
            return 0.0
        return math.sqrt(self.squares / (self.count - 1))


@dataclass
class RewardShaping(Ranged, key="reward"):
    """The shaping of a reward r: overlong penalty, shift, scale and clip.

        r <- clip( (r + penalty(|y|) - shift) / (scale + eps), -clip, clip )

    shift is a mean and scale a std (ddof 1). Each is over the rollout batch, the group, or all
    rewards of the run so far. If the std is 0 up to rounding, the reward is not scaled.

    ROLL's reward_norm=X is shift=X scale=X. Its reward_shift, which only centres, is shift=X. Its
    reward_scale is scale=X for running statistics. For batch and group, ROLL's reward_scale also
    centres.

    An environment can give a reward for every turn of an episode. With turns=outcome, the reward
    of the response is their sum, at its last token. With turns=each, every turn keeps its own
    reward at its last token, without shift, scale and clip. The overlong penalty is then added at
    the episode's last token.

    The soft overlong penalty (DAPO, arXiv:2503.14476, Eq 13), for a limit of L tokens and a cache
    of C tokens:

        penalty(n) = -overlong_penalty clip( (n - (L - C)) / C, 0, 1 )

    Responses are truncated at L tokens.
    """

    shift: str = choice("none", OVER)
    scale: str = choice("none", OVER)
    clip: float | None = ranged(None, above=0)  # the result is kept within +- this; null: no clip
    eps: float = ranged(1e-6, least=0)
    overlong_cache: int = ranged(0, least=0)  # C in tokens; 0: no penalty
    overlong_penalty: float = ranged(1.0, above=0)
    # the reward of a truncated response; null: verifiers and reward functions score it
    truncated: float | None = ranged(
        0.0, least=-LARGEST_REWARD, most=LARGEST_REWARD, metadata=HASHED_IF_CHANGED
    )
    turns: str = choice("outcome", ("outcome", "each"), metadata=HASHED_IF_CHANGED)
    # of a task that gives several rewards: the weight of each by name, for example
    # {correct: 1, format: 0.2}. The reward is their sum with these weights
    weights: dict[str, float] = ranged(default_factory=dict, metadata=HASHED_IF_CHANGED)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.weights:
            if not PLAIN_NAME.fullmatch(name):
                raise SettingError(
                    f"reward.weights.{name}",
                    problem="is no plain name of letters, digits, _ and -, as metrics need it",
                )
        if self.weights and not any(self.weights.values()):
            raise SettingError("reward.weights", self.weights, "makes every reward 0")

    def overlong(self, length_B: Tensor, limit: int) -> Tensor:
        """Compute the soft overlong penalty, in [-overlong_penalty, 0]. Shape [B].

        `length_B` and `limit` (L) are numbers of tokens.
        """
        if not self.overlong_cache:
            return torch.zeros(length_B.shape)
        start = limit - self.overlong_cache
        over_B = (length_B - start) / self.overlong_cache
        return -self.overlong_penalty * over_B.clamp(0, 1)

    def __call__(self, rewards_B: Tensor, groups_B: Tensor, running: RunningMoments) -> Tensor:
        """Shift, scale and clip rewards. Shape [B].

        With shift=running or scale=running, `running` is first updated with this batch.
        """
        if "running" in (self.shift, self.scale):
            running.update(rewards_B)
        groups = Groups(groups_B)
        shaped_B = rewards_B - self._mean(rewards_B, groups, running)
        if self.scale != "none":
            std = self._std(rewards_B, groups, running)
            # the std of equal rewards can differ from 0 by rounding
            rounding = 1e-6 if rewards_B.dtype == torch.float32 else 1e-12
            varies = std > rounding * rewards_B.abs().max()
            shaped_B = torch.where(varies, shaped_B / (std + self.eps), shaped_B)
        if self.clip is not None:
            shaped_B = shaped_B.clamp(-self.clip, self.clip)
        return shaped_B

    def _mean(self, rewards_B: Tensor, groups: Groups, running: RunningMoments) -> Tensor | float:
        if self.shift == "group":
            return groups.mean(rewards_B)
        if self.shift == "batch":
            return rewards_B.mean()
        return running.mean if self.shift == "running" else 0.0

    def _std(self, rewards_B: Tensor, groups: Groups, running: RunningMoments) -> Tensor:
        if self.scale == "group":
            return groups.std(rewards_B)
        if self.scale == "batch":
            return deviation(rewards_B)
        return rewards_B.new_tensor(running.std)
