"""The grammar of the commands: paths, options, their values, what is refused, and the help."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from gspo.io.arguments import ArgumentsError, command_options, help_text, option, parsed
from refusals import refuses


@dataclass(frozen=True, kw_only=True)
class Drawing:
    smooth: int = option(5, "batches on either side", least=0)
    caption: bool = option(True, "write the caption")
    formats: tuple[str, ...] = option(("pdf",), "file formats", choices=("pdf", "png"))


@dataclass(frozen=True, kw_only=True)
class Options(Drawing):
    """The options of a command that has one of each type."""

    paths: tuple[str, ...] = option(meaning="runs")
    where: dict[str, str] = option({}, "only these runs")
    in_: str = option("", "a word that Python reserves")
    out: Path = option(Path("figures"), "a folder")
    width: float = option(9.0, "inches", above=0)


def test_words_are_paths_or_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lr=1").mkdir()
    words = "a smooth=3 where.optim.lr=2e-4 lr=1 in=x where.task=math out=a=b caption=false width=7"
    assert parsed(Options, words.split()) == Options(
        paths=("a", "lr=1"),
        smooth=3,
        where={"optim.lr": "2e-4", "task": "math"},
        in_="x",
        out=Path("a=b"),
        caption=False,
        width=7.0,
    )
    assert parsed(Options, ["a"]) == Options(paths=("a",))


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("pdf", ("pdf",)),
        ("[pdf]", ("pdf",)),
        ("[pdf,png]", ("pdf", "png")),
        ("[pdf, 'png']", ("pdf", "png")),
    ],
)
def test_lists_are_written_as_for_hydra(text, items):
    assert parsed(Options, ["a", f"formats={text}"]).formats == items
    with pytest.raises(ArgumentsError, match="must name at least one"):
        parsed(Options, ["a", "formats=[]"])


def test_quotes_keep_commas():
    @dataclass
    class Names:
        names: tuple[str, ...] = option((), "names")
        name: str = option("", "a name")

    assert parsed(Names, ["""names=['a,b',"c d"]""", "name='x, y'"]) == Names(
        ("a,b", "c d"), "x, y"
    )
    assert parsed(Names, ["names='a,b'", "name=it's"]) == Names(("a,b",), "it's")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "PATH ...: is missing: runs"),
        ("a smoth=1", "smoth=1: there is no such option; the nearest is smooth="),
        ("a where=1", "where=1: there is no such option; the nearest is where.KEY=VALUE"),
        ("a smooth.x=1", "smooth.x=1: there is no such option; the nearest is smooth="),
        ("a where.x=1 where.x=2", "where.x=1: where.x=2 is given too; give one value"),
        ("a smooth=1.5", "smooth=1.5: must be a whole number"),
        ("a smooth=-1", "smooth=-1: must be a whole number of at least 0"),
        ("a width=nan", "width=nan: must be a finite number above 0"),
        ("a width=", "width='': must be a number"),
        ("a caption=yes", "caption=yes: choose true or false"),
        ("a formats=gif", "formats=gif: choose one of pdf, png"),
        ("a formats=pdf,png", "formats='pdf,png': write a list as formats=[pdf,png]"),
        ("a formats=['pdf]", 'formats="[\'pdf]": a quotation mark has no second'),
        ("a smooth=1 width=7", "width: does nothing here: there is none; leave it out"),
        ("a --smooth 3", "--smooth: options have no dashes; set smooth=3"),
        ("a --smooth=3", "--smooth=3: options have no dashes; set smooth=3"),
        ("a --no-caption b", "--no-caption: options have no dashes; set caption=false"),
        ("a --caption", "--caption: options have no dashes; set caption=true"),
        ("a --format pdf png", "--format: options have no dashes; set formats=[pdf,png]"),
        ("a --where x=1 y=2", "--where: options have no dashes; set where.x=1 where.y=2"),
        ("a --where", "--where: options have no dashes; set where.KEY=VALUE"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, message):
    refused = {"width": "there is none"} if "smooth=1 width" in words else None
    with pytest.raises(ArgumentsError) as error:
        parsed(Options, words.split(), refused)
    assert str(error.value) == message


def test_a_command_without_options_takes_paths_alone():
    @dataclass
    class Paths:
        paths: tuple[str, ...] = option(meaning="runs")

    for word in ("run=a", "--run"):
        with refuses(word, problem="there is no such option; give paths alone"):
            parsed(Paths, [word])


def test_the_help_has_paths_then_the_options_of_the_command_then_those_of_its_base():
    assert help_text(Options, "What it does.\n", {"caption": "there is none"}) == (
        """What it does.

== Options (key=value) ==

  PATH ...         runs
  where.KEY=VALUE  only these runs
  in=              a word that Python reserves
  out=figures      a folder
  width=9          inches
  smooth=5         batches on either side
  formats=[pdf]    file formats: pdf, png"""
    )


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0), (["a", "-h"], 0)])
def test_the_help_is_printed_if_asked_for_or_if_something_is_missing(
    words, code, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["gspo x", *words])
    with pytest.raises(SystemExit) as end:
        command_options(Options, "What it does.")
    assert end.value.code == code and capsys.readouterr().out.startswith("What it does.\n")
