"""The folder through which the trainer passes weights to an engine, and where the engine puts its
temporary files.

It lies in memory if there is room, and no other user may look into it. The trainer holds a lock on
it as long as the trainer lives, so that a later start can recognise, and remove, a folder that a
killed trainer left behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import save_file
from torch import Tensor

from gspo.io import untrusted
from gspo.io.files import errors_of_the_disk
from gspo.rollout.engines.server_guard import KEY, WEIGHTS

MEMORY = "/dev/shm"  # a file system in memory, on Linux
PREFIX = "gspo-vllm-"
YOUNG_SECONDS = 60.0  # the owner of a folder younger than this may not have locked it yet


class WeightsFolder:
    """A folder through which weights go, under a lock that the trainer holds."""

    path: Path
    lock: int  # a file descriptor; -1 after `close`

    def save_weights(self, tensors: dict[str, Tensor]) -> Path:
        """Write weights to a safetensors file, because messages to another process cannot carry
        tensors.
        """
        path = self.path / WEIGHTS
        with errors_of_the_disk(path):
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        return path

    def close(self) -> None:
        """Give the folder up. May be called twice."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


class ServerFolder(WeightsFolder):
    """The folder that a vLLM server has made. A trainer holds a lock in it as long as it uses the
    server.
    """

    def __init__(self, path: Path, url: str):
        """Raises ValueError if another trainer holds the lock, or if files cannot be written there."""
        self.path, self.lock = path, -1
        try:
            self.lock = os.open(
                self.path / "trainer.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600
            )
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ValueError(
                f"rollout.url={url}: another trainer uses this server; end that one, or start a server of its own on "
                "another port"
            ) from None
        except OSError as error:
            raise ValueError(
                f"rollout.url={url}: the server's folder {path} cannot be used here ({error.strerror}); start the "
                "server with rollout.folder=FOLDER, which both see and may write"
            ) from None


@dataclass(frozen=True)
class RunningServer:
    """What a running server has left for trainers in its folder."""

    path: Path
    key: str
    description: dict[str, Any]  # what `gspo serve` has written about it


def running_servers(port: int, parent: str) -> Iterator[RunningServer]:
    """Find the folders of this user's running servers that listen at a port, the newest first: in
    `parent`, or without one where servers make them.

    So it is the file system, and not what answers at an address, that says where weights are
    written. A folder that another user owns or can look into is passed over."""
    places = [parent] if parent else sorted({MEMORY, tempfile.gettempdir()})
    candidates = [path for place in places for path in Path(place).glob(f"{PREFIX}*")]
    for path in sorted(candidates, key=age):
        if not (is_own_folder(path) and is_locked(path)):
            continue
        try:
            key = untrusted.read_bytes(path / KEY).decode("ascii")
            description = untrusted.read_json(path / "description.json")
            listens_at = urlsplit(description["url"]).port
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # the folder of a trainer's own engine, or one in the making
            continue
        if listens_at == port:
            yield RunningServer(path, key, description)


def age(path: Path) -> float:
    """Return how old a folder is, in seconds; infinity if it is gone."""
    try:
        return time.time() - path.lstat().st_ctime
    except OSError:
        return float("inf")


def is_own_folder(path: Path) -> bool:
    """Return whether this is a folder, and no link, that this user owns and nobody else can look
    into.
    """
    try:
        about = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(about.st_mode)
        and about.st_uid == os.geteuid()
        and about.st_mode & 0o777 == 0o700
    )


def is_locked(path: Path) -> bool:
    """Return whether the process that made an engine's folder is alive: it holds a lock on it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


class EngineFolder(WeightsFolder):
    """A new folder with room for files of `size` bytes; with `parent` in that folder. Folders that
    killed trainers left behind are removed first."""

    def __init__(self, size: float, parent: str = ""):
        for place in {parent} if parent else {MEMORY, tempfile.gettempdir()}:
            remove_left_behind(place)
        fits = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1.5 * size
        # with mode 0700
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent or (MEMORY if fits else None)))
        self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder. May be called twice."""
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
        super().close()


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
            mine = about.st_uid == os.geteuid() and about.st_mode & 0o777 == 0o700
            if mine and time.time() - about.st_ctime > YOUNG_SECONDS:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:  # its trainer is alive
            continue
        finally:
            os.close(handle)
