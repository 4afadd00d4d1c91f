"""Builds the trainer of a run: opens policy and reference, starts the engine, and puts source and
trainer on top.

`build_trainer` does it all; the other functions are its steps, some of which evaluation and
benchmarks use alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gspo.config.checks import check_training_set
from gspo.config.settings import Settings
from gspo.distributed.ranks import Ranks, ranks_lost_in_passes
from gspo.evaluation.evaluate import load_evaluation_sets, with_room
from gspo.evaluation.resumable import fingerprint
from gspo.model.adapter import installed
from gspo.model.loading import Loaded, check_can_be_written, positions
from gspo.model.policy import Policy
from gspo.model.settings import POSITIONS, ModelSettings
from gspo.model.value_head import ValueHead
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.process import EngineEnded
from gspo.rollout.engines.vllm_server import VLLMServerEngine, check_server
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.base import RolloutSource
from gspo.rollout.sources.off_policy import make_source
from gspo.rollout.sources.pending import load_pending
from gspo.rollout.sources.sampler_logprobs import BehaviourLogprobs
from gspo.run.entry_point import stop_signal
from gspo.run.event_files import check_event_files
from gspo.run.inputs import check_inputs, inputs_of
from gspo.run.sweep_progress import PAUSE as PAUSE_OF_SWEEP
from gspo.tracking.tracker import PAUSE, Progress
from gspo.train.checkpoint import load_optimizer
from gspo.train.cold_start import CHECKED_PROBLEMS, cold_start, folder_of, recorded_reward
from gspo.train.extensions import Extensions
from gspo.train.optimizer import check_optimizer
from gspo.train.trainer import Trainer

if TYPE_CHECKING:
    from gspo.model.sharding.fsdp import Shards

COLD_START = timedelta(days=30)  # how long the other ranks wait for rank 0's cold start
# called with (step, steps, loss) after each step of a cold start
ColdStartProgress = Callable[[int, int, float], None]


@ranks_lost_in_passes()
def build_trainer(
    settings: Settings,
    checkpoint: Path | None = None,
    alone: bool = False,
    ranks: Ranks | None = None,
) -> Trainer:
    """Build the trainer of a run, from a checkpoint if there is one.

    `alone` says that the run has the terminal to itself, so that a cold start may draw a progress
    bar; `ranks` are the processes that train together, of which rank 0 makes the cold start. Raises
    ValueError for settings that cannot work on this machine or with this model, EngineEnded if the
    engine's process ends, and Stopped if the user asks to stop during a cold start.
    """
    ranks = ranks or Ranks()
    check_training_set(settings)
    check_event_files(settings)
    if settings.policy.deterministic:
        use_deterministic_algorithms()
    settings.task.ready()
    with ExitStack() as stack:
        bars: list[Progress] = []  # none before there is a cold start to be made

        def on_cold_start_step(step: int, steps: int, loss: float) -> None:
            stop_signal().raise_if_requested()
            if not bars:
                pause = PAUSE if alone else PAUSE_OF_SWEEP
                bars.append(
                    stack.enter_context(
                        closing(Progress("cold start", steps, step - 1, alone, pause))
                    )
                )
            bars[0](step, loss=loss)

        check_optimizer(settings.optim, training_device(settings))
        check_engine_start(settings.rollout, settings.model)
        if settings.policy.lora.rank:
            installed()
        if ranks.world_size > 1 and not checkpoint:
            others = ranks.new_group(COLD_START)
            if ranks.rank == 0:
                starting_model_folder(settings, on_cold_start_step)
            others.broadcast(None)  # the others wait here
        shards = make_shards(settings, ranks)
        policy = open_policy(settings, checkpoint, on_cold_start_step, shards)
        reference = open_reference(settings, policy, checkpoint, on_cold_start_step, shards)
        check_inputs(settings, inputs_of(settings, policy, reference))
        check_routing(settings, policy)
        sampled = policy.copy() if settings.rollout.overlap else policy
        # with overlap the engine samples in a thread of its own, beside the exchanges of the
        # trainer
        engine = make_engine(
            sampled, settings.rollout, ranks.new_group() if settings.rollout.overlap else ranks
        )
        try:
            return trainer_on_engine(settings, checkpoint, policy, reference, engine, ranks)
        except BaseException:
            engine.close()
            raise


def trainer_on_engine(
    settings: Settings,
    checkpoint: Path | None,
    policy: Policy,
    reference: Policy | None,
    engine: Engine,
    ranks: Ranks,
) -> Trainer:
    """Put source and trainer on top of an engine that has started, restore the checkpoint, and
    check that the engine has the trainer's weights and room for the held-out problems."""
    task = settings.task
    source = make_source(
        engine,
        task,
        settings.rollout,
        settings.sampler,
        settings.seed,
        behaviour_logprobs(settings, engine.policy),
        trained=policy,
    )
    trainer = Trainer(
        policy,
        source,
        settings.algorithm(),
        optim=settings.optim,
        settings=settings.trainer,
        policy_settings=settings.policy,
        seed=settings.seed,
        reference=reference,
        extensions=Extensions(settings.metrics, settings.callbacks),
        ranks=ranks,
    )
    check_same_weights(policy, ranks)
    if checkpoint:
        trainer.restore(load_optimizer(checkpoint, trainer.optimizer, policy))
        source.restore_pending(
            load_pending(checkpoint, lambda index: task.problem(settings.seed, "train", index))
        )
    check_engine_weights(source, trainer.state.step)
    for evaluation_set in load_evaluation_sets(
        task, settings.evaluation.sets, settings.evaluation.problems
    ):
        # raises before anything is written
        with_room(evaluation_set, engine, settings.rollout.longest_limit)
    return trainer


