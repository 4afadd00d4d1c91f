"""Early warnings: which signals of the monitor see a collapse coming, how early, how reliably?

    gspo figure early-warning
    gspo figure early-warning runs/stressors save=true
    gspo figure early-warning rules=true

Runs that collapse by the registered rule are compared with runs that do not, under several
stresses. A run's stress is the settings in which it differs, apart from seed, objective and
learning rate. A signal that is high only because the learning rate is high ranks runs well but
foresees nothing. So the table also has a row for the learning rate itself and AUROC among runs of
the same rate.

Expected: the reward's own fall is hard to beat, for collapse is defined by it. Signals that drift
with the update (ratios, KL to the old policy) lead it by more steps. Prints Markdown tables, and
writes early_warning.pdf and .png. With rules=true the tables and the figure are of every rule, on
the stressors and the 19 studies of warning_rules.STUDIES (warning_table.py).
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from gspo.analysis import (
    foresight,
    load,
    script,
    style,
    warning_probe,
    warning_rules,
    warning_table,
    warning_worth,
)
from gspo.analysis.arm_styles import tint
from gspo.analysis.blocks import markdown_table
from gspo.analysis.foresight import History, Value
from gspo.analysis.grid import settled_runs
from gspo.analysis.load import GRPO, GSPO
from gspo.analysis.runs import RunsError
from gspo.analysis.style import FigureOptions
from gspo.analysis.warning_rules import LR
from gspo.analysis.warning_table import draw_value
from gspo.analysis.warning_worth import Worth
from gspo.io.arguments import command_options, option
from gspo.statistics import sign_flip_p_of_integers
from gspo.tracking.collapse import SIGNALS, STEPS_FALLEN, levels
from gspo.tracking.foreign_options import NOTHING_SAID, ForeignOptions

RECORDED = Path(__file__).parent / "data" / "stressors"
METRICS = sorted({"reward/mean", *(signal.metric for signal in SIGNALS.values())})
LEADS = (1, 5, 10)  # steps before the collapse
LONG_RESPONSES = (
    "cold_start.wrong_step_rate=0.14, rollout.max_new_tokens=100, task.max_operands=8, "
    "task.min_operands=6"
)
NAMES = {  # the stresses of sweeps/stressors.yaml
    "": "learning rate alone",
    "trainer.minibatches=16": "16 mini-batches",
    "model.experts_per_token=1": "top-1 routing",
    "policy.old_logprobs=engine, rollout.dtype=bfloat16": "bfloat16 rollouts",
    "policy.old_logprobs=behaviour, rollout.staleness=8": "stale responses",
    LONG_RESPONSES: "long responses",
}
RATE = "optim.lr"
VARY_WITHIN_STRESS = ("objective.", RATE)  # settings
REFUSED = script.NO_CURVES | {"seeds": "its rows are signals, of all runs together"}
MONITOR = "any, as the monitor ships"


@dataclass(frozen=True, kw_only=True)
class Options(script.Options):
    """The options of this figure."""

    paths: tuple[str, ...] = option(
        (), f"runs, as for the other figures (default: analysis/data/{RECORDED.name})"
    )
    rules: bool = option(
        False, "judge every rule on the stressors and the 19 studies of warning_rules.STUDIES"
    )
    save: bool = option(False, f"keep the runs' metrics in analysis/data/{RECORDED.name}")


def main() -> None:
    options = command_options(Options, __doc__, REFUSED)
    if options.save and not options.paths:
        raise RunsError("save=true needs runs")
    if not options.paths and not RECORDED.exists():
        raise RunsError(f"{RECORDED} is not there: name the runs")
    if options.where and not options.paths:
        raise RunsError("where.KEY=VALUE chooses among runs: name some")
    if options.given() and not options.paths:
        raise RunsError(options.without_effect())
    if options.paths and options.rules:
        raise RunsError("rules=true takes the recorded runs: leave the paths out")
    if options.rules:
        print_rules(options)
        return
    if options.paths:
        frame, notes = from_runs(options.paths, options.where, options)
        for note in notes:
            print(f"note: {note}")
    else:
        frame = pd.read_parquet(RECORDED)
    runs = warning_rules.stressor_runs(frame)
    thresholds = shipped(frame)
    results = all_results(runs, thresholds)
    stresses = {run.group for run in runs}
    if not results or len(stresses) < 2:
        raise RunsError(
            "early_warning needs runs that collapsed and runs that did not, under two stresses or "
            "more"
        )
    if options.save:
        keep(frame, RECORDED)
    together = warning_worth.worth(warning_rules.together(runs, thresholds))
    paths = draw(results, together, runs, options.out, options)
    print("\n".join(outcomes(frame, runs)))
    script.print_lines(table(results, together), paths)


def print_rules(options: Options) -> None:
    """Print the tables of all rules on the recorded runs, and draw them."""
    frame = pd.read_parquet(RECORDED)
    runs = warning_rules.recorded_runs(frame)
    thresholds = {**shipped(frame), **warning_rules.COUNTER_THRESHOLDS}
    rows = warning_table.all_rows(runs, thresholds)
    paths = warning_table.draw(rows, runs, options.out, options)
    collapsed = sum(run.collapsed is not None for run in runs)
    settings = len({run.setting for run in runs})
    print(f"{collapsed} of {len(runs)} runs under {settings} settings collapsed.\n")
    lines = [*warning_table.tables(rows), "", *warning_probe.table(warning_rules.DATA)]
    script.print_lines(lines, paths)


# ------------------------------------------------------------------------------------------------
# data
def from_runs(
    paths: Sequence[str],
    where: Mapping[str, object] | None = None,
    foreign_options: ForeignOptions = NOTHING_SAID,
) -> tuple[pd.DataFrame, list[str]]:
    """Return a row per run and step, and notes on the runs that were left out.

    The columns are run, stress, arm, seed, lr, step, METRICS and threshold/<signal>. Runs that are
    neither finished nor collapsed are left out, since they may still collapse.
    """
    data = load.load(paths, where, foreign_options)
    usual = {}
    for key in load.differing(data.runs):
        if not key.startswith(VARY_WITHIN_STRESS):
            texts = [str(run.settings.get(key)) for run in data.runs]
            values = Counter(texts)
            usual[key] = values.most_common(1)[0][0]
    frames = []
    for run in settled_runs(data, (RATE,)):
        rows = run.rows[run.rows["step"] > 0].sort_values("step")
        metrics = [name for name in METRICS if name in rows]
        single_precision = dict.fromkeys(metrics, "float32")
        frame = rows[["step", *metrics]].astype(single_precision)
        of_the_objective = {
            key: value for key, value in run.appended.items() if key.startswith("objective.")
        }
        constants = {
            "run": f"{run.study}/{run.path.name}",
            "stress": stress(run.settings, usual),
            "arm": load.arm_with(run.base or run.arm, of_the_objective),
            "seed": run.seed,
            "lr": run.settings[RATE],
        }
        for name in SIGNALS:
            threshold = run.settings.get(f"monitor.thresholds.{name}", 0.0)
            constants[f"threshold/{name}"] = threshold
        frames.append(frame.assign(**constants))
    notes = [note for note in data.notes if not note.startswith("seeds of")]
    return pd.concat(frames, ignore_index=True), notes


def stress(settings: dict[str, object], usual: dict[str, str]) -> str:
    """Return the settings in which these differ from the usual settings, as the stress's name."""
    texts = []
    for key, value in usual.items():
        text = str(settings.get(key))
        if text != value:
            texts.append(f"{key}={text}")
    name = ", ".join(texts)
    return NAMES.get(name, name)


