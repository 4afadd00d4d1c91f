"""The policy objectives: small dataclasses whose fields are settings and whose call is the loss.

    sequence.py    one ratio per response or turn: GSPO, GSPO-token, GSPO-turn, LUSPO, GMPO
    token.py       one ratio per token, clipped: GRPO, Dr.GRPO, DAPO, PPO
    weighted.py    a weight on A grad log pi: REINFORCE, CISPO, MiniRL, DPPO, SAPO
    off_policy.py  VESPO, CTPO, CTPO-LA, DRO, prime-rl's losses, P3O

An objective returns the loss of every token. Averaging over tokens is a separate choice
(gspo.algorithm.aggregation). The objectives differ from the papers only in bounds on log-ratios
before exp (base.RatioObjective; VESPO, CTPO and P3O have their authors' bounds). GSPOAllTokens
contains a known mistake, to measure its effect.
"""

from gspo.algorithm.objectives import off_policy, sequence, token, weighted
from gspo.algorithm.objectives.base import LossInputs, LossOutputs, Objective, log_ratio
from gspo.algorithm.objectives.off_policy import CTPO, CTPOLA, DRO, P3O, VESPO, PrimeIPO, PrimeRL
from gspo.algorithm.objectives.sequence import (
    GMPO,
    GSPO,
    LUSPO,
    GSPOAllTokens,
    GSPOToken,
    GSPOTurn,
)
from gspo.algorithm.objectives.token import DAPO, GRPO, PPO, DrGRPO
from gspo.algorithm.objectives.weighted import CISPO, DPPO, SAPO, MiniRL, Reinforce

# Every class of these modules that has a name is an option of the group `objective`.
OBJECTIVES: tuple[type[Objective], ...] = tuple(
    kind
    for module in (sequence, token, weighted, off_policy)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and issubclass(kind, Objective)
    and kind.__module__ == module.__name__
    and kind.name
)

__all__ = [
    "CISPO",
    "CTPO",
    "CTPOLA",
    "DAPO",
    "DPPO",
    "DRO",
    "GMPO",
    "GRPO",
    "GSPO",
    "LUSPO",
    "OBJECTIVES",
    "P3O",
    "PPO",
    "SAPO",
    "VESPO",
    "DrGRPO",
    "GSPOAllTokens",
    "GSPOToken",
    "GSPOTurn",
    "LossInputs",
    "LossOutputs",
    "MiniRL",
    "Objective",
    "PrimeIPO",
    "PrimeRL",
    "Reinforce",
    "log_ratio",
]
