"""Whether the hub of models can be reached. Its own client tries for a minute, with two lines for
each attempt.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, try_to_load_from_cache

from gspo.model.public_models import KNOWN

SECONDS = 5.0  # how long an answer of the hub is waited for
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def check_source(path: str) -> None:
    """Do nothing for a folder. For the name of a model on the hub, while the hub cannot be reached,
    let transformers take the model from this machine's cache. Raises ValueError if it is not there
    either."""
    if Path(path).is_dir() or constants.HF_HUB_OFFLINE or is_reachable():
        return
    if not is_cached(path):
        raise ValueError(
            f"model.path={path!r}: there is no such folder here, and the hub ({constants.ENDPOINT}) cannot be reached "
            f"from this machine{nearest_model(path)}"
        )
    constants.HF_HUB_OFFLINE = True


@cache
def is_reachable() -> bool:
    """Return whether a connection to the hub can be made. Behind a proxy that is not tried."""
    if any(os.environ.get(name) for name in PROXIES):
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=SECONDS).close()
    except OSError:
        return False
    return True


def is_cached(name: str) -> bool:
    """Return whether the configuration of a model of the hub is in this machine's cache."""
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # no name that the hub could have
        return False


def nearest_model(path: str) -> str:
    """Return the end of a message that names folders beside the path, and public models, that are
    spelled alike.
    """
    given = Path(path)
    beside = []
    with suppress(OSError):  # a folder that this user may not read
        beside = [
            str(each) for each in given.parent.glob("*") if os.path.isfile(each / "config.json")
        ]
    same_end = [
        name for name in KNOWN if name.rpartition("/")[2].lower().startswith(given.name.lower())
    ]
    found = get_close_matches(path, beside, 2) or get_close_matches(path, KNOWN, 2) or same_end[:2]
    return f"; did you mean {' or '.join(found)}?" if found else ""
