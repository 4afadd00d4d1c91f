"""The life of one run: it trains from its newest checkpoint, again after each rollback, and its end
is recorded.
"""

from __future__ import annotations

import math
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path

from gspo.config.remarks import warnings
from gspo.config.settings import Settings
from gspo.distributed.ranks import RankLost
from gspo.io.files import CreatedFiles
from gspo.io.rows import read_rows
from gspo.model.policy import Policy
from gspo.model.sharding.dtensors import architecture
from gspo.rollout.engines.process import EngineEnded
from gspo.rollout.sources.base import NothingGraded
from gspo.run.build import build_trainer, cold_start_folder, print_sandbox_layers
from gspo.run.directory import ENDED, ROWS, RunDirectory, has_reached
from gspo.run.entry_point import (
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
from gspo.run.loop import Session, follow, warn
from gspo.run.processes import Peers
from gspo.tracking.run_report import PAGE
from gspo.tracking.tracker import Tracker
from gspo.tracking.wandb_choice import check_installed

# The exit codes that W&B is told of, by how a run ended.
W_AND_B = {"finished": 0, "stopped": 130, "collapsed": 4, "rolled back": 4, "failed": 1}


def run(settings: Settings, alone: bool, peers: Peers) -> float:
    """Make one run, from its directory to its last checkpoint. `alone` says that it has the
    terminal to itself.

    Of several processes rank 0 does this, and the others train along with it. Returns the run's
    score, also if it had ended before; NaN if it was stopped, and on the other ranks."""
    if peers.ranks.rank:
        train_along(settings, peers)
        return math.nan
    if settings.tracking.wandb != "disabled":
        # before a cold start that would be in vain
        check_installed(f"tracking.wandb={settings.tracking.wandb}")
    directory = RunDirectory.for_run(settings, in_sweep=not alone)
    try:
        with directory.exclusive_access() as made, directory.log_to_file(), closing(settings.task):
            warn(directory.foreign_settings_warnings(settings))
            while (how := attempt(settings, directory, alone, made, peers)) == "rolled back":
                if stop_signal().requested():
                    break
            peers.dismiss()
    except EngineEnded as error:
        raise Ended(
            f"{error}; {directory.saved_up_to()}; go on with resume={directory.path}"
        ) from None
    except NothingGraded as error:
        raise Ended(
            f"{directory.path}: {error}; mend that, and type the same command again"
        ) from None
    except RankLost:
        lost = peers.lost[1]
        raise Ended(
            f"{lost}; {directory.saved_up_to()}; go on with resume={directory.path}"
        ) from None
    if how == "collapsed" and alone:  # in a sweep a collapse is a result
        raise Collapsed
    return directory.score(how)


def train_along(settings: Settings, peers: Peers) -> None:
    """Train as one of the ranks that are not 0: what it says, from the checkpoint it names, until
    it has no more.
    """
    ranks = peers.ranks
    try:
        with closing(settings.task):
            while (told := ranks.broadcast(None)) is not None:
                lr, run, checkpoint = told
                lowered = replace(settings, optim=replace(settings.optim, lr=lr))
                trainer = build_trainer(lowered, checkpoint, ranks=ranks)
                follow(trainer, lowered, run, stop_signal().requested)
                peers.agree_on_signal()
    except RankLost:
        if stop_signal().requested():  # rank 0 was asked too, and had nothing to save
            raise Stopped from None
        peers.report_loss()
        raise SaidByRankZero from None
    except (EngineEnded, NothingGraded):
        raise SaidByRankZero from None


def attempt(
    settings: Settings, directory: RunDirectory, alone: bool, made: CreatedFiles, peers: Peers
) -> str:
    """Train from the newest checkpoint, or from the beginning, until the run ends or is rolled
    back; return which.
    """
    folder, rollbacks = directory.path, directory.rollbacks()
    warn(rollbacks.move())
    checkpoint = directory.newest_checkpoint(settings)
    if checkpoint is None:
        rollbacks.forget()
    if how := ended_before(settings, directory, checkpoint, alone):
        return how
    lowered = rollbacks.lowered(settings)
    lowered.varied = settings.varied
    with directory.removed_if_refused(lowered, made):
        peers.tell(lowered.optim.lr, folder, checkpoint)
        trainer = build_trainer(lowered, checkpoint, alone, peers.ranks)
    settings.inputs = lowered.inputs
    print_sampling_notes(lowered)
    warn(directory.supersede_after(trainer.state.step if checkpoint else -1))
    directory.record_start(settings, trainer.policy.prompt_format_used)
    warn(warnings(settings))
    warn(model_warnings(trainer.policy))
    tracker = open_tracker(settings, folder)
    print(f"{folder}: begins after step {trainer.state.step} of {settings.steps}{tracker.where()}")
    how, reason = "failed", ""
    directory.note_start(trainer.state.step if checkpoint else None)
    directory.write_status("running", trainer.state.step)
    try:
        how = Session(settings, directory, trainer, tracker, alone, stop_signal().requested).run()
        peers.agree_on_signal()
    except SystemExit:  # a scheduler has queued the job again
        how = "stopped"
        raise
    except Exception as error:
        reason = peers.lost[1] if isinstance(error, RankLost) else explain(error)
        if isinstance(error, OSError):
            raise Broken(
                f"{reason}; what was written is kept: mend this and go on with resume={folder}"
            ) from error
        # not a mistake of the user's: those were found before the first step
        if isinstance(error, ValueError):
            raise Failed(f"{folder} failed after step {trainer.state.step}: {reason}") from error
        raise
    finally:
        sync = leave(directory, how, trainer.state.step, reason, tracker)
    if how != "rolled back":
        # a sweep prints one command for all of its runs
        upload = f"; to upload it: {sync}" if sync and alone else ""
        again = "; the same command goes on with it" if how == "stopped" else ""
        print(f"{folder}: {how} at step {trainer.state.step}/{settings.steps}{again}{upload}")
        print(directory.stability_report(), end="")
        print(f"more in {folder / PAGE}")
    return how


def open_tracker(settings: Settings, folder: Path) -> Tracker:
    """Return what writes and sends the rows of a run."""
    tracking = settings.tracking
    events = EventFiles(folder, read_rows(folder / ROWS)) if tracking.tensorboard else None
    about = asdict(settings), settings.study, settings.tags()
    return Tracker(folder, tracking, *about, start=cold_start_folder(settings), elsewhere=events)


def ended_before(
    settings: Settings, directory: RunDirectory, checkpoint: Path | None, alone: bool
) -> str:
    """Return how the run has ended already, "" if there is something left to do."""
    folder = directory.path
    if has_reached(checkpoint, settings.steps):
        print(f"{folder} has reached step {settings.steps} already")
        # it was killed between its last checkpoint and its end
        if directory.status().get("how") not in ENDED:
            directory.write_stability_report("finished")
            directory.write_status("finished", settings.steps)
        return "finished"
    if not alone and directory.status().get("how") == "collapsed":
        print(f"{folder} has collapsed; it goes on with resume={folder} only")
        return "collapsed"
    return ""


def leave(
    directory: RunDirectory, how: str, step: int, reason: str, tracker: Tracker
) -> str | None:
    """Record how the run ended, and close its tracker; return the command that uploads it to W&B,
    if one is needed.
    """
    try:
        directory.write_status(how, step, reason)
        # a full disk was reported already; `gspo report` can make the page later
        with suppress(OSError):
            directory.write_page()
    finally:
        sync = tracker.finish(W_AND_B[how])
    return sync


def model_warnings(policy: Policy) -> list[str]:
    """Return the warnings that the model's architecture calls for."""
    kind, found = architecture(policy.model), []
    if policy.active_parameters is None:
        found.append(
            f"{kind}: how many parameters a token passes through cannot be told: there is no compute/flops"
        )
    if policy.template_turn_end is not None:
        token = policy.tokenizer.decode([policy.template_turn_end])
        found.append(
            f"responses end at {token} too: the chat template writes it behind an assistant's turn, though neither the "
            "tokenizer's end-of-sequence token nor generation_config.json is that token"
        )
    if not policy.network:
        found.append(
            f"{kind} as configured here is not a known architecture: its own forward is used, which is slower"
        )
    return found


def print_sampling_notes(settings: Settings) -> None:
    """Print what confines the programs that the task runs, and the engine's precision if it is not
    the trainer's.
    """
    print_sandbox_layers(settings.task.ready())
    if words := left_out_in_words(settings.inputs):
        print(f"{settings.label()}: {words}")
    if words := settings.task.left_out_of_evaluation():
        print(f"{settings.label()}: {words}")
    if half := settings.rollout.half_of_positions:
        wanted = max([settings.rollout.max_new_tokens, *settings.rollout.extend.values()])
        print(
            f"{settings.label()}: responses have up to {half} tokens in place of rollout.max_new_tokens={wanted}: half "
            "of the model's positions, so that a prompt has room"
        )
    if settings.rollout.dtype != "float32":
        print(
            f"{settings.label()}: training and held-out responses are sampled in {settings.rollout.dtype}"
        )
    if settings.rollout.quantization != "none":
        print(
            f"{settings.label()}: the engine's weights are rounded to {settings.rollout.quantization}"
        )
