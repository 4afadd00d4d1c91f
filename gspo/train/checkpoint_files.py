"""Finds the checkpoints of a run and checks whether they are whole, without reading tensors."""

import hashlib
import json
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gspo.io.files import step_folders, step_of, sync
from gspo.io.untrusted import is_step, open_plain_file, path_inside, read_bytes, read_json

log = logging.getLogger(__name__)
CHECKSUMS = "checksums.json"  # SHA-256 of every other file of a checkpoint or a cold start


def seal(folder: Path, checksums: dict[str, str] | None = None) -> None:
    """Write the checksums of a folder's files into it, and wait until it is on the disk.

    Checksums that are not in `checksums` are computed."""
    checksums = checksums or {}
    sealed = {}
    for path in folder.rglob("*"):
        if path.is_file():
            name = str(path.relative_to(folder))
            sealed[name] = checksums.get(name) or checksum(path)
    content = json.dumps(sealed, indent=1)
    (folder / CHECKSUMS).write_text(content, encoding="utf-8")
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def latest_checkpoint(run: Path) -> Path | None:
    """Return the newest whole checkpoint of a run directory, None if there are no checkpoints.

    Checkpoints newer than `latest` are left out. A warning names newer checkpoints that are
    damaged. Raises ValueError if all checkpoints are damaged.
    """
    pointer = run / "checkpoints" / "latest"
    newest = ""
    with permission_needed(run):
        if pointer.exists():
            newest = read_bytes(pointer).decode(errors="replace").strip()
    folders = step_folders(run / "checkpoints")[::-1]
    newest_step = step_of(newest)
    up_to_newest = [folder for folder in folders if step_of(folder.name) <= newest_step]
    problems = []
    # without a usable `latest`, every checkpoint is a candidate
    for folder in up_to_newest or folders:
        problem = damage(folder)
        if problem:
            problems.append(f"{folder} is damaged: {problem}")
            continue
        if problems:
            text = f"{'; '.join(problems)}; going back to {folder.name}"
            # not log.warning: without a log file Python would print the warning a second time
            log.info(text)
            print(f"warning: {text}", file=sys.stderr)
        return folder
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}; no whole checkpoint is left: move {run} away to start it from "
            "the beginning"
        )
    return None


def damage(folder: Path) -> str | None:
    """Describe the damage of a folder that `seal` completed, None if it is whole.

    It is damaged if a file is missing or not as it was written. Raises ValueError for a file that
    this user may not read, because its content is unknown.
    """
    with permission_needed(folder):
        try:
            sums = read_json(folder / CHECKSUMS)
        except PermissionError:
            raise
        except FileNotFoundError:
            return f"{CHECKSUMS} is missing"
        # it is not a mapping in JSON, or not a regular file
        except (OSError, ValueError) as error:
            return f"{CHECKSUMS} cannot be read ({error})"
        for name, digest in sums.items():
            try:
                if checksum(path_inside(folder, name)) != digest:
                    return f"{name} is not as it was written"
            except FileNotFoundError:
                return f"{name} is missing"
            except PermissionError:
                raise
            # an error of the disk, a link, a folder, a path outside the folder
            except (OSError, ValueError) as error:
                return f"{name} cannot be read ({error})"
    return None


@contextmanager
def permission_needed(folder: Path) -> Generator[None]:
    """Turn a PermissionError inside the block into a ValueError of one line that names the file."""
    try:
        yield
    except PermissionError as error:
        path = error.filename or folder
        raise ValueError(
            f"{path} may not be read by this user: ask its owner for the permission to read it"
        ) from None


def checksum(path: Path) -> str:
    """Compute the SHA-256 of a file's content, in hexadecimal digits."""
    with open_plain_file(path) as file:
        # its stub lacks BinaryIO
        return hashlib.file_digest(file, "sha256").hexdigest()  # ty: ignore[no-matching-overload]


def check_belongs(folder: Path, settings: str) -> None:
    """Raise ValueError if a checkpoint was written under other settings, also if it was moved."""
    written = read_state(folder)["settings"]
    if written != settings:
        raise ValueError(
            f"{folder} belongs to a run with other settings (their hash is {written}, here it is "
            f"{settings}): move it back to the run that wrote it"
        )


def read_state(folder: Path) -> dict:
    """Read a checkpoint's state.json. Raises ValueError if it is not the state of a run."""
    state = read_json(folder / "state.json")
    for name, kind in {"step": int, "settings": str, "rewards": dict}.items():
        value = state.get(name)
        if type(value) is not kind or (name == "step" and not is_step(value)):
            raise ValueError(f"{folder / 'state.json'} is damaged: {name}={str(value)[:40]}")
    return state
