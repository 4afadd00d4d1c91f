"""Computes the loss of a recorded step again, without the model, under any objective.

The recorded log-probs take the place of the model. Everything else is the code of the trainer, so a
replay under the recorded objective gives the step's metrics again, up to the rounding of sums.
Under another objective it says what that objective would have done with the same responses at the
same weights. The weights of the second update on are those to which the recorded objective had led.

    record = read_record(find_record(Path("runs/STUDY/RUN"), 123))
    settings = TrainerSettings(aggregation=Aggregation("seq-mean-token-mean"))
    replayed = replay(record, Algorithm(GRPO()), settings, PolicySettings())
    replayed.metrics["clip/token_active"]

The balancing loss of routers (trainer.router_aux_loss_coef) needs probabilities that no record
holds, so it is left out.

Shape suffixes: B responses, T response tokens, S all tokens, N flattened tokens, L MoE layers, K
experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from gspo.algorithm.aggregation import Totals
from gspo.algorithm.entropy import EntropyCoefficient
from gspo.algorithm.kl import KL, KLCoefficient
from gspo.algorithm.objectives import Objective
from gspo.algorithm.objectives.base import log_ratio
from gspo.algorithm.reward_shaping import RunningMoments
from gspo.data.batch import NOT_RECORDED, OldPolicyBatch, RolloutBatch, TokenBatch, TrainBatch
from gspo.data.kept_tokens import KeptTokens
from gspo.data.pack import pack
from gspo.data.problems import Problem
from gspo.data.samples import Score, ScoredResponse, Turn
from gspo.data.step_record import RecordedUpdate, StepRecord
from gspo.distributed.ranks import Ranks
from gspo.model.forward.outputs import PolicyOutput
from gspo.rollout.sources.base import Rollout
from gspo.train import diagnostics, measured_pass
from gspo.train.accumulator import MetricAccumulator
from gspo.train.credit import add_advantages
from gspo.train.engine_comparison import EngineComparison
from gspo.train.loss_terms import (
    EntropyTerm,
    Term,
    TermInputs,
    clip_bits,
    loss_inputs,
    loss_terms,
)
from gspo.train.replay_checks import check_advantages, check_record
from gspo.train.settings import Algorithm, PolicySettings, TrainerSettings


@dataclass
class ReplayedUpdate:
    """An update of a replayed step. Its arrays are over the n response tokens of its rows."""

    rows: ndarray  # the rows of the mini-batch
    log_ratio: ndarray  # log pi / pi_old of every token, 0 outside the loss
    weight: ndarray  # LossOutputs.weight_BT: the factor of A grad log pi, 0 if it is clipped
    clipped: ndarray  # uint8, a sum of ACTIVE, OUTSIDE, BOUNDED and DUAL
    gradient: ndarray  # the derivative of the loss by the log-prob of every token


@dataclass
class ReplayedStep:
    """A step as it was replayed under an objective."""

    metrics: dict[str, float]
    updates: list[ReplayedUpdate]
    advantages: ndarray  # over the response tokens of all rows
    trained: ndarray  # bool, whether each of these tokens is in the loss


def replay(
    record: StepRecord,
    algorithm: Algorithm,
    settings: TrainerSettings,
    policy_settings: PolicySettings,
    *,
    recorded_kl: bool = True,
    recorded_entropy: bool = True,
    recorded_advantages: bool = False,
) -> ReplayedStep:
    """Compute the loss of a recorded step.

    recorded_kl          start with the run's coefficient of the KL term at this step
    recorded_entropy     start with the run's coefficient of the entropy bonus at this step
    recorded_advantages  take the advantages of the record instead of computing them from rewards

    Raises ValueError if the objective needs tensors that the record does not hold."""
    check_record(record, algorithm, settings, policy_settings.old_logprobs)
    check_advantages(record, algorithm, recorded_advantages)
    accumulator = MetricAccumulator()
    state = record.header.state
    coefficient = kl_coefficient(record, algorithm.kl, recorded_kl)
    entropy = entropy_term(record, settings, recorded_entropy)

    # responses, and their log-probs under the old policy
    groups = groups_of(record, algorithm.reward.weights)
    rollout = Rollout(groups, rollout_s=0.0, score_s=0.0, limit=record.header.limit)
    rollout_batch = to_rollout_batch(record, rollout)
    engine_is_old = policy_settings.old_logprobs == "engine"
    old_batch = add_old_policy(record, rollout_batch, algorithm, engine_is_old, accumulator)
    comparison = EngineComparison(routes_floor=0.0)
    # a dump of texts has no log-probs of the engine
    knows_engine = not np.isnan(record.engine_logp).all()
    skips_old_pass = bool(state.get("skips_old_pass"))
    if knows_engine and not skips_old_pass and not engine_is_old:
        comparison.measure(old_batch, accumulator)

    # advantages
    if recorded_advantages:
        adv_BT = unflattened(record.advantages, old_batch)
        batch = old_batch.with_advantages(adv_BT)
        diagnostics.measure_advantages(adv_BT, batch.mask_BT, accumulator)
    else:
        batch, _ = add_advantages(
            old_batch,
            unflattened_or_none(record.old_values, old_batch),
            rollout,
            algorithm=algorithm,
            kl_coefficient=coefficient.value,
            mask_truncated=settings.mask_truncated,
            running=RunningMoments(**state.get("rewards", {})),
            accumulator=accumulator,
        )

    # one update per mini-batch
    objective = algorithm.objective
    starts_at_old = bool(state.get("starts_at_old_policy")) and objective.ratio_to == "old"
    experts = int(state.get("experts", 0))
    terms = loss_terms(algorithm, replace(settings, router_aux_loss_coef=0.0), coefficient, entropy)
    updates = []
    for update_number, update in enumerate(record.updates, start=1):
        minibatch = batch.rows(torch.from_numpy(update.rows).long())
        minibatch = measured_pass.reduce_minibatch(minibatch, algorithm.correction, accumulator)
        output = recorded_output(update, minibatch)
        is_at_old_policy = update_number == 1 and starts_at_old
        has_ratio_1 = is_at_old_policy and not engine_is_old
        statistic = minibatch_statistic(objective, output, minibatch, has_ratio_1)
        if is_at_old_policy:
            minibatch = measured_pass.start_at_old_policy(
                output, minibatch, objective, engine_is_old, statistic, accumulator
            )
        totals = Totals.of(minibatch.mask_BT)
        inputs = TermInputs(
            output, minibatch, totals, update_number, accumulator, statistic=statistic
        )
        updates.append(replay_update(update, inputs, terms))
        measured_pass.measure_pass(
            output, minibatch, update_number, objective, experts, accumulator
        )
        if knows_engine and skips_old_pass and update_number == 1:
            measured_pass.compare_with_engine(output, minibatch, comparison, accumulator)
        if entropy:
            entropy.end_update(totals, Ranks())
    metrics = accumulator.result()
    metrics = {name: value for name, value in metrics.items() if not name.startswith("time/")}
    return ReplayedStep(metrics, updates, flat(batch.adv_BT, batch), flat(batch.mask_BT, batch))


def kl_coefficient(record: StepRecord, kl: KL, is_recorded: bool) -> KLCoefficient:
    """Return the coefficient of the KL term, with the run's value at this step if `is_recorded`."""
    coefficient = KLCoefficient(kl)
    recorded = record.header.state.get("kl_coef")
    if is_recorded and kl.needs_reference and recorded is not None:
        coefficient.value = float(recorded)
    return coefficient


