"""Runs of other frameworks as ours: `read_foreign` of a log, and records for every figure.

    from gspo.analysis.foreign import read_foreign
    run = read_foreign("outputs/checkpoint-500")
    run = read_foreign("verl_file_logger.jsonl", objective="gspo")

A log rarely says all that a comparison needs. A file foreign_run.yaml beside the log, or a folder
above it, says the rest. If a folder has logs of several runs, NAME.foreign_run.yaml is about
NAME.jsonl alone:

    framework: trl            # only if the names do not tell
    objective: gspo
    updates_per_batch: 4      # optimizer steps of a rollout batch
    seed: 3
    steps: 500                # planned rollout batches
    study: my_study

A trainer of your own is read if the file says which of its metrics are ours:

    names: {train/avg_reward: reward/mean, train/grad: optim/grad_norm}
    step: global_step         # the key of its steps, and what they count
    counts: updates
"""

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pandas as pd

from gspo.analysis import foreign_files, foreign_joining, foreign_search, wandb_files
from gspo.analysis.foreign_search import ABOUT
from gspo.io import untrusted
from gspo.tracking import frameworks
from gspo.tracking.foreign_options import NOTHING_SAID, ForeignOptions
from gspo.tracking.frameworks.columns import listed
from gspo.tracking.frameworks.known import TABLES
from gspo.tracking.frameworks.own import own_table
from gspo.tracking.frameworks.table import AXIS_COUNTS, Table
from gspo.tracking.frameworks.translate import ForeignRun, Log, translate

# the settings of a record that only runs of other frameworks have
FRAMEWORK = "framework"
BATCHES_PER_ROW = "batches_per_row"
END = "end"
END_UNKNOWN = "end not logged"
LOG = "log"  # the end of the log's path, by which runs are told apart that nothing else tells apart
KINDS_IN_WORDS = {int: "a whole number of 0 or more", str: "a text", dict: "pairs of names"}
OF_THE_LOG = (BATCHES_PER_ROW, END, LOG)  # these do not make an arm


@dataclass(frozen=True)
class About:
    """What a user says of a run that its log does not say. 0, None and "" leave it to the log."""

    framework: str = ""
    objective: str = ""
    updates_per_batch: int = 0
    seed: int | None = None
    steps: int = 0
    study: str = ""
    names: dict[object, object] = field(default_factory=dict)  # of a trainer of one's own: ours
    step: str = ""  # the key of its steps
    counts: str = ""  # what its steps count: batches or updates


@dataclass(frozen=True)
class UnreadableLog:
    """A log of which nothing can be read, and the reasons."""

    path: Path
    notes: list[str]


def read_foreign(
    path: Path | str, framework: str = "", updates_per_batch: int = 0, objective: str = ""
) -> ForeignRun:
    """Return the run of another framework whose log is this file or folder.

    What is not given is taken from foreign_run.yaml beside the log, from the run's configuration,
    and from the names of its metrics. Raises ValueError, in a single line, if nothing can be read,
    if the folder holds several runs, or if the framework cannot be told."""
    options = ForeignOptions(
        framework=framework, updates_per_batch=updates_per_batch, objective=objective
    )
    runs, problems, notes = read_foreign_runs(path, options)
    if len(runs) + len(problems) > 1:
        names = ", ".join([*(str(run.path) for run in runs), *problems])
        raise ValueError(f"{path} holds {len(runs) + len(problems)} logs: name one ({names[:500]})")
    if problems:
        raise ValueError("; ".join([*problems, *notes]))
    runs[0].notes += notes
    return runs[0]


