"""Critical learning rate: how much further can GSPO be pushed than GRPO, and is that the ratio or
the size of the step?

    gspo figure critical-rate analysis/data/critical_rate.parquet

Left: the reward at the end against the learning rate. Middle: the share of collapsed runs, with the
fitted logistic curves and the rates at which half of the runs collapse (critical_rate.py). Right:
the reward at the end against the measured KL of an update, a point per arm and rate: arms that
differ only in the size of their steps lie on one line. Runs of one objective with several clip
ranges are arms of their own, for example GRPO with the paper's range and with the one that gives it
GSPO's KL. Prints Markdown tables, with the paired differences at each rate; writes
fig_critical_rate.pdf and .png. Metrics: reward/mean, kl/old_k3.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from gspo.analysis import load, script, style
from gspo.analysis.blocks import aligned_table
from gspo.analysis.critical_rate import Counts, fit, probability, ratio
from gspo.analysis.fig_sweep import arm as base_arm
from gspo.analysis.load import Data, Run
from gspo.analysis.looks import Look, looks, tint
from gspo.analysis.stats import t_interval
from gspo.analysis.style import View
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gspo.statistics import sign_flip_p

RATE, CLIP = "optim.lr", "objective.clip_low"
REFUSED = script.DOTS | script.NO_CURVES | {"log-x": "its x axes are logarithmic already"}
PART = 5  # start and end are the means of the first and of the last fifth of the batches


def main() -> None:
    args = script.parser(__doc__, refused=REFUSED).parse_args()
    data = load.load(args.runs, script.chosen(args))
    script.print_notes(data, "unfinished", "left out", "lost")
    numbers = measure(data)
    ratios = compare(numbers)
    paths = draw(data, numbers, ratios, args.out, script.view(args))
    tables = [table(numbers), difference_table(numbers), ratio_table(numbers, ratios)]
    print("\n".join([line for lines in tables for line in ("", *lines)] + ["", *map(str, paths)]))


# ---------------------------------------------------------------------------------------------------------
# numbers
def measure(data: Data) -> pd.DataFrame:
    """Return a row per run that has finished or collapsed: arm, seed, rate, start, end, collapsed,
    kl.
    """
    runs = [run for run in data.runs if run.finished or run.collapsed is not None]
    if not runs:
        load.die("fig_critical_rate needs runs that have finished or collapsed")
    others = [
        key
        for key in load.differing(runs)
        if not key.startswith(("objective.", "policy.routing_replay", RATE))
    ]
    if others:
        load.die(
            f"the runs differ also in {', '.join(others)}: give those that differ in the learning rate alone"
        )
    ranges = {(base_arm(run, RATE, ""), run.settings.get(CLIP)) for run in runs}
    several = {name for name, count in Counter(name for name, _ in ranges).items() if count > 1}
    numbers = pd.DataFrame([measured(run, several) for run in runs])
    twice = numbers[numbers.duplicated(["arm", "seed", "rate"])]
    if len(twice):
        load.die(
            f"two runs of {twice.iloc[0]['arm']}, seed {twice.iloc[0]['seed']}, rate {twice.iloc[0]['rate']:g}"
        )
    return numbers.sort_values(["arm", "rate", "seed"], ignore_index=True)


def measured(run: Run, several: set[str]) -> dict[str, object]:
    """Return one run's numbers. `several` are the arms with several clip ranges, which then stand
    in their names.
    """
    name, reward, kl = base_arm(run, RATE, ""), run.column("reward/mean"), run.column("kl/old_k3")
    part = max(run.planned // PART, 1)
    return {
        "arm": f"{name} [clip range {run.settings.get(CLIP)}]" if name in several else name,
        "seed": run.seed,
        "rate": float(run.settings[RATE]),
        "start": reward.head(part).mean(),
        "end": reward.tail(part).mean(),
        "collapsed": run.collapsed is not None,
        "kl": kl.mean() if len(kl) else np.nan,
    }


def in_order(numbers: pd.DataFrame) -> list[str]:
    """Return the arms' names in the order in which the paper has them ahead."""
    return sorted(
        numbers["arm"].unique(),
        key=lambda arm: (not arm.startswith("GSPO"), "Replay" not in arm, arm),
    )


