"""Links, pipes and devices in a stranger's run directory: nothing is written through them, and one
line says so.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

import forked
from commands import SMALL, environment, evaluate, only_run, train
from gspo.evaluation.resumable import WRITTEN, Folder
from gspo.io import files, untrusted
from gspo.io.files import append_to, locked, note_start, read_status, refuse_links, replace_text
from gspo.run.directory import RunDirectory, exclusive
from gspo.tracking.run_report import write_page
from gspo.tracking.tracker import write_rollouts

KEY = "ssh-ed25519 AAAA me@home\n"


@pytest.fixture
def mine(tmp_path) -> Path:
    """A file of the user's, which no run may touch."""
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "authorized_keys"
    path.write_text(KEY)
    return path


@pytest.fixture
def run(tmp_path) -> Path:
    """What of a run directory the writers here read."""
    folder = tmp_path / "gspo-seed1-0123456789"
    folder.mkdir()
    settings = {
        "study": "small",
        "steps": 2,
        "objective": {"name": "gspo"},
        "model": {"name": "tiny_moe"},
    }
    settings |= {"task": {"name": "math"}, "seed": 1}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    return folder


def test_the_page_of_a_run_goes_through_no_link(run, mine):
    for name in ("report.html.unfinished", "report.html"):
        (run / name).symlink_to(mine)
    assert "<html" in write_page(run).read_text()
    assert mine.read_text() == KEY and not (run / "report.html").is_symlink()
    assert not list(run.glob(".*")), "and leaves no temporary file"


def test_a_file_that_cannot_be_replaced_leaves_no_temporary_file(run):
    (run / "report.html").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_text(run / "report.html", "text")
    assert {path.name for path in run.iterdir()} == {
        "settings.yaml",
        "metrics.jsonl",
        "report.html",
    }


def test_a_linked_lock_is_neither_emptied_nor_held(run, mine):
    (run / ".lock").symlink_to(mine)
    with pytest.raises(ValueError, match=r"\.lock is a link to .*authorized_keys"), exclusive(run):
        pass
    assert not locked(run) and mine.read_text() == KEY


@pytest.mark.parametrize("text", ["", "[]", "7", "{", '"finished"', "\udcff"])
def test_a_damaged_status_says_that_alone(run, text):
    (run / "status.json").write_bytes(text.encode(errors="surrogateescape"))
    assert (
        list(read_status(run)) == ["reason"]
        and "status.json is damaged" in read_status(run)["reason"]
    )


def test_what_stands_in_a_lock_stays(run):
    (run / ".lock").write_text("a note")
    with exclusive(run):
        assert locked(run)
    assert (run / ".lock").read_text() == "a note" and not locked(run)


def test_who_may_only_read_a_run_cannot_hold_its_lock(run, monkeypatch):
    """It is enough to open a file to lock it. Nobody else can open this one; whether a run works
    there its status says to them."""
    (run / ".lock").touch(0o644)
    with exclusive(run):
        assert (run / ".lock").stat().st_mode & 0o777 == 0o600

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(untrusted, "open_plain_file", refused)
    for how, expected in (("running", True), ("finished", False)):
        monkeypatch.setattr(files, "read_status", lambda folder, how=how: {"how": how})
        assert locked(run) is expected


PLACES = [
    *("checkpoints", "rollouts", "evaluations", "superseded", "wandb"),
    *("metrics.jsonl", "monitor.jsonl", "train.log", "continued.jsonl", "status.json", "report.txt", "wandb_id"),
    *("checkpoints/step_000002", "checkpoints/latest", "rollouts/step_000001.jsonl"),
    *("evaluations/step_000002-ab/responses", "wandb/offline-run-20200101_000000-ab", "wandb/cache"),
    *("wandb/cache/wandb", "wandb/cache/wandb/logs"),
]  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_a_run_with_a_link_in_it_is_refused_and_nothing_is_written(run, tmp_path, name):
    place, other = run / name, tmp_path / "another run"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    other.mkdir()
    place.symlink_to(other)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with (
        pytest.raises(ValueError, match=f"{name} is a link to {other}: ") as refused,
        exclusive(run),
    ):
        pass
    assert "\n" not in str(refused.value)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "train.log", "rollouts"])
