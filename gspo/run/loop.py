"""The loop of a run: evaluation, metrics, warnings and checkpoints around the trainer's steps."""

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gspo.config.remarks import (
    cut_off_pays,
    engine_mismatch,
    nothing_to_learn,
    rounding_floor,
    warnings_after,
)
from gspo.config.settings import Settings, settings_hash
from gspo.distributed.ranks import ranks_lost_in_passes
from gspo.evaluation.evaluate import evaluate
from gspo.io.files import ENDED_EARLY, METRICS_FILE, append_to, replace_text
from gspo.io.rows import read_rows
from gspo.model.policy import Policy
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.sources.base import NothingGraded, Rollout
from gspo.run.build import evaluation_engine, in_process_engine
from gspo.run.directory import RunDirectory
from gspo.run.old_records import delete_old_records
from gspo.run.rollback import Rollbacks
from gspo.run.sweep_progress import shown_by_sweep
from gspo.tracking.monitor import Monitor, as_lines
from gspo.tracking.tracker import PAUSE, Progress, Tracker
from gspo.train.checkpoint import CheckpointWriter
from gspo.train.extensions import Callback
from gspo.train.trainer import Trainer

LOG = logging.getLogger("gspo.train")
EVENTS = "monitor.jsonl"
FIRST_STEPS = 3  # in these steps a batch without anything to learn causes a warning


