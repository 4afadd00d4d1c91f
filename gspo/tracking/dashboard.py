"""Makes W&B's saved views from gspo.tracking.views, writes them as JSON, and publishes them.

A view's address is a function of entity, project, name and study, so publishing a view again
replaces it. wandb_workspaces is W&B's own library for this (docs.wandb.ai, "Programmatic
workspaces"). Names with an underscore are private to this library. So its version is pinned, and
tests/unit/tracking/test_dashboard.py tests the names that are used.
"""

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

MAX_LINES = 50  # the largest number of groups or runs that a panel draws
PREFIX = "GSPO: "  # of the saved views' names: views that people make by hand have other names


def workspace(
    view: View, entity: str, project: str, by: tuple[str, ...] = GROUP_BY, study: str = ""
) -> ws.Workspace:
    """Return the saved view of a study's runs, or without `study` of all runs of the project.

    Runs are grouped by the settings `by`. A group is drawn as its mean and the range of its runs.
    It has no 95 % interval, as a ± has everywhere else in this project, because W&B has none."""
    if view.by:
        by = (view.by,)
    name = f"{PREFIX}{view.name}"
    if study:
        name += f" ({study})"
    sections = []
    for title, panels in view.sections:
        text = "\n\n".join(f"**{panel.title()}**  \n{_lines(panel)}" for panel in panels)
        plots = [_line_plot(panel) for panel in panels]
        sections.append(
            ws.Section(name=title, is_open=True, panels=[*plots, wr.MarkdownPanel(markdown=text)])
        )
    saved_view = ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        auto_generate_panels=False,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=MAX_LINES),
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Config(key) for key in by], filters=_filters(view, study)
        ),
    )
    address = hashlib.sha256(f"{entity}/{project}/{view.name}/{study}".encode()).hexdigest()[:11]
    saved_view._internal_name = internal._url_query_str_to_internal_name(address)
    return saved_view


def _filters(view: View, study: str) -> expr.And:
    """Return the filter for the runs of the view and of the study.

    It leaves out runs that contain only the pictures of a report."""
    conditions = [ws.Metric("JobType") == "train"]
    if study:
        conditions.append(ws.Metric("Group") == study)  # or the value of WANDB_RUN_GROUP
    if view.only:
        conditions.append(expr.Tags().isin([view.only]))
    return expr.And(*conditions)


def _lines(panel: Panel) -> str:
    """Return a panel's description in W&B's Markdown, one line per metric, with escaped stars."""
    return panel.description().replace("*", r"\*").replace("\n", "  \n")


def _line_plot(panel: Panel) -> wr.LinePlot:
    """Return W&B's line plot of a panel.

    Its lines are the groups of the view's runs, because W&B groups a panel's runs by a single key.
    """
    families = [name for name in panel.metrics if "*" in name]
    return wr.LinePlot(
        title=panel.title(),
        x=panel.x,
        y=[] if families else list(panel.metrics),
        metric_regex=pattern(families[0]) if families else None,
        log_y=panel.log,
        title_x=panel.x,
        title_y=panel.unit(),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_runs_to_show=MAX_LINES,
    )


def pattern(family: str) -> str:
    """Return the regular expression that matches a family's names."""
    return "^" + ".+".join(re.escape(part) for part in family.split("*")) + "$"


def spec(saved_view: ws.Workspace) -> dict:
    """Return a view as it is sent to W&B, without the panels' random ids.

    Equal views give equal results."""
    text = saved_view._to_model().model_dump_json(by_alias=True, exclude_none=True)
    return json.loads(
        text,
        object_hook=lambda node: {key: value for key, value in node.items() if key != "__id__"},
    )


def write(saved_views: list[ws.Workspace], folder: Path) -> list[Path]:
    """Write one JSON file per view, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for saved_view in saved_views:
        name = saved_view.name.removeprefix(PREFIX).lower()
        stem = re.sub(r"[^a-z0-9]+", "_", name).strip("_")
        path = folder / f"{stem}.json"
        replace_text(path, json.dumps(spec(saved_view), indent=1) + "\n")
        paths.append(path)
    return paths


def entity_to_publish(entity: str) -> str | None:
    """Return the entity to publish under: `entity`, or the account's default if it is empty.

    Returns None without an account. Raises ValueError if W&B does not name a default."""
    if not account():
        return None
    if entity:
        return entity
    try:
        default = wandb.Api().default_entity
    except (wandb.Error, WandbApiFailedError) as error:
        raise ValueError(
            f"W&B does not answer: {error}; publish=false writes the JSON alone"
        ) from None
    if not default:
        raise ValueError("entity=: the account has no default; set entity=TEAM")
    return default


def publish(saved_views: list[ws.Workspace]) -> Iterator[tuple[str, str]]:
    """Save the views of one project, and yield each view's name and URL.

    A view replaces the view with the same address. Raises ValueError with W&B's message if W&B
    refuses."""
    entity = saved_views[0].entity
    project = saved_views[0].project
    try:
        create_project(entity, project)
        for view in saved_views:
            try:
                existing = internal.View.from_name(view.entity, view.project, view._internal_name)
                view._internal_id = existing.id
            except ValueError:  # wandb_workspaces raises this if no view has this name
                view._internal_id = ""
            yield view.name, view.save().url
    except (wandb.Error, WandbApiFailedError) as error:
        raise ValueError(f"W&B did not save the views of {entity}/{project}: {error}") from None


def create_project(entity: str, project: str) -> None:
    """Create the project if it does not exist, because views need it."""
    api = wandb.Api()
    if project not in {existing.name for existing in api.projects(entity)}:
        api.create_project(project, entity)