def entropy_term(
    record: StepRecord, settings: TrainerSettings, is_recorded: bool
) -> EntropyTerm | None:
    """Return the entropy bonus, with the run's coefficient at this step if `is_recorded`."""
    coefficient: EntropyCoefficient | None = settings.entropy_coefficient()
    if not coefficient:
        return None
    term = EntropyTerm(coefficient, settings.aggregation)
    recorded = record.header.state.get("entropy_coef")
    if is_recorded and recorded:
        term.load_state(recorded)
    return term


# --------------------------------------------------------------------------------------------------
# from the record to batches
def groups_of(record: StepRecord, weights: dict[str, float]) -> list[list[ScoredResponse]]:
    """Return the responses of a record, group by group. They have no texts.

    If the record has named rewards, the rewards are their sums with these `weights`."""
    header = record.header
    positions_of_rows = np.cumsum(record.prompt_lengths.astype(np.int64) + record.response_lengths)
    groups: list[list[ScoredResponse]] = []
    kept_of_rows = kept_tokens(record)
    for row in range(len(record)):
        prompt_ids, token_ids = record.prompt_and_response(row)
        turns = [Turn(*turn[:2], "", turn[2]) for turn in header.turns.get(str(row), [])]
        experts = None
        if record.engine_experts is not None:
            end = int(positions_of_rows[row])
            begin = end - len(prompt_ids) - len(token_ids)
            experts = record.engine_experts[begin:end].astype(np.int16)
        named_rewards = {name: values[row] for name, values in header.named_rewards.items()}
        score = Score(float(record.rewards[row]), header.verdicts[row], rewards=named_rewards)
        # `reward.truncated` is not weighted, but an episode that was cut off has its own rewards
        if named_rewards and (turns or score.verdict != "truncated"):
            score = score.weighted(weights or None)
        response = ScoredResponse(
            problem=Problem(header.tasks[row], int(record.problems[row]), "", None),
            sample=int(record.samples[row]),
            prompt_ids=prompt_ids.tolist(),
            token_ids=token_ids.tolist(),
            logprobs=record.engine_logp[record.tokens_of(row)],
            finish_reason=header.finish_reasons[row],
            text="",
            policy_step=int(record.policy_steps[row]),
            experts=experts,
            turns=turns,
            score=score,
            kept=kept_of_rows[row],
        )
        if record.groups[row] == len(groups):
            groups.append([])
        groups[-1].append(response)
    return groups


