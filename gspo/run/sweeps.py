"""Plan a sweep and write its manifest before its first job.

When a sweep starts, one line of `runs/<study>/manifest.jsonl` lists its jobs with their run
directories. Run directories are named by their settings, so the same command finds them again.
gspo.run.sweep_state reads how far each job is.
"""

import grp
import json
import math
import os
import pwd
import secrets
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from gspo.config.load import chosen_settings
from gspo.config.own_file import check_own_file
from gspo.config.settings import Settings, folder_of, vary
from gspo.io.escaping import escape_line, outlive_reader
from gspo.io.files import ENDED, append_to, read_status, refuse_links
from gspo.run.devices import jobs_at_once
from gspo.run.entry_point import (
    REASON_COLLECTORS,
    UNFINISHED_JOBS,
    USER_ERRORS,
    JobResult,
    explain,
    print_error,
    stop_signal,
)
from gspo.run.launched import is_follower
from gspo.run.sweep_configs import SweepConfigs, expanded, launcher_of
from gspo.run.sweep_progress import SweepProgress
from gspo.run.sweep_state import (
    MANIFEST,
    entries,
    forecast,
    own_overrides,
    shared_overrides,
    upload,
    without_escapes,
)

# the variable with the sweep's id, by which its jobs find their plan in the manifest
SWEEP = "GSPO_SWEEP"
# Hydra's sweeper for Optuna writes it into the study's folder
BEST = "optimization_results.yaml"


