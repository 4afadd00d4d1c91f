"""Online: the real client against a stand-in for W&B's server. What is tracked is what is read back, and no more."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_sources import log, rows, same
from wandb_server import serving

sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))

import fig_curves
import load
import sources


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def online(server, tmp_path_factory):
    """A run in two segments; the server lacks the rows from 20 on of the first, as when a kill comes before upload."""
    folder = tmp_path_factory.mktemp("online") / "gspo-seed1-abc"
    log(folder, rows(0, 25), **server.environment)
    (run,) = server.runs.values()
    assert [row["step"] for row in run.rows.values()] == list(range(26)) and run.ended
    run.rows = {number: row for number, row in run.rows.items() if row["step"] < 20}
    log(folder, rows(26, 40), **server.environment)
    return folder


@pytest.fixture(autouse=True)
def account(server, monkeypatch, tmp_path):
    """This process reads from the stand-in, with a cache of its own."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_resumed_run_is_one_run_with_every_row_once(server, online):
    (run,) = server.runs.values()
    steps = [run.rows[number]["step"] for number in sorted(run.rows)]
    assert steps == list(range(41)) and [row["_step"] for row in run.rows.values()] == steps
    about = {key: run.about[key] for key in ("displayName", "groupName", "jobType", "tags", "project")}
    names = {
        "displayName": "gspo-seed1-abc",
        "groupName": "study",
        "jobType": "train",
        "tags": ["tag"],
        "project": "gspo",
    }
    assert about == names and run.config["objective"]["value"]["clip_low"] == 3e-4


def test_the_servers_rows_are_the_directorys(server, online, tmp_path):
    (directory,), (answered,) = sources.records(online), sources.records("wandb:team/gspo")
    same(directory.rows, answered.rows)
    assert directory.settings == answered.settings and answered.path.name == online.name
    asked = len(server.scanned)
    same(sources.records("wandb:team/gspo")[0].rows, directory.rows)
    assert asked > 0 and len(server.scanned) == asked, "the second time from the cache"
    (run,) = server.runs.values()
    run.rows[41] = run.rows[40] | {"_step": 41, "step": 41}
    try:
        assert sources.records("wandb:team/gspo")[0].rows["step"].max() == 41, "a run that goes on is read again"
    finally:
        del run.rows[41]
    assert len(sources.records("wandb:team/gspo/study")) == 1 and sources.records("wandb:team/gspo/other") == []
    drawn = [fig_curves.draw(load.load([source]), tmp_path / str(i))[1].read_bytes() for i, source in
             enumerate([online, "wandb:team/gspo"])]  # fmt: skip
    assert drawn[0] == drawn[1]


def test_the_newest_offline_segment_alone_brings_the_whole_run_to_the_server(tmp_path):
    folder = tmp_path / "gspo-seed1-abc"
    log(folder, rows(0, 25))
    time.sleep(1.1)  # folders are named by the second
    log(folder, rows(26, 40))
    *older, newest = sorted((folder / "wandb").glob("offline-run-*"))
    with serving() as server:
        command = [str(Path(sys.executable).parent / "wandb"), "sync", str(newest)]
        account = os.environ | server.environment
        done = subprocess.run(command, cwd=tmp_path, env=account, capture_output=True, check=False)
        assert done.returncode == 0 and len(older) == 1
        (run,) = server.runs.values()
        assert [row["step"] for row in run.rows.values()] == list(range(41)) and run.about["groupName"] == "study"


def test_refusals_are_one_line(server, capsys):
    with pytest.raises(ValueError, match="write wandb:ENTITY/PROJECT"):
        sources.records("wandb:team")
    before, server.runs = server.runs, None  # the server breaks: an error of its own in every answer
    try:
        with pytest.raises(SystemExit):
            load.load(["wandb:team/gspo"])
    finally:
        server.runs = before
    assert capsys.readouterr().err.startswith("error: wandb:team/gspo: ")
