"""The door for outside code: classes of a user's own package as options of Hydra's groups, typed
like ours.

    objective=my_pkg.losses:Mine objective.clip_low=0.1        an objective; advantage= and task=
                                                               likewise
    metrics.gap=my_pkg.extras:Gap                              a metric, custom/gap
    callbacks.stop.path=my_pkg.extras:StopEarly callbacks.stop.reward=0.9

A class is a dataclass that derives from the base named in BASES. Its fields are settings: unknown
keys, wrong types and numbers out of range are refused as for any other setting. An option file of
the user's own may begin with `defaults: ["my_pkg.losses:Mine"]`. What the class's source is
(gspo.io.user_code) becomes part of the run's settings.
"""

from __future__ import annotations

import inspect
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
from gspo.config.schema import schema
from gspo.config.settings import CHOICES
from gspo.io.arguments import nearest
from gspo.io.ranges import fields_with
from gspo.io.user_code import import_object, is_path, sources
from gspo.tasks.base import Task
from gspo.train.extensions import Callback, CustomMetric

if TYPE_CHECKING:
    from gspo.config.settings import Settings

# By group: the base that a class of the user's derives from, and the methods it must have, with
# what they are given.
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
NAMED = ("metrics", "callbacks")  # settings that are mappings from names to classes of the user's
HOOKS = ("before_step", "after_step")  # the methods of a callback, one of which it must have


# -------------------------------------------------------------------------------------------------
# options of groups
class OutsideOptions(ConfigSource):
    """Hydra asks it for an option that no file has: `objective/my_pkg.losses:Mine` is the schema of
    that class.
    """

    @staticmethod
    def scheme() -> str:
        return "outside"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        group, _, option = config_path.removesuffix(".yaml").rpartition("/")
        return group in BASES and group not in NAMED and is_path(option)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, option = config_path.removesuffix(".yaml").rpartition("/")
        node = typed(load_class(option, group, group), group)
        return ConfigResult(
            provider=self.provider,
            path=f"outside://{option}",
            config=node,
            header={"package": None},
        )


class SearchOutside(SearchPathPlugin):
    """Puts the source above behind all folders of option files."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("outside", "outside://")


def open_door() -> None:
    """Let Hydra find classes of the user's own packages."""
    Plugins.instance().register(OutsideOptions)
    Plugins.instance().register(SearchOutside)


# ------------------------------------------------------------------------------------------------------
# classes
def load_class(path: str, group: str, key: str) -> type:
    """Import a class of the user's. Raises ValueError in one line, which begins with `key`, if it
    does not fit.
    """
    kind, (base, methods) = import_object(path, key), BASES[group]
    where = f"{base.__module__}.{base.__name__}"
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ValueError(f"{key}={path}: must be a class that derives from {where}")
    if "__dataclass_fields__" not in vars(kind):
        raise ValueError(
            f"{key}={path}: write @dataclass above the class, so that its fields are settings"
        )
    for name, given in methods.items():
        check_method(kind, base, name, given, f"{key}={path}")
    if base is Callback and all(getattr(kind, name) is getattr(base, name) for name in HOOKS):
        raise ValueError(f"{key}={path}: must have a method {' or '.join(HOOKS)}")
    if base is CustomMetric and not (kind.unit and kind.meaning):
        raise ValueError(f"{key}={path}: must say its unit and its meaning, as class attributes")
    if option_name(kind) in CHOICES.get(group, {}):
        raise ValueError(
            f"{key}={path}: its name={option_name(kind)!r} is that of a built-in option; give it another"
        )
    return kind


def check_method(kind: type, base: type, name: str, given: tuple[str, ...], start: str) -> None:
    """Raise ValueError if a class lacks a method, or has one that cannot be called with what it is
    given.
    """
    method, signature = getattr(kind, name), f"{name}({', '.join(('self', *given))})"
    if method is getattr(base, name):
        raise ValueError(f"{start}: must have a method {signature}")
    try:
        inspect.signature(method).bind(None, *given)
    except TypeError:
        raise ValueError(
            f"{start}: {name}{inspect.signature(method)} must be {signature}"
        ) from None


