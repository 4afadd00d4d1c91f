"""Runs side by side in the terminal, in the order given, or an evaluation against that of its base.

    gspo compare runs/STUDY/A runs/STUDY/B ...
    gspo compare runs/STUDY --where optim.lr=2e-4 task.name=math
    gspo compare runs/STUDY --all
    gspo compare runs/STUDY/A/evaluations/step_000000-HASH runs/STUDY/A/evaluations/step_000060-HASH

Settings in which they differ; how they ended; reward and held-out scores with 95 % intervals (of
the reward: within the run, by resampling blocks of batches, which says nothing about other seeds;
of held-out scores: over problems); clipped tokens, routing consistency, tokens, compute, time. Any
source that the figures read will do: run directories, offline W&B files, wandb:ENTITY/PROJECT.

Of more than 4 runs each group of seeds has a line, with the settings that vary, and of up to 12
runs each run.

    --all               everything of every run
    --where KEY=VALUE   the runs with these settings alone

Of two evaluations (`gspo evaluate`), the base's first, on the same problems: the gain in accuracy
by set, its 95 % interval (Student's t over the problems' paired differences) and exact sign-flip p,
and what of the gain is format, more responses in which an answer is found, and what is correctness,
more right ones among these (intervals by bootstrap over problems). The formula is in
gspo/evaluation/paired.py.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from gspo.analysis import load, script
from gspo.analysis.load import Run
from gspo.analysis.stats import START, WINDOW, block_bootstrap, t_interval
from gspo.io.arguments import key_values
from gspo.io.escaping import escape_line
from gspo.io.tables import text_table
from gspo.tracking.collapse import best as peak_of

FEW = 12  # more runs are summarised by groups of seeds
SIDE_BY_SIDE = 4  # up to so many runs stand in columns beside each other
# of settings that vary together the first of these is shown
FIRST = ("objective.name", "policy.routing_replay")
MEANS = {  # rows of the table: the metric, and the format of its mean over the batches
    "clipped tokens": ("clip/token_active", ".3g"),
    "routing consistency": ("routing/consistency", ".4f"),
    "entropy": ("policy/entropy", ".3f"),
    "gradient norm": ("optim/grad_norm", ".3g"),
    "tokens of a response": ("length/mean", ".1f"),
}
TOTALS = {
    "tokens": ("compute/tokens", ".3g"),
    "FLOPs": ("compute/flops", ".3g"),
    "hours": ("compute/seconds", ".2f"),
}


def main() -> None:
    """Compare the runs that the command line names."""
    script.command(lambda: sys.exit(compare(sys.argv[1:])))


def compare(arguments: list[str]) -> int:
    """Print the comparison of these runs; return the exit code."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        words, where, is_all = options_of(arguments)
        _, paths = key_values(words, {}, paths=True)
    except ValueError as error:
        raise load.RunsError(str(error)) from None
    if evaluations := [path for path in paths if (Path(path) / "responses").is_dir()]:
        return compare_evaluations(paths, evaluations)
    data = load.load(paths, where)
    for note in data.notes:
        if not note.startswith("seeds of"):
            print(f"note: {escape_line(note)}")
    if len(data.runs) < 2:
        raise load.RunsError(f"there is one run, {data.runs[0].path}: name two or more")
    if len(data.runs) > SIDE_BY_SIDE:
        groups = summary(data.runs)
        # a title, a blank line and the head of the table
        are_grouped = len(groups) < len(data.runs) + 3
        if are_grouped:
            print("\n".join(groups))
        if len(data.runs) <= FEW:
            print("\n".join([*[""] * are_grouped, *list_of_runs(data.runs)]))
    if len(data.runs) <= SIDE_BY_SIDE or is_all:
        print("\n".join([*[""] * (len(data.runs) > SIDE_BY_SIDE), *table(data.runs)]))
    return 0


