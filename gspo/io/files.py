"""The small files of a run directory: events, status, lock and the list of continuations.

This module imports nothing heavy. A run directory may come from someone else, so a link inside it
must not redirect our writes. A link to the directory itself, or to a folder above it, is the user's
own choice.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from gspo.io import untrusted

SETTINGS_FILE = "settings.yaml"
METRICS_FILE = "metrics.jsonl"
STATUS_FILE = "status.json"
LOCK_FILE = ".lock"
ENDED_EARLY = "ended early"  # by a callback of the user's
ENDED = ("finished", ENDED_EARLY, "collapsed")  # the states of a run that has nothing left to do
RUN_STATES = (
    "running",
    "finished",
    ENDED_EARLY,
    "stopped",
    "collapsed",
    "failed",
    "rolled back",
)
# the entries of status.json that are read, with their types
STATUS_FIELDS = {"how": str, "step": int, "reason": str, "pid": int, "time": float}
# has a line for each time that another process continued the run from a checkpoint
CONTINUATIONS_FILE = "continued.jsonl"
# the folder in a run directory with a folder for each evaluation of its checkpoints
EVALUATIONS_FOLDER = "evaluations"
# W&B's folder in a run directory, and in the folder of an evaluation
W_AND_B_FOLDER = "wandb"
# links that W&B creates in its folder
W_AND_B_LINKS = ("latest-run", "debug.log", "debug-internal.log", "debug-core.log")
# names of temporary files of `replace_bytes`
UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.unfinished")
# an older temporary file belongs to a process that was killed
ABANDONED_SECONDS = 60.0
# a message names so many runs of a study
MAX_NAMED_RUNS = 3


def read_events(path: Path) -> list[dict]:
    """Return the monitor's events of a run: step, kind, signal and text of each.

    Raises ValueError if the path is not a regular file.
    """
    events = []
    try:
        for entry in untrusted.read_objects(path):
            texts = {name: entry.get(name, "") for name in ("kind", "signal", "text")}
            has_texts = all(isinstance(text, str) for text in texts.values())
            if untrusted.is_step(entry.get("step")) and has_texts:
                events.append({"step": entry["step"], **texts})
    except FileNotFoundError:
        return []
    return events


def check_run_directory(folder: Path) -> None:
    """Raise ValueError if a path is not a run directory: it has no settings.yaml.

    The message names runs in the folder if it is that of a study."""
    if (folder / SETTINGS_FILE).exists():
        return
    if not folder.exists():
        raise ValueError(f"{folder} does not exist: name a run directory, such as runs/STUDY/RUN")
    problem = f"{folder} is not a run directory: it has no {SETTINGS_FILE}"
    if not folder.is_dir():
        problem = f"{folder} is not a run directory"
        if (folder.parent / SETTINGS_FILE).exists():
            problem += f": name its folder, {folder.parent}"
        raise ValueError(problem)
    runs = sorted(file.parent for file in folder.glob(f"*/{SETTINGS_FILE}"))
    if runs:
        names = ", ".join(map(str, runs[:MAX_NAMED_RUNS]))
        more = ", ..." if len(runs) > MAX_NAMED_RUNS else ""
        problem += f"; name one of its runs: {names}{more}"
    raise ValueError(problem)


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically: it holds either the old or the new text.

    Half characters, as in the name of a folder that is not UTF-8, become escapes.
    """
    replace_bytes(path, text.encode(errors="backslashreplace"))


