"""Writes a run's rows to metrics.jsonl and to Weights & Biases, saves rollouts, shows progress.

The files are written first. Everything that W&B shows can be made from them again.
"""

import json
import logging
import math
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from gspo.data.samples import ScoredResponse
from gspo.io import untrusted
from gspo.io.escaping import escape_line
from gspo.io.files import METRICS_FILE, append_to, named_errors, replace_text
from gspo.io.rows import read_rows, rows_and_damage
from gspo.io.tables import clock
from gspo.tracking.metrics import lookup
from gspo.tracking.settings import TrackingSettings
from gspo.tracking.wandb_choice import About, chosen_mode

log = logging.getLogger(__name__)
# folders of a run whose entries are named after steps
STEP_FOLDERS = ("rollouts", "checkpoints", "evaluations", "steps")


class RowsElsewhere(Protocol):
    """Another destination of the rows of metrics.jsonl, such as gspo.run.event_files."""

    def send(self, row: dict) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Writes a run's rows to its directory, to W&B, and to `elsewhere` if it is given.

    `start` is the folder of the run's cold start, None without a cold start."""

    def __init__(
        self,
        run: Path,
        settings: TrackingSettings,
        config: dict,
        group: str,
        tags: list[str],
        *,
        start: Path | None = None,
        elsewhere: RowsElsewhere | None = None,
    ):
        self.run = run
        self.settings = settings
        self.wandb = None
        self.elsewhere = elsewhere
        self.rows = append_to(run / METRICS_FILE)  # `finish` closes it
        mode = chosen_mode(settings.wandb)
        if mode != "disabled":
            from gspo.tracking.wandb_run import WandbRun  # it imports W&B

            record = {"cold_start": start.name} if start else {}
            self.wandb = WandbRun(run, settings, mode, About(config, group, tags, record=record))
            if start:
                self.wandb.lineage.record_input(start, start.name)
            # the rows of a resumed run: `send` leaves out rows that W&B has
            for row in read_rows(run / METRICS_FILE):
                self.wandb.send(
                    row, read_rollouts(run / "rollouts" / f"step_{row['step']:06d}.jsonl")
                )

    def where(self) -> str:
        """Return the W&B run's address as the end of a sentence, "" if it is not online."""
        online = self.wandb is not None and not self.wandb.run.offline
        return f", tracked at {self.wandb.run.url}" if online else ""

    def log(
        self, step: int, metrics: dict[str, float], responses: list[ScoredResponse] | None
    ) -> None:
        """Write a step's row to metrics.jsonl, send it to W&B, and save the responses if given.

        Raises KeyError for a metric that the registry lacks."""
        for name in metrics:
            lookup(name)
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        row = {"step": step} | finite
        if responses:
            write_rollouts(self.run / "rollouts" / f"step_{step:06d}.jsonl", responses)
        with named_errors(self.run / METRICS_FILE):
            self.rows.write(json.dumps(row) + "\n")
            self.rows.flush()
            os.fsync(self.rows.fileno())
        if self.wandb:
            self.wandb.send(row, [rollout_row(response) for response in responses or []])
        if self.elsewhere:
            self.elsewhere.send(row)

    def checkpoints(self) -> None:
        """Record complete checkpoints in W&B that are not recorded there yet."""
        if self.wandb:
            self.wandb.checkpoints()

    def alert(self, title: str, text: str, kind: str) -> None:
        """Send a W&B alert, which the account passes on by mail or Slack.

        `kind` is the kind of a monitor's event. "cleared" sends nothing."""
        if self.wandb and kind != "cleared":
            self.wandb.alert(title, text, fallen=kind == "fallen")

    def asked_to_stop(self) -> bool:
        """Return whether W&B's server asks the run to stop, as a sweep's early termination does."""
        return self.wandb is not None and self.wandb.stopped

    def finish(self, exit_code: int) -> str | None:
        """Close the files and the W&B run, and return the command that uploads the rest of the run.

        Returns None if W&B's server has the whole run, or if the run has no W&B run."""
        self.rows.close()
        if self.elsewhere:
            self.elsewhere.close()
        self.checkpoints()
        return self.wandb.finish(exit_code) if self.wandb else None


def rollout_row(response: ScoredResponse) -> dict:
    """Return the saved row of a response, with its texts and the reasons of its reward."""
    row = {
        "task": response.problem.task,
        "family": response.problem.family,
        "problem": response.problem.index,
        "sample": response.sample,
        "prompt": response.problem.prompt,
        "rendered": response.rendered,
        "response": response.text,
        "reward": response.score.reward,
        "verdict": response.score.verdict,
        "length": response.length,
        "finish_reason": response.finish_reason,
        "policy_step": response.policy_step,
        "segments": response.segments or [(response.policy_step, response.length)],
    }
    if response.score.rewards:
        row["rewards"] = response.score.rewards
    if response.turns:  # an episode
        row["turns"] = [asdict(turn) for turn in response.turns]
        row["measures"] = response.measures
    return row


