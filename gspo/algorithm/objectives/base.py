"""The parts that objectives share: inputs, outputs, importance ratios, the clip and the dual clip.

Shape suffixes: B responses, T response tokens, 1 an axis that is broadcast over tokens. All
log-probabilities are natural logarithms, in float32 or better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gspo.data.lazy_torch import torch
from gspo.data.masked import masked_mean
from gspo.io.errors import SettingError
from gspo.io.ranges import Ranged, ranged

if TYPE_CHECKING:
    from torch import Tensor

# Log-ratios below this many nats (a ratio of 2e-9) are bounded. A small ratio cannot overflow, so a
# `log_ratio_bound` of less than 20 acts on large ratios alone.
LOG_RATIO_FLOOR = -20.0


@dataclass
class LossInputs:
    """The tensors that an objective may read. Masked entries can be NaN.

    Raises ValueError for log-probs in half precision: bfloat16 resolves them to 0.4 %, and GSPO's
    clip range is only 0.07 % wide.
    """

    logp_BT: Tensor  # log pi_theta(y_t | x, y_<t), with gradient
    old_logp_BT: Tensor  # log pi_old(y_t | x, y_<t), without gradient
    adv_BT: Tensor  # the advantage of every token
    mask_BT: Tensor  # bool, True on response tokens
    # log mu of the policy that sampled, as the engine reported it; a trainer always gives it
    engine_logp_BT: Tensor | None = None
    ref_logp_BT: Tensor | None = None  # log pi_ref; None without a reference policy
    # the number of tokens of each response, the environment's tokens included; None: as many as the
    # mask has
    lengths_B: Tensor | None = None
    # the weights of the correction, only for an objective with includes_correction
    correction_BT: Tensor | None = None
    # Objective.statistic of the whole mini-batch; None: of these inputs
    statistic: Tensor | None = None

    def __post_init__(self):
        for name in ("logp_BT", "old_logp_BT", "engine_logp_BT", "ref_logp_BT"):
            value = getattr(self, name)
            if value is not None and value.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"{name} is {value.dtype}: log-probs must be float32 or better, convert the "
                    "logits first"
                )

    @property
    def advantage_BT(self) -> Tensor:
        """The advantages A_it, 0 at masked tokens."""
        return torch.where(self.mask_BT, self.adv_BT, 0.0)


@dataclass
class LossOutputs:
    """The loss and the clip statistics of every token, meaningful if the mask is True."""

    loss_BT: Tensor
    # the factor of A_it grad log pi(y_it) in the gradient, 0 if it is clipped; without gradient
    weight_BT: Tensor
    is_clipped_BT: Tensor  # bool, True if the clip or a mask removed the token's gradient
    # bool, True if the ratio lies outside the clip range, for either sign of the advantage
    outside_BT: Tensor
    bounded_BT: Tensor  # bool, True if the log-ratio lies beyond its numerical bound
    # bool, True if the dual clip removed the gradient, a part of is_clipped_BT; None without it
    dual_BT: Tensor | None = None
    # the part of loss_BT that does not depend on the advantage, to which weight_BT and
    # is_clipped_BT do not apply; None: there is no such part
    penalty_BT: Tensor | None = None


@dataclass
class Objective(Ranged, key="objective"):
    """The base of all objectives: the fields of a subclass are its settings, and it is callable.

    The class attributes are facts about the formula. gspo.config.algorithm_checks reads them to
    refuse settings that would do nothing with this objective, or that would not do as they say.
    """

    name: str = ""
    # Some objectives have these settings. They have no annotation, so they are no fields here.
    log_ratio_bound = 20.0  # for diagnostics
    clip_low = 0.0
    clip_high = 0.0
    # the meaning of trainer.aggregation.mode=auto
    aggregation: ClassVar[str] = "seq-mean-token-mean"
    fixed_aggregation: ClassVar[bool] = False  # the formula holds with that aggregation alone
    # the policy that the ratio divides by: old | engine (the policy that sampled) | none: no ratio
    ratio_to: ClassVar[str] = "old"
    sequence_level: ClassVar[bool] = False  # there is one ratio per response
    # at the sequence level, tokens of a response may differ in advantage
    token_advantages: ClassVar[bool] = False
    # responses whose advantages are all 0 have a gradient too
    needs_every_row: ClassVar[bool] = False
    # clip_low and clip_high bound the ratio of the response
    clips_sequence_ratio: ClassVar[bool] = False
    # the ratio of a token is made of several tokens, as it is if sequence_level
    joint_ratio: ClassVar[bool] = False
    # the correction's weights are part of the formula, so the loss is not multiplied by them
    includes_correction: ClassVar[bool] = False
    # the weight of a response depends on its length, so it is measured by length
    weighs_by_length: ClassVar[bool] = False
    # the loss depends on `statistic` of the whole mini-batch
    needs_statistic: ClassVar[bool] = False

    def statistic(self, inputs: LossInputs) -> Tensor | None:
        """Compute the number of a whole mini-batch that the loss depends on, None without any.

        It has no gradient.
        """
        return None

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the loss of every token."""
        raise TypeError(f"objective {self.name!r} has no formula: choose a concrete one")


