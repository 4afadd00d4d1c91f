"""A machine whose locale is not UTF-8 reads and writes the same files, and prints without an error."""

import ast
import os
import subprocess
import sys

import pytest

from commands import ROOT, SMALL, command, environment, only_run
from gspo.analysis.load import GSPO
from three_arms import write_run

# a locale that Python then takes seriously
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
WRONG = """
open("x")
open(path, "a")
path.read_text()
path.write_text(text)
path.open()
path.open("w")
subprocess.run(command, text=True)
"""
RIGHT = """
open("x", "rb")
open(path, mode="ab")
path.read_text(encoding="utf-8")
path.open("rb")
os.open(path, flags)
slot.open("function", first)
subprocess.run(command, text=True, encoding="utf-8")
"""


def without_encoding(source: str) -> list[ast.Call]:
    """The calls that read or write text in whatever encoding the machine has."""
    return [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and machines_own(node)
    ]


def machines_own(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given:
        return False
    if isinstance(call.func, ast.Name):
        return call.func.id == "open" and textual(
            [given["mode"]] if "mode" in given else call.args[1:2]
        )
    if not isinstance(call.func, ast.Attribute):
        return False
    name = call.func.attr
    opens = (
        name == "open"
        and len(call.args) < 2
        and all(isinstance(a, ast.Constant) for a in call.args)
    )
    return (
        name in ("read_text", "write_text")
        or said(given.get("text"))
        or (opens and textual(call.args))
    )


def said(option: ast.expr | None) -> bool:
    return isinstance(option, ast.Constant) and option.value is True


def textual(mode: list[ast.expr]) -> bool:
    return not any("b" in ast.unparse(part) for part in mode)


def test_the_look_at_the_sources_sees_what_it_is_to_see():
    assert len(without_encoding(WRONG)) == 7 and not without_encoding(RIGHT)


@pytest.mark.parametrize("folder", ["gspo", "experiments", "analysis"])
def test_every_file_of_ours_is_utf_8_whatever_the_machine_says(folder):
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)[:100]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert not found, 'set encoding="utf-8":\n' + "\n".join(found)


@pytest.mark.slow
def test_figures_and_summaries_are_written_and_printed_under_an_ascii_locale(tmp_path):
    """The name of a model comes from a user who writes Greek."""
    for seed in (1, 2):
        write_run(tmp_path / "runs", GSPO, seed, 0.1, 0.1, steps=4, model={"name": "β"})
    script = [
        sys.executable,
        str(ROOT / "analysis" / "reproduce.py"),
        "runs",
        "formats=svg",
    ]
    done = subprocess.run(
        script, cwd=tmp_path, env=os.environ | ASCII, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert b"\\u03b2" in done.stdout and "β" in (tmp_path / "figures" / "summary.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.daily
def test_a_run_under_an_ascii_locale_ends_as_any_other(tmp_path):
    there = environment() | ASCII
    for overrides in ((*SMALL, "steps=2", "study=small"), None):
        overrides = overrides or (f"resume={only_run(tmp_path).relative_to(tmp_path)}", "steps=3")
        done = subprocess.run(
            command(*overrides), cwd=tmp_path, env=there, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()[-3000:]
    run = only_run(tmp_path)
    for script, argument in (
        ("report", str(run)),
        ("sample", f"run={run}"),
        ("sweep-status", str(run.parent)),
    ):
        script = [sys.executable, "-P", "-m", "gspo", script, argument]
        done = subprocess.run(script, cwd=tmp_path, env=there, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()[-3000:]


@pytest.mark.slow
def test_what_the_terminal_cannot_show_is_printed_as_an_escape(tmp_path):
    code = r"from gspo.run.entry_point import command_line; command_line(lambda: print('advantage \u03b2 \u2192 1 \udcff'))"
    for locale in (ASCII, {"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "utf-8"}):
        there = os.environ | locale | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=there, capture_output=True, check=False
        )
        assert done.returncode == 0 and done.stdout.startswith(b"advantage "), done.stderr.decode()[
            -2000:
        ]
        assert b"\\udcff" in done.stdout
