"""The folder through which the trainer passes weights to an engine.

The engine also puts its temporary files there. The folder is in memory if there is enough of it,
and no other user may look into it. The trainer holds a lock on it until it ends. So a later start
can recognise, and remove, a folder that a killed trainer left behind.
"""

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
from gspo.io.errors import SettingError
from gspo.io.files import errors_of_the_disk
from gspo.rollout.engines.server_guard import KEY_FILE, WEIGHTS_FILE

MEMORY = "/dev/shm"  # a file system in memory, on Linux
PREFIX = "gspo-vllm-"
MIN_AGE_SECONDS = 60.0  # the owner of a younger folder may not have locked it yet


class WeightsFolder:
    """A folder through which weights go, under a lock that the trainer holds."""

    path: Path
    lock: int  # a file descriptor, -1 after `close`

    def save_weights(self, tensors: dict[str, Tensor]) -> Path:
        """Write weights to a safetensors file, because messages cannot carry tensors."""
        path = self.path / WEIGHTS_FILE
        with errors_of_the_disk(path):
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        return path

    def close(self) -> None:
        """Release the lock. May be called twice."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


class ServerFolder(WeightsFolder):
    """The folder of a vLLM server, in which the trainer holds a lock while it uses the server."""

    def __init__(self, path: Path, url: str):
        """Take the lock.

        Raises ValueError if another trainer holds it, or if files cannot be written there."""
        self.path = path
        self.lock = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        try:
            self.lock = os.open(self.path / "trainer.lock", flags, 0o600)
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise SettingError(
                "rollout.url",
                url,
                "another trainer uses this server; stop that trainer, or start a second server on "
                "another port",
            ) from None
        except OSError as error:
            raise SettingError(
                "rollout.url",
                url,
                f"the server's folder {path} cannot be used here ({error.strerror})",
                remedy="start the server with rollout.folder=FOLDER, which both see and may write",
            ) from None


@dataclass(frozen=True)
class RunningServer:
    """The folder of a running server, and the files in it for trainers."""

    path: Path
    key: str
    description: dict[str, Any]  # written by `gspo serve`


def running_servers(port: int, parent: str) -> Iterator[RunningServer]:
    """Yield the folders of this user's running servers that listen at a port, newest first.

    They are searched in `parent`, or without it in the default folders of servers. So the file
    system says to which folder weights are written, not the server at an address. A folder is
    skipped if another user owns it or can look into it."""
    parents = [parent] if parent else sorted({MEMORY, tempfile.gettempdir()})
    candidates = [path for folder in parents for path in Path(folder).glob(f"{PREFIX}*")]
    for path in sorted(candidates, key=age):
        if not is_own_folder(path) or not is_locked(path):
            continue
        try:
            key = untrusted.read_bytes(path / KEY_FILE).decode("ascii")
            description = untrusted.read_json(path / "description.json")
            server_port = urlsplit(description["url"]).port
        # the folder of a trainer's own engine, or of a server that is starting
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if server_port == port:
            yield RunningServer(path, key, description)


def age(path: Path) -> float:
    """Return how old a folder is, in seconds, or infinity if it has been removed."""
    try:
        return time.time() - path.lstat().st_ctime
    except OSError:
        return float("inf")


def is_own_folder(path: Path) -> bool:
    """Return whether this is a folder, not a link, that only this user can look into."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_private(status)


def is_private(status: os.stat_result) -> bool:
    """Return whether this user owns a file, and no other user has any permission."""
    return status.st_uid == os.geteuid() and status.st_mode & 0o777 == 0o700


def is_locked(path: Path) -> bool:
    """Return whether the process that made an engine's folder is alive: it holds a lock on it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class EngineFolder(WeightsFolder):
    """A new folder for files of `size` bytes, in `parent` if that is set.

    Folders that killed trainers left behind are removed first."""

    def __init__(self, size: float, parent: str = ""):
        for folder in {parent} if parent else {MEMORY, tempfile.gettempdir()}:
            remove_left_behind(folder)
        fits = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1.5 * size
        default_parent = MEMORY if fits else None
        path = tempfile.mkdtemp(prefix=PREFIX, dir=parent or default_parent)  # with mode 0700
        self.path = Path(path)
        self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder. May be called twice."""
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
        super().close()


def remove_left_behind(parent: str) -> None:
    """Remove this user's engine folders in `parent` whose trainer ended without removing them."""
    for path in Path(parent).glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, not a folder, or just removed
            continue
        try:
            status = os.fstat(descriptor)
            if is_private(status) and time.time() - status.st_ctime > MIN_AGE_SECONDS:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:  # its trainer is alive
            continue
        finally:
            os.close(descriptor)
