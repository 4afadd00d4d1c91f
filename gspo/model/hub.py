"""Checks whether the hub of models can be reached.

The hub's own client tries for a minute, and prints two lines for each attempt.
"""

import os
import socket
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, try_to_load_from_cache

from gspo.io.errors import SettingError
from gspo.model.public_models import PUBLIC_MODELS

TIMEOUT_SECONDS = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def check_source(path: str) -> None:
    """Let transformers take a model from this machine's cache if the hub cannot be reached.

    For a folder this does nothing. Raises ValueError if the model is not in the cache either."""
    if Path(path).is_dir() or constants.HF_HUB_OFFLINE or is_reachable():
        return
    if not is_cached(path):
        raise SettingError(
            "model.path",
            path,
            f"there is no such folder here, and the hub ({constants.ENDPOINT}) cannot be "
            f"reached from this machine{nearest_model(path)}",
        )
    constants.HF_HUB_OFFLINE = True


@cache
def is_reachable() -> bool:
    """Return whether a connection to the hub can be made, or a proxy is set."""
    if any(os.environ.get(name) for name in PROXIES):
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=TIMEOUT_SECONDS).close()
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
    """Return the end of a message that suggests up to two folders or public models for a path.

    Their spelling is close to the path's. The text is empty if there is no such name."""
    siblings = []
    # this user may not be allowed to read the folder
    with suppress(OSError):
        folders = Path(path).parent.glob("*")
        siblings = [str(folder) for folder in folders if os.path.isfile(folder / "config.json")]
    suggestions = get_close_matches(path, siblings, 2) or get_close_matches(path, PUBLIC_MODELS, 2)
    if not suggestions:
        start = Path(path).name.lower()
        for name in PUBLIC_MODELS:
            model_name = name.rpartition("/")[2].lower()
            if model_name.startswith(start) and len(suggestions) < 2:
                suggestions.append(name)
    return f"; did you mean {' or '.join(suggestions)}?" if suggestions else ""