def keep(frame: pd.DataFrame, folder: Path) -> None:
    """Write a small Parquet file per stress, in place of the folder's files."""
    folder.mkdir(parents=True, exist_ok=True)
    for old_file in folder.glob("*.parquet"):
        old_file.unlink()
    for name, rows in frame.groupby("stress"):
        file = folder / f"{re.sub('[^0-9a-zA-Z]+', '_', name)}.parquet"
        rows.to_parquet(file, index=False, compression="zstd")


def shipped(frame: pd.DataFrame) -> dict[str, float]:
    """Return the monitor's thresholds as most rows have them, without those that are off."""
    thresholds = {}
    for name in SIGNALS:
        modes = frame[f"threshold/{name}"].mode()
        threshold = float(modes.iloc[0])
        if threshold:
            thresholds[name] = threshold
    return thresholds


# ------------------------------------------------------------------------------------------------
# results
@dataclass
class Result:
    """How well a signal foresees collapses."""

    name: str
    aurocs: list[Value]  # at each of LEADS
    same_lr: Value  # AUROC one step before, among runs of one learning rate
    fitted: Worth  # at thresholds fitted on the runs under other stresses
    shipped: Worth  # at the monitor's threshold


def result(runs: list[History], thresholds: dict[str, float], name: str) -> Result:
    """Measure a signal: AUROC at each lead, and the worth of its warnings."""
    runs = warning_rules.with_metric(runs, name)
    threshold = {name: thresholds.get(name, math.inf)}
    return Result(
        name,
        aurocs=[foresight.auroc(runs, name, lead) for lead in LEADS],
        same_lr=foresight.auroc(runs, name, same_lr=True),
        fitted=warning_worth.worth(warning_rules.held_out(runs, name)),
        shipped=warning_worth.worth(warning_rules.as_shipped(runs, threshold, name)),
    )


