"""The corrections of 2026, by hand-worked numbers, at their edges, and cut into micro-batches."""

import math
from dataclasses import replace

import pytest
import torch

from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.corrections import TIS
from gspo.algorithm.masks import CORRECTIONS, M2PO, OPSM, KPop, RhoMask, binary_kl
from gspo.algorithm.objectives import CTPO, GRPO, GSPO, P3O, VESPO, GSPOTurn, LossInputs
from gspo.algorithm.objectives.sequence import turn_indices
from refusals import refuses

LOG2 = math.log(2)


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def given(logp, old, adv, mask=None, engine=None) -> LossInputs:
    logp_BT = tensor(logp)
    mask_BT = torch.ones_like(logp_BT, dtype=torch.bool) if mask is None else torch.tensor(mask)
    adv_BT = tensor(adv)
    if adv_BT.ndim == 1:
        adv_BT = adv_BT[:, None].expand_as(logp_BT)
    engine_BT = None if engine is None else tensor(engine)
    return LossInputs(logp_BT.requires_grad_(), tensor(old), adv_BT, mask_BT == 1, engine_BT)


# ---- OPSM
# ------------------------------------------------------------------------------------------------


def test_opsm_drops_negative_responses_that_became_unlikely():
    # mean(q - l) is 0.6, 0.6 with A > 0, 0.6 with A = 0, 0.4, -0.6
    fall = [[0.2, 1.0], [0.6, 0.6], [0.6, 0.6], [0.4, 0.4], [-0.6, -0.6]]
    inputs = given(
        logp=[[-1 - x for x in row] for row in fall],
        old=[[0.0, 0.0]] * 5,
        adv=[-1.0, 1.0, 0.0, -1.0, -1.0],
        engine=[[-1.0, -1.0]] * 5,
    )
    weights = OPSM(delta=0.5).loss_weights(inputs)
    assert weights.tolist() == [[0, 0], [1, 1], [1, 1], [1, 1], [1, 1]]
    # against the old policy every response fell by more than 1
    assert OPSM(delta=0.5, against="old").loss_weights(inputs).tolist() == [
        [0, 0], [1, 1], [1, 1], [0, 0], [1, 1],
    ]  # fmt: skip


def test_opsm_reads_the_mask_alone_and_keeps_a_response_without_tokens():
    nan = math.nan
    inputs = given(
        logp=[[-3.0, nan, -1.0], [nan, nan, nan]],
        old=[[-1.0, nan, -1.0], [nan, nan, nan]],
        adv=[-1.0, -1.0],
        mask=[[1, 0, 1], [0, 0, 0]],
        engine=[[-1.0, nan, -1.0], [nan, nan, nan]],
    )
    assert OPSM(delta=0.9).loss_weights(inputs).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert OPSM(delta=1.1).loss_weights(inputs).tolist() == [[1, 0, 1], [0, 0, 0]]


def test_opsm_needs_the_engine_unless_it_compares_with_the_old_policy():
    inputs = given([[-1.0]], [[-1.0]], [-1.0])
    assert OPSM(against="old").loss_weights(inputs).tolist() == [[1.0]]
    with refuses("correction", "opsm", "engine_logp_BT is missing"):
        OPSM().loss_weights(inputs)
    with refuses("correction", "rho", "engine_logp_BT is missing"):
        RhoMask(mask_high=2.0).loss_weights(inputs)


# ---- M2PO
# ------------------------------------------------------------------------------------------------


def reduced(m, threshold, mask=None) -> list:
    m_BT = tensor(m)
    mask_BT = torch.ones_like(m_BT, dtype=torch.bool) if mask is None else torch.tensor(mask) == 1
    return M2PO(threshold=threshold).reduced_mask(m_BT, torch.zeros_like(m_BT), mask_BT).tolist()


def test_m2po_removes_the_fewest_tokens_the_largest_first():
    # squares .01, .04, .09, .16: means of the smallest 1, 2, 3, 4: .01, .025, .0467, .075
    m = [[0.1, -0.3], [0.4, -0.2]]
    assert reduced(m, 0.04) == [[True, False], [False, True]]
    assert reduced(m, 0.05) == [[True, True], [False, True]]
    assert reduced(m, 0.0749) == [[True, True], [False, True]]
    assert reduced(m, 0.0751) == [[True, True], [True, True]]
    assert reduced(m, 0.02) == [[True, False], [False, False]]
    # no number of tokens suffices: the smallest stays
    assert reduced(m, 1e-6) == [[True, False], [False, False]]


