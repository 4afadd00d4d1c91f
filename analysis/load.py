"""Runs from wherever they were recorded (sources.py): say which arm each is, give one tidy frame.

Row 0 holds only the evaluation of the cold start; row s >= 1 describes rollout batch s. What each metric means is
in gspo/metrics.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pandas as pd
import sources
from sources import Record

GSPO, GRPO_R2, GRPO, GSPO_TOKEN = "GSPO", "GRPO + Routing Replay (R2)", "GRPO", "GSPO-token"
ARMS = (GSPO, GRPO_R2, GRPO, GSPO_TOKEN)  # their order in tables and figures
OBJECTIVES = {  # objective.name to the arm's name; GRPO_R2 is GRPO with a setting
    "gspo": GSPO,
    "gspo_token": GSPO_TOKEN,
    "luspo": "LUSPO",
    "gmpo": "GMPO",
    "grpo": GRPO,
    "drgrpo": "Dr.GRPO",
    "dapo": "DAPO",
    "ppo": "PPO",
    "reinforce": "REINFORCE",
    "cispo": "CISPO",
    "minirl": "MiniRL",
    "dppo": "DPPO",
    "sapo": "SAPO",
}

# What may differ between two runs of one arm: who ran it, for how long, where it was written.
NOT_THE_ARM = (
    "seed",
    "steps",
    "study",
    "tracking",
    "checkpoint",
    "monitor",
    "runs",
    "on_existing",
    "resume",
    "threads",
)
# What makes the arms different on purpose; any other difference between compared arms goes into the caption.
MAKES_THE_ARM = ("objective", "policy.routing_replay")


@dataclass
class Run:
    """One run directory. `settings` is flat: {"optim.lr": 0.001, ...}."""

    path: Path
    settings: dict[str, object]
    rows: pd.DataFrame
    arm: str = ""
    id: str = ""  # W&B's, where the source is W&B's

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @property
    def last(self) -> int:
        """The last rollout batch that the file describes."""
        return int(self.rows["step"].max())

    @property
    def planned(self) -> int:
        """Rollout batches that the settings ask for."""
        return int(self.settings["steps"])


@dataclass
class Data:
    """All runs. `rows` is tidy: columns run, arm, seed, step, then one per metric; notes say what was amiss."""

    runs: list[Run]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        frames = [run.rows.assign(run=str(run.path), arm=run.arm, seed=run.seed) for run in self.runs]
        rows = pd.concat(frames, ignore_index=True)
        first = ["run", "arm", "seed", "step"]
        self.rows = rows[first + sorted(c for c in rows.columns if c not in first)]

    @property
    def arms(self) -> list[str]:
        """The arms found: the paper's in their fixed order, then the others by name."""
        found = {run.arm for run in self.runs}
        return [arm for arm in ARMS if arm in found] + sorted(found - set(ARMS))

    def of(self, *arms: str) -> list[Run]:
        """The runs of these arms, by arm and seed."""
        return sorted((run for run in self.runs if run.arm in arms), key=lambda run: (arms.index(run.arm), run.seed))

    def seeds(self, *arms: str) -> list[int]:
        """The seeds that all of these arms have."""
        return sorted(set.intersection(*({run.seed for run in self.of(arm)} for arm in arms)))

    def common_step(self, *arms: str) -> int:
        """The last rollout batch that every run of these arms has reached."""
        return min(run.last for run in self.of(*arms))

    def table(self, arm: str, metric: str, first_step: int = 1) -> pd.DataFrame:
        """One metric of one arm: index step, a column per seed; NaN where the metric was not reported."""
        rows = self.rows[(self.rows["arm"] == arm) & (self.rows["step"] >= first_step)]
        if metric not in rows:
            rows = rows.assign(**{metric: float("nan")})
        return rows.pivot(index="step", columns="seed", values=metric).astype(float)

    def paired(self, metric: str, *arms: str) -> list[pd.DataFrame]:
        """The metric's tables of these arms, cut to the seeds and the rollout batches that all of them have."""
        seeds, last = self.seeds(*arms), self.common_step(*arms)
        return [self.table(arm, metric).loc[:last, seeds] for arm in arms]

    def metrics(self, prefix: str) -> list[str]:
        """Names of the reported metrics that start so."""
        return [c for c in self.rows.columns if c.startswith(prefix) and self.rows[c].notna().any()]


