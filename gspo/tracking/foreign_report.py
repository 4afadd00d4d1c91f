"""Makes the page of a run of another framework: what can be judged of it, and what cannot.

The page answers the questions of stability, shows curves, and raises the monitor's warnings, each
from the metrics that the run has logged. It lists the warnings that cannot be computed, with the
reason, and every metric whose definition is not exactly ours.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from gspo.io.files import replace_text
from gspo.tracking.collapse import SIGNALS, gradient_spikes, is_finite, levels
from gspo.tracking.curves import Curve, curves
from gspo.tracking.frameworks.known import definition
from gspo.tracking.frameworks.table import OTHER, Table
from gspo.tracking.frameworks.translate import ForeignRun
from gspo.tracking.metrics import lookup
from gspo.tracking.monitor import Event, Monitor, MonitorSettings, reward_answer, routing_answer
from gspo.tracking.pages import TEMPLATES, fill

REWARD = "reward/mean"
GRADIENT = "optim/grad_norm"
ROUTING = "routing/consistency"
LARGEST_GRADIENT = "optim/grad_norm_max"
WITH_PROBE = ("trl",)  # the frameworks whose trainer gspo.probe has a callback for
# signals that compare a norm with the norms before it: any definition of the norm will do
OF_GRADIENTS = ("grad_spike", "grad_growth")
# metrics that a page of our own runs does not draw
MORE_CURVES = ("clip/sequence_active", "kl/old_k1", "kl/ref_k3")
MAX_NAME_BYTES = 200  # of a page; file systems allow 255


def write_foreign_page(
    run: ForeignRun, folder: Path, notes: Sequence[str] = (), taken: Collection[Path] = ()
) -> Path:
    """Write the page of a run of another framework to a folder, and return the page's path.

    The paths in `taken` are pages of other runs, which stay as they are."""
    name = "-".join(run.path.parts[-3:]).strip("-/")
    while len(f"{name}.html".encode(errors="replace")) > MAX_NAME_BYTES:
        # the end of a path says the most
        name = name[1:]
    path = folder / f"{name}.html"
    number = 1
    while path in taken:
        number += 1
        path = folder / f"{name}-{number}.html"
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(path, foreign_page(run, notes))
    return path


def foreign_page(run: ForeignRun, notes: Sequence[str] = ()) -> str:
    """Return the page's HTML. `notes` are further sentences about the reading of the log."""
    table = run.table
    values = {
        "name": run.path,
        "subtitle": subtitle(run, table),
        "story": [*_story(run), *notes, *run.notes],
        "stability": stability(run, table),
        "curves": _curves(run, table) if len(run.rows) > 2 else [],
        "events": [(event.step, event.kind, event.text) for event in warnings(run, table)],
        "not_judged": not_judged(run, table),
        "definitions": definitions(run),
        "version": table.full_title,
        "settings": sorted((name, str(value)) for name, value in run.settings.items()),
    }
    return fill(TEMPLATES / "foreign_report.html.j2", f"{table.title}: {run.path}", values)


def subtitle(run: ForeignRun, table: Table) -> str:
    """Return framework, kind of log, objective and seed as a line."""
    return ", ".join(
        [
            f"a run of {table.title}",
            f"read from {run.kind}",
            f"objective {run.objective or 'not logged'}",
            f"seed {run.settings.get('seed', 'not logged')}",
        ]
    )


def _story(run: ForeignRun) -> list[str]:
    first = run.rows[0]["step"]
    last = run.rows[-1]["step"]
    unit = "optimizer steps" if run.counts_updates else "rollout batches"
    planned = f" of {run.planned}" if run.planned else ""
    mapped = len(run.mapped())
    own = len(run.relations) - mapped
    return [
        f"{len(run.rows)} rows, from step {first} to {last}{planned} ({unit}).",
        f"{mapped} metrics stand under our names, {own} keep the framework's names because their "
        f"definitions are others, {len(run.unknown())} are not in the table.",
    ]


def _curves(run: ForeignRun, table: Table) -> list[Curve]:
    """Return the curves of a run's page, and MORE_CURVES that other frameworks log."""
    norm = gradient_norm(run, table)
    if not norm or norm == GRADIENT:
        return curves(run.rows, {}, MORE_CURVES, run.batches_per_row)
    metric = lookup(norm) if norm == LARGEST_GRADIENT else definition(norm)
    return curves(run.rows, {norm: metric}, (*MORE_CURVES, norm), run.batches_per_row)


