"""Measures a training step: each function adds sums of tensors to a MetricAccumulator, which turns
them into metrics.

The functions add sums and counts, never means. The accumulator divides once at the end of the step,
so a metric does not depend on how the step was cut into micro-batches.

Shape suffixes: P problems, G responses per problem, B responses, T response tokens, S all tokens, L
MoE layers, K experts per token.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from gspo.algorithm.corrections import EXPONENT_BOUND, LEVELS, importance_weight
from gspo.algorithm.kl import kl_estimate
from gspo.algorithm.objectives import LossInputs, LossOutputs, log_ratio
from gspo.algorithm.objectives.base import LOG_RATIO_FLOOR
from gspo.data.batch import TrainBatch
from gspo.data.masked import masked_mean
from gspo.data.samples import Response, all_same
from gspo.tracking.episodes import few, numbers
from gspo.train.accumulator import MetricAccumulator


def rollout(
    groups: list[list[Response]],
    ungraded: list[Response],
    filtered: dict[str, float],
    limit: int,
    accumulator: MetricAccumulator,
) -> None:
    """Measure all groups that were sampled, also those not trained on, and count the ones left out
    by reason.
    """
    rewards(groups, accumulator)
    responses = [r for group in groups for r in group]
    lengths(responses, accumulator)
    episodes(responses + ungraded, accumulator)
    accumulator.largest("length/limit", limit)
    for reason, count in filtered.items():
        accumulator.mean(f"filter/{reason}", count, 1)


def rewards(groups: list[list[Response]], accumulator: MetricAccumulator) -> None:
    """Measure the rewards by task, the shares of the verdicts, and the share of groups without a
    learning signal.
    """
    for group in groups:
        values = [r.score.reward for r in group]
        accumulator.mean("group/zero_variance", all_same(values), 1)
        accumulator.mean("group/all_correct", min(values) == 1, 1)
    responses = [r for group in groups for r in group]
    accumulator.mean("reward/mean", sum(r.score.reward for r in responses), len(responses))
    for task in sorted({r.problem.task for r in responses}):
        of_task = [r.score for r in responses if r.problem.task == task]
        accumulator.mean(f"reward/{task}", sum(score.reward for score in of_task), len(of_task))
        verdicts = Counter(score.verdict for score in of_task)
        for verdict, count in sorted(few(verdicts).items()):
            accumulator.mean(f"verdict/{task}_{verdict}", count, len(responses))


def lengths(responses: list[Response], accumulator: MetricAccumulator) -> None:
    """Measure the lengths, truncation and repetition of the responses."""
    counts = torch.tensor([r.length for r in responses], dtype=torch.float64)
    accumulator.mean("length/mean", counts.sum(), len(counts))
    accumulator.largest("length/p95", counts.quantile(0.95))
    truncated = sum(r.finish_reason == "length" for r in responses)
    accumulator.mean("length/truncated", truncated, len(responses))
    accumulator.mean(
        "length/repetition", sum(repetition(r.written_ids) for r in responses), len(responses)
    )


def episodes(responses: list[Response], accumulator: MetricAccumulator) -> None:
    """Measure those of a step's responses, also the ungraded ones, that are episodes of several
    turns. The numbers are those of gspo.tracking.episodes."""
    rows = [
        {
            "reward": r.score.reward,
            "finish_reason": r.finish_reason,
            "length": r.length,
            "turns": [vars(turn) for turn in r.turns],
            "measures": r.measures,
        }
        for r in responses
    ]
    for name, value in numbers(rows).items():
        accumulator.mean(f"episode/{name}", value, 1)


def repetition(token_ids: list[int], n: int = 4) -> float:
    """Compute the share of a response's n-grams that occurred in it before; 0 if it is shorter than
    n.

    >>> repetition([1, 2, 3, 4]), repetition([5] * 13)
    (0.0, 0.9)
    """
    grams = len(token_ids) - n + 1
    if grams < 1:
        return 0.0
    shifted = [token_ids[i:] for i in range(n)]  # the i-th token of every n-gram
    return 1 - len(set(zip(*shifted, strict=False))) / grams


def advantages(batch: TrainBatch, accumulator: MetricAccumulator) -> None:
    """Measure the mean, the std and the largest absolute value of the advantages of response
    tokens.
    """
    adv_N = batch.adv_BT[batch.mask_BT].double()
    if len(adv_N):
        accumulator.mean("advantage/mean", adv_N.sum(), len(adv_N))
        accumulator.largest("advantage/std", adv_N.std(correction=0))
        accumulator.largest("advantage/abs_max", adv_N.abs().max())


def reference(batch: TrainBatch, accumulator: MetricAccumulator) -> None:
    """Estimate KL(pi_old || pi_ref) by k1 and by k3, on the tokens that pi_old sampled."""
    d_BT = log_ratio(batch.old_logp_BT, batch.ref_logp_BT, batch.mask_BT)
    for estimator in ("k1", "k3"):
        kl_BT = kl_estimate(d_BT, estimator, bound=EXPONENT_BOUND)
        accumulator.mean(
            f"kl/ref_{estimator}", torch.where(batch.mask_BT, kl_BT, 0.0).sum(), batch.mask_BT.sum()
        )


def staleness(
    responses: list[Response], step: int, in_flight: int, accumulator: MetricAccumulator
) -> None:
    """Measure how many rollout batches ago the weights that sampled each token were current, and
    count the segments.
    """
    tokens_by_age: Counter[int] = Counter()
    segments = 0
    for r in responses:
        own = r.segments or [(r.policy_step, r.length)]
        segments += len(own)
        for policy_step, tokens in own:
            tokens_by_age[step - 1 - policy_step] += tokens
    aged = sum(age * tokens for age, tokens in tokens_by_age.items())
    accumulator.mean("staleness/mean", aged, tokens_by_age.total())
    accumulator.largest("staleness/max", max(tokens_by_age))
    accumulator.mean("staleness/segments", segments, len(responses))
    accumulator.mean("staleness/in_flight", in_flight, 1)


def mismatch(batch: TrainBatch, accumulator: MetricAccumulator) -> None:
    """Measure the gap between the trainer's old policy pi and the engine's policy mu, on the tokens
    that mu sampled.

    With l = log pi - log mu, k1 = mean(-l) estimates KL(mu || pi), and so does k3 = mean(exp(l) - 1
    - l), which is never negative. F(2) is the share of tokens with |l| > log 2 (arXiv:2510.11370).
    s = exp(mean l) of each response is to be compared with GSPO's clip range. The importance
    weights pi / mu of every level are measured before any truncation.
    """
    mask_BT, tokens = batch.mask_BT, batch.mask_BT.sum()
    log_BT = log_ratio(batch.old_logp_BT, batch.engine_logp_BT, mask_BT)
    accumulator.mean("mismatch/k1", -log_BT.sum(), tokens)
    accumulator.mean("mismatch/logp_abs", log_BT.abs().sum(), tokens)
    accumulator.largest("mismatch/logp_abs_max", log_BT.abs().max())
    accumulator.mean("mismatch/beyond_2", (log_BT.abs() > math.log(2)).sum(), tokens)
    log_s_B = batch.of_rows(masked_mean(log_BT, mask_BT))
    accumulator.mean("mismatch/sequence_log_abs", log_s_B.abs().sum(), len(log_s_B))
    accumulator.smallest("mismatch/sequence_min", log_s_B.min().exp())
    accumulator.largest("mismatch/sequence_max", log_s_B.max().exp())
    bounded_BT = log_BT.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)  # keeps k3 finite
    accumulator.mean("mismatch/k3", torch.where(mask_BT, k3(bounded_BT), 0.0).sum(), tokens)
    for level in LEVELS:
        weight_N = batch.of_tokens(
            importance_weight(batch.old_logp_BT, batch.engine_logp_BT, mask_BT, level)
        )
        accumulator.mean(f"mismatch/weight_{level}_mean", weight_N.sum(), tokens)
        accumulator.largest(f"mismatch/weight_{level}_max", weight_N.max())
        accumulator.ess(f"mismatch/weight_{level}_ess", weight_N)


def engine_routes(batch: TrainBatch, accumulator: MetricAccumulator) -> Tensor:
    """Measure and return the share of the engine's experts that the trainer's router chooses too
    under the old policy.

    It is the mean over layers and over the positions that predict response tokens. It is measured
    for each layer too, and so is the share of tokens for which the experts of any layer differ.
    """
    engine_BTLK, own_BTLK = (
        predicting(batch.engine_experts_BSLK, batch),
        predicting(batch.experts_BSLK, batch),
    )
    same_NL = batch.of_tokens(consistency(own_BTLK, engine_BTLK))
    accumulator.mean("routing/engine_agreement", same_NL.sum(), same_NL.numel())
    for layer, same_N in enumerate(same_NL.unbind(1)):
        accumulator.mean(f"routing/engine_agreement_layer_{layer}", same_N.sum(), len(same_N))
    accumulator.mean("routing/engine_changed_any_layer", (same_NL < 1).any(-1).sum(), len(same_NL))
    return same_NL.mean()


def correction(batch: TrainBatch, accumulator: MetricAccumulator) -> None:
    """Measure the mean weight that the correction puts on the loss of a token, and the share of
    tokens it masks.
    """
    tokens = batch.mask_BT.sum()
    accumulator.mean("mismatch/corrected_mean", batch.correction_BT[batch.mask_BT].sum(), tokens)
    accumulator.mean("mismatch/masked", (batch.mask_BT & (batch.correction_BT == 0)).sum(), tokens)


def k3(log_BT: Tensor) -> Tensor:
    """Compute r - 1 - log r with r = exp(log_BT): an estimate of KL(old || new), never negative
    (Schulman 2020).
    """
    return torch.expm1(log_BT) - log_BT


def clips(
    outputs: LossOutputs, inputs: LossInputs, minibatch: int, accumulator: MetricAccumulator
) -> None:
    """Measure clip fractions: weighted by token and by sequence, active and outside, by sign of the
    advantage.

    The definitions are the same for every objective, and the masks are the objective's own:
    `active` tokens lost their gradient, the ratio of `outside` tokens lies outside the clip range.
    Token fractions are given for each mini-batch too.
    """
    mask_BT, tokens, sequences = inputs.mask_BT, inputs.mask_BT.sum(), inputs.mask_BT.any(-1).sum()
    for kind, clipped_BT in (("active", outputs.active_BT), ("outside", outputs.outside_BT)):
        clipped_BT = clipped_BT & mask_BT
        accumulator.mean(f"clip/token_{kind}", clipped_BT.sum(), tokens)
        accumulator.mean(f"clip/token_{kind}_minibatch_{minibatch}", clipped_BT.sum(), tokens)
        accumulator.mean(
            f"clip/sequence_{kind}", masked_mean(clipped_BT.float(), mask_BT).sum(), sequences
        )
    for sign, chosen_BT in (("positive", inputs.adv_BT > 0), ("negative", inputs.adv_BT < 0)):
        chosen_BT = chosen_BT & mask_BT
        rows = chosen_BT.any(-1).sum()
        for kind, clipped_BT in (("active", outputs.active_BT), ("outside", outputs.outside_BT)):
            clipped_BT = clipped_BT & chosen_BT
            accumulator.mean(f"clip/token_{kind}_{sign}", clipped_BT.sum(), chosen_BT.sum())
            accumulator.mean(
                f"clip/sequence_{kind}_{sign}",
                masked_mean(clipped_BT.float(), chosen_BT).sum(),
                rows,
            )
    accumulator.mean("clip/log_ratio_bounded", (outputs.bounded_BT & mask_BT).sum(), tokens)
    accumulator.mean("clip/weight", torch.where(mask_BT, outputs.weight_BT, 0.0).sum(), tokens)
    if outputs.dual_BT is not None:
        accumulator.mean("clip/token_dual", (outputs.dual_BT & mask_BT).sum(), tokens)


def rounding_floor(
    outputs: LossOutputs,
    inputs: LossInputs,
    clip_range: float | None,
    accumulator: MetricAccumulator,
) -> None:
    """Measure how far the ratios of a step's first mini-batch are from 1.

    There the policy still is the old policy, so all of it is rounding, or with
    policy.old_logprobs=engine the mismatch of engine and trainer. `clip_range` is the narrower side
    of a clip range of sequence ratios; None for objectives that clip no sequence ratio.
    """
    mask_BT = inputs.mask_BT
    sequences = mask_BT.any(-1).sum()
    log_s_B = masked_mean(log_ratio(inputs.logp_BT, inputs.old_logp_BT, mask_BT), mask_BT)
    off = log_s_B.abs().sum()
    outside_BT = outputs.outside_BT & mask_BT
    accumulator.mean("ratio/floor_sequence_abs", off, sequences)
    accumulator.mean(
        "ratio/floor_outside", masked_mean(outside_BT.float(), mask_BT).sum(), sequences
    )
    if clip_range is not None:
        accumulator.mean("ratio/floor_of_range", off / clip_range, sequences)


def values(inputs: LossInputs, clip: float, accumulator: MetricAccumulator) -> None:
    """Measure the critic's squared error and the share of values that moved further than its clip
    range.
    """
    mask_BT = inputs.mask_BT
    tokens = mask_BT.sum()
    error_BT = torch.where(mask_BT, inputs.returns_BT - inputs.values_BT, 0.0)
    accumulator.mean("value/error", error_BT.square().sum(), tokens)
    moved_BT = torch.where(mask_BT, inputs.values_BT - inputs.old_values_BT, 0.0)
    accumulator.mean("value/clipped", (moved_BT.abs() > clip).sum(), tokens)


def explained_variance(batch: TrainBatch, accumulator: MetricAccumulator) -> None:
    """Measure 1 - var(R - V) / var(R), with the critic's values V at the start of the step.

    1 means a perfect critic, 0 one that knows no more than the mean return.
    """
    returns_N = batch.returns_BT[batch.mask_BT].double()
    if len(returns_N) > 1 and returns_N.var() > 0:
        unexplained = (returns_N - batch.old_values_BT[batch.mask_BT]).var() / returns_N.var()
        accumulator.mean("value/explained_variance", 1 - unexplained, 1)


def ratios(
    logp_BT: Tensor, batch: TrainBatch, bound: float, accumulator: MetricAccumulator
) -> None:
    """Measure the importance ratios of tokens and sequences, their effective sample sizes, and KL
    to the old policy.
    """
    mask_BT = batch.mask_BT
    log_BT = log_ratio(logp_BT, batch.old_logp_BT, mask_BT)
    lowest = min(LOG_RATIO_FLOOR, -bound)  # the objectives bound it in the same way
    log_s_B = batch.of_rows(masked_mean(log_BT, mask_BT)).clamp(lowest, bound)
    log_BT = log_BT.clamp(lowest, bound)
    token_N, log_N = batch.of_tokens(log_BT.exp()), batch.of_tokens(log_BT)
    if not len(log_N):
        return
    variance_B = batch.of_rows(masked_mean(log_BT.square(), mask_BT)) - log_s_B.square()
    for kind, ratio in (("token", token_N), ("sequence", log_s_B.exp())):
        accumulator.mean(f"ratio/{kind}_mean", ratio.sum(), len(ratio))
        accumulator.smallest(f"ratio/{kind}_min", ratio.min())
        accumulator.largest(f"ratio/{kind}_max", ratio.max())
        accumulator.ess(f"ratio/ess_{kind}", ratio)
    accumulator.mean("ratio/sequence_log_abs", log_s_B.abs().sum(), len(log_s_B))
    accumulator.mean("ratio/token_log_var", variance_B.clamp(min=0).sum(), len(variance_B))
    accumulator.mean("kl/old_k1", -log_N.sum(), len(log_N))
    accumulator.mean("kl/old_k3", k3(log_N).sum(), len(log_N))


def entropy(entropy_BT: Tensor, batch: TrainBatch, accumulator: MetricAccumulator) -> None:
    """Measure the mean entropy of the policy over response tokens, in nats."""
    accumulator.mean(
        "policy/entropy", torch.where(batch.mask_BT, entropy_BT, 0.0).sum(), batch.mask_BT.sum()
    )


def consistency(own_BSLK: Tensor, old_BSLK: Tensor) -> Tensor:
    """Compute the share of the K old experts that the router's own choice still contains. Shape [B,
    S, L].

    The share is |own intersect old| / K. One minus it is the share of changed experts in section
    5.3 of the GSPO paper.
    """
    return (old_BSLK.unsqueeze(-1) == own_BSLK.unsqueeze(-2)).any(-1).float().mean(-1)


def predicting(x_BS: Tensor, batch: TrainBatch) -> Tensor:
    """Select the positions whose forward pass predicts a response token: the one before each. Shape
    [B, T, ...].
    """
    return x_BS[:, batch.prompt_width - 1 : -1]


def expert_counts(experts_BSLK: Tensor, batch: TrainBatch, experts: int) -> Tensor:
    """Count how often each expert was chosen at the positions that predict a response token: [L,
    E].
    """
    chosen_NLK = batch.of_tokens(predicting(experts_BSLK, batch)).long()
    chosen_LM = chosen_NLK.transpose(0, 1).flatten(1)
    counts_LE = chosen_LM.new_zeros(len(chosen_LM), experts)
    # bincount would wait for a GPU
    return counts_LE.scatter_add_(1, chosen_LM, torch.ones_like(chosen_LM))


def routing(
    own_BSLK: Tensor,
    batch: TrainBatch,
    experts: int,
    minibatch: int | None,
    accumulator: MetricAccumulator,
) -> None:
    """Measure how far the routers' own choice agrees with the record of the step's start, and the
    loads of the experts.

    `minibatch` counts from 1. The first mini-batch is skipped, because its routing is that record
    itself; None stands for a measurement after the last update.
    """
    own_BTLK, old_BTLK = predicting(own_BSLK, batch), predicting(batch.experts_BSLK, batch)
    if minibatch is not None:
        loads_LE = expert_counts(own_BSLK, batch, experts)
        accumulator.expert_loads_LE = (
            loads_LE
            if accumulator.expert_loads_LE is None
            else accumulator.expert_loads_LE + loads_LE
        )
    if minibatch == 1:
        return
    kept_NL = batch.of_tokens(consistency(own_BTLK, old_BTLK))
    if minibatch is None:
        accumulator.mean("routing/consistency_after_step", kept_NL.sum(), kept_NL.numel())
        return
    accumulator.mean("routing/consistency", kept_NL.sum(), kept_NL.numel())
    accumulator.mean(f"routing/consistency_minibatch_{minibatch}", kept_NL.sum(), kept_NL.numel())
    accumulator.mean("routing/changed_any_layer", (kept_NL < 1).any(-1).sum(), len(kept_NL))
    for layer, kept_N in enumerate(kept_NL.unbind(1)):
        accumulator.mean(f"routing/consistency_layer_{layer}", kept_N.sum(), len(kept_N))
