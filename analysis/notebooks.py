"""Recorded runs for a notebook: a table with a row per run, and a table per metric.

    from gspo.analysis import load_runs

    recorded = load_runs("runs/paper_figures")      # or several folders, offline W&B files,
                                                    wandb:ENTITY/PROJECT
    load_runs("runs/sweep", where={"optim.lr": 2e-4})
    load_runs("outputs", objective="gspo")          # a log of another framework
    recorded.runs                                   # a row per run: arm, seed, how it ended,
                                                    scores, settings
    recorded.metric("reward/mean")                  # index step, columns (arm, seed)
    recorded.metric("eval/math/avg@2", arm="GSPO")  # index step, a column per seed
    recorded.metrics, recorded.arms, recorded.notes

RunsError (a ValueError of a single line) is raised for sources that cannot be read and for
metrics that no run has recorded. It names the nearest name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from gspo.analysis.load import Data, Run, load
from gspo.analysis.runs import RunsError, nearest
from gspo.analysis.stats import WINDOW
from gspo.io.arguments import ArgumentsError
from gspo.tracking.collapse import best
from gspo.tracking.foreign_options import ForeignOptions

SCORES = ("/avg@", "/pass@", "/maj@")


def load_runs(
    *sources: str | Path,
    where: Mapping[str, object] | None = None,
    framework: str = "",
    objective: str = "",
    updates_per_batch: int = 0,
) -> RecordedRuns:
    """Load the runs of these sources, which may be any that the figures read.

    With `where`, {"optim.lr": 2e-4, ...}, only the runs with these settings. The last three say of
    runs of other frameworks what their logs do not say (docs/other_frameworks.md). Raises
    RunsError.
    """
    if not sources:
        raise RunsError(
            "load_runs(): name folders with runs, offline W&B files, or "
            "wandb:ENTITY/PROJECT[/GROUP]"
        )
    try:
        foreign_options = ForeignOptions(
            framework=framework, objective=objective, updates_per_batch=updates_per_batch
        )
    except ArgumentsError as error:
        raise RunsError(f"load_runs(): {error}") from None
    return RecordedRuns(load(list(sources), where, foreign_options))


class RecordedRuns:
    """Runs as tables.

    Row 0 of a metric is the evaluation before training. Row s >= 1 is rollout batch s.
    """

    def __init__(self, data: Data):
        self.arms = data.arms
        self.notes = data.notes
        self.metrics = data.metrics("")
        rows = [row(run, self.metrics) for run in data.of(*data.arms)]
        self.runs = pd.DataFrame(rows)
        self._data = data

    def __repr__(self) -> str:
        return f"{len(self.runs)} runs of {', '.join(self.arms)}; {len(self.metrics)} metrics"

    def metric(self, name: str, arm: str = "") -> pd.DataFrame:
        """Return a metric with steps as index and columns (arm, seed).

        With `arm`, there is a column per seed of that arm. Values that a run has not reported are
        NaN.
        """
        if name not in self.metrics:
            suggestion = nearest(name, self.metrics)
            raise RunsError(f"no run has recorded a metric {name!r}{suggestion}")
        first = 0 if name.startswith("eval/") else 1
        if arm:
            return self._data.table(arm, name, first)
        tables = {}
        for arm in self.arms:
            tables[arm] = self._data.table(arm, name, first)
        return pd.concat(tables, axis=1, names=["arm"])


def row(run: Run, metrics: list[str]) -> dict[str, object]:
    """Return a run as a row: its name, how it ended, its scores (or NaN), and its settings."""
    rewards = run.column("reward/mean")
    cells: dict[str, object] = {
        "run": str(run.path),
        "id": run.id,
        "arm": run.arm,
        "seed": run.seed,
        "status": run.ended,
        "collapsed at": run.collapsed,
        "batches": run.last,
        "planned": run.planned,
        f"reward/mean, last {WINDOW}": run.last_rewards(WINDOW).mean(),
        "reward/mean, best smoothed": float("nan"),
    }
    if len(rewards):
        cells["reward/mean, best smoothed"], _ = best(run.rewards_by_batch().tolist())
    for name in metrics:
        is_score = name.startswith("eval/") and any(kind in name for kind in SCORES)
        if is_score or name == "eval/elo":
            scores = run.column(name, first_step=0)
            cells[f"{name}, last"] = scores.iloc[-1] if len(scores) else float("nan")
            cells[f"{name}, best"] = scores.max()
    settings = {key: value for key, value in run.settings.items() if key not in cells}
    return cells | settings