def counted(numbers: pd.DataFrame) -> tuple[Counts, list[str]]:
    """Return the runs for the fit, and the arms' names in their order there."""
    arms = in_order(numbers)
    rates, seeds = np.sort(numbers["rate"].unique()), np.sort(numbers["seed"].unique())
    runs, collapsed = np.zeros((2, len(seeds), len(arms), len(rates)), int)
    for row in numbers.itertuples():
        at = np.searchsorted(seeds, row.seed), arms.index(row.arm), np.searchsorted(rates, row.rate)
        runs[at], collapsed[at] = 1, row.collapsed
    return Counts(rates, runs, collapsed), arms


def compare(numbers: pd.DataFrame) -> dict[tuple[str, str], tuple]:
    """Return for each pair of arms with the same seeds the ratio of their critical rates: its
    interval and its p.
    """
    counts, arms = counted(numbers)
    if len(counts.rates_R) < 2:
        return {}
    seeds = {arm: set(numbers.loc[numbers["arm"] == arm, "seed"]) for arm in arms}
    pairs = [(a, b) for a, b in combinations(arms, 2) if seeds[a] == seeds[b]]
    return {(a, b): ratio(counts, arms.index(a), arms.index(b)) for a, b in pairs}


def difference_table(numbers: pd.DataFrame) -> list[str]:
    """Return a Markdown row per rate and pair of arms: the paired difference of the rewards at the
    end.
    """
    rows = [
        [
            "learning rate",
            "difference of the reward, last fifth",
            "mean and 95 % interval",
            "t",
            "p",
        ]
    ]
    arms = in_order(numbers)
    for rate, cell in numbers.groupby("rate"):
        ends = cell.pivot(index="seed", columns="arm", values="end")
        for a, b in combinations([arm for arm in arms if arm in ends], 2):
            each = (ends[a] - ends[b]).dropna().to_numpy()
            if len(each) > 1:
                mean, error = t_interval(each), each.std(ddof=1) / np.sqrt(len(each))
                t = f"{mean.mean / error:.1f}" if error > 0 else "-"
                rows.append(
                    [f"{rate:g}", f"{a} - {b}", mean.text("+.3f"), t, f"{sign_flip_p(each):.2g}"]
                )
    return aligned_table(rows)


def table(numbers: pd.DataFrame) -> list[str]:
    """Return a Markdown row per arm and rate."""
    rows = [
        [
            "objective",
            "learning rate",
            "seeds",
            "reward, first fifth",
            "last fifth",
            "collapsed",
            "KL of an update",
        ]
    ]
    for (arm, rate), runs in numbers.groupby(["arm", "rate"]):
        row = [arm, f"{rate:g}", str(len(runs)), f"{runs['start'].mean():.3f}"]
        row += [
            t_interval(runs["end"].to_numpy()).text(),
            f"{runs['collapsed'].sum()} of {len(runs)}",
        ]
        rows.append([*row, f"{runs['kl'].mean():.2g}"])
    return aligned_table(rows)


def ratio_table(numbers: pd.DataFrame, ratios: dict) -> list[str]:
    """Return a Markdown row per arm with its critical rate, and one per pair with the ratio."""
    counts, arms = counted(numbers)
    if len(counts.rates_R) < 2:
        return ["Critical rates need runs at two learning rates or more."]
    _, critical = fit(counts.rates_R, counts.runs_SAR.sum(0), counts.collapsed_SAR.sum(0))
    rows = [["arms", "critical learning rate, or ratio with its 95 % interval", "p"]]
    rows += [
        [arm, beyond(rate, numbers["rate"]), ""] for arm, rate in zip(arms, critical, strict=True)
    ]
    rows += [[f"{a} / {b}", value.text(".2f"), f"{p:.2g}"] for (a, b), (value, p) in ratios.items()]
    return aligned_table(rows)


def beyond(rate: float, rates: pd.Series) -> str:
    """Return a critical rate in words: where it lies outside of the rates that were run, only on
    which side.
    """
    if rate > rates.max():
        return f"above {rates.max():g}"
    return f"below {rates.min():g}" if rate < rates.min() else f"{rate:.3g}"


# ----------------------------------------------------------------------------------------------------------
# figure
def draw(
    data: Data, numbers: pd.DataFrame, ratios: dict, out: Path, view: View | None = None
) -> list[Path]:
    """Draw the three panels."""
    view, own = view or View(), looks(sorted(numbers["arm"].unique()))
    figure = style.canvas(3.6, view)
    axes = figure.subplots(1, 3, width_ratios=[1.1, 1.1, 1])
    ends(axes[0], numbers, own)
    shares(axes[1], numbers, own)
    if numbers["kl"].notna().any():
        against_kl(axes[2], numbers, own)
    style.key(axes[0], dict(sorted(own.items(), reverse=True)), loc="lower left")
    return style.save(figure, out, "fig_critical_rate", caption(data, numbers, ratios), view)


