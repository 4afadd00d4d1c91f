"""A disk that is full, read-only, or not ours: what a library says in its own words is an error of
the disk too.
"""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import forked
from commands import ROOT, SMALL, environment, train
from gspo.io.files import CreatedFiles, errors_of_the_disk
from gspo.model.loading import save
from gspo.model.settings import TinyMoE
from gspo.run.directory import exclusive, settings_and_checkpoint
from gspo.run.entry_point import DISK_ERRORS, print_error
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic
from gspo.train.checkpoint import CheckpointWriter
from gspo.train.checkpoint_files import damage, latest_checkpoint
from gspo.train.cold_start import cold_start
from gspo.train.settings import ColdStartSettings
from trainers import trainer

MODEL = TinyMoE(hidden=16, layers=2, heads=2, experts=4, expert_width=8)
TASK = ChainArithmetic(max_operands=3)
SETTINGS = ColdStartSettings(steps=2, batch_size=4)


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A file system of this size in memory."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, left: int) -> None:
    """All of the disk but so many bytes, and never less than a whole page."""
    room = os.statvfs(folder)
    (folder / "other data").write_bytes(bytes(room.f_bavail * room.f_frsize - left))


def test_weights_tokenizer_and_optimizer_on_a_full_disk_are_errors_of_the_disk(tmp_path):
    model, tokenizer = MODEL.make()
    with mounted(tmp_path / "disk", "1m") as disk:
        fill(disk, 4096)
        with pytest.raises(OSError, match="No space left") as weights:  # by safetensors
            save(model, tokenizer, disk / "model")
        (disk / "other data").unlink()
        fill(disk, 8192)
        # by tokenizers
        with pytest.raises(OSError, match="No space left") as words, errors_of_the_disk(disk):
            (disk / "model" / "more").write_bytes(bytes(4096))
            tokenizer.save_pretrained(disk / "tokenizer")
        assert weights.value.errno == words.value.errno == errno.ENOSPC


@pytest.mark.parametrize("left", [16384, 49152, 65536, 131072])
def test_a_checkpoint_that_does_not_fit_is_an_error_of_the_disk_whichever_file_it_is(
    tmp_path, left
):
    t = trainer()
    with mounted(tmp_path / "disk", "4m") as disk:
        writer = CheckpointWriter(disk, t.policy, t.optimizer, 2, "hash")
        writer.save(t.state)
        writer.wait()
        size = sum(
            path.stat().st_size for path in (disk / "checkpoints").rglob("*") if path.is_file()
        )
        for parameter in t.policy.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        t.optimizer.step()  # the optimizer's file comes last, and has two numbers per weight now
        t.state.step = 1
        fill(disk, size + left)
        writer.save(t.state)
        with pytest.raises(OSError, match="No space left") as full:
            writer.wait()
        assert full.value.errno in DISK_ERRORS and latest_checkpoint(disk).name == "step_000000"
        assert not list(disk.rglob("*.unfinished")), "the room is needed to record the run's end"
        writer.close()


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_is_one_line(tmp_path):
    """ulimit -f, a quota of its own kind: safetensors and torch meet it, and each tells it
    otherwise.
    """
    script = [
        *("prlimit", "--fsize=30000"),
        sys.executable,
        "-P",
        "-m",
        "gspo",
        "train",
        *SMALL,
    ]
    done = subprocess.run(
        [*script, "tracking.wandb=disabled"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert (
        "File too large" in done.stderr.splitlines()[-1]
        and "fix this and continue" in done.stderr.splitlines()[-1]
    )


def test_the_advice_names_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gspo train"])
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "settings.yaml").touch()
    inside = OSError(
        errno.ENOSPC, "No space left on device", str(tmp_path / "run" / "checkpoints" / "x")
    )
    assert print_error(inside) == 1
    assert capsys.readouterr().err.endswith(
        f"fix this and continue with resume={tmp_path / 'run'}\n"
    )
    monkeypatch.setattr(sys, "argv", ["gspo evaluate"])
    assert print_error(inside) == 1
    assert capsys.readouterr().err.endswith("fix this and continue with the same command\n")
    assert print_error(OSError(errno.ENOSPC, "No space left on device")) == 1
    assert capsys.readouterr().err.endswith("fix this and continue with the same command\n")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "two_jobs"])
