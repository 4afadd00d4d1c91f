"""The plan of a run before anything loads: memory of each GPU, traffic, and the time of a step.

For example, for Qwen3-30B-A3B on 16 GPUs, each GPU holds a sixteenth of the weights, of their
gradients and of AdamW's two moments (7.6 + 7.6 + 15.3 GB). It all-gathers a layer's weights while
that layer computes, and keeps the activations of a micro-batch.

gspo.planning.memory measures the memory, gspo.planning.engine_estimate estimates the engine, and
gspo.planning.times the seconds. The plan assumes that nothing overlaps and that every response has
the maximum length. So a time is right to a factor of two, and its parts show the bottleneck.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from gspo.config.checks import check_processes
from gspo.config.settings import Settings
from gspo.io.errors import SettingError
from gspo.model.loading import positions
from gspo.planning.engine_estimate import EngineEstimate, engine_estimate
from gspo.planning.hardware import GB, RESERVE, Hardware
from gspo.planning.memory import Measured, Work, measure
from gspo.planning.models import config_of
from gspo.planning.records import record_bytes
from gspo.planning.times import (
    exchange_times,
    passes_of,
    rollout_times,
    traffic_of,
    update_times,
)

DEFAULT_PROMPT_TOKENS = 512  # if neither the settings nor the user give a number
MAX_TEMPLATE_TOKENS = 32  # maximum tokens of a chat template around an observation; Qwen3's has 18
MAX_RANKS = 1024
ACTIVATIONS = "activations and gathered weights"
# bytes of the two 8-bit moments relative to those of a float32 weight; 256 values share a scale
EIGHT_BIT_MOMENTS = 2 * (1 + 4 / 256) / 4
SHARDED = (
    "weights",
    "AdamW's moments",
    "reference policy",
    "gradients",
    "gradient of a half",
)


@dataclass
class Plan:
    """The plan for a GPU: bytes by phase, bytes of traffic and seconds of a step."""

    settings: Settings
    hardware: Hardware
    work: Work
    measured: Measured
    engine: EngineEstimate
    phases: dict[str, dict[str, float]]  # bytes in the GPU's memory by phase and purpose
    traffic: dict[str, float]  # bytes that the GPU exchanges with other GPUs in a step
    times: dict[str, float]  # seconds of a step
    record_bytes: int = 0  # of the record of a step on disk; 0: no step is recorded

    @property
    def peak(self) -> tuple[str, float]:
        """The phase with the largest memory, and its bytes, including RESERVE."""
        phase = max(self.phases, key=lambda name: sum(self.phases[name].values()))
        return phase, sum(self.phases[phase].values()) + RESERVE * GB

    @property
    def fits(self) -> bool:
        """Whether the run fits into the GPU's memory."""
        return self.peak[1] <= self.hardware.memory * GB

    @property
    def responses(self) -> int:
        """The number of responses that a step samples."""
        return self.settings.rollout.prompts_per_step * self.settings.rollout.group_size

    @property
    def step_seconds(self) -> float:
        """The seconds of a step."""
        return sum(self.times.values())

    @property
    def bottleneck(self) -> str:
        """The part of a step that takes the most time."""
        return max(self.times, key=lambda name: self.times[name])


def plan(
    settings: Settings, hardware: Hardware, prompt: int = 0, earlier: Plan | None = None
) -> Plan:
    """Plan a run.

    `prompt` is the number of a prompt's tokens. 0 means rollout.max_prompt_tokens, or 512 without
    such a setting. `earlier` is a plan for the same model: its measurement is used again if
    the work of a rank is the same.

    Raises ValueError, with a single line, for contradicting settings and for an unknown model.
    """
    ranks, shard_size = ranks_of(settings)
    config = config_of(settings.model)
    rollout = settings.rollout
    default_prompt = rollout.max_prompt_tokens or DEFAULT_PROMPT_TOKENS
    maximum = positions(config)
    if maximum:
        rollout.bound_by(maximum)
        default_prompt = min(default_prompt, rollout.half_of_positions or default_prompt)
    prompt = prompt or default_prompt
    check_lengths(config, prompt, rollout.longest_limit)
    responses = math.ceil(rollout.prompts_per_step * rollout.group_size / ranks)
    minibatch = math.ceil(responses / settings.trainer.minibatches)
    work = Work(
        ranks=ranks,
        shard_size=shard_size,
        experts=settings.parallel.experts,
        rows=min(settings.trainer.micro_batch_size, minibatch),
        scored=min(settings.trainer.micro_batch_size, responses),
        prompt=prompt,
        response=response_tokens(settings, config, prompt),
        group=rollout.group_size,
        precision=getattr(torch, settings.policy.precision),
        checkpointing=settings.policy.checkpointing,
        lora=settings.policy.lora,
        head_dtype=getattr(torch, settings.policy.head_dtype),
    )
    measured = earlier.measured if earlier and earlier.work == work else measure(config, work)
    # a rank samples whole groups, and learns from an even share of the responses
    sampled_responses = math.ceil(rollout.prompts_per_step / ranks) * rollout.group_size
    engine = engine_estimate(settings, config, measured, work, sampled_responses, hardware)
    passes = passes_of(settings, work, responses, engine)
    traffic = traffic_of(settings, measured, work, passes)
    times = update_times(config, measured, work, passes, hardware)
    times |= exchange_times(traffic, work, hardware)
    times |= rollout_times(settings, config, measured, work, engine, hardware)
    return Plan(
        settings=settings,
        hardware=hardware,
        work=work,
        measured=measured,
        engine=engine,
        phases=phases(settings, measured, engine),
        traffic=traffic,
        times=times,
        record_bytes=record_bytes(settings, config, work),
    )


