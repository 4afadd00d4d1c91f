"""Make the settings of a run from Hydra's config or from a recorded run, and check them.

Recorded settings are only data: no interpolation in them is resolved. Some settings of a run that
another user made are not used.
"""

import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gspo.algorithm.aggregation import Aggregation
from gspo.config.checks import check
from gspo.config.conversion import to_dataclass
from gspo.config.refusals import no_such_setting, taken_away
from gspo.config.schema import (
    GROUPS_BESIDE_SETTINGS,
    SchemaSource,
    SearchSchemas,
    literal,
    merged,
    plain,
    settings_of,
)
from gspo.config.settings import CHOICES, CONSENT, Settings, changeable_on_resume, with_consent
from gspo.config.user_code import (
    CLASSES_BY_NAME,
    changed_source,
    class_schema,
    load_class,
    option_name,
    outside_code,
    register_outside_code,
    with_outside_parts,
)
from gspo.io.errors import SettingError
from gspo.io.files import SETTINGS_FILE, check_run_directory, replace_text
from gspo.io.ownership import is_own_file, why_not_own, write_signed
from gspo.io.ranges import fields_with
from gspo.io.untrusted import read_yaml
from gspo.io.user_code import is_path, source_files
from gspo.train.settings import ParallelSettings

# settings that the program writes, and what the user may say in their place
WRITTEN = {
    "options": "set objective=...",
    "outside": "set objective=MODULE:NAME",
    "inputs": "leave it out",
    "prompt_used": "set prompt.format=...",
}
OUTSIDE = "outside"  # the folder of a run directory that has copies of the outside code's source


def register_schemas() -> None:
    """Let Hydra find the schemas of the settings, and classes of the user's own packages."""
    Plugins.instance().register(SchemaSource)
    Plugins.instance().register(SearchSchemas)
    register_outside_code()
    OmegaConf.register_new_resolver("options", options_in_words, replace=True)


def options_in_words(group: str) -> str:
    """List the options of a group, in lines that `--help` prints beside the group's name."""
    options = GlobalHydra.instance().config_loader().get_group_options(group)
    lines = textwrap.wrap(" ".join(name for name in options if not name.startswith("_")), 100)
    return f"\n{' ' * 12}".join(lines)


# ------------------------------------------------------------------------- from config to settings
def chosen_settings(
    config: DictConfig, overrides: list[str], choices: Mapping[str, str | None]
) -> Settings:
    """Return the settings that the command line of `gspo train` chooses.

    These are the composed config with Hydra's choices. With resume= they are the settings of the
    recorded run with the overrides.
    """
    if config.resume:
        return resumed_settings(Path(config.resume), overrides, trust=config.allow_outside_code)
    return to_settings(config, choices)


def to_settings(
    config: DictConfig,
    choices: Mapping[str, str | None] | None = None,
    given: Collection[str] | None = None,
) -> Settings:
    """Convert a composed config to dataclasses, complete them and check them.

    `choices` (hydra.runtime.choices) are the chosen options, which are recorded. `given` names the
    settings that the command line adds to recorded ones; None: all are its own. Raises ValueError
    or an OmegaConf error that names key and value.
    """
    settings = to_dataclass(with_outside_parts(config))
    if choices is not None:
        for name, remedy in WRITTEN.items():
            value = getattr(settings, name)
            if value:
                raise SettingError(name, value, "is written by the program", remedy=remedy)
        for group, option in choices.items():
            if option and option.startswith("_") and group in CHOICES:
                raise SettingError(group, option, "is a schema", remedy="leave out the _")
        if choices.get("sizes") != choices.get("model"):
            raise SettingError(
                "sizes",
                choices["sizes"],
                f"conf/sizes follows model={choices['model']}, it is not chosen",
            )
        settings.options = {
            group: getattr(settings, group).name if is_path(option) else option
            for group, option in choices.items()
            if option and not group.startswith(("hydra/", "sizes"))
        }
    for group, options in CHOICES.items():
        chosen = getattr(settings, group)
        kind = type(chosen)
        if not is_dataclass(kind):
            option = (choices or {}).get(group)
            schemas = ", ".join(f"_{name}" for name in options)
            raise SettingError(
                group,
                option,
                "its option file does not say which settings it has",
                remedy=f"begin it with `defaults: [SCHEMA]`, SCHEMA one of {schemas}",
            )
        name = kind.name if kind in options.values() else option_name(kind)
        if chosen.name != name:
            raise SettingError(
                f"{group}.name",
                chosen.name,
                "cannot be changed",
                remedy=f"choose another option with {group}=...",
            )
    settings.outside = outside_code(settings)
    resolve(settings)
    try:
        check(settings, given)
    except SettingError as error:
        # the refusal names the option that was chosen: correction=tv, which is rho with settings
        option = settings.options.get(error.key)
        if option and error.value == getattr(settings, error.key).name:
            error.value = option
        raise
    return settings


