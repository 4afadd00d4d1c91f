"""Every objective with several settings, and their inputs."""

from dataclasses import asdict, fields

import pytest
import torch

import naive
from gspo.algorithm.aggregation import Aggregation, Totals
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
    GSPOToken,
    GSPOTurn,
    LossInputs,
    MiniRL,
    PrimeIPO,
    PrimeRL,
    Reinforce,
)

BAND = {"clip_low": 0.2, "clip_high": 0.27}
DUAL = {**BAND, "dual_clip": 1.3}
# CTPO-LA's dual clip bounds a log-ratio
DUAL_KINDS = [
    kind
    for kind in OBJECTIVES
    if "dual_clip" in {field.name for field in fields(kind)} and kind is not CTPOLA
]


# An objective, and the spread of log-ratios at which its clip cuts some of the tokens and spares
# others.
CASES = [
    *((kind(), 1e-3) for kind in (GSPO, GSPOToken)),
    *((kind(clip_low=0.1, clip_high=0.15), 0.5) for kind in (GSPO, GSPOToken, LUSPO)),
    *((kind(**DUAL), 1.0) for kind in DUAL_KINDS),
    (LUSPO(), 4e-3),
    (GMPO(), 0.8),
    (GMPO(clip_low=0.1, clip_high=0.3), 0.4),
    *((kind(), 0.4) for kind in (GRPO, DrGRPO, DAPO, PPO, MiniRL)),
    (GRPO(clip_low=0.01, clip_high=0.05), 0.05),
    (Reinforce(), 0.5),
    (CISPO(), 1.5),
    (CISPO(clip_low=0.3, clip_high=0.5), 0.6),
    (CISPO(**BAND, mask_harmful=True), 0.5),
    (CISPO(clip_high=1.0, mask_harmful=True), 1.0),
    (MiniRL(clip_low=0.05, clip_high=0.1), 0.2),
    (DPPO(), 0.8),
    (DPPO(delta=0.02), 0.3),
    (SAPO(), 0.5),
    (SAPO(level="sequence"), 0.8),
    (SAPO(tau_positive=0.5, tau_negative=3.0), 1.0),
    (GSPOTurn(), 1e-3),
    (GSPOTurn(clip_low=0.1, clip_high=0.15), 0.5),
    (VESPO(), 0.3),
    (VESPO(k_positive=1.5, lambda_positive=2.0, k_negative=2.5, lambda_negative=1.0), 0.6),
    (CTPO(), 0.3),
    (CTPO(prefix="geometric"), 0.5),
    (CTPOLA(), 0.05),
    (CTPOLA(prefix="geometric", power=-0.5), 0.1),
    (CTPOLA(dual_clip=None), 0.2),
    (DRO(), 0.5),
    (DRO(beta=0.1), 2.0),
    (PrimeRL(), 0.8),
    (PrimeRL(delta_low=0.05, delta_high=0.3, adv_scale=2.0, kl_coef=0.1), 0.8),
    (PrimeIPO(), 0.5),
    (P3O(), 0.5),
]


IDS = ["-".join(str(value) for value in asdict(objective).values()) for objective, _ in CASES]


cases = pytest.mark.parametrize("objective, scale", CASES, ids=IDS)


MEAN = Aggregation("seq-mean-token-mean")


def inputs(batch: naive.Batch, dtype=torch.float64) -> LossInputs:
    logp, old, mu, adv = (
        torch.tensor(x, dtype=dtype) for x in (batch.logp, batch.old, batch.mu, batch.adv)
    )
    return LossInputs(logp.requires_grad_(), old, adv, torch.tensor(batch.mask), engine_logp_BT=mu)


def run(objective, batch: naive.Batch, aggregation: Aggregation = MEAN, dtype=torch.float64):
    """Loss, gradient with respect to the log-probs, and the objective's outputs."""
    given = inputs(batch, dtype)
    outputs = objective(given)
    loss = aggregation(outputs.loss_BT, given.mask_BT, Totals.of(given.mask_BT))
    loss.backward()
    return loss.item(), given.logp_BT.grad, outputs


def settings(objective) -> dict:
    return {
        key: value
        for key, value in asdict(objective).items()
        if key not in ("name", "log_ratio_bound")
    }


def close(a, b, rtol=1e-12, atol=1e-14):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=rtol, atol=atol)
