"""Give Hydra the schemas of the settings.

gspo.config.conversion converts Hydra's configs to dataclasses, and gspo.config.refusals converts
its errors to plain sentences.
"""

from __future__ import annotations

import copy
import re
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from gspo.config.commands import BenchmarkCommand, EvaluateCommand, SampleCommand
from gspo.config.settings import CHOICES, Settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
        # the schemas themselves are no options to choose, as with objective=glob(*)
        is_root = config_path == "" and results_filter != ObjectType.CONFIG
        return sorted(CHOICES) if is_root else []

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


def field_names(node: DictConfig) -> list[Any]:
    """Return the fields of a config's dataclass, or the keys of a mapping, texts or numbers."""
    kind = OmegaConf.get_type(node)
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(node.keys())


def holds_values(child: Any) -> TypeGuard[DictConfig]:
    """Return whether a node of a config is itself a config, and neither missing nor null."""
    return isinstance(child, DictConfig) and not (child._is_missing() or child._is_none())


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
