"""Where the commands look for conf/ and sweeps/."""

import sys

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

from gspo.commands import option_files
from gspo.commands.option_files import CONF, SWEEPS, SweepFiles


def test_they_lie_beside_the_package_or_in_it(tmp_path, monkeypatch):
    assert (CONF / "train.yaml").is_file() and (SWEEPS / "paper_figures.yaml").is_file()
    package = tmp_path / "site-packages" / "gspo"
    monkeypatch.setattr(option_files, "__file__", str(package / "commands" / "option_files.py"))
    assert option_files.folder_of("conf") == tmp_path / "site-packages" / "conf"
    (package / "conf").mkdir(parents=True)
    assert option_files.folder_of("conf") == package / "conf"


@pytest.mark.parametrize(
    "words, found",
    [
        (["-cn", "seeds", "-m"], True),
        (["-cd", "sweeps", "-cn", "seeds"], False),
        (["-cdsweeps"], False),
        (["--config-dir=sweeps"], False),
        (["--config-dir", "sweeps"], False),
    ],
)
def test_a_folder_that_the_user_names_takes_the_place_of_sweeps(monkeypatch, words, found):
    monkeypatch.setattr(sys, "argv", ["gspo train", *words])
    path = ConfigSearchPathImpl()
    SweepFiles().manipulate_search_path(path)
    assert [element.path for element in path.get_path()] == [f"file://{SWEEPS}"] * found
