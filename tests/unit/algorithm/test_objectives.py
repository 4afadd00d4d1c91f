"""Objectives: a naive restatement (tests/oracles/naive.py), hand-worked numbers, equivalences,
refusals, defaults.
"""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import naive
from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.objectives import (
    CISPO,
    CTPO,
    CTPOLA,
    DAPO,
    DPPO,
    DRO,
    GMPO,
    GRPO,
    GSPO,
    LUSPO,
    OBJECTIVES,
    P3O,
    PPO,
    SAPO,
    VESPO,
    DrGRPO,
    GSPOAllTokens,
    GSPOToken,
    GSPOTurn,
    LossInputs,
    MiniRL,
    Objective,
    PrimeIPO,
    PrimeRL,
    Reinforce,
)
from loss_cases import BAND, CASES, DUAL, DUAL_KINDS, cases, close, inputs, run, settings
from refusals import refuses

# no token ever loses its gradient; CISPO's does with mask_harmful only
NEVER_CUTS = (Reinforce, SAPO, VESPO, DRO)


# ---- the papers' formulas, written naively
# -----------------------------------------------------------------------


def test_every_objective_is_tried():
    assert {type(objective) for objective, _ in CASES} == set(OBJECTIVES)
    assert {kind().name for kind in OBJECTIVES} == set(naive.FORMULAS)
    assert set(DUAL_KINDS) == {
        GSPO, GSPOAllTokens, GSPOToken, GSPOTurn, LUSPO, GRPO, DrGRPO, DAPO, PPO, CTPO,
    }  # fmt: skip


@cases
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_papers_formula_written_naively(objective, scale, seed):
    batch = naive.ragged(seed, scale)
    loss, gradient, outputs = run(objective, batch)
    told, mask = (
        naive.objective(objective.name, batch, **settings(objective)),
        torch.tensor(batch.mask),
    )
    assert loss == pytest.approx(
        naive.aggregate(told.loss, batch.mask, "seq-mean-token-mean"), abs=1e-12
    )
    names = {"loss": "loss", "weight": "weight", "is_clipped": "active", "outside": "outside"}
    for name, naive_name in names.items():
        expected = getattr(told, naive_name)[batch.mask]
        close(getattr(outputs, f"{name}_BT")[mask].detach(), expected)
    close(gradient, slope(told, batch))
    assert not outputs.bounded_BT.any() and not outputs.weight_BT.requires_grad
    # the batch is not trivial: each mask has both values
    cuts = not isinstance(objective, (*NEVER_CUTS, P3O))
    cuts = cuts and getattr(objective, "mask_harmful", True)
    assert told.active.any() == cuts and not told.active[batch.mask].all()
    assert (
        told.outside.any() != isinstance(objective, NEVER_CUTS)
        and not told.outside[batch.mask].all()
    )


def slope(told, batch):
    """The gradient of the mean of means that the oracle's weights say."""
    return (
        (told.pull - told.weight * batch.adv) / batch.mask.sum(-1, keepdims=True) / len(batch.mask)
    )


@cases
def test_gradient_equals_difference_quotients(objective, scale):
    batch = naive.ragged(7, scale)
    _, gradient, _ = run(objective, batch)
    close(
        gradient, naive.slopes(objective.name, batch, **settings(objective)), rtol=1e-6, atol=1e-8
    )
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize(
    "kind",
    [
        GSPOToken, GSPOTurn, GRPO, DAPO, PPO, DrGRPO, Reinforce, CISPO, MiniRL, DPPO, SAPO,
        VESPO, CTPO, CTPOLA, DRO, PrimeRL, PrimeIPO, P3O,
    ],
)  # fmt: skip
def test_advantages_may_differ_by_token(kind):
    objective, batch = kind(), naive.ragged(2, 0.3, by_token=True)
    _, gradient, _ = run(objective, batch)
    told = naive.objective(objective.name, batch, **settings(objective))
    close(gradient, slope(told, batch))


