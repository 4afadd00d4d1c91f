"""Submitit's jobs run what they find pickled in a folder: it is one that nobody else can write to."""

import os
import stat
import sys
from pathlib import Path

import pytest

import forked
from commands import SMALL, environment
from gspo.run.sweeps import make_private

NOBODY, NO_GROUP = 65534, 54321


def test_the_folder_is_made_for_this_user_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_private(tmp_path / ".submitit")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ".submitit").stat().st_mode) == 0o700
    make_private(tmp_path / ".submitit")


@pytest.mark.parametrize("place", ["study/.submitit", "study", "."])
def test_a_folder_that_everybody_can_write_to_is_refused(tmp_path, place):
    (tmp_path / "study" / ".submitit").mkdir(parents=True)
    (tmp_path / place).chmod(0o777)
    with pytest.raises(ValueError, match="another user could replace them in ") as refused:
        make_private(tmp_path / "study" / ".submitit")
    assert "\n" not in str(refused.value) and f"chmod go-w {(tmp_path / place).absolute()}," in str(
        refused.value
    )
    # as /tmp: everybody can write, nobody can rename what is another's
    (tmp_path / place).chmod(0o1777)
    if not place.endswith(".submitit"):
        make_private(tmp_path / "study" / ".submitit")
        return
    with pytest.raises(ValueError, match="another user could replace them"):
        make_private(tmp_path / "study" / ".submitit")


def test_a_link_in_its_place_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".submitit").symlink_to("elsewhere")
    with pytest.raises(ValueError, match="another user could replace them"):
        make_private(tmp_path / ".submitit")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_another_user_s_folder_and_a_group_s_are_refused(tmp_path):
    folder = tmp_path / "study" / ".submitit"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        os.chown(place, NOBODY, 0)
        with pytest.raises(ValueError, match="another user could replace them"):
            make_private(folder)
        os.chown(place, 0, NO_GROUP)
        place.chmod(0o775)
        with pytest.raises(ValueError, match="another user could replace them"):
            make_private(folder)
        os.chown(place, 0, 0)  # the group of this user alone, as many systems give each
        make_private(folder)


@pytest.mark.slow
def test_a_sweep_of_submitit_does_not_start_where_others_can_write(tmp_path):
    folder = tmp_path / "runs" / "small" / ".submitit"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    script = [
        sys.executable,
        "-P",
        "-m",
        "gspo",
        "train",
        "-m",
        *SMALL,
        "steps=2",
        "seed=1,2",
    ]
    script += ["hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=1"]
    done = forked.run(script, cwd=tmp_path, env=environment())
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "hydra.launcher.submitit_folder: jobs run the pickles" in done.stderr
    assert not list(Path(folder).iterdir())
