"""The directory of one run: who may write there, its log and status, and the checkpoint that the
run goes on from.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from omegaconf import OmegaConf

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
from gspo.config.settings import Settings, folder_of, same_result, settings_hash
from gspo.data.lazy_torch import torch
from gspo.io.escaping import EscapingFormatter
from gspo.io.files import (
    LOCK_FILE,
    STATUS_FILE,
    CreatedFiles,
    append_to,
    note_start,
    read_status,
    refuse_links,
    remove_unfinished,
    replace_text,
)
from gspo.io.ownership import SIGNATURES, is_own_file, why_not_own
from gspo.io.rows import read_rows
from gspo.io.untrusted import read_json
from gspo.run.entry_point import Stopped
from gspo.run.rollback import Rollbacks
from gspo.tracking import run_report
from gspo.tracking.metrics import CUSTOM
from gspo.tracking.monitor import stability_report
from gspo.tracking.score import score
from gspo.tracking.tracker import supersede
from gspo.train.checkpoint_files import check_belongs, damage, latest_checkpoint, read_state

LOG = "train.log"
ROWS = "metrics.jsonl"
REPORT = "report.txt"
SETTINGS = "settings.yaml"
DIFF = "code.diff"
MOST_DIFF = 1_000_000  # characters
MOST_CHANGED = 32 << 20  # bytes of changed files, beyond which they are named alone
# settings of a task or a model that name a file, a folder or a data set
PLACES = ("path", "train_path", "hub")
ENDED = ("finished", "collapsed")  # the status of a run that has nothing left to do


class RunDirectory:
    """The directory of one run. Only the process that holds `exclusive_access` may write there."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def for_run(cls, settings: Settings, in_sweep: bool) -> RunDirectory:
        """Return the directory that a run with these settings has. Writes nothing.

        Raises ValueError if it holds results that may not be continued. With on_existing=auto the
        same command continues a run that was interrupted or has failed. One that has ended is
        refused; in a sweep `gspo train` passes over it.
        """
        directory = cls(folder_of(settings))
        folder = directory.path
        if (folder / ROWS).exists():
            how = directory.status().get("how", "interrupted")
            continues = settings.on_existing == "auto" and (in_sweep or how not in ENDED)
            if not (settings.resume or settings.on_existing == "resume" or continues):
                raise ValueError(
                    f"{folder} exists already ({how}); continue it with resume={folder}, or remove it"
                )
            recorded = read_settings(folder, trust=settings.allow_outside_code)
            settings.inputs = recorded.inputs
            difference = same_result(settings, recorded)
            if difference:
                raise ValueError(f"{folder} was made with other settings: {difference}")
            if not (settings.resume or in_sweep):
                print(f"{folder} is there already ({how}): this command goes on with it")
        return directory

    # --------------------------------------------------------------------------------------------------
    # access, log
    def exclusive_access(self) -> AbstractContextManager[CreatedFiles]:
        """Within this context no other process writes here; see `exclusive`."""
        return exclusive(self.path)

    @contextmanager
    def log_to_file(self) -> Iterator[None]:
        """Within this context the library logs to train.log, with the traceback of the error that
        ends the run.
        """
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
    def removed_if_refused(self, settings: Settings, made: CreatedFiles) -> Iterator[None]:
        """Within this context a new run is built. If that raises ValueError, what this process made
        here is removed.

        The settings are written at once, so that a run which is killed in its cold start can be
        resumed."""
        new = not (self.path / SETTINGS).exists()
        if new:
            write_settings(settings, self.path)
        try:
            yield
        except ValueError:
            if new:
                made.remove(SETTINGS, SIGNATURES, LOG)
            raise

    # -------------------------------------------------------------------------------------------
    # what is written here
    def record_start(self, settings: Settings, prompt_format: str) -> None:
        """Write the settings, with the prompt format that is used, and which code and machine run
        them; of the user's own code, the source and the meaning of its metrics."""
        settings.prompt_used = prompt_format
        write_settings(settings, self.path)
        copy_outside_code(settings, self.path)
        if settings.metrics:
            meanings = {
                f"custom/{name}": {"unit": m.unit, "meaning": m.meaning}
                for name, m in settings.metrics.items()
            }
            replace_text(self.path / CUSTOM, json.dumps(meanings, indent=1))
        varied = {"varied": settings.varied} if settings.varied else {}
        replace_text(self.path / "code.json", json.dumps(code_state() | varied, indent=1))
        if diff := uncommitted():
            replace_text(self.path / DIFF, diff)
        else:
            (self.path / DIFF).unlink(missing_ok=True)

    def write_status(self, how: str, step: int, reason: str = "") -> None:
        """Write status.json: how the run is (one of gspo.io.files.RUN_STATES), its step, and the reason
        of a failure.
        """
        entry = {
            "how": how,
            "step": step,
            "reason": reason,
            "time": time.time(),
            "pid": os.getpid(),
            "host": platform.node(),
        }
        replace_text(self.path / STATUS_FILE, json.dumps(entry))

    def status(self) -> dict:
        """Return what status.json says; empty if it is not there."""
        return read_status(self.path)

    def note_start(self, checkpoint_step: int | None) -> None:
        """Note that this process begins to train, from the checkpoint of a step or (None) from the
        beginning.
        """
        note_start(self.path, checkpoint_step)

    def write_stability_report(self, how: str) -> None:
        """Answer the three stability questions from the run's rows, in report.txt. `how` says how
        the run ended.
        """
        replace_text(self.path / REPORT, stability_report(read_rows(self.path / ROWS), how) + "\n")

    def stability_report(self) -> str:
        """Return the text of report.txt."""
        return (self.path / REPORT).read_text(encoding="utf-8")

    def score(self, how: str) -> float:
        """Return the run's score (gspo.tracking.score) after it has ended so; NaN for a run that is
        not at its end.
        """
        return score(read_rows(self.path / ROWS), how == "collapsed") if how in ENDED else math.nan

    def write_page(self) -> None:
        """Write the run's HTML page."""
        run_report.write_page(self.path)

    # ----------------------------------------------------------------------------------------------------
    # going on
    def newest_checkpoint(self, settings: Settings) -> Path | None:
        """Return the checkpoint that the run goes on from, None to start from the beginning.

        A run that was killed before its first checkpoint starts from the beginning. Raises
        ValueError if the checkpoint belongs to other settings, or if there is none although the
        rows go beyond two checkpoints.
        """
        checkpoint = latest_checkpoint(self.path)
        if checkpoint:
            check_belongs(checkpoint, settings_hash(settings))
            return checkpoint
        last = max((row["step"] for row in read_rows(self.path / ROWS)), default=-1)
        # By the time of its second checkpoint, a run has written the first one completely.
        if last >= 0 and last >= 2 * (
            every := read_settings(self.path, trust=settings.allow_outside_code).checkpoint.every
        ):
            raise ValueError(
                f"{self.path} has no checkpoint, although it has rows up to step {last} and checkpoint.every={every}: "
                "put its checkpoints back, or move it away to start it from the beginning"
            )
        if settings.resume or last >= 0:
            print(
                f"{self.path} was interrupted before its first checkpoint: it starts from the beginning"
            )
        return None

    def supersede_after(self, step: int) -> list[str]:
        """Move what the run wrote after a step to superseded/; return the warnings about rows that
        were lost.
        """
        return supersede(self.path, step)

    def rollbacks(self) -> Rollbacks:
        """Return the rollbacks that the monitor has decided on so far."""
        return Rollbacks(self.path)

    def saved_up_to(self) -> str:
        """Say in words up to which checkpoint the run is saved."""
        latest = self.path / "checkpoints" / "latest"
        return (
            f"saved up to {latest.read_text(encoding='utf-8')}"
            if latest.exists()
            else "nothing was saved yet"
        )

    def foreign_settings_warnings(self, settings: Settings) -> list[str]:
        """Return the warnings before resuming a run whose settings another user wrote; empty for
        one's own run.
        """
        if not settings.resume or is_own_file(self.path / SETTINGS):
            return []
        place = (
            "tracking.wandb, tracking.entity and tracking.project count as this command gives them"
        )
        reads = f"; it reads {named}" if (named := places_outside(settings)) else ""
        return [
            f"{self.path / SETTINGS} {why_not_own()}; {place}, so wandb={settings.tracking.wandb}{reads}"
        ]


