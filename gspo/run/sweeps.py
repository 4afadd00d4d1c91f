"""Plans a sweep and writes its manifest before its first job; gspo.run.sweep_state reads how far
each job is.

When a sweep starts, one line of `runs/<study>/manifest.jsonl` lists its jobs with their run
directories, before the first of them begins. Run directories are named by their settings, so the
same command finds them again.
"""

from __future__ import annotations

import grp
import itertools
import json
import os
import pickle
import pwd
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from gspo.config.load import chosen_settings
from gspo.config.settings import Settings, folder_of, vary
from gspo.io.escaping import escape_line
from gspo.io.files import append_to, read_status, refuse_links
from gspo.run.directory import ENDED
from gspo.run.entry_point import (
    REASONS,
    UNFINISHED_JOBS,
    USER_ERRORS,
    Outcome,
    explain,
    print_error,
)
from gspo.run.launched import is_follower
from gspo.run.sweep_progress import SweepProgress
from gspo.run.sweep_state import MANIFEST, entries, forecast, own_overrides, special, upload

BEST = "optimization_results.yaml"  # what Hydra's sweeper for Optuna writes into the study's folder


class WriteManifest(Callback):
    """Hydra calls this at the start of a sweep and after each job.

    If the manifest cannot be written at the start, the sweep ends. If that fails after a job, Hydra
    warns and the sweep goes on."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Begin the sweep. Hydra makes a warning of every exception of a callback, and a sweep
        without a plan would lose its failures: so an exception ends the process here, with its
        reason in one line."""
        try:
            self._begin(config)
        except Exception as error:  # whatever it is
            sys.exit(print_error(error))

    def _begin(self, config: DictConfig) -> None:
        """Write the jobs to the manifests of their studies; with dry_run=true only print them, and
        end. What a search will run is not known yet."""
        planned = [] if is_search(config) else plan(config)
        if config.dry_run:
            print(
                forecast(planned)
                if planned
                else "a search chooses the settings of its jobs as it goes: no plan"
            )
            sys.exit(0)
        for number, job in enumerate(planned):
            if "same_as" in job:
                print(
                    f"job {number} ({special(planned, number)}) is {same_run(planned, number)}: it is run once"
                )
        self.began = time.time()
        self.planned = planned
        REASONS.append(self.collect_reasons)
        self.studies = studies_of(planned) or [Path(config.runs) / config.study]
        # Hydra writes the two others
        refuse_links(Path(config.runs) / config.study, (MANIFEST, "multirun.yaml", BEST))
        for study in self.studies:
            refuse_links(study, (MANIFEST,))
            append_entry(study, {"command": sys.argv, "jobs": planned})
        if pickles := config.hydra.launcher.get("submitit_folder"):
            private(Path(pickles.partition("%")[0]))
        if config.hydra.launcher._target_.endswith(".LocalLauncher"):
            # submitit's controllers kill their jobs at Ctrl-C, so there is nothing to wait for and
            # no job may follow.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        named = ", ".join(study.name for study in self.studies)
        self.progress = SweepProgress(named, planned) if planned else None
        if self.progress:
            self.progress.start()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Add the job of a search to the manifest."""
        if HydraConfig.get().mode == RunMode.MULTIRUN and is_search(config) and not is_follower():
            _append(
                config,
                {"jobs": [planned_job(list(HydraConfig.get().overrides.task), lambda: config)]},
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave the thread behind where a launcher sends this object to its jobs."""
        return {name: value for name, value in self.__dict__.items() if name != "progress"}

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Note in the manifest why a job did not finish, because it may have had no directory yet."""
        returned = job_return._return_value  # an Outcome, or an error of Hydra's own
        why = (
            returned.unfinished if isinstance(returned, Outcome) else {"reason": explain(returned)}
        )
        if HydraConfig.get().mode == RunMode.MULTIRUN and why and not is_follower():
            number = HydraConfig.get().job.num
            planned = self.planned[number]["run"] if number < len(self.planned) else ""
            _append(
                config,
                {"run": planned or _name(config, list(HydraConfig.get().overrides.task))} | why,
            )
        if is_search(config) and not is_follower():
            job, said = HydraConfig.get(), " ".join(why.values()) or f"score {returned:.4f}"
            named = [f"{key}=" for key in config.hydra.sweeper.params or ()]
            chosen = [
                each for each in job.overrides.task if each.startswith(tuple(named))
            ] or job.overrides.task
            print(escape_line(f"job {job.job.num}: {' '.join(chosen)}: {said}"), flush=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the command that uploads the study, and note which jobs did not finish for the exit
        code.
        """
        if self.progress:
            self.progress.close()
        for study in self.studies:
            if command := upload(study):
                of_study = "the study" if len(self.studies) == 1 else f"study {study.name}"
                print(f"to upload all runs of {of_study} to W&B: {command}")
        self.collect_reasons()

    def collect_reasons(self) -> None:
        """Note for the exit code which jobs did not finish, and why."""
        for study in self.studies:
            for entry in entries(study):
                if entry["time"] >= self.began and "run" in entry:
                    stopped = f"stopped {entry.get('stopped')}"
                    UNFINISHED_JOBS[entry["run"]] = entry.get("reason", stopped)
        for job in self.planned:  # also if an entry of theirs could not be written
            if "folder" in job and "same_as" not in job and job["run"] not in UNFINISHED_JOBS:
                status = read_status(Path(job["folder"]))
                if status.get("how") not in ENDED:
                    UNFINISHED_JOBS[job["run"]] = (
                        status.get("reason") or status.get("how") or "it did not begin"
                    )
            elif "reason" in job:
                UNFINISHED_JOBS.setdefault(job["run"], job["reason"])