def resolve(s: Settings) -> None:
    """Replace values that refer to other settings, such as auto, by those values."""
    if s.policy.routing_replay == "r3":
        s.rollout.routes = True
    longest = s.rollout.longest_limit
    s.trainer.aggregation = resolved(s.trainer.aggregation, s.objective.aggregation, longest)
    if not s.kl.in_loss:
        return
    aggregation = s.kl.aggregation
    if aggregation.mode != "auto":
        s.kl.aggregation = resolved(aggregation, "", longest)
        return
    if aggregation != Aggregation():
        name = "rows" if aggregation.rows != Aggregation.rows else "length"
        raise SettingError(
            f"kl.aggregation.{name}",
            getattr(aggregation, name),
            "is not read with kl.aggregation.mode=auto, which takes over trainer.aggregation",
            remedy="set kl.aggregation.mode=...",
        )
    s.kl.aggregation = s.trainer.aggregation


def resolved(aggregation: Aggregation, auto_mode: str, longest_limit: int) -> Aggregation:
    """Replace mode=auto by `auto_mode`, and length=null of the -norm mode by `longest_limit`.

    Raises ValueError if mode and length do not fit together.
    """
    mode = auto_mode if aggregation.mode == "auto" else aggregation.mode
    length = aggregation.length
    if mode == "seq-mean-token-sum-norm" and length is None:
        length = longest_limit
    return Aggregation(mode, aggregation.rows, length)


# ------------------------------------------------------------------------------- recorded settings
def write_settings(settings: Settings, folder: Path) -> None:
    """Write settings.yaml to a run directory, signed as this user's."""
    write_signed(folder / SETTINGS_FILE, yaml.safe_dump(asdict(settings), sort_keys=False))


def read_settings(folder: Path, consent: bool = False, trust: bool = False) -> Settings:
    """Read the settings of a run directory, with the arguments of `recorded_config`.

    Raises ValueError if the folder is no run directory, or was written by another version.
    """
    return to_settings(recorded_config(folder, consent, trust), given=())


def recorded_config(folder: Path, consent: bool = False, trust: bool = False) -> DictConfig:
    """Read a run directory's settings.yaml as a typed config, in which nothing is resolved.

    `consent` is the command line's consent to a weak sandbox. Outside code that the file names is
    imported only if this user made the run, or with the command line's `trust`.

    Raises ValueError if the folder is no run directory, or was written by another version.
    """
    check_run_directory(folder)
    path = folder / SETTINGS_FILE
    config = OmegaConf.structured(Settings)
    content = literal(read_yaml(path))
    code_paths = recorded_code_paths(content)
    if code_paths and not (trust or is_own_file(path)):
        raise ValueError(
            f"{path} names code from outside this package ({', '.join(code_paths)}) and {why_not_own()}: "
            "read that code, then set allow_outside_code=true"
        )
    try:
        for group in CHOICES:
            chosen = content.get(group)
            name = chosen.get("name") if isinstance(chosen, dict) else chosen
            config[group] = recorded_schema(group, name, code_paths.get(group, ""))
        config = merged(config, content | {"task": with_consent(content["task"], consent)})
        to_settings(config, given=())
    except OmegaConfBaseException as error:
        raise ValueError(f"{path} was written by another version:") from error
    except SettingError as error:
        error.where = str(path)
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config