# ------------------------------------------------------------------------------------------- policy
# and reference
def make_shards(settings: Settings, ranks: Ranks) -> Shards | None:
    """Return the ranks over which the weights are to be sharded, None where each has all of them."""
    if settings.parallel.mode != "shard":
        return None
    from gspo.model.sharding.fsdp import Shards  # PyTorch's part of it takes a second to import

    parallel = settings.parallel
    return Shards(
        ranks, parallel.shard_size or ranks.world_size, training_device(settings), parallel.experts
    )


def open_policy(
    settings: Settings,
    checkpoint: Path | None,
    on_cold_start_step: ColdStartProgress,
    shards: Shards | None = None,
) -> Policy:
    """Open the policy of a checkpoint, or the one that reinforcement learning starts from; with a
    critic if the advantage estimator needs values. Makes the cold start if it is not there yet.
    With LoRA a checkpoint is an adapter of the model that the run started from."""
    if settings.model.built_from_settings:
        check_positions(settings, POSITIONS)  # before a cold start that would be in vain
    lora = settings.policy.lora
    whole = None if lora.rank else checkpoint
    folder = whole or starting_model_folder(settings, on_cold_start_step)
    model, tokenizer = load_model(settings, folder, shards)
    check_positions(settings, positions(model))
    if folder and not checkpoint:
        reward = recorded_reward(folder)
        print(
            f"{settings.label()}: starts from {folder}, reward {reward:.3f} on {CHECKED_PROBLEMS} problems"
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
        initial_weights_digest="" if whole or shards else fingerprint(model),
    )
    policy.stop_at(settings.rollout.stop, "rollout.stop")
    if folder is None and not settings.model.built_from_settings and not shards:
        check_can_be_written(model, tokenizer)
    if lora.rank:
        policy.adapt(lora, settings.seed, base_of(settings, folder), checkpoint)
    return policy


def base_of(settings: Settings, folder: Path | None) -> str:
    """Return where others find the model under an adapter: a folder with its whole path, a name on
    the hub, or "" for a model that is made from its settings."""
    source = str(folder or settings.model.source())
    return str(Path(source).resolve()) if source and Path(source).is_dir() else source


def open_reference(
    settings: Settings,
    policy: Policy,
    checkpoint: Path | None,
    on_cold_start_step: ColdStartProgress,
    shards: Shards | None = None,
) -> Policy | None:
    """Open the reference policy, None if there is no KL term: the policy that the run started from,
    or the one that it was last refreshed to. With LoRA it is the trained `policy` without its
    adapter, on the same tensors."""
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
        precision=training_precision(settings),
        head_dtype=head_precision(settings),
        shards=shards,
        initial_weights_digest="" if has_refreshed or shards else fingerprint(model),
    )