def is_search(config: DictConfig) -> bool:
    """Return whether the sweeper chooses the settings of a job from the scores of those before, so
    that there is no plan of all jobs."""
    return not config.hydra.sweeper._target_.endswith(".BasicSweeper")


def plan(config: DictConfig) -> list[dict[str, Any]]:
    """Return the jobs of a sweep.

    Each has its overrides, and run, folder and steps, or the reason why its settings are wrong. Of
    several jobs that are the same run, the first of those with the most steps is made, and the
    others have its number as `same_as`. Raises OtherLauncher if a job chooses a launcher of its
    own."""
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    jobs: list[dict[str, Any]] = []
    numbers: dict[Any, int] = {}
    by_hash: dict[tuple[Path, str], dict[str, Any]] = {}
    configs = SweepConfigs(GlobalHydra.instance().config_loader(), config)
    of_jobs = expanded([*params, *config.hydra.overrides.task])
    common = set.intersection(*map(set, of_jobs)) if len(of_jobs) > 1 else set()
    for overrides in of_jobs:
        own = (
            [override for override in overrides if override not in common]
            if len(of_jobs) > 1
            else []
        )
        job = planned_job(overrides, lambda overrides=overrides: configs.of_job(overrides), own)
        # a run that two jobs make has the name that the first of them gives it; a run that is
        # resumed has its own
        if "folder" in job and not any(word.startswith("resume=") for word in overrides):
            folder = Path(job["folder"])
            first = by_hash.setdefault((folder.parent, hash_of(job["run"])), job)
            job |= {"run": first["run"], "folder": first["folder"]}
        jobs.append(job)
    for number, job in enumerate(jobs):
        first = numbers.setdefault(job.get("folder", number), number)
        if job.get("steps", 0) > jobs[first].get("steps", 0):
            numbers[job["folder"]] = number
    for number, job in enumerate(jobs):
        if "folder" in job and numbers[job["folder"]] != number:
            job["same_as"] = numbers[job["folder"]]
    return jobs


def hash_of(run: str) -> str:
    """Return the settings' hash at the end of a run's name."""
    return run.rpartition("-")[2]