@dataclass
class RatioObjective(Objective):
    """The base of the objectives that use an importance ratio.

    Log-ratios are kept within [-max(20, log_ratio_bound), log_ratio_bound] before exp. A token
    whose log-ratio lies outside is counted in `clip/log_ratio_bounded`. Its ratio has no gradient.
    CISPO, P3O and VESPO use the ratio as a fixed weight of the log-prob, so there the token keeps
    its gradient. For all other tokens the formulas are exact.
    """

    log_ratio_bound: float = ranged(20.0, above=0, most=80, why="exp(88) overflows")  # nats

    def token_ratio(
        self, inputs: LossInputs, denominator_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute w_it = pi(y_it) / pi_old(y_it), and whether it is beyond the bound. Both [B, T].

        `denominator_BT` replaces the old policy's log-probs.
        """
        if denominator_BT is None:
            denominator_BT = inputs.old_logp_BT
        return self.bounded_exp(log_ratio(inputs.logp_BT, denominator_BT, inputs.mask_BT))

    def sequence_ratio(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Compute s_i = exp( 1/|y_i| sum_t log w_it ), and whether it is beyond the bound.

        Both have the shape [B, 1].
        """
        log_BT = log_ratio(inputs.logp_BT, inputs.old_logp_BT, inputs.mask_BT)
        log_B = masked_mean(log_BT, inputs.mask_BT)
        return self.bounded_exp(log_B.unsqueeze(-1))

    def bounded_exp(self, log: Tensor) -> tuple[Tensor, Tensor]:
        """Compute exp of bounded log-ratios, and whether each of them is beyond the bound."""
        lowest = min(LOG_RATIO_FLOOR, -self.log_ratio_bound)
        ratio = log.clamp(lowest, self.log_ratio_bound).exp()
        is_beyond = (log < lowest) | (log > self.log_ratio_bound)
        return ratio, is_beyond

    def outside(self, ratio_BT: Tensor) -> Tensor:
        """Return whether ratios lie outside [1 - clip_low, 1 + clip_high]. Shape [B, T]."""
        return (ratio_BT < 1 - self.clip_low) | (ratio_BT > 1 + self.clip_high)


@dataclass
class Clipped(RatioObjective):
    """The base of the objectives with PPO's clip:

        -min( r A, clip(r, 1 - clip_low, 1 + clip_high) A )

    The dual clip (arXiv:1912.09729) is off by default. With it the loss is at most dual_clip |A| if
    A < 0, so a ratio above dual_clip has no gradient either.
    """

    clip_low: float = ranged(0.2, above=0, below=1, why="the band starts at 1 - clip_low > 0")
    clip_high: float = ranged(0.2, above=0, why="the band ends at 1 + clip_high")
    dual_clip: float | None = ranged(None, above=1, why="at 1 it would clip every update")  # c

    def clipped(self, ratio_BT: Tensor, bounded_BT: Tensor, inputs: LossInputs) -> LossOutputs:
        """Compute the clipped loss, with the dual clip if it is on, and the clip masks."""
        clipped_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high)
        return clipped_loss(ratio_BT, clipped_BT, bounded_BT, self.dual_clip, inputs)


def clipped_loss(
    ratio_BT: Tensor,
    clipped_ratio_BT: Tensor,
    bounded_BT: Tensor,
    dual_clip: Tensor | float | None,
    inputs: LossInputs,
) -> LossOutputs:
    """Compute PPO's loss from ratios and clipped ratios, with the dual clip if there is one."""
    adv_BT = inputs.advantage_BT
    gain_BT = ratio_BT * adv_BT
    clipped_gain_BT = clipped_ratio_BT * adv_BT
    loss_BT = -torch.minimum(gain_BT, clipped_gain_BT)
    is_clipped_BT = clipped_gain_BT < gain_BT
    dual_BT = None
    if dual_clip is not None:
        largest_BT = -dual_clip * adv_BT
        dual_BT = (adv_BT < 0) & (loss_BT > largest_BT)
        loss_BT = torch.where(dual_BT, largest_BT, loss_BT)
        is_clipped_BT = is_clipped_BT | dual_BT
    return LossOutputs(
        loss_BT=loss_BT,
        weight_BT=torch.where(is_clipped_BT | bounded_BT, 0.0, ratio_BT.detach()),
        is_clipped_BT=is_clipped_BT,
        outside_BT=clipped_ratio_BT.detach() != ratio_BT.detach(),
        bounded_BT=bounded_BT,
        dual_BT=dual_BT,
    )


def log_ratio(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Compute log( pi / pi_old ) of every token, 0 at masked tokens. Shape [B, T].

    No gradient reaches the old log-probs.
    """
    return torch.where(mask_BT, logp_BT - old_logp_BT.detach(), 0.0)


def probability_change(inputs: LossInputs, engine_logp_BT: Tensor) -> Tensor:
    """Compute pi(y_it) - mu(y_it) without gradient, 0 at masked tokens. Shape [B, T]."""
    change_BT = inputs.logp_BT.detach().exp() - engine_logp_BT.exp()
    return torch.where(inputs.mask_BT, change_BT, 0.0)


def required_engine_logp(inputs: LossInputs, group: str, name: str) -> Tensor:
    """Return the engine's log-probs without gradient. Raises ValueError if they are missing.

    `group` and `name` are the settings that need them.
    """
    if inputs.engine_logp_BT is None:
        raise SettingError(
            group, name, "compares with the behaviour policy: engine_logp_BT is missing"
        )
    return inputs.engine_logp_BT.detach()
