"""Early warnings: which of the monitor's signals see a collapse coming, how early, and how often
are they wrong?

    gspo figure early-warning                          the recorded runs of
                                                              analysis/data/stressors/
    gspo figure early-warning runs/stressors --save    runs of your own; --save: keep their
                                                              metrics there

Runs that collapse by the registered rule are compared with runs that do not, under several
stresses. A run's stress is what its settings change apart from seed, objective and learning rate. A
signal that is high only because the learning rate is high ranks runs well but foresees nothing, so
the table also has a row for the learning rate itself and AUROC among runs of one rate. Expected:
the reward's own fall is hard to beat, for collapse is defined by it; signals that drift with the
update (ratios, KL to the old policy) lead it by more steps. Prints Markdown tables, and writes
early_warning.pdf and .png.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from gspo.analysis import foresight, load, script, style
from gspo.analysis.blocks import aligned_table
from gspo.analysis.foresight import LR, Alarm, History, Value
from gspo.analysis.looks import tint
from gspo.analysis.style import View
from matplotlib.axes import Axes

from gspo.tracking.collapse import SIGNALS, STEPS_FALLEN, collapse, levels

RECORDED = Path(__file__).parent / "data" / "stressors"
METRICS = sorted({signal.metric for signal in SIGNALS.values()} | {"reward/mean"})
LEADS = (1, 5, 10)  # steps before the collapse
NAMES = {  # the stresses of sweeps/stressors.yaml
    "": "learning rate alone",
    "trainer.minibatches=16": "16 mini-batches",
    "model.experts_per_token=1": "top-1 routing",
    "policy.old_logprobs=engine, rollout.dtype=bfloat16": "bfloat16 rollouts",
    "policy.old_logprobs=behaviour, rollout.staleness=8": "stale responses",
    "cold_start.wrong_step_rate=0.14, rollout.max_new_tokens=100, task.max_operands=8, task.min_operands=6": (
        "long responses"
    ),
}
FREE = ("objective.", "optim.lr")  # the settings that vary within a stress
REFUSED = script.NO_CURVES | {"seeds": "its rows are signals, of all runs together"}
MARKS = ("o", "s", "^")  # the marker of each of LEADS
PAIR = (load.GSPO, load.GRPO)
MONITOR = "any, as the monitor ships"


def main() -> None:
    parser = script.parser(__doc__, needs_runs=False, refused=REFUSED)
    parser.add_argument(
        "--save",
        action="store_true",
        help=f"keep the runs' metrics in analysis/data/{RECORDED.name}/",
    )
    args = parser.parse_args()
    if args.save and not args.runs:
        load.die("--save needs runs")
    if not args.runs and not RECORDED.exists():
        load.die(f"{RECORDED} is not there: name the runs")
    if args.where and not args.runs:
        load.die("--where chooses among runs: name some")
    frame, notes = (
        from_runs(args.runs, script.chosen(args)) if args.runs else (pd.read_parquet(RECORDED), [])
    )
    for note in notes:
        print(f"note: {note}")
    if args.save:
        keep(frame, RECORDED)
    runs = foresight.histories(frame)
    results = [result(runs, shipped(frame), name) for name in (LR, *SIGNALS)]
    results = sorted((r for r in results if r.areas[0].count), key=lambda r: -r.areas[0].value)
    if not results or len({run.stress for run in runs}) < 2:
        load.die(
            "early_warning needs runs that collapsed and runs that did not, under two stresses or more"
        )
    together = foresight.worth([foresight.judged(run, shipped(frame)) for run in runs])
    paths = draw(results, together, runs, args.out, script.view(args))
    print("\n".join([*outcomes(frame, runs), "", *table(results, together), "", *map(str, paths)]))


# -------------------------------------------------------------------------------------------------------------
# data
def from_runs(
    paths: list[str], where: Mapping[str, object] | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Return a row per run and step with the columns run, stress, arm, seed, lr, step, METRICS and
    threshold/<signal>, and notes on what was left out.

    Runs that are neither finished nor collapsed are left out, since they may still collapse.
    """
    data = load.load(paths, where)
    keys = [key for key in load.differing(data.runs) if not key.startswith(FREE)]
    usual = {
        key: Counter(str(r.settings.get(key)) for r in data.runs).most_common(1)[0][0]
        for key in keys
    }
    frames = []
    for run in data.runs:
        rows = run.rows[run.rows["step"] > 0].sort_values("step")
        if run.last < run.planned and collapse(rows["reward/mean"].astype(float).tolist()) is None:
            continue
        thresholds = {
            f"threshold/{name}": run.settings.get(f"monitor.thresholds.{name}", 0.0)
            for name in SIGNALS
        }
        about = {
            "run": run.path.name,
            "stress": stress(run.settings, usual),
            "arm": run.arm.split(" [")[0],
        }
        about |= {"seed": run.seed, "lr": run.settings["optim.lr"]}
        columns = {name: rows[name].astype("float32") for name in METRICS if name in rows}
        frames.append(pd.DataFrame({"step": rows["step"], **columns}).assign(**about, **thresholds))
    if not frames:
        load.die("no run that has finished or collapsed")
    return pd.concat(frames, ignore_index=True), [
        n for n in data.notes if not n.startswith("seeds of")
    ]


