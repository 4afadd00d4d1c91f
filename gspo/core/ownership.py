"""Which small files of a run directory this user wrote: they are signed with a key that lies outside of it.

Who owns a file says nothing, as whoever unpacks a stranger's directory owns its files. `signed.json` holds a keyed hash
(HMAC-SHA256) of each such file and of its directory's name, by the file's name. The key is made at its first use, in
$XDG_STATE_HOME/gspo or ~/.local/state/gspo: machines that share the home directory know each other's runs. Without a
home directory nothing is known to be one's own.
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

from gspo.core import untrusted
from gspo.core.files import replace_text

SIGNATURES = "signed.json"


def own(file: Path) -> bool:
    """Whether this user wrote the file as it stands, in a directory of this name."""
    key, content = _key(), _content(file)
    return key is not None and content is not None and _signature(key, file, content) in _signatures(file)


def doubt() -> str:
    """Why a file is not taken for this user's, to be put after its name."""
    if _key() is None:
        return "cannot be known to be this user's: there is no home directory for the key that would show it"
    return "was not written by this user in this place"


def write_signed(file: Path, text: str) -> None:
    """Write a file that `own` knows again, also if this is killed before its end."""
    if key := _key():
        before = [_signature(key, file, _content(file))] if own(file) else []
        new = {file.name: [_signature(key, file, text.encode()), *before]}
        replace_text(file.with_name(SIGNATURES), json.dumps(_read(file.with_name(SIGNATURES)) | new, indent=1))
    replace_text(file, text)


def _signature(key: bytes, file: Path, content: bytes) -> str:
    place = json.dumps([file.parent.resolve().name, file.name]).encode()
    return hmac.new(key, place + b"\n" + content, hashlib.sha256).hexdigest()


def _signatures(file: Path) -> list:
    found = _read(file.with_name(SIGNATURES)).get(file.name)
    return found if isinstance(found, list) else []


def _content(file: Path) -> bytes | None:
    try:
        return untrusted.read_bytes(file)
    except (OSError, untrusted.Unreadable):  # none yet, or nothing that we would have written
        return None


def _read(path: Path) -> dict:
    try:
        return untrusted.read_json(path)
    except (OSError, untrusted.Unreadable):
        return {}


def _key() -> bytes | None:
    """This user's key; None where there is no place to keep one."""
    try:
        file = _state() / "key"
        if not file.exists():
            _make(file)
        return file.read_bytes() or None
    except (OSError, RuntimeError):  # no home directory, or none that can be written
        return None


def _state() -> Path:
    if given := os.environ.get("XDG_STATE_HOME"):
        return Path(given) / "gspo"
    if not Path.home().is_dir():
        raise FileNotFoundError(Path.home())
    return Path.home() / ".local" / "state" / "gspo"


def _make(file: Path) -> None:
    """Whole or not at all; of several processes that make it at a time the first counts."""
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
