"""Measures a training step: adds sums and counts of tensors to a MetricAccumulator.

The functions never add means. The accumulator divides once at the end of the step, so a metric does
not depend on the cut of the step into micro-batches.

gspo.train.routing measures the routers of MoE models.

Shape suffixes: B responses, T response tokens, N selected tokens or rows.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gspo.algorithm.corrections import EXPONENT_BOUND, LEVELS, importance_weight
from gspo.algorithm.kl import kl_estimate
from gspo.algorithm.objectives import LossInputs, LossOutputs, Objective, log_ratio
from gspo.algorithm.objectives.base import LOG_RATIO_FLOOR
from gspo.data.batch import Critic, OldPolicyBatch, RolloutBatch, TokenBatch, TrainBatch
from gspo.data.masked import masked_mean
from gspo.data.samples import ScoredResponse, all_same, is_right
from gspo.tracking.episodes import episode_metrics, most_frequent
from gspo.train.accumulator import MetricAccumulator

if TYPE_CHECKING:
    # it imports transformers, which gspo.probe does without
    from gspo.rollout.sources.base import Rollout


def measure_rollout(rollout: Rollout, accumulator: MetricAccumulator) -> None:
    """Measure all sampled groups, trained on or not, and count the dropped responses by reason.

    Kept tokens are measured in the groups that are trained on."""
    groups = rollout.sampled
    measure_rewards(groups, accumulator)
    responses = list(chain.from_iterable(groups))
    measure_lengths(responses, accumulator)
    measure_kept_tokens(rollout.responses, accumulator)
    measure_episodes(responses + rollout.ungraded, accumulator)
    accumulator.largest("length/limit", rollout.limit)
    for reason, count in rollout.filtered.items():
        accumulator.mean(f"filter/{reason}", count)


def measure_rewards(groups: list[list[ScoredResponse]], accumulator: MetricAccumulator) -> None:
    """Measure rewards and verdicts by task, and the share of groups without a learning signal."""
    for group in groups:
        rewards_of_group = [r.reward for r in group]
        accumulator.mean("group/zero_variance", all_same(rewards_of_group))
        all_right = all(is_right(r.reward, r.score.rewards) for r in group)
        accumulator.mean("group/all_correct", all_right)
    responses = list(chain.from_iterable(groups))
    total = sum(r.reward for r in responses)
    accumulator.mean("reward/mean", total, len(responses))
    for name in responses[0].score.rewards:
        values = [r.score.rewards.get(name, 0.0) for r in responses]
        accumulator.mean(f"reward/{name}/mean", sum(values), len(values))
    tasks = {r.problem.task for r in responses}
    for task in sorted(tasks):
        of_task = [r for r in responses if r.problem.task == task]
        total = sum(r.reward for r in of_task)
        accumulator.mean(f"reward/{task}", total, len(of_task))
        verdicts = most_frequent(Counter(r.score.verdict for r in of_task))
        for verdict, count in sorted(verdicts.items()):
            accumulator.mean(f"verdict/{task}_{verdict}", count, len(responses))


def measure_lengths(responses: list[ScoredResponse], accumulator: MetricAccumulator) -> None:
    """Measure the lengths, truncation and repetition of the responses."""
    lengths_B = torch.tensor([r.length for r in responses]).double()
    accumulator.mean_of("length/mean", lengths_B)
    accumulator.largest("length/p95", lengths_B.quantile(0.95))
    truncated = sum(r.finish_reason == "length" for r in responses)
    accumulator.mean("length/truncated", truncated, len(responses))
    repeated = sum(repetition(r.written_ids) for r in responses)
    accumulator.mean("length/repetition", repeated, len(responses))


def measure_kept_tokens(responses: list[ScoredResponse], accumulator: MetricAccumulator) -> None:
    """Measure how many tokens could be drawn, at the positions at which some were excluded.

    Responses have no kept tokens without rollout.keep_mask."""
    counts = [r.kept.counts for r in responses if r.kept is not None]
    if not counts:
        return
    counts_N = torch.from_numpy(np.concatenate(counts))
    counts_N = counts_N[counts_N > 0].double()
    if len(counts_N):
        accumulator.mean_of("sampling/kept_mean", counts_N)
        accumulator.largest("sampling/kept_max", counts_N.max())
        accumulator.mean_of("sampling/kept_one", counts_N == 1)


def measure_episodes(responses: list[ScoredResponse], accumulator: MetricAccumulator) -> None:
    """Measure the episodes among a step's responses, by gspo.tracking.episodes.

    Ungraded responses are measured too."""
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
    for name, value in episode_metrics(rows).items():
        accumulator.mean(f"episode/{name}", value)


def repetition(token_ids: list[int], n: int = 4) -> float:
    """Compute the share of a response's n-grams that occurred in it before.

    It is 0 for a response shorter than n.

    >>> repetition([1, 2, 3, 4]), repetition([5] * 13)
    (0.0, 0.9)
    """
    count = len(token_ids) - n + 1
    if count < 1:
        return 0.0
    shifted = [token_ids[i:] for i in range(n)]  # the i-th token of every n-gram
    distinct = set(zip(*shifted, strict=False))
    return 1 - len(distinct) / count


def measure_advantages(adv_BT: Tensor, mask_BT: Tensor, accumulator: MetricAccumulator) -> None:
    """Measure the mean, the std and the largest absolute value of response tokens' advantages."""
    adv_N = adv_BT[mask_BT].double()
    if len(adv_N):
        accumulator.mean_of("advantage/mean", adv_N)
        accumulator.largest("advantage/std", adv_N.std(correction=0))
        accumulator.largest("advantage/abs_max", adv_N.abs().max())


