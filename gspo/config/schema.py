"""Converts between Hydra's configs and the settings' dataclasses, and turns Hydra's errors into
plain sentences.

OmegaConf.to_object makes a key that is no field (`+optim.learning_rate=1`) an attribute that nobody
reads. Therefore keys are compared with the fields here, where the config of every entry point
becomes dataclasses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from gspo.config.settings import CHOICES
from gspo.config.synonyms import our_name, our_option
from gspo.io.arguments import nearest
from gspo.io.ranges import refusal

# groups that other frameworks have too
SHARED_GROUPS = ("trainer", "rollout", "optim", "objective")
# from this share of equal letters on, the nearest key is assumed to be the one that was meant
ALIKE = 0.6
GROUPS_BESIDE_SETTINGS = (
    "experiment",
    "preset",
    "arm",
    "cut",
)  # option groups of `gspo train` that are not fields of Settings


def schema(kind: type) -> DictConfig:
    """Make Hydra's schema of a dataclass. Keys can be added to its mappings without `+`."""
    node = OmegaConf.structured(kind)
    _open_mappings(node)
    return node


def _open_mappings(node: DictConfig) -> None:
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not (child._is_missing() or child._is_none()):
            if is_dataclass(OmegaConf.get_type(child)):
                _open_mappings(child)
            else:
                OmegaConf.set_struct(child, False)


def literal(content: Any) -> Any:
    """Escape every `${` in a file's content, at any depth, so that OmegaConf resolves nothing in
    it.

    Raises ValueError for ???, which stands for a missing value in OmegaConf and cannot be escaped.
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

    Raises ValueError, naming the dotted key, for a key that is no setting and for a number outside
    its range, and whatever the dataclasses themselves raise.
    """
    check_keys(config)
    _check(config, "")
    return OmegaConf.to_object(config)


def check_keys(config: DictConfig) -> None:
    """Raise ValueError for the first key that is no field of its dataclass, naming the nearest
    setting.
    """
    if wrong := next(keys_without_field(config), ""):
        raise ValueError(no_such_setting(wrong, settings_of(config)))


