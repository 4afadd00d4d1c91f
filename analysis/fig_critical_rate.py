"""Critical learning rate: how much higher is GSPO's than GRPO's, and why?

    gspo figure critical-rate analysis/data/critical_rate.parquet

Is it the ratio or the size of the step? Left: the reward at the end against the learning rate.
Middle: the share of collapsed runs, with the fitted logistic curves and the rates at which half of
the runs collapse (critical_rate.py). Right: the reward at the end against the measured KL of an
update, a point per arm and rate. Arms that differ only in the size of their steps
lie on the same line.

Runs of an objective with several clip ranges are arms of their own, for example GRPO with the
paper's range and with the range that gives it GSPO's KL. Prints Markdown tables, with the paired
differences at each rate. With looks=[20,30,40] the runs are a sequential design, which is judged at
these numbers of seeds (sequential.py). Writes fig_critical_rate.pdf and .png. Metrics: reward/mean,
kl/old_k3.
"""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from gspo.analysis import load, script, style
from gspo.analysis.arm_styles import ArmStyles, arm_styles, tint
from gspo.analysis.blocks import markdown_table
from gspo.analysis.critical_rate import probability
from gspo.analysis.grid import (
    cell_intervals,
    check_alike,
    collapsed_count,
    coverage,
    difference_cells,
    interval_line,
    part_length,
    range_suffixes,
    refuse_repeated,
    run_numbers,
    settled_runs,
    span,
)
from gspo.analysis.load import Data
from gspo.analysis.rate_ratios import (
    Ratios,
    collapse_counts,
    compare,
    decision,
    fit_pooled,
    in_order,
    incomplete_seeds,
)
from gspo.analysis.runs import RunsError
from gspo.analysis.sequential import Design, chosen_design
from gspo.analysis.stats import LEVEL, number, t_interval
from gspo.analysis.style import DEFAULTS, FigureOptions
from gspo.io.arguments import command_options, option
from gspo.statistics import standard_error

RATE = "optim.lr"
REFUSED = script.DOTS | script.NO_CURVES | {"log_x": "its x axes are logarithmic already"}


@dataclass(frozen=True, kw_only=True)
class Options(script.Options):
    """The options of this figure."""

    looks: tuple[int, ...] = option((), "numbers of seeds at which a sequential design is judged")
    same: float = option(0.0, "two rates within this share of each other are the same", least=0)


def main() -> None:
    options = command_options(Options, __doc__, REFUSED)
    if options.same and not options.looks:
        raise RunsError("same= is of a sequential design: give looks too, as in looks=[20,30,40]")
    design = chosen_design(options.looks)
    data = load.load(options.paths, options.where, options)
    script.print_notes(data, *script.ABOUT_ENDS)
    numbers = measure(data)
    ratios = compare(numbers, design)
    paths = draw(data, numbers, ratios, options.out, options)
    tables = [table(numbers), difference_table(numbers), ratio_table(numbers, ratios)]
    if design:
        tables.append(decision_table(ratios, design, options.same))
        tables.append(incomplete_seeds(numbers))
    script.print_lines(*tables, paths)


# ------------------------------------------------------------------------------------------------
# numbers
def measure(data: Data) -> pd.DataFrame:
    """Return a row per run that has finished or collapsed.

    The columns are arm, seed, rate, start, end, collapsed and kl.
    """
    runs = settled_runs(data, (RATE,))
    expected = ("objective.", "policy.routing_replay", RATE)
    check_alike(runs, expected, "give those that differ in the learning rate alone")
    rows = []
    for run in runs:
        rate = run.settings[RATE]
        if not isinstance(rate, int | float) or rate <= 0:
            raise RunsError(f"{run.path}: {RATE}={rate} must be a number above 0")
        part = part_length(run)
        row = run_numbers(run, part, part, {"kl": "kl/old_k3"})
        row["arm"] = load.base_arm(run.settings)
        row["rate"] = float(rate)
        rows.append(row)
    numbers = pd.DataFrame(rows)
    numbers["arm"] += range_suffixes(runs, numbers, [])
    for arm, group in numbers.groupby("arm"):
        of_arm = [runs[index] for index in group.index]
        check_alike(of_arm, (RATE,), "choose with where.KEY=VALUE", f"the runs of {arm}")
    refuse_repeated(numbers, ["rate"], "choose one with where.KEY=VALUE")
    return numbers.sort_values(["arm", "rate", "seed"], ignore_index=True)


