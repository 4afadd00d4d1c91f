"""Objectives: hand-worked numbers, a naive restatement, equivalences, invariances, hostile numbers."""

import math

import numpy as np
import pytest
import torch

from gspo.masked import Totals, aggregate
from gspo.objectives import GRPO, GSPO, GSPOToken, LossInputs

ALL = [GSPO, GSPOToken, GRPO]
BAND = {"clip_low": 0.2, "clip_high": 0.27}


def ragged(seed: int, scale: float = 0.3, rows: int = 6, width: int = 7):
    """A random ragged batch in float64: log-probs, old log-probs, per-response advantages, mask with holes."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, generator=g, dtype=torch.float64)
    logp = old + scale * torch.randn(rows, width, generator=g, dtype=torch.float64)
    adv = torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, width).clone()
    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    mask = torch.arange(width) < lengths
    mask[0, 1:3] = False  # holes, as multi-turn responses have
    mask[0, 0] = True
    return logp, old, adv, mask


def loss_and_gradient(objective, logp, old, adv, mask, how="sequence_mean"):
    logp = logp.clone().requires_grad_()
    outputs = objective(LossInputs(logp, old, adv, mask))
    loss = aggregate(outputs.loss_BT, mask, how, Totals.of(mask))
    loss.backward()
    return loss.item(), logp.grad, outputs


def naive(kind, logp, old, adv, mask, low, high):
    """The paper's formulas (Eq 2, 5, 13) with loops, in numpy: loss, active tokens, outside tokens."""
    logp, old, adv, mask = (np.asarray(x) for x in (logp, old, adv, mask))
    total, active, outside = 0.0, np.zeros(mask.shape, bool), np.zeros(mask.shape, bool)
    for i in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        s = math.exp(sum(logp[i, t] - old[i, t] for t in tokens) / len(tokens))
        gain = 0.0
        for t in tokens:
            ratio = math.exp(logp[i, t] - old[i, t]) if kind is GRPO else s
            clipped = min(max(ratio, 1 - low), 1 + high)
            gain += min(ratio * adv[i, t], clipped * adv[i, t])
            active[i, t] = clipped * adv[i, t] < ratio * adv[i, t]
            outside[i, t] = ratio < 1 - low or ratio > 1 + high
        total -= gain / len(tokens)
    return total / len(mask), active, outside


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_papers_formula_written_naively(kind, seed):
    logp, old, adv, mask = ragged(seed, scale=0.8)  # wide enough that each case has clipped tokens
    loss, _, outputs = loss_and_gradient(kind(**BAND), logp, old, adv, mask)
    expected, active, outside = naive(kind, logp, old, adv, mask, **{"low": 0.2, "high": 0.27})
    assert loss == pytest.approx(expected, abs=1e-12)
    assert (outputs.active_BT & mask).numpy().tolist() == active.tolist()
    assert (outputs.outside_BT & mask).numpy().tolist() == outside.tolist()
    assert active.any() and outside.any()  # the case is not trivial