def test_m2po_reads_the_mask_alone():
    nan = math.nan
    assert reduced([[0.1, nan, 5.0]], 0.1, [[1, 0, 1]]) == [[True, False, False]]
    assert reduced([[nan, 5.0]], 0.1, [[0, 0]]) == [[False, False]]
    assert reduced([[5.0]], 0.1) == [[True]]


def test_m2po_of_equal_tokens_keeps_all_or_one():
    assert reduced([[0.1, 0.1, -0.1]], 0.011) == [[True, True, True]]
    assert reduced([[0.1, 0.1, -0.1]], 0.009) == [[False, False, True]]


def test_m2po_of_a_mini_batch_is_not_that_of_its_micro_batches():
    """The reason why the trainer computes it over the whole mini-batch."""
    m = [[0.1, 0.1], [0.3, 0.3]]
    assert reduced(m, 0.06) == [[True, True], [True, True]]
    assert [reduced([row], 0.06)[0] for row in m] == [[True, True], [False, True]]


# ---- KPop
# ------------------------------------------------------------------------------------------------


def test_the_binary_divergences_are_those_of_the_documentation():
    p, q = tensor([[0.9, 0.5, 0.99, 0.1]]).log(), tensor([[0.05, 0.01, 0.5, 0.001]]).log()
    mask = torch.ones(1, 4, dtype=torch.bool)
    largest = torch.maximum(binary_kl(p, q, mask), binary_kl(q, p, mask))
    assert largest[0].tolist() == pytest.approx([2.38, 1.61, 1.61, 0.37], abs=6e-3)
    weights = KPop(high=2.0)(p, q, mask)
    assert weights[0].tolist() == pytest.approx([0, 50, 1.98, 100])


