"""OTB: the baseline of every token that minimises the variance of the gradient.

The estimator is verl's `optimal_token_baseline`. Its paper's measure of a token's gradient needs no
backward pass: it is the norm of the score at the logits.

Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from gspo.algorithm.advantages import Advantage, Credit, Groups, discounted
from gspo.data.lazy_torch import torch
from gspo.data.masked import masked_mean
from gspo.io.errors import SettingError
from gspo.io.ranges import choice, ranged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class OTB(Advantage):
    """The optimal token baseline (verl 0.10, core_algos.py, `optimal_token_baseline`).

        w_t  = || e_{y_t} - pi_t ||^2 = 1 - 2 pi_t(y_t) + sum_v pi_t(v)^2
        W_it = sum_{u <= t} w_iu
        b_t  = sum_i W_it G_it / ( sum_i W_it + eps )
        A_it = G_it - b_t

    G_it is the sum of the rewards from token t on. The sums over i are over the responses of the
    group that have a token t. There is no std. Masked tokens are left out of all sums. If engine
    and trainer have weights rho (correction=...), w_t is multiplied by rho_t^2.

    - The response is part of its own baseline.
    - At late tokens the baseline is over the longest responses alone. A token that a single
      response reaches has A = G eps / (W + eps), about 0. With `zero_tail` its baseline is 0, so
      A = G: the tail of the longest response is pushed with its whole reward.
    - `align=column` compares tokens in the same column, as `optimal_token_baseline` does. In
      episodes the environment's tokens then shift the meaning of t, and the zero tail begins at
      the second largest number of tokens as a column, which is too early. `align=token` counts
      the policy's tokens alone, as verl's `tir_optimal_token_baseline` does.
    - A group of one has the advantage 0, and with `group_of_one=reward` A = G, as in verl.
    """

    name: str = "otb"
    eps: float = ranged(1e-8, least=0)
    zero_tail: bool = True
    align: str = choice("token", ("token", "column"))
    group_of_one: str = choice("zero", ("zero", "reward"))
    needs_group: ClassVar[bool] = True
    needs_sum_pi_squared: ClassVar[bool] = True
    per_token: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        self.refuse_whitening("whitening would move the baseline, which is optimal as it is")

    def estimate(self, credit: Credit) -> Tensor:
        """Compute the advantages [B, T]. Raises ValueError without sum_v pi_v^2."""
        mask_BT = credit.mask_BT
        return_BT = discounted(credit.token_rewards_BT, mask_BT, 1.0)
        weight_BT = score_norms(credit)
        # the position of each column's token: as it is, or the policy's tokens first
        columns_BT = torch.arange(mask_BT.shape[1]).expand(mask_BT.shape)
        if self.align == "token":
            columns_BT = (~mask_BT).long().argsort(dim=1, stable=True)
        baseline_BT = self.baseline_of(
            return_BT.gather(1, columns_BT),
            weight_BT.gather(1, columns_BT).cumsum(1),
            mask_BT.gather(1, columns_BT),
            Groups(credit.groups_B),
        )
        adv_BT = return_BT - torch.zeros_like(return_BT).scatter(1, columns_BT, baseline_BT)
        if self.group_of_one == "zero":
            is_alone_B = Groups(credit.groups_B).size_B == 1
            adv_BT = torch.where(is_alone_B.unsqueeze(-1), 0.0, adv_BT)
        return adv_BT

    def baseline_of(
        self, return_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor, groups: Groups
    ) -> Tensor:
        """Compute b_t of every response's group, 0 for groups of one. Shape [B, T]."""
        weight_BT = torch.where(mask_BT, weight_BT, 0.0)
        weighted_BT = weight_BT * return_BT
        numerator_BT = group_sums(weighted_BT, groups)
        denominator_BT = group_sums(weight_BT, groups) + self.eps
        is_defined_BT = (denominator_BT != 0) & (groups.size_B > 1).unsqueeze(-1)
        baseline_BT = numerator_BT / torch.where(is_defined_BT, denominator_BT, 1.0)
        baseline_BT = torch.where(is_defined_BT, baseline_BT, 0.0)
        if self.zero_tail:
            baseline_BT = torch.where(longest_tail(mask_BT, groups), 0.0, baseline_BT)
        return baseline_BT


