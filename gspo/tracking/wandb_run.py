"""Sends a run's rows, tables and summary to Weights & Biases, also after a resume.

W&B is online if an account is configured, else offline. A killed process loses the part of its
offline file that was not flushed, so the file is flushed every second. A resumed run opens a new
offline segment under the same run id and writes its complete history into it. So the newest segment
is always complete. Older segments are marked as uploaded, and `wandb sync` skips them. A run that
is resumed online sends the rows that the server lacks. Rows that a killed process sent after its
last checkpoint stay on the server. If a run that the server has goes on offline, W&B gets a new run
with all its rows, because an upload would append them to the rows on the server.

The agent of a W&B sweep gives its runs an id, project and entity, which W&B uses in place of ours.
The run directory records the ids that W&B used, and a resumed run uses them again.
"""

import json
import logging
import math
import os
import re
import secrets
import shlex
import shutil
from collections import deque
from contextlib import suppress
from pathlib import Path

import wandb

from gspo.io.files import SETTINGS_FILE, append_to, step_folders
from gspo.io.ownership import is_own_file, why_not_own, write_signed
from gspo.io.untrusted import SURROGATES, read_bytes, read_json
from gspo.tracking.artifacts import Lineage, warn
from gspo.tracking.episodes import readable
from gspo.tracking.metrics import lookup
from gspo.tracking.score import of_points, point
from gspo.tracking.settings import TrackingSettings
from gspo.tracking.wandb_choice import (
    AGENT,
    MODEL,
    About,
    default_project,
    default_tags,
    read_note,
    server_run,
    under_agent,
)

log = logging.getLogger(__name__)
# files that hold W&B's id of the run, and its entity/project/id on the server
NOTES = ("wandb_id", "wandb_online")
# exit codes that W&B gets
STOPPED = 130  # a signal stopped the run, which can be resumed
COLLAPSED = 4  # the monitor ended the run
# A segment's folder for the files of tables until they are uploaded. By default W&B would put them
# into the home folder.
STAGING = "staging"
RECENT = 10  # the number of latest batches for the means in the summary
PUBLIC = "https://api.wandb.ai"
BASE_URL = re.compile(r"^\s*base_url\s*[=:]\s*(\S+)", re.MULTILINE | re.IGNORECASE)
# Rollout batches per table. W&B shows no more batches of a table, and each row names all of them.
BATCHES_PER_TABLE = 100


def refuse_settings_of_the_folder() -> None:
    """Raise ValueError if a file in the current folder would choose the server for W&B.

    W&B reads wandb/settings or .wandb/settings there. `wandb init` makes such a file, but a
    stranger's folder may contain it too. Its server would get the user's key and data."""
    for path in (Path("wandb", "settings"), Path(".wandb", "settings")):
        if not os.path.lexists(path):
            continue
        address = BASE_URL.search(read_bytes(path).decode(errors="replace"))
        trusted = {PUBLIC, os.environ.get("WANDB_BASE_URL", PUBLIC).rstrip("/")}
        if Path(SETTINGS_FILE).exists() or (address and address[1].rstrip("/") not in trusted):
            raise ValueError(
                f"{path}: W&B would take from this file where your key and data go; start in "
                "another folder, remove it, or give the address itself, WANDB_BASE_URL=..."
            )