def all_results(runs: list[History], thresholds: dict[str, float]) -> list[Result]:
    """Return a result per signal with collapsed and healthy runs, the largest AUROC first."""
    results = [result(runs, thresholds, name) for name in (LR, *SIGNALS)]
    measured = [signal for signal in results if signal.aurocs[0].count]
    return sorted(measured, key=lambda signal: -signal.aurocs[0].value)


def outcomes(frame: pd.DataFrame, runs: list[History]) -> list[str]:
    """Return lines that say how many runs collapsed, by stress, objective and learning rate."""
    collapsed = {run.run: run.collapsed is not None for run in runs}
    by_run = frame.groupby("run").first()
    by_run["collapsed"] = by_run.index.map(collapsed)
    groups = by_run.groupby(["stress", "arm", "lr"])["collapsed"]
    texts = groups.agg(lambda runs: f"{runs.sum()} of {len(runs)}")
    texts = texts.unstack("lr").fillna("-")
    rows = [["stress", "objective", *(f"{lr:g}" for lr in texts)]]
    rows += [[*index, *row] for index, row in texts.iterrows()]
    indices = [run.collapsed for run in runs if run.collapsed is not None]
    steps = [index + 1 for index in sorted(indices)]
    dips = 0
    for name, run_rows in frame.groupby("run"):
        if not collapsed[name] and fell(run_rows):
            dips += 1
    return [
        f"{len(steps)} of {len(runs)} runs collapsed, by learning rate:",
        "",
        *markdown_table(rows),
        "",
        f"Steps of the collapses: {', '.join(map(str, steps))}. Healthy runs that were below 0.7 x "
        f"their peak for {STEPS_FALLEN} steps: {dips}. {paired(by_run)}",
    ]


def fell(rows: pd.DataFrame) -> bool:
    """Return whether the monitor would have reported a run's reward as fallen, for good or not."""
    rewards = rows.sort_values("step")["reward/mean"].astype(float)
    _, _, below_peak = levels(rewards.tolist())
    steps_below = pd.Series(below_peak).rolling(STEPS_FALLEN).sum()
    return bool((steps_below == STEPS_FALLEN).any())


def paired(by_run: pd.DataFrame) -> str:
    """Return a sentence on the pairs of GSPO and GRPO runs in which only one run collapsed.

    The runs of a pair have the same stress, learning rate and seed.
    """
    runs = by_run[by_run["arm"].isin((GSPO, GRPO))]
    pairs = runs.pivot(index=["stress", "lr", "seed"], columns="arm", values="collapsed")
    if not {GSPO, GRPO} <= set(pairs):
        return ""
    pairs = pairs.dropna().astype(int)
    difference = pairs[GRPO] - pairs[GSPO]
    p = sign_flip_p_of_integers(difference.to_numpy())
    return (
        f"Of {len(pairs)} pairs of the same stress, rate and seed GRPO alone collapsed in "
        f"{(difference == 1).sum()}, GSPO alone in {(difference == -1).sum()} (exact sign test: "
        f"p = {p:.2g})."
    )


