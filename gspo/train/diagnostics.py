"""What a step tells of itself: tested functions from tensors to sums, which gspo.train.accumulator turns into metrics.

Every function adds sums and counts, never means of means: the tally divides once at the end of the step, so a metric
does not depend on how the step was cut into micro-batches.

Shape suffixes: P problems, G responses per problem, B responses, T response tokens, S all tokens, L MoE layers,
K experts per token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gspo.algorithm.corrections import LEVELS, importance_weight
from gspo.algorithm.kl import kl_estimate
from gspo.algorithm.objectives import LossInputs, LossOutputs, log_ratio
from gspo.algorithm.objectives.base import LOWEST
from gspo.core.batch import TrainBatch
from gspo.core.masked import masked_mean
from gspo.core.types import Response
from gspo.train.accumulator import Tally


def rollout(groups: list[list[Response]], filtered: dict[str, float], limit: int, tally: Tally) -> None:
    """All groups that were sampled, also those that are not trained on, and how many were left out and why."""
    rewards(groups, tally)
    lengths([r for group in groups for r in group], tally)
    tally.largest("length/limit", limit)
    for reason, count in filtered.items():
        tally.mean(f"filter/{reason}", count, 1)


def rewards(groups: list[list[Response]], tally: Tally) -> None:
    """Rewards by task, verdicts, and which groups carry a signal."""
    for group in groups:
        values = [r.score.reward for r in group]
        tally.mean("group/zero_variance", min(values) == max(values), 1)
        tally.mean("group/all_correct", min(values) == 1, 1)
        for r in group:
            tally.mean("reward/mean", r.score.reward, 1)
            tally.mean(f"reward/{r.problem.task}", r.score.reward, 1)
    responses = [r for group in groups for r in group]
    for key in sorted({(r.problem.task, r.score.verdict) for r in responses}):
        tally.mean(
            "verdict/" + "_".join(key), sum((r.problem.task, r.score.verdict) == key for r in responses), len(responses)
        )


def lengths(responses: list[Response], tally: Tally) -> None:
    """Lengths, truncation and repetition of the responses."""
    counts = torch.tensor([len(r.token_ids) for r in responses], dtype=torch.float64)
    tally.mean("length/mean", counts.sum(), len(counts))
    tally.largest("length/p95", counts.quantile(0.95))
    for r in responses:
        tally.mean("length/truncated", r.finish_reason == "length", 1)
        tally.mean("length/repetition", repetition(r.token_ids), 1)


def repetition(token_ids: list[int], n: int = 4) -> float:
    """Share of a response's n-grams that occurred before in it; 0 if it is shorter than n.

    >>> repetition([1, 2, 3, 4]), repetition([5] * 13)
    (0.0, 0.9)
    """
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def advantages(batch: TrainBatch, tally: Tally) -> None:
    """Mean, std and largest size of the advantages of response tokens."""
    adv_N = batch.adv_BT[batch.mask_BT].double()
    if len(adv_N):
        tally.mean("advantage/mean", adv_N.sum(), len(adv_N))
        tally.largest("advantage/std", adv_N.std(correction=0))
        tally.largest("advantage/abs_max", adv_N.abs().max())


def reference(batch: TrainBatch, tally: Tally) -> None:
    """KL(pi_old || pi_ref), estimated on the tokens that pi_old sampled: k1 and k3."""
    d_BT = log_ratio(batch.old_logp_BT, batch.ref_logp_BT, batch.mask_BT)
    for estimator in ("k1", "k3"):
        kl_BT = kl_estimate(d_BT, estimator, bound=20.0)
        tally.mean(f"kl/ref_{estimator}", torch.where(batch.mask_BT, kl_BT, 0.0).sum(), batch.mask_BT.sum())


def staleness(responses: list[Response], step: int, in_flight: int, tally: Tally) -> None:
    """How many rollout batches ago the tokens' weights were current, and how responses were cut."""
    for r in responses:
        segments = r.segments or [(r.policy_step, len(r.token_ids))]
        for policy_step, tokens in segments:
            tally.mean("staleness/mean", (step - 1 - policy_step) * tokens, tokens)
            tally.largest("staleness/max", step - 1 - policy_step)
        tally.mean("staleness/segments", len(segments), 1)
    tally.mean("staleness/in_flight", in_flight, 1)


