"""The directory of a run: its lock, log and status, and the checkpoint that it resumes from."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from gspo.config.load import (
    addresses,
    copy_outside_code,
    read_settings,
    recorded_config,
    refuse_addresses,
    source_change,
    to_settings,
    write_settings,
)
from gspo.config.schema import plain
from gspo.config.settings import Settings, folder_of, same_result, settings_hash
from gspo.io.errors import SettingError
from gspo.io.escaping import EscapingFormatter
from gspo.io.files import (
    ENDED,
    LOCK_FILE,
    METRICS_FILE,
    SETTINGS_FILE,
    STATUS_FILE,
    CreatedFiles,
    append_to,
    locked,
    read_status,
    refuse_links,
    remove_unfinished,
    replace_text,
    step_folders,
)
from gspo.io.ownership import SIGNATURES, is_own_file, why_not_own
from gspo.io.rows import read_rows
from gspo.io.untrusted import MAX_SMALL_FILE_BYTES, beginning, read_json
from gspo.run.code_state import code_state, uncommitted
from gspo.run.entry_point import Stopped
from gspo.tracking.metrics import CUSTOM
from gspo.tracking.monitor import stability_report
from gspo.tracking.score import score
from gspo.tracking.tracker import STEP_FOLDERS
from gspo.train.checkpoint_files import check_belongs, damage, latest_checkpoint, read_state

LOG = "train.log"
REPORT = "report.txt"
CODE = "code.json"
CHANGED = " and uncommitted changes"
DIFF = "code.diff"
# settings of a task or a model that name a file, a folder or a data set
PATH_SETTINGS = ("path", "train_path", "hub")


class RunDirectory:
    """The directory of a run. Only a process within `exclusive` may write there."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def for_run(cls, settings: Settings, in_sweep: bool) -> RunDirectory:
        """Return the directory that a run with these settings has, without writing.

        Raises ValueError if it holds results that may not be continued. With on_existing=auto the
        same command continues a run that was interrupted or has failed. A run that has ended is
        refused, but a sweep skips it.
        """
        directory = cls(folder_of(settings))
        folder = directory.path
        if (folder / METRICS_FILE).exists():
            how = read_status(folder).get("how", "interrupted")
            continues = settings.on_existing == "auto" and (in_sweep or how not in ENDED)
            if not (settings.resume or settings.on_existing == "resume" or continues):
                raise ValueError(
                    f"{folder} exists already ({how}); "
                    f"continue it with resume={folder}, or remove it"
                )
            recorded = read_settings(folder, trust=settings.allow_outside_code)
            settings.inputs = recorded.inputs
            difference = same_result(settings, recorded)
            if difference:
                raise ValueError(f"{folder} was made with other settings: {difference}")
            if not (settings.resume or in_sweep or locked(folder)):
                how = "interrupted" if how == "running" else how  # by a kill
                print(f"{folder} is there already ({how}): this command resumes it")
        return directory

    # ---------------------------------------------------------------------------------------- log
    @contextmanager
    def log_to_file(self) -> Generator[None]:
        """Log to train.log within this context, with the traceback of an error that ends it."""
        file = append_to(self.path / LOG)
        handler = logging.StreamHandler(file)
        handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("gspo")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            yield
        except Stopped:
            raise
        except Exception:
            if self.path.exists():  # a run that could not begin has removed its directory
                logger.exception("the run failed")
            raise
        finally:
            logger.removeHandler(handler)
            file.close()

    @contextmanager
    def removed_if_refused(
        self, settings: Settings, created_files: CreatedFiles
    ) -> Generator[None]:
        """Build a new run within this context, or remove its files if that raises ValueError.

        The settings are written at once, so that a run that is killed in its cold start can be
        resumed. `created_files` are the files that this process made."""
        new = not (self.path / SETTINGS_FILE).exists()
        if new:
            write_settings(settings, self.path)
        try:
            yield
        except ValueError:
            if new:
                created_files.remove(SETTINGS_FILE, SIGNATURES, LOG)
            raise

    # -------------------------------------------------------------------------------------- files
    def record_start(self, settings: Settings, prompt_format: str) -> list[str]:
        """Write the settings with the prompt format that is used, and the state of the code.

        The source of the user's own code is copied, and the meaning of its metrics is written.
        Returns a warning if the code is other than before."""
        settings.prompt_used = prompt_format
        write_settings(settings, self.path)
        copy_outside_code(settings, self.path)
        if settings.metrics:
            meanings = {
                f"custom/{name}": {"unit": metric.unit, "meaning": metric.meaning}
                for name, metric in settings.metrics.items()
            }
            replace_text(self.path / CUSTOM, json.dumps(meanings, indent=1))
        state = code_state()
        if settings.varied:
            state["varied"] = settings.varied
        diff = uncommitted()
        warnings = self._keep_earlier_code(state, diff)
        replace_text(self.path / CODE, json.dumps(state, indent=1))
        if diff:
            replace_text(self.path / DIFF, diff)
        else:
            (self.path / DIFF).unlink(missing_ok=True)
        return warnings

    def _keep_earlier_code(self, state: dict, diff: str) -> list[str]:
        """Return a warning if the run was made with other code until now, and keep its record.

        The record is moved to code.1.json and code.1.diff, the next to code.2.json and so on."""
        code = self.path / CODE
        if not code.exists():
            return []
        earlier = {}
        with suppress(ValueError):
            content = read_json(code)
            earlier = content if isinstance(content, dict) else {}
        earlier_diff = b""
        if (self.path / DIFF).exists():
            earlier_diff = beginning(self.path / DIFF, MAX_SMALL_FILE_BYTES)
        if (earlier.get("commit"), earlier_diff) == (state["commit"], diff.encode()):
            return []
        records = self.path.glob("code.*.json")
        numbers = [path.name.split(".")[1] for path in records]
        number = 1 + max([int(name) for name in numbers if name.isdecimal()], default=0)
        code.rename(code.with_name(f"code.{number}.json"))
        if earlier_diff:
            (self.path / DIFF).rename(self.path / f"code.{number}.diff")
        before = f"commit {str(earlier.get('commit'))[:10]}{CHANGED if earlier_diff else ''}"
        now = f"commit {str(state['commit'])[:10]}{CHANGED if diff else ''}"
        return [
            f"the code of {self.path} has changed: until now {before} (see code.{number}.json), "
            f"from now on {now}"
        ]

    def write_status(self, how: str, step: int, reason: str = "") -> None:
        """Write status.json: `how` (of files.RUN_STATES), the step, the reason of a failure."""
        entry = {
            "how": how,
            "step": step,
            "reason": reason,
            "time": time.time(),
            "pid": os.getpid(),
            "host": platform.node(),
        }
        replace_text(self.path / STATUS_FILE, json.dumps(entry))

    def write_stability_report(self, how: str) -> None:
        """Answer the three stability questions from the run's rows, in report.txt.

        `how` is the status with which the run ended."""
        replace_text(
            self.path / REPORT, stability_report(read_rows(self.path / METRICS_FILE), how) + "\n"
        )

    def stability_report(self) -> str:
        """Return the text of report.txt."""
        return (self.path / REPORT).read_text(encoding="utf-8")

    def score(self, how: str) -> float:
        """Return the score (gspo.tracking.score) of a run that ended with the status `how`.

        The score of a run that is not at its end is NaN."""
        if how not in ENDED:
            return math.nan
        return score(read_rows(self.path / METRICS_FILE), how == "collapsed")

    # ------------------------------------------------------------------------------------- resume
    def newest_checkpoint(self, settings: Settings) -> Path | None:
        """Return the checkpoint that the run resumes from, None to start from the beginning.

        A run that was killed before its first checkpoint starts from the beginning. Raises
        ValueError if the checkpoint belongs to other settings, or if there is none although the
        rows go beyond two checkpoints.
        """
        checkpoint = latest_checkpoint(self.path)
        if checkpoint:
            check_belongs(checkpoint, settings_hash(settings))
            return checkpoint
        last = max((row["step"] for row in read_rows(self.path / METRICS_FILE)), default=-1)
        if last >= 0:
            recorded = read_settings(self.path, trust=settings.allow_outside_code)
            every = recorded.checkpoint.every
            # By the time of its second checkpoint, a run has written the first one completely.
            if last >= 2 * every:
                raise ValueError(
                    f"{self.path} has no checkpoint, although it has rows up to step {last} and "
                    f"checkpoint.every={every}: put its checkpoints back, or move it away to start "
                    "it from the beginning"
                )
        if settings.resume or last >= 0:
            print(
                f"{self.path} was interrupted before its first checkpoint: "
                "it starts from the beginning"
            )
        return None

    def saved_up_to(self) -> str:
        """Say in words up to which checkpoint the run is saved."""
        latest = self.path / "checkpoints" / "latest"
        if not latest.exists():
            return "nothing was saved yet"
        return f"saved up to {latest.read_text(encoding='utf-8')}"

    def other_users_settings_warnings(self, settings: Settings) -> list[str]:
        """Return the warnings before a run is resumed whose settings another user wrote."""
        if not settings.resume or is_own_file(self.path / SETTINGS_FILE):
            return []
        paths = external_data(settings)
        reads = f"; it reads {paths}" if paths else ""
        return [
            f"{self.path / SETTINGS_FILE} {why_not_own()}; tracking.wandb, tracking.entity and "
            "tracking.project count as this command gives them, "
            f"so wandb={settings.tracking.wandb}{reads}"
        ]


