"""Early warnings: which of the monitor's signals see a collapse coming, how early, and how often are they wrong?

    python analysis/early_warning.py                          the recorded runs of analysis/data/stressors/
    python analysis/early_warning.py runs/stressors --save    runs of your own; --save: keep their metrics there

Runs that collapse by the registered rule against runs that do not, under several stresses; the stress of a run is what
its settings have apart from seed, objective and learning rate. Prints two Markdown tables, writes early_warning.pdf and
.png. Expected: the reward's own fall is hard to beat shortly before the collapse; signals of the update (drift from the
old policy, ratios) lead it by more.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import foresight
import load
import pandas as pd
import script
import style
from foresight import Alarm, History
from matplotlib.axes import Axes

from gspo.collapse import SIGNALS

RECORDED = Path(__file__).parent / "data" / "stressors"
METRICS = sorted({signal.metric for signal in SIGNALS.values()} | {"reward/mean"})
LEADS = (1, 5, 10)  # steps before the collapse
STRESSES = {  # the setting by which a stress is told, and its name
    "trainer.minibatches": "more mini-batches",
    "model.experts_per_token": "top-1 routing",
    "rollout.dtype": "bfloat16 rollouts",
    "rollout.staleness": "stale responses",
    "task.max_operands": "long responses",
}
FREE = ("objective.", "optim.lr")  # what varies within a stress
MONITOR = "any of them, as the monitor ships"


def main() -> None:
    parser = script.parser(__doc__, needs_runs=False)
    parser.add_argument("--save", action="store_true", help=f"keep the runs' metrics in {RECORDED.name}/")
    args = parser.parse_args()
    if args.save and not args.runs:
        load.die("--save needs runs")
    frame, notes = from_runs(args.runs) if args.runs else (pd.read_parquet(RECORDED), [])
    for note in notes:
        print(f"note: {note}")
    if args.save:
        keep(frame, RECORDED)
    runs = foresight.histories(frame)
    paths = draw(runs, shipped(frame), args.out)
    print("\n".join([*outcomes(frame, runs), "", *table(runs, shipped(frame)), "", *map(str, paths)]))


# ------------------------------------------------------------------------------------------------------------- data
def from_runs(paths: list[Path]) -> tuple[pd.DataFrame, list[str]]:
    """A row per run and step: run, stress, arm, seed, lr, step, METRICS, threshold/<signal>; and what was amiss."""
    data = load.load(paths)
    usual = {key: Counter(str(r.settings.get(key)) for r in data.runs).most_common(1)[0][0] for key in keys(data)}
    frames, notes = [], [note for note in data.notes if not note.startswith("seeds of")]
    for run in data.runs:
        if run.last < run.planned:
            continue  # noted as unfinished: it may still collapse
        rows = run.rows[run.rows["step"] > 0]
        thresholds = {f"threshold/{name}": run.settings[f"monitor.thresholds.{name}"] for name in SIGNALS}
        about = {"run": run.path.name, "stress": stress(run.settings, usual), "arm": run.arm.split(" [")[0]}
        about |= {"seed": run.seed, "lr": run.settings["optim.lr"]}
        columns = {name: rows[name].astype("float32") for name in METRICS if name in rows}
        frames.append(pd.DataFrame({"step": rows["step"], **columns}).assign(**about, **thresholds))
    if not frames:
        load.die("no finished run")
    return pd.concat(frames, ignore_index=True), notes


def keys(data: load.Data) -> list[str]:
    """The settings by which these runs' stresses differ."""
    return [key for key in load.differing(data.runs) if not key.startswith(FREE)]


def stress(settings: dict[str, object], usual: dict[str, str]) -> str:
    """In what these settings differ from the usual ones."""
    other = [key for key in usual if str(settings.get(key)) != usual[key]]
    named = [STRESSES[key] for key in other if key in STRESSES]
    return named[0] if named else ", ".join(f"{key}={settings.get(key)}" for key in other) or "learning rate alone"


def keep(frame: pd.DataFrame, folder: Path) -> None:
    """One small Parquet file per stress."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in frame.groupby("stress"):
        rows.to_parquet(folder / f"{name.replace(' ', '_')}.parquet", index=False, compression="zstd")


def shipped(frame: pd.DataFrame) -> dict[str, float]:
    """The monitor's thresholds in these runs; those that are switched off are left out."""
    found = {name: float(frame[f"threshold/{name}"].iloc[0]) for name in SIGNALS}
    return {name: value for name, value in found.items() if value}


# ----------------------------------------------------------------------------------------------------------- tables
def outcomes(frame: pd.DataFrame, runs: list[History]) -> list[str]:
    """How many runs collapsed, by stress, objective and learning rate."""
    fell = {run.run: run.collapsed is not None for run in runs}
    each = frame.groupby("run").first()[["stress", "arm", "lr"]].assign(fell=lambda f: f.index.map(fell))
    counted = each.groupby(["stress", "arm", "lr"])["fell"].agg(["sum", "count"])
    text = (counted["sum"].astype(int).astype(str) + " of " + counted["count"].astype(str)).unstack("lr").fillna("-")
    lines = [f"{sum(fell.values())} of {len(runs)} runs collapsed, by learning rate:", ""]
    lines += markdown(["stress", "objective", *(f"{lr:g}" for lr in text)], [[*i, *r] for i, r in text.iterrows()])
    first = sorted(run.collapsed + 1 for run in runs if run.collapsed is not None)
    return [*lines, "", f"Steps of the collapses: {', '.join(map(str, first))}."]


