"""Read runs from run directories, W&B's offline files, or W&B's server, one Record each, cached as
Parquet.

    runs/paper_figures                       run directories below it (settings.yaml and
                                             metrics.jsonl)
    copied/wandb                             offline W&B files below it that lie in no run directory
    analysis/data/paper_figures.parquet      a study that recorded_study.py has written
    wandb:entity/project, ../group           W&B's API, whole histories (not the sampled ones); a
                                             group is a study

W&B's files inside a run directory are a view of it and are not read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
from gspo.analysis import wandb_files
from pyarrow import parquet

from gspo.io import untrusted
from gspo.io.files import replace_bytes
from gspo.io.ownership import is_own_file

SERVER = "wandb:"
# runs of W&B that hold a report's pictures, or the numbers of one evaluation
NOT_TRAINED = ("report", "eval")
KEY = b"gspo"  # the key of the metadata in a cache file
# a recorded study's suffix, and the key of its runs' settings
STUDY_FILE, STUDY_KEY = ".parquet", b"gspo.study"
RUN = "run"  # its column that says to which of these runs a row belongs


@dataclass
class Record:
    """One run as recorded: its settings, flat as in {"optim.lr": 0.001}, a row per step, and notes
    on what was damaged."""

    path: Path
    settings: dict[str, object]
    rows: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    id: str = ""  # W&B's
    job: str = "train"  # its job type at W&B; NOT_TRAINED names those that are no training


def records(path: Path | str) -> list[Record]:
    """Return all runs of one source. Raises FileNotFoundError, or ValueError with one line."""
    if str(path).startswith(SERVER):
        return server(str(path).removeprefix(SERVER))
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix == STUDY_FILE and path.is_file():
        return recorded_study(path)
    files = sorted(path.rglob("settings.yaml"))
    folders = [file.parent for file in files if os.path.lexists(file.parent / "metrics.jsonl")]
    found = []
    for folder in folders:
        read = [folder / "settings.yaml", folder / "metrics.jsonl"]
        record = cached(
            str(read[0].resolve()), stamp(read), lambda folder=folder: from_folder(folder)
        )
        found.append(replace(record, path=folder))  # under the name that was given this time
    within = {folder.resolve() for folder in folders}
    there = [file for file in path.rglob("*.wandb") if file.is_file()] if path.is_dir() else [path]
    files = {file.resolve() for file in there}
    # .../wandb/offline-run-<time>-<id>/run-<id>.wandb: the folders' names sort by the time of their
    # start
    files = {file for file in files if not within & set(file.parents) and not _a_copy(file)}
    segments = sorted(files, key=lambda file: (file.parent.parent, file.parent.name))
    read = [cached(str(f), stamp([f]), lambda f=f: from_file(f)) for f in segments]
    return found + joined([segment for segment in read if segment.job not in NOT_TRAINED])


def _a_copy(file: Path) -> bool:
    """Return whether this is a copy of W&B's link to the latest run, which became a folder because
    the copy followed links."""
    return file.parent.name == "latest-run" and any(file.parent.parent.glob(f"*-run-*/{file.name}"))


def stamp(files: list[Path]) -> list:
    """Return what changes when one of the files does: name, size, and time of the last change."""
    return [[str(file.resolve()), file.lstat().st_size, file.lstat().st_mtime_ns] for file in files]


# ----------------------------------------------------------------------------------------------------
# run directories
def from_folder(folder: Path) -> Record:
    """Read a run directory. What can be read is read and the rest is noted; nothing in its files
    raises.
    """
    notes: list[str] = []
    settings, rows = (
        read_settings(folder / "settings.yaml", notes),
        numeric_rows(folder / "metrics.jsonl", notes),
    )
    return Record(folder, flatten(settings), pd.DataFrame(rows), notes)


def read_settings(file: Path, notes: list[str]) -> dict:
    """Return the settings of settings.yaml; an unreadable file gives a note and no settings."""
    try:
        return untrusted.read_yaml(file)
    except (OSError, untrusted.Unreadable) as error:
        notes.append(str(error))
        return {}


def numeric_rows(file: Path, notes: list[str]) -> list[dict]:
    """Return the rows of metrics.jsonl, each a step and numbers; null (a NaN or infinity when
    written) becomes NaN. Cut and damaged lines are left out, and noted."""
    try:
        rows, damaged = untrusted.read_rows(
            file, untrusted.OWN_RUN_FACTOR if is_own_file(file.with_name("settings.yaml")) else 1
        )
    except (OSError, untrusted.Unreadable) as error:
        notes.append(str(error))
        return []
    if damaged:
        some = ", ".join(str(number) for number, _ in damaged[:10]) + (
            ", ..." if len(damaged) > 10 else ""
        )
        notes.append(f"{file}: lines left out that are no rows: {some}")
    return [wandb_files.numbers(row) for row in rows]


def flatten(tree: dict, prefix: str = "") -> dict[str, object]:
    """Return nested settings as {"optim.lr": 0.001, ...}; lists become text."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value) if isinstance(value, list) else value
    return flat


# -------------------------------------------------------------------------------------------------------
# W&B's files
def from_file(file: Path) -> Record:
    """Read one offline W&B file, which holds a run or one segment of it."""
    segment = wandb_files.read(file)
    rows = pd.DataFrame([{"step": step} | row for step, row in sorted(segment.rows.items())])
    notes = [f"{file}: {what}" for what in segment.damage]
    return Record(
        Path(segment.name or file), flatten(segment.config), rows, notes, segment.id, segment.job
    )