def replace_bytes(path: Path, content: bytes) -> None:
    """Write the bytes of a small file atomically.

    A link at `path` is replaced, and the file that it points to stays unchanged.
    """
    unfinished = path.with_name(f".{secrets.token_hex(8)}.unfinished")
    try:
        with (
            named_errors(path),
            open(unfinished, "xb") as file,  # "x" fails if the file exists, and follows no link
        ):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def named_errors(path: Path) -> Generator[None]:
    """Let an OSError within this context name the file, which the error of a write does not do."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def remove_unfinished(folder: Path) -> None:
    """Delete temporary files of killed processes, but none that is being written now."""
    for path in folder.glob(".*.unfinished"):
        if UNFINISHED.fullmatch(path.name):
            age = time.time() - path.lstat().st_mtime
            if age > ABANDONED_SECONDS:
                path.unlink(missing_ok=True)


def append_to(path: Path) -> TextIO:
    """Open a text file for appending. Raises ValueError if the path is not a regular file."""
    return open(
        path,
        "a",
        encoding="utf-8",
        errors="backslashreplace",
        opener=untrusted.plain_file_opener,
    )


def refuse_links(folder: Path, names: Collection[str] = ()) -> None:
    """Raise ValueError for the first link, pipe, socket or device in a run directory.

    With `names`, only these entries of the directory are checked. W&B's folder, of the run or of
    one of its evaluations, may have the links that W&B itself renews. Folders inside W&B's folder
    are not checked, except its cache, because we follow no link there.
    """
    pending = [entry for entry in _entries(folder) if not names or entry.name in names]
    while pending:
        entry = pending.pop()
        parents = Path(entry.path).parent.relative_to(folder).parts
        is_of_evaluation = parents[:1] == (EVALUATIONS_FOLDER,)
        in_wandb = parents == (W_AND_B_FOLDER,) or (
            is_of_evaluation and parents[2:] == (W_AND_B_FOLDER,)
        )
        if entry.is_dir(follow_symlinks=False):
            if not in_wandb or entry.name == "cache":
                pending += _entries(entry.path)
        elif not entry.is_file(follow_symlinks=False) and not (
            in_wandb and entry.name in W_AND_B_LINKS
        ):
            raise untrusted.Unreadable(untrusted.not_plain(entry.path))


def _entries(folder: str | Path) -> list[os.DirEntry]:
    """Return the entries of a folder, or none if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


class CreatedFiles:
    """The entries of a run directory at the start, by which a process can delete its own files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.names_before = {entry.name for entry in _entries(folder)}
        # folders that do not exist yet, the innermost first
        self.missing_folders = [path for path in (folder, *folder.parents) if not path.exists()]

    def remove(self, *names: str) -> None:
        """Delete the new files among `names`, the new lock, and new folders that are empty."""
        for name in {*names, LOCK_FILE} - self.names_before:
            (self.folder / name).unlink(missing_ok=True)
        for folder in self.missing_folders:
            try:
                folder.rmdir()
            except OSError:  # the folder is not empty
                break


def step_folders(parent: Path) -> list[Path]:
    """Return the folders step_000001, step_000002 and so on of a folder, in the order of their
    steps.

    Unfinished checkpoints have other names.
    """
    folders = [path for path in parent.glob("step_*") if step_of(path.name) >= 0]
    return sorted(folders, key=lambda folder: step_of(folder.name))


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint's folder, as 8 in step_000008, else -1."""
    match = re.fullmatch(r"step_(\d{6,12})", name)
    return int(match[1]) if match else -1


@contextmanager
def errors_of_the_disk(path: Path) -> Generator[None]:
    """Turn errors of the disk inside the block into OSError.

    safetensors, tokenizers and torch raise other exceptions for them.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match:
            number = int(match[1])
            raise OSError(number, os.strerror(number), str(path)) from None
        if isinstance(error.__context__, OSError):  # torch cannot write the file
            raise error.__context__ from None
        raise


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_status(folder: Path) -> dict:
    """Return a run's last entry in status.json: state (`how`), step, reason, process id and time.

    The result is empty if there is no such file. If the file is damaged, the result has only a
    reason, which says so.
    """
    try:
        entries = untrusted.read_json(folder / STATUS_FILE)
    except FileNotFoundError:
        return {}
    except (OSError, untrusted.Unreadable) as error:
        return {"reason": str(error)}
    status = {
        name: entries[name]
        for name, kind in STATUS_FIELDS.items()
        if type(entries.get(name)) is kind
    }
    if "how" in status and status["how"] not in RUN_STATES:
        return {"reason": f"{folder / STATUS_FILE} is damaged: how={status['how']}"}
    return status


def note_start(folder: Path, checkpoint: int | None) -> None:
    """Record that this process starts to train at a checkpoint's step, or from scratch with None.

    It is a continuation if another process wrote the status last. After a rollback, this process
    wrote it.
    """
    if checkpoint is None:
        (folder / CONTINUATIONS_FILE).unlink(missing_ok=True)
    elif read_status(folder).get("pid") != os.getpid():
        with append_to(folder / CONTINUATIONS_FILE) as file:
            file.write(json.dumps({"step": checkpoint, "time": time.time()}) + "\n")


@contextmanager
def removed_on_error(folder: Path) -> Generator[None]:
    """Remove a folder if this context ends by an error, also by Ctrl-C."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def locked(folder: Path) -> bool:
    """Return whether a process works in a run directory, if that can be determined."""
    try:
        with untrusted.open_plain_file(folder / LOCK_FILE) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except PermissionError:  # the lock file belongs to another user
        return read_status(folder).get("how") == "running"
    except (OSError, ValueError):  # there is no lock file, or it is not a regular file
        return False
    return False
