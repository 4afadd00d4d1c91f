"""Train a policy: Hydra composes conf/, the settings become dataclasses, the trainer runs. `--help` says more."""

from __future__ import annotations

import gspo.core.interrupt  # noqa: F401

# isort: split

import signal
import sys
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gspo.config.checks import check_training_set, warnings
from gspo.config.load import chosen_settings, register_schemas, write_settings
from gspo.config.settings import Settings
from gspo.core.files import CreatedFiles, note_start, read_status
from gspo.core.ownership import SIGNATURES
from gspo.model.policy import Policy
from gspo.rollout.engine_process import EngineEnded
from gspo.run.build import assemble
from gspo.run.cli import Broken, Collapsed, Ended, Failed, Stopped, command_line, explain, one_line, stop_signal
from gspo.run.devices import keep_devices, take_share
from gspo.run.directory import (
    ENDED,
    LOG,
    about_its_maker,
    claim,
    exclusive,
    find,
    finished,
    log_to,
    say,
    say_layers,
    to_go_on_from,
)
from gspo.run.loop import Session, warn, write_report
from gspo.run.rollback import Rollbacks
from gspo.run.sweep_state import forecast
from gspo.run.sweeps import taken_by_another_job
from gspo.tracking.run_report import PAGE
from gspo.tracking.run_report import write as write_page
from gspo.tracking.tracker import Progress, Tracker, supersede
from gspo.tracking.wandb_run import own_arguments, under_agent
from gspo.train.trainer import Trainer

register_schemas()
W_AND_B = {"finished": 0, "stopped": 130, "collapsed": 4, "rolled back": 4, "failed": 1}  # the exit codes that it shows


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
@one_line
def main(config: DictConfig) -> None:
    job = HydraConfig.get()
    settings = chosen_settings(config, list(job.overrides.task), job.runtime.choices)
    if settings.dry_run:
        folder = find(settings, in_sweep=False)
        print(forecast([{"overrides": [], "folder": str(folder), "steps": settings.steps}]))
        return
    if first := taken_by_another_job(settings):
        print(f"job {job.job.num} is {first}: nothing is left to do")
        return
    stop = stop_signal()
    stop.install(signal.SIGINT, signal.SIGTERM)
    stop.install_scheduler()
    if not stop.loud:
        stop.end_with_parent()
    take_share(job, settings.threads)
    with stop.busy:
        try:
            if not stop.requested():  # a sweep that was asked to stop starts no further run
                run(settings, alone=job.mode == RunMode.RUN and not under_agent())
        except Stopped:
            print(f"{settings.label()}: stopped before its first step; the same command starts it again")
    stop.requeue()


def run(settings: Settings, alone: bool = True) -> None:
    """One run, from its directory to its last checkpoint. `alone`: it has the terminal to itself."""
    folder = find(settings, in_sweep=not alone)
    try:
        with exclusive(folder) as made, log_to(folder), closing(settings.task):
            warn(about_its_maker(settings, folder))
            while (how := attempt(settings, folder, alone, made)) == "rolled back" and not stop_signal().requested():
                pass
    except EngineEnded as error:
        latest = folder / "checkpoints" / "latest"
        kept = f"saved up to {latest.read_text(encoding='utf-8')}" if latest.exists() else "nothing was saved yet"
        raise Ended(f"{error}; {kept}; go on with resume={folder}") from None
    if how == "collapsed" and alone:  # of a sweep it is a result
        raise Collapsed


