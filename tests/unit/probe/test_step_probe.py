"""The probe's numbers of log-probs: those of our trainer, hand numbers, hostile input."""

import math
import subprocess
import sys
from functools import partial

import pytest
import torch

from builders import batch_of, perturb, sample
from gspo.algorithm.objectives import DPPO, GRPO, GSPO, P3O
from gspo.probe import RoutingProbe, StepProbe, clip_shares, ratio_statistics, rounding_floor
from gspo.train.accumulator import MetricAccumulator
from probing import log_probs, record, response_mask
from trainers import trainer

CLIPS = [GSPO(clip_low=3e-3, clip_high=4e-3), GRPO(clip_low=0.1, clip_high=0.1, dual_clip=1.2)]
NAN = float("nan")


@pytest.mark.parametrize("objective", CLIPS, ids=lambda o: o.name)
def test_the_numbers_are_our_trainers(objective):
    ours = trainer(objective)
    batch = batch_of(ours.policy, sample(ours.policy))
    model = ours.policy.model
    probe = RoutingProbe(model)
    old_logp_BT = log_probs(model, batch)
    old_experts_BSLK = record(probe, model, batch)
    perturb(ours.policy, 0.02)

    step = StepProbe(objective)
    logp_BT = log_probs(model, batch)
    experts_BSLK = record(probe, model, batch)
    response_BS = response_mask(batch)
    for rows in (slice(0, 4), slice(4, 5), slice(5, None)):
        step.add_logprobs(
            logp_BT[rows],
            old_logp_BT[rows],
            batch.adv_BT[rows],
            batch.mask_BT[rows],
            update_number=2,
        )
        # the passes differ in their padding
        step.add_routing(
            torch.nn.functional.pad(experts_BSLK[rows], (0, 0, 0, 0, 3, 2), value=-1),
            old_experts_BSLK[rows],
            torch.nn.functional.pad(response_BS[rows], (3, 2)),
            probe.num_experts,
            update_number=2,
            old_response_BS=response_BS[rows],
        )
    measured = step.result()

    accumulator = MetricAccumulator()
    every_row_B = torch.ones(len(batch), dtype=torch.bool)
    ours.update(batch, every_row_B, 2, accumulator)
    expected = accumulator.result()
    assert {"clip/token_active", "ratio/ess_token", "routing/consistency"} <= measured.keys()
    assert measured.keys() <= expected.keys()
    assert 0 < measured["clip/token_active"] < 1 and 0 < measured["routing/consistency"] < 1
    for name, value in measured.items():
        assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    clips = clip_shares(logp_BT, old_logp_BT, batch.adv_BT, batch.mask_BT, objective)
    ratios = ratio_statistics(logp_BT, old_logp_BT, batch.mask_BT)
    for name, value in {**clips, **ratios}.items():
        assert value == pytest.approx(measured[name], rel=1e-6, abs=1e-9), name


