"""Makes the settings of a run from Hydra's configuration or from a recorded run: as dataclasses,
completed and checked.

Recorded settings are only data: no interpolation in them is resolved. Of a run that this user did
not make, some settings are not taken over.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gspo.algorithm.aggregation import Aggregation
from gspo.config.checks import check
from gspo.config.commands import BenchmarkCommand, EvaluateCommand, SampleCommand
from gspo.config.schema import (
    GROUPS_BESIDE_SETTINGS,
    literal,
    no_such_setting,
    schema,
    settings_of,
    to_dataclass,
)
from gspo.config.settings import CHOICES, CONSENT, Settings, changeable_on_resume, with_consent
from gspo.config.user_code import (
    NAMED,
    changed_source,
    load_class,
    open_door,
    option_name,
    outside_code,
    typed,
    with_outside_parts,
)
from gspo.io.files import replace_text
from gspo.io.ownership import is_own_file, why_not_own, write_signed
from gspo.io.ranges import fields_with
from gspo.io.untrusted import read_yaml
from gspo.io.user_code import is_path, source_files
from gspo.train.settings import ParallelSettings

OUTSIDE = "outside"  # the folder of a run directory that has copies of the outside code's source


def register_schemas() -> None:
    """Register the dataclasses with Hydra, under the names that conf/ refers to, and the door for
    outside code.
    """
    open_door()
    OmegaConf.register_new_resolver("options", options_in_words, replace=True)
    store_schemas()


@cache
def store_schemas() -> None:
    """Put the dataclasses into Hydra's one store, which all commands of a process share."""
    # Hydra would copy all that the store holds whenever it looks up the options of a group, 150
    # times for `--help`. It reads the store alone: what it changes are copies of single entries.
    ConfigStore.__deepcopy__ = lambda store, memo: store
    store = ConfigStore.instance()
    commands = {
        "_evaluate": EvaluateCommand,
        "_sample": SampleCommand,
        "_benchmark": BenchmarkCommand,
    }
    for name, kind in ({"_settings": Settings} | commands).items():
        store.store(name=name, node=schema(kind))
    for group, options in CHOICES.items():
        for name, kind in options.items():
            store.store(group=group, name=f"_{name}", node=schema(kind))


def options_in_words(group: str) -> str:
    """List the options of a group that Hydra finds, in lines that `--help` puts beside the group's
    name.
    """
    found = GlobalHydra.instance().config_loader().get_group_options(group)
    lines = textwrap.wrap(" ".join(name for name in found if not name.startswith("_")), 100)
    return f"\n{' ' * 12}".join(lines)


def to_settings(config: DictConfig, choices: Mapping[str, str | None] | None = None) -> Settings:
    """Convert a composed config to dataclasses, complete them and check them.

    The options that were chosen are recorded from `choices` (hydra.runtime.choices). Raises
    ValueError or an OmegaConf error that names key and value.
    """
    settings = to_dataclass(with_outside_parts(config))
    if choices is not None:
        for written in ("options", "outside"):
            if value := getattr(settings, written):
                raise ValueError(f"{written}={value} is written by the program; say objective=...")
        if choices.get("sizes") != choices.get("model"):
            raise ValueError(
                f"sizes={choices['sizes']}: conf/sizes follows model={choices['model']}, it is not chosen"
            )
        recorded = {
            group: name
            for group, name in choices.items()
            if not group.startswith(("hydra/", "sizes"))
        }
        settings.options = {
            group: getattr(settings, group).name if is_path(name) else name
            for group, name in recorded.items()
            if name
        }
    for group, options in CHOICES.items():
        chosen = getattr(settings, group)
        own = type(chosen) in options.values()
        if chosen.name != (type(chosen).name if own else option_name(type(chosen))):
            raise ValueError(
                f"{group}.name={chosen.name!r} cannot be changed; choose another option with {group}=..."
            )
    settings.outside = outside_code(settings)
    settle(settings)
    check(settings)
    return settings


# What is, or holds, an address: a URL with or without its scheme, or a host with a port.
ADDRESS = re.compile(
    r"[a-z][a-z0-9+.-]*:/+\w|(^|[\s=])//\w|\b[\w-]+(\.[\w-]+)+:\d|\blocalhost:\d|\]:\d",
    re.IGNORECASE,
)
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
# groups of settings in which nothing is reached
NO_ADDRESSES = ("tracking", "inputs", "options", "prompt", "outside")


