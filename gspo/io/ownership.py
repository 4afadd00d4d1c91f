"""Signatures by which this user's own files in a run directory are recognised.

The file system's owner proves nothing: a user who unpacks someone else's run directory owns its
files. So files are signed with a key that is kept outside the run directory. `signed.json` holds,
by the name of each signed file, a keyed hash (HMAC-SHA256) of the file's content and of its
directory's name.

The key lies in $XDG_STATE_HOME/gspo or ~/.local/state/gspo and is created when it is first needed.
So machines that share a home directory recognise each other's runs. Without a home directory no
file is recognised.
"""

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
    """Return whether this user wrote the file with its content, in a directory of this name."""
    key = _key()
    content = _content(file)
    if key is None or content is None:
        return False
    return _signature(key, file, content) in _signatures(file)


def why_not_own() -> str:
    """Return the reason why a file is not recognised, for a message after the file's name."""
    if _key() is None:
        return (
            "cannot be known to be this user's: "
            "there is no home directory for the key that would show it"
        )
    return "was not written by this user in this place"


def write_signed(file: Path, text: str) -> None:
    """Write a file that `is_own_file` recognises.

    The signatures of the old and the new content are written first. So the file is recognised even
    if the process is killed in between.
    """
    key = _key()
    if key:
        signatures = [_signature(key, file, text.encode())]
        old_content = _content(file)
        if old_content is not None and is_own_file(file):
            signatures.append(_signature(key, file, old_content))
        signatures_file = file.with_name(SIGNATURES)
        all_signatures = _read(signatures_file) | {file.name: signatures}
        replace_text(signatures_file, json.dumps(all_signatures, indent=1))
    replace_text(file, text)


def derived_key(purpose: str) -> bytes | None:
    """Return this user's key for another purpose, or None if there is no home directory for it."""
    key = _key()
    if key is None:
        return None
    return hmac.new(key, f"for {purpose}".encode(), hashlib.sha256).digest()


def _signature(key: bytes, file: Path, content: bytes) -> str:
    """Compute the keyed hash of a file's directory name, name and content."""
    names = json.dumps([file.parent.resolve().name, file.name]).encode()
    return hmac.new(key, names + b"\n" + content, hashlib.sha256).hexdigest()


def _signatures(file: Path) -> list:
    """Return the signatures of a file in `signed.json`."""
    signatures = _read(file.with_name(SIGNATURES)).get(file.name)
    return signatures if isinstance(signatures, list) else []


def _content(file: Path) -> bytes | None:
    try:
        return untrusted.read_bytes(file)
    except (OSError, untrusted.Unreadable):  # no such file, or not a file that we would write
        return None


def _read(path: Path) -> dict:
    try:
        return untrusted.read_json(path)
    except (OSError, untrusted.Unreadable):
        return {}


def _key() -> bytes | None:
    """Return this user's key, created if there is none, or None if it cannot be stored."""
    try:
        file = _state_folder() / "key"
        if not file.exists():
            _create_key(file)
        return file.read_bytes() or None
    except (OSError, RuntimeError):  # there is no home directory, or it is not writable
        return None


def _state_folder() -> Path:
    """Return the folder of the key. Raises FileNotFoundError without a home directory."""
    state_home = os.environ.get("XDG_STATE_HOME")
    if state_home:
        return Path(state_home) / "gspo"
    if not Path.home().is_dir():
        raise FileNotFoundError(Path.home())
    return Path.home() / ".local" / "state" / "gspo"


def _create_key(file: Path) -> None:
    """Write a new key to a file atomically. If several processes do so, the first key stays."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, unfinished_path = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as unfinished:
            unfinished.write(secrets.token_bytes(32))
            unfinished.flush()
            os.fsync(unfinished.fileno())
        with suppress(FileExistsError):
            os.link(unfinished_path, file)
    finally:
        os.unlink(unfinished_path)