# ------------------------------------------------------------------------------------------------
# what can be judged
def gradient_norm(run: ForeignRun, table: Table) -> str:
    """Return the metric that tells best of the gradient's norm, empty if none was logged."""
    for name in (LARGEST_GRADIENT, GRADIENT, table.gradient_norm):
        if name and any(is_finite(row.get(name)) for row in run.rows):
            return name
    return ""


def stability(run: ForeignRun, table: Table) -> list[str]:
    """Return the answers to the three questions of stability, from what the run has logged."""
    rows = [row for row in run.rows if row["step"] > 0]
    remedy = " (gspo.probe can add it)" if table.name in WITH_PROBE else ""
    routing = (
        "Does expert activation stay consistent? It cannot be judged: "
        f"{table.title} logs no routing consistency{remedy}."
    )
    if any(is_finite(row.get(ROUTING)) for row in rows):
        routing = routing_answer(rows)
    reward = reward_answer(rows, batches_per_row=run.batches_per_row)
    return [reward, _gradient_answer(rows, gradient_norm(run, table)), routing]


def _gradient_answer(rows: list[dict[str, float]], name: str) -> str:
    """Return in words whether the gradient norm is in a reasonable range, by this metric."""
    question = "Is the gradient norm in a reasonable range? "
    if not name:
        return question + "It cannot be judged: no row has one."
    norms = np.array([row[name] for row in rows if is_finite(row.get(name))])
    if not len(norms):
        return question + "It cannot be judged: no rollout batch has a finite one."
    missing = sum(name in row and not is_finite(row[name]) for row in rows)
    spikes = gradient_spikes(norms)
    zeros = int((norms == 0).sum())
    verdict = "No" if spikes or missing else "Yes"
    if 2 * zeros > len(norms):
        verdict = f"No: no signal, {zeros} of {len(norms)} rows have a norm of 0"
    return (
        f"{question}{verdict} (by {name}: median {np.median(norms):.3g}, largest {norms.max():.3g}; "
        f"rows with ten times the usual norm: {spikes}; not finite: {missing})."
    )


def warnings(run: ForeignRun, table: Table) -> list[Event]:
    """Return the monitor's events, with its default thresholds, from what the run has logged.

    The monitor counts rows. If rows are means over several batches, the collapse rule tells of a
    fallen reward, and not the monitor's count of 20 steps."""
    monitor = Monitor(MonitorSettings())
    norm = gradient_norm(run, table)
    events: list[Event] = []
    for row in run.rows:
        observed: dict[str, float | None] = dict(row)
        if norm:
            observed.setdefault(GRADIENT, row.get(table.gradient_norm, row.get(norm)))
            observed.setdefault(LARGEST_GRADIENT, row.get(norm))
        events += monitor.observe(int(row["step"]), observed)
    return [event for event in events if event.kind != "fallen" or run.batches_per_row == 1]


def not_judged(run: ForeignRun, table: Table) -> list[tuple[str, str, str]]:
    """Return the judgements that cannot be made: the warning or rule, its metric and the reason."""
    logged = {name for row in run.rows for name, value in row.items() if is_finite(value)}
    norm = gradient_norm(run, table)
    lines = []
    smoothed, _, _ = levels([row.get(REWARD) for row in run.rows])
    if not (smoothed > 0).any():
        reason = "the smoothed reward is never above 0, and a share of it has no meaning"
        if REWARD not in logged:
            reason = f"no metric of {table.title} in this log has this definition"
        lines.append(("collapse rule", REWARD, reason))
    for name, signal in SIGNALS.items():
        if signal.metric in logged or (name in OF_GRADIENTS and norm):
            continue
        possible = [entry for entry in table.entries if entry.ours == signal.metric]
        reason = f"{table.title} logs no metric of this definition"
        fitting = [
            entry for entry in possible if not entry.objectives or run.objective in entry.objectives
        ]
        if fitting:
            reason = f"this run has not logged {' or '.join(entry.theirs for entry in fitting)}"
        elif possible and not run.objective:
            reason = "the objective is not logged: set objective="
        elif possible:
            theirs = " or ".join(entry.theirs for entry in possible)
            reason = f"{theirs} has another definition with objective={run.objective}"
        lines.append((name, signal.metric, reason))
    return lines


def definitions(run: ForeignRun) -> list[tuple[str, str, str, str]]:
    """Return the metrics whose definitions differ from ours: name, relation, theirs, how."""
    lines = []
    for name, entry in sorted(run.relations.items(), key=lambda item: (not item[1].ours, item[0])):
        if entry.ours and not entry.note and entry.relation == "same":
            continue
        theirs = entry.theirs
        if entry.formula() != "x":
            theirs += f": {entry.formula()}"
        relation = "another definition" if entry.relation == OTHER else entry.relation
        lines.append((name, relation, theirs, entry.note))
    return lines