def options_of(arguments: list[str]) -> tuple[list[str], dict[str, str], bool]:
    """Return the words that name runs, the settings that follow --where, and whether --all is among
    the words. Raises ValueError for --where without a setting."""
    words: list[str] = []
    where: dict[str, str] = {}
    rest = [argument for argument in arguments if argument != "--all"]
    while rest:
        word = rest.pop(0)
        if word != "--where":
            words.append(word)
            continue
        given = []
        while rest and "=" in rest[0] and not Path(rest[0]).exists():
            given.append(rest.pop(0))
        if not given:
            raise ValueError("--where needs settings, such as --where optim.lr=2e-4")
        for key, _, value in (each.partition("=") for each in given):
            if key in where:
                raise ValueError(f"--where {key}={where[key]} and {key}={value}: give one value")
            where[key] = value
    return words, where, "--all" in arguments


def compare_evaluations(paths: list[str], evaluations: list[str]) -> int:
    """Print the comparison of two evaluations; return the exit code."""
    # PyTorch comes with it, which takes seconds to import and which runs are compared without
    from gspo.evaluation.comparison import compared, comparison_table, read_finished

    if evaluations != paths or len(paths) != 2:
        raise load.RunsError(
            f"{evaluations[0]} is an evaluation: name two, the base's and the trained policy's, and nothing else"
        )
    try:
        print(comparison_table(compared(*map(read_finished, paths))))
    except (ValueError, OSError) as error:
        raise load.RunsError(str(error)) from None
    return 0


def differing(runs: list[Run]) -> list[str]:
    """Return the settings in which runs differ, but for those that say where and how a run is
    recorded.
    """
    keys = sorted({key for run in runs for key in run.settings})
    told = [
        key
        for key in keys
        if key.split(".")[0] not in ("tracking", "runs", "resume", "on_existing")
    ]
    return [key for key in told if len({str(run.settings.get(key, "-")) for run in runs}) > 1]


def telling(runs: list[Run]) -> dict[str, str]:
    """Return the settings that tell the runs apart beside the seed, each with the shortest name
    that it can have here.

    Of settings that vary together one is enough: a setting is left out if those before it tell all
    that it tells."""
    keys = [
        key
        for key in differing(runs)
        if key not in ("seed", "cold_start.seed") and not key.startswith("options.")
    ]
    keys = [*(key for key in FIRST if key in keys), *(key for key in keys if key not in FIRST)]
    kept: list[str] = []
    groups = 1
    for key in keys:
        found = len(
            {tuple(str(run.settings.get(each, "-")) for each in [*kept, key]) for run in runs}
        )
        if found > groups:
            kept.append(key)
            groups = found
    short = {key: key.removesuffix(".name").rpartition(".")[2] for key in kept}
    count = Counter(short.values())
    return {key: short[key] if count[short[key]] == 1 else key for key in kept}


def summary(runs: list[Run]) -> list[str]:
    """Return aligned lines: for each group of runs that differ in their seeds alone, their number,
    the mean reward of the last batches with the t interval over seeds, and how they ended. The
    highest reward comes first."""
    keys = telling(runs)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(str(run.settings.get(key, "-")) for key in keys), []).append(run)
    found = []
    for values, members in groups.items():
        rewards = [reward(run).tail(WINDOW).mean() for run in members]
        known = [value for value in rewards if not math.isnan(value)]
        of_seeds = t_interval(np.array(known)) if known else None
        ends = Counter(run.ended if run.collapsed is None else "collapsed" for run in members)
        ended_so = ", ".join(f"{count} {how}" for how, count in sorted(ends.items()))
        text = of_seeds.text() if of_seeds else "-"
        found.append(
            (-of_seeds.mean if of_seeds else math.inf, [*values, str(len(members)), text, ended_so])
        )
    found.sort(key=lambda pair: pair[0])
    rows = [
        [*keys.values(), "runs", f"reward, last {WINDOW}", "ended"],
        *(cells for _, cells in found),
    ]
    title = f"{len(runs)} runs in {len(found)} groups that differ in more than the seed (--all: every run)"
    return [title, "", *aligned(rows)]


def list_of_runs(runs: list[Run]) -> list[str]:
    """Return aligned lines, one for each run: the settings that tell it apart, its seed, how it
    ended, its reward.
    """
    keys = telling(runs)
    rows = [[*keys.values(), "seed", "batches", f"reward, last {WINDOW}", "best smoothed", "ended"]]
    for run in runs:
        values = [str(run.settings.get(key, "-")) for key in keys]
        last = interval(reward(run).tail(WINDOW))
        rows.append(
            [*values, str(run.seed), f"{run.last}/{run.planned}", last, best(run), ended(run)]
        )
    return [f"{len(runs)} runs (--all: everything of every run)", "", *aligned(rows)]