def test_three_tokens_by_hand():
    # ratios 1/2, 1, 3/2; A = 2; band [0.8, 1.27]
    old = torch.log(torch.tensor([[0.4, 0.5, 0.2]], dtype=torch.float64))
    logp = torch.log(torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64))
    adv, mask = torch.full((1, 3), 2.0, dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    # GRPO: gains 2 * (1/2, 1, 1.27) = 1, 2, 2.54; the third is clipped: no gradient; d loss / d logp = -w A / 3
    loss, gradient, outputs = loss_and_gradient(GRPO(**BAND), logp, old, adv, mask)
    assert loss == pytest.approx(-(1 + 2 + 2.54) / 3, abs=1e-12)
    assert gradient.tolist()[0] == pytest.approx([-1 / 3, -2 / 3, 0], abs=1e-12)
    assert outputs.active_BT.tolist() == [[False, False, True]]
    assert outputs.outside_BT.tolist() == [[True, False, True]]
    # GSPO: s = (1/2 * 1 * 3/2)^(1/3) = 0.75^(1/3) = 0.90856; inside; d loss / d logp = -s A / 3 for each token
    s = 0.75 ** (1 / 3)
    loss, gradient, outputs = loss_and_gradient(GSPO(**BAND), logp, old, adv, mask)
    assert loss == pytest.approx(-2 * s, abs=1e-12)
    assert gradient.tolist()[0] == pytest.approx([-2 * s / 3] * 3, abs=1e-12)
    assert not outputs.active_BT.any() and not outputs.outside_BT.any()
    # the same response with A = -2 in a band that starts at 0.95: s is below it, so the whole response is clipped
    loss, gradient, outputs = loss_and_gradient(GSPO(clip_low=0.05, clip_high=0.05), logp, old, -adv, mask)
    assert loss == pytest.approx(2 * 0.95, abs=1e-12)
    assert gradient.abs().max() == 0 and outputs.active_BT.all()


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean"])
def test_on_policy_all_objectives_have_the_same_gradient(how):
    _, old, adv, mask = ragged(0)
    gradients = [loss_and_gradient(kind(**BAND), old, old, adv, mask, how)[1] for kind in ALL]
    lengths = mask.sum(-1, keepdim=True).double()
    weight = 1 / (lengths * len(mask)) if how == "sequence_mean" else 1 / mask.sum().double()
    for gradient in gradients:
        torch.testing.assert_close(gradient, -adv * mask * weight, atol=1e-15, rtol=0)


def test_gspo_equals_gspo_token_off_policy():
    for seed in range(5):
        case = ragged(seed)
        (a, grad_a, out_a), (b, grad_b, out_b) = (loss_and_gradient(kind(**BAND), *case) for kind in (GSPO, GSPOToken))
        assert a == pytest.approx(b, abs=1e-14)
        torch.testing.assert_close(grad_a, grad_b, atol=1e-15, rtol=1e-12)
        assert torch.equal(out_a.active_BT & case[3], out_b.active_BT & case[3])


def test_gspo_token_takes_advantages_per_token():
    logp, old, adv, mask = ragged(1, scale=0.05)
    adv = adv + torch.arange(adv.shape[1])
    _, gradient, _ = loss_and_gradient(GSPOToken(**BAND), logp, old, adv, mask)
    log = torch.where(mask, logp - old, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    expected = (
        -log.exp() * adv * mask / mask.sum(-1, keepdim=True) / len(mask)
    )  # Eq 17: s_i/|y_i| A_it, nothing clipped
    torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=1e-12)


def test_gspo_equals_grpo_on_one_token_responses_with_equal_clip():
    logp, old, adv, _ = ragged(2)
    mask = torch.zeros(logp.shape, dtype=torch.bool)
    mask[:, 0] = True
    (a, grad_a, _), (b, grad_b, _) = (loss_and_gradient(kind(**BAND), logp, old, adv, mask) for kind in (GSPO, GRPO))
    assert a == b and torch.equal(grad_a, grad_b)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("how", ["sequence_mean", "token_mean"])
def test_loss_and_gradient_do_not_depend_on_cut_padding_or_order(kind, how):
    logp, old, adv, mask = ragged(3)
    loss, gradient, _ = loss_and_gradient(kind(**BAND), logp, old, adv, mask, how)
    # cut into micro-batches, normalised by the counts of the whole
    cut_logp, total = logp.clone().requires_grad_(), 0.0
    for rows in torch.arange(len(mask)).split(2):
        outputs = kind(**BAND)(LossInputs(cut_logp[rows], old[rows], adv[rows], mask[rows]))
        part = aggregate(outputs.loss_BT, mask[rows], how, Totals.of(mask))
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss, abs=1e-14)
    torch.testing.assert_close(cut_logp.grad, gradient, atol=1e-15, rtol=1e-12)
    # wider padding, another order of rows
    wide = [torch.nn.functional.pad(x, (0, 3)) for x in (logp, old, adv, mask)]
    wide_loss, wide_gradient, _ = loss_and_gradient(kind(**BAND), *wide, how)
    assert wide_loss == pytest.approx(loss, abs=1e-14)
    torch.testing.assert_close(wide_gradient[:, :-3], gradient, atol=1e-15, rtol=1e-12)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    moved_loss, moved_gradient, _ = loss_and_gradient(
        kind(**BAND), logp[order], old[order], adv[order], mask[order], how
    )
    assert moved_loss == pytest.approx(loss, abs=1e-14)
    torch.testing.assert_close(moved_gradient, gradient[order], atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_padding_never_reaches_loss_or_gradient(kind, poison):
    logp, old, adv, mask = ragged(4)
    loss, gradient, _ = loss_and_gradient(kind(**BAND), logp, old, adv, mask)
    poisoned = [torch.where(mask, x, poison) for x in (logp, old, adv)]
    bad_loss, bad_gradient, _outputs = loss_and_gradient(kind(**BAND), *poisoned, mask)
    assert bad_loss == loss
    assert torch.equal(bad_gradient, gradient)
    assert bad_gradient[~mask].abs().max() == 0


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("shift", [50.0, -50.0, 800.0, -800.0])
def test_huge_ratios_stay_finite_carry_no_gradient_and_are_counted(kind, shift):
    _logp, old, adv, mask = ragged(5)
    loss, gradient, outputs = loss_and_gradient(kind(**BAND), old + shift, old, adv, mask)
    assert math.isfinite(loss) and gradient.abs().max() == 0
    assert (outputs.bounded_BT | ~mask).all()


@pytest.mark.parametrize("kind", ALL)
def test_old_log_probs_get_no_gradient_and_empty_rows_count_nowhere(kind):
    logp, old, adv, mask = ragged(6)
    mask[2] = False
    old = old.requires_grad_()
    loss, gradient, _ = loss_and_gradient(kind(**BAND), logp, old, adv, mask)
    assert old.grad is None and math.isfinite(loss)
    keep = [0, 1, 3, 4, 5]
    smaller, _, _ = loss_and_gradient(kind(**BAND), logp[keep], old.detach()[keep], adv[keep], mask[keep])
    assert loss == pytest.approx(smaller, abs=1e-14) and gradient[2].abs().max() == 0


@pytest.mark.parametrize(
    "key, value", [("clip_low", 0.0), ("clip_low", 1.5), ("clip_high", -0.1), ("log_ratio_bound", 100)]
)
def test_a_clip_range_that_makes_no_sense_is_refused_by_name(key, value):
    for kind in ALL:
        with pytest.raises(ValueError, match=f"objective.{key}={value}"):
            kind(**{key: value})


def test_paper_defaults():
    assert (GSPO().clip_low, GSPO().clip_high) == (3e-4, 4e-4)
    assert (GSPOToken().clip_low, GSPOToken().clip_high) == (3e-4, 4e-4)
    assert (GRPO().clip_low, GRPO().clip_high) == (0.2, 0.27)
