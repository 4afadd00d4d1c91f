"""What a run needs on each of its GPUs, and how long a step takes, before anything loads.

For example, Qwen3-30B-A3B on 16 GPUs: each holds a sixteenth of the weights, of their gradients and
of AdamW's two moments (7.6 + 7.6 + 15.3 GB), gathers a layer's weights while it computes, and keeps
the activations of one micro-batch. What is held is counted by gspo.planning.memory; times are those
of a roofline: arithmetic at 40 % of the GPU's peak, memory at 60 % of its bandwidth, and what
launching kernels took on an H200 (gspo.planning.hardware). Nothing happens at the same time as
anything else, and every response has the greatest length. So a time is right to a factor of two,
and its parts say what binds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from gspo.config.checks import check_processes, samples_ahead, shares_weights
from gspo.config.settings import Settings
from gspo.model.cost import forward_flops
from gspo.planning.hardware import (
    ARITHMETIC,
    GB,
    MEMORY,
    OF_DENSE_LAYER,
    OF_MOE_LAYER,
    RESERVE,
    Hardware,
    Launches,
)
from gspo.planning.memory import Measured, Work, measure
from gspo.planning.models import config_of

BYTES = {"float32": 4, "bfloat16": 2}
PROMPT = 512  # tokens of a prompt where neither the settings nor the user say how many it can have
AROUND = 32  # tokens that a chat template puts around an observation, at most: Qwen3's puts 18
MOST_RANKS = 1024
# bytes for each logit of the next token while it is drawn: probabilities, their order, sums
OF_LOGIT = 24.0
# how many times as long a float32 product takes as one of bfloat16, without TF32 rather more
FLOAT32 = 8
ACROSS = "gradients between copies"
TOKENS = "tokens to their experts and back"
ACTIVATIONS = "activations and gathered weights"
# bytes of two moments of 8 bits, with a scale for 256, for each of a weight's four
EIGHT_BIT = 2 * (1 + 4 / 256) / 4
SPREAD = ("weights", "AdamW's moments", "reference policy", "gradients")


@dataclass
class Plan:
    """What is planned for one GPU. `phases` and `traffic` are in bytes, `times` in seconds of a
    step.
    """

    settings: Settings
    hardware: Hardware
    work: Work
    measured: Measured
    engine: Engine
    phases: dict[str, dict[str, float]]  # by phase, what is held then
    traffic: dict[str, float]  # what the GPU receives from others, or sends, in a step
    times: dict[str, float]

    @property
    def peak(self) -> tuple[str, float]:
        """The phase that holds most, and how many bytes with what the driver and libraries take."""
        phase = max(self.phases, key=lambda name: sum(self.phases[name].values()))
        return phase, sum(self.phases[phase].values()) + RESERVE * GB

    @property
    def fits(self) -> bool:
        """Whether the GPU's memory holds it."""
        return self.peak[1] <= self.hardware.memory * GB


def plan(
    settings: Settings, hardware: Hardware, prompt: int = 0, known: Plan | None = None
) -> Plan:
    """Plan a run. `prompt` is the number of a prompt's tokens; 0: rollout.max_prompt_tokens, or
    512. A plan of the same model that is `known` already saves measuring again what a rank computes
    at once, if that is the same.

    Raises ValueError, in one line, for settings that do not go together and for a model that is not
    known."""
    ranks, size = ranks_of(settings)
    config = config_of(settings.model)
    likely = settings.rollout.max_prompt_tokens or PROMPT
    if positions := getattr(config.get_text_config(), "max_position_embeddings", None):
        settings.rollout.bound_by(positions)
        likely = min(likely, settings.rollout.half_of_positions or likely)
    prompt = prompt or likely
    check_lengths(config, prompt, settings.rollout.longest_limit)
    each = math.ceil(settings.rollout.prompts_per_step * settings.rollout.group_size / ranks)
    work = Work(
        ranks=ranks,
        shard_size=size,
        experts=settings.parallel.experts,
        rows=min(settings.trainer.micro_batch_size, math.ceil(each / settings.trainer.minibatches)),
        scored=min(settings.trainer.micro_batch_size, each),
        prompt=prompt,
        response=response_tokens(settings, config, prompt),
        group=settings.rollout.group_size,
        precision=getattr(torch, settings.policy.precision),
        checkpointing=settings.policy.checkpointing,
        lora=settings.policy.lora,
        head_dtype=getattr(torch, settings.policy.head_dtype),
    )
    measured = known.measured if known and known.work == work else measure(config, work)
    engine = Engine.of(settings, config, measured, work, each, hardware)
    passes = passes_of(settings, work, each, engine)
    traffic = traffic_of(settings, measured, work, passes)
    times = update_times(config, measured, work, passes, hardware)
    times |= exchange_times(traffic, work, hardware) | rollout_times(
        measured, work, engine, hardware
    )
    if settings.rollout.name == "local":
        waves = math.ceil(engine.rows / engine.at_once)
        tokens = waves * work.response
        times["rollout: kernels launched"] = (
            tokens * config.num_hidden_layers * launches_of(measured).token
        )
    return Plan(
        settings,
        hardware,
        work,
        measured,
        engine,
        phases(settings, measured, engine),
        traffic,
        times,
    )