def mismatch(batch: TrainBatch, tally: Tally) -> None:
    """The gap between the trainer's old policy pi and the engine's mu, on the tokens that mu sampled.

    With l = log pi - log mu: k1 = mean(-l) estimates KL(mu || pi), k3 = mean(exp(l) - 1 - l) the same and is never
    negative; F(2) is the share of tokens with |l| > log 2 (arXiv:2510.11370); s = exp(mean l) of each response is what
    GSPO's clip range is compared with. Importance weights pi / mu of every level are those before any truncation.
    """
    mask_BT, tokens = batch.mask_BT, batch.mask_BT.sum()
    log_BT = log_ratio(batch.old_logp_BT, batch.engine_logp_BT, mask_BT)
    tally.mean("mismatch/k1", -log_BT.sum(), tokens)
    tally.mean("mismatch/logp_abs", log_BT.abs().sum(), tokens)
    tally.largest("mismatch/logp_abs_max", log_BT.abs().max())
    tally.mean("mismatch/beyond_2", (log_BT.abs() > math.log(2)).sum(), tokens)
    log_s_B = masked_mean(log_BT, mask_BT)[mask_BT.any(-1)]
    tally.mean("mismatch/sequence_log_abs", log_s_B.abs().sum(), len(log_s_B))
    tally.smallest("mismatch/sequence_min", log_s_B.min().exp())
    tally.largest("mismatch/sequence_max", log_s_B.max().exp())
    bounded_BT = log_BT.clamp(-LOWEST, LOWEST)  # keeps k3 finite
    tally.mean("mismatch/k3", torch.where(mask_BT, k3(bounded_BT), 0.0).sum(), tokens)
    for level in LEVELS:
        weight_N = importance_weight(batch.old_logp_BT, batch.engine_logp_BT, mask_BT, level)[mask_BT]
        tally.mean(f"mismatch/weight_{level}_mean", weight_N.sum(), tokens)
        tally.largest(f"mismatch/weight_{level}_max", weight_N.max())
        tally.ess(f"mismatch/weight_{level}_ess", weight_N)


def engine_routes(batch: TrainBatch, tally: Tally) -> float:
    """Share of the engine's experts that the trainer's router chooses too under the old policy, mean over layers and
    over the positions that predict response tokens; by layer; and the tokens of which any layer's experts differ."""
    engine_BTLK, own_BTLK = predicting(batch.engine_experts_BSLK, batch), predicting(batch.experts_BSLK, batch)
    same_NL = consistency(own_BTLK, engine_BTLK)[batch.mask_BT]
    tally.mean("routing/engine_agreement", same_NL.sum(), same_NL.numel())
    for layer, same_N in enumerate(same_NL.unbind(1)):
        tally.mean(f"routing/engine_agreement_layer_{layer}", same_N.sum(), len(same_N))
    tally.mean("routing/engine_changed_any_layer", (same_NL < 1).any(-1).sum(), len(same_NL))
    return float(same_NL.mean())


def correction(batch: TrainBatch, tally: Tally) -> None:
    """What a correction made of these weights: its mean on the loss of a token, and what it leaves out."""
    tokens = batch.mask_BT.sum()
    tally.mean("mismatch/corrected_mean", batch.correction_BT[batch.mask_BT].sum(), tokens)
    tally.mean("mismatch/masked", (batch.mask_BT & (batch.correction_BT == 0)).sum(), tokens)


def k3(log_BT: Tensor) -> Tensor:
    """r - 1 - log r with r = exp(log_BT): an estimate of KL(old || new) that is never negative (Schulman 2020)."""
    return torch.expm1(log_BT) - log_BT


def clips(outputs: LossOutputs, inputs: LossInputs, minibatch: int, tally: Tally) -> None:
    """Clip fractions: token- and sequence-weighted, active and outside, by sign of the advantage and by mini-batch.

    The same definitions for every objective, from its own masks: `active` is what lost its gradient.
    """
    mask_BT, tokens, sequences = inputs.mask_BT, inputs.mask_BT.sum(), inputs.mask_BT.any(-1).sum()
    for kind, clipped_BT in (("active", outputs.active_BT), ("outside", outputs.outside_BT)):
        clipped_BT = clipped_BT & mask_BT
        tally.mean(f"clip/token_{kind}", clipped_BT.sum(), tokens)
        tally.mean(f"clip/token_{kind}_minibatch_{minibatch}", clipped_BT.sum(), tokens)
        tally.mean(f"clip/sequence_{kind}", masked_mean(clipped_BT.float(), mask_BT).sum(), sequences)
    for sign, chosen_BT in (("positive", inputs.adv_BT > 0), ("negative", inputs.adv_BT < 0)):
        chosen_BT = chosen_BT & mask_BT
        rows = chosen_BT.any(-1).sum()
        for kind, clipped_BT in (("active", outputs.active_BT), ("outside", outputs.outside_BT)):
            clipped_BT = clipped_BT & chosen_BT
            tally.mean(f"clip/token_{kind}_{sign}", clipped_BT.sum(), chosen_BT.sum())
            tally.mean(f"clip/sequence_{kind}_{sign}", masked_mean(clipped_BT.float(), chosen_BT).sum(), rows)
    tally.mean("clip/log_ratio_bounded", (outputs.bounded_BT & mask_BT).sum(), tokens)
    tally.mean("clip/weight", torch.where(mask_BT, outputs.weight_BT, 0.0).sum(), tokens)
    if outputs.dual_BT is not None:
        tally.mean("clip/token_dual", (outputs.dual_BT & mask_BT).sum(), tokens)