def starting_model_folder(settings: Settings, on_cold_start_step: ColdStartProgress) -> Path | None:
    """Return the folder of the cold-started model, and make it if it is not there yet; None for a
    run without cold start."""
    if not settings.cold_start.steps:
        return None
    return cold_start(
        settings.model,
        settings.task,
        settings.cold_start,
        Path(settings.runs) / "cold_starts",
        on_cold_start_step,
        training_device(settings),
        settings.prompt,
    )


def cold_start_folder(settings: Settings) -> Path | None:
    """Return the folder of the cold-started model, which is not made here; None for a run without
    cold start.
    """
    if not settings.cold_start.steps:
        return None
    cache = Path(settings.runs) / "cold_starts"
    return folder_of(settings.model, settings.task, settings.cold_start, cache, settings.prompt)


def load_model(settings: Settings, folder: Path | None, shards: Shards | None = None) -> Loaded:
    """Return model and tokenizer on the run's device: from a folder, or without one as the model's
    settings make them. With `shards` each rank reads its own part of the weights."""
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


def check_positions(settings: Settings, available: int | None) -> None:
    """Raise ValueError if the longest response leaves no room for any prompt in the model's
    positions. Of a model that was not made here the positions are not known when the settings are
    chosen: then responses are bounded to half."""
    limit = settings.rollout.longest_limit
    if not available or limit < available:
        return
    if settings.model.built_from_settings:
        raise ValueError(
            f"rollout.max_new_tokens={limit} leaves no room for a prompt in {available} positions: lower it, for "
            f"example to {available // 2}"
        )
    half, rollout = available // 2, settings.rollout
    by_length = [
        settings.trainer.aggregation,
        *([settings.kl.aggregation] if settings.kl.in_loss else []),
    ]
    if (
        any(aggregation.length == limit for aggregation in by_length)
        or half <= rollout.token_budget
    ):
        raise ValueError(
            f"rollout.max_new_tokens={limit} leaves no room for a prompt in {available} positions, and other settings "
            f"depend on it (a loss that is divided by the longest response, or rollout.token_budget): set it to {half}"
        )
    rollout.bound_by(available)


def training_precision(settings: Settings) -> torch.dtype:
    """Return the precision of the trainer's matrix products."""
    return getattr(torch, settings.policy.precision)


def head_precision(settings: Settings) -> torch.dtype:
    """Return the precision of the product that makes logits."""
    return getattr(torch, settings.policy.head_dtype)


def use_deterministic_algorithms() -> None:
    """Let this process compute every sum in the same order each time, or raise RuntimeError where
    an operation has no such order. A CPU does so anyway."""
    # cuBLAS reads it when it is first used
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def training_device(settings: Settings) -> str:
    """Return the device that the model is trained on. Raises ValueError if it cannot be used."""
    return usable_device(settings.policy.device, "policy.device")