def table(runs: list[History], thresholds: dict[str, float]) -> list[str]:
    """A row per signal, by AUROC; the last row: the monitor's warnings together."""
    head = ["signal", *(f"AUROC, {lead} step{'s' * (lead > 1)} before" for lead in LEADS)]
    head += ["seen", "median lead", "warnings per healthy run", "as shipped: seen", "lead", "per healthy run"]
    rows = []
    for name in ranked(runs):
        areas = [text(foresight.auroc(runs, name, lead)[:3]) for lead in LEADS]
        fit = foresight.worth(foresight.held_out(runs, name))
        own = foresight.worth([foresight.judged(run, {name: thresholds.get(name, math.inf)}) for run in runs])
        rows.append([name, *areas, *cells(fit), *cells(own)])
    return markdown(head, [*rows, [MONITOR, *["-"] * 6, *cells(together(runs, thresholds))]])


def together(runs: list[History], thresholds: dict[str, float]) -> Alarm:
    """The monitor as it ships."""
    return foresight.worth([foresight.judged(run, thresholds) for run in runs])


def cells(alarm: Alarm) -> list[str]:
    return [text(alarm.seen), text(alarm.lead, ".0f"), text(alarm.false)]


def text(value: tuple[float, float, float], form: str = ".2f") -> str:
    """ "0.91 [0.83, 0.97]"."""
    middle, low, high = (f"{x:{form}}" for x in value)
    return "-" if math.isnan(value[0]) else f"{middle} [{low}, {high}]"


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---"] * len(head)
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, rule, *rows)]


def ranked(runs: list[History]) -> list[str]:
    """Signals that these runs have, by AUROC one step before the collapse."""
    areas = {name: foresight.auroc(runs, name)[0] for name in SIGNALS}
    return sorted((name for name in areas if not math.isnan(areas[name])), key=lambda name: -areas[name])


# ----------------------------------------------------------------------------------------------------------- figure
def draw(runs: list[History], thresholds: dict[str, float], out: Path) -> list[Path]:
    """A row per signal; panels: AUROC at three leads, collapses seen, lead time, warnings per healthy run."""
    names = ranked(runs)
    if not names:
        load.die("early_warning needs runs that collapsed and runs that did not")
    figure = style.canvas(0.9 + 0.26 * (len(names) + 1))
    axes = figure.subplots(1, 4, sharey=True, width_ratios=[1.7, 1, 1, 1])
    areas(axes[0], runs, names)
    alarms = [foresight.worth(foresight.held_out(runs, name)) for name in names] + [together(runs, thresholds)]
    titles = {"seen": "Collapses seen", "lead": "Lead time", "false": "False alarms"}
    labels = {"seen": "share", "lead": "median, steps before", "false": "warnings per healthy run"}
    for ax, part in zip(axes[1:], titles, strict=True):
        for row, alarm in enumerate(alarms):
            hue = style.COLOURS[load.GRPO_R2] if row == len(names) else style.COLOURS[load.GSPO]
            interval(ax, row, getattr(alarm, part), hue)
        ax.set_title(titles[part])
        ax.set_xlabel(labels[part])
        ax.set_xlim(left=0)
    axes[0].set_ylim(len(names) + 0.6, -0.6)
    axes[0].set_yticks(range(len(names) + 1), [*(n.replace("_", " ") for n in names), "monitor as it ships"])
    for ax in axes:
        ax.tick_params(axis="y", length=0)
    return style.save(figure, out, "early_warning", caption(runs))


def areas(ax: Axes, runs: list[History], names: list[str]) -> None:
    """AUROC with its interval at each lead; .5 is chance."""
    for row, name in enumerate(names):
        for place, lead in enumerate(LEADS):
            hue = style.tint(style.COLOURS[load.GSPO], 1 - 0.33 * place)
            interval(ax, row + 0.22 * (place - 1), foresight.auroc(runs, name, lead)[:3], hue)
    ax.axvline(0.5, color=style.MUTED, lw=1, ls="--", zorder=1)
    ax.set_title("AUROC")
    ax.set_xlabel(f"{', '.join(map(str, LEADS))} steps before (dark to light)")


def interval(ax: Axes, y: float, value: tuple[float, float, float], hue: object) -> None:
    middle, low, high = value
    if not math.isnan(middle):
        ax.plot([low, high], [y, y], color=hue, lw=1.4, zorder=2)
        ax.plot(middle, y, "o", ms=4, color=hue, mec="white", mew=0.5, zorder=3)


def caption(runs: list[History]) -> str:
    sick = [run for run in runs if run.collapsed is not None]
    kinds = sorted({run.stress for run in runs})
    early = sum(run.collapsed <= foresight.WARM_UP for run in sick)
    words = f"{len(sick)} collapsed and {len(runs) - len(sick)} healthy runs under {len(kinds)} kinds of stress "
    words += f"({', '.join(kinds)}); bars: 95 % intervals over runs. AUROC: largest score until so many steps before "
    words += "the collapse against the healthy runs' over the same steps. The other panels: a warning when the score "
    words += "exceeds a threshold that 5 % of the healthy runs under the other stresses exceed; the last row: all "
    words += "signals at the thresholds that the monitor ships."
    never = f" {early} collapsed within the first {foresight.WARM_UP} steps, in which nothing warns."
    return words + (never if early else "")


if __name__ == "__main__":
    main()
