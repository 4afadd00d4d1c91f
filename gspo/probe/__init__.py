"""Measures training steps of other trainers by this repository's definitions.

    routing.py    RoutingProbe: the experts of a Hugging Face MoE; routing_statistics
    logprobs.py   clip_shares, ratio_statistics and rounding_floor of log-probs
    step.py       StepProbe: all of these over the micro-batches of a training step
    trl.py        ProbedGRPOTrainer, which adds them to the logs of TRL

The names of the metrics are those of docs/metrics.md, and so are their definitions: the functions
call those of gspo.train. This package needs PyTorch alone, and gspo.probe.trl needs TRL.
"""

from gspo.algorithm.objectives import GRPO, GSPO
from gspo.probe.logprobs import clip_shares, ratio_statistics, rounding_floor
from gspo.probe.routing import RoutingProbe, routing_statistics
from gspo.probe.step import StepProbe

__all__ = [
    "GRPO",
    "GSPO",
    "RoutingProbe",
    "StepProbe",
    "clip_shares",
    "ratio_statistics",
    "rounding_floor",
    "routing_statistics",
]
