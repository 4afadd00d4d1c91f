"""Records in W&B what a run was made from and what it made, as artifacts: its graph of lineage then
shows

    cold start -> run -> checkpoint -> evaluation

An artifact names the files of a folder of this machine, with their places and sizes. Nothing of
them is uploaded or read, but for the small files that say what the others hold (HASHED): other
weights in the same place are another version. With `upload` the files go to W&B's server too.
"""

from __future__ import annotations

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
LONGEST = 128  # characters of an artifact's name
# how W&B refuses an artifact; ValueError: its name, its type or a path
REFUSED = (wandb.Error, WandbApiFailedError, ValueError)


class Lineage:
    """The artifacts of one W&B run. What W&B refuses is said once, and then no more is recorded:
    training goes on.
    """

    def __init__(self, run: wandb.Run, upload: bool = False):
        self.run, self.upload = run, upload
        self.recorded: dict[Path, wandb.Artifact] = {}
        self.refused = False

    def used(self, folder: Path, name: str, aliases: tuple[str, ...] = ()) -> None:
        """Record that the run begins with the model in a folder. Does nothing if the folder is not
        there.
        """
        self._record(folder, name, MODEL, aliases, used=True)

    def made(self, folder: Path, name: str, kind: str, aliases: tuple[str, ...] = ()) -> None:
        """Record that the run has written a folder, as a version of the artifact `name`."""
        self._record(folder, name, kind, aliases, used=False)

    def _record(
        self, folder: Path, name: str, kind: str, aliases: tuple[str, ...], used: bool
    ) -> None:
        if self.refused or folder in self.recorded or not folder.exists():
            return
        try:
            artifact = described(folder, name, kind, self.upload and not used)
            # `use_artifact` refuses to work offline, and online it waits for the server; this is
            # what it calls
            self.run._log_artifact(
                artifact, aliases=["latest", *aliases], is_user_created=True, use_after_commit=used
            )
        except REFUSED as error:
            self._refuse(name, str(error))
        else:
            self.recorded[folder] = artifact

    def check(self) -> None:
        """After the run's end, say it if W&B's server has refused one of the artifacts."""
        for artifact in self.recorded.values() if not self.run.offline else ():
            try:  # `Artifact.wait` would ask the server for all that it knows of the artifact
                answer = artifact._save_handle.wait_or(timeout=0).response.log_artifact_response
            except (
                TimeoutError,
                HandleAbandonedError,
            ):  # `WandbRun.finish` tells of what is left to upload
                continue
            if answer.error_message and not self.refused:
                self._refuse(artifact.name, answer.error_message)

    def _refuse(self, name: str, why: str) -> None:
        self.refused = True
        reason = (why.splitlines() or ["no reason is given"])[0]
        text = f"W&B does not take the artifact {name}, so its graph of lineage has gaps: {reason}"
        log.warning(text)
        print(f"warning: {text}", file=sys.stderr)


def described(folder: Path, name: str, kind: str, upload: bool) -> wandb.Artifact:
    """Return the artifact of a folder: its files as references, or with `upload` the files
    themselves.

    Raises ValueError if a path cannot be written as a URI that W&B reads."""
    artifact = wandb.Artifact(
        allowed(name), kind, metadata={"host": platform.node(), "folder": str(folder.absolute())}
    )
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        place = file.relative_to(folder)
        if place.parts[0] in OF_WANDB or place.name.startswith("."):
            continue
        if upload:
            artifact.add_file(str(file), name=str(place))
        else:
            artifact.add_reference(
                file.absolute().as_uri(), name=str(place), checksum=str(place) in HASHED
            )
    return artifact


def allowed(name: str) -> str:
    """Return a name with the characters that W&B allows in the name of an artifact.

    >>> allowed("my run/gspo+r2-seed1")
    'my_run_gspo_r2-seed1'
    """
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:LONGEST]
