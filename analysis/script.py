"""The command line of every figure script: load runs, draw, print the paths and the verdicts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from gspo.analysis import load, sources
from gspo.analysis.runs import RunsError
from gspo.analysis.style import DEFAULTS, FORMATS, FigureOptions
from gspo.analysis.verdicts import Claim
from gspo.io import escaping

# the reasons why a figure refuses options for curves
DOTS = {"seeds": "the seeds stand there as dots already"}
NO_CURVES = {"smooth": "it has no curve over batches", "log-x": "its x axis is not training"}


class RefusedOption(argparse.Action):
    """An option that has no effect in this figure and is therefore refused."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        figure = Path(sys.argv[0]).stem
        raise RunsError(f"{option_string} does nothing in {figure}: {self.const}; leave it out")


def parser(
    doc: str, needs_runs: bool = True, refused: dict[str, str] | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts of this folder share.

    The script's docstring is its help. `refused` maps options that can have no effect in this
    figure to the reasons.
    """
    arguments = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "runs",
        nargs="+" if needs_runs else "*",
        help=(
            "run directories, offline W&B files, or folders above them; "
            "wandb:ENTITY/PROJECT[/GROUP]"
        ),
    )
    arguments.add_argument(
        "--where",
        nargs="+",
        action="extend",
        type=setting,
        default=[],
        metavar="KEY=VALUE",
        help="take the runs with these settings alone, such as optim.lr=2e-4",
    )
    arguments.add_argument(
        "--out",
        type=folder,
        default="figures",
        help="folder for what is written (default: figures)",
    )
    drawing = {
        "seeds": {"action": "store_true", "help": "draw the curve of every single seed too, thin"},
        "smooth": {
            "type": batches,
            "default": DEFAULTS.smooth,
            "metavar": "N",
            "help": (
                "average curves over N batches on either side "
                f"(default: {DEFAULTS.smooth}; 0: as they are)"
            ),
        },
        "log-x": {
            "action": "store_true",
            "help": "logarithmic axis of training compute or batches",
        },
        "format": {
            "type": formats,
            "default": DEFAULTS.formats,
            "metavar": "F[,F]",
            "help": (
                f"{', '.join(FORMATS)}, or several with commas "
                f"(default: {','.join(DEFAULTS.formats)})"
            ),
        },
        "no-caption": {"action": "store_true", "help": "leave the caption out of the picture"},
        "width": {
            "type": inches,
            "default": DEFAULTS.width,
            "metavar": "INCHES",
            "help": f"width of the picture (default: {DEFAULTS.width:g}); text keeps its size",
        },
    }
    for name, option in drawing.items():
        reason = (refused or {}).get(name)
        if reason:
            option = {
                "action": RefusedOption,
                "nargs": "?",
                "const": reason,
                "default": option.get("default", False),
                "help": argparse.SUPPRESS,
            }
        arguments.add_argument(f"--{name}", **option)
    return arguments


def figure_options(args: argparse.Namespace) -> FigureOptions:
    """Return the drawing options of a command line."""
    return FigureOptions(
        seeds=args.seeds,
        smooth=args.smooth,
        log_x=args.log_x,
        formats=args.format,
        caption=not args.no_caption,
        width=args.width,
        where=", ".join(f"{key}={value}" for key, value in chosen(args).items()),
    )


def folder(name: str) -> Path:
    """Return the path of a folder, which is created if it is missing."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be made: {error.strerror}") from None
    return path


def chosen(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings of --where; raise RunsError for a setting that is given twice."""
    where: dict[str, str] = {}
    for key, value in args.where:
        if key in where:
            raise RunsError(f"--where {key}={where[key]} and {key}={value}: give one value")
        where[key] = value
    return where


def setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write KEY=VALUE, such as optim.lr=2e-4")
    return key, value


def batches(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of batches: 0, 1, 2, ...")
    return int(text)


def formats(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not set(names) <= set(FORMATS):
        raise argparse.ArgumentTypeError(f"{text!r}: choose of {', '.join(FORMATS)}")
    return names


def inches(text: str) -> float:
    try:
        width = float(text)
    except ValueError:
        width = 0.0
    if not 6 <= width <= 40:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a width of 6 to 40 inches (narrower, the panels' text collides)"
        )
    return width


def read(args: argparse.Namespace, several_studies: bool = False, notes: bool = True) -> load.Data:
    """Load the runs named on the command line and print the notes on them.

    Raises RunsError if an option would have no effect. Unless the figure takes several studies, it
    also raises if a source holds several studies.
    """
    if not several_studies:
        for path in args.runs:
            check_one_study(path)
    data = load.load(args.runs, chosen(args))
    if notes:
        print_notes(data)
    if args.seeds and all(len(data.seeds(arm)) == 1 for arm in data.arms):
        raise RunsError(
            "--seeds does nothing with one seed of every arm: its batches are drawn thin already; "
            "leave it out"
        )
    return data


def print_notes(data: load.Data, *kinds: str) -> None:
    """Print the notes on the runs, or only the notes that begin with these words."""
    for note in data.notes:
        if note.startswith(kinds or ""):
            print(f"note: {escaping.escape_line(note)}")


def check_one_study(path: str) -> None:
    """Raise RunsError if a source holds runs of several studies.

    They would be taken for arms and seeds of the same study.
    """
    try:
        records = [record for record in sources.records(path) if load.as_run(record, [])]
    except (OSError, ValueError):
        return  # load.load reports the error
    folders = {str(record.settings.get("study")): record.path.parent for record in records}
    if len(folders) > 1:
        study, folder = min(folders.items())
        address = f"{path}/{study}" if path.startswith(sources.SERVER) else folder
        names = ", ".join(sorted(folders))
        example = f"{sys.argv[0]} {address}"
        raise RunsError(
            f"{path} holds {len(folders)} studies ({names}): name one, as in: {example}"
        )


def command(main: Callable[[], None]) -> None:
    """Run a script's main.

    A RunsError becomes a line on stderr with exit code 2. No text from the runs can control the
    terminal.
    """
    escaping.escape_output()
    try:
        main()
    except RunsError as error:
        print(f"error: {escaping.escape_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def print_lines(*parts: Iterable[object]) -> None:
    """Print each part, a list of lines, with an empty line before it."""
    for part in parts:
        print()
        for line in part:
            print(line)


def run(
    doc: str,
    draw: Callable[[load.Data, Path, FigureOptions], list[Path]],
    judged_claims: Callable[[load.Data], list[Claim]],
    refused: dict[str, str] | None = None,
) -> None:
    """Draw a figure from the runs named on the command line."""
    args = parser(doc, refused=refused).parse_args()
    data = read(args)
    for path in draw(data, args.out, figure_options(args)):
        print(path)
    for claim in judged_claims(data):
        print(claim.sentence())