def kept_tokens(record: StepRecord) -> list[KeptTokens | None]:
    """Return the kept tokens of each row, None for each if the record has none."""
    if record.kept_counts is None or record.kept_ids is None:
        return [None] * len(record)
    kept: list[KeptTokens | None] = []
    begin = 0
    for row in range(len(record)):
        counts = record.kept_counts[record.tokens_of(row)]
        end = begin + int(counts.sum())
        kept.append(KeptTokens(counts, record.kept_ids[begin:end]))
        begin = end
    return kept


def to_rollout_batch(record: StepRecord, rollout: Rollout) -> RolloutBatch:
    """Pack the responses of a record.

    The mask has all tokens that the policy wrote, as before the trainer leaves responses out."""
    batch = pack(rollout.responses, pad_id=0)
    sampled_BT = unflattened(record.sampled, batch)
    return replace(batch, mask_BT=sampled_BT, sampled_BT=sampled_BT.clone())


def add_old_policy(
    record: StepRecord,
    batch: RolloutBatch,
    algorithm: Algorithm,
    engine_is_old: bool,
    accumulator: MetricAccumulator,
) -> OldPolicyBatch:
    """Add the recorded results of the passes before the updates, as OldPolicyPass does."""
    old_logp_BT = batch.engine_logp_BT if engine_is_old else unflattened(record.old_logp, batch)
    ref_logp_BT = unflattened_or_none(record.ref_logp, batch)
    if ref_logp_BT is not None:
        diagnostics.measure_reference_kl(old_logp_BT, ref_logp_BT, batch.mask_BT, accumulator)
    correction_BT = None
    if algorithm.correction.has_rollout_weights:
        correction_BT = algorithm.correction(old_logp_BT, batch.engine_logp_BT, batch.mask_BT)
        diagnostics.measure_correction(correction_BT, old_logp_BT, batch, accumulator)
    experts_BSLK = None
    if record.old_experts is not None:
        shape = (*batch.attention_BS.shape, *record.old_experts.shape[1:])
        experts_BSLK = torch.full(shape, NOT_RECORDED, dtype=torch.int16)
        experts_BSLK[batch.attention_BS] = torch.from_numpy(record.old_experts).short()
    sum_pi_squared_BT = None
    if algorithm.advantage.needs_sum_pi_squared:
        sum_pi_squared_BT = unflattened_or_none(record.sum_pi_squared, batch)
    return batch.with_old_policy(
        old_logp_BT, experts_BSLK, ref_logp_BT, correction_BT, sum_pi_squared_BT
    )


