"""The grammar of all commands: `gspo COMMAND [PATH ...] [key=value ...] [--help]`.

A command declares its options as the fields of a dataclass, and its docstring begins the help:

    @dataclass(frozen=True, kw_only=True)
    class Options:
        paths: tuple[str, ...] = option(meaning="run directories")
        smooth: int = option(5, "average curves over so many batches on either side", least=0)
        where: dict[str, str] = option({}, "only runs with this setting")

    options = command_options(Options, __doc__)

Words without `=` are paths. A field without a default must be given. Values are written as Hydra
wants them: `true` or `false`, lists as `[a,b]`, and quotes around a text with commas. A mapping has
a word for each key: `where.optim.lr=2e-4`. The commands that train, sample and evaluate leave their
settings to Hydra itself.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from inspect import get_annotations
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from gspo.io.errors import SettingError
from gspo.io.ranges import Range, default_of, refusal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HELP = {"-h", "--help"}
PATHS = "paths"  # the field of the words without "="
MAPPING = dict[str, str]
NO_SUCH_OPTION = "there is no such option"
BOOLEANS = {"true": True, "false": False}
LINE_CHARS = 100  # of the help
MAX_WORD_CHARS = 32  # a longer option has a line of its own
Options = TypeVar("Options", bound="DataclassInstance")


class ArgumentsError(SettingError):
    """The command line is wrong. The message is a single line."""


class Option(NamedTuple):
    """A field of a command's dataclass: its name on the command line, its type and its default."""

    key: str
    kind: Any
    default: Any
    meaning: str

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    def word(self, text: str = "") -> str:
        """Return the word of the command line that sets this option, for messages and help."""
        if self.key == PATHS:
            return "PATH ..."
        return f"{self.key}.KEY=VALUE" if self.kind == MAPPING else f"{self.key}={text}"


