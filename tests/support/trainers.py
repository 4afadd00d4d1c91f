"""Real trainers on small models, and what is measured of them."""

from dataclasses import dataclass

import torch

from builders import problems, small_policy
from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.objectives import GRPO
from gspo.data.batch import TrainBatch
from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.model.value_head import ValueHead
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.behaviour_logprobs import BehaviourLogprobs
from gspo.rollout.sources.off_policy import make_source
from gspo.rollout.sources.problem_sampler import Uniform
from gspo.tasks.base import Task
from gspo.train.accumulator import MetricAccumulator
from gspo.train.credit import add_advantages
from gspo.train.settings import Algorithm, OptimSettings, PolicySettings, TrainerSettings
from gspo.train.trainer import Trainer


@dataclass
class FirstCharacter(Task):
    """A real, trivially verifiable task: the reward is 1 if the response begins with a digit or a
    lower-case letter.
    """

    name: str = "first"

    def size(self, split: str) -> None:
        return None

    def problem(self, seed: int, split: str, index: int) -> Problem:
        return Problem("first", index, problems()[index % len(problems())].prompt, None)

    def score(self, answers) -> list[Score]:
        scores = []
        for _, text, _ in answers:
            right = text[:1].isdigit() or text[:1].islower()
            scores.append(Score(float(right), "correct" if right else "wrong"))
        return scores

    def close(self) -> None:
        pass


def trainer(
    objective=None,
    lr=1e-3,
    replay="none",
    model=None,
    seed=1,
    rollout=None,
    aggregation=None,
    parts=None,
    old_pass="always",
    eps=1e-15,
    optimizer="adamw",
    freeze_router=False,
    router_lr_factor=1.0,
    spread=None,
    lora=None,
    task=None,
    max_grad_norm=1.0,
    ranks=None,
    engine_ranks=None,
    **settings,
) -> Trainer:
    """A trainer of a small policy; `parts` are the algorithm's parts beside the objective, `spread`
    spreads a policy's weights over ranks, `lora` puts an adapter on it. The engine has the
    trainer's `ranks` if it has no `engine_ranks`."""
    spread = spread or (lambda policy: policy)
    policy = spread(small_policy(model))
    if lora:
        policy.adapt(lora, seed)
    algorithm = Algorithm(objective or GRPO(), **parts or {})
    if algorithm.advantage.needs_values:
        policy.value_head = ValueHead.open(policy.model, None)
    rollout = rollout or RolloutSettings(prompts_per_step=8, group_size=4, max_new_tokens=10)
    engine = LocalEngine(policy, ranks=engine_ranks or ranks)
    source = make_source(engine, task or FirstCharacter(), rollout, Uniform(), seed)
    aggregation = aggregation or Aggregation("seq-mean-token-mean")
    reference = policy.without_adapter() if lora else spread(small_policy(model))
    if algorithm.kl.name == "none":
        reference = None
    return Trainer(
        policy,
        source,
        algorithm,
        optim=OptimSettings(
            optimizer,
            lr,
            warmup_updates=1,
            eps=eps,
            router_lr_factor=router_lr_factor,
            max_grad_norm=max_grad_norm,
        ),
        settings=TrainerSettings(
            **{"minibatches": 4, "micro_batch_size": 8, "aggregation": aggregation} | settings
        ),
        policy_settings=PolicySettings(
            routing_replay=replay, old_pass=old_pass, freeze_router=freeze_router
        ),
        seed=seed,
        reference=reference,
        ranks=ranks,
    )


def steps(t: Trainer, count: int) -> list[dict]:
    first = t.state.step + 1
    return [t.train_step(step, t.source.next(step)) for step in range(first, first + count)]


def with_advantages(t: Trainer, old: tuple, rollout) -> TrainBatch:
    """The batch of the passes before the updates (`OldPolicyPass.add`), with advantages."""
    batch, _ = add_advantages(
        *old,
        rollout,
        algorithm=t.algorithm,
        kl_coefficient=t.coefficient.value,
        mask_truncated=t.settings.mask_truncated,
        running=t.state.rewards,
        accumulator=MetricAccumulator(),
    )
    return batch


def weights(t: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in t.policy.model.parameters()]


def gap_trainer(
    objective=None,
    lr=1e-3,
    replay="none",
    old="step_start",
    model=None,
    minibatches=4,
    parts=None,
    old_pass="auto",
    eps=1e-15,
    spread=None,
    lora=None,
    task=None,
    max_grad_norm=1.0,
    ranks=None,
    engine_ranks=None,
    **rollout,
) -> Trainer:
    """A trainer of a small policy whose engine may round, lag behind or cut responses."""
    spread = spread or (lambda policy: policy)
    policy = spread(small_policy(model))
    if lora:
        policy.adapt(lora, 1)
    settings = RolloutSettings(
        **{"prompts_per_step": 8, "group_size": 4, "max_new_tokens": 10, "routes": replay == "r3"}
        | rollout
    )
    sampled = policy.copy() if settings.overlap else policy
    dtype = getattr(torch, settings.dtype)
    engine = LocalEngine(sampled, settings.batch_rows, dtype, ranks=engine_ranks or ranks)
    later = settings.staleness or settings.token_budget
    keep = BehaviourLogprobs(sampled, 8, replay == "r3") if later and old != "step_start" else None
    mean = Aggregation("seq-mean-token-mean")
    return Trainer(
        policy,
        make_source(engine, task or FirstCharacter(), settings, Uniform(), 1, keep, policy),
        Algorithm(objective or GRPO(), **parts or {}),
        optim=OptimSettings(lr=lr, warmup_updates=1, eps=eps, max_grad_norm=max_grad_norm),
        settings=TrainerSettings(minibatches=minibatches, micro_batch_size=8, aggregation=mean),
        policy_settings=PolicySettings(routing_replay=replay, old_logprobs=old, old_pass=old_pass),
        seed=1,
        reference=spread(small_policy(model)) if parts else None,
        ranks=ranks,
    )


def flat(groups) -> list:
    return [r.token_ids for group in groups for r in group]
