"""The program as a wheel installs it: every command works from an empty folder, without the
repository.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from commands import ROOT, SMALL, environment, only_run, train
from gspo.tracking.tracker import read_rows

pytestmark = pytest.mark.slow
SOURCES = (
    "gspo",
    "analysis",
    "conf",
    "sweeps",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
MINE = """
from dataclasses import dataclass

from gspo.algorithm.objectives import GRPO


@dataclass
class Mine(GRPO):
    pass
"""
TWO_JOBS = [o for o in SMALL if not o.startswith("study=")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the repository without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, copy = ROOT / name, folder / "source" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    build = [
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(folder / "source"),
    ]
    subprocess.run([*PIP, *build], check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel) -> Path:
    """A folder of packages with the wheel in it."""
    folder = wheel.parent / "site"
    subprocess.run(
        [*PIP, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)],
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder that the commands are typed in, empty at first."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def gspo(site, folder):
    def call(*words: str) -> str:
        """The output of `gspo WORDS`, which ends well. Its packages come before those of the tests'
        environment.
        """
        there = environment() | {"PYTHONPATH": str(site)}
        command = [sys.executable, str(site / "bin" / "gspo"), *words]
        done = subprocess.run(
            command, cwd=folder, env=there, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    return call


@pytest.fixture(scope="module")
def run(gspo, folder) -> Path:
    """A run of two steps, and a third after a resume."""
    gspo("train", *SMALL, "steps=2")
    gspo("train", f"resume={only_run(folder).relative_to(folder)}", "steps=3")
    return only_run(folder)


def test_the_wheel_has_every_file_that_the_program_reads(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    ours = [
        path
        for name in ("gspo", "analysis")
        for path in files(ROOT / name)
        if "gallery" not in path.parts
    ]
    assert {
        str(path.relative_to(ROOT)) for path in ours if path.is_relative_to(ROOT / "gspo")
    } <= held
    options = [path for name in ("conf", "sweeps") for path in files(ROOT / name)]
    options += [path for path in ours if path.is_relative_to(ROOT / "analysis")]
    assert {f"gspo/{path.relative_to(ROOT)}" for path in options} <= held
    assert {name.split("/")[0] for name in held if ".dist-info/" not in name} == {"gspo"}


def files(folder: Path) -> list[Path]:
    return [
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]


def test_a_run_and_its_resume(run, folder):
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [0, 1, 2, 3]
    code = json.loads((run / "code.json").read_text())
    assert code["commit"] is None and code["command"][:2] == [
        "gspo train",
        f"resume={run.relative_to(folder)}",
    ]
    assert (run / "report.html").exists()


def test_the_run_is_the_one_that_the_repository_makes(run, tmp_path):
    done = train(tmp_path, *SMALL, "steps=2", "dry_run=true")
    assert run.name in done.stdout


def test_what_looks_at_a_run(gspo, run, folder):
    run = str(run.relative_to(folder))
    assert "math_easy" in gspo("evaluate", f"run={run}", "problems=2", "k=1")
    assert "--- math 0" in gspo("sample", f"run={run}", "problems=1", "samples=1")
    assert gspo("report", str(run)) == f"{run}/report.html\n"


def test_a_sweep_over_a_loss_of_the_users_own_in_worker_processes_and_its_figures(gspo, folder):
    (folder / "my_losses.py").write_text(MINE)
    assert "all " in gspo("check-objective", "my_losses:Mine")
    jobs = [*TWO_JOBS, "study=sweep", "steps=2", "objective=gspo,my_losses:Mine"]
    gspo("train", "-m", *jobs, "hydra/launcher=two_jobs")
    runs = sorted(
        str(path.relative_to(folder)) for path in (folder / "runs" / "sweep").glob("*-seed*")
    )
    assert "2 runs (rewards are smoothed): 2 finished" in gspo("sweep-status", "runs/sweep")
    assert gspo("compare", *runs).startswith(f"[1] {runs[0]}\n[2] {runs[1]}\n")
    assert "figures/fig_curves_sweep.png" in gspo("figure", "curves", "runs/sweep")
    assert "figures/fig1_stability.png" in gspo("figures", "runs/sweep"), (
        "which draws the paper's own points beside"
    )
    assert (folder / "figures" / "summary.md").exists()


def test_the_sweeps_that_come_with_it_and_those_of_the_users_own(gspo, folder):
    assert "3 jobs: " in gspo("train", "-cn", "paper_figures", "-m", "seed=1", "dry_run=true")
    assert "12 jobs: " in gspo("train", "-cn", "clip_range", "-m", "seed=1", "dry_run=true"), (
        "with options of their own"
    )
    (folder / "mine").mkdir()
    (folder / "mine" / "paper_figures.yaml").write_text(
        "defaults: [train, _self_]\nstudy: an_edited_copy\n"
    )
    assert "runs/an_edited_copy/" in gspo(
        "train", "-cd", "mine", "-cn", "paper_figures", "dry_run=true"
    )
    assert "6 jobs: " in gspo(
        "train", "-cd", "mine", "-cn", "seeds", "-m", "seed=1,2", "dry_run=true"
    ), "which is not in mine"


def test_the_modules_are_those_of_the_wheel(site, folder):
    names = [
        "gspo",
        "gspo.cli.main",
        "gspo.rewards.sandbox.server",
        "gspo.analysis",
        "gspo.analysis.fig_curves",
    ]
    script = f"from importlib.util import find_spec\nprint(*(find_spec(name).origin for name in {names}), sep=chr(10))"
    there = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=there,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(line.startswith(f"{site}/") for line in done.stdout.splitlines()), done.stdout