def stress(settings: dict[str, object], usual: dict[str, str]) -> str:
    """Return the settings in which these differ from the usual ones, as the name of the stress."""
    text = ", ".join(
        f"{key}={settings.get(key)}" for key in usual if str(settings.get(key)) != usual[key]
    )
    return NAMES.get(text, text)


def keep(frame: pd.DataFrame, folder: Path) -> None:
    """Write one small Parquet file per stress, replacing the files that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.parquet"):
        old.unlink()
    for name, rows in frame.groupby("stress"):
        rows.to_parquet(
            folder / f"{re.sub('[^0-9a-zA-Z]+', '_', name)}.parquet",
            index=False,
            compression="zstd",
        )


def shipped(frame: pd.DataFrame) -> dict[str, float]:
    """Return the monitor's thresholds as most rows have them, without those that are switched off."""
    found = {name: float(frame[f"threshold/{name}"].mode().iloc[0]) for name in SIGNALS}
    return {name: value for name, value in found.items() if value}


# ----------------------------------------------------------------------------------------------------------
# results
@dataclass
class Result:
    """How well one signal foresees collapses."""

    name: str
    areas: list[Value]  # AUROC at each of LEADS
    same_lr: Value  # AUROC one step before, among runs of one learning rate
    fit: Alarm  # at thresholds fitted on the runs under other stresses
    own: Alarm  # at the monitor's threshold


def result(runs: list[History], thresholds: dict[str, float], name: str) -> Result:
    """Measure one signal: AUROC at each lead, and the alarms it would have raised."""
    return Result(
        name,
        [foresight.auroc(runs, name, lead) for lead in LEADS],
        foresight.auroc(runs, name, same_lr=True),
        foresight.worth(foresight.held_out(runs, name)),
        foresight.worth(
            [foresight.judged(run, {name: thresholds.get(name, math.inf)}) for run in runs]
        ),
    )


def outcomes(frame: pd.DataFrame, runs: list[History]) -> list[str]:
    """Return lines that say how many runs collapsed, by stress, objective and learning rate."""
    fell = {run.run: run.collapsed is not None for run in runs}
    each = (
        frame.groupby("run")
        .first()[["stress", "arm", "lr"]]
        .assign(fell=lambda f: f.index.map(fell))
    )
    counted = each.groupby(["stress", "arm", "lr"])["fell"].agg(["sum", "count"])
    words = (
        (counted["sum"].astype(int).astype(str) + " of " + counted["count"].astype(str))
        .unstack("lr")
        .fillna("-")
    )
    lines = [f"{sum(fell.values())} of {len(runs)} runs collapsed, by learning rate:", ""]
    head = ["stress", "objective", *(f"{lr:g}" for lr in words)]
    lines += aligned_table([head, *([*i, *r] for i, r in words.iterrows())])
    first = sorted(run.collapsed + 1 for run in runs if run.collapsed is not None)
    dips = sum(fallen(rows) for name, rows in frame.groupby("run") if not fell[name])
    said = f"Healthy runs that were below 0.7 x their peak for {STEPS_FALLEN} steps: {dips}."
    return [
        *lines,
        "",
        f"Steps of the collapses: {', '.join(map(str, first))}. {said} {paired(frame, fell)}",
    ]


def fallen(rows: pd.DataFrame) -> bool:
    """Return whether the monitor would have reported a run's reward as fallen, for good or not."""
    below = pd.Series(levels(rows.sort_values("step")["reward/mean"].astype(float).tolist())[2])
    return bool((below.rolling(STEPS_FALLEN).sum() == STEPS_FALLEN).any())


def paired(frame: pd.DataFrame, fell: dict[str, bool]) -> str:
    """Return a sentence on pairs of GSPO and GRPO runs with the same stress, learning rate and
    seed: in how many only one of the two collapsed, and which."""
    each = frame.groupby("run").first().assign(fell=lambda f: f.index.map(fell)).reset_index()
    pairs = each[each["arm"].isin((load.GSPO, load.GRPO))].pivot(
        index=["stress", "lr", "seed"], columns="arm", values="fell"
    )
    if not {load.GSPO, load.GRPO} <= set(pairs):
        return ""
    pairs = pairs.dropna().astype(bool)
    alone = {arm: int((pairs[arm] & ~pairs[other]).sum()) for arm, other in (PAIR, PAIR[::-1])}
    n = sum(alone.values())
    p = min(1.0, 2 * sum(math.comb(n, k) for k in range(min(alone.values()) + 1)) / 2**n)
    return (
        f"Of {len(pairs)} pairs of the same stress, rate and seed GRPO alone collapsed in {alone[load.GRPO]}, "
        f"GSPO alone in {alone[load.GSPO]} (exact sign test: p = {p:.2g})."
    )


