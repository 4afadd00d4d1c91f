"""Give Hydra the schemas of the settings, and convert Hydra's configs and errors.

Configs become dataclasses, and errors become plain sentences.

OmegaConf.to_object turns a key that is no field (`+optim.learning_rate=1`) into an attribute that
nobody reads. Therefore `to_dataclass`, which every entry point calls, compares keys with fields.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from gspo.config.commands import BenchmarkCommand, EvaluateCommand, SampleCommand
from gspo.config.settings import CHOICES, Settings
from gspo.config.synonyms import our_name, our_option
from gspo.io.arguments import nearest
from gspo.io.errors import SettingError
from gspo.io.ranges import refusal
from gspo.tasks.base import Task, built_at

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# groups that other frameworks have too
SHARED_GROUPS = ("trainer", "rollout", "optim", "objective")
NO_SUCH_SETTING = "there is no such setting"
# if at least this share of the letters is equal, the nearest key is assumed to be meant
MIN_SIMILARITY = 0.6
SAME_GROUP = 0.8  # the same of a mistyped group whose setting is ours
# by a part of OmegaConf's message: the type that a setting must have
TYPES = {
    "could not be converted to Float": "a number",
    "could not be converted to Integer": "a whole number",
    "is not a valid bool": "true or false",
}
# option groups of `gspo train` that are not fields of Settings
GROUPS_BESIDE_SETTINGS = ("experiment", "preset", "arm", "cut")
# all schemas, by the paths that option files in conf/ refer to
SCHEMAS: dict[str, type[DataclassInstance]] = {
    "_settings": Settings,
    "_evaluate": EvaluateCommand,
    "_sample": SampleCommand,
    "_benchmark": BenchmarkCommand,
}
for group, options in CHOICES.items():
    SCHEMAS |= {f"{group}/_{name}": kind for name, kind in options.items()}

# Hydra's sources of configs have a method `list`, which hides the type in their annotations
Names = list[str]


def schema(kind: type[DataclassInstance]) -> DictConfig:
    """Make Hydra's schema of a dataclass. Keys can be added to its mappings without `+`."""
    node = OmegaConf.structured(kind)
    _open_mappings(node)
    return node


def _open_mappings(node: DictConfig) -> None:
    for key in node:
        child = node._get_node(key)
        if holds_values(child):
            if is_dataclass(OmegaConf.get_type(child)):
                _open_mappings(child)
            else:
                OmegaConf.set_struct(child, False)


@cache
def schema_at(path: str) -> DictConfig:
    """Return the schema under a path such as `objective/_gspo`. Callers must not change it."""
    return schema(SCHEMAS[path])


class SchemaSource(ConfigSource):
    """The schemas of all settings, which Hydra finds by paths such as `objective/_gspo`.

    Hydra's ConfigStore would serve them too. But Hydra copies all that the store holds whenever it
    looks up the options of a group, 150 times for `--help`."""

    @staticmethod
    def scheme() -> str:
        return "schemas"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == "" or config_path in CHOICES

    def is_config(self, config_path: str) -> bool:
        return config_path.removesuffix(".yaml") in SCHEMAS

    def list(self, config_path: str, results_filter: ObjectType | None) -> Names:
        groups = list(CHOICES) if config_path == "" else []
        paths = [path.rpartition("/") for path in SCHEMAS]
        configs = [name for group, _, name in paths if group == config_path]
        if results_filter == ObjectType.GROUP:
            return sorted(groups)
        return sorted(configs if results_filter == ObjectType.CONFIG else [*groups, *configs])

    def load_config(self, config_path: str) -> ConfigResult:
        path = config_path.removesuffix(".yaml")
        return ConfigResult(
            provider=self.provider,
            path=f"schemas://{path}",
            config=copy.deepcopy(schema_at(path)),
            header={"package": None},
        )