def ranks_of(settings: Settings) -> tuple[int, int]:
    """Return how many GPUs the run has, and how many hold one copy of the weights."""
    ranks, mode = max(settings.parallel.ranks, 1), settings.parallel.mode
    if ranks > 1 and mode == "none":
        raise ValueError(
            f"parallel.ranks={ranks} with parallel.mode=none: say parallel.mode=shard or replicate"
        )
    if mode == "shard" and ranks == 1:
        raise ValueError(
            "parallel.mode=shard with one GPU: say how many there are, parallel.ranks=N"
        )
    if ranks > 1:
        check_processes(settings, ranks)
    return ranks, (settings.parallel.shard_size or ranks) if mode == "shard" else 1


def check_lengths(config: PretrainedConfig, prompt: int, response: int) -> None:
    """Raise ValueError for a prompt and a response that the model has no positions for."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and prompt + response > positions:
        raise ValueError(
            f"a prompt of {prompt} and a response of {response} tokens exceed the model's {positions} positions: lower "
            "rollout.max_new_tokens, or say --prompt"
        )


def response_tokens(settings: Settings, config: PretrainedConfig, prompt: int) -> int:
    """Return the most tokens that can follow a prompt: those of the policy, and in episodes what
    the environment and the chat template write between its turns, as far as the model has
    positions."""
    limits = settings.task.environments().values()
    said = max(
        ((limit.turns - 1) * (limit.observation_tokens + AROUND) for limit in limits), default=0
    )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    most = settings.rollout.longest_limit + said
    return min(most, positions - prompt) if positions else most


@dataclass
class Engine:
    """The engine that a GPU samples with, or its part of it. Bytes."""

    weights: float  # beside the trainer's own
    cache: float  # keys and values of the responses that are sampled at once
    logits: float
    resident: float  # what stays while the trainer works
    per_token: float  # of keys and values, in one engine
    engines: float  # how many GPUs share one
    rows: float  # responses that one engine samples in a step
    at_once: float
    read: float  # of weights for a token, on one GPU
    # the trainer's weights with a LoRA adapter merged in, while it samples with them
    merged: float = 0.0

    @staticmethod
    def of(
        settings: Settings,
        config: PretrainedConfig,
        measured: Measured,
        work: Work,
        each: int,
        hardware: Hardware,
    ) -> Engine:
        """Return the engine of these settings. Raises ValueError for a vLLM whose share of a GPU
        holds no response.
        """
        rollout, text = settings.rollout, config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        item = BYTES[rollout.dtype]
        per_token = 2.0 * text.num_hidden_layers * heads * dim * item
        of_row = (work.prompt + work.response) * per_token
        all_weights = float(measured.parameters * item)
        at_once = min(each, max(rollout.batch_rows, rollout.group_size))
        if rollout.name in ("vllm", "vllm_server"):
            shared = rollout.tensor_parallel_size
            share, weights = rollout.gpu_memory * hardware.memory * GB, all_weights / shared
            if share < weights + of_row / shared:
                raise ValueError(
                    f"rollout.gpu_memory={rollout.gpu_memory:g} of {hardware.memory:g} GB holds no response beside the "
                    f"engine's weights of {weights / GB:.1f} GB"
                )
            at_once = int(min(at_once * shared, (share - weights) * shared / of_row))
            # on as many GPUs of the same kind, but on others than these
            if rollout.name == "vllm_server":
                return Engine(
                    0.0, 0.0, 0.0, 0.0, per_token, shared, each * shared, at_once, weights
                )
            # it takes its share at once, and keeps it unless it may sleep
            resident = 0.0 if rollout.sleep else share
            return Engine(
                weights,
                share - weights,
                0.0,
                resident,
                per_token,
                shared,
                each * shared,
                at_once,
                weights,
            )
        shares = shares_weights(settings) and work.shard_size == 1 and not rollout.overlap
        weights = 0.0 if shares else all_weights
        cache, logits = at_once * of_row, at_once * text.vocab_size * OF_LOGIT
        if settings.task.environments():
            cache *= 2  # between two turns the rows are copied out of the cache and into a new one
        resident = weights + (cache + logits if rollout.overlap else 0.0)
        merged = float(measured.merged) if shares else 0.0
        return Engine(
            weights, cache, logits, resident, per_token, 1, each, at_once, all_weights, merged
        )


@dataclass
class Passes:
    """How many micro-batches of a step a rank passes through the model."""

    learning: int
    scoring: int
    updates: int  # of the optimizer


def passes_of(settings: Settings, work: Work, each: int, engine: Engine) -> Passes:
    """Count a step's passes: each epoch learns; the old policy's and the reference's log-probs are
    scored. The former are spared where the engine has just computed them with the trainer's weights
    (PolicySettings.skips_old_pass)."""
    here = settings.rollout.name == "local" and not engine.weights
    skipped = settings.policy.skips_old_pass(
        exact_engine=here and settings.policy.precision == "float32",
        samples_ahead=samples_ahead(settings),
        correction=settings.correction.name,
        critic=settings.advantage.needs_values,
    )
    scored = (not skipped) + settings.kl.needs_reference
    epochs, minibatches = settings.trainer.epochs, settings.trainer.minibatches
    learning = minibatches * math.ceil(each / minibatches / work.rows)
    return Passes(learning * epochs, math.ceil(each / work.scored) * scored, minibatches * epochs)


def phases(settings: Settings, measured: Measured, engine: Engine) -> dict[str, dict[str, float]]:
    """Return what a GPU holds while responses are sampled, while they are scored, and in an update."""
    moments = 2.0 if settings.optim.name == "adamw" else EIGHT_BIT
    held = {"weights": float(measured.weights), "AdamW's moments": moments * measured.trained}
    # with LoRA: the same weights, the adapter off
    if settings.kl.needs_reference and not settings.policy.lora.rank:
        held["reference policy"] = float(measured.weights)
    beside = {"engine": engine.resident} if engine.resident else {}
    copied = engine.weights + engine.merged
    sampled = {"engine's weights": copied} if copied else {}
    return {
        "rollout": held | sampled | {"keys and values": engine.cache, "logits": engine.logits},
        "old log-probs": held | beside | {ACTIVATIONS: float(measured.scoring)},
        "update": held
        | beside
        | {"gradients": float(measured.trained), ACTIVATIONS: float(measured.update)},
    }


def traffic_of(
    settings: Settings, measured: Measured, work: Work, passes: Passes
) -> dict[str, float]:
    """Return the bytes that a GPU exchanges with others in a step."""
    if work.ranks == 1:
        return {}
    if work.shard_size == 1:  # a ring of sums sends every gradient twice
        return {ACROSS: 2.0 * passes.updates * measured.trained}
    found = {
        "weights gathered to learn": float(passes.learning * measured.gathered),
        "weights gathered to score": float(passes.scoring * measured.gathered_scoring),
        "gradients": float(passes.learning * measured.reduced),
        "weights for the engine": 4.0 * measured.parameters,  # gathered in float32, then rounded
    }
    if work.experts > 1:
        found[TOKENS] = float(
            passes.learning * measured.dealt + passes.scoring * measured.dealt_scoring
        )
    return found | (
        {ACROSS: float(passes.learning * measured.reduced_between)}
        if work.shard_size < work.ranks
        else {}
    )


def update_times(
    config: PretrainedConfig, measured: Measured, work: Work, passes: Passes, hardware: Hardware
) -> dict[str, float]:
    """Return the seconds of a step's arithmetic in the trainer; nothing where it is not known how
    many parameters a token passes through."""
    if not measured.active:
        return {}
    forward = forward_flops(config, measured.active, torch.tensor([work.prompt + work.response]))
    seconds = forward / (hardware.flops * 1e12 * ARITHMETIC)
    seconds *= 1 if work.precision == torch.bfloat16 else FLOAT32
    # a backward costs two forwards, with LoRA one; checkpointing computes one again
    per_pass = 1 + (1 if work.lora.rank else 2) + work.checkpointing
    layers = config.num_hidden_layers
    launches = launches_of(measured)
    return {
        "update: arithmetic": passes.learning * work.rows * per_pass * seconds,
        "update: kernels launched": passes.learning * layers * launches.learning,
        "old log-probs: arithmetic": passes.scoring * work.scored * seconds,
        "old log-probs: kernels launched": passes.scoring * layers * launches.scoring,
    }


def launches_of(measured: Measured) -> Launches:
    """Return what launching a layer's kernels takes: more in an MoE layer."""
    sparse = measured.active is not None and measured.active < measured.parameters
    return OF_MOE_LAYER if sparse else OF_DENSE_LAYER


