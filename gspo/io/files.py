"""Reads and writes the small files of a run directory, without importing anything heavy.

They are the rows of metrics, how the run last ended, and whether it is running. A run directory may
come from someone else, so a link inside it must not lead our writing elsewhere. A link to the
directory itself, or to a folder above it, is the user's own choice.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from gspo.io import untrusted

STATUS_FILE, LOCK_FILE = "status.json", ".lock"
RUN_STATES = ("running", "finished", "stopped", "collapsed", "failed", "rolled back")
# the entries of status.json that are read again
STATUS_FIELDS = {"how": str, "step": int, "reason": str, "pid": int}
# has a line for each time that another process continued the run from a checkpoint
CONTINUATIONS_FILE = "continued.jsonl"
# the folder in a run directory that has those of its checkpoints, a folder for each
EVALUATIONS_FOLDER = "evaluations"
# the folder in a run directory, or in that of an evaluation, where W&B keeps its files
W_AND_B_FOLDER = "wandb"
# links that W&B makes in that folder
W_AND_B_LINKS = ("latest-run", "debug.log", "debug-internal.log", "debug-core.log")
# files that `replace_bytes` had not renamed yet
UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.unfinished")
ABANDONED_SECONDS = (
    60.0  # seconds; an older file of this kind was left by a process that was killed
)


def read_events(path: Path) -> list[dict]:
    """Read the monitor's events of a run: step, kind, signal and text of each.

    Raises ValueError if the path is not a regular file.
    """
    try:
        found = [_event(entry) for entry in untrusted.read_objects(path)]
    except FileNotFoundError:
        return []
    return [event for event in found if event]


def _event(entry: dict) -> dict | None:
    if not untrusted.is_step(entry.get("step")):
        return None
    words = {name: entry.get(name, "") for name in ("kind", "signal", "text")}
    return (
        {"step": entry["step"], **words}
        if all(isinstance(word, str) for word in words.values())
        else None
    )


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that it holds either the old or the new text, never half of one.

    Half characters, as in the name of a folder that is not UTF-8, become escapes.
    """
    replace_bytes(path, text.encode(errors="backslashreplace"))


def replace_bytes(path: Path, content: bytes) -> None:
    """Do the same with bytes. A link at `path` is replaced; the file that it points to stays as it
    is.
    """
    beside = path.with_name(f".{secrets.token_hex(8)}.unfinished")
    try:
        with open(beside, "xb") as file:  # "x" fails if the file exists, and follows no link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Delete the files that killed processes left behind in `replace_bytes`, but not those being
    written just now.
    """
    for path in folder.glob(".*.unfinished"):
        if (
            UNFINISHED.fullmatch(path.name)
            and time.time() - path.lstat().st_mtime > ABANDONED_SECONDS
        ):
            path.unlink(missing_ok=True)


def append_to(path: Path) -> TextIO:
    """Open a text file to append lines to it. Raises ValueError if the path is a link or not a
    regular file.
    """
    return open(
        path, "a", encoding="utf-8", errors="backslashreplace", opener=untrusted.plain_file_opener
    )


def refuse_links(folder: Path, names: Collection[str] = ()) -> None:
    """Raise ValueError for the first link, pipe, socket or device in a run directory: nothing is
    written there.

    With `names`, only these entries of the directory are looked at. W&B's folder, of the run or of
    an evaluation of it, may have the links that W&B itself makes anew. The folders of its earlier
    segments are not looked at, as we follow no link there.
    """
    waiting = [entry for entry in _entries(folder) if not names or entry.name in names]
    while waiting:
        entry = waiting.pop()
        above = Path(entry.path).parent.relative_to(folder).parts
        in_theirs = above == (W_AND_B_FOLDER,) or (
            above[:1] == (EVALUATIONS_FOLDER,) and above[2:] == (W_AND_B_FOLDER,)
        )
        if entry.is_dir(follow_symlinks=False):
            waiting += _entries(entry.path) if not in_theirs or entry.name == "cache" else []
        elif not entry.is_file(follow_symlinks=False) and not (
            in_theirs and entry.name in W_AND_B_LINKS
        ):
            raise untrusted.Unreadable(untrusted.not_plain(entry.path))


def _entries(folder: str | Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


class CreatedFiles:
    """Notes what a run directory holds before a process writes there, so that it can delete just
    its own files.
    """

    def __init__(self, folder: Path):
        self.folder, self.before = folder, {entry.name for entry in _entries(folder)}
        # the innermost first
        self.folders = [path for path in (folder, *folder.parents) if not path.exists()]

    def remove(self, *names: str) -> None:
        """Delete the files of these names that were not there before, and the folders that were not
        and are empty.
        """
        for name in {*names, LOCK_FILE} - self.before:
            (self.folder / name).unlink(missing_ok=True)
        for folder in self.folders:
            try:
                folder.rmdir()
            except OSError:  # the folder is not empty
                break


@contextmanager
def errors_of_the_disk(path: Path) -> Iterator[None]:
    """Turn the disk's errors inside the block into OSError: safetensors, tokenizers and torch have
    their own ways.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from None
        if isinstance(error.__context__, OSError):  # torch, if it cannot write the file
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
    """Read what a run last wrote about itself to status.json: how it is, its step, the reason, its
    process number.

    The result is empty if there is no such file. If the file is damaged, the result is a reason
    that says so.
    """
    try:
        entry = untrusted.read_json(folder / STATUS_FILE)
    except FileNotFoundError:
        return {}
    except (OSError, untrusted.Unreadable) as error:
        return {"reason": str(error)}
    kept = {
        name: entry[name] for name, kind in STATUS_FIELDS.items() if type(entry.get(name)) is kind
    }
    return (
        kept
        if kept.get("how", RUN_STATES[0]) in RUN_STATES
        else {"reason": f"{folder / STATUS_FILE} is damaged: how={kept['how']}"}
    )


def note_start(folder: Path, checkpoint: int | None) -> None:
    """Note that this process begins to train, from the checkpoint of this step or, with None, from
    the beginning.

    It counts as a continuation if another process wrote the status last. After a rollback it was
    this process.
    """
    if checkpoint is None:
        (folder / CONTINUATIONS_FILE).unlink(missing_ok=True)
    elif read_status(folder).get("pid") != os.getpid():
        with append_to(folder / CONTINUATIONS_FILE) as file:
            file.write(json.dumps({"step": checkpoint, "time": time.time()}) + "\n")


def locked(folder: Path) -> bool:
    """Tell whether a process works in a run directory, as far as that can be seen."""
    try:
        with untrusted.open_plain_file(folder / LOCK_FILE) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except PermissionError:  # another user's
        return read_status(folder).get("how") == "running"
    except (OSError, ValueError):  # there is no lock file, or not a regular one
        return False
    return False
