"""The rules that warn of a collapse, the recorded runs, and the verdicts of the rules on them.

A rule is a score and a threshold. The rules are the monitor's own, and a counter that others
propose. A rule is judged on the runs that have recorded its metric, in two ways:

    as shipped   at the monitor's threshold, which was set before any of these runs
    held out     at a threshold that at most 5 % of the healthy runs of all other groups exceed.
                 A group is a study, or one of the six stresses of the stressors.

So no threshold was chosen on the runs that judge it. A collapse is seen if a warning begins before
it. Warnings in the first 10 steps do not exist, as in the monitor.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from gspo.analysis import foresight, load
from gspo.analysis.foresight import WARM_UP, History
from gspo.tracking.collapse import SIGNALS, STEPS_FALLEN, Level, Signal, collapse

DATA = Path(__file__).parent / "data"
# The studies that had been recorded on 2026-11-27, when experiments/LOG.md judged the rules. Later
# studies are not among them. bfloat16, observation_share and with_tool are shorter than MIN_STEPS.
STUDIES = (
    "critical_rate",
    "critical_rate_16",
    "critical_rate_top1",
    "mismatch_dose",
    "routing_dose",
    "edge_calibration",
    "edge_ranges",
    "beyond_edge",
    "comfortable",
    "edge_clip_grpo",
    "edge_clip_gspo",
    "edge_rate",
    "edge_rate_again",
    "paper_ranges",
    "paper_ranges_at_3.5e-4",
    "math_edge",
    "fixed_minibatch",
    "fixed_minibatch_ranges",
    "guessing",
)
STRESSORS = "stressors"
# Shorter runs are left out: a collapse takes 20 steps, and most come after step 20.
MIN_STEPS = 80


# ------------------------------------------------------------------------------------------------
# rules
@dataclass
class Streak:
    """The number of latest steps in a row whose value is `level`."""

    level: float
    count: int = 0

    def push(self, value: float) -> float:
        self.count = self.count + 1 if value == self.level else 0
        return float(self.count)


@dataclass
class WithoutSignal(Streak):
    """The number of latest steps in a row in which no group had any variance."""

    level: float = 1.0


@dataclass
class WithoutReward(Streak):
    """The number of latest steps in a row in which every response earned 0."""

    level: float = 0.0


@dataclass
class Fallen(Streak):
    """The number of latest steps in a row with a reward below 0.7 x its peak."""

    level: float = 1.0
    reward: Level = field(default_factory=Level)

    def push(self, value: float) -> float:
        self.reward.push(value)
        return super().push(float(self.reward.fallen()))


# Rules that are no signal of gspo.tracking.collapse, and the thresholds that their scores exceed.
# fallen and reward_zero are the monitor's own events. verl#7405 proposes no_signal without a number
# of steps, so it has the three steps of reward_zero.
COUNTERS = {
    "fallen": Signal("reward/mean", Fallen, "steps in a row below 0.7 x the peak"),
    "reward_zero": Signal("reward/mean", WithoutReward, "steps in a row without any reward"),
    "no_signal": Signal("group/zero_variance", WithoutSignal, "steps in a row without variance"),
}
COUNTER_THRESHOLDS = {"fallen": STEPS_FALLEN - 1.0, "reward_zero": 2.0, "no_signal": 2.0}
RULES = {**SIGNALS, **COUNTERS}
NOT_THE_MONITORS = ("no_signal",)
LR = "learning rate alone"  # a score without any metric, which the rules have to beat


# ------------------------------------------------------------------------------------------------
# runs
def recorded_runs(stressors: pd.DataFrame) -> list[History]:
    """Return the runs of STUDIES and of the stressors, each once.

    `stressors` is the frame of early_warning.py."""
    runs = stressor_runs(stressors)
    names: set[str] = set()
    for study in STUDIES:
        for run in study_runs(DATA / f"{study}.parquet"):
            if run.run not in names:
                runs.append(run)
            names.add(run.run)
    return runs


def stressor_runs(stressors: pd.DataFrame) -> list[History]:
    """Return the runs of the stressors. Each stress is a group, and all share their seeds.

    The frame has a row per run and step: the columns run, stress, arm, seed, lr, step and metrics.
    The learning rate is one more score of a run.
    """
    runs = []
    for name, rows in stressors.groupby("run"):
        first = rows.iloc[0]
        setting = f"{first['stress']}, {first['arm']}, {first['lr']}"
        run = history(rows, str(name), first["stress"], setting, f"{STRESSORS} {first['seed']}")
        run.lr = float(first["lr"])
        run.scores[LR] = np.full((rows["step"] > 0).sum(), run.lr)
        runs.append(run)
    return runs


def study_runs(file: Path) -> list[History]:
    """Return the runs of a recorded study that are long enough. The study is their group."""
    study = file.stem
    runs = []
    for run in load.load([file]).runs:
        if run.last >= MIN_STEPS:
            setting = f"{study}, {run.arm}"
            runs.append(history(run.rows, run.path.name, study, setting, f"{study} {run.seed}"))
    return runs


def history(rows: pd.DataFrame, name: str, group: str, setting: str, seed: str) -> History:
    """Return a run with the scores of every rule whose metric it has recorded."""
    rows = rows[rows["step"] > 0].sort_values("step")
    scores = {}
    for rule, signal in RULES.items():
        if signal.metric in rows and rows[signal.metric].notna().any():
            values = rows[signal.metric].astype(float)
            scores[rule] = signal.score(values.tolist())
    rewards = rows["reward/mean"].astype(float)
    collapsed = collapse(rewards.tolist())
    return History(name, group, math.nan, collapsed, scores, setting, seed)


# ------------------------------------------------------------------------------------------------
# verdicts
@dataclass
class Judged:
    """A run, the step of the first warning (or None), and the number of warnings."""

    run: History
    first: int | None
    warnings: int

    @property
    def seen(self) -> bool:
        """Whether a collapsed run was warned of before its collapse."""
        return self.first is not None and self.first < self.run.collapsed

    @property
    def steps(self) -> int:
        """The number of steps in which the run could be warned of."""
        scores = next(iter(self.run.scores.values()))
        return max(0, len(scores) - WARM_UP)


def judge(run: History, thresholds: dict[str, float]) -> Judged:
    """Return the warnings that these rules give together for a run."""
    steps: list[int] = []
    for rule, threshold in thresholds.items():
        steps += foresight.warnings(run.scores[rule], threshold)
    return Judged(run, min(steps, default=None), len(steps))


def with_metric(runs: list[History], rule: str) -> list[History]:
    """Return the runs that have recorded the rule's metric."""
    return [run for run in runs if rule in run.scores]