def exchange_times(traffic: dict[str, float], work: Work, hardware: Hardware) -> dict[str, float]:
    """Return the seconds in which a GPU exchanges this with others: what crosses copies of the
    weights goes between all ranks, tokens between those that share a layer's experts, the rest
    within a copy."""
    if not traffic:
        return {}
    between = {ACROSS: work.ranks, TOKENS: work.experts}
    seconds = (
        size / (hardware.bandwidth_between(between.get(name, work.shard_size)) * GB)
        for name, size in traffic.items()
    )
    return {"exchange between GPUs": sum(seconds)}


def rollout_times(
    measured: Measured, work: Work, engine: Engine, hardware: Hardware
) -> dict[str, float]:
    """Return the seconds in which a step's responses are sampled: for every token the weights and
    the cache are read, of experts those that the tokens of `at_once` responses can touch."""
    waves = math.ceil(engine.rows / engine.at_once)
    held = engine.at_once * (work.prompt + work.response / 2) * engine.per_token / engine.engines
    share = (
        min(1.0, engine.at_once * measured.active / measured.parameters) if measured.active else 1.0
    )
    read = waves * work.response * (engine.read * share + held)
    found = {"rollout: weights and cache read": read / (hardware.bandwidth * GB * MEMORY)}
    if measured.active:
        products = 2.0 * measured.active * engine.rows * work.response / engine.engines
        found["rollout: arithmetic"] = products / (hardware.flops * 1e12 * ARITHMETIC)
    return found


