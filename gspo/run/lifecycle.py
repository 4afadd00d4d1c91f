"""Make a run: train from its newest checkpoint, again after each rollback, and record the end."""

import math
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path

from gspo.config.load import read_settings
from gspo.config.remarks import warnings
from gspo.config.settings import Settings
from gspo.distributed.ranks import RankLost
from gspo.io.errors import SettingError
from gspo.io.escaping import outlive_reader
from gspo.io.files import ENDED, ENDED_EARLY, METRICS_FILE, CreatedFiles, note_start, read_status
from gspo.io.rows import read_rows
from gspo.model.policy import Policy
from gspo.model.sharding.dtensors import architecture
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.sources.base import NothingGraded
from gspo.run.build import build_trainer, print_sandbox_layers
from gspo.run.directory import RunDirectory, exclusive, has_reached
from gspo.run.entry_point import (
    DISK_ERRORS,
    Broken,
    Collapsed,
    Ended,
    Failed,
    SaidByRankZero,
    Stopped,
    explain,
    stop_signal,
)
from gspo.run.event_files import EventFiles
from gspo.run.inputs import left_out_in_words
from gspo.run.loop import TrainingLoop, follow, warn
from gspo.run.policies import cold_start_folder
from gspo.run.processes import Peers
from gspo.run.rollback import Rollbacks
from gspo.tracking.run_report import PAGE, write_page
from gspo.tracking.tracker import Tracker, supersede
from gspo.tracking.wandb_choice import check_installed, check_variables

# The exit codes that are sent to W&B, by the status with which a run ended.
EXIT_CODES = {
    "finished": 0,
    ENDED_EARLY: 0,
    "stopped": 130,
    "collapsed": 4,
    "rolled back": 4,
    "failed": 1,
}


def run(settings: Settings, alone: bool, peers: Peers) -> float:
    """Make a run, from its directory to its last checkpoint, and return its score.

    `alone` says that the run has the terminal to itself. Of several ranks rank 0 does this, and the
    others train along with it. A run that had ended before keeps its score. The score is NaN if the
    run was stopped, and on the other ranks."""
    if peers.ranks.rank:
        train_along(settings, peers)
        return math.nan
    if settings.tracking.wandb != "disabled":
        # before a cold start that would be in vain
        check_installed(f"tracking.wandb={settings.tracking.wandb}")
        check_variables(settings.tracking)
    directory = RunDirectory.for_run(settings, in_sweep=not alone)
    try:
        with (
            exclusive(directory.path) as created_files,
            directory.log_to_file(),
            closing(settings.task),
        ):
            warn(directory.other_users_settings_warnings(settings))
            how = attempt(settings, directory, alone, created_files, peers)
            while how == "rolled back" and not stop_signal().requested():
                how = attempt(settings, directory, alone, created_files, peers)
            peers.dismiss()
    except NothingGraded as error:
        raise Ended(
            f"{directory.path}: {error}; fix that, and type the same command again"
        ) from None
    except (EngineEnded, RankLost) as error:
        reason = peers.lost.reason if isinstance(error, RankLost) else error
        raise Ended(
            f"{reason}; {directory.saved_up_to()}; go on with resume={directory.path}"
        ) from None
    if how == "collapsed" and alone:  # in a sweep a collapse is a result
        raise Collapsed
    return directory.score(how)


def train_along(settings: Settings, peers: Peers) -> None:
    """Train as a rank other than 0, with the learning rates and checkpoints that rank 0 sends."""
    ranks = peers.ranks
    try:
        with closing(settings.task):
            attempt_of_rank_0 = ranks.broadcast(None)
            while attempt_of_rank_0 is not None:
                lr, run, checkpoint = attempt_of_rank_0
                lowered = replace(settings, optim=replace(settings.optim, lr=lr))
                trainer = build_trainer(lowered, checkpoint, ranks=ranks, folder=run)
                follow(trainer, lowered, run, stop_signal().requested)
                peers.agree_on_signal()
                attempt_of_rank_0 = ranks.broadcast(None)
    except RankLost:
        if stop_signal().requested():  # rank 0 was stopped too, and had nothing to save
            raise Stopped from None
        peers.report_loss()
        raise SaidByRankZero from None
    except (EngineEnded, NothingGraded):
        raise SaidByRankZero from None


def attempt(
    settings: Settings,
    directory: RunDirectory,
    alone: bool,
    created_files: CreatedFiles,
    peers: Peers,
) -> str:
    """Train from the newest checkpoint, or from the beginning, until the run ends or rolls back.

    Returns the status with which it ended, or "rolled back"."""
    folder = directory.path
    rollbacks = Rollbacks(folder)
    warn(rollbacks.move())
    checkpoint = directory.newest_checkpoint(settings)
    if checkpoint is None:
        rollbacks.forget()
    how = ended_before(settings, directory, checkpoint, alone)
    if how:
        return how
    lowered = rollbacks.lowered(settings)
    lowered.varied = settings.varied
    with directory.removed_if_refused(lowered, created_files):
        peers.begin_attempt(lowered.optim.lr, folder, checkpoint)
        trainer = build_trainer(lowered, checkpoint, alone, peers.ranks, folder)
    settings.inputs = lowered.inputs
    print_sampling_notes(lowered)
    warn(supersede(folder, trainer.state.step if checkpoint else -1))
    warn(directory.record_start(settings, trainer.policy.prompt_format_used))
    warn(warnings(settings))
    warn(model_warnings(trainer.policy))
    tracker = open_tracker(settings, folder)
    print(f"{folder}: begins after step {trainer.state.step} of {settings.steps}{tracker.where()}")
    how = "failed"
    reason = ""
    outlive_reader()
    note_start(folder, trainer.state.step if checkpoint else None)
    directory.write_status("running", trainer.state.step)
    try:
        how = TrainingLoop(
            settings, directory, trainer, tracker, alone, stop_signal().requested
        ).run()
        if how == ENDED_EARLY:
            reason = f"by callbacks.{trainer.extensions.ended_by}"
        peers.agree_on_signal()
    except SystemExit:  # a scheduler has queued the job again
        how = "stopped"
        raise
    except Exception as error:
        reason = explain(error) or type(error).__name__
        if isinstance(error, RankLost):
            reason = peers.lost.reason
        end = end_in_words(error, reason, folder, trainer.state.step)
        if end:
            raise end from error
        raise
    finally:
        sync = record_end(directory, how, trainer.state.step, reason, tracker)
    if how != "rolled back":
        # a sweep prints one command for all of its runs
        upload = f"; to upload it: {sync}" if sync and alone else ""
        again = "; the same command resumes it" if how == "stopped" else ""
        print(f"{folder}: {how} at step {trainer.state.step}/{settings.steps}{again}{upload}")
        print(directory.stability_report(), end="")
        print(f"more in {folder / PAGE}")
    return how


