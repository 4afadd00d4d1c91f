"""Recorded runs for a notebook: one table with a row per run, one table per metric.

    from gspo.analysis import load_runs

    recorded = load_runs("runs/paper_figures")      # or several folders, offline W&B files,
                                                    wandb:ENTITY/PROJECT
    load_runs("runs/sweep", where={"optim.lr": 2e-4})
    recorded.runs                                   # a row per run: arm, seed, how it ended,
                                                    scores, settings
    recorded.metric("reward/mean")                  # index step, columns (arm, seed)
    recorded.metric("eval/math/avg@2", arm="GSPO")  # index step, a column per seed
    recorded.metrics, recorded.arms, recorded.notes

`Refused` (a ValueError) is raised, in one line, for what cannot be read and for what no run has
recorded; it names the nearest name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from gspo.analysis.load import Data, Run, die, load
from gspo.analysis.runs import nearest
from gspo.analysis.stats import WINDOW

from gspo.tracking.collapse import best

SCORES = ("/avg@", "/pass@", "/maj@")


def load_runs(*sources: str | Path, where: Mapping[str, object] | None = None) -> Recorded:
    """Load the runs of these sources, which may be any that the figures read; with `where`,
    {"optim.lr": 2e-4, ...}, only those with these settings. Raises Refused (a ValueError)."""
    if not sources:
        die(
            "load_runs(): name folders with runs, offline W&B files, or wandb:ENTITY/PROJECT[/GROUP]"
        )
    return Recorded(load(list(sources), where))


class Recorded:
    """Runs as tables. Row 0 of a metric is the evaluation before training; row s >= 1 is rollout
    batch s.
    """

    def __init__(self, data: Data):
        self.arms, self.notes = data.arms, data.notes
        self.metrics = data.metrics("")
        self.runs = pd.DataFrame([row(run, self.metrics) for run in data.of(*data.arms)])
        self._data = data

    def __repr__(self) -> str:
        return f"{len(self.runs)} runs of {', '.join(self.arms)}; {len(self.metrics)} metrics"

    def metric(self, name: str, arm: str = "") -> pd.DataFrame:
        """Return one metric with steps as index and columns (arm, seed), or with `arm` a column per
        seed of that arm. Values that a run has not reported are NaN."""
        if name not in self.metrics:
            die(f"no run has recorded a metric {name!r}{nearest(name, self.metrics)}")
        first = 0 if name.startswith("eval/") else 1
        if arm:
            return self._data.table(arm, name, first)
        return pd.concat(
            {each: self._data.table(each, name, first) for each in self.arms}, axis=1, names=["arm"]
        )


def row(run: Run, metrics: list[str]) -> dict[str, object]:
    """Return one run as a row: what it was, what became of it, its scores (NaN where it has none),
    and its settings by their own names."""
    rewards = run.column("reward/mean")
    cells: dict[str, object] = {
        "run": str(run.path),
        "id": run.id,
        "arm": run.arm,
        "seed": run.seed,
    }
    cells |= {
        "status": run.ended,
        "collapsed at": run.collapsed,
        "batches": run.last,
        "planned": run.planned,
    }
    cells |= {f"reward/mean, last {WINDOW}": rewards.tail(WINDOW).mean()}
    cells |= {
        "reward/mean, best smoothed": best(rewards.tolist())[0] if len(rewards) else float("nan")
    }
    for name in metrics:
        if name == "eval/elo" or (
            name.startswith("eval/") and any(kind in name for kind in SCORES)
        ):
            scores = run.column(name, first_step=0)
            cells |= {
                f"{name}, last": scores.iloc[-1] if len(scores) else float("nan"),
                f"{name}, best": scores.max(),
            }
    return cells | {key: value for key, value in run.settings.items() if key not in cells}
