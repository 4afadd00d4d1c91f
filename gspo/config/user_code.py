"""Outside code: classes of a user's own package as options of Hydra's groups, typed like ours.

    objective=my_pkg.losses:Mine objective.clip_low=0.1        an objective; advantage= and task=
                                                               likewise
    metrics.gap=my_pkg.extras:Gap                              a metric, custom/gap
    callbacks.stop.path=my_pkg.extras:StopEarly callbacks.stop.reward=0.9

A class is a dataclass that derives from the base named in BASES. Its fields are settings: unknown
keys, wrong types and numbers out of range are refused as for any other setting. An option file of
the user's own may begin with `defaults: ["my_pkg.losses:Mine"]`. A hash of the class's source
(gspo.io.user_code) becomes part of the run's settings.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gspo.algorithm.advantages import Advantage
from gspo.algorithm.objectives import Objective
from gspo.config.refusals import NO_SUCH_SETTING, wrong_type
from gspo.config.schema import Names, merged, schema
from gspo.config.settings import CHOICES
from gspo.io.arguments import nearest
from gspo.io.errors import SettingError, first_line
from gspo.io.ranges import fields_with
from gspo.io.user_code import EXAMPLE, import_object, is_path, sources
from gspo.tasks.base import Task
from gspo.train.extensions import Callback, CustomMetric

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from gspo.config.settings import Settings

# By group: the base that a class of the user's derives from, and the methods that it must have,
# with their arguments.
BASES: dict[str, tuple[type, dict[str, tuple[str, ...]]]] = {
    "objective": (Objective, {"__call__": ("inputs",)}),
    "advantage": (Advantage, {"estimate": ("credit",)}),
    "task": (
        Task,
        {"problem": ("seed", "split", "index"), "score": ("answers",), "evaluation_sets": ()},
    ),
    "metrics": (CustomMetric, {"__call__": ("trained",)}),
    "callbacks": (Callback, {}),
}
# settings that are mappings from names to classes of the user's
CLASSES_BY_NAME = ("metrics", "callbacks")
HOOKS = ("before_step", "after_step")  # the methods of a callback, one of which it must have


# -------------------------------------------------------------------------------------------------
# options of groups
class OutsideOptions(ConfigSource):
    """The options that are classes: `objective/my_pkg.losses:Mine` is the schema of that class.

    Hydra asks this source for options that no file has."""

    @staticmethod
    def scheme() -> str:
        return "outside"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        group, _, option = config_path.removesuffix(".yaml").rpartition("/")
        return group in BASES and group not in CLASSES_BY_NAME and is_path(option)

    def list(self, config_path: str, results_filter: ObjectType | None) -> Names:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, option = config_path.removesuffix(".yaml").rpartition("/")
        return ConfigResult(
            provider=self.provider,
            path=f"outside://{option}",
            config=class_schema(load_class(option, group, group), group),
            header={"package": None},
        )


class SearchOutside(SearchPathPlugin):
    """Lets Hydra search classes after all folders of option files."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("outside", "outside://")


def register_outside_code() -> None:
    """Let Hydra find classes of the user's own packages."""
    Plugins.instance().register(OutsideOptions)
    Plugins.instance().register(SearchOutside)


# -------------------------------------------------------------------------------------------------
# classes
def load_class(path: str, group: str, key: str) -> type[DataclassInstance]:
    """Import a class of the user's.

    Raises ValueError in one line, which begins with `key`, if it does not fit."""
    kind = import_object(path, key)
    base, methods = BASES[group]
    problem = ""
    if not (isinstance(kind, type) and issubclass(kind, base)):
        problem = f"must be a class that derives from {base.__module__}.{base.__name__}"
    elif not is_dataclass(kind) or "__dataclass_fields__" not in vars(kind):
        problem = "write @dataclass above the class, so that its fields are settings"
    elif base is Callback and all(getattr(kind, name) is getattr(base, name) for name in HOOKS):
        problem = f"must have a method {' or '.join(HOOKS)}"
    elif base is CustomMetric and not (kind.unit and kind.meaning):
        problem = "must say its unit and its meaning, as class attributes"
    elif option_name(kind) in CHOICES.get(group, {}):
        name = option_name(kind)
        problem = f"its name={name!r} is that of a built-in option; give it another"
    else:
        wrong_methods = (
            wrong_method(kind, base, name, arguments) for name, arguments in methods.items()
        )
        problem = next(filter(None, wrong_methods), "")
    if problem:
        raise SettingError(key, path, problem)
    return kind


def wrong_method(kind: type, base: type, name: str, arguments: tuple[str, ...]) -> str:
    """Say that a class lacks a method, or that the method does not take these arguments."""
    method = getattr(kind, name)
    expected = f"{name}({', '.join(('self', *arguments))})"
    if method is getattr(base, name):
        return f"must have a method {expected}"
    signature = inspect.signature(method)
    try:
        signature.bind(None, *arguments)
    except TypeError:
        return f"{name}{signature} must be {expected}"
    return ""


