"""A dose: what is given more and more of it, is the reward lost, and which objective or remedy
withstands it longer?

    gspo figure dose runs/routing_dose --dose optim.router_lr_factor \
        --measured routing/consistency_after_step --arms policy.freeze_router
    gspo figure dose runs/mismatch_dose --dose rollout.dtype rollout.quantization \
        --measured mismatch/beyond_2 --arms correction.name policy.old_logprobs
    gspo figure dose runs/observation_share --dose task.log --measured
    episode/environment_tokens \
        --against gspo --also clip/token_active

--dose names the setting that was varied, or several that stand for one dose together; --measured
the metric that says how much of it the runs got, which is read in the first fifth of their batches,
before any sinks. Arms are the objectives with their Routing Replay, and with the settings of
--arms. Above: the reward at the end, and the share of collapsed runs. Below, paired by seed: every
objective minus GRPO (or that of --against) with the same remedy, and every remedy minus none of the
same objective. Prints Markdown tables of all of it, with the means of the metrics of --also, and of
each dose minus the least one; writes fig_dose_<study>.pdf and .png. Metrics: reward/mean and those
named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from pathlib import Path

import numpy as np
import pandas as pd
from gspo.analysis import load, script, style
from gspo.analysis.blocks import aligned_table
from gspo.analysis.fig_critical_rate import PART
from gspo.analysis.fig_sweep import arm as replayed
from gspo.analysis.load import GRPO, OBJECTIVES, Data, Run
from gspo.analysis.looks import Look, looks
from gspo.analysis.stats import Interval, t_interval
from gspo.analysis.style import View
from matplotlib.axes import Axes

REFUSED = script.DOTS | script.NO_CURVES
# what a setting of --arms is called in an arm's name; "" for the value that needs no word
WORDS = {
    "policy.freeze_router": {False: "", True: "frozen router"},
    "policy.precision": {"float32": "", "bfloat16": "bfloat16"},
    "policy.head_dtype": {"float32": "", "bfloat16": "head too"},
    "policy.old_logprobs": {"step_start": "", "engine": "engine's log-probs"},
    "correction.name": {"none": "", "tis": "TIS"},
}
# (arm, the arm it is compared with): columns level, seed, difference
Pairs = dict[tuple[str, str], pd.DataFrame]


def main() -> None:
    parser = script.parser(__doc__, refused=REFUSED)
    parser.add_argument(
        "--dose", nargs="+", required=True, metavar="SETTING", help="the setting that was varied"
    )
    parser.add_argument(
        "--measured", required=True, metavar="METRIC", help="the metric that says how much of it"
    )
    parser.add_argument(
        "--arms", nargs="+", default=[], metavar="SETTING", help="settings that make an arm"
    )
    parser.add_argument(
        "--against",
        default="grpo",
        choices=OBJECTIVES,
        help="the objective that others are set beside",
    )
    parser.add_argument(
        "--also",
        nargs="+",
        default=[],
        metavar="METRIC",
        help="metrics whose means the table shows",
    )
    args = parser.parse_args()
    data = script.read(args, notes=False)
    script.print_notes(data, "unfinished", "left out", "lost")
    numbers, against = (
        measure(data, args.dose, args.measured, args.arms, args.also),
        OBJECTIVES[args.against],
    )
    paths = draw(
        data, numbers, args.dose, args.measured, args.out, script.view(args), against, args.also
    )
    tables = [
        table(numbers, args.dose, args.measured, args.also),
        difference_table(numbers, against),
        dose_table(numbers),
    ]
    print("\n".join([line for lines in tables for line in ("", *lines)] + ["", *map(str, paths)]))


# ---------------------------------------------------------------------------------------------------------
# numbers
def measure(
    data: Data, dose: list[str], metric: str, settings: list[str], also: Sequence[str] = ()
) -> pd.DataFrame:
    """Return a row per run that has finished or collapsed: level (of the dose, in words), got (the
    measured metric), objective, remedy, arm, seed, end, collapsed. Levels are in order: numbers by
    size, others by what they measured.

    Raises Refused where a setting or the metric is missing, or if runs of one level and arm differ
    in anything else.
    """
    for name in (metric, *also):
        data.check_metric(name)
    runs = [run for run in data.runs if run.finished or run.collapsed is not None]
    for key in (*dose, *settings):
        if not runs or any(key not in run.settings for run in runs):
            load.die(
                f"no finished run has a setting {key}"
                if not runs
                else f"not all runs have a setting {key}"
            )
    means = [{name: run.column(name).mean() for name in also} for run in runs]
    numbers = pd.DataFrame(
        [measured(run, dose, metric, settings) | own for run, own in zip(runs, means, strict=True)]
    )
    for (level, arm), same in numbers.groupby(["level", "arm"]):
        twice = same[same.duplicated("seed")]
        if len(twice):
            load.die(
                f"two runs of {arm} at {level}, seed {twice.iloc[0]['seed']}: name with --arms what they differ in"
            )
        if others := load.differing([runs[at] for at in same.index]):
            load.die(
                f"the runs of {arm} at {level} differ also in {', '.join(others)}: give fewer runs"
            )
    return numbers.assign(place=numbers["level"].map(order(numbers).index)).sort_values(
        ["place", "arm", "seed"]
    )


def measured(run: Run, dose: list[str], metric: str, settings: list[str]) -> dict[str, object]:
    """Return one run's numbers."""
    reward, got, part = run.column("reward/mean"), run.column(metric), max(run.planned // PART, 1)
    values = [run.settings[key] for key in dose]
    name = OBJECTIVES.get(run.settings["objective.name"], run.settings["objective.name"])
    words = [
        WORDS.get(key, {}).get(run.settings[key], f"{key}={run.settings[key]}") for key in settings
    ]
    remedy = "".join(f" [{', '.join(some)}]" for some in [list(filter(None, words))] if some)
    whole = replayed(run, "", "") + remedy
    return {
        "level": values[0]
        if len(values) == 1
        else ", ".join(str(value) for value in values if value != "none"),
        "got": got[got.index <= part].mean() if len(got) else np.nan,
        "objective": name,
        "remedy": whole.removeprefix(name),
        "arm": whole,
        "seed": run.seed,
        "end": reward.tail(part).mean(),
        "collapsed": run.collapsed is not None,
    }


def order(numbers: pd.DataFrame) -> list:
    """Return the levels of the dose from the least to the largest."""
    if all(isinstance(level, Real) for level in numbers["level"]):
        return sorted(numbers["level"].unique())
    return numbers.groupby("level")["got"].mean().fillna(0).sort_values().index.tolist()


def compared(numbers: pd.DataFrame, against: str = GRPO) -> tuple[Pairs, Pairs]:
    """Return the paired differences of the rewards at the end: objectives minus `against`, and
    remedies minus none.
    """
    arms = numbers.drop_duplicates("arm").set_index("arm")
    named = {(row.objective, row.remedy): arm for arm, row in arms.iterrows()}
    objectives = [
        (arm, named.get((against, row.remedy)))
        for arm, row in arms.iterrows()
        if row.objective != against
    ]
    remedies = [(arm, named.get((row.objective, ""))) for arm, row in arms.iterrows() if row.remedy]
    return tuple(
        {(a, b): differences(numbers, a, b) for a, b in pairs if b}
        for pairs in (objectives, remedies)
    )


def differences(numbers: pd.DataFrame, a: str, b: str) -> pd.DataFrame:
    """Return the differences a - b of the seeds that both have at a level: columns level, seed,
    difference.
    """
    keys = ["place", "level", "seed"]
    both = numbers[numbers["arm"] == a].merge(
        numbers[numbers["arm"] == b], on=keys, suffixes=("", "_b")
    )
    return both.assign(difference=both["end"] - both["end_b"])[[*keys, "difference"]]


def intervals(pair: pd.DataFrame) -> list[tuple[int, object, Interval]]:
    """Return the place, the level and the interval of the difference at each level."""
    return [
        (place, level, t_interval(rows["difference"].to_numpy()))
        for (place, level), rows in grouped(pair)
    ]


def grouped(rows: pd.DataFrame) -> Iterable:
    return rows.groupby(["place", "level"])


# ----------------------------------------------------------------------------------------------------------
# tables
def table(
    numbers: pd.DataFrame, dose: list[str], metric: str, also: Sequence[str] = ()
) -> list[str]:
    """Return a Markdown row per level and arm."""
    rows = [
        [
            " ".join(dose),
            "arm",
            "seeds",
            f"{metric}, first fifth",
            "reward, last fifth",
            "collapsed",
            *also,
        ]
    ]
    for (_, level, arm), runs in numbers.groupby(["place", "level", "arm"]):
        row = [
            f"{level}",
            arm,
            str(len(runs)),
            f"{runs['got'].mean():.4g}",
            t_interval(runs["end"].to_numpy()).text(),
        ]
        means = [f"{runs[name].mean():.4g}" for name in also]
        rows.append([*row, f"{runs['collapsed'].sum()} of {len(runs)}", *means])
    return aligned_table(rows)


def difference_table(numbers: pd.DataFrame, against: str = GRPO) -> list[str]:
    """Return a Markdown row per level and pair of arms that differ in the objective or in the
    remedy alone.
    """
    rows = [["dose", "difference of the reward, last fifth", "mean and 95 % interval", "p"]]
    for pairs in compared(numbers, against):
        for (a, b), pair in pairs.items():
            rows += [
                [f"{level}", f"{a} - {b}", i.text("+.3f"), p_text(i)]
                for _, level, i in intervals(pair)
            ]
    return aligned_table(rows)


def dose_table(numbers: pd.DataFrame) -> list[str]:
    """Return a Markdown row per arm and level: the difference to the same arm's least dose, paired
    by seed.
    """
    rows = [["arm", "dose", "reward, minus that at its least dose", "p"]]
    for arm, runs in numbers.groupby("arm"):
        ends = runs.pivot(index="seed", columns="place", values="end")
        names = dict(zip(runs["place"], runs["level"], strict=True))
        for place in ends.columns[1:]:
            each = (ends[place] - ends[ends.columns[0]]).dropna().to_numpy()
            if len(each):
                interval = t_interval(each)
                head = f"{names[place]} - {names[ends.columns[0]]}"
                rows.append([arm, head, interval.text("+.3f"), p_text(interval)])
    return aligned_table(rows)


def p_text(interval: Interval) -> str:
    return f"{interval.p():.2g}" if interval.seeds > 1 else "-"


# ----------------------------------------------------------------------------------------------------------
# figure
def draw(
    data: Data,
    numbers: pd.DataFrame,
    dose: list[str],
    metric: str,
    out: Path,
    view: View | None = None,
    against: str = GRPO,
    also: Sequence[str] = (),
) -> list[Path]:
    """Draw the reward and the collapsed share of every arm above, and the differences of pairs of
    arms below. Where there are no remedies, the first metric of `also` stands in their place."""
    view, own = view or View(), looks(sorted(numbers["arm"].unique()))
    figure = style.canvas(7.4, view)
    panels = figure.subplot_mosaic("ab;nn;cd", height_ratios=(1, 0.1 + 0.06 * len(own), 1))
    upper, shares, names, *lower = panels.values()
    more = also[0] if also and not compared(numbers, against)[1] else ""
    for place, (arm, runs) in enumerate(numbers.groupby("arm")):
        shift = 0.05 * (place - (len(own) - 1) / 2)  # so that intervals do not hide each other
        for ax, column in ((upper, "end"), (lower[1], more)) if more else ((upper, "end"),):
            cells = [
                (at + shift, t_interval(cell[column].to_numpy()))
                for at, cell in runs.groupby("place")
            ]
            along(ax, cells, own[arm])
        share = runs.groupby("place")["collapsed"].mean()
        shares.plot(share.index + shift, share, lw=1.6, ms=5, **own[arm].plot())
    shares.set_ylim(-0.05, 1.05)
    for ax, pairs in zip(lower, compared(numbers, against), strict=True):
        for place, ((arm, _), pair) in enumerate(pairs.items()):
            shift = 0.07 * (place - (len(pairs) - 1) / 2)
            along(ax, [(at + shift, interval) for at, _, interval in intervals(pair)], own[arm])
        ax.axhline(0, color=style.MUTED, lw=1, zorder=1)
        ax.set_visible(bool(pairs or more))
    titles = (
        "Reward at the end",
        "Collapsed runs",
        f"Each objective minus {against}",
        more or "Each remedy minus none",
    )
    last = "mean of all batches" if more else "difference, same objective"
    paired = "difference, paired by seed" if more else "difference, same remedy"
    labels = "last fifth of the batches", "share of the seeds", paired, last
    ticks = [
        tick(level, cell.groupby("arm")["got"].mean()) for (_, level), cell in grouped(numbers)
    ]
    for ax, title, label in zip((upper, shares, *lower), titles, labels, strict=True):
        ax.set(title=title, ylabel=label, xlabel=f"{' and '.join(dose)}; below it\n{metric}")
        ax.set_xticks(range(len(ticks)), ticks)
    names.set_axis_off()
    style.key(names, own, loc="center", ncols=min(len(own), 4))
    study = Path(str(data.runs[0].settings.get("study"))).name
    return style.save(figure, out, f"fig_dose_{study}", caption(data, numbers, metric), view)


def along(ax: Axes, points: list[tuple[float, Interval]], look: Look) -> None:
    """Draw means with their intervals at these places, joined by a line."""
    means = np.array([interval.mean for _, interval in points])
    spans = np.nan_to_num([(i.mean - i.low, i.high - i.mean) for _, i in points])
    places = [place for place, _ in points]
    ax.errorbar(places, means, yerr=spans.T, lw=1.6, ms=5, elinewidth=1, **look.plot())


def tick(level: object, got: pd.Series) -> str:
    """Return the label of a level: its words, and below them what was measured there. That is the
    mean over the arms, or the least and the largest arm where one is more than twice the other."""
    word = f"{level:g}" if isinstance(level, Real) else str(level)
    got = got.dropna()
    if got.empty:
        return word
    if got.min() > 0 and got.max() > 2 * got.min():
        return f"{word}\n{got.min():.2g} to {got.max():.2g}"
    return f"{word}\n{got.mean():.3g}"


def caption(data: Data, numbers: pd.DataFrame, metric: str) -> str:
    """Return the caption: what was run and what is drawn."""
    counts = numbers.groupby(["place", "arm"])["seed"].count()
    seeds = (
        f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    )
    lengths = sorted({run.planned for run in data.runs})
    batches = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return (
        f"{len(numbers)} runs of {batches} rollout batches, {seeds} seeds per arm and dose. Under each dose stands "
        f"{metric} in the first fifth of the batches: the mean over the arms, or its least and largest arm. Bars: 95 % "
        "intervals over seeds; "
        "collapse by the registered rule. Differences are paired by seed."
    )


if __name__ == "__main__":
    script.command(main)