def attempt(settings: Settings, folder: Path, alone: bool, made: CreatedFiles) -> str:
    """From the newest checkpoint, or the beginning, until the run ends or is rolled back; says which."""
    back = Rollbacks(folder)
    warn(back.move())
    checkpoint = to_go_on_from(settings, folder)
    if checkpoint is None:
        back.forget()
    if finished(checkpoint, settings.steps):
        print(f"{folder} has reached step {settings.steps} already")
        if read_status(folder).get("how") not in ENDED:  # killed between its last checkpoint and its end
            write_report(folder, "finished")
            say(folder, "finished", settings.steps)
        return "finished"
    if not alone and read_status(folder).get("how") == "collapsed":
        print(f"{folder} has collapsed; it goes on with resume={folder} only")
        return "collapsed"
    trainer = prepared(back.lowered(settings), folder, checkpoint, alone, made)
    warn(supersede(folder, trainer.state.step if checkpoint else -1))
    claim(settings, folder, trainer.policy.prompt_format_used)
    warn(warnings(settings))
    warn(about_the_model(trainer.policy))
    tracker = Tracker(folder, settings.tracking, asdict(settings), settings.study, settings.tags())
    how, reason = "failed", ""
    note_start(folder, trainer.state.step if checkpoint else None)
    say(folder, "running", trainer.state.step)
    try:
        how = Session(settings, folder, trainer, tracker, alone, stop_signal().requested).run()
    except SystemExit:  # a scheduler's: the job is queued again
        how = "stopped"
        raise
    except Exception as error:
        reason = explain(error)
        if isinstance(error, OSError):
            raise Broken(f"{reason}; what was written is kept: mend this and go on with resume={folder}") from error
        if isinstance(error, ValueError):  # not the user's: those were found before
            raise Failed(f"{folder} failed after step {trainer.state.step}: {reason}") from error
        raise
    finally:
        sync = leave(folder, how, trainer.state.step, reason, tracker)
    if how != "rolled back":
        upload = f"; to upload it: {sync}" if sync and alone else ""  # a sweep says one command for all of its runs
        again = "; the same command goes on with it" if how == "stopped" else ""
        print(f"{folder}: {how} at step {trainer.state.step}/{settings.steps}{again}{upload}")
        print((folder / "report.txt").read_text(encoding="utf-8"), end="")
        print(f"more in {folder / PAGE}")
    return how


def leave(folder: Path, how: str, step: int, reason: str, tracker: Tracker) -> str | None:
    """Say in the directory how the run ended, and close its tracker; the command that uploads it, if there is one."""
    try:
        say(folder, how, step, reason)
        with suppress(OSError):  # a full disk was said already; `experiments/report.py` makes the page again
            write_page(folder)
    finally:
        sync = tracker.finish(W_AND_B[how])
    return sync


def about_the_model(policy: Policy) -> list[str]:
    """What the user is warned of because of the model's architecture."""
    kind, found = type(policy.model).__name__, []
    if policy.active_parameters is None:
        found.append(f"{kind}: how many parameters a token passes through cannot be told: there is no compute/flops")
    if not policy.network:
        found.append(f"{kind} as configured here is not a known architecture: its own forward is used, which is slower")
    return found


def prepared(settings: Settings, folder: Path, checkpoint: Path | None, alone: bool, made: CreatedFiles) -> Trainer:
    """The trainer; where it cannot be built, what this process made of a run that is new is taken away again."""
    new = not (folder / "settings.yaml").exists()
    if new:
        write_settings(settings, folder)  # so that a run which is killed in its cold start can be resumed
    try:
        return build(settings, checkpoint, alone)
    except ValueError:
        if new:
            made.remove("settings.yaml", SIGNATURES, LOG)
        raise


def build(settings: Settings, checkpoint: Path | None, alone: bool) -> Trainer:
    """Policy, engine, source and trainer; from the checkpoint if there is one."""
    check_training_set(settings)
    layers = settings.task.ready()
    bar = Progress("cold start", settings.cold_start.steps, 0, alone)

    def report(step: int, steps: int, loss: float) -> None:
        stop_signal().raise_if_requested()
        bar(step, loss=loss)

    try:
        trainer = assemble(settings, checkpoint, report)
    finally:
        bar.close()
    say_layers(layers)
    if settings.rollout.dtype != "float32":
        print(f"{settings.label()}: training and held-out responses are sampled in {settings.rollout.dtype}")
    return trainer


if __name__ == "__main__":
    stop_signal().loud = True
    if under_agent():
        sys.argv[1:] = own_arguments(sys.argv[1:])
    keep_devices()
    stop_signal().install(signal.SIGINT)  # in a sweep with workers, this process waits for them to end their steps
    command_line(main)
