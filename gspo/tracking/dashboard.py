"""Makes W&B's saved views from gspo.tracking.views, writes them as the JSON that W&B is sent, and
publishes them.

A view's address is a function of entity, project, name and study, so publishing it again replaces
it. wandb_workspaces is W&B's own library for this (docs.wandb.ai, "Programmatic workspaces"). Names
with an underscore are private to it, so its version is pinned, and
tests/unit/tracking/test_dashboard.py tests what is used of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb.sdk.lib.service.service_connection import WandbApiFailedError
from wandb_workspaces import expr
from wandb_workspaces.workspaces import internal

from gspo.io.files import replace_text
from gspo.tracking.views import GROUP_BY, STEP, Panel, View
from gspo.tracking.wandb_choice import account

LINES = 50  # the largest number of groups or runs that a panel draws
PREFIX = "GSPO: "  # begins the saved views' names, to tell them from views that people make by hand


def workspace(
    view: View, entity: str, project: str, by: tuple[str, ...] = GROUP_BY, study: str = ""
) -> ws.Workspace:
    """Return the saved view of a study's runs, or without `study` of all runs of the project.

    Runs are grouped by the settings `by`. A group is drawn as its mean and the range of its runs,
    because W&B has no 95 % intervals, which a ± means everywhere else in this project."""
    by = (view.by,) if view.by else by
    sections = []
    for name, panels in view.sections:
        about = "\n\n".join(f"**{panel.title()}**  \n{_lines(panel)}" for panel in panels)
        drawn = [_line_plot(panel) for panel in panels]
        sections.append(
            ws.Section(name=name, is_open=True, panels=[*drawn, wr.MarkdownPanel(markdown=about)])
        )
    made = ws.Workspace(
        entity=entity,
        project=project,
        name=f"{PREFIX}{view.name}" + (f" ({study})" if study else ""),
        auto_generate_panels=False,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=LINES),
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Config(key) for key in by], filters=_filters(view, study)
        ),
    )
    address = hashlib.sha256(f"{entity}/{project}/{view.name}/{study}".encode()).hexdigest()[:11]
    made._internal_name = internal._url_query_str_to_internal_name(address)
    return made


def _filters(view: View, study: str) -> expr.And:
    """Return the filter for the view's and the study's runs; it leaves out runs that only hold a
    report's pictures.
    """
    chosen = [ws.Metric("JobType") == "train"]
    if study:
        chosen.append(ws.Metric("Group") == study)  # or the value of WANDB_RUN_GROUP
    if view.only:
        chosen.append(expr.Tags().isin([view.only]))
    return expr.And(*chosen)


def _lines(panel: Panel) -> str:
    """Return a panel's description in W&B's Markdown, one line per metric, with stars kept as they
    are.
    """
    return panel.description().replace("*", r"\*").replace("\n", "  \n")


def _line_plot(panel: Panel) -> wr.LinePlot:
    """Return W&B's line plot of a panel. Its lines are the groups of the view's runs, because a
    panel's own grouping would allow one key only."""
    family = [name for name in panel.metrics if "*" in name]
    return wr.LinePlot(
        title=panel.title(),
        x=panel.x,
        y=[] if family else list(panel.metrics),
        metric_regex=pattern(family[0]) if family else None,
        log_y=panel.log,
        title_x=panel.x,
        title_y=panel.unit(),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_runs_to_show=LINES,
    )


def pattern(family: str) -> str:
    """Return the regular expression that matches a family's names."""
    return "^" + ".+".join(re.escape(part) for part in family.split("*")) + "$"


def spec(made: ws.Workspace) -> dict:
    """Return what W&B is sent of a view, without the panels' random ids, so that equal views give
    equal text.
    """
    text = made._to_model().model_dump_json(by_alias=True, exclude_none=True)
    return json.loads(
        text,
        object_hook=lambda node: {key: value for key, value in node.items() if key != "__id__"},
    )


def write(made: list[ws.Workspace], folder: Path) -> list[Path]:
    """Write one JSON file per view, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (each.name.removeprefix(PREFIX).lower() for each in made)
    paths = [folder / f"{re.sub(r'[^a-z0-9]+', '_', name).strip('_')}.json" for name in names]
    for each, path in zip(made, paths, strict=True):
        replace_text(path, json.dumps(spec(each), indent=1) + "\n")
    return paths


def home(entity: str) -> str | None:
    """Return the entity to publish under: the one asked for, else the account's default; None
    without an account.

    Raises ValueError if W&B does not name a default."""
    if not account():
        return None
    if entity:
        return entity
    try:
        default = wandb.Api().default_entity
    except (wandb.Error, WandbApiFailedError) as error:
        raise ValueError(
            f"W&B does not answer: {error}; publish=no writes the JSON alone"
        ) from None
    if not default:
        raise ValueError("entity=: the account has no default; say entity=TEAM")
    return default


def publish(made: list[ws.Workspace]) -> Iterator[tuple[str, str]]:
    """Save the views of one project, replacing those of the same address; yield each view's name
    and URL.

    Raises ValueError with W&B's message if it refuses."""
    try:
        create_project(made[0].entity, made[0].project)
        for each in made:
            try:
                each._internal_id = internal.View.from_name(
                    each.entity, each.project, each._internal_name
                ).id
            except ValueError:  # wandb_workspaces raises this if there is no view of that name
                each._internal_id = ""
            yield each.name, each.save().url
    except (wandb.Error, WandbApiFailedError) as error:
        raise ValueError(
            f"W&B did not save the views of {made[0].entity}/{made[0].project}: {error}"
        ) from None


def create_project(entity: str, project: str) -> None:
    """Create the project if it is not there: views need it, and it may have no run yet."""
    api = wandb.Api()
    if project not in {each.name for each in api.projects(entity)}:
        api.create_project(project, entity)
