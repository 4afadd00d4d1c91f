"""Checks of the file that the user names with -cn, whose settings could be lost without a word."""

from pathlib import Path

from hydra.conf import HydraConf
from hydra.types import RunMode
from omegaconf import DictConfig

from gspo.io.errors import SettingError
from gspo.io.untrusted import read_yaml

PROGRAM_FILE = "train"  # the file that `gspo train` composes without -cn


def check_own_file(hydra: DictConfig | HydraConf) -> None:
    """Raise ValueError if a file named with -cn says something that would not count.

    `hydra` is Hydra's own part of the composed configuration."""
    name = hydra.job.config_name
    if not name or name == PROGRAM_FILE:
        return
    searched = list(hydra.sweeper.params or {})
    if searched and hydra.mode == RunMode.RUN:
        raise ValueError(
            f"-cn {name} describes a sweep over {', '.join(searched)} (hydra.sweeper.params): add -m, "
            "or `mode: MULTIRUN` under `hydra:`"
        )
    resumes = any(word.startswith("resume=") for word in hydra.overrides.task)
    if resumes and "resume" not in searched:
        raise SettingError(
            "resume",
            problem=f"a resumed run has its own settings, and those of -cn {name} would not count",
            remedy="leave -cn out, and give the changes on the command line",
        )
    content = own_content(hydra, name)
    if content.get("resume"):
        raise SettingError(
            "resume",
            content["resume"],
            f"in {name}.yaml, the other settings of the file would not count",
            remedy="set resume=RUN on the command line, without -cn",
        )
    defaults = content.get("defaults")
    names = defaults if isinstance(defaults, list) else []
    order = [entry for entry in names if entry in ("_self_", PROGRAM_FILE)]
    if order == ["_self_", PROGRAM_FILE]:
        raise ValueError(
            f"{name}.yaml: under defaults: _self_ stands before {PROGRAM_FILE}, whose settings would "
            f"replace those of the file: write [{PROGRAM_FILE}, _self_]"
        )


def own_content(hydra: DictConfig | HydraConf, name: str) -> dict[str, object]:
    """Return the content of the file that -cn names, empty if it is not found."""
    for source in hydra.runtime.config_sources:
        file = Path(source.path) / f"{name.removesuffix('.yaml')}.yaml"
        if source.schema == "file" and file.is_file():
            return read_yaml(file)
    return {}