def measure_reference_kl(
    old_logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor, accumulator: MetricAccumulator
) -> None:
    """Estimate KL(pi_old || pi_ref) by k1 and by k3, on the tokens that pi_old sampled."""
    d_BT = log_ratio(old_logp_BT, ref_logp_BT, mask_BT)
    tokens = mask_BT.sum()
    for estimator in ("k1", "k3"):
        kl_BT = kl_estimate(d_BT, estimator, bound=EXPONENT_BOUND)
        accumulator.token_mean(f"kl/ref_{estimator}", kl_BT, mask_BT, tokens)


def measure_staleness(rollout: Rollout, step: int, accumulator: MetricAccumulator) -> None:
    """Measure the age of the weights that sampled each token, in steps, and count the segments."""
    responses = rollout.responses
    tokens_by_age: Counter[int] = Counter()
    segment_count = 0
    for r in responses:
        segments = r.segments or [(r.policy_step, r.length)]
        segment_count += len(segments)
        for policy_step, tokens in segments:
            age = step - 1 - policy_step
            tokens_by_age[age] += tokens
    total_age = sum(age * tokens for age, tokens in tokens_by_age.items())
    accumulator.mean("staleness/mean", total_age, tokens_by_age.total())
    accumulator.largest("staleness/max", max(tokens_by_age))
    accumulator.mean("staleness/segments", segment_count, len(responses))
    accumulator.mean("staleness/in_flight", rollout.num_unfinished)


def measure_mismatch(batch: OldPolicyBatch, accumulator: MetricAccumulator) -> None:
    """Measure the gap between the trainer's old policy pi and the engine's policy mu.

    It is measured on the tokens that mu sampled. With l = log pi - log mu, k1 = mean(-l) estimates
    KL(mu || pi). So does k3 = mean(exp(l) - 1 - l), which is never negative. F(2) is the share of
    tokens with |l| > log 2 (arXiv:2510.11370), among tokens at which more than one could be drawn.
    Compare s = exp(mean l) of each response with GSPO's clip range. The importance weights pi / mu
    of every level are measured before any truncation.
    """
    mask_BT = batch.mask_BT
    tokens = mask_BT.sum()
    log_BT = log_ratio(batch.old_logp_BT, batch.engine_logp_BT, mask_BT)
    abs_BT = log_BT.abs()
    accumulator.token_mean("mismatch/k1", -log_BT, mask_BT, tokens)
    accumulator.token_mean("mismatch/logp_abs", abs_BT, mask_BT, tokens)
    accumulator.largest("mismatch/logp_abs_max", abs_BT.max())
    choice_BT = batch.choice_BT
    is_beyond_BT = abs_BT > math.log(2)
    accumulator.token_mean("mismatch/beyond_2", is_beyond_BT, choice_BT, choice_BT.sum())
    log_s_B = masked_mean(log_BT, mask_BT)
    log_s_N = batch.of_rows(log_s_B)
    accumulator.mean_of("mismatch/sequence_log_abs", log_s_N.abs())
    accumulator.smallest("mismatch/sequence_min", log_s_N.min().exp())
    accumulator.largest("mismatch/sequence_max", log_s_N.max().exp())
    # the bound keeps k3 finite
    k3_BT = kl_estimate(-log_BT, "k3", bound=EXPONENT_BOUND)
    accumulator.token_mean("mismatch/k3", k3_BT, mask_BT, tokens)
    for level in LEVELS:
        weight_BT = importance_weight(batch.old_logp_BT, batch.engine_logp_BT, mask_BT, level)
        weight_N = batch.of_tokens(weight_BT)
        accumulator.mean_of(f"mismatch/weight_{level}_mean", weight_N)
        accumulator.largest(f"mismatch/weight_{level}_max", weight_N.max())
        accumulator.ess(f"mismatch/weight_{level}_ess", weight_N)