def recorded_schema(group: str, name: object, class_path: str) -> DictConfig:
    """Return the schema of a group's recorded option, or of the user's class at `class_path`."""
    if class_path:
        return class_schema(load_class(class_path, group, group), group)
    if isinstance(name, str) and name in CHOICES[group]:
        return OmegaConf.structured(CHOICES[group][name])
    options = ", ".join(CHOICES[group])
    raise SettingError(f"{group}.name", name, f"is unknown here; there are {options}")


def recorded_code_paths(content: dict[str, Any]) -> dict[str, str]:
    """Return the paths of all outside code that recorded settings would import, by setting."""
    for name in ("outside", *CLASSES_BY_NAME):
        if not isinstance(content.get(name) or {}, dict):
            raise SettingError(name, str(content[name])[:40], "must be a mapping")
    paths = {}
    for key, code in (content.get("outside") or {}).items():
        paths[key] = str(code.get("path")) if isinstance(code, dict) else ""
    for group in CLASSES_BY_NAME:
        for name, part in (content.get(group) or {}).items():
            path = part.get("path") if isinstance(part, dict) else part
            paths[f"{group}.{name}"] = str(path)
    for group, options in CHOICES.items():
        chosen = content.get(group)
        if not isinstance(chosen, dict):
            continue
        option = chosen.get("name")
        if isinstance(option, str) and option in options:
            for name in fields_with(options[option], "outside_code"):
                if chosen.get(name):
                    paths[f"{group}.{name}"] = str(chosen[name])
    return paths


def copy_outside_code(settings: Settings, folder: Path) -> None:
    """Copy the source of the outside code that the settings name to a run directory."""
    for key, code in settings.outside.items():
        for name, file in source_files(code["path"], key).items():
            copied = folder / OUTSIDE / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            replace_text(copied, file.read_text(encoding="utf-8"))


def source_change(folder: Path, recorded: DictConfig, settings: Settings) -> str:
    """Describe a change of a run's outside code since it was recorded, or return ""."""
    change = changed_source(plain(recorded.outside), settings.outside)
    return f"{folder}: {change}" if change else ""


# ----------------------------------------------------------------- addresses in recorded settings
# matches a URL with or without its scheme, and a host with a port, anywhere in a text
ADDRESS = re.compile(
    r"[a-z][a-z0-9+.-]*:/+\w|(^|[\s=])//\w|\b[\w-]+(\.[\w-]+)+:\d|\blocalhost:\d|\]:\d",
    re.IGNORECASE,
)
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
# groups of settings whose texts are never used as addresses; tracking has rules of its own
WITHOUT_ADDRESSES = ("tracking", "inputs", "options", "prompt", "outside")


