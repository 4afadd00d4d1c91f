"""Read runs from run directories, W&B's files or server, or the logs of other frameworks.

Each run is a Record. The sources are:

    runs/paper_figures                       run directories below it (settings.yaml and
                                             metrics.jsonl)
    copied/wandb                             offline W&B files below it that lie in no run directory
    analysis/data/paper_figures.parquet      a study that recorded_study.py has written
    wandb:entity/project, ../group, ../id    W&B's API, whole histories (not the sampled ones); a
                                             group is a study
    outputs/checkpoint-500                   logs of other frameworks (foreign_files.py)

W&B's files inside a run directory are a view of it and are not read again. Runs of ours are cached
as Parquet.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from gspo.analysis import foreign, foreign_files, foreign_search, wandb_files
from gspo.analysis.record_cache import Record, cached, cached_copy, keep
from gspo.io import untrusted
from gspo.io.files import METRICS_FILE, SETTINGS_FILE
from gspo.io.nested import dotted
from gspo.io.rows import own_run_factor
from gspo.tracking.foreign_options import NOTHING_SAID, ForeignOptions
from gspo.tracking.frameworks.translate import ForeignRun, Log
from gspo.tracking.wandb_choice import account

SERVER = "wandb:"
# runs of W&B that hold a report's pictures, or the numbers of one evaluation
NOT_TRAINED = ("report", "eval")
# a recorded study: its file's suffix, the key of its settings, and the column with the run's name
STUDY_FILE = ".parquet"
STUDY_KEY = b"gspo.study"
RUN = "run"
MAX_DAMAGED_NAMED = 10  # damaged lines that a note names


def records(path: Path | str, options: ForeignOptions = NOTHING_SAID) -> list[Record]:
    """Return all runs of a source. Raises FileNotFoundError, or ValueError with a single line.

    The options apply to its runs of other frameworks alone."""
    if is_server(path):
        return server(str(path), options)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix == STUDY_FILE and path.is_file():
        return recorded_study(path)
    run_folders = set()
    run_records = []
    for settings_file in sorted(path.rglob(SETTINGS_FILE)):
        folder = settings_file.parent
        metrics_file = folder / METRICS_FILE
        if not os.path.lexists(metrics_file):
            if not any(folder.rglob("*.wandb")):
                run_records.append(_without_rows(folder))
            continue
        run_folders.add(folder.resolve())
        stamp = file_stamp(settings_file, metrics_file)
        name = str(settings_file.resolve())
        record = cached(name, stamp, from_folder, folder)
        run_records.append(replace(record, path=folder))  # under the path of this call
    segments = []
    foreign_segments = []
    not_trained = 0
    for file in foreign_search.wandb_segments(path, run_folders):
        stamp = file_stamp(file)
        record = cached_copy(str(file), stamp)
        if record is None:
            segment = wandb_files.read(file)
            if segment.records:
                foreign_segments.append(segment)
                continue
            record = from_segment(segment)
            keep(record, str(file), stamp)
        if record.job in NOT_TRAINED:
            not_trained += 1
        else:
            segments.append(record)
    logs = foreign_files.wandb_logs(foreign_segments)
    all_records = run_records + joined(segments)
    all_records += foreign_records(path, run_folders, logs, options)
    if not_trained and not all_records:
        note = f"{path}: W&B files of reports and evaluations, which train nothing: {not_trained}"
        return [Record(path, {}, pd.DataFrame(), [note])]
    return all_records


def _without_rows(folder: Path) -> Record:
    """Return the record of a run directory that has no metrics.jsonl yet."""
    notes: list[str] = []
    settings = read_settings(folder / SETTINGS_FILE, notes)
    return Record(folder, flatten(settings), pd.DataFrame(), notes)


def foreign_records(
    path: Path, run_folders: set[Path], logs: list[Log], options: ForeignOptions
) -> list[Record]:
    """Return the runs of other frameworks: of these logs of W&B, and of the others at a path.

    An unreadable log becomes a record without rows, with a note."""
    notes: list[str] = []
    other_logs, unreadable = foreign.read_logs(path, run_folders, notes)
    runs, untranslated = foreign.translated(logs + other_logs, options)
    unreadable += untranslated
    log_records = [Record(log.path, {}, pd.DataFrame(), log.notes) for log in unreadable]
    log_records += [foreign_record(run, about) for run, about in runs]
    if notes:
        log_records.append(Record(path, {}, pd.DataFrame(), notes))
    return log_records


def foreign_record(run: ForeignRun, about: foreign.About, id: str = "") -> Record:
    """Return a run of another framework as a record."""
    settings, rows, notes = foreign.described(run, about)
    return Record(run.path, settings, rows, notes, id)


def file_stamp(*files: Path) -> list:
    """Return name, size and time of the last change of each file."""
    stamps = []
    for file in files:
        name = str(file.resolve())
        status = file.lstat()
        stamps.append([name, status.st_size, status.st_mtime_ns])
    return stamps


# ------------------------------------------------------------------------------------------------
# run directories
def from_folder(folder: Path) -> Record:
    """Read a run directory. Unreadable parts become notes; nothing in its files raises."""
    notes: list[str] = []
    settings = read_settings(folder / SETTINGS_FILE, notes)
    rows = numeric_rows(folder / METRICS_FILE, notes)
    return Record(folder, flatten(settings), pd.DataFrame(rows), notes)


def read_settings(file: Path, notes: list[str]) -> dict:
    """Return the settings of settings.yaml; an unreadable file gives a note and no settings."""
    try:
        return untrusted.read_yaml(file)
    except (OSError, untrusted.Unreadable) as error:
        notes.append(str(error))
        return {}


def numeric_rows(file: Path, notes: list[str]) -> list[dict]:
    """Return the rows of metrics.jsonl, each a step and numbers.

    null (a NaN or infinity when written) becomes NaN. Cut and damaged lines are left out, and
    noted.
    """
    try:
        rows, damaged = untrusted.read_bounded_rows(file, own_run_factor(file))
    except (OSError, untrusted.Unreadable) as error:
        notes.append(str(error))
        return []
    if damaged:
        numbers = [str(number) for number, _ in damaged[:MAX_DAMAGED_NAMED]]
        if len(damaged) > MAX_DAMAGED_NAMED:
            numbers.append("...")
        notes.append(f"{file}: lines left out that are no rows: {', '.join(numbers)}")
    return [wandb_files.numbers(row) for row in rows]


def flatten(tree: dict) -> dict[str, object]:
    """Return nested settings as {"optim.lr": 0.001, ...}; lists become text."""
    flat: dict[str, object] = {}
    for key, value in dotted(tree).items():
        if not isinstance(value, dict):
            flat[key] = str(value) if isinstance(value, list) else value
    return flat


# ------------------------------------------------------------------------------------------------
# W&B's files
def from_segment(segment: wandb_files.Segment) -> Record:
    """Return the content of an offline W&B file, a run of ours or a segment of it, as a record."""
    return Record(
        path=Path(segment.name or segment.path),
        settings=flatten(segment.config),
        rows=frame_of(segment.rows),
        notes=[f"{segment.path}: {damage}" for damage in segment.damage],
        id=segment.id,
        job=segment.job,
    )


def frame_of(rows_by_step: dict[int, dict[str, float]]) -> pd.DataFrame:
    """Return a row per step, with the column step."""
    rows = []
    for step in sorted(rows_by_step):
        rows.append({"step": step} | rows_by_step[step])
    return pd.DataFrame(rows)


def joined(segments: list[Record]) -> list[Record]:
    """Return a record per run, from segments in the order of their start.

    Segments with the same id are joined, and the later row of a step counts. Of runs with the same
    study and name but different ids, the newest counts: a run that was rolled back goes on under a
    new id.
    """
    runs: dict[tuple[object, Path], Record] = {}
    for segment in segments:
        key = (segment.settings.get("study"), segment.path)
        earlier = runs.get(key)
        if earlier is not None and earlier.id == segment.id:
            # without the copy the frame is fragmented, and pandas warns when a column is added
            rows = pd.concat([earlier.rows, segment.rows], ignore_index=True).copy()
            if len(rows):
                rows = rows.drop_duplicates("step", keep="last")
                rows = rows.sort_values("step", ignore_index=True)
            settings = earlier.settings | segment.settings
            notes = earlier.notes + segment.notes
            segment = Record(segment.path, settings, rows, notes, segment.id)
        elif earlier is not None:
            ids = f"{earlier.id} and {segment.id}"
            segment.notes.append(f"{segment.path}: two W&B runs, {ids}; the newer one counts")
        runs[key] = segment
    return list(runs.values())


# ------------------------------------------------------------------------------------------------
# recorded studies
def recorded_study(file: Path) -> list[Record]:
    """Read the runs of a study's Parquet file, under the paths <file>/<run>.

    Raises ValueError in a single line if it is no such file.
    """
    try:
        table = parquet.read_table(file)
        about = json.loads(table.schema.metadata[STUDY_KEY])
        frame = table.to_pandas()
        names = frame[RUN]
        numbers = frame.select_dtypes("number").astype({"step": "int64"})
        rows = {str(name): group for name, group in numbers.groupby(names, observed=True)}
        runs = []
        for name, run_settings in sorted(about["runs"].items()):
            numbers = rows[name].dropna(axis="columns", how="all").reset_index(drop=True)
            settings = about["common"] | run_settings
            runs.append(Record(file / name, settings, numbers))
        return runs
    except (KeyError, ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{file} is no study that analysis/recorded_study.py has written: {reason}"
        ) from None


# ------------------------------------------------------------------------------------------------
# W&B's server
def is_server(path: Path | str) -> bool:
    """Return whether a source is an address of W&B's server."""
    return str(path).startswith(SERVER)