def read_foreign_runs(
    path: Path | str, options: ForeignOptions = NOTHING_SAID
) -> tuple[list[ForeignRun], list[str], list[str]]:
    """Return the runs of all logs at or below a path, why others could not be read, and notes.

    The runs and the reasons are never empty together. The notes are about files that are no logs
    of a run, and that a user may take for some."""
    path = Path(path)
    notes: list[str] = []
    problems = []
    segments = []
    for file in foreign_search.wandb_segments(path, set()):
        segment = wandb_files.read(file)
        if segment.rows:
            problems.append(foreign_files.own_run(segment))
        else:
            segments.append(segment)
    logs = foreign_files.wandb_logs(segments)
    other_logs, unreadable = read_logs(path, (), notes)
    runs, untranslated = translated(logs + other_logs, options)
    problems += [log.notes[-1] for log in unreadable + untranslated]
    if not runs and not problems:
        problems += notes or [f"{path}: {foreign_search.content_of(path)}"]
        notes = []
    return [run for run, _ in runs], problems, notes


def read_logs(
    path: Path, own_runs: Collection[Path], notes: list[str]
) -> tuple[list[Log], list[UnreadableLog]]:
    """Return the logs of other frameworks at a path that are no logs of W&B, and those not read.

    The folders `own_runs` are left out. `notes` gets what else is left out."""
    logs = []
    unreadable = []
    for file in foreign_search.find_logs(path, own_runs, notes):
        if file.suffix == ".wandb":
            continue
        try:
            logs.append(foreign_files.read_log(file))
        except (OSError, ValueError) as error:
            unreadable.append(UnreadableLog(file, [str(error)]))
    return logs, unreadable


def translated(
    logs: list[Log], options: ForeignOptions = NOTHING_SAID
) -> tuple[list[tuple[ForeignRun, About]], list[UnreadableLog]]:
    """Return the runs of these logs with what the user says of each, and the unreadable logs.

    The options count before foreign_run.yaml. Logs of the same run in one folder are a run."""
    runs = []
    unreadable = []
    readable = []
    named_frameworks = []
    for log in logs:
        try:
            about = read_about(log.path)
            framework = options.framework or about.framework
            log.table = table_of_own(about, framework, log)
            named_frameworks.append(framework)
            readable.append(log)
        except (OSError, ValueError) as error:
            unreadable.append(UnreadableLog(log.path, [*log.notes, str(error)]))
    for log, framework in foreign_joining.joined(readable, named_frameworks):
        about = dataclasses.replace(read_about(log.path), **options.given())
        try:
            run = translated_alone(log, dataclasses.replace(about, framework=framework))
            runs.append((run, about))
        except (OSError, ValueError) as error:
            unreadable.append(UnreadableLog(log.path, [*log.notes, str(error)]))
    return runs, unreadable


def translated_alone(log: Log, about: About) -> ForeignRun:
    """Return a log's run. Raises ValueError if nothing can be read."""
    run = translate(log, about.framework, about.updates_per_batch, about.objective)
    run.planned = about.steps or run.planned
    table = run.table
    logged = {name for record in log.records for name in record}
    missing = [str(name) for name in about.names if name not in logged]
    if missing:
        run.notes.append(f"{ABOUT} has names that are not in the log: {listed(missing)}")
    if about.updates_per_batch and not any(axis.counts == "updates" for axis in table.axes):
        run.notes.append(
            f"updates_per_batch={about.updates_per_batch} changes nothing: the steps of "
            f"{table.title} are rollout batches"
        )
    return run


def read_about(log: Path) -> About:
    """Return what foreign_run.yaml says of a log. Raises Unreadable if it cannot be used."""
    of_the_run = foreign_joining.run_folder(log) / ABOUT
    for candidate in (*foreign_search.about_files(log), of_the_run):
        if candidate.is_file():
            break
    else:
        return About()
    values = untrusted.read_yaml(candidate)
    texts = ("framework", "objective", "study", "step", "counts")
    kinds: dict[object, type] = {"names": dict, **dict.fromkeys(texts, str)}
    for key, value in values.items():
        kind = kinds.get(key, int)
        if key not in About.__dataclass_fields__:
            keys = ", ".join(About.__dataclass_fields__)
            raise untrusted.Unreadable(
                f"{candidate}: {str(key)[:40]} is unknown. It may have {keys}"
            )
        if type(value) is not kind or (kind is int and not 0 <= value <= untrusted.MAX_STEP):
            raise untrusted.Unreadable(
                f"{candidate}: {key}={str(value)[:40]} must be {KINDS_IN_WORDS[kind]}"
            )
    return About(**values)