class SearchSchemas(SearchPathPlugin):
    """Lets Hydra search the schemas."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("schemas", "schemas://")


def merged(config: DictConfig, *changes: Any) -> DictConfig:
    """Merge mappings into a copy of a config. Raises an OmegaConf error for a wrong value."""
    # the type of the result is the type of the first argument, which OmegaConf does not declare
    return cast(DictConfig, OmegaConf.merge(config, *changes))


def plain(config: DictConfig) -> dict[str, Any]:
    """Return a config as nested dictionaries and lists. Interpolations are not resolved."""
    # OmegaConf declares the results for lists and for missing values too
    return cast(dict[str, Any], OmegaConf.to_container(config))


def literal(content: Any) -> Any:
    """Escape every `${` in a file's content, at any depth, so OmegaConf resolves nothing in it.

    Raises ValueError for ???, OmegaConf's missing value, which cannot be escaped.
    """
    if content == "???":
        raise ValueError("??? stands for a setting that is not given")
    if isinstance(content, dict):
        return {key: literal(value) for key, value in content.items()}
    if isinstance(content, list):
        return [literal(value) for value in content]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", content) if isinstance(content, str) else content


def to_dataclass(config: DictConfig) -> Any:
    """Convert a config to its dataclasses.

    Raises ValueError, naming the dotted key, for a key that is no setting and for a value outside
    its range or choices. Errors of the dataclasses themselves are raised too.
    """
    check_keys(config)
    check_values(config)
    try:
        settings = OmegaConf.to_object(config)
    except SettingError:
        # a task does not know its path while it is built with all other settings
        for key, node in task_nodes(config):
            with built_at(key):
                OmegaConf.to_object(node)
        raise
    for key, _ in task_nodes(config):
        part: Any = settings
        for name in key.split("."):
            part = part[name] if isinstance(part, dict) else getattr(part, name)
        part.key = key
    return settings


def task_nodes(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Yield the tasks in a config with their dotted keys, the parts of a mixture before it."""
    for name in node.keys():  # noqa: SIM118, a key without value is not iterated over
        child = node._get_node(name)
        if holds_values(child):
            key = f"{prefix}{name}"
            yield from task_nodes(child, f"{key}.")
            kind = OmegaConf.get_type(child)
            if isinstance(kind, type) and issubclass(kind, Task):
                yield key, child


def check_keys(config: DictConfig) -> None:
    """Raise ValueError for the first key that is no field of its dataclass.

    The message names the nearest setting."""
    unknown = next(keys_without_field(config), "")
    if unknown:
        raise no_such_setting(unknown, settings_of(config))


