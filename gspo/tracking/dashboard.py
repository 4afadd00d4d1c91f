"""W&B's saved views, made from gspo.tracking.views: built, checked, written as the JSON that W&B is sent, published.

A view's address is a function of entity, project and name, so publishing again replaces it and makes no second one.
wandb_workspaces is W&B's own library for this (docs.wandb.ai, "Programmatic workspaces"); the parts with an underscore
are private to it, so its version is pinned and tests/unit/tracking/test_dashboard.py holds what is used of it.
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

from gspo.core.files import replace_text
from gspo.tracking.views import STEP, Panel, View
from gspo.tracking.wandb_run import account

GROUP_BY = ("objective.name", "policy.routing_replay")  # the arms of the paper: GRPO with replay is one of its own
LINES = 50  # groups or runs that a panel draws at most
PREFIX = "GSPO: "  # of the saved views' names, to tell them from those that people make


def workspace(view: View, entity: str, project: str, by: tuple[str, ...] = GROUP_BY, study: str = "") -> ws.Workspace:
    """A saved view of a study's runs, or of all of the project: grouped by the settings `by`, each group drawn as its
    mean and the range of its runs; W&B knows no 95 % interval, and everything else here that has a ± means that."""
    by = (view.by,) if view.by else by
    sections = []
    for name, panels in view.sections:
        about = "\n\n".join(f"**{panel.title()}**  \n{_lines(panel)}" for panel in panels)
        drawn = [_line_plot(panel) for panel in panels]
        sections.append(ws.Section(name=name, is_open=True, panels=[*drawn, wr.MarkdownPanel(markdown=about)]))
    made = ws.Workspace(
        entity=entity,
        project=project,
        name=f"{PREFIX}{view.name}" + (f" ({study})" if study else ""),
        auto_generate_panels=False,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=LINES),
        runset_settings=ws.RunsetSettings(groupby=[ws.Config(key) for key in by], filters=_filters(view, study)),
    )
    address = hashlib.sha256(f"{entity}/{project}/{view.name}/{study}".encode()).hexdigest()[:11]
    made._internal_name = internal._url_query_str_to_internal_name(address)
    return made


def _filters(view: View, study: str) -> expr.And:
    """Of the view and the study; runs that hold a report's pictures are none to look at."""
    chosen = [ws.Metric("JobType") == "train"]
    if study:
        chosen.append(ws.Metric("Group") == study)  # or what WANDB_RUN_GROUP put in its place
    if view.only:
        chosen.append(expr.Tags().isin([view.only]))
    return expr.And(*chosen)


def _lines(panel: Panel) -> str:
    """The description as W&B's Markdown: a line each, stars as they are."""
    return panel.description().replace("*", r"\*").replace("\n", "  \n")


def _line_plot(panel: Panel) -> wr.LinePlot:
    """Its lines are the groups of the view's runs: a panel's own grouping would take one key alone."""
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
    """The regular expression of a family's names."""
    return "^" + ".+".join(re.escape(part) for part in family.split("*")) + "$"


def spec(made: ws.Workspace) -> dict:
    """What W&B is sent of a view, without the panels' random ids: the same view gives the same text."""
    text = made._to_model().model_dump_json(by_alias=True, exclude_none=True)
    return json.loads(text, object_hook=lambda node: {key: value for key, value in node.items() if key != "__id__"})


def write(made: list[ws.Workspace], folder: Path) -> list[Path]:
    """One JSON file per view."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (each.name.removeprefix(PREFIX).lower() for each in made)
    paths = [folder / f"{re.sub(r'[^a-z0-9]+', '_', name).strip('_')}.json" for name in names]
    for each, path in zip(made, paths, strict=True):
        replace_text(path, json.dumps(spec(each), indent=1) + "\n")
    return paths


def home(entity: str) -> str | None:
    """The entity to publish under: the one asked for, or the account's default; None without an account. Raises
    ValueError if W&B does not say which."""
    if not account():
        return None
    if entity:
        return entity
    try:
        default = wandb.Api().default_entity
    except (wandb.Error, WandbApiFailedError) as error:
        raise ValueError(f"W&B does not answer: {error}; publish=no writes the JSON alone") from None
    if not default:
        raise ValueError("entity=: the account has no default; say entity=TEAM")
    return default


def publish(made: list[ws.Workspace]) -> Iterator[tuple[str, str]]:
    """Save the views of one project, each over the one of its address if there is one; yields names and where they are
    to be seen. Raises ValueError with W&B's words when it refuses."""
    try:
        create_project(made[0].entity, made[0].project)
        for each in made:
            try:
                each._internal_id = internal.View.from_name(each.entity, each.project, each._internal_name).id
            except ValueError:  # what wandb_workspaces raises when there is none of that name
                each._internal_id = ""
            yield each.name, each.save().url
    except (wandb.Error, WandbApiFailedError) as error:
        raise ValueError(f"W&B did not save the views of {made[0].entity}/{made[0].project}: {error}") from None


def create_project(entity: str, project: str) -> None:
    """Views need a project that is there; no run may have made it yet."""
    api = wandb.Api()
    if project not in {each.name for each in api.projects(entity)}:
        api.create_project(project, entity)
