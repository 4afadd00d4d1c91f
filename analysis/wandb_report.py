"""A study's report as a W&B Report, written with W&B's own library for it
(wandb_workspaces.reports.v2).

A report shows pictures that a run has logged, so they go into a run of job type "report" in the
same project. Beside them stand live panels of the study's runs, grouped by objective where the arms
differ in nothing else, and links to the runs. Saving again replaces the report.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import wandb
import wandb_workspaces.reports.v2 as wr
from gspo.analysis import sources, study_parts
from gspo.analysis.blocks import Block, Folded, Heading, Items, Link, Table, Text, to_markdown
from gspo.analysis.load import Data, Run, die
from wandb.sdk.lib.service.service_connection import WandbApiFailedError
from wandb_workspaces import expr

LIVE = ("reward/mean", "clip/token_active", "routing/consistency", "optim/grad_norm")
GROUP_BY = "objective.name"
MADE = "Made by analysis/study_report.py, which replaces it"


def check(address: str, data: Data) -> None:
    """Raise Refused, before anything is drawn, if the report cannot be published at this address."""
    entity, _, project = address.partition("/")
    if not entity or not project or "/" in project:
        die(f"--publish {address}: write ENTITY/PROJECT")
    if odd := [name for name in studies(data) if not re.fullmatch(r"[\w.,+ -]+", name)]:
        die(f"study {odd[0]!r}: W&B's filters take letters, digits, spaces and _ . , + - alone")
    if not sources.signed_in():
        die(f"--publish {address}: no W&B account is configured on this machine: wandb login")


def publish(
    address: str, title: str, data: Data, words: Sequence[Block], figures: list[Path]
) -> str:
    """Save the report in ENTITY/PROJECT and return its address. Raises Refused when W&B refuses it."""
    entity, _, project = address.partition("/")
    name = f"figures: {title}"
    try:
        made = report(
            entity, project, title, data, words, name, upload(entity, project, name, figures)
        )
        made.id = saved_before(made)
        return made.save().url
    except (wandb.Error, WandbApiFailedError, ValueError) as error:
        die(f"W&B did not save the report in {address}: {error}")


def studies(data: Data) -> list[str]:
    """Return the names of the studies, sorted."""
    return sorted({str(run.settings.get("study")) for run in data.runs})


def upload(entity: str, project: str, name: str, figures: list[Path]) -> list[str]:
    """Log the figures to the one run of this name and return the keys under which they are stored."""
    pictures = {f"figures/{path.stem}": wandb.Image(str(path)) for path in figures}
    with (
        tempfile.TemporaryDirectory() as folder,
        wandb.init(
            entity=entity,
            project=project,
            id="report" + hashlib.sha256(name.encode()).hexdigest()[:10],
            name=name,
            job_type="report",
            dir=folder,
            mode="online",
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        ) as run,
    ):
        run.log(pictures)
    return list(pictures)


def report(
    entity: str,
    project: str,
    title: str,
    data: Data,
    words: Sequence[Block],
    drawn_by: str,
    pictures: list[str],
) -> wr.Report:
    """Return the report, not saved yet; `pictures` are the keys that the run named `drawn_by`
    holds.
    """
    shown = wr.Runset(
        entity, project, name="figures", filters=expr.And(expr.Metric("Name") == drawn_by)
    )
    chosen = expr.And(expr.Metric("Group").isin(studies(data)), expr.Metric("JobType") == "train")
    live = wr.Runset(entity, project, name="runs", filters=chosen)
    grouped_by = (
        GROUP_BY if len({run.settings[GROUP_BY] for run in data.runs}) == len(data.arms) else ""
    )
    at = addresses(entity, project)
    return wr.Report(
        entity=entity,
        project=project,
        title=title[:128],  # as long as W&B allows
        description=MADE,
        width="fixed",
        blocks=[
            *(part for block in words for part in as_wandb(block)),
            wr.H2("Figures"),
            wr.PanelGrid(
                runsets=[shown],
                hide_run_sets=True,
                panels=[
                    wr.MediaBrowser(
                        title=key,
                        media_keys=[key],
                        num_columns=1,
                        layout=wr.Layout(0, 16 * i, 24, 16),
                    )
                    for i, key in enumerate(pictures)
                ],
            ),
            wr.H2("The runs, live"),
            wr.P("Mean and range of the runs, by objective." if grouped_by else "A line per run."),
            wr.PanelGrid(
                runsets=[live],
                panels=[live_panel(metric, i, grouped_by) for i, metric in enumerate(LIVE)],
            ),
            wr.H2("Runs"),
            *as_wandb(study_parts.runs(data, lambda run: linked(run, at))),
        ],
    )


def live_panel(metric: str, place: int, grouped_by: str) -> wr.LinePlot:
    """Return a panel with a line per run or, with `grouped_by`, with the mean of the runs that
    agree in that setting."""
    where = wr.Layout(12 * (place % 2), 8 * (place // 2), 12, 8)
    panel = wr.LinePlot(title=metric, x="step", y=[metric], layout=where, max_runs_to_show=100)
    if grouped_by:
        panel.groupby, panel.groupby_aggfunc, panel.groupby_rangefunc = (
            wr.Config(grouped_by),
            "mean",
            "minmax",
        )
    return panel


def as_wandb(block: Block) -> list[wr.Block]:
    """Return one of our blocks, other than a figure, as W&B's. Tables become Markdown, since W&B's
    own tables show only runs."""
    match block:
        case Heading(text):
            return [wr.H2(text)]
        case Text(text):
            return [wr.P(text)]
        case Items(texts):
            return [wr.UnorderedList(items=list(texts))]
        case Folded(title, text):
            return [wr.H3(title), wr.CodeBlock(code=text, language="yaml")]
        case Table():
            return [wr.MarkdownBlock(to_markdown("", [block], Path()).removeprefix("# \n\n"))]


def addresses(entity: str, project: str) -> dict[str, str]:
    """Return the web addresses of the project's runs, by their ids."""
    return {run.id: run.url for run in wandb.Api().runs(f"{entity}/{project}")}


def linked(run: Run, at: dict[str, str]) -> Link | str:
    """Return the run's name, as a link to its page if the project has one."""
    file = run.path / "wandb_id"
    identity = file.read_text(encoding="utf-8").strip() if file.exists() else run.id
    return Link(run.path.name, at[identity]) if identity in at else run.path.name


def saved_before(made: wr.Report) -> str:
    """Return the id of the report of this title that this module saved before, or "" if there is
    none.
    """
    there = wandb.Api().reports(f"{made.entity}/{made.project}")
    return next(
        (each.id for each in there if (each.display_name, each.description) == (made.title, MADE)),
        "",
    )