def option_name(kind: type[DataclassInstance]) -> str:
    """Return the name of a class as an option: its own field `name`, else the class's name."""
    if "name" in inspect.get_annotations(kind):
        for field in fields(kind):
            if field.name == "name":
                default: Any = field.default
                return default
    return kind.__name__


def class_path(kind: type) -> str:
    """Return the path by which a class is named, for example "my_pkg.losses:Mine"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def class_schema(kind: type[DataclassInstance], key: str) -> DictConfig:
    """Return the schema of a class.

    Raises ValueError if a field's type cannot be that of a setting."""
    try:
        node = schema(kind)
    except (OmegaConfBaseException, NameError, TypeError) as error:
        raise SettingError(
            key, class_path(kind), f"its fields cannot be settings: {first_line(error)}"
        ) from None
    if "name" in node:
        node.name = option_name(kind)
    return node


# -------------------------------------------------------------------------------------------------
# metrics and callbacks
def with_outside_parts(config: DictConfig) -> DictConfig:
    """Replace the entries of `metrics` and `callbacks` by the schemas of their classes.

    The schemas get the values that the entries give."""
    if not any(config.get(group) for group in CLASSES_BY_NAME):
        return config
    config = config.copy()
    with open_dict(config):
        for group in CLASSES_BY_NAME:
            for name in list(config[group] or {}):
                config[group][name] = part_config(config[group][name], group, f"{group}.{name}")
    return config


def part_config(entry: Any, group: str, key: str) -> DictConfig:
    """Return a metric or callback as a typed config.

    `entry` is "my_pkg.extras:Gap", or a mapping with `path` and values of the class's fields.
    Raises ValueError, naming the key, if the class or a value does not fit."""
    if OmegaConf.is_config(entry) and is_dataclass(OmegaConf.get_type(entry)):
        return entry
    typed = [word.lstrip("+") for word in sys.argv[1:]]
    settings = [word.partition("=")[0] for word in typed if word.startswith(f"{key}.")]
    if isinstance(entry, str):
        # Hydra has replaced the settings by the class
        if settings:
            raise SettingError(key, entry, remedy=f"write {key}.path={entry} beside {settings[0]}")
        return with_values(load_class(entry, group, key), {"path": entry}, key)
    values = entry
    if not (OmegaConf.is_dict(values) or isinstance(values, dict)):
        raise SettingError(key, entry, f"set its module and class, {key}=my_pkg.extras:Gap")
    path = values.get("path")
    if path is None:
        # Hydra has replaced the class by the settings
        classes = [word.partition("=")[2] for word in typed if word.startswith(f"{key}=")]
        path = classes[-1] if classes else "my_pkg.extras:Gap"
        beside = "".join(f" beside {key}.{name}" for name in list(values)[:1])
        problem = "no class is given"
        if classes:
            problem = "beside settings of its own, a class is given as its path"
        raise SettingError(key, problem=problem, remedy=f"write {key}.path={path}{beside}")
    if not isinstance(path, str):
        raise SettingError(f"{key}.path", path, remedy=EXAMPLE)
    return with_values(load_class(path, group, key), values, key)


def with_values(kind: type[DataclassInstance], values: Any, key: str) -> DictConfig:
    """Return the schema of a class with values for its settings.

    Raises ValueError, naming the key, for an unknown setting or a value that does not fit."""
    node = class_schema(kind, key)
    names = [field.name for field in fields(kind)]
    for name in values:
        if name not in names:
            near = nearest(name, names)
            raise SettingError(
                f"{key}.{name}", problem=NO_SUCH_SETTING, remedy=f"the nearest is {key}.{near}"
            )
    try:
        return merged(node, values)
    except OmegaConfBaseException as error:
        mistake = wrong_type(error, f"{key}.")
        raise mistake or SettingError(key, problem=first_line(error)) from None


# -------------------------------------------------------------------------------------------------
# the record of outside code in the settings
def outside_code(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the path and the source files' SHA-256 of all outside code, by the naming setting."""
    paths = dict(outside_paths(settings))
    return {key: {"path": path, "sha256": sources(path, key)} for key, path in paths.items()}


def outside_paths(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the settings that name outside code, each with the code's path."""
    for group, options in CHOICES.items():
        chosen = getattr(settings, group)
        if type(chosen) not in options.values():
            yield group, class_path(type(chosen))
        for name in fields_with(type(chosen), "outside_code"):
            if getattr(chosen, name):
                yield f"{group}.{name}", getattr(chosen, name)
    for group in CLASSES_BY_NAME:
        for name, part in getattr(settings, group).items():
            yield f"{group}.{name}", part.path


def changed_source(recorded: dict[str, Any], current: dict[str, Any]) -> str:
    """Describe the first setting whose outside code has changed since its record, or return ""."""
    for key, entry in recorded.items():
        before = entry.get("sha256") or {}
        after = current.get(key, {}).get("sha256", {})
        if before != after:
            files = sorted(
                name for name in {**before, **after} if before.get(name) != after.get(name)
            )
            return (
                f"the source of {key}={entry.get('path')} is not what it was when the run was made "
                f"({', '.join(files)})"
            )
    return ""
