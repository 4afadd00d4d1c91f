"""The passes before a step's updates: under the old policy and under the reference policy.

Shape suffixes: B responses, T response tokens, S all tokens, N row indices, L MoE layers, K experts
per token.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gspo.algorithm.corrections import Correction
from gspo.algorithm.objectives import Objective
from gspo.data.batch import OldPolicyBatch, RolloutBatch, TokenBatch, TrainBatch
from gspo.data.pack import pack_recorded
from gspo.data.samples import Response
from gspo.distributed.ranks import Ranks
from gspo.model.forward.outputs import PolicyOutput
from gspo.model.policy import Policy
from gspo.rollout.engines.base import Engine
from gspo.rollout.sources.base import RolloutSource
from gspo.train import diagnostics
from gspo.train.accumulator import MetricAccumulator
from gspo.train.engine_comparison import EngineComparison
from gspo.train.loss_terms import loss_inputs
from gspo.train.settings import PolicySettings, TrainerSettings


def is_exact(engine: Engine) -> bool:
    """Return whether the engine's log-probs are the policy's own, but for rounding.

    This holds only with our own forward pass (`Policy.network`). In transformers' forward of other
    architectures, decoding with a cache may differ from a pass over the whole sequence.
    Nemotron-H, for example, clamps its time steps differently."""
    policy = engine.policy
    same_precision = policy.precision == policy.model.dtype
    return engine.shares_weights and same_precision and policy.network is not None


class OldPolicyPass:
    """Adds log-probs and routing of the old policy to a batch, and log-probs of the reference.

    The pass under the old policy is skipped if the engine's results stand for its results.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Policy | None,
        source: RolloutSource,
        correction: Correction,
        settings: PolicySettings,
        trainer_settings: TrainerSettings,
        sum_pi_squared: bool = False,
    ):
        self.policy = policy
        self.reference = reference
        self.correction = correction
        self.sum_pi_squared = sum_pi_squared  # compute it too, for advantages that need it
        self.settings = settings
        self.micro_batch_size = trainer_settings.micro_batch_size
        self.comparison = EngineComparison(source.settings.routes_floor)
        if settings.routing_replay != "none":
            policy.routing.check_replay()
        self.is_skipped = settings.skips_old_pass(
            exact_engine=is_exact(source.engine),
            samples_ahead=source.settings.samples_ahead,
            correction=correction.name,
            critic=bool(policy.value_head),
            sum_pi_squared=sum_pi_squared,
        )
        if self.is_skipped and policy.routing.layers:
            source.start_recording_experts()

    @property
    def passes(self) -> int:
        """The number of forward passes over the batch."""
        old = 0 if self.is_skipped else 1
        reference = 1 if self.reference else 0
        return old + reference

    @torch.no_grad()
    def add(
        self,
        batch: RolloutBatch,
        responses: Sequence[Response],
        local_rows_N: Tensor,
        ranks: Ranks,
        accumulator: MetricAccumulator,
    ) -> tuple[OldPolicyBatch, Tensor | None]:
        """Return the batch with the results of the passes, and the critic's values.

        All are computed under the weights of the step's start, unless the source has kept log-probs
        and routing under the weights that sampled (old_logprobs=behaviour or engine, with responses
        older than the step).
        """
        replay = self.settings.routing_replay
        if replay == "r3":
            batch = replace(batch, replay_BSLK=batch.engine_experts_BSLK)
        if self.is_skipped:
            results = batch.engine_logp_BT, batch.engine_experts_BSLK
        else:
            results = pack_recorded(responses, batch)
        values_BT = None
        sum_pi_squared_BT = None
        if results is None or self.policy.value_head or self.sum_pi_squared:
            scored = self.score(
                self.policy, batch, local_rows_N, ranks, sum_pi_squared=self.sum_pi_squared
            )
            values_BT = scored.values_BT
            sum_pi_squared_BT = scored.sum_pi_squared_BT
            results = results or (scored.logp_BT, scored.experts_BSLK)
        old_logp_BT, experts_BSLK = results
        if not self.is_skipped and len(local_rows_N):
            scored_batch = batch.with_old_policy(old_logp_BT, experts_BSLK)
            if ranks.world_size > 1:
                scored_batch = scored_batch.rows(local_rows_N)
            self.comparison.measure(scored_batch, accumulator)
        if self.settings.old_logprobs == "engine":
            old_logp_BT = batch.engine_logp_BT

        ref_logp_BT = None
        if self.reference:
            # with r3 this pass replays the engine's experts, as all passes do
            ref_logp_BT = self.score(self.reference, batch, local_rows_N, ranks).logp_BT
            diagnostics.measure_reference_kl(old_logp_BT, ref_logp_BT, batch.mask_BT, accumulator)
        correction_BT = None
        if self.correction.has_rollout_weights:
            correction_BT = self.correction(old_logp_BT, batch.engine_logp_BT, batch.mask_BT)
            diagnostics.measure_correction(correction_BT, old_logp_BT, batch, accumulator)
        if replay == "r2":
            batch = replace(batch, replay_BSLK=experts_BSLK)
        old_batch = batch.with_old_policy(
            old_logp_BT, experts_BSLK, ref_logp_BT, correction_BT, sum_pi_squared_BT
        )
        return old_batch, values_BT

    @torch.no_grad()
    def statistic(
        self,
        objective: Objective,
        minibatch: TrainBatch,
        is_local_B: Tensor,
        ranks: Ranks,
        has_ratio_1: bool,
    ) -> Tensor | None:
        """Return the number of a whole mini-batch that the objective's loss depends on, if any.

        It takes a pass under the current policy, unless all ratios are 1 by definition."""
        if not objective.needs_statistic:
            return None
        logp_BT = minibatch.old_logp_BT
        if not has_ratio_1:
            local_rows_N = is_local_B.nonzero().squeeze(-1)
            logp_BT = self.score(self.policy, minibatch, local_rows_N, ranks).logp_BT
        return objective.statistic(loss_inputs(PolicyOutput(logp_BT, None, None), minibatch))

    def score(
        self,
        policy: Policy,
        batch: TokenBatch,
        local_rows_N: Tensor,
        ranks: Ranks,
        *,
        sum_pi_squared: bool = False,
    ) -> PolicyOutput:
        """Compute log-probs and values of a batch, and the experts of the local rows."""
        rows_N = None if ranks.world_size == 1 else local_rows_N
        scored = policy.score(batch, self.micro_batch_size, rows_N, sum_pi_squared=sum_pi_squared)
        if ranks.world_size == 1:
            return scored
        reduced = replace(scored, logp_BT=ranks.all_reduce(scored.logp_BT))
        if scored.values_BT is not None:
            reduced.values_BT = ranks.all_reduce(scored.values_BT)
        if scored.sum_pi_squared_BT is not None:
            reduced.sum_pi_squared_BT = ranks.all_reduce(scored.sum_pi_squared_BT)
        return reduced
