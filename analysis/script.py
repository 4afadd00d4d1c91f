"""What every figure script does from the command line: load, draw, print the paths and the verdicts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import load
from claims import Claim


def parser(doc: str, needs_runs: bool = True) -> argparse.ArgumentParser:
    """The options that all scripts of this folder share; the script's docstring is its help."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = "run directories, offline W&B files, or folders above them; wandb:ENTITY/PROJECT[/GROUP]"
    options.add_argument("runs", nargs="+" if needs_runs else "*", help=where)
    options.add_argument("--out", type=folder, default="figures", help="folder for what is written (default: figures)")
    return options


def folder(name: str) -> Path:
    """A folder that is there, or is made."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be made: {error.strerror}") from None
    return path


def arguments(doc: str) -> argparse.Namespace:
    """The command line of a script that has no other options."""
    return parser(doc).parse_args()


def command(main: Callable[[], None]) -> None:
    """Run a script's main; what cannot be done with its runs is one line on stderr, exit code 2."""
    try:
        main()
    except load.Refused as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run(doc: str, draw: Callable[[load.Data, Path], list[Path]], judge: Callable[[load.Data], list[Claim]]) -> None:
    """Draw one figure from the runs named on the command line."""
    args = arguments(doc)
    data = load.load(args.runs)
    for note in data.notes:
        print(f"note: {note}")
    for path in draw(data, args.out):
        print(path)
    for claim in judge(data):
        print(claim.sentence())
