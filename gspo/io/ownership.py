"""Tells which small files of a run directory this user wrote: they are signed with a key that is
kept elsewhere.

The owner that the file system names proves nothing, because whoever unpacks someone else's run
directory owns its files. For each signed file, `signed.json` holds under the file's name a keyed
hash (HMAC-SHA256) of its content and of its directory's name. The key is made when it is first
needed, in $XDG_STATE_HOME/gspo or ~/.local/state/gspo. So machines that share a home directory
recognise each other's runs. Without a home directory no file is recognised.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from gspo.io import untrusted
from gspo.io.files import replace_text

SIGNATURES = "signed.json"


def is_own_file(file: Path) -> bool:
    """Tell whether this user wrote the file with its present content, in a directory of this name."""
    key, content = _key(), _content(file)
    return (
        key is not None
        and content is not None
        and _signature(key, file, content) in _signatures(file)
    )


def why_not_own() -> str:
    """Explain why a file is not recognised as this user's; the words follow the file's name in a
    message.
    """
    if _key() is None:
        return "cannot be known to be this user's: there is no home directory for the key that would show it"
    return "was not written by this user in this place"


def write_signed(file: Path, text: str) -> None:
    """Write a file that `own` will recognise, even if the process is killed in between."""
    if key := _key():
        before = [_signature(key, file, _content(file))] if is_own_file(file) else []
        new = {file.name: [_signature(key, file, text.encode()), *before]}
        replace_text(
            file.with_name(SIGNATURES),
            json.dumps(_read(file.with_name(SIGNATURES)) | new, indent=1),
        )
    replace_text(file, text)


def derived_key(purpose: str) -> bytes | None:
    """Return a key of this user's for another purpose than signing files; None if there is no place
    to keep one.
    """
    key = _key()
    return (
        None if key is None else hmac.new(key, f"for {purpose}".encode(), hashlib.sha256).digest()
    )


def _signature(key: bytes, file: Path, content: bytes) -> str:
    """Compute the keyed hash of a file's content and place."""
    place = json.dumps([file.parent.resolve().name, file.name]).encode()
    return hmac.new(key, place + b"\n" + content, hashlib.sha256).hexdigest()


def _signatures(file: Path) -> list:
    """Read the signatures that `signed.json` holds for a file."""
    found = _read(file.with_name(SIGNATURES)).get(file.name)
    return found if isinstance(found, list) else []


def _content(file: Path) -> bytes | None:
    try:
        return untrusted.read_bytes(file)
    except (
        OSError,
        untrusted.Unreadable,
    ):  # there is no such file, or it is not one that we would have written
        return None


def _read(path: Path) -> dict:
    try:
        return untrusted.read_json(path)
    except (OSError, untrusted.Unreadable):
        return {}


def _key() -> bytes | None:
    """Read this user's key, which is made if there is none; None if there is no place to keep one."""
    try:
        file = _state() / "key"
        if not file.exists():
            _make(file)
        return file.read_bytes() or None
    except (OSError, RuntimeError):  # there is no home directory, or it cannot be written to
        return None


def _state() -> Path:
    """Return the folder where the key is kept."""
    if given := os.environ.get("XDG_STATE_HOME"):
        return Path(given) / "gspo"
    if not Path.home().is_dir():
        raise FileNotFoundError(Path.home())
    return Path.home() / ".local" / "state" / "gspo"


def _make(file: Path) -> None:
    """Write a new key to a file, whole or not at all; if several processes do so at once, the first
    one's key stays.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, beside = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as unfinished:
            unfinished.write(secrets.token_bytes(32))
            unfinished.flush()
            os.fsync(unfinished.fileno())
        with suppress(FileExistsError):
            os.link(beside, file)
    finally:
        os.unlink(beside)
