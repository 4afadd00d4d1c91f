"""The settings under which `gspo replay` computes a loss: those of the run, with changes.

The command line may choose another objective, advantage, KL term or correction, or a preset, and
change their settings. Everything that a record cannot tell anew is refused, such as the number of
mini-batches: its log-probs are those of the updates that the run made.
"""

import copy
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from gspo.algorithm.aggregation import LENGTH_WEIGHTED, Aggregation
from gspo.cli.option_files import CONF, quoted, refuse_dashes, register_options
from gspo.config.algorithm_checks import check_objective, check_token_advantages
from gspo.config.checks import check
from gspo.config.conversion import to_dataclass
from gspo.config.load import recorded_schema, resolve
from gspo.config.schema import literal, merged
from gspo.config.settings import CHOICES, CLASS_PATH, LOSS_GROUPS, Settings
from gspo.config.user_code import outside_code, with_outside_parts
from gspo.data.step_record import Header
from gspo.io.arguments import NO_SUCH_OPTION, nearest
from gspo.io.errors import SettingError, first_line
from gspo.io.nested import dotted

OWN_OPTIONS = ("step", "model", "old_model", "page", "responses", "out", "allow_outside_code")
GROUPS = ("objective", "advantage", "kl", "correction")
AGGREGATION = "trainer.aggregation"
# It acts when responses are graded, and a record holds their rewards.
TRUNCATED = "reward.truncated"
# settings beside the groups that a replay may change
REPLAYABLE = (
    "reward",
    AGGREGATION,
    "trainer.mask_truncated",
    "trainer.entropy_coef",
    "trainer.entropy_target",
    "trainer.entropy_coef_delta",
    "trainer.entropy_coef_min",
    "trainer.entropy_coef_max",
    "policy.old_logprobs",
    "allow_length_weighting",
)


def of_header(header: Header, trust: bool) -> Settings:
    """Return the settings that the header of a record without run directory holds.

    Settings that it lacks are the defaults. Raises ValueError for settings that are unknown here,
    and for code of the user's own without `trust`. Only the groups that the loss depends on may
    occur, because others name code too, such as metrics and callbacks."""
    config = train_config([])
    content = literal(header.settings)
    for group, value in content.items():
        if group not in LOSS_GROUPS:
            raise SettingError(
                group[:40], problem=f"the record has settings besides {', '.join(LOSS_GROUPS)}"
            )
        if not isinstance(value, dict):
            raise SettingError(group, str(value)[:40], "must be a mapping")
        outside = value.pop(CLASS_PATH, "")
        if group in CHOICES:
            if outside and not trust:
                raise SettingError(
                    group,
                    outside,
                    "the record names code from outside this package",
                    remedy="read that code, then set allow_outside_code=true",
                )
            with open_dict(config):
                config[group] = recorded_schema(group, value.get("name"), outside)
    try:
        return to_dataclass(with_outside_parts(merged(config, content)))
    except OmegaConfBaseException as error:
        reason = first_line(error)
        raise ValueError(f"the record's settings are unknown here: {reason}") from None


def train_config(words: Sequence[str]) -> DictConfig:
    """Compose the settings of `gspo train` with these words."""
    register_options()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=[quoted(word) for word in words])


def changed(recorded: Settings, words: Sequence[str], complete: bool) -> tuple[Settings, list[str]]:
    """Return the settings with the changes of the command line, and notes about its preset.

    `complete` says that all other settings are the run's too, so all are checked together. Else
    the parts of the loss are."""
    refuse_dashes(list(words))
    for word in words:
        refuse_unless_changeable(word)
    preset_keys = keys_of_preset(words)
    keys = [word.partition("=")[0].lstrip("+") for word in words] + preset_keys
    chosen = {key for key in keys if key in GROUPS}
    options = [f"{group}={option_of(recorded, group)}" for group in GROUPS if group not in chosen]
    source = to_dataclass(with_outside_parts(train_config([*options, *words])))
    settings = copy.deepcopy(recorded)
    for group in chosen:
        setattr(settings, group, getattr(source, group))
        settings.options[group] = option_name_of(words, group, getattr(source, group))
    ignored = []
    for key in keys:
        if key in chosen or key == "preset" or key.partition(".")[0] in chosen:
            continue
        if belongs_to(key, [AGGREGATION]):
            continue
        if key == TRUNCATED:
            ignored.append(key)
        elif belongs_to(key) or key.partition(".")[0] in GROUPS:
            copy_setting(settings, source, key)
        else:
            ignored.append(key)
    given = [key for key in keys if belongs_to(key, [AGGREGATION])]
    if "objective" in chosen or given:
        settings.trainer.aggregation = changed_aggregation(
            recorded.trainer.aggregation,
            source.trainer.aggregation,
            given,
            settings.objective.aggregation,
            is_new="objective" in chosen,
        )
    kl_is_given = "kl" in chosen or any(belongs_to(key, ["kl.aggregation"]) for key in keys)
    kl_followed = recorded.kl.in_loss and recorded.kl.aggregation == recorded.trainer.aggregation
    if kl_followed and not kl_is_given:
        settings.kl.aggregation = Aggregation()  # it follows the replay's trainer.aggregation
    settings.outside = outside_code(settings)
    resolve(settings)
    if complete:
        check(settings, given=LOSS_GROUPS)
    else:
        # the header does not say that the run permitted its own average
        mode = recorded.trainer.aggregation.mode
        if recorded.objective.sequence_level and mode in LENGTH_WEIGHTED:
            settings.allow_length_weighting = True
        check_objective(settings)
        check_token_advantages(settings)
    notes = []
    if ignored:
        names = ", ".join(ignored)
        notes.append(f"the preset also sets {names}; a replay keeps what the run had")
    return settings, notes


