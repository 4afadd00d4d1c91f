"""Sends a run to Weights & Biases: its id there, which rows are sent when it is resumed, its tables
and its summary.

W&B is online if an account is configured, else offline. A killed process loses what its offline
file had not flushed, so the file is flushed every second. A resumed run opens a new offline segment
under the same run id and writes its whole history into it. So the newest segment is always
complete; the older ones are marked as uploaded, which makes `wandb sync` skip them. A run that is
resumed online sends the rows that the server lacks; rows that a killed process had sent after its
last checkpoint stay as it sent them. If the server has a run that then goes on offline, W&B gets a
new run with all its rows, because an upload would append to the rows that the server has.

The agent of a W&B sweep gives its runs an id, project and entity, which W&B uses in place of ours.
What W&B used is kept in the run directory and is used again wherever the run goes on.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import shlex
import shutil
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

import wandb

from gspo.io.files import append_to
from gspo.io.ownership import is_own_file, why_not_own, write_signed
from gspo.io.untrusted import SURROGATES, read_bytes, read_json
from gspo.tracking.artifacts import Lineage
from gspo.tracking.episodes import readable
from gspo.tracking.metrics import lookup
from gspo.tracking.score import of_points, point
from gspo.tracking.settings import TrackingSettings
from gspo.tracking.wandb_choice import (
    AGENT,
    MODEL,
    About,
    default_project,
    noted_in,
    server_run,
    under_agent,
)

log = logging.getLogger(__name__)
# files that hold W&B's id of the run, and its entity/project/id on the server
NOTES = ("wandb_id", "wandb_online")
STOPPED = 130  # the exit code that W&B gets for a run that a signal stopped and that can go on
COLLAPSED = 4  # and for one that the monitor ended
# A segment's folder for the files of tables until they are uploaded; W&B would put them into the
# home folder.
STAGING = "staging"
RECENT = 10  # how many batches the means in the summary go over
PUBLIC = "https://api.wandb.ai"
BASE_URL = re.compile(r"^\s*base_url\s*[=:]\s*(\S+)", re.MULTILINE | re.IGNORECASE)
# rollout batches per table: W&B shows no more of one, and each of its rows names all of them
PART = 100


def refuse_settings_of_the_folder() -> None:
    """Raise ValueError if W&B would take from the current folder to whom the user's key and data
    go: W&B reads wandb/settings or .wandb/settings there. `wandb init` makes such a file; a
    stranger's folder may hold one too."""
    for path in (Path("wandb", "settings"), Path(".wandb", "settings")):
        if not os.path.lexists(path):
            continue
        where = BASE_URL.search(read_bytes(path).decode(errors="replace"))
        chosen = {PUBLIC, os.environ.get("WANDB_BASE_URL", PUBLIC).rstrip("/")}
        if Path("settings.yaml").exists() or (where and where[1].rstrip("/") not in chosen):
            raise ValueError(
                f"{path}: W&B would take from this file where your key and data go; start in another folder, remove "
                "it, or give the address itself, WANDB_BASE_URL=..."
            )


