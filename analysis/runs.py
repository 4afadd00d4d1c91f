"""A recorded run, and all runs together, as tables that every statistic and figure reads.

load.py makes them. Row 0 holds only the evaluation of the cold start. Row s >= 1 describes rollout
batch s. gspo/tracking/metrics.py defines each metric.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from gspo.io import untrusted
from gspo.io.files import locked
from gspo.tracking.collapse import collapse
from gspo.tracking.frameworks.known import TABLES, definition
from gspo.tracking.metrics import Metric, custom_metrics, lookup

GSPO = "GSPO"
GRPO_R2 = "GRPO + Routing Replay (R2)"
GRPO = "GRPO"
GSPO_TOKEN = "GSPO-token"
ARMS = (GSPO, GRPO_R2, GRPO, GSPO_TOKEN)  # their order in tables and figures
NOT_METRICS = ("run", "arm", "seed", "step")  # the first columns in the table of all runs


class RunsError(ValueError):
    """The runs cannot be read or used as asked; the message is a single line.

    A command prints it and ends with exit code 2 (script.py).
    """


@dataclass
class Run:
    """A recorded run. `settings` is flat: {"optim.lr": 0.001, ...}."""

    path: Path
    settings: dict[str, object]
    rows: pd.DataFrame
    arm: str = ""
    # if settings are appended to the arm's name: the name without them, and these settings
    base: str = ""
    appended: dict[str, object] = field(default_factory=dict)
    id: str = ""  # W&B's id of the run, if W&B recorded it

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @property
    def study(self) -> str:
        return str(self.settings.get("study"))

    @property
    def clip_range(self) -> tuple[object, object]:
        """objective.clip_low and objective.clip_high; None if the settings have none."""
        low = self.settings.get("objective.clip_low")
        high = self.settings.get("objective.clip_high")
        return low, high

    @property
    def last(self) -> int:
        """The last rollout batch that has a row."""
        return int(self.rows["step"].max())

    @property
    def planned(self) -> int:
        """The number of rollout batches that the settings ask for."""
        return int(self.settings["steps"])

    @property
    def moe(self) -> bool:
        """Whether the model is a mixture of experts, by its settings or by its metrics."""
        model = self.settings.get("model.name")
        if model == "tiny_moe" or "model.experts" in self.settings:
            return True
        routing = [name for name in self.rows if name.startswith("routing/")]
        return bool(self.rows[routing].notna().any(axis=None))

    @property
    def batches_per_row(self) -> int:
        """The number of rollout batches over which a row is the mean. It is 1 for our runs."""
        return max(int(self.settings.get("batches_per_row") or 1), 1)

    @property
    def finished(self) -> bool:
        return self.last >= self.planned

    @property
    def settled(self) -> bool:
        """Whether the run has finished or collapsed."""
        return self.finished or self.collapsed is not None

    @property
    def ended(self) -> str:
        """How the run ended, by its directory or else by its rows."""
        from_rows = "finished" if self.finished else "unfinished"
        if "end" in self.settings and "framework" in self.settings:
            return str(self.settings["end"])
        try:
            status = untrusted.read_json(self.path / "status.json").get("how")
        except (OSError, untrusted.Unreadable):
            return from_rows
        if status == "running" and not locked(self.path):
            return "died"
        if isinstance(status, str) and len(status) < 20:
            return status
        return from_rows

    def rewards_by_batch(self) -> pd.Series:
        """Return reward/mean by step. A mean over several batches stands there for each of them."""
        rewards = self.column("reward/mean")
        return rewards.repeat(self.batches_per_row) if self.batches_per_row > 1 else rewards

    @cached_property
    def collapsed(self) -> int | None:
        """The step at which the run collapsed by the registered rule, or None if it did not."""
        rewards = self.rewards_by_batch()
        index = collapse(rewards.tolist())
        return None if index is None else int(rewards.index[index])

    @cached_property
    def custom(self) -> dict[str, Metric]:
        """The definitions of metrics that are not ours.

        They are the user's own, which the run's directory defines (none if it cannot be read), or
        those of another framework, whose names begin with the framework's."""
        if "framework" in self.settings:
            names = [name for name in self.rows if name.partition("/")[0] in TABLES]
            return {name: definition(name) for name in names}
        try:
            return custom_metrics(self.path)
        except (OSError, ValueError):
            return {}

    def column(self, metric: str, first_step: int = 1) -> pd.Series:
        """Return a metric by step without its NaN values; empty if it was not reported."""
        if metric not in self.rows or metric == "step":
            return pd.Series(dtype=float)
        # with NumPy, because a figure reads columns of thousands of runs
        steps = self.rows["step"].to_numpy()
        values = self.rows[metric].to_numpy(dtype=float, na_value=np.nan)
        reported = (steps >= first_step) & ~np.isnan(values)
        steps = steps[reported]
        order = np.argsort(steps, kind="stable")
        index = pd.Index(steps[order], name="step")
        return pd.Series(values[reported][order], index=index, name=metric)

    def last_rewards(self, count: int) -> pd.Series:
        """Return the rewards of the last `count` rows by step, empty if they have none.

        A run whose rewards were lost or became NaN before has none, rather than earlier ones."""
        steps = np.unique(self.rows["step"].to_numpy())
        first_step = max(int(steps[-count:][0]), 1)
        return self.column("reward/mean", first_step)


