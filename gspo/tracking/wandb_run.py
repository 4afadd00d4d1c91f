"""A run as Weights & Biases has it: under which id, what of it is sent again, its tables and summary.

W&B is online where an account is configured and offline otherwise. An offline file loses what was not flushed at a
kill, so it is flushed every second, and a resumed run opens a new offline segment under the same run id and writes the
whole history into it: the newest segment alone is always complete, and the older ones are marked as uploaded for
`wandb sync`. A run resumed online sends the rows that the server lacks; those that a killed process had sent after its
last checkpoint stay as it sent them. A run that the server has and that goes on offline becomes a new one for W&B, with
all its rows, for an upload would append to those that the server has.

A sweep's agent names its runs: W&B then takes its id, project and entity and drops ours. What W&B gave is kept in the
run directory, and from then on counts wherever the run goes on.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shlex
import shutil
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

import wandb
from requests.utils import get_netrc_auth

from gspo.core.files import append_to
from gspo.core.ownership import doubt, own, write_signed
from gspo.core.untrusted import HALVES, read_json
from gspo.tracking.metrics import lookup
from gspo.tracking.settings import MODES, TrackingSettings

log = logging.getLogger(__name__)
NOTES = ("wandb_id", "wandb_online")  # under which id W&B has the run, and where its server has it
AGENT = ("WANDB_SWEEP_ID", "WANDB_RUN_ID")  # what `wandb agent` sets for the runs that it starts
STOPPED = 130  # the exit code that W&B is told of a run that was stopped by a signal and can go on
STAGING = "staging"  # of a segment: the tables' files, until they are uploaded; in the home directory nothing is kept
RECENT = 10  # batches that a summary's means go over
PART = 100  # rollout batches in a table: W&B shows no more of one, and names all of them in each of its rows


class WandbRun:
    """W&B's side of a run directory. `mode`: online or offline."""

    def __init__(self, folder: Path, settings: TrackingSettings, mode: str, config: dict, group: str, tags: list[str]):
        self.folder, self.settings, self.known = folder, settings, set()
        self.table, self.batches, self.recent = None, 0, deque(maxlen=RECENT)
        if Path("settings.yaml").exists() and Path("wandb", "settings").exists():
            raise ValueError(
                "wandb/settings: W&B would take from this file of a run directory where your key and data go; start in "
                "another folder, or remove it"
            )
        self._clear("cache", "artifacts")
        os.environ["WANDB_CACHE_DIR"] = str(folder.absolute() / "wandb" / "cache")  # its core reads it when it starts
        if others := self._of_others():
            say(f"{others} {doubt()}; for W&B this is a new run")
        self.run = self._open(mode, config, group, tags)

    def _open(self, mode: str, config: dict, group: str, tags: list[str]):
        try:
            run = self._init(mode, self._identity(mode), config, group, tags)
        except wandb.Error as error:
            if mode == "offline":
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            say(f"W&B cannot be reached or refuses, tracking goes on offline: {reason}")
            wandb.teardown()  # it still holds the run's id
            run = self._init("offline", self._identity("offline"), config, group, tags)
        write_signed(self.folder / "wandb_id", run.id)
        if not run.offline:
            write_signed(self.folder / "wandb_online", f"{run.entity}/{run.project}/{run.id}")
        segment = Path(run.dir).parent
        staging = str(segment.absolute() / STAGING)
        if not HALVES.search(staging):
            os.environ["WANDB_DATA_DIR"] = staging  # read at each table; names that are not UTF-8 stop W&B
        self._mark_older_segments(segment)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _identity(self, mode: str) -> str:
        """W&B's id of this run: the agent's, or made at its first start. A run that has another id already, or was
        rolled back, is no longer the agent's: W&B would open a second run, or take no step twice."""
        noted, (*_, known) = self._noted("wandb_id"), self._known()
        sweep, agents = (os.environ.get(name) for name in AGENT)
        first = not noted and not known
        if not noted or (mode == "offline" and (noted == known or self._uploaded())):
            noted = agents if first and sweep and agents else secrets.token_hex(6)
            write_signed(self.folder / "wandb_id", noted)
        if sweep and not first and noted != agents:
            for name in AGENT:
                os.environ.pop(name, None)
            wandb.teardown()  # it has read them
        return noted

    def _noted(self, name: str) -> str:
        """What this user's processes wrote there; "" if nothing, or if somebody else did."""
        file = self.folder / name
        return file.read_text(encoding="utf-8") if own(file) else ""

    def _of_others(self) -> str:
        """The notes that are not taken over, in words; "" for none."""
        there = [file for name in NOTES if (file := self.folder / name).exists() and not own(file)]
        return " and ".join(map(str, there))

    def _uploaded(self) -> bool:
        """Whether `wandb sync` has uploaded the newest offline segment: the server has this run since."""
        files = sorted(self.folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.parent.name)
        return bool(files) and files[-1].with_name(f"{files[-1].name}.synced").exists()

    def _known(self) -> list[str]:
        """Entity, project and id under which the server has this run; empty where it does not, or nobody wrote it."""
        noted = self._noted("wandb_online")
        parts = noted.split("/") if noted else []
        return [""] * (3 - len(parts)) + parts

    def _mark_older_segments(self, newest: Path) -> None:
        """What they hold is in the new segment too, or has been sent: W&B's mark keeps `wandb sync` from them, and what
        they staged for it goes."""
        for segment in self.folder.glob("wandb/*run-*"):
            if segment.name != newest.name:
                self._clear(segment.name, STAGING)
        for file in self.folder.glob("wandb/offline-run-*/*.wandb"):
            if file.parent.name != newest.name:
                append_to(file.with_name(f"{file.name}.synced")).close()

    def _clear(self, *names: str) -> None:
        """Remove a folder of W&B's in this run directory, unless a link leads to it."""
        place = (self.folder.resolve() / "wandb").joinpath(*names)
        if place.resolve() == place:
            shutil.rmtree(place, ignore_errors=True)

    def _init(self, mode: str, identity: str, config: dict, group: str, tags: list[str]):
        asked, environment, (entity, project, _) = self.settings, os.environ, self._known()
        if project and asked.project not in ("", project):
            say(f"tracking.project={asked.project}: W&B has this run in {entity}/{project}, where it stays")
        return wandb.init(
            project=project or asked.project or default_project(),
            entity=entity or asked.entity or environment.get("WANDB_ENTITY") or None,
            id=identity,
            name=environment.get("WANDB_NAME") or self.folder.name,
            group=environment.get("WANDB_RUN_GROUP") or group,
            job_type="train",
            tags=[*tags, *(asked.tags or filter(None, environment.get("WANDB_TAGS", "").split(",")))],
            config=config | {"record": self._record()},
            dir=str(self.folder),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(
                x_transaction_log_flush_interval=1.0,
                silent=True,
                console="off",
                finish_timeout=asked.finish_timeout,
                finish_timeout_raises=True,
            ),
        )

    def _record(self) -> dict:
        """Which run directory and which code: stands beside the settings in W&B's configuration."""
        file = self.folder / "code.json"
        code = read_json(file) if file.exists() else {}
        return {"run": self.folder.name, "commit": code.get("commit"), "changed_files": code.get("changed_files", [])}

    def send(self, row: dict, rollouts: list[dict]) -> None:
        """A row and a saved rollout batch, unless the server has them from a killed process."""
        self._define(row)
        self.recent.append(row)
        self.batches += bool(rollouts)
        if row["step"] >= self.run.starting_step:
            self.run.log(row | self._table(row["step"], rollouts), step=row["step"], commit=True)
            self.run.summary.update({f"mean_of_last_{RECENT}": self._means()})

    def _define(self, row: dict) -> None:
        for name in row.keys() - self.known:
            with suppress(KeyError):  # a resumed run's, of another version
                summary = "last,max" if lookup(name).summary == "max" else "last"
                self.run.define_metric(name, step_metric="step", summary=summary)
                self.known.add(name)

    def _means(self) -> dict[str, float]:
        """Over the last batches, of the metrics that are noise in a single one."""
        names = {name for row in self.recent for name in row if name in self.known and lookup(name).summary == "recent"}
        values = {name: [row[name] for row in self.recent if row.get(name) is not None] for name in sorted(names)}
        return {name: sum(each) / len(each) for name, each in values.items() if each}

    def alert(self, title: str, text: str, fallen: bool) -> None:
        self.run.alert(title=title, text=text, level=wandb.AlertLevel.ERROR if fallen else wandb.AlertLevel.WARN)

    def _table(self, step: int, rollouts: list[dict]) -> dict[str, wandb.Table]:
        """The table of the saved batches with some rows of this one added: W&B is sent these and joins them to it."""
        if not rollouts:
            return {}
        part, place = divmod(self.batches - 1, PART)
        if self.table is None or place == 0:
            self.table = wandb.Table(columns=["step", *rollouts[0]], log_mode="INCREMENTAL", allow_mixed_types=True)
        for row in rollouts[:: max(1, len(rollouts) // self.settings.table_rows)]:
            self.table.add_data(step, *(json.dumps(v) if isinstance(v, list) else v for v in row.values()))
        return {f"rollouts_{part + 1}" if part else "rollouts": self.table}

    def finish(self, exit_code: int) -> str | None:
        """Close it; returns the command that uploads what the server lacks, if it lacks anything."""
        upload, folder = "wandb sync" if self.run.offline else None, Path(self.run.dir).parent
        if under_agent() and exit_code == STOPPED:
            self.run.mark_preempting()  # the sweep gives it to an agent again
        try:
            self.run.finish(exit_code=exit_code)
        except TimeoutError:
            log.warning("W&B took longer than tracking.finish_timeout=%s s to upload", self.settings.finish_timeout)
            upload = upload or "wandb sync --include-online"
        if not upload:
            self._clear(folder.name, STAGING)
        self._clear("cache", "artifacts")
        return f"{upload} {shlex.quote(os.path.relpath(folder))}" if upload else None


def default_project() -> str:
    return os.environ.get("WANDB_PROJECT") or "gspo"


def under_agent() -> bool:
    """Whether a sweep's `wandb agent` started this process."""
    return bool(os.environ.get(AGENT[0]))


def own_arguments(arguments: list[str]) -> list[str]:
    """A command line of `wandb agent` as it was at the run's first start. The agent that takes over a run passes the
    whole recorded configuration too: its blocks ("optim={'lr': ...}") are what the other arguments compose."""
    pairs = [argument.partition("=") for argument in arguments]
    return ["".join(pair) for pair in pairs if "." in pair[0] or not pair[2].startswith("{")]


def say(text: str) -> None:
    """A warning, on the terminal and in the run's train.log."""
    log.warning(text)
    print(f"warning: {text}", file=sys.stderr)


def chosen_mode(wanted: str) -> str:
    """online if an account is configured (an API key in the environment or in the netrc file), else offline."""
    if wanted != "auto":
        return wanted
    if os.environ.get("WANDB_MODE") in MODES[1:]:
        return os.environ["WANDB_MODE"]
    return "online" if account() else "offline"


def account() -> bool:
    """Whether a W&B account is configured: an API key in the environment or in the netrc file."""
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(wandb.Settings().base_url))