def addresses(content: dict[str, Any]) -> dict[str, str]:
    """Return the values in recorded settings that hold an address, by their dotted keys.

    Examples of addresses are http://host:8000 and host.org:80. W&B's are left out, since tracking
    has rules of its own."""
    by_key: dict[str, str] = {}

    def search(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                inner = f"{key}.{name}" if key else str(name)
                search(part, inner)
                search(str(name), f"{inner} (its name)")
        elif isinstance(value, list):
            for number, part in enumerate(value):
                search(part, f"{key}.{number}")
        elif isinstance(value, str) and ADDRESS.search(INVISIBLE.sub("", value)):
            by_key[key] = value

    searched = {name: part for name, part in content.items() if name not in WITHOUT_ADDRESSES}
    search(searched, "")
    return by_key


def refuse_addresses(folder: Path, refused: dict[str, str], consent: str) -> None:
    """Raise ValueError if there are addresses that another user wrote and no command has given.

    The run would send its data there. `consent` is the text that gives the addresses on the
    command line."""
    if refused:
        listed = ", ".join(f"{key}={value}" for key, value in sorted(refused.items()))
        raise ValueError(
            f"{folder / 'settings.yaml'} {why_not_own()}, and it names addresses to which the run's data "
            f"and responses would go: {listed}. If you want that, set {consent}"
        )


# ------------------------------------------------------------------------------------------- resume
def resumed_settings(folder: Path, overrides: list[str], trust: bool = False) -> Settings:
    """Return a run directory's settings with the changes of the command line.

    Raises ValueError for settings that may not change, and for outside code that has changed.

    Some settings of a run that this user did not make (gspo.io.ownership) are not used: the folder
    of cold starts and the W&B account. Tracking is offline. The command line must give the
    addresses that the run names. The number of processes is never taken from the record. With
    parallel.mode=... the sizes of shards and expert groups are not taken from it either.
    """
    parsed = OverridesParser.create().parse_overrides(overrides)
    recorded = recorded_config(folder, trust=trust)
    change = source_change(folder, recorded, to_settings(recorded, given=()))
    if change:
        raise ValueError(
            f"{change}: put it back (a copy is in {folder / OUTSIDE}), or begin a new run"
        )
    named_addresses: dict[str, str] = {}
    if not is_own_file(folder / SETTINGS_FILE):
        named_addresses = addresses(plain(recorded))
        overridden = {override.key_or_group for override in parsed}
        missing = {key: value for key, value in named_addresses.items() if key not in overridden}
        consent = " ".join(f"{key}={value}" for key, value in missing.items())
        refuse_addresses(folder, missing, consent)
        recorded.runs = Settings.runs
        recorded.tracking.entity = recorded.tracking.project = ""
        recorded.tracking.upload_checkpoints = False
        if recorded.tracking.wandb != "disabled":
            recorded.tracking.wandb = "offline"
    # another number of processes may continue the run
    recorded.parallel.ranks = ParallelSettings.ranks
    if any(override.key_or_group == "parallel.mode" for override in parsed):
        # the recorded sizes belong to the recorded mode
        recorded.parallel.shard_size = ParallelSettings.shard_size
        recorded.parallel.experts = ParallelSettings.experts
    keys = {*settings_of(recorded), *GROUPS_BESIDE_SETTINGS}
    changes = OmegaConf.create()
    for override in parsed:
        check_change(override, keys, named_addresses, folder)
        OmegaConf.update(changes, override.key_or_group, override.value())
    given = [override.key_or_group for override in parsed]
    return to_settings(merged(recorded, changes, {"resume": str(folder)}), given=given)


def check_change(
    override: Override, keys: set[str], named_addresses: dict[str, str], folder: Path
) -> None:
    """Raise ValueError if an override may not be given beside resume=`folder`.

    `keys` are the recorded run's settings. `named_addresses` are its addresses by key, which the
    user may repeat."""
    key = override.key_or_group
    group = key.partition(".")[0]
    if override.is_delete():
        raise taken_away(key)
    value = (override.input_line or "").partition("=")[2]
    if key not in keys and group not in CLASSES_BY_NAME:
        raise no_such_setting(key, sorted(keys))
    changeable = changeable_on_resume()
    allowed = (
        key in changeable
        or group in changeable
        or key in ("resume", "dry_run", "allow_outside_code")
        or key.endswith(f".{CONSENT}")
        or (key in named_addresses and str(override.value()) == named_addresses[key])
    )
    if not allowed:
        raise SettingError(
            key, value, f"with resume={folder}, only {', '.join(changeable)} may be changed"
        )
    if any(name.startswith(f"{key}.") for name in keys):
        raise SettingError(
            key,
            value,
            f"with resume={folder}, it has settings of its own",
            remedy=f"set one of them, {key}.NAME=...",
        )