@pytest.mark.parametrize("kind", DUAL_KINDS)
def test_dual_clip_acts_on_high_ratios_of_negative_advantages_alone_and_tells_where(kind):
    batch = naive.ragged(3, 1.0)
    mask, negative = torch.tensor(batch.mask), torch.tensor(batch.adv) < 0
    (_, gradient, outputs), (_, plain_gradient, plain) = (
        run(kind(**DUAL), batch),
        run(kind(**BAND), batch),
    )
    dual = outputs.dual_BT
    assert plain.dual_BT is None and dual[mask].any() and not dual[mask & ~negative].any()
    assert torch.equal(outputs.is_clipped_BT[mask], (plain.is_clipped_BT | dual)[mask])
    assert (
        not (plain.is_clipped_BT & dual)[mask].any()
        and plain.weight_BT[dual & mask].min() > DUAL["dual_clip"]
    )
    close(gradient, torch.where(dual & mask, 0.0, plain_gradient), rtol=0, atol=0)


# ---- by hand: ratios 1/2, 1, 3/2, old probabilities 0.4, 0.5, 0.2
# ------------------------------------------------

S = 0.75 ** (1 / 3)  # (1/2 * 1 * 3/2)^(1/3) = 0.90856: GSPO's ratio
G = math.exp((-math.log(2) + 0 + 0.4) / 3)  # 0.90691: ln 3/2 = 0.40547 is cut to 0.4 where A > 0
# 1.00182: ln 1/2 = -0.69315 is cut to -0.4 where A < 0
H = math.exp((-0.4 + 0 + math.log(1.5)) / 3)
# 0.94001: 4 sigmoid(1/2) sigmoid(-1/2), SAPO's f'(1/2) = f'(3/2)
P = 4 / (1 + math.exp(-0.5)) / (1 + math.exp(0.5))
Q = 1 / math.cosh(0.5) ** 2  # 0.78645


@pytest.mark.parametrize(
    "objective, adv, loss, gradient, active, outside",
    [
        # gains 2 * (1/2, 1, 1.27): the third is clipped; d loss / d logp = -w A / 3
        (GRPO(**BAND), 2, -(1 + 2 + 2.54) / 3, [-1 / 3, -2 / 3, 0], [0, 0, 1], [1, 0, 1]),
        # -2 * (0.8, 1, 1.5): the first is clipped at 0.8
        (GRPO(**BAND), -2, (1.6 + 2 + 3) / 3, [0, 2 / 3, 1], [1, 0, 0], [1, 0, 1]),
        # dual clip at 1.4: the third costs at most 1.4 * 2 and has no gradient
        (GRPO(**BAND, dual_clip=1.4), -2, (1.6 + 2 + 2.8) / 3, [0, 2 / 3, 0], [1, 0, 1], [1, 0, 1]),
        # S lies in the band; each token gets -S A / 3
        (GSPO(**BAND), 2, -2 * S, [-2 * S / 3] * 3, [0, 0, 0], [0, 0, 0]),
        # S lies below 0.95: the whole response is clipped for A < 0, and outside only for A > 0
        (GSPO(clip_low=0.05, clip_high=0.05), -2, 2 * 0.95, [0, 0, 0], [1, 1, 1], [1, 1, 1]),
        (GSPO(clip_low=0.05, clip_high=0.05), 2, -2 * S, [-2 * S / 3] * 3, [0, 0, 0], [1, 1, 1]),
        (LUSPO(**BAND), 2, -2 * S * 3, [-2 * S] * 3, [0, 0, 0], [0, 0, 0]),
        # the cut token is the third alone, the others keep the weight of the mean
        (GMPO(), 2, -2 * G, [-2 * G / 3, -2 * G / 3, 0], [0, 0, 1], [1, 0, 1]),
        # A < 0 cuts the first, from below
        (GMPO(), -2, 2 * H, [0, 2 * H / 3, 2 * H / 3], [1, 0, 0], [1, 0, 1]),
        # log pi of 0.2, 0.5, 0.3; the weights are 1/2, 1 and 3/2 cut to 1.27: no gradient is lost
        (CISPO(clip_high=0.27), 2, -2 / 3 * (0.5 * math.log(0.2) + math.log(0.5) + 1.27 * math.log(0.3)),
         [-1 / 3, -2 / 3, -2.54 / 3], [0, 0, 0], [0, 0, 1]),
        (CISPO(**BAND, mask_harmful=True), 2, -2 / 3 * (0.8 * math.log(0.2) + math.log(0.5)),
         [-1.6 / 3, -2 / 3, 0], [0, 0, 1], [1, 0, 1]),
        (MiniRL(), 2, -2 / 3 * (0.5 * math.log(0.2) + math.log(0.5)), [-1 / 3, -2 / 3, 0], [0, 0, 1], [1, 0, 1]),
        # pi - mu = -0.2, 0, 0.1: the third token's ratio is 1.5 and it stays, being rare
        (DPPO(), 2, -(1 + 2 + 3) / 3, [-1 / 3, -2 / 3, -1], [0, 0, 0], [1, 0, 0]),
        (DPPO(), -2, (0 + 2 + 3) / 3, [0, 2 / 3, 1], [1, 0, 0], [1, 0, 0]),
        (DPPO(delta=0.05), 2, -(1 + 2 + 0) / 3, [-1 / 3, -2 / 3, 0], [0, 0, 1], [1, 0, 1]),
        # sigmoids at -1/2, 0, 1/2 add up to 3/2, so J = 4 * 3/2 / 3 * 2; the weights are P/2, 1,
        # 3P/2
        (SAPO(), 2, -4.0, [-P / 3, -2 / 3, -P], [0, 0, 0], [0, 0, 0]),
        # tau = 2 where A < 0: J = -4/2 / 3 * 2 * 3/2; weights r / cosh^2(r - 1), with Q = 1 /
        # cosh^2(1/2)
        (SAPO(tau_negative=2.0), -2, 2.0, [Q / 3, 2 / 3, Q], [0, 0, 0], [0, 0, 0]),
        (Reinforce(), 2, -2 / 3 * math.log(0.2 * 0.5 * 0.3), [-2 / 3] * 3, [0, 0, 0], [0, 0, 0]),
    ],
)  # fmt: skip
def test_three_tokens_by_hand(objective, adv, loss, gradient, active, outside):
    logp, old = np.log([[0.2, 0.5, 0.3]]), np.log([[0.4, 0.5, 0.2]])
    batch = naive.Batch(logp, old, old, np.full((1, 3), float(adv)), np.ones((1, 3), bool))
    ours, our_gradient, outputs = run(objective, batch)
    assert ours == pytest.approx(loss, abs=1e-12)
    assert our_gradient[0].tolist() == pytest.approx(gradient, abs=1e-12)
    assert outputs.is_clipped_BT[0].tolist() == active and outputs.outside_BT[0].tolist() == outside


