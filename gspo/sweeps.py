"""What a sweep plans: its manifest, written before its first job. gspo.sweep_state says how far each job is.

When a sweep starts, one line of `runs/<study>/manifest.jsonl` lists its jobs with their run directories, before the
first of them begins. Run directories are named by their settings, so the same command finds them again.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from gspo.config import Settings, run_directory, to_settings
from gspo.process import UNFINISHED_JOBS, USER_ERRORS, explain
from gspo.sweep_state import MANIFEST, entries, upload


class WriteManifest(Callback):
    """Hydra's callback at the start of a sweep and after each job. Where it fails, Hydra warns and the sweep runs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """List the jobs, those too whose settings are wrong."""
        params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        loader, planned = GlobalHydra.instance().config_loader(), []
        for overrides in expanded([*params, *config.hydra.overrides.task]):
            try:
                settings = _settings(loader.load_sweep_config(config, overrides))
                planned.append({"overrides": overrides, "run": run_directory(settings).name, "steps": settings.steps})
            except USER_ERRORS as error:
                planned.append({"overrides": overrides, "run": " ".join(overrides), "reason": explain(error)})
        self.began = time.time()
        _append(config, {"command": sys.argv, "jobs": planned})
        if config.hydra.launcher._target_.endswith(".LocalLauncher"):
            # submitit's controllers kill their jobs at Ctrl-C: nothing to wait for, and no further job is to start
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Note why a job did not finish (process.one_line): it may have had no directory yet."""
        why = job_return._return_value  # a dict, but for an error of Hydra's own, which `return_value` would raise
        if HydraConfig.get().mode == RunMode.MULTIRUN and why:
            why = why if isinstance(why, dict) else {"reason": explain(why)}
            _append(config, {"run": _name(config, list(HydraConfig.get().overrides.task))} | why)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Say how to upload the study; tell the command line which of the jobs did not finish."""
        if command := upload(Path(config.runs) / config.study):
            print(f"to upload all runs of the study to W&B: {command}")
        for entry in entries(Path(config.runs) / config.study):
            if entry["time"] >= self.began and "run" in entry:
                stopped = f"stopped {entry.get('stopped')}"
                UNFINISHED_JOBS[entry["run"]] = entry.get("reason", stopped)


def _name(config: DictConfig, overrides: list[str]) -> str:
    """Of the run's directory; what was asked for, where that is not possible."""
    try:
        return run_directory(_settings(config)).name
    except USER_ERRORS:
        return " ".join(overrides)


def _settings(config: DictConfig) -> Settings:
    plain = config.copy()
    with open_dict(plain):
        plain.pop("hydra")
    return to_settings(plain, config.hydra.runtime.choices)


def _append(config: DictConfig, line: dict) -> None:
    folder = Path(config.runs) / config.study
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / MANIFEST, "a") as file:
        file.write("\n" + json.dumps({"time": time.time()} | line) + "\n")  # apart from a line that a kill cut short


def expanded(overrides: list[str]) -> list[list[str]]:
    """A sweep's jobs as lists of plain overrides; of one key given twice the later counts, as in Hydra."""
    choices: dict[str, list[str]] = {}
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.get_key_element()
        values = (
            override.sweep_string_iterator() if override.is_sweep_override() else [override.get_value_element_as_str()]
        )
        choices[key] = [f"{key}={value}" for value in values]
    return [list(job) for job in itertools.product(*choices.values())]
