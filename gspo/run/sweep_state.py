"""Find out how far the runs of a sweep are, from the study's manifest and the run directories."""

import contextlib
import math
import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.io import escaping, untrusted
from gspo.io.files import ENDED, ENDED_EARLY, METRICS_FILE, SETTINGS_FILE, locked, read_status
from gspo.io.ownership import is_own_file
from gspo.io.rows import own_run_factor
from gspo.io.tables import counted, text_table
from gspo.tracking.collapse import collapse, levels

# in a study's folder: one line per start of a sweep, and one per job that failed
MANIFEST = "manifest.jsonl"
UNFINISHED = ("running", "stopped", "died", "failed", "missing")
MAX_RUN_NAME_CHARS = 1000  # every line of the table is padded to the longest name
STEPS = re.compile(rb"^steps: (\d{1,9})$", re.MULTILINE)
STEP = re.compile(rb'"step": (\d{1,9})[,}]')
REWARD = re.compile(rb'"reward/mean": (null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)[,}]')
ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
PACE_STEPS = 10  # the pace is the mean of this many last steps


@dataclass
class Job:
    """A run of a sweep, and how far it is."""

    run: str
    steps: int  # the planned number of steps
    overrides: list[str]
    # finished | ended early | collapsed | running | stopped | died | failed | missing
    state: str
    step: int = 0
    reward: float | None = None  # the mean reward, smoothed over the steps
    pace: float | None = None  # seconds per step
    reason: str = ""
    collapsed: int | None = None  # the step at which the run collapsed by the registered rule

    def seconds_left(self) -> float:
        """Return the seconds that the run still needs, NaN if its pace is not known."""
        if self.state not in UNFINISHED:
            return 0.0
        return (self.steps - self.step) * (self.pace if self.pace is not None else math.nan)


# ----------------------------------------------------------------------------------------- manifest
def entries(study: Path) -> list[dict]:
    """Return the lines of the manifest, without lines that a kill cut short or of another form."""
    lines = []
    try:
        for line in untrusted.read_objects(study / MANIFEST):
            with contextlib.suppress(ValueError):
                lines.append(_entry(line))
    except FileNotFoundError:
        return []
    return lines


def _entry(line: object) -> dict:
    """Return a line of the manifest, or raise ValueError if it has another form."""
    kinds = {"time": float, "sweep": str, "run": str, "reason": str, "stopped": str, "jobs": list}
    entry: dict[str, Any] = {"time": 0.0} | _typed(line, kinds)
    if "jobs" in entry:
        entry["jobs"] = [_planned(job) for job in entry["jobs"]]
    return entry


def _planned(job: object) -> dict:
    """Return a planned job, or raise ValueError if it has another form."""
    kinds = {
        "run": str,
        "steps": int,
        "folder": str,
        "overrides": list,
        "reason": str,
        "same_as": int,
    }
    planned: dict[str, Any] = {"run": "", "overrides": []} | _typed(job, kinds)
    run = planned["run"]
    if not all(isinstance(override, str) for override in planned["overrides"]):
        raise ValueError("not a job of a sweep")
    # a job without steps has no folder: its settings were refused, and its overrides are its name
    if "steps" not in planned:
        planned["run"] = run[:MAX_RUN_NAME_CHARS]
    elif len(run) > MAX_RUN_NAME_CHARS:
        raise ValueError(f"run={run[:40]!r} ...: a name of {len(run):,} characters")
    elif "/" in run or run.strip(".") == "":
        raise ValueError(f"run={run!r} is no folder of a study")
    return planned


def _typed(line: object, kinds: Mapping[str, type]) -> dict:
    """Return a mapping if its values have the types of `kinds`, else raise ValueError."""
    if not isinstance(line, dict):
        raise ValueError("not a line of a manifest")
    for key, kind in kinds.items():
        if key in line and type(line[key]) is not kind:
            raise ValueError("not a line of a manifest")
    return line


def shared_overrides(jobs: Iterable[list[str]]) -> set[str]:
    """Return the overrides that all jobs of a sweep have, and none for a single job."""
    overrides = [set(job) for job in jobs]
    return set.intersection(*overrides) if len(overrides) > 1 else set()


def own_overrides(planned: list[dict], number: int) -> list[str]:
    """Return the overrides that tell a planned job from the other jobs of its sweep."""
    shared = shared_overrides(job["overrides"] for job in planned)
    return [override for override in planned[number]["overrides"] if override not in shared]


