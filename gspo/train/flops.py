"""Counts the FLOPs, tokens and seconds of each step and of the whole run."""

import torch

from gspo.data.batch import TokenBatch
from gspo.model.policy import Policy
from gspo.rollout.sources.base import Rollout
from gspo.train.checkpoint import TrainState


def account(
    state: TrainState,
    policy: Policy,
    batch: TokenBatch,
    rollout: Rollout,
    passes: float,
    train_s: float,
) -> dict[str, float]:
    """Add the step to the run's counters, and return the metrics of the step and of the run so far.

    A prompt is prefilled once per problem. A response is generated. Then it is trained on, at the
    cost of `passes` forward passes. Groups that were sampled and dropped cost their generation.
    `compute/flops` is left out if the number of active parameters is not known.
    """
    sampled = [r for group in rollout.sampled for r in group]
    generated_responses = [*sampled, *rollout.ungraded]
    generated = sum(r.length for r in generated_responses)
    trained = sum(r.length for r in rollout.responses)
    state.tokens += generated
    metrics: dict[str, float] = {}
    if policy.active_parameters is not None:
        flops = policy.forward_flops
        lengths = [len(r.prompt_ids) + len(r.token_ids) for r in generated_responses]
        seen = set()
        repeated_prompts = []
        for r in generated_responses:
            problem = (r.problem.task, r.problem.index)
            if problem in seen:
                repeated_prompts.append(len(r.prompt_ids))
            seen.add(problem)
        generation = flops(torch.tensor(lengths)) - flops(torch.tensor(repeated_prompts))
        state.flops += generation + flops(batch.attention_BS.sum(1)) * passes
        metrics["compute/flops"] = state.flops
    synced_s = rollout.synced.get("time/sync_s", 0.0)
    sampling_s = rollout.rollout_s + rollout.score_s + rollout.behaviour_s + synced_s
    if rollout.waited_s is not None:  # the rest of the sampling ran while the trainer worked
        sampling_s = rollout.waited_s
    state.seconds += sampling_s + train_s
    if rollout.environment_s:
        metrics["time/environment_s"] = rollout.environment_s
    return metrics | {
        "compute/tokens": state.tokens,
        "compute/dropped_tokens": generated - trained,
        "compute/seconds": state.seconds,
        "optim/updates": state.updates,
        "time/rollout_s": rollout.rollout_s,
        "time/score_s": rollout.score_s,
        "time/behaviour_s": rollout.behaviour_s,
        "time/waited_s": sampling_s,
        "time/train_s": train_s,
        "throughput/rollout_tokens": generated / rollout.rollout_s,
        "throughput/train_tokens": trained / train_s,
    }