def ranks_of(settings: Settings) -> tuple[int, int]:
    """Return the number of GPUs, and the number of GPUs that share a copy of the weights."""
    ranks = max(settings.parallel.ranks, 1)
    mode = settings.parallel.mode
    if ranks > 1 and mode == "none":
        raise SettingError(
            "parallel.ranks",
            ranks,
            "needs another parallel.mode than none",
            "set shard or replicate",
        )
    if mode == "shard" and ranks == 1:
        raise SettingError(
            "parallel.mode",
            "shard",
            "there is one GPU",
            remedy="set the number of GPUs, parallel.ranks=N",
        )
    if ranks > 1:
        check_processes(settings, ranks)
    if mode == "shard":
        return ranks, settings.parallel.shard_size or ranks
    return ranks, 1


def check_lengths(config: PretrainedConfig, prompt: int, response: int) -> None:
    """Raise ValueError if a prompt and a response exceed the model's positions."""
    maximum = positions(config)
    if maximum and prompt + response > maximum:
        raise SettingError(
            "rollout.max_new_tokens",
            response,
            f"exceeds the model's {maximum} positions with a prompt of {prompt} tokens",
            remedy="lower it, or set prompt_tokens",
        )


def response_tokens(settings: Settings, config: PretrainedConfig, prompt: int) -> int:
    """Return the maximum number of tokens after a prompt.

    In episodes they include the observations and the chat template between the policy's turns. The
    model's positions are an upper bound.
    """
    limits = settings.task.environments().values()
    environment_tokens = max(
        ((limit.turns - 1) * (limit.observation_tokens + MAX_TEMPLATE_TOKENS) for limit in limits),
        default=0,
    )
    tokens = settings.rollout.longest_limit + environment_tokens
    maximum = positions(config)
    return min(tokens, maximum - prompt) if maximum else tokens


def phases(
    settings: Settings, measured: Measured, engine: EngineEstimate
) -> dict[str, dict[str, float]]:
    """Return the bytes in a GPU's memory in each phase: rollout, old log-probs, update.

    With tracking.snr_every there is a further phase, in which the gradient of the batch's first
    half waits for the second's."""
    moments = 2.0 if settings.optim.name == "adamw" else EIGHT_BIT_MOMENTS
    always = {"weights": float(measured.weights), "AdamW's moments": moments * measured.trained}
    if engine.copies:
        always["copies to sample from"] = engine.copies
    # with LoRA, the reference policy is the same weights without the adapter
    if settings.kl.needs_reference and not settings.policy.lora.rank:
        always["reference policy"] = float(measured.weights)
    training = dict(always)
    if engine.resident:
        training["engine"] = engine.resident
    rollout = dict(always)
    if engine.weights or engine.merged:
        rollout["engine's weights"] = engine.weights + engine.merged
    rollout |= {"keys and values": engine.cache, "logits": engine.logits}
    update = {"gradients": float(measured.trained), ACTIVATIONS: float(measured.update)}
    result = {
        "rollout": rollout,
        "old log-probs": training | {ACTIVATIONS: float(measured.scoring)},
        "update": training | update,
    }
    if settings.tracking.snr_every:
        first_half = {"gradient of a half": float(measured.trained)}
        result["gradient SNR"] = training | first_half | update
    return result


