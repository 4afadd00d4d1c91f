"""Train a policy: Hydra composes conf/, the settings become dataclasses, the trainer runs. `--help` says more."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gspo.assembly import assemble, evaluation_engine
from gspo.checkpoint import CheckpointWriter
from gspo.checks import warnings, warnings_after
from gspo.config import Settings, register_schemas, resumed_settings, settings_hash, to_settings
from gspo.evaluation import evaluate
from gspo.rollout.source import Rollout
from gspo.runs import (
    Failed,
    Stopped,
    claim,
    command_line,
    exclusive,
    find,
    finished,
    log_to,
    one_line,
    say_layers,
    stop_signal,
    to_go_on_from,
)
from gspo.tracking import Progress, Tracker, supersede
from gspo.trainer import Trainer

register_schemas()
LOG = logging.getLogger("gspo.train")


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
@one_line
def main(config: DictConfig) -> None:
    job = HydraConfig.get()
    if config.resume:
        settings = resumed_settings(Path(config.resume), list(job.overrides.task))
    else:
        settings = to_settings(config)
    stop = stop_signal()
    stop.install(signal.SIGINT, signal.SIGTERM)
    if not stop.loud:
        stop.end_with_parent()
    with stop.busy:
        if stop.requested():  # a sweep that was asked to stop starts no further run
            return
        try:
            run(settings, alone=job.mode == RunMode.RUN)
        except Stopped:
            print(f"{settings.label()}: stopped before its first step")


def run(settings: Settings, alone: bool = True) -> None:
    """One run, from its directory to its last checkpoint. `alone`: it has the terminal to itself."""
    folder = find(settings, in_sweep=not alone)
    with exclusive(folder), log_to(folder):
        checkpoint = to_go_on_from(settings, folder)
        if finished(checkpoint, settings.steps):
            print(f"{folder} has reached step {settings.steps} already")
            return
        if settings.threads:
            torch.set_num_threads(settings.threads)
        trainer = prepared(settings, folder, checkpoint, alone)
        claim(settings, folder)
        warn(warnings(settings))
        if not trainer.policy.network:
            kind = type(trainer.policy.model).__name__
            warn([f"{kind} as configured here is not a known architecture: its own forward is used, which is slower"])
        supersede(folder, trainer.state.step if checkpoint else -1)
        tags = [settings.objective.name, f"replay-{settings.policy.routing_replay}", settings.model.name]
        tracker = Tracker(folder, settings.tracking, asdict(settings), settings.study, tags)
        exit_code = 1
        try:
            train(settings, folder, trainer, tracker, alone)
            exit_code = 0 if trainer.state.step == settings.steps else 130
        except ValueError as error:  # not the user's: those were found before
            raise Failed(f"{folder} failed after step {trainer.state.step}") from error
        finally:
            trainer.source.close()
            settings.task.close()
            sync = tracker.finish(exit_code)
    how = "stopped" if exit_code else "finished"
    upload = f"; to upload it: {sync}" if sync else ""
    print(f"{folder}: {how} at step {trainer.state.step}/{settings.steps}{upload}")


def prepared(settings: Settings, folder: Path, checkpoint: Path | None, alone: bool) -> Trainer:
    """The trainer; where it cannot be built, a folder that holds nothing yet is taken away again."""
    try:
        return build(settings, checkpoint, alone)
    except ValueError:
        if not (folder / "settings.yaml").exists():
            shutil.rmtree(folder)
        raise


def warn(lines: list[str]) -> None:
    """Say it on the terminal and in the run's train.log."""
    for line in lines:
        LOG.warning(line)
        print(f"warning: {line}", file=sys.stderr)


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


def train(settings: Settings, folder: Path, trainer: Trainer, tracker: Tracker, alone: bool) -> None:
    """Fit, with evaluation, tracking and checkpoints where they are due."""
    progress = Progress(settings.label(), settings.steps, trainer.state.step, alone)
    keep = settings.checkpoint.keep
    writer = CheckpointWriter(folder, trainer.policy, trainer.optimizer, keep, settings_hash(settings))
    engine, task, spent = evaluation_engine(trainer, settings), settings.task, {}

    def evaluation(step: int) -> dict[str, float]:
        if step % settings.evaluation.every and step != settings.steps:
            return {}
        started = time.perf_counter()
        if engine is not trainer.source.engine:  # that one is busy sampling, from older weights
            engine.load_weights(trainer.policy.named_tensors())
        metrics, _ = evaluate(engine, task, settings.evaluation, settings.rollout.longest_limit, step)
        return metrics | {"time/eval_s": time.perf_counter() - started}

    def log(step: int, metrics: dict[str, float], rollout: Rollout | None) -> None:
        kept = rollout is not None and (step in (1, settings.steps) or step % settings.tracking.rollouts_every == 0)
        tracker.log(step, metrics | spent, rollout.responses if kept else None)
        spent.clear()
        if step == min(10, settings.steps):  # the learning rate has begun to rise
            warn(warnings_after(settings, metrics))
        if rollout:
            progress(step, reward=metrics["reward/mean"], clipped=metrics.get("clip/token_active", 0.0))

    def checkpoint(step: int, last: bool) -> None:
        writer.check()
        if last or step % settings.checkpoint.every == 0:
            trainer.state.source, held = trainer.source.state(), trainer.source.held()
            started = time.perf_counter()
            moved = trainer.reference if getattr(settings.kl, "refresh_every", 0) else None
            writer.save(trainer.state, moved, held)
            if last:
                writer.wait()
            spent["time/checkpoint_s"] = time.perf_counter() - started

    try:
        trainer.fit(settings.steps, evaluation, log, checkpoint, stop_signal().requested)
    finally:
        progress.close()
        writer.close()


if __name__ == "__main__":
    stop_signal().loud = True
    stop_signal().install(signal.SIGINT)  # in a sweep with workers, this process waits for them to end their steps
    command_line(main)