def keys_without_field(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config that are no fields of their dataclasses."""
    kind = OmegaConf.get_type(node)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(node.keys())
    for key in node.keys():  # noqa: SIM118, a key without value is not iterated over
        if key not in names:
            yield f"{prefix}{key}"
            continue
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not (child._is_missing() or child._is_none()):
            yield from keys_without_field(child, f"{prefix}{key}.")


def _check(node: DictConfig, prefix: str) -> None:
    """Raise ValueError for the first setting that was removed, is missing or lies outside its
    range.
    """
    kind, given = OmegaConf.get_type(node), list(node.keys())
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else given
    for key in names:
        if key not in given:
            raise ValueError(
                f"~{prefix}{key}: a setting cannot be taken away; give it a value, {prefix}{key}=..."
            )
        if OmegaConf.is_missing(node, key):
            raise ValueError(f"{prefix}{key} is not given: say {prefix}{key}=...")
        value = node[key]
        if isinstance(value, DictConfig) and _holds_settings(value):
            _check(value, f"{prefix}{key}.")
        elif is_dataclass(kind) and (wrong := refusal(kind, key, _plain(value), f"{prefix}{key}")):
            raise ValueError(wrong)


def _holds_settings(value: DictConfig) -> bool:
    """Tell whether a config is a dataclass, or a mapping of dataclasses such as `gspo evaluate`'s
    `tasks`.
    """
    children = [] if is_dataclass(OmegaConf.get_type(value)) else list(value.values())
    return not children or any(
        is_dataclass(OmegaConf.get_type(c)) for c in children if OmegaConf.is_config(c)
    )


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def no_such_setting(key: str, settings: list[str]) -> str:
    """Say that there is no such setting, and what it is called here if another framework has it, or
    which other options of the group have it. Otherwise say which one is nearest; if that is far,
    list all settings of the group."""
    of_a_run = "objective" in settings
    group, _, field = key.partition(".")
    if of_a_run and (group not in settings or group == key or group in SHARED_GROUPS):
        full = as_typed(key)
        if ours := our_name(full):
            return f"there is no setting {full}: here it is {ours}"
    options = {f"{group}={name}": kind for name, kind in CHOICES.get(group, {}).items() if of_a_run}
    having = [
        option
        for option, kind in options.items()
        if field.lower() in {f.name for f in fields(kind)}
    ]
    if having and f"{group}.{field.lower()}" not in settings:
        return f"there is no setting {key}: {group}.{field.lower()} is a setting of {', '.join(having)}"
    groups = GROUPS_BESIDE_SETTINGS if of_a_run else ()
    choosable = [
        name
        for name in (*settings, *groups)
        if not key.startswith(f"{name}.") and not name.endswith(".name")
    ]
    near, (group, _, last) = nearest(key, choosable), key.rpartition(".")
    text = f"there is no setting {key}: the nearest is {near}"
    if SequenceMatcher(None, last.lower(), near.rpartition(".")[2].lower()).ratio() >= ALIKE:
        return text
    beside = [name.rpartition(".")[2] for name in choosable if name.rpartition(".")[0] == group]
    return f"{text} (of {', '.join(beside)})" if beside else text


def as_typed(key: str) -> str:
    """Return a key that Hydra does not know as the command line has it: of `actor.optim.lr=1` Hydra
    names `actor`.
    """
    typed = [word.partition("=")[0].lstrip("+~") for word in sys.argv[1:]]
    return next((word for word in typed if word.startswith(f"{key}.")), key)


def settings_of(node: DictConfig, prefix: str = "") -> list[str]:
    """List the dotted keys of all fields of a config; the keys inside mappings are left out."""
    kind, found = OmegaConf.get_type(node), []
    names = (
        [field.name for field in fields(kind)]
        if is_dataclass(kind)
        else [key for key in node if key != "hydra"]
    )
    for key in (name for name in names if name in list(node.keys())):
        found.append(f"{prefix}{key}")
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not (child._is_missing() or child._is_none()):
            found += settings_of(child, f"{prefix}{key}.")
    return found


def plain_words(error: BaseException) -> str:
    """Rewrite an error of Hydra's about keys or options as one sentence; return "" for any other
    error.
    """
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return ""
    if isinstance(error, MissingConfigException) and error.options:
        return _no_option(error)
    if unread := re.match(r"(?s)Error parsing override '(.*?)'\n", str(error)):
        return f"{unread[1]!r} is no setting: write KEY=VALUE, without blanks around the ="
    if several := re.match(r"Ambiguous value for argument '(.*?)'", str(error)):
        return f"{several[1]}: several values make a sweep, which needs -m"
    if twice := re.match(r"Could not append to config. An item is already at '(.+?)'", str(error)):
        return f"+{twice[1]}: this is a setting already; give it without +"
    place = re.match(r"In '[^']+': ", str(error))
    cause: BaseException | None = error
    while cause is not None:
        names_key = (
            isinstance(cause, ConfigKeyError | ConfigAttributeError)
            and cause.parent_node is not None
        )
        if names_key and cause.full_key:
            key, root = cause.full_key, cause.parent_node._get_root()
            settings = (
                settings_of(root.hydra, "hydra.") if key.startswith("hydra.") else settings_of(root)
            )
            return (place[0] if place else "") + no_such_setting(key, settings)
        cause = cause.__cause__ or cause.__context__
    return ""


def _no_option(error: MissingConfigException) -> str:
    """Say that there is no such option, and list the others, without schemas, whose names begin
    with _.
    """
    file = error.missing_cfg_file or ""
    group, _, option = file.partition("/") if file.startswith("model/") else file.rpartition("/")
    options = [name for name in error.options if not name.startswith("_")]
    text = f"{group}={option}: there is no such option"
    if group == "model":
        return f"{text} ({', '.join(options)}); a folder or a model of the hub is model=hf model.path={option}"
    if ours := our_option(group, option):
        return f"{text}: here it is {group}={ours}"
    return f"{text}; the nearest is {nearest(option, options)} (there are {', '.join(options)})"
