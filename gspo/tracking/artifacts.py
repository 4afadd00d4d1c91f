"""Records a run's inputs and outputs in W&B as artifacts.

W&B's graph of lineage then shows

    cold start -> run -> checkpoint -> evaluation

An artifact lists the files of a folder on this machine, with their paths and sizes. The files are
neither uploaded nor read, except small files with checksums (HASHED). Because of the checksums, new
weights at an old path become a new version. With `upload`, the files go to W&B's server
too.
"""

import logging
import platform
import re
import sys
from pathlib import Path

import wandb
from wandb.sdk.lib.service.service_connection import WandbApiFailedError
from wandb.sdk.mailbox import HandleAbandonedError

from gspo.tracking.wandb_choice import MODEL, OF_WANDB

log = logging.getLogger(__name__)
# the checksums of a checkpoint or a cold start, and the numbers of an evaluation
HASHED = ("checksums.json", "result.json")
MAX_NAME_CHARS = 128  # of an artifact
# The errors by which W&B refuses an artifact. ValueError is about its name, its type or a path.
REFUSALS = (wandb.Error, WandbApiFailedError, ValueError)


class Lineage:
    """The artifacts of one W&B run.

    If W&B refuses an artifact, the user is warned and no further artifact is recorded. Training
    goes on.
    """

    def __init__(self, run: wandb.Run, upload: bool = False):
        self.run = run
        self.upload = upload
        self.recorded: dict[Path, wandb.Artifact] = {}
        self.refused = False

    def record_input(self, folder: Path, name: str, aliases: tuple[str, ...] = ()) -> None:
        """Record that the run begins with the model in a folder, if the folder exists."""
        self._record(folder, name, MODEL, aliases, is_input=True)

    def record_output(
        self, folder: Path, name: str, kind: str, aliases: tuple[str, ...] = ()
    ) -> None:
        """Record that the run has written a folder, as a version of the artifact `name`."""
        self._record(folder, name, kind, aliases, is_input=False)

    def _record(
        self, folder: Path, name: str, kind: str, aliases: tuple[str, ...], is_input: bool
    ) -> None:
        if self.refused or folder in self.recorded or not folder.exists():
            return
        try:
            artifact = folder_artifact(folder, name, kind, self.upload and not is_input)
            # `use_artifact` calls this method. It refuses to work offline, and online it waits for
            # the server.
            self.run._log_artifact(
                artifact,
                aliases=["latest", *aliases],
                is_user_created=True,
                use_after_commit=is_input,
            )
        except REFUSALS as error:
            self._refuse(name, str(error))
        else:
            self.recorded[folder] = artifact

    def check(self) -> None:
        """Warn the user, after the run's end, if W&B's server has refused an artifact."""
        if self.run.offline:
            return
        for artifact in self.recorded.values():
            handle = artifact._save_handle
            if handle is None:  # W&B has not begun to save it
                continue
            try:
                # `Artifact.wait` would fetch all data about the artifact from the server
                answer = handle.wait_or(timeout=0).response.log_artifact_response
            except (TimeoutError, HandleAbandonedError):
                # the upload is not complete, which `WandbRun.finish` reports
                continue
            if answer.error_message and not self.refused:
                self._refuse(artifact.name, answer.error_message)

    def _refuse(self, name: str, why: str) -> None:
        self.refused = True
        reason = (why.splitlines() or ["no reason is given"])[0]
        warn(f"W&B does not take the artifact {name}, so its graph of lineage has gaps: {reason}")


def folder_artifact(folder: Path, name: str, kind: str, upload: bool) -> wandb.Artifact:
    """Return the artifact of a folder.

    It has references to the folder's files, or with `upload` the files themselves.
    Raises ValueError if a path cannot be written as a URI that W&B reads."""
    artifact = wandb.Artifact(
        allowed_name(name),
        kind,
        metadata={"host": platform.node(), "folder": str(folder.absolute())},
    )
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        path = file.relative_to(folder)
        if path.parts[0] in OF_WANDB or path.name.startswith("."):
            continue
        if upload:
            artifact.add_file(str(file), name=str(path))
        else:
            artifact.add_reference(
                file.absolute().as_uri(), name=str(path), checksum=str(path) in HASHED
            )
    return artifact


def allowed_name(name: str) -> str:
    """Return an artifact's name with "_" in place of characters that W&B does not allow.

    >>> allowed_name("my run/gspo+r2-seed1")
    'my_run_gspo_r2-seed1'
    """
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:MAX_NAME_CHARS]


def warn(text: str) -> None:
    """Print a warning on the terminal, and write it to the run's train.log."""
    log.warning(text)
    print(f"warning: {text}", file=sys.stderr)