def rate_axis(ax: Axes, rates: np.ndarray) -> None:
    """Set up a logarithmic axis with a tick at every rate."""
    ax.set_xscale("log")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(rates, [f"{1e4 * rate:.3g}" for rate in rates])
    ax.set_xlabel("learning rate ($10^{-4}$)")


def ends(ax: Axes, numbers: pd.DataFrame, own: dict[str, Look]) -> None:
    """Draw the reward at the end against the rate: the mean with its 95 % interval over seeds."""
    for arm, runs in numbers.groupby("arm"):
        means = [(rate, t_interval(cell["end"].to_numpy())) for rate, cell in runs.groupby("rate")]
        rates, mean = (
            [rate for rate, _ in means],
            np.array([interval.mean for _, interval in means]),
        )
        spans = [(i.mean - i.low, i.high - i.mean) for _, i in means]
        ax.errorbar(
            rates,
            mean,
            yerr=np.nan_to_num(np.transpose(spans)),
            lw=1.8,
            ms=5,
            elinewidth=1,
            **own[arm].plot(),
        )
    start = numbers.groupby("rate")["start"].mean()
    ax.plot(start.index, start, color=style.MUTED, lw=1, ls="--")
    rate_axis(ax, np.sort(numbers["rate"].unique()))
    ax.set_title("Reward at the end")
    ax.set_ylabel("training reward, last fifth")


def shares(ax: Axes, numbers: pd.DataFrame, own: dict[str, Look]) -> None:
    """Draw the share of collapsed runs against the rate, with the fitted curves."""
    counts, arms = counted(numbers)
    slope, critical = fit(counts.rates_R, counts.runs_SAR.sum(0), counts.collapsed_SAR.sum(0))
    rates = counts.rates_R
    fine = np.geomspace(rates[0], rates[-1], 200)
    for arm, at in zip(arms, critical, strict=True):
        shown = numbers[numbers["arm"] == arm].groupby("rate")["collapsed"].mean()
        look = own[arm]
        ax.plot(shown.index, shown, look.marker, ms=5, color=look.colour, mec="white", mew=0.5)
        if np.isfinite(at):
            ax.plot(fine, probability(fine, slope, at), color=look.colour, ls=look.line, lw=1.6)
        if rates[0] <= at <= rates[-1]:
            ax.plot([at, at], [0, 0.5], color=tint(look.colour, 0.6), lw=0.9)
    ax.axhline(0.5, color=style.FAINT, lw=0.8, zorder=0)
    ax.set_ylim(-0.05, 1.05)
    rate_axis(ax, rates)
    ax.set_title("Collapsed runs")
    ax.set_ylabel("share of the seeds")


def against_kl(ax: Axes, numbers: pd.DataFrame, own: dict[str, Look]) -> None:
    """Draw the reward at the end against the KL of an update, a point per arm and rate, joined in
    their order.
    """
    for arm, runs in numbers.groupby("arm"):
        cells = runs.groupby("rate")[["kl", "end"]].mean()
        ax.plot(cells["kl"], cells["end"], lw=1.2, ms=5.5, **own[arm].plot())
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high > 20 * low else (1.0, 2.0, 5.0)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.set_xlabel("KL of an update (kl/old_k3)")
    ax.set_title("Reward against step size")


def caption(data: Data, numbers: pd.DataFrame, ratios: dict) -> str:
    """Return the caption: what was run, what is drawn, and the ratios."""
    run, count = data.runs[0], numbers.groupby(["arm", "rate"])["seed"].count()
    counted = f"{count.min()}" if count.min() == count.max() else f"{count.min()} to {count.max()}"
    words = (
        f"{len(numbers)} runs of {run.planned} rollout batches in {run.settings.get('trainer.minibatches')} "
        f"mini-batches, {counted} seeds per arm and rate. Left: means with 95 % intervals over seeds; dashed: the "
        "reward of the first fifth of the batches. Middle: the share of the seeds that collapsed by the registered "
        "rule, and logistic curves with one slope. Right: means over seeds, joined in the order of the rates."
    )
    found = [
        f"{a} / {b}: {value.mean:.2f} [{value.low:.2f}, {value.high:.2f}], p = {p:.2g}"
        for (a, b), (value, p) in ratios.items()
    ]
    return (
        f"{words}\nRatio of the critical rates, 95 % interval, exact p: {'; '.join(found)}."
        if found
        else words
    )


if __name__ == "__main__":
    script.command(main)
