"""The invariances of objectives: all of ours pass, and each check refuses an objective that breaks
it.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from gspo.algorithm.invariances import CHECKS, check_objective, outputs_fit
from gspo.algorithm.objectives import GSPO, OBJECTIVES
from gspo.algorithm.objectives.token import GRPO


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_every_objective_of_ours_passes(kind):
    findings = check_objective(kind())
    assert len(findings) == 1 + len(CHECKS)
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


@pytest.mark.parametrize(
    "kind, name, text",
    [
        (MeanOfAllColumns, "masking", "tokens outside the mask have a gradient"),
        (MeanOfAllColumns, "cut of the batch", "count tokens by inputs.mask_BT"),
        (MaskTimes, "NaN in padding", "nan outside the mask reaches the gradient"),
        (ByNeighbours, "cut of the batch", "reads its neighbours"),
        (Entropic, "no advantage, no gradient", "needs_every_row = True"),
        (WrongSign, "gradient on policy", "does not follow the advantage"),
        (WrongGradient, "finite differences", "off by"),
        (ToldWrong, "clip metrics", "weight_BT is not the factor"),
        (ClippedAndNot, "clip metrics", "calls clipped have a gradient"),
    ],
)
def test_each_check_refuses_what_breaks_it(kind, name, text):
    assert text in failures(kind)[name]


def test_a_gradient_without_advantage_is_allowed_where_the_class_says_so():
    assert "no advantage, no gradient" not in failures(EntropicAndSaysSo)
