"""W&B dashboards from the metric registry: `python experiments/dashboard.py project=NAME [entity=TEAM]`

Six saved views: Stability, Clipping, Routing, Mismatch, Evaluation, Efficiency. Runs are grouped by objective, seeds
averaged (mean, standard error). With a W&B account they are saved in the project, over the ones that this command saved
before, and their addresses printed; without one, the JSON that W&B would be sent is written and the command to publish
is printed.

  project=NAME    W&B project (default: gspo, as tracking.project)
  entity=TEAM     W&B user or team (default: the account's own)
  by=SETTING      what runs are grouped by (default: objective.name); e.g. by=policy.routing_replay, by=optim.lr
  runs=PATH       run directories, offline files or wandb:ENTITY/PROJECT: which metrics there are (default: runs);
                  panels that none of them has recorded are left out, and named
  out=FOLDER      where the JSON goes (default: figures/dashboard)
  publish=no      write the JSON alone
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "analysis"))

import sources

from gspo.dashboard import home, publish, workspace, write
from gspo.process import command_line
from gspo.views import LEFT_OUT, VIEWS, View, recorded, unplaced

DEFAULTS = {
    "project": "gspo",
    "entity": "",
    "by": "objective.name",
    "runs": "runs",
    "out": "figures/dashboard",
    "publish": "yes",
}


def main() -> None:
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return
    chosen = options(arguments)
    views, notes = arranged(chosen["runs"], chosen["by"])
    entity = home(chosen["entity"]) if chosen["publish"] == "yes" else None
    made = [workspace(view, entity or chosen["entity"], chosen["project"], chosen["by"]) for view in views]
    for view, path in zip(views, write(made, Path(chosen["out"])), strict=True):
        print(f"{view.name:<11} {len(view.panels()):>3} panels  {path}")
    print("\n".join(notes))
    if entity is None:
        asked = [f"{key}={value}" for key, value in chosen.items() if value != DEFAULTS[key] and key != "publish"]
        print("not published. To publish: wandb login; python experiments/dashboard.py", *asked)
        return
    for name, address in publish(made):
        print(f"{name}: {address}")


def options(arguments: list[str]) -> dict[str, str]:
    """The command line over DEFAULTS. Raises ValueError for what it does not know."""
    chosen = dict(DEFAULTS)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in chosen or not equals:
            raise ValueError(f"{argument!r}: the options are {', '.join(f'{name}=' for name in DEFAULTS)}; see --help")
        chosen[key] = value
    if chosen["publish"] not in ("yes", "no"):
        raise ValueError(f"publish={chosen['publish']}: choose yes or no")
    return chosen


def arranged(runs: str, by: str) -> tuple[tuple[View, ...], list[str]]:
    """The views, checked against the registry and against what runs have recorded; and what is to be said of that."""
    if unplaced():
        raise ValueError(f"on no panel of gspo/views.py, nor in its LEFT_OUT: {', '.join(unplaced())}")
    notes = [f"left out on purpose: {name} ({why})" for name, why in LEFT_OUT.items()]
    found = sources.records(runs) if runs.startswith(sources.SERVER) or Path(runs).exists() else []
    if not found:
        return VIEWS, [*notes, f"no run under {runs}: the panels are checked against the registry alone"]
    if not any(by in record.settings for record in found):
        raise ValueError(f"by={by}: no run under {runs} has this setting")
    names = {name for record in found for name in record.rows.columns[record.rows.notna().any()]}
    views, missing = recorded(VIEWS, names)
    if missing:
        notes.append(f"left out, for no run under {runs} has recorded them: {', '.join(missing)}")
    return views, notes


if __name__ == "__main__":
    command_line(main)