def values(inputs: LossInputs, clip: float, tally: Tally) -> None:
    """The critic: its error, the share of values that its clip holds back, the variance of the returns."""
    mask_BT = inputs.mask_BT
    error_N = (inputs.returns_BT - inputs.values_BT)[mask_BT]
    tally.mean("value/error", error_N.square().sum(), len(error_N))
    tally.mean("value/clipped", ((inputs.values_BT - inputs.old_values_BT)[mask_BT].abs() > clip).sum(), len(error_N))


def explained_variance(batch: TrainBatch, tally: Tally) -> None:
    """1 - var(R - V) / var(R) of the values at the step's start: 1 is a perfect critic, 0 one that knows the mean."""
    returns_N = batch.returns_BT[batch.mask_BT].double()
    if len(returns_N) > 1 and returns_N.var() > 0:
        left = (returns_N - batch.old_values_BT[batch.mask_BT]).var() / returns_N.var()
        tally.mean("value/explained_variance", 1 - left, 1)


def ratios(logp_BT: Tensor, batch: TrainBatch, bound: float, tally: Tally) -> None:
    """Importance ratios of tokens and sequences, their effective sample sizes, and the KL estimates from them."""
    mask_BT = batch.mask_BT
    log_BT = log_ratio(logp_BT, batch.old_logp_BT, mask_BT)
    lowest = -max(LOWEST, bound)  # as the objectives bound it
    log_s_B = masked_mean(log_BT, mask_BT)[mask_BT.any(-1)].clamp(lowest, bound)
    log_BT = log_BT.clamp(lowest, bound)
    token_N, log_N = log_BT.exp()[mask_BT], log_BT[mask_BT]
    if not len(log_N):
        return
    variance_B = masked_mean(log_BT.square(), mask_BT)[mask_BT.any(-1)] - log_s_B.square()
    for kind, ratio in (("token", token_N), ("sequence", log_s_B.exp())):
        tally.mean(f"ratio/{kind}_mean", ratio.sum(), len(ratio))
        tally.smallest(f"ratio/{kind}_min", ratio.min())
        tally.largest(f"ratio/{kind}_max", ratio.max())
        tally.ess(f"ratio/ess_{kind}", ratio)
    tally.mean("ratio/sequence_log_abs", log_s_B.abs().sum(), len(log_s_B))
    tally.mean("ratio/token_log_var", variance_B.clamp(min=0).sum(), len(variance_B))
    tally.mean("kl/old_k1", -log_N.sum(), len(log_N))
    tally.mean("kl/old_k3", k3(log_N).sum(), len(log_N))


def entropy(entropy_BT: Tensor, batch: TrainBatch, tally: Tally) -> None:
    """Entropy of the policy at every response token."""
    tally.mean("policy/entropy", torch.where(batch.mask_BT, entropy_BT, 0.0).sum(), batch.mask_BT.sum())


def consistency(own_BSLK: Tensor, old_BSLK: Tensor) -> Tensor:
    """Share of the K old experts that the router's own choice still contains, [B, S, L].

    |S_own intersect S_old| / K: 1 - this is the share of changed experts of the GSPO paper's section 5.3.
    """
    return (old_BSLK.unsqueeze(-1) == own_BSLK.unsqueeze(-2)).any(-1).float().mean(-1)


def predicting(x_BS: Tensor, batch: TrainBatch) -> Tensor:
    """The positions whose forward pass predicts the response tokens: one before each. [B, T, ...]"""
    return x_BS[:, batch.prompt_width - 1 : -1]


def routing(own_BSLK: Tensor, batch: TrainBatch, experts: int, minibatch: int | None, tally: Tally) -> None:
    """Consistency of the routers' own choice with the record of the step's start, and the loads of the experts.

    `minibatch` counts from 1: the first is the record itself and says nothing; None stands for "after the last update".
    """
    own_BTLK, old_BTLK = predicting(own_BSLK, batch), predicting(batch.experts_BSLK, batch)
    if minibatch is not None:
        loads_LE = torch.stack(
            [torch.bincount(layer.reshape(-1).long(), minlength=experts) for layer in own_BTLK[batch.mask_BT].unbind(1)]
        )
        tally.expert_loads_LE = loads_LE if tally.expert_loads_LE is None else tally.expert_loads_LE + loads_LE
    if minibatch == 1:
        return
    kept_NL = consistency(own_BTLK, old_BTLK)[batch.mask_BT]
    if minibatch is None:
        tally.mean("routing/consistency_after_step", kept_NL.sum(), kept_NL.numel())
        return
    tally.mean("routing/consistency", kept_NL.sum(), kept_NL.numel())
    tally.mean(f"routing/consistency_minibatch_{minibatch}", kept_NL.sum(), kept_NL.numel())
    tally.mean("routing/changed_any_layer", (kept_NL < 1).any(-1).sum(), len(kept_NL))
    for layer, kept_N in enumerate(kept_NL.unbind(1)):
        tally.mean(f"routing/consistency_layer_{layer}", kept_N.sum(), len(kept_N))
