"""Compares runs side by side in the terminal, or an evaluation with the evaluation of its base.

    gspo compare runs/STUDY/A runs/STUDY/B ...
    gspo compare runs/STUDY where.optim.lr=2e-4 where.task.name=math
    gspo compare runs/STUDY all=true
    gspo compare runs/STUDY/A outputs objective=gspo updates_per_batch=4
    gspo compare runs/STUDY/A/evaluations/step_000000-HASH runs/STUDY/A/evaluations/step_000060-HASH

Runs are printed in the given order: the settings that differ, how the runs ended, reward and
held-out scores with 95 % intervals, clipped tokens, routing consistency, tokens, compute and time.
The interval of the reward is within the run, by resampling blocks of batches. It says nothing about
other seeds. The interval of a held-out score is over problems. Runs may be run directories, offline
W&B files, logs of other frameworks, or wandb:ENTITY/PROJECT, as for the figures.

For more than 4 runs, the table has a line for each group of seeds, with the settings that vary. Up
to 12 runs also have a line each.

Two evaluations (`gspo evaluate`) must be on the same problems. Name the base's evaluation first.
The table has the gain in accuracy for each set, with its 95 % interval (Student's t over the
problems' paired differences) and exact sign-flip p. It splits the gain into format (more responses
in which an answer is found) and correctness (more correct responses among these). The intervals of
these two parts are by bootstrap over problems. The formula is in gspo/evaluation/paired.py.
"""

import fnmatch
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from gspo.analysis import load, script
from gspo.analysis.foreign import LOG
from gspo.analysis.load import Run
from gspo.analysis.stats import START, WINDOW, block_bootstrap, number, t_interval
from gspo.io.arguments import command_options, option
from gspo.io.escaping import escape_line
from gspo.io.tables import counted, text_table
from gspo.tracking.collapse import best as peak_of
from gspo.tracking.foreign_options import ForeignOptions
from gspo.tracking.metrics import HELD_OUT_MEANS, stderr_of

MAX_LISTED_RUNS = 12  # more runs are only summarised by groups of seeds
MAX_COLUMNS = 4  # more runs are not printed as columns, except with all=true
# if several settings vary together, these are shown first
PREFERRED_SETTINGS = ("objective.name", "policy.routing_replay")
# rows of the table: the metric, and the format of its mean over the batches
MEANS = {
    "clipped tokens": ("clip/token_active", ".3g"),
    "routing consistency": ("routing/consistency", ".4f"),
    "entropy": ("policy/entropy", ".3f"),
    "gradient norm": ("optim/grad_norm", ".3g"),
    "tokens of a response": ("length/mean", ".1f"),
}
TOTALS = {
    "tokens": ("compute/tokens", ".3g"),
    "FLOPs": ("compute/flops", ".3g"),
}


@dataclass(frozen=True, kw_only=True)
class Options(ForeignOptions):
    """The options of this command."""

    paths: tuple[str, ...] = option(meaning="runs, or two evaluations")
    where: dict[str, str] = option({}, "only the runs with this setting: where.optim.lr=2e-4")
    all: bool = option(False, "print everything for every run")


def main() -> None:
    """Compare the runs that the command line names."""
    script.command(compare)


def compare() -> None:
    """Print the comparison of the runs or evaluations that the command line names."""
    options = command_options(Options, __doc__)
    evaluations = [path for path in options.paths if (Path(path) / "responses").is_dir()]
    if evaluations:
        if options.given():
            raise load.RunsError(options.without_effect())
        if options.where or options.all:
            raise load.RunsError("where.* and all= are about runs, and these are evaluations")
        compare_evaluations(options.paths, evaluations)
        return
    data = load.load(options.paths, options.where, options)
    for note in data.notes:
        if not note.startswith("seeds of"):
            print(f"note: {escape_line(note)}")
    runs = data.runs
    if len(runs) < 2:
        raise load.RunsError(f"there is one run, {runs[0].path}: name two or more")
    blocks: list[list[str]] = []
    if len(runs) > MAX_COLUMNS:
        groups = summary(runs)
        blocks.append(groups)
        if len(runs) <= MAX_LISTED_RUNS or not groups:
            blocks.append(list_of_runs(runs))
    if len(runs) <= MAX_COLUMNS or options.all:
        blocks.append(table(runs))
    print("\n\n".join("\n".join(block) for block in blocks if block))


def compare_evaluations(paths: Sequence[str], evaluations: Sequence[str]) -> None:
    """Print the comparison of two evaluations."""
    # It imports PyTorch, which takes seconds. A comparison of runs does not need it.
    from gspo.evaluation.comparison import compared, comparison_table, read_finished

    if len(evaluations) != 2 or len(paths) != 2:
        raise load.RunsError(
            f"{evaluations[0]} is an evaluation: name two, the base's and the trained policy's, "
            "and nothing else"
        )
    try:
        print(comparison_table(compared(*map(read_finished, paths))))
    except (ValueError, OSError) as error:
        raise load.RunsError(str(error)) from None


