"""A study's report as a W&B Report, written with W&B's library (wandb_workspaces.reports.v2).

A report shows pictures that a run has logged, so they go into a run of job type "report" in the
same project. Beside them stand live panels of the study's runs and links to the runs. The panels
are grouped by objective if the arms differ in nothing else. Saving again replaces the report.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import wandb
import wandb_workspaces.reports.v2 as wr
from wandb.sdk.lib.service.service_connection import WandbApiFailedError
from wandb_workspaces import expr

from gspo.analysis import study_parts
from gspo.analysis.blocks import Block, Folded, Heading, Items, Link, Table, Text, to_markdown
from gspo.analysis.load import Data, Run
from gspo.analysis.runs import RunsError
from gspo.tracking.wandb_choice import account

LIVE = ("reward/mean", "clip/token_active", "routing/consistency", "optim/grad_norm")
GROUP_BY = "objective.name"
MAX_TITLE_CHARS = 128  # W&B allows no more
DESCRIPTION = "Made by analysis/study_report.py, which replaces it"


def check(address: str, data: Data) -> None:
    """Raise RunsError if the report cannot be published at this address.

    It is called before anything is drawn.
    """
    entity, _, project = address.partition("/")
    if not entity or not project or "/" in project:
        raise RunsError(f"publish={address}: write ENTITY/PROJECT")
    for name in data.studies:
        if not re.fullmatch(r"[\w.,+ -]+", name):
            raise RunsError(
                f"study {name!r}: W&B's filters take letters, digits, spaces and _ . , + - alone"
            )
    if not account():
        raise RunsError(
            f"publish={address}: no W&B account is configured on this machine: wandb login"
        )


def publish(
    address: str,
    title: str,
    data: Data,
    words: Sequence[Block],
    figures: list[Path],
) -> str:
    """Save the report in ENTITY/PROJECT and return its address; raise RunsError if W&B refuses."""
    entity, _, project = address.partition("/")
    figures_run = f"figures: {title}"
    try:
        pictures = upload(entity, project, figures_run, figures)
        new_report = report(
            entity,
            project,
            title,
            data=data,
            words=words,
            figures_run=figures_run,
            pictures=pictures,
        )
        new_report.id = saved_before(new_report)
        return new_report.save().url
    except (wandb.Error, WandbApiFailedError, ValueError) as error:
        raise RunsError(f"W&B did not save the report in {address}: {error}") from None


def upload(
    entity: str,
    project: str,
    name: str,
    figures: list[Path],
) -> list[str]:
    """Log the figures to the run of this name and return the keys under which they are stored."""
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
    *,
    data: Data,
    words: Sequence[Block],
    figures_run: str,
    pictures: list[str],
) -> wr.Report:
    """Return the report, not saved yet.

    `pictures` are the keys of the pictures that the run named `figures_run` has logged.
    """
    only_figures = expr.And(expr.Metric("Name") == figures_run)
    figures = wr.Runset(entity, project, name="figures", filters=only_figures)
    trained = expr.And(expr.Metric("Group").isin(data.studies), expr.Metric("JobType") == "train")
    runs = wr.Runset(entity, project, name="runs", filters=trained)
    objectives = {run.settings[GROUP_BY] for run in data.runs}
    group_by = GROUP_BY if len(objectives) == len(data.arms) else ""
    urls = run_urls(entity, project)
    picture_panels = []
    for index, key in enumerate(pictures):
        layout = wr.Layout(0, 16 * index, 24, 16)
        picture_panels.append(
            wr.MediaBrowser(
                title=key,
                media_keys=[key],
                num_columns=1,
                layout=layout,
            )
        )
    live_panels = [live_panel(metric, index, group_by) for index, metric in enumerate(LIVE)]
    live_text = "Mean and range of the runs, by objective." if group_by else "A line per run."
    return wr.Report(
        entity=entity,
        project=project,
        title=title[:MAX_TITLE_CHARS],
        description=DESCRIPTION,
        width="fixed",
        blocks=[
            *(part for block in words for part in as_wandb(block)),
            wr.H2("Figures"),
            wr.PanelGrid(runsets=[figures], hide_run_sets=True, panels=picture_panels),
            wr.H2("The runs, live"),
            wr.P(live_text),
            wr.PanelGrid(runsets=[runs], panels=live_panels),
            wr.H2("Runs"),
            *as_wandb(study_parts.runs(data, lambda run: web_link(run, urls))),
        ],
    )


def live_panel(metric: str, index: int, group_by: str) -> wr.LinePlot:
    """Return a panel with a line per run, two panels to a row.

    With `group_by`, it has the mean of the runs that agree in that setting.
    """
    row, column = divmod(index, 2)
    layout = wr.Layout(12 * column, 8 * row, 12, 8)
    panel = wr.LinePlot(
        title=metric,
        x="step",
        y=[metric],
        layout=layout,
        max_runs_to_show=100,
    )
    if group_by:
        panel.groupby = wr.Config(group_by)
        panel.groupby_aggfunc = "mean"
        panel.groupby_rangefunc = "minmax"
    return panel


def as_wandb(block: Block) -> list[wr.Block]:
    """Return a block of ours, other than a figure, as W&B's.

    Tables become Markdown, since W&B's own tables show only runs.
    """
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


def run_urls(entity: str, project: str) -> dict[str, str]:
    """Return the web addresses of the project's runs, by their ids."""
    return {run.id: run.url for run in wandb.Api().runs(f"{entity}/{project}")}


def web_link(run: Run, urls: dict[str, str]) -> Link | str:
    """Return the run's name, as a link to its page if the project has it."""
    file = run.path / "wandb_id"
    run_id = file.read_text(encoding="utf-8").strip() if file.exists() else run.id
    return Link(run.path.name, urls[run_id]) if run_id in urls else run.path.name


def saved_before(new_report: wr.Report) -> str:
    """Return the id of the report of this title that this module saved before, or ""."""
    for report in wandb.Api().reports(f"{new_report.entity}/{new_report.project}"):
        if (report.display_name, report.description) == (new_report.title, DESCRIPTION):
            return report.id
    return ""