def table_of_own(about: About, framework: str, log: Log) -> Table | None:
    """Return the table of a trainer of the user's own, None if the log is of a known framework."""
    if not about.names:
        for key in ("step", "counts"):
            if getattr(about, key):
                raise ValueError(f"{log.path}: {ABOUT} says {key}, but no names: give names too")
        return None
    if framework:
        raise ValueError(
            f"{log.path}: {ABOUT} has names of a trainer of your own, and framework={framework} is set: "
            "leave one of them out"
        )
    counts = about.counts or AXIS_COUNTS[0]
    if counts not in AXIS_COUNTS:
        raise ValueError(f"{log.path}: {ABOUT}: counts: {counts[:40]} is none of batches, updates")
    try:
        table = own_table(about.names, about.step, counts)
    except ValueError as error:
        raise ValueError(f"{log.path}: {ABOUT}: {error}") from None
    trained = [theirs for theirs, ours in about.names.items() if not str(ours).startswith("eval/")]
    for record in log.records:
        axis = next((axis for axis in table.axes if axis.key in record), None)
        if axis and record[axis.key] == 0 and any(name in record for name in trained):
            log.notes.append(f"its {axis.key} begins at 0, which counts as the first")
            axes = tuple(dataclasses.replace(axis, first=0) for axis in table.axes)
            return dataclasses.replace(table, axes=axes)
    return table


@cache
def version() -> str:
    """Return a digest of the code that reads logs. Rows cached by other code are read anew."""
    files = [
        *Path(frameworks.__file__).parent.glob("*.py"),
        *Path(__file__).parent.glob("foreign*.py"),
    ]
    content = b"".join(file.read_bytes() for file in sorted(files))
    return hashlib.sha256(content).hexdigest()[:16]


def settings_of(run: ForeignRun, about: About, notes: list[str]) -> dict[str, object]:
    """Return the settings by which figures and tables know the run."""
    settings = dict(run.settings)
    table = run.table
    last = int(run.rows[-1]["step"])
    seed = about.seed if about.seed is not None else settings.get("seed")
    if type(seed) is not int:
        notes.append(f"{run.path}: its seed is not logged, taken as 0 ({ABOUT}: seed)")
        seed = 0
    objective = run.objective
    if not objective:
        objective = f"not logged, {short_name(run.path)}"
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


def short_name(log: Path) -> str:
    """Return a short name of a log: the run's folder, and the file if the folder may have others.

    A folder has one trainer state of a run."""
    folder = foreign_joining.run_folder(log).name
    is_alone = log.is_dir() or log.name == foreign_search.STATE_FILE
    return folder if is_alone else f"{folder}/{log.stem}".lstrip("/")


def distinct_ends(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of these paths that all differ.

    >>> distinct_ends([Path("a/x.jsonl"), Path("b/x.jsonl")])
    ['a/x.jsonl', 'b/x.jsonl']
    """
    ends: list[str] = []
    for number in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        ends = ["/".join(path.parts[-number:]) for path in paths]
        if len(set(ends)) == len(ends):
            break
    return ends


def is_their_own(setting: str) -> bool:
    """Return whether a setting is one of a framework's own, such as trl.delta."""
    return setting.partition(".")[0] in TABLES


def described(run: ForeignRun, about: About) -> tuple[dict[str, object], pd.DataFrame, list[str]]:
    """Return the settings, the rows and the notes of a run."""
    notes: list[str] = []
    settings = settings_of(run, about, notes)
    rows = pd.DataFrame(run.rows).astype({"step": "int64"})
    return settings, rows, notes + [f"{run.path}: {note}" for note in run.notes]
