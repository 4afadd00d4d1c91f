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

    `rows` are the rows that the run has already. The new file begins with them, and replaces the
    earlier files. So it also has the rows of steps at which tracking.tensorboard was false."""

    def __init__(self, run: Path, rows: list[dict]):
        # needs the package tensorboard, and takes a second
        from torch.utils.tensorboard import SummaryWriter

        earlier_files = list((run / FOLDER).glob("events.out.tfevents.*"))
        # a TensorBoard that shows the earlier files drops their steps
        self.writer = SummaryWriter(str(run / FOLDER), purge_step=0)
        for row in rows:
            self._add(row)
        self.writer.flush()
        for file in earlier_files:
            file.unlink()

    def send(self, row: dict) -> None:
        """Write a row of metrics.jsonl to the disk, with NaN for numbers that were not finite."""
        self._add(row)
        self.writer.flush()

    def _add(self, row: dict) -> None:
        for name, value in row.items():
            if name != "step":
                self.writer.add_scalar(name, math.nan if value is None else value, row["step"])

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
