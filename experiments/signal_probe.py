"""Signals of others that the recorded runs lack: RAGEN-2's mutual information, the gradient's SNR.

    gspo train experiment=micro_moe study=signal_probe seed=1 optim.lr=8e-4 \\
        callbacks.probe.path=experiments.signal_probe:Probe \\
        metrics.mutual_information.path=experiments.signal_probe:MutualInformation \\
        metrics.retrieval.path=experiments.signal_probe:Retrieval \\
        metrics.gradient_snr.path=experiments.signal_probe:GradientSNR

Runs have these metrics themselves now: tracking.information_every and tracking.snr_every
(gspo/train/signal_probe.py). This callback is kept for the recorded study, whose formula of the
gradient has more parts.

Run it in the repository's folder. The numbers are computed from the step's batch before the
updates, under the weights that sampled it. They change no other number of the run.

Shape suffixes: R responses, P prompts, K parts of a batch, N parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gspo.algorithm.aggregation import Totals
from gspo.data.batch import TrainBatch
from gspo.data.pack import pack
from gspo.data.samples import ScoredResponse
from gspo.model.policy import Policy
from gspo.train.accumulator import MetricAccumulator
from gspo.train.extensions import Callback, CustomMetric, TrainedStep
from gspo.train.loss_terms import Term, TermInputs

# the numbers of the step in progress, from the callback to the metrics
LATEST: dict[str, float] = {}


# ------------------------------------------------------------------------------------------------
# mutual information
def mutual_information(logp_RP: np.ndarray, own_R: np.ndarray) -> float:
    """Return RAGEN-2's proxy of the mutual information of prompt and response, nats per token.

    `logp_RP` is the mean log-prob per token of response i under prompt j, and `own_R` the column of
    its own prompt (arXiv:2604.06268, `mi_estimate` of its code):

        MI = mean_i [ l_i,own(i) - ( logsumexp_j l_ij - log P ) ]

    It is at most log P, and 0 if the prompt makes no difference to the responses.
    """
    prompts = logp_RP.shape[1]
    own_logp_R = logp_RP[np.arange(len(logp_RP)), own_R]
    marginal_R = np.logaddexp.reduce(logp_RP, axis=1) - math.log(prompts)
    return float((own_logp_R - marginal_R).mean())


def retrieval_accuracy(logp_RP: np.ndarray, own_R: np.ndarray) -> float:
    """Return the share of responses whose own prompt makes them most probable; by chance 1 / P."""
    return float((logp_RP.argmax(axis=1) == own_R).mean())


def cross_log_probs(
    policy: Policy, groups: list[list[ScoredResponse]], samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean log-prob per token of responses under every prompt, and their own prompts.

    The first `samples` responses of each group are scored. Equal prompts count once.
    """
    prompts = sorted({tuple(group[0].prompt_ids) for group in groups})
    rows = []
    own = []
    for group in groups:
        for response in group[:samples]:
            own.append(prompts.index(tuple(response.prompt_ids)))
            for prompt in prompts:
                rows.append(replace(response, prompt_ids=list(prompt), experts=None))
    batch = pack(rows, policy.pad_id)
    logp_BT = policy.score(batch, micro_batch_size=256).logp_BT
    total_B = torch.where(batch.mask_BT, logp_BT, 0.0).sum(-1)
    mean_B = total_B / batch.mask_BT.sum(-1)
    return mean_B.view(len(own), len(prompts)).double().numpy(), np.array(own)


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
            logp_RP, own_R = cross_log_probs(trainer.policy, rollout.groups, self.samples)
            gradients = part_gradients(trainer.policy, trainer.terms[0], batch, self.parts)
            LATEST["mutual_information"] = mutual_information(logp_RP, own_R)
            LATEST["retrieval"] = retrieval_accuracy(logp_RP, own_R)
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
