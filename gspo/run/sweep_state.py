"""Finds out how far the runs of a sweep are, from the study's manifest and the run directories."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from gspo.io import escaping, untrusted
from gspo.io.files import locked, read_status
from gspo.io.ownership import own
from gspo.io.tables import text_table
from gspo.tracking.collapse import collapse, levels

# in a study's folder: one line per start of a sweep, and one per job that failed
MANIFEST = "manifest.jsonl"
UNFINISHED = ("running", "stopped", "died", "failed", "missing")
# the largest number of characters of a job's name, to which every line of the table is padded
LONGEST = 1000
STEPS = re.compile(rb"^steps: (\d{1,9})$", re.MULTILINE)
STEP = re.compile(rb'"step": (\d{1,9})[,}]')
REWARD = re.compile(rb'"reward/mean": (null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)[,}]')
PACE = 10  # how many of the last steps the pace is averaged over


@dataclass
class Job:
    """One run of a sweep, and how far it is."""

    run: str
    steps: int  # the number of steps that it is planned to make
    overrides: list[str]
    state: str  # finished | collapsed | running | stopped | died | failed | missing
    step: int = 0
    reward: float | None = None  # its mean reward, smoothed over the steps
    pace: float | None = None  # seconds per step
    reason: str = ""
    collapsed: int | None = None  # the step at which it collapsed by the registered rule

    def seconds_left(self) -> float:
        """Return the seconds that the run still needs, NaN if its pace is not known."""
        if self.state not in UNFINISHED:
            return 0.0
        return (self.steps - self.step) * (self.pace if self.pace is not None else float("nan"))


def jobs(study: Path) -> list[Job]:
    """Return the planned runs of a study's folder, then those that are there without a plan. Raises
    ValueError if there are none."""
    planned: dict[str, dict] = {}
    for entry in entries(study):
        planned |= {
            job["run"]: job
            for job in entry.get("jobs", ())
            if "same_as" not in job and is_of(job, study)
        }
        if entry.get("run") in planned and "reason" in entry:
            planned[entry["run"]]["reason"] = entry["reason"]
    there = sorted(p.parent.name for p in study.glob("*-seed*/settings.yaml"))
    if not planned and not there:
        raise ValueError(f"{study} holds no runs and no {MANIFEST}")
    names = [*planned, *(name for name in there if name not in planned)]
    found = [_job(study / name, planned.get(name)) for name in names]
    paces = [job.pace for job in found if job.pace is not None]
    for job in found:
        if job.pace is None and paces:
            job.pace = statistics.median(paces)
    return found


def is_of(job: dict, study: Path) -> bool:
    """Return whether a planned job belongs to a study's folder. A sweep may have jobs in several. A
    job whose settings were refused has no folder, and is listed in all of them."""
    return "folder" not in job or Path(job["folder"]).parent.name == study.resolve().name


def entries(study: Path) -> list[dict]:
    """Return the lines of the manifest, without those that a kill cut short or that have another
    form.
    """
    found = []
    try:
        for line in untrusted.read_objects(study / MANIFEST):
            with contextlib.suppress(ValueError):
                found.append(_entry(line))
    except FileNotFoundError:
        return []
    return found


def _entry(line: object) -> dict:
    """Return a line of the manifest with its types checked. Raises ValueError if it has another
    form.
    """
    entry = {"time": 0.0} | _typed(
        line, {"time": float, "run": str, "reason": str, "stopped": str, "jobs": list}
    )
    return entry | ({"jobs": [_planned(job) for job in entry["jobs"]]} if "jobs" in entry else {})


def _planned(job: object) -> dict:
    """Return a planned job with its types checked. Raises ValueError if it has another form."""
    kinds = {
        "run": str,
        "steps": int,
        "folder": str,
        "overrides": list,
        "reason": str,
        "same_as": int,
    }
    job = {"run": "", "overrides": []} | _typed(job, kinds)
    if not all(isinstance(override, str) for override in job["overrides"]):
        raise ValueError("not a job of a sweep")
    if len(job["run"]) > LONGEST:
        raise ValueError(f"run={job['run'][:40]!r} ...: a name of {len(job['run']):,} characters")
    # without steps its settings were refused
    if "steps" in job and ("/" in job["run"] or job["run"].strip(".") == ""):
        raise ValueError(f"run={job['run']!r} is no folder of a study")
    return job


def _typed(line: object, kinds: dict[str, type]) -> dict:
    """Return a mapping whose values have the types that `kinds` gives for their keys. Raises
    ValueError if not.
    """
    if not isinstance(line, dict) or any(
        type(line[key]) is not kind for key, kind in kinds.items() if key in line
    ):
        raise ValueError("not a line of a manifest")
    return line


def _job(folder: Path, plan: dict | None) -> Job:
    """Return how far a run is. If one of its files cannot be read, it counts as failed, and
    `reason` names the file.
    """
    if plan and "steps" not in plan:  # its settings were refused
        return Job(plan["run"], 0, plan["overrides"], "failed", reason=plan.get("reason", ""))
    wrong, rows, steps = "", [], plan["steps"] if plan else 0
    try:
        with contextlib.suppress(FileNotFoundError):
            rows = untrusted.last_rows(folder / "metrics.jsonl", PACE)
        steps = steps if plan else _steps(folder / "settings.yaml")
    except (OSError, ValueError) as error:
        wrong = str(error)
    step = rows[-1]["step"] if rows else 0
    seconds = [_seconds(row) for row in rows if row.get("time/train_s") is not None]
    state, reason = _state(folder, plan or {}, step, steps)
    state, reason = ("failed", wrong) if wrong else (state, reason)
    reward, collapsed = rewards_of(folder / "metrics.jsonl") if rows else (None, None)
    pace = statistics.mean(seconds) if seconds else None
    return Job(
        folder.name,
        steps,
        plan["overrides"] if plan else [],
        state,
        step,
        reward,
        pace,
        reason,
        collapsed,
    )


def rewards_of(metrics: Path) -> tuple[float | None, int | None]:
    """Return a run's smoothed reward at its last step, and the step at which it collapsed; None for
    what it does not have. The rows are searched for these two numbers, which takes a fiftieth of
    the time of reading them whole."""
    factor = untrusted.OWN if own(metrics.with_name("settings.yaml")) else 1
    rewards: dict[int, float | None] = {}
    try:
        for row in untrusted.lines(metrics, factor):
            step, reward = STEP.search(row), REWARD.search(row)
            if step and reward and int(step[1]):
                rewards[int(step[1])] = None if reward[1] == b"null" else float(reward[1])
    except (
        OSError,
        ValueError,
    ):  # a line that is too long, a file that is: the state is known all the same
        return None, None
    steps = sorted(rewards)
    series = [rewards[step] for step in steps]
    if not any(reward is not None for reward in series):
        return None, None
    at = collapse(series)
    return float(levels(series)[0][-1]), None if at is None else steps[at]


def _steps(settings: Path) -> int:
    """Return how many steps a run is to make, from its settings."""
    # `write_settings` gave it a line: reading that alone takes a tenth of the time
    if own(settings):
        lines = STEPS.findall(untrusted.read_bytes(settings, untrusted.SETTINGS))
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
    if not os.path.lexists(folder / "settings.yaml"):
        return ("failed", plan["reason"]) if plan.get("reason") else ("missing", "")
    if locked(folder):
        return "running", ""
    status = read_status(folder)
    how = status.get("how", "finished" if step >= steps else "died")
    if how == "finished" and step < steps:  # by an earlier sweep with fewer steps
        how = "stopped"
    return ("died" if how in ("running", "rolled back") else how), status.get("reason", "")


def upload(study: Path) -> str | None:
    """Return the command that uploads the runs of a study which W&B's server lacks, None if it
    lacks none.

    Segments that a newer one of the same run replaces are marked as uploaded, and the command skips
    them."""
    files = study.glob("*/wandb/offline-run-*/run-*.wandb")
    if all(file.with_name(f"{file.name}.synced").exists() for file in files):
        return None
    return f"wandb sync {shlex.quote(os.path.relpath(study))}/*/wandb"


def table(found: list[Job]) -> str:
    """Return one line per run, and a last one with the counts and the time left."""
    width = max(len(job.run) for job in found)
    with_overrides = [set(job.overrides) for job in found if job.overrides]
    common = set.intersection(*with_overrides) if len(with_overrides) > 1 else set()
    lines = []
    for job in sorted(found, key=lambda job: (job.state in UNFINISHED, job.run)):
        reward = "" if job.reward is None else f"reward {job.reward:.3f}"
        settings = " ".join(
            o for o in job.overrides if not o.startswith("hydra") and o not in common
        )
        fall = "" if job.collapsed is None else f"COLLAPSED at step {job.collapsed}; "
        progress = f"{job.state:<9} {job.step:>5}/{job.steps:<5} {reward:<13}"
        text = f"{job.run:<{width}}  {progress} {fall}{job.reason or settings}"
        lines.append(escaping.line(text).rstrip(" ;"))
    counts = {
        state: sum(job.state == state for job in found)
        for state in ("finished", "collapsed", *UNFINISHED)
    }
    parallel = max(1, counts["running"])
    left = sum(job.seconds_left() for job in found) / parallel
    clock = (
        "unknown" if not 0 <= left < 1e9 else f"{int(left // 3600)}:{int(left % 3600 // 60):02d} h"
    )
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    fallen = sum(job.collapsed is not None for job in found)
    states += f"; {fallen} of them collapsed" if fallen else ""
    said = f"{len(found)} runs (rewards are smoothed): {states}; left with {parallel} at a time: {clock}"
    return "\n".join([*lines, said])


def own_overrides(planned: list[dict], number: int) -> list[str]:
    """Return the overrides of a planned job that not all jobs of its sweep have."""
    common = (
        set.intersection(*(set(job["overrides"]) for job in planned)) if len(planned) > 1 else set()
    )
    return [override for override in planned[number]["overrides"] if override not in common]


def special(planned: list[dict], number: int) -> str:
    """Return the same as one text."""
    return " ".join(own_overrides(planned, number))


def forecast(planned: list[dict]) -> str:
    """Return what a sweep would do: one line per job, and a last line that counts the states.

    A job's line has its number, state, steps, folder, and the overrides that tell it from the
    others. Jobs whose settings are refused have the state "wrong"."""
    rows, counts = [], Counter()
    for number, plan in enumerate(planned):
        own = special(planned, number)
        if "folder" not in plan:
            state, steps, where = "wrong", "", plan["reason"]
        else:
            job = _job(Path(plan["folder"]), plan)
            state, steps, where = job.state, f"{job.step}/{job.steps}", plan["folder"]
            if "same_as" in plan:
                state, own = "repeated", f"{own}: the same run as job {plan['same_as']}"
        counts[state] += 1
        rows.append([str(number), state, steps, where, own])
    lines = text_table(rows)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    ended = [state for state in ("finished", "collapsed", "repeated", "wrong") if state in counts]
    others = f"those not {' or '.join(ended)} are started" if ended else "all are started"
    return "\n".join([*lines, f"{len(planned)} jobs: {states}; without dry_run=true {others}"])