@dataclass
class Data:
    """All runs of a command.

    `notes` tell the reader which runs and rows were left out or are damaged.
    """

    runs: list[Run]
    notes: list[str] = field(default_factory=list)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """A tidy frame of all runs: the columns run, arm, seed and step, and one per metric."""
        frames = []
        for run in self.runs:
            # tables hold UTF-8
            name = str(run.path).encode(errors="backslashreplace").decode()
            names = {"run": name, "arm": run.arm, "seed": run.seed}
            frames.append(run.rows.assign(**names))
        rows = pd.concat(frames, ignore_index=True)
        metrics = sorted(set(rows.columns) - set(NOT_METRICS))
        return rows[[*NOT_METRICS, *metrics]]

    @property
    def studies(self) -> list[str]:
        return sorted({run.study for run in self.runs})

    @property
    def arms(self) -> list[str]:
        """The arms: the paper's in their fixed order, then the others by name.

        Arms of the same name are ordered by the values of their appended settings."""

        def order(run: Run) -> tuple:
            base = run.base or run.arm
            rank = ARMS.index(base) if base in ARMS else len(ARMS)
            numbers = []
            for value in run.appended.values():
                is_number = isinstance(value, int | float)
                numbers.append(value if is_number else 0)
            return rank, base, numbers, run.arm

        runs = sorted(self.runs, key=order)
        return list(dict.fromkeys(run.arm for run in runs))

    def of(self, *arms: str) -> list[Run]:
        """Return the runs of these arms, sorted by arm and seed."""
        runs = []
        for arm in dict.fromkeys(arms):
            runs_of_arm = [run for run in self.runs if run.arm == arm]
            runs += sorted(runs_of_arm, key=lambda run: run.seed)
        return runs

    def seeds(self, *arms: str) -> list[int]:
        """Return the seeds that all of these arms have."""
        seeds = {run.seed for run in self.of(*arms)}
        for arm in arms:
            seeds &= {run.seed for run in self.of(arm)}
        return sorted(seeds)

    def compared(self, *arms: str) -> list[Run]:
        """Return the runs by which these arms are compared.

        They are the runs of the seeds that have finished in all of these arms. While there is no
        such seed, they are the runs of the seeds that all arms have begun."""
        runs = self.of(*arms)
        begun = self.seeds(*arms)
        unfinished = {run.seed for run in runs if not run.finished}
        finished = [seed for seed in begun if seed not in unfinished]
        return [run for run in runs if run.seed in (finished or begun)]

    def left_out(self, *arms: str) -> list[Run]:
        """Return the runs of these arms that `compared` leaves out."""
        compared = {run.seed for run in self.compared(*arms)}
        runs = self.of(*arms)
        return [run for run in runs if run.seed not in compared]

    def common_step(self, *arms: str) -> int:
        """Return the last rollout batch that every run of these arms has reached."""
        return min(run.last for run in self.of(*arms))

    def table(self, arm: str, metric: str, first_step: int = 1) -> pd.DataFrame:
        """Return a metric of an arm, with steps as index and a column per seed.

        The index has every step from the first to the arm's last. Values that were not reported
        are NaN. Raises RunsError for an unknown arm, and for a metric that is neither recorded nor
        registered."""
        if arm not in self.arms:
            raise RunsError(f"no arm {arm!r} in these runs{nearest(arm, self.arms)}")
        rows = self.rows[self.rows["arm"] == arm]
        rows = rows[rows["step"] >= first_step]
        if metric not in rows:
            self.check_metric(metric)
            rows = rows.assign(**{metric: float("nan")})
        last = rows["step"].max()
        steps = pd.RangeIndex(first_step, last + 1, name="step")
        table = rows.pivot(index="step", columns="seed", values=metric)
        return table.astype(float).reindex(steps)

    def definition(self, metric: str) -> Metric:
        """Return a metric's definition, by the first run that defines it or by the registry.

        Raises KeyError if there is none."""
        for run in self.runs:
            if metric in run.custom:
                return run.custom[metric]
        return lookup(metric)

    def check_metric(self, metric: str) -> None:
        """Raise RunsError for a metric that is neither recorded nor registered."""
        try:
            lookup(metric)
        except KeyError:
            if metric not in self.rows:
                suggestion = nearest(metric, self.metrics(""))
                raise RunsError(f"no metric {metric!r}{suggestion}") from None

    def paired(self, metric: str, *arms: str) -> list[pd.DataFrame]:
        """Return the metric's table of each arm, with the same seeds and steps in all of them.

        The tables are cut to the compared runs and to the rollout batches that all of these have.
        A step that a run lost is NaN in its column alone."""
        runs = self.compared(*arms)
        seeds = sorted({run.seed for run in runs})
        last = min(run.last for run in runs)
        steps = range(1, last + 1)
        tables = []
        for arm in arms:
            table = self.table(arm, metric)[seeds]
            tables.append(table.reindex(steps))
        return tables

    def metrics(self, prefix: str) -> list[str]:
        """Return the names of the reported metrics that begin with the prefix."""
        names = [name for name in self.rows if name.startswith(prefix)]
        reported = self.rows[names].notna().any()
        reported = reported[reported].index
        return [name for name in reported if name not in NOT_METRICS]


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return the end of an error message: the nearest names, or all candidates if none is near."""
    candidates = list(candidates)
    close = get_close_matches(name, candidates)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; there are {', '.join(candidates)}"
