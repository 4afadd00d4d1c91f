"""Reads `key=value` words of the commands that do not use Hydra, and finds the nearest name to a
mistyped one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from pathlib import Path


def key_values(
    words: list[str], defaults: Mapping[str, str], paths: bool = False, empty: bool = True
) -> tuple[dict[str, str], list[str]]:
    """Return the defaults as the words change them, and the words that are paths.

    With `paths`, a word is a path if it has no `=` or names something that exists. Raises
    ValueError for a key that is not among the defaults, and with `empty=False` for an empty value.
    """
    chosen, found = dict(defaults), []
    for word in words:
        key, equals, value = word.partition("=")
        if key in defaults and equals:
            chosen[key] = value
        elif paths and not word.startswith("-") and (not equals or Path(word).exists()):
            found.append(word)
        elif not defaults:
            raise ValueError(f"{word!r}: there is no such option; give paths alone")
        else:
            options = ", ".join(f"{name}=" for name in defaults)
            raise ValueError(
                f"{word!r}: there is no such option; the nearest is {nearest(key, defaults)}= (of {options})"
            )
        if key in defaults and equals and not value and not empty:
            raise ValueError(f"{word!r}: give a value, {key}=...")
    return chosen, found


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the dotted name that looks most like a word, whatever its case. A name with the same
    last part, or its initials, is nearer.

    >>> nearest("optim.learning_rate", ["optim.lr", "optim.warmup_updates"])
    'optim.lr'
    """
    word = word.lower().replace("-", "_")
    last = word.rpartition(".")[2]
    initials = "".join(part[:1] for part in last.split("_"))

    def likeness(name: str) -> float:
        lower = name.lower()
        same = lower.rpartition(".")[2] in (last, initials)
        return SequenceMatcher(None, word, lower).ratio() + 0.3 * same

    return max(sorted(names), key=likeness)
