"""The parts of a training run put together: policy, reference, engine, source, trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from gspo.config.settings import Settings
from gspo.evaluation.evaluate import load_evaluation_sets, with_room
from gspo.model.loading import TinyDense, TinyMoE
from gspo.model.policy import Policy
from gspo.rollout.engine import Engine, LocalEngine
from gspo.rollout.engine_process import EngineEnded
from gspo.rollout.off_policy import StaleSource, make_source
from gspo.rollout.on_policy import OnPolicySource
from gspo.rollout.pending import load_pending
from gspo.rollout.sampler_logprobs import BehaviourLogprobs
from gspo.rollout.settings import RolloutSettings, VLLMRollout
from gspo.run.directory import open_policy, open_reference
from gspo.train.checkpoint import load_optimizer
from gspo.train.trainer import Trainer


def assemble(settings: Settings, checkpoint: Path | None, report: Callable[[int, int, float], None]) -> Trainer:
    """The trainer as the settings say, from the checkpoint if there is one. Raises ValueError for what cannot be."""
    if isinstance(settings.rollout, VLLMRollout):
        from gspo.rollout.vllm import check_start  # an installation of its own; only those who ask for it need it

        tiny = isinstance(settings.model, TinyMoE | TinyDense)  # before a cold start that would be in vain
        check_start(settings.rollout, settings.model.hidden // settings.model.heads if tiny else None)
    policy = open_policy(settings, checkpoint, report)
    reference = open_reference(settings, checkpoint, report)
    if settings.policy.routing_replay != "none":
        policy.routing.check_replay()
    if settings.rollout.routes and not policy.routing.layers:
        raise ValueError("rollout.routes=true with a model that has no known routers; set rollout.routes=false")
    sampled = policy.copy() if settings.rollout.overlap else policy
    engine = make_engine(sampled, settings)
    try:
        task, sampler, keep = settings.task, settings.sampler, behaviour(settings, sampled)
        source = make_source(engine, task, settings.rollout, sampler, settings.seed, keep, policy)
        parts = (settings.algorithm(), settings.optim, settings.trainer, settings.policy)
        trainer = Trainer(policy, source, *parts, settings.seed, reference)
        if checkpoint:
            trainer.restore(load_optimizer(checkpoint, trainer.optimizer))
            source.restore_pending(load_pending(checkpoint, lambda index: task.problem(settings.seed, "train", index)))
        check_weights(source, trainer.state.step)
        for evaluation_set in load_evaluation_sets(task, settings.evaluation.sets, settings.evaluation.problems):
            with_room(evaluation_set, engine, settings.rollout.longest_limit)  # before anything is written
    except BaseException:
        engine.close()
        raise
    return trainer


def check_weights(source: OnPolicySource | StaleSource, step: int) -> None:
    """The guard at the start, where nothing is lost yet: ValueError, so that it is one line."""
    try:
        source.check(step)
    except EngineEnded:
        raise
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def make_engine(policy: Policy, settings: Settings) -> Engine:
    """The engine that samples from `policy`. Raises ValueError if it cannot start."""
    rollout = settings.rollout
    if isinstance(rollout, VLLMRollout):
        from gspo.rollout.vllm import VLLMEngine

        return VLLMEngine(policy, rollout)
    return local_engine(policy, rollout)


def local_engine(policy: Policy, rollout: RolloutSettings, batch_rows: int = 0) -> LocalEngine:
    """The in-process engine in the precision of a run's rollouts: what its held-out problems are sampled by too, during
    training and afterwards. `batch_rows` 0: the run's."""
    return LocalEngine(policy, batch_rows or rollout.batch_rows, getattr(torch, rollout.dtype))


def evaluation_engine(trainer: Trainer, settings: Settings) -> Engine:
    """The run's own engine; beside one that samples while the trainer works, an in-process one of the same precision,
    which must be handed the current weights before it is used."""
    if settings.rollout.overlap:
        return local_engine(trainer.policy, settings.rollout)
    return trainer.source.engine


def behaviour(settings: Settings, sampled: Policy) -> BehaviourLogprobs | None:
    """Keeps log-probs under the weights that sampled, where the step's start comes later and they are asked for."""
    later = settings.rollout.staleness or settings.rollout.token_budget
    if not later or settings.policy.old_logprobs == "step_start":
        return None
    return BehaviourLogprobs(sampled, settings.trainer.micro_batch_size, settings.policy.routing_replay == "r3")
