"""Replays a recorded step with the model: the gradient by the parameters, from a checkpoint.

The trainer of the run is built again from the newest checkpoint before the step, and gets the
recorded responses instead of sampling. If that checkpoint is some steps older, the steps between
are replayed first, so they must have been recorded too.

Under the run's own settings this gives the gradient norm of the run. Under others, the step starts
from the same weights and goes its own way.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.config.settings import (
    LOSS_GROUPS,
    Settings,
    has_recorded_entropy_bonus,
    has_recorded_kl_coefficient,
)
from gspo.data.step_record import Header, StepRecord
from gspo.data.step_record_files import read_step, recorded_steps
from gspo.io.errors import SettingError
from gspo.io.files import step_folders
from gspo.model.policy import Policy
from gspo.model.weights import input_embedding
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.base import PendingRollouts, Rollout
from gspo.run.directory import settings_and_checkpoint
from gspo.run.policies import open_policy, open_reference
from gspo.run.rollback import Rollbacks
from gspo.tasks.base import Task
from gspo.train.accumulator import MetricAccumulator
from gspo.train.checkpoint import load_optimizer
from gspo.train.replay import groups_of
from gspo.train.settings import OptimSettings
from gspo.train.trainer import Trainer


@dataclass
class ModelReplay:
    """A step as the model went through it again."""

    metrics: dict[str, float]  # of the whole step
    gradient: list[Tensor]  # of the first update by each parameter, before clipping, on the CPU


class RecordedSource:
    """A rollout source without rollouts: the trainer is given recorded responses."""

    def __init__(self, policy: Policy, task: Task, settings: RolloutSettings):
        self.engine: Engine = LocalEngine(policy)
        self.task = task
        self.settings = settings

    def start_recording_experts(self) -> None:
        """Do nothing: the record has the experts."""

    def next(self, step: int) -> Rollout:
        """Raise RuntimeError: nothing is sampled."""
        raise RuntimeError(f"step {step} of a replay has a record")

    def update(self, step: int) -> None:
        """Do nothing: nothing is sampled from the new weights."""

    def check(self, step: int) -> None:
        """Do nothing: there is no engine to compare with."""

    def state(self) -> dict[str, Any]:
        """Return no state."""
        return {}

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Do nothing."""

    def pending(self) -> PendingRollouts:
        """Return no rollouts."""
        return PendingRollouts()

    def restore_pending(self, pending: PendingRollouts) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class ReplayTrainer(Trainer):
    """A trainer that keeps the gradient of the first update of its last step."""

    first_gradient: list[Tensor] | None = None

    def train_step(self, step: int, rollout: Rollout) -> dict[str, float]:
        self.first_gradient = None
        return super().train_step(step, rollout)

    def step_optimizer(self, accumulator: MetricAccumulator) -> None:
        if self.first_gradient is None:
            self.first_gradient = [
                torch.zeros(0) if p.grad is None else p.grad.detach().float().cpu().clone()
                for p in self.policy.parameters()
            ]
        super().step_optimizer(accumulator)


def starting_step(run: Path, step: int) -> int:
    """Return the newest checkpoint from which a step can be replayed, 0 for the run's start.

    Raises ValueError if there is none: the steps between must have been recorded."""
    steps = set(recorded_steps(run))
    start = step - 1
    while start > 0 and not (run / "checkpoints" / f"step_{start:06d}").is_dir():
        if start not in steps:
            names = [folder.name for folder in step_folders(run / "checkpoints")]
            raise SettingError(
                "model",
                True,
                f"needs a checkpoint before step {step} and the records of all steps between; step "
                f"{start} has neither, and the checkpoints are {', '.join(names) or 'none'}",
                remedy="choose a step soon after a checkpoint; to replay any of the last steps, record "
                "with tracking.record_last at least as large as checkpoint.every",
            )
        start -= 1
    return start


def replay_with_model(run: Path, step: int, changed: Settings, trust: bool) -> ModelReplay:
    """Replay a step of a run with the model.

    `changed` are the settings of the objective and of all that the loss depends on. Raises
    ValueError if no checkpoint fits."""
    start = starting_step(run, step)
    settings, checkpoint = settings_and_checkpoint(str(run), start, consent=False, trust=trust)
    settings.parallel = replace(settings.parallel, mode="none", shard_size=0, experts=1, ranks=0)
    policy = open_policy(settings, checkpoint, lambda *_: None)
    reference = open_reference(settings, policy, checkpoint, lambda *_: None)
    source = RecordedSource(policy, settings.task, settings.rollout)
    trainer = build(settings, policy, reference, source)
    if checkpoint:
        trainer.restore(load_optimizer(checkpoint, trainer.optimizer, policy))
    rollbacks = Rollbacks(run)
    for between in range(start + 1, step):
        record = read_step(run, between)
        check_fits(record, policy)
        trainer.optim = recorded_optim(record.header, rollbacks, settings)
        trainer.train_step(between, recorded_rollout(record, settings))
    if loss_parts(changed) != loss_parts(settings):
        other = replace(settings)
        for name, value in loss_parts(changed).items():
            setattr(other, name, deepcopy(value))
        other_trainer = build(other, policy, reference, source)
        other_trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
        other_trainer.state = trainer.state
        if has_recorded_kl_coefficient(other, settings):
            other_trainer.coefficient.value = trainer.coefficient.value
        if (
            other_trainer.entropy
            and trainer.entropy
            and has_recorded_entropy_bonus(other, settings)
        ):
            other_trainer.entropy.load_state(trainer.entropy.state())
        trainer = other_trainer
    record = read_step(run, step)
    check_fits(record, policy)
    trainer.optim = recorded_optim(record.header, rollbacks, settings)
    metrics = trainer.train_step(step, recorded_rollout(record, changed))
    return ModelReplay(metrics, trainer.first_gradient or [])


