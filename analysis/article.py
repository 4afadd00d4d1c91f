"""The article: a PDF of all studies with their figures, registered criteria and outcomes.

    python -m gspo.analysis.article out=build/paper
    make paper

Draws the figures from the recorded rows, computes every number (article_numbers.py) and every
verdict (article_registered.py), and compiles templates/article.typ with Typst. Writes these files:

    gspo.pdf       the article
    gspo.typ       its text, which reads the others
    numbers.json   its numbers
    verdicts.json  its verdicts, from the numbers by the registered rules
    *.pdf          its figures

The same rows give the same bytes. Typst is the package `typst` of the group `paper`. Its fonts are
inside the package, so the PDF does not depend on the machine's.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from gspo.analysis import article_figures, article_registered, script
from gspo.analysis.article_entries import Numbers
from gspo.analysis.article_numbers import collect
from gspo.analysis.runs import RunsError
from gspo.io.arguments import command_options, option
from gspo.io.files import replace_bytes, replace_text

TEMPLATE = Path(__file__).parent / "templates" / "article.typ"
DATA = Path(__file__).parent / "data"
# the functions of the template whose first argument is the name of a number
NAMED = re.compile(r'#?\b(?:num|mean|pval|both)\("([^"]+)"')
# those whose first argument is the name of a criterion or a claim
JUDGED = re.compile(r'#?\b(?:says|row)\("([^"]+)"')
PAGE_PIXELS_PER_INCH = 150
Verdicts = dict[str, dict[str, str]]  # those of article_registered.judge_all
FIXED_TIME = 0  # of the PDF's creation, in seconds


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this command."""

    out: Path = option(Path("build/paper"), "folder for what is written")
    pages: bool = option(False, "write a picture of every page too, page-1.png and so on")


def main() -> None:
    options = command_options(Options, __doc__)
    compiler()
    options.out.mkdir(parents=True, exist_ok=True)
    numbers = collect(DATA)
    text = TEMPLATE.read_text(encoding="utf-8")
    verdicts = article_registered.judge_all(numbers)
    check_numbers(text, numbers)
    check_verdicts(text, verdicts)
    paths = article_figures.draw_all(DATA, options.out)
    paths += write(options.out, text, numbers, verdicts)
    paths += compile_pdf(options.out, options.pages)
    script.print_lines(paths)


def check_numbers(text: str, numbers: Numbers) -> None:
    """Raise RunsError if the text names a number that was not computed."""
    for name in NAMED.findall(text):
        if name not in numbers.entries:
            raise RunsError(
                f"{TEMPLATE.name} names the number {name}, which article_numbers.py does not "
                "compute: correct the name or add the number"
            )


def check_verdicts(text: str, verdicts: Verdicts) -> None:
    """Raise RunsError if the text names a criterion that is not judged."""
    for name in JUDGED.findall(text):
        if name not in verdicts:
            raise RunsError(
                f"{TEMPLATE.name} names the criterion {name}, which article_registered.py does not "
                "judge: correct the name or add the criterion"
            )


def write(out: Path, text: str, numbers: Numbers, verdicts: Verdicts) -> list[Path]:
    """Write the text, its numbers and its verdicts."""
    source = out / "gspo.typ"
    replace_text(source, text)
    paths = [source]
    for name, entries in {"numbers": numbers.entries, "verdicts": verdicts}.items():
        paths.append(out / f"{name}.json")
        content = json.dumps(entries, indent=1, ensure_ascii=False, allow_nan=False)
        replace_text(paths[-1], content + "\n")
    return paths


def compiler() -> ModuleType:
    """Return the module typst, or raise RunsError with how to install it."""
    try:
        import typst
    except ModuleNotFoundError:
        raise RunsError("the package typst is missing: run `make paper`") from None
    return typst


def compile_pdf(out: Path, pages: bool = False) -> list[Path]:
    """Compile gspo.typ of a folder, also to a picture of each page if wanted.

    Raises RunsError with the compiler's message.
    """
    typst = compiler()
    source = out / "gspo.typ"
    try:
        document = typst.Compiler(source, root=out, ignore_system_fonts=True)
        paths = [out / "gspo.pdf"]
        replace_bytes(paths[0], document.compile(format="pdf", timestamp=FIXED_TIME))
        if pages:
            pictures = document.compile(format="png", ppi=PAGE_PIXELS_PER_INCH)
            for number, picture in enumerate(pictures, start=1):
                paths.append(out / f"page-{number}.png")
                replace_bytes(paths[-1], picture)
    except typst.TypstError as error:
        raise RunsError(f"{source} does not compile: {error.diagnostic or error}") from None
    return paths


if __name__ == "__main__":
    script.command(main)
