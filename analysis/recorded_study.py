"""Keep the metrics of a study's runs in a small Parquet file, which every figure reads.

    python analysis/recorded_study.py runs/paper_figures out=analysis/data
    gspo figures analysis/data/paper_figures.parquet

The file, which has the study's name, has a row per run and step with the metrics in single
precision, and in its metadata the settings of every run. The other files of a run directory
(checkpoints, responses, reports) are left out.
"""

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from gspo.analysis import load, script
from gspo.analysis.load import Data
from gspo.analysis.runs import RunsError, nearest
from gspo.analysis.sources import RUN, STUDY_FILE, STUDY_KEY
from gspo.io.arguments import command_options, option
from gspo.io.files import replace_bytes

REFUSED = dict.fromkeys(
    ("seeds", "smooth", "log_x", "formats", "caption", "width"), "it draws nothing"
)
# The metrics of the figures. Others are chosen with metrics=[...].
METRICS = (
    "reward/mean",
    "compute/*",
    "clip/token_active",
    "clip/token_outside",
    "kl/old_k3",
    "routing/consistency*",
    "routing/load_max",
    "eval/*",
    "length/mean",
    "policy/entropy",
    "optim/grad_norm",
)


@dataclass(frozen=True, kw_only=True)
class Options(script.Options):
    """The options of this script."""

    metrics: tuple[str, ...] = option(
        (), "other metrics than those of the figures; * stands for any text"
    )


def main() -> None:
    options = command_options(Options, __doc__, REFUSED)
    data = load.load(options.paths, options.where, options)
    studies = data.studies
    if len(studies) > 1:
        names = ", ".join(studies)
        raise RunsError(
            f"{len(studies)} studies ({names}): a file holds one, so name the folder of one"
        )
    file = options.out / f"{Path(studies[0]).name}{STUDY_FILE}"
    write(data, file, options.metrics)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def write(data: Data, file: Path, metrics: Sequence[str] | None = None) -> None:
    """Write the runs to `file`, with these metrics, or with the recorded metrics of METRICS.

    Raises RunsError if a run has neither finished nor collapsed, since it may still change, and if
    no run has recorded one of `metrics`.
    """
    for run in data.runs:
        if not run.settled:
            raise RunsError(f"{run.path} is unfinished: {run.last} of {run.planned} batches")
    counts = Counter(run.path.name for run in data.runs)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise RunsError(f"several runs have the name {repeated[0]}: rename their folders")
    unknown = [pattern for pattern in metrics or () if not matching(data, [pattern])]
    if unknown:
        suggestion = nearest(unknown[0], data.metrics(""))
        raise RunsError(f"no run has recorded {', '.join(unknown)}{suggestion}")
    names = matching(data, metrics or METRICS)
    frames = []
    for run in sorted(data.runs, key=lambda run: run.path.name):
        rows = run.rows.reindex(columns=["step", *names]).sort_values("step")
        rows.insert(0, RUN, run.path.name)
        frames.append(rows)
    rows = pd.concat(frames, ignore_index=True)
    types = {RUN: "category", "step": "int32"} | dict.fromkeys(names, "float32")
    table = pa.Table.from_pandas(rows.astype(types), preserve_index=False)
    table = table.replace_schema_metadata({STUDY_KEY: settings_json(data)})
    content = io.BytesIO()
    parquet.write_table(table, content, compression="zstd")
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(file, content.getvalue())


def matching(data: Data, patterns: Sequence[str]) -> list[str]:
    """Return the recorded metrics that match any of the patterns."""
    names = data.metrics("")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def settings_json(data: Data) -> str:
    """Return the settings of every run as JSON; settings that all runs share are there once.

    Metadata are not compressed.
    """
    keys = {key for run in data.runs for key in run.settings}
    common = {}
    for key in keys:
        values = {repr(run.settings.get(key, ...)) for run in data.runs}
        if len(values) == 1:
            common[key] = data.runs[0].settings[key]
    runs = {}
    for run in data.runs:
        further = {key: value for key, value in run.settings.items() if key not in common}
        runs[run.path.name] = further
    return json.dumps({"common": common, "runs": runs}, sort_keys=True)


if __name__ == "__main__":
    script.command(main)
