"""Objectives with one importance ratio per token and PPO's clip: PPO, GRPO, Dr.GRPO, DAPO.

They share a formula. They differ in three points:

    the clip range
    the aggregation     `trainer.aggregation.mode=auto` takes that of the paper
    the advantage       each is meant for a different estimator

Shape suffixes: B responses, T response tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from gspo.algorithm.objectives.base import Clipped, LossInputs, LossOutputs


@dataclass
class GRPO(Clipped):
    """Group Relative Policy Optimization as the GSPO paper writes it (arXiv:2507.18071, Eq 2-3).

        w_it = pi(y_it|x,y_i<t) / pi_old(y_it|x,y_i<t)
        J    = 1/G sum_i 1/|y_i| sum_t min( w_it A_it,
                                            clip(w_it, 1 - clip_low, 1 + clip_high) A_it )

    All tokens of a response have the same advantage, A_it = A_i.
    """

    name: str = "grpo"
    clip_low: float = 0.2  # arXiv:2507.18071, section 5.1
    clip_high: float = 0.27  # section 5.1

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_BT, bounded_BT = self.token_ratio(inputs)
        return self.clipped(ratio_BT, bounded_BT, inputs)


@dataclass
class DrGRPO(GRPO):
    """Dr.GRPO (arXiv:2503.20783): GRPO without its length bias.

        J = 1/G sum_i 1/C sum_t min( w_it A_it, clip(w_it, 1 - clip_low, 1 + clip_high) A_it )

    C is the response limit in tokens. The advantages should not be divided by the std
    (advantage=group_mean).
    """

    name: str = "drgrpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: ClassVar[str] = "seq-mean-token-sum-norm"


@dataclass
class DAPO(GRPO):
    """DAPO (arXiv:2503.14476, Eq 8): a higher upper clip bound and a mean over the batch's tokens.

        J = 1/(sum_i |y_i|) sum_i sum_t min( w_it A_it,
                                             clip(w_it, 1 - clip_low, 1 + clip_high) A_it )

    DAPO's other parts are settings of their own: dynamic sampling (rollout.refill_rounds) and the
    overlong penalty (reward.overlong_cache).
    """

    name: str = "dapo"
    clip_low: float = 0.2
    clip_high: float = 0.28  # "clip-higher"
    aggregation: ClassVar[str] = "token-mean"


@dataclass
class PPO(GRPO):
    """Proximal Policy Optimization (arXiv:1707.06347, Eq 7), for a critic's advantages.

        J = mean over tokens of min( w_t A_t, clip(w_t, 1 - clip_low, 1 + clip_high) A_t )

    `advantage=gae` trains a critic.
    """

    name: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: ClassVar[str] = "token-mean"