# ------------------------------------------------------------------------------------------------
# tables
def decision_table(ratios: Ratios, design: Design, margin: float) -> list[str]:
    """Return a Markdown row per pair of arms: the look's interval, p, level and decision."""
    rows = [["look", "pair", "ratio and interval at the level", "p", "level", "decision"]]
    for names, rate_ratio in ratios.items():
        interval = rate_ratio.interval
        look = f"{interval.seeds} of {design.maximum} seeds"
        verdict = decision(rate_ratio, names, design, margin)
        cells = [rate_ratio.text(), f"{rate_ratio.p:.2g}", f"{interval.level:.2g}", verdict]
        rows.append([look, " / ".join(names), *cells])
    return markdown_table(rows)


def difference_table(numbers: pd.DataFrame) -> list[str]:
    """Return a Markdown row per rate and pair of arms: the paired difference at the end."""
    difference = "difference of the reward, last fifth"
    rows = [["learning rate", difference, "mean and 95 % interval", "t", "p"]]
    ends = numbers.pivot(index=["rate", "seed"], columns="arm", values="end")
    pairs = list(combinations(in_order(numbers), 2))
    for rate, cell in ends.groupby(level="rate"):
        for a, b in pairs:
            paired = (cell[a] - cell[b]).dropna()
            if len(paired) < 2:
                continue
            interval = t_interval(paired)
            mean, p = difference_cells(interval)
            error = standard_error(paired)
            t = "-"
            if error > 0:
                t = f"{interval.mean / error:.1f}"
            rows.append([f"{rate:g}", f"{a} - {b}", mean, t, p])
    return markdown_table(rows)


def table(numbers: pd.DataFrame) -> list[str]:
    """Return a Markdown row per arm and rate."""
    head = ["objective", "learning rate", "seeds", "reward, first fifth", "last fifth"]
    rows = [[*head, "collapsed", "KL of an update"]]
    for (arm, rate), runs in numbers.groupby(["arm", "rate"]):
        row = [arm, f"{rate:g}", len(runs)]
        row.append(number(runs["start"].mean(), ".3f"))
        row.append(t_interval(runs["end"]).text())
        row.append(collapsed_count(runs))
        row.append(number(runs["kl"].mean(), ".2g"))
        rows.append(row)
    return markdown_table(rows)


def ratio_table(numbers: pd.DataFrame, ratios: Ratios) -> list[str]:
    """Return a Markdown row per arm with its critical rate, and a row per pair with the ratio."""
    counts, arms = collapse_counts(numbers)
    if len(counts.rates_R) < 2:
        return ["Critical rates need runs at two learning rates or more."]
    _, critical_A = fit_pooled(counts)
    rows = [["arms", f"critical learning rate, or ratio with its {interval_words(ratios)}", "p"]]
    for arm, rate in zip(arms, critical_A, strict=True):
        text = rate_text(rate, numbers.loc[numbers["arm"] == arm, "rate"])
        rows.append([arm, text, ""])
    for (a, b), rate_ratio in ratios.items():
        rows.append([f"{a} / {b}", rate_ratio.text(), f"{rate_ratio.p:.2g}"])
    return markdown_table(rows)


def interval_words(ratios: Ratios) -> str:
    """Return "95 % interval", or the words for pairs at different looks of a design."""
    levels = {rate_ratio.interval.level for rate_ratio in ratios.values()} or {LEVEL}
    if len(levels) > 1:
        return "interval at the level of the pair's look"
    return f"{coverage(levels.pop())} interval"


def rate_text(rate: float, rates: pd.Series) -> str:
    """Return a critical rate in words; outside the rates that were run, only on which side."""
    if rate > rates.max():
        return f"above {rates.max():g}"
    if rate < rates.min():
        return f"below {rates.min():g}"
    return number(rate, ".3g")


# ------------------------------------------------------------------------------------------------
# figure
def draw(
    data: Data,
    numbers: pd.DataFrame,
    ratios: Ratios,
    out: Path,
    options: FigureOptions = DEFAULTS,
) -> list[Path]:
    """Draw the three panels."""
    styles = arm_styles(sorted(numbers["arm"].unique()))
    figure = style.canvas(3.6, options)
    panels = figure.subplots(1, 3, width_ratios=[1.1, 1.1, 1])
    end_panel, share_panel, kl_panel = panels
    draw_ends(end_panel, numbers, styles)
    draw_shares(share_panel, numbers, styles)
    if numbers["kl"].notna().any():
        draw_against_kl(kl_panel, numbers, styles)
    falling = dict(sorted(styles.items(), reverse=True))
    style.legend(end_panel, falling, loc="lower left")
    text = caption(data, numbers, ratios)
    return style.save(figure, out, "fig_critical_rate", text, options)