class TrainingLoop:
    """A trainer's steps up to the last, with all that `Trainer.fit` calls between the steps.

    `alone` says that the run has the terminal to itself. `stop_requested()` returns whether the
    user or a scheduler wants the run to stop.
    """

    def __init__(
        self,
        settings: Settings,
        directory: RunDirectory,
        trainer: Trainer,
        tracker: Tracker,
        alone: bool,
        stop_requested: Callable[[], bool],
    ):
        self.settings = settings
        self.directory = directory
        self.trainer = trainer
        self.tracker = tracker
        self.stop_requested = stop_requested
        folder = directory.path
        trainer.extensions.callbacks |= profilers(settings, folder)
        self.engine = evaluation_engine(trainer, settings)
        self.writer = checkpoint_writer(folder, trainer, settings)
        pause = math.inf if shown_by_sweep() else PAUSE
        self.progress = Progress(settings.label(), settings.steps, trainer.state.step, alone, pause)
        self.monitor = Monitor(settings.monitor)
        rows = read_rows(folder / METRICS_FILE)
        events = [event for row in rows for event in self.monitor.observe(row["step"], row)]
        # all of the monitor's state is a function of the rows, and so are its events
        replace_text(folder / EVENTS, as_lines(events))
        self.last_saved_step = trainer.state.step  # the last step with a checkpoint
        # why the monitor ends the run: "collapsed", "rolled back", or "" if it does not
        self.ending = ""
        self.rollback_step = -1  # the step that a rollback returns to, -1 without rollback
        self.seconds: dict[str, float] = {}  # time metrics for the next row
        self.warned: set[str] = set()  # subjects that the user was warned of

    @ranks_lost_in_passes()
    def run(self) -> str:
        """Train to the last step, or until the user, a scheduler or the monitor ends the run.

        Returns how it ended: finished, ended early (by a callback), stopped, collapsed, or rolled
        back (then it must be started again)."""
        try:
            self.trainer.fit(
                self.settings.steps, self.evaluate, self.log, self.checkpoint, self.stop
            )
        except (EngineEnded, NothingGraded):
            self.save_last_step()
            raise
        except Exception as error:  # whatever it is, it is raised again
            self.record_failed_step(error)
            raise
        finally:
            self.progress.close()
            self.writer.close()
            self.trainer.source.close()
        how = self.ending
        if not how and self.trainer.state.step == self.settings.steps:
            how = "finished"
        elif not how:
            how = ENDED_EARLY if self.trainer.extensions.ended_by else "stopped"
        self.directory.write_stability_report(how)
        return how

    def record_failed_step(self, error: Exception) -> None:
        """Write the record of a step that could not be completed, or log why that is impossible."""
        try:
            self.trainer.recorder.finish({}, f"{type(error).__name__}: {error}")
        except (OSError, RuntimeError, ValueError) as problem:
            LOG.warning("the failed step could not be recorded: %s", problem)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return held-out metrics at the steps at which they are due, else nothing."""
        started = time.perf_counter()
        try:
            metrics = evaluate_if_due(self.engine, self.trainer, self.settings, step)
        except EngineEnded as error:  # evaluate in this process, so that the step is complete
            self.warn(step, f"{error}; its held-out problems are sampled in this process")
            self.engine = in_process_engine(self.trainer, self.settings)
            return self.evaluate(step)
        return metrics | {"time/eval_s": time.perf_counter() - started} if metrics else {}

    def log(self, step: int, metrics: dict[str, float], rollout: Rollout | None) -> None:
        """Write the step's row, report the monitor's events, and save responses if they are due."""
        settings = self.settings
        started = time.perf_counter()
        events = self.monitor.observe(step, metrics)
        self.seconds["time/monitor_s"] = time.perf_counter() - started
        responses = None
        if rollout:
            metrics = metrics | self.monitor.metrics()
            if step in (1, settings.steps) or step % settings.tracking.rollouts_every == 0:
                responses = rollout.responses
        self.tracker.log(step, metrics | self.seconds, responses)
        self.seconds.clear()
        with append_to(self.directory.path / EVENTS) as file:
            file.write(as_lines(events))
        if any(event.kind == "fallen" for event in events):
            self.apply_monitor_action(step)
        for event in events:
            self.tracker.alert(f"{settings.label()}, step {step}", event.text, event.kind)
        self.warn(step, *(event.text for event in events if event.kind != "cleared"))
        self.warn_of_long_prompts(step, metrics)
        self.warn_of_outside_code(rollout)
        if rollout:
            responses = rollout.responses
            if step <= FIRST_STEPS:
                reasons = nothing_to_learn(settings, metrics, responses, step)
                self.warn_once("nothing to learn", step, reasons)
            self.warn_once("rounding", step, rounding_floor(settings, metrics))
            self.warn_once("mismatch", step, engine_mismatch(settings, metrics))
            self.warn_once("truncated", step, cut_off_pays(settings, responses))
        if step == min(10, settings.steps):  # by now the learning rate has begun to rise
            warn(warnings_after(settings, metrics))
        if settings.tracking.record_last:
            delete_old_records(self.directory.path, step, settings.tracking, self.monitor)
        if rollout:
            clipped = metrics.get("clip/token_active", 0.0)
            self.progress(step, reward=metrics["reward/mean"], clipped=clipped)

    def warn(self, step: int, *texts: str) -> None:
        """Warn of something at a step."""
        warn([f"{self.settings.label()}, step {step}: {text}" for text in texts])

    def warn_once(self, subject: str, step: int, texts: list[str]) -> None:
        """Warn of a subject, unless the user was warned of it at an earlier step."""
        if texts and subject not in self.warned:
            self.warned.add(subject)
            self.warn(step, *texts)

    def warn_of_long_prompts(self, step: int, metrics: dict[str, float]) -> None:
        """Warn once for each set of problems that prompts are too long."""
        positions = self.engine.positions
        limit = self.settings.rollout.longest_limit
        room = f"{limit} response tokens in {positions} positions"
        if not positions:
            room = "max_prompt_tokens"
        for name, count in metrics.items():
            if name.endswith("/prompt_too_long") and count:
                action = "replaced by others; more may follow"
                if name.startswith("eval/"):
                    action = "left out"
                text = f"problems have prompts that are too long for {room} and are {action}"
                self.warn_once(name, step, [f"{name}: {count:g} {text}"])

    def warn_of_outside_code(self, rollout: Rollout | None) -> None:
        """Warn of the user's metrics that failed, and once of responses that were not graded."""
        failures = self.trainer.extensions.warnings
        warn([f"{self.settings.label()}, {text}" for text in failures])
        failures.clear()
        ungraded = rollout.ungraded if rollout else []
        reasons = Counter(r.score.reason for r in ungraded if r.score.reason)
        for reason, count in reasons.most_common():
            LOG.info("%d responses could not be graded: %s", count, reason)
        if reasons and "ungraded" not in self.warned:
            self.warned.add("ungraded")
            text = (
                f"{reasons.total()} responses could not be graded and are left out; the first: "
                f"{next(iter(reasons))} (train.log has the reasons of later steps)"
            )
            warn([f"{self.settings.label()}: {text}"])

    def apply_monitor_action(self, step: int) -> None:
        """Apply monitor.action after the reward has fallen: warn, end the run, or roll it back."""
        monitor = self.settings.monitor
        rollbacks = Rollbacks(self.directory.path)
        if monitor.action == "rollback" and len(rollbacks.entries) < monitor.rollbacks:
            self.writer.wait()
            rollback_step = rollbacks.plan(step, self.last_healthy_step())
            if rollback_step is None:
                self.ending = "collapsed"
                self.rollback_step = -1
                self.warn(step, "no checkpoint of a healthy step is left")
            else:
                self.ending = "rolled back"
                self.rollback_step = rollback_step
                self.warn(step, f"going back to step {rollback_step}")
        elif monitor.action != "warn":
            self.ending = "collapsed"

    def last_healthy_step(self) -> int:
        """Return the last step whose rollouts all came from healthy weights.

        It is the monitor's last healthy step, minus the age in steps of the oldest weights that
        rollouts come from."""
        rollout = self.settings.rollout
        oldest = rollout.staleness
        if rollout.token_budget:
            segments = math.ceil(rollout.longest_limit / rollout.token_budget)
            # a problem may wait for its turn, and for the other responses of its group
            queued_batches = math.ceil(rollout.in_flight / rollout.prompts_per_step)
            oldest += segments * queued_batches - 1
        return self.monitor.last_healthy_step - oldest

    def checkpoint(self, step: int, last: bool) -> None:
        """Begin to write a checkpoint if it is due. At the `last` step wait for the writer."""
        self.writer.check()
        if not last and step % self.settings.checkpoint.every:
            return
        trainer = self.trainer
        trainer.state.source = trainer.source.state()
        pending = trainer.source.pending()
        trainer.state.callbacks = trainer.extensions.state()
        started = time.perf_counter()
        self.writer.wait()  # the next checkpoint may delete an older one
        self.tracker.checkpoints()
        self.writer.save(
            trainer.state, refreshed_reference(trainer, self.settings), pending, self.step_to_keep()
        )
        self.last_saved_step = step
        if last:
            self.writer.wait()
        self.seconds["time/checkpoint_s"] = time.perf_counter() - started

    def save_last_step(self) -> None:
        """Write a checkpoint of the last step after the next batch could not be sampled.

        None is written if that step has a checkpoint, or if the source lacks batches that older
        weights were to sample."""
        step = self.trainer.state.step
        with suppress(EngineEnded, NothingGraded):
            if step and step != self.last_saved_step:
                self.checkpoint(step, last=True)

    def step_to_keep(self) -> int:
        """Return the step whose checkpoint is kept for a rollback, -1 for none.

        If that step has no checkpoint, the newest checkpoint before it is kept."""
        if self.settings.monitor.action != "rollback":
            return -1
        return self.rollback_step if self.rollback_step >= 0 else self.last_healthy_step()

    def stop(self) -> bool:
        """Return whether the run ends after this step."""
        return self.stop_requested() or self.tracker.asked_to_stop() or bool(self.ending)