def advice(made: Plan) -> list[str]:
    """Return in sentences what to change so that a run fits that does not; one sentence if it does.

    Each change is tried, in this order, until one fits: an engine that sleeps, layers computed
    again in the backward pass, smaller micro-batches, a smaller share of the memory for vLLM, fewer
    responses sampled at once, a rounded copy to sample with, experts that are dealt to the GPUs of
    a machine, more GPUs."""
    phase, peak = made.peak
    gpus = f"{made.work.ranks} GPU" + "s" * (made.work.ranks > 1)
    size = f"{peak / GB:.0f} GB of {made.hardware.memory:g} in the phase `{phase}`"
    if made.fits:
        return [f"{gpus}: fits, {size}."]
    lines = [f"{gpus}: does not fit, {size}."]
    changes: dict[str, str] = {}
    while found := next_change(made):
        changes |= found[0]
        made = plan(found[1], made.hardware, made.work.prompt, made)
        if made.fits:
            break
    if not changes:
        return [
            *lines,
            "There is no setting that would help: take a smaller model, or a larger GPU.",
        ]
    words = " ".join(f"{key}={value}" for key, value in changes.items())
    phase, peak = made.peak
    start, end = ("It fits with", "") if made.fits else ("It does not fit with", " either")
    return [*lines, f"{start} {words}{end}: {peak / GB:.0f} GB in the phase `{phase}`."]


