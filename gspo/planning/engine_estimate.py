"""The sampling engine's part of a plan: its memory, and the responses that it samples at once."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from gspo.config.settings import Settings
from gspo.io.errors import SettingError
from gspo.model.cost import head_dim_of
from gspo.planning.hardware import GB, Hardware
from gspo.planning.memory import Measured, Work

BYTES = {"float32": 4, "bfloat16": 2}
# bytes for each logit of the next token while it is sampled: probabilities, their order, sums
LOGIT_BYTES = 24.0


@dataclass
class EngineEstimate:
    """The sampling engine of a GPU, or the GPU's part of it: memory in bytes and responses."""

    weights: float  # in addition to the trainer's weights
    cache: float  # KV cache of the responses that are sampled at once
    logits: float
    resident: float  # stays in memory while the trainer works
    per_token: float  # KV cache of a token, in one engine
    gpus_per_engine: int
    rows: float  # count: responses that one engine samples in a step
    at_once: float  # count: responses that are sampled at once
    read: float  # weights that are read for each token, on one GPU
    # copy of the trainer's weights with a merged LoRA adapter, while the engine samples with them
    merged: float
    # float32 copies of all weights, from which an overlapped engine gets those of earlier steps
    copies: float


def cache_per_token(config: PretrainedConfig, itemsize: int) -> float:
    """Return the bytes of the keys and values of a token in all layers."""
    text = config.get_text_config()
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2.0 * text.num_hidden_layers * kv_heads * head_dim_of(config) * itemsize


def check_tensor_parallel(gpus: int, config: PretrainedConfig, most: int | None) -> None:
    """Raise SettingError if vLLM cannot share a model out over this number of GPUs.

    `most` is the number of GPUs of its machine, None if it is not known."""
    heads = getattr(config.get_text_config(), "num_attention_heads", 0)
    problem = ""
    if heads % gpus:
        problem = f"does not divide the model's {heads} attention heads"
    elif most is not None and gpus > most:
        problem = f"exceeds the GPUs of a machine: {most}"
    if problem:
        raise SettingError("rollout.tensor_parallel_size", gpus, problem)


def engine_estimate(
    settings: Settings,
    config: PretrainedConfig,
    measured: Measured,
    work: Work,
    responses: int,
    hardware: Hardware,
) -> EngineEstimate:
    """Return the estimate of a run's engine, for `responses` responses per GPU and step.

    Raises SettingError if vLLM's share of a GPU is too small for a response, or if it cannot use
    so many GPUs together.
    """
    rollout = settings.rollout
    itemsize = BYTES[rollout.dtype]
    per_token = cache_per_token(config, itemsize)
    per_response = (work.prompt + work.response) * per_token
    all_weights = float(measured.parameters * itemsize)
    at_once = min(responses, max(rollout.batch_rows, rollout.group_size))
    weights = 0.0
    cache = 0.0
    logits = 0.0
    resident = 0.0
    merged = 0.0
    gpus = 1
    if rollout.name in ("vllm", "vllm_server"):
        gpus = rollout.tensor_parallel_size
        # a server may be on another machine
        most = hardware.per_machine if rollout.name == "vllm" else None
        check_tensor_parallel(gpus, config, most)
        weights_per_gpu = all_weights / gpus
        share = rollout.gpu_memory * hardware.memory * GB
        if share < weights_per_gpu + per_response / gpus:
            raise SettingError(
                "rollout.gpu_memory",
                rollout.gpu_memory,
                f"this share of {hardware.memory:g} GB holds no response beside the engine's "
                f"weights of {weights_per_gpu / GB:.1f} GB",
            )
        at_once = int(min(at_once * gpus, (share - weights_per_gpu) * gpus / per_response))
        if rollout.name == "vllm":  # a server has as many GPUs of its own
            weights = weights_per_gpu
            cache = share - weights
            # vLLM allocates its share at once, and keeps it unless it may sleep
            resident = 0.0 if rollout.sleep else share
    else:
        if rollout.shares_weights and work.shard_size == 1 and not rollout.overlap:
            merged = float(measured.merged)
        else:
            weights = all_weights
        cache = at_once * per_response
        if settings.task.environments():
            cache *= 2  # between two turns, the rows are copied into a new cache
        logits = at_once * config.get_text_config().vocab_size * LOGIT_BYTES
        resident = weights + cache + logits if rollout.overlap else weights
    copies = 0.0
    if rollout.overlap:
        # of each batch that waits to be sampled, and the one that the engine's weights come from
        count = rollout.staleness + (0 if rollout.shares_weights else 1)
        copies = float(count * measured.parameters * BYTES["float32"])
    return EngineEstimate(
        weights=weights,
        cache=cache,
        logits=logits,
        resident=resident,
        per_token=per_token,
        gpus_per_engine=gpus,
        rows=responses * gpus,
        at_once=at_once,
        read=all_weights / gpus,
        merged=merged,
        copies=copies,
    )
