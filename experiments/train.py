"""Train a policy: Hydra composes conf/, the settings become dataclasses, the trainer runs. `--help` says more."""

from __future__ import annotations

import shutil
import signal
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gspo.assembly import assemble
from gspo.checks import warnings
from gspo.config import Settings, chosen_settings, folder_of, register_schemas
from gspo.process import Broken, Collapsed, Failed, Stopped, command_line, explain, one_line, stop_signal
from gspo.rollback import Rollbacks
from gspo.run_files import said
from gspo.run_report import PAGE
from gspo.run_report import write as write_page
from gspo.runs import claim, exclusive, find, finished, log_to, say, say_layers, to_go_on_from
from gspo.session import Session, warn, write_report
from gspo.share import keep_devices, take_share
from gspo.sweep_state import forecast
from gspo.sweeps import taken_by_another_job
from gspo.tracking import Progress, Tracker, supersede
from gspo.trainer import Trainer

register_schemas()
W_AND_B = {"finished": 0, "stopped": 130, "collapsed": 4, "rolled back": 4, "failed": 1}  # the exit codes that it shows


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
@one_line
def main(config: DictConfig) -> None:
    job = HydraConfig.get()
    settings = chosen_settings(config, list(job.overrides.task))
    if settings.dry_run:
        folder = folder_of(settings)
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
                run(settings, alone=job.mode == RunMode.RUN)
        except Stopped:
            print(f"{settings.label()}: stopped before its first step")
    stop.requeue()


def run(settings: Settings, alone: bool = True) -> None:
    """One run, from its directory to its last checkpoint. `alone`: it has the terminal to itself."""
    folder = find(settings, in_sweep=not alone)
    with exclusive(folder), log_to(folder), closing(settings.task):
        while (how := attempt(settings, folder, alone)) == "rolled back" and not stop_signal().requested():
            pass
    if how == "collapsed" and alone:  # of a sweep it is a result
        raise Collapsed


def attempt(settings: Settings, folder: Path, alone: bool) -> str:
    """From the newest checkpoint, or the beginning, until the run ends or is rolled back; says which."""
    back = Rollbacks(folder)
    warn(back.move())
    checkpoint = to_go_on_from(settings, folder)
    if checkpoint is None:
        back.forget()
    if finished(checkpoint, settings.steps):
        print(f"{folder} has reached step {settings.steps} already")
        if said(folder).get("how") not in ("finished", "collapsed"):  # killed between its last checkpoint and its end
            write_report(folder, "finished")
            say(folder, "finished", settings.steps)
        return "finished"
    if not alone and said(folder).get("how") == "collapsed":
        print(f"{folder} has collapsed; it goes on with resume={folder} only")
        return "collapsed"
    trainer = prepared(back.lowered(settings), folder, checkpoint, alone)
    claim(settings, folder)
    warn(warnings(settings))
    if not trainer.policy.network:
        kind = type(trainer.policy.model).__name__
        warn([f"{kind} as configured here is not a known architecture: its own forward is used, which is slower"])
    warn(supersede(folder, trainer.state.step if checkpoint else -1))
    tags = [settings.objective.name, f"replay-{settings.policy.routing_replay}", settings.model.name]
    tracker = Tracker(folder, settings.tracking, asdict(settings), settings.study, tags)
    how, reason = "failed", ""
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
        say(folder, how, trainer.state.step, reason)
        with suppress(OSError):  # a full disk was said already; `experiments/report.py` makes the page again
            write_page(folder)
        sync = tracker.finish(W_AND_B[how])
    if how != "rolled back":
        upload = f"; to upload it: {sync}" if sync else ""
        print(f"{folder}: {how} at step {trainer.state.step}/{settings.steps}{upload}")
        print((folder / "report.txt").read_text(), end="")
        print(f"more in {folder / PAGE}")
    return how


def prepared(settings: Settings, folder: Path, checkpoint: Path | None, alone: bool) -> Trainer:
    """The trainer; where it cannot be built, a folder that holds nothing yet is taken away again."""
    try:
        return build(settings, checkpoint, alone)
    except ValueError:
        if not (folder / "settings.yaml").exists():
            shutil.rmtree(folder)
            for parent in (folder.parent, folder.parent.parent):  # runs/STUDY, where this made them
                with suppress(OSError):
                    parent.rmdir()
        raise


def build(settings: Settings, checkpoint: Path | None, alone: bool) -> Trainer:
    """Policy, engine, source and trainer; from the checkpoint if there is one."""
    settings.task.size("train")  # a file that is not there, or a task without training set: before a model loads
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
    return trainer


if __name__ == "__main__":
    stop_signal().loud = True
    keep_devices()
    stop_signal().install(signal.SIGINT)  # in a sweep with workers, this process waits for them to end their steps
    command_line(main)
