"""Signals of others that the recorded runs lack: RAGEN-2's mutual information, the gradient's SNR.

    gspo train experiment=micro_moe study=signal_probe seed=1 optim.lr=8e-4 \\
        callbacks.probe.path=experiments.signal_probe:Probe \\
        metrics.mutual_information.path=experiments.signal_probe:MutualInformation \\
        metrics.retrieval.path=experiments.signal_probe:Retrieval \\
        metrics.gradient_snr.path=experiments.signal_probe:GradientSNR

Runs have these metrics themselves now: tracking.information_every and tracking.snr_every
(gspo/train/signal_probe.py). This callback is kept for the recorded study: it cuts the gradient
into more parts, and its metrics are in the rows under other names.

Run it in the repository's folder. The numbers are computed from the step's batch before the
updates, under the weights that sampled it. They change no other number of the run.

Shape suffixes: R responses, P prompts, K parts of a batch, N parameters.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Totals
from gspo.algorithm.mutual_information import prompt_information
from gspo.data.batch import TrainBatch
from gspo.model.policy import Policy
from gspo.train.accumulator import MetricAccumulator
from gspo.train.extensions import Callback, CustomMetric, TrainedStep
from gspo.train.loss_terms import Term, TermInputs
from gspo.train.signal_probe import cross_log_probs

# the numbers of the step in progress, from the callback to the metrics
LATEST: dict[str, float] = {}


# ------------------------------------------------------------------------------------------------
# signal and noise of the gradient
def signal_to_noise(gradients_KN: Tensor) -> float:
    """Return |G|^2 / tr(S), the gradient's signal-to-noise ratio for a part of the batch.

    The parts' gradients g_k are independent estimates of the gradient G with the covariance S. Both
    estimates are without bias, so the ratio may be negative (McCandlish et al. 2018):

        |G|^2 = ( |sum_k g_k|^2 - sum_k |g_k|^2 ) / (K (K - 1)),    tr(S) = mean_k |g_k|^2 - |G|^2

    It is NaN if all gradients are equal, for instance 0.
    """
    parts = len(gradients_KN)
    squares = float(gradients_KN.square().sum())
    square_of_sum = float(gradients_KN.sum(0).square().sum())
    signal = (square_of_sum - squares) / (parts * (parts - 1))
    noise = squares / parts - signal
    return signal / noise if noise > 0 else math.nan


def part_gradients(policy: Policy, term: Term, batch: TrainBatch, parts: int) -> Tensor:
    """Return the gradient of the policy term on each part of the batch, float32 [K, N].

    Each part has whole groups.
    """
    parameters = policy.parameters()
    gradients = []
    for prompts in batch.prompts_B.unique().chunk(parts):
        part = batch.rows(torch.isin(batch.prompts_B, prompts).nonzero().squeeze(-1))
        output = policy.forward(part)
        totals = Totals.of(part.mask_BT)
        loss = term(TermInputs(output, part, totals, 1, MetricAccumulator()))
        by_parameter = torch.autograd.grad(loss, parameters, allow_unused=True)
        flat = []
        for parameter, gradient in zip(parameters, by_parameter, strict=True):
            flat.append(torch.zeros_like(parameter) if gradient is None else gradient)
        gradients.append(torch.cat([gradient.flatten() for gradient in flat]))
    return torch.stack(gradients)


# ------------------------------------------------------------------------------------------------
# in a run
@dataclass
class Probe(Callback):
    """Computes the numbers before the updates of each step."""

    samples: int = 2  # responses of each group, for the mutual information
    parts: int = 8  # of the batch, for the gradient

    def before_step(self, step: int, trainer: Any) -> None:
        """Measure each batch as soon as the trainer has its advantages."""
        if hasattr(trainer, "probed"):
            return
        trainer.probed = True
        add_batch = trainer.recorder.add_batch

        def measure_and_add(batch: TrainBatch, rollout: Any) -> None:
            scored = cross_log_probs(
                trainer.policy,
                rollout.groups,
                prompts=len(rollout.groups),
                samples=self.samples,
                micro_batch_size=256,
                ranks=trainer.ranks,
            )
            information = {"mi": math.nan, "retrieval@1": math.nan}
            if scored is not None:
                mean_RP, sum_RP, own_R = scored
                different_P = torch.arange(mean_RP.shape[1])
                information = prompt_information(mean_RP, sum_RP, own_R, different_P)
            gradients = part_gradients(trainer.policy, trainer.terms[0], batch, self.parts)
            LATEST["mutual_information"] = information["mi"]
            LATEST["retrieval"] = information["retrieval@1"]
            LATEST["gradient_snr"] = signal_to_noise(gradients)
            add_batch(batch, rollout)

        trainer.recorder.add_batch = measure_and_add


@dataclass
class MutualInformation(CustomMetric):
    """The proxy of the mutual information of prompt and response."""

    unit: ClassVar[str] = "nats per token"
    meaning: ClassVar[str] = "mutual information of prompt and response, RAGEN-2's proxy"

    def __call__(self, trained: TrainedStep) -> float:
        return LATEST["mutual_information"]


@dataclass
class Retrieval(CustomMetric):
    """The share of responses that tell their prompt."""

    unit: ClassVar[str] = "share of responses"
    meaning: ClassVar[str] = "responses that are most probable under their own prompt"

    def __call__(self, trained: TrainedStep) -> float:
        return LATEST["retrieval"]


@dataclass
class GradientSNR(CustomMetric):
    """The gradient's signal-to-noise ratio."""

    unit: ClassVar[str] = "ratio"
    meaning: ClassVar[str] = "squared norm of the gradient over the variance of a part's gradient"

    def __call__(self, trained: TrainedStep) -> float:
        return LATEST["gradient_snr"]