def option(
    default: Any = dataclasses.MISSING,
    meaning: str = "",
    *,
    choices: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    why: str = "",
) -> Any:
    """Declare an option of a command, with its meaning for --help and the values it may have."""
    if choices:
        meaning = f"{meaning}: {', '.join(choices)}"
    facts: dict[str, Any] = {"meaning": meaning}
    if choices:
        facts["choices"] = tuple(choices)
    if (least, most, above) != (None, None, None):
        facts["range"] = Range(above=above, least=least, most=most, why=why)
    if default == {}:
        return dataclasses.field(default_factory=dict, metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


def options_of(kind: type[DataclassInstance]) -> dict[str, Option]:
    """Return the options of a command by the names of the fields: paths, its own, its bases'.

    A name such as `in`, which Python reserves, has an underscore as a field: `in_`."""
    kinds = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    names = [name for base in kind.__mro__ for name in get_annotations(base) if name in fields]
    names.sort(key=lambda name: name != PATHS)
    return {
        name: Option(
            name.rstrip("_"),
            kinds[name],
            default_of(fields[name]),
            fields[name].metadata["meaning"],
        )
        for name in names
    }


def command_options(
    kind: type[Options], doc: str | None, refused: Mapping[str, str] | None = None
) -> Options:
    """Return the options of this process's command line, as `parsed` does.

    Prints the help and ends the process for --help, and for no words if some are needed."""
    words = sys.argv[1:]
    required = any(entry.default is dataclasses.MISSING for entry in options_of(kind).values())
    if HELP & set(words) or (required and not words):
        print(help_text(kind, doc, refused))
        sys.exit(0 if words else 2)
    return parsed(kind, words, refused)


def parsed(
    kind: type[Options], words: Sequence[str], refused: Mapping[str, str] | None = None
) -> Options:
    """Return the options that the words of a command line give.

    `refused` maps options that have no effect in this command to the reasons.

    Raises ArgumentsError for an unknown option, a wrong value, an option that has no effect, and an
    option that is missing."""
    options = options_of(kind)
    names = {entry.key: name for name, entry in options.items() if name != PATHS}
    values: dict[str, Any] = {}
    for position, word in enumerate(words):
        key, equals_sign, text = word.partition("=")
        group, _, item = key.partition(".")
        name = names.get(group if item else key, "")
        is_mapping = bool(name) and options[name].kind == MAPPING
        if word.startswith("-"):
            raise without_dashes(words[position:], options)
        if name and equals_sign and is_mapping == bool(item):
            if refused and name in refused:
                problem = f"does nothing here: {refused[name]}"
                raise ArgumentsError(key, problem=problem, remedy="leave it out")
            if not is_mapping:
                values[name] = converted(options[name], text)
                continue
            mapping = values.setdefault(name, {})
            if mapping.setdefault(item, text) != text:
                raise ArgumentsError(key, mapping[item], f"{word} is given too", "give one value")
        elif PATHS in options and (not equals_sign or Path(word).exists()):
            values[PATHS] = (*values.get(PATHS, ()), word)
        elif not names:
            raise ArgumentsError(word, problem=NO_SUCH_OPTION, remedy="give paths alone")
        else:
            near = options[names[nearest(key, names)]].word()
            raise ArgumentsError(word, problem=NO_SUCH_OPTION, remedy=f"the nearest is {near}")
    for name, entry in options.items():
        if name in values:
            for value in values[name] if entry.is_list else [values[name]]:
                error = refusal(kind, name, value, entry.key)
                if error:
                    raise ArgumentsError(*error.args)
        elif entry.default is dataclasses.MISSING:
            raise ArgumentsError(entry.word("..."), problem=f"is missing: {entry.meaning}")
    return kind(**values)


def converted(entry: Option, text: str) -> Any:
    """Return the value of a word of the command line, by the option's type."""
    if entry.is_list:
        (kind, _) = get_args(entry.kind)
        texts = listed(text, entry.key)
        if not texts and entry.default != ():
            raise ArgumentsError(entry.key, text, "must name at least one")
        try:
            return tuple(map(kind, texts))
        except ValueError:
            name = "whole numbers" if kind is int else "numbers"
            raise ArgumentsError(entry.key, text, f"must be a list of {name}") from None
    if entry.kind is bool:
        if text.lower() not in BOOLEANS:
            raise ArgumentsError(entry.key, text, remedy="choose true or false")
        return BOOLEANS[text.lower()]
    if entry.kind in (int, float):
        try:
            return entry.kind(text)
        except ValueError:
            kind = "a whole number" if entry.kind is int else "a number"
            raise ArgumentsError(entry.key, text, f"must be {kind}") from None
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return entry.kind(text[1:-1] if is_quoted else text)


def listed(text: str, key: str) -> tuple[str, ...]:
    """Return the items of a list `[a,'b,c']`, or a single value as a list of one item."""
    in_brackets = text.startswith("[") and text.endswith("]")
    lexer = shlex.shlex(text[1:-1] if in_brackets else text, posix=True)
    lexer.whitespace = ","
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        items = tuple(item.strip() for item in lexer)
    except ValueError:
        raise ArgumentsError(key, text, "a quotation mark has no second") from None
    if not in_brackets and len(items) > 1:
        raise ArgumentsError(key, text, remedy=f"write a list as {key}=[{text}]")
    return items


def without_dashes(words: Sequence[str], options: Mapping[str, Option]) -> ArgumentsError:
    """Return the error of an option with dashes, which names the new spelling.

    For example, `--smooth 3` is smooth=3, `--no-caption` is caption=false, and `--where optim.lr=1`
    is where.optim.lr=1."""
    old, equals_sign, text = words[0].partition("=")
    values = list(takewhile(lambda word: not word.startswith("-"), words[1:]))
    if equals_sign:
        values = [text]
    keys = {entry.key: entry for name, entry in options.items() if name != PATHS}
    if not keys:
        return ArgumentsError(words[0], problem=NO_SUCH_OPTION, remedy="give paths alone")
    name = old.lstrip("-").replace("-", "_")
    entry = keys[nearest(name.removeprefix("no_"), keys)]
    if entry.kind is bool:
        spelling = entry.word("false" if name.startswith("no_") else "true")
    elif entry.kind == MAPPING:
        spelling = " ".join(f"{entry.key}.{value}" for value in values) or entry.word()
    elif entry.is_list and len(values) > 1:
        spelling = entry.word(f"[{','.join(values)}]")
    else:
        spelling = entry.word(values[0] if values else "...")
    problem = "options have no dashes"
    return ArgumentsError(words[0], problem=problem, remedy=f"set {spelling}")


def help_text(
    kind: type[DataclassInstance], doc: str | None, refused: Mapping[str, str] | None = None
) -> str:
    """Return a command's help: its docstring, and a table of its options.

    Options that have no effect in this command are left out."""
    rows = [
        (entry.word(default_text(entry)), entry.meaning)
        for name, entry in options_of(kind).items()
        if not refused or name not in refused
    ]
    column = max((len(word) for word, _ in rows if len(word) <= MAX_WORD_CHARS), default=0) + 4
    lines = [(doc or "").strip(), "", "== Options (key=value) ==", ""]
    for word, meaning in rows:
        first, *others = textwrap.wrap(meaning, LINE_CHARS - column)
        if len(word) <= MAX_WORD_CHARS:
            lines.append(f"  {word:<{column - 4}}  {first}")
        else:
            lines += [f"  {word}", " " * column + first]
        lines += [" " * column + line for line in others]
    return "\n".join(lines)


def default_text(entry: Option) -> str:
    """Return an option's default as it is written on the command line, "..." if it has none."""
    if entry.default is dataclasses.MISSING:
        return "..."
    if isinstance(entry.default, bool):
        return str(entry.default).lower()
    if isinstance(entry.default, float):
        return f"{entry.default:g}"
    return f"[{','.join(entry.default)}]" if entry.is_list else str(entry.default)


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