def option_name(kind: type) -> str:
    """Return the name of a class as an option: its own field `name`, or the class's name if it
    declares none.
    """
    declared = "name" in inspect.get_annotations(kind)
    return next((f.default for f in fields(kind) if f.name == "name" and declared), kind.__name__)


def place(kind: type) -> str:
    """Return where a class is, for example "my_pkg.losses:Mine"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def typed(kind: type, key: str) -> DictConfig:
    """Return the schema of a class. Raises ValueError if a field's type cannot be that of a
    setting.
    """
    try:
        node = schema(kind)
    except (OmegaConfBaseException, NameError, TypeError) as error:
        raise ValueError(
            f"{key}={place(kind)}: its fields cannot be settings: {str(error).splitlines()[0]}"
        ) from None
    if "name" in node:
        node.name = option_name(kind)
    return node


def filled(kind: type, values: Any, key: str) -> DictConfig:
    """Return the schema of a class with values for its settings. Raises ValueError for wrong ones,
    naming the key.
    """
    node, names = typed(kind, key), [field.name for field in fields(kind)]
    for name in values:
        if name not in names:
            raise ValueError(
                f"there is no setting {key}.{name}: the nearest is {key}.{nearest(name, names)}"
            )
    try:
        return OmegaConf.merge(node, values)
    except OmegaConfBaseException as error:
        raise ValueError(f"{key}: {str(error).splitlines()[0]}") from None


# -------------------------------------------------------------------------------------------
# metrics and callbacks
def with_outside_parts(config: DictConfig) -> DictConfig:
    """Replace what `metrics` and `callbacks` name by the schemas of the classes, with the values
    that were given.
    """
    if not any(config.get(group) for group in NAMED):
        return config
    config = config.copy()
    with open_dict(config):
        for group in NAMED:
            for name in list(config[group] or {}):
                config[group][name] = typed_part(config[group][name], group, f"{group}.{name}")
    return config


def typed_part(given: Any, group: str, key: str) -> DictConfig:
    """Return one metric or callback as a typed config, from "my_pkg.extras:Gap" or from a mapping
    with `path`.
    """
    if OmegaConf.is_config(given) and is_dataclass(OmegaConf.get_type(given)):
        return given
    values = {"path": given} if isinstance(given, str) else given
    if not (OmegaConf.is_dict(values) or isinstance(values, dict)) or not isinstance(
        values.get("path"), str
    ):
        raise ValueError(
            f"{key}={given}: say where the class is, {key}=my_pkg.extras:Gap or {key}.path=..."
        )
    kind = load_class(values["path"], group, key)
    return filled(kind, values, key)


# -------------------------------------------------------------------------------------------------
# what is recorded
def outside_code(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return, for each setting that names outside code, its place and the SHA-256 of its source
    files.
    """
    found = dict(outside_places(settings))
    return {key: {"path": path, "sha256": sources(path, key)} for key, path in found.items()}


def outside_places(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the settings that name outside code, each with the place of the code."""
    for group, options in CHOICES.items():
        chosen = getattr(settings, group)
        if type(chosen) not in options.values():
            yield group, place(type(chosen))
        for name in fields_with(type(chosen), "outside_code"):
            if getattr(chosen, name):
                yield f"{group}.{name}", getattr(chosen, name)
    for group in NAMED:
        for name, part in getattr(settings, group).items():
            yield f"{group}.{name}", part.path


def changed_source(recorded: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the first setting whose outside code is not what it was when it was recorded; "" if
    all is the same.
    """
    for key, entry in recorded.items():
        before, after = entry.get("sha256") or {}, now.get(key, {}).get("sha256", {})
        if before != after:
            files = sorted(
                name for name in {**before, **after} if before.get(name) != after.get(name)
            )
            return f"the source of {key}={entry.get('path')} is not what it was when the run was made ({', '.join(files)})"
    return ""
