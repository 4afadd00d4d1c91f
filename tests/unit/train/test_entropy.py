"""The entropy bonus: its gradient, the controller by hand, and what the trainer makes of both."""

import math
from dataclasses import replace

import pytest
import torch

from builders import batch_of, recorded_gradients, sample, small_policy
from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.entropy import EntropyCoefficient
from gspo.algorithm.objectives import GSPO
from gspo.distributed.ranks import Ranks
from gspo.train.accumulator import MetricAccumulator
from gspo.train.checkpoint import TrainState
from gspo.train.loss_terms import EntropyTerm, TermInputs
from gspo.train.settings import TrainerSettings
from trainers import steps, trainer


def test_the_controller_by_hand():
    c = EntropyCoefficient(0.0, target=0.2, delta=0.005, least=0.0, most=0.012)
    seen = []
    for entropy in (0.5, 0.2, 0.1, 0.1, 0.19, 0.21, 0.3, 0.1):
        seen.append(c.acting)
        c.update(entropy)
    # up at the target and below, down above it, between 0 and 0.012; nothing acts after an entropy
    # above the target
    assert seen == pytest.approx([0.0, 0.0, 0.005, 0.010, 0.012, 0.012, 0.0, 0.0])
    assert (c.value, c.measured) == (pytest.approx(0.007), 0.1)
    c.update(math.nan)
    assert (c.value, c.measured) == (pytest.approx(0.007), 0.1)


def test_a_fixed_coefficient_stays():
    c = EntropyCoefficient(0.01)
    c.update(0.001)
    c.update(9.0)
    assert c.acting == 0.01
    assert TrainerSettings().entropy_coefficient() is None
    assert TrainerSettings(entropy_coef=0.01).entropy_coefficient() == EntropyCoefficient(0.01)
    held = TrainerSettings(entropy_target=0.3, entropy_coef_delta=0.1, entropy_coef_max=0.5)
    assert held.entropy_coefficient() == EntropyCoefficient(0.0, 0.3, 0.1, 0.0, 0.5)


def test_the_term_by_hand_and_the_entropy_of_the_whole_mini_batch():
    """Two micro-batches of one update; masked entries are NaN."""
    policy = small_policy()
    batch = batch_of(policy, sample(policy))
    output = policy.forward(batch)
    mask_BT = torch.tensor([[True, True, True], [True, False, False]])
    entropy_BT = torch.tensor([[1.0, 2.0, 3.0], [0.5, math.nan, math.nan]])
    term = EntropyTerm(
        EntropyCoefficient(0.1, target=2.0, delta=0.01), Aggregation("seq-mean-token-mean")
    )
    totals, accumulator, loss = Totals.of(mask_BT), MetricAccumulator(), 0.0
    for row in (slice(0, 1), slice(1, 2)):
        rows_output = replace(output, entropy_BT=entropy_BT[row])
        rows_batch = replace(batch, mask_BT=mask_BT[row])
        loss += term(TermInputs(rows_output, rows_batch, totals, 1, accumulator))
    assert float(loss) == pytest.approx(-0.1 * (2.0 + 0.5) / 2)
    term.end_update(totals, Ranks())
    assert term.coefficient.measured == pytest.approx(6.5 / 4), (
        "the mean over tokens, whatever the aggregation"
    )
    assert term.coefficient.value == pytest.approx(0.11)
    assert accumulator.result()["policy/entropy_coef"] == pytest.approx(0.1)
    term.end_update(totals, Ranks())
    assert term.coefficient.measured == 0, "the sum began anew"
    with pytest.raises(ValueError, match="entropy_BT is missing"):
        term(TermInputs(replace(output, entropy_BT=None), batch, totals, 1, accumulator))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_its_gradient_is_that_of_a_naive_softmax_over_the_whole_vocabulary(temperature):
    """Through our own forward and through the model's own, with rows of different lengths and a
    temperature.
    """
    policy = small_policy()
    batch = batch_of(policy, sample(policy))
    policy.temperature = temperature
    policy.enable_entropy_gradient()

    def gradients(entropy_BT):
        policy.model.zero_grad()
        Aggregation("token-mean")(entropy_BT, batch.mask_BT, Totals.of(batch.mask_BT)).backward()
        return [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]

    def naive():
        logits_BSV = policy.model(
            input_ids=batch.tokens_BS,
            attention_mask=batch.attention_BS.long(),
            position_ids=(batch.attention_BS.cumsum(-1) - 1).clamp(min=0),
        ).logits
        logp_BTV = (logits_BSV[:, batch.prompt_width - 1 : -1] / temperature).log_softmax(-1)
        return -(logp_BTV.exp() * logp_BTV).sum(-1)

    expected = gradients(naive())
    assert max(float(g.abs().max()) for g in expected) > 1e-4
    for network in (policy.network, None):
        policy.network = network
        for ours, theirs in zip(gradients(policy.forward(batch).entropy_BT), expected, strict=True):
            torch.testing.assert_close(
                ours, theirs, atol=2e-5 * float(theirs.abs().max()) + 1e-8, rtol=1e-3
            )


def test_without_bonus_the_entropy_has_no_gradient():
    policy = small_policy()
    batch = batch_of(policy, sample(policy))
    for network in (policy.network, None):
        policy.network = network
        assert not policy.forward(batch).entropy_BT.requires_grad


@pytest.mark.slow
def test_its_gradient_does_not_depend_on_the_micro_batches_and_goes_through_checkpointing():
    found = []
    for size, checkpointing in ((32, False), (8, False), (3, True)):
        t = trainer(GSPO(), lr=0.0, minibatches=1, micro_batch_size=size, entropy_coef=0.5)
        t.policy.network.checkpointing = checkpointing
        with recorded_gradients() as given:
            metrics = steps(t, 1)[0]
        found.append((given[0], metrics["policy/entropy"], metrics["optim/loss"]))
    for gradients, entropy, loss in found[1:]:
        assert (entropy, loss) == pytest.approx(found[0][1:], rel=1e-5)
        for a, b in zip(gradients, found[0][0], strict=True):
            torch.testing.assert_close(a, b, atol=2e-5 * float(b.abs().max()) + 1e-9, rtol=1e-3)


@pytest.mark.slow
def test_the_entropy_rises_with_a_bonus_and_is_held_at_a_target():
    free, raised = (
        steps(trainer(GSPO(), lr=3e-3, entropy_coef=coef), 6)[-1]["policy/entropy"]
        for coef in (0.0, 1.0)
    )
    assert raised > free + 0.05
    t = trainer(GSPO(), lr=3e-3, entropy_coef=1.0, entropy_target=free - 1.0)
    first, *later = steps(t, 3)
    assert first["policy/entropy_coef"] == pytest.approx(0.25, abs=0.05), (
        "the first update of four, of nearly equal size"
    )
    assert all(m["policy/entropy_coef"] == 0 for m in later), "the entropy is above the target"
    assert t.entropy.coefficient.value == pytest.approx(1.0 - 12 * 0.005)


def test_its_state_is_kept_and_restored():
    settings = {"entropy_coef": 0.1, "entropy_target": 99.0}
    t = trainer(GSPO(), **settings)
    steps(t, 1)
    assert t.state.entropy_coef == [pytest.approx(0.12), t.entropy.coefficient.measured]
    again = trainer(GSPO(), **settings)
    again.restore(TrainState(entropy_coef=list(t.state.entropy_coef)))
    assert again.entropy.coefficient == t.entropy.coefficient