def advice(run_plan: Plan) -> list[str]:
    """Return sentences: whether the run fits, and settings to change if it does not.

    Changes are added until the run fits, in this order: an engine that sleeps, activation
    checkpointing, smaller micro-batches, a smaller share of the memory for vLLM, fewer responses
    sampled at once, a rounded copy of the weights to sample with, experts shared by the GPUs of a
    machine, more GPUs.
    """
    phase, peak = run_plan.peak
    gpus = "1 GPU" if run_plan.work.ranks == 1 else f"{run_plan.work.ranks} GPUs"
    size = f"{peak / GB:.0f} GB of {run_plan.hardware.memory:g} in the phase `{phase}`"
    if run_plan.fits:
        return [f"{gpus}: fits, {size}."]
    sentences = [f"{gpus}: does not fit, {size}."]
    overrides: dict[str, Any] = {}
    change = next_change(run_plan)
    while change and not run_plan.fits:
        group, values = change
        try:
            changed_group = replace(getattr(run_plan.settings, group), **values)
            settings = replace(run_plan.settings, **{group: changed_group})
            run_plan = plan(settings, run_plan.hardware, run_plan.work.prompt, run_plan)
        except SettingError:  # another setting forbids it, such as an engine without own process
            break
        overrides |= {f"{group}.{name}": value for name, value in values.items()}
        change = next_change(run_plan)
    if not overrides:
        sentences.append(
            "There is no setting that would help: take a smaller model, or a larger GPU."
        )
        return sentences
    words = " ".join(f"{key}={str(value).lower()}" for key, value in overrides.items())
    phase, peak = run_plan.peak
    result = f"{peak / GB:.0f} GB in the phase `{phase}`."
    if run_plan.fits:
        sentences.append(f"It fits with {words}: {result}")
    else:
        sentences.append(f"It does not fit with {words} either: {result}")
    return sentences


def next_change(run_plan: Plan) -> tuple[str, dict[str, Any]] | None:
    """Return the next change to try: a group of settings and its new values.

    The result is None if nothing helps.
    """
    s = run_plan.settings
    work = run_plan.work
    phase, _ = run_plan.peak
    memory = (run_plan.hardware.memory - RESERVE) * GB
    used = run_plan.phases[phase]
    sharded = sum(nbytes for name, nbytes in used.items() if name in SHARDED)
    # more GPUs do not reduce the rest
    fits_with_more_gpus = sum(used.values()) - sharded < memory
    if phase == "rollout":
        share = vllm_share(run_plan) if s.rollout.name == "vllm" else None
        if share:
            return "rollout", {"gpu_memory": share}
        if s.rollout.name == "local" and s.rollout.batch_rows > s.rollout.group_size:
            return "rollout", {"batch_rows": max(s.rollout.batch_rows // 2, s.rollout.group_size)}
    else:
        if s.rollout.name == "vllm" and not s.rollout.sleep and not s.rollout.overlap:
            return "rollout", {"sleep": True}
        if not s.policy.checkpointing:
            return "policy", {"checkpointing": True}
        if work.rows > 1 and (sharded < memory or not fits_with_more_gpus):
            return "trainer", {"micro_batch_size": max(work.rows // 4, 1)}
    has_float32_copy = s.rollout.name == "local" and s.rollout.dtype == "float32"
    if has_float32_copy and work.shard_size > 1:
        return "rollout", {"dtype": "bfloat16"}
    experts = max_expert_ranks(run_plan)
    if phase != "rollout" and s.parallel.experts == 1 and experts > 1:
        return "parallel", {"experts": experts}
    # weights under a LoRA adapter are not sharded
    if s.policy.lora.rank or not fits_with_more_gpus:
        return None
    replicates = s.parallel.mode == "replicate" and work.ranks > 1
    ranks = work.ranks if replicates else work.ranks * 2
    while ranks < MAX_RANKS and sharded * work.shard_size / ranks > memory:
        ranks *= 2
    if ranks > min(MAX_RANKS, s.rollout.prompts_per_step):
        return None
    values: dict[str, Any] = {"mode": "shard", "ranks": ranks}
    if s.parallel.shard_size:
        values["shard_size"] = 0
    return "parallel", values


def vllm_share(run_plan: Plan) -> float | None:
    """Return the share of a GPU's memory that the trainer leaves to vLLM during the rollout.

    It is a multiple of 1/20. The result is None if vLLM's present share is not larger, or if
    vLLM's weights and the KV cache of a group would not fit into it.
    """
    gpu = run_plan.hardware.memory * GB
    engine = run_plan.engine
    rollout = run_plan.settings.rollout
    rollout_phase = run_plan.phases["rollout"]
    other = sum(rollout_phase.values()) - engine.weights - engine.cache + RESERVE * GB
    share = math.floor(20 * (gpu - other) / gpu) / 20
    group_tokens = rollout.group_size * (run_plan.work.prompt + run_plan.work.response)
    group_cache = group_tokens * engine.per_token / engine.gpus_per_engine
    if (engine.weights + group_cache) / gpu < share < rollout.gpu_memory:
        return share
    return None


def max_expert_ranks(run_plan: Plan) -> int:
    """Return the largest number of GPUs of a machine that can share a layer's experts.

    It is 1 for a dense model, and without sharded weights.
    """
    experts = run_plan.measured.experts
    shard_size = run_plan.work.shard_size
    if not experts:
        return 1
    counts = range(1, min(run_plan.hardware.per_machine, shard_size) + 1)
    return max(n for n in counts if shard_size % n == 0 and experts % n == 0)
