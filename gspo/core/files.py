"""What a run's directory says, without loading anything heavy: rows, how the run last ended, whether it is running.

And how its files are written. A run directory may be a stranger's: a link in it must not lead our writing elsewhere. A
link to the directory itself, or above it, is its user's own choice.
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

from gspo.core import untrusted

STATUS, LOCK = "status.json", ".lock"
HOW = ("running", "finished", "stopped", "collapsed", "failed", "rolled back")
SAID = {"how": str, "step": int, "reason": str, "pid": int}  # of status.json, what is read again
CONTINUED = "continued.jsonl"  # a line for each time that another process went on from a checkpoint
W_AND_B = "wandb"  # the folder in a run directory where W&B keeps its files
LINKS = ("latest-run", "debug.log", "debug-internal.log", "debug-core.log")  # in there, to the newest of them
UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.unfinished")  # files that `replace_bytes` had not renamed yet
ABANDONED = 60.0  # seconds after which such a file is a killed process's


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics file; lines that a kill cut short or a disk damaged are left out. Raises ValueError for
    what is no file of rows."""
    return rows_and_damage(path)[0]


def rows_and_damage(path: Path) -> tuple[list[dict], list[str]]:
    """The rows, and the lines that are none."""
    try:
        rows, damaged = untrusted.read_rows(path)
    except FileNotFoundError:
        return [], []
    return rows, [line.decode(errors="replace") for _, line in damaged]


def read_events(path: Path) -> list[dict]:
    """What the monitor said of a run: step, kind, signal and text of each event. Raises ValueError for what is no
    file."""
    try:
        found = [_event(line) for line in untrusted.lines(path)]
    except FileNotFoundError:
        return []
    return [event for event in found if event]


def _event(line: bytes) -> dict | None:
    try:
        event = untrusted.parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not untrusted.is_step(event.get("step")):
        return None
    words = {name: event.get(name, "") for name in ("kind", "signal", "text")}
    return {"step": event["step"], **words} if all(isinstance(word, str) for word in words.values()) else None


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that it holds either the old or the new text, never half of one. Half characters, as in a
    folder's name that is not UTF-8, become escapes."""
    replace_bytes(path, text.encode(errors="backslashreplace"))


def replace_bytes(path: Path, content: bytes) -> None:
    """The same for bytes. A link at `path` is replaced; what it points to stays as it is."""
    beside = path.with_name(f".{secrets.token_hex(8)}.unfinished")
    try:
        with open(beside, "xb") as file:  # a new file: opens nothing that is there, not through a link either
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Take away what killed processes left of `replace_bytes`, but not what a report.py of this moment writes."""
    for path in folder.glob(".*.unfinished"):
        if UNFINISHED.fullmatch(path.name) and time.time() - path.lstat().st_mtime > ABANDONED:
            path.unlink(missing_ok=True)


def append_to(path: Path) -> TextIO:
    """A text file to write more lines to. Raises ValueError if the path is a link, or no plain file."""
    return open(path, "a", encoding="utf-8", errors="backslashreplace", opener=untrusted.plain_file)


def refuse_links(folder: Path, names: Collection[str] = ()) -> None:
    """Raises ValueError for the first link, pipe, socket or device in a run directory: nothing is written there.

    `names`: look at these of its entries alone. W&B's folder has links of its own in it, which it makes anew; into the
    folders of its earlier segments nothing of ours follows a link."""
    waiting, theirs = [entry for entry in _entries(folder) if not names or entry.name in names], folder / W_AND_B
    while waiting:
        entry = waiting.pop()
        in_theirs = Path(entry.path).parent == theirs
        if entry.is_dir(follow_symlinks=False):
            waiting += _entries(entry.path) if not in_theirs or entry.name == "cache" else []
        elif not entry.is_file(follow_symlinks=False) and not (in_theirs and entry.name in LINKS):
            raise untrusted.Unreadable(untrusted.not_plain(entry.path))


def _entries(folder: str | Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


class Made:
    """What is in a run directory before a process writes there, so that it can take away what it made and no more."""

    def __init__(self, folder: Path):
        self.folder, self.before = folder, {entry.name for entry in _entries(folder)}
        self.folders = [path for path in (folder, *folder.parents) if not path.exists()]  # the innermost first

    def take_back(self, *names: str) -> None:
        """Remove the files of these names that were not there before, and the folders that were not, if empty now."""
        for name in {*names, LOCK} - self.before:
            (self.folder / name).unlink(missing_ok=True)
        for folder in self.folders:
            try:
                folder.rmdir()
            except OSError:  # something else is in it
                break


@contextmanager
def errors_of_the_disk(path: Path) -> Iterator[None]:
    """Within: OSError also where a library tells it in its own way, as safetensors, tokenizers and torch do."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # tokenizers' is of no class of its own
        if said := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(said[1])
            raise OSError(number, os.strerror(number), str(path)) from None
        if isinstance(error.__context__, OSError):  # torch's, where the file that it was given could not be written
            raise error.__context__ from None
        raise


def sync(path: Path) -> None:
    """Until the disk has it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def said(folder: Path) -> dict:
    """What a run last said of itself: how it is, its step, a reason, its process. Empty if it never did; where the file
    is none, the reason says so."""
    try:
        entry = untrusted.read_json(folder / STATUS)
    except FileNotFoundError:
        return {}
    except (OSError, untrusted.Unreadable) as error:
        return {"reason": str(error)}
    kept = {name: value for name, value in entry.items() if name in SAID and type(value) is SAID[name]}
    return kept if kept.get("how", HOW[0]) in HOW else {"reason": f"{folder / STATUS} is damaged: how={kept['how']}"}


def note_start(folder: Path, checkpoint: int | None) -> None:
    """This process is about to train, from the checkpoint of this step or from the beginning. It continues the run if
    another process said something last: after a rollback it was this one."""
    if checkpoint is None:
        (folder / CONTINUED).unlink(missing_ok=True)
    elif said(folder).get("pid") != os.getpid():
        with append_to(folder / CONTINUED) as file:
            file.write(json.dumps({"step": checkpoint, "time": time.time()}) + "\n")


def locked(folder: Path) -> bool:
    """Whether a process works in a run directory, as far as can be seen."""
    try:
        with untrusted.opened(folder / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError):  # there is none, or none that a process of ours could hold, or it may not be read
        return False
    return False
