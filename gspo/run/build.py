"""Build the trainer of a run: policy, reference and engine, then the rollout source on top.

`build_trainer` does it all. Evaluation, samples and benchmarks use some of the other functions.
"""

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch

from gspo.config.checks import check_training_set
from gspo.config.settings import Settings, folder_of, loss_settings
from gspo.distributed.ranks import Ranks, ranks_lost_in_passes
from gspo.evaluation.evaluate import check_ratings, load_evaluation_sets, with_room
from gspo.io.errors import SettingError
from gspo.model.adapter import import_peft
from gspo.model.policy import Policy
from gspo.model.settings import ModelSettings, StandIn, Tiny
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.vllm_server import VLLMServerEngine, check_server
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.base import RolloutSource
from gspo.rollout.sources.behaviour_logprobs import BehaviourLogprobs
from gspo.rollout.sources.off_policy import make_source
from gspo.rollout.sources.pending import load_pending
from gspo.rollout.sources.problem_sampler import check_chats
from gspo.rollout.vllm_settings import VLLMRollout, VLLMServerRollout
from gspo.run.entry_point import stop_signal
from gspo.run.event_files import check_event_files
from gspo.run.inputs import check_inputs, inputs_of
from gspo.run.policies import (
    make_shards,
    open_policy,
    open_reference,
    starting_model_folder,
    training_device,
    use_deterministic_algorithms,
)
from gspo.run.sweep_progress import PAUSE as PAUSE_OF_SWEEP
from gspo.tracking.tracker import PAUSE, Progress
from gspo.train.checkpoint import load_optimizer
from gspo.train.extensions import Extensions
from gspo.train.optimizer import check_optimizer
from gspo.train.recorder import Recorder, StepRecorder
from gspo.train.signal_probe import SignalProbe
from gspo.train.trainer import Trainer

# how long the other ranks wait for rank 0's cold start
COLD_START_TIMEOUT = timedelta(days=30)


@ranks_lost_in_passes()
def build_trainer(
    settings: Settings,
    checkpoint: Path | None = None,
    alone: bool = False,
    ranks: Ranks | None = None,
    folder: Path | None = None,
) -> Trainer:
    """Build the trainer of a run, from a checkpoint if given.

    `alone` says that the run has the terminal to itself, so a cold start may draw a progress bar.
    The `ranks` train together, and rank 0 makes the cold start. `folder` is the run's directory,
    by default the one that the settings name. After a rollback the lowered rate would name another.

    Raises ValueError for settings that cannot work on this machine or with this model, EngineEnded
    if the engine's process ends, and Stopped if the user asks to stop during a cold start.
    """
    ranks = ranks or Ranks()
    check_training_set(settings)
    check_event_files(settings)
    if settings.policy.deterministic:
        use_deterministic_algorithms()
    settings.task.ready()
    with ExitStack() as stack:
        progress: Progress | None = None

        def on_cold_start_step(step: int, steps: int, loss: float) -> None:
            nonlocal progress
            stop_signal().raise_if_requested()
            if progress is None:
                pause = PAUSE if alone else PAUSE_OF_SWEEP
                progress = Progress("cold start", steps, step - 1, alone, pause)
                stack.callback(progress.close)
            progress(step, loss=loss)

        check_optimizer(settings.optim, training_device(settings))
        check_engine_start(settings.rollout, settings.model)
        if settings.policy.lora.rank:
            import_peft()
        if ranks.world_size > 1 and not checkpoint:
            waiting_ranks = ranks.new_group(COLD_START_TIMEOUT)
            if ranks.rank == 0:
                starting_model_folder(settings, on_cold_start_step)
            waiting_ranks.broadcast(None)
        shards = make_shards(settings, ranks)
        policy = open_policy(settings, checkpoint, on_cold_start_step, shards)
        reference = open_reference(settings, policy, checkpoint, on_cold_start_step, shards)
    check_inputs(settings, inputs_of(settings, policy, reference))
    check_routing(settings, policy)
    # with overlap the engine samples in a thread of its own, beside the trainer's collectives
    overlap = settings.rollout.overlap
    engine = make_engine(
        policy.copy() if overlap else policy,
        settings.rollout,
        ranks.new_group() if overlap else ranks,
    )
    try:
        recorder = make_recorder(settings, folder or folder_of(settings), policy, ranks)
        return trainer_on_engine(settings, checkpoint, policy, reference, engine, recorder, ranks)
    except BaseException:
        engine.close()
        raise


def trainer_on_engine(
    settings: Settings,
    checkpoint: Path | None,
    policy: Policy,
    reference: Policy | None,
    engine: Engine,
    recorder: Recorder,
    ranks: Ranks,
) -> Trainer:
    """Build source and trainer on top of an engine that has started, and restore the checkpoint.

    Raises ValueError if the engine lacks the trainer's weights, or positions for a held-out
    problem."""
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
        recorder=recorder,
        probe=SignalProbe(
            settings.tracking.information_every,
            settings.tracking.information_prompts,
            settings.tracking.information_samples,
            settings.tracking.snr_every,
        ),
    )
    check_same_weights(policy, ranks)
    if checkpoint:
        trainer.restore(load_optimizer(checkpoint, trainer.optimizer, policy))
        source.restore_pending(
            load_pending(checkpoint, lambda index: task.problem(settings.seed, "train", index))
        )
    check_chats(task, settings.seed, engine.policy.encode_prompt)
    check_engine_weights(source, trainer.state.step)
    evaluation = settings.evaluation
    evaluation_sets = load_evaluation_sets(task, evaluation.sets, evaluation.problems)
    # both checks raise before anything is written
    check_ratings(evaluation_sets)
    for evaluation_set in evaluation_sets:
        with_room(evaluation_set, engine, settings.rollout.longest_limit)
    return trainer


