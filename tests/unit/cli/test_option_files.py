"""Where the commands look for conf/ and sweeps/."""

import subprocess
import sys

import pytest

from gspo.cli import option_files
from gspo.cli.option_files import CONF, SWEEPS, composed_settings, with_run


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
