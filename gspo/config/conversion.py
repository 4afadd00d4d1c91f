"""Convert Hydra's configs to the dataclasses of the settings.

OmegaConf.to_object turns a key that is no field (`+optim.learning_rate=1`) into an attribute that
nobody reads. Therefore `to_dataclass`, which every entry point calls, compares keys with fields.
"""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gspo.config.refusals import no_such_setting, taken_away
from gspo.config.schema import field_names, holds_values, settings_of
from gspo.io.errors import SettingError
from gspo.io.ranges import refusal
from gspo.tasks.base import Task, built_at


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


def check_values(node: DictConfig, prefix: str = "") -> None:
    """Raise ValueError for the first setting that is removed, missing, or outside its range."""
    kind = OmegaConf.get_type(node)
    keys = list(node.keys())
    for name in field_names(node):
        key = f"{prefix}{name}"
        if name not in keys:
            raise taken_away(key)
        if OmegaConf.is_missing(node, name):
            raise SettingError(key, problem="is not given", remedy=f"set {key}=...")
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
