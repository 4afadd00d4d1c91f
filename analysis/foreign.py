"""Runs of other frameworks as ours: `read_foreign` of one log, and records for every figure.

    from gspo.analysis.foreign import read_foreign
    run = read_foreign("outputs/checkpoint-500")
    run = read_foreign("verl_file_logger.jsonl", objective="gspo")

A log rarely says all that a comparison needs. A file foreign_run.yaml beside the log, or one folder
above it, says the rest:

    framework: trl            # only if the names do not tell
    objective: gspo
    updates_per_batch: 4      # optimizer steps of a rollout batch
    seed: 3
    steps: 500                # planned rollout batches
    study: my_study
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from gspo.analysis import foreign_files
from gspo.io import untrusted
from gspo.tracking.frameworks.known import TABLES
from gspo.tracking.frameworks.translate import ForeignRun, Log, translate

ABOUT = "foreign_run.yaml"
# the settings of a record that only runs of other frameworks have
FRAMEWORK = "framework"
BATCHES_PER_ROW = "batches_per_row"
END = "end"
END_UNKNOWN = "end not logged"


@dataclass(frozen=True)
class About:
    """What a user says of a run that its log does not say. 0, None and "" leave it to the log."""

    framework: str = ""
    objective: str = ""
    updates_per_batch: int = 0
    seed: int | None = None
    steps: int = 0
    study: str = ""


def read_foreign(
    path: Path | str, framework: str = "", updates_per_batch: int = 0, objective: str = ""
) -> ForeignRun:
    """Return the run of another framework whose log is this file or folder.

    What is not given is taken from foreign_run.yaml beside the log, from the run's configuration,
    and from the names of its metrics. Raises ValueError, in a single line, if nothing can be read,
    if the folder holds several logs, or if the framework cannot be told."""
    notes: list[str] = []
    logs = foreign_files.find_logs(Path(path), (), notes)
    wandb = [Path(path)] if Path(path).suffix == ".wandb" else _wandb_files(Path(path))
    files = [*logs, *(file for file in wandb if file not in logs)]
    if len(files) > 1:
        names = ", ".join(str(file) for file in files[:5])
        raise ValueError(f"{path} holds {len(files)} logs: name one ({names})")
    if not files:
        raise ValueError(f"{path}: {foreign_files.content_of(Path(path))}")
    run, _ = translated(
        foreign_files.read_log(files[0]),
        About(framework, objective, updates_per_batch),
    )
    run.notes += notes
    return run


def _wandb_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.wandb")) if path.is_dir() else []


def translated(log: Log, said: About = About()) -> tuple[ForeignRun, About]:
    """Return a log's run, and what the user says of it here and in foreign_run.yaml."""
    about = read_about(log.path)
    fields = {name: value for name, value in dataclasses.asdict(said).items() if value}
    about = dataclasses.replace(about, **fields)
    run = translate(log, about.framework, about.updates_per_batch, about.objective)
    run.planned = about.steps or run.planned
    return run, about


def read_about(log: Path) -> About:
    """Return what foreign_run.yaml says of a log. Raises Unreadable if it cannot be used."""
    folder = log if log.is_dir() else log.parent
    for candidate in (folder / ABOUT, folder.parent / ABOUT):
        if candidate.is_file():
            break
    else:
        return About()
    values = untrusted.read_yaml(candidate)
    kinds = {"framework": str, "objective": str, "study": str}
    for key, value in values.items():
        kind = kinds.get(key, int)
        if key not in About.__dataclass_fields__:
            keys = ", ".join(About.__dataclass_fields__)
            raise untrusted.Unreadable(f"{candidate}: {key[:40]} is unknown. It may have {keys}")
        if type(value) is not kind or (kind is int and not 0 <= value <= untrusted.MAX_STEP):
            raise untrusted.Unreadable(
                f"{candidate}: {key}={str(value)[:40]} is no {kind.__name__}"
            )
    return About(**values)


def version() -> str:
    """Return a digest of all tables: rows that were cached under other tables are read again."""
    return hashlib.sha256(repr(TABLES).encode()).hexdigest()[:16]


def settings_of(run: ForeignRun, about: About, notes: list[str]) -> dict[str, object]:
    """Return the settings by which figures and tables know the run."""
    settings = dict(run.settings)
    table = TABLES[run.framework]
    last = int(run.rows[-1]["step"])
    seed = about.seed if about.seed is not None else settings.get("seed")
    if type(seed) is not int:
        notes.append(f"{run.path}: its seed is not logged, taken as 0 ({ABOUT}: seed)")
        seed = 0
    objective = run.objective
    if not objective:
        name = run.path.name if run.path.is_dir() else run.path.parent.name
        objective = f"not logged, {name or run.path.stem}"
    if not run.planned:
        settings[END] = END_UNKNOWN
    return settings | {
        FRAMEWORK: table.title,
        BATCHES_PER_ROW: run.batches_per_row,
        "seed": seed,
        "objective.name": objective,
        "steps": max(run.planned, 1) if run.planned else max(last, 1),
        "study": about.study or run.framework,
    }


def frame_of(run: ForeignRun) -> pd.DataFrame:
    """Return the run's rows as a table."""
    return pd.DataFrame(run.rows).astype({"step": "int64"})
