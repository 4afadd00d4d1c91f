"""The invariances of objectives: all of ours pass, and each check refuses an objective that breaks
it.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from gspo.algorithm.invariances import CHECKS, check_objective, outputs_fit
from gspo.algorithm.objectives import GSPO, OBJECTIVES, LossOutputs
from gspo.algorithm.objectives.token import GRPO


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_every_objective_of_ours_passes(kind):
    findings = check_objective(kind())
    assert len(findings) == 2 + len(CHECKS)
    assert [finding for finding in findings if not finding.holds] == []


def failures(kind) -> dict[str, str]:
    return {finding.name: finding.text for finding in check_objective(kind()) if not finding.holds}


@dataclass
class OneNumber(GRPO):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return replace(outputs, loss_BT=outputs.loss_BT.sum(-1))


@dataclass
class NoOutputs(GRPO):
    def __call__(self, inputs):
        return super().__call__(inputs).loss_BT


@dataclass
class WeightWithGradient(GRPO):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return replace(outputs, weight_BT=inputs.logp_BT - inputs.old_logp_BT)


@pytest.mark.parametrize(
    "kind, text",
    [
        (OneNumber, "must be numbers of shape [B, T] or [B, 1]"),
        (NoOutputs, "gave Tensor, not LossOutputs"),
        (WeightWithGradient, "weight_BT has a gradient"),
    ],
)
def test_outputs_of_the_wrong_kind_are_told_alone(kind, text):
    (finding,) = check_objective(kind())
    assert finding == outputs_fit(kind()) and not finding.holds and text in finding.text


@dataclass
class MeanOfAllColumns(GSPO):
    """Averages log-ratios over the padding too."""

    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        s_B1 = (inputs.logp_BT - inputs.old_logp_BT).mean(-1, keepdim=True).exp()
        return replace(outputs, loss_BT=-s_B1 * inputs.advantage_BT, weight_BT=s_B1.detach())


@dataclass
class MaskTimes(GRPO):
    """Masks by multiplication."""

    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        ratio_BT = (inputs.logp_BT - inputs.old_logp_BT).exp() * inputs.mask_BT
        return replace(outputs, loss_BT=-ratio_BT * inputs.adv_BT, weight_BT=ratio_BT.detach())


@dataclass
class ByNeighbours(GRPO):
    """Divides by the largest advantage of the micro-batch."""

    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        largest = inputs.advantage_BT.abs().max()
        return replace(
            outputs, loss_BT=outputs.loss_BT / largest, weight_BT=outputs.weight_BT / largest
        )


@dataclass
class Entropic(GRPO):
    """Adds a bonus that does not depend on the advantage."""

    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return replace(
            outputs,
            loss_BT=outputs.loss_BT + 0.01 * torch.where(inputs.mask_BT, inputs.logp_BT, 0.0),
        )


@dataclass
class EntropicAndSaysSo(Entropic):
    needs_every_row: ClassVar[bool] = True


@dataclass
class WrongSign(GRPO):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return replace(outputs, loss_BT=-outputs.loss_BT, weight_BT=-outputs.weight_BT)


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


@dataclass
class WrongGradient(GRPO):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return replace(
            outputs, loss_BT=HalfGradient.apply(outputs.loss_BT), weight_BT=outputs.weight_BT / 2
        )


@dataclass
class ToldWrong(GRPO):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return replace(outputs, weight_BT=outputs.weight_BT * 2)


@dataclass
class ClippedAndNot(GRPO):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return replace(outputs, is_clipped_BT=torch.ones_like(outputs.is_clipped_BT))


@dataclass
class WithoutOld(GRPO):
    """Divides by itself, so every ratio is 1."""

    def __call__(self, inputs):
        return self.clipped(*self.token_ratio(inputs, inputs.logp_BT.detach()), inputs)


@dataclass
class ByTheEngine(GRPO):
    def __call__(self, inputs):
        return self.clipped(*self.token_ratio(inputs, inputs.engine_logp_BT), inputs)


@dataclass
class MeanAdvantage(GRPO):
    def __call__(self, inputs):
        counts_B1 = inputs.mask_BT.sum(-1, keepdim=True)
        mean_B1 = inputs.advantage_BT.sum(-1, keepdim=True) / counts_B1
        return super().__call__(replace(inputs, adv_BT=mean_B1.expand_as(inputs.adv_BT)))


@dataclass
class Unbounded(GRPO):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        log_BT = torch.where(inputs.mask_BT, inputs.logp_BT - inputs.old_logp_BT, 0.0)
        none_BT = torch.zeros_like(inputs.mask_BT)
        return replace(
            outputs,
            loss_BT=-log_BT.exp() * inputs.advantage_BT,
            weight_BT=log_BT.exp().detach(),
            is_clipped_BT=none_BT,
        )


@dataclass
class ClipsInSilence(GRPO):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return replace(outputs, is_clipped_BT=torch.zeros_like(outputs.is_clipped_BT))


@dataclass
class OutsideInverted(GRPO):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return replace(outputs, outside_BT=~outputs.outside_BT)


@pytest.mark.parametrize(
    "kind, name, text",
    [
        (WithoutOld, "ratio_to", "does not depend on old_logp_BT: set the class attribute"),
        (ByTheEngine, "ratio_to", "ratio_to = 'engine'"),
        (MeanAdvantage, "gradient on policy", "sequence_level = True"),
        (Unbounded, "extreme ratios", "bound them before exp"),
        (ClipsInSilence, "clip metrics", "have no gradient, and is_clipped_BT does not say so"),
        (OutsideInverted, "clip metrics", "outside_BT is True somewhere"),
        (MeanOfAllColumns, "masking", "tokens outside the mask have a gradient"),
        (MeanOfAllColumns, "cut of the batch", "count tokens by inputs.mask_BT"),
        (MaskTimes, "NaN in padding", "nan outside the mask reaches the gradient"),
        (ByNeighbours, "cut of the batch", "reads its neighbours"),
        (Entropic, "no advantage, no gradient", "needs_every_row = True"),
        (WrongSign, "gradient on policy", "does not follow the token's advantage"),
        (WrongGradient, "finite differences", "off by"),
        (ToldWrong, "clip metrics", "weight_BT is not the factor"),
        (ClippedAndNot, "clip metrics", "calls clipped have a gradient"),
    ],
)
def test_each_check_refuses_what_breaks_it(kind, name, text):
    assert text in failures(kind)[name]


@dataclass
class HardMask(GRPO):
    """REINFORCE for the tokens whose ratio to the old policy is near 1."""

    def __call__(self, inputs):
        ratio_BT, bounded_BT = self.token_ratio(inputs)
        far_BT = (ratio_BT.detach().log().abs() > 0.5) & inputs.mask_BT
        kept_BT = inputs.mask_BT & ~far_BT
        logp_BT = torch.where(kept_BT, inputs.logp_BT, 0.0)
        return LossOutputs(
            loss_BT=-logp_BT * inputs.advantage_BT,
            weight_BT=kept_BT.to(logp_BT.dtype),
            is_clipped_BT=far_BT,
            outside_BT=far_BT,
            bounded_BT=torch.zeros_like(bounded_BT),
        )


@dataclass
class BySegments(GRPO):
    """A ratio for each half of a response, and one advantage for a response."""

    joint_ratio: ClassVar[bool] = True

    def __call__(self, inputs):
        log_BT = torch.where(inputs.mask_BT, inputs.logp_BT - inputs.old_logp_BT, 0.0)
        halves = []
        for half_BT in (log_BT[:, :4], log_BT[:, 4:]):
            halves.append(half_BT.mean(-1, keepdim=True).expand_as(half_BT))
        log_BT = torch.where(inputs.mask_BT, torch.cat(halves, dim=1), 0.0)
        ratio_BT, bounded_BT = self.bounded_exp(log_BT)
        return self.clipped(ratio_BT, bounded_BT, inputs)


@pytest.mark.parametrize(
    ("kind", "name"), [(HardMask, "ratio_to"), (BySegments, "gradient on policy")]
)
def test_hard_masks_and_ratios_of_segments_are_not_refused_by_these_checks(kind, name):
    assert name not in failures(kind)


@dataclass
class Dropout(GRPO):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return replace(outputs, loss_BT=torch.nn.functional.dropout(outputs.loss_BT))


@dataclass
class InPlace(GRPO):
    def __call__(self, inputs):
        inputs.adv_BT.mul_(0.9)
        return super().__call__(inputs)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Dropout, "draw no random numbers"), (InPlace, "a call changes its input adv_BT")],
)
def test_a_loss_that_does_not_repeat_itself_is_told_alone(kind, text):
    first, second = check_objective(kind())
    assert first.holds and second.name == "repeated calls" and text in second.text


@dataclass
class InFloat32(GRPO):
    def __call__(self, inputs):
        return super().__call__(
            replace(
                inputs,
                logp_BT=inputs.logp_BT.float(),
                old_logp_BT=inputs.old_logp_BT.float(),
                adv_BT=inputs.adv_BT.float(),
            )
        )


def test_a_loss_in_a_lower_precision_than_its_inputs_is_told_alone():
    (finding,) = check_objective(InFloat32())
    assert not finding.holds and "compute in the precision of the inputs" in finding.text


def test_the_sides_of_the_clip_are_said():
    texts = {finding.name: finding.text for finding in check_objective(GSPO())}
    assert texts["clip metrics"].endswith(
        "it clips A < 0 at ratios below 1 and A > 0 at ratios above 1"
    )


def test_a_gradient_without_advantage_is_allowed_where_the_class_says_so():
    assert "no advantage, no gradient" not in failures(EntropicAndSaysSo)
