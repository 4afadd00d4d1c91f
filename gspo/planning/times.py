"""The passes of a step, the bytes that a GPU exchanges in them, and their seconds.

Times come from a roofline: arithmetic at 40 % of the GPU's peak, memory at 60 % of its bandwidth,
and kernel launches as measured on an H200 (gspo.planning.hardware).
"""

import math
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from gspo.config.settings import Settings
from gspo.model.cost import forward_flops
from gspo.planning.engine_estimate import EngineEstimate
from gspo.planning.hardware import (
    ARITHMETIC,
    DENSE_LAYER,
    GB,
    MEMORY,
    MOE_LAYER,
    Hardware,
    Launches,
)
from gspo.planning.memory import Measured, Work

# time of a float32 product relative to a bfloat16 product; without TF32 it is larger
FLOAT32_SLOWDOWN = 8
BETWEEN_COPIES = "gradients between copies"
TO_EXPERTS = "tokens to their experts and back"


@dataclass
class Passes:
    """The passes of a rank in a step, on average over the steps.

    learning     micro-batches of forward and backward passes
    scoring      micro-batches of forward passes
    reductions   all_reduces of the whole gradient between copies of the weights
    """

    learning: float
    scoring: float
    reductions: float


def passes_of(settings: Settings, work: Work, responses: int, engine: EngineEstimate) -> Passes:
    """Count the passes of a step. `responses` is the number of a rank's responses.

    Every epoch learns from each response once. The log-probs of the old policy and of the reference
    policy are scored. The old policy's pass is skipped if the engine has just computed the same
    log-probs with the trainer's weights (PolicySettings.skips_old_pass). The measurements that
    `tracking` asks for every so many steps count by their share of the steps.
    """
    runs_in_trainer = settings.rollout.name == "local" and not engine.weights
    skips_old_pass = settings.policy.skips_old_pass(
        exact_engine=runs_in_trainer and settings.policy.precision == "float32",
        samples_ahead=settings.rollout.samples_ahead,
        correction=settings.correction.name,
        critic=settings.advantage.needs_values,
        sum_pi_squared=settings.advantage.needs_sum_pi_squared,
    )
    scored_policies = 0 if skips_old_pass else 1
    if settings.kl.needs_reference:
        scored_policies += 1
    epochs = settings.trainer.epochs
    # an objective may need a number of the whole mini-batch under the current policy
    scored_per_epoch = 1 if settings.objective.needs_statistic else 0
    minibatches = settings.trainer.minibatches
    passes_over_batch = math.ceil(responses / work.scored)
    passes = Passes(
        learning=epochs * minibatches * math.ceil(responses / minibatches / work.rows),
        scoring=(scored_policies + epochs * scored_per_epoch) * passes_over_batch,
        reductions=epochs * minibatches,
    )
    tracking = settings.tracking
    if tracking.snr_every:  # the gradients of two halves of the batch
        passes.learning += 2 * math.ceil(responses / 2 / work.rows) / tracking.snr_every
        passes.reductions += 2 / tracking.snr_every
    if tracking.information_every:  # every scored response under every prompt
        prompts = min(tracking.information_prompts, settings.rollout.prompts_per_step)
        samples = min(tracking.information_samples, settings.rollout.group_size)
        rows = prompts * samples * prompts / work.ranks
        passes.scoring += math.ceil(rows / work.scored) / tracking.information_every
    if tracking.record_after:
        # with record_last, every step is recorded
        passes.scoring += passes_over_batch / (1 if tracking.record_last else tracking.record_every)
    return passes


def traffic_of(
    settings: Settings, measured: Measured, work: Work, passes: Passes
) -> dict[str, float]:
    """Return the bytes that a GPU exchanges with other GPUs in a step, by purpose."""
    if work.ranks == 1:
        return {}
    if work.shard_size == 1:  # a ring all-reduce sends every gradient twice
        return {BETWEEN_COPIES: 2.0 * passes.reductions * measured.trained}
    traffic = {
        "weights gathered to learn": float(passes.learning * measured.all_gathered),
        "weights gathered to score": float(passes.scoring * measured.all_gathered_scoring),
        "gradients": float(passes.learning * measured.reduced),
        # all-gathered in float32, then rounded
        "weights for the engine": 4.0 * measured.parameters,
    }
    if work.experts > 1:
        tokens = (
            passes.learning * measured.all_to_all + passes.scoring * measured.all_to_all_scoring
        )
        traffic[TO_EXPERTS] = float(tokens)
    if work.shard_size < work.ranks:
        traffic[BETWEEN_COPIES] = float(passes.learning * measured.reduced_between)
    return traffic


