"""Roll a run back: continue from the last healthy checkpoint at a lower learning rate.

`rollbacks.json` records each rollback: from which step, to which step, and whether the rows between
them have been moved to superseded/. A run that is killed between the decision and the move makes
the move when it starts again, and then continues as if it had not been killed.
"""

import json
from dataclasses import replace
from pathlib import Path

from gspo.config.settings import Settings
from gspo.io.files import replace_text, step_folders
from gspo.io.untrusted import is_step, read_json
from gspo.tracking.tracker import supersede
from gspo.train.checkpoint_files import damage
from gspo.train.settings import OptimSettings


class Rollbacks:
    """The rollbacks of a run, the oldest first."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "rollbacks.json"
        self.entries: list[dict] = self._read() if self.path.exists() else []

    def _read(self) -> list[dict]:
        """Return the rollbacks in the file. Raises ValueError if it lists anything else."""
        entries = read_json(self.path, list)
        kinds = {"from": int, "to": int, "moved": bool}
        for entry in entries:
            has_kinds = isinstance(entry, dict) and all(
                type(entry.get(key)) is kind for key, kind in kinds.items()
            )
            if not has_kinds or not (is_step(entry["from"]) and is_step(entry["to"])):
                raise ValueError(f"{self.path} is damaged: an entry is not a rollback")
        return entries

    def plan(self, step: int, newest: int) -> int | None:
        """Decide at `step` to return to the newest undamaged checkpoint up to step `newest`.

        Returns the step of that checkpoint, None if there is none."""
        for folder in reversed(step_folders(self.folder / "checkpoints")):
            target = int(folder.name.removeprefix("step_"))
            if target <= newest and not damage(folder):
                self._write([*self.entries, {"from": step, "to": target, "moved": False}])
                return target
        return None

    def move(self) -> list[str]:
        """Move the output after the last rollback's target to superseded/, if it is not moved yet.

        Returns warnings for the user."""
        if not self.entries or self.entries[-1]["moved"]:
            return []
        last = self.entries[-1]
        lost = supersede(self.folder, last["to"])
        # W&B takes no step twice, so the next steps become a W&B run of their own.
        (self.folder / "wandb_id").unlink(missing_ok=True)
        self._write([*self.entries[:-1], last | {"moved": True}])
        return [*lost, f"rolled back from step {last['from']} to step {last['to']}"]

    def forget(self) -> None:
        """Delete all rollbacks, because the run starts from the beginning."""
        self.path.unlink(missing_ok=True)
        self.entries = []

    def lowered(self, settings: Settings) -> Settings:
        """Return the settings with the learning rate that the rollbacks have lowered."""
        return replace(settings, optim=self._optim_after(len(self.entries), settings))

    def optim_of(self, step: int, settings: Settings) -> OptimSettings:
        """Return the optimizer's settings under which the run made `step`.

        A step has been made again by the last rollback that returned to a step before it."""
        numbers = [n for n, entry in enumerate(self.entries, start=1) if entry["to"] < step]
        return self._optim_after(max(numbers, default=0), settings)

    def _optim_after(self, rollbacks: int, settings: Settings) -> OptimSettings:
        """Return the optimizer's settings after that many rollbacks."""
        factor = settings.monitor.rollback_lr**rollbacks
        return replace(settings.optim, lr=settings.optim.lr * factor)

    def _write(self, entries: list[dict]) -> None:
        """Write the list of rollbacks to the file."""
        self.entries = entries
        replace_text(self.path, json.dumps(entries))