def server(source: str, options: ForeignOptions = NOTHING_SAID) -> list[Record]:
    """Return the runs of wandb:ENTITY/PROJECT[/GROUP or /RUN_ID] from W&B's API, with all rows.

    Raises ValueError without an account.
    """
    import wandb

    host = wandb.Settings().base_url
    address = source.removeprefix(SERVER)
    run_records = []
    with server_errors(source):
        for run in server_runs(source):
            config = json.dumps(run.config, sort_keys=True, default=str)
            stamp = [run.state, run.lastHistoryStep, run.name, config, foreign.version()]
            if not wandb_files.is_ours(run.config):
                stamp.append(options.given())
            name = f"{host}/{address}/{run.id}"
            read = partial(from_server, options=options)
            run_records.append(cached(name, stamp, read, run))
    return run_records


def foreign_server_runs(
    source: str, options: ForeignOptions
) -> tuple[list[ForeignRun], list[str], list[str]]:
    """Return the runs of other frameworks among those of W&B's server.

    The second list tells why others could not be read, the third names the runs of ours."""
    runs = []
    problems = []
    ours = []
    with server_errors(source):
        for run in server_runs(source):
            if wandb_files.is_ours(run.config):
                ours.append(run.name)
                continue
            try:
                foreign_run, _ = foreign_server_run(run, server_segment(run), options)
                runs.append(foreign_run)
            except ValueError as error:
                problems.append(str(error))
    return runs, problems, ours


