"""What data may do on a terminal, in a page, in a figure: nothing."""

import base64
import fcntl
import hashlib
import io
import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import unicodedata

import matplotlib.text
import pytest
from jinja2 import UndefinedError
from markdown_it import MarkdownIt

from gspo.analysis import style
from gspo.analysis.blocks import Figure, Folded, Heading, Items, Link, Table, Text, to_html
from gspo.io.escaping import (
    UNSAFE_CHARACTERS,
    EscapingFormatter,
    EscapingStream,
    escape,
    escape_line,
    escape_markdown,
)
from gspo.tracking.pages import fill
from gspo.tracking.step_page import recorded_view, step_page
from spoiled_runs import ESCAPE, MARKUP, ROOT
from step_records import hostile_record

EVERY = [chr(number) for number in range(sys.maxunicode + 1)]


@pytest.mark.slow
def test_every_character_that_acts_or_hides_is_written_as_its_code():
    kept = [c for c in EVERY if escape(c) == c]
    controls = [
        c
        for c in kept
        if unicodedata.category(c) in ("Cc", "Cs") or unicodedata.bidirectional(c) in BIDI
    ]
    assert controls == ["\t", "\n"]
    hidden = [c for c in kept if unicodedata.category(c) == "Cf"]
    assert all(unicodedata.name(c, "").split()[0] in SCRIPTS for c in hidden), [
        hex(ord(c)) for c in hidden
    ]
    assert escape("\x1b[2J\u202e\ud83d\U000e0041\x9b") == r"\x1b[2J\u202e\ud83d\U000e0041\x9b"
    for text in (
        "naïve ± 95 %",
        "日本語",
        "हिन्दी क्‍ष",
        "می‌خواهم",
        "👩‍🔬 👍🏽",
        "a\tb\nc",
        "شكرا",
        "Ω√",
    ):
        assert escape(text) == text
    assert escape("paper\u200d_figures") == r"paper\u200d_figures"
    assert escape_line("a\nb\tc\r") == r"a\nb\tc\x0d"


BIDI = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
SCRIPTS = (
    "ARABIC",
    "SYRIAC",
    "KAITHI",
    "EGYPTIAN",
    "SHORTHAND",
    "MUSICAL",
)  # signs that these scripts are written with


@pytest.mark.parametrize(
    "text",
    [
        MARKUP, "![x](http://evil/)", "[a](http://evil/)", "[a][b]", "[a]: http://evil/", "<img src=http://evil/>",
        "http://evil/x", "https://evil", "www.evil.example", "# heading", "> quote", "- item", "1. item", "`code`",
        "**b** __b__ *i* _i_ ~~s~~", "a\n\n# heading\n", "a\n===\n", "&lt;b&gt; &#x202e;", "$x$",
        "| a | b |\n|---|---|\n",
        "\\<b>", "a](http://evil/)[b", "<!-- x", "<http://evil/>", "</details>", "```\nx\n```",
        "+ x", "\\[a](http://evil/)",
    ],
)  # fmt: skip
def test_markdown_is_text(text):
    """As CommonMark and GitHub read it: one paragraph that says what was given, and nothing else."""
    pytest.importorskip("markdown_it")
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for place in ("{}", "- {}", "## {}", "[{}](ours)", "![{}](ours)", "| {} |\n|---|\n| {} |"):
        tokens = reader.parse(place.replace("{}", escape_markdown(text)))
        inline = [child for token in tokens for child in token.children or ()]
        assert {token.type for token in inline} <= {
            "text",
            "text_special",
            "link_open",
            "link_close",
            "image",
        }, tokens
        addresses = [
            str(child.attrs.get("href", child.attrs.get("src"))) for child in inline if child.attrs
        ]
        assert set(addresses) <= {"ours"} and len(addresses) <= 1, (place, addresses)
        assert not {token.type for token in tokens} & {
            "html_block",
            "fence",
            "code_block",
            "hr",
            "blockquote_open",
        }
        assert sum(token.type == "heading_open" for token in tokens) == place.startswith("##")
        if not addresses:
            said = {
                "".join(child.content for child in token.children)
                for token in tokens
                if token.children
            }
            assert said == {" ".join(text.split())}
    assert "://" not in escape_markdown(text) and "www." not in escape_markdown(text), (
        "GitHub makes links of these"
    )