class WandbRun:
    """The W&B run of a run directory, or of an evaluation's folder.

    `mode` is "online" or "offline"."""

    def __init__(self, folder: Path, settings: TrackingSettings, mode: str, about: About):
        self.folder = folder
        self.settings = settings
        self.about = about
        self.defined: set[str] = set()  # metrics that W&B has a definition of
        self.table: wandb.Table | None = None
        self.batches = 0
        self.recent: deque[dict] = deque(maxlen=RECENT)
        self.points: list[tuple[int, float, float]] = []  # gspo.tracking.score.point of every row
        # whether W&B's server asks the run to stop, for its page or a sweep's early termination
        self.stopped = False
        refuse_settings_of_the_folder()
        self._clear("cache", "artifacts")
        # W&B's core reads it when it starts
        os.environ["WANDB_CACHE_DIR"] = str(folder.absolute() / "wandb" / "cache")
        foreign_notes = self._foreign_notes()
        if foreign_notes:
            warn(f"{foreign_notes} {why_not_own()}; for W&B this is a new run")
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
            # W&B reads the variable at each table. A path that is not UTF-8 would stop W&B.
            os.environ["WANDB_DATA_DIR"] = staging
        self._mark_older_segments(segment)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _identity(self, mode: str) -> str:
        """Return W&B's id of this run: `about.id`, the recorded id, the agent's id, or a new id.

        A run that has another id already, or was rolled back, is no longer the agent's run. With
        the agent's id W&B would open a second run, or refuse steps that it has already."""
        identity = self.about.id or read_note(self.folder / "wandb_id")
        _, _, server_id = server_run(self.folder)
        sweep, agent_id = (os.environ.get(name) for name in AGENT)
        is_first_start = not identity and not server_id
        # an upload would append the rows to those on the server
        needs_new_id = (
            mode == "offline" and not self.about.id and (identity == server_id or self._uploaded())
        )
        if not identity or needs_new_id:
            identity = secrets.token_hex(6)
            if is_first_start and sweep and agent_id:
                identity = agent_id
            write_signed(self.folder / "wandb_id", identity)
        if sweep and not is_first_start and identity != agent_id:
            for name in AGENT:
                os.environ.pop(name, None)
            wandb.teardown()  # W&B has read the variables already
        return identity

    def _foreign_notes(self) -> str:
        """Return the paths of notes that are ignored because another user wrote them, as a text."""
        files = [self.folder / name for name in NOTES]
        return " and ".join(str(file) for file in files if file.exists() and not is_own_file(file))

    def _uploaded(self) -> bool:
        """Return whether `wandb sync` has uploaded the newest offline segment to the server."""
        files = sorted(
            self.folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.parent.name
        )
        return bool(files) and files[-1].with_name(f"{files[-1].name}.synced").exists()

    def _mark_older_segments(self, newest: Path) -> None:
        """Mark older segments as uploaded for `wandb sync`, and remove their staged files.

        Their contents are in the new segment too, or have been sent."""
        for segment in self.folder.glob("wandb/*run-*"):
            if segment.name != newest.name:
                self._clear(segment.name, STAGING)
        for file in self.folder.glob("wandb/offline-run-*/*.wandb"):
            if file.parent.name != newest.name:
                append_to(file.with_name(f"{file.name}.synced")).close()

    def _clear(self, *names: str) -> None:
        """Remove a folder of W&B's in this run directory, unless its path goes through a link."""
        path = (self.folder.resolve() / "wandb").joinpath(*names)
        if path.resolve() == path:
            shutil.rmtree(path, ignore_errors=True)

    def _init(self, mode: str, identity: str):
        """Start the W&B run.

        Project and entity of the server's run come first, then the settings, then the environment.
        """
        settings = self.settings
        entity, project, _ = server_run(self.folder)
        if project and settings.project not in ("", project):
            warn(
                f"tracking.project={settings.project}: W&B has this run in {entity}/{project}, "
                "where it stays"
            )
        return wandb.init(
            project=project or settings.project or default_project(),
            entity=entity or settings.entity or os.environ.get("WANDB_ENTITY") or None,
            id=identity,
            name=os.environ.get("WANDB_NAME") or self.about.name or self.folder.name,
            group=os.environ.get("WANDB_RUN_GROUP") or self.about.group,
            job_type=self.about.job_type,
            tags=[*self.about.tags, *(settings.tags or default_tags())],
            config=self.about.config | {"record": self._record() | self.about.record},
            dir=str(self.folder),
            mode="offline" if mode == "offline" else "online",
            resume="allow",
            settings=wandb.Settings(
                x_transaction_log_flush_interval=1.0,
                silent=True,
                console="off",
                finish_timeout=settings.finish_timeout,
                finish_timeout_raises=True,
                # By default W&B would send SIGINT, a second signal if its agent sends a signal too.
                stop_fn=self._note_stop,
            ),
        )

    def _note_stop(self) -> None:
        """Note that the server asks the run to stop. W&B's client calls this in its own thread."""
        self.stopped = True

    def _record(self) -> dict:
        """Return the run directory's name and the code's version, for W&B's configuration."""
        file = self.folder / "code.json"
        code = read_json(file) if file.exists() else {}
        return {
            "run": self.folder.name,
            "commit": code.get("commit"),
            "changed_files": code.get("changed_files", []),
        }

    def send(self, row: dict, rollouts: list[dict]) -> None:
        """Send a row and a saved rollout batch, unless the server has them already."""
        self._define(row)
        self.recent.append(row)
        if rollouts:
            self.batches += 1
        self.points.append(point(row))
        if row["step"] >= self.run.starting_step:
            score = self._score() if self.about.job_type == "train" else {}
            entries = row | score | self._table(row["step"], rollouts)
            try:
                self.run.log(entries, step=row["step"], commit=True)
            except FileNotFoundError as error:
                # the system has cleaned its temporary files, among them W&B's folder for tables
                folder = Path(error.filename or "").parent
                if not folder.name.endswith("wandb-media"):
                    raise
                folder.mkdir(mode=0o700, parents=True)
                self.run.log(entries, step=row["step"], commit=True)
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
        """Return {"score": the run's score so far}, empty without a score.

        W&B's sweeps optimise this name."""
        value = of_points(self.points, collapsed)
        return {} if math.isnan(value) else {"score": value}

    def _means(self) -> dict[str, float]:
        """Return the means over the last batches of the metrics with summary "recent"."""
        names = {name for row in self.recent for name in row if name in self.defined}
        means = {}
        for name in sorted(names):
            values = [row[name] for row in self.recent if row.get(name) is not None]
            if values and lookup(name).summary == "recent":
                means[name] = sum(values) / len(values)
        return means

    def checkpoints(self) -> None:
        """Record the complete checkpoints of the run directory as versions of one model."""
        for folder in step_folders(self.folder / "checkpoints"):
            self.lineage.record_output(folder, self.folder.resolve().name, MODEL, (folder.name,))

    def alert(self, title: str, text: str, fallen: bool) -> None:
        """Send an alert: an error if the reward has fallen, else a warning."""
        self.run.alert(title, text, level="ERROR" if fallen else "WARN")

    def _table(self, step: int, rollouts: list[dict]) -> dict[str, wandb.Table]:
        """Add responses of this batch to the table of saved batches, and return {name: table}.

        Only the new rows are sent to W&B, which appends them."""
        if not rollouts:
            return {}
        table_index, batch_index = divmod(self.batches - 1, BATCHES_PER_TABLE)
        if self.table is None or batch_index == 0:
            names = dict.fromkeys(name for row in rollouts for name in readable(row))
            self.table = wandb.Table(
                columns=["step", *names], log_mode="INCREMENTAL", allow_mixed_types=True
            )
        stride = math.ceil(len(rollouts) / self.settings.table_rows)
        for row in map(readable, rollouts[::stride]):
            cells = [row.get(name) for name in self.table.columns[1:]]
            self.table.add_data(
                step, *(json.dumps(cell) if isinstance(cell, list) else cell for cell in cells)
            )
        name = f"rollouts_{table_index + 1}" if table_index else "rollouts"
        return {name: self.table}

    def finish(self, exit_code: int) -> str | None:
        """Close the W&B run, and return the command that uploads the rest of the run.

        Returns None if the server has the complete run."""
        upload = "wandb sync" if self.run.offline else None
        folder = Path(self.run.dir).parent
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