def group_sums(x_BT: Tensor, groups: Groups) -> Tensor:
    """Sum every column over each response's group. Shape [B, T]."""
    zeros = x_BT.new_zeros(groups.count, x_BT.shape[1])
    return zeros.index_add(0, groups.index_B, x_BT)[groups.index_B]


def longest_tail(mask_BT: Tensor, groups: Groups) -> Tensor:
    """Mark the longest response of each group, beyond the length of the second longest. [B, T].

    Nothing is marked if several responses are the longest. Lengths are numbers of tokens."""
    length_B = mask_BT.sum(-1)
    zeros = length_B.new_zeros(groups.count)
    longest = zeros.scatter_reduce(0, groups.index_B, length_B, "amax", include_self=False)
    is_longest_B = length_B == longest[groups.index_B]
    count_of_longest = zeros.index_add(0, groups.index_B, is_longest_B.long())
    is_only_B = is_longest_B & (count_of_longest[groups.index_B] == 1)
    shorter_B = torch.where(is_longest_B, 0, length_B)
    second = zeros.scatter_reduce(0, groups.index_B, shorter_B, "amax")
    columns_T = torch.arange(mask_BT.shape[1])
    is_beyond_BT = columns_T >= second[groups.index_B].unsqueeze(-1)
    return is_only_B.unsqueeze(-1) & is_beyond_BT


def score_norms(credit: Credit) -> Tensor:
    """Compute w_t = 1 - 2 pi_t + sum_v pi_v^2, times rho_t^2, and 0 at masked tokens. [B, T]."""
    if credit.sum_pi_squared_BT is None or credit.old_logp_BT is None:
        raise SettingError("advantage", "otb", "needs sum_v pi_v^2 of every token")
    weight_BT = 1 - 2 * credit.old_logp_BT.exp() + credit.sum_pi_squared_BT
    if credit.correction_BT is not None:
        weight_BT = weight_BT * credit.correction_BT.square()
    return torch.where(credit.mask_BT, weight_BT, 0.0)


def variance_proxies(
    adv_BT: Tensor, credit: Credit, gradient_norm: float | None = None
) -> dict[str, float]:
    """Return verl's `variance_proxy` metrics of a batch.

        signal = (gradient norm)^2
        power  = mean_i (rho_i A_i)^2 sum_t w_it
        noise  = max(0, power - signal) / (B - 1), 0 for a single response

    A_i and rho_i are means over the response, and rho = 1 without correction. w_it is without rho
    here and 0 at tokens with rho = 0, but the mean of its sums, `score_norm`, is with rho^2.

    The gradient norm is over all parameters, while w is the squared norm at the logits. So their
    difference compares unlike numbers, and the noise is not a variance. Compare the power between
    runs of the same model, and measure the noise of the gradient with `tracking.snr_every`.
    """
    mask_BT = credit.mask_BT
    mean_B = masked_mean(adv_BT, mask_BT)
    weighted_B = mean_B
    if credit.correction_BT is not None:
        weighted_B = mean_B * masked_mean(credit.correction_BT, mask_BT)
    norm_BT = score_norms(replace(credit, correction_BT=None))
    if credit.correction_BT is not None:
        norm_BT = torch.where(credit.correction_BT == 0, 0.0, norm_BT)
    norm_B = norm_BT.sum(-1)
    power = float((weighted_B.square() * norm_B).mean())
    proxies = {
        "power": power,
        "square": float(mean_B.square().mean()),
        "score_norm": float(score_norms(credit).sum(-1).mean()),
    }
    if gradient_norm is not None:
        signal = gradient_norm**2
        responses = len(norm_B)
        excess = max(0.0, power - signal)
        proxies["signal"] = signal
        proxies["noise"] = excess / (responses - 1) if responses > 1 else 0.0
    return proxies