def test_a_page_runs_and_fetches_nothing(tmp_path):
    bad = MARKUP + "' onerror='x\" y {{ 7 * 7 }}" + ESCAPE
    (tmp_path / "a.png").write_bytes(b"png")
    table = Table((bad,), ((bad,), (Link(bad, bad),)))
    page = to_html(
        bad,
        [
            Heading(bad),
            Text(bad),
            Items((bad,)),
            table,
            Figure(tmp_path / "a.png", bad),
            Folded(bad, bad),
        ],
    )
    assert (
        "<script>alert" not in page
        and "' onerror" not in page
        and 'x" y' not in page
        and not UNSAFE_CHARACTERS.search(page)
    )
    assert page.count("{{ 7 * 7 }}") == page.count("&lt;script&gt;") == 12, (
        "escaped once, and no template"
    )
    policy = page.split('Content-Security-Policy" content="')[1].split('"')[0]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    style = page.split("<style>")[1].split("</style>")[0]
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy, (
        "the browser takes our style"
    )
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_the_page_of_a_step_runs_our_script_alone():
    record = hostile_record()
    page = step_page(record, [recorded_view(record)] * 2, MARKUP + ESCAPE)
    assert not UNSAFE_CHARACTERS.search(page)
    assert "<script>alert" not in page and "<!--" not in page and "<img" not in page
    policy = page.split('Content-Security-Policy" content="')[1].split('"')[0]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    # all other scripts are data, of types that no browser runs
    (program,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    types = re.findall("<script ([^>]*)>", page)
    assert all(t.startswith(('type="text/plain"', 'type="application/json"')) for t in types)
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "script-src" not in to_html("another page", [])


def test_a_value_that_a_template_lacks_is_an_error(tmp_path):
    (tmp_path / "page.html.j2").write_text(
        "{% extends 'base.html.j2' %}{% block body %}{{ absent }}{% endblock %}"
    )
    with pytest.raises(UndefinedError, match="absent"):
        fill(tmp_path / "page.html.j2", "title", {})


def test_what_is_logged_is_shown():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(EscapingFormatter("%(message)s"))
    try:
        raise ValueError(ESCAPE)
    except ValueError:
        record = logging.LogRecord("gspo", 40, "", 1, "%s", (ESCAPE,), sys.exc_info())
    handler.emit(record)
    assert (
        not UNSAFE_CHARACTERS.search(stream.getvalue()) and r"\x1b]0;owned\x07" in stream.getvalue()
    )


def test_a_bar_moves_and_data_does_not():
    stream = io.StringIO()
    screen = EscapingStream(stream)
    screen.write("\r 10%|#| a\x1b[2J")
    screen.write("\r 20%|##|")
    screen.write("\x1b[A\x1b[A")
    screen.write("\n")
    print("note:", "\rall is well", file=screen)
    print("x", "\x1b[A", sep="", file=screen)
    assert stream.getvalue() == (
        "\r 10%|#| a\\x1b[2J\r 20%|##|\x1b[A\x1b[A\nnote: \\x0dall is well\nx\\x1b[A\n"
    )


PROGRAM = """
import sys, warnings
from tqdm import tqdm
from gspo.run.entry_point import command_line
def main():
    warnings.warn({escape!r})
    for i in tqdm(range(3), desc={escape!r}, mininterval=0, disable=False):
        tqdm.write({escape!r})
    print({escape!r}, file=sys.stderr)
    sys.stdout.writelines([{escape!r}])
    raise {error}({escape!r})
command_line(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("error", "code"), [("ValueError", 2), ("RuntimeError", 1)])
def test_a_real_terminal_sees_no_escape_of_ours_but_the_bar(error, code):
    """Errors of the user and of the program, warnings, tqdm's bar, in a pseudo-terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM.format(escape=ESCAPE, error=error)])
    seen = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    said = seen.decode()
    assert said.count(r"\x1b]0;owned\x07\x1b[2J\u202e") >= 7 and "100%" in said
    assert not UNSAFE_CHARACTERS.search(said.replace("\r", "")), UNSAFE_CHARACTERS.search(
        said.replace("\r", "")
    )


def test_a_latin_1_terminal_is_written_to():
    program = (
        "from gspo.io.escaping import escape_output; escape_output(); print('5 ± 3 → 日 \\ud83d')"
    )
    there = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=there, capture_output=True, check=False
    )
    assert (
        done.returncode == 0 and done.stdout.decode("latin-1") == "5 ± 3 \\u2192 \\u65e5 \\ud83d\n"
    )


def test_output_goes_on_without_its_reader_once_there_is_work_to_lose():
    program = """
import sys
from gspo.io.escaping import escape_output, outlive_reader
escape_output()
if "work" in sys.argv: outlive_reader()
sys.stdin.readline()
print("a" * 100_000, flush=True)
print("more")
print("done", file=sys.stderr)
"""
    for words, code in ((["work"], 0), ([], 1)):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        process.stdout.close()  # the reader ends
        process.stdin.write(b"\n")
        process.stdin.close()
        said = process.stderr.read().decode()
        assert process.wait() == code, said
        assert ("done" in said) == (code == 0) and ("BrokenPipeError" in said) == (code == 1)


def test_names_in_figures_are_no_formulas(tmp_path):
    figure = style.canvas(2, style.FigureOptions())
    ax = figure.subplots()
    names = [r"$\frac{$", r"a $x$ b", r"$10^{3}$$\foo$", "cost \x1b[2J $5"]
    ax.plot([1, 2], [1e-3, 10], label=names[0])
    ax.set_yscale("log")
    ax.set_xticks([1, 2], names[:2])
    ax.set_title(names[1])
    ax.legend(title=names[2])
    (path,) = style.save(
        figure, tmp_path, "odd", names[3] + " " + names[0], style.FigureOptions(formats=("svg",))
    )
    texts = {
        text.get_text(): text.get_parse_math() for text in figure.findobj(matplotlib.text.Text)
    }
    assert not any(texts[name] for name in names[:3]) and texts[r"$\mathdefault{10^{-2}}$"]
    assert path.exists() and json.dumps(list(texts)).count("u001b") == 0


@pytest.mark.parametrize(
    "hidden", ["\u034f", "\u115f", "\u1160", "\u3164", "\uffa0", "\ufe00", "\U0001d173"]
)
def test_fillers_and_variants_that_show_nothing_appear_as_their_codes(hidden):
    assert escape(f"runs/a{hidden}") == "runs/a" + ascii(hidden)[1:-1]
    assert escape("\u2764\ufe0f 1\ufe0f\u20e3") == "\u2764\ufe0f 1\ufe0f\u20e3", "emoji stay"
