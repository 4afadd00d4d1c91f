"""Say in plain sentences why a setting is refused, in the place of Hydra's errors."""

import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from gspo.config.schema import GROUPS_BESIDE_SETTINGS, settings_of
from gspo.config.settings import CHOICES
from gspo.config.synonyms import our_name, our_option
from gspo.io.arguments import nearest
from gspo.io.errors import SettingError

# groups that other frameworks have too
SHARED_GROUPS = ("trainer", "rollout", "optim", "objective")
OF_EVERY_RUN = ("dry_run", "resume", "runs", "study")  # settings that the program reads first
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
    if not settings:
        remedy = "begin your file with `defaults: [train, _self_]`"
        return SettingError(key, problem=NO_SUCH_SETTING, remedy=remedy)
    group, _, name = key.partition(".")
    name = name.lower()
    if group not in settings:
        full = key_on_command_line(key)
        near = nearest(full, settings)
        near_group, _, near_name = near.partition(".")
        likeness = SequenceMatcher(None, group.lower(), near_group).ratio()
        if near_name == full.partition(".")[2] and likeness > SAME_GROUP:
            return SettingError(full, problem=NO_SUCH_SETTING, remedy=f"the nearest is {near}")
    if is_of_a_run and (group not in settings or group == key or group in SHARED_GROUPS):
        full = key_on_command_line(key)
        ours = our_name(full)
        if ours and ours != full:
            return SettingError(full, problem=NO_SUCH_SETTING, remedy=f"here it is {ours}")
    if is_of_a_run and f"{group}.{name}" not in settings:
        options = options_with(group, name)
        if options:
            remedy = f"{group}.{name} is a setting of {', '.join(options)}"
            return SettingError(key, problem=NO_SUCH_SETTING, remedy=remedy)
    if key in GROUPS_BESIDE_SETTINGS:
        remedy = (
            f"a file chooses one under `defaults:`, as `- override /{key}: NAME`, and an option file "
            "of this group begins with `# @package _global_`"
        )
        return SettingError(key, problem="this is a group of options", remedy=remedy)
    if "." in key and key in settings:
        remedy = f"write {group}: {{{key.partition('.')[2]}: ...}}"
        return SettingError(key, problem="a key of a file has no dot", remedy=remedy)
    candidates = [
        candidate
        for candidate in (*settings, *(GROUPS_BESIDE_SETTINGS if is_of_a_run else ()))
        if not key.startswith(f"{candidate}.") and not candidate.endswith(".name")
    ]
    if key in OF_EVERY_RUN and key not in settings:
        remedy = "begin your file with `defaults: [train, _self_]`"
        return SettingError(key, problem=NO_SUCH_SETTING, remedy=remedy)
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
    options = []
    for option, kind in CHOICES.get(group, {}).items():
        if name in [field.name for field in fields(kind)]:
            options.append(f"{group}={option}")
    return options


def key_on_command_line(key: str) -> str:
    """Return a key that Hydra does not know as the command line has it.

    For example, of `actor.optim.lr=1` Hydra's error names only `actor`."""
    typed = [word.partition("=")[0].lstrip("+~") for word in sys.argv[1:]]
    return next((word for word in typed if word.startswith(f"{key}.")), key)


def plain_words(error: BaseException) -> str:
    """Rewrite an error about keys, options or a file's text as one sentence, or return ""."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        place = error.problem_mark
        return f"{place.name}, line {place.line + 1}: {error.problem}: this is not YAML"
    if isinstance(error, UnicodeDecodeError):
        line = error.object[: error.start].rpartition(b"\n")[2].decode(errors="replace")
        return f"a file is not UTF-8 after {line[-40:]!r}: save it as UTF-8"
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
    if unmerged and "does not support deletion" in str(error.__cause__):
        return str(taken_away(unmerged[1].removeprefix("~")))
    existing = re.match(r"Could not append to config. An item is already at '(.+?)'", text)
    if existing:
        return f"+{existing[1]}: this is a setting already; give it without +"
    option_file = re.match(r"In '([^']+)': ", text)
    cause: BaseException | None = error
    while cause is not None:
        words = words_of_cause(cause, option_file[1] if option_file else "")
        if words is not None:
            return words
        cause = cause.__cause__ or cause.__context__
    return ""


def words_of_cause(cause: BaseException, option_file: str) -> str | None:
    """Say what is wrong with a key or a value, or return "" if no words are known.

    Returns None for an error about something else, whose own cause may tell. `option_file` is the
    file that has the key, "" for the command line."""
    prefix = f"In '{option_file}': " if option_file else ""
    unfit = re.search(r"str is not a subclass of (\w+)\. value: (.*)", str(cause))
    if unfit:
        return of_a_group(*unfit.groups())
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        key = cause.full_key
        if key and cause.parent_node is not None:
            root = cause.parent_node._get_root()
            if key.startswith("hydra."):
                settings = settings_of(root.hydra, "hydra.")
            else:
                settings = settings_of(root)
            misfit = file_of_another_option(option_file, key, root) if option_file else ""
            return misfit or f"{prefix}{no_such_setting(key, settings)}"
    if isinstance(cause, ValidationError) and cause.full_key:
        typed = key_on_command_line(cause.full_key)
        if typed != cause.full_key:
            return f"{typed}: there is no such setting: {cause.full_key} has no parts"
        mistake = wrong_type(cause)
        return f"{prefix}{mistake}" if mistake else ""
    return None


def of_a_group(class_name: str, value: str) -> str:
    """Say how a file chooses an option, for a value in the place of settings of this class."""
    groups = []
    for group, kinds in CHOICES.items():
        if class_name in [kind.__name__ for kind in kinds.values()]:
            groups.append(group)
    group = groups[0] if groups else "GROUP"
    return (
        f"{group}: {value}: it has settings of its own; a file chooses it under `defaults:`, as "
        f"`- override /{group}: {value}`"
    )


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