def update_times(
    config: PretrainedConfig, measured: Measured, work: Work, passes: Passes, hardware: Hardware
) -> dict[str, float]:
    """Return the seconds of a step's passes in the trainer.

    The result is empty if the number of parameters per token is unknown.
    """
    if not measured.active:
        return {}
    lengths = torch.tensor([work.prompt + work.response])
    forward = forward_flops(config, measured.active, lengths)
    seconds = forward / (hardware.flops * 1e12 * ARITHMETIC)
    if work.precision != torch.bfloat16:
        seconds *= FLOAT32_SLOWDOWN
    # A backward pass costs two forward passes, or one with LoRA. Checkpointing repeats a forward.
    forwards = 2 if work.lora.rank else 3
    if work.checkpointing:
        forwards += 1
    layers = config.num_hidden_layers
    launches = launches_of(measured)
    return {
        "update: arithmetic": passes.learning * work.rows * forwards * seconds,
        "update: kernels launched": passes.learning * layers * launches.learning,
        "old log-probs: arithmetic": passes.scoring * work.scored * seconds,
        "old log-probs: kernels launched": passes.scoring * layers * launches.scoring,
    }


def launches_of(measured: Measured) -> Launches:
    """Return the seconds of a layer's kernel launches. An MoE layer has more of them."""
    is_moe = measured.active is not None and measured.active < measured.parameters
    return MOE_LAYER if is_moe else DENSE_LAYER


def exchange_times(traffic: dict[str, float], work: Work, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of a GPU's traffic with other GPUs.

    Gradients between copies of the weights go between all ranks, and tokens between the ranks that
    share a layer's experts. All other traffic stays within a copy of the weights.
    """
    if not traffic:
        return {}
    group_sizes = {BETWEEN_COPIES: work.ranks, TO_EXPERTS: work.experts}
    seconds = 0.0
    for name, nbytes in traffic.items():
        gpus = group_sizes.get(name, work.shard_size)
        seconds += nbytes / (hardware.bandwidth_between(gpus) * GB)
    return {"exchange between GPUs": seconds}


def rollout_times(
    settings: Settings,
    config: PretrainedConfig,
    measured: Measured,
    work: Work,
    engine: EngineEstimate,
    hardware: Hardware,
) -> dict[str, float]:
    """Return the seconds in which a step's responses are sampled.

    For every sampled token, the engine reads the weights and the KV cache. Of an MoE model it
    reads the experts that the tokens of `at_once` responses can reach. The prompt (once for its
    group) and the environment's tokens cost arithmetic alone, because each prompt and each
    observation is computed in a single pass.
    """
    sampled = sampled_tokens(settings, work)
    waves = math.ceil(engine.rows / engine.at_once)
    layers = config.num_hidden_layers
    mean_tokens = work.prompt + work.response / 2
    cache = engine.at_once * mean_tokens * engine.per_token / engine.gpus_per_engine
    share = 1.0
    if measured.active:
        share = min(1.0, engine.at_once * measured.active / measured.parameters)
    nbytes = waves * sampled * (engine.read * share + cache)
    times = {"rollout: weights and cache read": nbytes / (hardware.bandwidth * GB * MEMORY)}
    if measured.active:
        tokens = work.response + work.prompt / work.group
        flops = 2.0 * measured.active * engine.rows * tokens / engine.gpus_per_engine
        seconds = flops / (hardware.flops * 1e12 * ARITHMETIC)
        if settings.rollout.dtype != "bfloat16":
            seconds *= FLOAT32_SLOWDOWN
        times["rollout: arithmetic"] = seconds
    if settings.rollout.name == "local":
        launches = waves * sampled * layers
        times["rollout: kernels launched"] = launches * launches_of(measured).token
    return times


def sampled_tokens(settings: Settings, work: Work) -> int:
    """Return the tokens of a response that the policy samples. An environment writes the others."""
    return min(settings.rollout.longest_limit, work.response)
