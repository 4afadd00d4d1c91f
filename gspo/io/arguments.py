"""Parsing of `key=value` arguments without Hydra, and suggestions for mistyped names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from pathlib import Path


def key_values(
    words: list[str], defaults: Mapping[str, str], paths: bool = False, empty: bool = True
) -> tuple[dict[str, str], list[str]]:
    """Return the defaults with the values from `words`, and the words that are paths.

    With `paths`, a word is a path if it has no `=` or if it exists. Raises ValueError for a key
    that is not among the defaults, and with `empty=False` for an empty value.
    """
    values = dict(defaults)
    found_paths = []
    for word in words:
        key, equals, value = word.partition("=")
        if key in defaults and equals:
            values[key] = value
        elif paths and not word.startswith("-") and (not equals or Path(word).exists()):
            found_paths.append(word)
        elif not defaults:
            raise ValueError(f"{word!r}: there is no such option; give paths alone")
        else:
            options = ", ".join(f"{name}=" for name in defaults)
            raise ValueError(
                f"{word!r}: there is no such option; "
                f"the nearest is {nearest(key, defaults)}= (of {options})"
            )
        if key in defaults and equals and not value and not empty:
            raise ValueError(f"{word!r}: give a value, {key}=...")
    return values, found_paths


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the dotted name that is most similar to a word, ignoring case.

    A name is preferred if its last part equals the word's last part or the initials of that part.

    >>> nearest("optim.learning_rate", ["optim.lr", "optim.warmup_updates"])
    'optim.lr'
    """
    word = word.lower().replace("-", "_")
    last = word.rpartition(".")[2]
    initials = "".join(part[:1] for part in last.split("_"))

    def similarity(name: str) -> float:
        lower = name.lower()
        bonus = 0.3 if lower.rpartition(".")[2] in (last, initials) else 0.0
        return SequenceMatcher(None, word, lower).ratio() + bonus

    return max(sorted(names), key=similarity)