def profilers(settings: Settings, run: Path) -> dict[str, Callback]:
    """Return the callback that profiles steps, if there are steps to profile.

    Its name cannot be the name of a callback of the user's."""
    if not settings.profile.steps:
        return {}
    from gspo.run.profiling import Profiler  # PyTorch's profiler takes a while to import

    return {"profile.": Profiler(steps=settings.profile.steps, run=run)}


def evaluate_if_due(
    engine: Engine, trainer: Trainer, settings: Settings, step: int
) -> dict[str, float]:
    """Return held-out metrics at the steps at which they are due, else nothing."""
    every = settings.evaluation.every
    if every == 0 or (step % every and step != settings.steps):
        return {}
    # with overlap this is an engine of its own, and does not have the current weights
    if engine is not trainer.source.engine:
        engine.load_weights(trainer.policy.named_tensors())
    rollout = settings.rollout
    metrics, _ = evaluate(
        engine, settings.task, settings.evaluation, rollout.longest_limit, step, rollout.stop
    )
    return metrics


def checkpoint_writer(run: Path, trainer: Trainer, settings: Settings) -> CheckpointWriter:
    """Return the writer of a run's checkpoints.

    Rank 0 alone has a writer, but with sharded weights every rank has its own."""
    arguments = (
        run,
        trainer.policy,
        trainer.optimizer,
        settings.checkpoint.keep,
        settings_hash(settings),
    )
    if not trainer.policy.shards:
        return CheckpointWriter(*arguments)
    from gspo.train.sharded_checkpoint import ShardedCheckpointWriter  # its imports take a second

    return ShardedCheckpointWriter(*arguments, trainer.ranks)