# ---- equivalences
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_on_policy_all_objectives_have_the_gradient_of_reinforce(kind, mode):
    batch = naive.ragged(0, 0.3)
    batch = replace(batch, logp=batch.old, mu=batch.old)
    _, gradient, outputs = run(kind(), batch, Aggregation(mode))
    _, expected, _ = run(Reinforce(), batch, Aggregation(mode))
    if kind is LUSPO:  # up to the length, which is its point
        expected = expected * torch.tensor(batch.mask.sum(-1, keepdims=True))
    close(gradient, expected, atol=1e-15)
    mask = torch.tensor(batch.mask)
    assert not (outputs.is_clipped_BT | outputs.outside_BT)[mask].any()


WIDE = {"clip_low": 0.999, "clip_high": 1e3}  # nothing is clipped


@pytest.mark.parametrize(
    "a, b, scale, where, rtol",
    [
        (GSPO(**DUAL), GSPOToken(**DUAL), 1.0, "", 1e-12),
        (GSPO(), GSPOToken(), 1e-3, "", 1e-12),
        (GSPO(**DUAL), GRPO(**DUAL), 1.0, "one token", 1e-12),
        (GRPO(**DUAL), DAPO(**DUAL), 1.0, "", 0),
        (GRPO(**DUAL), PPO(**DUAL), 1.0, "", 0),
        (GRPO(**DUAL), DrGRPO(**DUAL), 1.0, "", 0),
        # gradients only, where the losses are of another form
        (GRPO(**BAND), MiniRL(**BAND), 0.5, "gradient", 1e-12),  # PPO's mask on sg[w] A log pi
        (GRPO(**WIDE), CISPO(**WIDE), 0.5, "gradient", 1e-12),
        (GRPO(**WIDE), DPPO(delta=0.999), 0.5, "sampled by the old policy", 1e-12),
        (GSPO(**WIDE), GMPO(clip_low=9.0, clip_high=9.0), 0.5, "", 1e-12),
        (
            GMPO(),
            MiniRL(clip_low=1 - math.exp(-0.4), clip_high=math.exp(0.4) - 1),
            0.5,
            "gradient, one token",
            1e-12,
        ),
        # SAPO's weight is r (1 - (tau/2)^2 (r - 1)^2 + ...): PPO's up to second order in the step
        (GRPO(**WIDE), SAPO(), 1e-4, "gradient", 1e-6),
        (GSPO(**WIDE), SAPO(level="sequence"), 1e-4, "gradient", 1e-6),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_equivalent_objectives(a, b, scale, where, rtol, seed):
    batch = naive.ragged(seed, scale)
    if "one token" in where:
        batch.mask[:] = np.arange(batch.mask.shape[1]) == 0
    if "sampled" in where:
        batch = replace(batch, mu=batch.old)
    (loss_a, gradient_a, out_a), (loss_b, gradient_b, out_b) = run(a, batch), run(b, batch)
    close(gradient_a, gradient_b, rtol=rtol, atol=1e-15 if rtol else 0)
    if "gradient" not in where:
        assert loss_a == pytest.approx(loss_b, abs=1e-14)
        mask = torch.tensor(batch.mask)
        assert torch.equal(out_a.is_clipped_BT[mask], out_b.is_clipped_BT[mask])


def test_luspo_is_gspo_under_another_aggregation():
    batch = naive.ragged(1, 0.5)
    a, gradient_a, _ = run(LUSPO(**BAND), batch)
    b, gradient_b, _ = run(GSPO(**BAND), batch, Aggregation("seq-mean-token-sum"))
    assert a == pytest.approx(b, abs=1e-12)
    close(gradient_a, gradient_b)


# ---- settings
# ----------------------------------------------------------------------------------------------------

NONSENSE = {
    "clip_low": (0.0, -0.1, math.nan), "clip_high": (0.0, -0.1, math.nan), "dual_clip": (1.0, 0.5, math.nan),
    "log_ratio_bound": (0.0, -1.0, 100.0, math.nan), "delta": (0.0, 1.0, math.nan), "level": ("word",),
    "tau_positive": (0.0, -1.0, math.nan), "tau_negative": (0.0, -1.0, math.nan),
    "k_positive": (-1.0, math.nan), "k_negative": (-1.0, math.nan), "lambda_positive": (0.0, -1.0, math.nan),
    "lambda_negative": (0.0, -1.0, math.nan), "prefix": ("word",), "power": (-2.0, 1.5, math.nan),
    "beta": (0.0, -1.0, math.nan), "delta_low": (-0.1, 1.0, math.nan), "delta_high": (-0.1, 1.0, math.nan),
    "adv_scale": (-1.0, math.nan), "kl_coef": (-1.0, math.nan),
}  # fmt: skip


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_setting_that_makes_no_sense_is_refused_by_key_and_value(kind):
    keys = {field.name for field in fields(kind)} - {"name", "mask_harmful"}
    assert keys <= set(NONSENSE)
    refused = [(key, value) for key in keys for value in NONSENSE[key]]
    if kind is PrimeIPO:  # 0 masks every token that moved
        refused.remove(("delta", 0.0))
    if kind is CTPOLA:  # it bounds a log-ratio
        refused = [pair for pair in refused if pair[0] != "dual_clip"] + [("dual_clip", 0.0)]
    # GMPO's and CTPO-LA's bound a log-ratio, the others' must leave the ratio positive
    if "clip_low" in keys and kind not in (GMPO, CTPOLA):
        refused += [("clip_low", 1.5)] + [("clip_low", 1.0)] * (kind not in (CISPO, MiniRL))
    for key, value in refused:
        with refuses(f"objective.{key}", value):
            kind(**{key: value})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["logp_BT", "old_logp_BT", "engine_logp_BT", "ref_logp_BT"])
def test_log_probs_in_half_precision_are_refused_by_name(name, dtype):
    given = {
        key: torch.zeros(1, 2)
        for key in ("logp_BT", "old_logp_BT", "adv_BT", "engine_logp_BT", "ref_logp_BT")
    }
    given[name] = given[name].to(dtype)
    with pytest.raises(ValueError, match=f"{name} is {dtype}.*float32 or better"):
        LossInputs(**given, mask_BT=torch.ones(1, 2, dtype=torch.bool))


def test_an_objective_without_formula_and_dppo_without_the_sampler_are_refused():
    given = inputs(naive.ragged(0, 0.3))
    with pytest.raises(TypeError, match="no formula"):
        Objective("mine")(given)
    for kind in (DPPO, PrimeRL, PrimeIPO):
        with refuses("objective", kind.name, "engine_logp_BT is missing"):
            kind()(replace(given, engine_logp_BT=None))


@pytest.mark.parametrize(
    "kind, default, auto",
    [
        # arXiv:2507.18071, section 5.1
        (GSPO, {"clip_low": 3e-4, "clip_high": 4e-4}, "seq-mean-token-mean"),
        (GSPOToken, {"clip_low": 3e-4, "clip_high": 4e-4}, "seq-mean-token-mean"),  # the same
        # the same section, and Eq 2
        (GRPO, {"clip_low": 0.2, "clip_high": 0.27}, "seq-mean-token-mean"),
        (LUSPO, {"clip_low": 2e-3, "clip_high": 2.5e-3}, "seq-mean-token-mean"),  # arXiv:2602.05261
        # arXiv:2507.20673: (e^-0.4, e^0.4)
        (GMPO, {"clip_low": 0.4, "clip_high": 0.4}, "seq-mean-token-mean"),
        # arXiv:2503.20783: a constant
        (DrGRPO, {"clip_low": 0.2, "clip_high": 0.2}, "seq-mean-token-sum-norm"),
        # arXiv:2503.14476: clip-higher, token loss
        (DAPO, {"clip_low": 0.2, "clip_high": 0.28}, "token-mean"),
        (PPO, {"clip_low": 0.2, "clip_high": 0.2}, "token-mean"),  # arXiv:1707.06347: epsilon 0.2
        (Reinforce, {}, "token-mean"),
        # arXiv:2506.13585: no lower bound; the cap of 5 is among ScaleRL's equals
        # (arXiv:2510.13786) and TRL's
        (CISPO, {"clip_low": 1.0, "clip_high": 4.0, "mask_harmful": False}, "token-mean"),
        # arXiv:2512.01374: no length norm
        (MiniRL, {"clip_low": 0.2, "clip_high": 0.27}, "seq-mean-token-sum"),
        (DPPO, {"delta": 0.15}, "token-mean"),  # arXiv:2602.04879
        # arXiv:2511.20347
        (
            SAPO,
            {"tau_positive": 1.0, "tau_negative": 1.05, "level": "token"},
            "seq-mean-token-mean",
        ),
        (GSPOTurn, {"clip_low": 3e-4, "clip_high": 4e-4}, "seq-mean-token-mean"),  # GSPO's
        # arXiv:2602.10693 and its authors' code
        (
            VESPO,
            {"k_positive": 2, "lambda_positive": 3, "k_negative": 3, "lambda_negative": 2},
            "token-mean",
        ),
        (CTPO, {"clip_low": 0.2, "clip_high": 0.2, "prefix": "product"}, "token-mean"),
        # prime-rl's DefaultLossConfig
        (
            PrimeRL,
            {"delta_low": 0.2, "delta_high": 0.2, "adv_scale": 1, "kl_coef": 1e-3},
            "token-mean",
        ),
        (PrimeIPO, {"delta": 0.1, "adv_scale": 1, "kl_coef": 1e-3}, "token-mean"),
        (P3O, {}, "token-mean"),
    ],
)
def test_defaults_are_the_papers(kind, default, auto):
    # off: no paper of these has it
    dual = {"dual_clip": None} if "dual_clip" in settings(kind()) else {}
    assert settings(kind()) == {**default, **dual} and kind.aggregation == auto
    assert kind().log_ratio_bound == (10 if kind is CTPO else 20)