def joined(segments: list[Record]) -> list[Record]:
    """Return one record per run, from segments in the order of their start. Segments with the same
    id are joined, and the later row of a step counts. Of runs with one study and name but different
    ids, the newest counts: a run that was rolled back goes on under a new id."""
    runs: dict[tuple[object, Path], Record] = {}
    for segment in segments:
        key = (segment.settings.get("study"), segment.path)
        before = runs.get(key)
        if before is not None and before.id == segment.id:
            rows = pd.concat([before.rows, segment.rows], ignore_index=True)
            if len(rows):
                rows = rows.drop_duplicates("step", keep="last").sort_values(
                    "step", ignore_index=True
                )
            settings, notes = before.settings | segment.settings, before.notes + segment.notes
            segment = Record(segment.path, settings, rows, notes, segment.id)
        elif before is not None:
            segment.notes.append(
                f"{segment.path}: two W&B runs, {before.id} and {segment.id}; the newer one counts"
            )
        runs[key] = segment
    return list(runs.values())


# ---------------------------------------------------------------------------------------------------
# recorded studies
def recorded_study(file: Path) -> list[Record]:
    """Read the runs of a study's Parquet file, under the paths <file>/<run>. Raises ValueError in
    one line if it is no such file."""
    try:
        table = parquet.read_table(file)
        about = json.loads(table.schema.metadata[STUDY_KEY])
        rows = {str(name): frame for name, frame in table.to_pandas().groupby(RUN, observed=True)}
        found = []
        for name, own in sorted(about["runs"].items()):
            numbers = rows[name].select_dtypes("number").dropna(axis="columns", how="all")
            numbers = numbers.astype({"step": "int64"}).reset_index(drop=True)
            found.append(Record(file / name, about["common"] | own, numbers))
        return found
    except (KeyError, ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{file} is no study that analysis/recorded_study.py has written: {reason}"
        ) from None


# ------------------------------------------------------------------------------------------------------
# W&B's server
def server(address: str) -> list[Record]:
    """Return the runs of entity/project[/group] from W&B's API, with all rows. Raises ValueError
    without an account.
    """
    import wandb  # imported here because it takes a second
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError

    entity, _, rest = address.partition("/")
    project, _, group = rest.partition("/")
    if not entity or not project:
        raise ValueError(
            f"{SERVER}{address}: write {SERVER}ENTITY/PROJECT or {SERVER}ENTITY/PROJECT/GROUP"
        )
    host = wandb.Settings().base_url
    if not signed_in():
        raise ValueError(
            f"{SERVER}{address}: no W&B account is configured on this machine: wandb login"
        )
    try:
        runs = list(
            wandb.Api().runs(f"{entity}/{project}", filters={"group": group} if group else None)
        )
        trained = [run for run in runs if run.job_type not in NOT_TRAINED]
        return [
            cached(
                f"{host}/{address}/{run.id}",
                [
                    run.state,
                    run.lastHistoryStep,
                    run.name,
                    json.dumps(run.config, sort_keys=True, default=str),
                ],
                lambda run=run: from_server(run),
            )
            for run in trained
        ]
    except (wandb.Error, WandbApiFailedError) as error:
        raise ValueError(f"{SERVER}{address}: {error}") from error


def signed_in() -> bool:
    """Return whether a W&B account is configured; without one W&B would ask for a key at the
    terminal.
    """
    import wandb
    from requests.utils import get_netrc_auth

    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(wandb.Settings().base_url))


def from_server(run: object) -> Record:
    """Read a run of the API. `scan_history` gives every row, whereas `history` gives 500 sampled
    ones.
    """
    rows: dict[int, dict[str, float]] = {}
    for row in run.scan_history(page_size=10_000):
        step = row.pop("step", None)
        if untrusted.is_step(step):
            rows.setdefault(step, {}).update(wandb_files.numbers(row))
    frame = pd.DataFrame([{"step": step} | row for step, row in sorted(rows.items())])
    settings = {key: value for key, value in run.config.items() if key != "_wandb"}
    # WANDB_NAME may have replaced the run's name
    name = wandb_files.recorded_name(settings) or run.name
    return Record(Path(name), flatten(settings), frame, id=run.id)


# ---------------------------------------------------------------------------------------------------------------
# cache
def cached(name: str, stamp: list, make: Callable[[], Record]) -> Record:
    """Return what `make` gives, and keep it under this name as Parquet in the user's cache folder
    until the stamp changes."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "gspo"
    kept = base / (hashlib.sha256(os.fsencode(name)).hexdigest()[:20] + ".parquet")
    try:
        table = parquet.read_table(kept)
        said = json.loads(table.schema.metadata[KEY])
        if said["stamp"] == stamp:
            about = said["notes"], said["id"], said["job"]
            return Record(Path(said["path"]), said["settings"], table.to_pandas(), *about)
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException):
        pass  # there is none yet, or it is damaged or of another form, so it is made again
    record = make()
    if len(record.rows):
        _keep(record, kept, {"stamp": stamp, "path": str(record.path)})
    return record


def _keep(record: Record, kept: Path, said: dict[str, object]) -> None:
    """Write the cache file beside its name and rename it. If the folder cannot be written, only
    time is lost.
    """
    said |= {"settings": record.settings, "notes": record.notes, "id": record.id, "job": record.job}
    table = pa.Table.from_pandas(record.rows, preserve_index=False)
    table = table.replace_schema_metadata(
        {**(table.schema.metadata or {}), KEY: json.dumps(said, default=str)}
    )
    file = io.BytesIO()
    parquet.write_table(table, file, compression="zstd")
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(kept, file.getvalue())
