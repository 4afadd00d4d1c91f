"""Keeps the metrics of a study's runs in one small Parquet file, which every figure reads like the
runs themselves.

    python analysis/recorded_study.py runs/paper_figures --out analysis/data
    gspo figures analysis/data/paper_figures.parquet

The file, which has the study's name, has a row per run and step with the metrics in single
precision, and in its metadata the settings of every run. What a run directory holds besides
(checkpoints, responses, reports) is not in it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pandas as pd
import pyarrow as pa
from gspo.analysis import load, script
from gspo.analysis.runs import nearest
from gspo.analysis.sources import RUN, STUDY_FILE, STUDY_KEY
from pyarrow import parquet

from gspo.io.files import replace_bytes

REFUSED = dict.fromkeys(
    ("seeds", "smooth", "log-x", "format", "no-caption", "width"), "it draws nothing"
)
# What figures read. Other metrics are for --metrics.
METRICS = (
    "reward/mean", "compute/*", "clip/token_active", "clip/token_outside", "kl/old_k3", "routing/consistency*",
    "routing/load_max", "eval/*", "length/mean", "policy/entropy", "optim/grad_norm",
)  # fmt: skip


def main() -> None:
    options = script.parser(__doc__, refused=REFUSED)
    options.add_argument(
        "--metrics", nargs="+", metavar="NAME", help="other metrics than those of figures; * is any"
    )
    args = options.parse_args()
    data = load.load(args.runs, script.chosen(args))
    studies = sorted({str(run.settings.get("study")) for run in data.runs})
    if len(studies) > 1:
        load.die(
            f"{len(studies)} studies ({', '.join(studies)}): a file holds one, so name the folder of one"
        )
    file = args.out / f"{Path(studies[0]).name}{STUDY_FILE}"
    write(data, file, args.metrics)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def write(data: load.Data, file: Path, metrics: Sequence[str] | None = None) -> None:
    """Write the runs that have finished or collapsed to `file`, with these metrics, or with those
    of METRICS that they have. Runs that may still change are refused, and so is a name in `metrics`
    that no run has recorded."""
    for run in data.runs:
        if not run.finished and run.collapsed is None:
            load.die(f"{run.path} is unfinished: {run.last} of {run.planned} batches")
    names = [
        name
        for name in data.metrics("")
        if any(fnmatchcase(name, pattern) for pattern in metrics or METRICS)
    ]
    idle = [
        pattern
        for pattern in metrics or ()
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if idle:
        load.die(f"no run has recorded {', '.join(idle)}{nearest(idle[0], data.metrics(''))}")
    frames = [
        run.rows.reindex(columns=["step", *names])
        .assign(**{RUN: run.path.name})
        .sort_values("step")
        for run in sorted(data.runs, key=lambda run: run.path.name)
    ]
    rows = pd.concat(frames, ignore_index=True)
    rows = rows.astype(dict.fromkeys(names, "float32") | {"step": "int32", RUN: "category"})
    table = pa.Table.from_pandas(rows[[RUN, "step", *names]], preserve_index=False)
    every = [run.settings for run in data.runs]
    common = {
        key: value
        for key, value in every[0].items()
        if all(repr(s.get(key, ...)) == repr(value) for s in every)
    }
    own = {
        run.path.name: {k: v for k, v in run.settings.items() if k not in common}
        for run in data.runs
    }
    # once, for metadata are not compressed
    about = json.dumps({"common": common, "runs": own}, sort_keys=True)
    table = table.replace_schema_metadata({STUDY_KEY: about})
    content = io.BytesIO()
    parquet.write_table(table, content, compression="zstd")
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(file, content.getvalue())


if __name__ == "__main__":
    script.command(main)