def usable_device(wanted: str, key: str) -> str:
    """Return the wanted device; for "auto" the GPU if there is one, else the CPU.

    On a GPU cuDNN's attention is switched off, because it plans anew for every shape, and shapes
    change with every token. Raises ValueError, naming the setting `key`, for a device that cannot
    be used here."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=wanted).item()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # unknown to torch; no such hardware; a build without it; no memory
        raise ValueError(
            f"{key}={wanted} cannot be used here: {str(error).splitlines()[0]}"
        ) from None
    return wanted


def print_sandbox_layers(layers: dict[str, str]) -> None:
    """Print in one line what confines the programs that a task runs; nothing for a task that runs
    none.
    """
    if layers:
        print("sandbox: " + "; ".join(f"{name}: {state}" for name, state in layers.items()))


# ----------------------------------------------------------------------------------------------
# engine and source
def check_engine_start(rollout: RolloutSettings, model: ModelSettings) -> None:
    """Raise ValueError if vLLM is asked for and cannot start here, or if there is no server of it.
    This comes before a cold start that would be in vain."""
    if rollout.name == "vllm_server":
        check_server(rollout)
    if rollout.name != "vllm":
        return
    # vLLM is an installation of its own: imported only where it is used
    from gspo.rollout.engines.vllm import check_start

    check_start(rollout, model.hidden // model.heads if model.built_from_settings else None)


def check_routing(settings: Settings, policy: Policy) -> None:
    """Raise ValueError if routing is to be recorded or replayed and the model's routers do not
    allow it.
    """
    if settings.policy.routing_replay != "none":
        policy.routing.check_replay()
    if settings.rollout.routes and not policy.routing.layers:
        raise ValueError(
            "rollout.routes=true with a model that has no known routers; set rollout.routes=false"
        )


def make_engine(policy: Policy, rollout: RolloutSettings, ranks: Ranks | None = None) -> Engine:
    """Start the engine that samples from `policy`, of several ranks this one's: for training, for
    evaluation, and to look at samples. Raises ValueError if it cannot start, EngineEnded if its
    process ends."""
    ranks = ranks or Ranks()
    if rollout.name == "vllm":
        from gspo.rollout.engines.vllm import VLLMEngine

        return VLLMEngine(policy, rollout, ranks)
    if rollout.name == "vllm_server":
        return VLLMServerEngine(policy, rollout, ranks)
    engine = local_engine(policy, rollout)
    engine.ranks = ranks
    return engine


def local_engine(policy: Policy, rollout: RolloutSettings, batch_rows: int = 0) -> LocalEngine:
    """Return an in-process engine in the precision of a run's rollouts. It also samples held-out
    problems, during training and afterwards. With `batch_rows` 0 it has the run's."""
    dtype = getattr(torch, rollout.dtype)
    return LocalEngine(
        policy,
        batch_rows or rollout.batch_rows,
        dtype,
        rollout.quantization,
        cuda_graphs=rollout.cuda_graphs,
    )


def evaluation_engine(trainer: Trainer, settings: Settings) -> Engine:
    """Return the engine that samples held-out problems: the run's own, or with rollout.overlap,
    where that one is busy, an in-process engine of the same precision. The latter must load the
    current weights before each use."""
    if not settings.rollout.overlap:
        return trainer.source.engine
    return in_process_engine(trainer, settings)


def in_process_engine(trainer: Trainer, settings: Settings) -> LocalEngine:
    """Return an engine of every rank's own process for held-out problems, which the ranks share."""
    engine = local_engine(trainer.policy, settings.rollout)
    engine.ranks = trainer.ranks
    return engine


def behaviour_logprobs(settings: Settings, sampled: Policy) -> BehaviourLogprobs | None:
    """Return what keeps log-probs under the weights that sampled, None where the settings do not
    use those: where responses are trained on at the step that sampled them, or with
    policy.old_logprobs=step_start."""
    later = settings.rollout.staleness or settings.rollout.token_budget
    if not later or settings.policy.old_logprobs == "step_start":
        return None
    return BehaviourLogprobs(
        sampled, settings.trainer.micro_batch_size, settings.policy.routing_replay == "r3"
    )


def check_same_weights(policy: Policy, ranks: Ranks) -> None:
    """Raise ValueError on every rank if one has begun with other weights than rank 0, such as from
    another folder of the same name on another machine. Of weights that are spread over ranks, each
    has some: then the files are compared before they are read."""
    alone = ranks.world_size == 1 or policy.shards
    sums = (
        {}
        if alone
        else {name: float(tensor.double().sum()) for name, tensor in policy.named_tensors()}
    )
    first, *others = ranks.all_gather(sums)
    for index, found in enumerate(others, start=1):
        if wrong := [name for name in first if found.get(name) != first[name]]:
            raise ValueError(
                f"rank {index} has other weights than rank 0, the first in {wrong[0]}: are the files alike?"
            )


def check_engine_weights(source: RolloutSource, step: int) -> None:
    """Raise ValueError if the engine's weights are not the trainer's.

    At the start nothing is lost yet, so the RuntimeError of this check becomes an error of one
    line."""
    try:
        source.check(step)
    except EngineEnded:
        raise
    except RuntimeError as error:
        raise ValueError(str(error)) from error