def without_escapes(overrides: Iterable[str]) -> str:
    """Return overrides as a command line has them, without the escapes of Hydra's sweeper."""
    return ESCAPED.sub(r"\1", " ".join(overrides))


# -------------------------------------------------------------------------------- state of the runs
def jobs(study: Path) -> list[Job]:
    """Return the runs of a study's folder: first the planned runs, then runs without a plan.

    A job whose settings were refused is listed only if it belongs to the last sweep. Refused jobs
    of earlier sweeps were corrected or given up. Raises ValueError if there are no runs."""
    planned: dict[str, dict] = {}
    for entry in entries(study):
        if "command" in entry:
            planned = {run: job for run, job in planned.items() if "steps" in job}
        for job in entry.get("jobs", ()):
            if "same_as" not in job and is_of(job, study):
                planned[job["run"]] = job
        if entry.get("run") in planned and "reason" in entry:
            planned[entry["run"]]["reason"] = entry["reason"]
    existing = sorted(file.parent.name for file in study.glob("*-seed*/settings.yaml"))
    if not planned and not existing:
        raise ValueError(f"{study} holds no runs and no {MANIFEST}")
    names = dict.fromkeys([*planned, *existing])
    runs = [_job(study / name, planned.get(name)) for name in names]
    paces = [job.pace for job in runs if job.pace is not None]
    for job in runs:
        if job.pace is None and paces:
            job.pace = statistics.median(paces)
    return runs


def is_of(job: dict, study: Path) -> bool:
    """Return whether a planned job belongs to a study's folder.

    A sweep may have several studies. A job whose settings were refused has no folder, and is listed
    in all of them."""
    return "folder" not in job or Path(job["folder"]).parent.name == study.resolve().name


def _job(folder: Path, plan: dict | None) -> Job:
    """Return how far a run is.

    A run with a file that cannot be read counts as failed, and `reason` names the file."""
    if plan and "steps" not in plan:  # its settings were refused
        return Job(plan["run"], 0, plan["overrides"], "failed", reason=plan.get("reason", ""))
    steps = plan["steps"] if plan else 0
    rows = []
    unreadable = ""
    try:
        with contextlib.suppress(FileNotFoundError):
            rows = untrusted.last_rows(folder / METRICS_FILE, PACE_STEPS)
        if not plan:
            steps = _steps(folder / SETTINGS_FILE)
    except (OSError, ValueError) as error:
        unreadable = str(error)
    step = rows[-1]["step"] if rows else 0
    seconds = [_seconds(row) for row in rows if row.get("time/train_s") is not None]
    if unreadable:
        state = "failed"
        reason = unreadable
    else:
        state, reason = _state(folder, plan or {}, step, steps)
    reward, collapsed = rewards_of(folder / METRICS_FILE) if rows else (None, None)
    return Job(
        folder.name,
        steps,
        plan["overrides"] if plan else [],
        state,
        step,
        reward=reward,
        pace=statistics.mean(seconds) if seconds else None,
        reason=reason,
        collapsed=collapsed,
    )


def rewards_of(metrics: Path) -> tuple[float | None, int | None]:
    """Return a run's smoothed reward at its last step, and the step at which it collapsed.

    Each is None if the run has none. The rows are searched for two numbers, which takes a fiftieth
    of the time of parsing them."""
    rewards: dict[int, float | None] = {}
    try:
        for row in untrusted.read_lines(metrics, own_run_factor(metrics)):
            step = STEP.search(row)
            reward = REWARD.search(row)
            if step and reward and int(step[1]):
                rewards[int(step[1])] = None if reward[1] == b"null" else float(reward[1])
    # a line or a file is too long: the state of the run is known without its rewards
    except (OSError, ValueError):
        return None, None
    steps = sorted(rewards)
    series = [rewards[step] for step in steps]
    if not any(reward is not None for reward in series):
        return None, None
    index = collapse(series)
    return float(levels(series)[0][-1]), None if index is None else steps[index]


def _steps(settings: Path) -> int:
    """Return the number of steps that a run's settings ask for."""
    # `write_settings` gives it a line: reading that alone takes a tenth of the time
    if is_own_file(settings):
        lines = STEPS.findall(untrusted.read_bytes(settings, untrusted.MAX_SETTINGS_BYTES))
        if len(lines) == 1:
            return int(lines[0])
    steps = untrusted.read_yaml(settings).get("steps")
    if type(steps) is not int:
        raise ValueError(f"{settings}: steps={str(steps)[:40]} is no number of steps")
    return steps


def _seconds(row: dict) -> float:
    """Return how many seconds a step took."""
    return (row.get("time/waited_s") or 0.0) + row["time/train_s"]