class OtherLauncher(Exception):
    """A job of a sweep chooses a launcher of its own, which nobody would use."""


class SweepConfigs:
    """Composes the configurations of a sweep's jobs.

    Hydra takes a third of a second to compose one, nearly all of it for the files that the choices
    name. So the choices, as in `objective=grpo`, are composed once for all jobs that make them. The
    values, as in `optim.lr=1`, are set in a copy, by Hydra's own function."""

    def __init__(self, loader: ConfigLoaderImpl, config: DictConfig):
        self.loader, self.config = loader, config
        # by the choices; unpickling is faster than a deep copy
        self.composed: dict[tuple[str, ...], bytes] = {}

    def of_job(self, overrides: list[str]) -> DictConfig:
        """Return the composed configuration of a job. Raises OtherLauncher if the job's own files
        choose another launcher than the one that starts all jobs."""
        choices, values = [], []
        for override, parsed in zip(
            overrides, OverridesParser.create().parse_overrides(overrides), strict=True
        ):
            if self.sets_a_value(parsed):
                values.append(parsed)
            else:
                choices.append(override)
        if tuple(choices) not in self.composed:
            own = self.loader.load_sweep_config(self.config, choices)
            self.check_launcher(own, overrides)
            self.composed[tuple(choices)] = pickle.dumps(own)
        own = pickle.loads(self.composed[tuple(choices)])
        ConfigLoaderImpl._apply_overrides_to_config(values, own)
        return own

    def sets_a_value(self, parsed: Override) -> bool:
        """Return whether an override sets a value of a setting that is there, and chooses no file."""
        plain = (
            parsed.type == OverrideType.CHANGE
            and parsed.package is None
            and not parsed.is_hydra_override()
        )
        return plain and not self.loader.repository.group_exists(parsed.key_or_group)

    def check_launcher(self, own: DictConfig, overrides: list[str]) -> None:
        """Raise OtherLauncher if a job's configuration chooses another launcher than the sweep's."""
        chosen, starts = (
            each.hydra.launcher._target_.rpartition(".")[2] for each in (own, self.config)
        )
        if chosen != starts:
            groups = " ".join(
                override for override in overrides if "." not in override.partition("=")[0]
            )
            raise OtherLauncher(
                f"the files of the job {groups} choose {chosen}, but one launcher starts all jobs of a sweep, here "
                f"{starts}: say hydra/launcher=... on the command line"
            )


def studies_of(planned: list[dict[str, Any]]) -> list[Path]:
    """Return the folders of the studies that the jobs of a sweep belong to."""
    return list(dict.fromkeys(Path(job["folder"]).parent for job in planned if "folder" in job))


def planned_job(
    overrides: list[str], config: Callable[[], DictConfig], own: list[str] = ()
) -> dict[str, Any]:
    """Return a job as the manifest lists it: overrides, and run, folder and steps, or the reason
    why its settings are wrong. `config` returns its composed configuration. `own` are the overrides
    that not all jobs of the sweep have."""
    job: dict[str, Any] = {"overrides": overrides}
    try:
        settings = _settings(config(), overrides)
    except USER_ERRORS as error:
        return job | {"run": " ".join(overrides), "reason": explain(error)}
    vary(settings, list(own))
    folder = folder_of(settings)
    return job | {"run": folder.name, "folder": str(folder), "steps": settings.steps}


def same_run(planned: list[dict], number: int) -> str:
    """Return, in words, which earlier job is the same run as this one; "" if none is."""
    if number >= len(planned) or "same_as" not in planned[number]:
        return ""
    first = planned[number]["same_as"]
    return f"the same run as job {first} ({special(planned, first)}), {planned[first]['folder']}"