def die(message: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def load(paths: list[Path | str]) -> Data:
    """All runs of these sources, labelled; dies if there are none, or if two are the same arm and seed."""
    notes: list[str] = []
    runs = {}
    for path in paths:
        try:
            found = sources.records(path)
        except (OSError, ValueError) as error:
            die(str(error))
        for record in found:
            if (run := as_run(record, notes)) is not None:
                key = record.path.resolve(), str(record.settings.get("study"))
                if key in runs and runs[key].id != run.id:
                    notes.append(f"{run.path}: two W&B runs, {runs[key].id} and {run.id}; the newer one counts")
                runs[key] = run
    runs = [run for _, run in sorted(runs.items())]
    if not runs:
        die(f"no runs under {', '.join(map(str, paths))}: no folder with settings.yaml and a batch in metrics.jsonl")
    label(runs, notes)
    notes += [f"unfinished: {run.path}, {run.last} of {run.planned} batches" for run in runs if run.last < run.planned]
    return Data(runs, notes)


def as_run(record: Record, notes: list[str]) -> Run | None:
    """A record as a run; None (and a note) if it is no training run or has no rollout batch yet."""
    notes += record.notes
    missing = [key for key in ("seed", "steps", "objective.name") if record.settings.get(key) is None]
    if missing:
        notes.append(f"left out: {record.path}, its settings have no {', '.join(missing)}")
        return None
    if not len(record.rows) or not (record.rows["step"] > 0).any():
        notes.append(f"left out: {record.path}, no rollout batch yet")
        return None
    twice = record.rows["step"][record.rows["step"].duplicated()]
    if len(twice):
        die(f"{record.path / 'metrics.jsonl'}: step {twice.iloc[0]} stands there twice")
    return Run(record.path, record.settings, record.rows, id=record.id)


def label(runs: list[Run], notes: list[str]) -> None:
    """Set each run's arm. Where runs of the same label and seed differ in other settings, these are appended."""
    for run in runs:
        name, replay = run.settings["objective.name"], run.settings.get("policy.routing_replay")
        run.arm = OBJECTIVES.get(name, name)
        if replay not in (None, "none"):
            run.arm += f" + Routing Replay ({replay.upper()})"
    for base in sorted({run.arm for run in runs}):
        group = [run for run in runs if run.arm == base]
        keys = {key for seed in {r.seed for r in group} for key in differing([r for r in group if r.seed == seed])}
        for run in group if keys else []:
            run.arm = base + " [" + ", ".join(f"{key}={run.settings.get(key)}" for key in sorted(keys)) + "]"
        seen: dict[tuple[str, int], Run] = {}
        for run in group:
            other = seen.setdefault((run.arm, run.seed), run)
            if other is not run:
                die(f"the same arm and seed twice ({run.arm}, seed {run.seed}): {other.path} and {run.path}; give one")
        for arm in sorted({run.arm for run in group}):
            keys = differing([run for run in group if run.arm == arm])
            notes += [f"seeds of {arm} differ also in {', '.join(keys)}"] if keys else []


def differing(runs: list[Run] | list[Record]) -> list[str]:
    """The settings in which these runs differ, without those that may differ between runs of one arm."""
    keys = {key for run in runs for key in run.settings if key.split(".")[0] not in NOT_THE_ARM}
    return sorted(key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1)


def lacking(data: Data, arms: tuple[str, ...]) -> str | None:
    """Why these arms cannot be compared, or None if they can."""
    if any(arm not in data.arms for arm in arms):
        return f"needs arms {' and '.join(arms)}; found: {', '.join(data.arms)}"
    if any(not data.table(arm, "reward/mean").notna().any().all() for arm in arms):
        return "needs reward/mean of every run"
    if not data.seeds(*arms):
        return f"needs a seed that all arms have (they are paired by seed): {', '.join(arms)} share none"
    if data.common_step(*arms) < 2:
        return "needs at least 2 rollout batches of every run"
    return None


def require(data: Data, figure: str, arms: tuple[str, ...]) -> None:
    """End the program with one line if the figure's arms are not there."""
    if (why := lacking(data, arms)) is not None:
        die(f"{figure} {why}")


def describe(data: Data, arms: list[str]) -> str:
    """What was run, for captions: model, batches, seeds, unfinished runs, differences that are not the arms' own."""
    runs = data.of(*arms)
    arms_with: dict[str, list[str]] = {}
    for arm in arms:
        arms_with.setdefault(count_seeds([run.seed for run in data.of(arm)]), []).append(arm)
    batch = f"{_all(runs, 'rollout.prompts_per_step')} prompts x {_all(runs, 'rollout.group_size')} responses"
    text = f"Run: {_all(runs, 'model.name', 'model not named')}, rollout batches of {batch} in "
    text += f"{_all(runs, 'trainer.minibatches')} mini-batches; "
    several = len(arms_with) > 1
    text += "; ".join(f"{', '.join(names)}: {seeds}" if several else seeds for seeds, names in arms_with.items())
    text += f"; {data.common_step(*arms)} batches common to all runs."
    for run in runs:
        if run.last < run.planned:
            text += f" Unfinished: {run.arm}, seed {run.seed}, {run.last} of {run.planned} batches."
    unknown = [arm for arm in arms if data.table(arm, "compute/flops").isna().all(axis=None)]
    if unknown:
        text += f" Training compute is not known of {', '.join(unknown)}: the runs report no compute/flops."
    others = [key for key in differing(runs) if not key.startswith(MAKES_THE_ARM)]
    return text + (f" The runs differ also in {', '.join(others)}." if others else "")


def _all(runs: list[Run], key: str, unknown: str = "?") -> str:
    """The values that a setting has in these runs: "4", "4 or 16"."""
    values = {run.settings.get(key, unknown) for run in runs}
    return " or ".join(str(value) for value in sorted(values, key=lambda v: (isinstance(v, str), v)))


def count_seeds(seeds: list[int]) -> str:
    """ "1 seed (0)" or "3 seeds (0, 1, 2)"."""
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"