def recorded_optim(header: Header, rollbacks: Rollbacks, settings: Settings) -> OptimSettings:
    """Return the optimizer's settings at a recorded step.

    Rollbacks and callbacks change the learning rate. Older records lack it, and then only the
    rollbacks are known."""
    optim = rollbacks.optim_of(header.step, settings)
    lr = header.state.get("lr")
    return optim if lr is None else replace(optim, lr=lr)


def check_fits(record: StepRecord, policy: Policy) -> None:
    """Raise ValueError for a record whose tokens or MoE layers the model does not have."""
    vocabulary_size = len(input_embedding(policy.model))
    largest_id = int(record.token_ids.max())
    if record.kept_ids is not None:
        largest_id = max(largest_id, int(record.kept_ids.max(initial=0)))
    if largest_id >= vocabulary_size:
        raise ValueError(
            f"the record of step {record.header.step} has the token ID {largest_id}, and the model "
            f"has {vocabulary_size} tokens"
        )
    layers = policy.routing.layers
    if record.old_experts is not None and record.old_experts.shape[1] != layers:
        raise ValueError(
            f"the record of step {record.header.step} has experts of "
            f"{record.old_experts.shape[1]} MoE layers, and the model has {layers}"
        )


def loss_parts(settings: Settings) -> dict[str, Any]:
    """Return the settings of the algorithm and of the trainer."""
    return {name: getattr(settings, name) for name in LOSS_GROUPS}


def build(
    settings: Settings, policy: Policy, reference: Policy | None, source: RecordedSource
) -> ReplayTrainer:
    """Build a trainer that replays steps.

    It makes the pass under the old policy itself if the record cannot stand for it."""
    return ReplayTrainer(
        policy,
        source,
        settings.algorithm(),
        optim=settings.optim,
        settings=settings.trainer,
        policy_settings=replace(settings.policy, old_pass="always"),
        seed=settings.seed,
        reference=reference,
    )


def recorded_rollout(record: StepRecord, settings: Settings) -> Rollout:
    """Return the recorded responses, with the log-probs and experts under the old policy.

    They are left out if the experts of an MoE model were not recorded and the old policy has the
    weights of the step's start. The trainer then computes both. Under another old policy only the
    experts are left out. Raises ValueError if Routing Replay needs experts that were not recorded.
    """
    groups = groups_of(record, settings.reward.weights)
    lacks_experts = record.old_experts is None and bool(record.header.state.get("experts"))
    recorded_policy = record.header.settings.get("policy", {})
    old_is_start = recorded_policy.get("old_logprobs", "step_start") == "step_start"
    routing_replay = settings.policy.routing_replay
    needs_experts = routing_replay == "r3" or (routing_replay == "r2" and not old_is_start)
    if lacks_experts and needs_experts:
        raise SettingError(
            "model",
            True,
            f"with policy.routing_replay={routing_replay} the tokens go through recorded experts, "
            f"and step {record.header.step} was recorded with tracking.record_experts=false",
            remedy="leave model=true out",
        )
    if not lacks_experts or not old_is_start:
        ends = (record.prompt_lengths.astype(int) + record.response_lengths).cumsum()
        responses = [r for group in groups for r in group]
        for row, response in enumerate(responses):
            response.old_logprobs = record.old_logp[record.tokens_of(row)]
            if record.old_experts is not None:
                length = len(response.prompt_ids) + len(response.token_ids)
                experts = record.old_experts[ends[row] - length : ends[row]]
                response.old_experts = experts.astype("int16")
    return Rollout(groups, rollout_s=math.nan, score_s=math.nan, limit=record.header.limit)


def parameter_cosine(a: ModelReplay, b: ModelReplay) -> float:
    """Compute the cosine between the parameter gradients of two first updates, NaN if one is 0."""
    product = 0.0
    square_a = 0.0
    square_b = 0.0
    for x, y in zip(a.gradient, b.gradient, strict=True):
        if x.shape == y.shape:
            product += float((x.double() * y.double()).sum())
        square_a += float(x.double().square().sum())
        square_b += float(y.double().square().sum())
    norms = (square_a * square_b) ** 0.5
    return product / norms if norms else float("nan")
