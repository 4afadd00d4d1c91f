"""Tracking: metrics.jsonl first, then Weights & Biases with the same numbers; rollouts; progress on the terminal.

Files are the truth, trackers are views. W&B is online where an account is configured and offline otherwise. An offline
file loses what was not flushed at a kill, so it is flushed every second, and a resumed run opens a new offline segment
under the same run id and writes the whole history into it: the newest segment alone is always complete, and the older
ones are marked as uploaded for `wandb sync`. A run resumed online sends the rows that the server lacks; those that a
killed process had sent after its last checkpoint stay as it sent them. A run that was online and goes on offline
becomes a new one for W&B, with all its rows, for an upload would append to those that the server has.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import wandb
from requests.utils import get_netrc_auth
from tqdm import tqdm

from gspo.metrics import lookup
from gspo.ranges import Ranged, ranged
from gspo.records import Response
from gspo.run_files import read_rows, replace_text, rows_and_damage

log = logging.getLogger(__name__)
WANDB_MODES = ("auto", "online", "offline", "disabled")


@dataclass
class TrackingSettings(Ranged, key="tracking"):
    """Where a run is shown. Changes nothing in its results."""

    wandb: str = "auto"  # auto: online if an account is configured, else offline | online | offline | disabled
    project: str = "gspo"
    entity: str = ""  # W&B user or team; empty: the account's default
    tags: list[str] = field(default_factory=list)
    # seconds that the end of a run waits for W&B's upload; the rest is for `wandb sync`
    finish_timeout: float = ranged(300.0, least=0)
    # steps between saved rollout batches; the first and the last are always saved
    rollouts_every: int = ranged(10, least=1)
    table_rows: int = ranged(16, least=1)  # responses of a saved batch that are also shown as a W&B table

    def __post_init__(self):
        super().__post_init__()
        if self.wandb not in WANDB_MODES:
            raise ValueError(f"tracking.wandb={self.wandb!r}: choose one of {', '.join(WANDB_MODES)}")


class Tracker:
    """Writes a run's rows to its directory and to W&B."""

    def __init__(self, run: Path, settings: TrackingSettings, config: dict, group: str, tags: list[str]):
        self.run, self.settings, self.known = run, settings, set()
        self.rows = open(run / "metrics.jsonl", "a")  # noqa: SIM115, closed by `finish`
        self.wandb = None
        mode = _mode(settings.wandb)
        if mode != "disabled":
            self.wandb = self._open_wandb(mode, config, group, tags)

    def _open_wandb(self, mode: str, config: dict, group: str, tags: list[str]):
        try:
            run = self._init(mode, self._identity(mode), config, group, tags)
            if mode == "online":
                replace_text(self.run / "wandb_online", run.id)
        except wandb.Error as error:
            if mode == "offline":
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            text = f"W&B cannot be reached or refuses, tracking goes on offline: {reason}"
            log.warning(text)
            print(f"warning: {text}", file=sys.stderr)
            wandb.teardown()  # it still holds the run's id
            run = self._init("offline", self._identity("offline"), config, group, tags)
        self._mark_older_segments(Path(run.dir).parent)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        for row in read_rows(self.run / "metrics.jsonl"):  # of a resumed run: those that this segment or server lacks
            if row["step"] >= run.starting_step:
                run.log(row, step=row["step"], commit=True)
        return run

    def _identity(self, mode: str) -> str:
        """W&B's id of this run, made at its first start."""
        file, online = self.run / "wandb_id", self.run / "wandb_online"
        there = online.read_text() if online.exists() else None  # the id that the server knows
        if not file.exists() or (mode == "offline" and file.read_text() == there):
            replace_text(file, secrets.token_hex(6))
        return file.read_text()

    def _mark_older_segments(self, newest: Path) -> None:
        """What they hold is in the new segment too, or has been sent: W&B's mark keeps `wandb sync` from them."""
        for file in self.run.glob("wandb/offline-run-*/*.wandb"):
            if file.parent.name != newest.name:
                file.with_name(f"{file.name}.synced").touch()

    def _init(self, mode: str, identity: str, config: dict, group: str, tags: list[str]):
        return wandb.init(
            project=self.settings.project,
            entity=self.settings.entity or None,
            id=identity,
            name=self.run.name,
            group=group,
            job_type="train",
            tags=[*tags, *self.settings.tags],
            config=config,
            dir=str(self.run),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(
                x_transaction_log_flush_interval=1.0,
                silent=True,
                console="off",
                finish_timeout=self.settings.finish_timeout,
                finish_timeout_raises=True,
            ),
        )

    def log(self, step: int, metrics: dict[str, float], responses: list[Response] | None) -> None:
        """One step: a row in metrics.jsonl, the same numbers to W&B, and the step's rollouts if given."""
        for name in metrics.keys() - self.known:
            metric = lookup(name)  # raises for a metric that nobody defined
            if self.wandb:
                self.wandb.define_metric(name, step_metric="step", summary=metric.summary)
            self.known.add(name)
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        row = {"step": step} | finite
        if responses:
            write_rollouts(self.run / "rollouts" / f"step_{step:06d}.jsonl", responses)
        self.rows.write(json.dumps(row) + "\n")
        self.rows.flush()
        os.fsync(self.rows.fileno())
        if self.wandb and step >= self.wandb.starting_step:  # the server has those before from the killed process
            table = {"rollouts": self._table(responses)} if responses else {}
            self.wandb.log(row | table, step=step, commit=True)

    def alert(self, title: str, text: str, kind: str) -> None:
        """A W&B alert: mail or Slack, as the account has it."""
        if self.wandb and kind != "cleared":
            level = wandb.AlertLevel.ERROR if kind == "fallen" else wandb.AlertLevel.WARN
            self.wandb.alert(title=title, text=text, level=level)

    def _table(self, responses: list[Response]) -> wandb.Table:
        chosen = responses[:: max(1, len(responses) // self.settings.table_rows)]
        return wandb.Table(columns=list(rollout_row(chosen[0])), data=[list(rollout_row(r).values()) for r in chosen])

    def finish(self, exit_code: int) -> str | None:
        """Close everything; returns the command that uploads an offline run, if there is one."""
        self.rows.close()
        if not self.wandb:
            return None
        offline, folder = self.wandb.settings.mode == "offline", Path(self.wandb.dir).parent
        try:
            self.wandb.finish(exit_code=exit_code)
        except TimeoutError:
            log.warning("W&B took longer than tracking.finish_timeout=%s s to upload", self.settings.finish_timeout)
            offline = True
        return f"wandb sync {os.path.relpath(folder)}" if offline else None


def _mode(wanted: str) -> str:
    """online if an account is configured (an API key in the environment or in the netrc file), else offline."""
    if wanted != "auto":
        return wanted
    if os.environ.get("WANDB_MODE") in WANDB_MODES[1:]:
        return os.environ["WANDB_MODE"]
    return "online" if account() else "offline"


def account() -> bool:
    """Whether a W&B account is configured: an API key in the environment or in the netrc file."""
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(wandb.Settings().base_url))


def rollout_row(response: Response) -> dict:
    """What is kept of a response: enough to read it and to see why it got its reward."""
    return {
        "task": response.problem.task,
        "family": response.problem.family,
        "problem": response.problem.index,
        "sample": response.sample,
        "prompt": response.problem.prompt,
        "response": response.text,
        "reward": response.score.reward,
        "verdict": response.score.verdict,
        "length": len(response.token_ids),
        "finish_reason": response.finish_reason,
        "policy_step": response.policy_step,
        "segments": response.segments or [(response.policy_step, len(response.token_ids))],
    }


def write_rollouts(path: Path, responses: list[Response]) -> None:
    """One JSON object per response."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(rollout_row(r)) + "\n" for r in responses))


def supersede(run: Path, step: int) -> list[str]:
    """Move what lies after `step` to superseded/<n>/: a run that resumes there will make it again. Damaged lines go
    there too; says in words which rows are lost by that."""
    attic, metrics = run / "superseded", run / "metrics.jsonl"
    files = [p for p in run.glob("*/step_*") if p.parent != attic and p.suffix != ".unfinished"]
    files = [p for p in files if int(p.stem.removeprefix("step_")) > step]
    rows, damaged = rows_and_damage(metrics)
    later = [row for row in rows if row["step"] > step]
    if files or later or damaged:
        attic = attic / str(1 + len(list(attic.glob("*"))))
        attic.mkdir(parents=True)
        (attic / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in later))
    if damaged:
        (attic / "damaged_metrics.jsonl").write_text("".join(damaged))
    for path in files:
        path.rename(attic / f"{path.parent.name}_{path.name}")
    if metrics.exists():
        replace_text(metrics, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
    missing = sorted(set(range(step + 1)) - {row["step"] for row in rows})
    return [f"metrics.jsonl was damaged: the rows of steps {_spans(missing)} are lost"] if missing else []


def _spans(numbers: list[int]) -> str:
    """3, 7-9"""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)


class Progress:
    """Step, reward and time left: a bar on a terminal, a line now and then elsewhere or beside other jobs."""

    def __init__(self, title: str, steps: int, done: int, alone: bool, seconds_between_lines: float = 10.0):
        self.title, self.steps, self.first, self.pause = title, steps, done, seconds_between_lines
        self.started, self.spoken = time.perf_counter(), 0.0
        bar = alone and sys.stderr.isatty()
        self.bar = tqdm(total=steps, initial=done, desc=title, unit="step", dynamic_ncols=True) if bar else None

    def __call__(self, step: int, **figures: float) -> None:
        text = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
        now = time.perf_counter()
        pace = (now - self.started) / max(step - self.first, 1)
        left = round(pace * (self.steps - step))
        line = f"{self.title}  step {step}/{self.steps}  {text}  {pace:.1f} s/step  {left // 60}:{left % 60:02d} left"
        log.info(line)
        if self.bar:
            self.bar.set_postfix_str(text)
            self.bar.update(step - self.bar.n)
        elif now - self.spoken > self.pause or step == self.steps:
            print(line, flush=True)
            self.spoken = now

    def close(self) -> None:
        if self.bar:
            self.bar.close()
