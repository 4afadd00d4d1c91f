"""A run under way: evaluation, rows, warnings and checkpoints around the trainer's steps."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gspo.config.checks import nothing_to_learn, warnings_after
from gspo.config.settings import Settings, settings_hash
from gspo.core.files import append_to, replace_text
from gspo.evaluation.evaluate import evaluate
from gspo.rollout.engine_process import EngineEnded
from gspo.rollout.source import Rollout
from gspo.run.build import evaluation_engine, local_engine
from gspo.run.rollback import Rollbacks
from gspo.tracking.monitor import Monitor, as_lines, report
from gspo.tracking.tracker import Progress, Tracker, read_rows
from gspo.train.checkpoint import CheckpointWriter
from gspo.train.trainer import Trainer

LOG = logging.getLogger("gspo.train")
EVENTS = "monitor.jsonl"


class Session:
    """What `Trainer.fit` calls. `asked` says whether the user or a scheduler wants the run to stop."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        trainer: Trainer,
        tracker: Tracker,
        alone: bool,
        asked: Callable[[], bool],
    ):
        self.settings, self.folder, self.trainer, self.tracker, self.asked = settings, folder, trainer, tracker, asked
        self.engine = evaluation_engine(trainer, settings)
        keep = settings.checkpoint.keep
        self.writer = CheckpointWriter(folder, trainer.policy, trainer.optimizer, keep, settings_hash(settings))
        self.progress = Progress(settings.label(), settings.steps, trainer.state.step, alone)
        self.monitor = Monitor(settings.monitor)
        rows = read_rows(folder / "metrics.jsonl")
        events = [event for row in rows for event in self.monitor.observe(row["step"], row)]
        replace_text(folder / EVENTS, as_lines(events))  # a function of the rows, as is all that the monitor knows
        self.saved = trainer.state.step  # the last step with a checkpoint
        self.ending = ""  # why the monitor ends it: collapsed, or rolled back
        self.target = -1  # the step that it goes back to
        self.spent: dict[str, float] = {}  # seconds that the next row will hold
        self.said: set[str] = set()  # metrics of left-out prompts that were spoken of

    def run(self) -> str:
        """Train to the last step, or until somebody or the monitor ends it; says how it ended: finished, stopped,
        collapsed, or rolled back (then there is more to do)."""
        try:
            self.trainer.fit(self.settings.steps, self.evaluate, self.log, self.checkpoint, self.stop)
        except EngineEnded:
            self.save_whole()
            raise
        finally:
            self.progress.close()
            self.writer.close()
            self.trainer.source.close()
        how = self.ending or ("finished" if self.trainer.state.step == self.settings.steps else "stopped")
        write_report(self.folder, how)
        return how

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics where they are due."""
        settings, trainer = self.settings, self.trainer
        if step % settings.evaluation.every and step != settings.steps:
            return {}
        started = time.perf_counter()
        if self.engine is not trainer.source.engine:  # that one is busy sampling, from older weights
            self.engine.load_weights(trainer.policy.named_tensors())
        limit = settings.rollout.longest_limit
        try:
            metrics, _ = evaluate(self.engine, settings.task, settings.evaluation, limit, step)
        except EngineEnded as error:  # the step is to be whole
            warn([f"{settings.label()}, step {step}: {error}; its held-out problems are sampled in this process"])
            self.engine = local_engine(trainer.policy, settings.rollout)
            return self.evaluate(step)
        return metrics | {"time/eval_s": time.perf_counter() - started}

    def log(self, step: int, metrics: dict[str, float], rollout: Rollout | None) -> None:
        """The step's row, what the monitor says of it, and on some steps its responses."""
        settings, started = self.settings, time.perf_counter()
        events = self.monitor.observe(step, metrics)
        self.spent["time/monitor_s"] = time.perf_counter() - started
        if rollout:
            metrics = metrics | self.monitor.metrics()
        kept = rollout is not None and (step in (1, settings.steps) or step % settings.tracking.rollouts_every == 0)
        self.tracker.log(step, metrics | self.spent, rollout.responses if kept else None)
        self.spent.clear()
        with append_to(self.folder / EVENTS) as file:
            file.write(as_lines(events))
        if any(event.kind == "fallen" for event in events):
            self.fallen(step)
        for event in events:
            self.tracker.alert(f"{settings.label()}, step {step}", event.text, event.kind)
        warn([f"{settings.label()}, step {step}: {event.text}" for event in events if event.kind != "cleared"])
        self.say_left_out(step, metrics)
        if rollout and step == 1:
            warn([f"{settings.label()}, step 1: {line}" for line in nothing_to_learn(settings, metrics)])
        if step == min(10, settings.steps):  # the learning rate has begun to rise
            warn(warnings_after(settings, metrics))
        if rollout:
            self.progress(step, reward=metrics["reward/mean"], clipped=metrics.get("clip/token_active", 0.0))

    def say_left_out(self, step: int, metrics: dict[str, float]) -> None:
        """Once: that prompts are too long, in training or in a held-out set."""
        for name, count in metrics.items():
            if name.endswith("/prompt_too_long") and count and name not in self.said:
                self.said.add(name)
                positions, limit = self.engine.positions, self.settings.rollout.longest_limit
                room = f"{limit} response tokens in {positions} positions" if positions else "max_prompt_tokens"
                what = f"{count:g} problems have prompts that are too long for {room} and are "
                what += "left out" if name.startswith("eval/") else "replaced by others; more may follow"
                warn([f"{self.settings.label()}, step {step}: {name}: {what}"])

    def fallen(self, step: int) -> None:
        """Do what the settings say."""
        action, back = self.settings.monitor.action, Rollbacks(self.folder)
        if action == "rollback" and len(back.made) < self.settings.monitor.rollbacks:
            self.writer.wait()
            target = back.plan(step, self.healthy())
            self.ending, self.target = ("collapsed", -1) if target is None else ("rolled back", target)
            text = "no checkpoint of a healthy step is left" if target is None else f"going back to step {target}"
            warn([f"{self.settings.label()}, step {step}: {text}"])
        elif action != "warn":
            self.ending = "collapsed"

    def healthy(self) -> int:
        """The monitor's, earlier by the age of the oldest weights that rollouts are sampled from."""
        rollout = self.settings.rollout
        parts = math.ceil(rollout.longest_limit / rollout.token_budget) - 1 if rollout.token_budget else 0
        return self.monitor.healthy - rollout.staleness - parts

    def checkpoint(self, step: int, last: bool) -> None:
        """Begin to write one where it is due; wait for it when it is the last."""
        self.writer.check()
        if not last and step % self.settings.checkpoint.every:
            return
        trainer = self.trainer
        trainer.state.source, held = trainer.source.state(), trainer.source.pending()
        started = time.perf_counter()
        moved = trainer.reference if getattr(self.settings.kl, "refresh_every", 0) else None
        self.writer.save(trainer.state, moved, held, self.spared())
        self.saved = step
        if last:
            self.writer.wait()
        self.spent["time/checkpoint_s"] = time.perf_counter() - started

    def save_whole(self) -> None:
        """After the end of the engine's process: a checkpoint of the last step, unless it has one or is not whole, for
        batches that older weights were to sample are lacking."""
        step = self.trainer.state.step
        with suppress(EngineEnded):
            if step and step != self.saved:
                self.checkpoint(step, last=True)

    def spared(self) -> int:
        """The newest checkpoint of this step or before is kept for a rollback; -1 for none."""
        if self.settings.monitor.action != "rollback":
            return -1
        return self.target if self.target >= 0 else self.healthy()

    def stop(self) -> bool:
        return self.asked() or bool(self.ending)


def write_report(folder: Path, how: str) -> None:
    """The three stability questions, answered from the rows: in report.txt."""
    replace_text(folder / "report.txt", report(read_rows(folder / "metrics.jsonl"), how) + "\n")


def warn(lines: list[str]) -> None:
    """Say it on the terminal and in the run's train.log."""
    for line in lines:
        LOG.warning(line)
        print(f"warning: {line}", file=sys.stderr)
