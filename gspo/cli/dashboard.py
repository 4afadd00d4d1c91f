"""W&B dashboards from the metric registry: `gspo dashboard project=NAME [entity=TEAM]`

Eight saved views: Stability, Clipping, Routing, Routing Replay, Mismatch, Episodes, Evaluation,
Efficiency. Runs are grouped by objective and Routing Replay, and a group is drawn as its mean and
range: over seeds, if nothing else differs in it (what does is said). With a W&B account they are
saved in the project, over the ones that this command saved before, and their addresses printed;
without one, the JSON that W&B would be sent is written and the command to publish is printed.

  project=NAME    W&B project (default: WANDB_PROJECT, else gspo, as tracking.project)
  entity=TEAM     W&B user or team (default: WANDB_ENTITY, else the account's own)
  study=NAME      the runs of one study alone, in views of their own (default: all runs of the
                  project)
  by=SETTING,...  what runs are grouped by (default: objective.name,policy.routing_replay); e.g.
                  by=options.objective (gspo_tiny apart from gspo), by=objective.name,optim.lr
  runs=PATH       run directories, offline files or wandb:ENTITY/PROJECT: which metrics there are
                  (default: runs); panels that none of them has recorded are left out, and named
  out=FOLDER      where the JSON goes (default: figures/dashboard)
  publish=no      write the JSON alone
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from gspo.analysis import load, sources
from gspo.analysis.sources import Record
from gspo.io.arguments import key_values
from gspo.io.escaping import escape_line
from gspo.run.entry_point import command_line
from gspo.tracking.views import GROUP_BY, LEFT_OUT, VIEWS, View, recorded, unknown, unplaced
from gspo.tracking.wandb_choice import check_installed, default_project

DEFAULTS = {
    "project": default_project(),
    "entity": os.environ.get("WANDB_ENTITY", ""),
    "study": "",
    "by": ",".join(GROUP_BY),
    "runs": "runs",
    "out": "figures/dashboard",
    "publish": "yes",
}


def main() -> None:
    """Make the dashboards that the command line asks for."""
    code: object = 0
    try:
        command_line(make)
    except SystemExit as end:
        code = end.code
    if "wandb" in sys.modules:
        # W&B's process was seen not to end when it was asked to, and this one would wait for it for
        # ever. Everything has been sent by now, and W&B's process ends by itself once its parent is
        # gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)


def make() -> None:
    """Arrange the views, write them as JSON, and save them in W&B if there is an account."""
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return
    chosen = options(arguments)
    check_installed("gspo dashboard")
    from gspo.tracking.dashboard import home, publish, workspace, write  # it imports W&B

    views, notes = arranged(chosen["runs"], chosen["by"], chosen["study"])
    entity = home(chosen["entity"]) if chosen["publish"] == "yes" else None
    place = entity or chosen["entity"], chosen["project"]
    made = [
        workspace(view, *place, tuple(chosen["by"].split(",")), chosen["study"]) for view in views
    ]
    for view, path in zip(views, write(made, Path(chosen["out"])), strict=True):
        print(f"{view.name:<14} {len(view.panels()):>3} panels  {path}")
    print("\n".join(map(escape_line, notes)))
    if chosen["publish"] == "no":
        return
    if entity is None:
        asked = [
            shlex.quote(f"{key}={value}") for key, value in chosen.items() if value != DEFAULTS[key]
        ]
        print(f"not published. To publish: wandb login; {sys.argv[0]}", *asked)
        return
    for name, address in publish(made):
        print(f"{name}: {address}")


def options(arguments: list[str]) -> dict[str, str]:
    """Return the command line over DEFAULTS. Raises ValueError for what it does not know."""
    chosen, _ = key_values(arguments, DEFAULTS)
    if not chosen["project"]:
        raise ValueError("project=: name a W&B project")
    if not re.fullmatch(r"[\w.,+ -]*", chosen["study"]):
        raise ValueError(
            f"study={chosen['study']}: W&B's filters take letters, digits, spaces and _ . , + - alone"
        )
    if chosen["publish"] not in ("yes", "no"):
        raise ValueError(f"publish={chosen['publish']}: choose yes or no")
    return chosen


def arranged(runs: str, grouped_by: str, study: str) -> tuple[tuple[View, ...], list[str]]:
    """Return the views, checked against the registry and against what runs have recorded, and the
    notes on what was left out."""
    if unplaced():
        raise ValueError(
            f"on no panel of gspo/tracking/views.py, nor in its LEFT_OUT: {', '.join(unplaced())}"
        )
    notes = [f"left out on purpose: {name} ({why})" for name, why in LEFT_OUT.items()]
    found = sources.records(runs) if runs.startswith(sources.SERVER) or Path(runs).exists() else []
    found = [
        record
        for record in found
        if len(record.rows) and study in ("", record.settings.get("study"))
    ]
    found, strange = of_this_version(found)
    notes += [
        f"left out: {record.path} has recorded {name}, which is on no panel"
        for record, name in strange
    ]
    where = f"{runs}" + (f" of study {study}" if study else "")
    if not found:
        return VIEWS, [
            *notes,
            f"no run under {where}: by={grouped_by} and the panels are checked against the registry alone",
        ]
    for key in grouped_by.split(","):
        if not any(key in record.settings for record in found):
            raise ValueError(f"by={grouped_by}: no run under {where} has the setting {key!r}")
    views, missing = recorded(VIEWS, {name for record in found for name in reported(record)})
    if missing:
        notes.append(f"left out, for no run under {where} has recorded them: {', '.join(missing)}")
    return views, notes + mixed(found, grouped_by)


def of_this_version(found: list[Record]) -> tuple[list[Record], list[tuple[Record, str]]]:
    """Return the runs whose metrics are all in the registry, and the others, each with one metric
    that is not.
    """
    strange = [(record, name) for record in found for name in unknown(reported(record))[:1]]
    others = {id(record) for record, _ in strange}
    return [record for record in found if id(record) not in others], strange


def reported(record: Record) -> list[str]:
    return list(record.rows.columns[record.rows.notna().any()])


def mixed(found: list[Record], grouped_by: str) -> list[str]:
    """Return a note if a group would contain runs that differ in more than the seed, so that its
    mean would hide that."""
    groups: dict[object, list[Record]] = {}
    for record in found:
        groups.setdefault(
            tuple(record.settings.get(key) for key in grouped_by.split(",")), []
        ).append(record)
    keys = sorted({key for group in groups.values() for key in load.differing(group)})
    studies = {str(record.settings.get("study")) for record in found}
    several = [f"{len(studies)} studies"] if len(studies) > 1 else []
    if not several and not keys:
        return []
    over = ", ".join([*several, *keys[:6]]) + (", ..." if len(keys) > 6 else "")
    return [
        f"by={grouped_by} draws means over {over} beside seeds: study= chooses one study, by= other settings"
    ]
