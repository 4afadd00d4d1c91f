"""Training on the kept tokens: ratios, clip fractions, records, LoRA and recomputed layers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from builders import batch_of, small_policy
from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.corrections import TIS, Rejection
from gspo.algorithm.kl import KLInLoss
from gspo.algorithm.masks import M2PO, RhoMask
from gspo.algorithm.objectives import GRPO, LossInputs
from gspo.data.batch import KeptSets, TrainBatch
from gspo.data.step_record_files import find_record, read_record, record_file, write_record
from gspo.io.untrusted import Unreadable
from gspo.model.forward.outputs import PolicyOutput
from gspo.model.policy import Policy
from gspo.model.settings import LoraSettings, TinyDense
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.settings import RolloutSettings
from gspo.train import diagnostics
from gspo.train.accumulator import MetricAccumulator
from gspo.train.loss_terms import PolicyTerm, TermInputs
from gspo.train.measured_pass import reduce_minibatch
from gspo.train.recorder import StepRecorder
from step_records import step_record
from trainers import FirstCharacter, steps, trainer

DENSE = TinyDense(hidden=32, layers=2, heads=2, width=48)
MEAN = Aggregation("seq-mean-token-mean")
SIZES = {"prompts_per_step": 8, "group_size": 4, "max_new_tokens": 10, "min_p": 0.4}
KEPT = RolloutSettings(**SIZES, keep_mask=True)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4, alpha=8)], ids=["whole", "lora"])
def test_a_run_whose_ratios_are_of_the_truncated_distribution(lora):
    """The correction's weights are 1, and so are the first ratios; a second step still is so, after
    four updates. KL to the reference is 0 at the start, because both have the same kept tokens."""
    parts = {"correction": TIS(), "kl": KLInLoss(coef=0.1, aggregation=MEAN)}
    t = trainer(GRPO(), model=DENSE, rollout=KEPT, parts=parts, lora=lora, entropy_coef=0.01)
    first, second = steps(t, 2)
    for row in (first, second):
        assert row["mismatch/weight_token_mean"] == pytest.approx(1, abs=1e-5)
        assert row["mismatch/logp_abs_max"] < 2e-5
        assert 0.02 < row["sampling/kept_one"] < 0.9 and row["sampling/kept_max"] > 5
        assert 1 < row["sampling/kept_mean"] < row["sampling/kept_max"]
    assert first["kl/ref_k3"] == pytest.approx(0, abs=1e-9) and second["kl/ref_k3"] > 0
    whole = steps(trainer(GRPO(), model=DENSE, rollout=RolloutSettings(**SIZES)), 1)[0]
    assert "sampling/kept_mean" not in whole
    # fewer tokens: less entropy, which is why the two cannot be compared
    assert first["policy/entropy"] < 0.8 * whole["policy/entropy"]
    assert whole["reward/mean"] == first["reward/mean"], "the tokens are the same"


def kept_batch(policy: Policy, **rules) -> TrainBatch:
    task = FirstCharacter()
    problems = [task.problem(1, "train", i) for i in range(4)]
    sampling = Sampling(1.0, 8, keep_mask=True, **rules)
    request = SamplingRequest(problems, 3, sampling, (1, "kept"))
    groups = LocalEngine(policy).generate(request)
    return batch_of(policy, [r for group in groups for r in group])


def test_greedy_lists_leave_nothing_to_learn():
    """With a single kept token everywhere the gradient is exactly 0, and nothing can be clipped."""
    policy = small_policy(DENSE)
    batch = kept_batch(policy, top_k=1)
    assert (batch.kept.counts_BT[batch.mask_BT] == 1).all() and not batch.choice_BT.any()
    output = policy.forward(batch)
    assert (output.logp_BT == 0).all() and (batch.engine_logp_BT == 0).all()
    (batch.adv_BT * output.logp_BT).sum().backward()
    assert all((p.grad == 0).all() for p in policy.model.parameters() if p.grad is not None)


def test_recomputed_layers_give_the_same_gradient():
    gradients = []
    for checkpointing in (False, True):
        policy = small_policy(DENSE)
        policy = Policy(policy.model, policy.tokenizer, checkpointing=checkpointing)
        batch = kept_batch(policy, top_p=0.7)
        parts = []
        for micro in batch.split(5):
            logp_BT = policy.forward(micro).logp_BT
            parts.append((micro.adv_BT * logp_BT)[micro.mask_BT].sum())
        sum(parts).backward()
        gradients.append([p.grad for p in policy.model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_clip_fractions_are_over_tokens_with_a_choice():
    """Of four tokens two have a choice, and one of these is clipped: a half, not a quarter."""
    mask_BT = torch.ones(1, 4, dtype=torch.bool)
    old_BT = torch.full((1, 4), -2.0)
    inputs = LossInputs(
        logp_BT=old_BT + torch.tensor([[0.0, 0.5, 0.0, 0.0]]),
        old_logp_BT=old_BT,
        adv_BT=torch.ones(1, 4),
        mask_BT=mask_BT,
        engine_logp_BT=old_BT,
        ref_logp_BT=None,
        lengths_B=torch.tensor([4]),
    )
    outputs = GRPO(clip_low=0.2, clip_high=0.2)(inputs)
    shares = []
    for choice_BT in (None, torch.tensor([[False, True, True, False]])):
        accumulator = MetricAccumulator()
        diagnostics.measure_clips(outputs, inputs, 1, accumulator, choice_BT)
        row = accumulator.result()
        shares.append([row["clip/token_active"], row["clip/sequence_active"]])
    assert shares == [[0.25, 0.25], [0.5, 0.5]]


def batch_with_choices() -> TrainBatch:
    """Two responses of four tokens. Two tokens of the first have a choice, none of the second."""
    mask_BT = torch.ones(2, 4, dtype=torch.bool)
    counts_BT = torch.tensor([[1, 3, 0, 1], [1, 1, 1, 1]])
    zeros_BT = torch.zeros(2, 4)
    return TrainBatch(
        tokens_BS=torch.ones(2, 4, dtype=torch.long),
        attention_BS=mask_BT,
        mask_BT=mask_BT,
        sampled_BT=mask_BT,
        prompts_B=torch.arange(2),
        kept=KeptSets(np.zeros(9, np.uint16), torch.zeros_like(counts_BT), counts_BT),
        engine_logp_BT=zeros_BT,
        old_logp_BT=torch.tensor([[0.0, 0.5, 0.1, 0.0], [0.0] * 4]),
        adv_BT=zeros_BT - 1,
    )


def before_the_updates(batch: TrainBatch, accumulator: MetricAccumulator) -> None:
    correction = Rejection(high=1.2)
    weight_BT = correction(batch.old_logp_BT, batch.engine_logp_BT, batch.mask_BT)
    diagnostics.measure_correction(weight_BT, batch.old_logp_BT, batch, accumulator)


def on_the_mini_batch(batch: TrainBatch, accumulator: MetricAccumulator) -> None:
    # the mean is .26 / 8 over all tokens, and .01 / 7 without the largest
    reduce_minibatch(batch, M2PO(threshold=0.01), accumulator)


def in_the_loss(batch: TrainBatch, accumulator: MetricAccumulator) -> None:
    correction = RhoMask(mask_high=1.2)
    term = PolicyTerm(GRPO(), Aggregation("token-mean"), correction)
    output = PolicyOutput(batch.old_logp_BT, None, None)
    term(TermInputs(output, batch, Totals.of(batch.mask_BT), 1, accumulator))


@pytest.mark.parametrize("act", [before_the_updates, on_the_mini_batch, in_the_loss])
def test_drop_rates_are_over_tokens_with_a_choice(act):
    """The mask takes one token of two with a choice: a half, not an eighth. No response goes."""
    accumulator = MetricAccumulator()
    act(batch_with_choices(), accumulator)
    found = accumulator.result()
    assert (found["mismatch/masked"], found["mismatch/sequence_masked"]) == (0.5, 0)


def recorded(run: Path, rollout: RolloutSettings) -> None:
    t = trainer(GRPO(), model=DENSE, rollout=rollout)
    t.recorder = StepRecorder(run, "test", t.policy, {}, t.ranks, every=1)
    steps(t, 1)


def test_a_record_holds_the_kept_tokens_and_has_the_second_version(tmp_path):
    recorded(tmp_path / "kept", KEPT)
    recorded(tmp_path / "whole", RolloutSettings(**SIZES))
    kept = read_record(find_record(tmp_path / "kept", 1))
    whole = read_record(find_record(tmp_path / "whole", 1))
    assert (kept.header.version, whole.header.version) == (2, 1)
    assert whole.kept_counts is None and whole.kept_ids is None
    assert kept.kept_ids.dtype == np.uint16 and kept.kept_counts.sum() == len(kept.kept_ids)
    assert (kept.token_ids == whole.token_ids).all()
    single = kept.kept_counts == 1
    assert single.any() and (kept.updates[0].logp[single[: len(kept.updates[0].logp)]] <= 0).all()
    assert (kept.old_logp[single] == 0).all()


@pytest.mark.parametrize(
    ("counts", "ids", "words"),
    [
        (None, [1], "only one of the arrays"),
        ("ones", "negative", "negative token ID"),
        ("ones", [1], "do not add up"),
        ("ones", "others", "among the kept tokens there"),
    ],
)
def test_records_with_impossible_lists_are_refused(counts, ids, words, tmp_path):
    record = step_record()
    response_ids = [record.prompt_and_response(row)[1] for row in range(len(record))]
    chosen = np.concatenate(response_ids).astype(np.int32)
    named = {"negative": -chosen - 1, "others": chosen + 1}
    kept_counts = np.ones(len(chosen), np.int32) if counts else None
    kept_ids = named[ids] if isinstance(ids, str) else np.array(ids, np.int32)
    path = record_file(tmp_path, 3)
    write_record(path, replace(record, kept_counts=np.ones(len(chosen), np.int32), kept_ids=chosen))
    assert read_record(path).kept_ids.tolist() == chosen.tolist()
    write_record(path, replace(record, kept_counts=kept_counts, kept_ids=kept_ids))
    with pytest.raises(Unreadable, match=words):
        read_record(path)
