"""The results of `gspo replay`: a column for each objective, as a page and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gspo.config.settings import UNSAFE_IN_NAMES, Settings
from gspo.data.step_record import StepRecord
from gspo.data.step_record_files import FOLDER, record_file
from gspo.io.files import SETTINGS_FILE, refuse_links, replace_text
from gspo.tracking.step_page import View, step_page

if TYPE_CHECKING:
    from gspo.train.replay import ReplayedStep

RECORDED = " (recorded)"  # ends the name of the column of the run's own objective
MAX_NAME_CHARS = 60  # of the words of a command line in the name of a page


class Column(NamedTuple):
    """A replay of the table: its name, its settings and its result."""

    name: str
    settings: Settings
    replayed: ReplayedStep


def write_replay_page(path: Path, record: StepRecord, columns: Sequence[Column]) -> Path:
    """Write the page of the tokens, and return its path.

    It is beside the record of a run, or in this folder for a record by itself. The name tells what
    the recorded objective is compared with."""
    step = record.header.step
    views = [
        View(
            column.name,
            column.replayed.advantages,
            [update.weight for update in column.replayed.updates],
            [update.clipped for update in column.replayed.updates],
            [update.gradient for update in column.replayed.updates],
            column.replayed.trained,
        )
        for column in columns
    ]
    is_run = (path / SETTINGS_FILE).exists()
    others = [column.name for column in columns if not column.name.endswith(RECORDED)]
    ending = "".join(f"-{UNSAFE_IN_NAMES.sub('_', name)[:MAX_NAME_CHARS]}" for name in others)
    file = Path(f"{path.stem}-step_{step:06d}{ending}.html")
    if is_run:
        refuse_links(path, (FOLDER,))
        file = record_file(path, step).with_name(f"step_{step:06d}{ending}.html")
    replace_text(file, step_page(record, views, f"{path.name}, step {step}"))
    return file


def numbers(record: StepRecord, columns: Sequence[Column]) -> dict:
    """Return the numbers of the comparison."""
    from gspo.train.replay_comparison import cosines, gradient_norm, response_weights

    content: dict = {"step": record.header.step, "replays": {}}
    for column in columns:
        weights = response_weights(record, column.replayed)
        content["replays"][column.name] = {
            "metrics": column.replayed.metrics,
            "gradient_norm": gradient_norm(column.replayed),
            "response_share": weights.share.tolist(),
            "response_clipped": weights.clipped.tolist(),
        }
    if len(columns) == 2:
        whole, *by_update = cosines(columns[0].replayed, columns[1].replayed)
        content["cosine"] = {"all": whole, "updates": by_update}
    return content