def table(results: list[Result], together: Alarm) -> list[str]:
    """Return a Markdown row per signal, sorted by AUROC; the last row is for the monitor's warnings
    taken together.
    """
    counts = [area.count for area in results[0].areas]
    head = [
        "signal",
        *(f"AUROC, {lead} before (of {n})" for lead, n in zip(LEADS, counts, strict=True)),
    ]
    head += ["same learning rate", "seen", "median lead", "warnings per healthy run"]
    head += ["as shipped: seen", "lead", "per healthy run"]
    rows = [
        [r.name, *(a.text() for a in r.areas), r.same_lr.text(), *cells(r.fit), *cells(r.own)]
        for r in results
    ]
    return aligned_table([head, *rows, [MONITOR, *["-"] * 7, *cells(together)]])


def cells(alarm: Alarm) -> list[str]:
    """Return the cells for one alarm: collapses seen, lead and false alarms."""
    return [alarm.seen.text(), alarm.lead.text(".0f"), alarm.false.text()]


# -----------------------------------------------------------------------------------------------------------
# figure
def draw(
    results: list[Result], together: Alarm, runs: list[History], out: Path, view: View
) -> list[Path]:
    """Draw a row per signal, with panels for AUROC at three leads, AUROC among runs of one rate,
    collapses seen, lead, and false alarms."""
    figure = style.canvas(0.9 + 0.26 * (len(results) + 1), view)
    axes = figure.subplots(1, 5, sharey=True, width_ratios=[1.5, 1, 1, 1, 1])
    for row, r in enumerate(results):
        for place, area in enumerate(r.areas):
            interval(
                axes[0],
                row + 0.22 * (place - 1),
                area,
                tint(style.INK, 1 - 0.3 * place),
                MARKS[place],
            )
        interval(axes[1], row, r.same_lr, style.INK)
    for row, alarm in enumerate([*(r.fit for r in results), together]):
        for ax, value in zip(axes[2:], (alarm.seen, alarm.lead, alarm.false), strict=True):
            interval(ax, row, value, style.INK, "o" if row < len(results) else "D")
    for ax in axes[:2]:
        ax.axvline(0.5, color=style.MUTED, lw=1, ls="--", zorder=1)
    titles = ("AUROC", "At one rate", "Seen", "Lead time", "False alarms")
    labels = (
        f"{', '.join(map(str, LEADS))} steps before",
        "AUROC",
        "share",
        "median steps",
        "per healthy run",
    )
    for ax, title, label in zip(axes, titles, labels, strict=True):
        ax.set_title(title)
        ax.set_xlabel(label)
        ax.set_xlim(left=0)
        ax.tick_params(axis="y", length=0)
    axes[0].set_ylim(len(results) + 0.6, -0.6)
    axes[0].set_yticks(
        range(len(results) + 1),
        [*(r.name.replace("_", " ") for r in results), "monitor as it ships"],
    )
    return style.save(figure, out, "early_warning", caption(runs, results), view)


def interval(ax: Axes, y: float, value: Value, hue: str, mark: str = "o") -> None:
    if value.count:
        ax.plot([value.low, value.high], [y, y], color=hue, lw=1.4, zorder=2)
        ax.plot(value.value, y, mark, ms=4.5, color=hue, mec="white", mew=0.5, zorder=3)


def caption(runs: list[History], results: list[Result]) -> str:
    sick, kinds = (
        [run for run in runs if run.collapsed is not None],
        sorted({run.stress for run in runs}),
    )
    counts = ", ".join(f"{area.count}" for area in results[0].areas)
    words = f"{len(sick)} collapsed and {len(runs) - len(sick)} healthy runs under {len(kinds)} kinds of stress "
    words += f"({', '.join(kinds)}). AUROC: largest score until so many steps before the collapse (dots, squares, "
    words += f"triangles; of {counts} runs) against the healthy runs' over the same steps; then among runs of one "
    words += "learning rate, where what the rate alone does to a score is no help. The others: warnings at a threshold "
    words += "that at most 5 % of the healthy runs under the other stresses exceed; last row (diamonds): all signals at "
    words += "the monitor's thresholds. Seen: before the collapse, not at it, where the reward's own threshold lies. "
    words += "Bars: 95 % intervals over runs."
    return words


if __name__ == "__main__":
    script.command(main)
