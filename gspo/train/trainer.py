"""The training loop, the training step and the update.

fit         for each step: train_step, evaluate if due, log, checkpoint if due
train_step  scored groups -> batch -> old log-probs -> advantages -> N mini-batches of updates
update      micro-batches -> sum of loss terms -> backward -> clip the gradient norm -> optimizer
            step

The paper (arXiv:2507.18071) leaves some choices open. Here the optimizer is AdamW with linear
warm-up, mini-batches are made of whole groups, gradients are clipped by their norm, and there is no
KL term unless one is chosen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Totals
from gspo.algorithm.kl import KLCoefficient
from gspo.data.batch import TrainBatch, pack, to_device
from gspo.data.samples import rewards_of
from gspo.data.seeding import permutation
from gspo.distributed.ranks import Ranks
from gspo.model.forward.outputs import PolicyOutput
from gspo.model.policy import Policy
from gspo.model.sharding.dtensors import clip_grad_norm
from gspo.rollout.engines.process import EngineEnded
from gspo.rollout.episodes.episode import CUT
from gspo.rollout.sources.base import Rollout, RolloutSource
from gspo.train import diagnostics, flops
from gspo.train.accumulator import MetricAccumulator
from gspo.train.checkpoint import TrainState
from gspo.train.credit import assign_credit
from gspo.train.extensions import Extensions, TrainedStep
from gspo.train.loss_terms import EntropyTerm, loss_inputs, loss_terms
from gspo.train.optimizer import make_optimizer, parameter_groups
from gspo.train.settings import Algorithm, OptimSettings, PolicySettings, TrainerSettings


class Trainer:
    """Trains one policy by one algorithm.

    `reference` is the policy to which a KL term is measured; `extensions` are the user's own
    metrics and callbacks. `ranks` are the processes that train the policy together: each has the
    whole batch, passes its share of the rows through the model, and makes the same updates.
    """

    def __init__(
        self,
        policy: Policy,
        source: RolloutSource,
        algorithm: Algorithm,
        *,
        optim: OptimSettings,
        settings: TrainerSettings,
        policy_settings: PolicySettings,
        seed: int,
        reference: Policy | None = None,
        extensions: Extensions | None = None,
        ranks: Ranks | None = None,
    ):
        self.policy, self.source, self.algorithm, self.reference = (
            policy,
            source,
            algorithm,
            reference,
        )
        self.ranks = ranks or Ranks()
        self.optim, self.settings, self.seed = optim, settings, seed
        self.extensions = extensions or Extensions({}, {})
        self.replay = policy_settings.routing_replay
        if self.replay != "none":
            policy.routing.check_replay()
        self.old_logprobs = policy_settings.old_logprobs
        self.skips_old_pass = (
            policy_settings.old_pass == "auto" and self._engine_reports_old_policy()
        )
        if self.skips_old_pass and policy.routing.layers:
            source.record_experts = True
        self.starts_at_old_policy = self._starts_at_old_policy()
        self.state = TrainState()
        # measured, and not compared with rollout.routes_floor yet
        self.routes_agreements: list[Tensor] = []
        # set when its end is noticed after the last update of a step
        self.engine_ended: EngineEnded | None = None
        self.coefficient = KLCoefficient(algorithm.kl) if algorithm.kl.needs_reference else None
        if self.coefficient and not reference:
            raise ValueError(
                f"kl.coef={algorithm.kl.coef} without reference policy: there is nothing to measure KL to"
            )
        self.terms = loss_terms(
            algorithm, settings.aggregation, self.coefficient, settings.router_aux_loss_coef
        )
        self.entropy: EntropyTerm | None = None
        if entropy_coefficient := settings.entropy_coefficient():
            self.entropy = EntropyTerm(entropy_coefficient, settings.aggregation)
            self.terms.append(self.entropy)
            policy.enable_entropy_gradient()
        self.every_row = any(term.needs_every_row for term in self.terms)
        groups = parameter_groups(policy, optim.router_lr_factor, policy_settings.freeze_router)
        self.optimizer = make_optimizer(groups, optim)

    def _engine_reports_old_policy(self) -> bool:
        """Tell whether the engine reports the old policy's log-probs and experts, but for rounding,
        and nothing else is needed from a pass under the old policy."""
        needs_pass = (
            self.algorithm.correction.name != "none"
            or self.policy.value_head
            or self.replay == "r3"
        )
        exact = self.source.exact and self.policy.precision == self.policy.model.dtype
        return self.old_logprobs == "step_start" and exact and not needs_pass

    def _starts_at_old_policy(self) -> bool:
        """Tell whether the old log-probs are those of the weights that the step begins with,
        whoever computed them, and the objective's ratio divides by them."""
        samples_ahead = self.source.settings.staleness or self.source.settings.token_budget
        divides_by_old = self.algorithm.objective.ratio_to == "old"
        return divides_by_old and (self.old_logprobs == "step_start" or not samples_ahead)

    def restore(self, state: TrainState) -> None:
        """Continue from a checkpoint's counters. Weights, optimizer and reference must have been
        loaded before.
        """
        self.state = state
        self.extensions.load_state(state.callbacks)
        self.source.load_state(state.source, state.step)
        if self.coefficient and state.kl_coef is not None:
            self.coefficient.value = state.kl_coef
        if self.entropy and state.entropy_coef is not None:
            self.entropy.coefficient.value, self.entropy.coefficient.measured = state.entropy_coef

    def fit(
        self,
        steps: int,
        evaluate: Callable[[int], dict[str, float]],
        log: Callable[[int, dict[str, float], Rollout | None], None],
        checkpoint: Callable[[int, bool], None],
        stop: Callable[[], bool],
    ) -> None:
        """Train from the current step up to step `steps`; when `stop()` is true on any rank,
        training ends after the current step.

        `evaluate(step)` returns the metrics of held-out problems at steps where they are due, else
        nothing. `checkpoint(step, last)` writes a checkpoint where one is due, and always after the
        last step. Raises EngineEnded if the engine's process has ended: after the current step if
        that no longer needs the engine, else with the state of the step before.
        """
        if self.state.step == 0:
            log(0, evaluate(0), None)
        for step in range(self.state.step + 1, steps + 1):
            self.extensions.before_step(step, self)
            rollout = self.source.next(step)
            metrics = self.train_step(step, rollout) | evaluate(step)
            log(step, metrics, rollout)
            stopping = self.ranks.any(self.extensions.after_step(step, self, metrics) or stop())
            checkpoint(step, stopping or bool(self.engine_ended) or step == steps)
            if self.engine_ended and step < steps:
                raise self.engine_ended
            if stopping:
                return

    def train_step(self, step: int, rollout: Rollout) -> dict[str, float]:
        """Train on one batch of scored groups: old log-probs, advantages, N updates. Returns the
        step's metrics.
        """
        started, accumulator = time.perf_counter(), MetricAccumulator()
        batch = pack(rollout.responses, self.policy.pad_id)
        groups = torch.arange(len(batch)).split([len(group) for group in rollout.groups])
        updates = [
            list(self.minibatches(groups, step, epoch)) for epoch in range(self.settings.epochs)
        ]
        own_N = (
            torch.cat([rows[self.ranks.shard_rows(len(rows))] for rows in updates[0]]).sort().values
        )
        with accumulator.timed("time/old_logprobs_s"):
            self.remember_old_policy(batch, own_N, accumulator)
        measured_kl = self.credit(batch, rollout, accumulator)
        diagnostics.rollout(
            rollout.sampled, rollout.ungraded, rollout.filtered, rollout.limit, accumulator
        )
        diagnostics.staleness(rollout.responses, step, rollout.in_flight, accumulator)
        for epoch in updates:
            accumulator.count("optim/missing_updates", self.settings.minibatches - len(epoch))
        for number, rows in enumerate(chain.from_iterable(updates), start=1):
            self.update(batch.rows(rows), torch.isin(rows, own_N), number, accumulator)
        if self.coefficient:  # after the updates, which used the coefficient that is logged
            self.coefficient.update(measured_kl, len(batch))
            self.state.kl_coef = self.coefficient.value
        if self.entropy:
            self.state.entropy_coef = [
                self.entropy.coefficient.value,
                self.entropy.coefficient.measured,
            ]
        with accumulator.timed("time/diagnostics_s"):
            self.routing_after_step(batch, own_N, step, accumulator)
        self.refresh_reference(step)
        self.state.step = step
        # passes for old and reference log-probs; an update costs three, as a backward pass costs
        # two forward passes, or one with LoRA, where no gradient of the weights is computed
        update = 2 if self.policy.adapter else 3
        passes = (
            (not self.skips_old_pass) + (self.reference is not None) + update * self.settings.epochs
        )
        train_s = time.perf_counter() - started
        costs = flops.account(self.state, self.policy, batch, rollout, passes, train_s)
        try:
            self.source.update(step)
        except EngineEnded as error:
            self.engine_ended = error
        lr = {"optim/lr": self.optimizer.param_groups[0]["lr"]}
        metrics = dict(accumulator.result(self.ranks)) | rollout.synced | costs | lr
        return metrics | self.extensions.measure(
            TrainedStep(step, batch, rollout.responses, metrics)
        )

    def minibatches(self, groups: Sequence[Tensor], step: int, epoch: int) -> Iterator[Tensor]:
        """Yield the rows of each mini-batch of an epoch: whole groups, in an order that is drawn
        anew in each epoch.
        """
        order = torch.from_numpy(permutation(len(groups), self.seed, "minibatches", step, epoch))
        # fewer where too many groups could not be graded
        count = min(self.settings.minibatches, len(groups))
        for chosen in order.tensor_split(count):
            yield torch.cat([groups[i] for i in chosen])

    def score(self, policy: Policy, batch: TrainBatch, own_N: Tensor) -> PolicyOutput:
        """Compute log-probs and values of a batch, each rank those of its own rows, and experts of
        these alone.
        """
        alone = self.ranks.world_size == 1
        scored = policy.score(batch, self.settings.micro_batch_size, None if alone else own_N)
        if alone:
            return scored
        values_BT = None if scored.values_BT is None else self.ranks.all_reduce(scored.values_BT)
        return replace(scored, logp_BT=self.ranks.all_reduce(scored.logp_BT), values_BT=values_BT)

    @torch.no_grad()
    def remember_old_policy(
        self, batch: TrainBatch, own_N: Tensor, accumulator: MetricAccumulator
    ) -> None:
        """Record in the batch the old policy's log-probs, routing and values, and the reference
        policy's log-probs.

        They are computed under the weights of the step's start. Where the source kept log-probs and
        routing under the weights that sampled (old_logprobs=behaviour or engine, with responses
        older than the step), these are used. `own_N` are this rank's rows.
        """
        if self.skips_old_pass:
            batch.old_logp_BT, batch.experts_BSLK = batch.engine_logp_BT, batch.engine_experts_BSLK
        if self.replay == "r3":
            batch.replay_BSLK = batch.engine_experts_BSLK
        if batch.old_logp_BT is None or self.policy.value_head:
            scored = self.score(self.policy, batch, own_N)
            batch.old_values_BT = scored.values_BT
            if batch.old_logp_BT is None:
                batch.old_logp_BT, batch.experts_BSLK = scored.logp_BT, scored.experts_BSLK
        if not self.skips_old_pass and len(own_N):
            self.compare(batch if self.ranks.world_size == 1 else batch.rows(own_N), accumulator)
        if self.old_logprobs == "engine":
            batch.old_logp_BT = batch.engine_logp_BT
        if self.reference:
            # with r3 this pass replays the engine's experts, as all passes do
            batch.ref_logp_BT = self.score(self.reference, batch, own_N).logp_BT
            diagnostics.reference(batch, accumulator)
        if self.algorithm.correction.name != "none":
            batch.correction_BT = self.algorithm.correction(
                batch.old_logp_BT, batch.engine_logp_BT, batch.mask_BT
            )
            diagnostics.correction(batch, accumulator)
        if self.replay == "r2":
            batch.replay_BSLK = batch.experts_BSLK

    def compare(self, batch: TrainBatch, accumulator: MetricAccumulator) -> None:
        """Measure how far the engine's log-probs and experts are from the trainer's. The next
        update reads the share of experts that agree."""
        diagnostics.mismatch(batch, accumulator)
        if batch.engine_experts_BSLK is not None:
            self.routes_agreements.append(diagnostics.engine_routes(batch, accumulator))

    def check_routes(self, agreements: list[float]) -> None:
        """Raise RuntimeError if the engine's experts cannot be those of the same tokens under the
        same weights.
        """
        floor = self.source.settings.routes_floor
        for agreement in agreements:
            if agreement < floor:
                raise RuntimeError(
                    f"routing/engine_agreement={agreement:.3f} is below rollout.routes_floor={floor}: the routes that "
                    "the engine returned are not those of these tokens, or its weights are far from the trainer's"
                )

    @torch.no_grad()
    def credit(
        self, batch: TrainBatch, rollout: Rollout, accumulator: MetricAccumulator
    ) -> float | None:
        """Set the batch's advantages. Returns the KL to the reference policy in nats per token, by
        which an adaptive coefficient is updated; None without KL term."""
        responses, kl = rollout.responses, self.algorithm.kl
        rewards_B = torch.tensor(
            [reward for group in rollout.groups for reward in rewards_of(group)]
        )
        sizes = torch.tensor([len(group) for group in rollout.groups])
        groups_B = torch.arange(len(sizes)).repeat_interleave(sizes)
        assign_credit(
            batch,
            rewards_B,
            groups_B,
            limit=rollout.limit,
            algorithm=self.algorithm,
            coefficient=self.coefficient,
            running=self.state.rewards,
            accumulator=accumulator,
        )
        measured_kl = None
        if self.coefficient:
            kl_BT = kl.estimate(batch.old_logp_BT, batch.ref_logp_BT, batch.mask_BT)
            measured_kl = float(kl_BT.sum() / batch.mask_BT.sum())
            accumulator.mean("kl/ref", measured_kl, 1)
            accumulator.mean("kl/coef", self.coefficient.value, 1)
        if self.settings.mask_truncated:
            cut_B = torch.tensor([r.finish_reason in CUT for r in responses])
            batch.mask_BT &= ~cut_B.unsqueeze(-1)
            accumulator.mean("filter/truncated", cut_B.sum(), len(cut_B))
        return measured_kl

    def update(
        self, batch: TrainBatch, own_B: Tensor, minibatch: int, accumulator: MetricAccumulator
    ) -> None:
        """Take one optimizer step on a mini-batch, of which this rank passes the rows in `own_B`
        through the model. The loss is normalised by the counts of the whole mini-batch."""
        totals = Totals.of(batch.mask_BT)
        every_row = self.every_row or not batch.adv_BT.any()
        own = batch if own_B.all() else batch.rows(own_B) if own_B.any() else None
        loads_LE = (
            old_loads(own, self.policy, self.ranks) if self.settings.router_aux_loss_coef else None
        )
        micros = own.split(self.settings.micro_batch_size) if own else []
        with self.policy.cached_casts():
            # where all advantages are 0 the gradient is exactly 0
            for i, learns in self.policy.lockstep(
                [every_row or bool(micro.adv_BT.any()) for micro in micros]
            ):
                if i is None:
                    self.policy.idle(batch, learns)
                    continue
                micro = micros[i].to(self.policy.device)
                with self.policy.routing.balancing(loads_LE):
                    with torch.set_grad_enabled(learns):
                        output = self.policy.forward(micros[i])
                        if minibatch == 1 and self.starts_at_old_policy:
                            self.start_at_old_policy(output, micro, accumulator)
                        inputs = loss_inputs(output, micro)
                        loss = sum(
                            term(inputs, totals, minibatch, accumulator) for term in self.terms
                        )
                    if learns:
                        loss.backward()
                accumulator.mean("optim/loss", loss.detach(), len(micro) / len(batch))
                with accumulator.timed("time/diagnostics_s"):
                    self.observe(output, micro, minibatch, accumulator)
        if self.entropy:
            self.entropy.end_update(totals, self.ranks)
        lr = self.optim.lr_of(self.state.updates + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        parameters = self.policy.parameters()
        self.ranks.all_reduce_gradients(parameters)
        norm = clip_grad_norm(parameters, self.optim.max_grad_norm)
        # One copy for all numbers that decide how to go on: the CPU waits here for the GPU, and
        # nowhere else.
        deciding = torch.stack(
            [norm, *(share.to(norm) for share in self.routes_agreements)]
        ).tolist()
        self.routes_agreements.clear()
        self.check_routes(deciding[1:])
        finite = math.isfinite(deciding[0])
        if finite:
            self.optimizer.step()
            self.state.updates += 1
            accumulator.mean("optim/grad_norm", norm, 1)
            accumulator.largest("optim/grad_norm_max", norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.count_skipped(not finite, accumulator)

    @torch.no_grad()
    def start_at_old_policy(
        self, output: PolicyOutput, micro: TrainBatch, accumulator: MetricAccumulator
    ) -> None:
        """Measure what rounding does to the ratios of a first mini-batch, then make them exactly 1.

        The policy still is the old policy there, and this pass has just computed its log-probs.
        Those of the pass under the old policy differ by rounding alone, because other matrix shapes
        round otherwise. The engine's log-probs stay what they are with policy.old_logprobs=engine:
        then the ratio is to the engine.
        """
        objective = self.algorithm.objective
        clip_range = (
            min(objective.clip_low, objective.clip_high) if objective.clips_sequence_ratio else None
        )
        inputs = loss_inputs(output, micro)
        diagnostics.rounding_floor(objective(inputs), inputs, clip_range, accumulator)
        if self.old_logprobs != "engine":
            micro.old_logp_BT = output.logp_BT.detach()

    def count_skipped(self, skipped: bool, accumulator: MetricAccumulator) -> None:
        """Count the updates in a row that were skipped because the gradient was not finite.

        Raises RuntimeError after too many of them, because their cause will not go away by itself.
        """
        self.state.skipped = self.state.skipped + 1 if skipped else 0
        accumulator.count("optim/skipped", skipped)
        if self.state.skipped > self.optim.max_skipped:
            raise RuntimeError(
                f"the gradients of {self.state.skipped} updates in a row were not finite "
                f"(optim.max_skipped={self.optim.max_skipped})"
            )

    @torch.no_grad()
    def observe(
        self,
        output: PolicyOutput,
        micro: TrainBatch,
        minibatch: int,
        accumulator: MetricAccumulator,
    ) -> None:
        """Measure what the update's forward pass shows. In the first mini-batch that is a pass
        under the old policy.
        """
        if self.skips_old_pass and minibatch == 1:
            compared = micro.with_all_sampled()
            compared.old_logp_BT = output.logp_BT
            compared.experts_BSLK = output.experts_BSLK
            self.compare(compared, accumulator)
        diagnostics.ratios(
            output.logp_BT, micro, self.algorithm.objective.log_ratio_bound, accumulator
        )
        diagnostics.entropy(output.entropy_BT, micro, accumulator)
        if output.experts_BSLK is not None:
            diagnostics.routing(
                output.experts_BSLK, micro, self.policy.routing.experts, minibatch, accumulator
            )

    @torch.no_grad()
    def routing_after_step(
        self, batch: TrainBatch, own_N: Tensor, step: int, accumulator: MetricAccumulator
    ) -> None:
        """Measure routing consistency after the last update, on a sample of the step's responses."""
        if batch.experts_BSLK is None:
            return
        chosen = permutation(len(batch), self.seed, "consistency", step)[
            : self.settings.consistency_sample
        ]
        rows = torch.from_numpy(chosen)
        own_B = torch.isin(rows, own_N)  # the others are other ranks'
        sample = batch.rows(rows)
        sample.mask_BT = sample.mask_BT & own_B.unsqueeze(-1)
        # the record was made without replay, while that of r3 was made with one
        if self.replay == "r2":
            sample.replay_BSLK = None
        own_rows = own_B.nonzero().squeeze(-1)
        own_BSLK = self.policy.score(sample, self.settings.micro_batch_size, own_rows).experts_BSLK
        diagnostics.routing(own_BSLK, sample, self.policy.routing.experts, None, accumulator)

    def refresh_reference(self, step: int) -> None:
        """Copy the current weights to the reference policy when kl.refresh_every says so."""
        every = self.algorithm.kl.refresh_every
        if self.reference and every and step % every == 0:
            self.reference.model.load_state_dict(self.policy.model.state_dict())


def old_loads(own: TrainBatch | None, policy: Policy, ranks: Ranks) -> Tensor:
    """Return the share of a mini-batch's choices of experts that fell on each, under the old
    policy: [L, E], on the policy's device. Each rank counts its own rows; None stands for no rows.
    """
    routing = policy.routing
    counts_LE = torch.zeros(routing.layers, routing.experts, dtype=torch.int64)
    if own:
        counts_LE = diagnostics.expert_counts(own.experts_BSLK, own, routing.experts)
    counts_LE = ranks.all_reduce(counts_LE)
    return to_device(
        counts_LE.float() / counts_LE.sum(-1, keepdim=True).clamp(min=1), policy.device
    )