def test_kpop_is_finite_at_certain_and_impossible_tokens():
    p, q = torch.tensor([[0.0, -200.0, 0.0]]), torch.tensor([[-200.0, 0.0, 0.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert binary_kl(p, q, mask).isfinite().all()
    assert KPop()(p, q, mask).tolist() == [[0, 0, 1]]


# ---- open-instruct's rho
# ------------------------------------------------------------------------------------------------


def test_total_variation_masks_only_tokens_that_move_further_apart():
    # |rho - 1| is 1, 0.5 and 1.5: the mean is 1
    inputs = given(
        logp=[[0.0] * 3] * 2,
        old=[[LOG2, -LOG2, math.log(2.5)]] * 2,
        adv=[1.0, -1.0],
        engine=[[0.0] * 3] * 2,
    )
    mask = RhoMask(measure="tv", mask_high=0.99)
    torch.testing.assert_close(mask.loss_weights(inputs), tensor([[0, 0.5, 0], [2, 0, 2]]))
    above = replace(mask, mask_high=1.01)
    torch.testing.assert_close(above.loss_weights(inputs), tensor([[2, 0.5, 2]] * 2))
    # the lower bound masks what is too close
    close = replace(mask, mask_high=None, mask_low=1.01)
    torch.testing.assert_close(close.loss_weights(inputs), tensor([[0, 0.5, 0], [2, 0, 2]]))
    # the level changes the weight and not the measure
    mean = 2.5 ** (1 / 3)
    geometric = replace(mask, level="geometric").loss_weights(inputs)
    torch.testing.assert_close(geometric, tensor([[0, mean, 0], [mean, 0, mean]]))


def test_the_bound_of_open_instruct_does_not_bind_in_a_healthy_run():
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(50, 400, generator=generator, dtype=torch.float64)
    mask = torch.ones_like(m, dtype=torch.bool)
    zeros = torch.zeros_like(m)
    for spread, mean in ((0.2, 0.16), (0.5, 0.43), (1.0, 1.1)):
        assert float(((spread * m).exp() - 1).abs().mean()) == pytest.approx(mean, abs=0.03)
        inputs = LossInputs(zeros, spread * m, torch.ones_like(m), mask, zeros)
        weights = RhoMask(measure="tv", mask_high=1.0 + 1e-6).loss_weights(inputs)
        assert bool((weights == 0).any()) == (spread == 1.0)


def test_sequence_masks_by_the_geometric_mean():
    inputs = given(
        logp=[[0.0] * 2] * 3,
        old=[[LOG2, LOG2], [LOG2, -LOG2], [-LOG2, -LOG2]],
        adv=[1.0] * 3,
        engine=[[0.0] * 2] * 3,
    )
    mask = RhoMask(level="geometric", mask_low=0.9, mask_high=1.3)
    torch.testing.assert_close(mask.loss_weights(inputs), tensor([[0, 0], [1, 1], [0, 0]]))


# ---- all of them
# ------------------------------------------------------------------------------------------------


def random_inputs(seed: int, rows: int = 6, width: int = 5) -> LossInputs:
    g = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(rows, width, generator=g, dtype=torch.float64)

    old = -2 + normal(0.3)
    mask = torch.rand(rows, width, generator=g) < 0.7
    mask[1] = False
    adv = torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, width)
    return LossInputs((old + normal(0.3)).requires_grad_(), old, adv, mask, old + normal(0.3))


def weights_of(correction, inputs: LossInputs) -> torch.Tensor:
    if correction.acts == "loss":
        return correction.loss_weights(inputs)
    tensors = inputs.old_logp_BT, inputs.engine_logp_BT, inputs.mask_BT
    if correction.acts == "minibatch":
        return correction.reduced_mask(*tensors).double()
    return correction(*tensors)


MADE = [
    KPop(high=0.01), M2PO(), OPSM(delta=0.1), OPSM(delta=0.1, against="old"),
    RhoMask(mask_low=0.7, mask_high=1.4), RhoMask(level="geometric", mask_low=0.9, mask_high=1.1),
    RhoMask(measure="tv", mask_high=0.2),
]  # fmt: skip


def test_every_correction_of_2026_is_tried():
    assert {type(correction) for correction in MADE} == set(CORRECTIONS[5:])


@pytest.mark.parametrize("correction", MADE, ids=str)
def test_weights_have_no_gradient_do_not_see_padding_and_mask_some_tokens(correction):
    inputs = random_inputs(1)
    weights = weights_of(correction, inputs)
    mask = inputs.mask_BT
    assert not weights.requires_grad and not weights[~mask].any()
    assert 0 < int((weights[mask] == 0).sum()) < int(mask.sum())
    padded = {
        name: torch.where(mask, getattr(inputs, name).detach(), math.nan)
        for name in ("logp_BT", "old_logp_BT", "adv_BT", "engine_logp_BT")
    }
    assert torch.equal(weights_of(correction, replace(inputs, **padded)), weights)
    # the same tensors in float32
    single = {
        name: getattr(inputs, name).detach().float()
        for name in ("logp_BT", "old_logp_BT", "adv_BT", "engine_logp_BT")
    }
    torch.testing.assert_close(
        weights_of(correction, replace(inputs, **single)).double(), weights, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("correction", [c for c in MADE if not isinstance(c, M2PO)], ids=str)
def test_weights_do_not_depend_on_the_micro_batch(correction):
    inputs = random_inputs(1)
    whole = weights_of(correction, inputs)
    for row in range(len(whole)):
        names = ("logp_BT", "old_logp_BT", "adv_BT", "mask_BT", "engine_logp_BT")
        of_row = {name: getattr(inputs, name)[row : row + 1] for name in names}
        assert torch.equal(weights_of(correction, replace(inputs, **of_row)), whole[row : row + 1])


# ---- hand-worked numbers of the objectives
# ------------------------------------------------------------------------------------------------


def test_vespo_gates_by_the_product_of_the_ratios():
    # W = 2 in every row
    inputs = given([[LOG2, 0.0]] * 3, [[0.0, 0.0]] * 3, [1.0, -1.0, 0.0])
    phi = VESPO()(inputs).weight_BT[:, 0].tolist()
    assert phi == pytest.approx([4 * math.exp(-3), 8 * math.exp(-2), 4 * math.exp(-3)])
    assert phi[0] == pytest.approx(0.199, abs=1e-3)
    # the peaks, at W = k / lambda
    at_peak = given([[math.log(2 / 3)], [math.log(3 / 2)]], [[0.0], [0.0]], [1.0, -1.0])
    assert VESPO()(at_peak).weight_BT[:, 0].tolist() == pytest.approx([1.208, 1.242], abs=1e-3)


def test_vespo_takes_the_engines_weights_into_the_product_once():
    inputs = given([[0.0, 0.0]], [[0.0, 0.0]], [1.0])
    weighted = replace(inputs, correction_BT=tensor([[2.0, 1.0]]))
    assert VESPO()(weighted).weight_BT[0, 0].item() == pytest.approx(4 * math.exp(-3))
    # a token of weight 0 drops its whole response
    dropped = replace(inputs, correction_BT=tensor([[0.0, 1.0]]))
    assert VESPO()(dropped).weight_BT[0, 0].item() == pytest.approx(2e-15, rel=0.05)
    assert VESPO()(replace(dropped, adv_BT=-dropped.adv_BT)).weight_BT[0, 0] < 1e-23


def test_vespos_gate_falls_with_the_length_at_the_same_noise():
    generator = torch.Generator().manual_seed(0)
    shares = []
    for length in (50, 500):
        variance = 0.008
        d = variance**0.5 * torch.randn(400, length, generator=generator, dtype=torch.float64)
        d = d - variance / 2
        zeros = torch.zeros_like(d)
        inputs = LossInputs(d, zeros, torch.ones_like(d), torch.ones_like(d, dtype=torch.bool))
        shares.append(float((VESPO()(inputs).weight_BT[:, 0] < 0.1).double().mean()))
    # the measured shares are 5 % and 48 %
    assert shares == pytest.approx([0.05, 0.48], abs=0.06)


def test_the_ratio_of_ctpo_is_that_of_the_prefix():
    inputs = given([[LOG2, 9.0, -LOG2, LOG2]], [[0.0, 0.0, 0.0, 0.0]], [1.0], mask=[[1, 0, 1, 1]])
    ratio, bounded, position = CTPO().prefix_ratio(inputs)
    assert ratio[0, [0, 2, 3]].tolist() == pytest.approx([2, 1, 2])
    assert position[0, [0, 2, 3]].tolist() == [1, 2, 3] and not bounded.any()
    ratio, _, _ = CTPO(prefix="geometric").prefix_ratio(inputs)
    assert ratio[0, [0, 2, 3]].tolist() == pytest.approx([2, 1, 2 ** (1 / 3)])
    # one large token clips the whole suffix
    far = given([[30.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]], [1.0])
    ratio, bounded, _ = CTPO().prefix_ratio(far)
    assert ratio[0].tolist() == pytest.approx([math.exp(10)] * 3) and bounded.all()


def test_p3o_caps_by_the_effective_sample_size():
    # w = 1, 3: ESS = 16 / (2 * 10)
    inputs = given([[0.0, math.log(3)]], [[0.0, 0.0]], [1.0])
    objective = P3O()
    assert float(objective.statistic(inputs)) == pytest.approx(0.8)
    outputs = objective(inputs)
    assert outputs.weight_BT[0].tolist() == pytest.approx([0.8, 0.8])
    k3 = math.log(3) + 1 / 3 - 1
    assert outputs.loss_BT[0].tolist() == pytest.approx([0, -0.8 * math.log(3) + 0.2 * k3])
    # of the whole mini-batch, if it is given
    given_ess = objective(replace(inputs, statistic=torch.tensor(1.0)))
    assert given_ess.weight_BT[0].tolist() == pytest.approx([1, 1])
    empty = replace(inputs, mask_BT=torch.zeros(1, 2, dtype=torch.bool))
    assert float(objective.statistic(empty)) == 1


def test_turns_are_unbroken_runs_of_the_mask():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1, 1], [0] * 8]) == 1
    assert turn_indices(mask)[mask].tolist() == [0, 0, 1, 2] + [0] * 8