def make_recorder(settings: Settings, folder: Path, policy: Policy, ranks: Ranks) -> Recorder:
    """Return the recorder that writes a run's steps into its directory."""
    tracking = settings.tracking
    if not (tracking.record_every or tracking.record_last):
        return Recorder()
    return StepRecorder(
        folder,
        settings.label(),
        policy,
        loss_settings(settings),
        ranks,
        every=tracking.record_every,
        last=tracking.record_last,
        experts=tracking.record_experts,
        after=tracking.record_after,
    )


def behaviour_logprobs(settings: Settings, sampled: Policy) -> BehaviourLogprobs | None:
    """Return the function that computes log-probs under the weights that sampled.

    Return None if nothing needs it: responses are trained on at the step that sampled them, or
    policy.old_logprobs=step_start."""
    if not settings.rollout.samples_ahead or settings.policy.old_logprobs == "step_start":
        return None
    return BehaviourLogprobs(
        sampled, settings.trainer.micro_batch_size, settings.policy.routing_replay == "r3"
    )


def check_routing(settings: Settings, policy: Policy) -> None:
    """Check that the model's routers allow the recording and the replay that the settings need.

    Raises ValueError if they do not."""
    if settings.policy.routing_replay != "none":
        policy.routing.check_replay()
    if settings.rollout.routes and not policy.routing.layers:
        raise SettingError(
            "rollout.routes",
            True,
            "this model has no known routers",
            remedy="set rollout.routes=false",
        )


def check_same_weights(policy: Policy, ranks: Ranks) -> None:
    """Raise ValueError on every rank if a rank has begun with other weights than rank 0.

    The cause may be another folder of the same name on another machine. Sharded weights are not
    compared here: their files are compared before they are read."""
    if ranks.world_size == 1 or policy.shards:
        return
    sums = {name: float(tensor.double().sum()) for name, tensor in policy.named_tensors()}
    sums_of_rank_0, *sums_of_others = ranks.all_gather(sums)
    for rank, other_sums in enumerate(sums_of_others, start=1):
        differing = [
            name for name, value in sums_of_rank_0.items() if other_sums.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"rank {rank} has other weights than rank 0, the first difference is in "
                f"{differing[0]}: give all ranks the same model files"
            )


def print_sandbox_layers(layers: dict[str, str]) -> None:
    """Print the layers that confine a task's programs, if there are any."""
    if layers:
        print("sandbox: " + "; ".join(f"{name}: {state}" for name, state in layers.items()))


# ------------------------------------------------------------------------------------------ engines
def check_engine_start(rollout: RolloutSettings, model: ModelSettings) -> None:
    """Check that the engine can start here, before a cold start that would be in vain.

    Raises ValueError if vLLM cannot start, or if no vLLM server answers."""
    if isinstance(rollout, VLLMServerRollout):
        check_server(rollout)
    if not isinstance(rollout, VLLMRollout):
        return
    # vLLM is an installation of its own: imported only if it is used
    from gspo.rollout.engines.vllm import check_start

    is_built = isinstance(model, Tiny | StandIn)  # else its heads are not known before it is loaded
    check_start(rollout, model.hidden // model.heads if is_built else None)


def make_engine(policy: Policy, rollout: RolloutSettings, ranks: Ranks | None = None) -> Engine:
    """Start this rank's engine, which samples from `policy`.

    Raises ValueError if it cannot start, and EngineEnded if its process ends."""
    ranks = ranks or Ranks()
    if isinstance(rollout, VLLMRollout):
        from gspo.rollout.engines.vllm import VLLMEngine

        return VLLMEngine(policy, rollout, ranks)
    if isinstance(rollout, VLLMServerRollout):
        return VLLMServerEngine(policy, rollout, ranks)
    return local_engine(policy, rollout, ranks=ranks)


def local_engine(
    policy: Policy, rollout: RolloutSettings, batch_rows: int = 0, ranks: Ranks | None = None
) -> LocalEngine:
    """Return an in-process engine that samples in the precision of a run's rollouts.

    `batch_rows` is the number of responses sampled at once. 0 stands for the run's."""
    return LocalEngine(
        policy,
        batch_rows or rollout.batch_rows,
        getattr(torch, rollout.dtype),
        rollout.quantization,
        cuda_graphs=rollout.cuda_graphs,
        ranks=ranks,
    )


def evaluation_engine(trainer: Trainer, settings: Settings) -> Engine:
    """Return the engine that samples held-out problems.

    It is the run's own engine. With rollout.overlap that engine is busy, so it is an in-process
    engine of the same precision, which must load the current weights before each use."""
    if not settings.rollout.overlap:
        return trainer.source.engine
    return in_process_engine(trainer, settings)


def in_process_engine(trainer: Trainer, settings: Settings) -> LocalEngine:
    """Return an engine in every rank's own process. The ranks share the problems."""
    return local_engine(trainer.policy, settings.rollout, ranks=trainer.ranks)


def check_engine_weights(source: RolloutSource, step: int) -> None:
    """Raise ValueError if the engine's weights are not the trainer's.

    At the start nothing is lost yet, so the RuntimeError of this check becomes an error without
    traceback."""
    try:
        source.check(step)
    except EngineEnded:
        raise
    except RuntimeError as error:
        raise ValueError(str(error)) from error