def unflattened_or_none(x: ndarray | None, batch: TokenBatch) -> Tensor | None:
    """Return the result of `unflattened`, or None for None."""
    return None if x is None else unflattened(x, batch)


def unflattened(x: ndarray, batch: TokenBatch) -> Tensor:
    """Return an array over all response tokens as a tensor [B, T, ...], 0 at padding."""
    real_BT = batch.real_BT
    x_N = torch.from_numpy(x)
    x_BT = torch.zeros((*real_BT.shape, *x.shape[1:]), dtype=x_N.dtype)
    x_BT[real_BT] = x_N
    return x_BT


def flat(x_BT: Tensor, batch: TokenBatch) -> ndarray:
    """Return the entries of the response tokens, row after row."""
    real_BT = batch.real_BT
    return x_BT.detach().expand(real_BT.shape)[real_BT].numpy()


def recorded_output(update: RecordedUpdate, minibatch: TrainBatch) -> PolicyOutput:
    """Return the recorded results of an update's forward pass, as leaves of a new graph."""
    logp_BT = unflattened(update.logp, minibatch).requires_grad_()
    entropy_BT = unflattened_or_none(update.entropy, minibatch)
    values_BT = unflattened_or_none(update.values, minibatch)
    for leaf_BT in (entropy_BT, values_BT):
        if leaf_BT is not None:
            leaf_BT.requires_grad_()
    experts_BSLK = None
    if update.experts is not None:
        experts_BTLK = unflattened(update.experts, minibatch).short()
        shape = (*minibatch.tokens_BS.shape, *experts_BTLK.shape[2:])
        experts_BSLK = torch.full(shape, NOT_RECORDED, dtype=torch.int16)
        # the position before a token predicts it
        experts_BSLK[:, minibatch.prompt_width - 1 : -1] = experts_BTLK
    return PolicyOutput(logp_BT, entropy_BT, experts_BSLK, values_BT)


# --------------------------------------------------------------------------------------------------
# the update
def minibatch_statistic(
    objective: Objective, output: PolicyOutput, minibatch: TrainBatch, has_ratio_1: bool
) -> Tensor | None:
    """Return the number that the objective's loss depends on, as OldPolicyPass.statistic does."""
    if not objective.needs_statistic:
        return None
    logp_BT = minibatch.old_logp_BT if has_ratio_1 else output.logp_BT
    return objective.statistic(loss_inputs(replace(output, logp_BT=logp_BT), minibatch))


def replay_update(
    update: RecordedUpdate, inputs: TermInputs, terms: Sequence[Term]
) -> ReplayedUpdate:
    """Compute the loss of an update, and its gradient by the log-probs."""
    minibatch = inputs.batch
    output = inputs.output
    loss = torch.zeros(())
    for term in terms:
        loss = loss + term(inputs)
    inputs.accumulator.mean("optim/loss", loss.detach())
    gradient_BT = torch.zeros_like(output.logp_BT)
    if loss.requires_grad:
        (computed_BT,) = torch.autograd.grad(loss, [output.logp_BT], allow_unused=True)
        if computed_BT is not None:
            gradient_BT = computed_BT
    with torch.no_grad():
        outputs = inputs.outputs
        if outputs is None:
            raise ValueError("the loss has no policy term")
        log_ratio_BT = log_ratio(output.logp_BT, minibatch.old_logp_BT, minibatch.mask_BT)
        weight_BT = torch.where(minibatch.mask_BT, outputs.weight_BT.float(), 0.0)
    return ReplayedUpdate(
        rows=update.rows,
        log_ratio=flat(log_ratio_BT, minibatch),
        weight=flat(weight_BT, minibatch),
        clipped=flat(clip_bits(outputs), minibatch),
        gradient=flat(gradient_BT, minibatch),
    )