def table(results: list[Result], together: Worth) -> list[str]:
    """Return a Markdown row per signal, sorted by AUROC.

    The last row is for the monitor's warnings taken together.
    """
    head = ["signal"]
    for lead, auroc in zip(LEADS, results[0].aurocs, strict=True):
        head.append(f"AUROC, {lead} before (of {auroc.count})")
    head += ["same learning rate", "seen", "median lead", "warnings per healthy run"]
    head += ["as shipped: seen", "lead", "per healthy run"]
    rows = [head]
    for signal in results:
        row = [signal.name]
        row += [auroc.text() for auroc in signal.aurocs]
        row.append(signal.same_lr.text())
        row += cells(signal.fitted)
        row += cells(signal.shipped)
        rows.append(row)
    row = [MONITOR, *["-"] * 7]
    rows.append(row + cells(together))
    return markdown_table(rows)


def cells(worth: Worth) -> list[str]:
    """Return the cells of a rule's worth: collapses seen, lead and false alarms."""
    return [
        worth.seen.text(),
        worth.lead.text(".0f"),
        worth.per_run.text(),
    ]


# ------------------------------------------------------------------------------------------------
# figure
def draw(
    results: list[Result],
    together: Worth,
    runs: list[History],
    out: Path,
    options: FigureOptions,
) -> list[Path]:
    """Draw a row per signal and a panel per quantity.

    The quantities are AUROC at three leads, AUROC among runs of the same rate, collapses seen,
    lead, and false alarms.
    """
    figure = style.canvas(0.9 + 0.26 * (len(results) + 1), options)
    axes = figure.subplots(1, 5, sharey=True, width_ratios=[1.5, 1, 1, 1, 1])
    auroc_panel, same_lr_panel, seen_panel, lead_panel, false_panel = axes
    marks = ((-0.22, "o", 1.0), (0.0, "s", 0.7), (0.22, "^", 0.4))  # of the leads
    for row, signal in enumerate(results):
        for auroc, (shift, marker, strength) in zip(signal.aurocs, marks, strict=True):
            colour = tint(style.INK, strength)
            draw_value(auroc_panel, row + shift, auroc, colour, marker)
        draw_value(same_lr_panel, row, signal.same_lr)
    worths = [signal.fitted for signal in results]
    worths.append(together)
    for row, worth in enumerate(worths):
        marker = "D" if worth is together else "o"
        draw_value(seen_panel, row, worth.seen, marker=marker)
        draw_value(lead_panel, row, worth.lead, marker=marker)
        draw_value(false_panel, row, worth.per_run, marker=marker)
    for ax in (auroc_panel, same_lr_panel):
        ax.axvline(0.5, **style.DASHED)
    auroc_panel.set(title="AUROC", xlabel=f"{', '.join(map(str, LEADS))} steps before")
    same_lr_panel.set(title="At one rate", xlabel="AUROC")
    seen_panel.set(title="Seen", xlabel="share")
    lead_panel.set(title="Lead time", xlabel="median steps")
    false_panel.set(title="False alarms", xlabel="per healthy run")
    for ax in axes:
        ax.set_xlim(left=0)
        ax.tick_params(axis="y", length=0)
    auroc_panel.set_ylim(len(results) + 0.6, -0.6)
    names = [signal.name.replace("_", " ") for signal in results]
    names.append("monitor as it ships")
    auroc_panel.set_yticks(range(len(names)), names)
    return style.save(figure, out, "early_warning", caption(runs, results), options)


def caption(runs: list[History], results: list[Result]) -> str:
    collapsed = sum(run.collapsed is not None for run in runs)
    stresses = sorted({run.group for run in runs})
    best = results[0]
    counts = [str(auroc.count) for auroc in best.aurocs]
    return (
        f"{collapsed} collapsed and {len(runs) - collapsed} healthy runs under {len(stresses)} "
        f"kinds of stress ({', '.join(stresses)}). AUROC: largest score until so many steps before "
        f"the collapse (dots, squares, triangles; of {', '.join(counts)} runs) against the healthy "
        "runs' over the same steps; then among runs of one learning rate, among which the rate "
        "itself cannot help a score. The others: warnings at a threshold that at most 5 % "
        "of the healthy runs under the other stresses exceed; last row (diamonds): all signals at "
        "the monitor's thresholds. Seen: before the collapse, not at it, where the reward's own "
        "threshold lies. Bars: 95 % intervals, of AUROC over runs, of the others over settings."
    )


if __name__ == "__main__":
    script.command(main)