class WriteManifest(Callback):
    """The callback by which Hydra reports the start and the end of a sweep and of its jobs.

    If the manifest cannot be written at the start, the sweep ends. If that fails after a job, Hydra
    warns and the sweep continues."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Begin the sweep.

        Hydra turns every exception of a callback into a warning, and a sweep without a plan would
        lose its failures. So an exception ends the process here, with its reason as a line."""
        stop_signal().ends_at_once = False
        try:
            self._begin(config)
        except Exception as error:  # every error must end the process
            sys.exit(print_error(error))

    def _begin(self, config: DictConfig) -> None:
        """Write the jobs to the manifests of their studies, or print them with dry_run=true.

        A dry run then exits. The jobs of a search are not known yet."""
        check_own_file(config.hydra)
        planned = [] if is_search(config) else plan(config)
        if not planned and not is_search(config):
            raise ValueError(
                "the sweep has no job: one of its settings has no value, as seed=range(0,0)"
            )
        if config.dry_run:
            no_plan = "a search chooses the settings of its jobs as it goes: no plan"
            print(forecast(planned) if planned else no_plan)
            sys.exit(0)
        jobs_at_once(config.hydra)  # refuses a launcher that would overload the machine
        for number, job in enumerate(planned):
            if job.get("uncomposed"):
                raise ValueError(
                    f"{job['reason']} (job {number} of {len(planned)}); no job was started, "
                    "because Hydra composes all of them before the first"
                )
        for number, job in enumerate(planned):
            if "same_as" in job:
                overrides = without_escapes(own_overrides(planned, number))
                print(f"job {number} ({overrides}) is {same_run(planned, number)}: it is run once")
        self.sweep = secrets.token_hex(8)
        os.environ[SWEEP] = self.sweep
        self.planned = planned
        REASON_COLLECTORS.append(self.collect_reasons)
        study = Path(config.runs) / config.study
        self.studies = studies_of(planned) or [study]
        # Hydra writes the last two files
        refuse_links(study, (MANIFEST, "multirun.yaml", BEST))
        for folder in self.studies:
            refuse_links(folder, (MANIFEST,))
            append_entry(folder, {"sweep": self.sweep, "command": sys.argv, "jobs": planned})
        pickles = config.hydra.launcher.get("submitit_folder")
        if pickles:
            make_private(Path(pickles.partition("%")[0]))
        if launcher_of(config.hydra) == "LocalLauncher":
            # submitit's controllers kill their jobs at Ctrl-C, so there is nothing to wait for and
            # no job may follow.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        else:
            stop_signal().tell_workers()
        if launcher_of(config.hydra) == "JoblibLauncher":
            # as at Ctrl-C, this process waits for its workers to end their steps
            stop_signal().install(signal.SIGTERM, signal.SIGHUP)
        self.progress = None
        outlive_reader()
        if planned:
            names = ", ".join(study.name for study in self.studies)
            self.progress = SweepProgress(names, planned)
            self.progress.start()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Add the job of a search to the manifest."""
        job = HydraConfig.get()
        if job.mode == RunMode.MULTIRUN and is_search(config) and not is_follower():
            entry = planned_job(list(job.overrides.task), lambda: config)
            append_entry(Path(config.runs) / config.study, {"jobs": [entry]})

    def __getstate__(self) -> dict[str, Any]:
        """Leave the thread out if a launcher sends this object to its jobs."""
        return {name: value for name, value in self.__dict__.items() if name != "progress"}

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Add to the manifest why a job did not finish, since it may have no directory yet."""
        if is_follower():
            return
        job = HydraConfig.get()
        if job.mode != RunMode.MULTIRUN:
            return
        number = job.job.num
        overrides = list(job.overrides.task)
        result = job_return._return_value  # a JobResult, or an error of Hydra's own
        if isinstance(result, JobResult):
            unfinished = result.unfinished
        else:
            unfinished = {"reason": explain(result)}
        if unfinished:
            planned = number_in(self.planned, number, overrides)
            run = self.planned[planned]["run"] if planned is not None else ""
            entry = {"sweep": self.sweep, "run": run or _name(config, overrides)} | unfinished
            append_entry(Path(config.runs) / config.study, entry)
        if is_search(config):
            searched = tuple(f"{key}=" for key in config.hydra.sweeper.params or ())
            chosen = [word for word in overrides if word.startswith(searched)] or overrides
            how = " ".join(unfinished.values()) or f"score {result:.4f}"
            print(escape_line(f"job {number}: {' '.join(chosen)}: {how}"), flush=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the command that uploads the study, and collect the reasons for the exit code."""
        if self.progress:
            self.progress.close()
        for study in self.studies:
            command = upload(study)
            if command:
                name = "the study" if len(self.studies) == 1 else f"study {study.name}"
                print(f"to upload all runs of {name} to W&B: {command}")
        self.collect_reasons()

    def collect_reasons(self) -> None:
        """Put the jobs that did not finish into UNFINISHED_JOBS, with their reasons."""
        for study in self.studies:
            for entry in entries(study):
                if entry.get("sweep") == self.sweep and "run" in entry:
                    status = read_status(study / entry["run"])
                    is_later = status.get("time", 0.0) > entry.get("time", math.inf)
                    if is_later and status.get("how") in ENDED:
                        continue  # another sweep has made the run meanwhile
                    stopped = f"stopped {entry.get('stopped')}"
                    run = self._named(entry["run"], study)
                    UNFINISHED_JOBS[run] = entry.get("reason", stopped)
        for job in self.planned:  # also if an entry of theirs could not be written
            run = job["run"]
            if "folder" in job:
                run = self._named(run, Path(job["folder"]).parent)
            if "folder" in job and "same_as" not in job and run not in UNFINISHED_JOBS:
                status = read_status(Path(job["folder"]))
                how = status.get("how")
                if how not in ENDED:
                    UNFINISHED_JOBS[run] = status.get("reason") or how or "it did not begin"
            elif "reason" in job:
                UNFINISHED_JOBS.setdefault(run, job["reason"])

    def _named(self, run: str, study: Path) -> str:
        """Return the name of a run for the list of unfinished jobs: with several studies STUDY/RUN.

        A job whose settings were refused has no study, and keeps its overrides as its name."""
        folders = [job["folder"] for job in self.planned if "folder" in job]
        is_of_several = len(self.studies) > 1 and str(study / run) in folders
        return f"{study.name}/{run}" if is_of_several else run


def is_search(config: DictConfig) -> bool:
    """Return whether the sweeper is a search, which has no plan of all jobs.

    A search chooses the settings of a job from the scores of earlier jobs."""
    return not config.hydra.sweeper._target_.endswith(".BasicSweeper")


# --------------------------------------------------------------------------------------------- plan
def plan(config: DictConfig) -> list[dict[str, Any]]:
    """Return the jobs of a sweep, as the manifest lists them.

    Every job has its overrides. A job with valid settings also has the name of its run, its folder
    and its steps. Any other job has the reason of the refusal. If several jobs are the same run,
    only the first of the jobs with the most steps is started, and the others have its number as
    `same_as`. Raises OtherLauncher if a job chooses a launcher of its own."""
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    overrides_of_jobs = expanded([*params, *config.hydra.overrides.task])
    shared = shared_overrides(overrides_of_jobs)
    # Hydra has no other loader. `config_loader` is declared to return its abstract base.
    loader = cast(ConfigLoaderImpl, GlobalHydra.instance().config_loader())
    configs = SweepConfigs(loader, config)
    jobs: list[dict[str, Any]] = []
    first_with_hash: dict[tuple[Path, str], dict[str, Any]] = {}
    for overrides in overrides_of_jobs:
        own = []
        if len(overrides_of_jobs) > 1:
            own = [override for override in overrides if override not in shared]
        job = planned_job(overrides, lambda overrides=overrides: configs.of_job(overrides), own)
        # a run that several jobs make has the name that the first of them gives it, but a resumed
        # run has its own name
        if "folder" in job and not any(word.startswith("resume=") for word in overrides):
            folder = Path(job["folder"])
            digest = job["run"].rpartition("-")[2]
            first = first_with_hash.setdefault((folder.parent, digest), job)
            job |= {"run": first["run"], "folder": first["folder"]}
        jobs.append(job)
    made_by: dict[str, int] = {}  # by folder: the number of the job that makes the run
    for number, job in enumerate(jobs):
        if "folder" in job:
            maker = made_by.setdefault(job["folder"], number)
            if job["steps"] > jobs[maker]["steps"]:
                made_by[job["folder"]] = number
    for number, job in enumerate(jobs):
        if "folder" in job and made_by[job["folder"]] != number:
            job["same_as"] = made_by[job["folder"]]
    return jobs


def planned_job(
    overrides: list[str], config: Callable[[], DictConfig], own: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a job as the manifest lists it: its overrides, run name, folder and steps.

    If its settings are wrong, it has the reason in place of folder and steps, and its overrides as
    its name. `uncomposed` is set if Hydra itself refuses to compose them. `config` returns the
    composed configuration. `own` are the overrides that not all jobs of the sweep have."""
    job: dict[str, Any] = {"overrides": overrides}
    try:
        composed = config()
    except USER_ERRORS as error:
        return job | {"run": " ".join(overrides), "reason": explain(error), "uncomposed": True}
    try:
        settings = _settings(composed, overrides)
    except USER_ERRORS as error:
        return job | {"run": " ".join(overrides), "reason": explain(error)}
    vary(settings, list(own))
    folder = folder_of(settings)
    return job | {"run": folder.name, "folder": str(folder), "steps": settings.steps}


def studies_of(planned: list[dict[str, Any]]) -> list[Path]:
    """Return the folders of the studies that the jobs of a sweep belong to."""
    return list(dict.fromkeys(Path(job["folder"]).parent for job in planned if "folder" in job))


def same_run(planned: list[dict], number: int) -> str:
    """Return, in words, which earlier job is the same run as this job, or return ""."""
    if number >= len(planned) or "same_as" not in planned[number]:
        return ""
    first = planned[number]["same_as"]
    overrides = without_escapes(own_overrides(planned, first))
    return f"the same run as job {first} ({overrides}), {planned[first]['folder']}"


def taken_by_another_job(settings: Settings) -> str:
    """Return, in words, which earlier job of the present sweep makes this run, or return "".

    Raises ValueError if this job has become another run than the planned one: Hydra reads the
    option files anew for each job, so that an edit while a sweep runs would change the jobs to
    come."""
    job = HydraConfig.get()
    if job.mode != RunMode.MULTIRUN:
        return ""
    study = Path(settings.runs) / settings.study
    # another sweep of the study may have begun since
    sweep = os.environ.get(SWEEP, "")
    overrides = list(job.overrides.task)
    planned: list[dict[str, Any]] = []
    number = None
    for entry in entries(study):
        if "jobs" in entry and entry.get("sweep", "") == sweep:
            number_in_entry = number_in(entry["jobs"], job.job.num, overrides)
            if number_in_entry is not None:  # the newest plan counts
                planned = entry["jobs"]
                number = number_in_entry
    if number is None:
        return ""
    vary(settings, own_overrides(planned, number) if len(planned) > 1 else [])
    settings.planned_name = planned[number]["run"]
    name = folder_of(settings).name
    if name == settings.planned_name:
        return same_run(planned, number)
    raise ValueError(
        f"job {number} was planned as {settings.planned_name} and is now {name}: its option files "
        "were edited after the sweep had begun; type the command again to make the runs that they "
        "describe now"
    )


def number_in(planned: list[dict[str, Any]], number: int, overrides: list[str]) -> int | None:
    """Return the number of a job in a plan, None if the plan lacks it.

    shuffle(...) draws anew when Hydra starts the jobs, so that a job may have another number."""
    if number < len(planned) and planned[number]["overrides"] == overrides:
        return number
    equal = [n for n, job in enumerate(planned) if job["overrides"] == overrides]
    return equal[0] if equal else None


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


# -------------------------------------------------------------------------------------------- files
def append_entry(study: Path, entry: dict) -> None:
    """Append an entry to the manifest in a study's folder."""
    study.mkdir(parents=True, exist_ok=True)
    with append_to(study / MANIFEST) as file:
        # after one that a kill may have cut short
        file.write("\n" + json.dumps({"time": time.time()} | entry) + "\n")


def make_private(folder: Path) -> None:
    """Make the folder of submitit's pickles for this user alone, because jobs run its pickles.

    Raises ValueError if another user could put a file there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    me = os.geteuid()
    for path in (folder.absolute(), *folder.resolve().parents):
        is_parent = path != folder.absolute()
        status = path.lstat()
        mode = status.st_mode
        trusted_owner = status.st_uid == me or (is_parent and status.st_uid == 0)
        group_writes = mode & stat.S_IWGRP and shared_group(status.st_gid)
        others_write = mode & stat.S_IWOTH or group_writes
        # as in /tmp, nobody can rename another user's entries
        if is_parent and mode & stat.S_ISVTX:
            others_write = False
        if others_write or not trusted_owner or stat.S_ISLNK(mode):
            raise ValueError(
                f"hydra.launcher.submitit_folder: jobs run the pickles that lie in {folder}, and "
                f"another user could replace them in {path}: chmod go-w {path}, or set "
                "hydra.launcher.submitit_folder=FOLDER/%j with a FOLDER that you alone can write to"
            )


def shared_group(number: int) -> bool:
    """Return whether a group has, or may have, other members than this user.

    Many systems give each user a group of his own."""
    try:
        group = grp.getgrgid(number)
        me = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return True
    return group.gr_name != me or not {me}.issuperset(group.gr_mem)