def chosen_settings(
    config: DictConfig, overrides: list[str], choices: Mapping[str, str | None]
) -> Settings:
    """Return the settings that `gspo train` was asked for.

    They are the composed config with Hydra's choices, or with resume= those of a recorded run with
    the overrides.
    """
    if config.resume:
        return resumed_settings(Path(config.resume), overrides, trust=config.allow_outside_code)
    return to_settings(config, choices)


def settle(s: Settings) -> None:
    """Replace values such as auto, which refer to other settings, by what they mean, so that
    settings.yaml tells it.
    """
    s.rollout.routes |= s.policy.routing_replay == "r3"
    s.trainer.aggregation = settled(
        s.trainer.aggregation, s.objective.aggregation, s.rollout.longest_limit
    )
    if s.kl.in_loss:
        of_kl = s.kl.aggregation
        if of_kl.mode == "auto" and of_kl != Aggregation():
            raise ValueError(
                f"kl.aggregation.rows={of_kl.rows}, kl.aggregation.length={of_kl.length} are not read with "
                "kl.aggregation.mode=auto, which takes over trainer.aggregation; say kl.aggregation.mode=..."
            )
        chosen = (
            settled(of_kl, "", s.rollout.longest_limit)
            if of_kl.mode != "auto"
            else s.trainer.aggregation
        )
        s.kl.aggregation = chosen


def settled(aggregation: Aggregation, paper: str, longest: int) -> Aggregation:
    """Replace mode=auto by the `paper`'s mode, and length=null of the -norm mode by the `longest`
    limit.

    Raises ValueError if mode and length do not fit together.
    """
    mode = paper if aggregation.mode == "auto" else aggregation.mode
    length = aggregation.length
    if mode == "seq-mean-token-sum-norm" and length is None:
        length = longest
    return Aggregation(mode, aggregation.rows, length)


def write_settings(settings: Settings, folder: Path) -> None:
    """Write settings.yaml to a run directory, signed as this user's."""
    write_signed(folder / "settings.yaml", yaml.safe_dump(asdict(settings), sort_keys=False))


def read_settings(folder: Path, consent: bool = False, trust: bool = False) -> Settings:
    """Read the settings of a run directory. The consent to a weak sandbox and the `trust` in code
    that another user's run names are the command line's.

    Raises ValueError if the folder is no run directory, or was written by another version.
    """
    return to_settings(recorded_config(folder, consent, trust))


def recorded_config(folder: Path, consent: bool = False, trust: bool = False) -> DictConfig:
    """Read a run directory's settings.yaml as a typed config. It is data: no interpolation in it is
    resolved, and code from outside that it names is imported only if this user made the run or says
    that it is trusted.

    Raises ValueError if the folder is no run directory, or was written by another version.
    """
    path = folder / "settings.yaml"
    if not path.exists():
        raise ValueError(f"{folder} is not a run directory: it has no settings.yaml")
    config, content = OmegaConf.structured(Settings), literal(read_yaml(path))
    places = recorded_places(content)
    if places and not (trust or is_own_file(path)):
        raise ValueError(
            f"{path} names code from outside this package ({', '.join(places)}) and {why_not_own()}: read that code, then "
            "say allow_outside_code=true"
        )
    for group, options in CHOICES.items():
        chosen = content.get(group)
        name = chosen.get("name") if isinstance(chosen, dict) else chosen
        if group in places:
            config[group] = typed(load_class(places[group], group, f"{path}: {group}"), group)
        elif isinstance(name, str) and name in options:
            config[group] = OmegaConf.structured(options[name])
        else:
            raise ValueError(
                f"{path}: {group}.name={name!r} is unknown here; it knows {', '.join(options)}"
            )
    try:
        config = OmegaConf.merge(config, content | {"task": with_consent(content["task"], consent)})
        to_settings(config)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path} was written by another version:") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config


def copy_outside_code(settings: Settings, folder: Path) -> None:
    """Copy the source of the outside code that the settings name to a run directory."""
    for key, code in settings.outside.items():
        for name, file in source_files(code["path"], key).items():
            copy = folder / OUTSIDE / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            replace_text(copy, file.read_text(encoding="utf-8"))


def recorded_places(content: dict[str, Any]) -> dict[str, str]:
    """Return the places of all code from outside that recorded settings would import, by setting."""
    found = {}
    for name in ("outside", *NAMED):
        if not isinstance(content.get(name) or {}, dict):
            raise ValueError(f"settings.yaml: {name}={str(content[name])[:40]} must be a mapping")
    for key, code in (content.get("outside") or {}).items():
        found[key] = str(code.get("path")) if isinstance(code, dict) else ""
    for group in NAMED:
        for name, part in (content.get(group) or {}).items():
            found[f"{group}.{name}"] = (
                str(part.get("path")) if isinstance(part, dict) else str(part)
            )
    for group, options in CHOICES.items():
        chosen = content.get(group)
        name = chosen.get("name") if isinstance(chosen, dict) else None
        kind = options.get(name) if isinstance(name, str) else None
        for name in fields_with(kind, "outside_code") if kind else ():
            if chosen.get(name):
                found[f"{group}.{name}"] = str(chosen[name])
    return found