def differing(runs: list[Run]) -> list[str]:
    """Return the settings in which runs differ, except the settings of how runs are recorded.

    Runs of different frameworks have few settings in common, and only these are compared."""
    keys = sorted({key for run in runs for key in run.settings})
    if len({run.settings.get("framework") for run in runs}) > 1:
        in_all = [key for key in keys if all(key in run.settings for run in runs)]
        keys = ["framework", *(key for key in in_all if key != "framework")]
    ignored = ["tracking", "runs", "resume", "on_existing"]
    if not any(LOG in run.appended for run in runs):
        ignored.append(LOG)
    keys = [key for key in keys if key.split(".")[0] not in ignored]
    return [key for key in keys if len({setting(run, key) for run in runs}) > 1]


def distinguishing_settings(runs: list[Run]) -> dict[str, str]:
    """Return the settings that distinguish the runs, besides the seed, each with a short name.

    If settings vary together, the first is enough. A setting is left out if it splits no group of
    runs that the settings before it leave together."""
    differing_keys = [
        key
        for key in differing(runs)
        if key not in ("seed", "cold_start.seed") and not key.startswith("options.")
    ]
    candidates = [key for key in PREFERRED_SETTINGS if key in differing_keys]
    candidates += [key for key in differing_keys if key not in PREFERRED_SETTINGS]
    keys: list[str] = []
    group_count = 1
    for candidate in candidates:
        groups = groups_of_equal(runs, [*keys, candidate])
        if len(groups) > group_count:
            keys.append(candidate)
            group_count = len(groups)
    short_names = {key: key.removesuffix(".name").rpartition(".")[2] for key in keys}
    uses = Counter(short_names.values())
    return {key: name if uses[name] == 1 else key for key, name in short_names.items()}


def setting(run: Run, key: str) -> str:
    """Return the run's value of a setting, "-" if it has none."""
    return str(run.settings.get(key, "-"))


def groups_of_equal(runs: list[Run], keys: Iterable[str]) -> dict[tuple[str, ...], list[Run]]:
    """Return the runs by their values of these settings."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(setting(run, key) for key in keys), []).append(run)
    return groups


def summary(runs: list[Run]) -> list[str]:
    """Return aligned lines, one for each group of runs that differ only in their seeds.

    A line has the number of runs, the mean reward of the last batches with the t interval over
    seeds, and how the runs ended. The highest reward comes first. The result is empty if every
    group has a single run."""
    keys = distinguishing_settings(runs)
    groups = groups_of_equal(runs, keys)
    if len(groups) == len(runs):
        return []
    scores = sorted({name for run in runs for name in fnmatch.filter(run.rows, HELD_OUT_MEANS)})
    lines: list[tuple[float, list[str]]] = []  # the key to sort by, and the cells
    for values, members in groups.items():
        rewards = [run.last_rewards(WINDOW).mean() for run in members]
        rewards = [value for value in rewards if not math.isnan(value)]
        without_reward = len(members) - len(rewards)
        sort_key = math.inf
        reward_text = "-"
        if rewards:
            over_seeds = t_interval(np.array(rewards))
            sort_key = -over_seeds.mean
            reward_text = over_seeds.text()
            if without_reward:
                reward_text += f", {without_reward} without"
        end_counts = Counter(run.ended if run.collapsed is None else "collapsed" for run in members)
        ends = ", ".join(f"{count} {how}" for how, count in sorted(end_counts.items()))
        score_texts = [last_scores(members, name) for name in scores]
        lines.append((sort_key, [*values, str(len(members)), reward_text, *score_texts, ends]))
    lines.sort(key=lambda line: line[0])
    head = [*keys.values(), "runs", f"reward, last {WINDOW}"]
    head += [*(f"{name}, last" for name in scores), "ended"]
    title = (
        f"{len(runs)} runs in {len(groups)} groups that differ in more than the seed "
        "(all=true: every run)"
    )
    return [title, "", *aligned([head, *(cells for _, cells in lines)])]


def last_scores(runs: list[Run], name: str) -> str:
    """Return the mean of the runs' last held-out scores, with the t interval over seeds."""
    scores = [run.column(name, first_step=0) for run in runs]
    lasts = [float(values.iloc[-1]) for values in scores if len(values)]
    return t_interval(np.array(lasts)).text() if lasts else "-"


def list_of_runs(runs: list[Run]) -> list[str]:
    """Return aligned lines, one for each run: its settings, seed, batches, reward and end."""
    keys = distinguishing_settings(runs)
    rows = [[*keys.values(), "seed", "batches", f"reward, last {WINDOW}", "best smoothed", "ended"]]
    for run in runs:
        results = [str(run.seed), batches(run), last_reward(run), best(run), ended(run)]
        rows.append([*(setting(run, key) for key in keys), *results])
    return [f"{counted(len(runs), 'run')} (all=true: everything of every run)", "", *aligned(rows)]


def aligned(rows: list[list[str]]) -> list[str]:
    """Return rows of cells as lines with columns, safe for a terminal."""
    return text_table([[escape_line(cell) for cell in row] for row in rows])