def keys_without_field(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config that are no fields of their dataclasses."""
    names = field_names(node)
    for key in node.keys():  # noqa: SIM118, a key without value is not iterated over
        if key not in names:
            yield f"{prefix}{key}"
            continue
        child = node._get_node(key)
        if holds_values(child):
            yield from keys_without_field(child, f"{prefix}{key}.")


def field_names(node: DictConfig) -> list[Any]:
    """Return the fields of a config's dataclass, or the keys of a plain mapping, texts or numbers."""
    kind = OmegaConf.get_type(node)
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(node.keys())


def holds_values(child: Any) -> TypeGuard[DictConfig]:
    """Return whether a node of a config is itself a config, and neither missing nor null."""
    return isinstance(child, DictConfig) and not (child._is_missing() or child._is_none())


def check_values(node: DictConfig, prefix: str = "") -> None:
    """Raise ValueError for the first setting that is removed, missing, or outside its range."""
    kind = OmegaConf.get_type(node)
    keys = list(node.keys())
    for name in field_names(node):
        key = f"{prefix}{name}"
        if name not in keys:
            raise taken_away(key)
        if OmegaConf.is_missing(node, name):
            raise SettingError(key, problem="is not given", remedy=f"say {key}=...")
        value = node[name]
        if isinstance(value, DictConfig) and holds_settings(value):
            check_values(value, f"{key}.")
        elif is_dataclass(kind):
            plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            error = refusal(kind, name, plain, key)
            if error:
                raise error


def holds_settings(value: DictConfig) -> bool:
    """Return whether a config is a dataclass, or a mapping of dataclasses.

    The settings `tasks` of `gspo evaluate` are such a mapping."""
    if is_dataclass(OmegaConf.get_type(value)) or not value:
        return True
    return any(
        is_dataclass(OmegaConf.get_type(child))
        for child in value.values()
        if OmegaConf.is_config(child)
    )


def settings_of(node: DictConfig, prefix: str = "") -> list[str]:
    """List the dotted keys of all fields of a config, without the keys inside mappings."""
    keys = []
    present = [name for name in node.keys() if name != "hydra"]  # noqa: SIM118, as above
    for name in field_names(node):
        if name not in present:
            continue
        keys.append(f"{prefix}{name}")
        child = node._get_node(name)
        if holds_values(child):
            keys += settings_of(child, f"{prefix}{name}.")
    return keys


# -------------------------------------------------------------------------------- errors in words
def taken_away(key: str) -> SettingError:
    """Return the error of ~key: no setting can be left out."""
    return SettingError(
        f"~{key}", problem="a setting cannot be taken away", remedy=f"give it a value, {key}=..."
    )


def no_such_setting(key: str, settings: list[str]) -> SettingError:
    """Return the error of an unknown setting, which names the setting that may be meant.

    That is the first of these: the setting of a mistyped group, our name for another framework's
    setting, the options of the group that have the setting, the nearest setting. If that is far,
    all settings of the group follow.
    """
    is_of_a_run = "objective" in settings
    group, _, name = key.partition(".")
    name = name.lower()
    if group not in settings:
        full = as_typed(key)
        near = nearest(full, settings)
        near_group, _, near_name = near.partition(".")
        likeness = SequenceMatcher(None, group.lower(), near_group).ratio()
        if near_name == full.partition(".")[2] and likeness > SAME_GROUP:
            return SettingError(full, problem=NO_SUCH_SETTING, remedy=f"the nearest is {near}")
    if is_of_a_run and (group not in settings or group == key or group in SHARED_GROUPS):
        full = as_typed(key)
        ours = our_name(full)
        if ours:
            return SettingError(full, problem=NO_SUCH_SETTING, remedy=f"here it is {ours}")
    if is_of_a_run and f"{group}.{name}" not in settings:
        options = options_with(group, name)
        if options:
            remedy = f"{group}.{name} is a setting of {', '.join(options)}"
            return SettingError(key, problem=NO_SUCH_SETTING, remedy=remedy)
    candidates = [
        candidate
        for candidate in (*settings, *(GROUPS_BESIDE_SETTINGS if is_of_a_run else ()))
        if not key.startswith(f"{candidate}.") and not candidate.endswith(".name")
    ]
    near = nearest(key, candidates)
    group, _, last = key.rpartition(".")
    remedy = f"the nearest is {near}"
    similarity = SequenceMatcher(None, last.lower(), near.rpartition(".")[2].lower()).ratio()
    siblings = [
        candidate.rpartition(".")[2]
        for candidate in candidates
        if candidate.rpartition(".")[0] == group
    ]
    if similarity < MIN_SIMILARITY and siblings:
        remedy += f" (of {', '.join(siblings)})"
    return SettingError(key, problem=NO_SUCH_SETTING, remedy=remedy)


def options_with(group: str, name: str) -> list[str]:
    """Return the options of a group that have a setting, as `group=option`."""
    return [
        f"{group}={option}"
        for option, kind in CHOICES.get(group, {}).items()
        if name in {field.name for field in fields(kind)}
    ]


def as_typed(key: str) -> str:
    """Return a key that Hydra does not know as the command line has it.

    For example, of `actor.optim.lr=1` Hydra's error names only `actor`."""
    typed = [word.partition("=")[0].lstrip("+~") for word in sys.argv[1:]]
    return next((word for word in typed if word.startswith(f"{key}.")), key)


def plain_words(error: BaseException) -> str:
    """Rewrite an error of Hydra's about keys or options as one sentence, or return ""."""
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return ""
    if isinstance(error, MissingConfigException) and error.options:
        return _no_option(error, error.options)
    text = str(error)
    if isinstance(error, MissingConfigException) and text.startswith("Cannot find primary config"):
        return no_such_file(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is no setting: write KEY=VALUE, without blanks around the ="
    several = re.match(r"Ambiguous value for argument '(.*?)'", text)
    if several:
        return f"{several[1]}: several values make a sweep, which is gspo train -m"
    unmerged = re.match(r"Error merging override (.*)", text)
    if unmerged and "is not Optional" in str(error.__cause__):
        return f"{unmerged[1]}: null is no value of this setting"
    if unmerged and "is not a ListConfig" in str(error.__cause__):
        key, _, value = unmerged[1].partition("=")
        return f"{unmerged[1]}: must be a list, as {key}=[{value}]"
    existing = re.match(r"Could not append to config. An item is already at '(.+?)'", text)
    if existing:
        return f"+{existing[1]}: this is a setting already; give it without +"
    option_file = re.match(r"In '([^']+)': ", text)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigKeyError | ConfigAttributeError):
            key = cause.full_key
            if key and cause.parent_node is not None:
                root = cause.parent_node._get_root()
                if key.startswith("hydra."):
                    settings = settings_of(root.hydra, "hydra.")
                else:
                    settings = settings_of(root)
                if option_file:
                    misfit = file_of_another_option(option_file[1], key, root)
                    return misfit or f"{option_file[0]}{no_such_setting(key, settings)}"
                return str(no_such_setting(key, settings))
        if isinstance(cause, ValidationError) and cause.full_key:
            typed = as_typed(cause.full_key)
            if typed != cause.full_key:
                return f"{typed}: there is no such setting: {cause.full_key} has no parts"
            mistake = wrong_type(cause)
            return f"{option_file[0] if option_file else ''}{mistake}" if mistake else ""
        cause = cause.__cause__ or cause.__context__
    return ""


def no_such_file(error: MissingConfigException) -> str:
    """Say in words that -cn NAME names no file, with the nearest name of a file that there is.

    Hydra's message lists the folders that were searched."""
    folders = re.findall(r"path=file://(.+)", str(error))
    names = [file.stem for folder in folders for file in Path(folder).glob("*.yaml")]
    name = error.missing_cfg_file or ""
    text = f"-cn {name}: there is no such file"
    return f"{text}; the nearest is {nearest(name, names)}" if names else text


def wrong_type(error: OmegaConfBaseException, prefix: str = "") -> SettingError | None:
    """Return the error of a value of another type than its setting's, None for another error.

    `prefix` comes before the setting's key."""
    line = str(error).splitlines()[0]
    value = re.match(r"Value '(.*?)' (of type|is not)", line)
    for pattern, words in TYPES.items():
        if value and pattern in line:
            return SettingError(f"{prefix}{error.full_key}", value[1], f"must be {words}")
    return None


def file_of_another_option(file: str, key: str, root: Any) -> str:
    """Say that an option file sets a setting that the chosen option of a group lacks, or return "".

    For example, `experiment/micro_moe` sets task.max_operands, which task=rows does not have."""
    chosen_group, _, chosen_option = file.partition("/")
    group, _, name = key.partition(".")
    options = options_with(group, name)
    option = OmegaConf.select(root, f"{group}.name")
    if chosen_group not in GROUPS_BESIDE_SETTINGS or not options or option is None:
        return ""
    trial = " (cut=tiny for a trial)" if chosen_group == "experiment" else ""
    return (
        f"{chosen_group}={chosen_option} sets {key} for {' or '.join(options)} and does not fit "
        f"{group}={option}: leave {chosen_group}= out{trial}"
    )


def _no_option(error: MissingConfigException, found_options: Sequence[str]) -> str:
    """Say in words that there is no such option, and which options there are.

    Options whose names begin with _ are schemas, and are left out."""
    file = error.missing_cfg_file or ""
    group, _, option = file.partition("/") if file.startswith("model/") else file.rpartition("/")
    options = [name for name in found_options if not name.startswith("_")]
    text = f"{group}={option}: there is no such option"
    if group == "model":
        return (
            f"{text} ({', '.join(options)}); "
            f"a folder or a model of the hub is model=hf model.path={option}"
        )
    ours = our_option(group, option)
    if ours:
        return f"{text}: here it is {group}={ours}"
    return f"{text}; the nearest is {nearest(option, options)} (there are {', '.join(options)})"