def test_a_sweep_on_a_full_disk_trains_no_cold_start_in_vain(tmp_path, launcher):
    with mounted(tmp_path / "disk", "1m") as disk:
        fill(disk, 40960)
        command = [
            sys.executable,
            "-P",
            "-m",
            "gspo",
            "train",
            "-m",
            *SMALL,
            "seed=1,2,3",
            "steps=2",
        ]
        command += [f"hydra/launcher={launcher}", "cold_start.steps=20"]
        done = forked.run(command, cwd=disk, env=environment())
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
        last = done.stderr.splitlines()[-1]
        assert "No space left on device" in last and "fix this and continue with" in last
        assert "cold start  step" not in done.stdout, "that there is no room was found out first"
        assert not list((disk / "runs" / "cold_starts").glob("*.unfinished"))
        if launcher == "basic":
            assert len(list(disk.glob("runs/small/*-seed*"))) == 1, "later jobs were not begun"


@pytest.mark.slow
def test_a_ready_cold_start_on_a_read_only_disk_is_used(tmp_path):
    with mounted(tmp_path / "disk", "4m") as disk:
        folder = cold_start(MODEL, TASK, SETTINGS, disk, lambda *_: None)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        again = cold_start(
            MODEL, TASK, SETTINGS, disk, lambda *_: pytest.fail("it was there already")
        )
        assert again == folder
        with pytest.raises(OSError, match="Read-only file system"):
            cold_start(
                MODEL, TASK, ColdStartSettings(steps=3), disk, lambda *_: pytest.fail("in vain")
            )


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> Path:
    return cold_start(
        MODEL, TASK, SETTINGS, tmp_path_factory.mktemp("cold_starts"), lambda *_: None
    )


@pytest.fixture
def made(once, tmp_path) -> Path:
    return shutil.copytree(once, tmp_path / once.name)


def again(folder: Path) -> Path:
    return cold_start(
        MODEL, TASK, SETTINGS, folder.parent, lambda *_: pytest.fail("it was there already")
    )


def zeros(path: Path) -> None:
    """As a file system leaves it that lost its last writes to a crash: the length is right."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def emptied(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("spoil", [zeros, emptied, Path.unlink])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "cold_start.json"]
)
def test_a_damaged_cold_start_is_named_and_not_trained_on(made, name, spoil):
    assert damage(made) is None and again(made) == made
    spoil(made / name)
    with pytest.raises(
        ValueError, match=f"{made.name} is damaged: {name} is .*; remove it"
    ) as said:
        again(made)
    assert "\n" not in str(said.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "cold_start.json"])
def test_an_emptied_file_of_a_cold_start_is_named_by_the_command(tmp_path, name):
    done = train(tmp_path, *SMALL, "steps=1")
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = (path for path in (tmp_path / "runs" / "cold_starts").iterdir() if path.is_dir())
    emptied(folder / name)
    done = train(tmp_path, *SMALL, "seed=2", "steps=1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and str(folder.name) in done.stderr


@pytest.mark.slow
def test_a_cold_start_is_on_the_disk_before_it_has_its_name(tmp_path):
    """The system calls of a real process: every file is synced, then the folder renamed, then that
    is synced.
    """
    code = f"""
from pathlib import Path
from gspo.model.settings import TinyMoE
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic
from gspo.train.cold_start import cold_start
from gspo.train.settings import ColdStartSettings
model = TinyMoE(hidden=16, layers=2, heads=2, experts=4, expert_width=8)
how = ColdStartSettings(steps=1, batch_size=2)
cold_start(model, ChainArithmetic(max_operands=3), how, Path({str(tmp_path)!r}), lambda *_: None)
"""
    trace = tmp_path / "trace"
    command = [
        "strace",
        "-f",
        "-y",
        "-e",
        "trace=fsync,rename",
        "-o",
        str(trace),
        sys.executable,
        "-c",
        code,
    ]
    try:
        subprocess.run(command, env=environment() | {"PYTHONPATH": str(ROOT)}, check=True)
    except FileNotFoundError:
        pytest.skip("there is no strace here")
    calls = trace.read_text().splitlines()
    at = next(
        number for number, line in enumerate(calls) if "rename(" in line and ".unfinished" in line
    )
    for name in (
        "model.safetensors",
        "config.json",
        "cold_start.json",
        "checksums.json",
        "tokenizer.json",
    ):
        assert any("fsync(" in line and f".unfinished/{name}>" in line for line in calls[:at]), name
    assert any("fsync(" in line and f"<{tmp_path}>" in line for line in calls[at:])


@contextmanager
def as_a_colleague() -> Iterator[None]:
    """Within: a user who may not read everything."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "checksums.json", ""])