def rate_axis(ax: Axes, rates: np.ndarray) -> None:
    """Set up a logarithmic axis with a tick at every rate."""
    ax.set_xscale("log")
    ax.xaxis.minorticks_off()
    ax.set_xticks(rates, [f"{1e4 * rate:.3g}" for rate in rates])
    ax.set_xlabel("learning rate ($10^{-4}$)")


def draw_ends(ax: Axes, numbers: pd.DataFrame, styles: ArmStyles) -> None:
    """Draw the reward at the end against the rate, with its 95 % interval over seeds."""
    for arm, runs in numbers.groupby("arm"):
        points = cell_intervals(runs, "rate", "end")
        interval_line(ax, points, styles[arm], line_width=1.8)
    starts = numbers.groupby("rate")["start"].mean()
    ax.plot(starts, color=style.MUTED, lw=1, ls="--")
    rate_axis(ax, starts.index)
    ax.set(title="Reward at the end", ylabel="training reward, last fifth")


def draw_shares(ax: Axes, numbers: pd.DataFrame, styles: ArmStyles) -> None:
    """Draw the share of collapsed runs against the rate, with the fitted curves."""
    counts, arms = collapse_counts(numbers)
    slope, critical_A = fit_pooled(counts)
    rates = counts.rates_R
    fine_rates = np.geomspace(rates[0], rates[-1], 200)
    shares = numbers.groupby(["arm", "rate"])["collapsed"].mean()
    for arm, critical in zip(arms, critical_A, strict=True):
        share = shares[arm]
        line = styles[arm]
        style.dots(ax, share.index, share, line.colour, line.marker)
        if np.isfinite(critical):
            fitted = probability(fine_rates, slope, critical)
            curve = {"color": line.colour, "ls": line.line, "lw": 1.6}
            ax.plot(fine_rates, fitted, **curve)
        if rates[0] <= critical <= rates[-1]:
            pale = tint(line.colour, 0.6)
            ax.plot([critical, critical], [0, 0.5], color=pale, lw=0.9)
    ax.axhline(0.5, color=style.FAINT, lw=0.8, zorder=0)
    ax.set_ylim(-0.05, 1.05)
    rate_axis(ax, rates)
    ax.set(title="Collapsed runs", ylabel="share of the seeds")


def draw_against_kl(ax: Axes, numbers: pd.DataFrame, styles: ArmStyles) -> None:
    """Draw the reward at the end against the KL of an update, a point per arm and rate.

    The points of an arm are joined in the order of the rates.
    """
    means = numbers.groupby(["arm", "rate"])[["kl", "end"]].mean()
    for arm, line in styles.items():
        cells = means.loc[arm]
        marks = line.plot_options()
        ax.plot(cells["kl"], cells["end"], lw=1.2, ms=5.5, **marks)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    multiples = [1, 2, 5]
    if high > 20 * low:
        multiples = [1, 3]
    style.round_ticks(ax, LogLocator(subs=multiples))
    ax.set(title="Reward against step size", xlabel="KL of an update (kl/old_k3)")


def caption(data: Data, numbers: pd.DataFrame, ratios: Ratios) -> str:
    """Return the caption, which describes the runs, the panels and the ratios."""
    run = data.runs[0]
    minibatches = run.settings.get("trainer.minibatches")
    seeds = span(numbers.groupby(["arm", "rate"]).size())
    text = (
        f"{len(numbers)} runs of {run.planned} rollout batches in {minibatches} mini-batches, "
        f"{seeds} seeds per arm and rate. "
        "Left: means with 95 % intervals over seeds; dashed: the reward of the first fifth of the "
        "batches. Middle: the share of the seeds that collapsed by the registered rule, and "
        "logistic curves with one slope. Right: means over seeds, joined in the order of the rates."
    )
    ratio_texts = []
    for (a, b), rate_ratio in ratios.items():
        ratio_texts.append(f"{a} / {b}: {rate_ratio.text()}, p = {rate_ratio.p:.2g}")
    if ratio_texts:
        title = f"Ratio of the critical rates, {interval_words(ratios)}, permutation p"
        text += f"\n{title}: {'; '.join(ratio_texts)}."
    return text


if __name__ == "__main__":
    script.command(main)
