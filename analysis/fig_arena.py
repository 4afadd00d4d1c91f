"""Arena: many objectives in many settings, each paired by seed with one of them, and a ranking.

    gspo figure arena runs/arena_sums_edge runs/arena_sums_stale ... arms=[correction.name] \\
        looks=[10,20]

Each study is a panel, and is named after the part of its name in which it differs from the others.
A panel has a row per arm: the paired difference of its reward at the end (last fifth of the
batches) to the objective `against`, with its interval. A filled mark is decided: the interval
leaves 0 out, and the exact p is below the level. The grey strip is the margin within which two arms
count as the same. With looks=[10,20] the runs are a sequential design, and levels are those of the
look (sequential.py). A panel says nothing of the number of its comparisons: of twenty null
comparisons one is decided by chance.

The ranking takes the mean of an arm's differences over all panels, each with equal weight. Every
pair of arms is compared at p < .05, with Holm's correction for all pairs, by random sign flips. The
intervals beside it are 95 % intervals without a correction. An arm has all ranks that the decided
pairs permit: "2 to 5" means that one arm is better, and that up to three of the arms that are not
told apart from it may be. Prints Markdown tables of all of it. Writes fig_arena.pdf and .png.
Metrics: reward/mean, compute/seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from gspo.analysis import load, script, style
from gspo.analysis.arm_styles import arm_styles
from gspo.analysis.blocks import markdown_table
from gspo.analysis.doses import paired_interval, shared_differences
from gspo.analysis.grid import (
    arm_words,
    check_alike,
    collapsed_count,
    coverage,
    draw_rows,
    name_rows,
    part_length,
    range_suffixes,
    refuse_repeated,
    row_names,
    run_numbers,
    settled_runs,
    span,
)
from gspo.analysis.load import OBJECTIVES, Data, Run
from gspo.analysis.runs import RunsError
from gspo.analysis.sequential import Design, chosen_design, level_of
from gspo.analysis.stats import LEVEL, Interval, t_interval
from gspo.analysis.verdicts import direction
from gspo.io.arguments import command_options, option
from gspo.io.tables import counted
from gspo.statistics import holm, random_sign_flip_p, t_quantile

REFUSED = script.DOTS | script.NO_CURVES
# The settings that make an arm, by the first part of their names. An objective may have no old
# policy, or one of its own.
ARM_SETTINGS = (
    "objective.",
    "advantage.",
    "trainer.aggregation",
    "policy.routing_replay",
    "policy.old_logprobs",
)
ADVICE = "choose runs with where.KEY=VALUE, or name with arms=[...] what makes an arm"
MAX_PANELS = 16
SECONDS_PER_HOUR = 3600
# by (arm, the arm it is compared with): the mean difference over the panels
Comparisons = dict[tuple[str, str], Interval]


@dataclass(frozen=True, kw_only=True)
class Options(script.Options):
    """The options of this figure."""

    against: str = option(
        "gspo", "the objective that the others are compared with", choices=tuple(OBJECTIVES)
    )
    arms: tuple[str, ...] = option((), "settings that make an arm besides objective and replay")
    columns: int = option(4, "panels in a row", least=1, most=6)
    same: float = option(0.03, "two rewards within this difference are the same", least=0)
    looks: tuple[int, ...] = option((), "numbers of seeds at which a sequential design is judged")


def main() -> None:
    options = command_options(Options, __doc__, REFUSED)
    design = chosen_design(options.looks)
    data = script.read(options, several_studies=True, notes=script.ABOUT_ENDS)
    numbers = measure(data, options.arms)
    baseline = OBJECTIVES[options.against]
    differences = paired(numbers, baseline, design)
    ranking = rank(numbers)
    paths = draw(numbers, differences, baseline, options)
    script.print_lines(
        table(numbers),
        difference_table(differences, baseline, options.same),
        [*interim(differences, design, options.same), *ranking_table(numbers, ranking, baseline)],
        paths,
    )


# ------------------------------------------------------------------------------------------------
# numbers
def measure(data: Data, settings: Sequence[str] = ()) -> pd.DataFrame:
    """Return a row per run that has finished or collapsed, in the order of the studies.

    The columns are cell (the study's name without what all names share), arm, seed, start, end,
    collapsed and hours. Raises RunsError if runs of a cell differ in more than their arm, if runs
    of an arm in a cell differ in more than their seed, or if two runs have the same cell, arm and
    seed.
    """
    runs = settled_runs(data, settings)
    if not runs:
        raise RunsError("fig_arena needs runs that have finished or collapsed")
    cells = cell_names([str(run.study) for run in runs])
    if len(cells) > MAX_PANELS:
        raise RunsError(
            f"fig_arena has {MAX_PANELS} panels at most; these are {len(cells)} studies"
        )
    rows = []
    for run in runs:
        part = part_length(run)
        row = run_numbers(run, part, part, {})
        row["cell"] = cells[str(run.study)]
        row["arm"] = arm_of(run, settings)
        row["hours"] = run.column("compute/seconds").max() / SECONDS_PER_HOUR
        rows.append(row)
    numbers = pd.DataFrame(rows)
    numbers["arm"] += range_suffixes(runs, numbers, ["cell"])
    refuse_repeated(numbers, ["cell"], "name with arms=[...] what they differ in")
    for cell, group in numbers.groupby("cell"):
        alike = [runs[index] for index in group.index]
        check_alike(alike, (*ARM_SETTINGS, *groups_of(settings)), ADVICE, f"the runs of {cell}")
    for (cell, arm), group in numbers.groupby(["cell", "arm"]):
        check_alike(
            [runs[index] for index in group.index], (), ADVICE, f"the runs of {arm} in {cell}"
        )
    return numbers


def groups_of(settings: Sequence[str]) -> list[str]:
    """Return the groups of these settings: "correction." of correction.name, steps of steps."""
    groups = []
    for key in settings:
        group, dot, _ = key.rpartition(".")
        groups.append(group + dot or key)
    return groups


def arm_of(run: Run, settings: Sequence[str]) -> str:
    """Return the arm of a run: objective, replay, and the words of the settings."""
    words = arm_words(run, settings)
    arm = load.base_arm(run.settings)
    return f"{arm} [{', '.join(words)}]" if words else arm


def cell_names(studies: Sequence[str]) -> dict[str, str]:
    """Return the name of each study's panel: without the words that all studies begin with.

    >>> cell_names(["arena_sums_edge", "arena_tools_edge"])
    {'arena_sums_edge': 'sums edge', 'arena_tools_edge': 'tools edge'}
    """
    words = {study: study.split("_") for study in studies}
    if len(words) == 1:
        return {study: study for study in words}
    shared = 0
    for same_place in zip(*words.values(), strict=False):
        if len(set(same_place)) > 1:
            break
        shared += 1
    return {study: " ".join(parts[shared:]) or study for study, parts in words.items()}


def arms_in_order(numbers: pd.DataFrame) -> list[str]:
    """Return the arms by falling mean reward, and then those that are not in every cell.

    The reward of a cell is taken relative to the mean of the arms in every cell, because some cells
    have higher rewards than others.
    """
    means = numbers.groupby(["arm", "cell"])["end"].mean().unstack()
    in_all = means.notna().all(axis=1)
    relative = means - means[in_all].mean()
    frame = pd.DataFrame({"in_all": in_all, "reward": relative.mean(axis=1)})
    return list(frame.sort_values(["in_all", "reward"], ascending=False).index)


def paired(numbers: pd.DataFrame, baseline: str, design: Design | None = None) -> pd.DataFrame:
    """Return a row per cell and arm: the interval of the arm minus the baseline, paired by seed.

    The columns are cell, arm and interval. Raises RunsError if a cell has no run of the baseline,
    or if a sequential design has no look at a pair's number of seeds.
    """
    rows = []
    for cell, group in numbers.groupby("cell", sort=False):
        arms = sorted(group["arm"].unique())
        if baseline not in arms:
            raise RunsError(
                f"{cell} has no run of {baseline}; it has {', '.join(arms)}: choose another "
                "with against=, or name other settings with arms=[...]"
            )
        for arm in arms:
            difference = differences_by_seed(group, arm, baseline)
            if arm == baseline or difference.empty:
                continue
            pair = f"{arm} and {baseline} in {cell}"
            level = level_of(design, len(difference), pair) if design else LEVEL
            interval = paired_interval(difference, level)
            rows.append({"cell": cell, "arm": arm, "interval": interval})
    if not rows:
        raise RunsError(f"no arm shares a seed with {baseline}")
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Ranking:
    """The mean difference of each pair of arms over the cells, and each pair's corrected p."""

    arms: list[str]
    comparisons: Comparisons
    p: dict[tuple[str, str], float]

    def ranks(self, arm: str) -> tuple[int, int]:
        """Return the best and the worst rank that an arm may have, 1 being the best."""
        better = 0
        worse = 0
        for (a, b), interval in self.comparisons.items():
            if arm not in (a, b) or self.p[a, b] >= LEVEL:
                continue
            ahead = (interval.mean > 0) == (arm == a)
            if ahead:
                worse += 1
            else:
                better += 1
        return 1 + better, len(self.arms) - worse


def rank(numbers: pd.DataFrame) -> Ranking:
    """Return the comparisons of all pairs of arms that are in every cell.

    The sign flips hold their error rate if two arms are equal in every cell. If an arm leads in
    some cells and trails in others, they tell a pair apart less often than its interval does.
    """
    cells = numbers["cell"].unique()
    counts = numbers.groupby("arm")["cell"].nunique()
    arms = [arm for arm in arms_in_order(numbers) if counts[arm] == len(cells)]
    comparisons: Comparisons = {}
    p: dict[tuple[str, str], float] = {}
    for a, b in combinations(arms, 2):
        by_cell = [cell_difference(numbers, cell, a, b) for cell in cells]
        if all(len(values) > 1 and not np.isnan(values).any() for values in by_cell):
            comparisons[a, b] = mean_over_cells(by_cell)
            weighted = np.concatenate([values / len(values) for values in by_cell])
            p[a, b] = random_sign_flip_p(weighted)
    corrected = holm(list(p.values()))
    return Ranking(arms, comparisons, dict(zip(p, corrected, strict=True)))


def cell_difference(numbers: pd.DataFrame, cell: str, a: str, b: str) -> np.ndarray:
    """Return the differences a - b of the seeds that both arms have in a cell."""
    return differences_by_seed(numbers[numbers["cell"] == cell], a, b).to_numpy()


def differences_by_seed(numbers: pd.DataFrame, a: str, b: str) -> pd.Series:
    """Return the differences a - b by seed, NaN if a run collapsed before its end was measured."""
    runs = numbers.set_index("seed")
    return shared_differences(runs[runs["arm"] == a], runs[runs["arm"] == b])


def mean_over_cells(differences: Sequence[np.ndarray]) -> Interval:
    """Return the mean of the cells' mean differences, each cell with equal weight.

    The cells count as independent, also those with the same seeds and problems. In study A the
    paired differences of a seed at two learning rates had a mean correlation of -.04 (6 pairs of
    arms at 28 pairs of rates). With v_c = s_c^2 / n_c the variance of the mean is
    sum_c v_c / C^2, and its degrees of freedom are (sum_c v_c)^2 / sum_c (v_c^2 / (n_c - 1))
    (Welch and Satterthwaite).
    """
    means = [values.mean() for values in differences]
    variances = np.array([values.var(ddof=1) / len(values) for values in differences])
    mean = float(np.mean(means))
    total = float(variances.sum())
    seeds = sum(len(values) for values in differences)
    if total == 0:
        return Interval(mean, mean, mean, seeds)
    freedoms = np.array([len(values) - 1 for values in differences])
    freedom = total**2 / float((variances**2 / freedoms).sum())
    half = t_quantile(freedom) * math.sqrt(total) / len(differences)
    return Interval(mean, mean - half, mean + half, seeds)


# ------------------------------------------------------------------------------------------------
# tables
def table(numbers: pd.DataFrame) -> list[str]:
    """Return a Markdown row per cell and arm."""
    rows = [
        ["cell", "arm", "seeds", "reward, first fifth", "last fifth", "collapsed", "core-hours"]
    ]
    for cell, group in numbers.groupby("cell", sort=False):
        for arm, runs in group.groupby("arm"):
            row = [cell, arm, len(runs), f"{runs['start'].mean():.3f}"]
            row += [t_interval(runs["end"]).text(), collapsed_count(runs)]
            row.append(f"{runs['hours'].sum():.2f}")
            rows.append(row)
    return markdown_table(rows)


def difference_table(differences: pd.DataFrame, baseline: str, margin: float) -> list[str]:
    """Return a Markdown row per cell and arm: its difference to the baseline and the verdict."""
    rows = [["cell", f"arm - {baseline}", "mean and interval", "p", "level", "verdict"]]
    for row in differences.itertuples():
        interval = row.interval
        cells = [interval.text("+.3f"), interval.p_text(), f"{interval.level:.2g}"]
        rows.append([row.cell, row.arm, *cells, direction(interval, margin)])
    return markdown_table(rows)


def interim(differences: pd.DataFrame, design: Design | None, margin: float) -> list[str]:
    """Return a line that the ranking is no result yet, if a pair may still get more seeds."""
    if design is None:
        return []
    last = design.looks[-1]
    # a decided pair gets no more seeds
    intervals = [x for x in differences["interval"] if not math.isnan(x.mean)]
    early = [x for x in intervals if x.seeds < last]
    undecided = [x for x in early if direction(x, margin) == "undecided"]
    if not undecided:
        return []
    return [
        f"The ranking is not judged yet: its level of {LEVEL:g} is that of a single look, at the end "
        f"of all cells ({counted(len(undecided), 'undecided pair')} with fewer than {last} seeds).",
        "",
    ]


def ranking_table(numbers: pd.DataFrame, ranking: Ranking, baseline: str) -> list[str]:
    """Return a Markdown row per arm in every cell: its mean difference, its ranks and its cost."""
    head = ["rank", "arm", f"mean over cells, minus {baseline}, 95 %", "p (Holm)", "collapsed"]
    rows = [[*head, "core-hours"]]
    for arm in ranking.arms:
        best, worst = ranking.ranks(arm)
        place = f"{best}" if best == worst else f"{best} to {worst}"
        difference = "-"
        p = "-"
        for (a, b), interval in ranking.comparisons.items():
            if {a, b} == {arm, baseline}:
                sign = 1 if a == arm else -1
                difference = signed(interval, sign).text("+.3f")
                p = f"{ranking.p[a, b]:.2g}"
        runs = numbers[numbers["arm"] == arm]
        hours = f"{runs['hours'].sum():.2f}"
        rows.append([place, arm, difference, p, collapsed_count(runs), hours])
    return markdown_table(rows)


def signed(interval: Interval, sign: int) -> Interval:
    """Return the interval of the negative difference if `sign` is -1."""
    if sign == 1:
        return interval
    return Interval(-interval.mean, -interval.high, -interval.low, interval.seeds)


# ------------------------------------------------------------------------------------------------
# figure
def draw(
    numbers: pd.DataFrame,
    differences: pd.DataFrame,
    baseline: str,
    options: Options,
) -> list[Path]:
    """Draw a panel per cell, in rows of `options.columns` panels, which share their x axis."""
    cells = list(dict.fromkeys(differences["cell"]))
    arms = [arm for arm in arms_in_order(numbers) if arm != baseline]
    styles = arm_styles(sorted(arms))  # they do not depend on the order of the results
    columns = min(options.columns, len(cells))
    panel_rows = math.ceil(len(cells) / columns)
    height = panel_rows * (0.75 + 0.19 * len(arms))
    figure = style.canvas(height, options)
    panels = figure.subplots(panel_rows, columns, sharey=True, sharex="row", squeeze=False)
    names = row_names(arms)
    for ax, cell in zip(panels.flat, cells, strict=False):
        rows = differences[differences["cell"] == cell]
        draw_rows(ax, rows, arms, styles, options.same)
        ax.set_title(cell, fontsize=9)
    for ax in panels.flat[len(cells) :]:
        ax.set_visible(False)
    for row in panels:
        name_rows(row, names, 0.7)
        row[0].tick_params(axis="y", labelsize=8)
        for ax in row:
            ax.set_xlabel(f"reward minus {baseline}'s", fontsize=8.5)
    text = caption(numbers, differences, baseline, options)
    return style.save(figure, options.out, "fig_arena", text, options)


def caption(
    numbers: pd.DataFrame, differences: pd.DataFrame, baseline: str, options: Options
) -> str:
    """Return the caption: what a row, a mark and the strip mean, and what it cost."""
    seeds = [x.seeds for x in differences["interval"] if not math.isnan(x.mean)] or [0]
    hours = numbers["hours"].sum()
    levels = sorted({interval.level for interval in differences["interval"]})
    covered = " and ".join(coverage(level) for level in levels)
    cells = numbers.groupby("arm")["cell"].nunique()
    apart = "; those that are not in all of them stand below" if cells.nunique() > 1 else ""
    text = (
        f"Reward of the last fifth of the batches minus {baseline}'s, paired by seed: mean and "
        f"{covered} interval over {span(seeds)} seeds. Filled: the interval leaves 0 out and the "
        f"exact p is below the level. Grey: within {options.same:g}. Arms are ordered by their mean "
        f"reward over all panels{apart}. {len(numbers)} runs, {hours:.1f} core-hours."
    )
    return text


if __name__ == "__main__":
    script.command(main)