def test_a_colleague_who_may_not_read_the_weights_is_told_that(tmp_path_factory, name):
    run = tmp_path_factory.mktemp("run")
    for folder in (run, *run.parents):
        if (
            folder.is_relative_to(tmp_path_factory.getbasetemp().parent.parent)
            and folder.owner() == run.owner()
        ):
            folder.chmod(folder.stat().st_mode | 0o055)
    t = trainer()
    writer = CheckpointWriter(run, t.policy, t.optimizer, 2, "hash")
    writer.save(t.state)
    writer.wait()
    writer.close()
    (run / "checkpoints" / "step_000000" / name).chmod(0)
    with (
        as_a_colleague(),
        pytest.raises(ValueError, match="may not be read by this user: ask") as said,
    ):
        latest_checkpoint(run)
    assert "damaged" not in str(said.value) and str(
        run / "checkpoints" / "step_000000" / name
    ) in str(said.value)


@pytest.mark.parametrize(
    "names", [{"/dev/zero": "0" * 64}, {"../../other": "0" * 64}, ["config.json"], None, 7]
)
def test_checksums_of_other_people_s_files_are_not_computed(made, names):
    import json

    (made / "checksums.json").write_text(json.dumps(names))
    with pytest.raises(
        ValueError, match=r"is damaged: .* cannot be read .*(which is not in it|checksums.json)"
    ):
        again(made)


def test_a_link_or_a_pipe_in_place_of_a_checkpoint_s_file_is_not_read(made):
    (made / "config.json").unlink()
    os.mkfifo(made / "config.json")
    assert "config.json cannot be read" in damage(made)
    (made / "config.json").unlink()
    (made / "config.json").symlink_to("/dev/zero")
    assert "config.json cannot be read" in damage(made)


def test_only_what_this_process_made_is_taken_away(tmp_path):
    run = tmp_path / "runs" / "small" / "gspo-seed1-0123456789"
    with exclusive(run) as made:
        (run / "settings.yaml").write_text("steps: 2")
        made.remove("settings.yaml")
    assert not (tmp_path / "runs").exists(), "nothing was there before"
    (run / "checkpoints").mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    (run / "train.log").write_text("an earlier run's")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*") if not path.is_dir()}
    with exclusive(run) as made:
        (run / "settings.yaml").write_text("steps: 2")
        made.remove("settings.yaml", "train.log")
    assert {
        path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*") if not path.is_dir()
    } == before
    empty = tmp_path / "runs" / "empty"
    empty.mkdir()
    CreatedFiles(empty).remove("settings.yaml")
    assert empty.exists(), "it was made by somebody else"


@pytest.mark.slow
def test_a_run_that_cannot_be_built_removes_no_folder_that_was_there(tmp_path):
    # found out once the model is known
    wrong = ("rollout.max_new_tokens=100000", "tracking.wandb=disabled")
    done = train(tmp_path, *SMALL, *wrong)
    assert done.returncode == 2 and not (tmp_path / "runs").exists(), done.stderr
    dry = train(tmp_path, *SMALL, *wrong, "dry_run=true")
    name = next(word for word in dry.stdout.split() if word.startswith("runs/small/"))
    (tmp_path / name / "checkpoints").mkdir(parents=True)
    (tmp_path / name / "notes.txt").write_text("mine")
    done = train(tmp_path, *SMALL, *wrong)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert {path.name for path in (tmp_path / name).iterdir()} == {"checkpoints", "notes.txt"}


def test_a_run_is_read_by_who_may_read_it_alone(tmp_path):
    with pytest.raises(ValueError, match="is not a run directory"):
        settings_and_checkpoint(str(tmp_path), -1, consent=False, trust=False)