def changed_aggregation(
    recorded: Aggregation, source: Aggregation, given: list[str], own_mode: str, is_new: bool
) -> Aggregation:
    """Return how a replay averages its loss, from the run's average and the command line's.

    `given` are the settings below trainer.aggregation on the command line, and `own_mode` is the
    mode of the objective. `is_new` says that the objective is not the run's: then the mode is its
    own, unless the command line gives another. The run's rows stay if the mode reads them."""
    if AGGREGATION in given:
        return source
    names = [key.rpartition(".")[2] for key in given]
    aggregation = recorded
    if is_new or "mode" in names:
        mode = source.mode if "mode" in names else "auto"
        rows = recorded.rows
        if "token-mean" in (mode, own_mode if mode == "auto" else ""):
            rows = Aggregation.rows
        aggregation = Aggregation(mode, rows)
    for name in names:
        aggregation = replace(aggregation, **{name: getattr(source, name)})
    return aggregation


def refuse_unless_changeable(word: str) -> None:
    """Raise ValueError for a word that a replay cannot follow."""
    key, _, value = word.partition("=")
    key = key.lstrip("+")
    is_changeable = belongs_to(key) and key != TRUNCATED
    if key == "preset" or key.partition(".")[0] in GROUPS or is_changeable:
        return
    choices = ", ".join([*GROUPS, "preset", *REPLAYABLE])
    if key.partition(".")[0] not in [field.name for field in fields(Settings)]:
        near = nearest(key, [*GROUPS, "preset", *OWN_OPTIONS])
        raise SettingError(word, problem=NO_SUCH_OPTION, remedy=f"the nearest is {near}=")
    raise SettingError(
        key,
        value,
        "a record holds the responses and log-probs of the run, so a replay cannot change this",
        remedy=f"choose from {choices}",
    )


def belongs_to(key: str, names: Sequence[str] = REPLAYABLE) -> bool:
    """Return whether a setting is one of `names` or belongs to one of these groups.

    By default: whether a replay may change a setting beside GROUPS."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def keys_of_preset(words: Sequence[str]) -> list[str]:
    """Return the groups and the dotted settings that the preset on the command line sets."""
    names = [word.removeprefix("preset=") for word in words if word.startswith("preset=")]
    if not names:
        return []
    file = CONF / "preset" / f"{names[-1]}.yaml"
    if not file.exists():
        options = ", ".join(sorted(path.stem for path in file.parent.glob("*.yaml")))
        raise SettingError("preset", names[-1], f"there is no such preset; there are {options}")
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    keys = []
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            keys += [key.removeprefix("override /") for key in entry]
    return keys + list(dotted(content))


def option_of(recorded: Settings, group: str) -> str:
    """Return the option with the fields of a run's group: its class's own, or the user's class."""
    outside = recorded.outside.get(group)
    return outside["path"] if outside else getattr(recorded, group).name


def option_name_of(words: Sequence[str], group: str, part: Any) -> str:
    """Return the option that the command line chose for a group, or the name of its class."""
    names = [word.partition("=")[2] for word in words if word.startswith(f"{group}=")]
    return names[-1] if names else part.name


def copy_setting(target: Any, source: Any, key: str) -> None:
    """Copy a setting with a dotted key from one tree of settings to another."""
    name, _, rest = key.partition(".")
    value = getattr(source, name)
    if not rest or not is_dataclass(value):
        setattr(target, name, value)
        return
    part = getattr(target, name)
    if "." in rest:
        copy_setting(part, value, rest)
        return
    if rest not in [field.name for field in fields(part)]:
        raise SettingError(key, problem="the run's option has no such setting")
    setattr(target, name, replace(part, **{rest: getattr(value, rest)}))