def next_change(made: Plan) -> tuple[dict[str, str], Settings] | None:
    """Return the next change to try, as overrides and as settings; None if there is none left that
    would help.
    """
    s, (phase, _) = made.settings, made.peak
    trains, room = phase != "rollout", (made.hardware.memory - RESERVE) * GB
    held = made.phases[phase]
    spread = sum(size for name, size in held.items() if name in SPREAD)  # what more GPUs share out
    if trains and s.rollout.name == "vllm" and not s.rollout.sleep and not s.rollout.overlap:
        return {"rollout.sleep": "true"}, replace(s, rollout=replace(s.rollout, sleep=True))
    if trains and not s.policy.checkpointing:
        return {"policy.checkpointing": "true"}, replace(
            s, policy=replace(s.policy, checkpointing=True)
        )
    if trains and made.work.rows > 1 and (spread < room or sum(held.values()) - spread >= room):
        rows = max(made.work.rows // 4, 1)
        trainer = replace(s.trainer, micro_batch_size=rows)
        return {"trainer.micro_batch_size": f"{rows}"}, replace(s, trainer=trainer)
    if not trains and s.rollout.name == "vllm" and (share := share_left(made)):
        return {"rollout.gpu_memory": f"{share:g}"}, replace(
            s, rollout=replace(s.rollout, gpu_memory=share)
        )
    if not trains and s.rollout.name == "local" and s.rollout.batch_rows > s.rollout.group_size:
        rows = max(s.rollout.batch_rows // 2, s.rollout.group_size)
        return {"rollout.batch_rows": f"{rows}"}, replace(
            s, rollout=replace(s.rollout, batch_rows=rows)
        )
    copied = s.rollout.name == "local" and s.rollout.dtype == "float32" and made.work.shard_size > 1
    if copied:
        return {"rollout.dtype": "bfloat16"}, replace(
            s, rollout=replace(s.rollout, dtype="bfloat16")
        )
    if trains and s.parallel.experts == 1 and (dealt := most_ranks_of_a_layer(made)) > 1:
        return {"parallel.experts": f"{dealt}"}, replace(
            s, parallel=replace(s.parallel, experts=dealt)
        )
    if s.policy.lora.rank or sum(held.values()) - spread >= room:
        return None  # weights under an adapter are not spread, or more GPUs would not help
    ranks = made.work.ranks if s.parallel.mode == "replicate" else made.work.ranks * 2
    # more than one doubling is needed
    while ranks < MOST_RANKS and spread * made.work.shard_size / ranks > room:
        ranks *= 2
    if ranks > min(MOST_RANKS, s.rollout.prompts_per_step):
        return None
    words = {"parallel.mode": "shard", "parallel.ranks": f"{ranks}"}
    words |= {"parallel.shard_size": "0"} if s.parallel.shard_size else {}
    return words, replace(s, parallel=replace(s.parallel, ranks=ranks, mode="shard", shard_size=0))


def share_left(made: Plan) -> float | None:
    """Return the share of a GPU's memory that the trainer leaves to vLLM while responses are
    sampled, in twentieths; None if vLLM has no more than that, or if its weights and the cache of a
    group would not fit into it."""
    gpu, engine, rollout = made.hardware.memory * GB, made.engine, made.settings.rollout
    beside = sum(made.phases["rollout"].values()) - engine.weights - engine.cache + RESERVE * GB
    share = math.floor(20 * (gpu - beside) / gpu) / 20
    group = (
        rollout.group_size
        * (made.work.prompt + made.work.response)
        * engine.per_token
        / engine.engines
    )
    return share if (engine.weights + group) / gpu < share < rollout.gpu_memory else None


def most_ranks_of_a_layer(made: Plan) -> int:
    """Return to how many GPUs of one machine the experts of a layer can be dealt; 1 where there are
    none, or where no weights are spread."""
    experts, size = made.measured.experts, made.work.shard_size
    counts = range(1, min(made.hardware.per_machine, size) + 1)
    return max(n for n in counts if size % n == 0 and experts % n == 0) if experts else 1
