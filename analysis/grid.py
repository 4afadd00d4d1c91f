"""Parts that the figures of studies share: checks of their runs, cells of tables, and panels.

A study figure is a grid of panels with a mean and its interval for every arm, or a row for every
arm. The fig_*.py files choose the numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gspo.analysis import load, style
from gspo.analysis.arm_styles import ArmStyle, ArmStyles
from gspo.analysis.load import Data, Run
from gspo.analysis.runs import RunsError
from gspo.analysis.stats import Interval, t_interval
from gspo.analysis.verdicts import direction
from gspo.tracking.collapse import MIN_BATCHES

# the words for a setting's value in an arm's name; "" for the value that needs no word
ARM_WORDS = {
    "policy.freeze_router": {False: "", True: "frozen router"},
    "policy.precision": {"float32": "", "bfloat16": "bfloat16"},
    "policy.head_dtype": {"float32": "", "bfloat16": "head too"},
    "policy.old_logprobs": {"step_start": "", "engine": "engine's log-probs"},
    "correction.name": {"none": "", "tis": "TIS", "opsm": "OPSM", "m2po": "M2PO"},
    "rollout.keep_mask": {False: "", True: "sampling mask"},
}
CLIP = "objective.clip_low"
NETWORK = "cold_start.seed"  # of which the initial network is drawn
PARTS = 5  # the start and the end of a run are the first and the last fifth of its batches


# ------------------------------------------------------------------------------------------------
# runs and numbers
def settled_runs(data: Data, settings: Iterable[str]) -> list[Run]:
    """Return the runs that have finished or collapsed; raise RunsError if a run lacks a setting."""
    runs = [run for run in data.runs if run.settled]
    if not runs:
        raise RunsError("no run has finished or collapsed")
    for key in settings:
        if any(key not in run.settings for run in runs):
            raise RunsError(f"not all runs have a setting {key}")
    return runs


def value_of(run: Run, key: str) -> object:
    """Return a run's value of a setting, "null" for null, which pandas would drop from groups."""
    value = run.settings[key]
    return "null" if value is None else value


def check_alike(
    runs: list[Run],
    expected: tuple[str, ...],
    advice: str,
    name: str = "the runs",
) -> None:
    """Raise RunsError if the runs differ in length, or in settings that are not expected.

    Those are expected whose names begin with one of `expected`.
    Each seed may have a cold start of its own, if all of its runs share it."""
    check_one_length(runs, name)
    keys = [key for key in load.differing(runs) if not key.startswith(expected)]
    networks = {(run.seed, run.settings.get(NETWORK)) for run in runs}
    if len(networks) == len({run.seed for run in runs}):
        keys = [key for key in keys if key != NETWORK]
    if keys:
        raise RunsError(f"{name} differ also in {', '.join(keys)}: {advice}")


def check_one_length(runs: list[Run], name: str = "the runs") -> None:
    """Raise RunsError if the runs were planned with different numbers of batches."""
    lengths = sorted({run.planned for run in runs})
    if len(lengths) > 1:
        steps = ", ".join(map(str, lengths))
        raise RunsError(f"{name} are of {steps} steps: give those of one length")


def refuse_repeated(numbers: pd.DataFrame, keys: list[str], advice: str) -> None:
    """Raise RunsError if two rows have the same arm, seed and values of these columns."""
    repeated = numbers[numbers.duplicated(["arm", "seed", *keys])]
    if len(repeated):
        first = repeated.iloc[0]
        cell = "".join(f", {key} {first[key]}" for key in keys if first[key] != "")
        raise RunsError(f"two runs of {first['arm']}, seed {first['seed']}{cell}: {advice}")


def run_numbers(
    run: Run,
    start: int,
    end: int,
    means: Mapping[str, str],
) -> dict[str, object]:
    """Return a run's seed, its reward in the first and last batches, and whether it collapsed.

    The first `start` and the last `end` batches count, or a whole row if rows are means over more.
    `can_collapse` says whether the run was planned to be long enough for the collapse rule, and had
    a positive reward, of whose peak the rule takes a share.
    `means` maps further columns to metrics, which are averaged over all batches. A metric that was
    not reported is NaN.
    """
    reward = run.column("reward/mean")
    first = max(start, run.batches_per_row)
    can_collapse = run.planned >= MIN_BATCHES and bool((reward > 0).any())
    numbers: dict[str, object] = {
        "seed": run.seed,
        "start": reward.loc[:first].mean(),
        "end": reward.loc[run.last - end + 1 :].mean(),
        "collapsed": run.collapsed is not None,
        "can_collapse": can_collapse or run.collapsed is not None,
    }
    for column, metric in means.items():
        numbers[column] = run.column(metric).mean()
    return numbers


