"""Writes the rows of a run as TensorBoard's event files too, by PyTorch's own writer
(tracking.tensorboard=true).

They lie in the run directory's `tensorboard/`, with the names of metrics.jsonl and the step as
TensorBoard's step. Each number is rounded to 32 bits, which is what a scalar of TensorBoard holds.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from gspo.config.settings import Settings

FOLDER = "tensorboard"


class EventFiles:
    """The event files of a run directory. `rows` are those that the run has already; what was
    written for later steps is marked as superseded. Rows from before event files were asked for are
    added first."""

    def __init__(self, run: Path, rows: list[dict]):
        # needs the package tensorboard, and takes a second
        from torch.utils.tensorboard import SummaryWriter

        folder = run / FOLDER
        new = not any(folder.glob("events.out.tfevents.*"))
        self.writer = SummaryWriter(
            str(folder), purge_step=0 if new or not rows else rows[-1]["step"] + 1
        )
        for row in rows if new else ():
            self.send(row)

    def send(self, row: dict) -> None:
        """Write a row of metrics.jsonl, so that it is on the disk; a number that was not finite is
        NaN.
        """
        for name, value in row.items():
            if name != "step":
                self.writer.add_scalar(name, math.nan if value is None else value, row["step"])
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        self.writer.close()


def check_event_files(settings: Settings) -> None:
    """Raise ValueError if event files are asked for and cannot be written."""
    if settings.tracking.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise ValueError(
            "tracking.tensorboard=true needs the package tensorboard: pip install 'gspo[tensorboard]', or leave it away"
        )
