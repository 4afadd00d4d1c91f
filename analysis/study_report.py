"""The report of a study: figures, settings, statistics and links to its runs.

    gspo study-report runs/paper_figures
    gspo study-report runs/learning_rate --figures figures/fig_sweep_learning_rate.png
    gspo study-report runs/paper_figures --publish TEAM/PROJECT

Writes report_<study>.html (a file that needs nothing else) and report_<study>.md. The figures are
the study's curves, the paper's figures that its arms permit, and the PNG files of --figures.
--publish saves the same as a report in a W&B project, over the report that it saved there before.
It needs an account.
"""

from __future__ import annotations

from pathlib import Path

from gspo.analysis import fig_curves, reproduce, script, study_parts
from gspo.analysis.blocks import Block, Figure, Heading, Link, address, to_html, to_markdown
from gspo.analysis.load import Run
from gspo.analysis.runs import RunsError
from gspo.io.files import replace_text


def main() -> None:
    parser = script.parser(__doc__, refused={"format": "the report shows PNG files"})
    parser.add_argument(
        "--figures",
        nargs="*",
        type=Path,
        default=[],
        help="further PNG files to show",
    )
    parser.add_argument(
        "--baseline",
        default="",
        metavar="ARM",
        help=(
            "the arm that the others are compared with "
            "(default: each with GRPO under the same settings)"
        ),
    )
    parser.add_argument(
        "--publish",
        default="",
        metavar="ENTITY/PROJECT",
        help="save it as a W&B Report too",
    )
    args = parser.parse_args()
    data = script.read(args, several_studies=True, notes=False)
    if args.baseline and args.baseline not in data.arms:
        arms = ", ".join(data.arms)
        raise RunsError(f"--baseline {args.baseline!r} is no arm of these runs: {arms}")
    for path in args.figures:
        if path.suffix != ".png" or not path.is_file():
            raise RunsError(f"--figures {path}: no PNG file")
    if args.publish:
        from gspo.analysis import wandb_report  # imported here because wandb takes a second

        wandb_report.check(args.publish, data)
    options = script.figure_options(args)
    drawn, left_out = reproduce.draw_all(data, args.out, options)
    # the table of settings already lists the arms
    data.notes += [reason.split("; found: ")[0] for reason in left_out]
    curves = fig_curves.draw(data, args.out, options)
    figures = [path for path in (*curves, *drawn, *args.figures) if path.suffix == ".png"]
    name = fig_curves.study_name(data.runs)
    title = f"Study {name}"
    words = study_parts.opening(data, args.baseline)
    runs_table = study_parts.runs(data, lambda run: local_link(run, args.out))
    content = [*words, *figure_blocks(figures), Heading("Runs"), runs_table]
    page = args.out / f"report_{name}.html"
    text = args.out / f"report_{name}.md"
    replace_text(page, to_html(title, content))
    replace_text(text, to_markdown(title, content, args.out))
    print(page)
    print(text)
    if args.publish:
        print(wandb_report.publish(args.publish, title, data, words, figures))


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