def source_change(folder: Path, recorded: DictConfig, settings: Settings) -> str:
    """Say in words that the outside code which a run was made with has changed since; "" if it has
    not.
    """
    change = changed_source(OmegaConf.to_container(recorded.outside), settings.outside)
    return f"{folder}: {change}" if change else ""


def addresses(content: dict[str, Any]) -> dict[str, str]:
    """Return the values in recorded settings that are or hold an address, such as http://host:8000
    or host.org:80, by their dotted keys. Those of W&B are left out, since tracking has rules of its
    own."""
    found: dict[str, str] = {}

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
            found[key] = value

    search({name: part for name, part in content.items() if name not in NO_ADDRESSES}, "")
    return found


def refuse_addresses(folder: Path, named: dict[str, str], words: str) -> None:
    """Raise ValueError for addresses, by their settings, that another user wrote and no command has
    given: what a run reads would be sent there. `words` is how to give them."""
    if named:
        there = ", ".join(f"{key}={value}" for key, value in sorted(named.items()))
        raise ValueError(
            f"{folder / 'settings.yaml'} {why_not_own()}, and it names addresses to which the "
            f"run's data and responses would go: {there}. If you want that, say {words}"
        )


def resumed_settings(folder: Path, overrides: list[str], trust: bool = False) -> Settings:
    """Return a run directory's settings with the changes of the command line. Refuses settings that
    may not change, and outside code that has changed.

    Of a run that this user did not make (gspo.io.ownership), the folder of cold starts and the
    W&B account are not taken over, and tracking is offline. The addresses that it names must be
    given by the command line. How many processes there were is not taken over either, nor how many
    held one copy of the weights, or shared the experts, if parallel.mode is given.
    """
    overrides = [override.lstrip("+") for override in overrides]
    recorded = recorded_config(folder, trust=trust)
    if change := source_change(folder, recorded, to_settings(recorded)):
        raise ValueError(
            f"{change}: put it back (a copy is in {folder / OUTSIDE}), or begin a new run"
        )
    named: dict[str, str] = {}
    if not is_own_file(folder / "settings.yaml"):
        named = addresses(OmegaConf.to_container(recorded))
        given = {override.split("=")[0] for override in overrides}
        missing = {key: value for key, value in named.items() if key not in given}
        refuse_addresses(
            folder, missing, " ".join(f"{key}={value}" for key, value in missing.items())
        )
        recorded.runs = Settings.runs
        recorded.tracking.entity = recorded.tracking.project = ""
        recorded.tracking.upload_checkpoints = False
        recorded.tracking.wandb = "disabled" if recorded.tracking.wandb == "disabled" else "offline"
    # another number of processes may go on with it
    recorded.parallel.ranks = ParallelSettings.ranks
    if any(override.startswith("parallel.mode=") for override in overrides):
        recorded.parallel.shard_size = ParallelSettings.shard_size  # the old mode's
        recorded.parallel.experts = ParallelSettings.experts
    keys, changes = {*settings_of(recorded), *GROUPS_BESIDE_SETTINGS}, []
    changeable = changeable_on_resume()
    for override in overrides:
        key = override.split("=")[0]
        if key.startswith("~"):
            raise ValueError(
                f"{override}: a setting cannot be taken away; give it a value, {key[1:]}=..."
            )
        if key not in keys and key.partition(".")[0] not in NAMED:
            raise ValueError(f"{override}: {no_such_setting(key, sorted(keys))}")
        free = key in ("resume", "dry_run", "allow_outside_code") or key.endswith(f".{CONSENT}")
        free = free or (key in named and override == f"{key}={named[key]}")
        if not free and not {key, key.split(".")[0]} & set(changeable):
            raise ValueError(
                f"{override} with resume={folder}: only {', '.join(changeable)} may be changed"
            )
        if any(name.startswith(f"{key}.") for name in keys):
            raise ValueError(
                f"{override} with resume={folder}: say which of its settings, {key}.NAME=..."
            )
        changes.append(override)
    return to_settings(
        OmegaConf.merge(recorded, OmegaConf.from_dotlist(changes), {"resume": str(folder)})
    )
