"""A peer's options by the peer's own names, with a record of which were read, so that none is
silently ignored.
"""

from peers.vectors import Entry

REMARKS = ("note",)  # options that inform only the reader


class Untranslated(ValueError):
    """Raised when what a peer does has no translation here; the message says what."""


class Options:
    """The entry's config and, after it, the options in the brackets of its key."""

    def __init__(self, entry: Entry):
        self.config = entry.config
        self.labels = entry.labels
        self.read: set[str] = set(REMARKS)

    def take(self, *names: str, default: object = None) -> object:
        """Return the value of the first of these names that is given and not None, else the
        default.
        """
        self.read |= set(names)
        for source in (self.config, self.labels):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return default

    def ignore(self, *names: str) -> None:
        """Count these options as read: they do not change what is translated."""
        self.read |= set(names)

    def ignore_labels(self) -> None:
        """Count all labels as read: they repeat the config."""
        self.read |= set(self.labels)

    def unread(self) -> list[str]:
        """Return the options that no translation looked at, except labels that repeat what the
        config says.
        """
        said = {str(value) for value in self.config.values()}
        said |= {str(float(v)) for v in self.config.values() if isinstance(v, int | float)}
        left = [f"{name}={value}" for name, value in self.config.items() if name not in self.read]
        for name, value in self.labels.items():
            parts = [name] if value is True else str(value).split("/")
            if name not in self.read and name not in self.config and not said.issuperset(parts):
                left.append(name if value is True else f"{name}={value}")
        return left