def part_length(run: Run) -> int:
    """Return the number of batches in a fifth of a run."""
    return max(run.planned // PARTS, 1)


def span(values: pd.Series | Sequence[int]) -> str:
    """Return the range of some whole numbers, as in "8" or "6 to 8"."""
    low = min(values)
    high = max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def arm_words(run: Run, settings: Iterable[str]) -> list[str]:
    """Return the words that name these settings of a run in an arm's name."""
    words = []
    for key in settings:
        value = run.settings[key]
        words.append(ARM_WORDS.get(key, {}).get(value, f"{key}={value}"))
    return [word for word in words if word]


def range_suffixes(runs: Sequence[Run], numbers: pd.DataFrame, group: Sequence[str]) -> pd.Series:
    """Return the suffix of each row's arm: its clip range, or "" for an arm with one range.

    The rows are those of the runs. An arm has several ranges if runs of the same `group` (columns
    of `numbers`) do. Without a group all runs count.
    """
    ranges = pd.Series([run.settings.get(CLIP) for run in runs], index=numbers.index)
    keys = [numbers[column] for column in (*group, "arm")]
    counts = ranges.groupby(keys, dropna=False).transform("nunique")
    several = numbers["arm"].isin(numbers.loc[counts > 1, "arm"])
    return (" [clip range " + ranges.astype(str) + "]").where(several, "")


# ------------------------------------------------------------------------------------------------
# cells of tables
def collapsed_count(runs: pd.DataFrame) -> str:
    """Return the number of collapsed runs among those long enough, as in "3 of 8", or "-"."""
    long_enough = runs[runs["can_collapse"]]
    if long_enough.empty:
        return "-"
    return f"{long_enough['collapsed'].sum()} of {len(long_enough)}"


def difference_cells(interval: Interval) -> list[str]:
    """Return the cells of a paired difference: the mean with its interval, and the exact p."""
    return [interval.text("+.3f"), interval.p_text()]


def coverage(level: float) -> str:
    """Return the coverage of an interval in percent, with the digits that tell it from 100 %.

    >>> coverage(0.05), coverage(0.0031), coverage(1.5e-5)
    ('95 %', '99.7 %', '99.999 %')
    """
    digits = max(0, math.ceil(-math.log10(100 * level)))
    return f"{100 - 100 * level:.{digits}f} %"


def gain_text(gains: pd.Series) -> str:
    """Return the mean gain, with the smallest and the largest seed if there are several."""
    text = f"{gains.mean():+.3f}"
    if len(gains) > 1:
        text += f" [{gains.min():+.3f}, {gains.max():+.3f}]"
    return text


# ------------------------------------------------------------------------------------------------
# panels
def cell_intervals(runs: pd.DataFrame, x: str, column: str) -> list[tuple[float, Interval]]:
    """Return the mean of a column over seeds with its t interval, for each value of `x`."""
    return [(value, t_interval(cell)) for value, cell in runs.groupby(x)[column]]


def interval_line(
    ax: Axes,
    points: Sequence[tuple[float, Interval]],
    arm_style: ArmStyle,
    line_width: float = 1.6,
    bar_width: float = 1.0,
    marker_size: float = 5.0,
) -> None:
    """Draw means with their intervals at these x, joined by a line."""
    x = [position for position, _ in points]
    means = np.array([interval.mean for _, interval in points])
    lows = np.array([interval.low for _, interval in points])
    highs = np.array([interval.high for _, interval in points])
    errors = np.nan_to_num([means - lows, highs - means])
    ax.errorbar(
        x,
        means,
        yerr=errors,
        lw=line_width,
        elinewidth=bar_width,
        ms=marker_size,
        **arm_style.plot_options(),
    )


def name_rows(axes: Sequence[Axes], names: Sequence[str], margin: float) -> None:
    """Set up a row for each name, the first on top, in panels side by side.

    `margin` is the room above the first row and below the last. The names stand at the first
    panel.
    """
    for ax in axes:
        ax.grid(axis="y", visible=True)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(names) - 1 + margin, -margin)
    axes[0].set_yticks(range(len(names)), names)
    for text in axes[0].get_yticklabels():
        text.set_color(style.INK)


def draw_rows(
    ax: Axes, rows: pd.DataFrame, arms: Sequence[str], styles: ArmStyles, margin: float
) -> None:
    """Draw a row per arm: its difference with the interval, filled if it is above or below 0.

    `rows` has the columns arm and interval. The grey strip is the margin of "the same".
    """
    ax.axvspan(-margin, margin, color=style.STRIP, lw=0, zorder=0)
    ax.axvline(0, color=style.MUTED, lw=1, zorder=1)
    for row in rows.itertuples():
        y = arms.index(row.arm)
        interval = row.interval
        line = styles[row.arm]
        decided = direction(interval, margin) in ("above", "below")
        ax.plot([interval.low, interval.high], [y, y], color=line.colour, lw=1.3, zorder=2)
        face = line.colour if decided else "white"
        ax.plot(interval.mean, y, "o", ms=5, mfc=face, mec=line.colour, mew=1.2, zorder=3)


def row_names(arms: Iterable[str]) -> list[str]:
    """Return the names of arms on one line each, for the rows of a panel."""
    return [style.arm_label(arm).replace("+\n", "+ ").replace("\n", ", ") for arm in arms]