class WandbRun:
    """The W&B run of a run directory, or of an evaluation's folder. `mode` is "online" or
    "offline".
    """

    def __init__(self, folder: Path, settings: TrackingSettings, mode: str, about: About):
        self.folder, self.settings, self.about = folder, settings, about
        self.defined: set[str] = set()  # metrics that W&B has a definition of
        self.table, self.batches, self.recent = None, 0, deque(maxlen=RECENT)
        self.points: list[tuple[int, float, float]] = []  # of all rows: what the score depends on
        # whether W&B's server asks the run to stop: its page, or a sweep's early termination
        self.stopped = False
        refuse_settings_of_the_folder()
        self._clear("cache", "artifacts")
        # W&B's core reads it when it starts
        os.environ["WANDB_CACHE_DIR"] = str(folder.absolute() / "wandb" / "cache")
        if others := self._foreign_notes():
            warn(f"{others} {why_not_own()}; for W&B this is a new run")
        self.run = self._open(mode)
        self.lineage = Lineage(self.run, settings.upload_checkpoints)

    def _open(self, mode: str):
        """Start the W&B run, offline if W&B cannot be reached, and note its id."""
        try:
            run = self._init(mode, self._identity(mode))
        except wandb.Error as error:
            if mode == "offline":
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            warn(f"W&B cannot be reached or refuses, tracking goes on offline: {reason}")
            wandb.teardown()  # else W&B would still hold the run's id
            run = self._init("offline", self._identity("offline"))
        write_signed(self.folder / "wandb_id", run.id)
        if not run.offline:
            write_signed(self.folder / "wandb_online", f"{run.entity}/{run.project}/{run.id}")
        segment = Path(run.dir).parent
        staging = str(segment.absolute() / STAGING)
        if not SURROGATES.search(staging):
            # W&B reads it at each table; a path that is not UTF-8 would stop it
            os.environ["WANDB_DATA_DIR"] = staging
        self._mark_older_segments(segment)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _identity(self, mode: str) -> str:
        """Return W&B's id of this run: the one that it must have, else the noted one, else the
        agent's, else a new one.

        A run that has another id already, or was rolled back, is no longer the agent's: with the
        agent's id W&B would open a second run, or refuse the steps that it has already."""
        noted, (*_, on_server) = (
            self.about.id or noted_in(self.folder / "wandb_id"),
            server_run(self.folder),
        )
        sweep, agents = (os.environ.get(name) for name in AGENT)
        first = not noted and not on_server
        twice = mode == "offline" and not self.about.id and (noted == on_server or self._uploaded())
        if not noted or twice:
            noted = agents if first and sweep and agents else secrets.token_hex(6)
            write_signed(self.folder / "wandb_id", noted)
        if sweep and not first and noted != agents:
            for name in AGENT:
                os.environ.pop(name, None)
            wandb.teardown()  # W&B has read the variables already
        return noted

    def _foreign_notes(self) -> str:
        """Return, in words, the notes that another user wrote and that are ignored; "" if there are
        none.
        """
        there = [
            file
            for name in NOTES
            if (file := self.folder / name).exists() and not is_own_file(file)
        ]
        return " and ".join(map(str, there))

    def _uploaded(self) -> bool:
        """Return whether `wandb sync` has uploaded the newest offline segment, so that the server
        has this run.
        """
        files = sorted(
            self.folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.parent.name
        )
        return bool(files) and files[-1].with_name(f"{files[-1].name}.synced").exists()

    def _mark_older_segments(self, newest: Path) -> None:
        """Mark older segments as uploaded, so that `wandb sync` skips them, and remove their staged
        files: what they hold is in the new segment too, or has been sent."""
        for segment in self.folder.glob("wandb/*run-*"):
            if segment.name != newest.name:
                self._clear(segment.name, STAGING)
        for file in self.folder.glob("wandb/offline-run-*/*.wandb"):
            if file.parent.name != newest.name:
                append_to(file.with_name(f"{file.name}.synced")).close()

    def _clear(self, *names: str) -> None:
        """Remove a folder of W&B's in this run directory, unless its path goes through a link."""
        place = (self.folder.resolve() / "wandb").joinpath(*names)
        if place.resolve() == place:
            shutil.rmtree(place, ignore_errors=True)

    def _init(self, mode: str, identity: str):
        """Call wandb.init: what the server has counts first, then the settings, then the
        environment.
        """
        asked, environment, (entity, project, _) = (
            self.settings,
            os.environ,
            server_run(self.folder),
        )
        if project and asked.project not in ("", project):
            warn(
                f"tracking.project={asked.project}: W&B has this run in {entity}/{project}, where it stays"
            )
        return wandb.init(
            project=project or asked.project or default_project(),
            entity=entity or asked.entity or environment.get("WANDB_ENTITY") or None,
            id=identity,
            name=environment.get("WANDB_NAME") or self.about.name or self.folder.name,
            group=environment.get("WANDB_RUN_GROUP") or self.about.group,
            job_type=self.about.job_type,
            tags=[
                *self.about.tags,
                *(asked.tags or filter(None, environment.get("WANDB_TAGS", "").split(","))),
            ],
            config=self.about.config | {"record": self._record() | self.about.record},
            dir=str(self.folder),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(
                x_transaction_log_flush_interval=1.0,
                silent=True,
                console="off",
                finish_timeout=asked.finish_timeout,
                finish_timeout_raises=True,
                # W&B would send SIGINT, a second signal where its agent sends one too
                stop_fn=self._note_stop,
            ),
        )

    def _note_stop(self) -> None:
        """W&B's client calls this, in a thread of its own, when the server asks the run to stop."""
        self.stopped = True

    def _record(self) -> dict:
        """Return which run directory and which code this is, for W&B's configuration."""
        file = self.folder / "code.json"
        code = read_json(file) if file.exists() else {}
        return {
            "run": self.folder.name,
            "commit": code.get("commit"),
            "changed_files": code.get("changed_files", []),
        }

    def send(self, row: dict, rollouts: list[dict]) -> None:
        """Send a row and a saved rollout batch, unless the server has them from a killed process."""
        self._define(row)
        self.recent.append(row)
        self.batches += bool(rollouts)
        self.points.append(point(row))
        if row["step"] >= self.run.starting_step:
            score = self._score() if self.about.job_type == "train" else {}
            self.run.log(
                row | score | self._table(row["step"], rollouts), step=row["step"], commit=True
            )
            self.run.summary.update({f"mean_of_last_{RECENT}": self._means()})

    def _define(self, row: dict) -> None:
        """Define the metrics of a row that W&B has no definition of."""
        for name in row.keys() - self.defined:
            # a resumed run may have metrics of another version of this program
            with suppress(KeyError):
                summary = "last,max" if lookup(name).summary == "max" else "last"
                self.run.define_metric(name, step_metric="step", summary=summary)
                self.defined.add(name)

    def _score(self, collapsed: bool = False) -> dict[str, float]:
        """Return the run's score so far, under the name that a sweep of W&B's optimises; nothing if
        there is none.
        """
        value = of_points(self.points, collapsed)
        return {} if math.isnan(value) else {"score": value}

    def _means(self) -> dict[str, float]:
        """Return the means over the last batches of those metrics that are too noisy in a single
        batch.
        """
        names = {name for row in self.recent for name in row if name in self.defined}
        names = {name for name in names if lookup(name).summary == "recent"}
        values = {
            name: [row[name] for row in self.recent if row.get(name) is not None]
            for name in sorted(names)
        }
        return {name: sum(each) / len(each) for name, each in values.items() if each}

    def checkpoints(self) -> None:
        """Record the whole checkpoints of the run directory that are there, as versions of one
        model.
        """
        for folder in sorted(self.folder.glob("checkpoints/step_??????")):
            self.lineage.made(folder, self.folder.resolve().name, MODEL, (folder.name,))

    def alert(self, title: str, text: str, fallen: bool) -> None:
        """Send an alert: an error if the reward has fallen, else a warning."""
        self.run.alert(
            title=title,
            text=text,
            level=wandb.AlertLevel.ERROR if fallen else wandb.AlertLevel.WARN,
        )

    def _table(self, step: int, rollouts: list[dict]) -> dict[str, wandb.Table]:
        """Add some responses of this batch to the table of saved batches, and return it under its
        name. Only the new rows are sent to W&B, which appends them."""
        if not rollouts:
            return {}
        part, place = divmod(self.batches - 1, PART)
        if self.table is None or place == 0:
            names = dict.fromkeys(name for row in rollouts for name in readable(row))
            self.table = wandb.Table(
                columns=["step", *names], log_mode="INCREMENTAL", allow_mixed_types=True
            )
        for row in map(readable, rollouts[:: max(1, len(rollouts) // self.settings.table_rows)]):
            cells = [row.get(name) for name in self.table.columns[1:]]
            self.table.add_data(
                step, *(json.dumps(cell) if isinstance(cell, list) else cell for cell in cells)
            )
        return {f"rollouts_{part + 1}" if part else "rollouts": self.table}

    def finish(self, exit_code: int) -> str | None:
        """Close the W&B run; return the command that uploads what the server lacks, None if it
        lacks nothing.
        """
        upload, folder = "wandb sync" if self.run.offline else None, Path(self.run.dir).parent
        if exit_code == COLLAPSED:
            self.run.summary.update(self._score(collapsed=True))
        if under_agent() and exit_code == STOPPED and not self.stopped:
            self.run.mark_preempting()  # the sweep then gives the run to an agent again
        try:
            self.run.finish(exit_code=exit_code)
        except TimeoutError:
            log.warning(
                "W&B took longer than tracking.finish_timeout=%s s to upload",
                self.settings.finish_timeout,
            )
            upload = upload or "wandb sync --include-online"
        self.lineage.check()
        if not upload:
            self._clear(folder.name, STAGING)
        self._clear("cache", "artifacts")
        return f"{upload} {shlex.quote(os.path.relpath(folder))}" if upload else None


def warn(text: str) -> None:
    """Print a warning on the terminal, and write it to the run's train.log."""
    log.warning(text)
    print(f"warning: {text}", file=sys.stderr)
