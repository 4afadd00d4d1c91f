"""Write the rows of a run as TensorBoard's event files, with tracking.tensorboard=true.

The files are in the run directory's `tensorboard/`. They have the names of metrics.jsonl, and the
step as TensorBoard's step. Each number is rounded to 32 bits, as a scalar of TensorBoard has no
more. PyTorch's own writer writes them.
"""

import importlib.util
import math
from pathlib import Path

from gspo.config.settings import Settings
from gspo.io.errors import SettingError

FOLDER = "tensorboard"


class EventFiles:
    """The event files of a run directory.

    `rows` are the rows that the run has already. New event files begin with them. In existing files
    the output of later steps is marked as superseded."""

    def __init__(self, run: Path, rows: list[dict]):
        # needs the package tensorboard, and takes a second
        from torch.utils.tensorboard import SummaryWriter

        folder = run / FOLDER
        is_new = not any(folder.glob("events.out.tfevents.*"))
        purge_step = 0 if is_new or not rows else rows[-1]["step"] + 1
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)
        if is_new:
            for row in rows:
                self.send(row)

    def send(self, row: dict) -> None:
        """Write a row of metrics.jsonl to the disk, with NaN for numbers that were not finite."""
        for name, value in row.items():
            if name != "step":
                self.writer.add_scalar(name, math.nan if value is None else value, row["step"])
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        self.writer.close()


def check_event_files(settings: Settings) -> None:
    """Raise ValueError if the settings ask for event files that cannot be written."""
    if settings.tracking.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise SettingError(
            "tracking.tensorboard",
            True,
            "needs the package tensorboard",
            remedy="pip install -e '.[tensorboard]', or leave it out",
        )
