"""Finds the checkpoints of a run and tells whether they are whole. The content of their tensors is
not read here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gspo.io.files import sync
from gspo.io.untrusted import is_step, open_plain_file, path_inside, read_bytes, read_json

log = logging.getLogger(__name__)
CHECKSUMS = "checksums.json"  # SHA-256 of every other file of a checkpoint or a cold start


def seal(folder: Path, known: dict[str, str] | None = None) -> None:
    """Write the checksums of a folder's files into it, but for the `known` ones by computing them,
    and wait until everything in it is on the disk."""
    known = known or {}
    names = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    sums = {name: known.get(name) or checksum(path) for name, path in names.items()}
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def latest_checkpoint(run: Path) -> Path | None:
    """Return the newest whole checkpoint of a run directory, up to the one that `latest` names;
    None if it has none.

    It warns if newer checkpoints are damaged. Raises ValueError if there are checkpoints and none
    of them is whole.
    """
    pointer = run / "checkpoints" / "latest"
    with permission_needed(run):
        newest = read_bytes(pointer).decode(errors="replace").strip() if pointer.exists() else ""
    found = sorted((run / "checkpoints").glob("step_??????"), reverse=True)
    found = [folder for folder in found if folder.name <= newest] or found
    wrong = []
    for folder in found:
        problem = damage(folder)
        if not problem:
            if wrong:
                text = f"{'; '.join(wrong)}; going back to {folder.name}"
                log.warning(text)
                print(f"warning: {text}", file=sys.stderr)
            return folder
        wrong.append(f"{folder} is damaged: {problem}")
    if found:
        raise ValueError(
            f"{'; '.join(wrong)}; no whole checkpoint is left: move {run} away to start it from the beginning"
        )
    return None


def damage(folder: Path) -> str | None:
    """Describe what is wrong with a folder that `seal` completed; None if it is whole.

    It is damaged if a file is missing or not as it was written. Raises ValueError for a file that
    this user may not read, as nothing is known of its content.
    """
    with permission_needed(folder):
        return _damage(folder)


def _damage(folder: Path) -> str | None:
    try:
        sums = read_json(folder / CHECKSUMS)
    except PermissionError:
        raise
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (OSError, ValueError) as error:  # it is not a mapping in JSON, or not a regular file
        return f"{CHECKSUMS} cannot be read ({error})"
    for name, digest in sums.items():
        try:
            if checksum(path_inside(folder, name)) != digest:
                return f"{name} is not as it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except PermissionError:
            raise
        except (
            OSError,
            ValueError,
        ) as error:  # an error of the disk, a link, a folder, a path outside the folder
            return f"{name} cannot be read ({error})"
    return None


@contextmanager
def permission_needed(folder: Path) -> Iterator[None]:
    """Turn a PermissionError inside the block into a ValueError of one line that names the file."""
    try:
        yield
    except PermissionError as error:
        what = error.filename or folder
        raise ValueError(
            f"{what} may not be read by this user: ask its owner for the permission to read it"
        ) from None


def checksum(path: Path) -> str:
    """Compute the SHA-256 of a file's content, in hexadecimal digits."""
    with open_plain_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_belongs(folder: Path, settings: str) -> None:
    """Raise ValueError if a checkpoint was written under other settings, whatever directory it lies
    in now.
    """
    written = read_state(folder)["settings"]
    if written != settings:
        raise ValueError(
            f"{folder} belongs to a run with other settings ({written}, here {settings})"
        )


def read_state(folder: Path) -> dict:
    """Read a checkpoint's state.json. Raises ValueError if its content is not the state of a run."""
    state = read_json(folder / "state.json")
    for name, kind in {"step": int, "settings": str, "rewards": dict}.items():
        if type(state.get(name)) is not kind or (name == "step" and not is_step(state[name])):
            raise ValueError(
                f"{folder / 'state.json'} is damaged: {name}={str(state.get(name))[:40]}"
            )
    return state
