"""The folder through which the trainer passes weights to an engine, and where the engine puts its temporary files.

It lies in memory if there is room, and no other user may look into it. The trainer holds a lock on it as long as the
trainer lives, so that a later start can recognise, and remove, a folder that a killed trainer left behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from gspo.core.files import errors_of_the_disk

MEMORY = "/dev/shm"  # a file system in memory, on Linux
PREFIX = "gspo-vllm-"
YOUNG_SECONDS = 60.0  # the owner of a folder younger than this may not have locked it yet


class EngineFolder:
    """A new folder with room for files of `size` bytes. Folders that killed trainers left behind are removed first."""

    def __init__(self, size: int):
        for parent in {MEMORY, tempfile.gettempdir()}:
            remove_left_behind(parent)
        fits = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1.5 * size
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY if fits else None))  # with mode 0700
        self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def save_weights(self, tensors: dict[str, Tensor]) -> Path:
        """Write weights to a safetensors file, because messages to another process cannot carry tensors."""
        path = self.path / "weights.safetensors"
        with errors_of_the_disk(path):
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        return path

    def close(self) -> None:
        """Remove the folder. May be called twice."""
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1


def size_of(tensors: dict[str, Tensor]) -> int:
    """Return how many bytes the tensors take."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def remove_left_behind(parent: str) -> None:
    """Remove this user's engine folders in `parent` whose trainer has ended without removing them."""
    for path in Path(parent).glob(f"{PREFIX}*"):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, not a folder, or just removed
            continue
        try:
            about = os.fstat(handle)
            mine = about.st_uid == os.geteuid() and stat.S_IMODE(about.st_mode) == 0o700
            if mine and time.time() - about.st_ctime > YOUNG_SECONDS:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:  # its trainer is alive
            continue
        finally:
            os.close(handle)
