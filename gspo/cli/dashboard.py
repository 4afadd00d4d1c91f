"""Makes W&B dashboards from the metric registry.

    gspo dashboard project=NAME entity=TEAM
    gspo dashboard project=NAME study=STUDY by=[objective.name,optim.lr]
    gspo dashboard by=options.objective       # gspo_tiny apart from gspo

There are eight saved views: Stability, Clipping, Routing, Routing Replay, Mismatch, Episodes,
Evaluation, Efficiency. Runs are grouped by objective and Routing Replay. A group is drawn as its
mean and range. That is over seeds if its runs differ in nothing else. If they do, a note names the
other settings.

With a W&B account, the views are saved in the project and their addresses are printed. They replace
the views that this command saved before. Without an account, the command writes the JSON for W&B
and prints the command to publish it.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo.analysis import load, sources
from gspo.analysis.sources import Record
from gspo.io.arguments import command_options, option
from gspo.io.errors import SettingError
from gspo.io.escaping import escape_line
from gspo.run.entry_point import command_line
from gspo.tracking.views import GROUP_BY, LEFT_OUT, VIEWS, View, recorded, unknown, unplaced
from gspo.tracking.wandb_choice import check_installed, default_project


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this command."""

    project: str = option(default_project(), "W&B project (as tracking.project of a run)")
    entity: str = option(
        os.environ.get("WANDB_ENTITY", ""), "W&B user or team (default: the account's own)"
    )
    study: str = option("", "only the runs of this study, in separate views")
    by: tuple[str, ...] = option(GROUP_BY, "settings to group runs by")
    runs: str = option(
        "runs",
        "run directories, offline files or wandb:ENTITY/PROJECT: panels whose metrics none of "
        "these runs has recorded are left out and named",
    )
    out: Path = option(Path("figures/dashboard"), "folder of the JSON")
    publish: bool = option(True, "save the views in W&B; false: only write the JSON")


def main() -> None:
    """Make the dashboards, with the options of the command line."""
    code: object = 0
    try:
        command_line(make)
    except SystemExit as end:
        code = end.code
    if "wandb" in sys.modules:
        # W&B's process sometimes does not end when it is asked to. This process would wait for it
        # forever. Everything has been sent by now, and W&B's process ends by itself after its
        # parent.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)


def make() -> None:
    """Arrange the views, write them as JSON, and save them in W&B if there is an account."""
    options = command_options(Options, __doc__)
    check(options)
    check_installed("gspo dashboard")
    # it imports W&B
    from gspo.tracking.dashboard import entity_to_publish, publish, workspace, write

    views, notes = checked_views(options.runs, options.by, options.study)
    account = entity_to_publish(options.entity) if options.publish else None
    entity = account or options.entity
    workspaces = [
        workspace(view, entity, options.project, options.by, options.study) for view in views
    ]
    for view, path in zip(views, write(workspaces, options.out), strict=True):
        print(f"{view.name:<14} {len(view.panels()):>3} panels  {path}")
    print("\n".join(map(escape_line, notes)))
    if not options.publish:
        return
    if account is None:
        print(f"not published. To publish: wandb login; {sys.argv[0]} {shlex.join(sys.argv[1:])}")
        return
    for name, address in publish(workspaces):
        print(f"{name}: {address}")


def check(options: Options) -> None:
    """Raise ValueError for a project or a study that W&B cannot have."""
    if not options.project:
        raise ValueError("project=: name a W&B project")
    if not re.fullmatch(r"[\w.,+ -]*", options.study):
        raise SettingError(
            "study", options.study, "W&B's filters take letters, digits, spaces and _ . , + - alone"
        )


def checked_views(runs: str, keys: Sequence[str], study: str) -> tuple[tuple[View, ...], list[str]]:
    """Return the views, and notes on the panels and runs that are left out.

    The views are checked against the registry and against the metrics that the runs recorded."""
    if unplaced():
        raise ValueError(
            f"on no panel of gspo/tracking/views.py, nor in its LEFT_OUT: {', '.join(unplaced())}"
        )
    notes = [f"left out on purpose: {name} ({why})" for name, why in LEFT_OUT.items()]
    exists = runs.startswith(sources.SERVER) or Path(runs).exists()
    records: list[Record] = []
    for record in sources.records(runs) if exists else []:
        if not len(record.rows) or study not in ("", record.settings.get("study")):
            continue
        unknown_metrics = unknown(reported(record))
        if unknown_metrics:
            metric = unknown_metrics[0]
            notes.append(f"left out: {record.path} has recorded {metric}, which is on no panel")
        else:
            records.append(record)
    source = f"{runs} of study {study}" if study else runs
    grouped_by = ",".join(keys)
    if not records:
        notes.append(
            f"no run under {source}: by=[{grouped_by}] and the panels are checked against the "
            "registry alone"
        )
        return VIEWS, notes
    for key in keys:
        if not any(key in record.settings for record in records):
            raise ValueError(f"by=[{grouped_by}]: no run under {source} has the setting {key!r}")
    views, missing = recorded(VIEWS, {name for record in records for name in reported(record)})
    if missing:
        notes.append(f"left out, for no run under {source} has recorded them: {', '.join(missing)}")
    return views, notes + mixed_groups(records, keys)


def reported(record: Record) -> list[str]:
    """Return the metrics for which a run has at least one value."""
    return list(record.rows.columns[record.rows.notna().any()])


def mixed_groups(records: list[Record], group_by: Sequence[str]) -> list[str]:
    """Return a note if the runs of a group differ in more than the seed: its mean would hide it."""
    groups: dict[object, list[Record]] = {}
    for record in records:
        values = tuple(record.settings.get(key) for key in group_by)
        groups.setdefault(values, []).append(record)
    keys = sorted({key for group in groups.values() for key in load.differing(group)})
    studies = {str(record.settings.get("study")) for record in records}
    differences = keys[:6]
    if len(studies) > 1:
        differences.insert(0, f"{len(studies)} studies")
    if not differences:
        return []
    if len(keys) > 6:
        differences.append("...")
    text = ", ".join(differences)
    return [
        f"by=[{','.join(group_by)}] draws means over {text} beside seeds: study= chooses one study, "
        "by= other settings"
    ]