def test_a_pipe_is_refused_not_waited_for(run, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert not locked(run)
    with pytest.raises(ValueError, match=f"{name} is no plain file"), exclusive(run):
        pass
    with pytest.raises(ValueError, match=f"{name} is no plain file"):
        append_to(run / name)


def test_every_writer_refuses_a_link_that_came_after_the_look(run, mine):
    for name in ("train.log", "continued.jsonl", "rollouts"):
        (run / name).symlink_to(mine.parent if name == "rollouts" else mine)
    with pytest.raises(ValueError, match=r"train\.log is a link"), RunDirectory(run).log_to_file():
        pass
    with pytest.raises(ValueError, match=r"continued\.jsonl is a link"):
        note_start(run, 4)
    (run / "rollouts").unlink()
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step_000001.jsonl").symlink_to(mine)
    write_rollouts(run / "rollouts" / "step_000001.jsonl", [])
    assert mine.read_text() == KEY


def test_an_evaluation_cuts_no_file_short_that_is_linked(run, mine):
    path = run / "evaluations" / "step_000002-ab"
    folder = Folder(path, {"samples": 1})
    (path / "responses" / "math.jsonl").symlink_to(mine)
    with pytest.raises(ValueError, match=r"math\.jsonl is a link"):
        folder.complete_groups("math", 1, 1, [])
    with pytest.raises(ValueError, match=r"math\.jsonl is a link"):
        folder.append("math", [[{}]])
    with pytest.raises(ValueError, match=r"math\.jsonl is a link"), exclusive(path, WRITTEN):
        pass
    assert mine.read_text() == KEY


def test_other_things_in_a_folder_that_the_user_chose_for_a_result_are_nobodys_business(
    tmp_path, mine
):
    out = tmp_path / "results"
    out.mkdir()
    (out / "notes").symlink_to(mine)
    with exclusive(out, WRITTEN):
        Folder(out, {"samples": 1})
    assert mine.read_text() == KEY


def test_a_link_to_the_run_directory_and_links_of_wandb_are_the_user_s_own(run, tmp_path):
    segment = run / "wandb" / "offline-run-20260101_000000-ab"
    segment.mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to(segment.name)
    (tmp_path / "runs").symlink_to(run)
    with exclusive(tmp_path / "runs"), RunDirectory(tmp_path / "runs").log_to_file():
        note_start(tmp_path / "runs", 4)
    assert (run / "continued.jsonl").exists()
    refuse_links(tmp_path / "runs")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two_steps")
    done = train(folder, *SMALL, "steps=2", "tracking.wandb=disabled")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_a_linked_checkpoints_folder_prunes_nobody_s_checkpoints(two_steps, tmp_path):
    shutil.copytree(two_steps / "runs", tmp_path / "runs")
    stranger = only_run(tmp_path)
    mine = tmp_path / "mine"
    shutil.move(stranger / "checkpoints", mine)
    for step in (1, 3, 4):
        shutil.copytree(mine / "step_000002", mine / f"step_{step:06d}")
    (stranger / "checkpoints").symlink_to(mine)
    before = sorted(mine.rglob("*"))
    done = train(tmp_path, f"resume={stranger.relative_to(tmp_path)}", "steps=8")
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and "checkpoints is a link to" in done.stderr
    )
    (stranger / "evaluations").symlink_to(mine)
    done = evaluate(stranger)
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and "evaluations is a link to" in done.stderr
    )
    assert sorted(mine.rglob("*")) == before


@pytest.mark.slow
def test_runs_may_lie_behind_a_link_that_the_user_made(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    done = train(tmp_path, *SMALL, "steps=2")
    assert done.returncode == 0, done.stderr[-3000:]
    done = train(tmp_path, f"resume={only_run(tmp_path).relative_to(tmp_path)}", "steps=4")
    assert done.returncode == 0, done.stderr[-3000:]
    assert evaluate(only_run(tmp_path)).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.jsonl", "multirun.yaml"])
def test_a_linked_file_of_a_sweep_is_not_written_to(tmp_path, mine, name):
    study = tmp_path / "runs" / "small"
    study.mkdir(parents=True)
    (study / name).symlink_to(mine)
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
    done = forked.run(script, cwd=tmp_path, env=environment())
    assert (
        done.returncode == 2
        and f"{name} is a link to" in done.stderr
        and done.stderr.count("\n") == 1
    )
    assert mine.read_text() == KEY and [path.name for path in study.iterdir()] == [name]