def table(runs: list[Run]) -> list[str]:
    """Return aligned lines: the settings that differ, then the results of the runs.

    Columns are numbered. A legend above the table gives each number's run."""
    legend = [f"[{i}] {escape_line(run.path)}" for i, run in enumerate(runs, start=1)]
    rows = [["", *(f"[{i}]" for i in range(1, len(runs) + 1))]]
    rows += [[key, *(setting(run, key) for run in runs)] for key in differing(runs)]
    rows.append([])
    rows += [row for row in results(runs) if any(cell != "-" for cell in row[1:])]
    return [*legend, "", *aligned(rows)]


def results(runs: list[Run]) -> list[list[str]]:
    """Return a row per quantity, with a cell per run, or "-" without values."""
    rows = [
        ["ended", *map(ended, runs)],
        ["batches", *map(batches, runs)],
        [f"reward, first {START}", *(interval(reward(run).head(START)) for run in runs)],
        [f"reward, last {WINDOW}", *map(last_reward, runs)],
        ["reward, best smoothed", *map(best, runs)],
    ]
    metrics = {metric for run in runs for metric in run.rows}
    for name in sorted(fnmatch.filter(metrics, HELD_OUT_MEANS)):
        rows.append([f"{name}, last ± 95 % (best)", *(held_out(run, name) for run in runs)])
    for name, (metric, form) in MEANS.items():
        rows.append([name, *(mean(run, metric, form) for run in runs)])
    for name, (metric, form) in TOTALS.items():
        rows.append([name, *(total(run, metric, form) for run in runs)])
    rows.append(seconds_row(runs))
    for name in ("checkpoint", "monitor"):
        rows.append([f"time, {name}", *(share_of_time(run, name) for run in runs)])
    return rows


def batches(run: Run) -> str:
    """Return the number of batches, and of the planned batches if they are known."""
    if "framework" in run.settings and run.finished:
        return str(run.last)  # logs without a plan count as finished
    return f"{run.last}/{run.planned}"


def reward(run: Run) -> pd.Series:
    return run.column("reward/mean")


def last_reward(run: Run) -> str:
    """Return the mean of the last rewards with its interval, or the batch of the last reward."""
    rewards = reward(run)
    lasts = run.last_rewards(WINDOW)
    if len(rewards) and not len(lasts):
        return f"none after batch {rewards.index[-1]}"
    return interval(lasts)


def interval(values: pd.Series) -> str:
    return block_bootstrap(values.to_numpy()).text() if len(values) else "-"


def ended(run: Run) -> str:
    """Return how a run ended by its directory, and the collapse by the registered rule."""
    return run.ended if run.collapsed is None else f"{run.ended}; collapsed at step {run.collapsed}"


def best(run: Run) -> str:
    """Return the highest point of the smoothed reward and its step."""
    rewards = run.rewards_by_batch()
    if not len(rewards):
        return "-"
    highest, position = peak_of(rewards.tolist())
    return f"{highest:.3f} at step {rewards.index[position]}"


def held_out(run: Run, name: str) -> str:
    """Return the last score with its 95 % interval over problems, and the best score.

    The best of all evaluations is chosen after the fact, so it is biased upwards."""
    if name not in run.rows:
        return "-"
    scores = run.rows.sort_values("step")[name].astype(float).dropna()
    if not len(scores):
        return "-"
    stderr = run.rows.get(stderr_of(name))
    half_width = 1.96 * float(stderr[scores.index[-1]]) if stderr is not None else math.nan
    # equal scores of all problems say nothing of other problems
    interval_text = f" ± {half_width:.3f}" if half_width > 0 else ""
    return f"{scores.iloc[-1]:.3f}{interval_text} ({scores.max():.3f})"


def mean(run: Run, metric: str, form: str) -> str:
    values = run.column(metric)
    return f"{values.mean():{form}}" if len(values) else "-"


def total(run: Run, metric: str, form: str) -> str:
    """Return the last value of a running total."""
    values = run.column(metric)
    return f"{values.iloc[-1]:{form}}" if len(values) else "-"


def seconds_row(runs: list[Run]) -> list[str]:
    """Return the row of the time that sampling and training took, in a unit that fits the runs."""
    totals = [run.column("compute/seconds").max() for run in runs]
    largest = max((value for value in totals if not math.isnan(value)), default=0.0)
    unit = "seconds"
    divisor = 1
    if largest >= 7200:
        unit = "hours"
        divisor = 3600
    elif largest >= 120:
        unit = "minutes"
        divisor = 60
    return [f"{unit}, sampling and training", *(number(x / divisor, ".1f") for x in totals)]


def share_of_time(run: Run, name: str) -> str:
    """Return the seconds spent on `name`, in percent of the seconds of sampling and training."""
    waited = run.column(f"time/{name}_s")
    seconds = run.column("compute/seconds")
    if not len(waited) or not len(seconds):
        return "-"
    return f"{100 * waited.sum() / seconds.iloc[-1]:.2f} %"
