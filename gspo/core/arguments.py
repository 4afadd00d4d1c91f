"""`key=value` words of the commands that Hydra does not read, and the nearest known word to one that is mistyped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from pathlib import Path


def key_values(
    words: list[str], defaults: Mapping[str, str], paths: bool = False, empty: bool = True
) -> tuple[dict[str, str], list[str]]:
    """The defaults as the words change them, and the words that are paths, where they are allowed: those without `=`,
    or that exist. Raises ValueError for a key that is not among the defaults, and for an empty value if told so."""
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
            known = ", ".join(f"{name}=" for name in defaults)
            raise ValueError(
                f"{word!r}: there is no such option; the nearest is {nearest(key, defaults)}= (of {known})"
            )
        if key in defaults and equals and not value and not empty:
            raise ValueError(f"{word!r}: give a value, {key}=...")
    return chosen, found


def nearest(word: str, known: Iterable[str]) -> str:
    """The known dotted name that looks most like this one. The same last part, or its initials, count for much."""
    last = word.rpartition(".")[2]
    initials = "".join(part[:1] for part in last.split("_"))

    def likeness(name: str) -> float:
        same = name.rpartition(".")[2] in (last, initials)
        return SequenceMatcher(None, word, name).ratio() + 0.3 * same

    return max(sorted(known), key=likeness)
