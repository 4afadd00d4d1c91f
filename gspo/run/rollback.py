"""Going back to the last healthy checkpoint at a lower learning rate, as a resume: the decision is a file.

`rollbacks.json` lists them: from which step, to which, whether what lies between has moved to superseded/. A run that
is killed between the decision and the move makes the move when it starts again, so it ends as if it had not been.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from gspo.config.settings import Settings
from gspo.core.files import replace_text
from gspo.core.untrusted import is_step, read_json
from gspo.tracking.tracker import supersede
from gspo.train.checkpoint import damage


class Rollbacks:
    """A run directory's rollbacks."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "rollbacks.json"
        self.made: list[dict] = self._read() if self.path.exists() else []

    def _read(self) -> list[dict]:
        """Raises ValueError for a file that lists no rollbacks."""
        made = read_json(self.path, list)
        kinds = {"from": int, "to": int, "moved": bool}
        fits = [isinstance(back, dict) and {k: type(back.get(k)) for k in kinds} == kinds for back in made]
        if not all(fits) or not all(is_step(back["from"]) and is_step(back["to"]) for back in made):
            raise ValueError(f"{self.path} is damaged: it lists what is no rollback")
        return made

    def plan(self, step: int, healthy: int) -> int | None:
        """Decide to go back to the newest whole checkpoint of step `healthy` or before; its step, None if there is
        none."""
        for folder in sorted((self.folder / "checkpoints").glob("step_??????"), reverse=True):
            target = int(folder.name.removeprefix("step_"))
            if target <= healthy and not damage(folder):
                self._write([*self.made, {"from": step, "to": target, "moved": False}])
                return target
        return None

    def move(self) -> list[str]:
        """Make the move that was decided, if there is one to make; what to say of it."""
        if not self.made or self.made[-1]["moved"]:
            return []
        last = self.made[-1]
        said = supersede(self.folder, last["to"])
        (self.folder / "wandb_id").unlink(
            missing_ok=True
        )  # W&B takes no step twice: the new branch is a run of its own
        self._write([*self.made[:-1], last | {"moved": True}])
        return [*said, f"rolled back from step {last['from']} to step {last['to']}"]

    def forget(self) -> None:
        """The run starts from the beginning."""
        self.path.unlink(missing_ok=True)
        self.made = []

    def lowered(self, settings: Settings) -> Settings:
        """The settings with the learning rate that the rollbacks so far leave."""
        lr = settings.optim.lr * settings.monitor.rollback_lr ** len(self.made)
        return replace(settings, optim=replace(settings.optim, lr=lr))

    def _write(self, made: list[dict]) -> None:
        self.made = made
        replace_text(self.path, json.dumps(made))