def test_hand_numbers():
    """Two responses of two tokens and of one. The ratios are 2, 1 and 1/2, so s is sqrt(2) and 1/2."""
    logp_BT = torch.tensor([[math.log(2), 0.0], [math.log(0.5), NAN]])
    old_logp_BT = torch.tensor([[0.0, 0.0], [0.0, NAN]])
    mask_BT = torch.tensor([[1, 1], [1, 0]])
    advantages = torch.tensor([1.0, 1.0])
    token = clip_shares(logp_BT, old_logp_BT, advantages, mask_BT, GRPO())
    assert token["clip/token_active"] == pytest.approx(1 / 3)  # 2 > 1.27 with A > 0
    assert token["clip/token_outside"] == pytest.approx(2 / 3)
    assert token["clip/sequence_active"] == pytest.approx(0.25)
    sequence = clip_shares(logp_BT, old_logp_BT, -advantages, mask_BT, GSPO())
    assert sequence["clip/token_active"] == pytest.approx(1 / 3)  # 1/2 < 1 with A < 0
    assert sequence["clip/sequence_active"] == pytest.approx(0.5)
    ratios = ratio_statistics(logp_BT, old_logp_BT, mask_BT)
    assert ratios["ratio/token_mean"] == pytest.approx(3.5 / 3)
    assert ratios["ratio/ess_token"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert ratios["ratio/sequence_max"] == pytest.approx(math.sqrt(2))
    assert ratios["ratio/sequence_min"] == pytest.approx(0.5)
    assert ratios["kl/old_k1"] == pytest.approx(0, abs=1e-7)
    floor = rounding_floor(logp_BT, old_logp_BT, mask_BT, GSPO())
    assert floor["ratio/floor_sequence_abs"] == pytest.approx(0.75 * math.log(2))
    assert floor["ratio/floor_of_range"] == pytest.approx(0.75 * math.log(2) / 3e-4)


def test_the_first_update_measures_the_rounding_if_there_was_an_old_pass():
    logp_BT = torch.zeros(1, 2)
    mask_BT = torch.ones(1, 2)
    advantages = torch.ones(1)
    step = StepProbe(GSPO())
    assert step.is_empty
    step.add_logprobs(logp_BT + 1e-6, logp_BT, advantages, mask_BT, update_number=1)
    assert step.result()["ratio/floor_sequence_abs"] == pytest.approx(1e-6)
    step = StepProbe(GSPO())
    step.add_logprobs(logp_BT, None, advantages, mask_BT, update_number=1)
    metrics = step.result()
    assert metrics["ratio/token_mean"] == 1 and metrics["clip/token_active"] == 0
    assert "ratio/floor_sequence_abs" not in metrics
    step = StepProbe(None)
    step.add_logprobs(logp_BT, None, advantages, mask_BT, update_number=1)
    assert not any(name.startswith("clip/") for name in step.result())


def test_masked_rows_and_nan_in_padding_change_nothing():
    g = torch.Generator().manual_seed(0)
    logp_BT = torch.randn(3, 4, generator=g)
    old_logp_BT = torch.randn(3, 4, generator=g)
    mask_BT = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    advantages = torch.tensor([1.0, -1.0, NAN])
    for hole in (NAN, math.inf, -math.inf):
        dirty_BT = torch.where(mask_BT.bool(), logp_BT, hole)
        dirty_old_BT = torch.where(mask_BT.bool(), old_logp_BT, hole)
        dirty = clip_shares(dirty_BT, dirty_old_BT, advantages, mask_BT, GRPO())
        dirty |= ratio_statistics(dirty_BT, dirty_old_BT, mask_BT)
        clean = clip_shares(logp_BT[:2], old_logp_BT[:2], advantages[:2], mask_BT[:2], GRPO())
        clean |= ratio_statistics(logp_BT[:2], old_logp_BT[:2], mask_BT[:2])
        assert dirty == clean
        assert all(math.isfinite(value) for value in dirty.values())
    nothing_BT = torch.zeros(3, 4)
    assert clip_shares(logp_BT, old_logp_BT, advantages, nothing_BT, GSPO()) == {}
    assert ratio_statistics(logp_BT, old_logp_BT, nothing_BT) == {}
    assert rounding_floor(logp_BT, old_logp_BT, nothing_BT, GSPO()) == {}


@pytest.mark.parametrize(
    ("logp", "old_logp", "advantages", "mask"),
    [
        ((3, 4), (3, 5), (3,), (3, 4)),
        ((3, 4), (3, 4), (3,), (3, 5)),
        ((3, 4), (3, 4), (4,), (3, 4)),
        ((3, 4), (3, 4), (1, 4), (3, 4)),
        ((4,), (4,), (4,), (4,)),
    ],
)
def test_shapes_that_differ_are_refused(logp, old_logp, advantages, mask):
    arguments = [torch.zeros(shape) for shape in (logp, old_logp, advantages, mask)]
    with pytest.raises(ValueError, match=r"the shapes do not agree: logp \["):
        clip_shares(*arguments, GRPO())


def test_objectives_that_need_more_than_these_log_probs_are_refused():
    zeros_BT = torch.zeros(2, 2)
    batch = (zeros_BT, zeros_BT, zeros_BT, torch.ones(2, 2))
    for measure in (StepProbe, partial(clip_shares, *batch)):
        with pytest.raises(ValueError, match="objective=dppo reads log-probs of the engine"):
            measure(DPPO())
    # its range is that of the whole mini-batch, so only a whole one can be measured
    with pytest.raises(ValueError, match="objective=p3o: it clips by a statistic"):
        StepProbe(P3O())
    assert clip_shares(*batch, P3O())["clip/token_active"] == 0


def test_half_precision_is_refused():
    zeros_BT = torch.zeros(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="log-probs must be float32 or better"):
        ratio_statistics(zeros_BT, zeros_BT, torch.ones(2, 2))


@pytest.mark.slow
def test_the_probe_needs_torch_alone():
    code = (
        "import sys, gspo.probe; heavy = {'transformers', 'hydra', 'omegaconf', 'wandb', 'trl'};"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
