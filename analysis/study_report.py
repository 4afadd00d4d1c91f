"""The report of a study: figures, settings, statistics, links to its runs; as HTML, as Markdown, as
a W&B Report.

    gspo study-report runs/paper_figures
    gspo study-report runs/learning_rate --figures figures/fig_sweep_learning_rate.png
    gspo study-report runs/paper_figures --publish TEAM/PROJECT

Writes report_<study>.html (one file that needs nothing else) and report_<study>.md. The figures are
the study's curves, those of the paper that its arms permit, and the PNG files that you name.
--publish saves the same as a report in a W&B project, over the one that it saved there before; it
needs an account.
"""

from __future__ import annotations

from pathlib import Path

from gspo.analysis import fig_curves, load, reproduce, script, study_parts
from gspo.analysis.blocks import Block, Figure, Heading, Link, address, to_html, to_markdown
from gspo.analysis.load import Run

from gspo.io.files import replace_text


def main() -> None:
    options = script.parser(__doc__, refused={"format": "the report shows PNG files"})
    options.add_argument(
        "--figures", nargs="*", type=Path, default=[], help="further PNG files to show"
    )
    of = "the arm that the others are compared with (default: each with GRPO under the same settings)"
    options.add_argument("--baseline", default="", metavar="ARM", help=of)
    options.add_argument(
        "--publish", default="", metavar="ENTITY/PROJECT", help="save it as a W&B Report too"
    )
    args = options.parse_args()
    data, view = script.read(args, several_studies=True, notes=False), script.view(args)
    if args.baseline and args.baseline not in data.arms:
        load.die(f"--baseline {args.baseline!r} is no arm of these runs: {', '.join(data.arms)}")
    for path in args.figures:
        if path.suffix != ".png" or not path.is_file():
            load.die(f"--figures {path}: no PNG file")
    if args.publish:
        from gspo.analysis import wandb_report  # imported here because wandb takes a second

        wandb_report.check(args.publish, data)
    drawn, left_out = reproduce.draw_all(data, args.out, view)
    # the table of settings already lists the arms
    data.notes += [why.split("; found: ")[0] for why in left_out]
    figures = [
        path
        for path in (*fig_curves.draw(data, args.out, view), *drawn, *args.figures)
        if path.suffix == ".png"
    ]
    name = fig_curves.study(data.runs)
    title = f"Study {name}"
    words = study_parts.opening(data, args.baseline)
    content = [
        *words,
        *shown(figures),
        Heading("Runs"),
        study_parts.runs(data, lambda run: local(run, args.out)),
    ]
    for path, text in (
        (args.out / f"report_{name}.html", to_html(title, content)),
        (args.out / f"report_{name}.md", to_markdown(title, content, args.out)),
    ):
        replace_text(path, text)
        print(path)
    if args.publish:
        print(wandb_report.publish(args.publish, title, data, words, figures))


def shown(figures: list[Path]) -> list[Block]:
    """Return a block for each figure under a heading."""
    return [Heading("Figures"), *(Figure(path, path.stem.replace("_", " ")) for path in figures)]


def local(run: Run, folder: Path) -> Link | str:
    """Return a link to the run's own report, or to its directory, from a page in `folder`."""
    place = run.path / "report.html" if (run.path / "report.html").exists() else run.path
    return Link(run.path.name, address(place, folder)) if place.exists() else run.path.name


if __name__ == "__main__":
    script.command(main)
