"""The console script `gspo`: its help, what it calls, and names that it does not know."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import forked
from gspo.cli import main

ROOT = Path(__file__).parents[3]
NOT_COMMANDS = {
    "__init__",
    "main",
    "option_files",
    "evaluation_job",
    "replay_output",
    "replay_settings",
}
HEAVY = {"torch", "hydra", "omegaconf", "numpy", "pandas", "matplotlib", "wandb", "yaml"}


def called(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `gspo` with these words."""
    monkeypatch.setattr(sys, "argv", ["gspo", *words])
    code = 0
    try:
        main.main()
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_every_module_of_the_package_is_a_command():
    modules = {command.module for command in main.COMMANDS.values()}
    stems = {path.stem for path in (ROOT / "gspo/cli").glob("*.py")} - NOT_COMMANDS
    assert {module for module in modules if module.startswith("gspo.cli.")} == {
        f"gspo.cli.{stem}" for stem in stems
    }


def test_the_help_has_a_line_and_an_example_for_each(monkeypatch, capsys):
    code, text, _ = called(monkeypatch, capsys, "--help")
    assert code == 0
    for name in main.COMMANDS:
        assert f"\n  {name} " in text and f"\n  gspo {name} " in text
    assert called(monkeypatch, capsys) == (2, text, "")


@pytest.mark.parametrize(
    ("shell", "code", "text"),
    [
        ("{gspo} --help >&-", 0, ""),
        ("{gspo} --help <&- >&- 2>&-", 0, ""),
        ("{gspo} --help >/dev/full", 1, "error: [Errno 28] No space left on device"),
        ("mkdir gone; cd gone; rmdir ../gone; {gspo} --help", 2, "error: the current folder no"),
    ],
)
def test_a_closed_or_full_output_and_a_deleted_folder(tmp_path, shell, code, text):
    command = shell.format(gspo=f"PYTHONPATH={ROOT} {sys.executable} -m gspo")
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and done.stderr.startswith(text)
    assert done.stderr.count("\n") == bool(text)


def test_ctrl_c_in_a_command_that_saves_nothing_is_one_line(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "dispatch", interrupted)
    assert called(monkeypatch, capsys, "compare") == (130, "", "\nstopped\n")


def test_the_help_loads_no_library():
    script = f"""
import sys
sys.argv = ["gspo", "--help"]
from gspo.cli.main import main
try:
    main()
finally:
    assert not {HEAVY!r} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(
    "words, line",
    [
        (["trian"], "error: there is no command 'trian'; the nearest is `gspo train`\n"),
        (
            ["sweep_status", "runs/s"],
            "error: there is no command 'sweep_status'; the nearest is `gspo sweep-status`\n",
        ),
        (
            ["figure", "curve", "runs/s"],
            "error: there is no figure 'curve'; the nearest is `gspo figure curves`\n",
        ),
        (["figure", "--list"], "error: --list: the only option here is --help\n"),
        (["\x1b[2J"], "error: there is no command '\\x1b[2J'; the nearest is `gspo"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(monkeypatch, capsys, words, line):
    code, text, said = called(monkeypatch, capsys, *words)
    assert (code, text) == (2, "") and said.startswith(line) and said.count("\n") == 1


def test_every_figure_is_listed_with_its_question_and_can_be_called(monkeypatch, capsys):
    code, text, _ = called(monkeypatch, capsys, "figure", "--help")
    assert code == 0 and "\n  clipping  " in text and "which share of the tokens is clipped" in text
    assert {path.stem for path in main.figure_files().values()} == {
        path.stem for path in (ROOT / "analysis").glob("*.py") if path.stem.startswith("fig")
    } | {"early_warning"}
    for name, path in main.figure_files().items():
        assert f"\n  {name} " in text and callable(import_module(f"analysis.{path.stem}").main)


def test_a_command_gets_the_words_after_its_name(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, text, _ = called(monkeypatch, capsys, "compare", "--help")
    assert code == 0 and "    gspo compare runs/STUDY/A runs/STUDY/B ...\n" in text
    code, _, said = called(monkeypatch, capsys, "sweep-status", "runs/nowhere")
    assert code == 2 and said == "error: runs/nowhere holds no runs and no manifest.jsonl\n"


HELPS = {
    "commands": [[name] for name in main.COMMANDS if name != "figure"],
    "figures": [["figure", name] for name in main.figure_files()],
}


@pytest.mark.parametrize("kind", ["commands", pytest.param("figures", marks=pytest.mark.slow)])
def test_the_help_of_every_command_has_the_same_parts(tmp_path, kind):
    """A sentence, examples, remarks, and the options with their defaults."""
    for words in HELPS[kind]:
        command = [sys.executable, "-P", "-m", "gspo", *words, "--help"]
        done = forked.run(command, cwd=tmp_path)
        first, examples, *_ = done.stdout.split("\n\n")
        assert done.returncode == 0 and "\n" not in first and len(first) <= 100, words
        assert f"gspo {' '.join(words)}" in examples, words
        table = re.split(r"\n== (?:Options|Settings)[ \w]* \(.*=.*\) ==\n\n", done.stdout)
        assert len(table) >= 2 and table[1].strip(), words
        assert "Hydra" not in done.stdout, words


def test_a_figure_speaks_of_the_command_that_was_typed(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, text, _ = called(monkeypatch, capsys, "figure", "clip-range", "--help")
    assert code == 0 and text.startswith("Clip range: ")
    assert "    gspo figure clip-range runs/" in text and "python analysis" not in text
    code, _, said = called(monkeypatch, capsys, "figure", "curves", "runs/nowhere")
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1
