"""The policy objectives. Each is a small dataclass: its fields are its settings, and calling it computes the loss.

    sequence.py   one ratio per response: GSPO, GSPO-token, LUSPO, GMPO
    token.py      one ratio per token, clipped: GRPO, Dr.GRPO, DAPO, PPO
    weighted.py   a weight on A grad log pi: REINFORCE, CISPO, MiniRL, DPPO, SAPO

An objective returns the loss of every token; how tokens are averaged is a separate choice (gspo.algorithm.aggregation).
The formulas differ from those of the papers in one point: log-ratios are bounded before exp, see base.RatioObjective.
"""

from gspo.algorithm.objectives.base import LossInputs, LossOutputs, Objective, log_ratio
from gspo.algorithm.objectives.sequence import GMPO, GSPO, LUSPO, GSPOToken
from gspo.algorithm.objectives.token import DAPO, GRPO, PPO, DrGRPO
from gspo.algorithm.objectives.weighted import CISPO, DPPO, SAPO, MiniRL, Reinforce

OBJECTIVES = (GSPO, GSPOToken, LUSPO, GMPO, GRPO, DrGRPO, DAPO, PPO, Reinforce, CISPO, MiniRL, DPPO, SAPO)

__all__ = ["OBJECTIVES", "LossInputs", "LossOutputs", "Objective", "log_ratio", *(o.__name__ for o in OBJECTIVES)]
