"""The report of a study: figures, settings, statistics and links to its runs.

    gspo study-report runs/paper_figures
    gspo study-report runs/learning_rate figures=figures/fig_sweep_learning_rate.png
    gspo study-report runs/paper_figures publish=TEAM/PROJECT

Writes report_<study>.html (a file that needs nothing else) and report_<study>.md. The figures are
the study's curves, the paper's figures that its arms permit, and the PNG files of `figures`. With
`publish` the same is saved as a report in a W&B project, over the report that it saved there
before. This needs an account.
"""

from dataclasses import dataclass
from pathlib import Path

from gspo.analysis import fig_curves, reproduce, script, study_parts
from gspo.analysis.blocks import Block, Figure, Heading, Link, address, to_html, to_markdown
from gspo.analysis.load import Run
from gspo.analysis.runs import RunsError
from gspo.io.arguments import command_options, option
from gspo.io.files import replace_text

REFUSED = {"formats": "the report shows PNG files"}


@dataclass(frozen=True, kw_only=True)
class Options(script.Options):
    """The options of this command."""

    figures: tuple[Path, ...] = option((), "further PNG files to show")
    baseline: str = option(
        "", "the arm that the others are compared with, instead of GRPO under the same settings"
    )
    publish: str = option("", "ENTITY/PROJECT: save the report in this W&B project too")


def main() -> None:
    options = command_options(Options, __doc__, REFUSED)
    data = script.read(options, several_studies=True, notes=None)
    if options.baseline and options.baseline not in data.arms:
        arms = ", ".join(data.arms)
        raise RunsError(f"baseline={options.baseline!r} is no arm of these runs: {arms}")
    for path in options.figures:
        if path.suffix != ".png" or not path.is_file():
            raise RunsError(f"figures={path}: no PNG file")
    if options.publish:
        from gspo.analysis import wandb_report  # imported here because wandb takes a second

        wandb_report.check(options.publish, data)
    drawn, left_out = reproduce.draw_all(data, options.out, options)
    # the table of settings already lists the arms
    data.notes += [reason.split("; found: ")[0] for reason in left_out]
    curves = fig_curves.draw(data, options.out, options)
    figures = [path for path in (*curves, *drawn, *options.figures) if path.suffix == ".png"]
    name = fig_curves.study_name(data.runs)
    title = f"Study {name}"
    words = study_parts.opening(data, options.baseline)
    runs_table = study_parts.runs(data, lambda run: local_link(run, options.out))
    content = [*words, *figure_blocks(figures), Heading("Runs"), runs_table]
    page = options.out / f"report_{name}.html"
    text = options.out / f"report_{name}.md"
    replace_text(page, to_html(title, content))
    replace_text(text, to_markdown(title, content, options.out))
    print(page)
    print(text)
    if options.publish:
        print(wandb_report.publish(options.publish, title, data, words, figures))


def figure_blocks(figures: list[Path]) -> list[Block]:
    """Return a block for each figure under a heading."""
    blocks: list[Block] = [Heading("Figures")]
    for path in figures:
        about = path.stem.replace("_", " ")
        blocks.append(Figure(path, about))
    return blocks


def local_link(run: Run, folder: Path) -> Link | str:
    """Return a link to the run's own report, or to its directory, from a page in `folder`."""
    for target in (run.path / "report.html", run.path):
        if target.exists():
            return Link(run.path.name, address(target, folder))
    return run.path.name


if __name__ == "__main__":
    script.command(main)