def measure_correction(
    correction_BT: Tensor,
    old_logp_BT: Tensor,
    batch: RolloutBatch,
    accumulator: MetricAccumulator,
) -> None:
    """Measure the correction's weights: their mean, what gets 0, and effective sample sizes.

    Effective sample sizes are measured twice: of the token ratios pi_old / mu before truncation,
    and of the weights that the loss uses."""
    mask_BT = batch.mask_BT
    weight_BT = importance_weight(old_logp_BT, batch.engine_logp_BT, mask_BT, "token")
    accumulator.row_weights("mismatch", "", batch.prompts_B, weight_BT, mask_BT)
    accumulator.row_weights("mismatch", "_used", batch.prompts_B, correction_BT, mask_BT)
    accumulator.mean_of("mismatch/corrected_mean", correction_BT[mask_BT])
    measure_masked(correction_BT != 0, mask_BT, batch.choice_BT, accumulator)


def measure_masked(
    kept_BT: Tensor, mask_BT: Tensor, choice_BT: Tensor, accumulator: MetricAccumulator
) -> None:
    """Measure the tokens and the whole responses that a correction leaves out.

    The token share counts only tokens of `choice_BT` (TokenBatch.choice_BT). At every other token
    only one token could be drawn. Its ratio is 1, so no token mask removes it. A response is left
    out if none of its tokens remains, whether they had a choice or not."""
    removed_BT = mask_BT & ~kept_BT
    accumulator.token_mean("mismatch/masked", removed_BT, choice_BT, choice_BT.sum())
    has_tokens_B = mask_BT.any(-1)
    removed_B = has_tokens_B & ~kept_BT.any(-1)
    accumulator.mean("mismatch/sequence_masked", removed_B.sum(), has_tokens_B.sum())


def measure_update_correction(
    weights_BT: Tensor, mask_BT: Tensor, choice_BT: Tensor, accumulator: MetricAccumulator
) -> None:
    """Measure a correction's weights in an update: their mean, and what gets the weight 0."""
    accumulator.token_mean("mismatch/corrected_mean", weights_BT, mask_BT, mask_BT.sum())
    measure_masked(weights_BT != 0, mask_BT, choice_BT, accumulator)


