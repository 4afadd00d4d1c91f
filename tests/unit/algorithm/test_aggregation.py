"""Aggregations; and what the loss must not depend on, for every objective under every aggregation:
how a batch is cut, its padding, its order, what stands in masked places, precision, and hostile
numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import naive
from gspo.algorithm.aggregation import LENGTH_WEIGHTED, MODES, ROWS, Aggregation, Totals
from gspo.algorithm.objectives import (
    CISPO,
    CTPO,
    CTPOLA,
    DRO,
    GMPO,
    OBJECTIVES,
    P3O,
    VESPO,
    PrimeIPO,
    PrimeRL,
    Reinforce,
)
from gspo.algorithm.objectives.base import RatioObjective
from loss_cases import MEAN, cases, close, inputs, run, settings
from refusals import refuses

ALL = [
    Aggregation("token-mean"),
    *(
        Aggregation(mode, rows)
        for mode in ("seq-mean-token-mean", "seq-mean-token-sum")
        for rows in ROWS
    ),
    *(Aggregation("seq-mean-token-sum-norm", rows, length) for rows in ROWS for length in (7, 0)),
]
aggregations = pytest.mark.parametrize(
    "aggregation", ALL, ids=lambda a: f"{a.mode}-{a.rows}-{a.length}"
)
NO_BOUND = (Reinforce, CISPO)  # they keep their gradient whatever the ratio
# They have other bounds, or a penalty that acts at every ratio.
OWN_BOUNDS = (VESPO, CTPO, CTPOLA, DRO, PrimeRL, PrimeIPO, P3O)
BOUNDED = [
    kind
    for kind in OBJECTIVES
    if issubclass(kind, RatioObjective) and not issubclass(kind, OWN_BOUNDS)
]


def with_an_empty_row(seed: int, scale: float) -> naive.Batch:
    batch = naive.ragged(seed, scale)
    batch.mask[4] = False
    return batch


# ---- the formulas
# ------------------------------------------------------------------------------------------------


def test_all_modes_are_tried():
    assert {a.mode for a in ALL} == set(MODES) and set(LENGTH_WEIGHTED) == set(MODES) - {
        "seq-mean-token-mean"
    }


@aggregations
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_formula_written_naively_with_its_gradient(aggregation, seed):
    mask = with_an_empty_row(seed, 0.3).mask
    loss = np.random.default_rng(seed).standard_normal(mask.shape)
    loss_BT, mask_BT = torch.tensor(loss, requires_grad=True), torch.tensor(mask)
    given = (aggregation.mode, aggregation.rows, aggregation.length or 0)
    ours = aggregation(loss_BT, mask_BT, Totals.of(mask_BT))
    ours.backward()
    assert ours.item() == pytest.approx(naive.aggregate(loss, mask, *given), abs=1e-13)
    # linear: the gradient is what a loss of 1 at one token gives
    for i, t in np.ndindex(mask.shape):
        alone = np.zeros(mask.shape)
        alone[i, t] = 1.0
        assert loss_BT.grad[i, t].item() == pytest.approx(
            naive.aggregate(alone, mask, *given), abs=1e-15
        )


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        # the means of (1, 3) and (8); the third row is empty
        (Aggregation("seq-mean-token-mean"), (2 + 8) / 2),
        (Aggregation("seq-mean-token-mean", "all"), (2 + 8) / 3),
        (Aggregation("seq-mean-token-mean", "one"), 2 + 8),
        (Aggregation("token-mean"), (1 + 3 + 8) / 3),
        (Aggregation("seq-mean-token-sum"), (4 + 8) / 2),
        (Aggregation("seq-mean-token-sum", "all"), (4 + 8) / 3),
        (Aggregation("seq-mean-token-sum", "one"), 4 + 8),
        (Aggregation("seq-mean-token-sum-norm", length=10), (4 + 8) / 2 / 10),
        (Aggregation("seq-mean-token-sum-norm", "all", 10), (4 + 8) / 3 / 10),
        (Aggregation("seq-mean-token-sum-norm", "one", 0), (4 + 8) / 4),  # four columns
    ],
)
def test_three_responses_by_hand(aggregation, expected):
    loss_BT = torch.tensor(
        [[1.0, math.nan, 3.0, 9.0], [8.0, 9.0, 9.0, math.inf], [9.0, 9.0, 9.0, math.nan]]
    )
    mask_BT = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    assert Totals.of(mask_BT) == Totals(sequences=2, rows=3, tokens=3, width=4)
    assert aggregation(loss_BT, mask_BT, Totals.of(mask_BT)).item() == pytest.approx(expected)


@aggregations
def test_a_batch_without_any_token_gives_0(aggregation):
    loss_BT, mask_BT = (
        torch.full((2, 3), math.nan, requires_grad=True),
        torch.zeros(2, 3, dtype=torch.bool),
    )
    loss = aggregation(loss_BT, mask_BT, Totals.of(mask_BT))
    loss.backward()
    assert loss.item() == 0 and loss_BT.grad.abs().max() == 0


@pytest.mark.parametrize(
    "given, refusal",
    [
        ({"mode": "mean"}, ("aggregation.mode", "mean")),
        (
            {"mode": "token-mean", "rows": "valid"},
            ("aggregation.rows", "valid"),
        ),
        (
            {"mode": "token-mean", "rows": "all"},
            ("aggregation.rows", "all", "is not read by"),
        ),
        (
            {"mode": "token-mean", "length": 5},
            ("aggregation.length", 5, "is not read by"),
        ),
        ({"mode": "seq-mean-token-mean", "length": 0}, ("aggregation.length", 0, "is not read")),
        (
            {"mode": "seq-mean-token-sum-norm", "length": -1},
            ("aggregation.length", -1),
        ),
    ],
)
def test_what_makes_no_sense_or_cannot_act_is_refused(given, refusal):
    with refuses(*refusal):
        Aggregation(**given)


@pytest.mark.parametrize("unsettled", [Aggregation(), Aggregation("seq-mean-token-sum-norm")])
def test_an_unsettled_aggregation_does_not_guess(unsettled):
    with refuses("aggregation.mode", unsettled.mode, "does not say what to divide by"):
        unsettled(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), Totals(1, 1, 1, 1))


# ---- every objective under every aggregation
# ---------------------------------------------------------------------


@aggregations
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_nothing_depends_on_the_cut_the_padding_or_the_order(kind, aggregation):
    objective, batch = kind(), with_an_empty_row(3, 0.3)
    loss, gradient, _ = run(objective, batch, aggregation)
    statistic = objective.statistic(inputs(batch))
    assert gradient.abs().max() > 0
    # micro-batches of 5, each as wide as its longest response, normalised by the counts of the
    # whole
    totals, cut_loss, cut_gradient = (
        Totals.of(torch.tensor(batch.mask)),
        0.0,
        torch.zeros_like(gradient),
    )
    for rows in np.split(np.arange(len(batch.mask)), [5, 10]):
        width = 1 + np.flatnonzero(batch.mask[rows].any(0)).max()
        given = inputs(batch.map(lambda x, rows=rows, width=width: x[rows, :width]))
        given = replace(given, statistic=statistic)
        part = aggregation(objective(given).loss_BT, given.mask_BT, totals)
        part.backward()
        cut_loss += part.item()
        cut_gradient[rows, :width] = given.logp_BT.grad
    assert cut_loss == pytest.approx(loss, abs=1e-13)
    close(cut_gradient, gradient)
    # three more columns: nothing changes, but for a loss that is divided by their number
    width = batch.mask.shape[1]
    change = width / (width + 3) if aggregation.length == 0 else 1.0
    wide_loss, wide_gradient, _ = run(
        objective, batch.map(lambda x: np.pad(x, ((0, 0), (0, 3)))), aggregation
    )
    assert wide_loss == pytest.approx(change * loss, abs=1e-13)
    close(wide_gradient[:, :-3], change * gradient)
    # another order of rows
    order = np.random.default_rng(0).permutation(len(batch.mask))
    moved_loss, moved_gradient, _ = run(objective, batch.map(lambda x: x[order]), aggregation)
    assert moved_loss == pytest.approx(loss, abs=1e-13)
    close(moved_gradient, gradient[order])


@cases
def test_what_stands_in_masked_places_changes_nothing_bitwise(objective, scale):
    batch = with_an_empty_row(4, scale)
    mask = torch.tensor(batch.mask)
    for aggregation in (MEAN, Aggregation("token-mean")):
        loss, gradient, outputs = run(objective, batch, aggregation)
        assert gradient[~mask].abs().max() == 0
        for poison in (math.nan, math.inf, -math.inf, 1e300):
            for names in (["logp"], ["old"], ["mu"], ["adv"], ["logp", "old", "mu", "adv"]):
                bad = replace(
                    batch,
                    **{name: np.where(batch.mask, getattr(batch, name), poison) for name in names},
                )
                bad_loss, bad_gradient, bad_outputs = run(objective, bad, aggregation)
                assert bad_loss == loss and torch.equal(bad_gradient, gradient)
                for name in ("loss_BT", "weight_BT", "is_clipped_BT", "outside_BT", "bounded_BT"):
                    assert torch.equal(
                        getattr(bad_outputs, name)[mask], getattr(outputs, name)[mask]
                    )


@cases
def test_old_and_behaviour_log_probs_get_no_gradient_and_empty_rows_count_nowhere(objective, scale):
    batch = with_an_empty_row(6, scale)
    given = inputs(batch)
    for tensor in (given.old_logp_BT, given.engine_logp_BT):
        tensor.requires_grad_()
    loss = MEAN(objective(given).loss_BT, given.mask_BT, Totals.of(given.mask_BT))
    loss.backward()
    assert given.old_logp_BT.grad is None and given.engine_logp_BT.grad is None
    keep = [i for i in range(len(batch.mask)) if i != 4]
    smaller, gradient, _ = run(objective, batch.map(lambda x: x[keep]))
    assert (
        loss.item() == pytest.approx(smaller, abs=1e-13) and given.logp_BT.grad[4].abs().max() == 0
    )
    close(given.logp_BT.grad[keep], gradient)


# ---- hostile numbers
# ---------------------------------------------------------------------------------------------


@cases
@pytest.mark.parametrize("shift", [50.0, -50.0, 800.0, -800.0])
def test_huge_ratios_stay_finite_carry_no_gradient_and_are_counted(objective, scale, shift):
    batch = with_an_empty_row(5, scale)
    batch = replace(batch, logp=batch.old + shift)
    mask, adv = torch.tensor(batch.mask), torch.tensor(batch.adv)
    loss, gradient, outputs = run(objective, batch)
    assert math.isfinite(loss) and gradient.isfinite().all()
    if isinstance(objective, OWN_BOUNDS):
        return
    if not isinstance(objective, NO_BOUND):
        assert gradient.abs().max() == 0 and (outputs.weight_BT * adv)[mask].abs().max() == 0
        # GMPO clips before it exponentiates: on that side its tokens count as active
        counted = outputs.bounded_BT | (
            outputs.is_clipped_BT | (adv == 0) if isinstance(objective, GMPO) else False
        )
        assert counted[mask].all()
        return
    # REINFORCE has no ratio; CISPO's weight is the edge of its band, or e^-20 where there is no
    # lower one
    edge = 1.0
    if isinstance(objective, CISPO):
        assert outputs.bounded_BT[mask].all()
        edge = 1 + objective.clip_high if shift > 0 else max(1 - objective.clip_low, math.exp(-20))
    weight = torch.where(outputs.is_clipped_BT, 0.0, torch.full_like(adv, edge))
    close(
        gradient,
        torch.where(mask, -weight * adv / mask.sum(-1, keepdim=True) / (len(mask) - 1), 0.0),
    )
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("bound", [10.0, 20.0, 80.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", BOUNDED)
def test_exact_up_to_the_bound_also_in_float32_and_no_gradient_beyond(kind, bound, dtype):
    objective = kind(log_ratio_bound=bound)
    # below, a smaller bound than 20 does not act: nothing can overflow there
    for log, inside in [
        (bound - 0.5, True),
        (bound + 0.5, False),
        (-19.5, True),
        (-max(bound, 20) - 0.5, False),
    ]:
        for adv in (1.5, -1.5):
            logp, old = np.full((1, 2), log - 90.0), np.full((1, 2), -90.0)
            batch = naive.Batch(logp, old, old, np.full((1, 2), adv), np.ones((1, 2), bool))
            loss, gradient, outputs = run(objective, batch, dtype=dtype)
            if kind is not GMPO:
                assert outputs.bounded_BT.all() == (not inside)
            if inside:
                told = naive.objective(objective.name, batch, **settings(objective))
                assert loss == pytest.approx(
                    naive.aggregate(told.loss, batch.mask, MEAN.mode), rel=1e-4
                )
                close(gradient.double(), -told.weight * adv / 2, rtol=1e-4, atol=1e-30)
            elif kind is not CISPO:
                assert math.isfinite(loss) and gradient.abs().max() == 0


@cases
def test_float32_is_close_to_float64(objective, scale):
    batch = with_an_empty_row(8, scale)
    loss, gradient, outputs = run(objective, batch)
    loss_32, gradient_32, outputs_32 = run(objective, batch, dtype=torch.float32)
    assert gradient_32.dtype == torch.float32 and loss_32 == pytest.approx(loss, rel=1e-4, abs=1e-6)
    close(gradient_32.double(), gradient, rtol=1e-4, atol=1e-6 * gradient.abs().max().item())
    for name in ("is_clipped_BT", "outside_BT", "bounded_BT"):
        assert torch.equal(
            getattr(outputs_32, name)[torch.tensor(batch.mask)], getattr(outputs, name)[batch.mask]
        )