def _state(folder: Path, plan: dict, step: int, steps: int) -> tuple[str, str]:
    """Return the state of a run, and the reason if it failed."""
    if not os.path.lexists(folder / SETTINGS_FILE):
        return ("failed", plan["reason"]) if plan.get("reason") else ("missing", "")
    if locked(folder):
        return "running", ""
    status = read_status(folder)
    how = status.get("how", "finished" if step >= steps else "died")
    if how == "finished" and step < steps:  # by an earlier sweep with fewer steps
        how = "stopped"
    if how in ("running", "rolled back"):
        how = "died"
    return how, status.get("reason", "")


# ----------------------------------------------------------------------------------------- in words
def upload(study: Path) -> str | None:
    """Return the command that uploads the runs of a study to W&B, None if the server has all.

    Segments that a newer segment of the same run replaces are marked as uploaded, and the command
    skips them."""
    files = study.glob("*/wandb/offline-run-*/run-*.wandb")
    if all(file.with_name(f"{file.name}.synced").exists() for file in files):
        return None
    return f"wandb sync {shlex.quote(os.path.relpath(study))}/*/wandb"


def table(runs: list[Job]) -> str:
    """Return a line per run, and a last line with the counts and the time left."""
    width = max(len(job.run) for job in runs)
    shared = shared_overrides(job.overrides for job in runs if job.overrides)
    lines = []
    for job in sorted(runs, key=lambda job: (job.state in UNFINISHED, job.run)):
        reward = "" if job.reward is None else f"reward {job.reward:.3f}"
        settings = without_escapes(
            override
            for override in job.overrides
            if not override.startswith("hydra") and override not in shared
        )
        fall = "" if job.collapsed is None else f"COLLAPSED at step {job.collapsed}; "
        progress = f"{job.state:<11} {job.step:>5}/{job.steps:<5} {reward:<13}"
        remark = job.reason or settings
        if job.state == ENDED_EARLY:
            remark = f"{settings} ({job.reason})"
        text = f"{job.run:<{width}}  {progress} {fall}{remark}"
        lines.append(escaping.escape_line(text).rstrip(" ;"))
    counts = {state: sum(job.state == state for job in runs) for state in (*ENDED, *UNFINISHED)}
    parallel = max(1, counts["running"])
    seconds = sum(job.seconds_left() for job in runs) / parallel
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    collapsed = sum(job.collapsed is not None for job in runs)
    if collapsed:
        states += f"; {collapsed} collapsed by the registered rule"
    last = f"{counted(len(runs), 'run')} (rewards are smoothed): {states}"
    if any(job.state in UNFINISHED for job in runs):
        last += f"; left with {parallel} at a time: {time_left(seconds)}"
    return "\n".join([*lines, last])


def time_left(seconds: float) -> str:
    """Return a time in words, such as "9 min" or "3:05 h"; "unknown" for NaN or infinity."""
    if 0 <= seconds < 3600:
        return f"{math.ceil(seconds / 60)} min"
    if 0 <= seconds < 1e9:
        return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d} h"
    return "unknown"


def forecast(planned: list[dict]) -> str:
    """Return the forecast of a sweep: a line per job, and a last line that counts the states.

    A job's line has its number, state, steps, folder, and the overrides that tell it from the
    others. Jobs whose settings are refused have the state "wrong"."""
    rows = []
    counts = Counter()
    for number, plan in enumerate(planned):
        overrides = without_escapes(own_overrides(planned, number))
        state = "wrong"
        progress = ""
        folder_or_reason = plan.get("folder") or plan["reason"]
        if "folder" in plan:
            job = _job(Path(plan["folder"]), plan)
            state = job.state
            progress = f"{job.step}/{job.steps}"
            if "same_as" in plan:
                state = "repeated"
                overrides = f"{overrides}: the same run as job {plan['same_as']}"
        counts[state] += 1
        rows.append([str(number), state, progress, folder_or_reason, overrides])
    lines = text_table(rows)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    left_alone = (*ENDED, "running", "repeated", "wrong")
    skipped = [state for state in left_alone if state in counts]
    others = "all are started"
    if skipped:
        others = f"those not {' or '.join(skipped)} are started"
    elif len(planned) == 1:
        others = "it is started"
    if any(plan.get("uncomposed") for plan in planned):
        others = "none is started, because Hydra composes all jobs before the first"
    number = counted(len(planned), "job")
    return "\n".join([*lines, f"{number}: {states}; without dry_run=true {others}"])