@pytest.mark.parametrize(
    "aggregation", [Aggregation("seq-mean-token-mean"), Aggregation("token-mean")], ids=str
)
def test_a_ratio_per_turn_is_gspo_on_one_turn_and_on_turns_of_one_token_grpo(aggregation):
    inputs = random_inputs(2)
    lengths = torch.tensor([5, 0, 3, 1, 4, 2])[:, None]
    one_turn = replace(inputs, mask_BT=torch.arange(5) < lengths)
    single = replace(inputs, mask_BT=torch.tensor([1, 0, 1, 0, 1]) == torch.ones(6, 1))
    band = {"clip_low": 0.1, "clip_high": 0.12, "dual_clip": 1.3}
    for case, other in ((one_turn, GSPO(**band)), (single, GRPO(**band))):
        results = []
        for objective in (GSPOTurn(**band), other):
            outputs = objective(case)
            loss = aggregation(outputs.loss_BT, case.mask_BT, Totals.of(case.mask_BT))
            (gradient,) = torch.autograd.grad(loss, case.logp_BT)
            results.append((loss.item(), gradient, outputs.is_clipped_BT & case.mask_BT))
        (loss, gradient, active), (other_loss, other_gradient, other_active) = results
        assert loss == pytest.approx(other_loss, abs=1e-14) and active.any()
        torch.testing.assert_close(gradient, other_gradient, rtol=1e-12, atol=1e-15)
        assert torch.equal(active, other_active)


def test_tis_is_a_rho_mask_that_masks_nothing():
    inputs = random_inputs(3)
    ours = RhoMask(mask_low=1e-9).loss_weights(inputs)
    tis = TIS()(inputs.old_logp_BT, inputs.engine_logp_BT, inputs.mask_BT)
    torch.testing.assert_close(ours, tis, rtol=1e-14, atol=0)