def end_in_words(
    error: Exception, reason: str, folder: Path, step: int
) -> Broken | Ended | Failed | None:
    """Return an error that ended a run as one for the user, None if it has a form of its own."""
    if isinstance(error, OSError):
        message = f"{reason}; what was written is kept: fix this and continue with resume={folder}"
        # other jobs of a sweep would fail by the same disk, but not by another cause
        return Broken(message) if error.errno in DISK_ERRORS else Ended(message)
    message = f"{folder} failed after step {step}: {reason}"
    # a wrong setting that only a response can show, such as reward.weights of other names
    if isinstance(error, SettingError):
        return Ended(message)
    # not a mistake of the user's, which is found before the first step
    if isinstance(error, ValueError):
        return Failed(message)
    return None


def open_tracker(settings: Settings, folder: Path) -> Tracker:
    """Return the tracker, which writes and sends the rows of a run."""
    tracking = settings.tracking
    event_files = None
    if tracking.tensorboard:
        event_files = EventFiles(folder, read_rows(folder / METRICS_FILE))
    return Tracker(
        folder,
        tracking,
        asdict(settings),
        settings.study,
        settings.tags(),
        start=cold_start_folder(settings),
        elsewhere=event_files,
    )


def ended_before(
    settings: Settings, directory: RunDirectory, checkpoint: Path | None, alone: bool
) -> str:
    """Return the status of a run that has nothing left to do, "" if it has."""
    folder = directory.path
    if has_reached(checkpoint, settings.steps):
        print(f"{folder} has reached step {settings.steps} already")
        how = str(read_status(folder).get("how"))
        if how in ENDED:
            return how
        recorded_steps = read_settings(folder, trust=settings.allow_outside_code).steps
        if settings.steps < recorded_steps:
            print(f"{folder} has not ended: its own number of steps is {recorded_steps}")
            return "stopped"
        # it was killed between its last checkpoint and its end
        directory.write_stability_report("finished")
        directory.write_status("finished", settings.steps)
        return "finished"
    how = str(read_status(folder).get("how"))
    if not alone and how in ENDED and how != "finished":
        print(f"{folder} has {how}; it goes on with resume={folder} only")
        return how
    return ""


def record_end(
    directory: RunDirectory, how: str, step: int, reason: str, tracker: Tracker
) -> str | None:
    """Record how the run ended, and close its tracker.

    Returns the command that uploads the run to W&B, None if none is needed."""
    try:
        directory.write_status(how, step, reason)
        # a full disk was reported already; `gspo report` can make the page later
        with suppress(OSError):
            write_page(directory.path)
    finally:
        sync = tracker.finish(EXIT_CODES[how])
    return sync


def model_warnings(policy: Policy) -> list[str]:
    """Return the warnings that the model's architecture calls for."""
    kind = architecture(policy.model)
    lines = []
    if policy.active_parameters is None:
        lines.append(
            f"{kind}: the number of active parameters is unknown, so compute/flops is left out"
        )
    if policy.unknown_stop_ids:
        ids = ", ".join(map(str, policy.unknown_stop_ids))
        lines.append(
            f"generation_config.json names eos_token_id {ids}, which is no token of the model: "
            "no response ends there"
        )
    if policy.template_turn_end is not None:
        token = policy.tokenizer.decode([policy.template_turn_end])
        lines.append(
            f"responses end at {token} too: the chat template writes it behind an assistant's "
            "turn, although it is not the tokenizer's end-of-sequence token, and "
            "generation_config.json does not name it"
        )
    if not policy.network:
        lines.append(
            f"{kind} as configured here is not a known architecture: its own forward is used, "
            "which is slower"
        )
    return lines


def print_sampling_notes(settings: Settings) -> None:
    """Print the sandbox of the task's programs, omitted problems, and unusual sampling settings."""
    print_sandbox_layers(settings.task.ready())
    rollout = settings.rollout
    notes = [left_out_in_words(settings.inputs), settings.task.left_out_of_evaluation()]
    if rollout.half_of_positions:
        limit = max([rollout.max_new_tokens, *rollout.extend.values()])
        notes.append(
            f"responses have up to {rollout.half_of_positions} tokens in place of "
            f"rollout.max_new_tokens={limit}: half of the model's positions, so that a prompt has "
            "room"
        )
    if rollout.dtype != "float32":
        notes.append(f"training and held-out responses are sampled in {rollout.dtype}")
    if rollout.quantization != "none":
        notes.append(f"the engine's weights are rounded to {rollout.quantization}")
    for note in notes:
        if note:
            print(f"{settings.label()}: {note}")
