"""Open the policy and the reference of a run: from a checkpoint, a cold start or a model's weights.

The functions also choose the device and the precision of these models.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gspo.config.settings import Settings
from gspo.distributed.ranks import Ranks
from gspo.evaluation.resumable import weights_digest
from gspo.io.errors import SettingError, first_line
from gspo.model.loading import Loaded, check_can_be_written, positions
from gspo.model.policy import Policy
from gspo.model.settings import POSITIONS, HFModel
from gspo.model.value_head import ValueHead
from gspo.run.entry_point import stop_signal
from gspo.train.cold_start import CHECKED_PROBLEMS, cold_start, folder_of, recorded_reward

if TYPE_CHECKING:
    from gspo.model.sharding.fsdp import Shards

# called with (step, steps, loss) after each step of a cold start
ColdStartProgress = Callable[[int, int, float], None]


# ----------------------------------------------------------------------------- policy and reference
def open_policy(
    settings: Settings,
    checkpoint: Path | None,
    on_cold_start_step: ColdStartProgress,
    shards: Shards | None = None,
) -> Policy:
    """Open the policy of a checkpoint, or the policy that reinforcement learning starts from.

    The policy has a critic if the advantage estimator needs values. A missing cold start is made.
    With LoRA, a checkpoint holds an adapter of the model that the run started from."""
    if settings.model.built_from_settings:
        check_positions(settings, POSITIONS)  # before a cold start that would be in vain
    lora = settings.policy.lora
    model_checkpoint = None if lora.rank else checkpoint
    folder = model_checkpoint or starting_model_folder(settings, on_cold_start_step)
    model, tokenizer = load_model(settings, folder, shards)
    check_positions(settings, positions(model.config))
    if folder and not checkpoint:
        reward = recorded_reward(folder)
        print(
            f"{settings.label()}: starts from {folder}, "
            f"reward {reward:.3f} on {CHECKED_PROBLEMS} problems"
        )
    policy = Policy(
        model,
        tokenizer,
        settings.rollout.temperature,
        value_head=ValueHead.open(model, checkpoint) if settings.advantage.needs_values else None,
        prompts=settings.prompt,
        precision=training_precision(settings),
        head_dtype=head_precision(settings),
        checkpointing=settings.policy.checkpointing,
        shards=shards,
        initial_weights_digest="" if model_checkpoint or shards else weights_digest(model),
    )
    policy.stop_at(settings.rollout.stop, "rollout.stop")
    if folder is None and not settings.model.built_from_settings and not shards:
        check_can_be_written(model, tokenizer)
    if lora.rank:
        policy.adapt(lora, settings.seed, base_model_path(settings, folder), checkpoint)
    return policy


def base_model_path(settings: Settings, folder: Path | None) -> str:
    """Return the path by which others find the model under an adapter.

    It is the absolute path of a folder, a name on the hub, or "" for a model that is made from its
    settings."""
    source = str(folder or settings.model.source())
    return str(Path(source).resolve()) if source and Path(source).is_dir() else source


def open_reference(
    settings: Settings,
    policy: Policy,
    checkpoint: Path | None,
    on_cold_start_step: ColdStartProgress,
    shards: Shards | None = None,
) -> Policy | None:
    """Open the reference policy, or return None if there is no KL term.

    The reference is the policy that the run started from, or was last refreshed to. With LoRA it
    is the trained `policy` without its adapter, on the same tensors."""
    if settings.kl.name == "none":
        return None
    if policy.adapter:
        return policy.without_adapter()
    refreshed = checkpoint / "reference" if checkpoint else None
    has_refreshed = refreshed and refreshed.exists()
    folder = refreshed if has_refreshed else starting_model_folder(settings, on_cold_start_step)
    model, tokenizer = load_model(settings, folder, shards)
    return Policy(
        model.requires_grad_(False),
        tokenizer,
        settings.rollout.temperature,
        prompts=settings.prompt,
        precision=training_precision(settings),
        head_dtype=head_precision(settings),
        shards=shards,
        initial_weights_digest="" if has_refreshed or shards else weights_digest(model),
    )


def plain_policy(path: str) -> Policy:
    """Open any causal language model, a folder or a name on the hub, at temperature 1."""
    model, tokenizer = HFModel(path=path).make()
    return Policy(model.to(usable_device("auto", "device")), tokenizer)


# ------------------------------------------------------------------------------------------ weights
def starting_model_folder(settings: Settings, on_cold_start_step: ColdStartProgress) -> Path | None:
    """Return the folder of the cold-started model, after making the model if it is missing.

    Return None for a run without cold start. If another run makes the model, this one waits. Raises
    Stopped if it is asked to stop meanwhile."""
    if not settings.cold_start.steps:
        return None

    def on_wait(seconds: float) -> None:
        if seconds == 0:
            print(
                f"{settings.label()}: waits for the cold start that another run makes", flush=True
            )
        stop_signal().raise_if_requested()

    return cold_start(
        settings.model,
        settings.task,
        settings.cold_start,
        Path(settings.runs) / "cold_starts",
        on_cold_start_step,
        device=training_device(settings),
        prompts=settings.prompt,
        on_wait=on_wait,
    )


def cold_start_folder(settings: Settings) -> Path | None:
    """Return the folder of the cold-started model, without making the model.

    Return None for a run without cold start."""
    if not settings.cold_start.steps:
        return None
    cache = Path(settings.runs) / "cold_starts"
    return folder_of(settings.model, settings.task, settings.cold_start, cache, settings.prompt)


def load_model(settings: Settings, folder: Path | None, shards: Shards | None = None) -> Loaded:
    """Load model and tokenizer to the run's device, from a folder or as the settings make them.

    With `shards` each rank reads its own part of the weights."""
    device = training_device(settings)
    source = str(folder) if folder else settings.model.source()
    if shards and source:
        from gspo.model.sharding.sharded_files import load_sharded

        return load_sharded(
            source, settings.model.attention, shards, device, training_precision(settings)
        )
    model, tokenizer = settings.model.open(folder) if folder else settings.model.make()
    model.to(device)
    if shards:
        shards.shard_model(model, training_precision(settings))
    return model, tokenizer


def make_shards(settings: Settings, ranks: Ranks) -> Shards | None:
    """Return the division of the weights into shards, None if every rank holds all weights."""
    if settings.parallel.mode != "shard":
        return None
    from gspo.model.sharding.fsdp import Shards  # PyTorch's FSDP takes a second to import

    parallel = settings.parallel
    return Shards(
        ranks, parallel.shard_size or ranks.world_size, training_device(settings), parallel.experts
    )


def check_positions(settings: Settings, available: int | None) -> None:
    """Check that the longest response leaves positions of the model for a prompt.

    A model that is made here has known positions, so its limit is refused. For other models the
    limit is lowered to half of the positions. Raises ValueError for a limit that is refused, and
    if other settings depend on a limit that would be lowered."""
    limit = settings.rollout.longest_limit
    if not available or limit < available:
        return
    half = available // 2
    if settings.model.built_from_settings:
        raise SettingError(
            "rollout.max_new_tokens",
            limit,
            f"leaves no room for a prompt in {available} positions",
            remedy=f"lower it, for example to {half}",
        )
    aggregations = [settings.trainer.aggregation]
    if settings.kl.in_loss:
        aggregations.append(settings.kl.aggregation)
    divides_by_limit = any(aggregation.length == limit for aggregation in aggregations)
    depending = max(settings.rollout.token_budget, settings.reward.overlong_cache)
    if divides_by_limit or half <= depending:
        raise SettingError(
            "rollout.max_new_tokens",
            limit,
            f"leaves no room for a prompt in {available} positions, and other settings "
            "depend on it (a loss that is divided by the longest response, "
            "rollout.token_budget, or reward.overlong_cache)",
            remedy=f"set it to {half}",
        )
    settings.rollout.bound_by(available)


# ---------------------------------------------------------------------------- device and precision
def training_precision(settings: Settings) -> torch.dtype:
    """Return the precision of the trainer's matrix products."""
    return getattr(torch, settings.policy.precision)


def head_precision(settings: Settings) -> torch.dtype:
    """Return the precision of the product that makes logits."""
    return getattr(torch, settings.policy.head_dtype)


def use_deterministic_algorithms() -> None:
    """Make this process compute every sum in the same order each time, as a CPU does anyway.

    An operation without a fixed order then raises RuntimeError."""
    # cuBLAS reads it when it is first used
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def training_device(settings: Settings) -> str:
    """Return the device that the model is trained on. Raises ValueError if it cannot be used."""
    return usable_device(settings.policy.device, "policy.device")


def usable_device(device: str, key: str) -> str:
    """Return the device, or for "auto" the GPU if there is one, else the CPU.

    On a GPU cuDNN's attention is switched off, because it plans anew for every shape, and shapes
    change with every token. Raises ValueError, naming the setting `key`, for a device that cannot
    be used here."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    # a device unknown to torch, absent hardware, a build without it, or no free memory
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise SettingError(key, device, f"cannot be used here: {reason}") from None
    return device
