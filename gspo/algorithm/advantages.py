"""Advantage estimators: from rewards to the advantage of every token of a response.

An estimator reads the reward of every token, the mask, and the group of every response, and returns
an advantage for every token. A group is the set of responses to a problem. Usually only the last
token has a reward: the verifier's, minus any KL penalty. Settings can whiten or clip advantages.

Shape suffixes: B responses, T response tokens, K named rewards, N selected responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.data.lazy_torch import torch
from gspo.data.masked import masked_mean, masked_sum
from gspo.io.errors import SettingError
from gspo.io.ranges import Ranged, choice, ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Credit:
    """The inputs of an advantage estimator."""

    token_rewards_BT: Tensor
    mask_BT: Tensor
    groups_B: Tensor  # int64; responses with the same number answer the same problem
    values_BT: Tensor | None = None  # the critic's V(x, y_<t), for estimators that need it
    # int64, the index of the policy's turn in an episode; None: no episodes
    turns_BT: Tensor | None = None
    # the named rewards of each response and their weights; None: the task gives a single reward
    named_rewards_BK: Tensor | None = None
    weights_K: Tensor | None = None
    # of the old policy, for estimators that need them: log-probs of the tokens, and sum_v pi_v^2
    old_logp_BT: Tensor | None = None
    sum_pi_squared_BT: Tensor | None = None
    correction_BT: Tensor | None = None  # weights for the mismatch of engine and trainer

    @property
    def rewards_B(self) -> Tensor:
        """The reward of each response: the sum over its tokens. Shape [B]."""
        return masked_sum(self.token_rewards_BT, self.mask_BT)


@dataclass
class Advantage(Ranged, key="advantage"):
    """The base of the estimators, with the settings that they share."""

    name: str = ""
    # whitening over the rollout batch:
    # none | tokens (verl, ROLL; long responses weigh more) | responses (ms-swift)
    whiten: str = choice("none", ("none", "tokens", "responses"))
    clip: float | None = ranged(None, above=0)  # keep advantages within +- this, after whitening
    needs_group: ClassVar[bool] = False  # rollout.group_size=1 is refused
    needs_values: ClassVar[bool] = False  # a critic is trained
    # tokens of a response can differ even if only its last token has a reward
    per_token: ClassVar[bool] = False
    # it compares the verifier's own rewards: shaping, penalties and KL in the reward are refused
    needs_raw_rewards: ClassVar[bool] = False
    needs_named_rewards: ClassVar[bool] = False  # the task must give several (reward.weights)
    needs_sum_pi_squared: ClassVar[bool] = False  # the old policy's pass computes sum_v pi_v^2
    # a group whose rewards are all equal can have advantages, so no group may be dropped for that
    learns_from_equal_rewards: ClassVar[bool] = False
    # Some estimators have these settings. The others behave as if they had these values
    # (gspo.config.algorithm_checks reads them). Without annotations they are not fields, which
    # would change the order of the subclasses' fields.
    group_of_one = "zero"
    whiten_eps = 1e-4
    gamma = 1.0
    std = "none"
    baseline = "none"
    value_coef = 0.5  # read if `needs_values`
    value_clip = 0.2  # read if `needs_values`

    def __call__(self, credit: Credit) -> Tensor:
        """Compute the advantages, whitened and clipped by the settings. Shape [B, T].

        Masked tokens have the advantage 0.

            whiten=tokens       (A - mean) / sqrt(var + 1e-8), over the tokens of the batch
            whiten=responses    (A - mean) / (std + whiten_eps), over the responses' mean advantages

        The variance has ddof 1.
        """
        mask_BT = credit.mask_BT
        adv = self.estimate(credit)
        batch_size, num_tokens = mask_BT.shape
        shapes = [(batch_size,), (batch_size, 1), (batch_size, num_tokens)]
        if not isinstance(adv, torch.Tensor) or tuple(adv.shape) not in shapes:
            returned = list(adv.shape) if isinstance(adv, torch.Tensor) else type(adv).__name__
            raise SettingError(
                "advantage",
                self.name,
                f"its estimate() must return a tensor of shape [{batch_size}] or "
                f"[{batch_size}, {num_tokens}], and returned {returned}",
            )
        adv_BT = adv if adv.ndim == 2 else adv.unsqueeze(-1)
        adv_BT = torch.where(mask_BT, adv_BT, 0.0)
        has_tokens_B = mask_BT.any(-1)
        if self.whiten == "tokens":
            adv_BT = whitened(adv_BT, adv_BT[mask_BT])
        elif self.whiten == "responses" and has_tokens_B.sum() > 1:
            mean_N = masked_mean(adv_BT, mask_BT)[has_tokens_B]
            scale = mean_N.std() + self.whiten_eps
            adv_BT = (adv_BT - mean_N.mean()) / torch.where(scale > 0, scale, 1.0)
        adv_BT = torch.where(mask_BT, adv_BT, 0.0)
        if self.clip is not None:
            adv_BT = adv_BT.clamp(-self.clip, self.clip)
        return adv_BT

    def estimate(self, credit: Credit) -> Tensor:
        """Compute the advantages before whitening: by response [B] or by token [B, T]."""
        raise TypeError(f"advantage {self.name!r} has no formula: choose a concrete one")

    def returns(self, credit: Credit) -> Tensor:
        """Compute the returns that the critic is trained to predict. Shape [B, T]."""
        raise TypeError(f"advantage {self.name!r} trains no critic")

    def permits_reward(self, reward: float) -> bool:
        """Return whether a response may have this reward."""
        return True

    def refuse_whitening(self, reason: str) -> None:
        """Raise ValueError if the advantages would be whitened."""
        if self.whiten != "none":
            raise SettingError("advantage.whiten", self.whiten, f"with {self.name}, {reason}")


@dataclass
class GroupAdvantage(Advantage):
    """The base of the estimators that compare a response with the rest of its group.

    If all rewards of a group are equal, its advantages are exactly 0. A group with a single
    response also has the advantage 0. With `group_of_one=reward` its mean counts as 0 and its std
    as 1, as in verl.
    """

    group_of_one: str = choice("zero", ("zero", "reward"))
    needs_group: ClassVar[bool] = True

    def estimate(self, credit: Credit) -> Tensor:
        return self.of_rewards(credit.rewards_B, Groups(credit.groups_B))

    def of_rewards(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        """Compute the advantages of responses with these rewards. Shape [B]."""
        adv_B = self.compare(rewards_B, groups)
        adv_B = torch.where(groups.all_equal(rewards_B), 0.0, adv_B)
        alone_B = torch.zeros_like(rewards_B)
        if self.group_of_one == "reward":
            alone_B = self.alone(rewards_B)
        return torch.where(groups.size_B == 1, alone_B, adv_B)

    def alone(self, rewards_B: Tensor) -> Tensor:
        """Compute the advantages of groups of size 1, with mean 0 and std 1. Shape [B]."""
        return rewards_B

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        """Compute the advantages of responses in groups with different rewards. Shape [B]."""
        raise TypeError(f"advantage {self.name!r} has no formula: choose a concrete one")


@dataclass
class GroupNormalized(GroupAdvantage):
    """The group-normalized advantage of GRPO and of the GSPO paper (arXiv:2507.18071, Eq 3 and 6).

        A_i = (r_i - mean_j r_j) / (std r + eps)

    The std has ddof 1, and it is over the group. With `std=batch` it is over all rewards of the
    batch (TRL's scale_rewards=batch, and Lite PPO, arXiv:2508.08221). The GSPO paper does not
    specify std and eps.
    """

    name: str = "group_normalized"
    # verl and ROLL use 1e-6, TRL and ms-swift 1e-4, OpenRLHF 1e-9
    eps: float = ranged(1e-6, least=0)
    std: str = choice("group", ("group", "batch"))

    def alone(self, rewards_B: Tensor) -> Tensor:
        return rewards_B / (1 + self.eps)

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        std = groups.std(rewards_B) if self.std == "group" else deviation(rewards_B)
        distance_B = rewards_B - groups.mean(rewards_B)
        return distance_B / (std + self.eps)


@dataclass
class GroupMean(GroupAdvantage):
    """The reward minus the group's mean: Dr.GRPO (arXiv:2503.20783), MiniRL (arXiv:2512.01374).

        A_i = r_i - mean_j r_j

    The mean includes r_i.
    """

    name: str = "group_mean"

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        return rewards_B - groups.mean(rewards_B)


@dataclass
class LeaveOneOut(GroupAdvantage):
    """The leave-one-out advantage, RLOO (arXiv:2402.14740).

        A_i = r_i - mean_{j != i} r_j = (r_i - mean_j r_j) G / (G - 1)

    G is the size of the group. The second form is G / (G - 1) times GroupMean's advantage.
    """

    name: str = "rloo"

    def compare(self, rewards_B: Tensor, groups: Groups) -> Tensor:
        distance_B = rewards_B - groups.mean(rewards_B)
        return distance_B * groups.size_B / groups.freedom_B


@dataclass
class Returns(Advantage):
    """The discounted return without a baseline (ROLL's adv_estimator=reinforce).

        A_t = sum_{u >= t} gamma^(u-t) r_u

    Masked positions inside a response, which the policy did not write, are not discounted.
    """

    name: str = "returns"
    gamma: float = ranged(1.0, above=0, most=1)

    def estimate(self, credit: Credit) -> Tensor:
        return discounted(credit.token_rewards_BT, credit.mask_BT, self.gamma)


@dataclass
class ReinforcePP(Returns):
    """REINFORCE++ (arXiv:2501.03262): the returns, whitened over all tokens of the batch.

        A = (R - mean R) / sqrt(var R + 1e-8)

    R is the return of a token. With `baseline=group` it is the response's reward minus the group's
    mean instead ("REINFORCE++-baseline").
    """

    name: str = "reinforce_pp"
    whiten: str = "tokens"
    baseline: str = choice("none", ("none", "group"))

    def __post_init__(self):
        super().__post_init__()
        if self.whiten == "none":
            raise SettingError(
                "advantage.whiten",
                "none",
                "REINFORCE++ is whitened; without it choose advantage=returns",
            )

    def estimate(self, credit: Credit) -> Tensor:
        if self.baseline == "none":
            return super().estimate(credit)
        return GroupMean().estimate(credit)


@dataclass
class GAE(Advantage):
    """Generalized advantage estimation (arXiv:1506.02438, Eq 16) with a critic V.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}
        R_t     = A_t + V_t

    V_t is the value before token t. After the last token it is 0. Masked positions inside a
    response are skipped. gamma is 1 by default, as is usual for LLMs. The critic's loss is

        value_coef 1/2 max( (V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2 )
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
        """Compute the advantages [B, T], from the last token to the first.

        Raises ValueError without values.
        """
        values_BT = self.values(credit)
        adv_BT = torch.zeros_like(credit.token_rewards_BT)
        next_adv_B = torch.zeros_like(adv_BT[:, 0])
        next_value_B = torch.zeros_like(adv_BT[:, 0])
        for t in reversed(range(adv_BT.shape[1])):
            mask_B = credit.mask_BT[:, t]
            reward_B = credit.token_rewards_BT[:, t]
            value_B = values_BT[:, t]
            delta_B = reward_B + self.gamma * next_value_B - value_B
            adv_B = delta_B + self.gamma * self.lam * next_adv_B
            next_adv_B = torch.where(mask_B, adv_B, next_adv_B)
            next_value_B = torch.where(mask_B, value_B, next_value_B)
            adv_BT[:, t] = next_adv_B
        return adv_BT

    def returns(self, credit: Credit) -> Tensor:
        """Compute R_t = A_t + V_t, the critic's target, from unwhitened advantages. [B, T]."""
        returns_BT = self.estimate(credit) + self.values(credit)
        return torch.where(credit.mask_BT, returns_BT, 0.0)

    def values(self, credit: Credit) -> Tensor:
        """Return the critic's values [B, T]. Raises ValueError if there are none."""
        if credit.values_BT is None:
            raise SettingError("advantage", "gae", "needs the critic's values")
        return credit.values_BT


class Groups:
    """The statistics of each response's group. All shapes are [B].

    For example, two groups with the rewards 0, 1 and 1, 1 have the means 0.5, 0.5, 1, 1.
    """

    def __init__(self, groups_B: Tensor):
        _, self.index_B, sizes = groups_B.unique(return_inverse=True, return_counts=True)
        self.count = len(sizes)
        self.size_B = sizes[self.index_B]
        self.freedom_B = (self.size_B - 1).clamp(min=1)  # the degrees of freedom of a variance

    def mean(self, x_B: Tensor) -> Tensor:
        """Compute the mean of each response's group."""
        sums = x_B.new_zeros(self.count).index_add(0, self.index_B, x_B)
        return sums[self.index_B] / self.size_B

    def std(self, x_B: Tensor) -> Tensor:
        """Compute the std (ddof 1) of each response's group, which is 0 for groups of size 1."""
        distance_B = x_B - self.mean(x_B)
        variance_B = self.mean(distance_B.square())  # ddof 0
        return (variance_B * self.size_B / self.freedom_B).sqrt()

    def all_equal(self, x_B: Tensor) -> Tensor:
        """Return whether all values of each response's group are exactly equal."""
        zeros = x_B.new_zeros(self.count)
        low = zeros.scatter_reduce(0, self.index_B, x_B, "amin", include_self=False)
        high = zeros.scatter_reduce(0, self.index_B, x_B, "amax", include_self=False)
        return (low == high)[self.index_B]


def discounted(x_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """Compute sum_{u >= t} gamma^(u-t) x_u over unmasked positions u. Shape [B, T]."""
    x_BT = torch.where(mask_BT, x_BT, 0.0)
    sum_BT = torch.zeros_like(x_BT)
    sum_B = torch.zeros_like(x_BT[:, 0])
    for t in reversed(range(x_BT.shape[1])):
        next_sum_B = x_BT[:, t] + gamma * sum_B
        sum_B = torch.where(mask_BT[:, t], next_sum_B, sum_B)
        sum_BT[:, t] = sum_B
    return sum_BT


def whitened(x: Tensor, sample: Tensor) -> Tensor:
    """Compute (x - mean) / sqrt(var + 1e-8), with the mean and the variance (ddof 1) of `sample`.

    A sample of fewer than two values leaves x unchanged.
    """
    if len(sample) < 2:
        return x
    return (x - sample.mean()) * (sample.var() + 1e-8).rsqrt()


def deviation(x_B: Tensor) -> Tensor:
    """Compute the standard deviation (ddof 1) of all values, or 0 of a single value."""
    return x_B.std() if len(x_B) > 1 else x_B.new_zeros(())
