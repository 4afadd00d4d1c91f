"""Between Hydra and the settings' dataclasses: the schema of a dataclass, the way back, and errors in plain words.

OmegaConf.to_object makes a key that is no field (`+optim.learning_rate=1`) an attribute that nobody reads, so keys are
compared with the fields here, where every entry point's config becomes dataclasses.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from gspo.core.arguments import nearest
from gspo.core.ranges import refusal

ALIKE = 0.6  # share of equal letters from which on the nearest key is taken for the one that was meant
GROUPS_BESIDE_SETTINGS = ("experiment", "preset", "arm")  # options of train.py that are no settings of their own


def schema(kind: type) -> DictConfig:
    """A dataclass as Hydra's schema. Its mappings take new keys as any setting is given: without `+`."""
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
    """What a file says, so that OmegaConf takes it for what it is: each `${` in a text is escaped, at any depth. Raises
    ValueError for ???, its word for a value that is not given, which cannot be escaped."""
    if content == "???":
        raise ValueError("??? stands for a setting that is not given")
    if isinstance(content, dict):
        return {key: literal(value) for key, value in content.items()}
    if isinstance(content, list):
        return [literal(value) for value in content]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", content) if isinstance(content, str) else content


def to_dataclass(config: DictConfig) -> Any:
    """The config as its dataclasses. Raises ValueError for a key that is no setting and a number outside its range,
    both by their dotted keys, and what the dataclasses raise."""
    check_keys(config)
    _check(config, "")
    return OmegaConf.to_object(config)


def check_keys(node: DictConfig, prefix: str = "", known: list[str] | None = None) -> None:
    """Raises ValueError for the first key that is no field of its dataclass, naming the nearest that is."""
    known, kind = known or settings_of(node, prefix), OmegaConf.get_type(node)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(node.keys())
    for key in node.keys():  # noqa: SIM118, a key without value is not iterated over
        if key not in names:
            raise ValueError(unknown(f"{prefix}{key}", known))
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not (child._is_missing() or child._is_none()):
            check_keys(child, f"{prefix}{key}.", known)


def _check(node: DictConfig, prefix: str) -> None:
    kind, given = OmegaConf.get_type(node), list(node.keys())
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else given
    for key in names:
        if key not in given:
            raise ValueError(f"~{prefix}{key}: a setting cannot be taken away; give it a value, {prefix}{key}=...")
        if OmegaConf.is_missing(node, key):
            raise ValueError(f"{prefix}{key} is not given: say {prefix}{key}=...")
        value = node[key]
        if isinstance(value, DictConfig) and _holds_settings(value):
            _check(value, f"{prefix}{key}.")
        elif is_dataclass(kind) and (wrong := refusal(kind, key, _plain(value), f"{prefix}{key}")):
            raise ValueError(wrong)


def _holds_settings(value: DictConfig) -> bool:
    """Whether it is a dataclass, or a mapping of such as evaluate.py's `tasks`."""
    parts = [] if is_dataclass(OmegaConf.get_type(value)) else list(value.values())
    return not parts or any(is_dataclass(OmegaConf.get_type(part)) for part in parts if OmegaConf.is_config(part))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def unknown(key: str, known: list[str]) -> str:
    """That there is no such setting, which known one is nearest to it, and where that is far, all of the same group."""
    groups = GROUPS_BESIDE_SETTINGS if "objective" in known else ()
    choosable = [name for name in (*known, *groups) if not key.startswith(f"{name}.") and not name.endswith(".name")]
    near, (group, _, last) = nearest(key, choosable), key.rpartition(".")
    text = f"there is no setting {key}: the nearest is {near}"
    if SequenceMatcher(None, last, near.rpartition(".")[2]).ratio() >= ALIKE:
        return text
    beside = [name.rpartition(".")[2] for name in choosable if name.rpartition(".")[0] == group]
    return f"{text} (of {', '.join(beside)})" if beside else text


def settings_of(node: DictConfig, prefix: str = "") -> list[str]:
    """The dotted keys of all fields, those of mappings left out."""
    kind, found = OmegaConf.get_type(node), []
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else [key for key in node if key != "hydra"]
    for key in (name for name in names if name in list(node.keys())):
        found.append(f"{prefix}{key}")
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not (child._is_missing() or child._is_none()):
            found += settings_of(child, f"{prefix}{key}.")
    return found


def plain_words(error: BaseException) -> str:
    """Hydra's errors about keys and options as one sentence; "" for any other error."""
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return ""
    if isinstance(error, MissingConfigException) and error.options:
        return _no_option(error)
    if twice := re.match(r"Could not append to config. An item is already at '(.+?)'", str(error)):
        return f"+{twice[1]}: this is a setting already; give it without +"
    place = re.match(r"In '[^']+': ", str(error))
    cause: BaseException | None = error
    while cause is not None:
        known = isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None
        if known and cause.full_key:
            key, root = cause.full_key, cause.parent_node._get_root()
            known = settings_of(root.hydra, "hydra.") if key.startswith("hydra.") else settings_of(root)
            return (place[0] if place else "") + unknown(key, known)
        cause = cause.__cause__ or cause.__context__
    return ""


def _no_option(error: MissingConfigException) -> str:
    """The schemas that option files begin with are left out: their names begin with _."""
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    options = [name for name in error.options if not name.startswith("_")]
    return (
        f"{group}={option}: there is no such option; the nearest is {nearest(option, options)} (there are "
        f"{', '.join(options)})"
    )