def taken_by_another_job(settings: Settings) -> str:
    """Return, in words, which earlier job of the present sweep makes this run; "" if none does, or
    outside a sweep.

    Raises ValueError if this job has become another run than the one that was planned: Hydra reads
    the option files anew for each job, so that an edit while a sweep runs would change the jobs to
    come."""
    job = HydraConfig.get()
    if job.mode != RunMode.MULTIRUN:
        return ""
    number, overrides = job.job.num, list(job.overrides.task)
    plans = [
        entry["jobs"] for entry in entries(Path(settings.runs) / settings.study) if "jobs" in entry
    ]
    # another sweep of the study may have begun since; the plan of this one has this job at its
    # place
    own = [plan for plan in plans if len(plan) > number and plan[number]["overrides"] == overrides]
    if not own:
        return ""
    planned = own[-1][number]
    vary(settings, own_overrides(own[-1], number) if len(own[-1]) > 1 else [])
    settings.planned_name = planned["run"]
    now = folder_of(settings).name
    if now == planned["run"]:
        return same_run(own[-1], number)
    raise ValueError(
        f"job {number} was planned as {planned['run']} and is now {now}: its option files were edited after "
        "the sweep had begun; type the command again to make the runs that they describe now"
    )


def _name(config: DictConfig, overrides: list[str]) -> str:
    """Return the name of the run's directory, or the overrides if the settings are wrong."""
    try:
        return folder_of(_settings(config, overrides)).name
    except USER_ERRORS:
        return " ".join(overrides)


def _settings(config: DictConfig, overrides: list[str]) -> Settings:
    """Return the settings of a job. Raises one of USER_ERRORS if they are wrong."""
    plain = config.copy()
    with open_dict(plain):
        plain.pop("hydra")
    return chosen_settings(plain, overrides, config.hydra.runtime.choices)


def _append(config: DictConfig, entry: dict) -> None:
    """Append an entry to the manifest."""
    append_entry(Path(config.runs) / config.study, entry)


def append_entry(study: Path, entry: dict) -> None:
    """Append an entry to the manifest in a study's folder."""
    study.mkdir(parents=True, exist_ok=True)
    with append_to(study / MANIFEST) as file:
        # after one that a kill may have cut short
        file.write("\n" + json.dumps({"time": time.time()} | entry) + "\n")


def private(folder: Path) -> None:
    """Make the folder of submitit's pickles for this user alone, because a job runs what it finds
    there.

    Raises ValueError if another user could put a file there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (folder.absolute(), *folder.resolve().parents):
        found, above = place.lstat(), place != folder.absolute()
        mode, owners = found.st_mode, (os.geteuid(), 0) if above else (os.geteuid(),)
        others = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and shared_group(found.st_gid))
        if above and mode & stat.S_ISVTX:  # as in /tmp, nobody can rename another user's entries
            others = False
        if others or found.st_uid not in owners or stat.S_ISLNK(mode):
            raise ValueError(
                f"hydra.launcher.submitit_folder: jobs run the pickles that lie in {folder}, and another user could "
                f"replace them in {place}: chmod go-w {place}, or say hydra.launcher.submitit_folder=FOLDER/%j with a "
                "FOLDER that you alone can write to"
            )


def shared_group(number: int) -> bool:
    """Return whether a group has, or may have, other members than this user. Many systems give each
    user a group of his own."""
    try:
        group, me = grp.getgrgid(number), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return True
    return group.gr_name != me or not {me}.issuperset(group.gr_mem)


def expanded(overrides: list[str]) -> list[list[str]]:
    """Return a sweep's jobs as lists of plain overrides. If a key is given twice, the later one
    counts, as in Hydra.
    """
    choices: dict[str, list[str]] = {}
    hydra = GlobalHydra.instance()
    # which knows what glob(...) stands for
    loader = hydra.config_loader() if hydra.is_initialized() else None
    for override in OverridesParser.create(config_loader=loader).parse_overrides(overrides):
        key = override.get_key_element()
        values = (
            override.sweep_string_iterator()
            if override.is_sweep_override()
            else [override.get_value_element_as_str()]
        )
        choices[key] = [f"{key}={value}" for value in values]
    return [list(job) for job in itertools.product(*choices.values())]