def as_shipped(runs: list[History], thresholds: dict[str, float], rule: str) -> list[Judged]:
    """Judge the runs at the shipped threshold of a rule."""
    threshold = {rule: thresholds[rule]}
    return [judge(run, threshold) for run in with_metric(runs, rule)]


def held_out_thresholds(runs: list[History], rule: str) -> dict[str, float]:
    """Return each group's threshold, which is fitted on the healthy runs of all other groups.

    Groups are left out if the others have no healthy run.
    """
    runs = with_metric(runs, rule)
    thresholds = {}
    for group in sorted({run.group for run in runs}):
        threshold = foresight.fitted([run for run in runs if run.group != group], rule)
        if not math.isnan(threshold):
            thresholds[group] = threshold
    return thresholds


def held_out(runs: list[History], rule: str) -> list[Judged]:
    """Judge each run at the held-out threshold of its group, if the group has one."""
    thresholds = held_out_thresholds(runs, rule)
    verdicts = []
    for run in with_metric(runs, rule):
        if run.group in thresholds:
            verdicts.append(judge(run, {rule: thresholds[run.group]}))
    return verdicts


def together(runs: list[History], thresholds: dict[str, float]) -> list[Judged]:
    """Judge the runs by all rules of the monitor at once, as far as their metrics are recorded."""
    verdicts = []
    for run in runs:
        recorded = {}
        for rule, threshold in thresholds.items():
            if rule in run.scores and rule not in NOT_THE_MONITORS:
                recorded[rule] = threshold
        verdicts.append(judge(run, recorded))
    return verdicts
