"""A machine whose locale is not UTF-8 reads and writes the same files, and prints without an error."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_runs import ROOT, SMALL, command, environment, evaluate, only_run, train

from gspo.policy.models import TinyDense, save

LATIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # ASCII, which Python then takes seriously
TEXT = {"open": 1, "read_text": 0, "write_text": 1, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0}


def sources() -> list[Path]:
    return [path for folder in ("gspo", "experiments", "analysis") for path in sorted((ROOT / folder).rglob("*.py"))]


def without_encoding(path: Path) -> list[str]:
    """The calls that read or write text in whatever encoding the machine has."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        owner = getattr(getattr(node.func, "value", None), "id", "")
        text = isinstance(given.get("text", given.get("universal_newlines")), ast.Constant)
        if name in TEXT and owner not in ("os", "gzip", "webbrowser", "ValueHead"):
            mode = given.get("mode") or next(iter(node.args[TEXT[name] if owner or name == "open" else 0 :][:1]), None)
            binary = isinstance(mode, ast.Constant) and "b" in str(mode.value)
            plain = name == "open" and owner not in ("", "io") and not is_file_open(node)
            text = not binary and not plain and not (name.endswith("TemporaryFile") and mode is None)
        if text and "encoding" not in given:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:100]}")
    return found


def is_file_open(node: ast.Call) -> bool:
    """`path.open("r")` and `path.open()`, not `session.open(kind, first)`."""
    return all(isinstance(argument, ast.Constant) for argument in node.args)


def test_every_file_of_ours_is_utf_8_whatever_the_machine_says():
    found = [line for path in sources() for line in without_encoding(path)]
    assert not found, "say encoding=\"utf-8\":\n" + "\n".join(found)


def test_the_look_at_the_sources_sees_what_it_is_to_see(tmp_path):
    file = tmp_path / "x.py"
    wrong = ['open("x")', 'open(p, "a")', "p.read_text()", "p.write_text(t)", "p.open()", 'p.open("w")']
    wrong += ["subprocess.run(c, text=True)", 'tempfile.TemporaryFile("w")']
    right = ['open("x", "rb")', 'open(p, mode="ab")', 'p.read_text(encoding="utf-8")', 'p.open("rb")', "os.open(p, 1)"]
    right += ["tempfile.TemporaryFile()", 'subprocess.run(c, text=True, encoding="utf-8")', "slot.open(kind, first)"]
    file.write_text("\n".join(wrong + right))
    lines = {line.split(":")[1] for line in map(lambda text: text.replace(str(tmp_path), ""), found_in(file))}
    assert lines == {str(number) for number in range(1, len(wrong) + 1)}


def found_in(file: Path) -> list[str]:
    global ROOT
    kept, ROOT = ROOT, file.parent
    try:
        return without_encoding(file)
    finally:
        ROOT = kept