def refreshed_reference(trainer: Trainer, settings: Settings) -> Policy | None:
    """Return the reference policy if it is no longer the policy of the run's start."""
    return trainer.reference if settings.kl.refresh_every else None


@ranks_lost_in_passes()
def follow(
    trainer: Trainer, settings: Settings, run: Path, stop_requested: Callable[[], bool]
) -> None:
    """Train along with rank 0 until it ends the run or rolls it back."""
    follower = Follower(trainer, settings, run)
    try:
        trainer.fit(
            settings.steps, follower.evaluate, lambda *_: None, follower.checkpoint, stop_requested
        )
    except (EngineEnded, NothingGraded):
        follower.save_last_step()
        raise
    finally:
        follower.close()


class Follower:
    """The part of a rank other than 0 between the steps, beside the `TrainingLoop` on rank 0.

    It samples its share of the held-out problems. With sharded weights it also writes its part of
    the checkpoints."""

    def __init__(self, trainer: Trainer, settings: Settings, run: Path):
        self.trainer = trainer
        self.settings = settings
        self.engine = evaluation_engine(trainer, settings)
        self.writer = checkpoint_writer(run, trainer, settings) if trainer.policy.shards else None
        self.last_saved_step = trainer.state.step

    def evaluate(self, step: int) -> dict[str, float]:
        """Return held-out metrics at the steps at which they are due, else nothing."""
        try:
            return evaluate_if_due(self.engine, self.trainer, self.settings, step)
        except EngineEnded:
            self.engine = in_process_engine(self.trainer, self.settings)
            return self.evaluate(step)

    def checkpoint(self, step: int, last: bool) -> None:
        """Write this rank's part of a checkpoint if it is due."""
        if not last and step % self.settings.checkpoint.every:
            return
        # rank 0 waits for the batches that are being sampled, which takes this rank's thread too
        if last:
            self.trainer.source.pending()
        self.last_saved_step = step
        if self.writer:
            self.writer.save(self.trainer.state, refreshed_reference(self.trainer, self.settings))
            if last:
                self.writer.wait()

    def save_last_step(self) -> None:
        """Do this rank's part of `TrainingLoop.save_last_step`."""
        step = self.trainer.state.step
        with suppress(EngineEnded, NothingGraded):
            if step and step != self.last_saved_step:
                self.checkpoint(step, last=True)

    def close(self) -> None:
        """Close the writer and the engine."""
        if self.writer:
            self.writer.close()
        self.trainer.source.close()


def warn(lines: list[str]) -> None:
    """Print warnings on the terminal, and write them to the run's train.log."""
    for line in lines:
        LOG.warning(line)
        print(f"warning: {line}", file=sys.stderr)