@contextmanager
def exclusive(folder: Path, names: Collection[str] = ()) -> Generator[CreatedFiles]:
    """Let no other process write in a folder within this context. The folder is made if needed.

    Yields a record of the files that the folder held before. Raises ValueError if another process
    writes there, and if an entry is a link. If the folder holds other things too, `names` are the
    entries that are written, and only these are examined."""
    refuse_links(folder, names)
    created_files = CreatedFiles(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with append_to(folder / LOCK_FILE) as lock:
        with suppress(PermissionError):  # of a lock file that another user has made
            os.fchmod(lock.fileno(), 0o600)  # who cannot open it cannot hold the lock
        # a process that only asks whether the folder is locked holds it briefly
        for pause in (0.1, 0.3, 0.6, 0.0):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(pause)
        else:
            raise ValueError(
                f"{folder} is being written by another process; wait for it, or stop it first"
            )
        for name in ("", *STEP_FOLDERS):
            remove_unfinished(folder / name)
        yield created_files


def has_reached(checkpoint: Path | None, steps: int) -> bool:
    """Return whether there is a checkpoint, of step `steps` or later."""
    return checkpoint is not None and read_state(checkpoint)["step"] >= steps


def settings_and_checkpoint(
    run: str, step: int, consent: bool, trust: bool, allowed: Collection[str] = ()
) -> tuple[Settings, Path | None]:
    """Return the settings and a checkpoint of a run directory.

    step      -1: the newest checkpoint, 0: the policy that the run started from, as None
    consent   the user's consent to run programs in a weak sandbox
    trust     the user's consent to import code that the run names
    allowed   the addresses that another user's run may reach

    Raises ValueError if the checkpoint is missing or damaged, and for addresses that are not
    allowed."""
    directory = Path(run)
    recorded = recorded_config(directory, consent, trust)
    settings = to_settings(recorded)
    is_own = is_own_file(directory / SETTINGS_FILE)
    if not is_own:
        content = plain(recorded)
        content.pop("rollout")  # the engine is this command's
        refused = {key: value for key, value in addresses(content).items() if value not in allowed}
        refuse_addresses(directory, refused, f"addresses=[{','.join(refused.values())}]")
    change = source_change(directory, recorded, settings)
    if change:
        print(f"warning: {change}; the present content is used", file=sys.stderr)
    paths = external_data(settings)
    if paths and not is_own:
        print(f"warning: {run}/settings.yaml {why_not_own()}; it reads {paths}", file=sys.stderr)
    checkpoints = directory / "checkpoints"
    if step < 0:
        folder = latest_checkpoint(directory)
    else:
        folder = checkpoints / f"step_{step:06d}"
        if step == 0 and not folder.exists():
            # the folder of cold starts: beside the study, also if this command runs elsewhere
            if not is_own:
                settings.runs = Settings.runs
            elif (directory.resolve().parents[1] / "cold_starts").is_dir():
                settings.runs = str(directory.resolve().parents[1])
            return settings, None
    if folder is None or not folder.exists():
        names = ", ".join(folder.name for folder in step_folders(checkpoints))
        raise SettingError("step", step, f"{run} has no such checkpoint; it has {names or 'none'}")
    problem = damage(folder) if step >= 0 else ""
    if problem:
        raise SettingError("step", step, f"{folder} is damaged: {problem}")
    if not settings.policy.lora.rank:  # else the folder holds no model
        # raises for a file that is too large, which transformers would read anyway
        read_json(folder / "config.json")
    return settings, folder


def external_data(settings: Settings) -> str:
    """List, as key=value, the files and data sets outside a run's directory that it reads."""
    pairs = []
    for group in ("task", "model"):
        for key in PATH_SETTINGS:
            value = getattr(getattr(settings, group), key, "")
            if value:
                pairs.append(f"{group}.{key}={value}")
    return ", ".join(pairs)
