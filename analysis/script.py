"""The command line of every figure script: load runs, draw, print the paths and the verdicts."""

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gspo.analysis import load, sources
from gspo.analysis.runs import RunsError
from gspo.analysis.style import FigureOptions
from gspo.analysis.verdicts import Claim
from gspo.io import escaping
from gspo.io.arguments import ArgumentsError, command_options, option
from gspo.tracking.foreign_options import NOTHING_SAID, ForeignOptions

# the reasons why a figure refuses options for curves
DOTS = {"seeds": "the seeds stand there as dots already"}
NO_CURVES = {"smooth": "it has no curve over batches", "log_x": "its x axis is not training"}


# the notes on runs that a figure leaves out
ABOUT_ENDS = ("unfinished", "left out", "lost")


@dataclass(frozen=True, kw_only=True)
class Options(FigureOptions, ForeignOptions):
    """The options of a figure's command: the runs and the folder, and how it is drawn."""

    paths: tuple[str, ...] = option(
        meaning="run directories, offline W&B files, logs of other frameworks, or folders above "
        "them; wandb:ENTITY/PROJECT[/GROUP or /RUN_ID]"
    )
    out: Path = option(Path("figures"), "folder for what is written")

    def __post_init__(self) -> None:
        """Raise RunsError if the folder cannot be made, before anything is read."""
        ForeignOptions.__post_init__(self)
        missing = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunsError(f"out={self.out} cannot be made: {error.strerror}") from None
        with suppress(OSError):  # a figure that is refused leaves no empty folder
            for folder in missing:
                folder.rmdir()


def read(
    options: Options, several_studies: bool = False, notes: tuple[str, ...] | None = ()
) -> load.Data:
    """Load the runs named on the command line, and print the notes on them.

    With `notes`, it prints the notes that begin with one of these words. With None it prints none.
    Raises RunsError if an option would have no effect. Unless the figure takes several studies, it
    also raises if a source holds several studies.
    """
    if not several_studies:
        for path in options.paths:
            check_one_study(path, options)
    data = load.load(options.paths, options.where, options)
    if notes is not None:
        print_notes(data, *notes)
    if options.seeds and all(len(data.seeds(arm)) == 1 for arm in data.arms):
        raise RunsError(
            "seeds=true does nothing with one seed of every arm: its batches are drawn thin "
            "already; leave it out"
        )
    return data


def print_notes(data: load.Data, *kinds: str) -> None:
    """Print the notes on the runs, or only the notes that begin with these words."""
    for note in data.notes:
        if note.startswith(kinds or ""):
            print(f"note: {escaping.escape_line(note)}")


def check_one_study(path: str, options: ForeignOptions = NOTHING_SAID) -> None:
    """Raise RunsError if a source holds runs of several studies.

    They would be taken for arms and seeds of the same study.
    """
    try:
        records = [record for record in sources.records(path, options) if load.as_run(record, [])]
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

    A wrong command line and a RunsError become a line on stderr with exit code 2, an error of a
    file one with exit code 1. No text from the runs can control the terminal.
    """
    escaping.escape_output()
    try:
        main()
    except (ArgumentsError, RunsError) as error:
        print(f"error: {escaping.escape_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        raise  # gspo.cli.main handles it
    except OSError as error:
        print(f"error: {escaping.escape_line(error)}", file=sys.stderr)
        raise SystemExit(1) from None


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
    options = command_options(Options, doc, refused)
    data = read(options)
    for path in draw(data, options.out, options):
        print(path)
    for claim in judged_claims(data):
        print(claim.sentence())