def measure_weights_by_length(
    weight_BT: Tensor, mask_BT: Tensor, accumulator: MetricAccumulator
) -> None:
    """Measure the mean weight of responses by length, as `clip/weight_length_N`.

    The metric is over the responses with more than N/2 and at most N tokens, N = 1, 2, 4, ..."""
    lengths_B = mask_BT.sum(-1)
    weight_B = masked_mean(weight_BT.detach().float(), mask_BT)
    longest = 1
    while True:
        is_in_bin_B = (lengths_B > longest // 2) & (lengths_B <= longest)
        total = torch.where(is_in_bin_B, weight_B, 0.0).sum()
        accumulator.mean(f"clip/weight_length_{longest}", total, is_in_bin_B.sum())
        if longest >= mask_BT.shape[1]:
            return
        longest *= 2


def measure_clips(
    outputs: LossOutputs,
    inputs: LossInputs,
    update_number: int,
    accumulator: MetricAccumulator,
    choice_BT: Tensor | None = None,
) -> None:
    """Measure clip fractions by token, by sequence, and by the sign of the advantage.

    The definitions are the same for every objective, and the masks are the objective's own.
    `active` tokens lost their gradient. The ratio of `outside` tokens lies outside the clip range.
    Token fractions are measured for each mini-batch too.

    Only tokens of `choice_BT` count (TokenBatch.choice_BT), None stands for all response tokens. If
    a single token could be drawn, its ratio is 1, and it would dilute the fractions.
    """
    kinds = {"active": outputs.is_clipped_BT, "outside": outputs.outside_BT}
    mask_BT = inputs.mask_BT if choice_BT is None else choice_BT
    selections = {
        "": mask_BT,
        "_positive": mask_BT & (inputs.adv_BT > 0),
        "_negative": mask_BT & (inputs.adv_BT < 0),
    }
    for sign, selected_BT in selections.items():
        tokens = selected_BT.sum()
        sequences = selected_BT.any(-1).sum()
        for kind, clipped_BT in kinds.items():
            share_B = masked_mean(clipped_BT.float(), selected_BT)
            clipped = torch.where(selected_BT, clipped_BT, False).sum()
            accumulator.mean(f"clip/token_{kind}{sign}", clipped, tokens)
            if not sign:
                accumulator.mean(f"clip/token_{kind}_minibatch_{update_number}", clipped, tokens)
            accumulator.mean(f"clip/sequence_{kind}{sign}", share_B.sum(), sequences)
    tokens = mask_BT.sum()
    accumulator.token_mean("clip/log_ratio_bounded", outputs.bounded_BT, mask_BT, tokens)
    accumulator.token_mean("clip/weight", outputs.weight_BT, mask_BT, tokens)
    if outputs.dual_BT is not None:
        accumulator.token_mean("clip/token_dual", outputs.dual_BT, mask_BT, tokens)


def measure_rounding_floor(
    objective: Objective, inputs: LossInputs, accumulator: MetricAccumulator
) -> None:
    """Measure the distance of a step's first ratios from 1.

    The policy still is the old policy in the first mini-batch. So all of the distance is rounding,
    or with policy.old_logprobs=engine the mismatch of engine and trainer. If the objective clips
    sequence ratios, the distance is also measured as a multiple of the clip range's narrower side.
    """
    mask_BT = inputs.mask_BT
    sequences = mask_BT.any(-1).sum()
    log_BT = log_ratio(inputs.logp_BT, inputs.old_logp_BT, mask_BT)
    log_s_B = masked_mean(log_BT, mask_BT)
    distance = log_s_B.abs().sum()
    outputs = objective(inputs)
    outside_B = masked_mean(outputs.outside_BT.float(), mask_BT)
    accumulator.mean("ratio/floor_sequence_abs", distance, sequences)
    accumulator.mean("ratio/floor_outside", outside_B.sum(), sequences)
    if objective.clips_sequence_ratio:
        clip_range = min(objective.clip_low, objective.clip_high)
        accumulator.mean("ratio/floor_of_range", distance / clip_range, sequences)


def measure_values(
    values_BT: Tensor, critic: Critic, mask_BT: Tensor, clip: float, accumulator: MetricAccumulator
) -> None:
    """Measure the critic's squared error, and the share of values that moved beyond `clip`."""
    tokens = mask_BT.sum()
    error_BT = critic.returns_BT - values_BT
    accumulator.token_mean("value/error", error_BT.square(), mask_BT, tokens)
    change_BT = values_BT - critic.old_values_BT
    accumulator.token_mean("value/clipped", change_BT.abs() > clip, mask_BT, tokens)


def measure_explained_variance(
    critic: Critic, mask_BT: Tensor, accumulator: MetricAccumulator
) -> None:
    """Measure 1 - var(R - V) / var(R), with the critic's values V at the start of the step.

    1 means a perfect critic, 0 a critic that knows no more than the mean return.
    """
    returns_N = critic.returns_BT[mask_BT].double()
    values_N = critic.old_values_BT[mask_BT]
    error_N = returns_N - values_N
    if len(returns_N) > 1 and returns_N.var() > 0:
        unexplained = error_N.var() / returns_N.var()
        accumulator.mean("value/explained_variance", 1 - unexplained)


def measure_ratios(
    logp_BT: Tensor,
    batch: TrainBatch,
    bound: float,
    accumulator: MetricAccumulator,
    has_groups: bool = True,
) -> None:
    """Measure importance ratios, their effective sample sizes, and KL to the old policy.

    Without groups, `batch.prompts_B` means nothing, and groups have no effective sample size."""
    mask_BT = batch.mask_BT
    log_BT = log_ratio(logp_BT, batch.old_logp_BT, mask_BT)
    lowest = min(LOG_RATIO_FLOOR, -bound)  # the objectives bound it in the same way
    log_s_B = masked_mean(log_BT, mask_BT)
    log_s_N = batch.of_rows(log_s_B).clamp(lowest, bound)
    log_BT = log_BT.clamp(lowest, bound)
    log_N = batch.of_tokens(log_BT)
    if not len(log_N):
        return
    mean_square_B = masked_mean(log_BT.square(), mask_BT)
    variance_N = batch.of_rows(mean_square_B) - log_s_N.square()
    ratios_N = {"token": log_N.exp(), "sequence": log_s_N.exp()}
    for kind, ratio_N in ratios_N.items():
        accumulator.mean_of(f"ratio/{kind}_mean", ratio_N)
        accumulator.smallest(f"ratio/{kind}_min", ratio_N.min())
        accumulator.largest(f"ratio/{kind}_max", ratio_N.max())
        accumulator.ess(f"ratio/ess_{kind}", ratio_N)
    if has_groups:
        groups_N = batch.of_rows(batch.prompts_B)
        accumulator.group_ess("ratio/ess_group", groups_N, ratios_N["sequence"])
    accumulator.mean_of("ratio/sequence_log_abs", log_s_N.abs())
    accumulator.mean_of("ratio/token_log_var", variance_N.clamp(min=0))
    accumulator.mean_of("kl/old_k1", -log_N)
    accumulator.mean_of("kl/old_k3", kl_estimate(-log_N, "k3", bound=-lowest))


def measure_entropy(entropy_BT: Tensor, batch: TokenBatch, accumulator: MetricAccumulator) -> None:
    """Measure the mean entropy of the policy over response tokens, in nats."""
    mask_BT = batch.mask_BT
    accumulator.token_mean("policy/entropy", entropy_BT, mask_BT, mask_BT.sum())
