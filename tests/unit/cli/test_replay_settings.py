"""The settings of a record without run directory, which anyone may have written."""

import sys

import pytest

from gspo.cli.replay_settings import of_header
from gspo.data.step_record import Header

EVIL = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\n"
PATH = "replay_evil:Evil"


@pytest.mark.parametrize(
    "settings",
    [
        {"metrics": {"m": PATH}},
        {"metrics": {"m": {"path": PATH}}},
        {"callbacks": {"c": PATH}},
        {"callbacks": {"c": {"path": PATH}}},
        {"outside": {"objective": {"path": PATH}}},
        {"task": {"name": "math", "class_path": PATH}},
        {"task": {"name": "rows", "reward": PATH}},
        {"model": {"name": PATH}},
        {"objective": {"name": "gspo", "class_path": PATH}},
        {"advantage": {"name": "x", "class_path": PATH}},
        {"kl": {"name": "none", "class_path": PATH}},
        {"reward": {"class_path": PATH}},
    ],
)
def test_no_setting_of_a_record_imports_code(settings, tmp_path, monkeypatch):
    (tmp_path / "replay_evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "replay_evil", raising=False)
    if "reward" in settings:  # these settings have no choices, so the path is not read
        of_header(Header(step=1, settings=settings), trust=False)
    else:
        with pytest.raises(ValueError, match=r"settings besides|allow_outside_code=true"):
            of_header(Header(step=1, settings=settings), trust=False)
    assert not (tmp_path / "imported").exists() and "replay_evil" not in sys.modules
