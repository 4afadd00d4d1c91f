"""The tables and the figure of every warning rule on the recorded runs of warning_rules.py.

`gspo figure early-warning rules=true` prints and draws them. warning_rules.py says which runs and
thresholds, warning_worth.py says how the intervals are computed.
"""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from gspo.analysis import style
from gspo.analysis.arm_styles import tint
from gspo.analysis.blocks import markdown_table
from gspo.analysis.foresight import MIN_VALUES, NO_VALUE, History, Value
from gspo.analysis.style import FigureOptions
from gspo.analysis.warning_logs import FRAMEWORKS, marks
from gspo.analysis.warning_rules import (
    RULES,
    STRESSORS,
    as_shipped,
    held_out,
    held_out_thresholds,
    together,
    with_metric,
)
from gspo.analysis.warning_worth import Worth, within_settings, worth

ANY = "any rule of the monitor"
LEAD = 5  # steps before the collapse, of the AUROC


# ------------------------------------------------------------------------------------------------
# tables
@dataclass
class Row:
    """A rule's worth on all runs, in both ways, and on the stressors alone."""

    rule: str
    shipped: Worth
    held_out: Worth | None  # None for several rules together
    stressors: Worth | None  # held out, on the stressors
    within: Value  # AUROC within settings, LEAD steps before the collapse
    thresholds: str  # the held-out thresholds, and the shipped threshold


def all_rows(runs: list[History], thresholds: dict[str, float]) -> list[Row]:
    """Return a row per rule, those that see most collapses first, and a row for the monitor."""
    stressors = [run for run in runs if run.seed.startswith(STRESSORS)]
    rows = []
    for rule in RULES:
        if with_metric(runs, rule):
            rows.append(
                Row(
                    rule,
                    worth(as_shipped(runs, thresholds, rule)),
                    worth(held_out(runs, rule)),
                    worth(held_out(stressors, rule)),
                    within_settings(runs, rule, LEAD),
                    threshold_cell(runs, thresholds, rule),
                )
            )
    rows.sort(key=lambda row: -row.held_out.seen.value)
    rows.append(Row(ANY, worth(together(runs, thresholds)), None, None, NO_VALUE, ""))
    return rows


def threshold_cell(runs: list[History], thresholds: dict[str, float], rule: str) -> str:
    """Return the smallest and the largest held-out threshold, and the shipped threshold."""
    fitted = held_out_thresholds(runs, rule).values()
    if not fitted:
        return f"- ({thresholds[rule]:g})"
    return f"{min(fitted):.2g} to {max(fitted):.2g} ({thresholds[rule]:g})"


def tables(rows: list[Row]) -> list[str]:
    """Return the Markdown tables of the rules' worth, and of the logs that have their metrics."""
    columns = ["seen", "lead", "per healthy run", "per 100 healthy steps", "seen at random"]
    shipped = [["as shipped", "collapsed, healthy", *columns, "warned at any time"]]
    last_columns = ["on the stressors: seen", "AUROC within settings (runs)"]
    held_out = [["held out", "thresholds (shipped)", *columns, *last_columns]]
    for row in rows:
        counts = f"{row.shipped.collapsed}, {row.shipped.healthy}"
        shipped.append([row.rule, counts, *cells(row.shipped), row.shipped.warned.text()])
        if row.held_out and row.stressors:
            within = f"{row.within.text()} ({row.within.count})"
            last_cells = [row.stressors.seen.text(), within]
            held_out.append([row.rule, row.thresholds, *cells(row.held_out), *last_cells])
    logs = [["metric", "rules", *FRAMEWORKS]]
    for metric in sorted({signal.metric for signal in RULES.values()}):
        names = [rule for rule, signal in RULES.items() if signal.metric == metric]
        logs.append([metric, ", ".join(names), *marks(metric)])
    return [*markdown_table(shipped), "", *markdown_table(held_out), "", *markdown_table(logs)]


def cells(result: Worth) -> list[str]:
    """Return the cells of a rule's worth."""
    return [
        result.seen.text(),
        result.lead.text(".0f"),
        result.per_run.text(),
        result.per_100_steps.text(),
        f"{result.at_random:.2f}",
    ]


# ------------------------------------------------------------------------------------------------
# figure
def draw(rows: list[Row], runs: list[History], out: Path, options: FigureOptions) -> list[Path]:
    """Draw a row per rule: collapses seen, lead, and false alarms, as shipped and held out."""
    figure = style.canvas(0.9 + 0.3 * len(rows), options)
    axes = figure.subplots(1, 4, sharey=True, width_ratios=[1.3, 1, 1.2, 1])
    seen_panel, lead_panel, false_panel, within_panel = axes
    for height, row in enumerate(rows):
        for result, shift, marker, strength in (
            (row.shipped, -0.17, "D", 0.5),
            (row.held_out, 0.17, "o", 1.0),
        ):
            if result is None:
                continue
            colour = tint(style.INK, strength)
            y = height + shift
            draw_value(seen_panel, y, result.seen, colour, marker)
            draw_value(lead_panel, y, result.lead, colour, marker)
            draw_value(false_panel, y, result.per_100_steps, colour, marker)
            seen_panel.plot(result.at_random, y, "|", color=colour, ms=9)
        if row.within.count >= MIN_VALUES:
            draw_value(within_panel, height, row.within)
    seen_panel.set(title="Seen", xlabel="share of the collapses")
    lead_panel.set(title="Lead time", xlabel="median steps")
    false_panel.set(title="False alarms", xlabel="per 100 healthy steps")
    within_panel.set(title="Same setting", xlabel="AUROC")
    within_panel.axvline(0.5, **style.DASHED)
    for ax in axes:
        ax.set_xlim(left=0)
        ax.tick_params(axis="y", length=0)
    seen_panel.set_ylim(len(rows) - 0.4, -0.6)
    seen_panel.set_yticks(range(len(rows)), [row.rule.replace("_", " ") for row in rows])
    return style.save(figure, out, "early_warning_rules", caption(runs), options)


def draw_value(
    ax: Axes,
    y: float,
    value: Value,
    colour: str = style.INK,
    marker: str = "o",
) -> None:
    """Draw an estimate and its interval."""
    if value.count:
        ax.plot([value.low, value.high], [y, y], color=colour, lw=1.4)
        style.dots(ax, value.value, y, colour, marker, 4.5, zorder=3)


def caption(runs: list[History]) -> str:
    """Return the figure's caption."""
    collapsed = sum(run.collapsed is not None for run in runs)
    groups = len({run.group for run in runs})
    return (
        f"{collapsed} collapsed and {len(runs) - collapsed} healthy runs of {groups} studies and "
        "stresses; each rule is judged on the runs that have recorded its metric. Pale diamonds: "
        "at the monitor's thresholds. Dots: at a threshold that at most 5 % of the healthy runs of "
        "the other studies and stresses exceed. Upright strokes: the share of collapses that "
        "warnings at random steps would precede, if they came as often as in healthy runs. Same "
        f"setting: largest score until {LEAD} steps before a collapse against the healthy runs of "
        "the same setting, which have other seeds. Bars: 95 % intervals over settings or seeds, "
        "whichever are wider."
    )