def aligned(rows: list[list[str]]) -> list[str]:
    """Return rows of cells as lines with columns, safe for a terminal."""
    return text_table([[escape_line(cell) for cell in row] for row in rows])


def table(runs: list[Run]) -> list[str]:
    """Return aligned lines: the settings that differ, then what the runs did. Columns are numbered,
    with a legend above."""
    lines = [f"[{i}] {escape_line(run.path)}" for i, run in enumerate(runs, start=1)]
    rows = [["", *(f"[{i}]" for i in range(1, len(runs) + 1))]]
    rows += [[key, *(str(run.settings.get(key, "-")) for run in runs)] for key in differing(runs)]
    rows += [[], *(row for row in results(runs) if any(cell != "-" for cell in row[1:]))]
    return [*lines, "", *aligned(rows)]


def results(runs: list[Run]) -> list[list[str]]:
    """Return a row per quantity with a cell per run, "-" where a run has not reported it."""
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("ended", ended),
        ("batches", lambda run: f"{run.last}/{run.planned}"),
        (f"reward, first {START}", lambda run: interval(reward(run).head(START))),
        (f"reward, last {WINDOW}", lambda run: interval(reward(run).tail(WINDOW))),
        ("reward, best smoothed", best),
    ]
    sets = sorted(
        {name for run in runs for name in run.rows if name.startswith("eval/") and "/avg@" in name}
    )
    rows += [
        (f"{name}, last ± 95 % (best)", lambda run, name=name: held_out(run, name)) for name in sets
    ]
    rows += [
        (name, lambda run, m=metric, f=form: mean(run, m, f))
        for name, (metric, form) in MEANS.items()
    ]
    rows += [
        (name, lambda run, m=metric, f=form: total(run, m, f))
        for name, (metric, form) in TOTALS.items()
    ]
    rows += [
        (f"time, {name}", lambda run, n=name: share_of_time(run, n))
        for name in ("checkpoint", "monitor")
    ]
    return [[name, *(cell(run) for run in runs)] for name, cell in rows]


def reward(run: Run) -> pd.Series:
    return run.column("reward/mean")


def interval(values: pd.Series) -> str:
    return block_bootstrap(values.to_numpy()).text() if len(values) else "-"


def ended(run: Run) -> str:
    """Return how a run ended, by the registered rule and by what its directory says."""
    return run.ended if run.collapsed is None else f"{run.ended}; collapsed at step {run.collapsed}"


def best(run: Run) -> str:
    """Return the highest point of the smoothed reward and its step."""
    rewards = reward(run)
    if not len(rewards):
        return "-"
    highest, at = peak_of(rewards.tolist())
    return f"{highest:.3f} at step {rewards.index[at]}"


def held_out(run: Run, name: str) -> str:
    """Return the last score with its 95 % interval over problems, and the best of all evaluations,
    which is chosen after the fact."""
    if name not in run.rows:
        return "-"
    scores = run.rows.sort_values("step")[name].astype(float).dropna()
    if not len(scores):
        return "-"
    stderr = run.rows.get(name.rsplit("/", 1)[0] + "/stderr")
    half = 1.96 * float(stderr[scores.index[-1]]) if stderr is not None else math.nan
    around = "" if math.isnan(half) else f" ± {half:.3f}"
    return f"{scores.iloc[-1]:.3f}{around} ({scores.max():.3f})"


def mean(run: Run, metric: str, form: str) -> str:
    values = run.column(metric)
    return f"{values.mean():{form}}" if len(values) else "-"


def total(run: Run, metric: str, form: str) -> str:
    """Return the last value of a running total, with seconds as hours."""
    values = run.column(metric)
    return (
        f"{values.iloc[-1] / (3600 if metric == 'compute/seconds' else 1):{form}}"
        if len(values)
        else "-"
    )


def share_of_time(run: Run, name: str) -> str:
    """Return the share of the run's seconds in which it waited for this."""
    spent, seconds = run.column(f"time/{name}_s"), run.column("compute/seconds")
    return f"{100 * spent.sum() / seconds.iloc[-1]:.2f} %" if len(spent) and len(seconds) else "-"
