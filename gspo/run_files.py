"""What a run's directory says, without loading anything heavy: rows, how the run last ended, whether it is running."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

STATUS, LOCK = "status.json", ".lock"
CONTINUED = "continued.jsonl"  # a line for each time that another process went on from a checkpoint


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics file; lines that a kill cut short or a disk damaged are left out."""
    return rows_and_damage(path)[0]


def rows_and_damage(path: Path) -> tuple[list[dict], list[str]]:
    """The rows, and the lines that are none."""
    rows, damaged = [], []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:  # not JSON, or not UTF-8
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            damaged.append(line.decode(errors="replace"))
    return rows, damaged


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
    """What a run last said of itself; empty if it never did."""
    path = folder / STATUS
    return json.loads(path.read_text()) if path.exists() else {}


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
    path = folder / LOCK
    if not path.exists():
        return False
    with open(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
