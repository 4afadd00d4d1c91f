"""Known misreadings of GSPO, each implemented here and shown to differ: experiments/MISREADINGS.md,
in numbers.

`quoted` holds the page to the numbers that are computed here.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.objectives import GRPO, GSPO, GSPOToken, LossInputs, Reinforce
from gspo.data.masked import masked_mean

PAGE = (Path(__file__).parents[3] / "experiments" / "MISREADINGS.md").read_text()
MEAN = Aggregation("seq-mean-token-mean")


def quoted(section: int, *numbers: str) -> None:
    text = " ".join(PAGE.split(f"\n## {section}. ")[1].split("\n## ")[0].split())
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", text), (
            f"section {section} lacks {number}"
        )


def outputs_of(objective, logp_BT, old_BT, adv_BT, mask_BT=None):
    mask_BT = torch.ones_like(logp_BT, dtype=torch.bool) if mask_BT is None else mask_BT
    return objective(LossInputs(logp_BT, old_BT, adv_BT.expand_as(logp_BT), mask_BT)), mask_BT


def gradient(objective, logp_BT, old_BT, adv_BT, mask_BT=None, aggregation=MEAN):
    """Loss, and its gradient with respect to the log-probs."""
    logp_BT = logp_BT.detach().clone().requires_grad_()
    outputs, mask_BT = outputs_of(objective, logp_BT, old_BT, adv_BT, mask_BT)
    loss = aggregation(outputs.loss_BT, mask_BT, Totals.of(mask_BT))
    return loss.item(), torch.autograd.grad(loss, logp_BT)[0]


def slightly_off_policy(rows=4000, width=200, spread=3.4e-4):
    """Responses whose mean log-ratios spread so far that the paper's band clips about the paper's
    15 %.
    """
    rng = np.random.default_rng(0)
    old = torch.tensor(-3 * rng.random((rows, width)))
    logp = old + torch.tensor(spread * math.sqrt(width) * rng.standard_normal((rows, width)))
    return logp, old, torch.tensor(rng.choice([-1.0, 1.0], (rows, 1)))


def test_1_a_clipped_ratio_set_to_one_keeps_pushing():
    def misread(logp_BT, old_BT, adv_B1):
        s_B1 = (logp_BT - old_BT).mean(-1, keepdim=True).exp().detach()
        weight_B1 = torch.where((s_B1 < 1 - 3e-4) | (s_B1 > 1 + 4e-4), 1.0, s_B1)
        return -(weight_B1 * adv_B1 * logp_BT.mean(-1, keepdim=True)).mean()

    old_BT, adv_B1 = (
        torch.full((1, 4), -1.0, dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.float64),
    )
    logp_BT = (old_BT + math.log(1.01)).requires_grad_()  # s = 1.01, A = 1: clipped
    pushed_BT = torch.autograd.grad(misread(logp_BT, old_BT, adv_B1), logp_BT)[0]
    assert pushed_BT.tolist() == [[-0.25] * 4]  # -A/|y|
    assert gradient(GSPO(), logp_BT, old_BT, adv_B1)[1].abs().max() == 0
    # a hundred steps of plain gradient descent, rate 0.01, on this one response from s = 1
    right_BT, wrong_BT = old_BT.clone(), old_BT.clone()
    for _ in range(100):
        right_BT = right_BT - 0.01 * gradient(GSPO(), right_BT, old_BT, adv_B1)[1]
        wrong_BT = wrong_BT.detach().requires_grad_()
        wrong_BT = (
            wrong_BT - 0.01 * torch.autograd.grad(misread(wrong_BT, old_BT, adv_B1), wrong_BT)[0]
        )
    right, wrong = ((x - old_BT).mean().exp().item() for x in (right_BT, wrong_BT))
    assert 1 + 4e-4 < right < 1.003 and wrong > 1.28  # one step beyond the edge, and without end
    quoted(1, "-0.25", f"{right:.4f}", f"{wrong:.3f}")


def test_2_a_ratio_to_itself_is_always_one():
    class Misread(GSPO):  # exp(mean(l - sg(l))): the old log-probs are not read
        def __call__(self, inputs):
            ratio_B1 = (
                masked_mean(inputs.logp_BT - inputs.logp_BT.detach(), inputs.mask_BT)
                .unsqueeze(-1)
                .exp()
            )
            ratio_BT = ratio_B1.expand_as(inputs.mask_BT)
            return self.clipped(ratio_BT, torch.zeros_like(inputs.mask_BT), inputs)

    class AsVerl(GSPO):  # l - sg(l) + sg(mean(l - l_old)) looks alike and is right
        def __call__(self, inputs):
            l_BT, mean_B1 = (
                inputs.logp_BT,
                (inputs.logp_BT - inputs.old_logp_BT).mean(-1, keepdim=True),
            )
            ratio_BT = (l_BT - l_BT.detach() + mean_B1.detach()).exp()
            return self.clipped(ratio_BT, torch.zeros_like(inputs.mask_BT), inputs)

    logp_BT, old_BT, adv_B1 = slightly_off_policy(rows=2000)
    misread = outputs_of(Misread(), logp_BT, old_BT, adv_B1)[0]
    assert not misread.outside_BT.any() and (misread.weight_BT == 1).all()
    assert outputs_of(GSPO(), logp_BT, old_BT, adv_B1)[0].is_clipped_BT.double().mean() > 0.14
    wrong_BT = gradient(Misread(), logp_BT, old_BT, adv_B1)[1]
    torch.testing.assert_close(
        wrong_BT, gradient(Reinforce(), logp_BT, old_BT, adv_B1)[1], rtol=1e-12, atol=0
    )
    # any old policy will do
    assert torch.equal(wrong_BT, gradient(Misread(), logp_BT, old_BT - 5, adv_B1)[1])
    for right in (GSPO(), GSPOToken()):
        ours_BT = gradient(right, logp_BT, old_BT, adv_B1)[1]
        torch.testing.assert_close(
            gradient(AsVerl(), logp_BT, old_BT, adv_B1)[1], ours_BT, rtol=1e-10, atol=0
        )
    lost = ((wrong_BT - ours_BT).norm() / ours_BT.norm()).item()
    assert lost > 0.3
    quoted(2, f"{lost:.2f}", "0 %")


def test_3_a_sum_of_log_ratios_leaves_any_band_with_length():
    def summed(log_BT):
        return log_BT.sum(-1).exp()

    # what the objective has, read from its weights (the band is opened: nothing is clipped)
    def averaged(log_BT):
        objective = GSPO(clip_low=0.999, clip_high=1e9)
        return outputs_of(objective, log_BT, torch.zeros_like(log_BT), torch.ones(1, 1))[
            0
        ].weight_BT[:, 0]

    # every token shifted alike, by 2e-4: the mean does not know the length
    for length, ratio in [(1, "1.0002"), (10, "1.0020"), (100, "1.0202"), (1000, "1.2214")]:
        log_BT = torch.full((1, length), 2e-4, dtype=torch.float64)
        assert averaged(log_BT).item() == pytest.approx(math.exp(2e-4), abs=1e-12)
        assert f"{summed(log_BT).item():.4f}" == ratio
        quoted(3, ratio)
    # tokens that move independently, with a standard deviation of 0.05
    outside, never = [], []
    for length in (10, 100, 1000):
        log_BT = torch.tensor(0.05 * np.random.default_rng(length).standard_normal((2000, length)))
        for ratio, shares in [(summed(log_BT), outside), (averaged(log_BT), never)]:
            shares.append(((ratio < 0.8) | (ratio > 1.27)).double().mean().item())
        wide, narrow = summed(log_BT).log().std().item(), averaged(log_BT).log().std().item()
        assert wide == pytest.approx(0.05 * math.sqrt(length), rel=0.05)
        assert narrow == pytest.approx(0.05 / math.sqrt(length), rel=0.05)
    assert outside[0] < outside[1] < outside[2] and outside[2] > 0.85 and never == [0, 0, 0]
    quoted(3, *(f"{100 * share:.0f} %" for share in outside), f"{wide:.1f}", f"{narrow:.4f}")


def test_4_a_token_band_on_a_sequence_ratio_never_clips():
    logp_BT, old_BT, adv_B1 = slightly_off_policy()
    paper, misread = (
        outputs_of(o, logp_BT, old_BT, adv_B1)[0]
        for o in (GSPO(), GSPO(clip_low=0.2, clip_high=0.2))
    )
    active, outside = (x.double().mean().item() for x in (paper.is_clipped_BT, paper.outside_BT))
    assert 0.13 < active < 0.17 and not misread.outside_BT.any()
    farthest = (misread.weight_BT - 1).abs().max().item()
    assert farthest < 0.2 / 100
    # what is left has the gradient of an objective without clip, and is taken for GSPO
    open_BT = gradient(GSPO(clip_low=0.999, clip_high=1e9), logp_BT, old_BT, adv_B1)[1]
    assert torch.equal(
        gradient(GSPO(clip_low=0.2, clip_high=0.2), logp_BT, old_BT, adv_B1)[1], open_BT
    )
    quoted(
        4,
        f"{100 * active:.1f} %",
        f"{100 * outside:.1f} %",
        f"{farthest:.4f}",
        f"{0.2 / farthest:.0f}",
    )


def test_5_an_average_over_tokens_weighs_responses_by_their_length():
    # a loss per response [B, 1], times the mask [B, T]
    def misread(logp_BT, old_BT, adv_B1, mask_BT):
        s_B1 = masked_mean(logp_BT - old_BT, mask_BT).unsqueeze(-1).exp()
        loss_B1 = -torch.minimum(s_B1 * adv_B1, s_B1.clamp(1 - 3e-4, 1 + 4e-4) * adv_B1)
        return (loss_B1 * mask_BT).sum() / mask_BT.sum()

    change = [
        [0.001, -0.0004, 0.0006, 0],
        [-0.002, 0.0005, 0, 0],
        [0.003, -0.001, 0.001, 0],
        [2e-4, -1e-4, 4e-4, -3e-4],
    ]
    old_BT = torch.tensor(
        [[-0.1, -0.2, -0.3, -0.4], [-1] * 4, [-0.5, -0.6, -0.7, -0.8], [-2] * 4],
        dtype=torch.float64,
    )
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    adv_B1 = torch.tensor([[1], [-1], [0.5], [-0.5]], dtype=torch.float64)
    case = (old_BT + torch.tensor(change, dtype=torch.float64), old_BT, adv_B1, mask_BT)
    right, right_BT = gradient(GSPO(), *case)
    token_mean, token_mean_BT = gradient(GSPO(), *case, Aggregation("token-mean"))
    token_sum, token_sum_BT = gradient(GSPO(), *case, Aggregation("seq-mean-token-sum"))
    assert misread(*case).item() == pytest.approx(token_mean, abs=1e-15)
    # the losses that TRL and ROLL compute for this batch
    assert right == pytest.approx(-0.000193761095, abs=1e-12)
    assert token_mean == pytest.approx(-0.115561552117, abs=1e-12)
    assert token_sum == pytest.approx(-0.375575044379, abs=1e-9)
    length_B1 = mask_BT.sum(-1, keepdim=True)
    torch.testing.assert_close(token_mean_BT, right_BT * length_B1 * 4 / 13, rtol=1e-12, atol=0)
    torch.testing.assert_close(token_sum_BT, right_BT * length_B1, rtol=1e-12, atol=0)
    quoted(5, f"{right:.6f}", f"{token_mean:.6f}", f"{token_sum:.6f}", "4/13", "2/13")


def test_6_with_one_update_per_rollout_there_is_no_gspo():
    rng = np.random.default_rng(0)
    # a policy that is a table: 8 responses, 12 tokens, 5 words
    logits = torch.tensor(rng.standard_normal((8, 12, 5)))
    words = torch.tensor(rng.integers(0, 5, (8, 12, 1)))
    adv_B1 = torch.tensor(rng.standard_normal((8, 1)))

    def logp(logits):
        return logits.log_softmax(-1).gather(-1, words).squeeze(-1)

    def gradients(logits, old_BT):
        return [
            gradient(kind, logp(logits), old_BT, adv_B1)[1]
            for kind in (GSPO(), GRPO(), Reinforce())
        ]

    old_BT = logp(logits)
    gspo, grpo, reinforce = gradients(logits, old_BT)
    assert torch.equal(gspo, grpo) or (gspo - grpo).abs().max() < 1e-16
    assert (gspo - reinforce).abs().max() < 1e-16
    for kind in (GSPO(), GRPO()):
        assert not outputs_of(kind, old_BT, old_BT, adv_B1)[0].outside_BT.any()
    # one update of GRPO later they are different algorithms
    moving = logits.clone().requires_grad_()
    logp(moving).backward(grpo)
    after = logits - 0.1 * moving.grad
    gspo, grpo, _ = gradients(after, old_BT)
    clipped = [
        outputs_of(kind, logp(after), old_BT, adv_B1)[0].is_clipped_BT.double().mean()
        for kind in (GSPO(), GRPO())
    ]
    apart = ((gspo - grpo).norm() / grpo.norm()).item()
    assert clipped[0] > 0.3 and clipped[1] == 0 and apart > 0.3
    quoted(6, f"{100 * clipped[0]:.0f} %", f"{apart:.2f}")


def test_the_page_and_the_tests_name_each_other():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    shown = {name for name in globals() if re.match(r"test_\d_", name)}
    assert named == shown and len(shown) == PAGE.count("\n## ")
