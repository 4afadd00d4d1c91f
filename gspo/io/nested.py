"""Functions of nested dictionaries and lists, such as settings and other content of JSON files."""

import math
from collections.abc import Callable, Mapping
from typing import Any


def dotted(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the entries of nested dictionaries by dotted keys. An empty dictionary stays a value.

    >>> dotted({"optim": {"lr": 0.1}, "tags": []})
    {'optim.lr': 0.1, 'tags': []}
    """
    flat = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            flat |= dotted(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def mapped(content: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dictionaries and lists, in which change(v) replaces each leaf v."""
    if isinstance(content, Mapping):
        return {key: mapped(value, change) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [mapped(value, change) for value in content]
    return change(content)


def finite_or_none(value: Any) -> Any:
    """Return None for a number that JSON cannot hold, and any other value as it is."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