def server_runs(source: str) -> list:
    """Return the training runs of wandb:ENTITY/PROJECT[/GROUP] as W&B's API has them.

    If no run has the group, it may be the id of a run.

    Raises ValueError without an account, and if the address has another form."""
    import wandb  # imported here because it takes a second

    entity, _, rest = source.removeprefix(SERVER).partition("/")
    project, _, group = rest.partition("/")
    if not entity or not project:
        raise ValueError(
            f"{source}: write {SERVER}ENTITY/PROJECT, and /GROUP or /RUN_ID for a part of its runs"
        )
    if not account():  # W&B would ask for a key at the terminal
        raise ValueError(f"{source}: no W&B account is configured on this machine: wandb login")
    api = wandb.Api()
    filters = {"group": group} if group else None
    runs = list(api.runs(f"{entity}/{project}", filters=filters))
    if group and not runs:
        runs = list(api.runs(f"{entity}/{project}", filters={"name": group}))
    return [run for run in runs if run.job_type not in NOT_TRAINED]


@contextlib.contextmanager
def server_errors(source: str) -> Iterator[None]:
    """Make a ValueError of a single line of an error of W&B's API."""
    import wandb
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError

    try:
        yield
    except (wandb.Error, WandbApiFailedError) as error:
        raise ValueError(f"{source}: {error}") from error


def from_server(run: object, options: ForeignOptions = NOTHING_SAID) -> Record:
    """Read a run of the API."""
    segment = server_segment(run)
    if segment.records:
        try:
            foreign_run, about = foreign_server_run(run, segment, options)
            return foreign_record(foreign_run, about, run.id)
        except ValueError as error:
            return Record(segment.path, {}, pd.DataFrame(), [str(error)])
    settings = dict(segment.config)
    # WANDB_NAME may have replaced the run's name
    name = wandb_files.recorded_name(settings) or run.name
    notes = []
    if segment.without_step:
        notes.append(f"{name}: left out: {segment.without_step} records without a step")
    return Record(Path(name), flatten(settings), frame_of(segment.rows), notes, id=run.id)


def server_segment(run: object) -> wandb_files.Segment:
    """Return the whole history of a run of the API.

    `scan_history` gives every row, `history` 500 sampled rows."""
    settings = dict(run.config)
    settings.pop("_wandb", None)
    # several runs may have the same name
    name = run.name if wandb_files.may_be_a_name(run.name) else "run"
    segment = wandb_files.Segment(Path(name) / run.id, id=run.id, config=settings)
    for row in run.scan_history(page_size=10_000):
        segment.add(dict(row))
    return segment


def foreign_server_run(
    run: object, segment: wandb_files.Segment, options: ForeignOptions
) -> tuple[ForeignRun, foreign.About]:
    """Return a run of another framework of the API. Raises ValueError if it cannot be read.

    No file of this machine says anything of it."""
    about = foreign.About(**options.given())
    return foreign.translated_alone(foreign_files.wandb_log([segment]), about), about