def write_rollouts(path: Path, responses: list[ScoredResponse]) -> None:
    """Write responses to a file, one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_lines(path, [rollout_row(response) for response in responses])


def read_rollouts(path: Path) -> list[dict]:
    """Return the rows that `write_rollouts` wrote, without damaged lines.

    The list is empty if the file does not exist or cannot be read."""
    try:
        return list(untrusted.read_objects(path))
    except (OSError, ValueError):
        return []


def supersede(run: Path, step: int) -> list[str]:
    """Move the entries of a run after `step` to superseded/<n>/ before it resumes at `step`.

    The resumed run writes them again: rows, rollouts, checkpoints, and evaluations of these
    checkpoints. Damaged lines of metrics.jsonl are moved too. Returns a list with a warning if rows
    up to `step` are lost by the damage, else an empty list.
    """
    metrics = run / METRICS_FILE
    files = [
        path
        for folder in STEP_FOLDERS
        for path in (run / folder).glob("step_*")
        if _step(path) > step
    ]
    rows, damaged = rows_and_damage(metrics)
    earlier = [row for row in rows if row["step"] <= step]
    later = [row for row in rows if row["step"] > step]
    if files or later or damaged:
        superseded = run / "superseded"
        numbers = [int(path.name) for path in superseded.glob("*") if path.name.isdecimal()]
        target = superseded / str(1 + max(numbers, default=0))
        target.mkdir(parents=True)
        _write_lines(target / METRICS_FILE, later)
        if damaged:
            replace_text(target / "damaged_metrics.jsonl", "".join(damaged))
        for path in files:
            path.rename(target / f"{path.parent.name}_{path.name}")
    if metrics.exists():
        _write_lines(metrics, earlier)
    missing = sorted(set(range(step + 1)) - {row["step"] for row in rows})
    if not missing:
        return []
    return [f"metrics.jsonl was damaged: the rows of steps {_spans(missing)} are lost"]


def _write_lines(path: Path, rows: list[dict]) -> None:
    """Write rows to a file, one JSON object per line."""
    replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _step(path: Path) -> int:
    """Return the step in the name of a run's file or folder, -1 for any other name.

    The names are step_000008.jsonl (rollouts), step_000008 (a checkpoint),
    step_000008-28211d79a6 (an evaluation of the checkpoint), step_000008.safetensors (the record of
    a step) and step_000008.html (its page). Unfinished folders have other names.
    """
    name = re.fullmatch(r"step_(\d+)(-[\w.+-]+)?(\.jsonl|\.safetensors|\.html)?", path.name)
    return int(name[1]) if name else -1


def _spans(numbers: list[int]) -> str:
    """Return ascending numbers as text, with spans joined: "3, 7-9"."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)


PAUSE = 10.0  # minimum of seconds between two lines of a run's progress


class Progress:
    """Shows step, reward and time left: as a bar on a terminal, else as a line every few seconds.

    `alone`: no other job writes to the same terminal. If `seconds_between_lines` is infinite,
    steps are only logged."""

    def __init__(
        self, title: str, steps: int, done: int, alone: bool, seconds_between_lines: float = PAUSE
    ):
        self.title = title
        self.steps = steps
        self.first = done
        self.pause = seconds_between_lines
        self.started = time.perf_counter()
        self.printed = 0.0
        self.bar: tqdm | None = None
        if alone and sys.stderr.isatty():
            description = escape_line(title)
            self.bar = tqdm(
                total=steps, initial=done, desc=description, unit="step", dynamic_ncols=True
            )

    def __call__(self, step: int, **figures: float) -> None:
        """Show and log that a step is done, with some of its metrics."""
        text = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
        now = time.perf_counter()
        pace = (now - self.started) / max(step - self.first, 1)
        seconds_left = round(pace * (self.steps - step))
        line = (
            f"{self.title}  step {step}/{self.steps}  {text}  {pace:.1f} s/step  "
            f"{clock(seconds_left)} left"
        )
        log.info(line)
        if self.bar:
            self.bar.set_postfix_str(text)
            self.bar.update(step - self.bar.n)
        elif now - self.printed > self.pause or (step == self.steps and self.pause < math.inf):
            print(escape_line(line), flush=True)
            self.printed = now

    def close(self) -> None:
        """End the bar."""
        if self.bar:
            self.bar.close()
