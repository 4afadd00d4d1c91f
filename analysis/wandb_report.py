"""A study's report as a W&B Report, by W&B's own library for it (wandb_workspaces.reports.v2).

A report shows pictures that a run has logged: they go into a run of job type "report" in the same project. Beside them
stand live panels of the study's runs, grouped by objective, and links to them. Saving again replaces the report.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import study_report
import wandb
import wandb_workspaces.reports.v2 as wr
from blocks import Block, Figure, Folded, Heading, Items, Link, Table, Text, to_markdown
from load import Data, Run, die
from wandb.sdk.lib.service.service_connection import WandbApiFailedError

LIVE = ("reward/mean", "clip/token_active", "routing/consistency", "optim/grad_norm")
GROUP_BY = "objective.name"


def publish(address: str, title: str, study: str, data: Data, opening: Sequence[Block], figures: list[Path]) -> str:
    """Save the report in ENTITY/PROJECT; returns where it is to be seen. Dies without an account and when refused."""
    entity, _, project = address.partition("/")
    if not entity or not project or "/" in project:
        die(f"--publish {address}: write ENTITY/PROJECT")
    try:
        pictures = upload(entity, project, study, figures)
        made = report(entity, project, title, study, data, opening, pictures)
        made.id = saved_before(entity, project, title)
        return made.save().url
    except (wandb.Error, WandbApiFailedError, ValueError) as error:
        die(f"W&B did not save the report in {address}: {error}")


def upload(entity: str, project: str, study: str, figures: list[Path]) -> dict[str, str]:
    """Log the figures to one run per study; returns its name and the keys under which they are: {key: name}."""
    name = f"figures of {study}"
    with (
        tempfile.TemporaryDirectory() as folder,
        wandb.init(
            entity=entity,
            project=project,
            id="report" + hashlib.sha256(study.encode()).hexdigest()[:10],
            name=name,
            job_type="report",
            dir=folder,
            mode="online",
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        ) as run,
    ):
        run.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in figures})
    return {f"figures/{path.stem}": name for path in figures}


def report(
    entity: str, project: str, title: str, study: str, data: Data, opening: Sequence[Block], pictures: dict[str, str]
) -> wr.Report:
    """The report, not saved yet."""
    shown = wr.Runset(entity, project, name="figures", filters=f"Name = '{next(iter(pictures.values()))}'")
    live = wr.Runset(entity, project, name=study, filters=f"Group = '{study}'", groupby=[f"config.{GROUP_BY}"])
    at = addresses(entity, project)
    return wr.Report(
        entity=entity,
        project=project,
        title=title,
        width="fixed",
        blocks=[
            *(part for block in opening for part in as_wandb(block)),
            wr.H2("Figures"),
            wr.PanelGrid(
                runsets=[shown],
                hide_run_sets=True,
                panels=[
                    wr.MediaBrowser(title=key, media_keys=[key], num_columns=1, layout=wr.Layout(0, 16 * i, 24, 16))
                    for i, key in enumerate(pictures)
                ],
            ),
            wr.H2("The runs, live"),
            wr.PanelGrid(runsets=[live], panels=[live_panel(metric, i) for i, metric in enumerate(LIVE)]),
            wr.H2("Runs"),
            *as_wandb(study_report.runs(data, lambda run: linked(run, at))),
        ],
    )


def live_panel(metric: str, place: int) -> wr.LinePlot:
    return wr.LinePlot(
        title=metric,
        x="step",
        y=[metric],
        groupby=wr.Config(GROUP_BY),
        groupby_aggfunc="mean",
        groupby_rangefunc="stderr",
        layout=wr.Layout(12 * (place % 2), 8 * (place // 2), 12, 8),
    )


def as_wandb(block: Block) -> list[wr.Block]:
    """One of our parts as theirs. Tables are Markdown: W&B's own tables show runs alone."""
    match block:
        case Heading(text):
            return [wr.H2(text)]
        case Text(text):
            return [wr.P(text)]
        case Items(texts):
            return [wr.UnorderedList(items=list(texts))]
        case Folded(title, text):
            return [wr.H3(title), wr.CodeBlock(code=text, language="yaml")]
        case Table() | Figure():
            return [wr.MarkdownBlock(to_markdown("", [block], Path()).removeprefix("# \n\n"))]


def addresses(entity: str, project: str) -> dict[str, str]:
    """Where the project's runs are to be seen, by id."""
    return {run.id: run.url for run in wandb.Api().runs(f"{entity}/{project}")}


def linked(run: Run, at: dict[str, str]) -> Link | str:
    """The run's name, and its page if the project has it."""
    file = run.path / "wandb_id"
    identity = file.read_text().strip() if file.exists() else run.id
    return Link(run.path.name, at[identity]) if identity in at else run.path.name


def saved_before(entity: str, project: str, title: str) -> str:
    """The id of the report of this title, empty if there is none."""
    return next((each.id for each in wandb.Api().reports(f"{entity}/{project}") if each.display_name == title), "")
