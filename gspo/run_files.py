"""What a run's directory says, without loading anything heavy: rows, how the run last ended, whether it is running."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from gspo import bounded

STATUS, LOCK = "status.json", ".lock"
HOW = ("running", "finished", "stopped", "collapsed", "failed", "rolled back")
SAID = {"how": str, "step": int, "reason": str, "pid": int}  # of status.json, what is read again
CONTINUED = "continued.jsonl"  # a line for each time that another process went on from a checkpoint


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics file; lines that a kill cut short or a disk damaged are left out. Raises ValueError for
    what is no file of rows."""
    return rows_and_damage(path)[0]


def rows_and_damage(path: Path) -> tuple[list[dict], list[str]]:
    """The rows, and the lines that are none."""
    try:
        rows, damaged = bounded.read_rows(path)
    except FileNotFoundError:
        return [], []
    return rows, [line.decode(errors="replace") for _, line in damaged]


def read_events(path: Path) -> list[dict]:
    """What the monitor said of a run: step, kind, signal and text of each event. Raises ValueError for what is no
    file."""
    try:
        found = [_event(line) for line in bounded.lines(path)]
    except FileNotFoundError:
        return []
    return [event for event in found if event]


def _event(line: bytes) -> dict | None:
    try:
        event = bounded.parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not bounded.is_step(event.get("step")):
        return None
    words = {name: event.get(name, "") for name in ("kind", "signal", "text")}
    return {"step": event["step"], **words} if all(isinstance(word, str) for word in words.values()) else None


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that it holds either the old or the new text, never half of one."""
    beside = path.with_name(path.name + ".unfinished")
    beside.write_text(text)
    sync(beside)
    os.replace(beside, path)


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
        entry = bounded.read_json(folder / STATUS)
    except FileNotFoundError:
        return {}
    except (OSError, bounded.Unreadable) as error:
        return {"reason": str(error)}
    kept = {name: value for name, value in entry.items() if name in SAID and type(value) is SAID[name]}
    return kept if kept.get("how", HOW[0]) in HOW else {"reason": f"{folder / STATUS} is damaged: how={kept['how']}"}


def note_start(folder: Path, checkpoint: int | None) -> None:
    """This process is about to train, from the checkpoint of this step or from the beginning. It continues the run if
    another process said something last: after a rollback it was this one."""
    if checkpoint is None:
        (folder / CONTINUED).unlink(missing_ok=True)
    elif said(folder).get("pid") != os.getpid():
        with open(folder / CONTINUED, "a") as file:
            file.write(json.dumps({"step": checkpoint, "time": time.time()}) + "\n")


def locked(folder: Path) -> bool:
    """Whether a process works in a run directory."""
    try:
        with bounded.opened(folder / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, bounded.Unreadable):
        return False
    return False