@contextmanager
def exclusive(folder: Path, names: Collection[str] = ()) -> Iterator[CreatedFiles]:
    """Within this context no other process writes in a folder; it is made if it is not there.

    Yields a record of what the folder held before. Raises ValueError if another process writes
    there, and if an entry is a link. If the folder holds other things too, `names` says which of
    its entries are written, and only those are looked at."""
    refuse_links(folder, names)
    made = CreatedFiles(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with append_to(folder / LOCK_FILE) as lock:
        with suppress(PermissionError):  # of a lock file that another user has made
            os.fchmod(lock.fileno(), 0o600)  # who cannot open it cannot hold the lock
        # a process that only asks whether the folder is locked holds it briefly
        for patience in (0.1, 0.3, 0.6, 0.0):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(patience)
        else:
            raise ValueError(
                f"{folder} is being written by another process; wait for it, or stop it first"
            )
        remove_unfinished(folder)
        yield made


def has_reached(checkpoint: Path | None, steps: int) -> bool:
    """Return whether a checkpoint is that of step `steps` or later; False without a checkpoint."""
    return checkpoint is not None and read_state(checkpoint)["step"] >= steps


def settings_and_checkpoint(
    run: str, step: int, consent: bool, trust: bool, allowed: Collection[str] = ()
) -> tuple[Settings, Path | None]:
    """Return settings and checkpoint of a run directory; step -1 means the newest checkpoint, and
    step 0 the policy that the run started from, without a checkpoint.

    `consent` is the user's consent to run programs in a weak sandbox, `trust` that to import code
    that the run names, and `allowed` are the addresses that another user's run may reach. Raises
    ValueError if the checkpoint is not there or is damaged, and for addresses that are not allowed.
    """
    recorded = recorded_config(Path(run), consent, trust)
    settings = to_settings(recorded)
    if not is_own_file(Path(run) / SETTINGS):
        content = OmegaConf.to_container(recorded)
        content.pop("rollout")  # the engine is this command's
        named = {key: value for key, value in addresses(content).items() if value not in allowed}
        refuse_addresses(Path(run), named, f"addresses=[{','.join(named.values())}]")
    if change := source_change(Path(run), recorded, settings):
        print(f"warning: {change}; what is there now is used", file=sys.stderr)
    if not is_own_file(Path(run) / SETTINGS) and (reads := places_outside(settings)):
        print(f"warning: {run}/settings.yaml {why_not_own()}; it reads {reads}", file=sys.stderr)
    folder = (
        latest_checkpoint(Path(run)) if step < 0 else Path(run) / "checkpoints" / f"step_{step:06d}"
    )
    if step == 0 and not folder.exists():
        if not is_own_file(Path(run) / SETTINGS):
            settings.runs = Settings.runs  # where a cold start is made if there is none
        return settings, None
    if folder is None or not folder.exists():
        there = sorted(p.name for p in (Path(run) / "checkpoints").glob("step_??????"))
        raise ValueError(
            f"step={step}: {run} has no such checkpoint; it has {', '.join(there) or 'none'}"
        )
    if step >= 0 and (problem := damage(folder)):
        raise ValueError(f"step={step}: {folder} is damaged: {problem}")
    if not settings.policy.lora.rank:  # else the folder holds no model
        # raises for a file that is too large, which transformers would read anyway
        read_json(folder / "config.json")
    return settings, folder


def places_outside(settings: Settings) -> str:
    """Name, as key=value, the files, folders and hub names outside the run's directory that its
    settings read; "" if they read none."""
    groups = {"task": settings.task, "model": settings.model}
    named = {
        f"{group}.{key}": getattr(part, key, "") for group, part in groups.items() for key in PLACES
    }
    return ", ".join(f"{key}={value}" for key, value in named.items() if value)


def git(*words: str) -> str:
    """Return the output of a git command in this code's repository; "" without git or repository."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        return done.stdout
    except OSError:
        return ""


def uncommitted() -> str:
    """Return how the tracked files of this code differ from its commit, as `git apply` takes it; ""
    if they do not, or if this code is in no repository. Of very large changes only the files are
    named."""
    if not git("ls-files", "--", Path(__file__).name):
        return ""
    root = Path(git("rev-parse", "--show-toplevel").strip())
    changed = [root / name for name in git("diff", "HEAD", "--name-only", "-z").split("\0") if name]
    if sum(path.stat().st_size for path in changed if path.is_file()) > MOST_CHANGED:
        # git would take minutes
        return "".join(f"# changed: {path.relative_to(root)}\n" for path in changed)
    diff = git("diff", "HEAD", "--no-color", "--no-ext-diff")
    return (
        diff
        if len(diff) <= MOST_DIFF
        else git("diff", "HEAD", "--no-color", "--no-ext-diff", "--stat")
    )


def versions(*names: str) -> dict[str, str]:
    """Return the versions of those of these packages that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def code_state() -> dict:
    """Return which code runs on which machine: commit, changed files, versions, threads, GPUs,
    command line.

    An installed copy of this code may lie inside another repository, whose commit says nothing
    about it."""
    tracked = git("ls-files", "--", Path(__file__).name) != ""
    return {
        "commit": (tracked and git("rev-parse", "HEAD").strip()) or None,
        "changed_files": [line[3:] for line in git("status", "--porcelain").splitlines()]
        if tracked
        else [],
        "python": platform.python_version(),
        "versions": versions("torch", "transformers", "numpy", "wandb", "hydra-core"),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "command": sys.argv,
    }
