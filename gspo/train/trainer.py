"""The training loop, the training step and the update.

fit         for each step: train_step, evaluate if due, log, checkpoint if due
train_step  scored groups -> batch -> old log-probs -> advantages -> N mini-batches of updates
update      micro-batches -> sum of loss terms -> backward -> clipped gradient -> optimizer step

The paper (arXiv:2507.18071) leaves some choices open. Here the optimizer is AdamW with linear
warm-up, mini-batches are made of whole groups, gradients are clipped by their norm, and there is no
KL term by default.

With several ranks each rank has the whole batch and makes the same updates, but passes only its
share of the rows, the local rows, through the model.

Shape suffixes: B responses, T response tokens, S all tokens, N row indices, L MoE layers, K experts
per token, E experts.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Totals
from gspo.algorithm.kl import KLCoefficient
from gspo.data.batch import TrainBatch
from gspo.data.pack import pack
from gspo.data.seeding import permutation
from gspo.distributed.ranks import Ranks
from gspo.io.errors import SettingError
from gspo.model.policy import Policy
from gspo.model.sharding.dtensors import clip_grad_norm
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.sources.base import Rollout, RolloutSource
from gspo.train import diagnostics, flops, routing
from gspo.train.accumulator import MetricAccumulator
from gspo.train.checkpoint import TrainState
from gspo.train.credit import add_advantages
from gspo.train.extensions import Extensions, TrainedStep
from gspo.train.loss_terms import EntropyTerm, PolicyTerm, TermInputs, loss_terms
from gspo.train.measured_pass import (
    compare_with_engine,
    measure_pass,
    reduce_minibatch,
    start_at_old_policy,
)
from gspo.train.minibatches import local_rows, split_into_minibatches
from gspo.train.old_policy import OldPolicyPass
from gspo.train.optimizer import make_optimizer, parameter_groups
from gspo.train.recorder import Recorder
from gspo.train.settings import Algorithm, OptimSettings, PolicySettings, TrainerSettings
from gspo.train.signal_probe import SignalProbe, measure_snr


class Trainer:
    """Trains a policy by an algorithm.

    `reference` is the policy to which a KL term is measured. `extensions` are the user's own
    metrics and callbacks. `ranks` are the processes that train the policy together. `recorder`
    records steps for a later replay. `probe` measures the signal of batches.
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
        recorder: Recorder | None = None,
        probe: SignalProbe | None = None,
    ):
        if algorithm.kl.needs_reference and not reference:
            raise SettingError(
                "kl.coef",
                algorithm.kl.coef,
                "without reference policy: there is nothing to measure KL to",
            )
        self.policy = policy
        self.source = source
        self.algorithm = algorithm
        self.reference = reference
        self.optim = optim
        self.settings_lr = optim.lr  # a callback may set optim.lr
        self.settings = settings
        self.seed = seed
        self.extensions = extensions or Extensions({}, {})
        self.ranks = ranks or Ranks()
        self.recorder = recorder or Recorder()
        self.probe = probe or SignalProbe()
        self.policy_settings = policy_settings
        # The step starts at pi_old, unless responses are older and keep their own log-probs.
        recomputes_old = policy_settings.old_logprobs == "step_start"
        self.starts_at_old_policy = recomputes_old or not source.settings.samples_ahead
        # Ratios to pi_old are then 1 in the first update, up to rounding. With old_logprobs=engine
        # they are 1 up to the mismatch of engine and trainer.
        divides_by_old = algorithm.objective.ratio_to == "old"
        self.first_ratios_near_1 = divides_by_old and self.starts_at_old_policy
        uses_engine = policy_settings.old_logprobs == "engine"
        self.first_ratios_are_1 = self.first_ratios_near_1 and not uses_engine
        self.state = TrainState()
        self.old_policy = OldPolicyPass(
            policy,
            reference,
            source,
            algorithm.correction,
            policy_settings,
            settings,
            sum_pi_squared=algorithm.advantage.needs_sum_pi_squared,
        )
        # set if the end of the engine's process is noticed after the last update of a step
        self.engine_ended: EngineEnded | None = None
        self.coefficient = KLCoefficient(algorithm.kl)
        entropy = settings.entropy_coefficient()
        self.entropy = EntropyTerm(entropy, settings.aggregation) if entropy else None
        if self.entropy:
            policy.enable_entropy_gradient()
        self.terms = loss_terms(algorithm, settings, self.coefficient, self.entropy)
        self.needs_every_row = any(term.needs_every_row for term in self.terms)
        groups = parameter_groups(policy, optim.router_lr_factor, policy_settings.freeze_router)
        self.optimizer = make_optimizer(groups, optim)

    def restore(self, state: TrainState) -> None:
        """Continue from a checkpoint's counters.

        Weights, optimizer and reference must have been loaded before.
        """
        self.state = state
        if state.changed_lr:
            recorded_lr, changed_lr = state.changed_lr
            self.optim.lr = changed_lr
            if recorded_lr != self.settings_lr:
                # a rollback has lowered the lr of the settings: lower the callback's lr alike
                self.optim.lr = changed_lr * self.settings_lr / recorded_lr
        self.extensions.load_state(state.callbacks)
        self.source.load_state(state.source, state.step)
        if self.algorithm.kl.needs_reference and state.kl_coef is not None:
            self.coefficient.value = state.kl_coef
        if self.entropy and state.entropy_coef is not None:
            self.entropy.load_state(state.entropy_coef)

    # ----------------------------------------------------------------------------------------------
    # the loop

    def fit(
        self,
        steps: int,
        evaluate: Callable[[int], dict[str, float]],
        log: Callable[[int, dict[str, float], Rollout | None], None],
        checkpoint: Callable[[int, bool], None],
        stop: Callable[[], bool],
    ) -> None:
        """Train from the current step up to step `steps`.

        Training ends after the current step if `stop()` is true on any rank. `evaluate(step)`
        returns the metrics of held-out problems at steps at which they are due, else nothing.
        `checkpoint(step, last)` writes a checkpoint if it is due, and always after the last step.

        Raises EngineEnded if the engine's process has ended. If the current step no longer needs
        the engine, the step is completed and checkpointed first. Otherwise the state is that of
        the step before.
        """
        if self.state.step == 0:
            log(0, evaluate(0), None)
        for step in range(self.state.step + 1, steps + 1):
            self.extensions.before_step(step, self)
            rollout = self.source.next(step)
            metrics = self.train_step(step, rollout) | evaluate(step)
            log(step, metrics, rollout)
            ends = self.extensions.after_step(step, self, metrics) or stop()
            has_changed_lr = self.optim.lr != self.settings_lr
            self.state.changed_lr = [self.settings_lr, self.optim.lr] if has_changed_lr else None
            stopping = self.ranks.any(ends)
            is_last = stopping or bool(self.engine_ended) or step == steps
            checkpoint(step, is_last)
            if self.engine_ended and step < steps:
                raise self.engine_ended
            if stopping:
                return

    # ----------------------------------------------------------------------------------------------
    # the step

    def train_step(self, step: int, rollout: Rollout) -> dict[str, float]:
        """Train on a batch of scored groups, and return the step's metrics."""
        started = time.perf_counter()
        accumulator = MetricAccumulator()
        self.recorder.start(step, self.loss_state())

        # the rows of each mini-batch, epoch by epoch
        rollout_batch = pack(rollout.responses, self.policy.pad_id)
        group_sizes = [len(group) for group in rollout.groups]
        num_minibatches = self.settings.minibatches
        num_epochs = self.settings.epochs
        epochs = split_into_minibatches(group_sizes, num_minibatches, num_epochs, self.seed, step)
        local_rows_N = local_rows(epochs[0], self.ranks)

        # log-probs under the old policy, then advantages
        with accumulator.timed("time/old_logprobs_s"):
            old_batch, values_BT = self.old_policy.add(
                rollout_batch, rollout.responses, local_rows_N, self.ranks, accumulator
            )
        batch, measured_kl = add_advantages(
            old_batch,
            values_BT,
            rollout,
            algorithm=self.algorithm,
            kl_coefficient=self.coefficient.value,
            mask_truncated=self.settings.mask_truncated,
            running=self.state.rewards,
            accumulator=accumulator,
        )
        diagnostics.measure_rollout(rollout, accumulator)
        diagnostics.measure_staleness(rollout, step, accumulator)
        has_signal = bool((batch.adv_BT * batch.mask_BT).any())  # truncated responses may be masked
        self.state.without_signal = 0 if has_signal else self.state.without_signal + 1
        accumulator.largest("group/steps_without_signal", self.state.without_signal)
        self.recorder.add_batch(batch, rollout)
        self.measure_signal(batch, rollout, local_rows_N, step, accumulator)

        # one update per mini-batch
        minibatches = list(chain.from_iterable(epochs))
        planned = num_minibatches * num_epochs
        accumulator.count("optim/missing_updates", planned - len(minibatches))
        self.run_updates(batch, minibatches, local_rows_N, accumulator)

        # after the updates, which used the coefficients that are logged
        if self.algorithm.kl.needs_reference:
            self.coefficient.update(measured_kl, len(batch))
            self.state.kl_coef = self.coefficient.value
        if self.entropy:
            self.state.entropy_coef = self.entropy.state()
        with accumulator.timed("time/diagnostics_s"):
            self.routing_after_step(batch, local_rows_N, step, accumulator)
        every = self.algorithm.kl.refresh_every
        if self.reference and every and step % every == 0:
            self.reference.model.load_state_dict(self.policy.model.state_dict())
        self.state.step = step
        train_s = time.perf_counter() - started
        # LoRA computes no gradient of the weights, so a backward pass costs one forward pass
        update_passes = 2 if self.policy.adapter else 3
        passes = self.old_policy.passes + update_passes * num_epochs
        if self.algorithm.objective.needs_statistic:
            passes += num_epochs
            if self.first_ratios_are_1:
                # the first mini-batch's statistic takes no pass, see OldPolicyPass.statistic
                passes -= len(minibatches[0]) / len(batch)
        costs = flops.account(self.state, self.policy, batch, rollout, passes, train_s)
        try:
            self.source.update(step)
        except EngineEnded as error:
            self.engine_ended = error
        metrics = accumulator.result(self.ranks)
        metrics |= rollout.synced
        metrics |= costs
        metrics["optim/lr"] = self.optimizer.param_groups[0]["lr"]
        trained = TrainedStep(step, batch, rollout.responses, metrics)
        metrics |= self.extensions.measure(trained)
        return metrics | self.recorder.finish(metrics)

    def loss_state(self) -> dict[str, Any]:
        """Return the numbers beside settings that the loss of the next step depends on.

        lr                    the learning rate after the warm-up, which a callback may have changed
        kl_coef               the coefficient of the KL term
        entropy_coef          the state of the entropy bonus, see EntropyTerm; None without bonus
        rewards               the moments of all rewards before the step
        starts_at_old_policy  whether the first update begins with the weights of the old policy.
                              Its ratios to pi_old are then 1 (with policy.old_logprobs=engine up
                              to the mismatch). The objective does not matter, because the
                              objective of a replay may be another one
        skips_old_pass        whether the engine's log-probs stand for those of the old policy
        experts               the number of experts of each MoE layer; 0: a dense model
        """
        return {
            "lr": self.optim.lr,
            "kl_coef": self.coefficient.value,
            "entropy_coef": self.entropy.state() if self.entropy else None,
            "rewards": asdict(self.state.rewards),
            "starts_at_old_policy": self.starts_at_old_policy,
            "skips_old_pass": self.old_policy.is_skipped,
            "experts": self.policy.routing.experts if self.policy.routing.layers else 0,
        }

    # ----------------------------------------------------------------------------------------------
    # the update

    def run_updates(
        self,
        batch: TrainBatch,
        minibatches: list[Tensor],
        local_rows_N: Tensor,
        accumulator: MetricAccumulator,
    ) -> None:
        """Take an optimizer step on each mini-batch, which is given by its rows in the batch."""
        for update_number, rows_N in enumerate(minibatches, start=1):
            minibatch = batch.rows(rows_N)
            is_local_B = torch.isin(rows_N, local_rows_N)
            self.recorder.begin_update(update_number, rows_N[is_local_B])
            self.update(minibatch, is_local_B, update_number, accumulator)
        self.recorder.end_updates(local_rows_N, self.settings.micro_batch_size)

    def update(
        self,
        minibatch: TrainBatch,
        is_local_B: Tensor,
        update_number: int,
        accumulator: MetricAccumulator,
    ) -> None:
        """Take an optimizer step on a mini-batch, with the loss of the local rows of each rank.

        The loss is normalised by the counts of the whole mini-batch, over all ranks."""
        minibatch = reduce_minibatch(minibatch, self.algorithm.correction, accumulator)
        totals = Totals.of(minibatch.mask_BT)
        objective = self.algorithm.objective
        is_at_old_policy = update_number == 1 and self.first_ratios_near_1
        engine_is_old = self.policy_settings.old_logprobs == "engine"
        has_ratio_1 = update_number == 1 and self.first_ratios_are_1
        statistic = self.old_policy.statistic(
            objective, minibatch, is_local_B, self.ranks, has_ratio_1
        )
        experts = self.policy.routing.experts
        local = minibatch
        if not is_local_B.all():
            local = minibatch.rows(is_local_B) if is_local_B.any() else None
        loads_LE = None
        if self.settings.router_aux_loss_coef:
            loads_LE = routing.old_loads(local, self.policy, self.ranks)
        splits: list[Tensor] = []
        micros: list[TrainBatch] = []
        if local:
            splits = local.split_rows(self.settings.micro_batch_size)
            micros = [local.rows(split_N) for split_N in splits]
        # A micro-batch whose advantages are all 0 needs no backward pass. If all advantages of the
        # mini-batch are 0, every micro-batch gets one, so that the gradient is 0 and not None.
        needs_every_row = self.needs_every_row or not minibatch.adv_BT.any()
        needs_backward = [needs_every_row or bool(micro.adv_BT.any()) for micro in micros]
        with self.policy.cached_casts():
            for i, needs_gradient in self.policy.lockstep(needs_backward):
                if i is None:
                    self.policy.idle(minibatch, needs_gradient)
                    continue
                micro = micros[i].to(self.policy.device)
                with (
                    self.policy.routing.balancing(loads_LE),
                    torch.set_grad_enabled(needs_gradient),
                ):
                    output = self.policy.forward(micros[i])
                    if is_at_old_policy:
                        micro = start_at_old_policy(
                            output, micro, objective, engine_is_old, statistic, accumulator
                        )
                    loss = torch.zeros((), device=self.policy.device)
                    inputs = TermInputs(
                        output, micro, totals, update_number, accumulator, statistic=statistic
                    )
                    for term in self.terms:
                        loss = loss + term(inputs)
                    if needs_gradient:
                        loss.backward()
                share = len(micro) / len(minibatch)
                accumulator.mean("optim/loss", loss.detach(), share)
                with accumulator.timed("time/diagnostics_s"):
                    measure_pass(output, micro, update_number, objective, experts, accumulator)
                    if self.old_policy.is_skipped and update_number == 1:
                        compare_with_engine(output, micro, self.old_policy.comparison, accumulator)
                self.recorder.add_pass(splits[i], inputs)
        if self.entropy:
            self.entropy.end_update(totals, self.ranks)
        self.step_optimizer(accumulator)

    def step_optimizer(self, accumulator: MetricAccumulator) -> None:
        """Sum the gradients of all ranks, clip their norm, and step if the norm is finite.

        Raises RuntimeError after more than optim.max_skipped updates in a row without a finite
        norm, because their cause will not go away by itself.
        """
        lr = self.optim.lr_of(self.state.updates + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        parameters = self.policy.parameters()
        self.ranks.all_reduce_gradients(parameters)
        norm = clip_grad_norm(parameters, self.optim.max_grad_norm)
        # One copy for all numbers that decide how to go on: the CPU waits here for the GPU, and
        # nowhere else.
        comparison = self.old_policy.comparison
        agreements = [agreement.to(norm) for agreement in comparison.agreements]
        numbers = torch.stack([norm, *agreements])
        norm_value, *agreement_values = numbers.tolist()
        comparison.check(agreement_values)
        skipped = not math.isfinite(norm_value)
        if skipped:
            self.state.skipped += 1
        else:
            self.optimizer.step()
            self.state.updates += 1
            self.state.skipped = 0
            accumulator.mean("optim/grad_norm", norm)
            accumulator.largest("optim/grad_norm_max", norm)
        self.optimizer.zero_grad(set_to_none=True)
        accumulator.count("optim/skipped", skipped)
        if self.state.skipped > self.optim.max_skipped:
            raise RuntimeError(
                f"the gradients of {self.state.skipped} updates in a row were not finite "
                f"(optim.max_skipped={self.optim.max_skipped})"
            )

    # ----------------------------------------------------------------------------------------------
    # around the updates

    def measure_signal(
        self,
        batch: TrainBatch,
        rollout: Rollout,
        local_rows_N: Tensor,
        step: int,
        accumulator: MetricAccumulator,
    ) -> None:
        """Measure mutual information, signal and noise of the batch, if they are due."""
        size = self.settings.micro_batch_size
        with accumulator.timed("time/diagnostics_s"):
            if self.probe.measures_information(step):
                self.probe.information(self.policy, rollout.groups, size, self.ranks, accumulator)
            if self.probe.measures_snr(step):
                measure_snr(
                    self.old_policy,
                    PolicyTerm(
                        self.algorithm.objective,
                        self.settings.aggregation,
                        self.algorithm.correction,
                    ),
                    batch,
                    starts_at_old=self.first_ratios_are_1,
                    micro_batch_size=size,
                    local_rows_N=local_rows_N,
                    position=(self.seed, step),
                    ranks=self.ranks,
                    accumulator=accumulator,
                )

    def routing_after_step(
        self, batch: TrainBatch, local_rows_N: Tensor, step: int, accumulator: MetricAccumulator
    ) -> None:
        """Measure routing consistency after the last update, on some of the step's responses."""
        if batch.experts_BSLK is None:
            return
        order = permutation(len(batch), self.seed, "consistency", step)
        rows_N = torch.from_numpy(order[: self.settings.consistency_sample])
        sample = batch.rows(rows_N)
        # The old policy's experts were chosen without a replay under r2, and with one under r3. The
        # same must hold here.
        if self.policy_settings.routing_replay == "r2":
            sample = replace(sample, replay_BSLK=None)
        is_local_B = torch.isin(rows_N, local_rows_N)
        size = self.settings.micro_batch_size
        routing.measure_after_step(self.policy, sample, is_local_B, size, accumulator)
