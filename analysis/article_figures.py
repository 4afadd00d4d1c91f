"""The figures of the article (article.py): a row of panels for each study, drawn from its numbers.

The panels are those of `gspo figure dose`, in a size that fits the page. The comparison at the
edge, the critical rates and the early warnings are drawn by their own figures.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gspo.analysis import (
    claims,
    doses,
    early_warning,
    fig_contrast,
    fig_critical_rate,
    fig_dose,
    panels,
    rate_ratios,
    style,
    warning_rules,
    warning_worth,
)
from gspo.analysis.arm_styles import ArmStyles, arm_style, arm_styles
from gspo.analysis.article_doses import PRECISIONS, ends_of, measured
from gspo.analysis.article_numbers import PAPER_RANGE, QUARTER_RANGE, study
from gspo.analysis.grid import interval_line
from gspo.analysis.load import GRPO, GRPO_R2, GSPO, GSPO_TOKEN, Data
from gspo.analysis.stats import t_interval
from gspo.analysis.style import FigureOptions

# Inches. The page's text is 6.9 inches wide, so 8 points are printed as 6.6.
WIDTH = 8.4
OPTIONS = FigureOptions(formats=("pdf",), caption=False, width=WIDTH)
ROW_HEIGHT = 2.35
SIGNALS_SHOWN = 9  # of the early warnings, those with the largest AUROC
Panel = Callable[[Axes, pd.DataFrame, ArmStyles], None]


def draw_all(folder: Path, out: Path) -> list[Path]:
    """Draw every figure of the article from the recorded studies of a folder."""
    contrast = [study(folder, name) for name in ("comfortable", "paper_ranges", "edge_rate")]
    paths = fig_contrast.draw(contrast, out, OPTIONS)
    data = study(folder, "critical_rate")
    runs = fig_critical_rate.measure(data)
    paths += fig_critical_rate.draw(data, runs, rate_ratios.compare(runs), out, OPTIONS)
    paths += style.save(sums_alone(study(folder, "math_edge")), out, "sums_alone", "", OPTIONS)
    for letter, draw in {"B": staleness, "C": mismatch, "D": routing, "E": tools}.items():
        figure = draw(measured(letter, folder))
        paths += style.save(figure, out, f"study_{letter}", "", OPTIONS)
    paths += style.save(rounding(measured("F", folder)), out, "study_F", "", OPTIONS)
    paths += warnings(folder, out)
    return paths


def sums_alone(data: Data) -> Figure:
    """Draw the rewards on sums alone, and GSPO minus each of its rivals, a dot per seed."""
    runs = fig_critical_rate.measure(data)
    styles = arm_styles(sorted(runs["arm"].unique()))
    figure = style.canvas(ROW_HEIGHT + 0.2, OPTIONS)
    curve_panel, difference_panel = figure.subplots(1, 2)
    for arm in data.arms:
        name = arm
        if arm.startswith(f"{GRPO} ["):
            name = f"{GRPO} [clip range {data.of(arm)[0].clip_range[0]}]"
        panels.curve(curve_panel, data.table(arm, "reward/mean"), styles[name], OPTIONS)
    style.training_axis(curve_panel, 0, OPTIONS)
    curve_panel.set_title("Training reward")
    ends = runs.pivot(index="seed", columns="arm", values="end")
    panels.zero_line(difference_panel)
    difference_panel.axhspan(-claims.SAME, claims.SAME, color=style.STRIP, zorder=0)
    ticks = []
    for index, rival in enumerate((GRPO_R2, PAPER_RANGE, QUARTER_RANGE)):
        interval = t_interval(ends[GSPO] - ends[rival])
        x = [index + shift for shift in fig_dose.shifts(interval.seeds, 0.02)]
        style.dots(difference_panel, x, interval.values, style.MUTED, size=4, edge=1)
        panels.mean_bar(difference_panel, index + 0.3, interval, 11)
        label = style.arm_label(rival).replace("+\n", "+ ").replace("Routing Replay", "R2")
        ticks.append(f"- {label}")
    difference_panel.set_xticks(range(len(ticks)), ticks, fontsize=8)
    difference_panel.set_xlim(-0.5, len(ticks) - 0.3)
    difference_panel.set_title("GSPO minus its rivals, last fifth")
    style.legend_above(figure, styles, OPTIONS)
    return figure


def row(
    runs: pd.DataFrame, contents: Sequence[Panel], ticks: dict[object, str], label: str
) -> Figure:
    """Draw panels beside each other, whose x axis is the dose, and a legend above them."""
    styles = arm_styles(sorted(runs["arm"].unique()))
    figure = style.canvas(ROW_HEIGHT, OPTIONS)
    axes = figure.subplots(1, len(contents))
    for ax, panel in zip(axes, contents, strict=True):
        panel(ax, runs, styles)
        ax.set_xticks(range(len(ticks)), list(ticks.values()), fontsize=8)
        ax.set_xlabel(label)
    style.legend_above(figure, styles, OPTIONS)
    return figure


def column_panel(column: str, title: str) -> Panel:
    """Return a panel of a column of the runs: means over seeds with their intervals."""

    def draw(ax: Axes, runs: pd.DataFrame, styles: ArmStyles) -> None:
        fig_dose.draw_column(ax, runs, styles, column)
        ax.set_title(title)

    return draw


def collapsed_panel(ax: Axes, runs: pd.DataFrame, styles: ArmStyles) -> None:
    """Draw the share of collapsed runs."""
    fig_dose.draw_collapsed(ax, runs, styles)
    ax.set_title("Collapsed runs, share")


def objectives_panel(baseline: str) -> Panel:
    """Return a panel of each objective minus the baseline with the same remedy."""

    def draw(ax: Axes, runs: pd.DataFrame, styles: ArmStyles) -> None:
        objectives, _ = doses.compared(runs, baseline)
        fig_dose.draw_differences(ax, objectives, styles)
        ax.set_title(f"Reward minus {baseline}'s")

    return draw


def remedies_panel(title: str) -> Panel:
    """Return a panel of each remedy minus none of the same objective."""

    def draw(ax: Axes, runs: pd.DataFrame, styles: ArmStyles) -> None:
        _, remedies = doses.compared(runs)
        fig_dose.draw_differences(ax, remedies, styles)
        ax.set_title(title)

    return draw


END = column_panel("end", "Reward, last fifth")


def staleness(runs: pd.DataFrame) -> Figure:
    """Draw study B: the reward, and each objective minus GRPO, by the number of mini-batches."""
    ticks = {level: f"{level}" for level in sorted(runs["level"].unique())}
    return row(runs, [END, objectives_panel(GRPO)], ticks, "mini-batches per rollout batch")


def mismatch(runs: pd.DataFrame) -> Figure:
    """Draw study C: engines with weights of 32, 4, 3 and 2 bits."""
    got = 100 * runs.groupby("level")["measured"].mean()
    words = {"none": "32 bits", "fp4_e2m1": "4", "int3": "3", "int2": "2"}
    ticks = {}
    for level, word in words.items():
        ticks[level] = f"{word}\n{got[level]:.1g} %"
    contents = [END, collapsed_panel, objectives_panel(GRPO), remedies_panel("Remedy minus none")]
    return row(runs, contents, ticks, "engine's weights,\ntokens off twofold")


def routing(runs: pd.DataFrame) -> Figure:
    """Draw study D: routers whose learning rate is 1 to 60 times that of the other weights."""
    changed = 100 * (1 - runs.groupby("level")["measured"].mean())
    ticks = {}
    for level in sorted(runs["level"].unique()):
        ticks[level] = f"{level:g}\n{changed[level]:.1f} %"
    contents = [END, collapsed_panel, objectives_panel(GRPO), remedies_panel("Remedy minus none")]
    return row(runs, contents, ticks, "router's factor,\nexperts changed")


def tools(runs: pd.DataFrame) -> Figure:
    """Draw study E: a tool that writes a tenth, half or nine tenths of the tokens."""
    got = 100 * runs.groupby("level")["measured"].mean()
    ticks = {level: f"{share:.0f} %" for level, share in got.items()}
    clipped = column_panel("clip/token_active", "Clipped share of tokens")
    contents = [END, objectives_panel(GSPO), clipped]
    return row(runs, contents, ticks, "tokens that the tool wrote")


def rounding(runs: pd.DataFrame) -> Figure:
    """Draw study F: what three precisions change against float32, at two learning rates."""
    figure = style.canvas(ROW_HEIGHT, OPTIONS)
    floor_panel, clipped_panel, low_panel, high_panel = figure.subplots(1, 4)
    sequence = (GSPO, GSPO_TOKEN)
    every = ("CISPO", GRPO, *sequence)
    low, high = sorted(runs["level"].unique())
    draw_precisions(floor_panel, runs, "measured", low, sequence, against_float32=False)
    draw_precisions(clipped_panel, runs, "clip/token_outside", low, sequence)
    draw_precisions(low_panel, runs, "end", low, every)
    draw_precisions(high_panel, runs, "end", high, every)
    floor_panel.set_title("Rounding")
    clipped_panel.set_title("Clipped share")
    low_panel.set_title(f"Reward, {fig_contrast.scientific(low)}")
    high_panel.set_title(f"Reward, {fig_contrast.scientific(high)}")
    style.legend_above(figure, {arm: arm_style(arm) for arm in every}, OPTIONS)
    return figure


def draw_precisions(
    ax: Axes,
    runs: pd.DataFrame,
    column: str,
    rate: float,
    objectives: Sequence[str],
    against_float32: bool = True,
) -> None:
    """Draw a column of the runs for each precision, by default its change against float32."""
    table = ends_of(runs, column)
    shifts = fig_dose.shifts(len(objectives), 0.13)
    for shift, objective in zip(shifts, objectives, strict=True):
        points = []
        for index, precision in enumerate(PRECISIONS.values()):
            values = table[f"{objective} [{precision}]", rate]
            if against_float32:
                values = values - table[objective, rate]
            points.append((index + shift, t_interval(values)))
        interval_line(ax, points, arm_style(objective))
    if against_float32:
        ax.axhline(0, color=style.MUTED, lw=1, zorder=1)
    else:
        ax.set_ylim(bottom=0)
    ax.set_xticks(range(3), ["float32\nhead", "all\nbfloat16", "engine's\nlog-probs"], fontsize=8)


def warnings(folder: Path, out: Path) -> list[Path]:
    """Draw the signals that foresee collapses best, of the runs of the stressors."""
    frame = pd.read_parquet(folder / early_warning.RECORDED.name)
    thresholds = early_warning.shipped(frame)
    runs = warning_rules.stressor_runs(frame)
    results = early_warning.all_results(runs, thresholds)
    together = warning_worth.worth(warning_rules.together(runs, thresholds))
    return early_warning.draw(results[:SIGNALS_SHOWN], together, runs, out, OPTIONS)
