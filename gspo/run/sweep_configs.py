"""Expand a sweep's command line to its jobs, and compose the configuration of each job."""

import itertools
import pickle

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig


def expanded(overrides: list[str]) -> list[list[str]]:
    """Return a sweep's jobs as lists of plain overrides.

    If a key is given twice, the later override counts, as in Hydra."""
    choices: dict[str, list[str]] = {}
    hydra = GlobalHydra.instance()
    # the loader finds the options that glob(...) stands for
    loader = hydra.config_loader() if hydra.is_initialized() else None
    for override in OverridesParser.create(config_loader=loader).parse_overrides(overrides):
        key = override.get_key_element()
        if override.is_sweep_override():
            values = override.sweep_string_iterator()
        else:
            values = [override.get_value_element_as_str()]
        choices[key] = [f"{key}={value}" for value in values]
    return [list(job) for job in itertools.product(*choices.values())]


class OtherLauncher(Exception):
    """A job of a sweep chooses a launcher of its own, which would not be used."""


class SweepConfigs:
    """The configurations of a sweep's jobs.

    Hydra takes a third of a second to compose a configuration, nearly all of it for the files of
    the chosen options. So choices, as in `objective=grpo`, are composed once for all jobs that have
    them. Values, as in `optim.lr=1`, are set in a copy, by Hydra's own function."""

    def __init__(self, loader: ConfigLoaderImpl, config: DictConfig):
        self.loader = loader
        self.config = config
        # by the choices; unpickling is faster than a deep copy
        self.composed: dict[tuple[str, ...], bytes] = {}

    def of_job(self, overrides: list[str]) -> DictConfig:
        """Return the composed configuration of a job.

        Raises OtherLauncher if the job's own files choose another launcher than the launcher
        of the sweep."""
        parsed_overrides = OverridesParser.create().parse_overrides(overrides)
        choices = []
        values = []
        for override, parsed in zip(overrides, parsed_overrides, strict=True):
            if self.sets_a_value(parsed):
                values.append(parsed)
            else:
                choices.append(override)
        key = tuple(choices)
        if key not in self.composed:
            composed = self.loader.load_sweep_config(self.config, choices)
            self.check_launcher(composed, overrides)
            self.composed[key] = pickle.dumps(composed)
        config = pickle.loads(self.composed[key])
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return config

    def sets_a_value(self, parsed: Override) -> bool:
        """Return whether an override changes the value of a setting, and chooses no file."""
        changes_value = (
            parsed.type in (OverrideType.CHANGE, OverrideType.FORCE_ADD)
            and parsed.package is None
            and not parsed.is_hydra_override()
        )
        return changes_value and not self.loader.repository.group_exists(parsed.key_or_group)

    def check_launcher(self, composed: DictConfig, overrides: list[str]) -> None:
        """Raise OtherLauncher if a job's configuration chooses a launcher of its own."""
        chosen = launcher_of(composed.hydra)
        of_sweep = launcher_of(self.config.hydra)
        if chosen != of_sweep:
            groups = " ".join(
                override for override in overrides if "." not in override.partition("=")[0]
            )
            raise OtherLauncher(
                f"the files of the job {groups} choose {chosen}, but one launcher starts all jobs "
                f"of a sweep, here {of_sweep}: set hydra/launcher=... on the command line"
            )


def launcher_of(hydra: HydraConf | DictConfig) -> str:
    """Return the class name of the launcher in the configuration of Hydra."""
    return hydra.launcher._target_.rpartition(".")[2]
