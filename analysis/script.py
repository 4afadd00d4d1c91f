"""What every figure script does from the command line: load runs, draw, print the paths and the
verdicts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from gspo.analysis import load, sources
from gspo.analysis.claims import Claim
from gspo.analysis.style import FORMATS, View

from gspo.io import escaping

# The reasons why a figure refuses options for curves: --seeds, --smooth and --log-x.
DOTS = {"seeds": "the seeds stand there as dots already"}
NO_CURVES = {"smooth": "it has no curve over batches", "log-x": "its x axis is not training"}


class DoesNothing(argparse.Action):
    """An option that has no effect in this figure, and is therefore refused."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        load.die(
            f"{option_string} does nothing in {Path(sys.argv[0]).stem}: {self.const}; leave it out"
        )


def parser(
    doc: str, needs_runs: bool = True, refused: dict[str, str] | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts of this folder share; the script's
    docstring is its help. `refused` names the options that can have no effect in this figure, with
    the reasons."""
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = (
        "run directories, offline W&B files, or folders above them; wandb:ENTITY/PROJECT[/GROUP]"
    )
    options.add_argument("runs", nargs="+" if needs_runs else "*", help=where)
    options.add_argument(
        "--where",
        nargs="+",
        action="extend",
        type=setting,
        default=[],
        metavar="KEY=VALUE",
        help="take the runs with these settings alone, such as optim.lr=2e-4",
    )
    options.add_argument(
        "--out",
        type=folder,
        default="figures",
        help="folder for what is written (default: figures)",
    )
    every = {
        "seeds": {"action": "store_true", "help": "draw the curve of every single seed too, thin"},
        "smooth": {
            "type": batches,
            "default": View.smooth,
            "metavar": "N",
            "help": f"average curves over N batches on either side (default: {View.smooth}; 0: as they are)",
        },
        "log-x": {
            "action": "store_true",
            "help": "logarithmic axis of training compute or batches",
        },
        "format": {
            "type": formats,
            "default": View.formats,
            "metavar": "F[,F]",
            "help": f"{', '.join(FORMATS)}, or several with commas (default: {','.join(View.formats)})",
        },
        "no-caption": {"action": "store_true", "help": "leave the caption out of the picture"},
        "width": {
            "type": inches,
            "default": View.width,
            "metavar": "INCHES",
            "help": f"width of the picture (default: {View.width:g}); text keeps its size",
        },
    }
    for name, how in every.items():
        why = (refused or {}).get(name)
        silent = {
            "action": DoesNothing,
            "nargs": "?",
            "const": why,
            "default": how.get("default", False),
        }
        options.add_argument(f"--{name}", **(silent | {"help": argparse.SUPPRESS} if why else how))
    return options


def view(args: argparse.Namespace) -> View:
    """Return how to draw, as the command line says."""
    where = ", ".join(f"{key}={value}" for key, value in chosen(args).items())
    return View(
        args.seeds, args.smooth, args.log_x, args.format, not args.no_caption, args.width, where
    )


def folder(name: str) -> Path:
    """Return the path of a folder, which is made if it is not there."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be made: {error.strerror}") from None
    return path


def chosen(args: argparse.Namespace) -> dict[str, str]:
    """Return what --where says. Raises Refused for a setting that is given twice."""
    where: dict[str, str] = {}
    for key, value in args.where:
        if key in where:
            load.die(f"--where {key}={where[key]} and {key}={value}: give one value")
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
    """Load the runs named on the command line and print the notes on them. Raises Refused where an
    option would have no effect and, unless the figure takes several studies, where one of the names
    holds more than one study."""
    for path in () if several_studies else args.runs:
        one_study(path)
    data = load.load(args.runs, chosen(args))
    if notes:
        print_notes(data)
    if args.seeds and all(len(data.seeds(arm)) == 1 for arm in data.arms):
        load.die(
            "--seeds does nothing with one seed of every arm: its batches are drawn thin already; leave it out"
        )
    return data


def print_notes(data: load.Data, *kinds: str) -> None:
    """Print the notes on the runs, or those that begin with one of these words."""
    for note in data.notes:
        if note.startswith(kinds or ""):
            print(f"note: {escaping.escape_line(note)}")


def one_study(path: str) -> None:
    """Raise Refused if a source holds runs of several studies: they would be taken for arms and
    seeds of one study.
    """
    try:
        found = [record for record in sources.records(path) if load.as_run(record, [])]
    except (OSError, ValueError):
        return  # load.load reports the error
    studies = {str(record.settings.get("study")): record.path.parent for record in found}
    if len(studies) > 1:
        name, folder = sorted(studies.items())[0]
        address = f"{path}/{name}" if path.startswith(sources.SERVER) else folder
        command = f"{sys.argv[0]} {address}"
        load.die(
            f"{path} holds {len(studies)} studies ({', '.join(sorted(studies))}): name one, as in: {command}"
        )


def command(main: Callable[[], None]) -> None:
    """Run a script's main. What cannot be done with its runs becomes one line on stderr with exit
    code 2, and no text from the runs can control the terminal."""
    escaping.escape_output()
    try:
        main()
    except load.Refused as error:
        print(f"error: {escaping.escape_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def run(
    doc: str,
    draw: Callable[[load.Data, Path, View], list[Path]],
    judge: Callable[[load.Data], list[Claim]],
    refused: dict[str, str] | None = None,
) -> None:
    """Draw one figure from the runs named on the command line."""
    args = parser(doc, refused=refused).parse_args()
    data = read(args)
    for path in draw(data, args.out, view(args)):
        print(path)
    for claim in judge(data):
        print(claim.sentence())
