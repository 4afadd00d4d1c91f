"""Where Hydra finds the option files. conf/ and sweeps/ lie beside gspo/ in the repository, and in it in a wheel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, open_dict

from gspo.config.load import register_schemas, to_settings
from gspo.config.settings import Settings


def folder_of(name: str) -> Path:
    """Return the folder conf or sweeps of this installation (pyproject.toml says where it is installed)."""
    package = Path(__file__).parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


CONF, SWEEPS = folder_of("conf"), folder_of("sweeps")


class SweepFiles(SearchPathPlugin):
    """Lets `gspo train -cn paper_figures -m` find the sweeps that come with the program, in any folder.

    They are looked for last, so that an edited copy in a folder that the user names with -cd is the one that counts:
    Hydra puts that folder right before the first entry with the name "schema", which is why they have this name."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("schema", f"file://{SWEEPS}")


def composed(name: str, job: Callable[[DictConfig], object]) -> Callable[[], None]:
    """Return the command that composes conf/<name>.yaml and the command line, and calls `job` with the result.

    `job` is a function of a module, decorated with `one_line`, so that a sweep's worker processes import it."""
    register_schemas()
    return hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(job)


def composed_settings(words: list[str]) -> Settings:
    """Return the settings of the run that `gspo train` would make of these words."""
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", overrides=words, return_hydra_config=True)
        choices = config.hydra.runtime.choices
        with open_dict(config):
            del config["hydra"]
        return to_settings(config, choices)
