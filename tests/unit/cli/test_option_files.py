"""Where the commands look for conf/ and sweeps/."""

import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gspo.cli import option_files
from gspo.cli.option_files import (
    CONF,
    SWEEPS,
    composed_settings,
    options_first,
    quoted,
    refuse_misread,
    with_run,
)


def test_they_lie_beside_the_package_or_in_it(tmp_path, monkeypatch):
    assert (CONF / "train.yaml").is_file() and (SWEEPS / "paper_figures.yaml").is_file()
    package = tmp_path / "site-packages" / "gspo"
    monkeypatch.setattr(option_files, "__file__", str(package / "commands" / "option_files.py"))
    assert option_files.folder_of("conf") == tmp_path / "site-packages" / "conf"
    (package / "conf").mkdir(parents=True)
    assert option_files.folder_of("conf") == package / "conf"


@pytest.mark.slow
def test_a_folder_that_the_user_names_comes_before_the_sweeps(tmp_path):
    script = f"""
import sys
from hydra.core.plugins import Plugins
from gspo.cli.option_files import SweepFiles, composed
Plugins.instance().register(SweepFiles)
sys.argv = {["gspo train", "-cd", str(tmp_path), "--info", "searchpath"]!r}
composed("train", print)()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    places = [done.stdout.index(f"file://{folder}") for folder in (CONF, tmp_path, SWEEPS)]
    assert places == sorted(places)


def test_plans_and_replays_have_the_options_of_the_sweeps_too():
    settings = composed_settings(["experiment=edge_moe", "arm=edge_gspo"])
    assert settings.objective.name == "gspo"


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("evaluate", ["run=a", "-m"], "-m: gspo evaluate makes no sweep"),
        ("sample", ["--multirun", "run=a", "k=1,2"], "--multirun: gspo sample makes no sweep"),
        ("train", ["resume=a", "--cfg", "job"], "--cfg shows options of conf/, and a resumed run"),
    ],
)
def test_an_option_that_a_command_would_ignore_is_refused(command, words, said):
    with pytest.raises(ValueError, match=said):
        refuse_misread(command, words)
    refuse_misread("train", ["-m", "seed=1,2"])


@pytest.mark.parametrize("path", ["runs/a=b/1", "läufe/x", "runs/~a#b'c(1)"])
def test_a_run_may_have_any_path(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / path).mkdir(parents=True)
    (word,) = map(quoted, with_run("evaluate", [path]))
    override = OverridesParser.create().parse_override(word)
    assert override.key_or_group == "run" and override.value() == path


def test_options_of_hydra_are_moved_before_the_settings():
    words = ["seed=1", "--info", "-cd", "mine", "--info", "searchpath", "k=2"]
    moved = ["--info", "-cd", "mine", "--info", "searchpath", "seed=1", "k=2"]
    assert options_first(words) == moved
    assert with_run("evaluate", ["--cfg", "job", "a"]) == ["--cfg", "job", "run=a"]


def test_a_long_setting_is_no_path():
    words = ["run=a", "prompt.system=" + "x" * 300]
    assert with_run("evaluate", words) == words


@pytest.mark.parametrize("words", [["a", "b"], ["run=a", "b", "k=2"], ["a", "b/c", "d"]])
def test_several_runs_are_refused_where_one_is_taken(words):
    with pytest.raises(ValueError, match=r"^evaluate takes one run, and \d are given: ") as caught:
        with_run("evaluate", words)
    assert "\n" not in str(caught.value)
    for one in (["run=a", "step=1"], ["-cd", "b", "run=a"]):
        assert with_run("evaluate", one) == one
    assert with_run("evaluate", ["a", "-m", "k=2"]) == ["run=a", "-m", "k=2"]
